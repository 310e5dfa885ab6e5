"""Batches through stages on real ranks, compared with the whole model: losses, gradients, outputs, in any order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detrain_nb import Session
from detrain_nb import parallel as par
from detrain_nb.errors import CellInterrupted, CellTimeout, RankError, SessionError, SpecError
from detrain_nb.parallel import SCHEDULES, PipelineStages, split, stages_of_rank
from detrain_nb.session.state.cell_observer import CellObserver

from .models import GPT
from .test_splitter import TOKENS

CLOSE = 2e-6  # relative; 5e-7 was measured


@pytest.fixture(scope="module")
def session(two_ranks: Session) -> Session:
    two_ranks.run_cell("import on_ranks", timeout_s=60)
    return two_ranks


@pytest.mark.parametrize(
    "schedule, is_tied",
    [
        *[pytest.param(schedule, True, marks=[] if schedule == "1F1B" else pytest.mark.slow) for schedule in SCHEDULES],
        *[pytest.param(schedule, False, marks=pytest.mark.slow) for schedule in ("1F1B", "Interleaved1F1B")],
    ],
)
def test_every_schedule_gives_the_whole_models_losses_gradients_and_outputs(
    session: Session, schedule: str, is_tied: bool
) -> None:
    num_stages = 2 if schedule in ("GPipe", "1F1B") else 4
    result = session.run_cell(f"on_ranks.train_gpt({schedule!r}, {num_stages}, is_tied={is_tied})")
    assert sorted(stage for found in result.values.values() for stage in found["stages"]) == list(range(num_stages))
    for found in result.values.values():
        assert found["gradients"] < CLOSE and found["added up"] < CLOSE
        assert found["evaluation left gradients"] is True
        if num_stages - 1 in found["stages"]:
            assert max(found["losses"]) < 1e-6 and found["prediction"] < 1e-6
        else:
            assert found["nothing elsewhere"] is True


@pytest.mark.slow
def test_page_of_the_docs_does_what_it_says(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples in docs/parallel.md run, and print what the page says."""
    page = (Path(__file__).parents[2] / "docs/parallel.md").read_text(encoding="utf-8")
    first, second, third, fourth, described, viewed = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    result = session.run_cell(first.replace("%%distributed\n", "") + "loss is None, float(loss or 0)")
    assert result.values[0] == (True, 0.0)
    assert result.values[1][0] is False and 0.5 < result.values[1][1] < 3
    shown = session.run_cell(second, ranks=[0])
    assert "laptop" in session.log.text(shown.cell, 0) and "equal numbers of units:" in session.log.text(shown.cell, 0)
    planned = session.run_cell(third, ranks=[0])
    assert "colwise" in session.log.text(planned.cell, 0)
    namespace: dict[str, Any] = {"torch": torch, "nn": torch.nn, "par": par}
    exec(fourth, namespace)
    assert "512 ranks" in capsys.readouterr().out
    session.run_cell(described.removeprefix("%%rank 0\n"), ranks=[0])
    exec(viewed, {"session": session})
    session.run_cell("del mesh, pipeline")  # messages in other tests list the names that hold groups


def test_other_cuts_on_a_rank_are_told(session: Session) -> None:
    """Both cuts would run, and train a model that the user has not written."""
    with pytest.raises(RankError, match=r"cut at h\.2 on rank 1, but at h\.1 on rank 0: take"):
        session.run_cell(
            "from detrain_nb import parallel as par\n"
            "par.PipelineStages(par.split(on_ranks.GPT(layers=3), on_ranks.tokens(2, 1), at=[f'h.{1 + rank}']))"
        )


def test_loss_that_is_a_sum(session: Session) -> None:
    result = session.run_cell("on_ranks.train_gpt('1F1B', 2, is_tied=False, reduction='sum')")
    assert all(found["gradients"] < CLOSE and found["added up"] < CLOSE for found in result.values.values())


def test_optimizer_keeps_tied_parameters_equal(session: Session) -> None:
    """AdamW takes full steps of 1e-3 even for gradients that are almost zero; hence the tolerance."""
    assert max(session.run_cell("on_ranks.optimize_gpt()").values.values()) < 5e-5


def test_tied_parameters_begin_equal(session: Session) -> None:
    assert session.run_cell("on_ranks.start_apart(rank)").values == {0: True, 1: True}


