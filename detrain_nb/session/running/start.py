"""The beginning of a session: its ranks are started, or the running ranks of an earlier notebook are taken over."""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...deploy.bringing_up import End
from ...deploy.files import label
from ...deploy.known import StartedWith, noted_owners
from ...deploy.start_steps import OnStep, Phase, StartStep, ignore_step
from ...errors import CellTimeout, LaunchError, SessionError, SpecError, format_ranks, short_ranks
from ...launch import (
    LOOPBACK,
    LOOPBACK_INTERFACE,
    RankConfig,
    describe_crowd,
    launch_node,
    most_ranks,
    threads_per_rank,
)
from ...plan import DEVICES, NodePlan, Plan, plan_nodes, plan_one_node
from ...text import told_node
from ...transport import Transport
from ...wire import Attach, Attached, Launch, OpenStore, StartedCold, StoreOpened
from ..output.safe_output import quote
from ..state.requests import Request
from ..state.session_state import agent_of
from .asked import check_mapping, check_seconds, check_whole
from .core import Core

LARGEST_SEED = 1 << 62
_TELL_GAP_S = 0.1

Say = Callable[[str], None]  # called with a line about the progress of a start


@dataclass(frozen=True)
class RankStart:
    """The arguments of ``Session.start`` that concern the processes of the ranks."""

    folder: str
    env: Mapping[str, str] = field(repr=False)  # it may hold secrets
    start: str
    seed: int
    has_group: bool
    linger_s: float
    spool_limit_bytes: int
    group_timeout_s: float = 0.0

    def check(self) -> None:
        """Check the values. Raises: SpecError for an invalid one, SessionError if this process has a process group."""
        check_seconds("linger_s", self.linger_s)
        check_seconds("group_timeout_s", self.group_timeout_s)
        check_whole("seed", self.seed)
        check_whole("spool_limit_bytes", self.spool_limit_bytes, least=0)
        check_mapping("env", self.env)
        if abs(self.seed) > LARGEST_SEED:
            raise SpecError(f"seed {self.seed}: give a number from -2**62 to 2**62")
        if self.start not in ("fork", "exec"):
            raise SpecError(f"start {self.start!r} is neither fork nor exec")
        if not os.path.isdir(self.folder):
            raise SpecError(f"folder {self.folder} does not exist: the ranks start in it")
        for key, value in self.env.items():
            if not isinstance(value, str):
                raise SpecError(f"env {key}: give a str, not {type(value).__name__}")
            if not key or "=" in key or "\0" in key + value:
                raise SpecError(f"{key!r} is not a valid environment variable name")
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
            raise SessionError(
                "torch.distributed is initialised in this process: call "
                "torch.distributed.destroy_process_group() first; the ranks are separate processes"
            )

    def message(
        self, plan: Plan, node_rank: int, transport: Transport, *, cpus: int, run_id: str, store: tuple[str, int] | None
    ) -> Launch:
        """Return the message to the agent of a node: the launcher's command, and data kept for a later notebook."""
        node = plan.nodes[node_rank]
        ranks = list(node.ranks)
        own = os.environ if transport.is_this_machine else {}
        wanted_threads = self.env.get("OMP_NUM_THREADS") or own.get("OMP_NUM_THREADS", "")
        threads = int(wanted_threads) if wanted_threads.isdigit() else 0
        threads = threads or threads_per_rank(len(ranks), cpus=cpus)
        folder = transport.work_folder(self.folder)
        config = RankConfig(
            agent_socket="agent.sock",
            folder=folder,
            device=node.device,
            backend=plan.backend,
            seed=self.seed,
            threads=threads,
            group_timeout_s=self.group_timeout_s,
            is_only_node=len(plan.nodes) == 1,
            is_work_folder=not transport.is_this_machine or folder != self.folder,
        )
        launch = launch_node(
            plan,
            config,
            node_rank=node_rank,
            python=transport.python,
            run_id=run_id,
            store=store,
            interface=transport.interface if len(plan.nodes) > 1 else LOOPBACK_INTERFACE,
            start=self.start,
            extra_env={**transport.env, **self.env},
        )
        info = {
            "device": node.device,
            "backend": plan.backend,
            "init": self.has_group,
            "group_timeout_s": self.group_timeout_s,
        }
        return Launch(launch.argv, launch.env, ranks, self.linger_s, info, self.spool_limit_bytes)


