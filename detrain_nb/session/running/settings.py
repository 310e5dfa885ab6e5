"""What of a session can be set while it runs, and what its start has set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...deploy.kept import check_warm
from ..link.rank_link import RankLink
from ..recovery.process_groups import ProcessGroups, describe_new_groups
from ..state.limits import Limits
from .asked import check_flag, check_seconds

__all__ = ["SessionSettings", "SlotsOnly"]


_CAN_BE_SET = {
    "hang_s": "How long ranks wait for others before the cell says so.",
    "warm_s": "How long nodes keep what the ranks have imported, after a stop.",
}
# What our own rooms use: Tab does not offer it.
_FOR_OUR_OWN = {"bring", "complete", "next_cell", "pop_losses", "reach_by", "stop_gap_s"}


class SlotsOnly:
    """What a session offers: a setting that is none, or stands elsewhere, is no new attribute of it."""

    __slots__ = ("__weakref__",)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            what_can = f"{', '.join(_CAN_BE_SET)} of session.settings, and each of session.settings.limits"
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set: what can is {what_can}") from None

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _FOR_OUR_OWN]


class SessionSettings(SlotsOnly):
    """What of a session can be set while it runs: ``hang_s``, ``warm_s`` and each of ``limits``, in seconds."""

    __slots__ = {
        **dict.fromkeys(("_groups", "_limits", "_process_groups", "_require_alive", "_state", "stop_gap_s")),
        **_CAN_BE_SET,
    }

    def __init__(self, link: RankLink, process_groups: ProcessGroups, require_alive: Callable[[], None]) -> None:
        self._require_alive = require_alive
        self._limits = link.limits
        self._state = link.state
        self._groups = link.state.groups
        self._process_groups = process_groups
        self.hang_s = 5.0
        self.stop_gap_s = 0.0  # from a stop to what it does: time for whoever restarts this process to say so
        self.warm_s = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises: SpecError for what is no number of seconds."""
        if name == "warm_s":
            check_warm(value)
        elif name in ("hang_s", "stop_gap_s"):
            check_seconds(name, value)
        super().__setattr__(name, value)

    @property
    def limits(self) -> Limits:
        """How long the session waits for what, and how often it looks; each can be set."""
        return self._limits

    @property
    def wants_group(self) -> bool:
        """There is a default process group, made before the first cell and after every loss."""
        return self._groups.is_wanted

    @property
    def group_timeout_s(self) -> float:
        """How long a collective waits for another rank; 0 where that is torch's own choice."""
        return self._groups.timeout_s

    @property
    def checks_collectives(self) -> bool:
        """The ranks compare every collective before they begin it, and all of them fail where it is not the same."""
        return self._groups.is_checked

    def check_collectives(self, is_on: bool = True) -> str:
        """Compare collectives from the next process groups on, or no more; says in words when that is.

        Groups that no cell uses are ended at once. Each collective then takes some milliseconds longer.
        Raises: what ended the session.
        """
        check_flag("is_on", is_on)
        self._require_alive()
        if is_on == self.checks_collectives:
            return ""
        self._groups.check(is_on)
        if self._state.busy:
            return "a cell runs: it holds for process groups that are made later, after %distributed restart for all"
        if not self._groups.any_has:
            return ""
        return describe_new_groups(self._process_groups.end(), is_wanted=self.wants_group)
