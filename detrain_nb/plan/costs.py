"""Costs of the stages of a model, layer by layer, and the step time that follows: numbers only, without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HALVINGS = 30  # steps of the bisection for a time
_SLACK = 1 + 1e-9  # for rounding errors of sums


@dataclass(frozen=True)
class Layer:
    """The part of a model between two neighbouring cut points; in a very long model, several of them together.

    ``time_s``: seconds for one microbatch, forward and backward, on the node of its stage. ``state_bytes``: parameters
    with gradients and optimizer state; a tied parameter counts once per stage, in its first layer there.
    ``activation_bytes``: of all microbatches that the stage keeps at once. ``input_bytes``: of the layer's input.
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
    """One stage: the next ``num_layers`` layers.

    ``time_s``: seconds for one microbatch, or for its tensors on the link if those take longer. ``node`` runs the
    stage and has ``node_memory_bytes``, None when unknown.
    """

    num_layers: int
    time_s: float
    memory_bytes: float
    node: str = ""
    node_memory_bytes: float | None = None


@dataclass(frozen=True)
class StageCosts:
    """All layers of a model in order, and the stages that they form.

    ``even_imbalance``: the imbalance of stages with equal numbers of layers, for comparison.
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
        """Layer indices: stage ``i`` has the layers from ``bounds[i]`` up to ``bounds[i + 1]``, exclusive."""
        found = [0]
        for stage in self.stages:
            found.append(found[-1] + stage.num_layers)
        return tuple(found)

    @property
    def imbalance(self) -> float:
        return imbalance_of(self.stage_s)

    @property
    def best_slowest_s(self) -> float:
        """The time of the slowest stage in the best cut of the same layers that fits into memory, in seconds.

        When no cut fits, the current time. The activations of a layer are counted for as many microbatches as 1F1B
        keeps in the stage that gets it.
        """
        if not self._can_be_cut(math.inf):
            return max(self.stage_s)
        low, high = 0.0, math.fsum(layer.time_s for layer in self.layers)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._can_be_cut(middle) else (middle, high)
        return high

    def _can_be_cut(self, limit_s: float) -> bool:
        """Return whether a cut exists whose stages all take at most ``limit_s``, found by filling each greedily."""
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
    """Return the layers of each stage; with more than ``most`` in all, neighbours are merged."""
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
    """Return the time of the slowest stage divided by the mean; 1 is balanced."""
    total = sum(stage_s)
    return max(stage_s) * len(stage_s) / total if total else 1.0


def step_of(stage_s: Sequence[float], num_microbatches: int) -> float:
    """Return the time of one batch in a schedule such as 1F1B, in seconds.

    The first microbatch passes all stages; the others follow at the pace of the slowest stage.
    """
    return sum(stage_s) + (num_microbatches - 1) * max(stage_s)


def bubble_of(stage_s: Sequence[float], num_microbatches: int) -> float:
    """Return the share of a step in which the slowest stage waits."""
    step_s = step_of(stage_s, num_microbatches)
    return 1 - num_microbatches * max(stage_s) / step_s if step_s else 0.0
