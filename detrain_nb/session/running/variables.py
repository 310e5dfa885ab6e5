"""Queries for the variables of ranks: a busy rank is reported at once, without delaying the answers of the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from typing import Any

from ...errors import DetrainError, NodeLost, SessionError, SpecError, WireError
from ...wire import AskVariables, RequestDone, RequestFailed
from ..output.safe_output import one_line, quote
from ..state.requests import Request
from .core import Core, Ranks
from .variable_checks import read_preview, read_variables
from .variable_facts import Preview, RankVariable
from .variable_table import Variables, describe_silent, gather_variables

__all__ = ["list_variables", "look_into"]

_MOST_PATTERNS, _MOST_PATTERN_CHARS = 100, 200
_ANSWER_BYTES = 4 << 20  # of a rank
_BUSY_LIMIT_S = 0.8  # for a rank that began something else just before
_LOOK_S = 0.05
_RANK_SHARE = 0.6  # of the time limit, for the rank: the rest is for the network


def list_variables(core: Core, names: Iterable[str], ranks: Ranks, *, limit_s: float) -> Variables:
    """Return the variables of all ``ranks`` as one table. Raises: SpecError; the error that ended the session."""
    patterns = list(names)
    if len(patterns) > _MOST_PATTERNS or any(len(name) > _MOST_PATTERN_CHARS for name in patterns):
        raise SpecError(f"names: give at most {_MOST_PATTERNS}, each of at most {_MOST_PATTERN_CHARS} characters")
    core.require_alive()
    wanted = {"names": patterns, "limit_s": _RANK_SHARE * limit_s}
    answers, silent = _ask(core, core.choose(ranks), wanted, limit_s=limit_s)
    said: dict[int, dict[str, RankVariable]] = {}
    left_out = 0
    for rank, answer in answers.items():
        try:
            said[rank], more = read_variables(answer)
            left_out = max(left_out, more)
        except WireError as exc:
            silent[rank] = f"sending invalid data: {exc}"
    most, silent = AskVariables.MOST_NAMES, dict(sorted(silent.items()))
    return gather_variables(said, silent, left_out=left_out, most=most, patterns=patterns)


def look_into(core: Core, name: str, rank: int, *, limit_s: float) -> Preview:
    """Return a preview of one variable of one rank. Raises: SessionError when it is busy or has no such variable."""
    core.require_alive()
    chosen = core.choose(rank)
    answers, silent = _ask(core, chosen, {"preview": name, "limit_s": _RANK_SHARE * limit_s}, limit_s=limit_s)
    if rank in silent:
        raise SessionError(describe_silent([rank], silent[rank]))
    try:
        return read_preview(answers[rank], name=name, rank=rank)
    except WireError as exc:
        raise SessionError(f"rank {rank} is sending invalid data: {exc}") from exc


def _ask(
    core: Core, chosen: Collection[int], wanted: dict[str, Any], *, limit_s: float
) -> tuple[dict[int, object], dict[int, str]]:
    """Return the answers of ranks, and for the others the reason why there is none."""
    silent = _not_idle(core, chosen)
    asked = [rank for rank in chosen if rank not in silent]
    answers: dict[int, object] = {}
    with core.link.request(asked, [AskVariables.ANSWER], limit_bytes=_ANSWER_BYTES) as request:
        if asked:
            with contextlib.suppress(NodeLost):
                core.link.send(AskVariables(asked, request.number, wanted))
                _wait(core, request, asked, limit_s=limit_s)
        late = _not_idle(core, asked)
        for rank in asked:
            try:
                answers[rank] = _answer(request, rank)
            except DetrainError as exc:
                silent[rank] = str(exc) or late.get(rank, f"silent: no answer within {limit_s:g} s")
    return answers, silent


def _wait(core: Core, request: Request, asked: Collection[int], *, limit_s: float) -> None:
    """Wait for all answers, but not for ranks that have begun something else."""
    began = time.monotonic()
    while not request.wait_quietly(_LOOK_S):
        past_s = time.monotonic() - began
        missing = [rank for rank in asked if request.waits_for(rank)]
        are_busy = past_s >= _BUSY_LIMIT_S and _not_idle(core, missing).keys() >= set(missing)
        if are_busy or past_s >= limit_s:
            return


def _answer(request: Request, rank: int) -> object:
    """Return the answer of a rank. Raises: DetrainError with its refusal, or with an empty text without an answer."""
    answer = request.answers.get(rank)
    if isinstance(answer, RequestFailed):
        raise SessionError(f": {quote(answer.error)}")
    if not isinstance(answer, RequestDone):
        raise SessionError("")
    try:
        return request.value(rank, AskVariables.ANSWER)
    except DetrainError as exc:
        raise SessionError(f"sending invalid data: {one_line(str(exc))}") from exc


def _not_idle(core: Core, ranks: Iterable[int]) -> dict[int, str]:
    """Return the ranks that cannot answer now, with the reason."""
    busy, lost, left = core.state.busy, core.state.lost, core.state.requests.left(core.state.ranks)
    found: dict[int, str] = {}
    for rank in ranks:
        if rank in lost:
            found[rank] = "down" if lost[rank].down else "starting"
        elif rank in busy:
            found[rank] = f"busy: running cell {busy[rank].number}"
        elif rank in left:
            found[rank] = f"busy: still in {left[rank]}"
        elif not core.link.is_reachable(rank):
            found[rank] = "unreachable"
        elif not core.state.can_tell_variables(core.state.node_of.get(rank, 0)):
            found[rank] = "from an earlier release, which cannot report variables: %distributed restart"
    return found
