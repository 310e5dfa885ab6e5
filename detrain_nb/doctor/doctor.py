"""Examination of hosts in parallel, which continues when one of them fails, and the fixes that are safe to make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..deploy.chosen_nodes import Nodes, nodes_of, transports_to
from ..errors import SpecError
from .examination import Crew, Examination, Host
from .host_facts import Fault
from .host_judgement import FOLDER
from .host_probe import HostProbe
from .judgement import relative_speeds, write_rows
from .report import Link, Problem, Report

if TYPE_CHECKING:
    from ..transport.ssh import AskPassphrase

__all__ = ["Fixed", "examine", "fix"]


def examine(
    nodes: Nodes,
    *,
    bandwidth: bool = False,
    speed: bool = False,
    on_progress: Callable[[str], None] | None = None,
    config_path: Path | None = None,
    ask_passphrase: AskPassphrase | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Report:
    """Examine hosts that are reached over SSH: each one alone, then the links between them.

    report = examine("alice@gpu1,gpu2:2222", bandwidth=True, on_progress=print)

    Nothing is written on the hosts. Each opens a port for a moment, on the address at which the others reach it.

    - ``nodes``: a nodes file, text such as ``alice@gpu1,gpu2:2222``, or a list of nodes; not this machine.
    - ``bandwidth``: also measure it, between the hosts and from the notebook; this loads the network for a second or
      two for each other host.
    - ``speed``: measure the speed of a rank of each host relative to the fastest, all ranks at once on the devices that
      they would use; this loads the devices for a second or two.
    - ``on_progress`` is called with a line before every part, ``ask_passphrase`` with the path of a key file that needs
      a passphrase, ``meanwhile`` repeatedly, all in the calling thread; an exception from any of them ends the
      examination.
    - ``config_path`` replaces ~/.ssh/config.

    A host that cannot be reached does not raise: it is a problem of the report.
    Raises: SpecError when the nodes are invalid, or one is this machine.
    """
    transports = transports_to(nodes)
    chosen = nodes_of(transports)
    if len(chosen) < len(transports):
        raise SpecError("only hosts reached over SSH can be examined: give a nodes file, or hosts")
    if twice := [name for name, times in Counter(node.name for node in chosen).items() if times > 1]:
        raise SpecError(f"two nodes are named {twice[0]!r}: give each a different name")
    with Crew(len(chosen), ask_passphrase, meanwhile=meanwhile) as crew:
        examination = Examination(chosen, crew, on_progress or (lambda line: None), config_path)
        try:
            examination.run(bandwidth=bandwidth, speed=speed)
        finally:
            examination.close()
    hosts = examination.hosts
    return Report(
        chosen,
        tuple(write_rows(hosts, has_bandwidth=bandwidth, has_speed=speed)),
        tuple(_list_links(hosts)),
        tuple(host.node for host in hosts if host.folder_state in ("absent", "loose")),
        config_path,
        ask_passphrase,
        {host.name: size for host in hosts if (size := _memory_of(host)) is not None},
        relative_speeds(hosts),
    )


def _memory_of(host: Host) -> float | None:
    """Return the memory for a host's ranks in bytes: of the smallest GPU they use, else of the machine."""
    if host.facts is None:
        return None
    gpus, memory, wanted = host.facts.gpus, host.facts.memory, host.node.devices
    if wanted != "cpu" and not isinstance(gpus, Fault):
        sizes = [
            gpu.total_bytes for index, gpu in enumerate(gpus.gpus) if not isinstance(wanted, tuple) or index in wanted
        ]
        if sizes:
            return min(sizes)
    if isinstance(memory, Fault) or isinstance(wanted, tuple):
        return None
    return memory.total if memory.limit is None else min(memory.total, memory.limit)


@dataclass(frozen=True, repr=False)
class Fixed:
    """The fixes that `fix` made, each with its host, and the problems left for the user."""

    done: tuple[str, ...]
    left: tuple[Problem, ...]

    def __repr__(self) -> str:
        done = [f"fixed on {line}" for line in self.done] or ["nothing is safe to fix automatically"]
        return "\n".join([*done, *(["left for you:"] if self.left else []), *(f"- {problem}" for problem in self.left)])


def fix(report: Report) -> Fixed:
    """Create detrain_nb's folder on hosts that lack it; set its mode to 700 where other users can enter it.

    Nothing else is safe to fix automatically: the other problems are returned with their commands. A fix that fails
    changes nothing.
    """
    done: dict[str, str] = {}
    with Crew(len(report._to_fix), report._ask_passphrase) as crew:
        probes = [
            HostProbe(node, config_path=report._config_path, ask_passphrase=crew.questions) for node in report._to_fix
        ]
        try:
            for probe, said in zip(probes, crew.do(_fix_host, probes)):
                if isinstance(said, str) and said:
                    done[probe.node.name] = said
        finally:
            for probe in probes:
                probe.close()
    left = [problem for problem in report.problems if problem.check != FOLDER or problem.host not in done]
    return Fixed(tuple(f"{host}: {said}" for host, said in done.items()), tuple(left))


def _fix_host(probe: HostProbe) -> str:
    probe.connect()
    probe.look()
    return probe.fix()


def _list_links(hosts: Iterable[Host]) -> Iterator[Link]:
    for host in hosts:
        for target, way in host.ways.items():
            rate = host.rates.get(target)
            mbit_s = rate * 8e-6 if isinstance(rate, float | int) else None
            yield Link(host.name, target, way.error, None if way.error else way.round_trip_s * 1e3, mbit_s)
