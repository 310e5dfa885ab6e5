"""Meshes of existing ranks; tests/plan covers the arithmetic."""

from __future__ import annotations

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError, SessionError
from detrain_nb.parallel import make_mesh


def test_mesh_without_ranks_is_told() -> None:
    with pytest.raises(SessionError, match="a mesh needs a process group: start the session with one"):
        make_mesh(tp=1)


@pytest.mark.slow
def test_neighbouring_ranks_are_on_the_last_axis() -> None:
    with Session.start(4, device="cpu") as session:
        made = session.run_cell(
            "from detrain_nb import parallel as par\nmesh = par.make_mesh(tp=2, pp=-1)\n"
            "mesh.mesh_dim_names, mesh['pp'].get_local_rank(), mesh['tp'].get_local_rank(), mesh.device_type"
        )
        assert made.values == {rank: (("pp", "tp"), rank // 2, rank % 2, "cpu") for rank in range(4)}
        summed = session.run_cell(
            "t = torch.tensor([rank]); dist.all_reduce(t, group=mesh['tp'].get_group()); t.item()"
        )
        assert summed.values == {0: 1, 1: 1, 2: 5, 3: 5}
        with pytest.raises(RankError, match="mesh tp=3 needs 3 ranks, but there are 4: use fewer ranks or raise tp"):
            session.run_cell("par.make_mesh(tp=3)")
