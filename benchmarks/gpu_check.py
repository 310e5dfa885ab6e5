"""What a check on a GPU machine is, where it runs, and what it leaves in a file while it runs."""

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
    """What this machine lacks for a check."""


class CheckFailed(Exception):
    """What was found is not what was promised."""


@dataclass(frozen=True)
class Place:
    """Where checks run: on GPUs or on the CPU (``kind``), and how many GPUs torch sees."""

    kind: str
    gpus: int
    folder: Path

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def require_gpus(self, count: int = 1) -> None:
        """Raises: NotPossible."""
        if not self.is_gpu:
            raise NotPossible("no GPU: these ranks are on the CPU")
        if self.gpus < count:
            raise NotPossible(f"needs {count} GPUs, and there {'is' if self.gpus == 1 else 'are'} {self.gpus}")

    def how_many_ranks_have(self, ranks: int) -> str:
        """In words, what ``ranks`` ranks compute and talk on here."""
        if not self.is_gpu:
            return "CPU, gloo"
        return "a GPU each, NCCL" if self.gpus >= ranks else "one GPU shared, gloo"


class Notes:
    """What was measured, in a file as soon as it is: a check that is killed leaves what it had."""

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
    """``run`` notes what it measures; it raises NotPossible, or whatever else where the check has failed.

    ``needs``: modules that are imported. ``limit_s``: what takes longer hangs.
    """

    name: str
    title: str
    run: Callable[[Place, Notes], None]
    needs: tuple[str, ...] = FOR_A_SESSION
    limit_s: float = 180.0


def require(condition: bool, words: str) -> None:
    """Raises: CheckFailed. (An assert would say nothing here: no pytest rewrites it.)"""
    if not condition:
        raise CheckFailed(words)
