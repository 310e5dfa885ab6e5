"""Sync of the notebook's folder to the nodes: files that have changed here are sent before the next cell runs.

The node decides which files it needs, from its record of the files it has received (a note next to the work folders):
only files that we sent are removed or replaced, and a restarted kernel sends nothing twice. While nothing changes,
nothing is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..copying.json_lines import LINE_BYTES, SLOWEST_BYTES_PER_S, Overdue, Talk, Untrue, as_size, clean
from ..copying.remote_program import SAMPLE_FILES, STATE_BYTES
from ..errors import DetrainError, SessionError
from ..text import html_cells, name_some, table_lines
from ..transport import Transport
from .files import PATIENCE, OnProgress, Patience, Stop, label, on_every, open_talk
from .folder import Manifest, list_folder, name_hidden, pack
from .ignoring import OWN_FILE
from .start_steps import OnStep, StartStep, ignore_step

__all__ = ["DataCheck", "DataState", "FolderSync", "check"]

_CHUNK_BYTES = 1 << 18
_INDEX_BYTES = 8  # per file in the list of wanted files
_COLUMNS = ["node", "files", "bytes", "checksum", ""]
_WHERE_LOOKED = "relative paths are resolved in the folder where the ranks of each node start"


class FolderSync:
    """Mirror of the folder ``root`` here in the work folders of nodes.

    ``notices`` names the files that a node left alone, the hidden files that are sent, and the files that are not sent,
    as they may hold keys. A node that takes too long is skipped until it is reached again. ``takes_over=False`` is for
    a session that continues: a work folder that mirrors another folder is left alone. ``top`` is the real path of
    ``root`` when it was first read.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, top: str = "", takes_over: bool = True, patience: Patience = PATIENCE
    ) -> None:
        self.root = Path(root).absolute()
        self._top = top or os.path.realpath(root)
        self.notices: list[str] = []
        self._root_name = f"{socket.gethostname()}:{self.root}"
        self._takes_over = takes_over
        self._patience = patience
        self._brought: dict[str, tuple[object, Manifest]] = {}
        self._apart: set[str] = set()
        self._overdue: dict[str, object] = {}  # node name -> the contact during which it took too long
        self._left_alone: set[tuple[str, str]] = set()
        self._told: set[str] = set()

    def bring(
        self,
        nodes: Sequence[Transport],
        *,
        on_step: OnStep = ignore_step,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send everything that has changed to ``nodes``.

        ``on_step`` is called in the threads of the nodes, ``meanwhile`` repeatedly in the calling thread.
        Raises: SpecError when the folder has too many files or bytes, DetrainError with the name of the node.
        """
        nodes = [node for node in nodes if node.name not in self._apart and not self._is_overdue(node)]
        if not nodes:
            return
        kept: list[str] = []
        manifest = list_folder(self.root, top=self._top, kept=kept)
        waiting = [node for node in nodes if self._is_behind(node, manifest)]
        if waiting:
            self._tell_once(
                "hidden files are sent to the nodes too",
                name_hidden(manifest),
                f"list those that should stay here in {OWN_FILE}",
            )
        self._tell_once(
            "not sent, as they may hold keys", kept, f"to send a file that holds none, add a line !NAME to {OWN_FILE}"
        )
        if waiting:
            packer = _Packer(self._top, manifest)

            def bring(node: Transport, stop: Stop, _: object) -> None:
                on_step(StartStep(node.name, "send", "running"))
                try:
                    self._bring(node, manifest, packer, stop)
                except DetrainError as exc:
                    on_step(StartStep(node.name, "send", "failed", error=str(exc)))
                    raise
                on_step(StartStep(node.name, "send", "done"))

            on_every(waiting, bring, meanwhile=meanwhile)

    def _tell_once(self, what: str, names: list[str], advice: str) -> None:
        fresh = [name for name in names if name not in self._told]
        if fresh:
            self._told.update(fresh)
            self.notices.append(f"{what}: {name_some([clean(name)[:80] for name in fresh], most=10)}: {advice}")

    def _is_behind(self, node: Transport, manifest: Manifest) -> bool:
        contact, brought = self._brought.get(node.name, (None, {}))
        if contact is node.contact:
            return not _is_same(brought, manifest)
        if node.folder_state != (self._root_name, hashlib.sha256(_write_list(manifest)).hexdigest()):
            return True
        self._brought[node.name] = node.contact, manifest
        return False

    def _bring(self, node: Transport, manifest: Manifest, packer: _Packer, stop: Stop) -> None:
        contact, folder = node.contact, node.work_folder(str(self.root))
        if not folder:
            raise SessionError(f"{label(node)} has no work folder until its agent has been reached")
        names, listed = list(manifest), _write_list(manifest)
        order = {"root": self._root_name, "takes_over": self._takes_over, "size": len(listed)}
        with open_talk(node, stop=stop, patience=self._patience) as talk, self._without_who_is_overdue(node):
            self._send_in_time(talk, listed, "sync", base=folder, cache=node.cache, **order)
            answer = talk.hear("want", "other", most_bytes=LINE_BYTES + _INDEX_BYTES * len(names))
            if answer["type"] == "other":
                self._leave_apart(node, clean(answer.get("root")))
                return
            if wanted := _choose(names, answer.get("indices")):
                packed = packer.pack(wanted)
                stop.check()
                self._send_in_time(talk, packed, "archive", size=len(packed))
            self._note_left_alone(node, talk.hear("done"), manifest)
            self._brought[node.name] = contact, manifest

    def _send_in_time(self, talk: Talk, data: bytes, kind: str, **fields: object) -> None:
        """Send a line followed by ``data``; the deadline first covers the transfer, then the node's answer."""
        talk.deadline = time.monotonic() + self._patience.bring_s + len(data) / SLOWEST_BYTES_PER_S
        talk.say(kind, **fields)
        for start in range(0, len(data), _CHUNK_BYTES):
            talk.send(data[start : start + _CHUNK_BYTES])
        talk.flush()
        talk.deadline = time.monotonic() + self._patience.bring_s

    def _is_overdue(self, node: Transport) -> bool:
        return self._overdue.get(node.name) is node.contact

    @contextlib.contextmanager
    def _without_who_is_overdue(self, node: Transport) -> Iterator[None]:
        """Catch an overdue node: cells do not wait for it again until it has been reconnected."""
        try:
            yield
        except Overdue:
            self._overdue[node.name] = node.contact
            self.notices.append(
                f"{label(node)} did not receive the files of {self.root} in time; cells no longer wait for it, and its "
                "ranks keep the files received earlier: check whether its disk hangs, then try %distributed restart"
            )

    def _leave_apart(self, node: Transport, root: str) -> None:
        self._apart.add(node.name)
        if root:
            self.notices.append(
                f"{label(node)}: its work folder mirrors {root}, not {self.root}: changes here are not sent to it"
            )

    def _note_left_alone(self, node: Transport, said: dict[str, Any], manifest: Manifest) -> None:
        """Add one notice for paths that the node did not overwrite, as the file there did not come from us."""
        names = said.get("left_alone")
        found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        fresh = [name for name in found if name in manifest and (node.name, name) not in self._left_alone]
        if fresh:
            self._left_alone.update((node.name, name) for name in fresh)
            some = name_some([clean(name) for name in fresh])
            self.notices.append(
                f"{label(node)}: not overwritten, as the notebook did not send the existing files: {some}: "
                "replace them with %distributed put, or delete them there"
            )


def _write_list(manifest: Manifest) -> bytes:
    """Return the manifest in the form in which it is sent to a node."""
    return json.dumps([[name, *state.kind] for name, state in manifest.items()]).encode()


class _Packer:
    """Archives of files, each packed once even when several nodes want it."""

    def __init__(self, root: str, manifest: Manifest) -> None:
        self._root, self._manifest = root, manifest
        self._packed: dict[tuple[str, ...], bytes] = {}
        self._packing = threading.Lock()

    def pack(self, names: list[str]) -> bytes:
        key = tuple(names)
        with self._packing:
            if key not in self._packed:
                self._packed[key] = pack(self._root, self._manifest, names)
            return self._packed[key]


def _is_same(before: Manifest, now: Manifest) -> bool:
    """Return True when all contents are equal, regardless of modification times."""
    return before.keys() == now.keys() and all(state.kind == now[name].kind for name, state in before.items())


def _choose(names: list[str], indices: object) -> list[str]:
    """Return the names that a node wants, from their indices. Raises: Untrue."""
    if not isinstance(indices, list):
        raise Untrue("the node sent no list of the files it wants")
    if len(indices) > len(names) or any(as_size(index) >= len(names) for index in indices):  # before a dict has them
        raise Untrue("the node wants a file that the folder does not have")
    return [names[index] for index in dict.fromkeys(indices)]


@dataclass(frozen=True)
class DataState:
    """The files that a node has under a path.

    ``names`` is a digest of all names and sizes. ``sample`` holds the size of some files and the digest of their
    beginning and end; nodes with equal names sample the same files.
    """

    exists: bool
    files: int = 0
    size_bytes: int = 0
    names: str = ""
    sample: tuple[tuple[str, int, str], ...] = ()
    num_skipped: int = 0

    @property
    def checksum(self) -> str:
        return hashlib.sha256(repr(self.sample).encode()).hexdigest()[:12] if self.sample else ""


@dataclass(frozen=True)
class DataCheck:
    """Comparison of the files under a path on every node; its repr lists the differences by node."""

    path: str
    states: dict[str, DataState]

    @property
    def is_same(self) -> bool:
        """True if no node differs from the others."""
        return not any(self.differences.values())

    @property
    def differences(self) -> dict[str, list[str]]:
        """Differences in words, by node, from the state that most nodes have; in a tie, the first node's state."""
        states = list(self.states.values())
        counts = Counter(states)
        usual = max(states, key=lambda state: (counts[state], -states.index(state)))
        return {name: _differ(state, usual) for name, state in self.states.items()}

    def __repr__(self) -> str:
        if not self.is_anywhere:
            return f"{self._title()}\n{_WHERE_LOOKED}"
        return "\n".join([self._title(), *table_lines([_COLUMNS, *self._rows()])])

    def _repr_html_(self) -> str:
        if not self.is_anywhere:
            return f"<p>{html.escape(self._title())}<br>{_WHERE_LOOKED}</p>"
        body = "".join(f"<tr>{html_cells(row)}</tr>" for row in self._rows())
        return f"<p>{html.escape(self._title())}</p><table><tr>{html_cells(_COLUMNS, tag='th')}</tr>{body}</table>"

    @property
    def is_anywhere(self) -> bool:
        """True when at least one node has the path."""
        return any(state.exists for state in self.states.values())

    def _title(self) -> str:
        if not self.is_anywhere:
            return f"{self.path}: on no node"
        nodes = "1 node" if len(self.states) == 1 else f"{len(self.states)} nodes"
        return f"{self.path}: {'the same' if self.is_same else 'not the same'} on {nodes}"

    def _rows(self) -> list[list[str]]:
        rows = []
        for (name, state), differences in zip(self.states.items(), self.differences.values()):
            remark = ", ".join(differences) or _name_skipped(state, "not compared")
            rows.append([name, f"{state.files:,}", f"{state.size_bytes:,}", state.checksum, remark])
        return rows


def _differ(state: DataState, usual: DataState) -> list[str]:
    if not state.exists or not usual.exists:
        return [] if state.exists == usual.exists else ["missing" if usual.exists else "only here"]
    words = []
    for here, there, what in ((state.files, usual.files, "file"), (state.size_bytes, usual.size_bytes, "byte")):
        if here != there:
            count = abs(here - there)
            words.append(f"{count:,} {what}{'s' if count > 1 else ''} {'more' if here > there else 'fewer'}")
    elsewhere = {name: fields for name, *fields in usual.sample}
    changed = [name for name, *fields in state.sample if fields != elsewhere.get(name, fields)]
    if changed:
        words.append(f"contents differ: {name_some(changed)}")
    if state.names != usual.names and not words:
        words.append("names or sizes differ")
    if state.num_skipped != usual.num_skipped:
        words.append(_name_skipped(state, f"elsewhere {usual.num_skipped}") or f"elsewhere {_name_skipped(usual)}")
    return words


def _name_skipped(state: DataState, *more: str) -> str:
    links = "link to a folder, or device" if state.num_skipped == 1 else "links to folders, or devices"
    return ", ".join([f"{state.num_skipped} {links}", *more]) if state.num_skipped else ""


def check(nodes: Sequence[Transport], path: str, *, folder: str = "") -> DataCheck:
    """Compare the files under ``path`` on all nodes: names, sizes, and the beginning and end of up to 64 files.

    A relative ``path`` is resolved in the work folder that belongs to ``folder``.
    Raises: DetrainError with the name of the node.
    """

    def look(node: Transport, stop: Stop, _: OnProgress) -> DataState:
        with open_talk(node, stop=stop) as talk:
            talk.say("check", base=node.work_folder(folder), path=path)
            return _read_state(talk.hear("state", most_bytes=STATE_BYTES))

    states = on_every(nodes, look)
    return DataCheck(path, {label(node): state for node, state in zip(nodes, states)})


def _read_state(said: dict[str, Any]) -> DataState:
    """Check and return the state that a node sent. Raises: Untrue."""
    if said.get("exists") is not True:
        return DataState(False)
    sample = said.get("sample")
    if not isinstance(sample, dict) or len(sample) > SAMPLE_FILES:
        raise Untrue(f"the node sent an invalid sample: expected a JSON object of up to {SAMPLE_FILES} files")
    read = []
    for name, fields in sample.items():
        if not isinstance(fields, list) or len(fields) != 2:
            raise Untrue("the node sent an invalid sample: expected size and digest of each file")
        read.append((clean(name), as_size(fields[0]), clean(fields[1])[:64]))
    files, size, skipped = (as_size(said.get(key)) for key in ("files", "size", "skipped"))
    return DataState(True, files, size, clean(said.get("names"))[:64], tuple(read), skipped)
