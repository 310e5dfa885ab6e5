"""A model stays the same, bit for bit, when it is inspected: attributes, hooks, caches, random numbers, outputs."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detrain_nb import parallel as par
from detrain_nb.errors import SpecError

from . import forgetful
from .families import OF_TRANSFORMERS, draw, tokens
from .forgetful import FORGETFUL
from .untouched import assert_untouched, look_of

# The largest families run all calls in sequence.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("few_passes")]

THERE: Any = None  # a module, or a function of one, that a test puts into this file for a while
CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "profile": par.profile,
    "measure": lambda model, inputs: par.profile(model, inputs, measure=True),
    "stages": lambda model, inputs: [par.split(model, inputs, 2).stage(index) for index in (0, 1)],
    "tp_plan": par.tp_plan,
    "dry_run of pp": lambda model, inputs: par.dry_run(model, {"pp": 2}, example_inputs=inputs),
    "dry_run of tp": lambda model, inputs: par.dry_run(model, {"tp": 2, "dp_shard": 2}, example_inputs=inputs),
}
SLOW = pytest.mark.slow
QUICK: dict[str, Any] = dict.fromkeys(("hooks", "writes", "weakly", "caches by values"), ())
SIMILAR = ("containers by values", "hooks by values")  # to "caches by values"
# These calls raise, as the model cannot be cut or its code fails in stages and parts. It is still left alone.
FAIL = {
    "draws": ["stages", "dry_run of pp"],
    "replaces": ["dry_run of tp"],
    "writes": ["stages", "dry_run of pp", "dry_run of tp"],
}


# Models that have run before are slow or, like one that branches on values, quick. New ones are thorough.
@pytest.mark.parametrize(
    "kind, is_used",
    [
        pytest.param(kind, used, marks=pytest.mark.thorough if not used or kind in SIMILAR else QUICK.get(kind, SLOW))
        for kind in FORGETFUL
        for used in (False, True)
    ],
)
def test_model_that_writes_is_left_as_it_was(kind: str, is_used: bool) -> None:
    torch.manual_seed(0)
    model, inputs = FORGETFUL[kind](), draw(2, 8)
    if is_used:
        model(inputs.clone())
    assert [name for name in CALLS if not is_left_alone(name, model, inputs)] == FAIL.get(kind, [])


def is_left_alone(name: str, model: nn.Module, inputs: Any) -> bool:
    """Return whether the call ended without an error; the model must be unchanged in either case."""
    before, is_ended = look_of(model), False
    with contextlib.suppress(SpecError, RuntimeError, AssertionError):
        CALLS[name](model, inputs)
        is_ended = True
    try:
        assert_untouched(model, before)
    except AssertionError as exc:
        raise AssertionError(f"{name}: {exc}") from None
    return is_ended


def test_what_stands_for_another_stage_leaves_nothing_in_caches() -> None:
    """Stand-ins for another stage run on tensors without values, to find shapes."""
    forgetful.TABLES.clear()
    model, inputs = nn.Sequential(forgetful.Caches(), nn.Linear(8, 8)), draw(2, 8)
    stage = par.split(model, inputs, at=["1"]).stage(1)
    before = look_of(model)
    stage(draw(2, 8), inputs)
    assert_untouched(model, before)


class GrowsTable(forgetful.Body):
    """Resizes its table, which moves the storage, and branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.table.resize_(len(self.table) + 3, 8).zero_()
        if bool(x.isfinite().all()):
            self.table.add_(1)
        return self.go(x)


@pytest.mark.parametrize("name", CALLS)
def test_tensor_that_grows_has_its_size_and_values_again(name: str) -> None:
    model = GrowsTable()
    storage_bytes = model.table.untyped_storage().nbytes()
    CALLS[name](model, draw(2, 8))
    assert torch.equal(model.table, torch.ones(2, 8))
    assert model.table.untyped_storage().nbytes() == storage_bytes


class Counts(forgetful.Body):
    """Counts in a plain tensor, independently of its input, so the count is computed even in runs without values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.go(x)


@pytest.mark.parametrize("name", CALLS)
def test_plain_tensor_that_counts_has_its_values_again(name: str) -> None:
    model = Counts()
    CALLS[name](model, draw(2, 8))
    assert torch.equal(model.calls, torch.zeros(3))


class Lerps(forgetful.Body):
    """A closure writes into the model's buffer, also when a copy of the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", mean := torch.ones(8))

        def update(x: Tensor) -> Tensor:
            if self.training:
                mean.lerp_(x.detach().mean(0), 0.1)
            return x * mean

        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        return self.update(self.go(x))


