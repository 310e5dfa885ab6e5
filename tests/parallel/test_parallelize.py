"""One call lays a model out over a mesh: losses, gradients, their norm and AdamW's steps equal the whole model's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from detrain_nb import Session
from detrain_nb import parallel as par
from detrain_nb.errors import RankError, SpecError
from detrain_nb.parallel.replicated import averaged

from .models import GPT
from .sampled import one_in

# Relative for gradients and their norm (measured: 3e-6 and 5e-7), absolute for losses. AdamW takes full steps of 1e-2
# even for gradients that are almost zero: afterwards parameters differed by 1.1e-4, and gradients by 5e-5.
CLOSE = {"loss": 3e-6, "gradient": 1e-5, "later gradient": 3e-4, "norm": 3e-6, "parameter": 5e-4}

CLOSE_NUMBERS = 1e-5  # relative; for the numbers of a Trainer


@pytest.fixture(scope="module")
def two_ranks(two_ranks: Session) -> Session:
    two_ranks.run_cell("import mixed_ranks", timeout_s=60)
    return two_ranks


@pytest.fixture(scope="module")
def four_ranks(four_ranks: Session) -> Session:
    four_ranks.run_cell("import mixed_ranks", timeout_s=60)
    return four_ranks


def require_close(session: Session, axes: dict[str, int], **options: Any) -> None:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = session.run_cell(f"mixed_ranks.train({axes}{given})", timeout_s=90).values
    for rank, apart in found.items():
        assert all(apart[name] < limit for name, limit in CLOSE.items()), (rank, apart)


@pytest.mark.parametrize(
    "axes, options",
    [
        ({"dp_replicate": 2}, {}),
        ({"dp_shard": 2}, {"differs": True}),
        pytest.param({"dp_replicate": 2}, {"differs": True}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2}, {"differs": True, "fsdp": True}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, {"activations": "full"}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, {"activations": "selective"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"differs": True}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(two_ranks: Session, axes: dict[str, int], options: dict[str, Any]) -> None:
    require_close(two_ranks, axes, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, schedule",
    [
        ({"dp_replicate": 2, "dp_shard": 2}, "1F1B"),
        ({"dp_shard": 2, "tp": 2}, "1F1B"),
        ({"tp": 4}, "1F1B"),
        ({"pp": 4}, "1F1B"),
        ({"pp": 2, "dp_replicate": 2}, "Interleaved1F1B"),
        pytest.param({"pp": 2, "dp_replicate": 2}, "1F1B", marks=pytest.mark.thorough),
        *[({"pp": 2, "dp_shard": 2}, schedule) for schedule in ("1F1B", "InterleavedZeroBubble", "DualPipeV")],
        *[({"pp": 2, "tp": 2}, schedule) for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")],
        *[  # each of these schedules is tested above on the other axis
            pytest.param({"pp": 2, axis: 2}, schedule, marks=pytest.mark.thorough)
            for axis, schedules in {
                "dp_shard": ("Interleaved1F1B", "ZBVZeroBubble"),
                "tp": ("InterleavedZeroBubble", "DualPipeV"),
            }.items()
            for schedule in schedules
        ],
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 1}, "ZBVZeroBubble"),
    ],
)
def test_four_ranks(four_ranks: Session, axes: dict[str, int], schedule: str) -> None:
    """The head is the embedding, so the first and the last stage both have it, on one rank or on two."""
    require_close(four_ranks, axes, schedule=schedule, is_tied=True)
    if schedule == "1F1B" and "pp" in axes:
        require_close(four_ranks, axes, is_tied=False, layers=4)


@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_optimizer_of_many_tensors_makes_the_same_steps(
    two_ranks: Session, axes: dict[str, int], optimizer: str
) -> None:
    require_close(two_ranks, axes, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["foreach", pytest.param("fused", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}], ids="x".join)
def test_optimizer_of_many_tensors_makes_the_same_steps_on_two_axes(
    four_ranks: Session, axes: dict[str, int], optimizer: str
) -> None:
    require_close(four_ranks, axes, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"activations": "full"}, {"activations": "selective"}])
def test_stages_that_compute_again(four_ranks: Session, options: dict[str, Any]) -> None:
    require_close(four_ranks, {"pp": 2, "dp_shard": 2}, **options)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_compiled_blocks(two_ranks: Session, axes: dict[str, int]) -> None:
    require_close(two_ranks, axes, compile=True, layers=2)


@pytest.mark.parametrize("axis, told", [("pp", "was laid out in stages before"), ("dp_shard", "is already laid out")])
def test_cell_that_lays_a_trained_model_out_once_more_loses_nothing(two_ranks: Session, axis: str, told: str) -> None:
    """Each rank has trained its own part; a second layout would replace the others' values by the first rank's."""
    two_ranks.run_cell(
        "import torch\nfrom torch import nn\nfrom detrain_nb import parallel as par\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\n"
        f"mesh = par.make_mesh({axis}=2)\n"
        "again = lambda: par.parallelize(model, mesh, example_inputs=torch.ones(2, 4), loss=nn.functional.mse_loss)\n"
        "laid_out = again()\n"
        "laid_out.train_step(torch.ones(4, 4), torch.zeros(4, 4))\n"
        "with torch.no_grad():\n    for each in laid_out.parameters(): each.mul_(0.5)"
    )
    look = "[float(getattr(each, '_local_tensor', each).sum()) for each in laid_out.parameters()]"
    before = two_ranks.run_cell(look).values
    with pytest.raises(RankError, match=f"{told}.*recreate the model, lay the new one out and load"):
        two_ranks.run_cell("again()")
    assert two_ranks.run_cell(look).values == before


@pytest.mark.slow
def test_three_axes_on_eight_ranks(eight_ranks: Session) -> None:
    eight_ranks.run_cell("import mixed_ranks", timeout_s=60)
    require_close(eight_ranks, {"pp": 2, "dp_shard": 2, "tp": 2}, schedule="Interleaved1F1B", is_tied=True)


def require_same_numbers(session: Session, axes: dict[str, int], folder: Path, **options: Any) -> None:
    """Check that losses, gradient norms and evaluations of a Trainer equal those of one process, on every rank."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = session.run_cell(f"mixed_ranks.fit({axes}, {str(folder)!r}{given})", timeout_s=90).values
    for laid_out, whole in found.values():
        assert {name: len(numbers) for name, numbers in laid_out.items()} == {
            "losses": 6, "norms": 6, "evaluated loss": 2, "evaluated accuracy": 2
        }  # fmt: skip
        for name, numbers in laid_out.items():
            assert numbers == pytest.approx(whole[name], rel=CLOSE_NUMBERS), name


