"""Steps of the compared variants, in turns in the same ranks: A B B A ..., A B C B C A ..., each between two barriers.

So a machine whose speed drifts affects all alike. Models, data and pipelines are the same for all variants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from parallel_measures import Sizes
from parallel_models import Block, ResidualMlp
from report import Samples
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from detrain_nb import parallel as par

Step = Callable[[], Tensor | None]  # the loss, if this rank has it
Run = tuple[list[float], list[float]]  # seconds of each counted step, and losses of all steps
Name = TypeVar("Name")

_CPU = torch.device("cpu")


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds until all ranks, which begin together, have finished a step. Collective: all ranks."""
    dist.barrier()
    began = time.perf_counter()
    result = step()
    dist.barrier()
    return time.perf_counter() - began, result


def alternate(steps: Mapping[Name, Step], sizes: Sizes, *, cycles: int, turn: int) -> dict[Name, Run]:
    """Run all variants in turns with a rotating order, since a variant that runs twice in a row has warm caches.

    Collective: all ranks.
    """
    names = list(steps) if turn % 2 else list(steps)[::-1]
    runs: dict[Name, Run] = {name: ([], []) for name in names}
    for number in range(2 * (cycles + sizes.warm_up)):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds, loss = timed(steps[name])
            if number >= 2 * sizes.warm_up:
                runs[name][0].append(seconds)
            if loss is not None:
                runs[name][1].append(float(loss))
    return runs


def losses_apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference on any rank, relative to the loss by hand. Collective: all ranks."""
    if len(ours) != len(theirs):
        raise RuntimeError(f"{len(ours)} losses of ours, {len(theirs)} by hand")
    apart = torch.tensor(max((abs(our - their) / abs(their) for our, their in zip(ours, theirs)), default=0.0))
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return float(apart)


def add_runs(samples: Samples, key: str, runs: Mapping[str, Run]) -> None:
    for who, (seconds, _) in runs.items():
        samples.add(who, f"{key}_ms", *(1e3 * each for each in seconds))


def with_optimizer(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter], gradients: Step) -> Step:
    """Return a step of ``gradients`` followed by plain SGD."""
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
    """Build a pipeline with known shapes that divides the loss instead of each gradient: as fast as torch allows."""
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
