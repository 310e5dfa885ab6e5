"""Descriptions of ranks that died: how, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ...errors import RemoteError, format_ranks, short_ranks
from ...text import HERE
from ...wire import RankEnded
from ..output.safe_output import one_line, quote

_TIMED_OUT = re.compile(r"[Tt]imed out waiting (?:for )?(\d{1,15})ms")  # what gloo raises
_LONGEST_REASON = 4000
WITHOUT = (
    "others keep their variables; %distributed shrink continues without the lost ranks, "
    "%distributed restart restarts everything"
)


def advice(ends: Mapping[int, RankEnded], *, world_size: int, is_told: bool = False) -> list[str]:
    """Return lines that say what to do about dead ranks, of ``world_size``; ``is_told``: the lines before say why."""
    fresh = [rank for rank, end in ends.items() if not end.down]
    lines = [what_to_do_about_down({rank: end}) for rank, end in sorted(ends.items()) if end.down and not is_gone(end)]
    if gone := {rank: end for rank, end in ends.items() if is_gone(end)}:
        lines.append(f"the {WITHOUT}" if is_told else what_to_do_about_down(gone))
    if fresh:
        is_one, short = len(fresh) == 1, short_ranks(fresh)
        source = min(set(range(world_size)) - ends.keys(), default=None)  # None: no other rank has the variables
        lines.append(
            f"{format_ranks(fresh)} {'was' if is_one else 'were'} restarted, "
            f"{'its' if is_one else 'their'} variables are lost:\n"
            f"  %distributed replay -r {short}  runs earlier cells there again"
        )
        if source is not None:
            option = f" --from {source}" if source else ""
            lines[-1] += f"\n  %broadcast NAME{option} -r {short}  brings variables from rank {source}"
    return lines


def is_gone(end: RankEnded) -> bool:
    """Return whether the rank was lost with its node, so that no agent can restart it."""
    return end.exit_code < 0


def what_to_do_about_down(ends: Mapping[int, RankEnded]) -> str:
    """Say why ranks are not restarted, all for one reason, and what to do."""
    first = next(iter(ends.values()))
    ranks, are = format_ranks(ends), "is" if len(ends) == 1 else "are"
    if is_gone(first):
        return f"{ranks} {are} lost, {_reason(first.down)}: the {WITHOUT}"
    return (
        f"{ranks} {are} not restarted, {_reason(first.down)}: %distributed restart -r {short_ranks(ends)} tries again"
    )


def describe_ends(ends: Mapping[int, RankEnded], *, hosts: Mapping[int, str]) -> str:
    """Describe how each of the ranks ended, a line or more for each."""
    gone: dict[str, list[int]] = {}
    for end in ends.values():
        if is_gone(end):
            gone.setdefault(_reason(end.reason), []).append(end.rank)
    lines = [f"{format_ranks(of)} {'is' if len(of) == 1 else 'are'} lost: {reason}" for reason, of in gone.items()]
    alone = [end for _, end in sorted(ends.items()) if not is_gone(end)]
    return "\n".join([*lines, *(describe_end(end, host=hosts.get(end.rank, HERE)) for end in alone)])


def describe_end(end: RankEnded, *, host: str) -> str:
    """Describe how a rank's process ended, with the last lines of its stderr."""
    words = quote(f"\n{end.stderr_tail.strip()}") if end.stderr_tail.strip() else ""
    if is_gone(end):
        return f"rank {end.rank}: {_reason(end.reason)}"
    what = "was replaced" if end.asked else how_it_ended(end)
    return f"rank {end.rank} on {host} (pid {end.pid}) {what}{f'; its last words:{words}' if words else ''}"


def how_it_ended(end: RankEnded) -> str:
    """Return ``ended with signal 9 (SIGKILL), out of memory``; for a rank lost with its node, the reason."""
    if is_gone(end):
        return _reason(end.reason)
    how = f"signal {end.signal} ({_signal_name(end.signal)})" if end.signal else f"exit code {end.exit_code}"
    return f"ended with {how}{f', {_reason(end.reason)}' if end.reason else ''}"


def describe_silence(errors: Mapping[int, RemoteError]) -> str:
    """Report the ranks whose collectives timed out, with their hosts if there are several; empty when none did."""
    silent = {rank: match for rank, error in errors.items() if (match := _TIMED_OUT.search(error.message))}
    if not silent:
        return ""
    hosts = sorted({errors[rank].host for rank in silent})
    waited_s = max(int(match[1]) for match in silent.values()) / 1000
    said = f"received nothing for {waited_s:g} s, the timeout of their group (--group-timeout)"
    if len(hosts) < 2:
        return f"{format_ranks(silent)} {said}"
    cut = "the network between these hosts may be cut"
    return (
        f"{format_ranks(silent)} on {' and '.join(hosts)} {said.replace('nothing', 'nothing from each other')}: {cut}"
    )


def _reason(words: str) -> str:
    """Return the reason that a node gave, on one line."""
    return one_line(words, most_chars=_LONGEST_REASON) if words.strip() else "its node gave no reason"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
