"""Stages compared with the whole model: outputs, all gradients, names, and what each stage holds."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import re
import types
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel import Split, StageNode, profile, split, tp_plan
from detrain_nb.parallel.stages.boundaries import Boundaries
from detrain_nb.parallel.stubs import Stub

from .holding import HOLDERS, Held, Hooked
from .models import (
    GPT,
    AroundNames,
    BasesMethod,
    ByFunctions,
    Checkpointed,
    Collecting,
    Configured,
    Counts,
    Experts,
    InContainers,
    LooksAtValues,
    Masked,
    ReadsInside,
    ReadsNext,
    ReadsOfOthers,
    Recurrent,
    Rescales,
    SharesByDict,
    Skips,
    TwoNames,
    UNet,
    WithSlots,
    WithToken,
    Writes,
)
from .sampled import one_in
from .untouched import assert_untouched, look_of

pytestmark = pytest.mark.usefixtures("few_passes")

TOKENS = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))


def made(model: nn.Module) -> nn.Module:
    """Initialise the parameters with the same values each time."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def chain(found: Split, *args: Any, **kwargs: Any) -> Any:
    """Return the output of the stages, run in sequence."""
    result = found.stage(0)(*args, **kwargs)
    for index in range(1, found.num_stages):
        result = found.stage(index)(result, *args, **kwargs)
    return result


# Model, example arguments, arguments of another batch size, number of stages.
FAMILIES: dict[str, tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...], int]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), (batch(4, 8),), (batch(3, 8),), 3),
    "GPT": (lambda: GPT(layers=3), (TOKENS,), (TOKENS[:1, :9],), 3),
    "tied": (lambda: GPT(layers=2, is_tied=True), (TOKENS,), (TOKENS[:1],), 2),
    "UNet": (UNet, (batch(3, 8),), (batch(5, 8),), 3),
    "encoder": (encoder, (batch(2, 5, 16),), (batch(3, 4, 16),), 4),
    "encoder-decoder": (
        lambda: nn.Transformer(16, 2, 2, 1, 32, 0.0, batch_first=True),
        (batch(2, 5, 16), batch(2, 4, 16)),
        (batch(1, 3, 16), batch(1, 6, 16)),
        2,
    ),
    "token": (WithToken, (batch(2, 3, 8),), (batch(4, 5, 8),), 3),
    "norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
        (batch(6, 4),),
        (batch(5, 4),),
        3,
    ),
    "writes": (Writes, (batch(3, 8),), (batch(2, 8),), 3),
    "two names": (TwoNames, (batch(4, 8),), (batch(3, 8),), 3),
    "checkpointed": (Checkpointed, (batch(2, 8),), (batch(3, 8),), 3),
    "skips": (Skips, (batch(3, 8),), (batch(2, 8),), 5),
    "recurrent": (Recurrent, (TOKENS[:, :4] % 11,), (TOKENS[:1, :3] % 11,), 4),
    "reads inside": (ReadsInside, (batch(3, 8),), (batch(2, 8),), 4),
    "reads next": (ReadsNext, (batch(3, 8),), (batch(2, 8),), 2),
    "reads of others": (ReadsOfOthers, (batch(3, 8),), (batch(2, 8),), 4),
    "base's method": (BasesMethod, (batch(3, 8),), (batch(2, 8),), 3),
    "shares by dict": (SharesByDict, (batch(3, 8),), (batch(2, 8),), 2),
    "counts": (Counts, (batch(3, 8),), (batch(2, 8),), 2),
    "configured": (Configured, (batch(3, 8),), (batch(2, 8),), 2),
    "in containers": (InContainers, (batch(3, 8),), (batch(2, 8),), 2),
    "experts": (Experts, (batch(2, 6, 8),), (batch(1, 4, 8),), 3),
}


