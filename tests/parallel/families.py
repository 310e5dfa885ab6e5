"""Small models of transformers, with every kind of input that they take; ranks import this module too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(rows: int, length: int, below: int = 97) -> Tensor:
    return torch.randint(1, below, (rows, length), generator=torch.Generator().manual_seed(2))


def padding(rows: int, length: int) -> Tensor:
    """Return an attention mask whose first row is padded in its second half."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return mask


def positions(rows: int, length: int) -> Tensor:
    return torch.arange(length)[None] + 3 * torch.arange(rows)[:, None]


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SHORT = {**SMALL, "max_position_embeddings": 32}


def gpt2(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": layers, "n_head": 4}
    config = hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation=attention)
    return hf.GPT2LMHeadModel(config)


def llama(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SHORT, num_hidden_layers=layers, num_key_value_heads=2, attn_implementation=attention)
    )


def qwen3(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    config = hf.Qwen3Config(
        **SHORT, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8, attn_implementation=attention
    )
    return hf.Qwen3ForCausalLM(config)


def mixtral(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    config = hf.MixtralConfig(
        **SHORT, num_hidden_layers=layers, num_key_value_heads=2, num_local_experts=4, attn_implementation=attention
    )
    return hf.MixtralForCausalLM(config)


def bert(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    config = hf.BertConfig(
        **SHORT,
        num_hidden_layers=layers,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        attn_implementation=attention,
    )
    return hf.BertForMaskedLM(config)


def t5(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    sizes = {"vocab_size": 97, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": layers, "num_heads": 4}
    config = hf.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0, attn_implementation=attention)
    return hf.T5ForConditionalGeneration(config)


def vit(hf: Any, attention: str, layers: int = 4) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    picture = {"image_size": 16, "patch_size": 4, "num_labels": 10}
    config = hf.ViTConfig(
        **sizes, **picture, hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation=attention
    )
    return hf.ViTForImageClassification(config)


def text(rows: int, length: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": tokens(rows, length), "attention_mask": padding(rows, length), **more}


def causal(rows: int, length: int) -> dict[str, Any]:
    ids = tokens(rows, length)
    return text(rows, length, position_ids=positions(rows, length), labels=ids, use_cache=False)


# Makes the model with a number of layers; makes inputs by rows and length; a tied parameter; a required cut.
HfFamily = tuple[Callable[..., nn.Module], Callable[[int, int], dict[str, Any]], str | None, str]
OF_TRANSFORMERS: dict[str, HfFamily] = {
    "GPT-2": (gpt2, causal, "transformer.wte.weight", "transformer.h.2"),
    "Llama": (llama, causal, None, "model.layers.2"),
    "Qwen3": (qwen3, causal, None, "model.layers.2"),
    "Mixtral": (mixtral, causal, None, "model.layers.2"),
    "Bert": (
        bert,
        lambda rows, length: text(rows, length, token_type_ids=tokens(rows, length) % 2, labels=tokens(rows, length)),
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.2",
    ),
    "T5": (
        t5,
        lambda rows, length: text(rows, length, labels=tokens(rows, length // 2), use_cache=False),
        "shared.weight",
        "encoder.final_layer_norm",
    ),
    "ViT": (
        vit,
        lambda rows, length: {"pixel_values": draw(rows, 3, 16, 16), "labels": torch.arange(rows) + length},
        None,
        "vit.layers.2",
    ),
}


def largest_difference(model: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference of any gradient in ``model``, relative to the largest gradient value of all."""
    references = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    most = max(float(gradient.abs().max()) for gradient in references.values() if gradient is not None)
    pairs = [(parameter.grad, references[name]) for name, parameter in model.named_parameters()]
    assert all((gradient is None) == (reference is None) for gradient, reference in pairs)
    both = [(gradient, reference) for gradient, reference in pairs if gradient is not None and reference is not None]
    return max(float((gradient - reference).abs().max()) for gradient, reference in both) / most


def train_on_ranks(family: str, *, schedule: str, num_stages: int) -> dict[str, Any]:
    """Train on a batch with padding and the family's other inputs: a pipeline over all ranks, and the whole model."""
    import copy

    import transformers

    from detrain_nb import parallel as par

    def mean_square(output: Any, rows: Tensor) -> Tensor:
        return output.logits.square().flatten(1).mean(1).mean()  # type: ignore[no-any-return]

    make, inputs, _, _ = OF_TRANSFORMERS[family]
    torch.manual_seed(0)
    model = make(transformers, "sdpa")
    whole = copy.deepcopy(model)
    example, batch, other = ({**inputs(rows, length), "labels": None} for rows, length in ((2, 8), (8, 8), (4, 6)))
    found = par.split(model, example, num_stages)
    stages = par.PipelineStages(found, loss=mean_square, schedule=schedule, num_microbatches=4, device="cpu")
    losses = [stages.train_step(each, torch.arange(len(each["input_ids"]))) for each in (batch, other)]
    expected = [mean_square(whole(**each), torch.arange(1)) for each in (batch, other)]
    sum(expected).backward()  # type: ignore[union-attr]
    output = stages.predict(other)
    differences = [abs(float(loss - right)) for loss, right in zip(losses, expected) if loss is not None]
    return {
        "stages": stages.indices,
        "gradients": max(largest_difference(module, whole) for module in stages.modules),
        "losses": max(differences, default=None),
        "output": None if output is None else type(output).__name__,
    }
