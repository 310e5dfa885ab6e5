"""The settings of a session: those that can be set while it runs, and those set by its start."""

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
    "hang_s": "How long ranks wait for others before the cell reports it.",
    "warm_s": "How long nodes keep a process with the imported modules after a stop.",
}
# Used by our own code: Tab completion does not offer these.
_FOR_OUR_OWN = {"bring", "complete", "next_cell", "pop_losses", "reach_by", "stop_gap_s"}


class SlotsOnly:
    """A base class without new attributes: setting an unknown or misplaced one raises AttributeError."""

    __slots__ = ("__weakref__",)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            what_can = f"{', '.join(_CAN_BE_SET)} of session.settings, or a field of session.settings.limits"
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set: set {what_can}") from None

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _FOR_OUR_OWN]


class SessionSettings(SlotsOnly):
    """The settings of a running session: ``hang_s``, ``warm_s`` and the fields of ``limits``, in seconds."""

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
        self.stop_gap_s = 0.0  # delay of a stop: a front end that restarts this process needs time to say so
        self.warm_s = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting. Raises: SpecError when ``value`` is not a valid number of seconds."""
        if name == "warm_s":
            check_warm(value)
        elif name in ("hang_s", "stop_gap_s"):
            check_seconds(name, value)
        super().__setattr__(name, value)

    @property
    def limits(self) -> Limits:
        """The timeouts and intervals of the session; each can be set."""
        return self._limits

    @property
    def wants_group(self) -> bool:
        """A default process group is made before the first cell and after every loss."""
        return self._groups.is_wanted

    @property
    def group_timeout_s(self) -> float:
        """The timeout of collectives; 0 means torch's default."""
        return self._groups.timeout_s

    @property
    def checks_collectives(self) -> bool:
        """The ranks compare every collective before they begin it, and all of them fail if it differs."""
        return self._groups.is_checked

    def check_collectives(self, is_on: bool = True) -> str:
        """Turn the comparison of collectives on or off, from the next process groups on; returns a text that says when.

        Groups that no cell uses are ended at once. Compared collectives take some milliseconds longer.
        Raises: SpecError when ``is_on`` is not a bool; the error that ended the session.
        """
        check_flag("is_on", is_on)
        self._require_alive()
        if is_on == self.checks_collectives:
            return ""
        self._groups.check(is_on)
        if self._state.busy:
            return "a cell is running: this applies to the next process groups, and to all after %distributed restart"
        if not self._groups.any_has:
            return ""
        return describe_new_groups(self._process_groups.end(), is_wanted=self.wants_group)
