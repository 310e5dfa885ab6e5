"""Layers of a model that can be cut over ranks: proposed by the data flow or by the model itself, then proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from ...errors import SpecError
from ..arguments import require_model, require_whole
from ..blocks import pattern_of
from ..costs.profiler import ExampleInputs, as_call
from ..kept import State
from ..limits import find_parameter_use, require_read_as_attributes, require_unasked, require_untransformed
from ..module_copies import ghost_of, replace_tensors
from ..recorders import TensorMemo
from ..recording import fails_with_inputs, first_float_tensor, modules_around
from ..writes import has_own_memory, values_kept
from .block_calls import BlockCalls, where_the_model_is
from .layer_flow import watch_flow
from .plan import EXPERTS, LINEAR, Pair, PlannedModule, TensorPlan
from .proof import Proof, find_fault, hooks_in, is_on_meta, is_too_large, keep_call, without_hooks
from .proof_runs import Call
from .proposals import (
    Between,
    candidates_of,
    flow_pairs,
    heads_that_do_not_divide,
    known_modules,
    own_pairs,
    size_to_cut,
    trials_of,
    why_not_embedding,
    with_sums,
)
from .sequence_plan import with_sequence_parts

_PROVED_WHOLE_NUMEL = 50_000_000  # parameters; of larger models, with float64 copies per rank, only blocks are proved
SHAPES_ALONE = "of large blocks on the meta device, only the shapes were proved"
_NOT_CALLED = "it is not called as a module"
_WRITTEN = "the model's forward writes into its parameters"


def tp_plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    tp: int = 2,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    require: Sequence[str] = (),
) -> TensorPlan:
    """Find which parts of ``model`` can be cut over ``tp`` ranks; unproved parts stay on every rank, with the reason.

    ``example_inputs``: a tensor, a sequence of the positional arguments, or a mapping of the keyword arguments.
    ``sequence_parallel``: between layers, each rank has its part of the sequence. ``loss_parallel``: the head's output
    stays in parts, for `torch.distributed.tensor.parallel.loss_parallel`. ``require``: names of modules that must be
    cut. A plan that the model brings (``_tp_plan``) is proposed first, and proved like any other.

    The model runs once in evaluation mode, without gradients; then each kind of block runs in float64 on the CPU. Every
    rank that calls this with the same model gets the same plan. Large blocks of a model on the meta device run without
    values, and only their shapes are proved, which is enough for a dry run but not for training.

    Raises: SpecError if what was requested by name is impossible, or the model fails on the inputs.
    """
    require_model(model)
    require_whole(tp=tp)
    if tp < 2:
        raise SpecError(f"tp={tp}: layers are cut over 2 or more ranks")
    most = max((size for parameter in model.parameters() for size in parameter.shape), default=0)
    if tp > most:
        raise SpecError(f"tp={tp} is too large: no parameter has more than {most} rows or columns to cut")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise SpecError("the model's parameters are already on a mesh: make the plan before laying the model out")
    call = as_call(example_inputs)
    if is_on_meta(model):
        model = _all_on_meta(model)
    with values_kept(_written_through_copies(model)):
        with fails_with_inputs(*call):
            planner = _Planner(model, call, tp)
        planner.add_pairs()
        planner.add_embeddings()
        planner.add_experts()
        planner.add_head(is_loss_parallel=loss_parallel)
        planner.explain_the_rest()
        planner.prove_whole()
        if loss_parallel:
            planner.require_head()
        plan = planner.plan
        for name in require:
            _require_cut(plan, name)
        return planner.with_sequence_parts() if sequence_parallel else plan


def _written_through_copies(model: nn.Module) -> list[Tensor]:
    """Return tensors that copies of the model may write into, in any thread, through functions that refer to them.

    If the model is itself a copy, this includes tensors of its original. Parameters are left out: reading them this way
    is refused.
    """
    own = {id(tensor) for each in model.parameters() for tensor in (each, each.grad)}
    return [each for each in State(model).tensors if id(each) not in own and has_own_memory(each)]


def _require_cut(plan: TensorPlan, name: str) -> None:
    inside = plan.inside(name)
    if not inside & {*plan.roles}:
        why = next((plan.reasons[each] for each in plan.modules if each in inside and each in plan.reasons), "")
        raise SpecError(f"{name!r} cannot be cut over tp={plan.tp} ranks: {why or 'it has no layers that can be cut'}")


class _Planner:
    def __init__(self, model: nn.Module, call: Call, tp: int) -> None:
        self._model, self._tp = model, tp
        self._call = where_the_model_is(model, call)
        self._names = dict(model.named_modules())
        self.plan = TensorPlan(tp, known_modules(model))
        use = find_parameter_use(model, self._call)
        require_untransformed(use)
        require_read_as_attributes(use.read_past, axis="tp")
        require_unasked(use.versions_asked, axis="tp")
        self._written = {
            name
            for name, module in self.plan.modules.items()
            if any(first in use.written for _, first, _ in module.parameters)
        }
        layers = [name for name, module in self.plan.modules.items() if module.kind in LINEAR]
        self._flow = watch_flow(model, *self._call, layers)
        self._entered = {*self._flow.entered}
        self._verdicts: dict[Any, Pair | str] = {}
        self._blocks = BlockCalls(model, self._call)
        self._is_of_shapes = False  # True if something too large was proved by its shapes only

    @property
    def kept_call(self) -> Call:
        first = first_float_tensor(*self._call)
        return keep_call(*self._call, lambda tensor: tensor is first or tensor.requires_grad)

    # ---- pairs

    def add_pairs(self) -> None:
        proposals = [*own_pairs(self._model, self.plan.modules), *flow_pairs(self._flow, self.plan.modules)]
        alone = {name for name, module in self.plan.modules.items() if module.kind in ("embedding", "experts")}
        self._blocks.note({*map(self._parent_of, proposals), *alone, *self._flow.outputs, *self._flow.heads})
        used: set[str] = set()
        for pair in proposals:
            if used & {*pair.names}:
                continue
            verdict = self._judge(pair)
            if isinstance(verdict, str):
                for name in pair.names:  # the first verdict is the nearest
                    if name not in used:
                        self.plan.reasons.setdefault(name, verdict)
                continue
            if self._written & verdict.members:
                self.plan.reasons.update(dict.fromkeys(pair.names, _WRITTEN))
                continue
            self.plan.pairs.append(verdict)
            try:
                self.plan.require_agreement()
            except SpecError as exc:
                self.plan.pairs.remove(verdict)
                self.plan.reasons.update(dict.fromkeys(pair.names, str(exc)))
                continue
            used |= {*pair.names}
            for name in pair.names:
                self.plan.reasons.pop(name, None)

    def _judge(self, pair: Pair) -> Pair | str:
        """Return the pair as it can be cut, or why it cannot. Blocks of one kind are proved once."""
        if not {*pair.names} <= self._entered:
            return _NOT_CALLED
        parent_name = self._parent_of(pair)
        if reason := self._why_not_provable(parent_name):
            return reason
        parent = self._names[parent_name]
        relative = pair.renamed(lambda name: _without(parent_name, name))
        between = self._between(parent_name, pair)
        modules = known_modules(parent)
        counts = tuple(candidates_of(parent, relative, modules))
        key = (self._blocks.kind_of(parent_name), relative, between, counts)
        if key not in self._verdicts:
            self._verdicts[key] = self._prove(parent_name, relative, modules, between)
        verdict = self._verdicts[key]
        if isinstance(verdict, str):
            return verdict
        verdict = replace(verdict, origin=pair.origin)
        return verdict.renamed(lambda name: ".".join(part for part in (parent_name, name) if part))

    def _between(self, parent_name: str, pair: Pair) -> Between:
        def inside(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(_without(parent_name, name) for name in names if _is_in(parent_name, name))

        modules = inside(name for name in self._flow.between(pair.columns, pair.row) if name in self.plan.modules)
        parameters = inside(sorted(self._flow.parameters.get(pair.row, ())))
        between = self._blocks.between(self._blocks.kind_of(parent_name))
        return replace(between, modules=modules, parameters=parameters)

    def _prove(self, parent_name: str, pair: Pair, modules: dict[str, PlannedModule], between: Between) -> Pair | str:
        kind = self._blocks.kind_of(parent_name)
        parent, call = self._names[parent_name], self._blocks.of_kind.get(kind)
        if call is None:
            return _NOT_CALLED
        for name in pair.names:
            size = size_to_cut(modules[name], is_column=name in pair.columns)
            if size % self._tp:
                return f"{size} {'outputs' if name in pair.columns else 'inputs'} are not divisible by tp={self._tp}"
        self._is_of_shapes |= is_too_large(parent)

        def prove(parent: nn.Module) -> Pair | str:
            proof = Proof(parent, call, unread=self._blocks.unread.get(kind, ()))
            return self._try(proof, parent, pair, modules, between)

        found = prove(parent)
        if not isinstance(found, str):
            return found
        no_heads = heads_that_do_not_divide(parent, pair, modules, self._tp)
        return no_heads or f"not proved: {self._with_hooks(parent_name, found, prove)}"

    def _try(
        self, proof: Proof, parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], between: Between
    ) -> Pair | str:
        faults = []
        for trial in trials_of(parent, pair, modules, self._tp, between):
            misfit = proof.shapes.find_fault(TensorPlan(self._tp, modules, [trial]))
            if misfit is not None:
                faults.append(misfit)
                continue
            for complete in with_sums(trial, modules, between):
                fault = proof.find_fault(TensorPlan(self._tp, modules, [complete]))
                if fault is None:
                    return complete
                faults.append(fault)
        return faults[0]

    def _with_hooks(self, name: str, fault: str, prove: Callable[[nn.Module], Any]) -> str:
        """Return the fault and the hooks in ``name`` that cause it; ``prove`` returns a text if there is a fault."""
        hooked = hooks_in(self._names[name])
        try:
            if not hooked or isinstance(prove(without_hooks(self._names[name])), str):
                return fault
        except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied may raise anything
            return fault
        whole_names = (".".join(filter(None, (name, each))) for each in hooked)
        named = ", ".join(dict.fromkeys(pattern_of(each) or "the model" for each in whole_names))
        return (
            f"{fault}; the proof succeeds without the hooks of {named}: remove them, or have them treat each column "
            "separately"
        )

    def _parent_of(self, pair: Pair) -> str:
        """Return the innermost module that contains all layers of a pair and runs whenever one of them does."""
        common = [name for name in modules_around(pair.row) if all(_is_in(name, each) for each in pair.names)]
        around = frozenset.intersection(*(self._flow.around.get(name, frozenset([""])) for name in pair.names))
        return next(name for name in reversed(common) if name in around or not name)

    # ---- modules with whole inputs and outputs

    def add_embeddings(self) -> None:
        """Cut tables of the size of the vocabulary; gathering small ones costs more than they weigh."""
        in_pairs = frozenset().union(*(pair.members for pair in self.plan.pairs))
        tables = [
            name for name, module in self.plan.modules.items() if module.kind == "embedding" and name not in in_pairs
        ]
        largest = max((self._rows(name) for name in tables), default=0)
        for name in tables:
            reason = why_not_embedding(self._names[name])
            if not reason and 2 * self._rows(name) < largest:
                reason = f"{self._rows(name)} rows are few compared with the {largest} of the vocabulary"
            self._add_alone(name, "embedding", reason)

    def add_experts(self) -> None:
        """Cut each expert of a mixture into parts, so that it does not matter which expert gets the tokens."""
        mixtures = [name for name, module in self.plan.modules.items() if module.kind == "experts"]
        for name in mixtures:
            self._add_alone(name, EXPERTS[0], "")
            if name not in self.plan.alone:
                reason = self.plan.reasons[name]
                self._add_alone(name, EXPERTS[1], "")
                if name not in self.plan.alone:
                    self.plan.reasons[name] = reason

    def add_head(self, *, is_loss_parallel: bool) -> None:
        if is_loss_parallel:
            for name in self._flow.outputs:
                self.plan.replicate(name)  # it must be a head, not a row
        roles = self.plan.roles
        heads = [name for name in self._flow.outputs if name not in roles]
        others = [name for name in self._flow.heads if name not in (*roles, *heads)]
        for name in (*heads, *others):
            self._add_alone(name, "colwise", "")
        if is_loss_parallel and len(heads) == 1 and heads[0] in self.plan.alone:
            self.plan.shard_head = heads[0]

    def require_head(self) -> None:
        """Raise SpecError if the output cannot stay in parts."""
        if self.plan.shard_head is None:
            heads = self._flow.outputs
            why = next((self.plan.reasons[name] for name in heads if name in self.plan.reasons), "")
            raise SpecError(
                "loss_parallel needs a model that returns the output of one linear layer, its head: "
                f"{why or f'{len(heads)} were found'}; leave loss_parallel out"
            )

    def _add_alone(self, name: str, role: str, reason: str) -> None:
        reason = reason or self._why_not_provable(name)
        if name in self._written:
            reason = _WRITTEN
        if not reason:
            try:
                self.plan.set(name, role)
            except SpecError as exc:
                reason = str(exc)
        if not reason:
            relative = TensorPlan(self._tp, known_modules(self._names[name]), alone={"": role})
            call = self._blocks.of_kind.get(self._blocks.kind_of(name))
            fault: str | None = _NOT_CALLED
            if call is not None:  # torch's own layers are known, and may be as large as a vocabulary
                fault = None
                if not _is_plain(self._names[name]):
                    self._is_of_shapes |= is_too_large(self._names[name])
                    fault = find_fault(self._names[name], relative, call)
                    if fault:
                        fault = self._with_hooks(name, fault, lambda bare: find_fault(bare, relative, call))
            if fault:
                self.plan.replicate(name)
                reason = f"not proved: {fault}"
        if reason:
            self.plan.reasons[name] = reason

    # ---- the end

    def explain_the_rest(self) -> None:
        members = {*self.plan.roles}.union(*(pair.members for pair in self.plan.pairs))
        for name, module in self.plan.modules.items():
            if name in members or name in self.plan.reasons:
                continue
            parametrized = _parametrized(name, self._names)
            if parametrized:
                reason = parametrized
            elif module.kind == "other":
                if all(len(shape) < 2 for *_, shape in module.parameters):
                    continue
                reason = "parameters of its kind cannot be cut"
            elif name not in self._entered:
                reason = _NOT_CALLED
            else:
                reason = "no layers were found that can pass their parts to it or take its parts"
            self.plan.reasons[name] = reason

    @property
    def _is_too_large(self) -> bool:
        numel = sum(parameter.numel() for parameter in self._model.parameters())
        return is_too_large(self._model) or numel > _PROVED_WHOLE_NUMEL

    def _why_not_provable(self, name: str) -> str:
        """Return why not: the proof of a block does not cover what it does to a parameter of another module."""
        other = self._flow.others.get(name, "") if self._is_too_large else ""
        return other and f"its code reads {other} of another module, and the whole model is too large to prove"

    def prove_whole(self) -> None:
        """Prove the whole model too, if it is not too large: code outside a block may read what is in it."""
        if self._is_too_large:
            self.plan.checked = SHAPES_ALONE if self._is_of_shapes else "each kind of block was proved"
            return

        def prove(model: nn.Module) -> str | None:
            return find_fault(model, replace(self.plan, shard_head=None), self.kept_call)

        fault = prove(self._model)
        self.plan.checked = "proved"
        if fault:
            reason = f"the model as a whole was not proved: {self._with_hooks('', fault, prove)}"
            self.plan.reasons.update(dict.fromkeys(self.plan.roles, reason))
            self.plan.pairs, self.plan.alone, self.plan.shard_head = [], {}, None
            self.plan.checked = reason

    def with_sequence_parts(self) -> TensorPlan:
        return with_sequence_parts(
            self.plan, self._model, self.kept_call, entered=self._flow.entered, parent_of=self._parent_of
        )

    def _rows(self, name: str) -> int:
        return self.plan.modules[name].parameters[0][2][0]


def _parametrized(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return a reason for a module whose weight is computed at each call, or that holds such a weight's source."""
    owner, _, key = name.rpartition("parametrizations.") if "parametrizations." in name else (f"{name}.", "", "")
    module = modules[owner[:-1]]
    if not parametrize.is_parametrized(module):
        return ""
    made: Any = module.parametrizations
    keys = [key] if key else list(made)
    return (
        f"{owner[:-1] or 'the model'} recomputes its {' and '.join(keys)} at each call (parametrize), which cannot be "
        "cut: torch.nn.utils.parametrize.remove_parametrizations() makes it a plain parameter"
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether it is one of torch's own layers, without changes."""
    return type(module) in (nn.Linear, nn.Embedding) and not (module._forward_hooks or module._forward_pre_hooks)


def _is_in(outer: str, name: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _without(outer: str, name: str) -> str:
    return name[len(outer) + 1 :] if outer else name


def _all_on_meta(model: nn.Module) -> nn.Module:
    """Copy a model, plain attributes included, to meta: ``to("meta")`` leaves a table of positions on the CPU."""
    made = ghost_of(model)
    on_meta = TensorMemo(lambda tensor: torch.empty_like(tensor, device="meta"))
    for part in made.modules():
        replace_tensors(part, lambda tensor: tensor if tensor.is_meta else on_meta(tensor))
    return made
