"""Ranks that wait for others in vain, where that is certain: nobody who could come to their collectives is left.

Certain it is only where every rank says all of itself: whoever runs a cell waits, in torch, in collectives that another
one has not come to; the others have ended it; and in several looks nothing has moved. A rank that computes or sleeps, a
message or a collective that may be under way, a GPU, a rank that does not answer: then `HangWatch` decides, by time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .diagnosis import Verdict

_LOOKS, _LASTS_S = 3, 1.9  # so many looks, over so long, that find the same


class StuckWatch:
    """Looks, with stacks, at the ranks of one cell."""

    def __init__(self) -> None:
        self._found: object = None  # None: somebody may yet come
        self._since = 0.0
        self._looks = 0

    def note(self, verdicts: Mapping[int, Verdict], *, now: float) -> None:
        """A look."""
        found = _where_all_are_stuck(verdicts.values())
        if found is None or found != self._found:
            self._since, self._looks = now, 0
        self._found = found
        self._looks += 1

    def is_certain(self, *, now: float) -> bool:
        """Whoever still runs the cell waits in vain."""
        return self._found is not None and self._looks >= _LOOKS and now - self._since >= _LASTS_S


def _where_all_are_stuck(verdicts: Collection[Verdict]) -> object:
    """What is the same in the next look if nothing moves; None while somebody may come, or it is not known."""
    ranks = [verdict.evidence for verdict in verdicts]
    left = [verdict for verdict in verdicts if verdict.kind != "idle"]
    if not left or not all(map(_is_in_vain, left)) or not all(evidence.is_known for evidence in ranks):
        return None
    return [(each.rank, each.state, each.cell, each.stack, each.operations, dict(each.steps)) for each in ranks]


def _is_in_vain(verdict: Verdict) -> bool:
    """Two looks say that it does not compute, its stack that it waits, and nothing of what it has begun can end."""
    evidence = verdict.evidence
    return verdict.is_in_vain and not evidence.is_cuda and evidence.cpu_share is not None
