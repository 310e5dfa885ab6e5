"""Layouts without ranks: a dry run reports what real ranks hold."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from detrain_nb import Session
from detrain_nb.errors import SpecError
from detrain_nb.parallel import dry_run, make_mesh, parallelize, repeated
from detrain_nb.parallel.dry_run import _Layout
from detrain_nb.parallel.rehearsal import fake_ranks

from .memory_models import EXAMPLES, Llama3, token_loss
from .models import GPT, Experts
from .tensor_models import Llama

TOKENS = torch.zeros(2, 16, dtype=torch.long)
IMPORTS = "import mixed_ranks; from parallel import memory_ranks"


@pytest.fixture(scope="module")
def session(two_ranks: Session) -> Session:
    two_ranks.run_cell(IMPORTS, timeout_s=60)
    return two_ranks


@pytest.fixture(scope="module")
def four(four_ranks: Session) -> Session:
    four_ranks.run_cell(IMPORTS, timeout_s=60)
    return four_ranks


@pytest.mark.slow  # like everything that needs ranks
@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2},
        {"pp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_it_says_what_real_ranks_hold(session: Session, axes: dict[str, int]) -> None:
    """A row reports its first rank, which has 49 of 97 vocabulary rows; the other ranks may hold up to 1 % less."""
    held = session.run_cell(f"mixed_ranks.bytes_here({axes})").values
    found = dry_run(GPT(), axes, example_inputs=TOKENS)
    for row in found.rows:
        assert (row.parameter_bytes, row.optimizer_bytes) == held[row.ranks[0]]
        assert row.total_bytes == sum(row.parts_bytes)
        for rank in row.ranks:
            assert 0.99 * row.parameter_bytes < held[rank][0] <= row.parameter_bytes


def test_it_leaves_tracebacks_as_they_were() -> None:
    """torch adds the rank to every traceback line when a process group is made."""
    before = sys.excepthook
    dry_run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"pp": 2}, example_inputs=torch.zeros(2, 4))
    assert sys.excepthook is before


def test_norms_of_another_stage_are_not_sharded() -> None:
    """The stand-in for a norm is an instance of the norm's class."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    axes = {"pp": 2, "dp_shard": 2}
    found = dry_run(nn.Sequential(*layers), axes, example_inputs=torch.zeros(4, 8), pp=["2"], precision="bf16")
    assert len(found.rows) == 2


Case = tuple[str, dict[str, int], dict[str, Any]]
FIRST: list[Case] = [("gpt", {"dp_shard": 2}, {"precision": "bf16", "activations": "selective"})]
MORE: list[Case] = [
    ("gpt", {"pp": 2}, {"activations": "full"}),
    ("resnet", {"pp": 2}, {"schedule": "Interleaved1F1B", "precision": "bf16"}),
]
MOST: list[Case] = [
    ("llama", {"tp": 2}, {"sequence_parallel": True, "precision": "bf16"}),
    ("gpt", {"dp_replicate": 2}, {}),
    ("llama", {"tp": 2}, {}),
    ("gpt, many classes", {"dp_shard": 2}, {"activations": "full"}),
    ("llama", {"dp_shard": 2}, {"precision": "bf16"}),
    ("resnet", {"dp_shard": 2}, {}),
    ("bert", {"dp_replicate": 2}, {"precision": "bf16", "activations": "selective"}),
    ("bert", {"pp": 2}, {}),
    ("gpt", {"pp": 2}, {"schedule": "GPipe", "precision": "bf16"}),
    ("gpt", {"pp": 2}, {"schedule": "Interleaved1F1B", "precision": "bf16", "activations": "selective"}),
    ("gpt", {"pp": 2}, {"schedule": "ZBVZeroBubble"}),
    ("llama", {"tp": 2}, {"loss_parallel": True, "activations": "full"}),
]
OVER_FOUR: list[Case] = [
    ("gpt", {"pp": 2, "tp": 2}, {}),
    ("gpt", {"pp": 2, "dp_shard": 2}, {"precision": "bf16"}),
    ("llama", {"dp_shard": 2, "tp": 2}, {"activations": "selective"}),
    ("gpt", {"dp_replicate": 2, "dp_shard": 2}, {}),
]


