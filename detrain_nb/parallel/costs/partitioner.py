"""The choice of which units of a model make which stage: the split whose slowest stage is fastest, found exactly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import SpecError
from ...plan import (
    MOST_LAYERS,
    Layer,
    PlanDescription,
    StageCost,
    StageCosts,
    bubble_of,
    imbalance_of,
    join_layers,
    step_of,
)
from ...text import name_some, table_lines
from ..arguments import require_whole
from .profiler import ModelProfile

# Parameter, gradient and Adam's two moments, all of one dtype.
STATE_FACTOR = 4.0
_MOST_NAME = 200  # characters of a module's name
_MOST_CUTS = 10  # named in an error


@dataclass(frozen=True)
class StageNode:
    """A node that runs one stage.

    ``speed`` is relative to the machine on which the units were timed. ``memory_bytes`` is a limit for what the
    partition knows: parameters with their state and saved activations, as in one process. Layouts change this: bf16,
    shards, ``tp`` and recomputed activations need less; the loss, its logits and buffers between stages need more.
    ``dry_run`` counts all of it. ``bytes_per_s`` and ``latency_s`` are of the link to the neighbouring stages.

    Raises: SpecError when a number is not above 0, or ``latency_s`` is negative or infinite.
    """

    name: str = ""
    memory_bytes: float = math.inf
    speed: float = 1.0
    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for what in ("memory_bytes", "speed", "bytes_per_s"):
            if not getattr(self, what) > 0:
                raise SpecError(f"node {self.name!r}: {what}={getattr(self, what)} must be above 0")
        if not 0 <= self.latency_s < math.inf:
            raise SpecError(f"node {self.name!r}: latency_s={self.latency_s} must be 0 or more seconds, and finite")


@dataclass(frozen=True)
class Partition:
    """Units of each stage: stage ``i`` has the units from ``bounds[i]`` to ``bounds[i + 1]``, on ``nodes[i]``.

    ``stage_s``, by stage: seconds for one microbatch, forward and backward, or for its tensors on the link if that is
    longer. ``memory_bytes``: what a stage needs at most. ``layers``: what each unit adds to its stage. ``even``: for
    comparison, the split into equal numbers of units, on the nodes in their given order.
    """

    profile: ModelProfile = field(repr=False)
    nodes: tuple[StageNode, ...]
    bounds: tuple[int, ...]
    stage_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    num_microbatches: int
    even: Partition | None = field(default=None, repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Modules at whose entry the second and each later stage begins."""
        return tuple(str(self.profile.units[bound].cut) for bound in self.bounds[1:-1])

    @property
    def imbalance(self) -> float:
        """Slowest stage's time divided by the mean; 1 is even."""
        return imbalance_of(self.stage_s)

    @property
    def step_s(self) -> float:
        """Seconds of one batch in a schedule such as 1F1B: one microbatch passes all stages, the others follow it."""
        return step_of(self.stage_s, self.num_microbatches)

    @property
    def bubble(self) -> float:
        """Share of a step in which the slowest stage waits."""
        return bubble_of(self.stage_s, self.num_microbatches)

    @property
    def fits(self) -> bool:
        """Whether no stage needs more memory than its node has."""
        return all(needed <= node.memory_bytes for needed, node in zip(self.memory_bytes, self.nodes))

    def costs(self) -> StageCosts:
        """Return the numbers alone, which need no torch."""
        layers = join_layers(self.layers, self.bounds, most=MOST_LAYERS)
        stages = tuple(
            StageCost(
                len(layers[stage]),
                self.stage_s[stage],
                self.memory_bytes[stage],
                node.name,
                node.memory_bytes if math.isfinite(node.memory_bytes) else None,
            )
            for stage, node in enumerate(self.nodes)
        )
        even = self.even.imbalance if self.even else None
        return StageCosts(tuple(itertools.chain(*layers)), stages, self.num_microbatches, even)

    def to_dict(self) -> dict[str, Any]:
        """Return the partition as plain JSON, for ``widgets.plan``: it can be pulled, or written into a file."""
        return PlanDescription(costs=self.costs()).to_dict()

    def __str__(self) -> str:
        rows = [("stage", "node", "begins at", "units", "time", "memory")]
        for stage, node in enumerate(self.nodes):
            begin, end = self.bounds[stage : stage + 2]
            time_text = f"{1e3 * self.stage_s[stage]:.3f} ms"
            cut = self.profile.units[begin].cut or "the start"
            memory_text = f"{self.memory_bytes[stage] / 1e9:.3f} GB"
            rows.append((str(stage), node.name or "-", cut, str(end - begin), time_text, memory_text))
        lines = [*table_lines(rows), self._summary()]
        if self.even is not None:
            lines.append(f"equal numbers of units: {self.even._summary()}{'' if self.even.fits else ', does not fit'}")
        return "\n".join(lines)

    def _summary(self) -> str:
        of = "1 microbatch" if self.num_microbatches == 1 else f"{self.num_microbatches} microbatches"
        step = f"a step of {of} {1e3 * self.step_s:.3f} ms"
        return f"slowest stage / mean {self.imbalance:.3f}, {step}, of which {100 * self.bubble:.0f} % bubble"


