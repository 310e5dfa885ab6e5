"""A Python program of ours, started on a node: its source is sent as text, then both sides exchange lines of JSON.

Used by bootstrapped_node.py and the doctor. The program prints a magic line first; any output before that line comes
from the login shell.
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
_OUR_IMPORT = re.compile(r"^from detrain_nb\.([\w.]+) import .*\n", re.MULTILINE)  # in a program
_INNER_IMPORT = re.compile(r"^from (__future__|\..*) import .*\n", re.MULTILINE)  # in a module inserted into a program
_PROLOGUE_BYTES = 1 << 16  # of a shell's output before our first line
_LINE_BYTES = 1 << 20
_MOST_VALUES = 1 << 14  # in a line
_ANSWER_LIMIT_S = 60.0  # setup lines and a slow disk included
_UPLOAD_LIMIT_S = 600.0
_LAST_WORDS_LIMIT_S = 1.0
_EXIT_LIMIT_S = 2.0
_SETUP_FAILED = 93
_WORDS_CHARS = 400  # of a last line, which may be the text of our own program
_LOOK_AT_LOGIN = (
    "check that the login files there (~/.bashrc, ~/.profile) do not read or close stdin or set PYTHONHOME, that "
    "sshd_config has no ForceCommand, that the account has a login shell (not nologin), and that the configured python "
    "is a Python interpreter"
)
_END_OF_PROGRAM = "detrain_nb_end_of_program"
# Runs before a program's first import: an old bash stores the program in /tmp, and Python would search that folder for
# modules, even for ``__future__``.
_WITHOUT_ITS_FOLDER = """\
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
exec(compile({source!r}, "/dev/fd/3", "exec"))"""


def read_program(name: str) -> str:
    """Return the text of a program of node/ssh, with the modules of ours that it imports inserted."""
    text = _read_module(f"node.ssh.{name}")
    return _OUR_IMPORT.sub(lambda needed: _INNER_IMPORT.sub("", _read_module(needed[1])), text)


def _read_module(name: str) -> str:
    return _PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")


class RemoteProgram:
    """Conversation in lines of JSON with a program on a node, which is not trusted: sizes and times are limited.

    When the program has ended, every method raises LaunchError or TransportError with the last output of the shell or
    of Python.
    """

    def __init__(self, stream: CommandStream, node: Node) -> None:
        """Use `start` instead."""
        self._stream = stream
        self._sock = stream.sock
        self._python = node.python
        self._after = " after the setup lines, if the shell completed them" if node.setup else ""
        self._arrived = b""
        self._prologue: str | None = None  # output before our first line; None until that line has arrived

    @classmethod
    def start(
        cls, source: str, *, magic: bytes, node: Node, connection: Connection, limit_s: float = _ANSWER_LIMIT_S
    ) -> RemoteProgram:
        """Start a program in the node's Python, after its setup lines; return when it has printed its ``magic``.

        Raises: LaunchError, TransportError.
        """
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
            raise TransportError(
                f"our program on the node did not read {len(data):,} bytes within {limit_s:g} s"
            ) from exc
        except OSError as exc:
            raise self._why_ended() from exc

    def say(self, **fields: object) -> None:
        self.send(json.dumps(fields).encode() + b"\n")

    def hear(self, kind: str, *, limit_s: float = _ANSWER_LIMIT_S) -> Mapping[str, Any]:
        """Return the next line, which must be of that kind.

        Raises: TransportError; SessionError or LaunchError when the program reports a failure.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._arrived:
            if len(self._arrived) > _LINE_BYTES:
                raise TransportError(f"the node sent a line of more than {_LINE_BYTES} bytes")
            self._arrived += self._receive(deadline)
        line, _, self._arrived = self._arrived.partition(b"\n")
        try:
            if count_values(line, most=_MOST_VALUES) > _MOST_VALUES:
                raise ValueError("too many values")
            said = json.loads(line.decode())  # of bytes it would guess the encoding: UTF-16 would not have been counted
        except (ValueError, RecursionError) as exc:
            raise TransportError(
                f"invalid message from our program on the node: {as_text(line[:80].decode(errors='replace'))}"
            ) from exc
        if not isinstance(said, dict):
            raise TransportError("invalid message from our program on the node: not a JSON object")
        if said.get("type") == "failed":
            known = {"SessionError": SessionError, "LaunchError": LaunchError}
            raise known.get(clean(said.get("kind")), LaunchError)(as_words(said.get("text", "")))
        if said.get("type") != kind:
            raise TransportError(f"the node sent {clean(said.get('type'))[:40]!r} instead of {kind!r}")
        return said

    def take_socket(self) -> socket.socket:
        """Return the byte stream to the program, for a protocol of its own from now on."""
        self._sock.settimeout(None)
        return self._sock

    def close(self) -> None:
        """Hang up; the program reads end of file."""
        self._stream.close()

    def skip_to(self, magic: bytes, *, limit_s: float = _ANSWER_LIMIT_S) -> None:
        """Read past the login shell's output up to ``magic``. Raises: TransportError when it never arrives."""
        deadline = time.monotonic() + limit_s
        while magic not in self._arrived:
            if len(self._arrived) > _PROLOGUE_BYTES:
                raise TransportError(
                    f"the shell on the node printed more than {_PROLOGUE_BYTES} bytes before our program started: "
                    "remove output from its login files (~/.bashrc, ~/.profile)"
                )
            self._arrived += self._receive(deadline)
        prologue, _, self._arrived = self._arrived.partition(magic)
        self._prologue = prologue.decode(errors="replace")

    def _receive(self, deadline: float) -> bytes:
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError as exc:
            advice = f": {_LOOK_AT_LOGIN}" if self._prologue is None else ""
            raise TransportError(f"our program on the node does not answer{advice}") from exc
        except OSError as exc:
            raise self._why_ended() from exc
        if not data:
            raise self._why_ended()
        return data

    def _read_last_words(self) -> None:
        """Read the output that had already been sent when writing failed."""
        deadline = time.monotonic() + _LAST_WORDS_LIMIT_S
        with contextlib.suppress(OSError):
            while len(self._arrived) <= _PROLOGUE_BYTES and (left_s := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not (data := self._sock.recv(1 << 16)):
                    break
                self._arrived += data

    def _why_ended(self) -> DetrainError:
        """Return the error for a shell or Python that ended before the expected line."""
        status = self._stream.exit_status(limit_s=_EXIT_LIMIT_S)
        if self._prologue is None:
            self._read_last_words()
        said = self._stream.stderr_tail() + (self._prologue or self._arrived.decode(errors="replace"))
        words = [line for line in said.splitlines() if line.strip()]
        fatal = [line for line in words if line.startswith("Fatal Python error")]  # more lines come after it
        last = as_text((fatal or words)[-1].strip()[:_WORDS_CHARS]) if words else "no output"
        self.close()
        if status == _SETUP_FAILED:
            return LaunchError(f"the setup lines failed: {last}")
        if status in (126, 127):
            return LaunchError(f"{self._python}: {last} (exit {status}): set python of this node to another path")
        if "SyntaxError" in last:
            return LaunchError(f"{self._python} is too old for our program: set python of this node to 3.10 or newer")
        how = "the connection broke" if status is None else f"exit {status}"
        if self._prologue is not None:
            return TransportError(f"our program on the node ended ({how}): {last}")
        advice = "" if status is None else f"; {_LOOK_AT_LOGIN}"
        return TransportError(f"{self._python} did not start our program{self._after} ({how}): {last}{advice}")


def write_script(node: Node, source: str) -> bytes:
    """Return the script for the shell: the user's setup lines, then ``exec`` of Python with our program."""
    lines = []
    if node.setup:
        lines = [
            "detrain_nb_setup() {",
            *node.setup,
            "}",
            f"trap 'exit {_SETUP_FAILED}' EXIT",  # for `set -e` in a setup line, which a list with || would disable
            "detrain_nb_setup </dev/null >&2",
            "[ $? = 0 ] || exit",
            "trap - EXIT",
        ]
    lines += [
        # File names are UTF-8 regardless of the locale; processes that our program starts still get that locale.
        f"exec {_quote_path(node.python)} -X utf8 -u /dev/fd/3 3<<'{_END_OF_PROGRAM}'",
        _WITHOUT_ITS_FOLDER.format(source=source),
        _END_OF_PROGRAM,
        "",
    ]
    return "\n".join(lines).encode()


def _quote_path(path: str) -> str:
    """Quote a path for the shell; a leading ~/ still means the home directory on the node."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def as_words(said: object) -> str:
    """Return the node's error text, cleaned; its further lines are marked, so none passes for a line of ours."""
    if not isinstance(said, str):
        return clean(said)
    return behind_ours("\n".join(map(as_text, said[:4096].strip().split("\n"))))


def as_text(said: object) -> str:
    """Return one line of text from a node without control characters.

    Raises: ValueError when ``said`` is not a string, or too long.
    """
    if not isinstance(said, str) or len(said) > 4096:
        raise ValueError("expected a string of at most 4096 characters")
    return printable(said, "?")
