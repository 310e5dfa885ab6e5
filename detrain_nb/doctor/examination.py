"""The queries to the hosts: each alone, then how they reach each other; a fault does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from ..deploy.node_facts import choose_address
from ..deploy.questions import Questions
from ..deploy.ways import address_beside
from ..errors import DetrainError, SpecError
from ..launch import LOOPBACK, threads_per_rank
from ..node.system.gpus import read_visible
from ..plan.nodes import NodeOffer, NodePlan, plan_nodes
from ..text import count_of
from ..transport.ssh import SshConnection
from .host_facts import Fault, Gpus, HostFacts
from .host_probe import Clock, Door, HostProbe, Speed, Way

if TYPE_CHECKING:
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Crew", "Examination", "Host"]

T = TypeVar("T")
R = TypeVar("R")

_MOST_HOSTS_AT_ONCE = 32
_LOOK_GAP_S = 0.1
_MOST_RANKS_AT_ONCE = 64  # of one host, when their speed is measured


@dataclass
class Host:
    """What is known of one host; a fault is the reason why no more is known."""

    node: Node
    probe: HostProbe
    where: str = ""
    fingerprint: str = ""
    ssh_fault: DetrainError | None = None
    fault: str = ""
    facts: HostFacts | None = None
    address: tuple[str, str] | Fault = field(default_factory=lambda: Fault(""))
    reached_from: str = ""  # see `address_beside`
    door: Door | Fault = field(default_factory=lambda: Fault(""))
    clock: Clock | Fault = field(default_factory=lambda: Fault(""))
    ways: dict[str, Way] = field(default_factory=dict)
    rates: dict[str, float | Fault] = field(default_factory=dict)
    rate_from_here: float | Fault = field(default_factory=lambda: Fault(""))
    speed: Speed | Fault | None = None  # None: the host has no torch

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def is_here(self) -> bool:
        return self.node.is_this_machine

    @property
    def folder_state(self) -> str:
        folder = self.facts.folder if self.facts and not self.is_here else None
        return "" if folder is None or isinstance(folder, Fault) else folder.state


class Crew:
    """One thread per host; their questions to the user are asked in the calling thread, which waits for them."""

    def __init__(
        self,
        num_hosts: int,
        ask_passphrase: AskPassphrase | None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Create the threads.

        ``meanwhile`` is called in the calling thread while it waits; an exception from it ends the wait.
        """
        self.questions = Questions(ask_passphrase, meanwhile=meanwhile) if ask_passphrase else None
        self._meanwhile = meanwhile
        self._pool = ThreadPoolExecutor(max(1, min(num_hosts, _MOST_HOSTS_AT_ONCE)), "detrain_nb doctor")

    def do(self, act: Callable[[T], R], items: Sequence[T]) -> list[R | DetrainError]:
        """Run ``act`` on each item; return its results in order, a DetrainError in place of a result.

        Raises: any other exception that ``act`` raised.
        """
        work = [self._pool.submit(act, item) for item in items]
        if self.questions:
            self.questions.serve(work)
        while wait(work, _LOOK_GAP_S if self._meanwhile else None).not_done:
            if self._meanwhile:
                self._meanwhile()
        results: list[R | DetrainError] = []
        for future in work:
            error = future.exception()
            if error is not None and not isinstance(error, DetrainError):
                raise error
            results.append(error or future.result())
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Examination:
    """Connects to all hosts, queries each, then has them connect to each other."""

    def __init__(
        self, nodes: Sequence[Node], crew: Crew, progress: Callable[[str], None], config_path: Path | None
    ) -> None:
        self.hosts = [
            Host(node, HostProbe(node, config_path=config_path, ask_passphrase=crew.questions)) for node in nodes
        ]
        self._crew = crew
        self._progress = progress
        self._is_over = False

    def run(self, *, bandwidth: bool, speed: bool) -> None:
        self._progress(f"examining {count_of(len(self.hosts), 'host')}")
        self._crew.do(self._visit, [host for host in self.hosts if not host.is_here])
        self._crew.do(self._visit, [host for host in self.hosts if host.is_here])  # its address depends on those
        asked = [host for host in self.hosts if host.facts]
        answered = f"{len(asked)} of {count_of(len(self.hosts), 'host')} answered"
        self._progress(f"{answered}: comparing clocks and testing connections")
        self._crew.do(self._look_around, asked)
        if speed:
            self._progress(f"measuring the speed of ranks on {count_of(len(asked), 'host')}")
            self._crew.do(_measure_speed, asked)
        if bandwidth:
            self._measure_rates(asked)

    def close(self) -> None:
        self._is_over = True
        for host in self.hosts:
            host.probe.close()

    def _visit(self, host: Host) -> None:
        """Query a host, and have it listen for the others."""
        try:
            connection = host.probe.connect()
        except DetrainError as exc:
            host.ssh_fault = exc
            return
        host.reached_from = "" if host.node.address else connection.local_address
        if isinstance(connection, SshConnection):
            host.where, host.fingerprint = connection.settings.where, connection.host_key_fingerprint
        try:
            facts = host.facts = host.probe.look()
        except DetrainError as exc:
            host.fault = str(exc)
            host.probe.close()
            return
        if self._is_over:  # interrupted in the meantime
            host.probe.close()
        if isinstance(facts.addresses, Fault):
            host.address = facts.addresses
            return
        try:
            host.address = (
                self._address_here(host)
                if host.is_here
                else choose_address(
                    host.node, facts.addresses, reached_at=facts.reached_at, peer_address=connection.peer_address
                )
            )
        except DetrainError as exc:
            host.address = Fault(str(exc))
            return
        try:
            host.door = host.probe.listen(host.address[0])
        except DetrainError as exc:
            host.door = Fault(str(exc))

    def _address_here(self, host: Host) -> tuple[str, str]:
        """Return this machine's address towards the first other host that has one. Raises: LaunchError."""
        for other in self.hosts:
            if not other.is_here and not isinstance(other.address, Fault):
                return address_beside(other.address[0], host.node, reached_from=other.reached_from)
        return address_beside(LOOPBACK, host.node)

    def _look_around(self, host: Host) -> None:
        """Compare a host's clock with ours, then have it connect to the others."""
        try:
            host.clock = host.probe.compare_clocks()
            others = [(other.name, other.door) for other in self.hosts if other is not host]
            doors = {name: door for name, door in others if isinstance(door, Door)}
            if doors:
                host.ways = dict(zip(doors, host.probe.reach(list(doors.values()))))
        except DetrainError as exc:
            if isinstance(host.clock, Fault):
                host.clock = Fault(str(exc))
            else:
                host.ways = {name: Way(str(exc)) for name in doors}

    def _measure_rates(self, hosts: Sequence[Host]) -> None:
        """Measure between pairs of hosts, disjoint pairs at once; then from the notebook to one host after another."""
        rounds = list(_pair_off(hosts))
        for number, pairs in enumerate(rounds, 1):
            self._progress(f"measuring bandwidth between hosts: round {number} of {len(rounds)}")
            self._crew.do(_measure_both, pairs)
        for host in hosts:
            if host.is_here:
                continue
            self._progress(f"measuring bandwidth to {host.name}")
            [rate] = self._crew.do(lambda host: host.probe.measure_rate_from_here(), [host])
            host.rate_from_here = Fault(str(rate)) if isinstance(rate, DetrainError) else rate


