"""Model families cut into stages that run in sequence: outputs and all gradients equal the whole model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detrain_nb import Session
from detrain_nb.errors import SpecError
from detrain_nb.parallel import Split, profile, split
from detrain_nb.parallel.stages.boundaries import Boundaries

from .families import OF_TRANSFORMERS, bert, draw, gpt2, llama, padding, tokens
from .models import Experts, GivesMask, LooksAtMask, LooksInLeaf, WithToken, WritesPart
from .vision import ConvUNet, ResNet


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.square().mean()
    loss: Tensor = output.loss if output.loss is not None else output.logits.square().mean()
    return loss


def run(found: Split, inputs: dict[str, Any]) -> Any:
    result = found.stage(0)(**inputs)
    for index in range(1, found.num_stages):
        result = found.stage(index)(result, **inputs)
    return result


def assert_like_whole(model: nn.Module, found: Split, inputs: dict[str, Any]) -> None:
    """Compare loss, gradients and buffers of the stages with those of a copy of the model.

    The stages share the tensors of the model itself.
    """
    model.zero_grad()
    whole = copy.deepcopy(model)
    result, expected = run(found, inputs), whole(**inputs)
    assert type(result) is type(expected)
    if not isinstance(result, Tensor):
        assert list(result.keys()) == list(expected.keys())
        torch.testing.assert_close(result.logits, expected.logits, rtol=0, atol=0)
    loss, expected_loss = loss_of(result), loss_of(expected)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=0)
    loss.backward()  # type: ignore[no-untyped-call]
    expected_loss.backward()  # type: ignore[no-untyped-call]
    for (name, parameter), (_, reference) in zip(model.named_parameters(), whole.named_parameters()):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=0, msg=name)
    for (name, buffer), (_, reference) in zip(model.named_buffers(), whole.named_buffers()):
        torch.testing.assert_close(buffer, reference, rtol=0, atol=0, msg=name)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


# Model, example inputs, inputs of another size, the largest number of stages to try, required cuts.
Family = tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any], int, set[str]]
OF_TORCH: dict[str, Family] = {
    "ResNet": (ResNet, {"x": draw(4, 3, 32, 32)}, {"x": draw(2, 3, 40, 40)}, 3, {"layer2", "layer3.1", "fc"}),
    "U-Net": (ConvUNet, {"x": draw(2, 3, 16, 16)}, {"x": draw(3, 3, 8, 8)}, 3, {"out", "head"}),
    "gives a mask": (GivesMask, {"tokens": tokens(2, 5, 11) - 1}, {"tokens": tokens(3, 4, 11) - 1}, 3, {"middle"}),
    "writes a part": (WritesPart, {"x": draw(3, 8)}, {"x": draw(2, 8)}, 2, {"d"}),
    "looks at a mask": (
        LooksAtMask,
        {"tokens": tokens(2, 6, 11), "mask": padding(2, 6)},
        {"tokens": tokens(3, 5, 11), "mask": torch.ones(3, 5, dtype=torch.long)},
        4,
        {"body.1", "body.2", "pool", "head"},
    ),
    "looks in a leaf": (LooksInLeaf, {"x": draw(2, 3, 8)}, {"x": draw(3, 5, 8)}, 4, {"layers.1", "layers.2", "last"}),
    "experts": (Experts, {"x": draw(2, 6, 8)}, {"x": draw(1, 4, 8)}, 3, {"blocks.1", "blocks.2"}),
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in ("ResNet", "U-Net") else ()) for name in OF_TORCH]
)
def test_stages_compute_what_the_whole_model_does(family: str) -> None:
    """Checked with inputs of another size than the example, then with the example.

    What crosses a boundary is known beforehand.
    """
    make, example, other, most_stages, cuts = OF_TORCH[family]
    torch.manual_seed(0)
    model = make()
    known = profile(model, example)
    assert cuts <= set(known.cuts)
    for num_stages in range(2, most_stages + 1):
        found = split(copy.deepcopy(model), example, num_stages, profile_of_model=known)
        for inputs in (other, example):
            if num_stages == min(most_stages, 3):
                assert_boundaries_known(found, inputs)
            assert_like_whole(found.model, found, inputs)


def assert_boundaries_known(found: Split, inputs: dict[str, Any]) -> None:
    buffers = {name: buffer.clone() for name, buffer in found.model.named_buffers()}
    before = torch.get_rng_state()
    boundaries = Boundaries(found).find((), inputs, is_training=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in found.model.named_buffers())
    result = found.stage(0)(**inputs)
    for index, boundary in enumerate(boundaries, 1):
        assert boundary.is_meta and boundary.requires_grad
        assert (boundary.shape, boundary.dtype) == (result.shape, result.dtype)
        result = found.stage(index)(result, **inputs)
    assert len(boundaries) == found.num_stages - 1


def test_statistics_are_of_the_batches_and_not_of_the_search_for_shapes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), Experts(), nn.Linear(8, 8))
    assert_boundaries_known(split(model, {"input": draw(2, 6, 8)}, at=["1.blocks.1", "2"]), {"input": draw(3, 6, 8)})


def test_stage_follows_to_another_device() -> None:
    """The device is "meta", which every machine has.

    Stand-ins for other stages must move too, or torch mixes devices.
    """
    model, inputs = WithToken(), draw(2, 3, 8)
    found = split(model, inputs, 3)
    for index in (1, 2):
        stage = found.stage(index)
        stage(torch.zeros(2, 4, 8), inputs)
        copied = copy.deepcopy(stage).to("meta")
        assert copied(torch.zeros(2, 4, 8, device="meta"), inputs.to("meta")).is_meta
        stand_ins = [value for module in copied.modules() for value in vars(module).values() if type(value) is Tensor]
        assert stand_ins and all(value.is_meta for value in stand_ins)
        assert not stage(torch.zeros(2, 4, 8), inputs).is_meta


def test_what_zeros_cannot_stand_for_is_told() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.table(tokens)
            return x * (1 // round(float(x.detach().abs().max()) + 1 - 0.6))

    model = nn.Sequential(Divides(), nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.ones_(model[0].table.weight)
    with pytest.raises(SpecError, match=r"zeros cannot stand in for '0' of another stage: .* fails on zeros \("):
        split(model, tokens(2, 3, 11), at=["2"])


# ---- transformers


@pytest.fixture(scope="module")
def transformers() -> Any:
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


# "eager" is no default: with it only Llama is slow, the others are thorough. So is Qwen3, which is built like Llama.
WITH_ATTENTION = [
    pytest.param(
        family,
        attention,
        marks=pytest.mark.slow
        if family == "Llama" or (attention == "sdpa" and family != "Qwen3")
        else pytest.mark.thorough,
    )
    for family in OF_TRANSFORMERS
    for attention in ("eager", "sdpa")
]


@pytest.mark.parametrize("family, attention", WITH_ATTENTION)
def test_models_of_transformers_compute_what_the_whole_does(family: str, attention: str, transformers: Any) -> None:
    make, inputs, tied, cut = OF_TRANSFORMERS[family]
    torch.manual_seed(0)
    model, example = make(transformers, attention), inputs(2, 8)
    known = profile(model, example)
    assert cut in known.cuts
    for num_stages in (2, min(len(known.units), 7)):
        found = split(copy.deepcopy(model), example, num_stages, profile_of_model=known)
        assert tied is None or found.shared[tied] == (0, num_stages - 1)
        assert_like_whole(found.model, found, example)
        assert_like_whole(found.model, found, inputs(3, 6))
    assert_boundaries_known(found, inputs(3, 6))


@pytest.mark.slow
def test_model_output_is_one_of_the_whole_models_kind(transformers: Any) -> None:
    model, inputs = llama(transformers, "sdpa"), {"input_ids": tokens(2, 8)}
    found = split(model, inputs, 2)
    result = run(found, inputs)
    assert type(result).__name__ == "CausalLMOutputWithPast" and result.loss is None
    torch.testing.assert_close(result.logits, model(**inputs).logits, rtol=0, atol=0)


@pytest.mark.slow
def test_what_stays_alive_to_the_end_leaves_no_cut_behind_it(transformers: Any) -> None:
    model, inputs = gpt2(transformers, "sdpa"), {"input_ids": tokens(2, 8), "output_hidden_states": True}
    why = r"\(cuts: transformer.drop, transformer.h.0; not at transformer.h.1: besides its input, .* of "
    with pytest.raises(SpecError, match=rf"the model can be cut into at most 3 {why}"):
        split(model, inputs, 4)  # after it each layer's output is part of the model's
    found = split(model, inputs, 3)
    with torch.no_grad():
        result, expected = run(found, inputs), model(**inputs)
    torch.testing.assert_close(result.logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(result.hidden_states, expected.hidden_states, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [-2, 3])
def test_hidden_states_are_those_of_the_whole_model(number: int, transformers: Any) -> None:
    """transformers collects them with hooks, which the first call that requests hidden states installs."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = bert(transformers, "sdpa").bert, nn.Linear(32, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            result: Tensor = self.head(self.bert(input_ids, output_hidden_states=True).hidden_states[number])
            return result

    torch.manual_seed(0)
    model, inputs = Reads().eval(), {"input_ids": tokens(2, 8)}
    expected = copy.deepcopy(model)(**inputs)
    known = profile(model, inputs)
    for cut in ("bert.encoder.layer.1", "bert.encoder.layer.2", "head"):
        found = split(model, inputs, at=[cut], profile_of_model=known)
        for _ in range(2):
            torch.testing.assert_close(run(found, inputs), expected, rtol=0, atol=0, msg=cut)


