"""Every exception of detrain_nb.

DetrainError
├── SpecError (ValueError)            a request is invalid: a field, a number, a name
│   ├── FieldError                    fields of a spec are invalid; `faults` lists them
│   └── CellSyntaxError               a cell is not valid Python; nothing was sent
├── SessionError                      the session's state does not allow the request: none runs, a rank is busy
│   └── ForeignConnection             another user's process is connected to a process group
├── Conflict                          a file has changed since it was read here
├── JobError                          the job's state does not allow the request, or no job has that name
│   └── JobFailed                     a job did not succeed
├── LaunchError                       the ranks of a node could not be started
├── TransportError                    a node cannot be reached, or its channel broke
│   ├── HostKeyError                  a host presents an unknown or revoked key
│   └── WireError                     the peer sent something that is not a message
├── NodeLost                          a node's agent or launcher has exited, and its ranks with it
├── RankLost                          the process of a rank exited unexpectedly
├── CellTimeout                       a cell did not finish within its timeout
├── NotFinite (ArithmeticError)       the loss or a gradient is NaN or infinite
├── RankError                         a cell raised on at least one rank
│   └── CellInterrupted (KeyboardInterrupt)   the cell was interrupted
└── ValueNotSupported (TypeError)     a value cannot be sent between the notebook and a rank

Remote failures travel as text. IPython shows what ``_render_traceback_`` returns in place of our own traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "HUNG_UP",
    "CellInterrupted",
    "CellSyntaxError",
    "CellTimeout",
    "Conflict",
    "DetrainError",
    "FieldChange",
    "FieldError",
    "FieldFault",
    "ForeignConnection",
    "HostKeyError",
    "JobError",
    "JobFailed",
    "LaunchError",
    "NodeLost",
    "NotFinite",
    "RankError",
    "RankLost",
    "RemoteError",
    "SessionError",
    "SpecError",
    "TransportError",
    "ValueNotSupported",
    "WireError",
    "behind_ours",
    "format_ranks",
    "quoted",
]

# What gloo and NCCL report when the peer process has exited.
HUNG_UP = re.compile(r"connection (?:closed|reset)|broken pipe|remote process exited", re.IGNORECASE)

_MOST_HOSTS = 4  # more hosts are counted, not named
_QUOTE = "  | "  # marks a line received from a node
_PLAIN = "\x1b[0m"


class DetrainError(Exception):
    """Base class of every exception that a user can cause or see."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class SpecError(DetrainError, ValueError):
    """A request that is invalid: a field, a number or a name. It is also a ValueError."""


@dataclass(frozen=True)
class FieldFault:
    """One invalid field: its ``path``, such as ``training.epochs``, and ``said``, the rest of the error line.

    For a fault of several fields, ``path`` is empty and ``said`` begins with a colon.
    """

    path: str
    said: str
    advice: str = ""  # what to give: ``said`` without the value; empty where the two cannot be separated

    def __str__(self) -> str:
        return f"{self.path}{self.said}" if self.path else self.said.removeprefix(": ")

    def below(self, path: str) -> FieldFault:
        """Return the same fault with its path under the field ``path`` of a containing object."""
        return FieldFault(f"{path}.{self.path}" if self.path else path, self.said, self.advice)


class FieldError(SpecError):
    """Invalid fields of a spec, one line each; ``where`` names the file that contains them."""

    def __init__(self, faults: Iterable[FieldFault], *, where: str = "") -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(f"{where}: {fault}" if where else str(fault) for fault in self.faults))


@dataclass(frozen=True)
class FieldChange:
    """A field whose value in the file (``theirs``) differs from the one here (``mine``); an empty string: not set."""

    path: str
    theirs: str
    mine: str

    def __str__(self) -> str:
        return f"{self.path} is {self.theirs or 'not given'} there and {self.mine or 'not given'} here"


