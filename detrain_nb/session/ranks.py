"""The ranks of a session: which there are and where, what they do now, and single ones stopped or asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..plan import Plan
from ..wire import Complete, Completions, Inspect, Inspection, Message
from .diagnosis.diagnosis import describe_mismatch, judge
from .diagnosis.evidence import Evidence
from .diagnosis.where_report import Whereabouts
from .output.safe_output import safe_completions
from .running.asked import check_text, check_whole
from .running.core import Core, Ranks
from .running.rank_replacement import RankReplacement
from .running.status import describe_over

if TYPE_CHECKING:
    from ..spec.node import Node

__all__ = ["SessionRanks"]

_LONGEST_HELP = 1 << 18  # characters
WHERE_GAP_S = 0.1  # between two looks that tell who uses the processor


class SessionRanks:
    """Those of one session. ``len(session.ranks)`` is how many there are."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._replacement = RankReplacement(core)

    def __len__(self) -> int:
        return self._core.world_size

    @property
    def plan(self) -> Plan:
        """Their nodes and devices, and the backend."""
        return self._core.plan

    def plan_of(self, cell: int) -> Plan:
        """The ranks as they were numbered when a cell ran: a session that has shrunk has given them other numbers."""
        return self._core.plan_of(cell)

    @property
    def nodes(self) -> tuple[Node, ...] | None:
        """The nodes that they run on, with as many ranks as each has; None for this machine."""
        return self._core.nodes

    @property
    def node_names(self) -> dict[int, str]:
        """The name of every rank's node, of those that have one."""
        return self._core.plan.node_names

    def choose(self, ranks: Ranks, *, plan: Plan | None = None) -> tuple[int, ...]:
        """The ranks that are meant, in ascending order; a host that errors name is a choice too. Raises: SpecError.

        ``plan``: of the ranks that ran an earlier cell, see ``plan_of``.
        """
        return self._core.choose(ranks, plan=plan)

    def where(self) -> Whereabouts:
        """Where every rank is: the line, the stack of the cell, the collective it waits in and since when."""
        core, everyone = self._core, self._core.state.ranks
        if over := describe_over(core):
            silent = judge([Evidence(rank, "no answer") for rank in everyone])
            return Whereabouts(core.name, tuple(silent.values()), core.state.hosts, "", over)
        before = core.link.locate(everyone, stack=False)
        time.sleep(WHERE_GAP_S)
        _, evidence = core.link.look(everyone, before=before, stack=True)
        verdicts, mismatch = tuple(judge(evidence).values()), describe_mismatch(evidence)
        return Whereabouts(core.name, verdicts, core.state.hosts, mismatch, describe_over(core))

    def interrupt(self, ranks: Ranks = None) -> None:
        """Raise KeyboardInterrupt on those that run a cell. Does not wait."""
        self._replacement.interrupt(ranks)

    def replace(self, ranks: Ranks) -> None:
        """Replace ``ranks`` by fresh ones: their variables are lost, those of the others are not. Does not wait.

        Raises: SessionError for those of a lost node.
        """
        self._replacement.replace(ranks)

    def wait_until_fresh(self, ranks: Ranks) -> None:
        """Wait until ranks that are being replaced are up. Raises: SessionError."""
        self._replacement.wait_until_fresh(ranks)

    def shrink(self) -> dict[int, int]:
        """Go on without the ranks of nodes that are lost: those that are left are one group again, numbered from 0.

        They keep their variables, ``rank`` and ``world_size`` aside. Returns the new number of each.
        Raises: SessionError when no node is lost, or one that is left is busy.
        """
        return self._replacement.shrink()

    def complete(self, code: str, position: int, *, ranks: Ranks = None, limit_s: float = 1.0) -> Completions | None:
        """Completions by the first idle one of ``ranks``; None when there is none, or it does not answer in time.

        Names, attributes and keys of dicts; each begins with what stands between ``start`` and ``position``.
        """
        check_text("code", code)
        check_whole("position", position)
        answer = self._ask_idle(lambda rank, number: Complete([rank], number, code, position), limit_s, ranks)
        return safe_completions(answer, code=code, position=position) if isinstance(answer, Completions) else None

    def inspect(self, name: str, detail: int = 0, *, ranks: Ranks = None, limit_s: float = 1.0) -> str | None:
        """The help text of a name, by the first idle one of ``ranks``."""
        check_text("name", name)
        answer = self._ask_idle(lambda rank, number: Inspect([rank], number, name, detail), limit_s, ranks)
        return answer.text[:_LONGEST_HELP] or None if isinstance(answer, Inspection) else None

    def _ask_idle(self, ask: Callable[[int, int], Message], limit_s: float, ranks: Ranks) -> Message | None:
        core = self._core
        idle = set(self.choose(ranks)) - set(core.state.busy) - set(core.state.lost)
        if not idle or not core.is_alive:
            return None
        return core.link.ask(min(idle), ask, limit_s=limit_s)
