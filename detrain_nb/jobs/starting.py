"""From a spec to a job on all its nodes: all nodes are prepared before anything runs, or nothing runs.

A notebook that dies in between leaves nothing: a node drops what it has prepared when the connection to it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets as random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..copying.json_lines import FilesError, Refused, Talk
from ..deploy.chosen_nodes import transports_to
from ..deploy.files import OnProgress, Stop, label
from ..deploy.jobs import open_job_talk
from ..deploy.node_facts import check_same_torch
from ..deploy.ways import settle_addresses
from ..errors import DetrainError, JobError, LaunchError, SpecError
from ..node.job.order import JobOrder, JobRendezvous
from ..node.job.terms import NOT_STARTED, RUNNING, SUBMITTING
from ..plan import Plan
from ..storage import has_password, locate
from ..text import CopyProgress
from ..transport import Transport
from .asking import ask_facts, on_all, open_job_talks, send_to_all, try_on_all
from .crowds import find_crowds
from .noting import hear_reports, running_job
from .record import Record
from .report_checks import NodeResources, find_part, read_pointers, read_port
from .shipping import ship
from .source import ShippedSource, fetch_here, tell_pointers
from .submitting import submitting

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Started", "gather_secrets", "read_spec", "start"]

_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", "lo"
NO_TORCH = 'torch is not installed: install it there, or set python = "/path/to/python" for this node'
_KEY_BYTES = 32
_LAUNCH_GRACE_S = 5.0
_UNDO_LIMIT_S = 30.0
Say = Callable[[str], object]


@dataclass(frozen=True)
class Started:
    """A running job; ``transports`` are connected to its nodes.

    ``notices``: what the user should know about it.
    """

    id: str
    name: str
    transports: list[Transport]
    notices: tuple[str, ...] = ()


def start(
    spec: PipelineSpec,
    source: ShippedSource,
    *,
    storage: str | None = None,
    secrets: Mapping[str, str] | None = None,
    on_progress: Say | None = None,
    nodes: Sequence[Node | Transport] | None = None,
    record: Record,
    ask_passphrase: AskPassphrase | None = None,
    before: str = "",
    file: bytes | None = b"",
    cancel: Stop | None = None,
) -> Started:
    """Start a job from a spec that `read_spec` returned, on its nodes or on ``nodes``, with its source.

    ``before``: the id of the job that is restarted, whose checkpoints are taken over. ``file`` is written to the
    record. Another thread can end the call with ``cancel``.
    Raises: what `submit` raises; nothing runs then.
    """
    storage = _full_url(storage)
    given = secrets, storage, nodes, record, ask_passphrase, on_progress, before, file
    return _Starting(spec, source, *given, cancel or Stop()).run()


def gather_secrets(spec: PipelineSpec, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of all secrets that a spec names. Raises: SpecError that lists those that are not set."""
    known = {**os.environ, **(given or {})}
    if missing := [name for name in spec.secrets if not known.get(name)]:
        kind, them = ("secret", "it") if len(missing) == 1 else ("secrets", "them")
        raise SpecError(f"{kind} {', '.join(missing)}: not set here: set {them} in the environment of this process")
    return {name: known[name] for name in spec.secrets}


def read_spec(
    spec: PipelineSpec | str | os.PathLike[str], name: str | None, nodes: Sequence[Node | Transport] | None
) -> PipelineSpec:
    """Load the given spec, with ``name`` or ``nodes`` in place of its own, and check it.

    Raises: SpecError.
    """
    from ..spec import PipelineSpec, worst

    if isinstance(spec, (str, os.PathLike)):
        spec = PipelineSpec.load(os.fspath(spec))
    if not isinstance(spec, PipelineSpec):
        made = (
            "convert it with PipelineSpec.from_dict"
            if isinstance(spec, dict)
            else "give a PipelineSpec, its path, or its URL"
        )
        raise SpecError(f"spec of type {type(spec).__name__}, not PipelineSpec: {made}")
    overrides: dict[str, object] = {} if name is None else {"name": name}
    if nodes is not None:
        described = [node.node if isinstance(node, Transport) else node for node in nodes]
        overrides["nodes"] = [node.to_fields() for node in described if node is not None]
    spec = spec.with_overrides({**overrides, **_full_paths(spec)})
    findings = spec.check()
    if worst(findings) == "error":
        raise SpecError("\n".join(str(each) for each in findings if each.severity == "error"))
    return spec