@pytest.mark.parametrize("rows", [6, 8])
def test_keywords_and_what_is_not_of_the_batch_reach_every_stage(session: Session, rows: int) -> None:
    """With 8 rows the mask has the size of the batch; the example shows that it is not part of it."""
    assert max(session.run_cell(f"on_ranks.use_masks({rows})", timeout_s=30).values.values()) < CLOSE


def test_stage_without_parameters_is_told_where_it_is_made(session: Session) -> None:
    """The automatic split makes no such stage if there is another split."""
    assert session.run_cell("on_ranks.stages_without(None)").values == {0: [], 1: []}
    first, second = session.run_cell("on_ranks.stages_without(['3'])").values.values()
    assert not first and [each.partition(", but")[0] for each in second] == ["stage 1 (from 3 on) has no parameters"]
    first, second = session.run_cell("on_ranks.stages_without(['2'], frozen='0')").values.values()
    assert not second and first[0].startswith("stage 0 (from the start on) has no trainable parameters, but")


def test_batch_norm_counts_each_microbatch_once(session: Session) -> None:
    counted, difference = session.run_cell("on_ranks.count_batches()").values[1]
    assert counted == 8 and difference < 1e-6


def test_model_that_looks_at_values_takes_other_batches(session: Session) -> None:
    assert max(session.run_cell("on_ranks.use_experts()").values.values()) < CLOSE


def test_batches_that_differ_in_a_number_have_their_own_shapes(session: Session) -> None:
    assert session.run_cell("on_ranks.keep_some()").values == {0: [None] * 3, 1: [(4, 6, 8), (4, 3, 8), (4, 6, 8)]}


def test_shape_that_cannot_be_foreseen_is_told_before_it_is_sent(session: Session) -> None:
    with pytest.raises(
        RankError, match=r"stage 0 returned .*\(1, 3, 8\).* was expected: .* use batches like the example"
    ):
        session.run_cell("on_ranks.look_at_large_values()")


def test_tensor_without_values_is_told_before_it_is_sent(session: Session) -> None:
    """torch would count it as sent, and the next stage would wait."""
    with pytest.raises(RankError, match=r"stage 0 returned a fake tensor, which has no values to send"):
        session.run_cell("on_ranks.send_fake()")


def test_caches_of_a_models_code_hold_what_its_batches_computed(session: Session) -> None:
    assert max(session.run_cell("on_ranks.use_caches()", timeout_s=20).values.values()) < CLOSE


def test_autocast_may_change_from_batch_to_batch(session: Session) -> None:
    assert all(max(found) < 1e-6 for found in session.run_cell("on_ranks.change_autocast()").values.values())


@pytest.mark.parametrize("kind", ["function", "classes", "nothing counts in one", "no rows"])
def test_losses_count_as_over_the_whole_batch(session: Session, kind: str) -> None:
    for gradients, loss in session.run_cell(f"on_ranks.weigh({kind!r})").values.values():
        assert gradients < CLOSE and loss < 1e-5


def test_frozen_tied_parameter_stays(session: Session) -> None:
    assert session.run_cell("on_ranks.freeze_tied()").values == {0: 0.0, 1: 0.0}


def test_mode_of_a_layer_is_the_users(session: Session) -> None:
    assert session.run_cell("on_ranks.keep_modes()").values == {0: True, 1: True}


def test_step_after_one_that_failed_is_whole(session: Session) -> None:
    assert max(session.run_cell("on_ranks.fail_once()").values.values()) < CLOSE


# ---- what crosses a boundary

LINEARS = ("linear",) * 4


@pytest.mark.parametrize(
    "kind, schedule",
    [
        pytest.param(kind, schedule, marks=[] if kind == "transpose" or schedule == "1F1B" else pytest.mark.slow)
        for kind in ("transpose", "permute", "expand")
        for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    ],
)
def test_views_and_gradients_in_other_layouts_cross_a_boundary(session: Session, schedule: str, kind: str) -> None:
    """A stage's output is not contiguous, and neither is the gradient of its input."""
    kinds = (kind,) * (2 if schedule == "1F1B" else 4)
    found = session.run_cell(f"on_ranks.train_at_edges(on_ranks.turns(*{kinds}), {schedule!r})", timeout_s=30).values
    assert sorted(name[0] for names, _ in found.values() for name in names if "weight" in name) == list(
        "0123"[: len(kinds)]
    )
    assert max(apart for _, apart in found.values()) < CLOSE