def require_peaks(session: Session, cases: list[Case]) -> None:
    """Check that the reported bytes are within 20 % of the live tensors at the peak of a step.

    Only the first rank of each row is compared.
    """
    for name, axes, options in cases:
        call = f"memory_ranks.peak_here({name!r}, {axes!r}, **{options!r})"
        held = session.run_cell(call, timeout_s=100).values
        model, example, target, loss = EXAMPLES[name]()
        for row in dry_run(model, axes, example_inputs=example, target=target, loss=loss, **options).rows:
            assert 0.8 < row.total_bytes / held[row.ranks[0]] < 1.2, (name, axes, options, row, held)


@pytest.mark.slow
def test_the_peak_is_that_of_real_ranks(session: Session) -> None:
    require_peaks(session, FIRST)


@pytest.mark.thorough
def test_the_peak_is_that_of_real_ranks_in_more_layouts(session: Session) -> None:
    require_peaks(session, MORE)


@pytest.mark.thorough
def test_the_peak_is_that_of_real_ranks_in_most_layouts(session: Session) -> None:
    require_peaks(session, MOST)


@pytest.mark.thorough
def test_the_peak_is_that_of_four_real_ranks(four: Session) -> None:
    require_peaks(four, OVER_FOUR)


def require_largest(session: Session, axes: dict[str, int]) -> None:
    """Check the names and shapes of the largest parameters on the first rank of each row; no other is larger."""
    held = session.run_cell(f"mixed_ranks.shapes_here({axes})", timeout_s=60).values
    rows = dry_run(Llama(layers=4), axes, example_inputs=TOKENS).rows
    for row in rows:
        shapes = held[row.ranks[0]]
        largest = dict(row.largest)
        assert len(largest) == 3 and largest.items() <= shapes.items()
        others = [math.prod(shape) for name, shape in shapes.items() if name not in largest]
        assert min(map(math.prod, largest.values())) >= max(others)
    ends = dict(rows[0].largest) | dict(rows[-1].largest)
    assert ends["embed.weight"] == ends["head.weight"] == (49, 32), "of 97 rows"


@pytest.mark.thorough
def test_the_largest_parameters_are_told_as_a_rank_has_them(session: Session) -> None:
    require_largest(session, {"tp": 2})


@pytest.mark.thorough
@pytest.mark.timeout(300)  # four ranks start, which is slow on a loaded machine
def test_it_says_what_stages_of_parts_hold(four: Session) -> None:
    axes = {"pp": 2, "tp": 2}
    held = four.run_cell(f"mixed_ranks.bytes_here({axes})", timeout_s=60).values
    found = dry_run(GPT(), axes, example_inputs=TOKENS)
    assert [row.ranks for row in found.rows] == [(0, 1), (2, 3)]
    for row in found.rows:
        assert (row.parameter_bytes, row.optimizer_bytes) == held[row.ranks[0]]
        assert held[row.ranks[1]][0] <= row.parameter_bytes
    require_largest(four, axes)


@pytest.mark.slow
def test_five_hundred_gpus_on_one_machine() -> None:
    """The model has 8 billion parameters, and no memory is allocated for any of them."""
    with torch.device("meta"):
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8192, 64, 32768, 0.0, batch_first=True, norm_first=True),
            10,
            enable_nested_tensor=False,
        )
        example = torch.empty(1, 2048, 8192)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole > 32e9
    found = dry_run(model, {"pp": 2, "dp_replicate": 4, "dp_shard": 64}, example_inputs=example, activations="full")
    assert sum(len(row.ranks) for row in found.rows) == 512
    assert sum(row.parameter_bytes * len(row.ranks) for row in found.rows) == pytest.approx(4 * whole, rel=0.01)
    text = str(found)
    assert "pp=2 x dp_replicate=4 x dp_shard=64: 512 ranks, 1F1B" in text and "256-511" in text
    assert not dist.is_initialized() and all(parameter.is_meta for parameter in model.parameters())
    assert "<pre " in found._repr_html_() and found.peak.total_bytes == max(row.total_bytes for row in found.rows)


def test_parameters_beside_layers_of_another_dtype_are_sent_apart() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.inner = nn.Parameter(torch.ones(9, dtype=torch.complex64)), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16))
            return result

    for model in (Waves(), nn.Sequential(nn.Linear(16, 16), Waves(), nn.Linear(16, 16))):
        peak = dry_run(model, {"dp_shard": 2}, example_inputs=torch.zeros(4, 16)).peak
        whole = sum(each.numel() * each.element_size() for each in model.parameters())
        assert whole / 2 <= peak.parameter_bytes <= whole / 2 + 8, "of nine complex numbers a rank has five"


