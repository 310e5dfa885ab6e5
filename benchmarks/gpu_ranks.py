"""A rank of the GPU checks under plain torchrun: a model laid out by ``parallelize`` next to the same model unsplit.

    torchrun --standalone --nproc-per-node=N gpu_ranks.py JOB FOLDER

Each rank writes its measurements, or its error, to a file in the folder.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_models import Gpt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detrain_nb import parallel as par
from detrain_nb.launch import threads_per_rank, usable_cpus

_GROUP_LIMIT = timedelta(seconds=60)
_STEPS = 3
_MICROBATCHES = 4
_ROWS = 8  # in the batch of a replica
_SMALL = {"width": 64, "layers": 4, "vocabulary": 96, "length": 16}
_FOR_MEMORY = {
    "cuda": {"width": 1024, "layers": 8, "vocabulary": 16384, "length": 512},
    # a tensor-parallel plan is verified on the CPU in float64, which takes long
    "cuda tp": {"width": 512, "layers": 2, "vocabulary": 4096, "length": 128},
    "cpu": {"width": 128, "layers": 4, "vocabulary": 512, "length": 64},
}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def lay_out(job: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Train both models for some steps; returns the largest differences of losses, of gradient norms, of gradients.

    All differences are relative, those of a gradient to its largest entry.
    """
    _make_group(job, device)
    mesh = par.make_mesh(**job["axes"], device_type=device.type)
    torch.manual_seed(0)
    model = Gpt(**_SMALL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    whole = copy.deepcopy(model).to(device)
    references = dict(whole.named_parameters())
    laid_out = par.parallelize(
        model,
        mesh,
        example_inputs=_tokens(2, 0, _SMALL),
        loss=token_loss,
        num_microbatches=_MICROBATCHES,
        device=device,
        **job["options"],
    )
    optimizers = [torch.optim.SGD(list(each.parameters()), lr=0.1) for each in (laid_out, whole)]
    apart = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    for step in range(_STEPS):
        x, y = (_tokens(_ROWS * laid_out.num_replicas, 2 * step + part, _SMALL).to(device) for part in (1, 2))
        mine = (part.chunk(laid_out.num_replicas)[laid_out.replica] for part in (x, y))
        loss, expected = laid_out.train_step(*mine), token_loss(whole(x), y)
        expected.backward()
        if loss is not None:
            apart["loss"] = max(apart["loss"], abs(float(loss / expected.detach()) - 1))
        for name, parameter in laid_out.named_parameters():
            reference = references[name].grad
            assert parameter.grad is not None and reference is not None, name
            difference = (_full(parameter.grad).float() - reference).abs().max() / reference.abs().max()
            apart["gradient"] = max(apart["gradient"], float(difference))
        if not job["is_shared"] or not any(isinstance(each, DTensor) for each in laid_out.parameters()):  # see _full
            norms = par.clip_grad_norm(laid_out, 1.0), nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            apart["norm"] = max(apart["norm"], abs(float(norms[0]) / float(norms[1]) - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return apart


def measure_memory(job: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Return the bytes that a dry run predicts for this rank, and the bytes of its second step with AdamW."""
    axes = job["axes"]
    sizes = _FOR_MEMORY["cuda tp" if device.type == "cuda" and axes.get("tp", 1) > 1 else device.type]
    is_pipeline = axes.get("pp", 1) > 1
    count = _MICROBATCHES if is_pipeline else 1
    with torch.device("meta"):
        model = Gpt(**sizes)
    example = torch.zeros(_ROWS // count, sizes["length"], dtype=torch.long)
    said = par.dry_run(model, axes, example_inputs=example, num_microbatches=count)
    row = next(row for row in said.rows if int(os.environ["RANK"]) in row.ranks)
    _make_group(job, device)
    model = Gpt(**sizes)
    mesh = par.make_mesh(**axes, device_type=device.type)
    laid_out = par.parallelize(
        model, mesh, example_inputs=example, loss=token_loss, num_microbatches=count, device=device, **job["options"]
    )
    optimizer = torch.optim.AdamW(list(laid_out.parameters()))
    x, y = (_tokens(_ROWS, seed, sizes) for seed in (1, 2))

    def step() -> None:
        laid_out.train_step(x, y)
        optimizer.step()
        optimizer.zero_grad()

    held, peak = _on_gpu(step) if device.type == "cuda" else _on_cpu(step, laid_out.modules[0], optimizer)
    return {
        "said_parameter_and_optimizer_bytes": row.parameter_bytes + row.optimizer_bytes,
        "held_bytes": held,
        "said_total_bytes": row.total_bytes,
        "peak_bytes": peak,
    }


def _on_gpu(step: Any) -> tuple[int, int]:
    """Return the bytes allocated between steps, and the peak of a step."""
    step()  # allocates the optimizer's state and cuBLAS's workspace
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated()


def _on_cpu(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the same on the CPU, which has no allocator statistics: torch's tracker adds up the tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
        totals = [
            sum(each["Total"] for each in tracker.get_tracker_snapshot(when).values()) for when in ("current", "peak")
        ]
    return totals[0], totals[1]


def _make_group(job: dict[str, Any], device: torch.device) -> None:
    """Create the process group: NCCL does not allow two ranks on one GPU, gloo does."""
    if device.type == "cuda" and not job["is_shared"]:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=_GROUP_LIMIT)
    else:
        dist.init_process_group("gloo", timeout=_GROUP_LIMIT)


def _tokens(rows: int, seed: int, sizes: dict[str, int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes["vocabulary"], (rows, sizes["length"]), generator=generator)


def _full(tensor: Tensor) -> Tensor:
    """Gather a tensor on the CPU: gathering GPU tensors over gloo, for ranks that share a GPU, crashes the process."""
    return tensor.cpu().full_tensor().to(tensor.device) if isinstance(tensor, DTensor) else tensor


def main() -> None:
    job, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]
    device = torch.device("cpu")
    try:
        if job["kind"] == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(device)
            torch.ones(1, device=device)  # otherwise a mesh would choose a device by the local rank
        torch.set_num_threads(threads_per_rank(int(os.environ["WORLD_SIZE"]), cpus=usable_cpus()))
        measured = {"layout": lay_out, "memory": measure_memory}[job["what"]](job, device)
    except BaseException as exc:
        told = {"summary": f"{type(exc).__name__}: {exc}", "traceback": traceback.format_exc()}
        (folder / f"error-{rank}").write_text(json.dumps(told), encoding="utf-8")
        raise
    (folder / f"measured-{rank}").write_text(json.dumps(measured), encoding="utf-8")
    if dist.get_world_size() > 1:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread that releases a tensor while Python exits would abort it


if __name__ == "__main__":
    main()
