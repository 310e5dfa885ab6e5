"""One command on every node at once: what it prints is shown by node, and the worst exit status counts."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..copying.json_lines import Talk, Untrue, as_size
from ..deploy.files import Stop, label
from ..deploy.jobs import ENDLESS, open_job_talk
from ..errors import DetrainError, SpecError
from ..node.job.terms import COMMAND_LIMIT_S
from ..transport import Transport
from .asking import try_on_all
from .log_lines import FollowedFile, LogLine
from .report_checks import read_number

__all__ = ["Executed", "execute"]

FAILED_HERE = 255  # as ssh says where it could not reach a host
_MOST_PIECE_BYTES = 1 << 17  # of what waits to be shown; a node sends half as much
_MOST_LINES = 1000  # wait to be shown
_LOOK_GAP_S = 0.1
_SLACK_S = 60.0


@dataclass(frozen=True)
class Executed:
    """How a command has ended: its exit status, or why it could not be run, for each node."""

    statuses: dict[str, int | DetrainError]

    @property
    def status(self) -> int:
        """The worst: of a node on which it could not be run, 255; else the largest."""
        return max(FAILED_HERE if isinstance(each, DetrainError) else each for each in self.statuses.values())


def execute(
    nodes: Sequence[Transport],
    command: str,
    *,
    job: str | None = None,
    timeout_s: float = COMMAND_LIMIT_S,
    on_line: Callable[[LogLine], object] | None = None,
    slack_s: float = _SLACK_S,
) -> Executed:
    """Run a shell command on all nodes; in the folder and with the environment of ``job``, where one is named.

    ``on_line`` is called in this thread. After ``timeout_s`` the command is ended there; a node that does not
    say so within ``slack_s`` more is not waited for. Raises: SpecError.
    """
    if not command.strip() or "\0" in command:
        raise SpecError("no command was given: give what a shell is to run")
    if not 0 < timeout_s <= 1e6:
        raise SpecError(f"timeout {timeout_s:g} s: give more than 0 and at most a million")
    output, stop, several = _Output(), Stop(), len(nodes) > 1

    def run(index: int) -> int:
        with open_job_talk(nodes[index], stop=stop, patience=ENDLESS) as talk:
            talk.deadline = time.monotonic() + timeout_s + slack_s
            talk.say("exec", command=command, id=job, node_rank=index, timeout_s=timeout_s)
            return output.take_all(talk, label(nodes[index]) if several else "")

    pool = ThreadPoolExecutor(1, thread_name_prefix="detrain_nb exec")
    try:
        work = pool.submit(try_on_all, nodes, run)
        output.show_until_done(work, on_line)
    except BaseException:
        output.is_wanted = False
        stop.ask()
        stop.insist()  # the command ends with the talk
        raise
    finally:
        pool.shutdown(wait=False)
    return Executed({label(node): outcome for node, outcome in zip(nodes, work.result())})


class _Output:
    """What a command prints on all nodes, as lines that wait to be shown; a node waits meanwhile."""

    def __init__(self) -> None:
        self._lines: queue.Queue[LogLine] = queue.Queue(_MOST_LINES)
        self.is_wanted = True

    def take_all(self, talk: Talk, node: str) -> int:
        """To the end of the command; returns its exit status. Raises: FilesError."""
        file = FollowedFile()
        while (said := talk.hear("output", "exit"))["type"] == "output":
            size = as_size(said.get("size"))
            if size > _MOST_PIECE_BYTES:
                raise Untrue(f"a piece of {size:,} bytes came: {_MOST_PIECE_BYTES:,} is the most")
            self._put(node, file.take(file.offset, b"".join(talk.read(size))))
        self._put(node, file.end())
        return read_number(said.get("status"), least=-255, most=255)

    def show_until_done(self, work: Future[Any], on_line: Callable[[LogLine], object] | None) -> None:
        """Give each line to ``on_line``, in this thread, until ``work`` is done and none waits."""
        while not (work.done() and self._lines.empty()):
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_LOOK_GAP_S)
                if on_line:
                    on_line(line)

    def _put(self, node: str, lines: list[str]) -> None:
        for line in lines:
            while self.is_wanted:
                with contextlib.suppress(queue.Full):
                    self._lines.put(LogLine(node, "", line), timeout=_LOOK_GAP_S)
                    break
