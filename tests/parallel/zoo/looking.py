"""Models of the zoo, inspected: profiled, split, planned and tried without ranks, then compared with what they were."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from detrain_nb import parallel as par
from detrain_nb.errors import SpecError

from .entry import float_leaves, on
from .everything import ENTRIES
from .looks import first_difference, look_at


def look(name: str, device: str = "cpu") -> tuple[dict[str, str], set[str]]:
    """Profile, split, plan and dry-run a new model, then one that has run; return what each call changed.

    This compares attributes, tensors, generators, and later outputs bit for bit, and finds tensors without memory that
    are left. A refused call must leave nothing behind either. Also returns which calls were refused.
    """
    entry, left, refused = ENTRIES[name], dict[str, str](), set[str]()
    model, other, inputs = entry.model().to(device), entry.model().to(device), on(device, entry.inputs(2))
    for when in ("new", "used"):
        known = _without_memory()  # those of other tests may still exist
        for what, call in _LOOKS.items():
            before = look_at(model, *_generators(device))
            try:
                call(model, inputs)
            except SpecError:
                refused.add(what)
            except Exception as exc:  # noqa: BLE001  what a model raises is what is asked for
                left[f"{what}, {when}"] = f"raises {type(exc).__name__}: {exc}"
                continue
            if difference := first_difference(before, look_at(model, *_generators(device))):
                left[f"{what}, {when}"] = difference
        if more := len(_without_memory()) - len(known):
            left[f"all, {when}"] = f"{more} tensors without memory are left"
        if difference := _compute_alike(model, other, on(device, entry.inputs(3))):
            left[f"outputs, {when}"] = difference
    return left, refused


_LOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "profile": par.profile,
    "split": lambda model, inputs: par.split(model, inputs, 2),
    "tp_plan": lambda model, inputs: par.tp_plan(model, inputs, tp=2),
    "dry_run": lambda model, inputs: par.dry_run(model, {"pp": 2}, example_inputs=inputs),
}


def _without_memory() -> list[FakeTensor]:
    """Return all fake tensors that are left, except those that torch.compile keeps."""
    gc.collect()
    fakes = [each for each in gc.get_objects() if type(each) is FakeTensor]
    return [each for each in fakes if each.fake_mode.shape_env is None]


def _generators(device: str) -> tuple[Any, ...]:
    of_gpu = [torch.cuda.get_rng_state(device)] if device != "cpu" else []
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), *of_gpu


def _compute_alike(model: nn.Module, other: nn.Module, inputs: dict[str, Any]) -> str:
    """Compare outputs in training and in evaluation mode, for the same seed; return the difference in words."""
    for is_training in (True, False):
        results = []
        modes = [module.training for module in model.modules()]
        for each in (model, other):
            torch.manual_seed(7)
            if not is_training:
                each.eval()
            results.append(float_leaves(each(**inputs)))
            for module, mode in zip(each.modules(), modes):
                module.training = mode
        found, expected = results
        if any(isinstance(each, FakeTensor) for each in found):
            return "outputs are without memory"
        if len(found) != len(expected):
            return f"{len(found)} tensors instead of {len(expected)}"
        if not all(torch.equal(*pair) for pair in zip(found, expected)):
            apart = max(float((a - b).abs().max()) for a, b in zip(found, expected))
            return f"outputs are {apart:.2g} apart in {'training' if is_training else 'evaluation'}"
    return ""
