"""A rank of the parallel benchmark: it measures one part and writes the result to a folder.

    torchrun --standalone --nproc-per-node=2 parallel_ranks.py PART SIZES TURN FOLDER

The first rank's times go to a file in the folder; so does the error of any rank.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_cuts import measure_gpt, measure_plan, measure_resnet
from parallel_layouts import measure_efficiency, measure_mlp, measure_pipeline, measure_shards, measure_tensor
from parallel_measures import read_sizes
from parallel_training import measure_digests, measure_save, measure_trainer
from report import Samples

_GROUP_LIMIT = timedelta(seconds=120)

PARTS = {
    "pipeline": measure_pipeline,
    "tensor": measure_tensor,
    "shards": measure_shards,
    "mlp": measure_mlp,
    "efficiency": measure_efficiency,
    "gpt": measure_gpt,
    "resnet": measure_resnet,
    "plan": measure_plan,
    "trainer": measure_trainer,
    "save": measure_save,
    "digests": measure_digests,
}


def run_rank(measure: Callable[[Samples], None], folder: Path) -> None:
    """Write the measurements of the first rank, or the error of any rank, to ``folder``."""
    rank = os.environ["RANK"]
    samples = Samples()
    try:
        measure(samples)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    if rank == "0":
        (folder / "samples.json").write_text(json.dumps(samples.by_name), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread that releases a tensor while Python exits would abort it


def _measure(samples: Samples) -> None:
    part, sizes, turn = sys.argv[1], read_sizes(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_GROUP_LIMIT)
    try:
        PARTS[part](sizes, turn, samples)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(_measure, Path(sys.argv[4]))