def partition(
    profile: ModelProfile,
    nodes: int | Sequence[StageNode],
    *,
    times_s: Sequence[float] | None = None,
    num_microbatches: int | None = None,
    is_training: bool = True,
    is_order_free: bool = False,
    state_factor: float = STATE_FACTOR,
) -> Partition:
    """Split the units over ``nodes``, one stage on each, so that the slowest stage is as fast as possible.

    ``nodes``: their number if all are alike, or each one, in the order of the stages. ``times_s``: seconds of each unit
    for one microbatch, by default ``profile.times()``. ``num_microbatches``: of one step, by default two for each
    stage. ``is_order_free``: the nodes may be taken in any order. A stage computes while its tensors travel, and takes
    as long as the longer of the two.

    Memory is for 1F1B: stage ``i`` of ``k`` keeps at most ``k - i`` microbatches. ``state_factor`` times the bytes of
    parameters is what they need with gradients and optimizer state; frozen parameters have neither, and parameters that
    the forward does not use have no gradients. A stage without parameters, which optimizers refuse, is made only if
    there is no other split.

    Exact, by dynamic programming over units, stages and kinds of nodes. Raises: SpecError if the model has too few
    cuts, or no split fits into memory.
    """
    if not isinstance(profile, ModelProfile):
        raise SpecError(
            f"partition needs a profile, not a {type(profile).__name__}: call partition(profile(model, "
            "example_inputs), nodes)"
        )
    if not isinstance(nodes, Sequence):
        require_whole(stages=nodes)
    given = tuple(nodes) if isinstance(nodes, Sequence) else tuple(StageNode() for _ in range(nodes))
    if not given or not all(isinstance(node, StageNode) for node in given):
        raise SpecError(f"nodes={nodes!r} is invalid: give a StageNode for each stage, or the number of stages")
    if len(given) > len(profile.units):
        count = len(profile.units)
        cuts = name_some(profile.cuts, most=_MOST_CUTS) or "none"
        why = f"; {profile.why_no_more}" if profile.why_no_more else ""
        otherwise = "use fewer stages" if count > 1 else "keep it whole (tp, dp_shard or dp_replicate instead of pp)"
        raise SpecError(
            f"cannot make {len(given)} stages: the model can be cut into at most {count} (cuts: {cuts}{why}): "
            f"{otherwise}"
        )
    times = profile.times(is_training=is_training) if times_s is None else list(times_s)
    if len(times) != len(profile.units):
        raise SpecError(f"{len(times)} times for {len(profile.units)} units: give one time for each unit")
    if num_microbatches is not None and num_microbatches < 1:
        raise SpecError(f"num_microbatches={num_microbatches}: a step has at least 1 microbatch")
    count = num_microbatches or 2 * len(given)
    costs = _Costs(profile, times, len(given), count, is_training, state_factor)
    is_order_free = is_order_free and len(set(given)) > 1
    found = _search(costs, given, is_order_free=is_order_free, with_parameters=True)
    if found is None:
        found = _search(costs, given, is_order_free=is_order_free, with_parameters=False)
    if found is None:
        raise SpecError(_explain_no_fit(costs, given))
    chosen, bounds = found
    return replace(costs.describe(chosen, bounds), even=costs.describe_even(given))


def partition_at(
    profile: ModelProfile, bounds: Sequence[int], nodes: Sequence[StageNode], *, num_microbatches: int
) -> Partition:
    """Return the costs of stages whose ``bounds`` are already chosen; for training, as in ``partition``."""
    costs = _Costs(profile, profile.times(), len(nodes), num_microbatches, True, STATE_FACTOR)
    return replace(costs.describe(nodes, bounds), even=costs.describe_even(nodes))


