"""Record of the jobs submitted from this machine and their last known state: a file that outlives kernels.

Several notebooks and shells use it at once: each call is one transaction, and closes the file again.
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
_LAST_CHARACTER = chr(0x10FFFF)  # sorts after all characters that can follow
# What each format adds to the previous one; a file has the number of its format. Never change any of these.
FORMATS: tuple[Sequence[str], ...] = (
    (
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, exit_code INTEGER,
            submitted_at REAL NOT NULL, started_at REAL, ended_at REAL, world_size INTEGER,
            metrics TEXT NOT NULL DEFAULT '', updated_at REAL NOT NULL, release TEXT NOT NULL,
            spec_digest TEXT NOT NULL, nodes TEXT NOT NULL
        )""",
        # apart from the jobs, so that listing those reads no spec; a spec that is submitted again is stored once
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
    ("ALTER TABLE jobs ADD COLUMN file BLOB",),  # NULL: written by an earlier release
)
_SUMMARY = (
    "jobs.id, name, state, exit_code, submitted_at, started_at, ended_at, world_size, metrics, updated_at, release"
)
_DETAILS = "nodes, storage, source, spec, file"
_NEWEST = "ORDER BY submitted_at DESC, jobs.id DESC LIMIT"


class Changes(TypedDict, total=False):
    """Fields of a job that can be updated; None means unknown. ``metrics``: the last ones, as JSON.

    ``source``: the commit, or a digest of the files, that it runs; empty if unknown.
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
    """A job as it was at ``updated_at``. Times are seconds since the epoch; ``metrics`` is JSON, or empty."""

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
    """All that is recorded of a job; ``nodes`` and ``spec`` are the submitted JSON, ``storage`` a URL or empty.

    ``file``: the full path of the file with the spec, as `os.fsencode` gives it; empty if there is none, None if an
    earlier release submitted the job.
    """

    nodes: str
    storage: str
    source: str
    spec: str
    file: bytes | None


class Record:
    """The jobs of this user, in ``file``: by default below ``XDG_STATE_HOME``, or ~/.local/state if that is not set.

    Each method raises JobError when the file cannot be used: others can write it, a newer release wrote it, it is
    damaged, or another process has locked it for ``busy_limit_s``.
    """

    def __init__(self, file: Path | None = None, *, busy_limit_s: float = _BUSY_LIMIT_S) -> None:
        self._file = file
        self._busy_limit_s = busy_limit_s

    def add(
        self, id: str, *, name: str, nodes: str, spec: str, state: str, storage: str = "", file: bytes | None = b""
    ) -> None:
        """Add a job that is being submitted, with the fields of `JobRow`. Raises: JobError when the id exists."""
        digest, now = hashlib.sha256(spec.encode()).hexdigest(), time.time()
        with self._changing() as db:
            if db.execute("SELECT 1 FROM jobs WHERE id = ?", (id,)).fetchone():
                raise JobError(f"job {id} already exists: give another id")
            db.execute("INSERT OR IGNORE INTO specs VALUES (?, ?)", (digest, spec))
            db.execute(
                "INSERT INTO jobs "
                "(id, name, state, submitted_at, updated_at, release, spec_digest, nodes, storage, file) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (id, name, state, now, now, __version__, digest, nodes, storage, file),
            )

    def update(self, id: str, **changes: Unpack[Changes]) -> None:
        """Update what is known of a job. A job that was removed meanwhile, also by another process, stays removed."""
        if unknown := changes.keys() - Changes.__annotations__.keys():
            raise TypeError(f"{min(unknown)!r} is not a field of a job")
        columns = "".join(f"{name} = ?, " for name in changes)
        with self._changing() as db:
            db.execute(f"UPDATE jobs SET {columns}updated_at = ? WHERE id = ?", (*changes.values(), time.time(), id))

    def get_last(self) -> JobRow:
        """Return the last job that was submitted and started. Raises: JobError when there is none."""
        with self._reading() as db:
            where = f"WHERE state != '{NOT_STARTED}' {_NEWEST} 1"
            row = db.execute(f"SELECT {_SUMMARY}, {_DETAILS} FROM jobs JOIN specs ON digest = spec_digest {where}")
            if found := row.fetchone():
                return JobRow(*found)
        raise JobError("no job was submitted from here")

    def get(self, wanted: str) -> JobRow:
        """Return the job of an id, the newest of a name, or the only one whose id begins so. Raises: JobError.

        Of one name, a submission that failed comes after all that were started: it has no logs to look at.
        """
        shown = printable(wanted)[:80]
        if not wanted or not wanted.isprintable():
            raise JobError(f"{shown!r} is not a job: give its id, the beginning of its id, or a name")
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
                f"several jobs begin with {shown!r}: {name_some([row[0] for row in rows])}: give more of an id"
            )
        return JobRow(*rows[0])

    def summaries(self, limit: int | None = None, *, name: str | None = None) -> list[JobSummary]:
        """List the jobs, the newest first; with ``name``, only those of that name."""
        where, named = ("", ()) if name is None else ("WHERE name = ?", (name,))
        values = (*named, -1 if limit is None else limit)
        with self._reading() as db:
            return [JobSummary(*row) for row in db.execute(f"SELECT {_SUMMARY} FROM jobs {where} {_NEWEST} ?", values)]

    def newest_of(self, names: Sequence[str]) -> dict[tuple[str, bytes | None], tuple[JobSummary, int]]:
        """Return the newest job for each of these names and each ``file`` (see `JobRow`), and the number of such jobs.

        As in `get`, a submission that failed comes after all that were started.
        """
        found: dict[tuple[str, bytes | None], tuple[JobSummary, int]] = {}
        order = f"MAX(submitted_at - (state = '{NOT_STARTED}') * 1e12)"  # SQLite takes the other columns from that row
        columns = f"SELECT {_SUMMARY}, file, COUNT(*), {order} FROM jobs WHERE name IN"
        with self._reading() as db:
            for begin in range(0, len(names), _MOST_NAMES):
                some = names[begin : begin + _MOST_NAMES]
                places = ", ".join("?" * len(some))
                for *row, file, count, _ in db.execute(f"{columns} ({places}) GROUP BY name, file", some):
                    found[row[1], file] = (JobSummary(*row), count)
        return found

    def remove(self, id: str) -> None:
        """Forget a job, and its spec unless another job has the same. A missing job is not an error."""
        with self._changing() as db:
            digest = db.execute("SELECT spec_digest FROM jobs WHERE id = ?", (id,)).fetchone() or ("",)
            db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            db.execute("DELETE FROM fetched WHERE id = ?", (id,))
            is_used = "SELECT 1 FROM jobs WHERE spec_digest = digest"
            db.execute(f"DELETE FROM specs WHERE digest = ? AND NOT EXISTS ({is_used})", digest)

    def fetched(self, id: str) -> dict[str, str]:
        """Return the files that fetches of a job wrote here: SHA-256 by full path."""
        with self._reading() as db:
            rows = db.execute("SELECT path, sha256 FROM fetched WHERE id = ?", (id,)).fetchall()
        return {os.fsdecode(path): digest for path, digest in rows}

    def note_fetched(self, id: str, files: Mapping[str, str]) -> None:
        """Add files that a fetch wrote to those recorded before."""
        with self._changing() as db:
            rows = [(id, os.fsencode(path), digest) for path, digest in files.items()]
            db.executemany("INSERT OR REPLACE INTO fetched VALUES (?, ?, ?)", rows)

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Yield the database in one transaction: all of its changes are made, or none."""
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")  # lock before reading: two readers that wait to write would both fail
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
            why = f"{exc.filename}: {exc.strerror}: make it a writable folder" if exc.filename else exc
            raise JobError(
                f"the record of jobs cannot be used: {why}, or set XDG_STATE_HOME to another folder"
            ) from exc
        except sqlite3.Error as exc:
            raise JobError(f"the record of jobs {file} cannot be used: {_told(exc, self._busy_limit_s)}") from exc

    def _prepare(self) -> Path:
        """Return the path of the file, which may not exist. Raises: OSError when it is not this user's alone."""
        file = self._file or state_folder() / _FILE_NAME
        file = make_private_folder(file.parent) / file.name
        # lstat, not open: closing the file would release the locks that other threads hold on it
        try:
            state = file.lstat()
        except FileNotFoundError:
            return file
        if not stat.S_ISREG(state.st_mode) or can_others_write(state, file):
            raise PermissionError(f"{describe(file, state)} is not a file that only this user can write: move it away")
        return file


def bring_up_to_date(db: sqlite3.Connection, file: Path, formats: Sequence[Sequence[str]] = FORMATS) -> None:
    """Upgrade a file of an older release. Raises: JobError for a file of a newer release."""
    if _format_of(db) == len(formats):
        return
    db.execute("BEGIN IMMEDIATE")
    with db:
        if (found := _format_of(db)) > len(formats):
            raise JobError(
                f"the record of jobs {file} was written by a newer release: it has format {found}, and this one reads "
                f"up to {len(formats)}: update detrain_nb, or set XDG_STATE_HOME to another folder"
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
        return f"another process has locked it for {busy_limit_s:g} s: stop that process, or try again"
    is_of_system = isinstance(error, sqlite3.OperationalError)  # a full disk, a file that is read-only
    if is_of_system and getattr(error, "sqlite_errorname", "") != "SQLITE_ERROR":  # else its tables are not ours
        return str(error)
    return f"{error}: move it away, and a new one is created"