def _measure_speed(host: Host) -> None:
    """Measure with all ranks of the host running at once, while the other hosts do the same."""
    assert host.facts is not None  # the host has answered
    torch, processors = host.facts.torch, host.facts.processors
    if isinstance(torch, Fault) or not torch.version:
        return
    if isinstance(processors, Fault):
        host.speed = processors
        return
    try:
        ranks = _plan_ranks(host.node, host.facts.gpus)
        threads = threads_per_rank(len(ranks.ranks), cpus=int(processors.free))
        host.speed = host.probe.measure_speed(ranks, threads=threads)
    except DetrainError as exc:
        host.speed = Fault(str(exc))


def _plan_ranks(node: Node, gpus: Gpus | Fault) -> NodePlan:
    """Plan the ranks that a session would have on the node. Raises: SpecError."""
    if (node.ranks or 1) > _MOST_RANKS_AT_ONCE:
        raise SpecError(f"{node.ranks} ranks are too many to measure at once, the limit is {_MOST_RANKS_AT_ONCE}")
    visible: tuple[str, ...] = ()
    if node.devices != "cpu":
        if isinstance(gpus, Fault):
            raise SpecError(gpus.text)
        visible = read_visible(gpus.visible or None, len(gpus.gpus))
    offer = NodeOffer(node.name, tuple(range(len(visible))), node.devices, node.ranks)
    [plan] = plan_nodes([offer], device="auto", backend=None).nodes
    return plan


def _pair_off(hosts: Sequence[Host]) -> Iterator[list[tuple[Host, Host]]]:
    """Yield rounds of disjoint pairs; over all rounds every pair of hosts occurs once."""
    ring: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        met = zip(ring[:half], reversed(ring[half:]))
        yield [(one, other) for one, other in met if one is not None and other is not None]
        ring.insert(1, ring.pop())


def _measure_both(pair: tuple[Host, Host]) -> None:
    """Measure one direction after the other, as they would slow each other down."""
    for source, target in (pair, pair[::-1]):
        way = source.ways.get(target.name)
        if way is None or way.error or not isinstance(target.door, Door):
            continue
        try:
            source.rates[target.name] = source.probe.measure_rate(target.door)
        except DetrainError as exc:
            source.rates[target.name] = Fault(str(exc))