@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_stages_compute_what_the_whole_model_does(family: str) -> None:
    """Checked with a batch size that the split has not seen, then with the example's."""
    make, example, other, num_stages = FAMILIES[family]
    model = made(make())
    whole = copy.deepcopy(model)
    found = split(model, example, num_stages)
    assert_every_parameter_keeps_its_name_and_is_on_one_stage(found)
    for args in (other, example):
        result, expected = chain(found, *args), whole(*args)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        result.square().mean().backward()
        expected.square().mean().backward()
        for (name, parameter), (_, reference) in zip(model.named_parameters(), whole.named_parameters()):
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=0, msg=name)
        for (name, buffer), (_, reference) in zip(model.named_buffers(), whole.named_buffers()):
            torch.testing.assert_close(buffer, reference, rtol=0, atol=0, msg=name)
        model.zero_grad()
        whole.zero_grad()


def assert_every_parameter_keeps_its_name_and_is_on_one_stage(found: Split) -> None:
    model, stages = found.model, [found.stage(index) for index in range(found.num_stages)]
    own = dict(model.named_parameters(remove_duplicate=False))
    counts = {id(parameter): 0 for parameter in own.values()}
    for name, parameter in (each for stage in stages for each in stage.named_parameters()):
        assert parameter is own[name]
        counts[id(own[name])] += 1
    assert counts == {id(own[name]): len(found.shared.get(name, (0,))) for name, _ in model.named_parameters()}
    assert {key for stage in stages for key in stage.state_dict()} == set(model.state_dict())


def test_hooks_of_the_model_itself_run_on_what_it_is_called_with_and_on_what_it_gives() -> None:
    model, x = made(encoder()), batch(3, 4, 16)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: output * 2 + args[0])
    model.register_forward_hook(lambda module, args, kwargs, output: output.tanh(), with_kwargs=True, always_call=True)
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    whole, found = copy.deepcopy(model), split(model, x, 3)
    seen.clear()
    result = chain(found, x)
    assert seen == [(3, 4, 16)]
    torch.testing.assert_close(result, whole(x), rtol=0, atol=0)


def test_stages_have_what_a_layer_keeps_in_slots() -> None:
    model, x = made(WithSlots()), batch(3, 8)  # torch copies no slots, so there is no whole model to compare with
    torch.testing.assert_close(chain(split(model, x, 2), x), model(x), rtol=0, atol=0)


def test_hook_of_the_model_that_is_always_called_sees_a_failure() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), list[Any]()
    model.register_forward_hook(lambda module, args, output: seen.append(output), always_call=True)
    stage = split(model, batch(2, 4), 2).stage(0)
    seen.clear()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        stage(batch(2, 5))
    assert seen == [None]


@pytest.mark.parametrize("where", ["", "body"])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_no_cut_goes_through_a_module_with_a_backward_hook(where: str, kind: str) -> None:
    body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), body=body, last=nn.Linear(4, 4)))
    assert profile(model, batch(2, 4)).cuts == ("body", "body.1", "body.2", "body.3", "last")
    getattr(model.get_submodule(where), kind)(lambda module, *gradients: None)
    assert profile(model, batch(2, 4)).cuts == (("body", "last") if where else ())
    with pytest.raises(SpecError, match=f"at 'body.2': {where or 'the model'} has a hook on its backward pass"):
        split(model, batch(2, 4), at=["body.2"])


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("number", one_in(2, [-2, 2, 3]))
def test_what_hooks_collect_has_as_many_parts_as_in_the_whole_model(number: int, is_used: bool) -> None:
    """Also for a batch shape seen before, and whether or not the hooks existed when the model was cut."""
    model, x = made(Collecting(number)), batch(4, 8)
    expected = copy.deepcopy(model)(x)
    if is_used:
        model(x)
    cuts = [unit.cut for unit in profile(model, x).units if unit.cut is not None]
    assert {"layers.1", "layers.2"} <= {*cuts}
    for cut in cuts:
        found = split(model, x, at=[cut])
        first, second = found.stage(0), found.stage(1)
        for _ in range(2):
            torch.testing.assert_close(second(first(x), x), expected, rtol=0, atol=0, msg=cut)