def test_activations_and_frozen_parameters_count_as_they_are() -> None:
    model = GPT()
    kept = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS).peak
    again = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS, activations="full").peak
    assert again.activation_bytes < kept.activation_bytes / 4
    model.requires_grad_(False)
    with pytest.raises(SpecError, match="no parameter of the model has requires_grad"):
        dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS)
    model.head.requires_grad_(True)
    frozen = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS, activations="full").peak
    assert frozen.optimizer_bytes == 2 * 49 * 32 * 4 and frozen.gradient_bytes <= 49 * 32 * 4
    assert frozen.parameter_bytes == again.parameter_bytes and frozen.activation_bytes < again.activation_bytes
    assert "mixed_ranks" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, pytest.param({"pp": 2}, marks=pytest.mark.thorough)])
def test_equal_blocks_that_are_left_out_count_as_if_they_ran(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def peaks() -> list[int]:
        found = dry_run(GPT(layers=14), axes, example_inputs=TOKENS, target=TOKENS, loss=token_loss)
        return [row.total_bytes for row in found.rows]

    reckoned = peaks()
    monkeypatch.setattr(repeated, "_FEWEST", 99)
    assert reckoned == pytest.approx(peaks(), rel=0.02)


@pytest.mark.thorough
def test_places_that_are_alike_are_as_if_each_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result equals that of trying every place and running all microbatches of 1F1B."""

    def found() -> list[Any]:
        rows = dry_run(
            GPT(layers=12), {"pp": 6}, example_inputs=TOKENS, pp=[f"h.{2 * stage}" for stage in range(1, 6)]
        ).rows
        return [(row.ranks, row.stages, row.num_parameters, row.largest, *row.parts_bytes) for row in rows]

    reckoned = found()
    monkeypatch.setattr(_Layout, "_places_alike", lambda self, num_ranks: [[place] for place in range(num_ranks)])
    monkeypatch.setattr(_Layout, "_played_microbatches", lambda self, place: self.num_microbatches)
    for mine, tried in zip(reckoned, found(), strict=True):
        assert mine[:4] == tried[:4] and mine[4:] == pytest.approx(tried[4:], rel=0.02, abs=600)


class Repeating(nn.Module):
    """Keeps ``times`` copies of its output, and has a number of its own."""

    def __init__(self, number: int, times: int) -> None:
        super().__init__()
        self.layer, self.number, self.times = nn.Linear(16, 16), number, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.cat([self.layer(x)] * self.times, -1).exp()
        return x + kept[..., :16] * kept.sum(-1, keepdim=True)


@pytest.mark.slow
def test_blocks_that_differ_in_an_int_are_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (Repeating(number, 40 if number > 2 else 1) for number in range(12))
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(16, 16))

    def peak() -> int:
        return dry_run(model, {"dp_shard": 2}, example_inputs=torch.zeros(32, 16)).peak.total_bytes

    left_out: list[str] = []
    skipped = repeated._Skipped.__init__
    monkeypatch.setattr(
        repeated._Skipped, "__init__", lambda self, name, *rest: left_out.append(name) or skipped(self, name, *rest)
    )
    said = peak()
    assert left_out, "some of those that differ in their number alone"
    monkeypatch.setattr(repeated, "_FEWEST", 99)
    assert said == pytest.approx(peak(), rel=0.02)


def test_blocks_that_nothing_can_stand_for_all_run() -> None:
    """They return more than one tensor."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x).relu(), more + 1

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Pair() for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more = x
            for layer in self.layers:
                x, more = layer(x, more)
            return x * more

    row = dry_run(Pairs(), {"dp_shard": 2}, example_inputs=torch.zeros(64, 8)).peak
    assert row.activation_bytes > 8 * 64 * 8 * 4 and row.num_parameters == 8 * 36


@pytest.mark.slow
def test_what_a_model_on_the_meta_device_keeps_beside_its_buffers_is_found() -> None:
    """Also under tp, where its large blocks have no values: the plan is the same as for a small model."""
    with torch.device("meta"):
        small = Llama3(32, 1, 4, 2, 64, length=16, vocabulary=96)
        large = Llama3(2048, 1, 16, 8, 8192, length=16)
    said = [dry_run(model, {"tp": 2}, example_inputs=TOKENS) for model in (small, large)]
    assert all(found.plan is not None for found in said)
    proved, shaped = (found.plan for found in said)
    assert proved.roles == shaped.roles and len(shaped.roles) == 2 + 7
    assert proved.checked == "proved" and "shapes" in shaped.checked
    whole = sum(parameter.nbytes for parameter in large.parameters())
    assert said[1].peak.parameter_bytes == pytest.approx(whole / 2, rel=0.01)
    with fake_ranks(0, 2), pytest.raises(SpecError, match="plan is unproved"):
        parallelize(large, make_mesh(tp=2, device_type="cpu"), example_inputs=TOKENS, tp=shaped)


def test_the_model_is_left_as_it_was() -> None:
    """Copies of the model run on tensors without memory; they share objects and caches with it."""

    class Notes:
        last: Any = None

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.notes, self.layer = Notes(), nn.Linear(8, 8)

        @functools.lru_cache(maxsize=4)  # noqa: B019 - as models do
        def scale(self, size: int) -> torch.Tensor:
            return torch.ones(size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.notes.last = self.layer(x) * self.scale(8)
            return self.notes.last

    model, x = Noting(), torch.randn(2, 8)
    expected, state = model(x), torch.random.get_rng_state()
    Noting.scale.cache_clear()
    model.notes.last = None
    dry_run(model, {"dp_shard": 2}, example_inputs=x)
    assert model.notes.last is None and Noting.scale.cache_info().currsize == 0
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(model(x), expected)


class Centering(nn.Module):
    """A loss that keeps an average of the outputs, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.calls, self.seen = 0, list[torch.Tensor]()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(output.detach())
        loss = (output - self.center - target).square().mean()
        if self.calls % 2:
            self.center.lerp_(output.detach().mean(0), 0.1)
        self.center = self.center + float(output.detach().mean()) * 0 if LOOKS[0] else self.center * 0.9
        return loss


LOOKS = [False]


@pytest.mark.parametrize("looks", [False, True])
def test_the_loss_is_left_as_it_was(looks: bool) -> None:
    """Also if the loss reads values, and therefore runs with some."""
    LOOKS[0] = looks
    loss, model = Centering(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    center = loss.center
    for given in (loss, lambda output, target: loss(output, target) * 2):
        dry_run(model, {"dp_shard": 2}, example_inputs=torch.randn(3, 8), target=torch.zeros(3, 8), loss=given)
        assert loss.center is center and not center.any() and type(center) is torch.Tensor
        assert not loss.calls and not loss.seen


def test_what_parallelize_refuses_in_parts_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), nn.Linear(8, 8))
    with pytest.raises(SpecError, match="0 renormalizes its weight"):
        dry_run(model, {"dp_shard": 2}, example_inputs=torch.zeros(2, 4, dtype=torch.long))

    class Normalizing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.div_(self.weight.detach().norm())
            return super().forward(x)

    with pytest.raises(SpecError, match=r"forward writes into its parameter 0\.weight"):
        dry_run(nn.Sequential(Normalizing(8, 8)), {"dp_shard": 2}, example_inputs=torch.zeros(2, 8))


@pytest.mark.thorough
def test_llama_3_of_8_billion_on_8_gpus() -> None:
    """The peak is between 80 and 92 GiB.

    50 GiB are the matrix products that "selective" keeps of 2 x 8192 tokens. 23 GiB are logits over 128,256 classes, in
    bf16 and float32, with their gradients. 11 GiB are weights and the optimizer's state. torchtitan reports 82.4 GiB,
    reserved; docs/parallel.md explains the difference.
    """
    with torch.device("meta"):
        model, tokens = Llama3(4096, 32, 32, 8, 14336, length=8192), torch.empty(2, 8192, dtype=torch.long)
    options: dict[str, Any] = {"precision": "bf16", "activations": "selective", "loss": token_loss}
    row = dry_run(model, {"dp_shard": 8}, example_inputs=tokens, target=tokens, **options).peak
    assert 80 < row.total_bytes / 2**30 < 92
    assert 45 < row.activation_bytes / 2**30 < 55 and row.phase == "backward"


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_llama_3_of_405_billion_on_512_gpus() -> None:
    with torch.device("meta"):
        model, tokens = Llama3(16384, 126, 128, 8, 53248, length=8192), torch.empty(2, 8192, dtype=torch.long)
    axes, options = {"pp": 8, "dp_shard": 8, "tp": 8}, {"precision": "bf16", "activations": "full", "loss": token_loss}
    found = dry_run(model, axes, example_inputs=tokens, target=tokens, **options)
    assert sum(row.num_parameters for row in found.rows) == pytest.approx(405e9 / 64, rel=0.02)
    assert found.plan is not None and len(found.plan.roles) == 2 + 126 * 7
    assert all(row.total_bytes / 2**30 < 200 for row in found.rows)


def test_a_model_that_looks_at_values_is_tried_with_them() -> None:
    model = Experts()
    row = dry_run(model, {"dp_shard": 1}, example_inputs=torch.randn(2, 6, 8)).peak
    assert row.parameter_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert row.activation_bytes > 0
    with pytest.raises(SpecError, match="reads values"):
        dry_run(model.to("meta"), {"dp_shard": 1}, example_inputs=torch.randn(2, 6, 8))


def test_a_loss_without_its_target_is_told() -> None:
    with pytest.raises(SpecError, match="there is none: pass it"):
        dry_run(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, loss=nn.CrossEntropyLoss())


@pytest.mark.thorough
def test_stages_of_parts_of_the_sequence_and_of_the_classes() -> None:
    """One plan cuts both; the weights are cut as without them."""
    axes, options = {"pp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}
    found = dry_run(Llama(layers=2), axes, example_inputs=TOKENS, **options)
    usual = dry_run(Llama(layers=2), axes, example_inputs=TOKENS)
    assert found.plan is not None and found.plan.sequence is not None and found.plan.shard_head
    assert [row.parameter_bytes for row in found.rows] == [row.parameter_bytes for row in usual.rows]


def test_what_tp_leaves_whole_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert "most of it" not in str(dry_run(model, {"tp": 2}, example_inputs=torch.zeros(2, 8))).lower()
    told = str(dry_run(model, {"tp": 3}, example_inputs=torch.zeros(2, 8))).splitlines()[-1]
    assert told.startswith("tensor parallel over 3 ranks: ") and "whole on every rank: 0 (" in told
    assert told.endswith("16 outputs are not divisible by tp=3)")


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(SpecError, match="dp_shard=-1: a dry run needs the size of every axis"):
        dry_run(GPT(), {"dp_shard": -1}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="unknown mesh axis"):
        dry_run(GPT(), {"dq": 2}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="stages"):
        dry_run(nn.Linear(4, 4), {"pp": 3}, example_inputs=torch.zeros(2, 4))


def test_options_of_a_mesh_without_the_axis_are_refused_as_parallelize_does() -> None:
    with pytest.raises(SpecError, match="no pp axis"):
        dry_run(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, pp=["blocks.1"])
    with pytest.raises(SpecError, match="a tp axis"):
        dry_run(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, sequence_parallel=True)
    with pytest.raises(SpecError, match="cp=2: context parallelism is not supported yet"):
        dry_run(GPT(), {"cp": 2}, example_inputs=TOKENS)


@pytest.mark.slow  # needs a session of its own
def test_rank_without_a_group_has_dry_runs(session_of_one: Session) -> None:
    [told] = session_of_one.run_cell(_DRY_RUN).values.values()
    assert told == [4, 1, False]


@pytest.fixture
def session_of_one() -> Iterator[Session]:
    with Session.start(ranks=1, device="cpu", init=False) as started:
        yield started


_DRY_RUN = """
import torch, torch.distributed as dist
from detrain_nb import parallel as par
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
found = par.dry_run(model, {"pp": 2, "dp_shard": 2}, example_inputs=torch.zeros(2, 4))
ranks = sum(len(row.ranks) for row in found.rows)
is_left = dist.is_initialized()
dist.init_process_group()
[ranks, dist.get_world_size(), is_left]
"""


@pytest.mark.parametrize(
    "axes", [{"pp": 2}, *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("dp_shard", "tp"))], ids=str
)
def test_torch_keeps_no_more_of_each_further_call(axes: dict[str, int]) -> None:
    sizes = []
    for _ in range(3):
        dry_run(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), axes, example_inputs=torch.ones(2, 8))
        sizes.append(len(FakeTensorMode.cache))
    assert sizes[1] == sizes[2]
