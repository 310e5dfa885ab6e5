"""A model made without memory gets the same values, wherever it is laid out, as one made on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detrain_nb import Session
from detrain_nb.errors import RankError, SpecError
from detrain_nb.parallel import deferred, dry_run, materialize
from detrain_nb.parallel.parallelize import plan_for

from .families import OF_TRANSFORMERS
from .models import GPT
from .vision import ResNet

SEED = 7


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and other tensor attributes, under all of their names."""
    return {
        f"{prefix}.{key}": tensor
        for prefix, module in model.named_modules()
        for tensors in (module._parameters, module._buffers, vars(module))
        for key, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


def assert_as_usual(make: Callable[[], nn.Module]) -> None:
    """Check every tensor, which of them are tied, and the state of the random generator."""
    torch.manual_seed(SEED)
    usual, state = make(), torch.get_rng_state()
    torch.manual_seed(SEED)
    model = deferred(make)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.is_meta for tensor in tensors_of(model).values())
    assert materialize(model, device="cpu") is model
    assert torch.equal(torch.get_rng_state(), state), "materialize draws nothing of its own"
    expected, found = tensors_of(usual), tensors_of(model)
    assert list(found) == list(expected) and list(model.state_dict()) == list(usual.state_dict())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True, check_stride=True, msg=name)
        assert type(tensor) is type(expected[name]), name
        assert tensor.requires_grad == expected[name].requires_grad, name
        for other in found:
            assert (tensor is found[other]) == (expected[name] is expected[other]), (name, other)


def _negate(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.neg_()


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "register_hook": lambda gradient: 5 * gradient,
    "register_post_accumulate_grad_hook": _negate,
}


class Hooked(nn.Module):
    """Has hooks on tensors with gradients: two that are no parameters, and a parameter if ``has_parameter``."""

    def __init__(self, kind: str, *, has_parameter: bool) -> None:
        super().__init__()
        self.plain = torch.ones(3, requires_grad=True)
        self.register_buffer("buffer", torch.ones(3).requires_grad_())
        self.weight = nn.Parameter(torch.ones(3)) if has_parameter else None
        for tensor in self.tensors():
            getattr(tensor, kind)(HOOKS[kind])

    def tensors(self) -> list[Tensor]:
        found = (self.plain, self.get_buffer("buffer"), self.weight)
        return [tensor for tensor in found if tensor is not None]

    def forward(self, x: Tensor) -> Tensor:
        for tensor in self.tensors():
            x = x * tensor
        return x


