"""Hypha's jobs: those of its RFC, as JSON or as the RFC writes it, and those of today's scheduler, in TOML."""

from __future__ import annotations

import re
from typing import Any

from .imported import Foreign, Imported, Importer
from .reading import NO_FIELD, Part, Whole
from .relaxed_json import read_relaxed

_SCRIPT = "torch_training.py"  # that of the RFC
_NO_SCRIPT = f"source: a job of Hypha names no script, its workers have one: write {_SCRIPT}, which reads job_spec()"
_NOT_YET = 'of the algorithm "diloco", which no spec can have yet: "sync" agrees in every step'
_PLACEHOLDER = "a placeholder: nothing is filled in"
_TOKEN = "a spec keeps no token: name the variable that holds it in secrets"
_MARKET = "of the market of workers: give nodes, each with its host"
_OF_NETWORK = "of Hypha's own network: nodes are reached over SSH"
_NO_PREPROCESSOR = "a spec has no preprocessor: the script makes its own"
_OWN_SECTIONS = ("preprocessor", "model_destination", "metrics")
_IS_PLACEHOLDER = re.compile(r"<[^<>]*>")
_SCHEDULES = {"cosine-with-warmup": "cosine", "linear-with-warmup": "linear", "cosine": "cosine", "linear": "linear"}
_SCHEDULES |= {"wsd": "wsd", "constant": "constant"}
_PRECISIONS = {"no": "fp32", "bf16": "bf16"}
_RFC_KEYS = {"driver", "training_definition"}


def _is_one(foreign: Foreign) -> bool:
    return _is_scheduler(foreign.document) or _is_rfc(_read_any(foreign))


def _is_scheduler(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("scheduler"), dict) and "job" in document["scheduler"]


def _is_rfc(document: Any) -> bool:
    return isinstance(document, dict) and document.keys() >= _RFC_KEYS
