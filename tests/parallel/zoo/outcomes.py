"""What becomes of the models of the zoo where it is not "right": refused, with what a user reads, or a known fault."""

from __future__ import annotations

Outcomes = dict[str, dict[str, str]]

_HOOK = r"first\.weight has a hook on its gradient, which .* would drop: "
_SPARSE = r"table has sparse gradients, .*: set sparse=False, or keep the model whole"
_WRITTEN = r"table renormalizes its weight in the forward \(max_norm=0\.7\), .* keep the model whole"

_BESIDE = r"cuts: none; not at .*: besides its input, .* still needed after it"

# By name and layout: a pattern of the reason.
REFUSED: Outcomes = {
    "by value": {"pp": r"cuts: none; not at blocks\.0: the code around it has read a tensor's value before"},
    "Llava": {"pp": _BESIDE},
    "PaliGemma": {"pp": _BESIDE},
    "SAM": {"pp": _BESIDE},
    # In evaluation it gives its memory too, of every layer.
    "XLNet": {"pp": r"with this batch in evaluation mode the model cannot be cut at .*: besides its input,"},
    "hooks behind accumulation": {"tp": _HOOK, "dp_shard": _HOOK},
    "max_norm": {"tp": _WRITTEN, "dp_shard": _WRITTEN},
    "Encodec": {
        "pp": r"output\['audio_codes'\] of the model has shape \(1, 2, 1, 64\) for 2 rows: .* return it with the rows"
    },
    # In evaluation it fills a cache of a layer, which another call reads.
    "LeViT": {
        "pp": r"evaluation mode .*attention_bias_cache, which the model keeps for its next call, is not a buffer"
    },
    # In evaluation it divides weights of later layers.
    "RWKV": {"dp_shard": r"forward writes into its parameter rwkv\.blocks\.0\.attention\.output\.weight and 3 more"},
    "parameter hooks": {"tp": _HOOK, "dp_shard": _HOOK},
    "sparse gradients": {"dp_shard": _SPARSE},
}

# Of which tensor parallel ranks have no parts: that a model is right there would say nothing of the cut.
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

# What is wrong still, by name and layout: a pattern of the outcome. Whoever mends one takes its line away.
FAULTS: Outcomes = {}
