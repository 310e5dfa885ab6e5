"""The beginning of a session: its ranks are started, or an earlier notebook's are taken up again."""

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
from ...transport import Transport
from ...wire import Attach, Attached, Launch, OpenStore, StartedCold, StoreOpened
from ..output.safe_output import quote
from ..state.requests import Request
from ..state.session_state import agent_of
from .asked import check_mapping, check_seconds, check_whole
from .core import Core

LARGEST_SEED = 1 << 62
_TELL_GAP_S = 0.1

Say = Callable[[str], None]  # how far a start is, in a line


@dataclass(frozen=True)
class RankStart:
    """What ``Session.start`` was asked for, of the ranks' processes."""

    folder: str
    env: Mapping[str, str] = field(repr=False)  # it may hold secrets
    start: str
    seed: int
    has_group: bool
    linger_s: float
    spool_limit_bytes: int
    group_timeout_s: float = 0.0

    def check(self) -> None:
        """Raises: SpecError for what does not fit, SessionError where this process is a rank itself."""
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
            raise SpecError(f"folder {self.folder} is not there: the ranks start in it")
        for key, value in self.env.items():
            if not isinstance(value, str):
                raise SpecError(f"env {key}: its value is text, a str, not {type(value).__name__}")
            if not key or "=" in key or "\0" in key + value:
                raise SpecError(f"{key!r} is no name of an environment variable")
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
            raise SessionError(
                "torch.distributed is initialised in this process itself: call "
                "torch.distributed.destroy_process_group() first, the ranks are processes of their own"
            )

    def message(
        self, plan: Plan, node_rank: int, transport: Transport, *, cpus: int, run_id: str, store: tuple[str, int] | None
    ) -> Launch:
        """What the agent of a node is told: the launcher's command, and what it remembers for a later notebook."""
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
    """What the agents of ``nodes`` say of themselves, by the node's position.

    The first node has to answer, as have all at a start; another that does not is one of ``SessionState.absent``.
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
    """Say hello to all nodes and decide where the ranks that were asked for are; returns what the agents said.

    ``is_here``: nobody has named nodes. Raises: SpecError, or why a node does not answer.
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
            core.state.notices.add(f"{node.name} is to have {', '.join(unset)}, which this process has not set")
    for number, end in enumerate(ends):
        if end.why_cold:
            core.state.take(StartedCold(end.why_cold), node=number)
    return attached


def require_room(plan: Plan, attached: Mapping[int, Attached]) -> None:
    """Raises: SpecError where a node is to have far more ranks than it has processors or memory for."""
    for number, node in enumerate(plan.nodes):
        has = attached[number]
        most = most_ranks(cpus=has.cpus, free_bytes=has.free_bytes)
        if len(node.ranks) > most:
            crowd = describe_crowd(len(node.ranks), where=label(node), cpus=has.cpus, free_bytes=has.free_bytes)
            raise SpecError(f"{crowd}; start at most {most}, or all the same with --force (in Python force=True)")


def launch(
    core: Core,
    how: RankStart,
    attached: Mapping[int, Attached],
    *,
    say: Say,
    on_step: OnStep = ignore_step,
    is_apart: bool = False,
) -> None:
    """Start the ranks of all nodes at once; where these are ``is_apart`` no group is made. Raises: LaunchError."""
    core.state.groups.want(how.has_group, timeout_s=how.group_timeout_s)
    if is_apart:
        core.state.notices.add("the nodes do not reach each other: no process group can be made in this session")
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
    """Tells of each node how many of its ranks have come so far, where that is another number than before."""

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
    """Raises: CellTimeout, or why a rank cannot come."""
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
            apart = "; do the nodes reach each other? %distributed doctor --nodes NODES tells" if core.nodes else ""
            raise CellTimeout(f"{num_up} of {all_ranks} ranks are up, and no other came in {limit_s:g} s{apart}")
    request.wait(0.0, what="start")
    counted.tell(set(request.answers))
    core.state.requests.end(request)


def _open_store(core: Core, address: str) -> int:
    """The port on the first node that the store of the rendezvous will listen on."""
    request = core.state.expect_store()
    core.link.send_to(0, OpenStore(address))
    request.wait(core.link.limits.start_s, what="a socket for the store")
    core.state.requests.end(request)
    answer = request.answers[agent_of(0)]
    if not isinstance(answer, StoreOpened) or not answer.port:
        raise LaunchError(
            f"{label(core.transports[0])}: no socket for the store: {quote(getattr(answer, 'error', ''))}"
        )
    return answer.port


