"""Arguments of a wrong type are refused at once, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from detrain_nb import parallel as par
from detrain_nb.errors import SpecError

NET, X = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(2, 4)
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (par.profile, ("gpt2", X), {}, "the model is 'gpt2': give an nn.Module"),
    (par.profile, (nn.ReLU, X), {}, r"the model is the class ReLU: pass an instance, ReLU\(...\)"),
    (par.tp_plan, (None, X), {}, "the model is None: give an nn.Module"),
    (par.tp_plan, (NET, X), {"tp": 2.0}, "tp=2.0: give a whole number, 1 or more"),
    (par.tp_plan, (NET, X), {"tp": 10**9}, "tp=1000000000 is too large: no parameter has more than 8 rows or columns"),
    (par.split, (NET, X, -1), {}, "stages=-1: give a whole number, 1 or more"),
    (par.split, (NET, X, 2.0), {}, "stages=2.0: give a whole number"),
    (par.split, (NET, X), {"at": "2"}, r"at='2': give a list of module names"),
    (par.dry_run, (NET, 2), {"example_inputs": X}, "the sizes of the mesh are 2: give them by axis"),
    (par.dry_run, (NET, {"pp": "2"}), {"example_inputs": X}, "pp='2': give a whole number of ranks"),
    (
        par.dry_run,
        (NET, {"dp_shard": 2}),
        {"example_inputs": X, "optimizer_states": -1},
        "optimizer_states=-1: give a whole number, 0 or more",
    ),
    (par.parallelize, (NET, {"pp": 2}), {"example_inputs": X}, "the mesh is {'pp': 2}: give what make_mesh returns"),
    (par.timeline, ("1F1B", 2, 2.5), {}, "num_microbatches=2.5: give a whole number"),
    (par.deferred, (NET,), {}, "pass a class, or a function that returns a model"),
    (par.materialize, ("x",), {}, "the model is 'x': give an nn.Module"),
]


@pytest.mark.parametrize("call, args, kwargs, message", CALLS)
def test_wrong_kind_is_told(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        call(*args, **kwargs)


def test_what_costs_and_cuts_are_shown_as_tables() -> None:
    found = par.split(NET, X, 2)
    for shown in (found, found.profile):
        assert "the start" in shown._repr_html_() and shown._repr_html_().startswith("<pre ")


def test_mesh_of_groups_that_were_ended_is_told() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = par.make_mesh(dp_shard=1)
    finally:
        dist.destroy_process_group()
    with pytest.raises(SpecError, match="have been destroyed: make a new mesh with make_mesh"):
        par.parallelize(NET, mesh, example_inputs=X)