@pytest.mark.parametrize(
    "kinds, schedule",
    [
        (("linear", "view"), "1F1B"),
        (("linear", "view", "view", "linear"), "ZBVZeroBubble"),
        (("linear", "view", "linear", "view"), "ZBVZeroBubble"),
        (("linear", "view", "linear", "view"), "InterleavedZeroBubble"),
    ],
)
def test_stage_may_be_a_view_alone(session: Session, kinds: tuple[str, ...], schedule: str) -> None:
    """The stage has no parameters and returns a view of its input.

    It may be the last stage, or both stages of a rank.
    """
    found = session.run_cell(f"on_ranks.train_at_edges(on_ranks.turns(*{kinds}), {schedule!r})", timeout_s=30).values
    trained = sorted(name for names, _ in found.values() for name in names if "weight" in name)
    assert trained == [f"{index}.linear.weight" for index, kind in enumerate(kinds) if kind == "linear"]
    assert max(apart for _, apart in found.values()) < CLOSE


@pytest.mark.parametrize(
    "schedule, num_stages, num_frozen",
    [("1F1B", 2, 1), ("ZBVZeroBubble", 4, 1), ("ZBVZeroBubble", 4, 3), ("Interleaved1F1B", 4, 3), ("DualPipeV", 4, 1)],
)
def test_first_stages_may_be_frozen(session: Session, schedule: str, num_stages: int, num_frozen: int) -> None:
    code = f"on_ranks.train_at_edges(on_ranks.turns(*{LINEARS[:num_stages]}), {schedule!r}, num_frozen={num_frozen})"
    found = session.run_cell(code, timeout_s=30).values
    trained = sorted(name for names, _ in found.values() for name in names if "weight" in name)
    assert trained == [f"{index}.linear.weight" for index in range(num_frozen, num_stages)]
    assert max(apart for _, apart in found.values()) < CLOSE


def test_stage_that_begins_with_dropout_evaluates(session: Session) -> None:
    """In evaluation dropout returns its input, as an identity does."""
    assert max(session.run_cell("on_ranks.evaluate_at_dropout()", timeout_s=30).values.values()) < 1e-6


def test_dropout_of_stages_is_drawn_as_of_the_whole_model_in_microbatches(session: Session) -> None:
    """Stages that run in sequence in one process draw what the whole model draws, equal to the bit."""
    found = session.run_cell("on_ranks.drop()", timeout_s=30).values
    assert found[0] == found[1] == (0.0, 0.0, True)


# ---- one rank fails, and the other waits for it

FAILED = "rank 1 failed with ValueError: no loss today"


class Watcher(CellObserver):
    """Records the reports of waiting, and interrupts the cell once a rank has failed."""

    def __init__(self) -> None:
        self.reports: list[str] = []

    def waiting(self, text: str) -> None:
        self.reports += [text] if text else []
        if "failed" in text:
            raise KeyboardInterrupt


@pytest.fixture
def failing(session: Session) -> Iterator[Session]:
    """Yield a session with ``stages`` whose loss fails on rank 1.

    After the test other stages, with new groups, must work as before.
    """
    hang_s, session.settings.hang_s = session.settings.hang_s, 0.5
    try:
        session.run_cell("stages = on_ranks.fail_on_the_last()")
        yield session
    finally:
        session.settings.hang_s = hang_s  # other test modules share these ranks
    assert max(session.run_cell("on_ranks.use_masks(6)", timeout_s=30).values.values()) < CLOSE


def test_error_of_a_rank_is_told_where_the_other_waits_for_it_in_vain(failing: Session) -> None:
    with pytest.raises(
        CellTimeout, match=rf"did not end within 4 s on rank 0 \(line 1\); {FAILED}: rank 0 waited"
    ) as caught:
        failing.run_cell("stages.train_step(on_ranks.draw(8, 8), on_ranks.draw(8, 8))", timeout_s=4)
    assert "rank 0 waited in step (line 1): freed" in str(caught.value)
    assert str(caught.value).endswith("run the cell that creates stages again")
    with pytest.raises(
        RankError, match="stages uses a process group that no longer exists: run the cell that creates stages again"
    ):
        failing.run_cell("stages.predict(on_ranks.draw(8, 8))", timeout_s=10)