def attach(core: Core, nodes: Sequence[int], *, steal: bool = False) -> dict[int, Attached]:
    """Attach to the agents of ``nodes`` and return their answers, by the position of the node.

    The first node must answer, and at a start all must; any other that does not is in ``SessionState.absent``.
    """
    request = core.state.expect_attached(nodes)
    for node in nodes:
        if node not in core.state.absent:
            core.link.send_to(node, Attach(core.name, core.holder, steal))
    try:
        request.wait(core.link.limits.start_s if 0 in nodes else core.link.limits.attach_s, what="attach")
    except CellTimeout:
        if 0 in nodes:
            raise
        for node in nodes:
            if request.waits_for(agent_of(node)):
                core.link.hang_up(node, f"it did not answer within {core.link.limits.attach_s:g} s")
    core.state.requests.end(request)
    answers = {node: request.answers.get(agent_of(node)) for node in nodes}
    return {node: answer for node, answer in answers.items() if isinstance(answer, Attached)}


def place(core: Core, ends: Sequence[End], asked: StartedWith, *, is_here: bool, force: bool) -> dict[int, Attached]:
    """Attach to all nodes and place the requested ranks on them; returns the answers of the agents.

    ``is_here``: no nodes were given. Raises: SpecError; the reason why a node does not answer.
    """
    attached = attach(core, range(len(core.transports)))
    if is_here:
        gpus = attached[0].gpus
        core.state.know_plan(plan_one_node(ranks=asked.ranks, device=asked.device, backend=asked.backend, gpus=gpus))
    else:
        offers = [transport.offer(attached[node].gpus) for node, transport in enumerate(core.transports)]
        core.state.know_plan(plan_nodes(offers, device=asked.device, backend=asked.backend, ranks=asked.ranks))
    if not force:
        require_room(core.state.plan, attached)
    core.note_down(asked)
    for node in core.nodes or ():
        if unset := [name for name in node.env if name not in os.environ and name not in asked.env]:
            core.state.notices.add(f"{node.name} should get {', '.join(unset)}, which this process has not set")
    for number, end in enumerate(ends):
        if end.why_cold:
            core.state.take(StartedCold(end.why_cold), node=number)
    return attached


def require_room(plan: Plan, attached: Mapping[int, Attached]) -> None:
    """Check that no node gets far more ranks than it has processors or memory for. Raises: SpecError."""
    for number, node in enumerate(plan.nodes):
        has = attached[number]
        most = most_ranks(cpus=has.cpus, free_bytes=has.free_bytes)
        if len(node.ranks) > most:
            crowd = describe_crowd(len(node.ranks), where=label(node), cpus=has.cpus, free_bytes=has.free_bytes)
            raise SpecError(f"{crowd}; start at most {most}, or override this with --force (in Python force=True)")


def launch(
    core: Core,
    how: RankStart,
    attached: Mapping[int, Attached],
    *,
    say: Say,
    on_step: OnStep = ignore_step,
    is_apart: bool = False,
) -> None:
    """Start the ranks of all nodes at once; with ``is_apart`` no process group is made. Raises: LaunchError."""
    core.state.groups.want(how.has_group, timeout_s=how.group_timeout_s)
    if is_apart:
        core.state.notices.add("the nodes cannot reach each other: no process group can be made in this session")
    address = core.transports[0].address if len(core.transports) > 1 else LOOPBACK
    store = None if is_apart else (address, _open_store(core, address))
    run_id = uuid.uuid4().hex
    ranks_up = core.state.expect_ranks()
    for node, transport in enumerate(core.transports):
        message = how.message(core.state.plan, node, transport, cpus=attached[node].cpus, run_id=run_id, store=store)
        core.link.send_to(node, message)
    _wait_until_all_up(core, ranks_up, say, _Counted(core.state.plan, "ranks", on_step))
    if how.has_group:
        counted = _Counted(core.state.plan, "group", on_step)

        def tell(ready: Collection[int]) -> None:
            counted.tell(ready)
            say(f"making the process group: {len(ready)} of {core.state.world_size} ranks")

        tell(())
        core.process_groups.make(tell=tell)
        counted.tell(core.state.ranks)


