"""Requests to all nodes of a job in parallel: the talks with their job services, and the failures by node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from ..copying.json_lines import FilesError, Talk, Untrue
from ..deploy.files import OnProgress, Stop, label, on_every
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, TransportError, WireError
from ..transport import Transport
from .report_checks import NodeResources, read_facts

if TYPE_CHECKING:
    from ..plan import Plan
    from ..spec import PipelineSpec

__all__ = ["ask_facts", "on_all", "open_job_talks", "plan_as_made", "send_to_all", "try_on_all"]

_Result = TypeVar("_Result")


def ask_facts(talk: Talk) -> NodeResources:
    """Ask a node for its resources. Raises: FilesError."""
    talk.say("facts")
    return read_facts(talk.hear("facts"))


def plan_as_made(
    spec: PipelineSpec, nodes: Sequence[Transport], *, world_size: int | None, limit_s: float
) -> Plan | None:
    """Return the plan that a job was started with; None when the GPUs of ``nodes`` now give another world size.

    ``nodes``: those of the job that answer.
    Raises: SpecError when the plan needs the GPU count of a node that does not report it.
    """

    def ask(index: int) -> int:
        with open_job_talk(nodes[index]) as talk:
            return ask_facts(talk).gpus

    found = {node.name: each for node, each in zip(nodes, try_on_all(nodes, ask, limit_s=limit_s))}
    plan = spec.plan(gpus={name: each for name, each in found.items() if isinstance(each, int)})
    return plan if plan.world_size == world_size else None


@contextlib.contextmanager
def open_job_talks(nodes: Sequence[Transport], stop: Stop) -> Iterator[list[Talk]]:
    """Open a talk with the job service of each node; ``stop`` ends them. If one node cannot be reached, close all.

    Raises: DetrainError.
    """
    arrivals = _Arrivals()
    try:
        yield on_all(nodes, lambda index: arrivals.enter(open_job_talk(nodes[index], stop=stop)))
    except BaseException:
        stop.ask()
        stop.insist()
        raise
    finally:
        arrivals.close()


def on_all(nodes: Sequence[Transport], act: Callable[[int], _Result]) -> list[_Result]:
    """Call ``act`` with the position of each node, all in parallel; return the results in the order of ``nodes``.

    Every call finishes, even if another one fails. Raises: DetrainError with a line for each node that failed.
    """
    outcomes = try_on_all(nodes, act)
    failures = [outcome for outcome in outcomes if isinstance(outcome, DetrainError)]
    if failures:
        kinds = {type(exc) for exc in failures}
        kind = kinds.pop() if len(kinds) == 1 else DetrainError
        raise kind("\n".join(dict.fromkeys(map(str, failures)))) from failures[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, DetrainError)]


def send_to_all(
    nodes: Sequence[Transport], act: Callable[[int, OnProgress], _Result], on_progress: OnProgress
) -> list[_Result]:
    """Call ``act`` as `on_all` does, for long transfers; ``on_progress`` gets the sums over all nodes, here."""

    def run(node: Transport, stop: Stop, tell: OnProgress) -> _Result:
        def note(files: int, done: int, total: int) -> None:
            stop.check()
            tell(files, done, total)

        with _explained(node):
            return act(nodes.index(node), note)

    return on_every(nodes, run, on_progress)


def try_on_all(
    nodes: Sequence[Transport], act: Callable[[int], _Result], *, limit_s: float | None = None
) -> list[_Result | DetrainError]:
    """Call ``act`` as `on_all` does, but return failures in place of results; after ``limit_s`` a node has failed."""

    def run(index: int) -> _Result:
        with _explained(nodes[index]):
            return act(index)

    work = [_begin(run, index) for index in range(len(nodes))]
    if limit_s is None:
        for node in nodes:
            node.ask_meanwhile(work)
    wait(work, limit_s)
    outcomes: list[_Result | DetrainError] = []
    for future, node in zip(work, nodes):
        try:
            outcomes.append(future.result(0))
        except TimeoutError:
            outcomes.append(TransportError(f"{label(node)}: it did not answer within {limit_s or 0:g} s"))
        except DetrainError as exc:  # any other exception is a bug of ours
            outcomes.append(exc)
    return outcomes


@contextlib.contextmanager
def _explained(node: Transport) -> Iterator[None]:
    """Turn a FilesError of the block into a DetrainError that names ``node``."""
    try:
        yield
    except Untrue as exc:
        raise WireError(f"{label(node)}: {exc}") from exc
    except FilesError as exc:
        raise DetrainError(f"{label(node)}: {exc}") from exc


def _begin(act: Callable[[int], _Result], index: int) -> Future[_Result]:
    """Start ``act`` in a daemon thread: a host that is down may take long to time out and must not delay exit."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = act(index)
        except BaseException as exc:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(exc)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"detrain_nb job {index}", daemon=True).start()
    return future


class _Arrivals:
    """Talks opened by several threads; a talk that opens after `close` is closed at once."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._changing = threading.Lock()

    def enter(self, talk: contextlib.AbstractContextManager[Talk]) -> Talk:
        opened = talk.__enter__()
        with self._changing:
            if not self._is_closed:
                self._stack.push(talk)
                return opened
        talk.__exit__(None, None, None)
        raise TransportError("stopped")

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
        self._stack.close()
