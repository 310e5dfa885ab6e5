"""What the ranks of the parallel benchmark do: ours and what it is held against, step by step in turns.

    torchrun --standalone --nproc-per-node=2 parallel_ranks.py PART SIZES TURN FOLDER

Both are in the same processes: A B B A ..., each step between two barriers, so that a machine that drifts is unfair to
nobody. The first rank's times go to a file in the folder; an error goes there too, whoever has it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_measures import BEST_CUT, IDEAL, LEGAL_CUTS, LOOP, TORCH, WAITING, Sizes, read_sizes
from parallel_models import Block, Gpt, ResidualMlp, ResNet, first_shard, second_shard
from report import US, Samples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from detrain_nb import parallel as par
from detrain_nb import training

_GROUP_LIMIT = timedelta(seconds=120)
_CPU = torch.device("cpu")

Step = Callable[[], Tensor | None]  # the loss, where this rank has it
Run = tuple[list[float], list[float]]  # seconds of each step, and losses of these and of those before them


# ---- turns


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until all ranks have made a step that all began together. Collective: all ranks."""
    dist.barrier()
    began = time.perf_counter()
    result = step()
    dist.barrier()
    return time.perf_counter() - began, result


def alternate(steps: Mapping[str, Step], sizes: Sizes, *, cycles: int, turn: int) -> dict[str, Run]:
    """Each in its turn, there and back again. Collective: all ranks."""
    names = list(steps) if turn % 2 else list(steps)[::-1]
    runs: dict[str, Run] = {name: ([], []) for name in names}
    for number in range(2 * (cycles + sizes.warm_up)):
        for name in names if number % 2 else names[::-1]:
            seconds, loss = timed(steps[name])
            if number >= 2 * sizes.warm_up:
                runs[name][0].append(seconds)
            if loss is not None:
                runs[name][1].append(float(loss))
    return runs


def losses_apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference, of the loss by hand, on any rank. Collective: all ranks."""
    if len(ours) != len(theirs):
        raise RuntimeError(f"{len(ours)} losses of ours, {len(theirs)} by hand")
    apart = torch.tensor(max((abs(our - their) / abs(their) for our, their in zip(ours, theirs)), default=0.0))
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return float(apart)


def add_runs(samples: Samples, key: str, runs: Mapping[str, Run]) -> None:
    for who, (seconds, _) in runs.items():
        samples.add(who, f"{key}_ms", *(1e3 * each for each in seconds))


def with_optimizer(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter], gradients: Step) -> Step:
    """``gradients``, and what plain SGD makes of them."""
    optimizer = torch.optim.SGD(list(parameters), lr=0.01)

    def step() -> Tensor | None:
        loss = gradients()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---- models and data, the same on all ranks


def make_mlp(width: int, layers: int) -> ResidualMlp:
    torch.manual_seed(0)
    return ResidualMlp(Block(width) for _ in range(layers))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_tokens(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


# ---- a pipeline, ours and by hand


def our_pipeline(
    model: nn.Module, x: Tensor, y: Tensor, *, loss: Any, count: int, cuts: Any = "auto"
) -> tuple[par.ParallelModel, Step]:
    mesh = par.make_mesh(pp=2, device_type="cpu")
    options = {"loss": loss, "schedule": "1F1B", "num_microbatches": count, "device": "cpu"}
    pipeline = par.parallelize(model, mesh, example_inputs=x[: len(x) // count], pp=cuts, **options)
    return pipeline, partial(pipeline.train_step, x, y)


def hand_pipeline(parts: Sequence[nn.Module], x: Tensor, y: Tensor, *, loss: Any, count: int) -> tuple[nn.Module, Step]:
    """With shapes that are known beforehand, and the loss divided instead of every gradient: as fast as torch is."""
    rank = dist.get_rank()
    piece = x[: len(x) // count]
    with torch.no_grad():
        between = parts[0](piece)
        shapes = [piece.to("meta"), between.to("meta").requires_grad_(), parts[1](between).to("meta").requires_grad_()]
    ends = {"input_args": (shapes[rank],), "output_args": (shapes[rank + 1],)}
    stage = PipelineStage(parts[rank], rank, 2, _CPU, **ends)
    schedule = Schedule1F1B(stage, count, lambda output, target: loss(output, target) / count, scale_grads=False)

    def step() -> Tensor | None:
        if rank == 0:
            schedule.step(x, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=y, losses=losses, return_outputs=False)
        return torch.stack([each.detach() for each in losses]).sum()

    return parts[rank], step


def measure_pipeline(sizes: Sizes, turn: int, samples: Samples) -> None:
    """1F1B over two stages of as many layers."""
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
    """The same with more work, and beside it both ranks each doing everything: half of that would be ideal."""
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


# ---- parts of layers, and shards


def measure_tensor(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Each block's first layer cut by its outputs, the second by its inputs."""
    x, y = draw(sizes.rows, sizes.width, seed=1), draw(sizes.rows, sizes.width, seed=2)
    mesh = par.make_mesh(tp=2, device_type="cpu")
    common: dict[str, Any] = {"example_inputs": x, "loss": F.mse_loss, "device": "cpu"}
    model = par.parallelize(make_mlp(sizes.width, sizes.layers), mesh, **common)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    other = parallelize_module(make_mlp(sizes.width, sizes.layers), init_device_mesh("cpu", (2,)), plan)
    _alternate_whole(sizes, turn, samples, "tensor", model, other, x, y)