@pytest.mark.parametrize("has_parameter", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_gradients_and_hooks_of_tensors_are_those_of_the_usual_model(kind: str, has_parameter: bool) -> None:
    usual = Hooked(kind, has_parameter=has_parameter)
    late = materialize(deferred(Hooked, kind, has_parameter=has_parameter), device="cpu")
    for model in (usual, late):
        model(torch.arange(3.0)).sum().backward()
    expected, found = ([tensor.grad for tensor in model.tensors()] for model in (usual, late))
    assert not any(gradient is None for gradient in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Initialized(nn.Module):
    """Initialises parameters in the ways that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=2)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(8), nn.LSTM(4, 6, 2))
        self.head = nn.Linear(8, 11, bias=False)
        self.truncated, self.orthogonal = nn.Parameter(torch.empty(40, 8)), nn.Parameter(torch.empty(8, 5))
        nn.init.trunc_normal_(self.truncated, std=1.5)
        nn.init.orthogonal_(self.orthogonal)
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)
        self.half = nn.Linear(6, 6).to(torch.bfloat16)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 6), 0.5))
        self.apply(self.initialize)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.body[0].weight[1] = 0  # type: ignore[index]
        self.body[0].bias.data = torch.randn(8) * 2
        nn.utils.parametrizations.spectral_norm(self.body[0])

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(6, 6, dtype=torch.bool)), persistent=False)
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("positions", torch.arange(7).expand(1, -1))
        self.register_buffer("constant", torch.tensor([1.0, 2, 3]))
        self.register_buffer("of_numpy", torch.from_numpy(np.arange(5.0)) * 2)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.rand(3)))
        self.attribute = torch.linspace(0, 1, 5)


class Drawn(nn.Module):
    """Draws random numbers of all kinds, also from other generators."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Parameter(torch.randn(33, generator=own)), nn.Buffer(torch.empty(5))
        self.second.uniform_(generator=own)
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.apart = nn.Parameter(torch.randn(20))
        self.order, self.like = nn.Buffer(torch.randperm(9)), nn.Buffer(torch.rand_like(self.first))
        self.chosen = nn.Buffer(torch.multinomial(torch.rand(7), 3))
        self.coins = nn.Buffer(torch.bernoulli(torch.rand(5)))


class Looks(nn.Module):
    """Reads values in its constructor, also random ones: sizes and branches depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.weight = nn.Parameter(torch.randn(5, 5))
        while torch.linalg.det(self.weight) > -1:
            nn.init.normal_(self.weight)
        self.above = nn.Buffer((self.weight > 0).nonzero())
        self.width = nn.Linear(int(torch.randint(3, 9, ())), 2)


def under_bfloat16() -> nn.Module:
    """Make a model under a default dtype that no longer applies when its values are computed."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Linear(30, 20)
        model.register_buffer("thirds", torch.arange(5) / 3)
        return model
    finally:
        torch.set_default_dtype(torch.float32)


PRETRAINED = torch.arange(12.0).view(3, 4)


def of_values_from_outside() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    model[0].weight.data.copy_(PRETRAINED)
    model[1].register_buffer("doubled", PRETRAINED * 2)
    return model


def of_a_first_pass() -> nn.Module:
    """Return a model with the statistics of a batch, as in data-dependent initialisation."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True))
    model(torch.randn(5, 3, 9) * 3 + 1)
    return model.eval()


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "initialized": Initialized,
    "buffers": Buffers,
    "drawn": Drawn,
    "looks": Looks,
    "bfloat16": under_bfloat16,
    "outside": of_values_from_outside,
    "first pass": of_a_first_pass,
    "ResNet": ResNet,
    "GPT": lambda: GPT(is_tied=True),
    "copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_values_are_those_of_one_cpu(kind: str) -> None:
    assert_as_usual(PLAIN[kind])


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert_as_usual(lambda: OF_TRANSFORMERS[family][0](transformers, "sdpa"))


def test_another_seed_is_another_model() -> None:
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(materialize(deferred(nn.Linear, 4, 4), device="cpu"))
    assert not torch.equal(models[0].weight, models[1].weight)


def test_dtype_and_freezing_behind_it_are_kept() -> None:
    torch.manual_seed(SEED)
    usual = GPT().to(torch.bfloat16)
    torch.manual_seed(SEED)
    model = deferred(GPT).to(torch.bfloat16).requires_grad_(False)
    materialize(model, device="cpu")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, usual.state_dict()[name]) and tensor.dtype is torch.bfloat16


def test_dry_run_leaves_it_without_memory() -> None:
    model = deferred(GPT)
    dry_run(model, {"dp_shard": 2}, example_inputs=torch.zeros(2, 16, dtype=torch.long))
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, device="cpu")


class OfNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(torch.eye(3).numpy() * 2))


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(3)]


def test_what_cannot_be_deferred_is_told() -> None:
    with pytest.raises(SpecError, match=r"OfNumpy needs tensors with memory, .* without numpy"):
        deferred(OfNumpy)
    with pytest.raises(SpecError, match="the model has tensors in a list or a dict"):
        deferred(InAList)
    with pytest.raises(SpecError, match="LazyLinear needs tensors with memory"):
        deferred(nn.LazyLinear, 4)
    with pytest.raises(SpecError, match="returned int"):
        deferred(lambda: 3)  # type: ignore[arg-type, return-value]
    with torch.device("meta"), pytest.raises(SpecError, match="deferred supports dense tensors on the CPU only"):
        deferred(nn.Linear, 4, 4)


def test_errors_of_the_constructor_are_its_own() -> None:
    def fail() -> nn.Module:
        raise RuntimeError("of the model's own")

    with pytest.raises(RuntimeError, match="of the model's own"):
        deferred(fail)


class ReadsItsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.scale[self.scale.tolist().index(1.0)]
        return result


def test_model_whose_code_fails_on_zeros_is_told_what_to_do() -> None:
    """Whatever the error is, the example inputs are not blamed."""
    with pytest.raises(SpecError, match=r"fails with zeros as parameters .* pass it as tp="):
        plan_for(
            deferred(ReadsItsWeights), torch.ones(2, 4), "auto", {"tp": 2}, sequence_parallel=False, loss_parallel=False
        )


def test_plan_is_that_of_a_model_with_values() -> None:
    """The model branches on a mask and has fused layers. Experts in one tensor cannot run on zeros without memory."""
    transformers = pytest.importorskip("transformers")
    tokens = {"input_ids": torch.ones(2, 8, dtype=torch.long), "use_cache": False}
    options: Any = {"sequence_parallel": False, "loss_parallel": False}
    make, *_ = OF_TRANSFORMERS["GPT-2"]
    plans = [
        plan_for(model, tokens, "auto", {"tp": 2}, **options)
        for model in (make(transformers, "sdpa", 2), deferred(make, transformers, "sdpa", 2))
    ]
    assert plans[0] is not None and plans[0].packed and str(plans[0]) == str(plans[1])
    with pytest.raises(SpecError, match=r"fails with zeros as parameters .* pass it as tp="):
        model = deferred(OF_TRANSFORMERS["Mixtral"][0], transformers, "sdpa", 1)
        plan_for(model, tokens, "auto", {"tp": 2}, **options)


def test_changes_behind_it_are_told() -> None:
    written = deferred(GPT)
    nn.init.zeros_(written.head.weight)
    with pytest.raises(SpecError, match=r"'head.weight' was changed after deferred\(\)"):
        materialize(written, device="cpu")
    tied = deferred(GPT)
    tied.head.weight = tied.wte.weight
    with pytest.raises(SpecError, match=r"'head.weight' was tied to 'wte.weight' after deferred\(\)"):
        materialize(tied, device="cpu")
    replaced = deferred(GPT)
    replaced.extra = nn.Linear(3, 3, device="meta")
    with pytest.raises(SpecError, match=r"'extra.weight' is on the meta device and has no values to get"):
        materialize(replaced, device="cpu")


# ---- on ranks


@pytest.fixture(scope="module")
def two_ranks(two_ranks: Session) -> Session:
    two_ranks.run_cell("import deferred_ranks", timeout_s=60)
    return two_ranks


@pytest.fixture(scope="module")
def four_ranks(four_ranks: Session) -> Session:
    four_ranks.run_cell("import deferred_ranks", timeout_s=60)
    return four_ranks


def require_the_same(session: Session, axes: dict[str, int], **options: Any) -> None:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    for rank, found in session.run_cell(f"deferred_ranks.apart({axes}{given})", timeout_s=90).values.items():
        assert found["different"] == [], rank
        assert found["losses"]["deferred"] == found["losses"]["usual"], rank
        assert found["parameters"] >= 10 and (found["buffers"] or options.get("family") == "GPT-2")
        assert "tp" not in axes or found["packed"] or "family" not in options


@pytest.mark.parametrize(
    "axes, options",
    [
        ({"dp_shard": 2}, {}),
        pytest.param({"dp_shard": 2}, {"other_seed": True}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"other_seed": True, "schedule": "ZBVZeroBubble"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"family": "GPT-2"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"family": "Llama"}, marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_have_their_parts(two_ranks: Session, axes: dict[str, int], options: dict[str, Any]) -> None:
    """The models have a tied head, a fused layer and buffers; with ``other_seed`` all ranks get rank 0's values."""
    require_the_same(two_ranks, axes, **options)


@pytest.mark.parametrize(
    "axes, options",
    [
        pytest.param({"dp_shard": 4}, {}, marks=pytest.mark.thorough),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, {"family": "GPT-2"}, marks=pytest.mark.thorough),
        pytest.param({"pp": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, {"schedule": "Interleaved1F1B"}, marks=pytest.mark.slow),
    ],
)
def test_four_ranks_have_their_parts(four_ranks: Session, axes: dict[str, int], options: dict[str, Any]) -> None:
    require_the_same(four_ranks, axes, **options)


@pytest.mark.slow
def test_no_rank_holds_the_model(four_new_ranks: Session) -> None:
    """A rank holds its quarter, and a few tensors of 4% each."""
    four_new_ranks.run_cell("import deferred_ranks", timeout_s=60)
    for grown, whole in four_new_ranks.run_cell("deferred_ranks.peak_growth()", timeout_s=90).values.values():
        assert whole > 400e6 and grown < whole / 2


def test_rank_that_makes_it_otherwise_is_named(two_ranks: Session) -> None:
    scaled, scaled_by = "deferred_ranks.Scaled()", "deferred_ranks.par.deferred(deferred_ranks.Scaled, {})"
    for make in (scaled_by.format("rank + 1"), f"{scaled_by.format(1)} if rank else {scaled}"):
        with pytest.raises(RankError, match="the model on rank 1 differs") as caught:
            two_ranks.run_cell(f"deferred_ranks.lay_out(lambda: {make}, dp_shard=2)", timeout_s=30)
        assert "operations" in str(caught.value) or "parts" in str(caught.value)
