"""A save, in progress or done: one at a time per process; the next call raises its error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError

from ..errors import DetrainError
from .ranks import Ranks, all_ranks


class Saving:
    """The save of one checkpoint to ``name``; ``result()`` waits for it to finish."""

    def __init__(self, step: int, name: str, future: Future[None]) -> None:
        self.step = step
        self.name = name
        self._future = future
        self._is_told = False

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks' parts are written, and old checkpoints are removed.

        Raises: DetrainError when the save failed, or has not finished within ``timeout_s``.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError:
            if not self._future.done():
                raise DetrainError(f"the checkpoint of step {self.step} is not saved after {timeout_s} s") from None
            raise
        except BaseException:
            self._is_told = True
            raise

    def __repr__(self) -> str:
        if not self.is_done:
            state = "under way"
        else:
            state = "done" if self._future.exception() is None else "failed"
        return f"<Saving of step {self.step} to {self.name}: {state}>"


# The next save must know the one before, whichever code calls it, under whatever process group and for whatever URL: it
# belongs to the process. A Saving keeps none of the saved tensors.
_last: list[Saving] = []


def begin() -> Ranks:
    """Wait for a save in the background, and bring all ranks together. Collective: all ranks.

    Raises: on every rank, the error of that save, unless it was raised already on the rank where it failed.
    """
    failure = _wait_for_last()  # before the ranks' group is used: the save uses it too
    ranks = all_ranks()
    ranks.gather(lambda: _raise(failure))
    return ranks


def _wait_for_last() -> BaseException | None:
    if not _last:
        return None
    failure = _last[0]._future.exception()
    last = _last.pop()  # only now: an interrupt may have ended the wait
    return None if last._is_told else failure


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


def start(step: int, name: str, work: Callable[[], None], *, is_async: bool) -> Saving:
    """Run ``work`` here, or in a thread that the process joins before it exits. Raises: what ``work`` raises here."""
    future: Future[None]
    if is_async:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="detrain-nb-checkpoint")
        future = pool.submit(work)
        pool.shutdown(wait=False)
    else:
        future = Future()
        work()
        future.set_result(None)
    saving = Saving(step, name, future)
    _last[:] = [saving]
    return saving