@pytest.mark.slow
def test_stages_of_parts_train_and_evaluate_like_one_process(four_ranks: Session, tmp_path: Path) -> None:
    """The call is that of the documentation; evaluation batches are not divisible by the number of microbatches."""
    options = {"pp": "auto", "tp": "auto", "fsdp": True, "schedule": "1F1B", "num_microbatches": 8}
    require_same_numbers(four_ranks, {"pp": 2, "tp": 2}, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"pp": 2, "tp": 2}, pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.thorough)], ids="x".join
)
def test_sequence_and_classes_in_parts_train_and_evaluate_like_one_process(
    four_ranks: Session, axes: dict[str, int], tmp_path: Path
) -> None:
    options = {"kind": "llama", "sequence_parallel": True, "loss_parallel": True, "num_microbatches": 4}
    require_same_numbers(four_ranks, axes, tmp_path, **options)


@pytest.mark.slow
def test_memory_of_a_rank_is_its_part(four_ranks: Session) -> None:
    """Bytes of parameters and of AdamW's two moments: a shard has a quarter, a stage has what it holds."""
    whole, state = four_ranks.run_cell("mixed_ranks.bytes_here({'dp_replicate': 4}, fsdp=False)").values[0]
    assert state == 2 * whole
    for axes in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}):
        found = four_ranks.run_cell(f"mixed_ranks.bytes_here({axes})").values
        parts = [found[rank][0] for rank in range(4)]
        copies = axes.get("dp_replicate", 1)
        assert whole * copies <= sum(parts) <= whole * copies * 1.02, "padding alone is more"
        assert all(found[rank][1] == 2 * parts[rank] for rank in range(4))
        if "pp" not in axes:
            assert max(parts) <= whole * copies / 4 * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids="x".join)
