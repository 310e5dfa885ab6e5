"""Tiny transformers models for sound, and for images with text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .decoders import GROUPED, of
from .decoders import SIZES as TEXT
from .entry import Entry, draw, padding, tokens
from .pictures import SIZES as PICTURE

_SOUND = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "mask_time_prob": 0.0,  # numpy draws what is masked
    "mask_feature_prob": 0.0,
}
_IMAGE = 95  # the token that stands for a picture


def hear(rows: int) -> dict[str, Any]:
    return {"input_values": draw(rows, 256)}


def compare(rows: int) -> dict[str, Any]:
    return {"input_ids": tokens(rows), "attention_mask": padding(rows), "pixel_values": draw(rows, 3, 16, 16)}


def describe(rows: int) -> dict[str, Any]:
    """Return a text with a picture of 16 patches inside."""
    ids = tokens(rows, 24, below=_IMAGE)
    ids[:, 2:18] = _IMAGE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": draw(rows, 3, 16, 16),
        "use_cache": False,
    }


def _pair(kind: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a maker of a text model and an image model whose outputs are compared."""
    return of(
        kind, {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": PICTURE, "projection_dim": 16, **more}
    )


def _seeing(kind: str, config: str, vision: str, text: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a maker of a language model that takes images."""

    def make() -> nn.Module:
        import transformers

        pictures = getattr(transformers, vision)(**PICTURE)
        language = getattr(transformers, text)(**GROUPED)
        sizes = getattr(transformers, config)(vision_config=pictures, text_config=language, **more)
        made: nn.Module = getattr(transformers, kind)(sizes)
        return made

    return make


_LLAVA = {
    "image_token_index": _IMAGE,
    "image_token_id": _IMAGE,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
}

SENSES = {
    "Wav2Vec2": Entry(of("Wav2Vec2ForCTC", _SOUND), hear),
    "Hubert": Entry(of("HubertForCTC", _SOUND), hear),
    "WavLM": Entry(of("WavLMForCTC", _SOUND), hear),
    "Data2Vec audio": Entry(of("Data2VecAudioForCTC", _SOUND), hear),
    "SEW": Entry(of("SEWForCTC", _SOUND, squeeze_factor=2), hear),
    "UniSpeech": Entry(of("UniSpeechForCTC", _SOUND), hear),
    "Wav2Vec2-Conformer": Entry(of("Wav2Vec2ConformerForCTC", _SOUND, conv_depthwise_kernel_size=3), hear),
    "AST": Entry(
        of("ASTForAudioClassification", PICTURE, max_length=32, num_mel_bins=16, time_stride=4, frequency_stride=4),
        lambda rows: {"input_values": draw(rows, 32, 16)},
    ),
    "CLIP": Entry(_pair("CLIPModel"), compare),
    "SigLIP": Entry(_pair("SiglipModel"), compare),
    "AltCLIP": Entry(_pair("AltCLIPModel"), compare),
    # Its loss is a small difference of larger numbers: float32 alone is off by 2e-4.
    "ChineseCLIP": Entry(_pair("ChineseCLIPModel"), compare, close=1e-3),
    "Blip": Entry(_pair("BlipModel"), compare),
    "X-CLIP": Entry(
        of(
            "XCLIPModel",
            {"text_config": TEXT, "projection_dim": 16, "prompt_layers": 1, "prompt_num_attention_heads": 4},
            vision_config={
                **PICTURE,
                "num_frames": 2,
                "mit_hidden_size": 16,
                "mit_intermediate_size": 32,
                "mit_num_attention_heads": 4,
            },
        ),
        lambda rows: {
            "input_ids": tokens(rows),
            "attention_mask": padding(rows),
            "pixel_values": draw(rows, 2, 3, 16, 16),
        },
        close=2e-4,
    ),
    "Llava": Entry(
        _seeing("LlavaForConditionalGeneration", "LlavaConfig", "CLIPVisionConfig", "LlamaConfig", **_LLAVA), describe
    ),
    "PaliGemma": Entry(
        _seeing(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            "SiglipVisionConfig",
            "GemmaConfig",
            image_token_id=_IMAGE,
            projection_dim=32,
        ),
        describe,
    ),
    "GIT": Entry(
        of("GitForCausalLM", TEXT, vision_config=PICTURE),
        lambda rows: {**compare(rows), "attention_mask": torch.ones(rows, 8, dtype=torch.long), "use_cache": False},
    ),
    "ViLT": Entry(
        of("ViltForQuestionAnswering", {**TEXT, **PICTURE}, max_image_length=-1),
        lambda rows: {**compare(rows), "pixel_mask": torch.ones(rows, 16, 16, dtype=torch.long)},
    ),
    "Flava": Entry(
        of(
            "FlavaModel",
            {},
            text_config=TEXT,
            image_config=PICTURE,
            multimodal_config=PICTURE,
            projection_dim=16,
            hidden_size=32,
        ),
        compare,
    ),
    "CLIPSeg": Entry(
        _pair(
            "CLIPSegForImageSegmentation",
            reduce_dim=16,
            extract_layers=[0, 1],
            decoder_num_attention_heads=4,
            decoder_intermediate_size=32,
        ),
        compare,
        close=1e-3,
    ),
    "SAM": Entry(
        of(
            "SamModel",
            {},
            vision_config={
                **PICTURE,
                "output_channels": 16,
                "num_pos_feats": 8,
                "mlp_dim": 64,
                "window_size": 2,
                "global_attn_indexes": [1],
            },
            prompt_encoder_config={"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
            mask_decoder_config={
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "iou_head_hidden_dim": 16,
            },
        ),
        lambda rows: {
            "pixel_values": draw(rows, 3, 16, 16),
            "input_points": draw(rows, 1, 2, 2),
            "input_labels": torch.ones(rows, 1, 2, dtype=torch.long),
        },
    ),
    "Encodec": Entry(
        of(
            "EncodecModel",
            {},
            num_filters=4,
            upsampling_ratios=[2, 2],
            hidden_size=16,
            codebook_size=16,
            codebook_dim=16,
            num_lstm_layers=1,
        ),
        lambda rows: {"input_values": draw(rows, 1, 256)},
    ),
    "PatchTST": Entry(
        of(
            "PatchTSTForPrediction",
            {
                "num_input_channels": 2,
                "context_length": 16,
                "patch_length": 4,
                "patch_stride": 4,
                "d_model": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "ffn_dim": 32,
                "prediction_length": 4,
                "loss": "mse",
                "distribution_output": "normal",
            },
        ),
        lambda rows: {"past_values": draw(rows, 16, 2)},
    ),
    "Decision Transformer": Entry(
        of(
            "DecisionTransformerModel",
            {"state_dim": 4, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 16},
        ),
        lambda rows: {
            "states": draw(rows, 5, 4),
            "actions": draw(rows, 5, 3),
            "rewards": draw(rows, 5, 1),
            "returns_to_go": draw(rows, 5, 1),
            "timesteps": torch.arange(5).repeat(rows, 1),
            "attention_mask": torch.ones(rows, 5, dtype=torch.long),
        },
    ),
}