def _full_paths(spec: PipelineSpec) -> dict[str, object]:
    """Make a relative source path absolute: a restart may run in another folder."""
    kind = spec.source.kind
    path = getattr(spec.source, kind)
    if kind not in ("script", "notebook", "path") or "://" in path:
        return {}
    return {f"source.{kind}": os.path.abspath(os.path.expanduser(path))}


def _full_url(storage: str | None) -> str | None:
    """Turn a path into a file URL, relative to the current folder; nodes use the same path. Raises: SpecError."""
    path = locate(storage).path if storage else ""
    return f"file://{path}" if storage and "://" not in storage else storage


@dataclass
class _Starting:
    """One submission, from its first check to the last answer of a node."""

    spec: PipelineSpec
    source: ShippedSource
    given: Mapping[str, str] | None = field(repr=False)
    storage: str | None
    nodes: Sequence[Node | Transport] | None
    record: Record
    ask_passphrase: AskPassphrase | None
    on_progress: Say | None
    before: str
    file: bytes | None
    cancel: Stop
    _may_run: bool = False  # on some of its nodes
    _notices: list[str] = field(default_factory=list)

    def run(self) -> Started:
        secrets = gather_secrets(self.spec, self.given)
        nodes = list(self.spec.nodes if self.nodes is None else self.nodes)
        self._transports = transports_to(nodes or None, ask_passphrase=self.ask_passphrase)
        self._refuse_running()  # before taking the lock of the name, which marks a job as being submitted
        with submitting(self.spec.name):
            return self._run(_make_id(self.spec.name), secrets)

    def _run(self, job: str, secrets: Mapping[str, str]) -> Started:
        storage = self.storage or ""
        self.record.add(
            job,
            name=self.spec.name,
            nodes=json.dumps([node.to_fields() for node in self.spec.nodes]),
            spec=json.dumps(self.spec.to_dict()),
            state=SUBMITTING,
            storage="" if has_password(storage) else storage,
            file=self.file,
        )
        try:
            for notice in (*_list_warnings(self.spec), *self.source.notices, *_list_unset(self._transports)):
                self._note(notice)
            self._say(f"connecting to {', '.join(map(label, self._transports))}")
            with open_job_talks(self._transports, self.cancel) as talks:
                facts = on_all(self._transports, lambda index: ask_facts(talks[index]))
                self._check_together(facts)
                plan = self._plan(facts)
                self.record.update(job, world_size=plan.world_size)
                ready = self._ship_to_all(talks, secrets)
                self._note_source(job)
                orders = self._orders(job, plan)
                self._prepare_and_launch(talks, orders, ready, secrets)
        except BaseException as exc:
            with contextlib.suppress(DetrainError):
                if not self._may_run or self._undo(job):  # nothing of the job is left, and the caller gets the error
                    self.record.remove(job)
                else:
                    self.record.update(job, state=NOT_STARTED, ended_at=time.time(), exit_code=None)
            for transport in self._transports:
                transport.leave()
            if isinstance(exc, KeyboardInterrupt) and not self._may_run:
                raise KeyboardInterrupt("nothing was started") from None
            if isinstance(exc, FilesError):  # from a talk, outside the code that names its node
                raise DetrainError(str(exc)) from exc
            raise
        self.record.update(job, state=RUNNING, started_at=time.time())
        return Started(job, self.spec.name, self._transports, tuple(self._notices))

    # ---- before any node is asked

    def _refuse_running(self) -> None:
        """Raise JobError when a job of this name is running, as far as known here; each node checks for itself."""
        if running := running_job(self.spec.name, record=self.record, ask_passphrase=self.ask_passphrase):
            advice = "{} stops it; or give this one another name"
            raise JobError(f"job {running} is already running", advice=advice, typed=f"stop {running}")

    # ---- on the nodes

    def _check_together(self, facts: Sequence[NodeResources]) -> None:
        """Raise SpecError or LaunchError when the nodes do not fit together."""
        nodes = self._transports
        versions = {label(node): said.torch for node, said in zip(nodes, facts)}
        if missing := [name for name, version in versions.items() if not version]:
            raise LaunchError(f"{', '.join(missing)}: {NO_TORCH}")
        check_same_torch(versions)
        if len(nodes) == 1:
            return
        accounts = [node.account for node in nodes]
        for node in nodes:
            if node.account is not None and accounts.count(node.account) > 1:
                raise SpecError(f"{label(node)} is the same machine as another node: name it once, with ranks = N")
        settle_addresses(nodes)

    def _plan(self, facts: Sequence[NodeResources]) -> Plan:
        """Plan the ranks. Raises: SpecError when the nodes lack what the spec needs."""
        plan = self.spec.plan(gpus={node.name: said.gpus for node, said in zip(self._transports, facts)})
        for crowd in find_crowds(plan, self._transports, facts):
            self._note(crowd)
        return plan

    def _ship_to_all(self, talks: Sequence[Talk], secrets: Mapping[str, str]) -> list[str]:
        """Send all nodes the same source; if one does not reach the host of a repository, all get it from here.

        Raises: DetrainError with a line for each node that failed, SpecError.
        """
        environment = {**(self.given or {}), **secrets}

        def ship_to(index: int, tell: OnProgress) -> str:
            return ship(
                talks[index],
                self.source,
                node=label(self._transports[index]),
                storage=self.storage,
                environment=environment,
                on_progress=tell,
            )

        self._say("sending the changed source files")
        ready = send_to_all(self._transports, ship_to, CopyProgress("send", self._say))
        if not (why := self.source.unreached):
            return ready
        self._say(f"{why}: fetching the repository here")
        try:
            self.source = fetch_here(self.source, {**os.environ, **environment})
        except DetrainError as exc:
            raise DetrainError(f"{why}\n{exc}") from exc
        self._note(f"{why}: commit {self.source.commit[:12]} was fetched here and sent to all nodes")
        for notice in self.source.notices:
            self._note(notice)
        return send_to_all(self._transports, ship_to, CopyProgress("send", self._say))

    def _note_source(self, job: str) -> None:
        """Record what is sent; note if it differs from the source of the job that is restarted."""
        digest = self.source.digest
        self.record.update(job, source=digest)
        before = self.record.get(self.before).source if self.before else ""
        if before and before != digest:
            self._note(f"the source has changed since {self.before}: the job runs it as it is now")

    def _orders(self, job: str, plan: Plan) -> list[JobOrder]:
        """Return what each node is to run; the port of the store is not known yet."""
        is_alone, rendezvous = len(plan.nodes) == 1, self._rendezvous(plan)
        resolved = json.loads(self.spec.job_spec(plan).to_json())
        return [
            JobOrder(
                id=job,
                name=self.spec.name,
                argv=(*self.source.program, *self.spec.program_arguments(plan)),
                node_rank=node_rank,
                nodes=tuple(label(each) for each in self._transports),
                ranks=node.ranks,
                world_size=plan.world_size,
                python=transport.python,
                workdir=(transport.node.workdir if transport.node else None) or "",
                env=dict(self.spec.env),
                secret_names=tuple(self.spec.secrets),
                withheld=_list_secret(self.spec) if transport.is_this_machine else (),
                setup=tuple(self.spec.source.setup),
                artifacts=tuple(self.spec.artifacts),
                spec=resolved,
                device=node.device,
                gpus=node.gpus,
                address=_LOOPBACK if is_alone else transport.address,
                interface=_LOOPBACK_INTERFACE if is_alone else transport.interface,
                rendezvous=rendezvous,
                silence_s=self.spec.rendezvous.silence_s,
            )
            for node_rank, (node, transport) in enumerate(zip(plan.nodes, self._transports))
        ]

    def _rendezvous(self, plan: Plan) -> JobRendezvous:
        asked, nodes = self.spec.rendezvous, len(plan.nodes)
        return JobRendezvous(
            kind="elastic" if asked.is_elastic else "fixed",
            run_id=asked.id or random.token_hex(8),
            address=asked.endpoint or (_LOOPBACK if nodes == 1 else self._transports[0].address),
            port=asked.port,
            timeout_s=asked.timeout_s,
            max_restarts=asked.max_restarts,
            min_nodes=asked.min_nodes or nodes,
            max_nodes=asked.max_nodes or nodes,
        )

    def _prepare_and_launch(
        self, talks: Sequence[Talk], orders: Sequence[JobOrder], ready: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """Prepare all nodes, then launch on all. Raises: DetrainError with a line for each node that failed."""

        def prepare(index: int) -> tuple[int, list[str]]:
            own = {**self._transports[index].env, **secrets}
            order = orders[index].to_dict()
            talks[index].say("prepare", order=order, secrets=own, source=ready[index], before=self.before)
            said = talks[index].hear("prepared")
            return read_port(said.get("port")), read_pointers(said.get("pointers"))

        self._say("preparing all nodes")
        port, pointers = on_all(self._transports, prepare)[0]
        if pointers:
            self._note(tell_pointers(pointers))
        rendezvous = orders[0].rendezvous
        key = random.token_hex(_KEY_BYTES) if rendezvous.kind == "elastic" else ""

        def launch(index: int) -> None:
            talks[index].say("launch", store=[rendezvous.address, port], key=key)
            talks[index].hear("launched")

        self._say("starting the ranks")
        self._may_run = True
        on_all(self._transports, launch)

    def _undo(self, job: str) -> bool:
        """Stop the job on all nodes, over new talks: an interrupt has closed those of the launch.

        Returns True when nothing of it is left. On a node that does not answer, the ranks exit when they have waited
        for the others in vain.
        """

        def stop(index: int) -> None:
            with open_job_talk(self._transports[index]) as talk:
                try:
                    talk.say("stop", id=job, node_rank=index, grace_s=_LAUNCH_GRACE_S)
                    talk.hear("stopped")
                    talk.say("remove", id=job, node_rank=index)
                    talk.hear("removed")
                except Refused:  # a node that has not launched it has removed it
                    if find_part(hear_reports(talk, [job]), job, index):
                        raise

        return try_on_all(self._transports, stop, limit_s=_UNDO_LIMIT_S) == [None] * len(self._transports)

    def _note(self, text: str) -> None:
        self._notices.append(text)
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        if self.on_progress:
            self.on_progress(text)


def _make_id(name: str) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{random.token_hex(2)}"


def _list_warnings(spec: PipelineSpec) -> Iterator[str]:
    """Yield the warnings on a spec; whether its ranks fit is checked later against the resources of its nodes."""
    for each in spec.check():
        if each.field not in ("", "parallelism"):
            yield each.told


def _list_secret(spec: PipelineSpec) -> tuple[str, ...]:
    """List the variables of this process that a spec names as secret: a job on this machine does not inherit them."""
    token = [spec.source.git.token] if spec.source.git and spec.source.git.token else []
    return tuple(dict.fromkeys([*spec.secrets, *(name for node in spec.nodes for name in node.env), *token]))


def _list_unset(nodes: Sequence[Transport]) -> Iterator[str]:
    """Yield a message for each node that should get variables of this process that are not set."""
    for node in nodes:
        if unset := [name for name in (node.node.env if node.node else ()) if name not in os.environ]:
            yield f"{label(node)} should get {', '.join(unset)}, which this process has not set"
