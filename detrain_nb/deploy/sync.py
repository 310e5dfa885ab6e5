"""The notebook's folder, kept the same on the nodes: what has changed here goes there before the next cell.

What is to go is decided there, by a note beside the work folders of what came before: only what we have sent is
removed or replaced, and a kernel that was started anew sends nothing twice. While nothing changes, nothing is said.
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
_INDEX_BYTES = 8  # of a file, in a list
_COLUMNS = ["node", "files", "bytes", "checksum", ""]
_WHERE_LOOKED = "a path that is not given in full is looked for in the folder where the ranks of each node start"


class FolderSync:
    """Keeps the work folders of nodes as the folder ``root`` here; ``notices`` get what was left alone there, and what
    of the folder goes or stays that the user may not think of. A node that takes too long is gone on without.

    Not ``takes_over``: of a session that goes on, where a folder that is kept as another one here is left alone.
    ``top`` is where ``root`` led when it was looked at first.
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
        self._overdue: dict[str, object] = {}  # and the contact at which it was
        self._left_alone: set[tuple[str, str]] = set()
        self._told: set[str] = set()

    def bring(
        self,
        nodes: Sequence[Transport],
        *,
        on_step: OnStep = ignore_step,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Have all that has changed on ``nodes``.

        ``on_step`` is told in the threads of the nodes; ``meanwhile`` is called in this one, again and again.
        Raises: SpecError when the folder is too much, DetrainError with the node.
        """
        nodes = [node for node in nodes if node.name not in self._apart and not self._is_overdue(node)]
        if not nodes:
            return
        kept: list[str] = []
        manifest = list_folder(self.root, top=self._top, kept=kept)
        waiting = [node for node in nodes if self._is_behind(node, manifest)]
        if waiting:
            self._tell_once(
                "hidden files go to the nodes too", name_hidden(manifest), f"list in {OWN_FILE} what should stay here"
            )
        self._tell_once(
            "these stay here, as they may hold keys", kept, f"a line !NAME in {OWN_FILE} sends one that does not"
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
            raise SessionError(f"{label(node)} has no work folder before an agent of it was reached")
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
        """Say a line with ``data`` after it; the node has so long to take it, and then to answer."""
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
        """Cells do not wait for it a second time, unless it is reached anew."""
        try:
            yield
        except Overdue:
            self._overdue[node.name] = node.contact
            self.notices.append(
                f"{label(node)} has not taken the files of {self.root} in time, and is gone on without: its ranks have "
                "those that came before; look whether its disk hangs, %distributed restart tries again"
            )

    def _leave_apart(self, node: Transport, root: str) -> None:
        self._apart.add(node.name)
        if root:
            self.notices.append(
                f"{label(node)}: its work folder is kept as {root}, not as {self.root}: changes here do not go there"
            )

    def _note_left_alone(self, node: Transport, said: dict[str, Any], manifest: Manifest) -> None:
        """What somebody else has put there, of what was sent, is said once."""
        names = said.get("left_alone")
        found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        fresh = [name for name in found if name in manifest and (node.name, name) not in self._left_alone]
        if fresh:
            self._left_alone.update((node.name, name) for name in fresh)
            some = name_some([clean(name) for name in fresh])
            self.notices.append(
                f"{label(node)}: left as it is, since it did not come from here: {some}: "
                "put it there to replace it, or remove it there"
            )


def _write_list(manifest: Manifest) -> bytes:
    """As a node is told what there is."""
    return json.dumps([[name, *state.kind] for name, state in manifest.items()]).encode()


class _Packer:
    """Packs once what several nodes want at the same time."""

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
    """The same contents, whenever they were written."""
    return before.keys() == now.keys() and all(state.kind == now[name].kind for name, state in before.items())


def _choose(names: list[str], indices: object) -> list[str]:
    """What a node wants, of what it was told of. Raises: Untrue."""
    if not isinstance(indices, list):
        raise Untrue("it does not say what it wants")
    if len(indices) > len(names) or any(as_size(index) >= len(names) for index in indices):  # before a dict has them
        raise Untrue("it wants a file that the folder does not have")
    return [names[index] for index in dict.fromkeys(indices)]


@dataclass(frozen=True)
class DataState:
    """What a node has under a path. ``names`` is a digest of all names and sizes; ``sample`` has sizes and digests of
    the beginning and the end of some files, the same on every node that has the same names."""

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
    """Whether the same files are on every node; what is printed says which node differs in what."""

    path: str
    states: dict[str, DataState]

    @property
    def is_same(self) -> bool:
        return not any(self.differences.values())

    @property
    def differences(self) -> dict[str, list[str]]:
        """In words, by node: from what most nodes have, of several from what the first of them has."""
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
        """Whether a node has it."""
        return any(state.exists for state in self.states.values())

    def _title(self) -> str:
        if not self.is_anywhere:
            return f"{self.path}: on no node"
        nodes = "1 node" if len(self.states) == 1 else f"{len(self.states)} nodes"
        return f"{self.path}: {'the same' if self.is_same else 'not the same'} on {nodes}"

    def _rows(self) -> list[list[str]]:
        rows = []
        for (name, state), differences in zip(self.states.items(), self.differences.values()):
            remark = ", ".join(differences) or _name_skipped(state, "not looked at")
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
        words.append(f"other contents: {name_some(changed)}")
    if state.names != usual.names and not words:
        words.append("other names or sizes")
    if state.num_skipped != usual.num_skipped:
        words.append(_name_skipped(state, f"elsewhere {usual.num_skipped}") or f"elsewhere {_name_skipped(usual)}")
    return words


def _name_skipped(state: DataState, *more: str) -> str:
    links = "link to a folder, or device" if state.num_skipped == 1 else "links to folders, or devices"
    return ", ".join([f"{state.num_skipped} {links}", *more]) if state.num_skipped else ""


def check(nodes: Sequence[Transport], path: str, *, folder: str = "") -> DataCheck:
    """Look whether the same files are under ``path`` on all nodes: names, sizes, and the ends of up to 64 files.

    Raises: DetrainError with the node.
    """

    def look(node: Transport, stop: Stop, _: OnProgress) -> DataState:
        with open_talk(node, stop=stop) as talk:
            talk.say("check", base=node.work_folder(folder), path=path)
            return _read_state(talk.hear("state", most_bytes=STATE_BYTES))

    states = on_every(nodes, look)
    return DataCheck(path, {label(node): state for node, state in zip(nodes, states)})


def _read_state(said: dict[str, Any]) -> DataState:
    """Raises: Untrue."""
    if said.get("exists") is not True:
        return DataState(False)
    sample = said.get("sample")
    if not isinstance(sample, dict) or len(sample) > SAMPLE_FILES:
        raise Untrue("its sample is none")
    read = []
    for name, fields in sample.items():
        if not isinstance(fields, list) or len(fields) != 2:
            raise Untrue("its sample is none")
        read.append((clean(name), as_size(fields[0]), clean(fields[1])[:64]))
    files, size, skipped = (as_size(said.get(key)) for key in ("files", "size", "skipped"))
    return DataState(True, files, size, clean(said.get("names"))[:64], tuple(read), skipped)