@pytest.mark.parametrize("name", CALLS)
def test_buffer_that_a_function_writes_into_has_its_values_again(name: str) -> None:
    model = Lerps()
    with contextlib.suppress(SpecError):
        CALLS[name](model, draw(2, 8))
    assert torch.equal(model.mean, torch.ones(8))


class Tells(forgetful.Body):
    """Its last part writes into the model through a weak reference, also when that part runs alone."""

    class Part(nn.Module):
        def __init__(self, owner: nn.Module) -> None:
            super().__init__()
            self.up, self.down, self.owner = nn.Linear(8, 16), nn.Linear(16, 8), weakref.ref(owner)

        def forward(self, x: Tensor) -> Tensor:
            owner: Any = self.owner()
            owner.last, owner.calls = self.up(x).relu(), owner.calls + 1
            return x + self.down(owner.last)

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = torch.ones(8), 0
        self[2] = self.Part(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.go(x)


@pytest.mark.parametrize("name", CALLS)
def test_model_that_a_part_of_it_writes_into_is_left_as_it_was(name: str) -> None:
    model = Tells()
    before = look_of(model)
    with contextlib.suppress(SpecError):
        CALLS[name](model, draw(2, 8))
    assert_untouched(model, before)
    assert torch.equal(model.last, torch.ones(8)) and model.calls == 0


def test_classes_of_a_model_go_when_nobody_has_them() -> None:
    kept = _use_classes()
    gc.collect()
    assert [each() for each in kept] == [None, None]


def _use_classes() -> list[weakref.ref[type]]:
    class Slots:
        __slots__ = ("calls",)

    class Model(forgetful.Body):
        def __init__(self) -> None:
            super().__init__()
            self.slots: Any = Slots()

        def forward(self, x: Tensor) -> Tensor:
            self.slots.calls = 1
            return self.go(x)

    for name in ("profile", "measure", "stages", "tp_plan", "dry_run of pp"):
        CALLS[name](Model(), draw(2, 8))
    return [weakref.ref(Slots), weakref.ref(Model)]


class WritesView(forgetful.Body):
    """Writes a tensor with a gradient into a view, which torch cannot turn into a leaf again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.row = 0, torch.zeros(2, 8)[0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.go(x)
        self.row.mul_(0.9).add_(made.mean(0))
        return made


def test_what_cannot_be_put_back_is_told_and_all_else_is_put_back() -> None:
    model = WritesView()
    with pytest.raises(SpecError, match=r"could not be undone \(RuntimeError: Can't detach views"):
        par.profile(model, draw(2, 8))
    assert model.calls == 0


def test_generator_that_went_on_is_named() -> None:
    class Takes(forgetful.Body):
        def __init__(self) -> None:
            super().__init__()
            self.noise = (index for index in range(99))
            self.both = zip(range(99), (index for index in range(99)))
            self.unused = self.parameters()

        def forward(self, x: Tensor) -> Tensor:
            return self.go(x, next(self.noise) + next(self.both)[1])

    model = Takes()
    before = look_of(model)
    with pytest.warns(UserWarning, match="reads from a generator .*Takes.__init__.* and cannot be put back") as told:
        par.profile(model, draw(2, 8))
    assert len(told) == 2
    assert_untouched(model, before)


HELPERS = """
import functools, threading
import torch

@functools.lru_cache
def table_of(size):
    return torch.ones(size)

KEPT = {}

def add_kept(x):
    if len(x) not in KEPT:
        KEPT[len(x)] = torch.ones(x.shape[-1])
    return x + KEPT[len(x)] + table_of(x.shape[-1])

class Rope:
    def __init__(self):
        self.lock, self.cache, self.uses = threading.Lock(), {}, 0

    def add(self, x):
        with self.lock:
            self.uses += 1
            if len(x) not in self.cache:
                self.cache[len(x)] = torch.ones(x.shape[-1])
            return x + self.cache[len(x)]
"""


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a package other than the model's."""
    package, inner = types.ModuleType("helpful"), types.ModuleType("helpful.inner")
    vars(package)["inner"] = inner
    exec(HELPERS, vars(inner))
    for module in (package, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


@pytest.mark.parametrize("name", ["profile", "tp_plan", "dry_run of pp"])
@pytest.mark.parametrize("way", ["function", "module", "import", "lock"])
def test_helpers_of_another_package_keep_no_tensors_of_ours(
    name: str, way: str, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(forgetful.Body):
        def __init__(self) -> None:
            super().__init__()
            self.rope = helpers.inner.Rope()

        def forward(self, x: Tensor) -> Tensor:
            if way == "function":
                x = THERE(x)
            elif way == "module":
                x = THERE.inner.add_kept(x)
            elif way == "import":
                from helpful.inner import add_kept  # type: ignore[import-not-found]

                x = add_kept(x)
            else:
                x = self.rope.add(x)
            return self.go(x)

    there = {"function": helpers.inner.add_kept, "module": helpers}
    monkeypatch.setitem(globals(), "THERE", there.get(way))
    model, inputs = Model(), draw(2, 8)
    CALLS[name](model, inputs)
    assert type(model(inputs)) is Tensor
    kept = [*helpers.inner.KEPT.values(), *model.rope.cache.values(), helpers.inner.table_of(8)]
    assert [*map(type, kept)] == [Tensor, Tensor]


# ---- transformers

TEXT = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
PICTURE = {k: TEXT[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")}
PICTURE |= {"image_size": 16, "patch_size": 4}


def _read() -> dict[str, Any]:
    return {"input_ids": tokens(2, 8), "output_hidden_states": True}


def _see(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": draw(2, 3, size, size), "output_hidden_states": True}


QUICKER = ("BeitForImageClassification", "SegformerForSemanticSegmentation")  # both keep something between calls
# By class name: its sizes, and its inputs.
MORE: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "BertForMaskedLM": (TEXT, _read),
    "RobertaForMaskedLM": (TEXT, _read),
    "ElectraForPreTraining": ({**TEXT, "embedding_size": 32}, _read),
    "DebertaV2ForMaskedLM": ({**TEXT, "relative_attention": True, "pos_att_type": ["c2p"]}, _read),
    "DistilBertForMaskedLM": ({"vocab_size": 97, "dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2}, _read),
    "OPTForCausalLM": ({**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32}, _read),
    "BloomForCausalLM": ({"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _read),
    "MambaForCausalLM": ({**TEXT, "state_size": 4}, _read),
    "BeitForImageClassification": ({**PICTURE, "use_relative_position_bias": True}, _see),
    "Dinov2ForImageClassification": (PICTURE, _see),
    "SegformerForSemanticSegmentation": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
        | {"num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
        | {"decoder_hidden_size": 16},
        lambda: {"pixel_values": draw(2, 3, 32, 32)},
    ),
    "SwinForImageClassification": (
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        lambda: _see(32),
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICKER else pytest.mark.thorough)
        for name in (*MORE, *OF_TRANSFORMERS)
    ],
)
def test_models_of_transformers_are_left_as_they_were(name: str, transformers: Any) -> None:
    """A model that was inspected returns what an untouched one does, hidden states included."""
    model, other = (_of_transformers(name, transformers) for _ in range(2))
    inputs = MORE[name][1]() if name in MORE else {**OF_TRANSFORMERS[name][1](2, 8), "output_hidden_states": True}
    for call in ("profile", "stages") if name in QUICKER else CALLS:
        is_left_alone(call, model, inputs)
    with torch.no_grad():
        found, expected = model(**inputs), other(**inputs)
    assert list(found) == list(expected)
    assert "Segformer" in name or any("hidden_states" in key for key in found)  # T5 has two kinds
    found_tensors, expected_tensors = (dict(tensors_of(each)) for each in (found, expected))
    assert all(any(place.startswith(f"output[{key!r}]") for place in found_tensors) for key in found)
    torch.testing.assert_close(found_tensors, expected_tensors, rtol=0, atol=0)
    assert is_left_alone("profile", model, inputs)


def tensors_of(value: Any, place: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, with their paths: in containers and in attributes, as caches have them."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_of(each, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors_of(each, f"{place}[{index}]")
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for key, each in vars(value).items():
            yield from tensors_of(each, f"{place}.{key}")


def _of_transformers(name: str, transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    if name in OF_TRANSFORMERS:
        return OF_TRANSFORMERS[name][0](transformers, "sdpa", layers=2).eval()
    kind = getattr(transformers, name)
    made: nn.Module = kind(kind.config_class(**MORE[name][0])).eval()
    return made
