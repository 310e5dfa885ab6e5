"""Which jobs were submitted from this machine, and what was last known of them: a file that outlives kernels.

Several notebooks and shells use it at once: each call is one transaction, and none holds the file open between two.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from .. import __version__
from ..errors import JobError
from ..guarded import can_others_write, describe, make_private_folder, state_folder
from ..node.job.terms import NOT_STARTED
from ..text import name_some, printable

__all__ = ["FORMATS", "Changes", "JobRow", "JobSummary", "Record", "bring_up_to_date"]

_FILE_NAME = "jobs.sqlite"
_BUSY_LIMIT_S = 10.0
_MOST_NAMES = 500  # in one query
_LAST_CHARACTER = chr(0x10FFFF)  # sorts behind all that can follow
# What each format adds to the one before; a file says which one it has. None of these is ever changed.
FORMATS: tuple[Sequence[str], ...] = (
    (
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, exit_code INTEGER,
            submitted_at REAL NOT NULL, started_at REAL, ended_at REAL, world_size INTEGER,
            metrics TEXT NOT NULL DEFAULT '', updated_at REAL NOT NULL, release TEXT NOT NULL,
            spec_digest TEXT NOT NULL, nodes TEXT NOT NULL
        )""",
        # apart from the jobs, so that a list reads none; each is there once, however often it was submitted
        "CREATE TABLE specs (digest TEXT PRIMARY KEY, spec TEXT NOT NULL)",
        "CREATE INDEX jobs_by_time ON jobs (submitted_at)",
        "CREATE INDEX jobs_by_name ON jobs (name, submitted_at)",
        "CREATE INDEX jobs_by_spec ON jobs (spec_digest)",
    ),
    ("ALTER TABLE jobs ADD COLUMN storage TEXT NOT NULL DEFAULT ''",),
    (
        "CREATE TABLE fetched (id TEXT, path BLOB, sha256 TEXT NOT NULL, PRIMARY KEY (id, path))",
        "ALTER TABLE jobs ADD COLUMN source TEXT NOT NULL DEFAULT ''",
    ),
    ("ALTER TABLE jobs ADD COLUMN file BLOB",),  # NULL: an earlier release has noted none
)
_SUMMARY = (
    "jobs.id, name, state, exit_code, submitted_at, started_at, ended_at, world_size, metrics, updated_at, release"
)
_DETAILS = "nodes, storage, source, spec, file"
_NEWEST = "ORDER BY submitted_at DESC, jobs.id DESC LIMIT"


class Changes(TypedDict, total=False):
    """What may be noted down of a job; None is not known. ``metrics``: the last ones, as JSON.

    ``source``: the commit, or a digest of the files, that it runs; empty where that is not known.
    """

    state: str
    exit_code: int | None
    started_at: float | None
    ended_at: float | None
    world_size: int | None
    metrics: str
    source: str


@dataclass(frozen=True)
class JobSummary:
    """A job as it was at ``updated_at``. Times are seconds of the epoch; ``metrics`` is JSON, or empty."""

    id: str
    name: str
    state: str
    exit_code: int | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    world_size: int | None
    metrics: str
    updated_at: float
    release: str


@dataclass(frozen=True)
class JobRow(JobSummary):
    """All that is kept of a job; ``nodes`` and ``spec`` are the JSON that was given, ``storage`` a URL or empty.

    ``file``: the full path of the file that the spec is in, as `os.fsencode` gives it; empty where there is none, None
    where an earlier release has submitted it.
    """

    nodes: str
    storage: str
    source: str
    spec: str
    file: bytes | None