class _Costs:
    """Costs of a stage, for every pair of a first unit (rows) and an end unit (columns), or for one pair."""

    def __init__(
        self,
        profile: ModelProfile,
        times: Sequence[float],
        num_stages: int,
        num_microbatches: int,
        is_training: bool,
        state_factor: float,
    ) -> None:
        self.profile = profile
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self._times = times
        self._is_training = is_training
        factors = (1.0, state_factor if is_training else 1.0)
        self._state_bytes = {
            name: factors[name not in profile.frozen] * size for name, size in profile.parameter_bytes.items()
        }
        self._unused: dict[int, list[str]] = {}  # by unit
        for name, index in profile.unused.items():
            self._unused.setdefault(index, []).append(name)
            has_gradient = is_training and name not in profile.frozen
            self._state_bytes[name] -= profile.parameter_bytes[name] if has_gradient else 0
        self._time_s = _spans(times)
        self._saved_bytes = _spans([unit.saved_bytes for unit in profile.units])
        self._state_of_spans = self._sum_state()
        self.has_no_parameters = _spans([len(unit.parameters) for unit in profile.units]) == 0
        crossing = torch.tensor([0.0, *(unit.input_bytes for unit in profile.units[1:]), 0.0], dtype=torch.float64)
        self._link_bytes = (crossing[:, None] + crossing[None, :]) * (2 if is_training else 1)  # and its gradient back
        is_crossed = torch.ones(len(crossing), dtype=torch.float64)
        is_crossed[0] = is_crossed[-1] = 0
        self._messages = (is_crossed[:, None] + is_crossed[None, :]) * (2 if is_training else 1)

    def _sum_state(self) -> Tensor:
        """Return the bytes of each span's parameters with their state; parameters shared by its units count once."""
        sizes = self._state_bytes
        units = enumerate(self.profile.units)
        sums = _spans([sum(sizes[name] for name in (*unit.parameters, *self._held(at))) for at, unit in units])
        last_use: dict[str, int] = {}
        for index, unit in enumerate(self.profile.units):
            for name in unit.parameters:
                if name in last_use:
                    sums[: last_use[name] + 1, index + 1 :] -= sizes[name]
                last_use[name] = index
        return sums

    def _held(self, unit: int) -> Sequence[str]:
        """Return the parameters that belong to a unit although no unit uses them."""
        return self._unused.get(unit, ())

    def stage_s(self, node: StageNode, span: Any = ...) -> Tensor:
        time_s = self._time_s[span] / node.speed
        if math.isinf(node.bytes_per_s) and not node.latency_s:
            return time_s
        travel_s = self._link_bytes[span] / node.bytes_per_s + self._messages[span] * node.latency_s
        return torch.maximum(time_s, travel_s)

    def memory_bytes(self, stage: int, span: Any = ...) -> Tensor:
        return self._state_of_spans[span] + self._saved_bytes[span] * self._num_kept(stage)

    def _num_kept(self, stage: int) -> int:
        """Return the number of microbatches whose activations a stage keeps at once."""
        return min(self.num_microbatches, self.num_stages - stage) if self._is_training else 0

    def _layers(self, stage: int, node: StageNode, span: tuple[int, int]) -> Iterator[Layer]:
        """Yield what each unit of a stage adds to its time and memory."""
        there: set[str] = set()
        for index in range(*span):
            unit, time_s = self.profile.units[index], self._times[index]
            state_bytes = sum(self._state_bytes[name] for name in {*unit.parameters, *self._held(index)} - there)
            there.update(unit.parameters)
            yield Layer(
                (unit.cut or "the start")[-_MOST_NAME:],
                time_s / node.speed,
                state_bytes,
                float(unit.saved_bytes * self._num_kept(stage)),
                float(unit.input_bytes),
            )

    def describe_even(self, nodes: Sequence[StageNode]) -> Partition:
        """Return the split into equal numbers of units, on the nodes in this order."""
        units = len(self.profile.units)
        return self.describe(nodes, [stage * units // len(nodes) for stage in range(len(nodes) + 1)])

    def describe(self, nodes: Sequence[StageNode], bounds: Sequence[int]) -> Partition:
        spans = list(itertools.pairwise(bounds))
        return Partition(
            self.profile,
            tuple(nodes),
            tuple(bounds),
            tuple(float(self.stage_s(node, span)) for node, span in zip(nodes, spans)),
            tuple(float(self.memory_bytes(stage, span)) for stage, span in enumerate(spans)),
            self.num_microbatches,
            layers=tuple(
                layer
                for stage, (node, span) in enumerate(zip(nodes, spans))
                for layer in self._layers(stage, node, span)
            ),
        )


def _spans(values: Sequence[float]) -> Tensor:
    """Return the sums of ``values[begin:end]`` at [begin, end]; shape (n + 1, n + 1), unused below the diagonal."""
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), torch.tensor(values, dtype=torch.float64).cumsum(0)])
    return sums[None, :] - sums[:, None]


