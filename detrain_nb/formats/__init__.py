"""Specs written as files of other tools, and such files read as specs: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..documents import format_document, suffix_of
from ..errors import SpecError
from ..plan.targets import TARGETS, as_typed
from ..spec import Finding, PipelineSpec, nodes_from_lease
from ..storage import locate
from ..text import name_some
from . import accelerate, akash, pytorchjob, runai, slurm, torchrun, torchtitan, trainjob
from .imported import Imported
from .importing import IMPORTERS, explain_no_host, import_file, import_text
from .script_import import import_command

__all__ = [
    "EXPORTERS",
    "IMPORTERS",
    "Imported",
    "check_export",
    "export_spec",
    "import_command",
    "import_file",
    "import_text",
    "nodes_from_lease",
    "write_export",
    "write_import",
]

_MOST_OPTION_CHARS = 4096

# ``export(spec, plan)`` returns the text of a file; the target's options are further keywords, each a string.
EXPORTERS: Mapping[str, Callable[..., str]] = {
    "torchrun": torchrun.export,
    "slurm": slurm.export,
    "akash": akash.export,
    "pytorchjob": pytorchjob.export,
    "trainjob": trainjob.export,
    "runai": runai.export,
    "torchtitan": torchtitan.export,
    "torchtitan-toml": torchtitan.export_toml,
    "accelerate": accelerate.export,
}


def export_spec(spec: PipelineSpec, to: str, *, gpus: int = 0, options: Mapping[str, str | None] | None = None) -> str:
    """Return a spec as the text of a file in the format ``to``; a node without ``devices`` has ``gpus`` GPUs.

    ``to`` is one of ``EXPORTERS``: torchrun, slurm, akash, pytorchjob, trainjob, runai, torchtitan, torchtitan-toml and
    accelerate. ``options`` are those of the target, as in ``{"namespace": "team"}``, see
    `detrain_nb.pipelines.describe_targets`; None or an empty string means not given.
    Raises: SpecError, also for a spec that the format cannot express.
    """
    if to not in EXPORTERS:
        raise SpecError(f"{to!r} is not an export format: give one of {', '.join(EXPORTERS)}")
    target = TARGETS[to]
    given = {name: value for name, value in (options or {}).items() if value}
    if unknown := [name for name in given if name not in target.options]:
        known = f"it has {', '.join(map(as_typed, target.options))}" if target.options else "it has no options"
        raise SpecError(f"{to} has no option {as_typed(unknown[0])}: {known}")
    if long := [name for name, value in given.items() if len(value) > _MOST_OPTION_CHARS]:
        said = f"has {len(given[long[0]]):,} characters: give at most {_MOST_OPTION_CHARS:,}"
        raise SpecError(f"{as_typed(long[0])} {said}")
    if gpus < 0:
        raise SpecError(f"--gpus {gpus}: give 0 or more")
    plan = spec.plan(gpus=dict.fromkeys(_name_unknown(spec) if spec.nodes else [""], gpus) if gpus else None)
    return EXPORTERS[to](spec, plan, **given)


def check_export(spec: PipelineSpec, *, gpus: int = 0) -> list[Finding]:
    """Return the faults that an export of a spec would have, and as warnings those that it may have."""
    findings = [found for found in spec.check() if found.field != "image"]  # which concerns only our own jobs
    if len(spec.nodes) == 1 and (said := explain_no_host(spec.nodes[0].host)):
        findings.append(Finding("nodes.host", said, "warning"))
    if not gpus and (names := _name_unknown(spec)):
        said = f"no GPUs are exported for {name_some(names)}: if each has some, give their number as --gpus"
        findings.append(Finding("nodes.devices", said, "warning"))
    return findings


def _name_unknown(spec: PipelineSpec) -> list[str]:
    """Return the names of the nodes whose number of GPUs is unknown."""
    return [node.name for node in spec.nodes if node.devices == "auto"] if spec.nodes else ["this machine"]


def write_export(text: str, target: str) -> str:
    """Write an exported text to a path or fsspec URL, and return a message about that.

    Raises: DetrainError when it cannot be written there.
    """
    place = locate(target)
    before = ", replacing the old file" if place.exists() else ""
    place.write(text.encode("utf-8"))
    return f"wrote {place.name}{before}"


def write_import(imported: Imported, target: str) -> str:
    """Write what was imported as a spec, or as a nodes file, in the format of the suffix.

    Returns a message about that. Raises: SpecError for another suffix, or when it cannot be written there.
    """
    return write_export(format_document(imported.to_dict(), suffix_of(target), where=target), target)