def test_tied_parameters_are_named() -> None:
    found = split(GPT(is_tied=True), TOKENS, 3)
    assert found.shared == {"wte.weight": (0, 2)}
    assert "wte.weight" in dict(found.stage(0).named_parameters()) and "head.weight" not in found.stage(0).state_dict()
    assert "head.weight" in dict(found.stage(2).named_parameters()) and "wte.weight" not in found.stage(2).state_dict()
    assert not {"wte.weight", "head.weight"} & set(found.stage(1).state_dict())


def test_tied_parameter_that_is_read_from_outside_has_each_of_its_names() -> None:
    """The head reads its layer without calling it: zeros under one of the names would change the output."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(8, 4)
            self.bias = self.decoder.bias

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.decoder.weight.T + self.decoder.bias

    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Head()))
    found = split(model, batch(3, 8), 2)
    torch.testing.assert_close(chain(found, batch(3, 8)), model(batch(3, 8)), rtol=0, atol=0)


def test_masks_reach_every_stage() -> None:
    model, inputs = made(Masked()), {"x": batch(2, 8), "mask": torch.tensor([1.0, 0, 2, 3, 1, 1, 0, 1])}
    found = split(model, inputs, 3)
    torch.testing.assert_close(chain(found, **inputs), model(**inputs), rtol=0, atol=0)
    torch.testing.assert_close(chain(found, inputs["x"], mask=inputs["mask"]), model(**inputs), rtol=0, atol=0)


def test_model_that_looks_at_values_is_cut_before_it_does() -> None:
    model, args = made(LooksAtValues()).eval(), batch(3, 4)
    found = split(model, args, 2)
    assert found.cuts == ("norm",)
    for sign in (1, -1):
        torch.testing.assert_close(chain(found, sign * args), model(sign * args), rtol=0, atol=0)


@pytest.mark.parametrize("is_training", [True, False])
def test_model_that_rescales_its_weights_does_it_once(is_training: bool) -> None:
    model, x = made(Rescales()).train(is_training), batch(3, 8)
    whole, found = copy.deepcopy(model), split(model, x, at=["blocks.2"])
    assert not found.shared
    stages, boundaries = [found.stage(index) for index in range(2)], Boundaries(found)
    for mode in (True, False, True, False):
        boundaries.find((x,), {}, is_training=mode)
        assert boundaries.rewrites_parameters or is_training and mode
        for stage in stages:
            stage.train(mode)
            if boundaries.rewrites_parameters:
                stage.be_careful()
        torch.testing.assert_close(stages[1](stages[0](x), x), whole.train(mode)(x), rtol=0, atol=0)


def test_stage_that_has_to_run_again_counts_once() -> None:
    model, x = made(Counts()), batch(3, 8)
    stage = split(model, x, at=["second"]).stage(1)
    received = model.first(x).detach().requires_grad_()  # as a rank gets it: stages must not write into it
    result = stage(received, x)
    torch.testing.assert_close(result, model(x), rtol=0, atol=0)
    assert model.calls == 2, "once by the stage, once by the model"
    assert (stage.times, model.times, len(model.log)) == (1, 1, 2), "the list is the one of the model"


def test_refusal_says_what_hinders_a_block() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            kept = x = self.first(x)
            for block in self.blocks:
                x = block(x) + kept
            return x

    why = r"besides its input, float32 \(2, 4\) of first is still needed after it"
    with pytest.raises(SpecError, match=rf"cut into at most 2 \(cuts: blocks.0; not at blocks.1: {why}\): use fewer"):
        split(Remembers(), batch(2, 4), 3)


class _AddsLoss(torch.autograd.Function):
    """Returns a tensor unchanged and gives a loss its gradient, as mixtures of experts over stages do."""

    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class _Expert(nn.Linear):
    """Adds its loss to one list for all, keeps it, or attaches it to its output."""

    def __init__(self, way: str, losses: list[Tensor]) -> None:
        super().__init__(4, 4)
        self.way, self.losses = way, losses

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        loss = result.square().mean()
        if self.way == "in one list":
            self.losses.append(loss)
        elif self.way == "by each":
            self.loss = loss
        else:
            result = _AddsLoss.apply(result, loss)  # type: ignore[no-untyped-call]
        return result


class _Mixture(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.aux = way, list[Tensor]()
        self.layers = nn.ModuleList(_Expert(way, self.aux) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.aux.clear()
        for layer in self.layers:
            x = layer(x)
        losses = [layer.loss for layer in self.layers] if self.way == "by each" else self.aux
        return x + sum(losses)


@pytest.mark.parametrize("way, name", [("in one list", "aux"), ("by each", r"layers\.0\.loss")])
def test_losses_that_a_model_gathers_are_named_with_what_to_do(way: str, name: str) -> None:
    why = rf"float32 \(\) of layers\.0 is still needed after it, kept in {name}, but only one tensor is sent to the"
    with pytest.raises(SpecError, match=rf"not at layers\.1: .* {why} next stage: have each module add its part to"):
        split(_Mixture(way), batch(2, 4), 2)


def test_losses_that_are_put_into_what_layers_return_are_right_over_stages() -> None:
    model, x = made(_Mixture("returned")), batch(2, 4)
    whole = copy.deepcopy(model)
    for result in (chain(split(model, x, 2), x), whole(x)):
        result.sum().backward()
    expected, found = ([parameter.grad for parameter in each.parameters()] for each in (whole, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "model, why",
    [
        (nn.Linear(4, 4), "the model calls no module at which a stage could begin"),
        (nn.Sequential(nn.Linear(4, 4)), "not at 0: its input was not computed by the model"),
        (nn.Sequential(nn.Dropout(), nn.Linear(4, 4)), r"not at 1: "),
    ],
    ids=["layer", "one", "two"],
)
def test_refusal_says_why_there_is_no_cut_at_all(model: nn.Module, why: str) -> None:
    with pytest.raises(SpecError, match=rf"cut into at most 1 \(cuts: none; {why}.*\): keep it whole"):
        split(model.eval(), batch(2, 4), 2)


def test_containers_with_nothing_in_them_are_copied() -> None:
    model, x = made(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))), batch(2, 4)
    model.options, model.names = [None], {"act": None, "layers": (None, 2)}  # type: ignore[assignment]
    first, second = (split(model, x, 2).stage(index) for index in range(2))
    torch.testing.assert_close(second(first(x), x), model(x), rtol=0, atol=0)
    assert first.options == [None] and first.names == {"act": None, "layers": (None, 2)}


class _Keeps(nn.Module):
    """Keeps something from one call to the next, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.way, self.step, self.log = way, 0, list[Tensor]()
        self.memory: Tensor | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.way in ("from the end", "of a layer") and self.memory is not None:
            x = x + self.memory
        if self.way == "warm-up":
            x = x * min(1.0, (1 + self.step) / 3)
        if self.table is None:
            self.table = torch.ones(8)
        for number, layer in enumerate(self.layers):
            x = layer(x * self.table)
            if self.way == "of a layer" and number == 2:
                self.memory = x.detach()
            if self.way == "to the end" and number == 1:
                kept, self.memory = self.memory, x.detach()
        if self.way == "to the end" and kept is not None:
            x = x + kept
        if self.way == "from the end":
            self.memory = x.detach()
        if self.way == "captured":
            self.log.append(x)
            self.memory = x
        self.step += 1
        return x


