"""The cost of the Trainer and its checkpoints, next to a loop by hand and to a blocking save."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_measures import LOOP, UNCHECKED, WAITING, Sizes
from parallel_turns import draw, make_mlp, our_pipeline, timed
from report import US, Samples
from torch import Tensor

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.training import tensor_files


class _InTurns:
    """Training data that run steps of another loop between those of the Trainer: one, two of theirs, one, one, ..."""

    def __init__(self, batch: tuple[Tensor, Tensor], other: Callable[[], Any], warm_up: int) -> None:
        self._batch, self._other, self._warm_up = batch, other, warm_up
        self.seconds: dict[str, list[float]] = {US: [], LOOP: []}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        number = 0
        while True:
            dist.barrier()
            began = time.perf_counter()
            yield self._batch
            dist.barrier()
            self._note(US, number, time.perf_counter() - began)
            if number % 2 == 0:
                for _ in range(2):
                    self._note(LOOP, number, timed(self._other)[0])
            number += 1

    def _note(self, who: str, number: int, seconds: float) -> None:
        if number >= self._warm_up:
            self.seconds[who].append(seconds)


def measure_trainer(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure the Trainer's step, with all reports, next to the loop of docs/parallel.md: clipped, plain, and blind.

    A loop without clipping that is as careful as the Trainer waits for the norm over all ranks before the optimizer's
    step, so that it takes no step with a non-finite gradient. The blind one steps as soon as its own rank is done.
    """
    for key, clip, is_blind in (("trainer", 1.0, False), ("plain", None, False), ("blind", None, True)):
        x, y = draw(sizes.rows, sizes.width, seed=1), draw(sizes.rows, sizes.width, seed=2)
        common = {"loss": F.mse_loss, "count": sizes.microbatches, "cuts": [f"layers.{sizes.layers // 2}"]}
        model, _ = our_pipeline(make_mlp(sizes.width, sizes.layers), x, y, **common)
        other, gradients = our_pipeline(make_mlp(sizes.width, sizes.layers), x, y, **common)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)

        def by_hand(  # type: ignore[no-untyped-def]
            other=other, gradients=gradients, optimizer=optimizer, clip=clip, is_blind=is_blind
        ) -> None:
            gradients()
            if not is_blind:
                norm = par.grad_norm(other) if clip is None else par.clip_grad_norm(other, clip)
                if not norm.isfinite():
                    raise RuntimeError("a gradient is not a number")
            optimizer.step()
            optimizer.zero_grad()

        data = _InTurns((x, y), by_hand, 2 * sizes.warm_up)
        trainer = training.Trainer(
            model,
            train=data,
            steps=2 * (sizes.cycles + sizes.warm_up) + 1,  # the last is untimed: no batch is requested after it
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            clip=clip,
        )
        trainer.fit()
        for who, seconds in data.seconds.items():
            samples.add(who, f"{key}_ms", *(1e3 * each for each in seconds))


def measure_save(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure saving a model and its AdamW to a folder, until the call returns. The two kinds alternate."""
    model, optimizer = _after_a_step(sizes)
    kinds = [True, False] if turn % 2 else [False, True]
    for number in range(-1, 2 * sizes.saves):
        for is_async in kinds if number % 2 else kinds[::-1]:
            began = time.perf_counter()
            saved = training.save("saved", model, optimizer, step=number + 1, keep=1, is_async=is_async)
            blocked_s = time.perf_counter() - began
            saved.result()
            if number >= 0:
                samples.add(US if is_async else WAITING, "save_s", blocked_s)
                if is_async:
                    samples.add(US, "save_done_s", time.perf_counter() - began)


def measure_digests(sizes: Sizes, turn: int, samples: Samples) -> None:
    """Measure saving to a folder and loading, from the page cache; with digests, and without making or checking any."""
    model, optimizer = _after_a_step(sizes)
    with_and_without = [(US, "with"), (UNCHECKED, "without")]
    digests = tensor_files.digests
    for number in range(-1, 2 * sizes.saves):
        for who, folder in with_and_without[:: 1 if (turn + number) % 2 else -1]:
            tensor_files.digests = digests if who == US else lambda data: ""
            began = time.perf_counter()
            training.save(folder, model, optimizer, step=1)
            saved_s = time.perf_counter() - began
            tensor_files.digests = digests
            if who != US:
                _make_format_1(Path(folder, "step-00000001"))
            began = time.perf_counter()
            training.load(folder, model, optimizer)
            loaded_s = time.perf_counter() - began
            if number >= 0:
                samples.add(who, "saved_s", saved_s)
                samples.add(who, "loaded_s", loaded_s)


def _after_a_step(sizes: Sizes) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_mlp(sizes.saved_width, sizes.saved_layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _make_format_1(folder: Path) -> None:
    """Remove the digests of a checkpoint, so that it has the format from before there were any."""
    note_file = folder / "checkpoint.json"
    note = json.loads(note_file.read_bytes())
    index_file = folder / note["index"]
    index = json.loads(index_file.read_bytes())
    for _, _, chunks in index["tensors"].values():
        for chunk in chunks:
            chunk.pop()
    index_file.write_text(json.dumps(index))
    del note["crc32"], note["index_crc32"]
    note |= {"format": 1, "files": {**note["files"], index_file.name: index_file.stat().st_size}}
    note_file.write_text(json.dumps(note))