@pytest.fixture(scope="module")
def session(transformers: Any, two_ranks: Session) -> Session:
    two_ranks.run_cell("import families", timeout_s=60)
    return two_ranks


@pytest.mark.parametrize(
    "family", [pytest.param("Mixtral", marks=pytest.mark.thorough), pytest.param("Bert", marks=pytest.mark.slow)]
)
def test_models_of_transformers_train_on_ranks_as_the_whole_does(family: str, session: Session) -> None:
    code = f"families.train_on_ranks({family!r}, schedule='1F1B', num_stages=2)"
    first, last = (found for _, found in sorted(session.run_cell(code, timeout_s=50).values.items()))
    assert (first["stages"], last["stages"]) == ((0,), (1,))
    assert first["gradients"] < 1e-6 and last["gradients"] < 1e-6 and last["losses"] < 1e-6, "1.7e-7 was measured"
    assert first["output"] is None and last["output"].startswith(("CausalLMOutput", "MoeCausal", "MaskedLM"))


def test_attributes_that_a_forward_writes_are_not_of_the_profile() -> None:
    class Remembers(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
            self.table: Tensor | None = None
            self.seen = list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(4)
            self.seen.append(x)
            result: Tensor = super().forward(x * self.table)
            return result

    model = Remembers()
    profile(model, draw(2, 4), measure=True)
    assert model.table is None and not model.seen
