"""Checks of models over ranks on GPUs: every layout against one process, and a dry run against allocated memory."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check import FOR_LAYOUTS, Check, CheckFailed, Notes, NotPossible, Place, require

_RANKS = str(Path(__file__).with_name("gpu_ranks.py"))
_LIMIT_S = 170.0  # for everything that one check starts
_SHOWN_CHARS = 4000
# Relative, in float32. Tests on the CPU use 3e-6 and 1e-5; a GPU and its collectives add in another order.
_CLOSE = {"loss": 1e-5, "gradient": 2e-4, "norm": 2e-5}
_CLOSE_IN_BF16 = {"loss": 2e-2, "gradient": math.inf, "norm": math.inf}  # gradients are only reported
_HELD_WITHIN = 0.05
_WORKSPACE_BYTES = 64 << 20  # workspace of cuBLAS and of a rank's collectives on a GPU
_PEAK_BETWEEN = (0.7, 1.3)  # a dry run omits the loss and temporary tensors of operators
# How torch and we report operations that gloo does not support with GPU tensors.
_NOT_SUPPORTED = ("not supported", "does not support", "not implemented", "no backend type", "unsupported", "SpecError")


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh's axes, and the other arguments of ``parallelize``."""

    axes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return ", ".join([sizes, *(f"{name}={value}" for name, value in self.options.items())])


LAYOUTS = (
    Layout({"dp_shard": 1}, {"fsdp": True}),
    Layout({"dp_shard": 1}, {"fsdp": True, "precision": "bf16"}),
    Layout({"pp": 2}),
    Layout({"pp": 2}, {"schedule": "Interleaved1F1B"}),
    Layout({"pp": 2}, {"schedule": "ZBVZeroBubble"}),
    Layout({"tp": 2}),
    Layout({"dp_shard": 2}),
    Layout({"dp_replicate": 2}),
    Layout({"pp": 2, "dp_shard": 2}),
    Layout({"pp": 2, "dp_replicate": 2}),
    Layout({"pp": 2, "tp": 2}),
    Layout({"dp_replicate": 2, "dp_shard": 2}),
    Layout({"dp_shard": 2, "tp": 2}),
    Layout({"pp": 2, "dp_shard": 2, "tp": 2}),
    Layout({"pp": 2, "dp_replicate": 2, "dp_shard": 2}),
)
OF_MEMORY = (Layout({"dp_shard": 1}), Layout({"pp": 2}), Layout({"tp": 2}), Layout({"dp_shard": 2}))
_MOST_SHARING = 4  # ranks on one GPU


def checks() -> list[Check]:
    """Return all checks; each one reports what this machine lacks."""
    return [
        *(_check("layout", layout, check_layout, "as one process") for layout in LAYOUTS),
        *(_check("memory", layout, check_memory, "as a dry run says") for layout in OF_MEMORY),
    ]


def _check(what: str, layout: Layout, run: Any, title: str) -> Check:
    return Check(f"{what} {layout}", f"{layout}: {title}", functools.partial(run, layout), FOR_LAYOUTS)


def check_layout(layout: Layout, place: Place, notes: Notes) -> None:
    """Losses, all gradients and their norm equal those of the same model in one process."""
    found = _run("layout", layout, place, notes)
    apart = {name: max(each[name] for each in found) for name in _CLOSE}
    limits = _CLOSE_IN_BF16 if layout.options.get("precision") == "bf16" else _CLOSE
    notes.add(apart=apart, limits={name: limit for name, limit in limits.items() if limit < math.inf})
    wrong = [name for name, limit in limits.items() if not apart[name] <= limit]
    require(not wrong, f"{', '.join(wrong)} too far from one process: {apart}")


def check_memory(layout: Layout, place: Place, notes: Notes) -> None:
    """Parameters and AdamW's state are held between steps; the peak of a step is near the dry run's total."""
    if not place.is_gpu and layout.ranks > 1:
        raise NotPossible("no GPU: on the CPU only one process adds its tensors up")
    found = _run("memory", layout, place, notes)
    notes.add(by_rank=found)
    room = _WORKSPACE_BYTES if place.is_gpu else 0
    for rank, each in enumerate(found):
        said, held = each["said_parameter_and_optimizer_bytes"], each["held_bytes"]
        ratio = each["peak_bytes"] / each["said_total_bytes"]
        notes.add(**{f"peak_by_said_of_rank_{rank}": round(ratio, 3)})
        require(
            abs(held - said) <= _HELD_WITHIN * said + room, f"rank {rank} holds {held:,} bytes, and {said:,} were said"
        )
        low, high = _PEAK_BETWEEN
        is_near = low <= ratio and each["peak_bytes"] <= high * each["said_total_bytes"] + room
        require(is_near, f"the peak of rank {rank} is {ratio:.2f} of what was said: {each}")


def _run(what: str, layout: Layout, place: Place, notes: Notes) -> list[dict[str, float]]:
    """Measure pull and push in turn with equal bytes over one socket; the first of each is a warm-up."""
    is_shared = place.is_gpu and place.gpus < layout.ranks
    if is_shared and layout.ranks > _MOST_SHARING:
        place.require_gpus(layout.ranks)
    notes.add(ranks=place.how_many_ranks_have(layout.ranks), world_size=layout.ranks)
    job = {"what": what, "kind": place.kind, "is_shared": is_shared, "axes": layout.axes, "options": layout.options}
    status, log = _start([json.dumps(job), str(place.folder)], layout.ranks, place.folder)
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in _of_ranks(place.folder, "error")]
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in _of_ranks(place.folder, "measured")]
    if is_shared and errors and all(_is_not_supported(error["summary"]) for error in errors):
        raise NotPossible(f"ranks that share a GPU over gloo: {errors[0]['summary'][:500]}")
    if status or len(measured) != layout.ranks:
        told = "\n".join(error["traceback"] for error in errors) or _without_torchrun(log)
        raise CheckFailed(f"torchrun ended with {status}:\n{told[-_SHOWN_CHARS:]}")
    return measured


def _without_torchrun(log: str) -> str:
    """Return the output of the ranks, without torchrun's long report of their exit."""
    return log.partition("torch/distributed/elastic/multiprocessing/api.py")[0].strip() or log


def _is_not_supported(summary: str) -> bool:
    return any(words.lower() in summary.lower() for words in _NOT_SUPPORTED)


def _of_ranks(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def _start(arguments: list[str], ranks: int, folder: Path) -> tuple[int, str]:
    """Return the exit status of torchrun, and all output of it and its ranks; the caller stops remaining processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    log_path = folder / "log"
    with open(log_path, "wb") as log:
        ended = subprocess.run(
            [*torchrun, f"--nproc-per-node={ranks}", _RANKS, *arguments],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONFAULTHANDLER": "1",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "=lo",
            },
            stdout=log,
            stderr=log,
            timeout=_LIMIT_S,
        )
    return ended.returncode, log_path.read_text(encoding="utf-8", errors="replace")
