"""Cuts of a model, and the parts that each stage gets; stage.py makes the stages."""

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
    """A model cut into stages; ``stage(i)`` makes a stage, on the rank that needs it.

    ``cuts`` are the modules at whose entry the second and each later stage begins. ``shared``: parameters that more
    than one stage uses (tied parameters), by first name; their gradients must be summed over those stages.
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
        """Return all names that a parameter has in the model; ``name`` is the first of them."""
        every = dict(self.model.named_parameters(remove_duplicate=False))
        return [other for other, parameter in every.items() if parameter is every[name]]

    def written_buffers(self) -> dict[str, int]:
        """Return the buffers that the forward writes, by name, with the stage that writes each last."""
        written = self.profile.written_buffers
        return {each.name: bisect.bisect_right(self.bounds, each.unit) - 1 for each in written}

    def stage(self, index: int) -> nn.Module:
        """Make a stage: a module of the model's own class that holds only its own part's tensors.

        The first stage is called as the model is. Each other stage gets the tensor from the previous stage first, then
        the model's own arguments: masks and positions are needed everywhere. A stage returns the tensor for the next
        stage; the last one returns the model's output. Raises: SpecError for an ``index`` that does not exist.
        """
        if not 0 <= index < self.num_stages:
            raise SpecError(f"stage {index} does not exist: there are {self.num_stages} stages, counted from 0")
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
        """Return a stage's parameters by first name: those used in the example, and its share of the unused ones."""
        return set(self._used(stage)) | self._unused_of(stage)

    def _used(self, stage: int) -> dict[str, None]:
        units = self.profile.units[self.bounds[stage] : self.bounds[stage + 1]]
        return dict.fromkeys(name for unit in units for name in unit.parameters)

    def _names_in(self, stage: int, runs: set[str]) -> set[str]:
        """Return the names of a stage's parameters.

        Of a tied parameter's names, those count whose module runs in this stage or is never entered: code that reads it
        from outside may use any of them.
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
    """Cut ``model`` into ``stages`` so that their times are balanced, or ``at`` the entry of the named modules.

    ``example_inputs``: of one microbatch, as in ``profile``. ``nodes``: what runs each stage, as in ``partition``. The
    model may be on the meta device.

    Raises: SpecError for arguments that do not fit, or if the model cannot be cut so; the error names possible cuts.
    """
    require_model(model)
    require_whole(stages=stages)
    if "forward" in vars(model):
        raise SpecError(
            "model.forward was replaced on the object, which bypasses the stages: define it in the model's class, or "
            "undo it (del model.forward)"
        )
    found = profile_of_model or profile(model, example_inputs)
    require_read_as_attributes(found.read_past, axis="pp")
    require_read_as_attributes(found.buffers_read_past, axis="pp", kind="buffer")
    require_made_before(found.made, axis="pp")
    if at is not None:
        require_names(at=at)
        if stages is not None and stages != len(at) + 1:
            raise SpecError(f"{stages} stages need {stages - 1} cuts (at=), not {len(at)}")
        made = Split(model, found, _bounds_at(model, found, at))
        if wrong := _find_wrong(made, example_inputs):
            _bounds_at(model, found.without(wrong), at)
        return made
    if stages is None and nodes is None:
        raise SpecError("none of stages, at and nodes was given: give one of them")
    if stages is not None and nodes is not None and stages != len(nodes):
        raise SpecError(f"{stages} stages, but {len(nodes)} nodes: give one node for each stage")
    while True:
        best = partition(found, nodes if nodes is not None else stages or 0)
        made = Split(model, found, best.bounds, best)
        if not (wrong := _find_wrong(made, example_inputs)):
            return made
        found = found.without(wrong)


def _find_wrong(found: Split, example_inputs: ExampleInputs) -> dict[str, str]:
    """Return the cuts at which stages would not compute what the model does, with the reasons."""
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
            raise SpecError(f"the model has no module {name!r}{hint}")
        if name not in index_of:
            cuts = ", ".join(found.cuts) or "nowhere"
            why = found.hindrances.get(name, "it does not run with the example inputs")
            raise SpecError(f"the model cannot be cut at {name!r}: {why}. It can be cut at: {cuts}")
    bounds = [index_of[name] for name in at]
    if bounds != sorted(set(bounds)):
        ordered = sorted(set(at), key=lambda name: index_of[name])
        raise SpecError(f"give the cuts in the order in which they run, each once: {', '.join(ordered)}")
    return (0, *bounds, len(found.units))
