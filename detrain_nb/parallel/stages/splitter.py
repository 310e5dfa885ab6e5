"""Where a model is cut, and what each stage has of it; stage.py makes the stages."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ...errors import SpecError
from ...text import ShownAsText
from ..arguments import require_model, require_names, require_whole
from ..costs.partitioner import Partition, StageNode, partition
from ..costs.profiler import ExampleInputs, ModelProfile, as_call, profile
from ..limits import require_made_before, require_read_as_attributes
from ..recording import modules_around
from .proof import find_difference
from .stage import build_stage


@dataclass(frozen=True)
class Split(ShownAsText):
    """A model, cut into stages; ``stage(i)`` makes one of them, on the rank that needs it.

    ``cuts`` are the modules at whose entry the second and each further stage begins. ``shared`` has the parameters that
    more than one stage uses (tied ones), by first name: their gradients have to be added up over those stages.
    """

    model: nn.Module = field(repr=False)
    profile: ModelProfile = field(repr=False)
    bounds: tuple[int, ...]
    partition: Partition | None = field(default=None, repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def cuts(self) -> tuple[str, ...]:
        return tuple(str(self.profile.units[bound].cut) for bound in self.bounds[1:-1])

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        users: dict[str, list[int]] = {}
        for stage in range(self.num_stages):
            for name in self._used(stage):
                users.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    def aliases(self, name: str) -> list[str]:
        """All names that a parameter has in the model, of which ``name`` is the first."""
        every = dict(self.model.named_parameters(remove_duplicate=False))
        return [other for other, parameter in every.items() if parameter is every[name]]

    def written_buffers(self) -> dict[str, int]:
        """Those that the forward writes, by name: in which stage it does so last."""
        written = self.profile.written_buffers
        return {each.name: bisect.bisect_right(self.bounds, each.unit) - 1 for each in written}

    def stage(self, index: int) -> nn.Module:
        """Make a stage: a module of the model's own class that holds the tensors of its part alone.

        The first is called as the model is. Every other gets the tensor from the stage before it first, and then what
        the model is called with: masks and positions are needed everywhere. What it returns is the tensor for the next
        stage, or, of the last one, what the model returns. Raises: SpecError.
        """
        if not 0 <= index < self.num_stages:
            raise SpecError(f"stage {index}: there are {self.num_stages}, from 0 on")
        units = self.profile.units
        cuts = [None, *self.cuts, None]
        runs = {name for unit in units[self.bounds[index] : self.bounds[index + 1]] for name in unit.modules}
        ends = filter(None, cuts[index : index + 2])
        on_the_way = {outer for name in (*runs, *ends) for outer in (*modules_around(name), name)}
        return build_stage(
            self.model,
            cut_in=cuts[index],
            cut_out=cuts[index + 1],
            replaceable=self.profile.computing,
            runs=runs | on_the_way,
            holds=self._names_in(index, runs | on_the_way),
            outputs=self.profile.outputs,
            written_elsewhere={name for name, stage in self.written_buffers().items() if stage != index},
        )

    def uses(self, stage: int) -> set[str]:
        """The parameters of a stage, by first name: those that it used in the example, and some that nobody did."""
        return set(self._used(stage)) | self._unused_of(stage)

    def _used(self, stage: int) -> dict[str, None]:
        units = self.profile.units[self.bounds[stage] : self.bounds[stage + 1]]
        return dict.fromkeys(name for unit in units for name in unit.parameters)

    def _names_in(self, stage: int, runs: set[str]) -> set[str]:
        """The names of a stage's parameters.

        Of a tied one those count that a module which runs has, or one that never does: who reads it from outside may
        do so by any of them.
        """
        entered = {name for unit in self.profile.units for name in unit.modules}
        used = self.uses(stage)
        names_of: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        held: set[str] = set()
        for names in names_of.values():
            if names[0] in used:
                module_of = {name: name.rpartition(".")[0] for name in names}
                here = [name for name in names if module_of[name] in runs or module_of[name] not in entered]
                held.update(here or names)
        return held

    def _unused_of(self, stage: int) -> set[str]:
        units = range(self.bounds[stage], self.bounds[stage + 1])
        return {name for name, unit in self.profile.unused.items() if unit in units}

    def __str__(self) -> str:
        if self.partition is not None:
            return str(self.partition)
        begins = ["the start", *self.cuts]
        return "\n".join(f"stage {index} begins at {begin}" for index, begin in enumerate(begins))


def split(
    model: nn.Module,
    example_inputs: ExampleInputs,
    stages: int | None = None,
    *,
    at: Sequence[str] | None = None,
    nodes: Sequence[StageNode] | None = None,
    profile_of_model: ModelProfile | None = None,
) -> Split:
    """Cut ``model`` into ``stages``, where that is best for their times; or ``at`` the entry of the modules named.

    ``example_inputs``: of one microbatch, as ``profile`` has them. ``nodes``: what runs each stage, as ``partition``
    has them. The model may be on the meta device. Raises: SpecError, which says where the model can be cut.
    """
    require_model(model)
    require_whole(stages=stages)
    if "forward" in vars(model):
        raise SpecError(
            "the forward of the model was replaced on the object, which leads around its stages: put it into its "
            "class, or take it back (del model.forward)"
        )
    found = profile_of_model or profile(model, example_inputs)
    require_read_as_attributes(found.read_past, axis="pp")
    require_read_as_attributes(found.buffers_read_past, axis="pp", kind="buffer")
    require_made_before(found.made, axis="pp")
    if at is not None:
        require_names(at=at)
        if stages is not None and stages != len(at) + 1:
            raise SpecError(f"{stages} stages and {len(at)} cuts: {len(at)} cuts make {len(at) + 1} stages")
        made = Split(model, found, _bounds_at(model, found, at))
        if wrong := _find_wrong(made, example_inputs):
            _bounds_at(model, found.without(wrong), at)
        return made
    if stages is None and nodes is None:
        raise SpecError("neither stages, nor cuts (at), nor nodes: give one of them")
    if stages is not None and nodes is not None and stages != len(nodes):
        raise SpecError(f"{stages} stages and {len(nodes)} nodes: give one node for each stage")
    while True:
        best = partition(found, nodes if nodes is not None else stages or 0)
        made = Split(model, found, best.bounds, best)
        if not (wrong := _find_wrong(made, example_inputs)):
            return made
        found = found.without(wrong)


def _find_wrong(found: Split, example_inputs: ExampleInputs) -> dict[str, str]:
    """The cuts at which stages would not compute what the model does, and why."""
    if not found.cuts:
        return {}
    args, kwargs = as_call(example_inputs)
    written = found.written_buffers()
    why = find_difference(found.model, found.stage, args, kwargs, cuts=found.cuts, written_buffers=written)
    if not why or len(found.cuts) == 1:
        return {cut: why for cut in found.cuts if why}
    alone = (Split(found.model, found.profile, (0, bound, found.bounds[-1])) for bound in found.bounds[1:-1])
    wrong = {cut: told for each in alone for cut, told in _find_wrong(each, example_inputs).items()}
    return wrong or {found.cuts[0]: why}


def _bounds_at(model: nn.Module, found: ModelProfile, at: Sequence[str]) -> tuple[int, ...]:
    index_of = {unit.cut: index for index, unit in enumerate(found.units)}
    modules = [name for name, _ in model.named_modules() if name]
    for name in at:
        if name not in modules:
            near = difflib.get_close_matches(name, found.cuts or modules, n=1, cutoff=0.3)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"{name!r} is no module of the model{hint}")
        if name not in index_of:
            cuts = ", ".join(found.cuts) or "nowhere"
            why = found.hindrances.get(name, "it does not run with the example inputs")
            raise SpecError(f"the model cannot be cut at {name!r}: {why}. It can be cut at: {cuts}")
    bounds = [index_of[name] for name in at]
    if bounds != sorted(set(bounds)):
        ordered = sorted(set(at), key=lambda name: index_of[name])
        raise SpecError(f"the cuts are not in the order in which they run, each once: {', '.join(ordered)}")
    return (0, *bounds, len(found.units))
