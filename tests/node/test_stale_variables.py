"""Variables that hold ended groups: one thread explains errors with them while another one records more."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from detrain_nb.node.groups.stale_variables import StaleVariables, forget_meshes


class _Mesh(DeviceMesh):
    """A mesh without groups."""

    def __init__(self) -> None:
        pass


@pytest.fixture(autouse=True)
def threads_that_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_error_is_explained_while_a_generation_ends() -> None:
    stale = StaleVariables()
    with pytest.raises(ValueError, match="Default process group") as caught:
        torch.distributed.all_reduce(torch.ones(1))
    error = caught.value
    kept = {f"mesh_{index}": _Mesh() for index in range(200)}
    assert len(stale.note(kept)) == 200

    def note() -> None:
        for turn in range(30):
            stale.note(kept | {f"of_turn_{turn}_{index}": _Mesh() for index in range(300)})

    noting = threading.Thread(target=note)
    noting.start()
    try:
        while noting.is_alive():
            assert "mesh_0, mesh_1, " in stale.explain(error, str(error))
    finally:
        noting.join()


def test_default_group_that_has_ended_is_to_be_made_first() -> None:
    stale, mesh = StaleVariables(), _Mesh()
    stale.note({"mesh": mesh})
    with pytest.raises(ValueError, match="Default process group") as caught:
        torch.distributed.all_reduce(torch.ones(1))
    said = stale.explain(caught.value, str(caught.value))
    first = "the process groups were ended: call dist.init_process_group() again"
    assert said.startswith(f"{first}, then run the cell that creates mesh again (Default ")


def test_error_that_has_nothing_to_do_with_it_is_left_alone() -> None:
    stale, mesh = StaleVariables(), _Mesh()
    stale.note({"mesh": mesh})
    for text in ("Connection closed by peer [127.0.0.1]:33", "ProcessGroupGloo::broadcast: invalid root rank: 7"):
        assert stale.explain(RuntimeError(text), text) == ""  # errors of the user's code


def test_what_is_gone_explains_nothing() -> None:
    stale, error = StaleVariables(), RuntimeError("Connection closed by peer")
    assert stale.note({"mesh": _Mesh(), 1: _Mesh(), "_own": _Mesh()}) == ["mesh"]
    assert stale.explain(error, str(error)) == ""


@pytest.mark.parametrize("left_out", ["torch.distributed.tensor", "torch.distributed.tensor._api"])
def test_meshes_are_forgotten_after_an_import_that_was_stopped(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped import can leave submodules without their package, or a package without its last submodules."""
    importlib.import_module("torch.distributed.tensor")
    monkeypatch.delitem(sys.modules, left_out)
    forget_meshes()
