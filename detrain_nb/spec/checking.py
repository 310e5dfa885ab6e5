"""Checks of a spec that need no node: missing files, numbers that do not fit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..guarded import open_file
from ..plan.choices import SCHEDULES
from ..plan.git_urls import parse_git_url
from ..text import name_some
from .findings import Finding, findings_of
from .grammar import check_python
from .notebook import MOST_BYTES, script_of_notebook
from .pipeline_fields import PipelineFields
from .planning import describe_unknown_gpus, find_rounds_that_do_not_fit, plan_spec
from .source import Source

_READ_BY_SCRIPTS = ("parallelism", "training", "data", "model", "checkpoint")

_FIELDS_OF_A_PLAN = {  # by the beginning of its error
    "mesh": "parallelism",
    "batch size": "training.batch_size",
    **dict.fromkeys(SCHEDULES, "parallelism.microbatches"),
}


def check_spec(spec: PipelineFields) -> list[Finding]:
    """Return the faults of a spec, and the possible ones as warnings."""
    checks = (
        _check_urls,
        _check_reader,
        _check_plan,
        _check_schedule,
        _check_speeds,
        _check_rendezvous,
        _check_checkpoint,
        _check_image,
    )
    findings = (finding for check in checks for finding in check(spec))
    return [*_check_source(spec.source), *_check_hidden(spec.source), *findings]


def check_source(document: Mapping[str, Any]) -> list[Finding]:
    """Return the faults of what a source runs, whatever else is wrong in the ``document`` of its spec."""
    given = document.get("source")
    if not isinstance(given, Mapping):
        return []
    try:
        source = Source(**{name: given[name] for name in (*_LOOKS, "entry") if name in given})
    except SpecError:
        return []  # the spec reports its faults
    return [*_check_source(source)]


def _check_plan(spec: PipelineFields) -> Iterator[Finding]:
    """Plan the ranks; how many a node has is unknown here if neither ``ranks`` nor GPU indices are given."""
    try:
        plan = plan_spec(spec, gpus={})
        if misfits := find_rounds_that_do_not_fit(spec, plan):
            some = f"{name_some([*map(str, misfits)])} of {len(plan.nodes)} nodes"
            said = f"with {some} a script that reads its spec cannot continue: {next(iter(misfits.values()))}"
            yield Finding("rendezvous.min_nodes", said, "warning")
    except SpecError as exc:
        field = next((field for begin, field in _FIELDS_OF_A_PLAN.items() if str(exc).startswith(begin)), "")
        if describe_unknown_gpus(spec, {}):
            yield Finding(field, str(exc), "warning")
        else:
            yield from findings_of(exc, field=field)


def _check_source(source: Source) -> Iterator[Finding]:
    for kind, look in _LOOKS.items():
        try:
            look(source)
        except SpecError as exc:
            yield Finding(f"source.{kind}", str(exc))
    if source.git and source.git.token and not parse_git_url(source.git.url).hides_token:
        yield Finding("source.git.token", "a token is sent over https only: give an https:// url, or leave it out")


def _check_speeds(spec: PipelineFields) -> Iterator[Finding]:
    fastest = max((node.relative_speed or 0.0 for node in spec.nodes), default=0.0)
    for node in spec.nodes if spec.parallelism.algorithm == "sync" else ():
        if node.relative_speed and node.relative_speed < fastest / 2:
            said = f"{node.relative_speed:g}, the fastest has {fastest:g}, and every step waits for the slowest rank"
            yield Finding(
                f"nodes.{node.name}.relative_speed", f"{said}: give it fewer ranks, or leave it out", "warning"
            )


def _check_reader(spec: PipelineFields) -> Iterator[Finding]:
    """Check that the script reads the fields meant for it; unknown for a folder, a repository or a module."""
    given = spec.to_fields()
    fields = [f"{section}.{name}" for section in _READ_BY_SCRIPTS for name in given.get(section, {})]
    script = _script_of(spec.source)
    if fields and script and spec.source.argument_style == "plain" and "job_spec" not in script.lower():
        said = f"the script does not call job_spec(), which it needs to read {name_some(fields, most=6)}"
        yield Finding("source", f"{said}: call it, unless a module that it imports does", "warning")


def _check_urls(spec: PipelineFields) -> Iterator[Finding]:
    """Warn of what follows the ``?`` of a URL: it may be a signature, and a spec is not secret."""
    urls = {name: found.url for name in ("data", "model", "checkpoint") if (found := getattr(spec, name))}
    places = {f"{name}.url": url for name, url in urls.items()} | {"source.path": spec.source.path or ""}
    for field, url in places.items():
        if "://" in url and "?" in url:
            said = "the part after ? is stored with the job and sent to all nodes: leave keys and signatures out"
            yield Finding(field, said, "warning")


def _check_schedule(spec: PipelineFields) -> Iterator[Finding]:
    """Check that the ranks will find the file of a schedule; unknown for a repository."""
    name, source = spec.parallelism.schedule, spec.source
    if not name.endswith(".csv") or source.git or (source.path and "://" in source.path):
        return
    if source.module or name.startswith(("/", "~")):
        said = f"{name} is not sent to the nodes: put it at that path on each, or give a file next to the script"
        yield Finding("parallelism.schedule", said, "warning")
        return
    folder = _expand(source.path or "").absolute()
    if ".." in Path(name).parts or not os.path.isfile(folder / name):
        yield Finding("parallelism.schedule", f"{name}: no such file in {folder}, from which it is sent to the nodes")


def _check_rendezvous(spec: PipelineFields) -> Iterator[Finding]:
    there = max(1, len(spec.nodes))
    nodes = f"{there} node{'s' if there > 1 else ''}"
    for field, count in (("min_nodes", spec.rendezvous.min_nodes), ("max_nodes", spec.rendezvous.max_nodes)):
        if count is not None and count > there:
            yield Finding(
                f"rendezvous.{field}",
                f"{count}, but the spec has {nodes}: add nodes or lower it",
            )
    if spec.rendezvous.is_elastic and spec.checkpoint is None:
        yield Finding("checkpoint", "restarted ranks begin at step 0: give the url of a folder", "warning")


def _check_checkpoint(spec: PipelineFields) -> Iterator[Finding]:
    url = spec.checkpoint.url if spec.checkpoint else ""
    if "://" in url or url.startswith(("/", "~")) or len(spec.nodes) < 2 or all(node.workdir for node in spec.nodes):
        return
    if url:
        said = f"{url} is a different folder on each node, and would have only some shards of a checkpoint"
        yield Finding("checkpoint.url", f"{said}: give a URL, or the full path of a folder that all share", "warning")


def _check_image(spec: PipelineFields) -> Iterator[Finding]:
    if spec.image is not None:
        said = f"{spec.image}: only exports start containers yet: the ranks of a job run in the Python of their nodes"
        yield Finding("image", said, "warning")


def _script_of(source: Source) -> str:
    """Return the text of a source that is a single file; empty when it is not, or cannot be read."""
    with contextlib.suppress(SpecError):
        if source.script is not None:
            return _read(_expand(source.script))
        if source.notebook is not None:
            return script_of_notebook(_read(_expand(source.notebook)), where=source.notebook)
    return source.script_text or ""


def _check_hidden(source: Source) -> Iterator[Finding]:
    """Warn of modules in the folder of a script that hide a module of Python, or torch, of the same name."""
    name = source.script or source.notebook or ""
    names = {Path(name).stem} if name else set()
    if source.path and "://" not in source.path:
        beside = (_expand(source.path) / (source.entry or "")).parent
        with contextlib.suppress(OSError):  # faults of the folder are reported elsewhere
            names = {path.parent.name for path in beside.glob("*/__init__.py")}
            names |= {path.stem for path in beside.glob("*.py")}
    for hidden in sorted(names & (sys.stdlib_module_names - set(sys.builtin_module_names) | {"torch"})):
        said = f"ranks import {hidden} from the folder of their script, not from Python or torch: rename it"
        yield Finding(f"source.{source.kind}", said, "warning")


def _look_at_script(source: Source) -> None:
    if source.script is not None:
        check_python((_read(_expand(source.script)), source.script))


def _look_at_text(source: Source) -> None:
    if source.script_text is not None:
        check_python((source.script_text, "the text"))


def _look_at_notebook(source: Source) -> None:
    if source.notebook is not None:
        script_of_notebook(_read(_expand(source.notebook)), where=source.notebook)


def _look_at_folder(source: Source) -> None:
    if source.path is None or "://" in source.path:
        return
    folder = _expand(source.path)
    if not os.path.isdir(folder):
        raise SpecError(f"{folder}: no such folder, looked for in {folder.absolute().parent}")
    entry = folder / (source.entry or "")
    check_python((_read(entry), str(entry)))


def _look_at_git(source: Source) -> None:
    """Check the key, if this machine clones; otherwise it is on the nodes."""
    git = source.git
    if git and git.ssh_key and git.how == "bundle" and not os.path.isfile(_expand(git.ssh_key)):
        raise SpecError(f"ssh_key {git.ssh_key}: no such file")


_LOOKS: dict[str, Callable[[Source], None]] = {
    "script": _look_at_script,
    "script_text": _look_at_text,
    "notebook": _look_at_notebook,
    "path": _look_at_folder,
    "git": _look_at_git,
}


def _expand(path: str) -> Path:
    """Expand ``~``; an unknown user stays as it is, unlike with ``Path.expanduser``."""
    return Path(os.path.expanduser(path))


def _read(path: Path) -> str:
    """Return the text of a file. Raises: SpecError."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would block
        raise SpecError(f"{path}: is not a file")
    try:
        with open_file(path) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file, looked for in {path.absolute().parent}") from None
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from None
    if len(data) > MOST_BYTES:
        raise SpecError(f"{path}: larger than {MOST_BYTES // 1_000_000} MB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise SpecError(f"{path}, line {line}: is not UTF-8: save the file as UTF-8") from None
