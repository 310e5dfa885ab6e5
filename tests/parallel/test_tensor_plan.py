"""Plans, made in one process: what is cut, what is not cut and why, how plans are read and edited."""

from __future__ import annotations

import copy
import dataclasses
import functools
import html
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from detrain_nb.errors import SpecError
from detrain_nb.parallel.tensor import copies, planner, proof
from detrain_nb.parallel.tensor.layout import lay_out
from detrain_nb.parallel.tensor.plan import ByHead, Layout, Pair, TensorPlan
from detrain_nb.parallel.tensor.planner import tp_plan
from detrain_nb.parallel.tensor.proof import find_fault, keep_call
from detrain_nb.parallel.tensor.proposals import known_modules
from detrain_nb.parallel.tensor.shapes import _NoRanks

from .models import GPT
from .tensor_models import MODELS, Attention, Llama, draw, made, tokens

_DIFFERS = r"output differs from the unsplit module \(error \de[+-]\d\d, tolerance 1e-06\)"


@functools.cache
def _planned(**sizes: Any) -> TensorPlan:
    return tp_plan(Llama(**sizes), tokens())


def planned(**sizes: Any) -> TensorPlan:
    """Return the plan of a small language model, to be edited."""
    return copy.deepcopy(_planned(**sizes))


def call_of(*args: Tensor) -> Any:
    return keep_call(args, {}, lambda tensor: tensor.is_floating_point())


def test_layers_of_a_language_model_are_cut() -> None:
    plan = planned()
    attention, gated = plan.pairs[:2]
    assert attention.columns == tuple(f"layers.0.attention.w{key}" for key in "qkv")
    assert attention.row == "layers.0.attention.wo"
    assert {(key, value) for _, key, value in attention.attributes} == {("n_heads", 2), ("n_kv_heads", 1)}
    assert attention.summed == ("layers.0.attention.q_norm", "layers.0.attention.k_norm")
    assert gated == Pair(("layers.0.mlp.gate", "layers.0.mlp.up"), "layers.0.mlp.down")
    assert plan.alone == {"embed": "embedding", "head": "colwise"}
    assert len(plan.pairs) == 4 and plan.checked == "proved"


class Placed(nn.Module):
    """Its table of positions is a plain attribute that stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.body = torch.ones(16, 32, device="cpu"), Llama(layers=1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body.head(self.body.layers[0](self.body.embed(ids) + self.places[: ids.shape[1]]))


def test_a_model_on_the_meta_device_that_keeps_tensors_beside_its_buffers_is_planned() -> None:
    with torch.device("meta"):
        model = Placed()
    plan = tp_plan(model, tokens())
    assert len(plan.pairs) == 2 and plan.checked == "proved" and not model.places.is_meta


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"sequence_parallel": True, "loss_parallel": True}], ids=str
)
def test_what_is_too_large_to_be_given_values_is_proved_in_shapes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = Llama()
    proved = tp_plan(model, tokens(), **options)
    monkeypatch.setattr(proof, "_MOST_MADE_UP", 0)
    shaped = tp_plan(model, tokens(), **options)
    assert (shaped.pairs, shaped.alone, shaped.sequence) == (proved.pairs, proved.alone, proved.sequence)
    assert proved.checked == "proved" and "the shapes were proved" in str(shaped)


def test_what_is_too_large_and_runs_with_values_alone_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(hidden * float(hidden.sum()))

    model, x = Looking().to("meta"), torch.empty(2, 8, device="meta")
    monkeypatch.setattr(proof, "_MOST_MADE_UP", 0)
    plan = TensorPlan(2, known_modules(model), [Pair(("up",), "down")])
    fault = find_fault(model, plan, call_of(x))
    assert fault is not None and "does not run without values" in fault


def test_block_that_reads_a_parameter_of_another_is_whole_in_a_model_too_large_to_prove(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof of a block does not cover the gradient of another block's parameter. It does cover an argument."""

    class Block(nn.Module):
        def __init__(self, owner: Any) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.owner = lambda: owner

        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            hidden = self.up(x) * self.owner().scale if shift is None else self.up(x + shift)
            result: Tensor = x + self.down(hidden.relu())
            return result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(8))
            self.leading, self.given = Block(self), Block(None)

        def forward(self, x: Tensor) -> Any:
            return self.given(self.leading(x), self.shift)

    monkeypatch.setattr(planner, "_PROVED_WHOLE_NUMEL", 0)
    plan = tp_plan(Model(), draw(2, 8))
    assert plan.roles == {"given.up": "colwise", "given.down": "rowwise"}
    assert plan.reasons["leading.up"].startswith("its code reads scale of another module, and the whole model")


def test_fused_layers_are_cut_in_what_is_packed_into_them() -> None:
    plan = planned(is_fused=True)
    assert [pair.packed for pair in plan.pairs] == [3, 2, 3, 2]
    assert {(key, value) for _, key, value in plan.pairs[0].attributes} == {("n_head", 2), ("width", 16)}