class _Counted:
    """A reporter of how many ranks of each node are ready, whenever that number has changed."""

    def __init__(self, plan: Plan, phase: Phase, on_step: OnStep) -> None:
        self._plan = plan
        self._phase = phase
        self._on_step = on_step
        self._told: dict[str, int] = {}

    def tell(self, there: Collection[int]) -> None:
        for node in self._plan.nodes:
            come, total = sum(rank in there for rank in node.ranks), len(node.ranks)
            if self._told.get(node.name) != come:
                self._told[node.name] = come
                self._on_step(StartStep(node.name, self._phase, "done" if come == total else "running", come, total))


def _wait_until_all_up(core: Core, request: Request, say: Say, counted: _Counted) -> None:
    """Wait until all ranks are up. Raises: CellTimeout; the reason why a rank cannot come up."""
    num_up, limit_s, all_ranks = 0, core.link.limits.start_s, core.state.world_size
    deadline = time.monotonic() + limit_s
    counted.tell(())
    say(f"importing torch: 0 of {all_ranks} ranks are up")
    while not request.wait_quietly(_TELL_GAP_S) and not request.has_failed:
        if len(request.answers) > num_up:
            num_up, deadline = len(request.answers), time.monotonic() + limit_s
            counted.tell(set(request.answers))
        say(f"importing torch: {num_up} of {all_ranks} ranks are up")
        if time.monotonic() >= deadline:
            apart = "; check that the nodes reach each other: %distributed doctor --nodes NODES" if core.nodes else ""
            raise CellTimeout(f"{num_up} of {all_ranks} ranks are up, and no other came up in {limit_s:g} s{apart}")
    request.wait(0.0, what="start")
    counted.tell(set(request.answers))
    core.state.requests.end(request)


def _open_store(core: Core, address: str) -> int:
    """Open a socket on the first node for the rendezvous store; returns its port."""
    request = core.state.expect_store()
    core.link.send_to(0, OpenStore(address))
    request.wait(core.link.limits.start_s, what="a socket for the store")
    core.state.requests.end(request)
    answer = request.answers[agent_of(0)]
    if not isinstance(answer, StoreOpened) or not answer.port:
        raise LaunchError(
            f"{label(core.transports[0])}: no socket for the rendezvous store: {quote(getattr(answer, 'error', ''))}"
        )
    return answer.port


def go_on(core: Core, *, steal: bool = False, say: Say) -> None:
    """Continue a session from what its agents remember. Raises: SessionError, CellTimeout.

    The first node hosts the rendezvous store: without it there is no session, and the other nodes are checked against
    it. Another node counts as absent when it is lost before it has answered, when its messages are invalid, or when it
    claims a rank that this machine has recorded for a different node.
    """
    attached = attach(core, [0], steal=steal)
    names = [transport.name for transport in core.transports]
    noted = noted_owners(core.name, names)
    for rank in attached[0].ranks:
        if noted.get(rank):
            owner = names[noted[rank]]
            raise _disputed(core.name, rank, f"{names[0]} claims", f"this machine has recorded it on {owner}")
    core.state.measure_by(attached[0], noted)
    attached |= attach(core, range(1, len(core.transports)), steal=steal) if len(core.transports) > 1 else {}
    for rank, (one, other) in core.state.owners.disputed.items():
        both = f"{names[one]} and {names[other]} both claim"
        raise _disputed(core.name, rank, both, "this machine has no record of it")
    world_size = max((up.world_size for up in core.state.up.values()), default=0)
    plan = _what_runs(attached, names, world_size=world_size, session=core.name)
    info = _info(attached[0])
    core.state.groups.want(bool(info.get("init")), timeout_s=_seconds(info.get("group_timeout_s")))
    core.state.know_plan(plan)
    core.state.groups.go_on_from(max(answer.generation for answer in attached.values()))
    core.state.lose_absent()
    by = core.link.caught_up_by
    for node, answer in attached.items():
        if answer.last_number > answer.acknowledged:
            _catch_up(core, node, answer.last_number, say, by=by)
    _wait_until_up(core)
    core.state.go_on_with_groups()
    if disputed := core.state.history.disputed:
        core.state.notice(
            f"nodes disagree on the code of cell {short_ranks(disputed)} (%distributed log --list shows it): "
            "a replay gives each rank the code that its own node reports"
        )
    core.state.know_hosts()


