"""What the Trainer and its checkpoints cost beside a loop by hand, and beside a save that waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_measures import LOOP, WAITING, Sizes
from parallel_turns import draw, make_mlp, our_pipeline, timed
from report import US, Samples
from torch import Tensor

from detrain_nb import parallel as par
from detrain_nb import training


class _InTurns:
    """Training data that make steps of another loop between those of the Trainer: one, two of theirs, one, one, ..."""

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
    """Its step, with all that it tells, beside the lines of docs/parallel.md: with clipping, without, and blind.

    A loop without clipping that is as careful as the Trainer waits for the norm of all ranks before the optimizer's
    step, so that none is taken with what is not a number; the blind one steps as soon as its own rank is done.
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
            steps=2 * (sizes.cycles + sizes.warm_up) + 1,  # the last one is not noted: nobody asks for a batch after it
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            clip=clip,
        )
        trainer.fit()
        for who, seconds in data.seconds.items():
            samples.add(who, f"{key}_ms", *(1e3 * each for each in seconds))


def measure_save(sizes: Sizes, turn: int, samples: Samples) -> None:
    """A model with its AdamW, to a folder: until the call returns. They take turns, one at a time."""
    model = make_mlp(sizes.saved_width, sizes.saved_layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
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
