"""What only a GPU can show: devices and NCCL. A rank that can use CUDA shows that nothing used it before the fork."""

from __future__ import annotations

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankError, RankLost, SpecError
from detrain_nb.node.agent.agent import count_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="no GPU on this machine"),
]


def test_ranks_default_to_the_gpus_and_each_has_its_own() -> None:
    with Session.start() as session:
        assert len(session.ranks) == count_gpus()
        found = session.run_cell("torch.cuda.current_device(), str(device), torch.empty(1, device='cuda').device.index")
        assert found.values == {rank: (rank, f"cuda:{rank}", rank) for rank in range(len(session.ranks))}


def test_collectives_run_on_nccl_and_on_gloo() -> None:
    with Session.start(device="cuda") as session:
        session.run_cell("t = torch.ones(4, device=device); dist.all_reduce(t)")
        session.run_cell("c = torch.ones(4); dist.all_reduce(c)")
        result = session.run_cell("t.sum(), c.sum()")
        for on_gpu, on_cpu in result.values.values():
            assert on_gpu.item() == on_cpu.item() == 4.0 * len(session.ranks)
        assert "nccl" in session.run_cell("str(dist.get_backend_config())").values[0]


def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    with Session.start(1, device="cuda") as session:
        session.run_cell("x = torch.arange(5, device=device, dtype=torch.bfloat16)")
        assert session.pull("x")[0].tolist() == [0, 1, 2, 3, 4]
        assert session.pull("x")[0].device.type == "cpu"


def test_stop_of_a_gpu_loop_keeps_variables() -> None:
    with Session.start(1, device="cuda") as session:
        session.run_cell("x = torch.ones(1, device=device)")
        with pytest.raises(Exception, match="did not end within"):
            session.run_cell("while True: x.add_(0)", timeout_s=1)
        assert session.run_cell("x.item()").values == {0: 1.0}


def test_collective_on_gloo_alone_counts_as_one_with_others() -> None:
    """Even in a group that also has NCCL, such a cell is not replayed on one rank alone."""
    with Session.start(1, device="cuda") as session:
        session.run_cell("alone = 1")
        session.run_cell("c = torch.ones(1); dist.all_reduce(c)")
        session.restart(0)
        assert list(session.log.replay(0).values()) == [None]
        assert session.run_cell("alone, 'c' in globals()").values == {0: (1, False)}


def test_broken_context_is_named_and_the_rank_replaced() -> None:
    with Session.start(1, device="cuda") as session:
        code = "x = torch.zeros(4, device=device)\nx[torch.tensor([9], device=device)].sum().item()"
        with pytest.raises((RankError, RankLost), match=r"CUDA error|device-side assert") as caught:
            session.run_cell(code)
        shown = "\n".join(caught.value._render_traceback_())
        assert "it is replaced" in shown or "rank 0 was restarted" in shown, "by us, or by NCCL's own watch"
        assert session.run_cell("torch.ones(2, device=device).sum().item()").values == {0: 2.0}


def test_out_of_memory_names_the_largest_variables_and_the_memory_is_free_again() -> None:
    with Session.start(1, device="cuda") as session:
        code = """
big = torch.empty(1 << 28, device=device)
def fill():
    held = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device=device)
    torch.empty(torch.cuda.mem_get_info()[0] * 2, dtype=torch.uint8, device=device)
fill()
"""
        with pytest.raises(RankError, match="OutOfMemoryError") as caught:
            session.run_cell(code)
        assert "the largest variables on rank 0: big 1.1 GB" in "\n".join(caught.value._render_traceback_())
        assert session.run_cell("torch.cuda.memory_reserved() < 3 * 2**30").values == {0: True}


@pytest.mark.skipif(count_gpus() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "wrapper", ["None", "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device))"]
)
def test_hung_nccl_collective_is_stopped_and_the_next_one_works(wrapper: str) -> None:
    with Session.start(2, device="cuda") as session:
        on_gloo = "for _ in range(9): dist.all_reduce(torch.ones(1))"  # gloo numbers its collectives apart from NCCL
        session.run_cell(
            f"alive = {wrapper}\nkept = rank\nt = torch.ones(1, device=device)\ndist.all_reduce(t)\n{on_gloo}"
        )
        with pytest.raises(CellTimeout, match="freed"):
            session.run_cell("if rank == 0:\n    dist.all_reduce(t)\n    torch.cuda.synchronize()", timeout_s=2)
        code = "t = torch.ones(1, device=device)\ndist.all_reduce(t)\nkept, t.item()"
        assert session.run_cell(code).values == {0: (0, 2.0), 1: (1, 2.0)}


def test_more_ranks_than_gpus_is_refused_with_the_numbers() -> None:
    with pytest.raises(SpecError, match=f"need {count_gpus() + 1} GPUs but this machine has {count_gpus()}"):
        Session.start(count_gpus() + 1, device="cuda")