def test_memory_of_a_rank_with_parts_of_layers_is_what_the_plan_says(four_ranks: Session, axes: dict[str, int]) -> None:
    """The plan's parameters are held in parts, all others on both ranks of a row. Shards and stages divide these."""
    model = GPT(layers=4)
    layouts = par.tp_plan(model, torch.zeros(2, 16, dtype=torch.long), tp=2).layouts
    whole = sum(parameter.nbytes for parameter in model.parameters())
    found = four_ranks.run_cell(f"mixed_ranks.bytes_here({axes})", timeout_s=60).values
    assert all(state == 2 * parameters for parameters, state in found.values())
    for place in range(2):
        row = 0
        for name, parameter in model.named_parameters():
            layout = layouts.get(name)
            row += parameter.nbytes if layout is None else parameter.chunk(2, layout.dim)[place].nbytes
        assert 0.5 * whole < row < 0.7 * whole, "of this GPT the attention stays whole"
        held = [found[rank][0] for rank in (place, place + 2)]
        assert sum(held) == row
        assert max(held) <= row * (0.5 * 1.02 if "dp_shard" in axes else 0.6)


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2}])
def test_bf16_computes_and_keeps_float32(two_ranks: Session, axes: dict[str, int]) -> None:
    for dtypes, apart in two_ranks.run_cell(f"mixed_ranks.compute_in('bf16', {axes})").values.values():
        assert dtypes == ["torch.bfloat16", "torch.float32"]
        assert apart < 0.02
    for dtypes, apart in two_ranks.run_cell(f"mixed_ranks.compute_in(None, {axes})").values.values():
        assert dtypes == ["torch.float32"] and apart < 1e-6


@pytest.mark.slow
def test_boundaries_are_bf16_beside_shards(four_ranks: Session) -> None:
    for dtypes, apart in four_ranks.run_cell(
        "mixed_ranks.compute_in('bf16', {'pp': 2, 'dp_shard': 2})"
    ).values.values():
        assert dtypes == ["torch.bfloat16", "torch.float32"] and apart < 0.02


def test_hook_sends_less_and_trains(two_ranks: Session) -> None:
    found = two_ranks.run_cell("mixed_ranks.train({'dp_replicate': 2}, fsdp=False, comm_hook='fp16')").values
    assert 1e-6 < found[0]["gradient"] < 1e-2, "half precision on the way"
    found = two_ranks.run_cell("mixed_ranks.train({'dp_replicate': 2}, fsdp=False, comm_hook='powersgd')").values
    assert found[0]["gradient"] < 1e-5, "whole gradients in the first steps"