def test_error_of_a_rank_is_shown_when_the_wait_for_it_is_stopped(failing: Session) -> None:
    """Before the interrupt, the report names the waiting rank and the failed one."""
    watcher = Watcher()
    with pytest.raises(CellInterrupted) as caught:
        failing.run_cell("stages.train_step(on_ranks.draw(8, 8), on_ranks.draw(8, 8))", observer=watcher, timeout_s=30)
    assert watcher.reports[-1].startswith(FAILED)
    assert caught.value.errors[0].interrupted and not caught.value.errors[1].interrupted
    assert caught.value.errors[1].summary == "ValueError: no loss today"
    shown = "\n".join(caught.value._render_traceback_())
    told = r"--- rank 1 on .*in loss\n  \| +raise ValueError.*\n  \| ValueError: no loss today"
    assert re.search(told, shown, re.DOTALL)
    assert not any("pipelining" in line for line in caught.value.errors[1].traceback)
    assert shown.startswith("--- rank 1 on "), "first who failed by itself, then who was interrupted"


def test_error_of_a_rank_ends_the_cell_when_the_other_can_only_wait_for_it(
    failing: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing.settings.limits, "message_s", 2.0)
    with pytest.raises(RankError, match=r"^rank 1 on [^:]+: ValueError: no loss today\nrank 0 on ") as caught:
        failing.run_cell("stages.train_step(on_ranks.draw(8, 8), on_ranks.draw(8, 8))", timeout_s=30)
    assert not isinstance(caught.value, CellInterrupted)
    assert caught.value.note.startswith("rank 0 waited in step (line 1): freed\n")


