"""What a check on a GPU machine is, where it runs, and what it writes to a file while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible here"

FOR_A_SESSION = ("torch", "IPython", "numpy", "pydantic", "packaging", "pathspec", "fsspec")
FOR_LAYOUTS = ("torch", "numpy", "fsspec")


class NotPossible(Exception):
    """Error of a check for which this machine lacks something."""


class CheckFailed(Exception):
    """Error of a check whose result differs from what is promised."""


@dataclass(frozen=True)
class Place:
    """The place of the checks: GPUs or the CPU (``kind``), and the number of GPUs that torch sees."""

    kind: str
    gpus: int
    folder: Path

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def require_gpus(self, count: int = 1) -> None:
        """Check that there are enough GPUs. Raises: NotPossible."""
        if not self.is_gpu:
            raise NotPossible("no GPU: these ranks are on the CPU")
        if self.gpus < count:
            raise NotPossible(f"needs {count} GPUs, and there {'is' if self.gpus == 1 else 'are'} {self.gpus}")

    def how_many_ranks_have(self, ranks: int) -> str:
        """Describe the device and the backend of ``ranks`` ranks here."""
        if not self.is_gpu:
            return "CPU, gloo"
        return "a GPU each, NCCL" if self.gpus >= ranks else "one GPU shared, gloo"


class Notes:
    """Measurements, written to a file at once, so that a killed check leaves them."""

    def __init__(self, path: Path) -> None:
        self.measured: dict[str, Any] = {}
        self._path = path

    def add(self, **measured: Any) -> None:
        self.measured.update(measured)
        self.write()

    def write(self, **outcome: Any) -> None:
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps({"measured": self.measured, **outcome}), encoding="utf-8")
        written.rename(self._path)


@dataclass(frozen=True)
class Check:
    """One check. ``run`` records its measurements; it raises NotPossible, or any other error if the check has failed.

    ``needs``: modules that it imports. ``limit_s``: a check that takes longer hangs.
    """

    name: str
    title: str
    run: Callable[[Place, Notes], None]
    needs: tuple[str, ...] = FOR_A_SESSION
    limit_s: float = 180.0


def require(condition: bool, words: str) -> None:
    """Check a condition. Raises: CheckFailed. (A plain assert has no message here: pytest does not rewrite it.)"""
    if not condition:
        raise CheckFailed(words)
