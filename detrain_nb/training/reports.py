"""Reports of a training: its result, a line of metrics for each step, a progress bar."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..metrics import log_metrics, note_step
from ..parallel import ParallelModel
from ..parallel.microbatches import rows_of

Record = dict[str, float]
_RSS_UNIT = 1024  # bytes, on Linux


@dataclass
class Result:
    """The result of a training: a record for each step made, one for each evaluation, and the seconds it took.

    A record of ``history`` has step, loss, grad_norm, lr, samples_per_s and memory_bytes and, if they are known,
    tokens_per_s and mfu. ``steps`` is the last step; ``resumed_from``: the name of a checkpoint, or empty.
    """

    steps: int
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list, repr=False)
    evaluations: list[Record] = field(default_factory=list)
    resumed_from: str = ""

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.history]

    def __str__(self) -> str:
        begun = f" (from {self.resumed_from})" if self.resumed_from else ""
        if not self.history:
            return f"{self.steps} steps{begun}: nothing was left to do"
        first, last = self.history[0], self.history[-1]
        text = (
            f"{len(self.history)} steps{begun} in {self.seconds:.1f} s, loss {first['loss']:.4g} -> {last['loss']:.4g}"
        )
        if self.evaluations:
            shown = (f"{name} {value:.4g}" for name, value in self.evaluations[-1].items() if name != "step")
            text += f"; evaluated at step {self.evaluations[-1]['step']:.0f}: {', '.join(shown)}"
        return text


class Reports:
    """The reports of one Trainer: every rank keeps the result; the main rank writes metrics and shows the bar."""

    def __init__(
        self,
        model: ParallelModel,
        *,
        metrics_folder: str | None,
        flops_per_sample: float | None,
        peak_flops: float | None,
        show_progress: bool,
    ) -> None:
        self._model = model
        self._folder = metrics_folder
        self._flops_per_sample, self._peak_flops = flops_per_sample, peak_flops
        self._show_progress = show_progress
        self._untold: Record = {}  # for the first line of a run
        self.begin(Result(0))

    def begin(self, result: Result) -> None:
        """Report a new run from now on; its lines in the metrics carry the time at which it began."""
        self.result = result
        self._run = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def step(self, step: int, record: Record, batch: Any, *, seconds: float) -> None:
        """Record a step; adds to ``record`` its speed, in samples of all replicas, and this rank's peak memory."""
        samples = rows_of(batch) * self._model.num_replicas
        record["samples_per_s"] = samples / seconds
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
        if first is not None and first.dim() > 1 and not first.is_floating_point():
            record["tokens_per_s"] = first.numel() * self._model.num_replicas / seconds
        if self._flops_per_sample and self._peak_flops:  # a backward pass takes twice what a forward one does
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            record["mfu"] = 3 * self._flops_per_sample * samples / seconds / (self._peak_flops * world_size)
        record["memory_bytes"] = _memory_bytes(self._model.device)
        self.result.history.append({"step": step, **record})
        self._log(step, {**self._untold, **record})
        self._untold = {}

    def evaluation(self, step: int, scores: Record) -> None:
        self.result.evaluations.append({"step": step, **scores})
        self._log(step, {f"evaluation_{name}": value for name, value in scores.items()})

    @contextlib.contextmanager
    def bar(self, steps: int, *, initial: int) -> Iterator[Callable[[Record], None]]:
        """Show a progress bar, if tqdm is installed; yields the function to call after every step."""
        self._untold = {"total_steps": steps}
        tqdm = _find_tqdm() if self._show_progress and self._model.is_main else None
        if tqdm is None:
            yield lambda record: None
            return
        with tqdm(total=steps, initial=initial, desc="training", unit="step", mininterval=0.5) as bar:

            def show(record: Record) -> None:
                bar.set_postfix(loss=f"{record['loss']:.4g}", refresh=False)
                bar.update()

            yield show

    def _log(self, step: int, record: Record) -> None:
        if self._model.is_main:
            log_metrics(step, {"run": self._run, **record}, folder=self._folder)
        else:
            note_step(step)


def _find_tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def _memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: of its GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
