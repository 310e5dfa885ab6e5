"""A job submitted again: the same spec, with the source as it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..deploy.files import Stop
from ..transport import Transport
from .record import Record
from .source import fetch_bundle, plan_source
from .starting import Started, gather_secrets, read_spec, start

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..transport.ssh import AskPassphrase

__all__ = ["start_again"]


def start_again(
    spec: PipelineSpec,
    before: str,
    *,
    name: str,
    nodes: Sequence[Transport] | None,
    stop: Callable[[], object],
    storage: str | None,
    secrets: Mapping[str, str] | None,
    record: Record,
    ask_passphrase: AskPassphrase | None,
    on_progress: Callable[[str], object] | None,
    cancel: Stop | None,
) -> Started:
    """Start ``spec`` as a new job that replaces ``before``, which ``stop`` stops once secrets and source are ready.

    Another thread can end the call with ``cancel``.
    Raises: SpecError when a secret that the spec names is not set here; DetrainError.
    """
    given = None if secrets is None else dict(secrets)
    gather_secrets(spec, given)  # before anything is stopped
    source = fetch_bundle(plan_source(spec), given)
    if cancel:
        cancel.check()
    stop()
    row = record.get(before)
    if spec.checkpoint is not None:
        spec = spec.with_overrides({"checkpoint.resume": True})
    return start(
        read_spec(spec, name, nodes),
        source,
        storage=storage or row.storage or None,
        secrets=given,
        on_progress=on_progress,
        nodes=nodes,
        record=record,
        ask_passphrase=ask_passphrase,
        before=before,
        file=row.file,
        cancel=cancel,
    )