@pytest.mark.parametrize(
    "axes, options, message",
    [
        ({"dp_shard": 2}, {"fsdp": False}, "DDP was asked for, but dp_shard=2 shards the model"),
        ({"dp_replicate": 2}, {"comm_hook": "bf16"}, "comm_hook='bf16' needs NCCL"),
        ({"dp_replicate": 2}, {"comm_hook": "zip"}, "choose one of none, fp16, bf16, powersgd"),
        ({"dp_shard": 2}, {"comm_hook": "fp16"}, "needs DDP, which is not used here"),
        ({"dp_shard": 2}, {"precision": "fp16"}, "give 'bf16' or 'fp32'"),
        ({"dp_shard": 2}, {"activations": "some"}, "choose one of none, selective, full"),
        ({"cp": 2}, {}, "cp=2: context parallelism is not supported yet"),
        ({"ep": 2}, {}, "ep=2: expert parallelism is not supported yet"),
        ({"dp_shard": 2}, {"pp": ["layers.1"]}, "the mesh has no pp axis"),
        ({"dp_shard": 2}, {"loss_parallel": True}, "need a mesh with a tp axis"),
        (
            {"pp": 2},
            {"pp": ["layers.1", "layers.2"]},
            "2 cuts make 3 stages, but the schedule needs 2 on this mesh",
        ),
        ({"pp": 2}, {"pp": ["layers.7"]}, "the model has no module 'layers.7': did you mean 'layers."),
        ({"pp": 2}, {"schedule": "2F2B"}, "unknown schedule '2F2B'"),
        (
            {"dp_shard": 2},
            {"device": "tpu"},
            "device='tpu': models cannot be laid out on such a device",
        ),
        ({"pp": 2}, {"device": "meta"}, "device='meta': models cannot be laid out on such a device"),
    ],
)
def test_what_cannot_be_is_told(two_ranks: Session, axes: dict[str, int], options: Any, message: str) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run_cell(f"mixed_ranks.lay_out(mixed_ranks.Small(), {axes}, **{options})", timeout_s=30)
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_gpu_that_is_not_there_is_told(two_ranks: Session, axes: dict[str, int]) -> None:
    message = "device='cuda': this rank has no GPU that torch can use; available: cpu"
    with pytest.raises(RankError, match=message):
        two_ranks.run_cell(f"mixed_ranks.lay_out(mixed_ranks.Small(), {axes}, device='cuda')", timeout_s=30)
    with pytest.raises(RankError, match=f"device_type={message.removeprefix('device=')}"):
        two_ranks.run_cell("mixed_ranks.par.make_mesh(pp=2, device_type='cuda')", timeout_s=30)


def test_kind_of_device_that_is_none_is_told(two_ranks: Session) -> None:
    with pytest.raises(RankError, match="device_type='tpu': models cannot be laid out on such a device"):
        two_ranks.run_cell("mixed_ranks.par.make_mesh(pp=2, device_type='tpu')", timeout_s=30)


@pytest.mark.parametrize("max_norm", ["-1.0", "0.0", "float('nan')", "None", "torch.tensor(-1.0)"])
def test_norm_that_would_turn_gradients_round_is_refused(max_norm: str) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    given = eval(max_norm)
    with pytest.raises(SpecError, match=rf"max_norm={re.escape(repr(given))} must be above 0; .* call grad_norm"):
        par.clip_grad_norm(layer, given)
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


def test_ddp_beside_a_zero_bubble_schedule_is_refused(two_ranks: Session) -> None:
    """The check runs in one process, so four ranks are not needed."""
    from detrain_nb.parallel.data_parallel import _why_not_ddp
    from detrain_nb.parallel.stages.schedules import find_schedule

    assert "replicas would drift apart" in _why_not_ddp({"pp": 2, "dp_replicate": 2}, find_schedule("ZBVZeroBubble"))
    assert "it cannot broadcast a DTensor" in _why_not_ddp({"dp_replicate": 2, "tp": 2}, None)
    assert not _why_not_ddp({"pp": 2, "dp_replicate": 2}, find_schedule("1F1B"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, options, reason",
    [
        ({"pp": 2, "dp_replicate": 2}, {"schedule": "ZBVZeroBubble"}, "bypasses the gradient exchange of DDP"),
        ({"pp": 2, "dp_replicate": 2}, {"schedule": "InterleavedZeroBubble"}, "replicas would drift apart"),
        ({"dp_replicate": 2, "tp": 2}, {}, r"fails on tensor parallel parameters \(tp=2\)"),
        ({"dp_replicate": 2, "tp": 2}, {"comm_hook": "fp16"}, "it cannot broadcast a DTensor"),
        ({"dp_replicate": 2, "dp_shard": 2}, {}, "dp_shard=2 shards the model"),
    ],
)
def test_ddp_that_was_asked_for_is_refused_on_all_ranks(
    four_ranks: Session, axes: dict[str, int], options: Any, reason: str
) -> None:
    """The error has the reason, and no rank is left waiting."""
    code = f"mixed_ranks.lay_out(mixed_ranks.Small(), {axes}, fsdp=False, **{options})"
    with pytest.raises(RankError, match=f"DDP was asked for, but .*{reason}") as caught:
        four_ranks.run_cell(code, timeout_s=30)
    assert sorted(caught.value.errors) == [0, 1, 2, 3]


def test_rank_with_another_model_is_named(two_ranks: Session) -> None:
    code = "mixed_ranks.lay_out(mixed_ranks.Other() if rank == 1 else mixed_ranks.Small(), {'dp_shard': 2})"
    with pytest.raises(RankError, match="the model on rank 1 differs: it has the model: Other") as caught:
        two_ranks.run_cell(code, timeout_s=30)
    assert sorted(caught.value.errors) == [0, 1], "nobody is left waiting"


def test_mesh_of_some_ranks_waits_for_no_other(two_ranks: Session) -> None:
    found = two_ranks.run_cell("mixed_ranks.lay_out_on_one(1)", timeout_s=30).values
    assert found[0] is None and found[1] > 0


@pytest.mark.slow
def test_values_of_the_first_rank_are_taken_on_every_axis(four_ranks: Session) -> None:
    found = four_ranks.run_cell("mixed_ranks.begin_apart({'pp': 2, 'dp_shard': 2})", timeout_s=60).values
    assert found == dict.fromkeys(range(4), 0.0)


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2}])
def test_optimizer_may_be_made_after_an_evaluation(two_ranks: Session, axes: dict[str, int]) -> None:
    for norm, apart in two_ranks.run_cell(f"mixed_ranks.evaluate_first({axes})", timeout_s=60).values.values():
        assert norm < 2e-6 and apart < 1e-6


