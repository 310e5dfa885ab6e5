"""A pipeline, tensor parallel layers, shards: our step next to the same step by hand, on plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_measures import IDEAL, TORCH, Sizes
from parallel_models import ResidualMlp, first_shard, second_shard
from parallel_turns import (
    Step,
    add_runs,
    alternate,
    draw,
    draw_tokens,
    hand_pipeline,
    losses_apart,
    make_mlp,
    our_pipeline,
    with_optimizer,
)
from report import US, Samples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from detrain_nb import parallel as par


def measure_pipeline(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure 1F1B over two stages with equally many layers."""
    x, y = draw(sizes.rows, sizes.width, seed=1), draw(sizes.rows, sizes.width, seed=2)
    half, common = sizes.layers // 2, {"loss": F.mse_loss, "count": sizes.microbatches}
    pipeline, gradients = our_pipeline(make_mlp(sizes.width, sizes.layers), x, y, cuts=[f"layers.{half}"], **common)
    layers = make_mlp(sizes.width, sizes.layers).layers
    module, by_hand = hand_pipeline([ResidualMlp(layers[:half]), ResidualMlp(layers[half:])], x, y, **common)
    steps = {US: with_optimizer(pipeline.parameters(), gradients), TORCH: with_optimizer(module.parameters(), by_hand)}
    runs = alternate(steps, sizes, cycles=sizes.cycles, turn=turn)
    add_runs(samples, "pipeline", runs)
    samples.add(US, "pipeline_apart", losses_apart(runs[US][1], runs[TORCH][1]))


def measure_efficiency(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure the same with more work, and both ranks doing all of it: half of that time would be ideal."""
    x, y = draw(sizes.wide_rows, sizes.wide, seed=1), draw(sizes.wide_rows, sizes.wide, seed=2)
    half, count = sizes.layers // 2, sizes.microbatches
    common = {"loss": F.mse_loss, "count": count}
    pipeline, gradients = our_pipeline(make_mlp(sizes.wide, sizes.layers), x, y, cuts=[f"layers.{half}"], **common)
    whole = make_mlp(sizes.wide, sizes.layers)
    module, by_hand = hand_pipeline(
        [ResidualMlp(whole.layers[:half]), ResidualMlp(whole.layers[half:])], x, y, **common
    )

    def everything() -> None:
        for piece, target in zip(x.chunk(count), y.chunk(count)):
            (F.mse_loss(whole(piece), target) / count).backward()

    def without_gradients(parameters: Sequence[nn.Parameter], step: Step) -> Step:
        def run() -> None:
            step()
            for parameter in parameters:
                parameter.grad = None

        return run

    steps = {
        "everything": without_gradients(list(whole.parameters()), everything),
        US: without_gradients(list(pipeline.parameters()), gradients),
        TORCH: without_gradients(list(module.parameters()), by_hand),
    }
    runs = alternate(steps, sizes, cycles=sizes.wide_cycles, turn=turn)
    for who in (US, TORCH):
        pairs = zip(runs["everything"][0], runs[who][0])
        samples.add(who, "efficiency", *(all_s / 2 / step_s for all_s, step_s in pairs))
    samples.add(IDEAL, "efficiency", count / (count + 1))


# ---- tensor parallel layers, and shards


def measure_tensor(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure each block with its first layer cut by outputs and its second layer cut by inputs."""
    x, y = draw(sizes.rows, sizes.width, seed=1), draw(sizes.rows, sizes.width, seed=2)
    mesh = par.make_mesh(tp=2, device_type="cpu")
    common: dict[str, Any] = {"example_inputs": x, "loss": F.mse_loss, "device": "cpu"}
    model = par.parallelize(make_mlp(sizes.width, sizes.layers), mesh, **common)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    other = parallelize_module(make_mlp(sizes.width, sizes.layers), init_device_mesh("cpu", (2,)), plan)
    _alternate_whole(sizes, turn, samples, "tensor", model, other, x, y)


def measure_shards(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure FSDP2, with a shard of each block and half the rows on each rank."""
    rank, half = dist.get_rank(), sizes.rows // 2
    x, y = (draw(sizes.rows, sizes.width, seed=seed)[rank * half :][:half] for seed in (1, 2))
    common: dict[str, Any] = {"example_inputs": x, "loss": F.mse_loss, "device": "cpu"}
    model = par.parallelize(make_mlp(sizes.width, sizes.layers), par.make_mesh(dp_shard=2, device_type="cpu"), **common)
    other, mesh = make_mlp(sizes.width, sizes.layers), init_device_mesh("cpu", (2,))
    for layer in other.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    _alternate_whole(sizes, turn, samples, "shards", model, other, x, y)


def _alternate_whole(
    sizes: Sizes,
    turn: int,
    samples: Samples,
    key: str,
    model: par.ParallelModel,
    other: nn.Module,
    x: Tensor,
    y: Tensor,
) -> None:
    def by_hand() -> Tensor:
        loss = F.mse_loss(other(x), y)
        loss.backward()
        return loss.detach()

    gradients = partial(model.train_step, x, y)
    steps = {US: with_optimizer(model.parameters(), gradients), TORCH: with_optimizer(other.parameters(), by_hand)}
    runs = alternate(steps, sizes, cycles=sizes.cycles, turn=turn)
    add_runs(samples, key, runs)
    theirs = torch.tensor(runs[TORCH][1], dtype=torch.float64)
    dist.all_reduce(theirs)  # by hand, each rank has the loss of its own rows, or all have the same
    samples.add(US, f"{key}_apart", losses_apart(runs[US][1], (theirs / dist.get_world_size()).tolist()))


# ---- DeTrain's MLP


def measure_mlp(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure two stages, cut by costs or where DeTrain cuts: ours and torch's. DeTrain is in parallel_peers.py."""
    for width in sizes.mlp_widths:
        for count in sizes.mlp_microbatches:
            x, y = draw(sizes.mlp_rows, 784, seed=1), draw_tokens(sizes.mlp_rows, most=10, seed=2)
            torch.manual_seed(0)
            parts = [first_shard(width), second_shard(width)]
            common: dict[str, Any] = {"loss": F.cross_entropy, "count": count}
            steps: dict[tuple[str, str], Step] = {}
            for what, cuts in (("auto", "auto"), ("same", [str(len(parts[0]))])):
                model = nn.Sequential(*first_shard(width), *second_shard(width))
                pipeline, gradients = our_pipeline(model, x, y, cuts=cuts, **common)
                steps[US, what] = with_optimizer(pipeline.parameters(), gradients)
            module, by_hand = hand_pipeline(parts, x, y, **common)
            steps[TORCH, "same"] = with_optimizer(module.parameters(), by_hand)
            runs = alternate(steps, sizes, cycles=sizes.mlp_steps // 2, turn=turn)
            for (who, what), (seconds, _) in runs.items():
                samples.add(who, f"mlp_{width}_{count}_{what}", *(1 / each for each in seconds))
