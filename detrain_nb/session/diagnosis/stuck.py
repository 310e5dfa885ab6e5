"""Detection of ranks that certainly wait in vain: no rank is left that could join their collectives.

That is certain only if every rank reports its full state: all ranks in the cell wait, in torch, in collectives that
another rank has not joined; the others have ended the cell; and several looks show no change. If a rank computes,
sleeps or does not answer, a message or a collective may be in progress, or there is a GPU, `HangWatch` decides, by
time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .diagnosis import Verdict

_LOOKS, _LASTS_S = 3, 1.9  # this many equal looks, over this many seconds


class StuckWatch:
    """A watch over the ranks of one cell, fed with looks that have stacks."""

    def __init__(self) -> None:
        self._found: object = None  # None: a rank may still join
        self._since = 0.0
        self._looks = 0

    def note(self, verdicts: Mapping[int, Verdict], *, now: float) -> None:
        """Note a look."""
        found = _where_all_are_stuck(verdicts.values())
        if found is None or found != self._found:
            self._since, self._looks = now, 0
        self._found = found
        self._looks += 1

    def is_certain(self, *, now: float) -> bool:
        """Return whether all ranks that still run the cell wait in vain."""
        return self._found is not None and self._looks >= _LOOKS and now - self._since >= _LASTS_S


def _where_all_are_stuck(verdicts: Collection[Verdict]) -> object:
    """Return a value that stays equal in the next look if nothing changes; None if a rank may join, or if unknown."""
    ranks = [verdict.evidence for verdict in verdicts]
    left = [verdict for verdict in verdicts if verdict.kind != "idle"]
    if not left or not all(map(_is_in_vain, left)) or not all(evidence.is_known for evidence in ranks):
        return None
    return [(each.rank, each.state, each.cell, each.stack, each.operations, dict(each.steps)) for each in ranks]


def _is_in_vain(verdict: Verdict) -> bool:
    """Return whether two looks show no computing, the stack a wait, and nothing that was begun can end."""
    evidence = verdict.evidence
    return verdict.is_in_vain and not evidence.is_cuda and evidence.cpu_share is not None
