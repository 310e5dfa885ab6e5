"""What of a session can be set while it runs, and what its start has set."""

from __future__ import annotations

from .recovery.process_groups import describe_new_groups
from .running.core import Core
from .state.limits import Limits

__all__ = ["SessionSettings"]


class SessionSettings:
    """Those of one session, in seconds where that is in the name."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.warm_s = 0.0  # how long nodes keep what the ranks have imported, after a stop

    @property
    def hang_s(self) -> float:
        """How long ranks wait for others before the cell says so."""
        return self._core.hang_s

    @hang_s.setter
    def hang_s(self, seconds: float) -> None:
        self._core.hang_s = seconds

    @property
    def stop_gap_s(self) -> float:
        """From a stop to what it does: time for whoever restarts this process to say so."""
        return self._core.stop_gap_s

    @stop_gap_s.setter
    def stop_gap_s(self, seconds: float) -> None:
        self._core.stop_gap_s = seconds

    @property
    def limits(self) -> Limits:
        """How long it waits for what, and how often it looks; each can be set."""
        return self._core.link.limits

    @property
    def wants_group(self) -> bool:
        """There is a default process group, made before the first cell and after every loss."""
        return self._core.state.groups.is_wanted

    @property
    def group_timeout_s(self) -> float:
        """How long a collective waits for another rank; 0 where that is torch's own choice."""
        return self._core.group_timeout_s

    @property
    def checks_collectives(self) -> bool:
        """The ranks compare every collective before they begin it, and all of them fail where it is not the same."""
        return self._core.state.groups.is_checked

    def check_collectives(self, is_on: bool = True) -> str:
        """Compare collectives from the next process groups on, or no more; says in words when that is.

        Groups that no cell uses are ended at once. Each collective then takes some milliseconds longer.
        """
        state = self._core.state
        if is_on == self.checks_collectives:
            return ""
        state.groups.check(is_on)
        if state.busy:
            return "a cell runs: it holds for process groups that are made later, after %distributed restart for all"
        has_groups = state.groups.any_has
        return describe_new_groups(self._core.process_groups.end(), is_wanted=self.wants_group) if has_groups else ""