def test_planning_leaves_the_model_and_the_users_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8)).train()
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tp_plan(model, draw(4, 8))
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model] == [True, False, True, True]
    assert type(model[0]) is nn.Linear and not model[0]._forward_hooks and not model[0]._forward_pre_hooks


@pytest.mark.parametrize("is_training", [True, False])
def test_layers_around_statistics_are_proved_as_the_model_trains(is_training: bool) -> None:
    """Statistics over part of the features differ from those over all; in evaluation they are constants."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(16, 6)).train(is_training)
    pairs = tp_plan(model, draw(4, 8, 8)).pairs
    assert [pair.names for pair in pairs] == ([] if is_training else [("0", "3")])


class Squash(nn.Tanh):
    """An activation that all models of a file share."""


SQUASH = Squash()


def test_module_that_other_models_have_too_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 16), SQUASH, nn.Linear(16, 6))
    lay_out(model, tp_plan(model, draw(4, 8)), _NoRanks(2), lambda parameter, _: parameter)
    assert type(SQUASH) is Squash and type(model[1]) is not Squash and isinstance(model[1], Squash)


def test_planning_leaves_torchs_fused_layers_on() -> None:
    """The ranks of a proof are threads, which switch the fast path off together."""
    assert torch.backends.mha.get_fastpath_enabled()
    for tp in (2, 4, 2, 4):
        tp_plan(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), draw(2, 8), tp=tp)
        assert torch.backends.mha.get_fastpath_enabled()


def test_model_that_keeps_what_it_computed_is_proved_too() -> None:
    class Keeps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.given = super().forward(x)
            return self.given

    model = Keeps(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    model(draw(4, 8))
    assert not model.given.is_leaf and len(tp_plan(model, draw(4, 8)).pairs) == 1


def test_layers_between_which_a_value_is_looked_at_stay_whole() -> None:
    class Halts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            if (hidden.detach().norm() > 1e3).any():  # neither for this input nor for a part of it
                hidden = hidden * 2
            result: Tensor = self.down(hidden)
            return result

    plan = tp_plan(Halts(), draw(4, 8))
    assert not plan.pairs and "reads a value" in plan.reasons["up"]


def test_model_without_memory_is_planned() -> None:
    with torch.device("meta"):
        model = Llama()
    assert tp_plan(model, tokens()).roles == planned().roles


def test_heads_that_do_not_divide_are_told() -> None:
    model = Llama(heads=9, kv_heads=9, width=36, layers=1)
    plan = tp_plan(model, tokens())
    assert plan.reasons["layers.0.attention.wq"] == "9 heads (n_heads) are not divisible by tp=2"
    assert "layers.0.mlp.down" in plan.roles
    with pytest.raises(
        SpecError, match=r"'layers.0.attention' cannot be cut over tp=2 ranks: 9 heads \(n_heads\) are not"
    ):
        tp_plan(model, tokens(), require=["layers.0.attention"])
    assert tp_plan(model, tokens(), tp=3, require=["layers.0.attention"]).roles["layers.0.attention.wo"] == "rowwise"


def test_width_that_is_taken_from_the_input_is_refused() -> None:
    """GPT's attention reshapes the output of its heads to the width of its input."""
    plan = tp_plan(GPT(layers=1), tokens())
    assert plan.reasons["h.0.qkv"].startswith("not proved: RuntimeError: shape '[4, 16, 32]' is invalid")
    assert [pair.names for pair in plan.pairs] == [("h.0.fc1", "h.0.fc2")]


