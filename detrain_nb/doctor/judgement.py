"""The findings as rows: of each host alone (host_judgement.py), then of the links between them, and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..deploy.ways import ADVICE
from ..text import count_of
from .examination import Host
from .host_facts import Fault
from .host_judgement import OF_CONNECTION, OF_FACTS, Group, command_on, not_known
from .host_probe import Speed, Way
from .report import Cell, Row

__all__ = ["relative_speeds", "write_rows"]

_MOST_CLOCK_OFFSET_S = 1.0
_MOST_NAMED = 4
_SLOW = 0.5  # relative to the fastest

_THERE = Way("")
_SLOW_ADVICE = "every step waits for the slowest rank: stop other load there, give it fewer ranks, or leave it out"
_OPEN_THE_WAY = "open all TCP ports between the hosts in the firewall, or give the address that the others can reach"


def write_rows(hosts: Sequence[Host], *, has_bandwidth: bool, has_speed: bool) -> Iterator[Row]:
    """Yield the rows of a report."""
    group = Group.of(hosts)
    for name, of_connection in OF_CONNECTION.items():
        yield Row(name, tuple(map(of_connection, hosts)))
    for name, of_facts in OF_FACTS.items():
        yield Row(name, tuple(of_facts(host, host.facts, group) if host.facts else Cell() for host in hosts))
    for name, of_ways in _OF_WAYS.items():
        yield Row(name, tuple(of_ways(host, hosts) if host.facts else Cell() for host in hosts))
    for name, of_rates in _OF_RATES.items() if has_bandwidth else ():
        yield Row(name, tuple(of_rates(host) if host.facts else Cell() for host in hosts))
    if has_speed:
        relative = relative_speeds(hosts)
        yield Row("speed", tuple(_judge_speed(host, relative) if host.facts else Cell() for host in hosts))


def relative_speeds(hosts: Sequence[Host]) -> dict[str, float]:
    """Return the speed of a rank relative to the fastest, which is 1.0, for each host that was measured."""
    speeds = {host.name: host.speed.gflop_s for host in hosts if isinstance(host.speed, Speed)}
    return {name: max(0.001, round(speed / max(speeds.values()), 3)) for name, speed in speeds.items()}


def _judge_clock(host: Host, hosts: Sequence[Host]) -> Cell:
    if isinstance(host.clock, Fault):
        return not_known(host.clock)
    offset_s, uncertainty_s = host.clock.offset_s, host.clock.uncertainty_s
    if abs(offset_s) < 10:
        offset_ms = round(offset_s * 1e3, 1) + 0.0  # not -0.0
        text = f"{offset_ms:+.1f} ms ± {uncertainty_s * 1e3:.1f} ms"
    else:
        text = f"{offset_s:+,.0f} s ± {uncertainty_s:.1f} s"
    if abs(offset_s) - uncertainty_s <= _MOST_CLOCK_OFFSET_S:
        return Cell(text, "good")
    return Cell(text, "warning", "synchronize it by NTP", command_on(host.node, "timedatectl", "set-ntp", "true"))


def _judge_address(host: Host, hosts: Sequence[Host]) -> Cell:
    if isinstance(host.address, Fault):
        return Cell(host.address.text or "unknown", "bad")
    text = f"{host.address[0]} ({host.address[1]})"
    if isinstance(host.door, Fault):
        return Cell(f"{text}: cannot listen there: {host.door.text}", "bad", "give another address in the nodes file")
    for other in hosts[: hosts.index(host)]:
        if other.address == host.address and other.node.user == host.node.user:
            return Cell(f"{text}, same as {other.name}", "bad", "list the machine once, with ranks = N")
    return Cell(text, "good")


def _judge_ways(host: Host, hosts: Sequence[Host]) -> Cell:
    if not host.ways:
        return Cell("no other host" if len(hosts) == 1 else "-")
    failed: dict[str, list[str]] = {}
    for name, way in host.ways.items():
        if way.error:
            failed.setdefault(way.error, []).append(name)
    if not failed:
        return Cell(", ".join(host.ways) if len(host.ways) <= _MOST_NAMED else f"all {len(host.ways)} others", "good")
    text = "; ".join(f"not {', '.join(names)}: {error}" for error, names in failed.items())
    is_of_here = host.is_here or any(other.is_here and host.ways.get(other.name, _THERE).error for other in hosts)
    return Cell(text, "bad", ADVICE if is_of_here else _OPEN_THE_WAY)


def _judge_round_trips(host: Host, hosts: Sequence[Host]) -> Cell:
    times_ms = [way.round_trip_s * 1e3 for way in host.ways.values() if not way.error]
    return Cell(_describe_range(times_ms, _describe_ms), "good") if times_ms else Cell()


def _judge_round_trip_from_here(host: Host, hosts: Sequence[Host]) -> Cell:
    return (
        Cell()
        if isinstance(host.clock, Fault) or host.is_here
        else Cell(_describe_ms(host.clock.round_trip_s * 1e3), "good")
    )


def _judge_rates(host: Host) -> Cell:
    if failed := [f"to {name}: {rate.text}" for name, rate in host.rates.items() if isinstance(rate, Fault)]:
        return Cell("; ".join(failed), "warning", "check the network between them")
    rates = [rate for rate in host.rates.values() if not isinstance(rate, Fault)]
    return Cell(_describe_range(rates, _describe_rate), "good") if rates else Cell()


def _judge_rate_from_here(host: Host) -> Cell:
    if host.is_here:
        return Cell()
    if isinstance(host.rate_from_here, Fault):
        return not_known(host.rate_from_here)
    return Cell(_describe_rate(host.rate_from_here), "good")


def _judge_speed(host: Host, relative: Mapping[str, float]) -> Cell:
    speed = host.speed
    if speed is None:
        return Cell("not measured: torch is missing")
    if isinstance(speed, Fault):
        return Cell(f"not measured: {speed.text}", "warning")
    ranks = f"{speed.num_ranks} ranks at once, each with" if speed.num_ranks > 1 else "1 rank with"
    share = count_of(speed.threads, "thread") if speed.threads else "a GPU"
    text = f"{_describe_gflop_s(speed.gflop_s)}, {relative[host.name]} of the fastest ({ranks} {share})"
    return Cell(text, "warning", _SLOW_ADVICE) if relative[host.name] < _SLOW else Cell(text, "good")


_OF_WAYS: Mapping[str, Callable[[Host, Sequence[Host]], Cell]] = {
    "clock": _judge_clock,
    "address": _judge_address,
    "reaches": _judge_ways,
    "round trip": _judge_round_trips,
    "round trip from here": _judge_round_trip_from_here,
}
_OF_RATES: Mapping[str, Callable[[Host], Cell]] = {
    "bandwidth": _judge_rates,
    "bandwidth from here": _judge_rate_from_here,
}


def _describe_range(values: Sequence[float], show: Callable[[float], str]) -> str:
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"


def _describe_ms(time_ms: float) -> str:
    return f"{time_ms:.2g} ms" if time_ms < 10 else f"{time_ms:,.0f} ms"


def _describe_rate(bytes_per_s: float) -> str:
    mbit_s = bytes_per_s * 8e-6
    return f"{mbit_s:,.3g} Mbit/s" if mbit_s < 1000 else f"{mbit_s / 1000:,.1f} Gbit/s"


def _describe_gflop_s(gflop_s: float) -> str:
    return f"{gflop_s:.3g} GFLOP/s" if gflop_s < 1000 else f"{gflop_s / 1000:,.1f} TFLOP/s"