class Conflict(DetrainError):
    """A file that has changed since it was read here, so it was not written, or its job not started.

    ``changed_at`` is when the other version was written, in seconds since the epoch, and ``owner`` is its user; None
    and empty when the file no longer exists. ``changes`` lists the fields that differ. ``fault`` is the message
    without its ``advice``, which is for Python.
    """

    def __init__(
        self,
        fault: str,
        *,
        advice: str,
        changed_at: float | None = None,
        owner: str = "",
        changes: Iterable[FieldChange] = (),
    ) -> None:
        self.fault = fault
        self.changed_at, self.owner, self.changes = changed_at, owner, tuple(changes)
        super().__init__(f"{fault}: {advice}")


class CellSyntaxError(SpecError):
    """A cell that is not valid Python; nothing was sent to the ranks.

    The magics raise it, with Python's own error as ``error``. `Session.run_cell` raises RankError for such a cell.
    """

    def __init__(self, error: SyntaxError) -> None:
        self.error = error
        super().__init__(f"{error.msg} (line {error.lineno})")

    def _render_traceback_(self) -> list[str]:
        text = (self.error.text or "").rstrip()
        marker = " " * max(0, (self.error.offset or 1) - 1) + "^"
        return [f"  line {self.error.lineno}", f"    {text}", f"    {marker}", f"SyntaxError: {self.error.msg}"]


class SessionError(DetrainError):
    """A request that the state of the session does not allow: no session runs, or a rank is busy."""


class ForeignConnection(SessionError):
    """A process group that was not used because another user's process is connected to it."""


class JobError(DetrainError):
    """A request that the state of a job does not allow, or a job that does not exist.

    ``advice`` says what to do, with ``{}`` for ``typed``: the command ``stop ID`` or ``list``, or an option such as
    ``--anyway``. A front end sets ``prog``, the start of its commands (``%job``); without it, the advice is in Python.
    """

    prog = ""

    def __init__(self, fault: str, *, advice: str = "{}", typed: str = "") -> None:
        self.fault, self.advice, self.typed = fault, advice, typed
        super().__init__(fault)

    def __str__(self) -> str:
        if not self.typed:
            return self.fault
        command, _, job = self.typed.partition(" ")
        in_python = {
            "stop": f"find_job({job!r}).stop()",
            "list": "jobs()",
            "--anyway": "anyway=True",
            "--replace": "replace=True",
        }
        is_option = command.startswith("--")
        here = f"{'' if is_option else f'{self.prog} '}{self.typed}" if self.prog else in_python[command]
        return f"{self.fault}: {self.advice.format(here)}"


class JobFailed(JobError):
    """A job that did not succeed; the message has the failed rank, its node and its last lines, as far as known."""


class LaunchError(DetrainError):
    """Ranks of a node that could not be started."""


class TransportError(DetrainError):
    """A node that cannot be reached, or whose channel broke."""


class HostKeyError(TransportError):
    """A host key that is unknown for its host, or revoked; ``command``, if given, carries out the ``advice``.

    Both are our own words and kept apart from the host's, so a front end can show them as ours without parsing text.
    """

    def __init__(self, fault: str, *, advice: str = "", command: str = "") -> None:
        self.fault, self.advice, self.command = fault, advice, command
        super().__init__(": ".join(filter(None, (fault, advice, command))))


class WireError(TransportError):
    """Data from the peer that is not a valid message."""


class NodeLost(DetrainError):
    """A node whose agent or launcher has exited, and its ranks with it."""