class GivesWeights(nn.Module):
    """Attention that also returns its weights, which the model reads (``is_read``) or not."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.attention, self.is_read = WithWeights(), is_read

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor
        result, weights = self.attention(x)
        return result + weights.mean() if self.is_read else result


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in self.qkv)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("is_read", [False, True])
def test_weights_of_attention_matter_where_somebody_reads_them(is_read: bool) -> None:
    plan = tp_plan(GivesWeights(is_read=is_read), draw(2, 3, 8))
    assert bool(plan.pairs) != is_read
    if is_read:
        assert plan.reasons["attention.out"].startswith("not proved: RuntimeError: The size of tensor a (4) must match")


class GivesWeightsOn(nn.Module):
    """A block that also returns its attention's weights, as GPT-Neo's do. The model has two, and ignores them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = WithWeights(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = self.attention(x)
        return x + self.down(self.up(x).relu()), weights


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivesWeightsOn() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_weights_of_attention_that_a_block_hands_on_to_nobody_do_not_matter() -> None:
    plan = tp_plan(Blocks(), draw(2, 3, 8))
    assert {pair.row for pair in plan.pairs} >= {f"blocks.{index}.attention.out" for index in range(2)}, plan


class InFloat32(nn.Module):
    """Attention that requires float32, as kernels do; its keys have a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 is wanted")
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = (q @ k.mT).softmax(-1) @ v
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + result


def test_gradient_that_is_zero_but_for_rounding_is_no_other() -> None:
    """Softmax cancels what the bias of the keys adds."""
    assert [pair.row for pair in tp_plan(InFloat32(), draw(2, 6, 8)).pairs] == ["out"]


def test_random_numbers_of_a_model_are_told_to_be_the_reason() -> None:
    class Draws(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x + torch.randn_like(x))
            return result

    plan = tp_plan(Draws(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), draw(2, 8))
    assert not plan.pairs and "it draws random numbers other than dropout's" in str(plan)


class Grouped(nn.Module):
    """One layer computes queries and fewer keys and values, as in Phi-3, so its parts have unequal lengths."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, 4
        self.qkv_proj = nn.Linear(16, (heads + 2 * kv_heads) * 4)
        self.o_proj = nn.Linear(heads * 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv_proj(x).split(sizes, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result


class GroupedBlock(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention, self.up, self.down = Grouped(heads, kv_heads), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.down(self.up(x).relu())
        return result


class BesideHeads(nn.Module):
    """Blocks that gate with another tensor's features; their attention's heads are as wide as these."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.LayerNorm(16)
            self.attention.head_dim = 8  # type: ignore[assignment]
            self.gate, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

        def forward(self, x: Tensor, features: Tensor) -> Tensor:
            result: Tensor = x + self.down(self.gate(self.attention(x)).tanh() * features)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x).unflatten(-1, (2, 8))
        for number, block in enumerate(self.blocks):
            x = block(x, features[..., number, :])
        return x


def test_heads_of_another_layer_are_not_the_reason() -> None:
    assert tp_plan(made(BesideHeads()), draw(2, 5, 16)).reasons["blocks.0.gate"].startswith("not proved: ")


def test_fused_layer_of_unequal_parts_is_cut_in_each_of_them() -> None:
    model = made(GroupedBlock(4, 2))
    plan = tp_plan(model, draw(2, 6, 16))
    assert plan.pairs[0].names == ("attention.qkv_proj", "attention.o_proj") and plan.pairs[0].packed == (4, 2, 2)
    assert "colwise, packed 4:2:2" in str(plan) and plan.checked == "proved"
    assert plan.packed["attention.qkv_proj.weight"] == Layout(0, (4, 2, 2))


def test_fused_layer_with_one_head_of_keys_stays_whole() -> None:
    """The other layers of the block are cut."""
    model = made(GroupedBlock(4, 1))
    plan = tp_plan(model, draw(2, 6, 16))
    assert plan.roles == {"up": "colwise", "down": "rowwise"} and plan.checked == "proved"
    assert plan.reasons["attention.qkv_proj"] == "1 heads (num_kv_heads) are not divisible by tp=2"
    with pytest.raises(SpecError, match=r"'attention' cannot be cut over tp=2 ranks: 1 heads \(num_kv_heads\) are not"):
        tp_plan(model, draw(2, 6, 16), require=["attention"])


def test_fused_layer_of_unequal_parts_is_not_proved_as_if_they_were_equal() -> None:
    """As two parts of queries, one of keys and one of values it would run, but pair queries with the wrong keys."""
    attention = made(Grouped(4, 2))
    numbers = (("", "num_heads", 2), ("", "num_kv_heads", 1))
    plan = TensorPlan(2, known_modules(attention), [Pair(("qkv_proj",), "o_proj", packed=4, attributes=numbers)])
    fault = find_fault(attention, plan, call_of(draw(2, 6, 16)))
    assert fault is not None and re.fullmatch(rf"its {_DIFFERS}", fault)


def test_experts_are_cut_each() -> None:
    model, call = MODELS["mixture"]()
    plan = tp_plan(model, call)
    assert plan.alone == {"experts": "experts", "head": "colwise"}
    assert {name: layout.packed for name, layout in plan.layouts.items() if "experts" in name} == {
        "experts.gate_up_proj": 2,
        "experts.down_proj": 1,
    }
    uneven = tp_plan(model, call, tp=5)
    assert (
        uneven.reasons["experts"]
        == "'experts' cannot be 'experts': its gate_up_proj packs 2 tensors of 12 rows, which are not divisible by tp=5"
    )


def test_experts_whose_gates_lie_by_turns_are_cut_so() -> None:
    model, call = MODELS["mixture by turns"]()
    plan = tp_plan(model, call)
    assert plan.alone == {"experts": "interleaved experts", "head": "colwise"}
    assert {name: layout for name, layout in plan.layouts.items() if "experts" in name} == {
        "experts.gate_up_proj": Layout(2),
        "experts.gate_up_proj_bias": Layout(1),
        "experts.down_proj": Layout(1),
    }


def test_what_attention_has_for_each_head_is_cut_with_it() -> None:
    """These are a table of biases that the next block gets, sinks, a norm over all heads, and another tensor's keys."""
    model, call = MODELS["biased"]()
    plan = tp_plan(model, call)
    first, second, last = plan.pairs
    assert first.parts == (("blocks.0", "sink", 0), ("blocks.0.table", "weight", 1))
    assert first.by_head == (ByHead("blocks.0", 1, 4, is_output=True),)
    assert second.by_head == (ByHead("blocks.1", 2, 4),)
    assert last.gathered == ("last.norm",) and last.parts == (("last", "sink", 0),)
    assert plan.layouts["blocks.0.table.weight"] == Layout(1)
    assert plan.alone == {"head": "colwise"}  # the model scales its output
    plan.replicate("blocks.0.table")
    assert plan.pairs == [second, last] and not any("blocks.0" in name for name in plan.layouts)


def test_layers_beside_each_other_are_cut_each() -> None:
    """They get one input, in blocks that run twice.

    One counts its heads in the shared configuration, one has latent keys.
    """
    model, call = MODELS["beside"]()
    grouped, latent, one, gated = tp_plan(model, call).pairs
    assert one.names == ("one.q", "one.o") and {"one.k", "one.v"} <= {*one.summed}
    assert grouped.packed == (4, 2, 2) and ("attention", "config.num_heads", 2) in grouped.attributes
    assert latent.columns == ("latent.up", "latent.q") and latent.entry == "latent"
    assert gated == Pair(("up",), "down")


class Wider(nn.Module):
    """Two blocks of one kind, but of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2 * width)) for width in (4, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x).tanh()
        return x


def test_blocks_of_one_name_and_other_sizes_are_proved_each() -> None:
    assert [pair.row for pair in tp_plan(Wider(), draw(2, 4)).pairs] == ["stages.0.2", "stages.1.2"]


class Numbered(nn.Module):
    """Has a number of its own; ``act`` is its activation, ``is_flipped`` makes it mix its hidden features."""

    def __init__(self, number: int, act: nn.Module | None = None, is_flipped: bool = False, times: int = 1) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 32), nn.Linear(32, 16), act or nn.GELU()
        self.number, self.is_flipped, self.times = number, is_flipped, times

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        hidden = hidden.flip(-1) * hidden.mean(-1, keepdim=True) if self.is_flipped or self.times > 1 else hidden
        result: Tensor = x + self.down(hidden)
        return result


@pytest.mark.parametrize("other", [{"act": nn.Softmax(-1)}, {"is_flipped": True}, {"times": 2}], ids=str)
def test_blocks_of_one_class_that_do_something_else_are_proved_each(other: dict[str, Any]) -> None:
    """The verdict on a block holds only for those that compute the same.

    This is so even if the whole model is too large to prove.
    """
    model = nn.Sequential(Numbered(0), Numbered(1, **other), Numbered(2))
    plan = tp_plan(model, draw(2, 5, 16))
    assert [pair.row for pair in plan.pairs] == ["0.down", "2.down"] and plan.checked == "proved"
    assert "not proved" in plan.reasons["1.up"]


def test_blocks_that_differ_in_their_number_alone_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[nn.Module] = []
    find = proof.Proof.find_fault
    monkeypatch.setattr(proof.Proof, "find_fault", lambda self, plan: proved.append(self._module) or find(self, plan))
    model = nn.Sequential(*(Numbered(number + 1) for number in range(6)))
    assert len(tp_plan(model, draw(2, 5, 16)).pairs) == 6
    assert [each for each in proved if each is not model] == [model[0]]


def test_layers_that_are_not_called_stay_whole() -> None:
    """nn.MultiheadAttention reads the weights of its last layer without calling it."""
    model, call = MODELS["encoder"]()
    plan = tp_plan(model, call)
    assert plan.reasons["layers.0.self_attn.out_proj"] == "it is not called as a module"
    assert [pair.names for pair in plan.pairs] == [(f"layers.{i}.linear1", f"layers.{i}.linear2") for i in range(2)]


def test_gradient_of_what_is_used_on_parts_is_missed_by_no_proof() -> None:
    """These are the norms of queries and keys, which plans of transformers had left out."""
    attention = Attention(32, 4, 2, has_norms=True)
    pair = Pair(("wq", "wk", "wv"), "wo", attributes=(("", "n_heads", 2), ("", "n_kv_heads", 1)))
    modules = known_modules(attention)
    fault = find_fault(attention, TensorPlan(2, modules, [pair]), call_of(draw(2, 4, 32)))
    assert fault is not None and fault.startswith("the gradient of q_norm.")
    right = Pair(pair.columns, pair.row, attributes=pair.attributes, summed=("q_norm", "k_norm"))
    assert find_fault(attention, TensorPlan(2, modules, [right]), call_of(draw(2, 4, 32))) is None


def test_weights_of_zero_prove_nothing_and_are_not_used() -> None:
    """A mean over cut features is wrong; zero weights, with which training may begin, would hide that."""
    model = nn.Sequential(nn.Linear(8, 16), Of(lambda x: x - x.mean(-1, keepdim=True)), nn.Linear(16, 8))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert not tp_plan(model, draw(4, 8)).pairs


class Own(nn.Module):
    """Has a plan of its own, as models of transformers do; its pair ``wrong`` is invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.wrong = nn.ModuleDict({"a": nn.Linear(8, 16), "norm": nn.Softmax(-1), "b": nn.Linear(16, 8)})
        self._tp_plan = {"up": "colwise", "down": "rowwise", "wrong.a": "colwise", "wrong.b": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).relu())
        result: Tensor = x + self.wrong["b"](self.wrong["norm"](self.wrong["a"](x)))
        return result


def test_plan_that_the_model_brings_is_taken_where_it_is_right() -> None:
    plan = tp_plan(Own(), draw(4, 8))
    assert plan.pairs == [Pair(("up",), "down", origin="the model's own plan")]
    assert re.fullmatch(rf"not proved: its {_DIFFERS}", plan.reasons["wrong.b"])


POINTWISE: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "drop": nn.Dropout}
MIXING: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Softmax(-1),
    "norm": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "roll": lambda: Of(lambda x: x.roll(1, -1)),
    "sum": lambda: Of(lambda x: x.cumsum(-1)),
    "mean": lambda: Of(lambda x: x + x.mean(-1, keepdim=True)),
    "place": lambda: Of(lambda x: x * torch.arange(x.shape[-1])),
}


class Of(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@settings(max_examples=25, deadline=None)
@given(
    ops=st.lists(st.sampled_from([*POINTWISE, *MIXING]), min_size=1, max_size=3),
    has_skip=st.booleans(),
    width=st.sampled_from([8, 9]),
)
def test_pair_is_cut_exactly_where_all_between_goes_element_by_element(
    ops: list[str], has_skip: bool, width: int
) -> None:
    made_of = {**POINTWISE, **MIXING}
    between = [made_of[op]() if op != "norm" else nn.LayerNorm(width, elementwise_affine=False) for op in ops]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.between, self.b = nn.Linear(6, width), nn.Sequential(*between), nn.Linear(width, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(self.between(self.a(x)))
            return x + result if has_skip else result

    plan = tp_plan(Model(), draw(3, 6))
    is_right = width == 8 and all(op in POINTWISE for op in ops)
    assert bool(plan.pairs) == is_right, plan.reasons
    if width == 9:
        assert plan.reasons["a"] == "9 outputs are not divisible by tp=2"


@settings(max_examples=10, deadline=None)
@given(widths=st.lists(st.sampled_from([4, 6, 8, 5]), min_size=2, max_size=6), tp=st.sampled_from([2, 3, 4]))
def test_chains_of_layers_are_cut_two_by_two(widths: list[int], tp: int) -> None:
    """All planned sizes are divisible, no layer is in two pairs, and the whole plan is proved."""
    layers = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.Tanh())]
    plan = tp_plan(nn.Sequential(*layers), draw(3, widths[0]), tp=tp)
    assert plan.checked == "proved"
    names = [name for pair in plan.pairs for name in pair.names]
    assert len(names) == len({*names})
    assert all(layers[int(pair.row)].in_features % tp == 0 for pair in plan.pairs)


@pytest.mark.parametrize("was_run", [False, True])
def test_what_cannot_be_copied_is_no_reason_to_keep_layers_whole(was_run: bool) -> None:
    model, call = MODELS["keeps"]()
    if was_run:
        model(call)
    lock, aux = model.blocks[0].lock, model.blocks[0].aux
    plan = tp_plan(model, [call])
    assert [pair.row for pair in plan.pairs] == ["blocks.0.down", "blocks.1.down"] and plan.checked == "proved"
    assert model.blocks[0].lock is lock and model.blocks[0].aux.equal(aux)


def test_table_with_sparse_gradients_is_cut() -> None:
    model, call = MODELS["sparse"]()
    plan = tp_plan(model, call)
    assert plan.roles == {"up": "colwise", "down": "rowwise", "table": "embedding"} and plan.checked == "proved"
    assert model.table.sparse and model.bag.sparse


class TakesLock(nn.Sequential):
    def forward(self, x: Tensor, lock: Any) -> Tensor:
        with lock:
            result: Tensor = super().forward(x)
        return result


def test_a_vocabulary_is_not_copied_for_each_rank_of_a_proof() -> None:
    """It is not searched word by word either. Containers with tensors, and small ones, are copied."""
    model = Numbered(0)
    model.vocabulary = {str(each): each for each in range(2000)}
    model.pairs = [(str(each), each) for each in range(2000)]
    model.tables, model.counts = [torch.ones(1) for _ in range(2000)], {"calls": 0}
    made = copies.copied(model)
    assert made.vocabulary is model.vocabulary and made.pairs is model.pairs
    assert made.tables[0] is not model.tables[0] and made.counts is not model.counts


def test_arguments_that_cannot_be_copied_are_taken_as_they_are() -> None:
    model = TakesLock(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    assert tp_plan(model, [draw(4, 8), threading.Lock()]).pairs == [Pair(("0",), "2")]


# ---- reading and editing


def test_block_whose_own_train_gives_nothing_back_is_cut() -> None:
    class Block(nn.Sequential):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]  # of transformers' LeViT
            super().train(mode)

    model = made(nn.Sequential(Block(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.LayerNorm(8)))
    assert tp_plan(model, draw(4, 8)).roles == {"0.0": "colwise", "0.2": "rowwise"}


def test_plan_is_a_table() -> None:
    plan = planned(is_fused=True)
    text = str(plan)
    assert text.splitlines()[0] == "tensor parallel over 2 ranks: 99% of the parameters in parts; proved"
    assert "layers.*.attention.c_attn (2x)  colwise, packed 3  proved with layers.*.attention.c_proj" in text
    assert "<td style='text-align:left'>layers.*.mlp.down (2x)</td>" in plan._repr_html_()


def test_plan_that_leaves_most_whole_says_what_and_why() -> None:
    plan = planned().replicate("layers").replicate("head")
    assert plan.what_is_whole == (
        "Most parameters are whole on every rank: layers.*.mlp.gate (17%, 'layers' is replicated on request); "
        "layers.*.mlp.up (17%, 'layers' is replicated on request); "
        "layers.*.mlp.down (16%, 'layers' is replicated on request)"
    )
    assert plan.what_is_whole in str(plan).splitlines()[0] and html.escape(plan.what_is_whole) in plan._repr_html_()
    assert planned().what_is_whole == ""


def hooked(**hooks: Any) -> nn.Module:
    """Return a block with ``hooks`` on the outputs of its layers."""
    model = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.ReLU(), down=nn.Linear(16, 8)))
    for name, hook in hooks.items():
        model.get_submodule(name).register_forward_hook(hook)
    return model


