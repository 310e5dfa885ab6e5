"""What the stages of a model cost, layer by layer, and what follows for a step: numbers alone, without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HALVINGS = 30  # of the range in which a time lies
_SLACK = 1 + 1e-9  # sums are rounded


@dataclass(frozen=True)
class Layer:
    """What runs from one place at which a model can be cut to the next; of very many a few together.

    ``time_s``: seconds for one microbatch, forward and backward, on the node of its stage. ``state_bytes``: parameters
    with their gradients and the optimizer's state; a tied one counts once in a stage, at its first layer there.
    ``activation_bytes``: of all microbatches that the stage keeps at once. ``input_bytes``: of what comes in.
    """

    name: str
    time_s: float
    state_bytes: float
    activation_bytes: float
    input_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True)
class StageCost:
    """The next ``num_layers`` layers. ``time_s``: of one microbatch, or of its tensors on the link where that is more.

    ``node`` runs it, which has ``node_memory_bytes``, where that is known.
    """

    num_layers: int
    time_s: float
    memory_bytes: float
    node: str = ""
    node_memory_bytes: float | None = None


@dataclass(frozen=True)
class StageCosts:
    """All layers of a model in their order, and the stages that they make.

    ``even_imbalance``: of equal numbers of layers, for comparison.
    """

    layers: tuple[Layer, ...]
    stages: tuple[StageCost, ...]
    num_microbatches: int
    even_imbalance: float | None = None

    @property
    def stage_s(self) -> tuple[float, ...]:
        return tuple(stage.time_s for stage in self.stages)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Stage ``i`` has the layers from ``bounds[i]`` up to ``bounds[i + 1]``."""
        found = [0]
        for stage in self.stages:
            found.append(found[-1] + stage.num_layers)
        return tuple(found)

    @property
    def imbalance(self) -> float:
        return imbalance_of(self.stage_s)

    @property
    def best_slowest_s(self) -> float:
        """The time of the slowest stage where the same layers are cut best, by their times, of cuts that fit.

        Where none fits it is that of now. A layer counts with the activations of as many microbatches as 1F1B keeps in
        the stage that gets it.
        """
        if not self._can_be_cut(math.inf):
            return max(self.stage_s)
        low, high = 0.0, math.fsum(layer.time_s for layer in self.layers)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._can_be_cut(middle) else (middle, high)
        return high

    def _can_be_cut(self, limit_s: float) -> bool:
        """Each stage takes what it can: there is a cut whose stages take no longer, or there is none."""
        kept = [min(self.num_microbatches, len(self.stages) - stage) for stage in range(len(self.stages))]
        rooms = [_SLACK * (stage.node_memory_bytes or math.inf) for stage in self.stages]
        now = itertools.chain.from_iterable(
            itertools.repeat(at, stage.num_layers) for at, stage in enumerate(self.stages)
        )
        stage, filled_s, held_bytes, is_empty = 0, 0.0, 0.0, True
        for layer, at in zip(self.layers, now):
            while True:
                needed = layer.state_bytes + layer.activation_bytes * kept[stage] / kept[at]
                if filled_s + layer.time_s <= limit_s and held_bytes + needed <= rooms[stage]:
                    break
                if is_empty or stage + 1 == len(self.stages):
                    return False
                stage, filled_s, held_bytes, is_empty = stage + 1, 0.0, 0.0, True
            filled_s, held_bytes, is_empty = filled_s + layer.time_s, held_bytes + needed, False
        return True

    @property
    def step_s(self) -> float:
        return step_of(self.stage_s, self.num_microbatches)

    @property
    def bubble(self) -> float:
        return bubble_of(self.stage_s, self.num_microbatches)


def join_layers(layers: Sequence[Layer], bounds: Sequence[int], *, most: int) -> list[list[Layer]]:
    """Return the layers of each stage; where there are more than ``most`` in all, neighbours count as one."""
    size = math.ceil(len(layers) / (most - len(bounds))) if len(layers) > most else 1
    return [
        [_join(layers[at : min(at + size, end)]) for at in range(begin, end, size)]
        for begin, end in itertools.pairwise(bounds)
    ]


def _join(layers: Sequence[Layer]) -> Layer:
    if len(layers) == 1:
        return layers[0]
    return replace(
        layers[0],
        name=f"{layers[0].name} and {len(layers) - 1} more",
        time_s=math.fsum(layer.time_s for layer in layers),
        state_bytes=math.fsum(layer.state_bytes for layer in layers),
        activation_bytes=math.fsum(layer.activation_bytes for layer in layers),
    )


def imbalance_of(stage_s: Sequence[float]) -> float:
    """The slowest stage's time by the mean; 1 is even."""
    total = sum(stage_s)
    return max(stage_s) * len(stage_s) / total if total else 1.0


def step_of(stage_s: Sequence[float], num_microbatches: int) -> float:
    """Of one batch through a schedule such as 1F1B: one microbatch through all stages, the others behind it."""
    return sum(stage_s) + (num_microbatches - 1) * max(stage_s)


def bubble_of(stage_s: Sequence[float], num_microbatches: int) -> float:
    """The share of a step in which the slowest stage waits."""
    step_s = step_of(stage_s, num_microbatches)
    return 1 - num_microbatches * max(stage_s) / step_s if step_s else 0.0
