"""Completions of values on the line of a magic: hosts, sessions, files, variables. No connection is opened."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import keyword
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..deploy.known import known_sessions, session_names
from ..documents import SUFFIXES
from ..errors import DetrainError
from ..plan.targets import KINDS, TARGETS
from ..session.session import Session
from ..transport.ssh_config import list_hosts
from .given_spec import read_spec
from .options import setting_candidates

_LIMIT_S = 0.05  # the user has pressed a key and waits
_TO_ESCAPE = re.compile(r"([^\w@%+=:,./~-])")
_ESCAPED = re.compile(r"\\(.)")
_MOST_JOBS = 100  # the newest
_EVERYWHERE = {*dir(builtins), *keyword.kwlist, "In", "Out", "get_ipython"}


class Candidates:
    """The completions: ``of`` returns those of a word; ``session`` returns the notebook's session, or None."""

    def __init__(self, session: Callable[[], Session | None], ipython: Any) -> None:
        self._session = session
        self._ipython = ipython
        self._reading: threading.Thread | None = None
        self._by_kind: dict[str, Callable[[str], list[str]]] = {
            "NODES": lambda word: self._in_time(_hosts_and_files, word),
            "NAMES": self._nodes,
            "RANKS": self._nodes,
            "NAMES HERE": lambda word: _in_list(word, self._own_variables()),
            "NAMES THERE": self._variables,
            "VARIABLE": self._variables,
            "CELL": self._cells,
            "CELLS": lambda word: _in_list(word, self._cells("")),
            "KEY=VALUE": setting_candidates,
            "OTHERS": lambda word: self._in_time(_nodes_but_first, word),
            "SESSION": lambda word: self._in_time(_sessions, word),
            "JOB": lambda word: self._in_time(_jobs, word),
            "SPEC": lambda word: [*self._own_specs(word), *self._in_time(_specs, word)],
            "FIELD": lambda word: self._in_time(_fields, word),
            "FORMAT": lambda word: self._in_time(_formats, word),
            "KIND": lambda word: [kind for kind in KINDS if kind.startswith(word)],
            "NODES_FILE": lambda word: self._in_time(_specs, word),
            "DIR": lambda word: self._in_time(_folders, word),
            "FILE": lambda word: self._in_time(_files, word),
        }

    def _cells(self, word: str) -> list[str]:
        session = self._session()
        numbers = [str(cell) for cell in dict.fromkeys(ran.cell for ran in session.log.cells)] if session else []
        return [number for number in numbers if number.startswith(word)]

    def of(self, kind: str | None, word: str, before: Sequence[str] = ()) -> list[str] | None:
        """Return the words that begin with ``word``, after the words ``before``; None for an unknown kind."""
        if kind == "NODE":
            return sorted(self._in_time(lambda word: self._nodes_named(before, word), word))
        find = self._by_kind.get(kind or "")
        return sorted(find(word)) if find else None

    def _nodes(self, word: str) -> list[str]:
        session = self._session()
        return _in_list(word, session.ranks.plan.hosts) if session else []

    def _own_variables(self) -> list[str]:
        here, others = self._ipython.user_ns, self._ipython.user_ns_hidden
        return [name for name, value in list(here.items()) if name[:1] != "_" and value is not others.get(name)]

    def _own_specs(self, word: str) -> list[str]:
        here = list(self._ipython.user_ns.items())
        return [name for name, value in here if type(value).__name__ == "PipelineSpec" and name.startswith(word)]

    def _nodes_named(self, words: Sequence[str], word: str) -> list[str]:
        """Return nodes of the spec, after the format of an export; else nodes of a job."""
        others = [_ESCAPED.sub(r"\1", name) for name in words if name not in TARGETS]
        own = self._own_specs("")
        specs = [name for name in others if name in own or os.path.isfile(os.path.expanduser(name))]
        if specs and len(others) < len(words):
            return [node.name for node in read_spec(self._ipython, specs[0]).nodes if node.name.startswith(word)]
        return _nodes_of_job(words, word)

    def _variables(self, word: str) -> list[str]:
        """Return variables of the first idle rank, for the last place of a list; without names that Python defines."""
        session = self._session()
        start = word.rpartition(",")[2]
        found = session.ranks.complete(start, len(start)) if session else None
        if found is None:
            return []
        names = [start[: found.start] + match for match in found.matches]
        return _in_list(word, [name for name in names if name.isidentifier() and name not in _EVERYWHERE])

    def _in_time(self, read: Callable[[str], Iterable[str]], word: str) -> list[str]:
        """Return what ``read`` finds; nothing if a slow disk or an ``Include`` takes longer than 0.05 s."""
        if self._reading in threading.enumerate():  # is_alive() is wrong after an interrupted join
            return []
        found: list[str] = []

        def run() -> None:
            with contextlib.suppress(OSError, ValueError, DetrainError):
                found.extend(read(word))

        self._reading = threading.Thread(target=run, name="detrain_nb completion", daemon=True)
        self._reading.start()
        self._reading.join(_LIMIT_S)
        return [] if self._reading.is_alive() else found