def test_hook_that_does_something_else_on_parts_is_named() -> None:
    plan = tp_plan(hooked(up=lambda module, args, output: output - output.mean(-1, keepdim=True)), torch.randn(2, 8))
    told = (
        rf"not proved: its {_DIFFERS}; the proof succeeds without the hooks of up: remove them, or have them treat each"
    )
    assert re.match(told, plan.reasons["up"]) and re.search(told, plan.what_is_whole)
    assert {*tp_plan(hooked(up=lambda module, args, output: output * 2), torch.randn(2, 8)).roles} >= {"up", "down"}


def test_hook_around_a_block_that_reads_a_layer_is_named() -> None:
    body = hooked()
    model = nn.Sequential(OrderedDict(body=body, last=nn.Sigmoid()))
    model.register_forward_hook(lambda module, args, output: output * module.body.up.out_features)
    told = rf"the model as a whole was not proved: its {_DIFFERS}; the proof succeeds without the hooks of the model"
    assert re.match(told, tp_plan(model, torch.randn(2, 8)).reasons["body.up"])


def test_fault_is_told_with_the_module_whose_code_raised_it() -> None:
    model = hooked()
    model.act = Wide()
    plan = tp_plan(model, torch.randn(2, 8))
    assert plan.reasons["up"] == "not proved: ValueError: 8 columns (in act)"


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 16:
            raise ValueError(f"{x.shape[-1]} columns")
        return x.tanh()