@pytest.mark.parametrize(
    "way, name, cuts",
    [
        ("from the end", "memory", ()),
        ("of a layer", "memory", (3,)),
        ("warm-up", "step", ()),
        ("captured", "", (1, 2, 3)),
        ("none", "", (1, 2, 3)),
    ],
)
def test_what_a_model_keeps_for_its_next_call_is_in_one_stage(way: str, name: str, cuts: tuple[int, ...]) -> None:
    model = _Keeps(way)
    found = profile(model, batch(3, 8))
    assert found.cuts == tuple(f"layers.{number}" for number in cuts)
    if name:
        why = f"{name}, which the model keeps for its next call, is read before it and written after it"
        assert found.hindrances["layers.1"] == why
    assert (model.step, model.memory, model.table, model.log, type(model)) == (0, None, None, [], _Keeps)


class _Registered(nn.Module):
    """Registers each subclass once; its ``__init_subclass__`` requires a kind."""

    registry: ClassVar[dict[str, type[nn.Module]]] = {}

    def __init_subclass__(cls, *, kind: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind in cls.registry:
            raise ValueError(f"{kind} is there already")
        cls.registry[kind] = cls


class _Follows(_Registered, kind="follows"):
    """Reads between its layers what it noted in the previous call."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.keeps, self.before = keeps, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        before = self.before
        for layer in self.layers:
            x = layer(x).tanh()
        if self.keeps:
            x = x + before
            self.before = x.detach().mean()
        return x


def test_classes_made_of_the_users_are_not_shown_to_their_registry() -> None:
    model = _Follows(keeps=True)
    assert profile(model, batch(3, 8)).hindrances["layers.1"].startswith("before, which the model keeps for its next")
    found = split(_Follows(keeps=False), batch(3, 8), 2)
    torch.testing.assert_close(found.stage(1)(found.stage(0)(batch(3, 8)), batch(3, 8)), found.model(batch(3, 8)))
    assert tp_plan(_Follows(keeps=False), batch(3, 8)).checked == "proved"
    assert _Registered.registry == {"follows": _Follows, "abstract": _FollowsAbstract}


class _Abstract(abc.ABC, nn.Module):
    """A class with another base before nn.Module: its objects cannot be given a class derived from it."""


class _FollowsAbstract(_Abstract, _Follows, kind="abstract"):
    pass


@pytest.mark.parametrize("kind", [_FollowsAbstract, type("Plain", (abc.ABC, _Keeps), {})])
def test_what_is_kept_by_an_abstract_class_is_found(kind: Any) -> None:
    model = kind(keeps=True) if kind is _FollowsAbstract else kind("from the end")
    found = profile(nn.Sequential(model, nn.Linear(8, 8)), batch(3, 8))
    name = "0.before" if kind is _FollowsAbstract else "0.memory"
    assert found.hindrances["0.layers.1"].startswith(f"{name}, which the model keeps for its next call")


class _CountsAndWrites(nn.Module):
    """A stage of it finds during a run that it writes into its input, and runs again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.way, self.in_a_dict, self.in_an_object = way, {"calls": [0]}, types.SimpleNamespace(calls=0)
        self.numbers, self.in_an_object.numbers = iter(range(99)), map(abs, iter([5, 6, 7, 8, 9, 10]))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "dict":
            self.in_a_dict["calls"][0] += 1
        elif self.way == "iterators":
            self.in_a_dict["calls"] = [next(self.numbers) + next(self.in_an_object.numbers)]
        else:
            self.in_an_object.calls += 1
        for layer in self.layers:
            x = layer(x)
            x.add_(1)
        return x * (self.in_a_dict["calls"][0] + self.in_an_object.calls)


@pytest.mark.parametrize("way", ["dict", "object", "iterators"])
def test_stage_that_runs_again_counts_once(way: str) -> None:
    x, whole = batch(3, 8), _CountsAndWrites(way)
    stages = [split(copy.deepcopy(whole), x, 2).stage(index) for index in range(2)]  # of two ranks
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(stages[1](stages[0](x), x), whole(x))


class _InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize(
    "order, stage, name",
    [([3, 2, 1, 0], 1, "layers.1.weight"), ([0, 1, 2, 3], 1, "layers.3.weight"), ([0, 2, 1], 1, "layers.1.weight")],
)
def test_batch_that_has_layers_run_in_another_order_is_refused(order: list[int], stage: int, name: str) -> None:
    x = batch(3, 8)
    found = split(made(_InOrder()), {"x": x, "order": [0, 1, 2]}, at=["layers.2"])
    with pytest.raises(SpecError, match=f"with this batch, stage {stage} uses {name}, unlike with the example inputs"):
        Boundaries(found).find((x,), {"order": order}, is_training=True)
    with pytest.raises(SpecError, match=r"'layers\.\d' of another stage was called in this one: this batch"):
        chain(split(made(_InOrder()), {"x": x, "order": [0, 1, 2, 3]}, at=["layers.2"]), x, [1, 3, 2, 0])


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("shared", [nn.BatchNorm1d(4), _Counts()], ids=lambda module: type(module).__name__)
def test_what_a_layer_writes_in_every_run_is_in_one_stage(shared: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))
    found = profile(model, batch(3, 4))
    assert found.cuts == ("4",)
    assert re.match("the buffer 1.* is read before it and written after it", found.hindrances["2"])


