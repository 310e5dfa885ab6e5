"""What came from the ranks, kept for whoever waits for it. Filled by the background thread of the node's link."""

from __future__ import annotations

from ..errors import DetrainError, LaunchError, NodeLost, RankLost, SessionError
from ..wire import (
    Attached,
    CellDone,
    CellFailed,
    ClearOutput,
    Completions,
    Display,
    GenerationReady,
    Inspection,
    LauncherEnded,
    Message,
    Notice,
    Output,
    Piece,
    Position,
    RankEnded,
    RankUp,
    Refused,
    RequestDone,
    RequestFailed,
    Value,
)
from .cells import CellRun
from .log import Logged, OutputLog
from .requests import Requests
from .safe_output import clean_text


class Inbox:
    """The state of a session's ranks as their messages tell it."""

    def __init__(self, session: str) -> None:
        self.log = OutputLog()
        self.requests = Requests()
        self.runs: dict[int, CellRun] = {}
        self.up: dict[int, RankUp] = {}
        self.lost: dict[int, RankEnded] = {}
        self.has_group: dict[int, bool] = {}
        self.last_seconds: dict[int, float] = {}
        self.notices: list[str] = []
        self.failure: DetrainError | None = None
        self.attached = self.requests.new([0])
        self.ranks_up = self.requests.new([])
        self.generation_ready = self.requests.new([])
        self._session = session

    @property
    def busy(self) -> dict[int, CellRun]:
        """The ranks that run a cell, and which."""
        return {rank: run for run in list(self.runs.values()) for rank in run.running}

    def add_run(self, run: CellRun) -> None:
        """A cell is about to be sent; of the earlier ones only those matter that still run."""
        self.runs = {number: known for number, known in self.runs.items() if known.running} | {run.cell: run}

    def take(self, message: Message) -> None:
        """Raises: WireError when a message does not fit what was asked."""
        if isinstance(message, (Output, Display, ClearOutput, CellDone, CellFailed)):
            self._take_of_cell(message)
        elif isinstance(message, (Value, Piece, RequestDone, RequestFailed, Position, Completions, Inspection)):
            self.requests.take(message)
        elif isinstance(message, RankEnded):
            self._take_end_of_rank(message)
        elif isinstance(message, GenerationReady):
            self.has_group[message.rank] = not message.error
            self.generation_ready.take(message)
        elif isinstance(message, RankUp):
            self.up[message.rank] = message
            self.ranks_up.take(message)
        elif isinstance(message, Attached):
            self.attached.take_from(0, message)
        elif isinstance(message, Refused):
            self.fail(SessionError(message.reason))
        elif isinstance(message, LauncherEnded):
            self._take_end_of_launcher(message)
        elif isinstance(message, Notice):
            self.notice(message.text)

    def notice(self, text: str) -> None:
        """Something the user should know; the cell that runs shows it."""
        self.notices.append(text)
        for run in list(self.runs.values()):
            if run.observer and run.running:
                run.observer.notice(text)

    def fail(self, error: DetrainError) -> None:
        """Nothing will come from the node any more: whoever waits is told."""
        self.failure = self.failure or error
        self.requests.fail_all(self.failure)
        for run in list(self.runs.values()):
            run.done.set()

    def close(self, reason: str) -> None:
        """The node has hung up."""
        self.fail(NodeLost(f"the agent of session {self._session!r} is gone ({reason}): %distributed restart"))

    def _take_of_cell(self, message: Logged) -> None:
        if isinstance(message, (CellDone, CellFailed)):
            self.has_group[message.rank] = message.has_group
            self.last_seconds[message.rank] = message.seconds
        if not isinstance(message, CellDone) or message.body:
            self._log(message)
        if run := self.runs.get(message.cell):
            run.take(message)

    def _log(self, message: Logged) -> None:
        had_error = self.log.error
        self.log.append(message)
        if self.log.error != had_error:
            self.notice(self.log.error)

    def _take_end_of_rank(self, message: RankEnded) -> None:
        self.lost[message.rank] = message
        for run in list(self.runs.values()):
            if message.rank in run.running:
                run.take(message)
        host = self.up[message.rank].host if message.rank in self.up else "this machine"
        self.requests.fail_all(RankLost(describe_end(message, host=host)))

    def _take_end_of_launcher(self, message: LauncherEnded) -> None:
        words = message.log_tail.strip().splitlines()
        last = words[-1] if words else f"exit code {message.exit_code}"
        if self.ranks_up.is_open:
            self.fail(LaunchError(f"the ranks did not start: {last}"))
        else:
            self.fail(NodeLost(f"the ranks of session {self._session!r} ended: {last}: %distributed restart"))


def describe_end(end: RankEnded, *, host: str) -> str:
    """How a rank's process ended, with the last lines of its stderr."""
    how = f"signal {end.signal}" if end.signal else f"exit code {end.exit_code}"
    words = clean_text(end.stderr_tail).strip()
    return (
        f"rank {end.rank} on {host} (pid {end.pid}) ended with {how}, its variables are gone: "
        f"start all ranks anew with %distributed restart{f'; its last words:{chr(10)}{words}' if words else ''}"
    )