def _disputed(session: str, rank: int, who_has: str, noted: str) -> SessionError:
    return SessionError(
        f"{who_has} rank {rank} of session {session!r}, but {noted}: attach where it was started, or end it: "
        f"%distributed stop {session}"
    )


def _catch_up(core: Core, node: int, number: int, say: Say, *, by: float) -> None:
    """Receive what this notebook missed of a node; a node that is too slow is lost, the first one with the session.

    Raises: CellTimeout; the error that ended the session.
    """
    source = core.transports[node].name or "the ranks"

    def tell(share: float) -> None:
        say(f"received {share:.0%} of what {source} kept")

    try:
        core.link.wait_for_number(node, number, by=by, tell=tell)
    except CellTimeout as exc:
        if node == 0:
            raise
        core.link.hang_up(node, str(exc))


def _wait_until_up(core: Core) -> None:
    """Wait for ranks that were still starting when their notebook left.

    A node other than the first is lost when its ranks do not come up.
    Raises: SessionError when ranks of the first node do not; the error that ended the session.
    """
    state = core.state

    def starting() -> set[int]:
        return set(state.ranks) - state.up.keys() - state.lost.keys()

    state.wait_for(lambda: state.failure is not None or not starting(), core.link.limits.start_s)
    if late := starting():
        if state.failure:
            raise state.failure
        words = f"{format_ranks(late)} of session {core.name!r} did not start within {core.link.limits.start_s:g} s"
        if late & set(core.state.plan.nodes[0].ranks):
            raise SessionError(words)
        for number, node in enumerate(core.state.plan.nodes):
            if late & set(node.ranks):
                core.link.hang_up(number, words)


def _what_runs(attached: Mapping[int, Attached], names: Sequence[str], *, world_size: int, session: str) -> Plan:
    """Build the plan from the ranks of the agents in ``attached``, by position; all other ranks were on absent nodes.

    Raises: SessionError when an agent does not report its ranks, or the reports do not fit together.
    """
    nodes: list[NodePlan] = []
    for node, name in enumerate(names):
        answer = attached.get(node)
        if answer is None:
            nodes.append(NodePlan((), "cpu", name))
            continue
        if not answer.ranks:
            raise SessionError(f"session {session!r} has not started its ranks; end it: %distributed stop {session}")
        device = _info(answer).get("device")
        if device not in DEVICES:
            raise _without_layout(session, name, answer)
        nodes.append(NodePlan(tuple(answer.ranks), device, name))
    backend = _info(attached[0]).get("backend")
    if not isinstance(backend, str):
        raise _without_layout(session, names[0], attached[0])
    if 0 not in nodes[0].ranks:
        raise SessionError(
            f"rank 0 of session {session!r} is not on the first node: give all nodes, in the order of its start"
        )
    known = {rank for node in nodes for rank in node.ranks}
    if missing := tuple(rank for rank in range(world_size) if rank not in known):
        absent = next((node for node in range(len(names)) if node not in attached), None)
        if absent is None:
            raise SessionError(
                f"these are not all nodes of session {session!r}: give all, in the order of its start, or leave out "
                "one that does not report all its ranks (--without)"
            )
        nodes[absent] = replace(nodes[absent], ranks=missing)
    plan = Plan(tuple(nodes), backend)
    if sorted(rank for node in nodes for rank in node.ranks) != list(range(plan.world_size)):
        raise SessionError(f"the agents of session {session!r} report inconsistent ranks: end them")
    return plan


def _without_layout(session: str, node: str, answer: Attached) -> SessionError:
    where = told_node(node)
    return SessionError(
        f"the agent of session {session!r} on {where} sent no rank layout; kill its process there (pid {answer.pid})"
    )


def _info(answer: Attached) -> dict[str, Any]:
    return answer.info if isinstance(answer.info, dict) else {}


def _seconds(said: object) -> float:
    return said if isinstance(said, float) and 0 <= said < math.inf else 0.0