def test_what_a_layer_writes_and_a_later_one_reads_is_in_one_stage() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), _Counts(), nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            counted: Tensor = self.layers[3](self.layers[:3](x) * self.layers[1].calls)
            return counted

    found = profile(Reads(), batch(3, 4))
    assert "layers.2" not in found.cuts
    assert found.hindrances["layers.2"] == "the buffer layers.1.calls is written before it and read after it"


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile reads it
@pytest.mark.parametrize("way", one_in(2, ["in place", "around"]))
def test_compiled_parts_are_compiled_in_their_stages(way: str) -> None:
    import torch._dynamo

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    parts = [Part() for _ in range(3)]
    for part in parts:
        if way == "in place":
            part.compile(backend=backend)
    around = (torch.compile(part, backend=backend) for part in parts)
    model = made(nn.Sequential(*(parts if way == "in place" else around)))
    torch._dynamo.reset()
    whole, found = copy.deepcopy(model), split(model, batch(3, 8), 3)
    assert found.cuts == ("1", "2")
    Boundaries(found).find((batch(2, 8),), {}, is_training=True)
    assert not graphs, "only looked at"
    result = chain(found, batch(3, 8))
    assert graphs
    expected = whole(batch(3, 8))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    result.sum().backward()
    expected.sum().backward()
    for (name, parameter), (_, reference) in zip(model.named_parameters(), whole.named_parameters()):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=0, msg=name)
    with pytest.raises(SpecError, match="it is part of a compiled module"):
        split(model, batch(3, 8), at=["1.down" if way == "in place" else "1._orig_mod.down"])


