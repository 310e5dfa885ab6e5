"""The call that submits a spec as a job, or previews that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, overload

from ..deploy.chosen_nodes import Nodes, read_given
from .job import Job
from .preview import Submission, preview
from .record import Record
from .source import fetch_bundle, plan_source
from .starting import Say, gather_secrets, read_spec, start

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..transport.ssh import AskPassphrase

__all__ = ["submit"]


@overload
def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    dry_run: Literal[False] = False,
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Nodes = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Job: ...


@overload
def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    dry_run: Literal[True],
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Nodes = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Submission: ...


def submit(
    spec: PipelineSpec | str | os.PathLike[str],
    *,
    file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    dry_run: bool = False,
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Nodes = None,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
    notices: Sequence[str] = (),
) -> Job | Submission:
    """Start a job on all nodes of ``spec``, or on ``nodes``, as ``"gpu1,gpu2"``; it continues when this process ends.

    job = submit("train.toml", nodes="gpu1,gpu2", on_progress=print)
    print(submit("train.toml", dry_run=True))  # what would run where; nothing is started

    - ``spec``: a spec, its path, or its URL; also a script (.py) or a notebook.
    - ``name``: a name in place of the spec's.
    - ``dry_run``: return a `Submission` with what would run where, and which files would be sent. No node and no git
      host is asked.
    - ``storage``: a location such as ``s3://bucket/folder``, through which the source is sent.
    - ``secrets``: values for the variables that the spec's ``secrets`` name; the others come from this process's
      environment.
    - ``file``: the path that a spec object was read from; My Pipelines lists the job there.
    - ``on_progress``: called with a line about each step. ``ask_passphrase``: as in `detrain_nb.Session.start`.
    - ``record``: where jobs are recorded, by default this user's record on this machine.

    The job's ``notices`` have the given ones, then messages for the user that do not prevent the start.
    Raises: SpecError for an invalid spec, JobError when a job of that name is running, DetrainError with a line for
    each node that failed. Nothing runs then.
    """
    chosen = None if nodes is None else read_given(nodes)
    given = spec if file is None else file
    spec = read_spec(spec, name, chosen)
    gather_secrets(spec, secrets)  # before anything is read; for a dry run, too
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
        nodes=chosen,
        record=record,
        ask_passphrase=ask_passphrase,
        file=_full_path(given),
    )
    return Job(
        started.id,
        started.name,
        started.transports,
        record=record,
        ask_passphrase=ask_passphrase,
        notices=started.notices,
    )


def _full_path(file: object) -> bytes:
    """Return a path for the record; empty for a spec object or a URL, which are not files here."""
    if not isinstance(file, (str, os.PathLike)) or "://" in (path := os.fsdecode(file)):
        return b""
    return os.fsencode(os.path.realpath(os.path.expanduser(path)))