def similar_nodes(nodes: str) -> str:
    """Return a question about unknown hosts: hosts of ~/.ssh/config, and nodes files, with a similar name.

    Empty for a nodes file; for any other file, how to make a nodes file of it.
    """
    if os.path.isfile(os.path.expanduser(nodes)):
        how = f"{nodes} is not a nodes file: %pipeline import {nodes} -o nodes.toml converts a list of hosts"
        return "" if nodes.lower().endswith(SUFFIXES) else how
    with contextlib.suppress(OSError, DetrainError):
        known = list_hosts(Path.home() / ".ssh" / "config")
        there = [*known, *_files("", suffixes=SUFFIXES)]
        hosts = [part.strip().rpartition("@")[2].partition(":")[0] for part in nodes.split(",")]
        unknown = [host for host in hosts if host not in known]
        near = [found for host in unknown for found in difflib.get_close_matches(host, there, n=1, cutoff=0.7)]
        return f"did you mean {', '.join(near)}?" if near else ""
    return ""


def _in_list(word: str, names: Iterable[str], *, prefix: str = "") -> list[str]:
    """Return names for the last place of a list with commas, except those already in it."""
    before, comma, last = word.rpartition(",")
    given = {part.rpartition("@")[2] for part in before.split(",")}
    start = last.removeprefix(prefix)
    return [f"{before}{comma}{prefix}{name}" for name in names if name.startswith(start) and name not in given]


def _hosts_and_files(word: str) -> list[str]:
    """List hosts of ~/.ssh/config, with or without a user; and nodes files, unless a list of hosts was begun."""
    from ..spec.node import THIS_MACHINE  # pydantic is slow to import

    user, at, _ = word.rpartition(",")[2].rpartition("@")
    found: list[str] = []
    if not any(slash in word for slash in {"/", os.sep}):
        with contextlib.suppress(OSError, DetrainError):  # there are still files
            found = [] if at else _in_list(word, [THIS_MACHINE])
            found += _in_list(word, list_hosts(Path.home() / ".ssh" / "config"), prefix=f"{user}{at}")
    return found if at or "," in word else [*found, *_files(word, suffixes=SUFFIXES)]


def _files(word: str, *, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """List folders, and files with one of ``suffixes``."""
    typed = _ESCAPED.sub(r"\1", word)
    folder, start = os.path.split(typed)
    before = typed[: len(typed) - len(start)]
    found = []
    with os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            is_shown = entry.name.startswith(start) and (start or not entry.name.startswith("."))
            if is_shown and (entry.name.lower().endswith(suffixes) or entry.is_dir()):
                found.append(_TO_ESCAPE.sub(r"\\\1", before + entry.name + ("/" if entry.is_dir() else "")))
    return found


def _nodes_but_first(word: str) -> list[str]:
    """List them for all known sessions: the session may be named later in the line."""
    return _in_list(word, dict.fromkeys(node.name for known in known_sessions().values() for node in known.nodes[1:]))


def _sessions(word: str) -> list[str]:
    return [name for name in session_names() if name.startswith(word)]


def _jobs(word: str) -> list[str]:
    """List ids and names of the newest jobs; a name means its newest job."""
    from ..jobs.record import Record

    known = Record().summaries(limit=_MOST_JOBS)
    names = dict.fromkeys(name for row in known for name in (row.name, row.id))
    return [name for name in names if name.startswith(word)]


def _nodes_of_job(words: Sequence[str], word: str) -> list[str]:
    """List the nodes of the first job on the line."""
    from ..jobs.noting import nodes_of_row
    from ..jobs.record import Record

    for name in words:
        with contextlib.suppress(DetrainError):
            job = Record().get(name)
            return [node.name for node in nodes_of_row(job.nodes, job.id) if node.name.startswith(word)]
    return []


def _specs(word: str) -> list[str]:
    return _files(word, suffixes=SUFFIXES)


def _fields(word: str) -> list[str]:
    """Complete ``--tr`` to ``--training.``, then its fields; ``--source.git.`` is a section again."""
    from ..spec import PipelineSpec

    section, dot, _ = word.removeprefix("--").rpartition(".")
    names = [f"{section}{dot}{name}" for name in PipelineSpec.field_names(section)]
    ends = {name: "." if PipelineSpec.field_names(name) else "" for name in names}
    found = [f"--{name}{end}" for name, end in ends.items() if dot or end]
    return [name for name in found if name.startswith(word)]


def _formats(word: str) -> list[str]:
    return [name for name in TARGETS if name.startswith(word)]


def _folders(word: str) -> list[str]:
    return [name for name in _files(word) if name.endswith("/")]