def go_on(core: Core, *, steal: bool = False, say: Say) -> None:
    """Take up what the agents remember. Raises: SessionError, CellTimeout.

    The first node has the store of the rendezvous: without it there is no session, and what it says is the measure for
    the others. One of them that is lost before it has answered, or says what cannot be, counts as absent, as does one
    that claims a rank which another had when this machine noted it down.
    """
    attached = attach(core, [0], steal=steal)
    names = [transport.name for transport in core.transports]
    noted = noted_owners(core.name, names)
    for rank in attached[0].ranks:
        if noted.get(rank):
            owner = names[noted[rank]]
            raise _disputed(core.name, rank, f"{names[0]} says that it has", f"this machine has noted {owner}")
    core.state.measure_by(attached[0], noted)
    attached |= attach(core, range(1, len(core.transports)), steal=steal) if len(core.transports) > 1 else {}
    for rank, (one, other) in core.state.owners.disputed.items():
        both = f"{names[one]} and {names[other]} both say that they have"
        raise _disputed(core.name, rank, both, "this machine has not noted which had it")
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
            f"nodes do not agree on the code of cell {short_ranks(disputed)} (%distributed log --list shows it): "
            "a rank is given again only what its own node says"
        )
    core.state.know_hosts()


def _disputed(session: str, rank: int, who_has: str, noted: str) -> SessionError:
    return SessionError(
        f"{who_has} rank {rank} of session {session!r}, and {noted}: attach where it was started, or end it: "
        f"%distributed stop {session}"
    )


def _catch_up(core: Core, node: int, number: int, say: Say, *, by: float) -> None:
    """Have what was missed of a node. One that has not sent it in time is lost, the first one with the session.

    Raises: CellTimeout, or what ended the session.
    """
    source = core.transports[node].name or "the ranks"

    def tell(share: float) -> None:
        say(f"{share:.0%} of what {source} has kept is here")

    try:
        core.link.wait_for_number(node, number, by=by, tell=tell)
    except CellTimeout as exc:
        if node == 0:
            raise
        core.link.hang_up(node, str(exc))


def _wait_until_up(core: Core) -> None:
    """Wait for ranks that were still starting when their notebook was gone. A node whose ranks do not come is lost, the
    first one with the session."""
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
    """The ranks that the agents in ``attached``, by position, remember; what none of them has was on other nodes.

    Raises: SessionError when they do not say, or do not fit together.
    """
    nodes: list[NodePlan] = []
    for node, name in enumerate(names):
        answer = attached.get(node)
        if answer is None:
            nodes.append(NodePlan((), "cpu", name))
            continue
        if not answer.ranks:
            raise SessionError(f"session {session!r} has not started its ranks: %distributed stop {session} ends it")
        device = _info(answer).get("device")
        if device not in DEVICES:
            raise SessionError(f"the agent of session {session!r} does not say what it runs: end it with its pid")
        nodes.append(NodePlan(tuple(answer.ranks), device, name))
    backend = _info(attached[0]).get("backend")
    if not isinstance(backend, str):
        raise SessionError(f"the agent of session {session!r} does not say what it runs: end it with its pid")
    if 0 not in nodes[0].ranks:
        raise SessionError(f"these are not the nodes of session {session!r} in order: name all, as at its start")
    known = {rank for node in nodes for rank in node.ranks}
    if missing := tuple(rank for rank in range(world_size) if rank not in known):
        absent = next((node for node in range(len(names)) if node not in attached), None)
        if absent is None:
            raise SessionError(
                f"these are not all nodes of session {session!r}: name all, in the order of its start, or leave out "
                "one that does not say all its ranks (--without)"
            )
        nodes[absent] = replace(nodes[absent], ranks=missing)
    plan = Plan(tuple(nodes), backend)
    if sorted(rank for node in nodes for rank in node.ranks) != list(range(plan.world_size)):
        raise SessionError(f"the agents of session {session!r} do not say which ranks they run: end them")
    return plan


def _info(answer: Attached) -> dict[str, Any]:
    return answer.info if isinstance(answer.info, dict) else {}


def _seconds(said: object) -> float:
    return said if isinstance(said, float) and 0 <= said < math.inf else 0.0
