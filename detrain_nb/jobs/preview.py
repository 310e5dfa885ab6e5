"""Preview of a submission: what would run where, and which files would be sent; no node is asked."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..deploy.files import label
from ..guarded import RUN_MODULE
from ..launch import ELASTIC_BACKEND, JOB_BACKEND, Program, Rendezvous, launch_job
from ..plan import Plan
from ..text import ShownAsText, format_size, html_text, printable, show, told_node
from .source import describe_token

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from .source import ShippedSource

__all__ = ["Submission", "preview"]

_MOST_FILES = 20


@dataclass(frozen=True)
class Submission(ShownAsText):
    """A job that was not submitted. ``commands``: the argv of each node, by its name.

    ``env``: the variables of its ranks. ``from_here``: by node name, the variables that the node gets from this
    process. The spec may come from a stranger, so its values must not be able to forge a line of the output.
    """

    name: str
    plan: Plan
    commands: dict[str, list[str]]
    files: tuple[tuple[str, int], ...]
    setup: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    from_here: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all files, as if no node had any of them."""
        return sum(size for _, size in self.files)

    def __str__(self) -> str:
        return "\n".join([f"job {self.name} would run", str(self.plan), *self._details()])

    def _repr_html_(self) -> str:
        details = html_text("\n".join(self._details()))
        return f"<div>job {html.escape(self.name)} would run</div>{self.plan._repr_html_()}{details}"

    def _details(self) -> list[str]:
        return list(map(printable, self._lines()))

    def _lines(self) -> list[str]:
        lines = [f"{told_node(node)}: {shlex.join(argv)}" for node, argv in self.commands.items()]
        lines += [f"variable of setup and ranks: {name}={show(value, most=200)}" for name, value in self.env.items()]
        lines += [f"setup on every node: {line}" for line in self.setup]
        lines += [
            f"{told_node(node)} gets from the environment here: {', '.join(had)}"
            for node, had in self.from_here.items()
        ]
        if self.secrets:
            lines.append(f"secrets from the environment here: {', '.join(self.secrets)}")
        if self.repository:
            return [*lines, *self.repository, *(f"warning: {each}" for each in self.warnings)]
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines.append(f"{count}, {format_size(self.size_bytes)}, would be sent, except for files that the nodes have:")
        lines += [f"  {name}  {format_size(size)}" for name, size in self.files[:_MOST_FILES]]
        if len(self.files) > _MOST_FILES:
            lines.append(f"  and {len(self.files) - _MOST_FILES} more")
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]


def preview(spec: PipelineSpec, source: ShippedSource) -> Submission:
    """Return what submitting ``spec`` would do. Raises: SpecError."""
    plan = spec.plan()
    return Submission(
        spec.name,
        plan,
        dict(_commands(spec, source, plan)),
        tuple((file.name, file.size) for file in source.files),
        tuple(spec.source.setup),
        tuple(spec.secrets),
        (*(each.told for each in spec.check() if each.severity == "warning"), *source.notices),
        _describe_repository(source),
        spec.env,
        {node.name: node.env for node in spec.nodes if node.env},
    )


def _describe_repository(source: ShippedSource) -> tuple[str, ...]:
    if source.git is None:
        return ()
    told = {
        "clone": f"every node fetches {source}",
        "bundle": f"this machine fetches {source}, and all nodes get it from here",
        "auto": f"every node fetches {source}; all get it from here if one does not reach its host",
    }[source.git.how]
    return tuple(filter(None, (told, describe_token(source.git))))


def _commands(spec: PipelineSpec, source: ShippedSource, plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each node and the argv that it would run."""
    settings, num_nodes = spec.rendezvous, len(plan.nodes)
    first = spec.nodes[0].address or spec.nodes[0].host if num_nodes > 1 else "127.0.0.1"
    meeting = Rendezvous(
        ELASTIC_BACKEND if settings.is_elastic else JOB_BACKEND,
        settings.id or spec.name,
        (settings.endpoint or first, settings.port),
        timeout_s=settings.timeout_s,
        silence_s=settings.silence_s,
        max_restarts=settings.max_restarts,
    )
    between = settings.min_nodes or num_nodes, settings.max_nodes or num_nodes
    first_word, *words = *source.program, *spec.program_arguments(plan)
    program = Program("module", tuple(words)) if first_word == "-m" else Program("script", (first_word, *words))
    for node_rank, node in enumerate(plan.nodes):
        python = spec.python_of(node_rank)
        argv = launch_job(
            meeting,
            program,
            nodes=between if settings.is_elastic else num_nodes,
            ranks=len(node.ranks),
            node_rank=node_rank,
            python=python,
        ).argv
        yield label(node), [python, "-m", *argv[3:]] if argv[1:3] == ["-c", RUN_MODULE] else argv
