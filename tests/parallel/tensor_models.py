"""Models whose layers can be cut over ranks, each in its own way, with their example inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def made(model: nn.Module, std: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def tokens(rows: int = 4, length: int = 16, vocabulary: int = 96) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Grouped-query attention with its head counts as attributes; ``has_norms``: per-head norms of queries and keys."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, has_norms: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.LayerNorm(self.head_dim) if has_norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.wq(x).view(batch, length, self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
        return result


class FusedAttention(nn.Module):
    """One layer computes queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.width = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, self.n_head, -1).transpose(1, 2)
            for each in self.c_attn(x).split(self.width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        result: Tensor = self.c_proj(attended.reshape(batch, length, self.width))
        return result


class Gated(nn.Module):
    """A gated MLP; ``is_fused``: gate and up are one layer."""

    def __init__(self, width: int, *, is_fused: bool = False) -> None:
        super().__init__()
        self.is_fused = is_fused
        if is_fused:
            self.gate_up = nn.Linear(width, 4 * width)
        else:
            self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.is_fused else (self.gate(x), self.up(x))
        result: Tensor = self.dropout(self.down(F.silu(gate) * up))
        return result


class LlamaBlock(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Llama(nn.Module):
    """A language model whose parts can all be cut."""

    def __init__(
        self,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 32,
        layers: int = 2,
        vocabulary: int = 97,
        has_norms: bool = True,
        is_fused: bool = False,
        is_tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=3)
        self.layers = nn.ModuleList(
            LlamaBlock(
                FusedAttention(width, heads) if is_fused else Attention(width, heads, kv_heads, has_norms=has_norms),
                Gated(width, is_fused=is_fused),
                width,
            )
            for _ in range(layers)
        )
        for layer in self.layers:
            layer.mlp.dropout.p = dropout
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Recurrent(nn.Module):
    """An LSTM that stays whole, and two layers that can be cut.

    The model also reads a parameter of its own and the weight of a layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.scale = nn.LSTM(8, 8, batch_first=True), nn.Parameter(torch.ones(8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0] * self.scale
        result: Tensor = self.down(F.gelu(self.up(x))) + F.linear(x, self.up.weight).mean()
        return result


class Mixture(nn.Module):
    """Gated experts stacked in two parameters; each token uses two of them."""

    def __init__(self, experts: int = 4, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            rows, place = torch.where(chosen == expert)
            gate, up = (x[rows] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            mine = (F.silu(gate) * up) @ self.down_proj[expert].T
            result = result.index_add(0, rows, mine * weights[rows, place, None])
        return result


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(8, 4), experts, nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        result: Tensor = self.head(x + self.experts(x, chosen, weights))
        return result


def _heads(x: Tensor, width: int = 4) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


class Biased(nn.Module):
    """Self- or cross-attention with a bias for each head, from its own table or passed in, as in T5."""

    def __init__(self, *, has_table: bool, is_wide: bool = False) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.norm = nn.LayerNorm(24 if is_wide else 6)
        self.is_wide = is_wide
        self.table = nn.Embedding(8, 4) if has_table else None
        self.sink = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, other: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q = _heads(self.norm(self.q(x)), 6) if self.is_wide else self.norm(_heads(self.q(x), 6))
        k, v = (_heads(layer(other), 6) for layer in (self.k, self.v))
        if bias is None:
            far = (torch.arange(x.shape[1])[:, None] - torch.arange(other.shape[1])).clamp(-4, 3) + 4
            bias = x.new_zeros(1, self.heads, 1, 1) if self.table is None else self.table(far).movedim(-1, 0)[None]
        sink = self.sink.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        scores = torch.cat([q @ k.mT + bias, sink], -1).softmax(-1)[..., :-1]
        return self.o((scores @ v).transpose(1, 2).flatten(2)), bias


class BiasedModel(nn.Module):
    """Three blocks: the first one's table gives the bias of the second; the last attends to the model's first input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(has_table=index == 0) for index in range(2))
        self.last, self.head, self.scale = Biased(has_table=False, is_wide=True), nn.Linear(24, 40), 0.5

    def forward(self, x: Tensor) -> Tensor:
        first, bias = x, None
        for block in self.blocks:
            given, bias = block(x, x, bias)
            x = x + given
        x = x + self.last(x, first)[0]
        result: Tensor = self.head(x) * self.scale
        return result


class OneKey(nn.Module):
    """Attention whose queries share one head of keys and values, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_groups = 4
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (_heads(layer(x)).repeat(1, self.num_key_value_groups, 1, 1) for layer in (self.k, self.v))
        result: Tensor = self.o(F.scaled_dot_product_attention(_heads(self.q(x)), k, v).transpose(1, 2).flatten(2))
        return result


class Numbers:
    """A configuration that modules share."""

    def __init__(self) -> None:
        self.num_heads = 4


class Latent(nn.Module):
    """Latent attention, as in DeepSeek: keys come from a small layer, in part shared by all heads.

    Queries come from a layer of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up, self.o = nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(8, 24), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        small, shared = self.down(x).split([8, 2], dim=-1)
        k, v = _heads(self.up(self.norm(small)), 6).split([2, 4], dim=-1)
        k = torch.cat([k, shared[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        result: Tensor = self.o(((_heads(self.q(x)) @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


class GroupedByNumbers(nn.Module):
    """One layer for queries and for fewer keys and values; the shared configuration has the number of heads."""

    def __init__(self, config: Numbers) -> None:
        super().__init__()
        self.config, self.num_kv_heads = config, 2
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        begin, end = 4 * self.config.num_heads, 4 * (self.config.num_heads + self.num_kv_heads)
        q, k, v = self.qkv(x).tensor_split([begin, end], dim=-1)
        attended = F.scaled_dot_product_attention(_heads(q), _heads(k), _heads(v), enable_gqa=True)
        result: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return result


class Beside(nn.Module):
    """Attention modules and an MLP get the same input and their outputs are added, as in Falcon; it all runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Numbers()
        self.latent, self.attention, self.one = Latent(), GroupedByNumbers(self.config), OneKey()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            given = self.norm(x)
            attended = self.attention(given) + self.latent(given) + self.one(given)
            x = x + attended + self.down(F.gelu(self.up(given)))
        return x / self.config.num_heads


class ByTurns(nn.Module):
    """Gated experts with biases, whose gate and up columns alternate, as in GPT-OSS."""

    def __init__(self, experts: int = 4, width: int = 8, hidden: int = 6) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, width, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            rows, place = torch.where(chosen == expert)
            both = x[rows] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            mine = (F.silu(both[..., ::2]) * both[..., 1::2]) @ self.down_proj[expert] + self.down_proj_bias[expert]
            result = result.index_add(0, rows, mine * weights[rows, place, None])
        return result


class Kept(nn.Module):
    """Keeps what cannot be copied: a lock, a computed tensor, and an auxiliary loss that its model adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.lock = nn.Linear(8, 16), nn.Linear(16, 8), threading.Lock()
        self.scale, self.aux = self.up.weight.sum() * 0 + 1, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.aux = x.square().mean()
        result: Tensor = x + self.down(F.gelu(self.up(x))) * self.scale.detach().to(x.dtype)
        return result


class AddsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Kept() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x + sum(block.aux for block in self.blocks)


class Weighed(nn.Module):
    """Reads the weights of a parameter list between its blocks, and one parameter after all of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.weights = nn.ParameterList(torch.ones(8) for _ in self.blocks)
        self.last = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block, weight in zip(self.blocks, self.weights):
            x = F.dropout(block(x) * weight, self.dropout, self.training)
        return x * self.last


class Sparse(nn.Module):
    """Tables with sparse gradients: only the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(96, 8, sparse=True), nn.EmbeddingBag(96, 8, sparse=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.bag(tokens)[:, None]
        result: Tensor = x + self.down(self.up(x).tanh())
        return result


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _family(name: str, **more: Any) -> tuple[nn.Module, Any]:
    """Return a tiny model of transformers and its inputs."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    gpt2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    opt = {**sizes, "ffn_dim": 64, "word_embed_proj_dim": 32}
    for key in ("intermediate_size", "num_key_value_heads"):
        opt.pop(key)
    bert = {key: value for key, value in sizes.items() if key != "num_key_value_heads"}
    t5 = {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4}
    bart = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _OF_A_SIDE.items()}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    given = {
        "Qwen3": {**sizes, "head_dim": 8},
        "Mixtral": {**sizes, "num_local_experts": 4},
        "GPT2": gpt2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "OPT": opt | {"dropout": 0.0},
        "Bert": bert | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        "Albert": bert | {"embedding_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "Bart": bart | {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0},
        "Bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "DeepseekV2": sizes | latent | routed | {"num_key_value_heads": 4, "num_experts_per_tok": 2},
        "Falcon": bert | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "GptOss": {**sizes, "head_dim": 8, "num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2},
        "Phi3": sizes | {"pad_token_id": 0},
        "T5": t5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    }.get(name, sizes)
    ends = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "Albert": "ForMaskedLM"}
    ends |= dict.fromkeys(("Bart", "T5"), "ForConditionalGeneration")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}{ends.get(name, 'ForCausalLM')}")
    model: nn.Module = kind(getattr(transformers, f"{name}Config")(**given, **more))
    call = {"input_ids": tokens()}
    return model, {**call, "decoder_input_ids": tokens().flip(0)} if name in ("Bart", "T5") else call


_OF_A_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
FAMILIES = ("Llama", "Qwen3", "Mixtral", "GPT2", "Bert", "OPT")
# And the percentage of the parameters that are at least partly cut over the ranks.
OTHER_FAMILIES = {
    "Falcon": 79,  # its single head of keys is in one layer with its queries
    "GptOss": 97,
    "T5": 99,
    "DeepseekV2": 85,
    "Albert": 80,
    "Bart": 90,
    "Bloom": 95,
    "Olmo2": 98,
    "Phi3": 98,
}

# By name: makes the model and its inputs.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": lambda: (made(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))), draw(4, 8)),
    "encoder": lambda: (made(_encoder()), draw(4, 16, 32)),
    "llama": lambda: (made(Llama()), tokens()),
    "llama tied": lambda: (made(Llama(is_tied=True)), tokens()),
    "fused": lambda: (made(Llama(is_fused=True)), tokens()),
    "recurrent": lambda: (made(Recurrent()), draw(4, 5, 8)),
    "mixture": lambda: (made(Routed(Mixture()), std=0.5), draw(16, 8)),
    "mixture by turns": lambda: (made(Routed(ByTurns()), std=0.5), draw(16, 8)),
    "biased": lambda: (made(BiasedModel()), draw(4, 5, 24)),
    "sparse": lambda: (made(Sparse()), tokens()),
    "keeps": lambda: (made(AddsLoss()), draw(4, 8)),
    "beside": lambda: (made(Beside()), draw(3, 6, 16)),
    "weighed": lambda: (made(Weighed()), draw(4, 8)),
    **{name: (lambda name=name: _family(name)) for name in (*FAMILIES, *OTHER_FAMILIES)},
}
