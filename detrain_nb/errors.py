"""Every exception of detrain_nb.

DetrainError
├── SpecError (ValueError)            what was asked for cannot be: a field, a number, a name
│   ├── FieldError                    fields of a spec cannot be; `faults` has each of them
│   └── CellSyntaxError               a cell is not Python; nothing was sent
├── SessionError                      the session is not in a state for that: none runs, a rank is busy
│   └── ForeignConnection             another user's process is connected to a process group
├── Conflict                          a file was changed by others after it was read here
├── JobError                          a job is not in a state for that, or there is none of that name
│   └── JobFailed                     a job did not succeed
├── LaunchError                       the ranks of a node could not be started
├── TransportError                    a node cannot be reached, or its channel broke
│   ├── HostKeyError                  a host shows a key that is not known, or revoked
│   └── WireError                     the other side sent what is not a message
├── NodeLost                          a node's agent or launcher is gone, and its ranks with it
├── RankLost                          the process of a rank ended by itself
├── CellTimeout                       a cell did not end in the time it was given
├── NotFinite (ArithmeticError)      a training has met a loss or a gradient that is no number
├── RankError                         a cell raised on at least one rank
│   └── CellInterrupted (KeyboardInterrupt)   ... because it was interrupted
└── ValueNotSupported (TypeError)     a value that cannot travel between the notebook and a rank

Remote failures travel as text. IPython shows what ``_render_traceback_`` returns instead of a traceback of ours.
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

# What gloo and NCCL say when the process at the other end is gone.
HUNG_UP = re.compile(r"connection (?:closed|reset)|broken pipe|remote process exited", re.IGNORECASE)

_MOST_HOSTS = 4  # that are named one by one
_QUOTE = "  | "  # before a line that a node says
_PLAIN = "\x1b[0m"


class DetrainError(Exception):
    """The base of every exception that a user can cause or meet."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class SpecError(DetrainError, ValueError):
    """What was asked for cannot be."""


@dataclass(frozen=True)
class FieldFault:
    """What is wrong with a field, and what to give: ``path`` as ``training.epochs``, ``said`` the rest of the line.

    ``path`` is empty where it is about several fields, and ``said`` begins with a colon then.
    """

    path: str
    said: str
    advice: str = ""  # what to give: ``said`` without the value; empty where the two cannot be told apart

    def __str__(self) -> str:
        return f"{self.path}{self.said}" if self.path else self.said.removeprefix(": ")

    def below(self, path: str) -> FieldFault:
        """The same, told of what has the field in its own field ``path``."""
        return FieldFault(f"{path}.{self.path}" if self.path else path, self.said, self.advice)


class FieldError(SpecError):
    """Fields of a spec that cannot be, each with its line; ``where``: the file that they stand in."""

    def __init__(self, faults: Iterable[FieldFault], *, where: str = "") -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(f"{where}: {fault}" if where else str(fault) for fault in self.faults))


@dataclass(frozen=True)
class FieldChange:
    """A field that has another value in the file (``theirs``) than here (``mine``); an empty text is no value."""

    path: str
    theirs: str
    mine: str

    def __str__(self) -> str:
        return f"{self.path} is {self.theirs or 'not given'} there and {self.mine or 'not given'} here"


class Conflict(DetrainError):
    """A file is not as it was when it was read here, so it was not written, or not started.

    ``changed_at`` is the time of the other version in seconds of the epoch, ``owner`` whose file that is; None and
    empty where there is none any more. ``changes`` has the fields that differ. ``fault`` is the message without its
    ``advice``, which is for Python.
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
    """A cell is not Python; nothing was sent."""

    def __init__(self, error: SyntaxError) -> None:
        self.error = error
        super().__init__(f"{error.msg} (line {error.lineno})")

    def _render_traceback_(self) -> list[str]:
        text = (self.error.text or "").rstrip()
        marker = " " * max(0, (self.error.offset or 1) - 1) + "^"
        return [f"  line {self.error.lineno}", f"    {text}", f"    {marker}", f"SyntaxError: {self.error.msg}"]


class SessionError(DetrainError):
    """The session is not in a state for what was asked."""


class ForeignConnection(SessionError):
    """A process of another user of the machine is connected to a process group, which was not used."""


class JobError(DetrainError):
    """A job is not in a state for what was asked, or there is none of that name.

    ``advice`` says what to do, with braces for what is ``typed``: the command ``stop ID`` or ``list``, or ``--anyway``.
    A front end sets the ``prog`` that begins its commands, as ``%job``; where none has, it is said in Python.
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
    """A job did not succeed."""


class LaunchError(DetrainError):
    """The ranks of a node could not be started."""


class TransportError(DetrainError):
    """A node cannot be reached, or the channel to it broke."""


class HostKeyError(TransportError):
    """A host shows a key that is not known for it, or revoked; ``command``, if there is one, does what ``advice`` says.

    Both are ours alone, so that they can be shown as such: no text with a host's words is searched for them.
    """

    def __init__(self, fault: str, *, advice: str = "", command: str = "") -> None:
        self.fault, self.advice, self.command = fault, advice, command
        super().__init__(": ".join(filter(None, (fault, advice, command))))


class WireError(TransportError):
    """The other side sent something that is not a message."""


class NodeLost(DetrainError):
    """A node's agent or launcher is gone, and its ranks with it."""


class RankLost(DetrainError):
    """The process of a rank ended by itself; ``ranks`` were lost with their variables, the others keep theirs."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(message)


class NotFinite(DetrainError, ArithmeticError):
    """A training has met a loss or a gradient that is no number; its parameters are as they were before the step."""


class CellTimeout(DetrainError):
    """A cell did not end in the time it was given."""


class ValueNotSupported(DetrainError, TypeError):
    """A value that cannot travel between the notebook and a rank."""


@dataclass(frozen=True)
class RemoteError:
    """What a cell raised on one rank, as text: nothing a rank sends becomes an exception object of its own class."""

    rank: int
    host: str
    name: str
    message: str
    traceback: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def summary(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name

    @property
    def follows_another(self) -> bool:
        """What a rank meets when another one has failed: that one hung up, or a stop ended the wait for it."""
        return self.interrupted or bool(HUNG_UP.search(self.message))


class RankError(DetrainError):
    """A cell raised on at least one rank; ``errors`` has every rank's error, by rank.

    ``lost_before``: how ranks ended before the cell began, in words, where nobody was told: it is often the reason.
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
        """Ranks that failed with the same error are one entry; what follows from another rank's stands behind it."""
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
    """The ranks were interrupted while they ran a cell; they keep their variables."""


def _list_hosts(errors: Iterable[RemoteError]) -> str:
    hosts = list(dict.fromkeys(error.host for error in errors))
    return ", ".join(hosts) if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"


def quoted(words: str) -> str:
    """Clean words of a node, below a line of ours that names it: no line passes for ours, nor colours what follows."""
    return "\n".join(f"{_QUOTE}{line}{_PLAIN if chr(27) in line else ''}" for line in words.split("\n"))


def behind_ours(words: str) -> str:
    """The same where the first line stands behind words of ours: only the further ones are marked."""
    return quoted(words).removeprefix(_QUOTE)


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as a user writes them: ``rank 1``, ``ranks 0-3``, ``ranks 0, 2, 5-7``."""
    numbers = sorted(set(ranks))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {short_ranks(numbers, separator=', ')}"


def count_ranks(number: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} rank{'s' if number != 1 else ''}"


def short_ranks(ranks: Iterable[int], *, separator: str = ",") -> str:
    """Write ranks as ``0``, ``0-3`` or ``0,2,5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return separator.join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