def measure_shards(sizes: Sizes, turn: int, samples: Samples) -> None:
    """FSDP2, a shard of each block and half the rows on each rank."""
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
    dist.all_reduce(theirs)  # by hand each rank has the loss of its own rows, or all have the same
    samples.add(US, f"{key}_apart", losses_apart(runs[US][1], (theirs / dist.get_world_size()).tolist()))


# ---- DeTrain's MLP


def measure_mlp(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Its two stages, cut where it cuts them: ours and torch's; DeTrain itself is in parallel_peers.py."""
    for width in sizes.mlp_widths:
        for count in sizes.mlp_microbatches:
            x, y = draw(sizes.mlp_rows, 784, seed=1), draw_tokens(sizes.mlp_rows, most=10, seed=2)
            torch.manual_seed(0)
            parts = [first_shard(width), second_shard(width)]
            model = nn.Sequential(*first_shard(width), *second_shard(width))
            cut, common = str(len(parts[0])), {"loss": F.cross_entropy, "count": count}
            pipeline, gradients = our_pipeline(model, x, y, cuts=[cut], **common)
            module, by_hand = hand_pipeline(parts, x, y, **common)
            steps = {
                US: with_optimizer(pipeline.parameters(), gradients),
                TORCH: with_optimizer(module.parameters(), by_hand),
            }
            runs = alternate(steps, sizes, cycles=sizes.mlp_steps // 2, turn=turn)
            for who, (seconds, _) in runs.items():
                samples.add(who, f"mlp_{width}_{count}", *(1 / each for each in seconds))


# ---- where it is cut


def measure_gpt(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Cut by what its parts cost on paper."""
    torch.manual_seed(0)
    model = Gpt(sizes.gpt_width, sizes.gpt_layers, sizes.gpt_vocabulary, sizes.gpt_length)
    rows = sizes.microbatches
    x, y = (draw_tokens(rows, sizes.gpt_length, most=sizes.gpt_vocabulary, seed=seed) for seed in (1, 2))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    _enumerate_cuts(sizes, turn, samples, "gpt", model, x, y, loss=loss, is_measured=False)


def measure_resnet(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Cut by the times that its parts take."""
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
    """Every legal cut for real; then the quickest of them and the automatic one once more, in turns.

    The second time, because the least of many noisy medians is less than what that cut takes.
    """
    count = sizes.microbatches
    known = par.profile(model, x[: len(x) // count], measure=is_measured)
    cuts = list(known.cuts)
    chosen = [par.split(model, x[: len(x) // count], 2, profile_of_model=known).cuts[0]]
    dist.broadcast_object_list(chosen)  # measured times are not the same on both ranks
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


# ---- the loop


class _InTurns:
    """Training data that make steps of another loop between those of the Trainer: one, two of theirs, one, one, ..."""

    def __init__(self, batch: tuple[Tensor, Tensor], other: Callable[[], Any], warm_up: int) -> None:
        self._batch, self._other, self._warm_up = batch, other, warm_up
        self.seconds: dict[str, list[float]] = {US: [], LOOP: []}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        number = 0
        while True:
            dist.barrier()
            began = time.perf_counter()
            yield self._batch
            dist.barrier()
            self._note(US, number, time.perf_counter() - began)
            if number % 2 == 0:
                for _ in range(2):
                    self._note(LOOP, number, timed(self._other)[0])
            number += 1

    def _note(self, who: str, number: int, seconds: float) -> None:
        if number >= self._warm_up:
            self.seconds[who].append(seconds)


def measure_trainer(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Its step, with all that it tells, beside the lines of docs/parallel.md; with clipping and without."""
    for key, clip in (("trainer", 1.0), ("plain", None)):
        x, y = draw(sizes.rows, sizes.width, seed=1), draw(sizes.rows, sizes.width, seed=2)
        common = {"loss": F.mse_loss, "count": sizes.microbatches, "cuts": [f"layers.{sizes.layers // 2}"]}
        model, _ = our_pipeline(make_mlp(sizes.width, sizes.layers), x, y, **common)
        other, gradients = our_pipeline(make_mlp(sizes.width, sizes.layers), x, y, **common)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)

        def by_hand(other=other, gradients=gradients, optimizer=optimizer, clip=clip) -> None:  # type: ignore[no-untyped-def]
            gradients()
            if clip is not None:
                par.clip_grad_norm(other, clip)
            optimizer.step()
            optimizer.zero_grad()

        data = _InTurns((x, y), by_hand, 2 * sizes.warm_up)
        trainer = training.Trainer(
            model,
            train=data,
            steps=2 * (sizes.cycles + sizes.warm_up) + 1,  # the last one is not noted: nobody asks for a batch after it
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            clip=clip,
        )
        trainer.fit()
        for who, seconds in data.seconds.items():
            samples.add(who, f"{key}_ms", *(1e3 * each for each in seconds))


def measure_save(sizes: Sizes, turn: int, samples: Samples) -> None:
    """A model with its AdamW, to a folder: until the call returns. They take turns, one at a time."""
    model = make_mlp(sizes.saved_width, sizes.saved_layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    kinds = [True, False] if turn % 2 else [False, True]
    for number in range(-1, 2 * sizes.saves):
        for is_async in kinds if number % 2 else kinds[::-1]:
            began = time.perf_counter()
            saved = training.save("saved", model, optimizer, step=number + 1, keep=1, is_async=is_async)
            blocked_s = time.perf_counter() - began
            saved.result()
            if number >= 0:
                samples.add(US if is_async else WAITING, "save_s", blocked_s)
                if is_async:
                    samples.add(US, "save_done_s", time.perf_counter() - began)


# ---- a rank

PARTS = {
    "pipeline": measure_pipeline,
    "tensor": measure_tensor,
    "shards": measure_shards,
    "mlp": measure_mlp,
    "efficiency": measure_efficiency,
    "gpt": measure_gpt,
    "resnet": measure_resnet,
    "trainer": measure_trainer,
    "save": measure_save,
}


def run_rank(measure: Callable[[Samples], None], folder: Path) -> None:
    """Write what the first rank measures, or what any fails with, to ``folder``."""
    rank = os.environ["RANK"]
    samples = Samples()
    try:
        measure(samples)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    if rank == "0":
        (folder / "samples.json").write_text(json.dumps(samples.by_name), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo that lets go of a tensor while Python ends would abort it


def _measure(samples: Samples) -> None:
    part, sizes, turn = sys.argv[1], read_sizes(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_GROUP_LIMIT)
    try:
        PARTS[part](sizes, turn, samples)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(_measure, Path(sys.argv[4]))