class RankLost(DetrainError):
    """A rank whose process exited unexpectedly; ``ranks`` lost their variables, the other ranks keep theirs."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(message)


class NotFinite(DetrainError, ArithmeticError):
    """A loss or gradient that is NaN or infinite; the parameters keep their values from before the step."""


class CellTimeout(DetrainError):
    """A cell that did not finish within its timeout and was stopped, or a value that took too long to arrive."""


class ValueNotSupported(DetrainError, TypeError):
    """A value that cannot be sent between the notebook and a rank."""


@dataclass(frozen=True)
class RemoteError:
    """An exception that a cell raised on one rank, as text; it never becomes an object of the class it names.

    ``name`` is the name of that class, ``traceback`` has its lines, with those of the cell. ``interrupted``: the rank
    was stopped.
    """

    rank: int
    host: str
    name: str
    message: str
    traceback: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def summary(self) -> str:
        """The name and the message in one text: ``ZeroDivisionError: division by zero``."""
        return f"{self.name}: {self.message}" if self.message else self.name

    @property
    def follows_another(self) -> bool:
        """Whether this error is the consequence of another rank's: its connection closed, or a stop ended the wait."""
        return self.interrupted or bool(HUNG_UP.search(self.message))


class RankError(DetrainError):
    """A cell that raised on at least one rank; ``errors`` maps each failed rank to its `RemoteError`.

    The session continues; ranks whose processes still run keep their variables. ``note`` describes what happened to
    ranks that were waiting, if anything.
    ``lost_before`` describes ranks that exited before the cell began and were not reported yet: often the cause.
    """

    def __init__(
        self, errors: Mapping[int, RemoteError], *, world_size: int, note: str = "", lost_before: str = ""
    ) -> None:
        self.errors = dict(sorted(errors.items()))
        self.world_size = world_size
        self.note = note
        self.lost_before = f"before this cell {lost_before}" if lost_before else ""
        told = [f"{where}: {behind_ours(error.summary)}" for where, error in self._entries()]
        super().__init__("\n".join(filter(None, [*told, self.lost_before])) or note)

    def _entries(self) -> list[tuple[str, RemoteError]]:
        """Group ranks that failed with the same error; errors that follow from another rank's come last."""
        entries: dict[tuple[str, str, tuple[str, ...]], list[RemoteError]] = {}
        for error in self.errors.values():
            entries.setdefault((error.name, error.message, error.traceback), []).append(error)
        return [
            (f"{format_ranks(error.rank for error in group)} on {_list_hosts(group)}", group[0])
            for group in sorted(entries.values(), key=lambda group: group[0].follows_another)
        ]

    def _render_traceback_(self) -> list[str]:
        lines: list[str] = []
        for where, error in self._entries():
            lines += [f"--- {where} ---", *map(quoted, (*error.traceback, error.summary))]
        well = self.world_size - len(self.errors)
        if well > 0 and not all(error.interrupted for error in self.errors.values()):
            lines.append(f"--- {well} of {self.world_size} ranks: no error ---")
        lines += filter(None, [self.lost_before, self.note])
        return lines


class CellInterrupted(RankError, KeyboardInterrupt):
    """Ranks that were interrupted while running a cell; they keep their variables."""


def _list_hosts(errors: Iterable[RemoteError]) -> str:
    hosts = list(dict.fromkeys(error.host for error in errors))
    return ", ".join(hosts) if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"


def quoted(words: str) -> str:
    """Mark each line of a node's cleaned text, so that none passes for ours or colours the text after it."""
    return "\n".join(f"{_QUOTE}{line}{_PLAIN if chr(27) in line else ''}" for line in words.split("\n"))


def behind_ours(words: str) -> str:
    """Mark all lines of a node's text but the first, which continues a line of ours."""
    return quoted(words).removeprefix(_QUOTE)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as a user types them: ``rank 1``, ``ranks 0-3``, ``ranks 0, 2, 5-7``."""
    numbers = sorted(set(ranks))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {short_ranks(numbers, separator=', ')}"


def count_ranks(number: int) -> str:
    """Format a number of ranks: ``1 rank``, ``2 ranks``."""
    return f"{number} rank{'s' if number != 1 else ''}"


def short_ranks(ranks: Iterable[int], *, separator: str = ",") -> str:
    """Format ranks as ``0``, ``0-3`` or ``0,2,5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return separator.join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