@pytest.mark.parametrize(
    "schedule, num_stages, awaited",
    [
        pytest.param("1F1B", 2, "stage 0 waited for the gradient of microbatch 1 from stage 1", marks=pytest.mark.slow),
        pytest.param(
            "Interleaved1F1B",
            4,
            "stage 2 waited for the gradient of microbatch 1 from stage 3",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_is_waited_for_in_vain_has_a_name(session: Session, schedule: str, num_stages: int, awaited: str) -> None:
    """Without an interrupt the wait ends with the group's timeout."""
    told = session.run_cell(f"on_ranks.wait_in_vain({schedule!r}, {num_stages}, 1)", timeout_s=100).values
    assert told[1] == "ValueError: no loss today"
    assert re.match(rf"RuntimeError: {awaited} on rank 1 for \d+\.\d s, without success: that rank failed", told[0])


SCRIPT = """
import sys
import torch.distributed as dist
sys.path.insert(0, {folder!r})
import on_ranks
dist.init_process_group("gloo")
stages = on_ranks.fail_on_the_last()
stages.train_step(on_ranks.draw(8, 8), on_ranks.draw(8, 8))
"""


@pytest.mark.slow
def test_error_of_a_rank_ends_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert ended.returncode != 0
    own = [line for line in ended.stderr.splitlines() if line.startswith("[rank1]:")]
    assert own[-1] == "[rank1]: ValueError: no loss today"
    assert not any("[rank0]: ValueError" in line for line in ended.stderr.splitlines())


# ---- batches and pipelines of other sizes


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", pytest.param("InterleavedZeroBubble", marks=pytest.mark.slow)])
def test_last_batch_may_be_any(session: Session, schedule: str) -> None:
    for losses, gradients in session.run_cell(f"on_ranks.end_in_any_batch({schedule!r})", timeout_s=60).values.values():
        assert max(losses) < 1e-6 and gradients < CLOSE


@pytest.mark.parametrize(
    "code, message",
    [
        ("schedule='2F2B'", r"unknown schedule '2F2B': choose one of GPipe, 1F1B"),
        ("num_microbatches=1", "1F1B needs at least as many microbatches as stages: 1 are fewer than 2"),
        (
            "schedule='DualPipeV', num_microbatches=3",
            "DualPipeV needs at least as many microbatches as stages: 3 are fewer than 4",
        ),
        ("num_microbatches=-1", "-1 microbatches: must be at least 1"),
        ("schedule='zbvzerobubble'", "ZBVZeroBubble has two stages per rank: 2 ranks need 4 stages, not 2"),
    ],
)
def test_pipeline_that_cannot_be_is_told(session: Session, code: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        session.run_cell(
            "from on_ranks import *\n"
            f"found = par.split(GPT(layers=1), tokens(2, 1), {4 if 'Dual' in code else 2})\n"
            f"par.PipelineStages(found, loss=TokenLoss(), device='cpu', {code})"
        )


@pytest.mark.parametrize(
    "code, message",
    [
        (
            "stages.train_step(tokens(4, 1), tokens(4, 2))",
            "there is no loss to train with: pass loss=, a function of the output and the target, to parallelize",
        ),
        (
            "stages.evaluate(tokens(4, 1), tokens(4, 2))",
            "there is no loss to evaluate: pass loss=, .* for a plain model.*, or call predict",
        ),
        ("stages.predict(torch.tensor(1))", "a batch without rows, or without a tensor"),
    ],
)
def test_step_that_cannot_be_is_told(session: Session, code: str, message: str) -> None:
    made = "stages = par.PipelineStages(par.split(GPT(layers=1), tokens(2, 1), 2), device='cpu')"
    with pytest.raises(RankError, match=message):
        session.run_cell(f"from on_ranks import *\n{made}\n{code}")


def test_training_without_gradients_is_told(session: Session) -> None:
    made = "stages = par.PipelineStages(par.split(GPT(layers=1), tokens(2, 1), 2), loss=TokenLoss(), device='cpu')"
    with pytest.raises(
        RankError, match=r"train_step was called under torch.no_grad\(\): call it outside, or call evaluate"
    ):
        session.run_cell(
            f"from on_ranks import *\n{made}\nwith torch.no_grad(): stages.train_step(tokens(4, 1), tokens(4, 2))"
        )


@pytest.mark.parametrize(
    "code, message",
    [
        pytest.param(
            "loss = lambda output, target: F.mse_loss(output.detach(), target)",
            "element 0 of tensors does not require grad",
            marks=pytest.mark.slow,
        ),
        ("model.requires_grad_(False)", "does not require grad: all parameters of the model are frozen"),
    ],
)
def test_what_has_nothing_to_train_is_told_as_torch_does(
    failing: Session, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing.settings.limits, "message_s", 2.0)
    with pytest.raises(RankError, match=message):
        failing.run_cell(
            "from on_ranks import *\n"
            f"model, loss = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), F.mse_loss\n{code}\n"
            "stages = par.PipelineStages(par.split(model, draw(2, 8), 2), loss=loss, device='cpu')\n"
            "stages.train_step(draw(4, 8), draw(4, 8))"
        )


def test_batch_that_would_be_cut_along_time_is_refused(session: Session) -> None:
    with pytest.raises(
        RankError, match=r"0\.self_attn has batch_first=False, so it takes the first dimension, .* for time"
    ):
        session.run_cell(
            "from on_ranks import *\n"
            "model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))\n"
            "par.PipelineStages(par.split(model, draw(6, 2, 8), 2), device='cpu')"
        )


def test_pipeline_without_ranks_is_told() -> None:
    with pytest.raises(SessionError, match="a pipeline needs a process group: start the session with one"):
        PipelineStages(split(GPT(), TOKENS, 2))


@pytest.mark.parametrize(
    "schedule, num_ranks, num_stages, expected",
    [
        ("1F1B", 3, 3, [(0,), (1,), (2,)]),
        ("Interleaved1F1B", 2, 6, [(0, 2, 4), (1, 3, 5)]),
        ("ZBVZeroBubble", 3, 6, [(0, 5), (1, 4), (2, 3)]),
        ("dualpipev", 2, 4, [(0, 3), (1, 2)]),
    ],
)
def test_stages_are_laid_on_ranks(
    schedule: str, num_ranks: int, num_stages: int, expected: list[tuple[int, ...]]
) -> None:
    found = [
        stages_of_rank(schedule, rank=rank, num_ranks=num_ranks, num_stages=num_stages) for rank in range(num_ranks)
    ]
    assert found == expected


@pytest.mark.parametrize(
    "schedule, num_ranks, num_stages, message",
    [
        (
            "GPipe",
            2,
            4,
            "GPipe has one stage per rank, but there are 4 stages and 2 ranks: use Interleaved1F1B",
        ),
        ("LoopedBFS", 2, 5, "5 stages are not divisible by 2 ranks: LoopedBFS needs equally many"),
        ("DualPipeV", 2, 6, "DualPipeV has two stages per rank: 2 ranks need 4 stages, not 6"),
    ],
)
def test_stages_that_do_not_fit_the_ranks_are_told(
    schedule: str, num_ranks: int, num_stages: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        stages_of_rank(schedule, rank=0, num_ranks=num_ranks, num_stages=num_stages)