@pytest.mark.slow
def test_optimizer_may_be_made_after_an_evaluation_of_stages_of_shards(four_ranks: Session) -> None:
    for norm, apart in four_ranks.run_cell("mixed_ranks.evaluate_first({'pp': 2, 'dp_shard': 2})").values.values():
        assert norm < 2e-6 and apart < 1e-6


@pytest.mark.parametrize("way", one_in(2, ["any", "nonzero", "list", "batch"]))
def test_experts_in_the_model_itself_have_rows_on_some_replicas_alone(two_ranks: Session, way: str) -> None:
    """If FSDP2 gathered each of them separately, as it does layers, the rank that has rows would wait for the other."""
    code = f"mixed_ranks.apart_from_whole(mixed_ranks.Routed({way!r}), {{'dp_shard': 2}})"
    for apart in two_ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-4
    units = two_ranks.run_cell(f"mixed_ranks.shard_routed({way!r})", timeout_s=60).values[0]
    assert units == ["", "layers.0", "layers.1"]


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_model_that_needs_the_whole_batch_is_told_how_to_have_it(two_ranks: Session, axes: dict[str, int]) -> None:
    message = r"(?s)shapes cannot be multiplied.*given one of 2 microbatches.*give num_microbatches=1 \(.*GPipe"
    with pytest.raises(RankError, match=message):
        two_ranks.run_cell(f"mixed_ranks.train_on_a_graph({axes}, num_microbatches=2)", timeout_s=60)
    code = f"mixed_ranks.train_on_a_graph({axes}, num_microbatches=1, schedule='GPipe')"
    assert all(apart is None or abs(apart) < 1e-5 for apart in two_ranks.run_cell(code, timeout_s=60).values.values())


def test_expert_with_a_part_that_is_gathered_by_itself_is_refused(two_ranks: Session) -> None:
    with pytest.raises(RankError, match=r"experts\.0 may not run on every rank, .* has a BatchNorm1d in another dtype"):
        two_ranks.run_cell("mixed_ranks.shard_routed('any', has_norm=True)", timeout_s=60)