def test_stage_holds_nothing_of_the_others() -> None:
    model = GPT()
    found = split(model, TOKENS, 2)
    stage = found.stage(1)
    kept = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    own = {name for name, _ in stage.named_parameters()}
    del model, found
    gc.collect()
    assert {name for name, ref in kept.items() if ref() is not None} == own < set(kept)


def test_users_model_stays_as_it_was() -> None:
    model = made(GPT())
    before, modules = model(TOKENS), dict(model.named_modules())
    found = split(model, TOKENS, 3)
    stages = [found.stage(index).eval() for index in range(3)]
    assert dict(model.named_modules()) == modules and model.training and type(model) is GPT
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=0)
    assert all(isinstance(stage, GPT) and not stage.training for stage in stages)


@pytest.mark.parametrize("kind", [OrderedDict, lambda: defaultdict(int), Counter])
def test_methods_of_other_stages_write_into_nothing_of_the_users(kind: Callable[[], Any]) -> None:
    class Counts(nn.Linear):
        def count(self, rows: int) -> None:
            self.seen[rows] = self.seen.get(rows, 0) + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Counts(8, 8), nn.Linear(8, 8)
            self.a.seen = kind()

        def forward(self, x: Tensor) -> Tensor:
            self.a.count(len(x))
            result: Tensor = self.b(self.a(x))
            return result

    model, x = Outer(), batch(4, 8)
    split(model, x, at=["b"]).stage(1)(x, x)
    assert not model.a.seen


def test_stages_of_a_model_without_memory_are_without_it_too() -> None:
    with torch.device("meta"):
        model = GPT(width=4096, layers=8)
    stage = split(model, TOKENS, 4).stage(2)
    assert all(parameter.is_meta for parameter in stage.parameters())
    copied = copy.deepcopy(split(made(GPT()), TOKENS, 4).stage(2))
    hidden = copied(batch(2, 16, 32), TOKENS)
    assert hidden.shape == (2, 16, 32) and hidden.requires_grad