class Record:
    """The jobs of this user, in ``file``: by default where ``XDG_STATE_HOME`` says, else in ~/.local/state.

    Each method raises JobError where the file cannot be used: others can write it, a newer release has written it, it
    is damaged, or another process has held it for ``busy_limit_s``.
    """

    def __init__(self, file: Path | None = None, *, busy_limit_s: float = _BUSY_LIMIT_S) -> None:
        self._file = file
        self._busy_limit_s = busy_limit_s

    def add(
        self, id: str, *, name: str, nodes: str, spec: str, state: str, storage: str = "", file: bytes | None = b""
    ) -> None:
        """Note down a job that is being submitted now, as `JobRow` has it. Raises: JobError for an id that is there."""
        digest, now = hashlib.sha256(spec.encode()).hexdigest(), time.time()
        with self._changing() as db:
            if db.execute("SELECT 1 FROM jobs WHERE id = ?", (id,)).fetchone():
                raise JobError(f"job {id} is there already: give another id")
            db.execute("INSERT OR IGNORE INTO specs VALUES (?, ?)", (digest, spec))
            db.execute(
                "INSERT INTO jobs "
                "(id, name, state, submitted_at, updated_at, release, spec_digest, nodes, storage, file) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (id, name, state, now, now, __version__, digest, nodes, storage, file),
            )

    def update(self, id: str, **changes: Unpack[Changes]) -> None:
        """Note down what is known now. A job that was removed meanwhile, by another process too, stays removed."""
        if unknown := changes.keys() - Changes.__annotations__.keys():
            raise TypeError(f"{min(unknown)!r} is not kept of a job")
        columns = "".join(f"{name} = ?, " for name in changes)
        with self._changing() as db:
            db.execute(f"UPDATE jobs SET {columns}updated_at = ? WHERE id = ?", (*changes.values(), time.time(), id))

    def get_last(self) -> JobRow:
        """Return the job that was submitted last, and started. Raises: JobError where there is none."""
        with self._reading() as db:
            where = f"WHERE state != '{NOT_STARTED}' {_NEWEST} 1"
            row = db.execute(f"SELECT {_SUMMARY}, {_DETAILS} FROM jobs JOIN specs ON digest = spec_digest {where}")
            if found := row.fetchone():
                return JobRow(*found)
        raise JobError("no job was submitted from here")

    def get(self, wanted: str) -> JobRow:
        """Return the job of an id, the newest of a name, or the one whose id begins so. Raises: JobError.

        Of a name, a submission that failed stands behind all that were started: nobody asks for its logs.
        """
        shown = printable(wanted)[:80]
        if not wanted or not wanted.isprintable():
            raise JobError(f"{shown!r} is no job: give its id, what that begins with, or a name")
        columns = f"SELECT {_SUMMARY}, {_DETAILS} FROM jobs JOIN specs ON digest = spec_digest WHERE"
        with self._reading() as db:
            for where in ("jobs.id = ?", f"name = ? AND state != '{NOT_STARTED}'", "name = ?"):
                if row := db.execute(f"{columns} {where} {_NEWEST} 1", (wanted,)).fetchone():
                    return JobRow(*row)
            between = wanted, wanted + _LAST_CHARACTER
            rows = db.execute(f"{columns} jobs.id >= ? AND jobs.id < ? {_NEWEST} 5", between).fetchall()
        if not rows:
            those = "{} shows those that were"
            raise JobError(f"no job {shown!r} was submitted from here", advice=those, typed="list")
        if len(rows) > 1:
            raise JobError(
                f"several jobs begin with {shown!r}: {name_some([row[0] for row in rows])}: give more of one"
            )
        return JobRow(*rows[0])

    def summaries(self, limit: int | None = None, *, name: str | None = None) -> list[JobSummary]:
        """List the newest jobs first, those of one name if that is given."""
        where, named = ("", ()) if name is None else ("WHERE name = ?", (name,))
        values = (*named, -1 if limit is None else limit)
        with self._reading() as db:
            return [JobSummary(*row) for row in db.execute(f"SELECT {_SUMMARY} FROM jobs {where} {_NEWEST} ?", values)]

    def newest_of(self, names: Sequence[str]) -> dict[tuple[str, bytes | None], tuple[JobSummary, int]]:
        """Return the newest job of each of these names and each ``file`` (see `JobRow`), and how many these have.

        As in `get`, a submission that failed stands behind all that were started.
        """
        found: dict[tuple[str, bytes | None], tuple[JobSummary, int]] = {}
        order = f"MAX(submitted_at - (state = '{NOT_STARTED}') * 1e12)"  # the other columns are those of that row
        columns = f"SELECT {_SUMMARY}, file, COUNT(*), {order} FROM jobs WHERE name IN"
        with self._reading() as db:
            for begin in range(0, len(names), _MOST_NAMES):
                some = names[begin : begin + _MOST_NAMES]
                places = ", ".join("?" * len(some))
                for *row, file, count, _ in db.execute(f"{columns} ({places}) GROUP BY name, file", some):
                    found[row[1], file] = (JobSummary(*row), count)
        return found

    def remove(self, id: str) -> None:
        """Forget a job, and its spec where no other has the same. One that is not there is no error."""
        with self._changing() as db:
            digest = db.execute("SELECT spec_digest FROM jobs WHERE id = ?", (id,)).fetchone() or ("",)
            db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            db.execute("DELETE FROM fetched WHERE id = ?", (id,))
            is_used = "SELECT 1 FROM jobs WHERE spec_digest = digest"
            db.execute(f"DELETE FROM specs WHERE digest = ? AND NOT EXISTS ({is_used})", digest)

    def fetched(self, id: str) -> dict[str, str]:
        """What was written here when artifacts of a job were fetched: SHA-256 by full path."""
        with self._reading() as db:
            rows = db.execute("SELECT path, sha256 FROM fetched WHERE id = ?", (id,)).fetchall()
        return {os.fsdecode(path): digest for path, digest in rows}

    def note_fetched(self, id: str, files: Mapping[str, str]) -> None:
        """Note down what was written, beside what was before."""
        with self._changing() as db:
            rows = [(id, os.fsencode(path), digest) for path, digest in files.items()]
            db.executemany("INSERT OR REPLACE INTO fetched VALUES (?, ?, ?)", rows)

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """All that happens in it, or nothing of it."""
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")  # not first to read: two who then wait for each other would both fail
            with db:
                yield db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        file = self._file
        try:
            file = self._prepare()
            db = sqlite3.connect(file, timeout=self._busy_limit_s, isolation_level=None)
            try:
                bring_up_to_date(db, file)
                if hasattr(os, "getuid") and file.stat().st_mode & 0o077:
                    file.chmod(0o600)
                yield db
            finally:
                db.close()
        except OSError as exc:
            why = f"{exc.filename}: {exc.strerror}: let it be a folder to write in" if exc.filename else exc
            raise JobError(
                f"the record of jobs cannot be used: {why}, or set XDG_STATE_HOME to another folder"
            ) from exc
        except sqlite3.Error as exc:
            raise JobError(f"the record of jobs {file} cannot be used: {_told(exc, self._busy_limit_s)}") from exc

    def _prepare(self) -> Path:
        """Where it is; it may not be there yet. Raises: OSError for one that is not this user's alone."""
        file = self._file or state_folder() / _FILE_NAME
        file = make_private_folder(file.parent) / file.name
        # looked at by its name: who opened and closed the file would end the locks that other threads have on it
        try:
            state = file.lstat()
        except FileNotFoundError:
            return file
        if not stat.S_ISREG(state.st_mode) or can_others_write(state, file):
            raise PermissionError(f"{describe(file, state)} is not a file that only this user can write: move it away")
        return file


def bring_up_to_date(db: sqlite3.Connection, file: Path, formats: Sequence[Sequence[str]] = FORMATS) -> None:
    """Add what a file of an older release lacks. Raises: JobError for one of a newer release."""
    if _format_of(db) == len(formats):
        return
    db.execute("BEGIN IMMEDIATE")
    with db:
        if (found := _format_of(db)) > len(formats):
            raise JobError(
                f"the record of jobs {file} is of a newer release: it has format {found}, and this one reads up to "
                f"{len(formats)}: update detrain_nb, or set XDG_STATE_HOME to another folder"
            )
        for statements in formats[found:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(formats)}")


def _format_of(db: sqlite3.Connection) -> int:
    found: Any = db.execute("PRAGMA user_version").fetchone()
    return int(found[0])


def _told(error: sqlite3.Error, busy_limit_s: float) -> str:
    if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
        return f"another process has held it for {busy_limit_s:g} s: end that one, or try again"
    is_of_system = isinstance(error, sqlite3.OperationalError)  # a full disk, a file that is read-only
    if is_of_system and getattr(error, "sqlite_errorname", "") != "SQLITE_ERROR":  # that: its tables are not ours
        return str(error)
    return f"{error}: move it away, and a new one is begun"
