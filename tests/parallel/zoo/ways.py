"""Models of transformers as people use them: with labels, a cache, and their own heads and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .decoders import EXPERTS, GPT, GROUPED, SIZES, of, read
from .entry import Entry, padding, tokens
from .own_parts import Lora


class OnHiddenStates(nn.Module):
    """A head on the hidden states of one layer, which the model returns on request."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.body = of("BertModel", {**SIZES, "num_hidden_layers": 4})()
        self.head, self.layer = nn.Linear(32, 5), layer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        given = self.body(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        result: Tensor = self.head(given.hidden_states[self.layer].mean(1))
        return result


def _adapted() -> nn.Module:
    """Return a frozen model with small trained layers next to those of its attention."""
    model = of("LlamaForCausalLM", GROUPED)().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora.Layer(getattr(layer.self_attn, name)))
    return model


def _recomputing() -> nn.Module:
    """Return a model with transformers' gradient checkpointing, which recomputes layers in the backward pass."""
    model = of("LlamaForCausalLM", GROUPED)()
    model.gradient_checkpointing_enable()
    return model


def _with_labels(inputs: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    return lambda rows: {**inputs(rows), "labels": tokens(rows)}


def _cached(rows: int) -> dict[str, Any]:
    """Return inputs that leave the cache on, as by default."""
    return {"input_ids": tokens(rows), "attention_mask": padding(rows)}


WAYS = {
    "Bert, hidden states": Entry(lambda: OnHiddenStates(-2), _cached),
    "Bert, third hidden state": Entry(lambda: OnHiddenStates(3), _cached),
    "Bert, eager": Entry(of("BertForMaskedLM", SIZES, attn_implementation="eager"), _cached),
    "Bert, attentions": Entry(
        of("BertForMaskedLM", SIZES, attn_implementation="eager"),
        lambda rows: {**_cached(rows), "output_attentions": True},
    ),
    "GPT-2, cached": Entry(of("GPT2LMHeadModel", GPT), _cached),
    "GPT-2, labels": Entry(of("GPT2LMHeadModel", GPT), _with_labels(read)),
    "GPT-2, hidden states": Entry(
        of("GPT2LMHeadModel", GPT), lambda rows: {**read(rows), "output_hidden_states": True}
    ),
    "GPT-2, classes": Entry(of("GPT2ForSequenceClassification", GPT, pad_token_id=0, num_labels=3), read),
    "Llama, cached": Entry(of("LlamaForCausalLM", GROUPED), _cached),
    "Llama, labels": Entry(of("LlamaForCausalLM", GROUPED), _with_labels(read)),
    "Llama, adapted": Entry(_adapted, read),
    "Llama, recomputing": Entry(_recomputing, read),
    "Llama, bfloat16": Entry(lambda: of("LlamaForCausalLM", GROUPED)().bfloat16(), read, close=5e-2),
    "Mixtral, router": Entry(
        of("MixtralForCausalLM", GROUPED, num_local_experts=4),
        lambda rows: {
            **read(rows),
            "output_router_logits": True,
            "attention_mask": torch.ones(rows, 8, dtype=torch.long),
        },
    ),
    "Qwen3-MoE, router": Entry(
        of("Qwen3MoeForCausalLM", EXPERTS, head_dim=8),
        lambda rows: {**_with_labels(read)(rows), "output_router_logits": True},
    ),
    "T5, labels": Entry(
        of(
            "T5ForConditionalGeneration",
            {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4},
            decoder_start_token_id=0,
        ),
        lambda rows: {"input_ids": tokens(rows), "attention_mask": padding(rows), "labels": tokens(rows, 6)},
    ),
}