def test_boundary_is_contiguous_and_no_view() -> None:
    class Turned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self[1](self[0](x).transpose(0, 1))
            return result

    model = made(Turned(nn.Linear(4, 4), nn.Linear(4, 4)))
    found = split(model, batch(3, 2, 4), at=["1"])
    hidden = found.stage(0)(batch(3, 2, 4))
    assert hidden.is_contiguous() and not hidden._is_view() and hidden.shape == (2, 3, 4)
    torch.testing.assert_close(found.stage(1)(hidden, batch(3, 2, 4)), model(batch(3, 2, 4)), rtol=0, atol=0)


def test_encoder_with_padding_is_cut_in_its_middle() -> None:
    """In evaluation torch would otherwise use nested tensors from its first layer to its last."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).eval()
    call = {"src": torch.randn(2, 6, 16), "src_key_padding_mask": torch.arange(6)[None] >= torch.tensor([[4], [6]])}
    found = split(model, call, at=["layers.2"])
    with torch.no_grad():
        between = found.stage(0).eval()(**call)
        output = found.stage(1).eval()(between, **call)
    torch.testing.assert_close(output, model(**call).detach(), rtol=0, atol=0)


def test_cuts_are_chosen_by_name_by_number_or_by_nodes() -> None:
    model = GPT()
    assert split(model, TOKENS, at=["h.1", "head"]).cuts == ("h.1", "head")
    assert split(model, TOKENS, 2).cuts == ("h.2",)
    by_nodes = split(model, TOKENS, nodes=[StageNode("slow"), StageNode("quick", speed=5)])
    assert by_nodes.cuts == ("h.0",) and "quick" in str(by_nodes)
    assert str(split(model, TOKENS, at=["h.1"])) == "stage 0 begins at the start\nstage 1 begins at h.1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"at": ["h.9"]}, r"the model has no module 'h.9': did you mean 'h\.\d'\?"),
        (
            {"at": ["h.1.ln2"]},
            r"cannot be cut at 'h.1.ln2': it is part of a block with a connection around it, and blocks stay whole. "
            "It can be cut at: h.0, h.1, h.2, h.3, ln_f, head",
        ),
        ({"at": ["h.1.ln1"]}, r"at 'h.1.ln1': h.1 begins at the same place. It can be cut at: "),
        (
            {"at": ["h.1.fc2"]},
            r"at 'h.1.fc2': besides its input, float32 \(2, 16, 32\) of h.1 is still needed after it. It can",
        ),
        ({"at": ["wte"]}, r"at 'wte': it gets no float tensor. It can be cut at: "),
        ({"at": ["h.2", "h.1"]}, r"the order in which they run, each once: h.1, h.2"),
        ({"at": ["h.1", "h.1"]}, r"the order in which they run, each once: h.1"),
        ({"at": ["h.1"], "stages": 3}, r"3 stages need 2 cuts \(at=\), not 1"),
        ({"stages": 8}, r"the model can be cut into at most 7 \(cuts: h.0, "),
        ({}, r"none of stages, at and nodes was given"),
        ({"stages": 2, "nodes": [StageNode()]}, "2 stages, but 1 nodes: give one node for each stage"),
    ],
)
def test_what_cannot_be_is_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        split(GPT(), TOKENS, **arguments)


def test_parameters_that_the_example_did_not_need_are_with_their_module() -> None:
    model = Experts()
    found = split(model, batch(1, 1, 8), at=["blocks.1", "blocks.2"])
    for index in range(3):
        names = {name for name, _ in found.stage(index).named_parameters()}
        assert names == {name for name, _ in model.named_parameters() if name.startswith(f"blocks.{index}.")}


@pytest.mark.parametrize("at", ["b", "c"])
def test_functions_and_hooks_that_were_made_with_a_model_lead_to_its_stages(at: str) -> None:
    model, x = made(ByFunctions()), batch(3, 8)
    torch.testing.assert_close(chain(split(model, x, at=[at]), x), model(x), rtol=0, atol=0)


WAYS = {**{way: functools.partial(Held, way) for way in HOLDERS}, "objects and lists": AroundNames}
WAYS |= {f"hook, {way}": functools.partial(Hooked, way) for way in ("layer", "weight")}
WAYS |= {
    f"forward, {way}": functools.partial(Hooked, way) for way in ("method", "partial", "block", "partial of a method")
}


@pytest.mark.parametrize("way", one_in(4, WAYS))
def test_what_holds_layers_leads_to_those_of_the_stage(way: str) -> None:
    """For the user they still lead to the model's layers. Checked at every cut, with all gradients."""
    model, x = made(WAYS[way]()), batch(3, 8)
    expected = model(x)
    expected.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    before = look_of(model)
    cuts = profile(model, x).cuts
    assert "last" in cuts or "b" in cuts or {"1", "2", "3"} <= {*cuts}
    for cut in cuts:
        found = split(model, x, at=[cut])
        Boundaries(found).find((x,), {}, is_training=True)
        own = [{*map(id, found.stage(index).parameters())} for index in range(2)]
        result = chain(found, x)
        assert_untouched(model, before)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=cut)
        result.square().mean().backward()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, msg=cut)
        assert set.union(*own) == {*map(id, model.parameters())}
        model.zero_grad()