@pytest.mark.slow
def test_experts_in_a_stage_itself(four_ranks: Session) -> None:
    code = "mixed_ranks.apart_from_whole(mixed_ranks.Routed('any'), {'pp': 2, 'dp_shard': 2}, pp=['layers.1'])"
    for apart in four_ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-4


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}])
@pytest.mark.parametrize("model", ["Branches", "Repeated"])
def test_branches_and_layers_that_repeat(two_ranks: Session, axes: dict[str, int], model: str) -> None:
    """A layer that one replica does not use still has the right gradient there."""
    found = two_ranks.run_cell(f"mixed_ranks.apart_from_whole(mixed_ranks.{model}(), {axes})", timeout_s=60).values
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("kind", ["sum", "ignored", "own"])
def test_losses_with_arguments_are_weighed(two_ranks: Session, kind: str) -> None:
    for loss, gradient in two_ranks.run_cell(
        f"mixed_ranks.weigh_over_replicas({kind!r})", timeout_s=60
    ).values.values():
        assert loss < 2e-6 and gradient < 2e-6


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_replicas_evaluate_with_the_same_statistics(two_ranks: Session, precision: str | None) -> None:
    found = two_ranks.run_cell(f"mixed_ranks.normalize({precision!r})", timeout_s=60).values
    assert found[0] == found[1] and found[0][0] != 0


@pytest.mark.parametrize("way", ["plain", "data", "batch_norm"])
def test_replicas_share_buffers_that_a_model_writes_itself(two_ranks: Session, way: str) -> None:
    found = two_ranks.run_cell(f"mixed_ranks.average({way!r})", timeout_s=60).values
    assert found[0] == found[1] and any(found[0])


def test_gradients_are_what_they_were_when_an_average_of_new_ones_fails() -> None:
    parameters = [nn.Parameter(torch.zeros((), dtype=dtype)) for dtype in (torch.float32, torch.float8_e5m2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 5)
    before = [parameter.grad for parameter in parameters]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Gloo can average the first parameter, but not the dtype of the second.
        with pytest.raises(RuntimeError, match="scalar type"), averaged(parameters, [dist.group.WORLD]):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
    finally:
        dist.destroy_process_group()
    assert all(parameter.grad is grad for parameter, grad in zip(parameters, before))
    assert float(before[0]) == 5


def test_replicas_are_saved_with_the_same_statistics(two_ranks: Session, tmp_path: Path) -> None:
    found = two_ranks.run_cell(f"mixed_ranks.save_statistics({str(tmp_path)!r})", timeout_s=60).values
    (saved, before), (also_saved, others) = found[0], found[1]
    assert before != others, "each has its own while it trains"
    assert {*saved, *also_saved} == {before}


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"pp": 2}], ids=str)
def test_backward_pass_is_outside_of_autocast(two_ranks: Session, axes: dict[str, int]) -> None:
    for seen in two_ranks.run_cell(f"mixed_ranks.look_at_autocast({axes}, num_microbatches=2)").values.values():
        assert seen == [("backward", False), ("forward", True)]


def test_users_model_stays_on_its_device(two_ranks: Session) -> None:
    assert two_ranks.run_cell("mixed_ranks.stay_where_it_was()").values == {0: {"cpu"}, 1: {"cpu"}}


def test_ranks_with_unlike_devices_are_told(two_ranks: Session) -> None:
    with pytest.raises(RankError, match=r"only some ranks have a GPU that their group can use \(without: 0\)"):
        two_ranks.run_cell("mixed_ranks.choose_device('cpu:gloo,cuda:nccl')", timeout_s=30)
    of_gloo = two_ranks.run_cell("mixed_ranks.choose_device('cpu:gloo,cuda:gloo')", timeout_s=30)
    assert of_gloo.values == {0: "cpu", 1: "cpu"}, "gloo sends no tensor of a GPU to one rank"


def test_axes_that_are_not_known_are_told(two_ranks: Session) -> None:
    with pytest.raises(RankError, match="the mesh has an unknown axis 'dp': name the axes pp, dp_replicate"):
        two_ranks.run_cell("mixed_ranks.lay_over_axis('dp')", timeout_s=30)
    with pytest.raises(RankError, match="needs DDP, but FSDP2 was asked for: give the mesh a dp_shard axis too"):
        two_ranks.run_cell("mixed_ranks.lay_over_axis('dp_replicate', fsdp=True)", timeout_s=30)
