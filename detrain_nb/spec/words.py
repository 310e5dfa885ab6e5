"""What a text in a spec may be: names, paths, lines; and how a list of such texts is read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from ..plan.names import NAME, VARIABLE

_LIKE_RANKS = re.compile(r"[0-9_-]+|all")  # what plan.parse_ranks reads, and what looks like it
_OURS = re.compile(
    r"DETRAIN_NB_.*|TORCHELASTIC_.*|PET_.*|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)"
)
# Patterns for editors, in the syntax common to Python and JavaScript; they refuse no more than the models do.
NODE_NAME = rf"(?!(?:[0-9_-]+|[aA][lL][lL])$){NAME.pattern}"
FREE_VARIABLE = rf"(?!(?:{_OURS.pattern})$){VARIABLE.pattern}"
ONE_LINE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*"
PATH = rf"(?!-)(?=.*\S){ONE_LINE}"
NODE_PATH = rf"(?![A-Za-z]:[\\/]|\\\\){PATH}"
INSIDE = rf"(?![/~])(?!(?:.*/)?\.\.(?:/|$))(?!.*\\){PATH}"
MODULE = r"[^\s\d.][^\s.]*(?:\.[^\s\d.][^\s.]*){0,30}"
PYTHON_FILE = r".*\.[pP][yY]"
_MOST_PATH_CHARS = 4096
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*){0,30}")


def only(is_right: Callable[[str], object]) -> AfterValidator:
    """Accept a text for which ``is_right`` is true; the error is built from the field's description."""

    def check(text: str) -> str:
        if not is_right(text):
            raise ValueError
        return text

    return AfterValidator(check)


def like(pattern: str) -> WithJsonSchema:
    """Let editors mark a text that does not match ``pattern``, which accepts whatever the model accepts."""
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$"})


def is_node_name(text: str) -> bool:
    """Return whether a text is a name that cannot be read as a choice of ranks."""
    return is_job_name(text) and not _LIKE_RANKS.fullmatch(text.lower())


def is_job_name(text: str) -> bool:
    return bool(NAME.fullmatch(text))


def is_variable(text: str) -> bool:
    """Return whether a text is the name of an environment variable."""
    return bool(VARIABLE.fullmatch(text))


def check_free(name: str) -> str:
    """Return the name of a variable, if the user may set it. Raises: ValueError."""
    if _OURS.fullmatch(name):
        raise ValueError(f"{name} is set on every rank by torchrun or detrain_nb: give it another name")
    return name


def is_module(text: str) -> bool:
    """Return whether a text is the dotted name of a Python module."""
    return bool(_MODULE.fullmatch(text)) and len(text) <= 250


def is_path(text: str) -> bool:
    """Return whether a text is a path for an argv: not blank, no option, no control characters, not too long."""
    return len(text) <= _MOST_PATH_CHARS and bool(text.strip()) and not text.startswith("-") and is_one_line(text)


def check_node_path(text: str) -> str:
    """Return a path on nodes. Raises: ValueError for one of Windows, which would be a plain name there."""
    if _OF_WINDOWS.match(text):
        raise ValueError(
            "is a Windows path but ranks run on Linux: give the path that it has there, such as /mnt/share"
        )
    return text


def is_inside(text: str) -> bool:
    """Return whether a text is a path inside a folder, which does not lead out of it."""
    return is_path(text) and not text.startswith(("/", "~")) and "\\" not in text and ".." not in text.split("/")


def is_one_line(text: str, *, allowed: str = "") -> bool:
    """Return whether a text has no control characters, line ends, or characters that UTF-8 cannot encode."""
    if text.isprintable():  # the usual case, and a fast check
        return True
    return not any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} for char in text if char not in allowed)


def is_for_argv(text: str) -> bool:
    """Return whether a text can be an argument or a variable's value: no NUL, nothing that UTF-8 cannot encode."""
    return "\0" not in text and not any(unicodedata.category(char) == "Cs" for char in text)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list or a tuple as a tuple. Raises: ValueError."""
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(value)


def as_set_of(value: Any) -> tuple[Any, ...]:
    """Return a list as a tuple. Raises: ValueError when an item is in it twice."""
    items = as_tuple(value)
    if len(set(map(repr, items))) < len(items):
        raise ValueError
    return items


def as_lines(value: Any) -> tuple[str, ...]:
    """Return the shell lines of a text, or of a list of texts, without empty ones at either end. Raises: ValueError."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    lines = [line.removesuffix("\r") for text in texts for line in text.split("\n")]
    if not all(is_one_line(line, allowed="\t") for line in lines):
        raise ValueError
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return tuple(lines)


Path = Annotated[str, only(is_path), like(PATH)]
NodePath = Annotated[str, only(is_path), AfterValidator(check_node_path), like(NODE_PATH)]
EACH_ONCE: dict[str, Any] = {"uniqueItems": True}
_TEXT: dict[str, Any] = {"type": "string"}
Lines = Annotated[
    tuple[str, ...],
    BeforeValidator(as_lines),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}, mode="validation"),
]
JobName = Annotated[str, only(is_job_name), like(NAME.pattern)]
Module = Annotated[str, only(is_module), like(MODULE)]
Inside = Annotated[str, only(is_inside), like(INSIDE)]
Variable = Annotated[str, only(is_variable), like(VARIABLE.pattern)]
FreeVariable = Annotated[Variable, AfterValidator(check_free), like(FREE_VARIABLE)]
Variables = Annotated[tuple[Variable, ...], BeforeValidator(as_set_of), Field(json_schema_extra=EACH_ONCE)]
