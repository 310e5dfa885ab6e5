"""One shell command, run on all nodes at once: its output is shown by node, and the worst exit status counts."""

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

FAILED_HERE = 255  # the exit status of ssh for a host that it cannot reach
_MOST_PIECE_BYTES = 1 << 17  # of one piece of output; a node sends at most half as much
_MOST_LINES = 1000  # waiting to be shown
_LOOK_GAP_S = 0.1
_SLACK_S = 60.0


@dataclass(frozen=True)
class Executed:
    """Outcome of a command by the name of the node: its exit status, or the error why it could not be run."""

    statuses: dict[str, int | DetrainError]

    @property
    def status(self) -> int:
        """The largest exit status; 255 for a node on which the command could not be run."""
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
    """Run a shell command on all nodes; with ``job``, the id of a job, in its folder and environment.

    ``nodes`` are transports: in your own code call `Job.execute`.

    ``on_line`` is called in this thread. After ``timeout_s`` the nodes kill the command; a node that does not
    report its end within another ``slack_s`` is not waited for. Raises: SpecError.
    """
    if not command.strip() or "\0" in command:
        raise SpecError("the command is empty or contains a NUL byte: give a shell command")
    if not 0 < timeout_s <= 1e6:
        raise SpecError(f"timeout {timeout_s:g} s: give more than 0 and at most 1000000")
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
        stop.insist()  # a node kills the command when the talk closes
        raise
    finally:
        pool.shutdown(wait=False)
    return Executed({label(node): outcome for node, outcome in zip(nodes, work.result())})


class _Output:
    """Lines that a command prints on all nodes, queued for display; a node waits while the queue is full."""

    def __init__(self) -> None:
        self._lines: queue.Queue[LogLine] = queue.Queue(_MOST_LINES)
        self.is_wanted = True

    def take_all(self, talk: Talk, node: str) -> int:
        """Queue the output until the command ends; return its exit status. Raises: FilesError."""
        file = FollowedFile()
        while (said := talk.hear("output", "exit"))["type"] == "output":
            size = as_size(said.get("size"))
            if size > _MOST_PIECE_BYTES:
                raise Untrue(f"it sent a piece of {size:,} bytes; the limit is {_MOST_PIECE_BYTES:,}")
            self._put(node, file.take(file.offset, b"".join(talk.read(size))))
        self._put(node, file.end())
        return read_number(said.get("status"), least=-255, most=255)

    def show_until_done(self, work: Future[Any], on_line: Callable[[LogLine], object] | None) -> None:
        """Give each line to ``on_line``, in this thread, until ``work`` is done and the queue is empty."""
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