def test_weights_that_are_made_anew_are_told_with_what_to_do() -> None:
    model = hooked()
    parametrize.register_parametrization(model.up, "weight", nn.Identity())
    reasons = tp_plan(model, torch.randn(2, 8)).reasons
    told = "up recomputes its weight at each call (parametrize), which cannot be cut: torch.nn.utils."
    assert reasons["up"].startswith(told) and reasons["up.parametrizations.weight"].startswith(told)


class KeepsWeights(nn.Module):
    """Computes each of its weights once in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(4)))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            result: Tensor = self.head(self.layers(x))
            return result


def test_ranks_of_a_proof_share_no_weights_that_are_kept_in_a_call() -> None:
    for _ in range(4):  # whether they would depends on thread timing
        assert tp_plan(KeepsWeights(), torch.randn(2, 8)).checked == "proved"
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})


def test_replicated_block_takes_its_whole_pair_with_it() -> None:
    plan = planned()
    assert plan.replicate("layers.1.mlp.up") is plan
    assert {name for name in plan.roles if name.startswith("layers.1.mlp")} == set()
    assert plan.reasons["layers.1.mlp.down"] == "'layers.1.mlp.up' is replicated on request"
    plan.set("layers.0.mlp.up", "colwise")
    assert (
        plan.reasons["layers.0.mlp.down"]
        == "it was cut with 'layers.0.mlp.up', which is 'colwise' by itself on request"
    )
    plan.replicate("layers")
    assert plan.roles == {"embed": "embedding", "head": "colwise"}


def test_module_can_be_cut_by_itself() -> None:
    plan = tp_plan(GPT(layers=1), tokens())
    plan.set("h.0.qkv", "colwise").set("h.0.proj", "rowwise").set("head", "replicate")
    assert plan.roles["h.0.qkv"] == "colwise" and plan.roles["h.0.proj"] == "rowwise" and "head" not in plan.roles
    assert find_fault(GPT(layers=1), plan, call_of(tokens())) is None


def test_recurrent_layers_and_weights_used_elsewhere_are_right() -> None:
    model, call = MODELS["recurrent"]()
    plan = tp_plan(model, call)
    assert plan.pairs and find_fault(model, plan, call_of(call)) is None


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda plan: plan.replicate("layer.1.mlp"),
            "the plan has no module 'layer.1.mlp': did you mean 'layers.1.mlp'?",
        ),
        (lambda plan: plan.set("layers.0.mlp.upp", "colwise"), "did you mean 'layers.0.mlp.up'?"),
        (
            lambda plan: plan.set("layers.0.mlp.up", "columns"),
            "'layers.0.mlp.up' cannot be 'columns': did you mean 'colwise'?",
        ),
        (
            lambda plan: plan.set("norm", "rowwise"),
            "'norm' cannot be 'rowwise': that role is for linear and conv1d layers, not",
        ),
        (
            lambda plan: plan.set("layers.0.mlp", "colwise"),
            "'layers.0.mlp' has no parameters of its own: name one of the",
        ),
        (lambda plan: plan.set("head", "rowwise"), "'head' and 'embed' share 'embed.weight', which would be cut in"),
    ],
)
def test_edit_that_is_wrong_is_told_and_changes_nothing(edit: Callable[[TensorPlan], Any], message: str) -> None:
    plan = planned(is_tied=True)
    before = str(plan)
    with pytest.raises(SpecError) as caught:
        edit(plan)
    assert message in str(caught.value)
    assert str(plan) == before


def test_rows_that_do_not_go_round_are_told() -> None:
    plan = tp_plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), draw(2, 8), tp=4)
    with pytest.raises(SpecError, match="'2' cannot be 'colwise': 3 rows leave some of 4 ranks without any"):
        plan.set("2", "colwise")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 1}, "tp=1: layers are cut over 2 or more ranks"),
        ({"require": ["layers.0.atention"]}, "did you mean 'layers.0.attention'"),
        ({"require": ["norm"]}, "'norm' cannot be cut over tp=2 ranks: it has no layers that can be cut"),
    ],
)
def test_plan_that_cannot_be_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tp_plan(Llama(layers=1), tokens(), **options)


@dataclasses.dataclass(frozen=True)
class Configuration:
    factor: float


class Weighing(nn.Module):
    """Mixes its hidden features by a factor that is 0 at first; ``way``: where the factor comes from."""

    class Block(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.up, self.down, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way
            self.register_buffer("warm", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("is_late", torch.tensor(False))

        def forward(self, x: Tensor, factor: Any) -> Tensor:
            if self.way == "configured":
                factor = factor.factor
            elif self.way == "chosen":
                factor = float(factor > 2 or factor < 0)
            elif self.way == "counted":
                factor = (self.count > 100).double()
                self.count.add_(int(self.training))
            elif self.way == "switched":
                factor = self.is_late.double()
                self.is_late.logical_or_(torch.tensor(self.training))
            if self.way in ("written", "replaced"):
                factor = self.warm.clone()
                if self.training and self.way == "written":
                    self.warm.add_(0.5)
                elif self.training:
                    self.warm = self.warm + 0.5
            hidden = self.up(x).tanh()
            if self.way != "harmless":
                hidden = hidden - factor * hidden.mean(-1, keepdim=True)
            elif factor > 0.3:
                raise ValueError(f"{factor} is too much")
            result: Tensor = x + self.down(hidden)
            return result

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(way) for _ in range(2))

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, factor)
        return x


@pytest.mark.parametrize(
    "way, factor, message",
    [
        ("number", 0.0, "with other arguments than 0"),
        ("number", torch.zeros(()), "with other arguments than 0"),
        ("written", 0, "with other values of warm, which it writes"),
        ("replaced", 0, "with other values of warm, which it writes"),
        ("counted", None, "with other values of count, which it writes"),
        ("switched", None, "with other values of is_late, which it writes"),
        ("number", 0, "with other arguments than 0"),
        ("number", np.float32(0), "with other arguments than 0"),
        ("configured", Configuration(0.0), "with other arguments than 0"),
        ("chosen", 0.5, "with other arguments than 0.5"),
        ("chosen", torch.ones(1), "with other arguments than 1"),
    ],
)
def test_what_a_zero_hides_is_not_proved(way: str, factor: Any, message: str) -> None:
    model = made(Weighing(way))
    plan = tp_plan(model, (draw(2, 8), factor))
    assert not plan.roles and all(message in plan.reasons[f"layers.{n}.up"] for n in range(2)), plan.reasons
    assert all(part.warm == 0 and part.count == 0 and not part.is_late for part in model.layers)  # type: ignore[union-attr]


def test_number_for_which_the_model_has_no_other_is_no_fault() -> None:
    assert len(tp_plan(made(Weighing("harmless")), (draw(2, 8), 0.0)).pairs) == 2


class Noting(nn.Module):
    """Notes something about its hidden features for its next pass; ``way``: where, and when."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way
        self.register_buffer("mean", torch.zeros(()))
        self.noted: Any = {"mean": torch.zeros(())} if way == "dict" else torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        noted = self.noted["mean"] if self.way == "dict" else self.noted
        result: Tensor = x + self.down(hidden - self.mean - noted)
        with torch.no_grad():
            if self.way == "given":
                self.mean.add_(x.mean())
            elif self.way == "always" or (self.way == "buffer" and self.training):
                self.mean.lerp_(hidden.mean(), 0.5)
            elif self.way == "share" and self.training:
                self.mean.lerp_((hidden > 0).float().mean(), 0.5)  # not float64
            elif self.way == "dict" and self.training:
                self.noted["mean"] = hidden.mean()
            elif self.way == "attribute" and self.training:
                self.noted = hidden.mean()
        return result


