"""Outcomes of the zoo's models other than "right": refused, with the user's message, or a known fault."""

from __future__ import annotations

Outcomes = dict[str, dict[str, str]]

_HOOK = r"first\.weight has a hook on its gradient, which .* would drop: "
_SPARSE = r"table has sparse gradients, .*: set sparse=False, or keep the model whole"
_WRITTEN = r"table renormalizes its weight in the forward \(max_norm=0\.7\), .* keep the model whole"

_BESIDE = r"cuts: none; not at .*: besides its input, .* still needed after it"

# By name and layout: a pattern of the message.
REFUSED: Outcomes = {
    "by value": {"pp": r"cuts: none; not at blocks\.0: the code around it has read a tensor's value before"},
    "Llava": {"pp": _BESIDE},
    "PaliGemma": {"pp": _BESIDE},
    "SAM": {"pp": _BESIDE},
    # In evaluation it also returns the memory of every layer.
    "XLNet": {"pp": r"with this batch in evaluation mode the model cannot be cut at .*: besides its input,"},
    "hooks behind accumulation": {"tp": _HOOK, "dp_shard": _HOOK},
    "max_norm": {"tp": _WRITTEN, "dp_shard": _WRITTEN},
    "Encodec": {
        "pp": r"output\['audio_codes'\] of the model has shape \(1, 2, 1, 64\) for 2 rows: .* return it with the rows"
    },
    # In evaluation it fills a layer's cache, which another call reads.
    "LeViT": {
        "pp": r"evaluation mode .*attention_bias_cache, which the model keeps for its next call, is not a buffer"
    },
    # In evaluation it divides the weights of later layers.
    "RWKV": {"dp_shard": r"forward writes into its parameter rwkv\.blocks\.0\.attention\.output\.weight and 3 more"},
    "parameter hooks": {"tp": _HOOK, "dp_shard": _HOOK},
    "sparse gradients": {"dp_shard": _SPARSE},
}

# Tensor parallel ranks have no parts of these, so a right result under tp shows nothing about the cut.
WHOLE = {
    "checkpointed, reentrant",
    "complex parameters",
    "Encodec",
    "extracting hook",
    "LED",
    "mixed dtypes inside",
    "SwiftFormer",
    "ViLT",
    "writes its input",
    "XGLM",
}

# Known faults, by name and layout: a pattern of the outcome. Fixing one removes its line.
FAULTS: Outcomes = {}
