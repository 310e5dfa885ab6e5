"""Where a model is cut, compared with every other legal cut; and how long the search takes for a large model."""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_measures import BEST_CUT, LEGAL_CUTS, Sizes
from parallel_models import Gpt, ResNet
from parallel_turns import Step, add_runs, alternate, draw, draw_tokens, our_pipeline
from report import US, Samples
from torch import Tensor, nn

from detrain_nb import parallel as par


def measure_gpt(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Compare cuts of a GPT, chosen by estimated costs."""
    torch.manual_seed(0)
    model = Gpt(sizes.gpt_width, sizes.gpt_layers, sizes.gpt_vocabulary, sizes.gpt_length)
    rows = sizes.microbatches
    x, y = (draw_tokens(rows, sizes.gpt_length, most=sizes.gpt_vocabulary, seed=seed) for seed in (1, 2))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    _enumerate_cuts(sizes, turn, samples, "gpt", model, x, y, loss=loss, is_measured=False)


def measure_resnet(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Compare cuts of a ResNet, chosen by measured times."""
    torch.manual_seed(0)
    model = ResNet(sizes.channels)
    rows = sizes.picture_rows
    x, y = draw(rows, 3, sizes.picture, sizes.picture, seed=1), draw_tokens(rows, most=10, seed=2)
    _enumerate_cuts(sizes, turn, samples, "resnet", model, x, y, loss=F.cross_entropy, is_measured=True)


def _enumerate_cuts(
    sizes: Sizes,
    turn: int,
    samples: Samples,
    key: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Any,
    is_measured: bool,
) -> None:
    """Measure every legal cut; then measure the fastest and the automatic cut again, in turns.

    They are measured again because the minimum of many noisy medians is less than what that cut takes.
    """
    count = sizes.microbatches
    known = par.profile(model, x[: len(x) // count], measure=is_measured)
    cuts = list(known.cuts)
    chosen = [par.split(model, x[: len(x) // count], 2, profile_of_model=known).cuts[0]]
    dist.broadcast_object_list(chosen)  # measured times differ between the ranks
    (automatic,) = chosen

    def step_of(cut: str) -> Step:
        pipeline, gradients = our_pipeline(model, x, y, loss=loss, count=count, cuts=[cut])
        parameters = list(pipeline.parameters())

        def step() -> None:
            gradients()
            for parameter in parameters:
                parameter.grad = None

        return step

    steps = {cut: step_of(cut) for cut in cuts}
    runs = alternate(steps, sizes, cycles=sizes.cut_cycles, turn=turn)
    medians = {cut: statistics.median(seconds) for cut, (seconds, _) in runs.items()}
    quickest = [min(medians, key=lambda cut: medians[cut])]
    dist.broadcast_object_list(quickest)
    (best,) = quickest
    if dist.get_rank() == 0:
        times = ", ".join(f"{cut} {1e3 * seconds:.0f}" for cut, seconds in medians.items())
        print(f"{key}: automatic {automatic}, quickest {best}; ms by cut: {times}", flush=True)
    duel = alternate({cut: steps[cut] for cut in {automatic: 0, best: 0}}, sizes, cycles=sizes.duel_cycles, turn=turn)
    add_runs(samples, key, {US: duel[automatic], BEST_CUT: duel[best]})
    samples.add(US, f"{key}_cuts", len(cuts))
    samples.add(LEGAL_CUTS, f"{key}_cuts", len(known.cuts))
    samples.add(US, f"{key}_cut_number", cuts.index(automatic))
    samples.add(BEST_CUT, f"{key}_cut_number", cuts.index(best))


def measure_plan(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Profile a model of 70 billion parameters without its memory; assign many layers to many unequal nodes."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with torch.device("meta"):
        model = Gpt(*sizes.large_gpt)
    x = torch.zeros(1, sizes.large_gpt[-1], dtype=torch.long, device="meta")
    par.profile(model, x)
    samples.add(US, "profile_s", time.perf_counter() - began)
    samples.add(US, "profile_mb", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024)
    samples.add(US, "profile_parameters", sum(parameter.numel() for parameter in model.parameters()) / 1e9)
    units = [par.Unit(f"layer{index}" if index else None, 0.0, 0, 10, 8, ()) for index in range(sizes.plan_layers)]
    nodes = [par.StageNode(str(index), memory_bytes=1e9, speed=1 + index % 3) for index in range(sizes.plan_stages)]
    times_s = [1.0 + index % 7 for index in range(sizes.plan_layers)]
    began = time.perf_counter()
    par.partition(par.ModelProfile(tuple(units), {}), nodes, times_s=times_s)
    samples.add(US, "partition_s", time.perf_counter() - began)