@pytest.mark.parametrize(
    "way, name",
    [
        ("buffer", "mean"),
        ("always", "mean"),
        ("share", "mean"),
        ("dict", "noted['mean']"),
        ("attribute", "noted"),
    ],
)
def test_block_that_writes_something_else_in_parts_is_whole(way: str, name: str) -> None:
    model = made(nn.Sequential(Noting(way), Noting(way)))
    plan = tp_plan(model, draw(4, 8))
    assert (
        not plan.roles and plan.reasons["0.up"] == f"not proved: the values that its forward writes into {name} differ"
    )
    assert all(part.mean == 0 for part in model)


@pytest.mark.parametrize("is_training", [True, False])
def test_block_that_takes_the_time_is_cut(is_training: bool) -> None:
    class Timed(nn.Sequential):
        took_s = 0.0

        def forward(self, x: Tensor) -> Tensor:
            begun = time.perf_counter()
            result: Tensor = super().forward(x)
            self.took_s = time.perf_counter() - begun
            return result

    block = made(Timed(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))).train(is_training)
    assert len(tp_plan(block, draw(4, 8)).pairs) == 1


_passes = [0]


@pytest.mark.parametrize("begin", [0, 1])
def test_block_whose_times_are_equal_by_chance_is_cut(begin: int) -> None:
    """Each time equals that of the previous or of the next pass."""

    class Timed(nn.Sequential):
        took_s = 0.0

        def forward(self, x: Tensor) -> Tensor:
            _passes[0] += 1
            self.took_s = float(_passes[0] // 2)
            result: Tensor = super().forward(x)
            return result

    _passes[0] = begin
    block = made(Timed(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))).eval()
    assert len(tp_plan(block, draw(4, 8)).pairs) == 1


