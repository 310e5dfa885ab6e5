"""Checks of a spec against its nodes as they are now: doctor, torch, libraries, free disk, port, and ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..deploy.chosen_nodes import transports_to
from ..deploy.files import label
from ..deploy.jobs import open_job_talk
from ..deploy.ways import settle_here
from ..errors import DetrainError, LaunchError, SpecError
from ..launch import LOOPBACK
from ..spec import Finding
from ..storage import locate, needed_library
from ..text import format_size
from ..transport import Transport
from .asking import ask_facts, try_on_all
from .crowds import find_crowds
from .execution import execute
from .log_lines import LogLine
from .report_checks import NodeResources
from .shipping import ship
from .source import ShippedSource, describe_token, fetch_here, plan_source
from .starting import NO_TORCH, gather_secrets

if TYPE_CHECKING:
    from ..spec import PipelineSpec, Rendezvous
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["check_here", "check_nodes", "check_port"]

_ROOM_BYTES = 500_000_000  # for logs and artifacts
_COMMAND_LIMIT_S = 30.0
_TRY_PORT = "import socket, sys; socket.create_server((sys.argv[1], int(sys.argv[2]))).close()"
_TRY_IMPORT = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if not u.find_spec(name)])"


def check_here(spec: PipelineSpec) -> list[Finding]:
    """Return the findings on ``spec``, its secrets and its source folder; no node is asked. An empty list is good."""
    path = spec.source.path
    findings = spec.check() if path is None or "://" in path else _plan_source(spec)[1]
    return [*findings, *_check_secrets(spec)]


def check_nodes(
    spec: PipelineSpec,
    *,
    storage: str | None = None,
    ask_passphrase: AskPassphrase | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> list[Finding]:
    """Return the findings on ``spec`` and on its nodes as they are now; no rank is started there.

    for finding in check_nodes(spec):
        print(finding)  # nodes.gpu2.python: ...

    ``storage``: the location through which the source is sent, as for `submit`. ``on_progress`` is told who will get
    the token of a repository, before it is sent.
    """
    source, findings = _plan_source(spec)
    findings += _check_secrets(spec)
    if source.git and on_progress and (told := describe_token(source.git)):
        on_progress(told)
    if spec.nodes:
        findings += _examine(spec.nodes, ask_passphrase)
    nodes = transports_to(list(spec.nodes) or None, ask_passphrase=ask_passphrase)
    try:
        facts = try_on_all(nodes, lambda index: _facts_of(nodes[index]))
        judged = {each.field for each in findings if each.severity == "error"}  # the doctor says what to do
        findings += [each for each in _check_facts(spec, nodes, facts, source.size_bytes) if each.field not in judged]
        answering = [node for node, said in zip(nodes, facts) if not isinstance(said, DetrainError)]
        if spec.rendezvous.port and nodes[0] in answering:
            findings += _check_endpoint(spec.rendezvous, nodes[0], answering, is_alone=len(nodes) == 1)
        findings += _check_libraries(spec, storage, answering)
        if source.git and (answering or source.git.how == "bundle"):
            findings += _check_repository(source, answering)
    finally:
        for node in nodes:
            node.leave()
    return findings


def _plan_source(spec: PipelineSpec) -> tuple[ShippedSource, list[Finding]]:
    findings = spec.check()
    if any(each.severity == "error" and each.field.startswith("source") for each in findings):
        return ShippedSource(()), findings
    try:
        return plan_source(spec), findings
    except DetrainError as exc:
        return ShippedSource(()), [*findings, *(Finding("source", line) for line in str(exc).splitlines())]


def _examine(nodes: Sequence[Node], ask_passphrase: AskPassphrase | None) -> Iterator[Finding]:
    from ..doctor import examine  # slow to import, and not needed for a job without nodes

    for each in examine(nodes, ask_passphrase=ask_passphrase).problems:
        said = ": ".join(filter(None, (each.check, each.what, each.advice, each.command)))
        yield Finding(f"nodes.{each.host}", said, "warning" if each.is_warning else "error")


def _facts_of(node: Transport) -> NodeResources:
    with open_job_talk(node) as talk:
        return ask_facts(talk)


def _check_secrets(spec: PipelineSpec) -> Iterator[Finding]:
    try:
        gather_secrets(spec)
    except SpecError as exc:
        yield Finding("secrets", str(exc))


def _check_facts(
    spec: PipelineSpec, nodes: Sequence[Transport], facts: Sequence[NodeResources | DetrainError], size_bytes: int
) -> Iterator[Finding]:
    known: dict[str, int] = {}
    for node, said in zip(nodes, facts):
        field = f"nodes.{label(node)}"
        if isinstance(said, DetrainError):
            yield Finding(field, str(said))
            continue
        known[node.name] = said.gpus
        if not said.torch:
            yield Finding(field, NO_TORCH)
        if said.free_bytes < size_bytes + _ROOM_BYTES:
            free = format_size(said.free_bytes)
            yield Finding(field, f"only {free} free for jobs: set XDG_STATE_HOME in the setup of the node", "warning")
    try:
        plan = spec.plan(gpus=known)
        answers = [each for each in facts if isinstance(each, NodeResources)]
        if len(answers) == len(nodes):
            for crowd in find_crowds(plan, nodes, answers):
                yield Finding("nodes", crowd, "warning")
    except SpecError as exc:
        yield Finding("parallelism", str(exc))


def _check_endpoint(
    rendezvous: Rendezvous, first: Transport, answering: Sequence[Transport], *, is_alone: bool
) -> Iterator[Finding]:
    """Yield a finding if the first node cannot listen where the store of the job will be."""
    try:
        settle_here(answering)
    except LaunchError as exc:
        yield Finding(f"nodes.{label(first)}", str(exc))
        return
    address = rendezvous.endpoint or (LOOPBACK if is_alone else first.address)
    yield from check_port(first, address, rendezvous.port)


def check_port(node: Transport, address: str, port: int) -> Iterator[Finding]:
    """Yield a finding if a node cannot listen on ``address`` and ``port``, or this cannot be checked."""
    command = shlex.join([node.python, "-c", _TRY_PORT, address, str(port)])
    said: list[LogLine] = []
    (outcome,) = execute([node], command, timeout_s=_COMMAND_LIMIT_S, on_line=said.append).statuses.values()
    if isinstance(outcome, DetrainError):
        yield Finding("rendezvous.port", f"could not check that port {port} is free: {outcome}", "warning")
    elif outcome:
        why = said[-1].text if said else f"exit {outcome}"
        yield Finding("rendezvous.port", f"{label(node)} cannot listen on {address} port {port}: {why}")


def _check_libraries(spec: PipelineSpec, storage: str | None, nodes: Sequence[Transport]) -> Iterator[Finding]:
    """Yield a finding for each library that a URL needs and a node lacks.

    For URLs of the spec it is a warning: only the script knows whether it opens them on the nodes.
    """
    urls = {f"{name}.url": part.url for name in ("data", "model", "checkpoint") if (part := getattr(spec, name))}
    if storage:
        try:
            locate(storage)
        except SpecError as exc:
            yield Finding("storage", str(exc))
        urls["storage"] = storage
    needed = {field: library for field, url in urls.items() if (library := needed_library(url))}
    if not needed or not nodes:
        return
    names = sorted(set(needed.values()))
    for node, missing in zip(nodes, try_on_all(nodes, lambda index: _find_missing(nodes[index], names))):
        for field, library in needed.items():
            if not isinstance(missing, DetrainError) and library in missing:
                said = f"{label(node)} lacks {library}, which this URL needs: install it there"
                yield Finding(field, said, "error" if field == "storage" else "warning")


def _check_repository(source: ShippedSource, nodes: Sequence[Transport]) -> Iterator[Finding]:
    """Yield findings if a node cannot fetch the repository, or this machine cannot for a node without access.

    What is fetched is kept for the job.
    """
    if source.git and source.git.how == "bundle":
        nodes = ()

    def fetch(index: int) -> str:
        with open_job_talk(nodes[index]) as talk:
            return ship(talk, source, node=label(nodes[index]))

    told = [str(said) for said in try_on_all(nodes, fetch) if isinstance(said, DetrainError)]
    if source.unreached:
        yield Finding("source.git", f"{source.unreached}: it will be fetched where you submit, and sent", "warning")
    if source.unreached or not nodes:
        try:
            fetch_here(source, os.environ)
        except DetrainError as exc:
            told.append(str(exc))
    yield from (Finding("source.git", each) for each in dict.fromkeys(told))


def _find_missing(node: Transport, names: Sequence[str]) -> set[str]:
    said: list[LogLine] = []
    execute(
        [node],
        shlex.join([node.python, "-c", _TRY_IMPORT, *names]),
        timeout_s=_COMMAND_LIMIT_S,
        on_line=said.append,
    )
    return {word for line in said for word in line.text.split()}
