"""A Python program of ours, started on a node: its source is sent as text, then lines of JSON go both ways.

Used by bootstrapped_node.py and the doctor. The program prints a magic line first: what stands before it is the login
shell's.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..copying.json_lines import clean
from ..errors import DetrainError, LaunchError, SessionError, TransportError, behind_ours
from ..spec.node import Node
from ..text import printable
from ..transport.connection import CommandStream, Connection
from ..wire import count_values

__all__ = ["RemoteProgram", "as_text", "as_words", "read_program", "write_script"]

_PACKAGE = Path(__file__).parent.parent
_OUR_IMPORT = re.compile(r"^from detrain_nb\.([\w.]+) import .*\n", re.MULTILINE)  # of a program
_INNER_IMPORT = re.compile(r"^from (__future__|\..*) import .*\n", re.MULTILINE)  # the program has it, too
_PROLOGUE_BYTES = 1 << 16  # of what a shell prints before our first line
_LINE_BYTES = 1 << 20
_MOST_VALUES = 1 << 14  # of a line
_ANSWER_LIMIT_S = 60.0  # setup lines and a slow disk included
_UPLOAD_LIMIT_S = 600.0
_LAST_WORDS_LIMIT_S = 1.0
_EXIT_LIMIT_S = 2.0
_SETUP_FAILED = 93
_WORDS_CHARS = 400  # of a last line: it may be our own program
_LOOK_AT_LOGIN = (
    "look whether the login files there (~/.bashrc, ~/.profile) read or close stdin or set PYTHONHOME, whether "
    "sshd_config has a ForceCommand, whether the account has a login shell (nologin is none), and whether that python "
    "is one"
)
_END_OF_PROGRAM = "detrain_nb_end_of_program"
# Before a program's first import: an old bash keeps it in /tmp, and Python would look for modules beside it, even for
# what ``from __future__`` names.
_WITHOUT_ITS_FOLDER = """\
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
exec(compile({source!r}, "/dev/fd/3", "exec"))"""


def read_program(name: str) -> str:
    """A program of node/ssh as text, with the modules of ours in it that it needs before our code is there."""
    text = _read_module(f"node.ssh.{name}")
    return _OUR_IMPORT.sub(lambda needed: _INNER_IMPORT.sub("", _read_module(needed[1])), text)


def _read_module(name: str) -> str:
    return _PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")


class RemoteProgram:
    """Lines of JSON with a program on a node. Nothing that comes is trusted: sizes and time have limits.

    Every method raises LaunchError or TransportError with what the shell, or Python, said when the program has ended.
    """

    def __init__(self, stream: CommandStream, node: Node) -> None:
        """Made by `start`."""
        self._stream = stream
        self._sock = stream.sock
        self._python = node.python
        self._after = " after the setup lines, if the shell came through them" if node.setup else ""
        self._arrived = b""
        self._prologue: str | None = None  # what came before our first line, once that has come

    @classmethod
    def start(
        cls, source: str, *, magic: bytes, node: Node, connection: Connection, limit_s: float = _ANSWER_LIMIT_S
    ) -> RemoteProgram:
        """Start a program in the node's Python, after its setup lines; return when it has said its ``magic``."""
        stream = connection.open_stream("exec bash -l" if node.setup else "exec sh")
        program = cls(stream, node)
        try:
            program.send(write_script(node, source))
            program.skip_to(magic, limit_s=limit_s)
        except BaseException:
            program.close()
            raise
        return program

    def send(self, data: bytes, *, limit_s: float = _UPLOAD_LIMIT_S) -> None:
        self._sock.settimeout(limit_s)
        try:
            self._sock.sendall(data)
        except TimeoutError as exc:
            raise TransportError("our program there takes nothing more") from exc
        except OSError as exc:
            raise self._why_ended() from exc

    def say(self, **fields: object) -> None:
        self.send(json.dumps(fields).encode() + b"\n")

    def hear(self, kind: str, *, limit_s: float = _ANSWER_LIMIT_S) -> Mapping[str, Any]:
        """The next line, which is of that kind. Raises: what went wrong there, TransportError."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._arrived:
            if len(self._arrived) > _LINE_BYTES:
                raise TransportError("a line without end came from there")
            self._arrived += self._receive(deadline)
        line, _, self._arrived = self._arrived.partition(b"\n")
        try:
            if count_values(line, most=_MOST_VALUES) > _MOST_VALUES:
                raise ValueError("too many values")
            said = json.loads(line.decode())  # it guesses at bytes: values in UTF-16 would not be counted
        except (ValueError, RecursionError) as exc:
            raise TransportError(
                f"what came is not what our program says: {as_text(line[:80].decode(errors='replace'))}"
            ) from exc
        if not isinstance(said, dict):
            raise TransportError("what came is not what our program says")
        if said.get("type") == "failed":
            known = {"SessionError": SessionError, "LaunchError": LaunchError}
            raise known.get(clean(said.get("kind")), LaunchError)(as_words(said.get("text", "")))
        if said.get("type") != kind:
            raise TransportError(f"{kind} was expected, {clean(said.get('type'))[:40]!r} came")
        return said

    def take_socket(self) -> socket.socket:
        """The byte stream to the program, for what it says from now on in its own way."""
        self._sock.settimeout(None)
        return self._sock

    def close(self) -> None:
        """Hang up: the program there reads the end of its input."""
        self._stream.close()

    def skip_to(self, magic: bytes, *, limit_s: float = _ANSWER_LIMIT_S) -> None:
        """What a login shell prints comes first. Raises: TransportError when there is no end to it."""
        deadline = time.monotonic() + limit_s
        while magic not in self._arrived:
            if len(self._arrived) > _PROLOGUE_BYTES:
                raise TransportError("the shell there prints without end before our program starts")
            self._arrived += self._receive(deadline)
        prologue, _, self._arrived = self._arrived.partition(magic)
        self._prologue = prologue.decode(errors="replace")

    def _receive(self, deadline: float) -> bytes:
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError as exc:
            advice = f": {_LOOK_AT_LOGIN}" if self._prologue is None else ""
            raise TransportError(f"our program there does not answer{advice}") from exc
        except OSError as exc:
            raise self._why_ended() from exc
        if not data:
            raise self._why_ended()
        return data

    def _read_last_words(self) -> None:
        """What it had said when nobody could write to it any more."""
        deadline = time.monotonic() + _LAST_WORDS_LIMIT_S
        with contextlib.suppress(OSError):
            while len(self._arrived) <= _PROLOGUE_BYTES and (left_s := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not (data := self._sock.recv(1 << 16)):
                    break
                self._arrived += data

    def _why_ended(self) -> DetrainError:
        """The shell, or Python, ended before it said what was expected."""
        status = self._stream.exit_status(limit_s=_EXIT_LIMIT_S)
        if self._prologue is None:
            self._read_last_words()
        said = self._stream.stderr_tail() + (self._prologue or self._arrived.decode(errors="replace"))
        words = [line for line in said.splitlines() if line.strip()]
        fatal = [line for line in words if line.startswith("Fatal Python error")]  # more lines come after it
        last = as_text((fatal or words)[-1].strip()[:_WORDS_CHARS]) if words else "it said nothing"
        self.close()
        if status == _SETUP_FAILED:
            return LaunchError(f"the setup lines failed: {last}")
        if status in (126, 127):
            return LaunchError(f"{self._python}: {last} (exit {status}): name another python for it")
        if "SyntaxError" in last:
            return LaunchError(f"{self._python} is too old to read our program: name one of 3.10 or newer")
        how = "the connection broke" if status is None else f"exit {status}"
        if self._prologue is not None:
            return TransportError(f"our program there ended ({how}): {last}")
        advice = "" if status is None else f"; {_LOOK_AT_LOGIN}"
        return TransportError(f"{self._python} did not start our program{self._after} ({how}): {last}{advice}")


def write_script(node: Node, source: str) -> bytes:
    """What the shell there is told: the user's setup, then to become Python with our program."""
    lines = []
    if node.setup:
        lines = [
            "detrain_nb_setup() {",
            *node.setup,
            "}",
            f"trap 'exit {_SETUP_FAILED}' EXIT",  # with `set -e` among the lines, which counts for no list with ||
            "detrain_nb_setup </dev/null >&2",
            "[ $? = 0 ] || exit",
            "trap - EXIT",
        ]
    lines += [
        # Names of files are UTF-8 whatever the locale there says; it stays as it is for what our program starts.
        f"exec {_quote_path(node.python)} -X utf8 -u /dev/fd/3 3<<'{_END_OF_PROGRAM}'",
        _WITHOUT_ITS_FOLDER.format(source=source),
        _END_OF_PROGRAM,
        "",
    ]
    return "\n".join(lines).encode()


def _quote_path(path: str) -> str:
    """A path as a shell takes it literally, but for ~/, the home there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def as_words(said: object) -> str:
    """What failed there, in its lines: none but the first could be taken for what we say ourselves."""
    if not isinstance(said, str):
        return clean(said)
    return behind_ours("\n".join(map(as_text, said[:4096].strip().split("\n"))))


def as_text(said: object) -> str:
    """One line of text from a node, without control characters. Raises: ValueError when it is none, or too long."""
    if not isinstance(said, str) or len(said) > 4096:
        raise ValueError("a text was expected")
    return printable(said, "?")