class OfItsClass(nn.Module):
    """Calls its last layer through a class attribute, which stages do not change."""

    held: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.held[:] = [self.b]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.held[0](self.a(x))
        return result


def test_layers_that_are_called_by_another_name_are_told() -> None:
    found = Split(OfItsClass(), profile(OfItsClass(), batch(2, 8)), (0, 1, 2))
    with pytest.raises(SpecError, match="the model returned without reaching 'b', where its next stage begins"):
        found.stage(0)(batch(2, 8))
    with pytest.raises(SpecError, match="stage input was never consumed: 'b' was not called through the module tree"):
        found.stage(1)(batch(2, 8), batch(2, 8))
    with pytest.raises(SpecError, match=r"does not call 'b', .*: if a class or a global holds it, call it as"):
        Boundaries(found).find((batch(2, 8),), {}, is_training=True)
    with pytest.raises(SpecError, match=r"into at most 1 .cuts: none; b: the model returned without reaching"):
        split(OfItsClass(), batch(2, 8), 2)


def test_forward_that_was_replaced_on_the_object_is_told() -> None:
    model = GPT()
    model.forward = types.MethodType(lambda self, tokens: 3 * GPT.forward(self, tokens), model)  # type: ignore[method-assign]
    with pytest.raises(SpecError, match=r"model\.forward was replaced on the object"):
        split(model, TOKENS, 2)


def test_stage_that_is_not_there_is_told() -> None:
    with pytest.raises(SpecError, match="stage 2 does not exist: there are 2 stages, counted from 0"):
        split(GPT(), TOKENS, 2).stage(2)


class Scaled(nn.Module):
    """Uses a parameter of its own on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_stage_trains_after_inference() -> None:
    """Zeros that stand in for other stages are kept, which is impossible for those made in inference mode."""
    model, x = Scaled().eval(), torch.randn(2, 4)
    stage = split(model, x, at=["layers.2"]).stage(1)
    with torch.inference_mode():
        stage(x.clone(), x)
    received = torch.randn(2, 4, requires_grad=True)
    stage(received, x).sum().backward()
    assert received.grad is not None


class Cutting(nn.Module):
    """Returns a number of columns that depends on ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[:, : 9 - self.number]
        return result


def test_what_stands_for_blocks_that_are_alike_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Stub._ask_ghost
    monkeypatch.setattr(
        Stub, "_ask_ghost", lambda self, args, kwargs: asked.append(self._name) or ask(self, args, kwargs)
    )
    last = split(GPT(layers=6), TOKENS, at=["h.5"]).stage(1)
    last(torch.zeros(*TOKENS.shape, 32), TOKENS)
    assert len([name for name in asked if name.startswith("h.")]) == 1


def test_what_stands_for_blocks_gives_shapes_by_their_numbers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(map(Cutting, range(5))), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            width = x.shape[1]
            result: Tensor = self.last(x)[:, : width - 1]
            return result

    found = split(Model(), batch(2, 9, 4), at=["last"])
    torch.testing.assert_close(
        found.stage(1)(found.stage(0)(batch(2, 9, 4)), batch(2, 9, 4)), found.model(batch(2, 9, 4))
    )