def _search(
    costs: _Costs, nodes: Sequence[StageNode], *, is_order_free: bool, with_parameters: bool
) -> tuple[tuple[StageNode, ...], tuple[int, ...]] | None:
    """Return the best order of the nodes and the bounds, or None if nothing fits.

    ``with_parameters``: each stage must have some. A state is how many nodes of each kind are used; its value is, by
    unit, the time of the slowest stage so far, at best. If the order is given, each node is a kind of its own, used in
    turn.
    """
    kinds = list(dict.fromkeys(nodes)) if is_order_free else list(nodes)
    counts = [nodes.count(kind) for kind in kinds] if is_order_free else [1] * len(kinds)
    size = len(costs.profile.units) + 1
    no_span = torch.ones(size, size, dtype=torch.bool).tril()
    if with_parameters:
        no_span |= costs.has_no_parameters

    @functools.lru_cache(maxsize=len(kinds) if is_order_free else 1)  # each entry takes units squared
    def stage_s(kind: StageNode) -> Tensor:
        return costs.stage_s(kind).masked_fill_(no_span, math.inf)

    start = tuple(0 for _ in kinds)
    best = {start: torch.full((size,), math.inf, dtype=torch.float64)}
    best[start][0] = 0
    came_from: list[dict[tuple[int, ...], tuple[Tensor, Tensor]]] = []
    for stage in range(len(nodes)):
        too_much = _find_too_much(costs, stage, kinds if is_order_free else kinds[stage : stage + 1])
        reached: dict[tuple[int, ...], Tensor] = {}
        steps: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        for used, slowest in best.items():
            for index in [stage] if not is_order_free else range(len(kinds)):
                if used[index] == counts[index]:
                    continue
                kind = kinds[index]
                total = torch.maximum(slowest[:, None], stage_s(kind))
                if kind in too_much:
                    total.masked_fill_(too_much[kind], math.inf)
                value, begin = total.min(dim=0)
                now = (*used[:index], used[index] + 1, *used[index + 1 :])
                if now not in reached:
                    reached[now], steps[now] = value, (begin, torch.full((size,), index))
                else:
                    is_better = value < reached[now]
                    reached[now] = torch.where(is_better, value, reached[now])
                    old_begin, old_index = steps[now]
                    steps[now] = (torch.where(is_better, begin, old_begin), old_index.masked_fill(is_better, index))
        best = reached
        came_from.append(steps)
    state = tuple(counts)
    if not math.isfinite(float(best[state][-1])):
        return None
    return _trace_back(came_from, state, kinds, size - 1)


def _find_too_much(costs: _Costs, stage: int, kinds: Sequence[StageNode]) -> dict[StageNode, Tensor]:
    """Return the spans that exceed the memory of a kind of node, for kinds with a limit."""
    limited = {kind for kind in kinds if math.isfinite(kind.memory_bytes)}
    needed = costs.memory_bytes(stage) if limited else None
    return {} if needed is None else {kind: needed > kind.memory_bytes for kind in limited}


def _trace_back(
    came_from: Sequence[dict[tuple[int, ...], tuple[Tensor, Tensor]]],
    state: tuple[int, ...],
    kinds: Sequence[StageNode],
    end: int,
) -> tuple[tuple[StageNode, ...], tuple[int, ...]]:
    order: list[StageNode] = []
    bounds = [end]
    for steps in reversed(came_from):
        begins, indices = steps[state]
        index = int(indices[bounds[-1]])
        order.append(kinds[index])
        bounds.append(int(begins[bounds[-1]]))
        state = (*state[:index], state[index] - 1, *state[index + 1 :])
    return tuple(reversed(order)), tuple(reversed(bounds))


def _explain_no_fit(costs: _Costs, nodes: Sequence[StageNode]) -> str:
    needed = costs.memory_bytes(len(nodes) - 1)
    whole, largest = float(needed[0, -1]), float(needed.diagonal(1).max())
    have = ", ".join(f"{node.memory_bytes / 1e9:.2f}" for node in nodes)
    return (
        f"no split into {len(nodes)} stages fits: the model needs {whole / 1e9:.2f} GB with gradients and optimizer "
        f"state, its largest unit {largest / 1e9:.2f} GB, but the nodes have {have} GB: use more nodes or smaller "
        "microbatches"
    )
