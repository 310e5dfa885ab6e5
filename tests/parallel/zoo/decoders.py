"""Tiny causal language models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .entry import Entry, padding, tokens

# Most configurations use these names for their sizes.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {
    "vocab_size": 96,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def of(model: str, sizes: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    """Return a function that makes the model of transformers with this name."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        made: nn.Module = kind(kind.config_class(**{**sizes, **more}))
        return made

    return make


def read(rows: int) -> dict[str, Any]:
    return {"input_ids": tokens(rows), "attention_mask": padding(rows), "use_cache": False}


def read_whole(rows: int) -> dict[str, Any]:
    return {"input_ids": tokens(rows), "use_cache": False}


def _latent(**more: Any) -> dict[str, Any]:
    """Return the sizes of DeepSeek's latent attention: queries, keys and values come from short vectors."""
    sizes = {**EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    return {**sizes, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, **more}


_MADE: dict[str, Callable[[], nn.Module]] = {
    "GPT-J": of("GPTJForCausalLM", GPT, rotary_dim=4),
    "GPT-Neo": of(
        "GPTNeoForCausalLM",
        {**SIZES, "num_layers": 2, "num_heads": 4},
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "GPT-NeoX": of("GPTNeoXForCausalLM", SIZES),
    "GPT-BigCode": of("GPTBigCodeForCausalLM", GPT),
    "gpt-oss": of(
        "GptOssForCausalLM", GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "CodeGen": of("CodeGenForCausalLM", GPT, rotary_dim=4),
    "CTRL": of("CTRLLMHeadModel", GPT, dff=64),
    "GPT": of("OpenAIGPTLMHeadModel", GPT),
    "XGLM": of("XGLMForCausalLM", SIZES, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4),
    "BioGPT": of("BioGptForCausalLM", SIZES),
    "Falcon": of("FalconForCausalLM", SIZES),
    "Falcon new": of("FalconForCausalLM", SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "OPT": of("OPTForCausalLM", SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "OPT narrow": of("OPTForCausalLM", SIZES, ffn_dim=64, word_embed_proj_dim=16),
    "Bloom": of("BloomForCausalLM", SIZES, n_layer=2, n_head=4),
    "MPT": of("MptForCausalLM", {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "Phi": of("PhiForCausalLM", SIZES, partial_rotary_factor=0.5),
    "Phi-3": of("Phi3ForCausalLM", GROUPED),
    "Gemma": of("GemmaForCausalLM", GROUPED, head_dim=8),
    "Gemma 2": of("Gemma2ForCausalLM", GROUPED, head_dim=8, sliding_window=4),
    "Gemma 3": of(
        "Gemma3ForCausalLM", GROUPED, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "Mistral": of("MistralForCausalLM", GROUPED, head_dim=8, sliding_window=4),
    "Qwen2": of("Qwen2ForCausalLM", GROUPED),
    "Qwen2-MoE": of("Qwen2MoeForCausalLM", EXPERTS, shared_expert_intermediate_size=32),
    "Qwen3-MoE": of("Qwen3MoeForCausalLM", EXPERTS, head_dim=8),
    "Qwen3-Next": of(
        "Qwen3NextForCausalLM",
        EXPERTS,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=32,
    ),
    "Cohere": of("CohereForCausalLM", GROUPED),
    "Cohere 2": of(
        "Cohere2ForCausalLM", GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "OLMo": of("OlmoForCausalLM", GROUPED, clip_qkv=3.0),
    "OLMo 2": of("Olmo2ForCausalLM", GROUPED),
    "OLMoE": of("OlmoeForCausalLM", EXPERTS),
    "StableLM": of("StableLmForCausalLM", GROUPED, partial_rotary_factor=0.5),
    "StarCoder2": of("Starcoder2ForCausalLM", GROUPED),
    "DeepSeek 2": of("DeepseekV2ForCausalLM", _latent()),
    "DeepSeek 3": of("DeepseekV3ForCausalLM", _latent(n_group=1, topk_group=1)),
    "Granite": of("GraniteForCausalLM", GROUPED),
    "GraniteMoE": of("GraniteMoeForCausalLM", GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "Nemotron": of("NemotronForCausalLM", GROUPED),
    "GLM": of("GlmForCausalLM", GROUPED, head_dim=8),
    "Persimmon": of("PersimmonForCausalLM", SIZES),
    "DBRX": of(
        "DbrxForCausalLM",
        {"vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    "SmolLM3": of("SmolLM3ForCausalLM", GROUPED, no_rope_layers=[1, 0]),
    "DiffLlama": of("DiffLlamaForCausalLM", GROUPED),
    "Mamba": of("MambaForCausalLM", SIZES, state_size=4, time_step_rank=4),
    "Mamba 2": of("Mamba2ForCausalLM", SIZES, state_size=4, num_heads=4, head_dim=16, n_groups=2, chunk_size=4),
    "FalconMamba": of("FalconMambaForCausalLM", SIZES, state_size=4, time_step_rank=4),
    "RWKV": of("RwkvForCausalLM", SIZES, attention_hidden_size=32, context_length=32),
    "Jamba": of(
        "JambaForCausalLM",
        GROUPED,
        num_experts=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "Bamba": of(
        "BambaForCausalLM",
        GROUPED,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "RecurrentGemma": of(
        "RecurrentGemmaForCausalLM",
        GROUPED,
        head_dim=8,
        lru_width=32,
        attention_window_size=4,
        block_types=["recurrent", "attention"],
    ),
    "xLSTM": of("xLSTMForCausalLM", SIZES, num_heads=4, num_blocks=2, chunk_size=8, return_last_states=False),
    "Zamba2": of(
        "Zamba2ForCausalLM",
        SIZES,
        layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1,
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=4,
        use_mamba_kernels=False,
    ),
    "ProphetNet decoder": of(
        "ProphetNetForCausalLM",
        {"vocab_size": 96, "hidden_size": 32},
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    ),
    "TrOCR decoder": of(
        "TrOCRForCausalLM", SIZES, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64
    ),
}
# They take no mask, or use it for nothing but padding.
_WITHOUT_MASK = ("RWKV", "xLSTM", "Mamba", "Mamba 2", "FalconMamba")

DECODERS = {name: Entry(make, read_whole if name in _WITHOUT_MASK else read) for name, make in _MADE.items()}
DECODERS["GPT"] = Entry(_MADE["GPT"], lambda rows: {"input_ids": tokens(rows), "attention_mask": padding(rows)})
