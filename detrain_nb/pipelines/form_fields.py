"""The fields of a form, described for a page; all of it comes from the models of the spec and their JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel

from ..plan.choices import ONE_OF
from ..spec import Node, Parallelism, PipelineSpec

__all__ = ["FIELDS", "HOW_OF", "KIND_PATH", "NODE_FIELDS", "SOURCE_KINDS", "STEPS", "FieldInfo", "Kind", "Step"]

Kind = Literal["text", "area", "number", "flag", "choice", "list", "words", "lines", "variables"]
Step = Literal["general", "nodes", "source"]

KIND_PATH = "source.kind"  # only in the form: which of the exclusive fields of a source is used
SOURCE_KINDS = tuple(name.removeprefix("source.") for group in ONE_OF for name in group if name.startswith("source."))
_STEP_OF: Mapping[str, Step] = {  # by the first name of a path
    **dict.fromkeys(("name", "description", "parallelism", "training", "model", "image"), "general"),
    **dict.fromkeys(("nodes", "rendezvous"), "nodes"),
    **dict.fromkeys(("source", "data", "checkpoint", "artifacts", "env", "secrets"), "source"),
}
STEPS: tuple[Step, ...] = ("general", "nodes", "source")
_OF_KIND = {
    "source.entry",
    *(f"source.{kind}" for kind in SOURCE_KINDS),
}  # required for their kind of source, else absent
_WRITTEN: Mapping[str, Kind] = {  # texts of several lines, and lists that are not written with commas
    "description": "area",
    "source.script_text": "area",
    "source.arguments": "words",
    "source.setup": "lines",
    "setup": "lines",
}
_HOW: Mapping[Kind, str] = {"variables": "one NAME=value per line", "words": "as in a shell: --name 'a b' --fast"}
HOW_OF: Mapping[str, str] = {  # by path, for fields whose hint does not explain their use
    "name": "name of the file, its jobs and the model (--model_name, in the style detrain); a-z, A-Z, 0-9 and . _ -",
    "source.argument_style": '"detrain" adds --gpu, --epochs, --batch_size, --lr, --model_name (the name of the '
    "pipeline), --split_size",
    "source.git.url": "https://host/path, ssh://host/path, user@host:path or a path, without a password: a private "
    "repository needs a token (https) or a key (ssh)",
    "source.git.ref": "a branch, a tag or a commit; each start uses its latest state, and fetches only new commits: "
    "a pull, not another clone",
    "source.git.how": '"clone": each node fetches from the git host; "bundle": this machine fetches and sends it; '
    '"auto": "clone", or "bundle" if a node cannot reach the git host',
    "source.git.token": "for a private repository over https: the name of an environment variable on this machine that "
    "holds a token; never the token itself",
    "source.git.ssh_key": "for a private repository over ssh: the path of a private key on the machine that clones; "
    "empty: the keys that ssh finds there",
}
_UNITS = {"_mbit_s": " (Mbit/s)", "_ms": " (ms)", "_gb": " (GB)", "_s": " (s)"}
_TITLES = {
    **{axis: axis for axis in Parallelism().axes},
    "url": "URL",
    "id": "ID",
    "ssh_key": "SSH key",
    "env": "Environment variables",
}
_SECTIONS = {"data": "Data", "model": "Model", "checkpoint": "Checkpoint"}  # sections with equal field names


@dataclass(frozen=True)
class FieldInfo:
    """A field: its ``path``, such as ``training.epochs``, and what a page shows of it.

    ``is_required``: for a field of a kind of source, once that kind is chosen. ``choices`` are suggestions unless the
    kind is choice. ``is_whole``: a number without a fraction. ``low`` and ``high`` are inclusive bounds, ``above`` is
    an exclusive lower bound. ``default`` is the text of the value that holds without input; empty if there is none.
    """

    path: str
    title: str
    hint: str
    kind: Kind
    step: Step
    is_required: bool
    is_whole: bool
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    above: float | None
    default: str
    default_value: Any
    annotation: Any

    def to_json(self) -> dict[str, Any]:
        """Return what a page needs, as plain JSON; ``how`` explains the input where the hint does not."""
        names = ("path", "title", "hint", "kind", "step", "low", "high", "above", "default")
        return {
            **{name: getattr(self, name) for name in names},
            "how": HOW_OF.get(self.path) or _HOW.get(self.kind, ""),
            "required": self.is_required,
            "whole": self.is_whole,
            "choices": [*self.choices],
        }


@cache
def _schema() -> dict[str, Any]:
    return PipelineSpec.model_json_schema()


def _walk(model: type[BaseModel], before: str, step: Step | None, *, is_optional: bool = False) -> Iterator[FieldInfo]:
    """Yield the input fields of a model and of the models in it, except its list of nodes."""
    schema = _schema() if model is PipelineSpec else _schema()["$defs"][model.__name__]
    for name, field in model.model_fields.items():
        path = f"{before}{name}"
        place = step or _STEP_OF[name]
        inner = _model_in(field.annotation)
        if path == "nodes":
            continue
        if inner is not None:
            is_left_out = type(None) in get_args(field.annotation) and path not in _OF_KIND
            yield from _walk(inner, f"{path}.", place, is_optional=is_left_out)
        else:
            is_required = path in _OF_KIND or (field.is_required() and not is_optional)
            yield _describe(path, field, schema["properties"][name], place, is_required=is_required)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _describe(path: str, field: Any, schema: Mapping[str, Any], step: Step, *, is_required: bool) -> FieldInfo:
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    choices = [str(each) for part in parts for each in part.get("enum", [part["const"]] if "const" in part else [])]
    default = None if field.is_required() else _plain(field.default)
    return FieldInfo(
        path=path,
        title=field.title or _title(path),
        hint=field.description or "",
        kind=_kind(path, parts, is_closed=all("enum" in part or "const" in part for part in parts)),
        step=step,
        is_required=is_required,
        is_whole=_is_whole(parts),
        choices=tuple(dict.fromkeys(choices)),
        low=_bound(parts, "minimum"),
        high=_highest(parts),
        above=_bound(parts, "exclusiveMinimum"),
        default=_show_default(default),
        default_value=default,
        annotation=field.annotation,
    )


def _kind(path: str, parts: list[Mapping[str, Any]], *, is_closed: bool) -> Kind:
    if path in _WRITTEN:
        return _WRITTEN[path]
    types = {part.get("type") for part in parts}
    if is_closed:
        return "choice"
    if "object" in types:
        return "variables"
    if types == {"array"}:
        return "list"
    if types == {"boolean"}:
        return "flag"
    if types <= {"integer", "number"}:
        return "number"
    return "text"


def _bound(parts: list[Mapping[str, Any]], name: str) -> float | None:
    return next((part[name] for part in parts if name in part), None)


def _is_whole(parts: list[Mapping[str, Any]]) -> bool:
    return all(part.get("type") == "integer" for part in parts)


def _highest(parts: list[Mapping[str, Any]]) -> float | None:
    above = _bound(parts, "exclusiveMaximum")
    return above - 1 if above is not None and _is_whole(parts) else _bound(parts, "maximum")


def _title(path: str) -> str:
    section, _, name = path.rpartition(".")
    if section in _SECTIONS:
        own = _TITLES.get(name, name)
        return f"{_SECTIONS[section]} {own}"
    if name in _TITLES:
        return _TITLES[name]
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    words = name.removesuffix(unit).replace("_", " ")
    return f"{words[:1].upper()}{words[1:]}{_UNITS.get(unit, '')}"


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _show_default(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _kind_of_source() -> FieldInfo:
    hint = "what the ranks run: a script, cells of a notebook, a repository, a folder or a module"
    return FieldInfo(
        KIND_PATH, "Source", hint, "choice", "source", True, False, SOURCE_KINDS, None, None, None, "", None, str
    )


FIELDS: Mapping[str, FieldInfo] = {each.path: each for each in (*_walk(PipelineSpec, "", None), _kind_of_source())}
NODE_FIELDS: Mapping[str, FieldInfo] = {each.path: each for each in _walk(Node, "", "nodes")}
