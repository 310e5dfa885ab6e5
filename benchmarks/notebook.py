"""A notebook with ranks for tests of faults: cells hang on purpose, and the surviving ranks are checked afterwards."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kernel import Cell, Kernel, KernelError
from peers import Toolkit

from detrain_nb.node.system.processes import descendants, end_descendants

_ARRIVE = "from pathlib import Path\nPath('{folder}', str(rank)).touch()\n"
_KEEP = "keep = 1000 + rank"
_KEPT = "print(f'kept {rank} {keep}')"
_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)\nprint(f'reduced {rank} {int(t)}')"
_PID = "import os\nprint(f'pid {rank} {os.getpid()}')"


class Notebook:
    """A kernel and ranks of one toolkit, started on first use; close it.

    ``limit_s`` limits every operation. ``settle_s`` is how long ranks are left hanging in a cell.
    """

    def __init__(self, kit: Toolkit, folder: Path, *, ranks: int, limit_s: float, settle_s: float) -> None:
        self.kit = kit
        self.ranks = ranks
        folder.mkdir()
        self._top = folder
        self._limit_s = limit_s
        self._settle_s = settle_s
        self._kernel: Kernel | None = None
        self._kernel_folder = self._begun = folder
        self._folders = 0

    @property
    def kernel(self) -> Kernel:
        """The kernel; its ranks have a process group and a variable each."""
        if self._kernel is None:
            self._kernel_folder = self._new_folder()
            self._kernel = self.kit.open_kernel(self._kernel_folder)
            self.kit.start_ranks(self._kernel, self.ranks)
            self.run(_KEEP)
        return self._kernel

    def kill_kernel(self, cell: Cell) -> None:
        """Kill the kernel while ``cell`` runs. The notebook's next kernel has the toolkit loaded and no ranks."""
        self.kernel.kill(cell)
        self.kernel.close()
        self._kernel = None
        self._kernel = self.kit.open_kernel(self._kernel_folder)

    def close(self) -> None:
        """Stop the kernel, the ranks and all other processes; the next use starts new ones."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()
        end_descendants()

    # ---- cells on all ranks

    def run(self, code: str) -> Cell:
        """Run a cell on all ranks. Raises: KernelError if it fails."""
        return self.kernel.run(self._on_all(code))

    def begin(self, code: str, *, settles: bool = True) -> Cell:
        """Send a cell that will hang; wait until all ranks have begun it, and ``settle_s`` longer.

        Raises: KernelError if a rank does not begin the cell, or if the cell ends.
        """
        self._begun = self._new_folder()
        self._begun.mkdir()
        cell = self.kernel.send(self._on_all(_ARRIVE.replace("{folder}", str(self._begun)) + code))
        if not self.watch(cell, until=lambda: len(list(self._begun.iterdir())) == self.ranks):
            raise KernelError(f"not all of {self.ranks} ranks began {cell.name} within {self._limit_s:g} s")
        if settles:
            settled_at = time.monotonic() + self._settle_s
            self.watch(cell, until=lambda: cell.has_ended or time.monotonic() >= settled_at)
        if cell.has_ended:
            raise KernelError(f"{cell.name} was to hang and has ended: {cell.shown()[-500:].strip()}")
        return cell

    def begun_at(self, rank: int) -> float:
        """Return when a rank began the last of those cells, as ``time.time()``."""
        return (self._begun / str(rank)).stat().st_mtime

    def watch(self, cell: Cell, *, until: Callable[[], bool] | None = None, more_s: float = 0.0) -> bool:
        """Receive messages until the cell has ended, or ``until()``; returns False after ``limit_s`` and ``more_s``."""
        return self.kernel.watch(cell, until=until, timeout_s=self._limit_s + more_s)

    def stop(self, cell: Cell) -> bool:
        """Press the stop button and wait for the prompt; returns False if the prompt does not return in time."""
        self.kernel.interrupt()
        return self.watch(cell)

    # ---- the surviving ranks

    def reduce(self) -> Cell | None:
        """Run a cell with an all_reduce; returns None unless all ranks joined it in time."""
        cell = self._try(self._on_all(_REDUCE))
        return cell if cell and said(cell, "reduced") == dict.fromkeys(range(self.ranks), self.ranks) else None

    def have_kept(self, ranks: Iterable[int]) -> bool:
        """Return whether ``ranks`` still have their variables."""
        wanted = list(ranks)
        on_some = self.kit.on_some.replace("{ranks}", ",".join(map(str, wanted)))
        cell = self._try(on_some.replace("{code}", _KEPT))
        return cell is not None and said(cell, "kept") == {rank: 1000 + rank for rank in wanted}

    def has_survived(self) -> bool:
        """Return whether all ranks join a collective in the next cell and still have their variables."""
        time.sleep(self.kit.rest_s)
        return self.reduce() is not None and self.have_kept(range(self.ranks))

    def pid_of(self, rank: int) -> int:
        """Return the pid of a rank's interpreter, in whatever namespace it runs."""
        inner = said(self.run(_PID), "pid")[rank]
        names = {pid: _pids_of(pid) for pid in descendants(os.getpid())}
        return max((pid for pid in names if names[pid][-1:] == [inner]), key=lambda pid: len(names[pid]))

    def _try(self, code: str) -> Cell | None:
        """Run a cell; if it does not end in time, stop it and return None."""
        cell = self.kernel.send(code)
        if self.watch(cell):
            return cell
        self.stop(cell)
        return None

    def _on_all(self, code: str) -> str:
        return self.kit.on_all.replace("{code}", code).replace("{n}", str(self.ranks))

    def _new_folder(self) -> Path:
        self._folders += 1
        return self._top / str(self._folders)


def said(cell: Cell, word: str) -> dict[int, int]:
    """Return what ranks printed as ``word rank number``."""
    return {int(rank): int(number) for rank, number in re.findall(rf"\b{word} (\d+) (\d+)\b", cell.shown())}


def _pids_of(pid: int) -> list[int]:
    """Return the pid of a process in this namespace and in each nested one; empty if the process has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [int(number) for line in status.splitlines() if line.startswith("NSpid:") for number in line.split()[1:]]
