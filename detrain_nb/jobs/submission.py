"""The call that submits a spec: as a job, or to see what that would be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, overload

from .job import Job
from .preview import Submission, preview
from .record import Record
from .source import fetch_bundle, plan_source
from .starting import Say, read_spec, start

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..spec.node import Node
    from ..transport import Transport
    from ..transport.ssh import AskPassphrase

__all__ = ["submit"]


@overload
def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    name: str | None = None,
    dry_run: Literal[False] = False,
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Sequence[Node | Transport] | None = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Job: ...


@overload
def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    name: str | None = None,
    dry_run: Literal[True],
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Sequence[Node | Transport] | None = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Submission: ...


def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    name: str | None = None,
    dry_run: bool = False,
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Sequence[Node | Transport] | None = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Job | Submission:
    """Start a job on all nodes of ``spec``, or of ``nodes``; it goes on when this process ends.

    ``spec`` may be the URL of one. ``dry_run`` only says what would run where, and which files would travel; no node
    and no git host is asked. ``storage``: a location, as ``s3://bucket/folder``, by which the source travels.
    ``secrets`` are by default those of this process' environment that the spec names. What the user should
    know and does not keep it from starting is in the job's ``notices``, behind those that are given.
    Raises: SpecError for what cannot be, JobError where a job of that name runs, DetrainError with a line for each node
    that failed. Nothing runs then.
    """
    spec = read_spec(spec, name, nodes)
    source = plan_source(spec)
    if not dry_run:
        source = fetch_bundle(source, secrets)
    source.notices = (*notices, *source.notices)
    if dry_run:
        return preview(spec, source)
    record = record or Record()
    started = start(
        spec,
        source,
        storage=storage,
        secrets=secrets,
        on_progress=on_progress,
        nodes=nodes,
        record=record,
        ask_passphrase=ask_passphrase,
    )
    return Job(
        started.id,
        started.name,
        started.transports,
        record=record,
        ask_passphrase=ask_passphrase,
        notices=started.notices,
    )
