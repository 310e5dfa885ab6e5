"""Tiny image models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .decoders import of
from .entry import Entry, draw

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 10,
}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 10,
}
CONV = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 10}


def see(rows: int, size: int = 16) -> dict[str, Any]:
    return {"pixel_values": draw(rows, 3, size, size)}


def _hidden(rows: int) -> dict[str, Any]:
    """Return images with the noise from which the hidden patches are drawn."""
    return {**see(rows), "noise": draw(rows, 16)}


_MADE: dict[str, Callable[[], nn.Module]] = {
    "BEiT": of("BeitForImageClassification", SIZES, use_relative_position_bias=True),
    "BEiT, shared bias": of("BeitForImageClassification", SIZES, use_shared_relative_position_bias=True),
    "Data2Vec vision": of("Data2VecVisionForImageClassification", SIZES, use_relative_position_bias=True),
    "DeiT": of("DeiTForImageClassification", SIZES),
    "DINOv2": of("Dinov2ForImageClassification", SIZES, mlp_ratio=2),
    "DINOv2 registers": of("Dinov2WithRegistersForImageClassification", SIZES, mlp_ratio=2, num_register_tokens=2),
    "DINOv3": of("DINOv3ViTModel", SIZES, num_register_tokens=2, pos_embed_rescale=None),
    "ViT-MSN": of("ViTMSNForImageClassification", SIZES),
    "I-JEPA": of("IJepaForImageClassification", SIZES),
    "Hiera": of(
        "HieraForImageClassification",
        {"num_labels": 10},
        embed_dim=8,
        image_size=[32, 32],
        depths=[1, 1],
        num_heads=[1, 2],
        patch_stride=[4, 4],
        patch_size=[7, 7],
        patch_padding=[3, 3],
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        num_query_pool=1,
    ),
    "Swin": of("SwinForImageClassification", SWIN),
    "Swin 2": of("Swinv2ForImageClassification", SWIN),
    "ConvNext": of("ConvNextForImageClassification", CONV),
    "ConvNext 2": of("ConvNextV2ForImageClassification", CONV),
    "ResNet of transformers": of("ResNetForImageClassification", CONV),
    "RegNet": of("RegNetForImageClassification", CONV, groups_width=8),
    "MobileNet 1": of("MobileNetV1ForImageClassification", {"image_size": 32, "num_labels": 10}, depth_multiplier=0.25),
    "MobileNet 2": of("MobileNetV2ForImageClassification", {"image_size": 32, "num_labels": 10}, depth_multiplier=0.25),
    "MobileViT": of(
        "MobileViTForImageClassification",
        {"image_size": 32, "num_labels": 10},
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
        num_attention_heads=4,
    ),
    "FocalNet": of(
        "FocalNetForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": 10,
        },
    ),
    "PoolFormer": of(
        "PoolFormerForImageClassification", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 10}
    ),
    "SegFormer": of(
        "SegformerForSemanticSegmentation",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "num_labels": 5},
        decoder_hidden_size=16,
    ),
    "PVT": of(
        "PvtForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "num_labels": 10},
        image_size=32,
    ),
    "PVT 2": of(
        "PvtV2ForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "num_labels": 10},
        image_size=32,
    ),
    "CvT": of(
        "CvtForImageClassification",
        {"num_labels": 10},
        embed_dim=[8, 16, 16],
        num_heads=[1, 2, 2],
        depth=[1, 2, 3],
        drop_path_rate=[0.0, 0.0, 0.0],
    ),
    "LeViT": of(
        "LevitForImageClassification",
        {"image_size": 32, "num_labels": 10},
        hidden_sizes=[16, 16, 16],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    "SwiftFormer": of(
        "SwiftFormerForImageClassification",
        {"image_size": 32, "num_labels": 10, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16]},
    ),
    "YOLOS": of("YolosForObjectDetection", {**SIZES, "image_size": [16, 16]}, num_detection_tokens=4),
    "ImageGPT": of(
        "ImageGPTForImageClassification",
        {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_labels": 10},
    ),
}
_LARGER = {
    "ConvNext",
    "ConvNext 2",
    "ResNet of transformers",
    "RegNet",
    "MobileNet 1",
    "MobileNet 2",
    "MobileViT",
    "PoolFormer",
    "SegFormer",
    "PVT",
    "PVT 2",
    "CvT",
    "LeViT",
    "SwiftFormer",
    "Hiera",
}


def _look_closely(rows: int) -> dict[str, Any]:
    return see(rows, 32)


def _tokens_of_pictures(rows: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(rows * 16).view(rows, 16) % 90, "use_cache": False}


PICTURES = {name: Entry(make, _look_closely if name in _LARGER else see) for name, make in _MADE.items()}
PICTURES["ImageGPT"] = Entry(_MADE["ImageGPT"], _tokens_of_pictures)
PICTURES["BiT"] = Entry(
    of("BitForImageClassification", CONV, num_groups=4),
    _look_closely,
    close=1e-3,  # it divides by the deviation of its weights: float32 alone is off by 3e-5
)
PICTURES["DPT"] = Entry(
    of(
        "DPTForDepthEstimation",
        {**SIZES, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        reassemble_factors=[1, 1, 1, 1],
    ),
    see,
    close=1e-3,  # for 128 x 128 numbers: float32 alone is off by 2e-4
)
PICTURES["ViT-MAE"] = Entry(
    of(
        "ViTMAEForPreTraining",
        SIZES,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    ),
    _hidden,
)