def test_block_that_reads_what_it_has_written_in_each_pass_is_cut() -> None:
    model = made(nn.Sequential(Noting("given"), Noting("given")))
    assert len(tp_plan(model, draw(4, 8)).pairs) == 2 and all(part.mean == 0 for part in model)


def test_parameters_without_a_shape_are_told() -> None:
    with pytest.raises(SpecError, match="the model has lazy parameters without a shape: call it once"):
        tp_plan(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 8)), draw(2, 8))


def test_loss_parallel_needs_a_head() -> None:
    with pytest.raises(SpecError, match="returns the output of one linear layer, its head: 0 were found"):
        tp_plan(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), draw(2, 8), loss_parallel=True)


def test_head_in_parts_is_no_row() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert tp_plan(model, draw(2, 8)).roles == {"0": "colwise", "2": "rowwise"}
    plan = tp_plan(model, draw(2, 8), loss_parallel=True)
    assert plan.roles == {"2": "colwise"} and plan.shard_head == "2"


def test_sequence_that_cannot_be_cut_is_told() -> None:
    """GPT's attention is not cut itself, so it would see only its part of the sequence."""
    with pytest.raises(SpecError, match=f"the sequence cannot be cut between layers: not proved: its {_DIFFERS}"):
        tp_plan(GPT(layers=1), tokens(), sequence_parallel=True)
    with pytest.raises(SpecError, match="the sequence length 15 is not divisible by tp=2"):
        tp_plan(Llama(layers=1), tokens(length=15), sequence_parallel=True)
    with pytest.raises(SpecError, match="in repeated blocks, but none were found"):
        tp_plan(made(nn.Linear(8, 8)), draw(2, 8), sequence_parallel=True)
