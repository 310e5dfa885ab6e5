"""Tiny language models of transformers: encoders that read the whole text, and encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .decoders import SIZES, of
from .entry import Entry, draw, padding, tokens


def read(rows: int) -> dict[str, Any]:
    return {"input_ids": tokens(rows), "attention_mask": padding(rows)}


def translate(rows: int) -> dict[str, Any]:
    return {
        "input_ids": tokens(rows),
        "attention_mask": padding(rows),
        "decoder_input_ids": tokens(rows, 6),
        "use_cache": False,
    }


def hear(rows: int) -> dict[str, Any]:
    return {"input_features": draw(rows, 8, 16), "decoder_input_ids": tokens(rows, 6), "use_cache": False}


_DISTIL = {"vocab_size": 96, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
_XLM = {"vocab_size": 96, "n_words": 96, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}

_READERS: dict[str, Callable[[], nn.Module]] = {
    "Roberta": of("RobertaForMaskedLM", SIZES),
    "XLM-Roberta": of("XLMRobertaForMaskedLM", SIZES),
    "Roberta-PreLayerNorm": of("RobertaPreLayerNormForMaskedLM", SIZES),
    "CamemBert": of("CamembertForMaskedLM", SIZES),
    "Electra": of("ElectraForMaskedLM", SIZES, embedding_size=16),
    "Albert": of("AlbertForMaskedLM", SIZES, embedding_size=16, inner_group_num=1),
    "Deberta": of("DebertaForMaskedLM", SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "Deberta 2": of("DebertaV2ForMaskedLM", SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DistilBert": of("DistilBertForMaskedLM", _DISTIL),
    "MPNet": of("MPNetForMaskedLM", SIZES),
    "ModernBert": of("ModernBertForMaskedLM", SIZES, global_attn_every_n_layers=2, local_attention=4),
    "MobileBert": of("MobileBertForMaskedLM", SIZES, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "SqueezeBert": of("SqueezeBertForMaskedLM", SIZES, embedding_size=32),
    "ConvBert": of("ConvBertForMaskedLM", SIZES, embedding_size=16, conv_kernel_size=3),
    "RemBert": of("RemBertForMaskedLM", SIZES, input_embedding_size=16, output_embedding_size=24),
    "RoFormer": of("RoFormerForMaskedLM", SIZES, embedding_size=32),
    "Ernie": of("ErnieForMaskedLM", SIZES),
    "Esm": of("EsmForMaskedLM", SIZES, mask_token_id=3, position_embedding_type="rotary"),
    "I-Bert": of("IBertForMaskedLM", SIZES),
    "Flaubert": of("FlaubertWithLMHeadModel", _XLM),
    "XLM": of("XLMWithLMHeadModel", _XLM),
    "XLNet": of("XLNetLMHeadModel", {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "Funnel": of(
        "FunnelForMaskedLM",
        {"vocab_size": 96, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    "BigBird": of("BigBirdForMaskedLM", SIZES, attention_type="original_full"),
    "Megatron-Bert": of("MegatronBertForMaskedLM", SIZES),
    "LayoutLM": of("LayoutLMForMaskedLM", SIZES),
    "Data2Vec": of("Data2VecTextForMaskedLM", SIZES),
    "Canine": of("CanineModel", SIZES, num_hash_buckets=32, local_transformer_stride=4),
    "Splinter": of("SplinterModel", SIZES),
    "UMT5 encoder": of(
        "UMT5EncoderModel", {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    ),
}

_PAIR = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_TRANSLATORS: dict[str, Callable[[], nn.Module]] = {
    "Bart": of("BartForConditionalGeneration", _PAIR),
    "mBart": of("MBartForConditionalGeneration", _PAIR),
    "Pegasus": of("PegasusForConditionalGeneration", _PAIR),
    "Pegasus-X": of("PegasusXForConditionalGeneration", _PAIR, block_size=4, num_global_tokens=2),
    "Marian": of("MarianMTModel", _PAIR),
    "Blenderbot": of("BlenderbotForConditionalGeneration", _PAIR),
    "Blenderbot small": of("BlenderbotSmallForConditionalGeneration", _PAIR),
    "M2M-100": of("M2M100ForConditionalGeneration", _PAIR),
    "PLBart": of("PLBartForConditionalGeneration", _PAIR),
    "BigBird-Pegasus": of("BigBirdPegasusForConditionalGeneration", _PAIR, attention_type="original_full"),
    "LED": of(
        "LEDForConditionalGeneration",
        _PAIR,
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "FSMT": of("FSMTForConditionalGeneration", _PAIR, langs=["en", "de"], src_vocab_size=96, tgt_vocab_size=96),
    "mT5": of("MT5ForConditionalGeneration", _T5, feed_forward_proj="gated-gelu"),
    "UMT5": of("UMT5ForConditionalGeneration", _T5),
    "LongT5": of("LongT5ForConditionalGeneration", _T5, local_radius=3),
    "Switch": of(
        "SwitchTransformersForConditionalGeneration",
        _T5,
        num_experts=4,
        router_jitter_noise=0.0,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "NLLB-MoE": of(
        "NllbMoeForConditionalGeneration", _PAIR, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2
    ),
    "ProphetNet": of(
        "ProphetNetForConditionalGeneration",
        {"vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 32, "decoder_start_token_id": 1},
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    ),
}

ENCODERS = {name: Entry(make, read) for name, make in _READERS.items()}
ENCODERS |= {name: Entry(make, translate) for name, make in _TRANSLATORS.items()}
ENCODERS |= {
    # Its attention uses windows of four tokens.
    "Longformer": Entry(of("LongformerForMaskedLM", SIZES, attention_window=4), read),
    "Nystromformer": Entry(
        of("NystromformerForMaskedLM", SIZES, num_landmarks=4, segment_means_seq_len=8, conv_kernel_size=3),
        lambda rows: {"input_ids": tokens(rows)},
    ),
    "FNet": Entry(of("FNetForMaskedLM", SIZES), lambda rows: {"input_ids": tokens(rows)}),
    "Whisper": Entry(
        of("WhisperForConditionalGeneration", _PAIR, num_mel_bins=8, max_source_positions=8, max_target_positions=16),
        hear,
    ),
    "Speech2Text": Entry(
        of(
            "Speech2TextForConditionalGeneration",
            _PAIR,
            input_feat_per_channel=8,
            conv_channels=16,
            max_source_positions=16,
            max_target_positions=16,
        ),
        lambda rows: {"input_features": draw(rows, 16, 8), "decoder_input_ids": tokens(rows, 6), "use_cache": False},
    ),
}
