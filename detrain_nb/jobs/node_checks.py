"""What is wrong with a spec as its nodes are now: the doctor, torch, free disk, the port, and whether its ranks fit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..deploy.chosen_nodes import transports_to
from ..deploy.files import label
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, JobError, SpecError
from ..spec import Finding
from ..text import format_size
from ..transport import Transport
from .asking import ask_facts, try_on_all
from .execution import execute
from .log_lines import LogLine
from .report_checks import NodeFacts
from .source import plan_source
from .starting import gather_secrets

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..transport.ssh import AskPassphrase

__all__ = ["check_nodes"]

_ROOM_BYTES = 500_000_000  # for logs and artifacts
_PORT_LIMIT_S = 30.0
_TRY_PORT = "import socket, sys; socket.create_server((sys.argv[1], int(sys.argv[2]))).close()"


def check_nodes(spec: PipelineSpec, *, ask_passphrase: AskPassphrase | None = None) -> list[Finding]:
    """Return what is wrong with ``spec``, as its nodes are now too. Nothing is started there."""
    findings = [*spec.check(), *_check_secrets(spec)]
    size_bytes = 0
    if not any(each.severity == "error" and each.field.startswith("source") for each in findings):
        try:
            size_bytes = plan_source(spec).size_bytes
        except DetrainError as exc:
            findings.append(Finding("source", str(exc)))
    if hosts := [node for node in spec.nodes if not node.is_this_machine]:
        from ..doctor import examine  # it takes its time, and most checks ask no host

        report = examine(hosts, ask_passphrase=ask_passphrase)
        for each in report.problems:
            said = ": ".join(filter(None, (each.check, each.what, each.advice, each.command)))
            findings.append(Finding(f"nodes.{each.host}", said, "warning" if each.is_warning else "error"))
    nodes = transports_to(list(spec.nodes) or None, ask_passphrase=ask_passphrase)
    try:
        facts = try_on_all(nodes, lambda index: _facts_of(nodes[index]))
        findings += _check_facts(spec, nodes, facts, size_bytes)
        if spec.rendezvous.port and not isinstance(facts[0], DetrainError):
            findings += _check_port(nodes[0], spec.rendezvous.port)
    finally:
        for node in nodes:
            node.leave()
    return findings


def _facts_of(node: Transport) -> NodeFacts:
    with open_job_talk(node) as talk:
        return ask_facts(talk)


def _check_secrets(spec: PipelineSpec) -> Iterator[Finding]:
    try:
        gather_secrets(spec)
    except SpecError as exc:
        yield Finding("secrets", str(exc))


def _check_facts(
    spec: PipelineSpec, nodes: Sequence[Transport], facts: Sequence[NodeFacts | DetrainError], size_bytes: int
) -> Iterator[Finding]:
    known: dict[str, int] = {}
    for node, said in zip(nodes, facts):
        field = f"nodes.{label(node)}"
        if isinstance(said, DetrainError):
            if node.is_this_machine:  # of a host the doctor has said it
                yield Finding(field, str(said))
            continue
        known[node.name] = said.gpus
        if not said.torch:
            yield Finding(field, "torch is missing there: install it, or name another python")
        if said.free_bytes < size_bytes + _ROOM_BYTES:
            free = format_size(said.free_bytes)
            yield Finding(field, f"{free} are free where jobs are: set XDG_STATE_HOME there, in its setup", "warning")
    try:
        spec.plan(gpus=known)
    except SpecError as exc:
        yield Finding("parallelism", str(exc))


def _check_port(node: Transport, port: int) -> Iterator[Finding]:
    """Can the first node listen there, as it will have to?"""
    command = shlex.join([node.python, "-c", _TRY_PORT, node.address, str(port)])
    said: list[LogLine] = []
    try:
        done = execute([node], command, timeout_s=_PORT_LIMIT_S, on_line=said.append)
    except JobError as exc:
        yield Finding("rendezvous.port", str(exc))
        return
    if done.status:
        why = said[-1].text if said else f"exit {done.status}"
        yield Finding("rendezvous.port", f"{label(node)} cannot listen on {node.address} port {port}: {why}")
