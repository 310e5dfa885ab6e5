"""Checkpoints on real ranks and in one process: a load restores all that was saved, in any layout, or nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler as schedules

from detrain_nb import Session, training
from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.storage import Location, locate
from detrain_nb.training import catalog, checkpoint, digests, reading, safetensors_export, tensor_files
from detrain_nb.training.plain import from_json, to_json
from detrain_nb.training.randomness import random_state, set_random_state
from detrain_nb.training.ranks import Ranks
from detrain_nb.training.state import ModelState, OptimizerState
from detrain_nb.training.tensor_index import TensorIndex
from detrain_nb.transport.ssh import SshConnection, SshTarget

from ..testbed.testbed import Testbed
from . import checkpoint_ranks as on_ranks
from .damage import changed, flip, pieces_of, the_file

HERE = Path(__file__).parent
MIB = 1 << 20
CLOSE = 1e-6  # relative tolerance of a loss
CLOSE_STEPS = 1e-4  # relative tolerance after steps in other layouts, for losses and tensors; 2e-5 was measured
LAYOUTS = ["pp", "fsdp", "ddp", "tp", "zbv"]


@pytest.fixture(scope="module")
def session(two_ranks: Session) -> Session:
    two_ranks.run_cell("import checkpoint_ranks as on_ranks", timeout_s=60)
    return two_ranks


@pytest.fixture(scope="module")
def four_ranks(four_ranks: Session) -> Session:
    four_ranks.run_cell("import checkpoint_ranks as on_ranks", timeout_s=60)
    return four_ranks


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Return a checkpoint of the whole model in one process, and the losses of the steps after it."""
    url = str(tmp_path_factory.mktemp("one"))
    return url, on_ranks.train_and_save("one", url)


def read_all(url: str, *, is_tied: bool = True) -> dict[str, Tensor]:
    """Return the tensors of the model and the optimizer in a checkpoint, as one process loads them."""
    run = on_ranks.Run("one", seed=5, is_tied=is_tied)
    run.load(url)
    found = dict(run.model.state_dict())
    for number, state in run.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return found


def is_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def slow_but(fast: str) -> list[Any]:
    return [pytest.param(layout, marks=[] if layout == fast else pytest.mark.slow) for layout in LAYOUTS]


# ---- layouts


@pytest.mark.parametrize("layout", slow_but("pp"))
def test_saved_by_one_process_loaded_in_a_layout_and_back(
    session: Session, layout: str, of_one: tuple[str, list[float]], tmp_path: Path
) -> None:
    go_there_and_back(session, layout, of_one, str(tmp_path))


@pytest.mark.slow
def test_saved_by_one_process_loaded_by_stages_of_shards_on_four_ranks_and_back(
    four_ranks: Session, tmp_path: Path
) -> None:
    """The head is not tied, because the gradients of tied parameters are summed before they are sharded."""
    url = str(tmp_path / "one")
    expected = on_ranks.train_and_save("one", url, is_tied=False)
    go_there_and_back(four_ranks, "pp x fsdp", (url, expected), str(tmp_path / "back"), is_tied=False)


def go_there_and_back(
    session: Session, layout: str, of_one: tuple[str, list[float]], back: str, *, is_tied: bool = True
) -> None:
    """Check that the losses are the whole model's, and that the ranks save, bit by bit, what they have loaded."""
    url, expected = of_one
    result = session.run_cell(f"on_ranks.load_and_train({layout!r}, {url!r}, again={back!r}, is_tied={is_tied})")
    for losses, notes in result.values.values():
        assert losses == pytest.approx(expected, rel=CLOSE, abs=0)
        assert notes[0].startswith(
            f"saved by 1 ranks, loaded by {len(result.values)}: random number generators were reseeded"
        )
    assert is_equal(read_all(url, is_tied=is_tied), read_all(back, is_tied=is_tied))
    assert on_ranks.load_and_train("one", back, is_tied=is_tied)[0] == expected


@pytest.mark.parametrize(
    "layout, is_async",
    [
        ("fsdp", True),
        *(pytest.param(layout, layout == "zbv", marks=pytest.mark.slow) for layout in ("pp", "ddp", "tp", "zbv")),
    ],
)
def test_resumed_losses_are_those_of_the_uninterrupted_run_bit_by_bit(
    session: Session, layout: str, is_async: bool, tmp_path: Path
) -> None:
    """This includes dropout, a schedule of the learning rate, and training that continues during the save."""
    url = str(tmp_path)
    saved = session.run_cell(f"on_ranks.train_and_save({layout!r}, {url!r}, dropout=0.2, is_async={is_async})").values
    loaded = session.run_cell(f"on_ranks.load_and_train({layout!r}, {url!r}, dropout=0.2)").values
    assert loaded == {rank: (losses, ()) for rank, losses in saved.items()}
    other = session.run_cell(f"on_ranks.load_and_train({layout!r}, {url!r}, dropout=0.3)").values
    assert other[0][0] != saved[0]


@pytest.mark.slow
def test_saved_by_stages_loaded_as_shards_and_back(session: Session, tmp_path: Path) -> None:
    stages, shards, again = (str(tmp_path / name) for name in ("stages", "shards", "again"))
    expected = session.run_cell(f"on_ranks.train_and_save('pp', {stages!r})").values[0]
    losses, _ = session.run_cell(f"on_ranks.load_and_train('fsdp', {stages!r}, again={shards!r})").values[0]
    assert losses == pytest.approx(expected, rel=CLOSE, abs=0)
    losses, _ = session.run_cell(f"on_ranks.load_and_train('pp', {shards!r}, again={again!r})").values[0]
    assert losses == expected
    assert is_equal(read_all(stages), read_all(again))


@pytest.mark.slow
def test_saved_by_one_process_loaded_by_shards_of_parts_of_layers_on_four_ranks_and_back(
    four_ranks: Session, of_one: tuple[str, list[float]], tmp_path: Path
) -> None:
    go_there_and_back(four_ranks, "tp x fsdp", of_one, str(tmp_path))


@pytest.mark.slow
def test_saved_by_stages_of_shards_on_four_ranks_loaded_by_two(
    four_ranks: Session, session: Session, tmp_path: Path
) -> None:
    url = str(tmp_path)
    saving = f"on_ranks.train_and_save('pp x fsdp', {url!r}, is_async=True, is_tied=False)"
    expected = four_ranks.run_cell(saving).values[0]
    for layout in ("tp", "pp"):
        loading = f"on_ranks.load_and_train({layout!r}, {url!r}, is_tied=False)"
        losses, _ = session.run_cell(loading).values[0]
        assert losses == pytest.approx(expected, rel=CLOSE, abs=0)


@pytest.mark.parametrize(
    "family", [pytest.param("GPT-2", marks=pytest.mark.slow), pytest.param("Phi-3", marks=pytest.mark.thorough)]
)
def test_layouts_of_parallelize_follow_each_other_as_one_run(four_ranks: Session, family: str, tmp_path: Path) -> None:
    """Two stages with tp=2, four shards, one process, and stages again all match the uninterrupted run."""
    pytest.importorskip("transformers")
    urls = {name: str(tmp_path / name) for name in ("stages", "shards", "one", "stages again")}
    expected = on_ranks.FamilyRun(family, None)

    def go_on(axes: dict[str, int], source: str | None, target: str) -> None:
        came = str(tmp_path / f"{target}, as it came")
        given = None if source is None else urls[source]
        code = f"on_ranks.go_on_laid_out({family!r}, {axes}, {given!r}, {came!r}, {urls[target]!r}, steps=2)"
        found = four_ranks.run_cell(code, timeout_s=90).values
        assert all(bool(packed) == ("tp" in axes) for _, packed in found.values())
        require_same_losses(found, expected.train(2))
        if source is not None:
            assert is_equal(read_family(family, urls[source]).everything(), read_family(family, came).everything())
        require_close(read_family(family, urls[target]), expected)

    go_on({"pp": 2, "tp": 2}, None, "stages")
    go_on({"dp_shard": 4}, "stages", "shards")
    of_one = read_family(family, urls["shards"])
    assert of_one.train(2) == pytest.approx(expected.train(2), rel=CLOSE_STEPS)
    require_close(of_one, expected)
    of_one.save(urls["one"])
    go_on({"pp": 2, "tp": 2}, "one", "stages again")


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Phi-3", "GPT-2"])
def test_fused_layers_in_parts_and_shards_are_saved_whole(four_ranks: Session, family: str, tmp_path: Path) -> None:
    """The ranks hold the rows in another order than the whole model; the file has the whole model's order."""
    pytest.importorskip("transformers")
    expected = on_ranks.FamilyRun(family, None)
    axes, first, came, second = {"dp_shard": 2, "tp": 2}, *(str(tmp_path / name) for name in ("1", "came", "2"))
    for source, target in ((None, first), (first, second)):
        code = f"on_ranks.go_on_laid_out({family!r}, {axes}, {source!r}, {came!r}, {target!r}, steps=2)"
        found = four_ranks.run_cell(code, timeout_s=90).values
        assert all(packed for _, packed in found.values())
        require_same_losses(found, expected.train(2))
        require_close(read_family(family, target), expected)
    assert is_equal(read_family(family, first).everything(), read_family(family, came).everything())


def read_family(family: str, url: str) -> on_ranks.FamilyRun:
    run = on_ranks.FamilyRun(family, None, seed=5)
    run.load(url)
    return run


def require_same_losses(found: dict[int, tuple[list[float], list[str]]], expected: list[float]) -> None:
    """Compare the losses on each rank that has any, which are the ranks of the last stage."""
    known = [losses for losses, _ in found.values() if losses]
    assert len(known) >= len(found) / 2
    for losses in known:
        assert losses == pytest.approx(expected, rel=CLOSE_STEPS)


def require_close(found: on_ranks.FamilyRun, expected: on_ranks.FamilyRun) -> None:
    """Compare the values and the optimizer's state of all parameters."""
    assert found.step == expected.step
    values, references = found.everything(), expected.everything()
    assert values.keys() == references.keys() and any(name.startswith("exp_avg_sq of") for name in values)
    for name, value in values.items():
        apart = (value - references[name]).abs().max() / references[name].abs().max().clamp_min(1e-6)
        assert float(apart) < CLOSE_STEPS, name


def test_error_of_one_rank_is_everybodys_and_they_go_on_together(session: Session, tmp_path: Path) -> None:
    told = session.run_cell(f"on_ranks.fail_on_one(rank, {str(tmp_path)!r})").values
    for rank, errors in told.items():
        assert "a object cannot be saved" in errors[0] and errors[0].startswith("SpecError")
        assert ("rank 1: " in errors[0]) == (rank == 0)
        assert "weight was saved with shape [2, 2] but has [3, 2] in the model" in errors[1]
        assert errors[2] == "step-00000001"
    (tmp_path / "unshared").mkdir()
    told = session.run_cell(f"on_ranks.save_unshared(rank, {str(tmp_path / 'unshared')!r})").values
    assert "step-00000001: rank 1's part is not visible on rank 0's host (0 of " in told[0]
    assert "the folder is not shared: give a path on a disk that all hosts share, or a URL" in told[0]
    disagreed = session.run_cell(f"on_ranks.disagree(rank, {str(tmp_path)!r})").values
    assert set(disagreed.values()) == {"SpecError: step is 0 on rank 0 and 1 on rank 1: give the same on all ranks"}


# ---- damage that some ranks read (in one process: test_reading.py)


@pytest.fixture(scope="module")
def of_shards(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with steps 1 and 2 of two ranks, each with a shard of every tensor."""
    folder = tmp_path_factory.mktemp("shards")
    session.run_cell(f"on_ranks.save_twice('fsdp', {str(folder)!r})")
    return folder


@pytest.mark.parametrize(
    "layout, kind",
    [
        ("fsdp", "model/"),
        *[pytest.param("fsdp", kind, marks=pytest.mark.slow) for kind in ("optimizer/", "random/1/")],
        *[
            pytest.param(layout, kind, marks=pytest.mark.slow if kind == "model/" else pytest.mark.thorough)
            for layout in ("pp", "tp")
            for kind in ("model/", "optimizer/", "random/1/")
        ],
    ],
)
def test_damage_that_one_rank_reads_is_found_by_all(session: Session, of_shards: Path, layout: str, kind: str) -> None:
    """The damage is in the second rank's file; if the layout is shards, the first rank reads nothing of this file."""
    file = the_file(of_shards, 2, "rank-00001*")
    name, begin, _ = next(each for each in pieces_of(file, kind) if "1.down.bias" in each[0] or kind == "random/1/")
    with changed(file, flip(begin)):
        told = session.run_cell(f"on_ranks.load_damaged({layout!r}, {str(of_shards)!r}, 2)").values
        assert told[0][1] and told[1][1], "nobody has changed anything"
        assert told[1][0].endswith(told[0][0].removeprefix("DetrainError: "))
        assert f"{file.name}: '{name}', bytes 0 to" in told[0][0] and "step-00000002 is damaged: rank " in told[0][0]
        found = session.run_cell(f"on_ranks.load_whole({layout!r}, {str(of_shards)!r})").values
        assert found[0] == found[1] and found[0][0] == 1 and found[0][2]
        assert "step-00000002 was skipped" in found[0][1][0] and name in found[0][1][0]


@pytest.mark.parametrize("number", [0, 1])
def test_damage_in_shards_is_found_by_one_process(of_shards: Path, number: int) -> None:
    file, run = the_file(of_shards, 2, f"rank-0000{number}*"), on_ranks.Run("one", seed=7)
    for kind in ("model/", "optimizer/"):
        for name, begin, end in pieces_of(file, kind)[0::7]:
            with changed(file, flip(end - 1)):
                said, is_unchanged = on_ranks.load_damaged("one", str(of_shards), 2, run)
                assert is_unchanged and f"{file.name}: '{name}', bytes 0 to {end - begin}, is damaged" in said


def test_shards_are_compared_by_what_they_read(session: Session, tmp_path: Path) -> None:
    """Each rank reads its half of a tensor of 8 MiB twice, and only the rank of the damaged half reports the damage."""
    training.save(str(tmp_path), nn.Linear(1024, 2048, bias=False), step=1)
    counts = session.run_cell(f"on_ranks.count_read({str(tmp_path)!r})").values
    assert set(counts.values()) == {(2 * 4 * MIB, 4 * MIB)}
    file = the_file(tmp_path, 1, "rank-*")
    [(_, begin, _)] = pieces_of(file, "model/")
    with changed(file, flip(begin + 6 * MIB + 5)), pytest.raises(Exception) as error:
        session.run_cell(f"on_ranks.count_read({str(tmp_path)!r})")
    assert f"rank 1: {file}: 'model/weight', bytes {6 * MIB} to {7 * MIB}, is damaged" in str(error.value)


def test_ranks_that_ask_for_other_checkpoints_are_told(session: Session, tmp_path: Path) -> None:
    """Otherwise each rank would wait for the others, or continue from another checkpoint."""
    told = session.run_cell(f"on_ranks.ask_for_others(rank, {str(tmp_path)!r})").values
    for errors in told.values():
        assert "step is None on rank 0 and 1 on rank 1: give the same on all ranks" in errors[0]
        assert "is_random_state_wanted is True on rank 0 and False on rank 1" in errors[1]
        assert f"url is {tmp_path} on rank 0 and {tmp_path}/other on rank 1" in errors[2]
        assert "ssh://h/x: ssh:// would accept any host key" in errors[3] and "ssh://h/x: ssh:// would" in errors[4]
        assert errors[5] == "none"


@pytest.mark.parametrize("depth", [900, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (600, 5000))])
def test_note_that_only_one_rank_could_keep_is_an_error_of_all(session: Session, depth: int, tmp_path: Path) -> None:
    """JSON may be nested more deeply than the objects that can be sent between ranks."""
    session.run_cell(f"on_ranks.save_twice('fsdp', {str(tmp_path)!r})")
    note = the_file(tmp_path, 2, "checkpoint.json")
    text = note.read_bytes()
    body = text[: text.rindex(b",\n")].replace(b'"extra": null', b'"extra": ' + b"[" * depth + b"]" * depth)
    note.write_bytes(digests.seal(body + b"\n}"))
    told = session.run_cell(f"on_ranks.load_damaged('fsdp', {str(tmp_path)!r}, 2)").values
    if depth == 900:
        unread = body.replace(b'"extra": ', b'"more": null,\n "extra": null,\n "even more": ')
        note.write_bytes(digests.seal(unread + b"\n}"))
        found = session.run_cell(f"on_ranks.load_whole('fsdp', {str(tmp_path)!r})").values
        assert all(step == 2 and is_step for step, _, is_step in found.values()), "what nobody reads does not travel"
    assert all(is_unchanged and said.startswith("DetrainError") for said, is_unchanged in told.values())


# ---- one process


@pytest.mark.parametrize(
    "scheme, is_async",
    [
        ("", False),
        ("file://", True),
        ("memory://", False),
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("", True), ("file://", False), ("memory://", True))
        ],
    ],
)
def test_any_place_keeps_all_that_training_needs(scheme: str, is_async: bool, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path}"
    saved = on_ranks.train_and_save("one", url, dropout=0.2, is_async=is_async)
    assert on_ranks.load_and_train("one", url, dropout=0.2) == (saved, ())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # a warning by torch itself when it first compiles
@pytest.mark.parametrize("wrap", [pytest.param(torch.compile, marks=pytest.mark.slow), checkpoint_wrapper])
def test_wrapped_model_has_the_names_of_the_plain_one(wrap: Any, tmp_path: Path) -> None:
    inner = filled(3)
    inner[1] = wrap(inner[1])
    for model in (inner, wrap(filled(3))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        training.save(str(tmp_path), model, optimizer, step=1)
        plain = filled(0)
        fresh = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
        training.load(str(tmp_path), plain, fresh)
        assert is_equal(plain.state_dict(), dict(zip(plain.state_dict(), model.state_dict().values())))
        assert len(fresh.state_dict()["state"]) == 4


def test_numbers_drawn_after_a_load_are_those_drawn_after_the_save(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(1).item()]

    draw()
    training.save(str(tmp_path), nn.Linear(2, 2), step=1)
    expected = draw()
    draw()
    training.load(str(tmp_path), nn.Linear(2, 2))
    assert draw() == expected
    training.load(str(tmp_path), nn.Linear(2, 2), is_random_state_wanted=False)
    assert draw() != expected


def test_optimizer_that_has_made_no_step_is_left_as_it_is(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    training.save(str(tmp_path), model, optimizer, step=0)
    assert not optimizer.state and model.weight.grad is not None
    training.load(str(tmp_path), other, fresh)
    assert not fresh.state
    for each, by in ((model, optimizer), (other, fresh)):
        by.zero_grad()
        each(torch.ones(2)).sum().backward()
        by.step()
    assert torch.equal(model.weight, other.weight)


def test_parameter_that_had_no_gradient_has_no_state_after_a_load(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    training.save(str(tmp_path), model, optimizer, step=1)
    other = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    fresh = torch.optim.Adam(other.parameters())
    training.load(str(tmp_path), other, fresh)
    assert sorted(fresh.state_dict()["state"]) == [0, 1]


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, of a tensor's rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}
SCHEDULERS = {
    "of a function": lambda by: schedules.LambdaLR(by, lambda step: 1 / (1 + step)),
    "of milestones": lambda by: schedules.MultiStepLR(by, [2, 2, 4]),
    "one after the other": lambda by: schedules.SequentialLR(
        by, [schedules.LinearLR(by, total_iters=3), schedules.CosineAnnealingWarmRestarts(by, 4)], [3]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_optimizers_and_schedules_go_on_as_if_nothing_had_been(optimizer: str, scheduler: str, tmp_path: Path) -> None:
    def make() -> Any:
        model = nn.Linear(3, 2)
        by = OPTIMIZERS[optimizer](model.parameters())
        return model, by, SCHEDULERS[scheduler](by)

    def train(model: nn.Module, by: torch.optim.Optimizer, schedule: Any) -> list[float]:
        losses = []
        for _ in range(3):
            loss = (model(torch.arange(3.0)) - 1).pow(2).sum()
            loss.backward()
            by.step()
            by.zero_grad()
            schedule.step()
            losses.append(loss.item())
        return losses

    first = make()
    train(*first)
    training.save(str(tmp_path), *first, step=3)
    second = make()
    training.load(str(tmp_path), *second)
    assert train(*first) == train(*second)
    assert second[1].state_dict()["param_groups"] == first[1].state_dict()["param_groups"]


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "numbers": [1, -2.5, 1e-320, True, None, 10**30],
        "tuple": (1, ("a",)),
        3: {(1, 2): "by tuple"},
        "$float": float("-inf"),
        "counter": Counter({30: 2}),
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "dtype": torch.bfloat16,
        "tensor": torch.arange(6.0).reshape(2, 3),
    }
    training.save(str(tmp_path), nn.Linear(2, 2), step=1, data_position=value, extra="é")
    found = training.load(str(tmp_path), nn.Linear(2, 2))
    tensor = found.data_position.pop("tensor")
    assert torch.equal(tensor, value.pop("tensor"))
    assert found.data_position == value and isinstance(found.data_position["counter"], Counter)
    assert (found.extra, found.step) == ("é", 1)
    with pytest.raises(SpecError, match=r"extra\['a'\]\[0\]: a object cannot be saved"):
        training.save(str(tmp_path), nn.Linear(2, 2), step=2, extra={"a": [object()]})


@pytest.mark.parametrize("text", ['{"$dtype": "load"}', '{"$tensor": [1]}', '{"$bytes": "x"}', '{"$run": 1}'])
def test_value_that_nobody_has_written_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(json.loads(text))
    assert from_json(to_json({"$run": 1}, "")) == {"$run": 1}


def test_last_ones_stay_and_the_list_is_a_table(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (100, 200, 300, 400):
        training.save(str(tmp_path), model, step=step, keep=2)
    assert [each.step for each in training.checkpoints(str(tmp_path))] == [300, 400]
    training.load(str(tmp_path), model, step=300)
    training.save(str(tmp_path), model, step=350, keep=2)  # newer than step 400: resumed from 300
    there = training.checkpoints(str(tmp_path))
    assert [each.step for each in there] == [400, 350]
    assert training.load(str(tmp_path), model).step == 350
    lines = str(there).splitlines()
    assert lines[0].split() == ["step", "saved", "size", "complete"] and lines[2].split()[0] == "350"
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "step-00000350").iterdir()}
    assert there[1].size_bytes == sum(sizes.values()) and there[1].is_complete
    assert str(training.checkpoints(str(tmp_path / "nothing"))) == "no checkpoints"


def test_what_a_link_in_the_folder_leads_to_is_not_cleared(tmp_path: Path) -> None:
    """Colleagues who save into the same folder can put links there."""
    model = nn.Linear(2, 2)
    training.save(str(tmp_path / "own"), model, step=100)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "step-00000100").symlink_to(tmp_path / "own" / "step-00000100")
    for step in (200, 300):
        training.save(str(tmp_path / "shared"), model, step=step, keep=1)
    assert training.load(str(tmp_path / "own"), model).step == 100


def test_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    training.save(str(tmp_path), first, step=1)
    training.save(str(tmp_path), second, step=1)
    training.load(str(tmp_path), first)
    assert torch.equal(first.weight, second.weight)
    assert len(list((tmp_path / "step-00000001").iterdir())) == 3


def test_leftovers_of_a_killed_save_go_with_the_next_and_nothing_else_does(tmp_path: Path) -> None:
    training.save(str(tmp_path), nn.Linear(2, 2), step=1)
    half = tmp_path / "step-00000002"
    half.mkdir()
    (half / "rank-00000-0123456789abcdef.safetensors").write_bytes(b"half")
    other = tmp_path / "step-00000003"
    other.mkdir()
    (other / "notes.txt").write_text("of the user's own")
    there = training.checkpoints(str(tmp_path))
    assert [each.is_complete for each in there] == [False, True] and there.last is there[1]
    with pytest.warns(UserWarning, match="step-00000002 was skipped: its save has not finished"):
        assert training.load(str(tmp_path), nn.Linear(2, 2)).step == 1
    training.save(str(tmp_path), nn.Linear(2, 2), step=4)
    assert not half.exists() and (other / "notes.txt").exists()
    (other / "rank-00000-0123456789abcdef.safetensors").write_bytes(b"half")
    training.save(str(tmp_path), nn.Linear(2, 2), step=5)
    assert [file.name for file in other.iterdir()] == ["notes.txt"]


class FullDisk(LocalFileSystem):
    """A file system without space to finish a file of tensors."""

    cachable = False

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        if "w" in mode and path.endswith(".safetensors"):
            file.write(b"half")
            file.close()
            raise OSError(28, "No space left on device")
        return file


def test_save_that_fails_leaves_the_one_of_its_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    training.save(str(tmp_path), model, step=1)
    with pytest.raises(DetrainError, match="No space left"):
        training.save(str(tmp_path), nn.Linear(2, 2), step=1, files=FullDisk())
    other = nn.Linear(2, 2)
    assert training.load(str(tmp_path), other).step == 1
    assert torch.equal(model.weight, other.weight)


class Silent(LocalFileSystem):
    """A store that raises ``error`` when a file is read whose path contains ``silent``."""

    cachable = False
    silent = "nothing"
    error: Exception = TimeoutError("the store did not answer")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb" and self.silent in path:
            raise self.error
        return super().open(path, mode, **kwargs)


@pytest.mark.parametrize("harm", ["no answer", "flipped bit", "later format", "another program's", "note is gone"])
def test_checkpoint_whose_note_cannot_be_read_is_not_removed(saved: Path, harm: str) -> None:
    """The checkpoint may be whole and the newest one; only its note says how old it is."""
    files, note = Silent(), the_file(saved, 3, "checkpoint.json")
    if harm == "no answer":
        files.silent = "step-00000003/checkpoint.json"
    elif harm == "flipped bit":
        note.write_bytes(note.read_bytes().replace(b"2", b"3", 1))
    elif harm == "later format":
        rewrite(saved, 3, note=lambda said: said.update(format=3))
        assert "its format 3 is of a newer version" in str(training.checkpoints(str(saved)))
    elif harm == "another program's":
        note.write_text('{"theirs": 1}')
    else:
        note.unlink()
    before = sorted(file.name for file in (saved / "step-00000003").iterdir())
    for step in (4, 5):
        training.save(str(saved), filled(step), step=step, keep=1, files=files)
    assert sorted(file.name for file in (saved / "step-00000003").iterdir()) == before
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000003", "step-00000005"]
    if harm == "no answer":
        files.silent = "nothing"
        assert [(each.step, each.is_complete) for each in training.checkpoints(str(saved))] == [(3, True), (5, True)]


@pytest.mark.parametrize("silent", ["step-00000003/checkpoint.json", "step-00000003/index", "step-00000003/rank"])
@pytest.mark.parametrize("error", [TimeoutError("no answer"), OSError(5, "Input/output error"), MemoryError()])
def test_store_that_does_not_answer_is_no_damage(saved: Path, silent: str, error: Exception) -> None:
    """If it counted as damage, hours of training would be lost, as the newest checkpoint is whole."""
    files, model = Silent(), filled(0)
    files.silent, files.error = silent, error
    with pytest.raises(
        DetrainError, match=r"step-00000003.* cannot be read: .*; it may be intact: load again, or choose"
    ):
        training.load(str(saved), model, files=files)
    assert bool((model[0].weight == 0).all())
    assert training.load(str(saved), model, step=2, files=files).step == 2
    files.silent = "nothing"
    assert training.load(str(saved), model, files=files).step == 3


@pytest.mark.parametrize("is_told_before", [True, False])
def test_save_whose_note_cannot_be_written_goes_with_the_next(
    tmp_path: Path, is_told_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a save has all tensors; if it kept an index, nothing would ever remove it."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as limited:
        if is_told_before:
            limited.setattr(catalog, "MOST_NOTE_BYTES", 100_000)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(DetrainError, match=r"File too large|the limit is 100000"):
                training.save(str(tmp_path), nn.Linear(2, 2), step=1, extra="x" * 10**6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert [each.is_unfinished for each in training.checkpoints(str(tmp_path))] == [True]
    training.save(str(tmp_path), nn.Linear(2, 2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("at", [1, 2])
def test_interrupt_of_a_save_leaves_no_index_without_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Nothing would remove such a save, because it has all tensors."""
    with monkeypatch.context() as patched:
        interrupt_after(patched, Location, "write", at=at)
        with pytest.raises(KeyboardInterrupt):
            training.save(str(tmp_path), nn.Linear(2, 2), step=1)
    assert all(each.is_complete or each.is_unfinished for each in training.checkpoints(str(tmp_path)))
    training.save(str(tmp_path), nn.Linear(2, 2), step=2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_old_one_that_is_half_removed_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    training.save(str(tmp_path), nn.Linear(2, 2), step=1)
    with monkeypatch.context() as patched:
        interrupt_after(patched, os, "unlink", at=at)
        patched.setattr(os, "supports_dir_fd", {os.unlink, *os.supports_dir_fd})
        with pytest.raises(KeyboardInterrupt):
            training.save(str(tmp_path), nn.Linear(2, 2), step=2, keep=1)
    assert len(list(tmp_path.iterdir())) == 2
    assert training.load(str(tmp_path), nn.Linear(2, 2), step=2).step == 2
    training.save(str(tmp_path), nn.Linear(2, 2), step=3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_async", [False, True])
def test_rank_that_dies_in_a_save_leaves_the_last_good_one(tmp_path: Path, is_async: bool) -> None:
    """The rank's replacement and the other ranks form a new group, and save again."""
    url = str(tmp_path)
    prepare = f"import sys; sys.path.insert(0, {str(HERE)!r}); import checkpoint_ranks as on_ranks"
    with Session.start(2, device="cpu") as session:
        session.run_cell(prepare)
        session.run_cell(f"on_ranks.train_and_save('fsdp', {url!r})")
        with pytest.raises(DetrainError):
            session.run_cell(f"on_ranks.die_in_save(rank, {url!r}, is_async={is_async})")
        there = training.checkpoints(url)
        assert there.last is not None and there.last.step == 3
        session.run_cell(prepare)
        found = session.run_cell(f"on_ranks.go_on_after_a_death({url!r})").values
        assert found[0] == found[1] and found[0][:2] == (3, [3, 4])
        assert len(list(tmp_path.iterdir())) == 2


def test_tied_parameter_is_written_once(tmp_path: Path) -> None:
    """The checkpoint has it under both names, as another layout may look for either of them."""
    sizes = []
    for is_tied in (True, False):
        url = str(tmp_path / str(is_tied))
        for is_async in (False, True):
            training.save(url, on_ranks.LanguageModel(is_tied=is_tied), step=int(is_async), is_async=is_async).result()
        files = sorted(Path(url).rglob("rank-*"))
        assert abs(files[0].stat().st_size - files[1].stat().st_size) < 64
        sizes.append(files[0].stat().st_size)
    assert sizes[1] - sizes[0] >= 51 * 16 * 4


@pytest.mark.slow
def test_killed_save_leaves_the_last_good_one(tmp_path: Path) -> None:
    """20 processes are killed while they save; at least three must leave half a save, or the test shows nothing."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import checkpoint_ranks as on_ranks\n"
    code += f"print(on_ranks.kill_at_random({str(tmp_path)!r}, 20, seed=1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = eval(done.stdout)
    assert found["halves"] >= 3 and found["last"] >= 3


def test_process_group_goes_with_what_was_saved_in_it(tmp_path: Path) -> None:
    """Saves use a group of their own; it is released with the ranks' group, and saves in a later group use another."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import checkpoint_ranks as on_ranks\n"
    code += f"print(on_ranks.save_in_two_groups({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert eval(done.stdout) == {"left": [False, False], "steps": [1, 2]}


# ---- invalid and hostile files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder with steps 1, 2 and 3, whose parameters are 1, 2 and 3."""
    for step in (1, 2, 3):
        training.save(str(tmp_path), filled(step), step=step)
    return tmp_path


def filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def rewrite(
    saved: Path,
    step: int,
    *,
    index: Callable[[dict[str, Any]], object] | None = None,
    note: Callable[[dict[str, Any]], object] | None = None,
) -> None:
    """Change an index or a note as somebody with write access can: all digests match."""
    index_file, note_file = the_file(saved, step, "index-*"), the_file(saved, step, "checkpoint.json")
    said = json.loads(note_file.read_text())
    del said["crc32"]
    if index is not None:
        text = json.loads(index_file.read_text())
        index(text)
        index_file.write_text(json.dumps(text))
        said["files"][index_file.name] = index_file.stat().st_size
        said["index_crc32"] = digests.digest(index_file.read_bytes())
    if note is not None:
        note(said)
    note_file.write_bytes(digests.seal(json.dumps(said, indent=1).encode()))


@pytest.mark.parametrize(
    "pattern, harm",
    [(pattern, harm) for pattern in ("rank-*", "index-*", "checkpoint.json") for harm in ("truncated", "missing")]
    + [("index-*", "other content"), ("checkpoint.json", "other content")],
)
def test_broken_checkpoint_is_passed_over_with_a_warning(saved: Path, pattern: str, harm: str) -> None:
    file = the_file(saved, 3, pattern)
    if harm == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "missing":
        file.unlink()
    else:
        file.write_bytes(b"[" * file.stat().st_size)
    model = filled(0)
    with pytest.warns(UserWarning, match=r"step-00000003 was skipped: .+"):
        found = training.load(str(saved), model)
    assert found.step == 2 and len(found.notes) == 1 and bool((model[0].weight == 2).all())
    with pytest.raises(DetrainError, match="step-00000003 is damaged"):
        training.load(str(saved), model, step=3)


@pytest.mark.parametrize(
    "harm",
    [
        *("part is missing", "part is too large", "part is outside", "file is elsewhere"),
        *("digests are too few", "digests are none", "no digests", "no header's digest", "header's digest is none"),
    ],
)
def test_index_that_does_not_hold_together_is_broken(saved: Path, harm: str) -> None:
    """The index is complete and has its correct digest, so only its contents can show the fault."""

    def change(index: dict[str, Any]) -> None:
        chunk = index["tensors"]["model/0.weight"][2][0]
        if harm == "part is missing":
            chunk[1], chunk[4] = [2, 4], chunk[3] + 2 * 4 * 4
        elif harm == "part is too large":
            chunk[4] += 4
        elif harm == "part is outside":
            chunk[0] = [1, 0]
        elif harm == "digests are too few":
            chunk[5] = ""
        elif harm == "digests are none":
            chunk[5] = None
        elif harm == "no digests":
            chunk.pop()
        elif harm == "no header's digest":
            index["headers"] = {}
        elif harm == "header's digest is none":
            index["headers"] = dict.fromkeys(index["headers"], 7)
        else:
            index["files"][0] = "../x" + index["files"][0][4:]

    rewrite(saved, 3, index=change)
    model = filled(0)
    why = {
        "part is missing": "parts of .* are missing",
        "part is too large": r"bytes \d+ to \d+ are not a",
        "part is outside": "exceeds its shape",
        "file is elsewhere": "is not in the checkpoint",
        "no header's digest": "not of this format",
    }
    with pytest.warns(UserWarning, match=f"step-00000003 was skipped: .*{why.get(harm, 'the digests? of a')}"):
        assert training.load(str(saved), model).step == 2


@pytest.mark.parametrize(
    "said",
    [
        {"data_position": {"$dtype": "nn"}},
        {"extra": {"$tuple": 3}},
        {"scheduler": {"$set": [[]]}},
        {"optimizer": ...},
        {"serial": 1 << 70},
    ],
)
def test_note_with_values_that_are_none_is_passed_over_before_anything_is_changed(
    saved: Path, said: dict[str, Any]
) -> None:

    def change(note: dict[str, Any]) -> None:
        note |= said
        for key in [key for key, value in said.items() if value is ...]:
            del note[key]

    rewrite(saved, 3, note=change)
    model = filled(0)
    with pytest.warns(UserWarning, match=r"step-00000003 was skipped: .*checkpoint\.json cannot be read"):
        assert training.load(str(saved), model).step == 2
    assert bool((model[0].weight == 2).all())


def test_random_state_that_is_none_is_told_and_the_rest_is_loaded(saved: Path) -> None:
    rewrite(saved, 3, index=lambda index: index["values"].update({"random/0/python_rest": 7}))
    model = filled(0)
    with pytest.warns(
        UserWarning, match=r"random number state is invalid \(\w+\): random number generators were reseeded with"
    ):
        assert training.load(str(saved), model).step == 3
    assert bool((model[0].weight == 3).all())


def test_step_that_is_a_link_is_not_written_through(saved: Path, tmp_path: Path) -> None:
    """Others can have created the link, in a folder that a group can write to."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "step-00000003").symlink_to(saved / "step-00000003")
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(DetrainError, match="step-00000003 is a link, and links are not followed"):
        training.save(str(shared), filled(9), step=3)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "harm, said",
    [
        *(
            ("nothing in it", "its save has not finished"),
            ("file", "it is not a folder"),
            ("pipe", "it is not a folder"),
        ),
        *(("link", "it is a link, and links are"), ("link to nothing", "it is a link, and links are")),
    ],
)
def test_step_that_is_no_folder_with_files_is_told_of(saved: Path, tmp_path: Path, harm: str, said: str) -> None:
    """The newest step has been moved away; others may have put a link in its place."""
    folder, outside = saved / "step-00000003", tmp_path / "outside"
    folder.rename(outside)
    if harm == "nothing in it":
        folder.mkdir()
    elif harm == "file":
        folder.write_text("")
    elif harm == "pipe":
        os.mkfifo(folder)
    else:
        folder.symlink_to(outside if harm == "link" else "/nowhere")
    before = sorted(outside.iterdir())
    model = filled(0)
    with pytest.warns(UserWarning, match=f"step-00000003 was skipped: {said}"):
        assert training.load(str(saved), model).step == 2
    with pytest.raises(DetrainError, match=f"step-00000003 is damaged: {said}.*; complete steps: 1, 2"):
        training.load(str(saved), model, step=3)
    assert [each.step for each in training.checkpoints(str(saved)) if each.is_complete] == [1, 2]
    training.save(str(saved), model, step=4, keep=1)
    assert sorted(outside.iterdir()) == before
    assert os.path.lexists(folder) == (harm != "nothing in it")
    assert training.load(str(saved), model, step=4).notes == ()


def test_folder_with_digits_of_another_script_is_none_of_ours(saved: Path) -> None:
    shutil.copytree(saved / "step-00000003", saved / "step-0000000\u0664")
    assert [each.step for each in training.checkpoints(str(saved))] == [1, 2, 3]
    assert training.load(str(saved), filled(0)).notes == ()


def test_checkpoint_and_safetensors_go_to_a_host_and_come_back(testbed: Testbed, tmp_path: Path) -> None:
    """The files are on SFTP, where ``seek`` does not return the new position."""
    config, home = Path(testbed.inventory.ssh_config), f"{testbed.inventory.user_home}/{tmp_path.name}"
    with (
        SshConnection.open(SshTarget("h0"), config_path=config) as connection,
        contextlib.closing(connection.open_sftp_filesystem()) as files,
    ):
        saved, first, second = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
        training.save(f"{home}/run", saved, step=1, files=files)
        training.load(f"{home}/run", first, files=files)
        training.export_safetensors(f"{home}/model.safetensors", saved, files=files)
        training.import_safetensors(f"{home}/model.safetensors", second, files=files)
    assert is_equal(saved.state_dict(), first.state_dict()) and is_equal(saved.state_dict(), second.state_dict())


def test_file_that_became_a_link_since_it_was_listed_is_not_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can exchange a file in a group's folder; the next save would show them what only the user may read."""
    data, listed = the_file(saved, 3, "rank-*"), catalog._read_entries
    (tmp_path / "private").write_bytes(data.read_bytes())

    def list_then_exchange(folder: Location) -> dict[str, tuple[str, int]]:
        found = listed(folder)
        if folder.path == str(data.parent):
            data.unlink()
            data.symlink_to(tmp_path / "private")
        return found

    monkeypatch.setattr(catalog, "_read_entries", list_then_exchange)
    with pytest.raises(DetrainError, match="cannot be read: it is a link"):
        training.load(str(saved), filled(0), step=3)


def test_part_of_a_tensor_is_one_of_its_file(saved: Path) -> None:
    """Otherwise an index could name any bytes of a file as a tensor, and the next save would write them out."""

    def change(index: dict[str, Any]) -> None:
        name = next(name for name, (_, shape, _) in index["tensors"].items() if name.startswith("model/") and shape)
        part = index["tensors"][name][2][0]
        part[3:5] = [at - 1 for at in part[3:5]]

    rewrite(saved, 3, index=change)
    with pytest.raises(DetrainError, match="cannot be read: none of its tensors has the bytes"):
        training.load(str(saved), filled(0), step=3)


def test_save_after_one_that_says_it_is_the_last_removes_nothing(tmp_path: Path) -> None:
    """Another user may have left such a checkpoint in a world-writable folder."""
    training.save(str(tmp_path), filled(1), step=1)
    (tmp_path / "step-00000099").mkdir()
    for file in (tmp_path / "step-00000001").iterdir():
        shutil.copy(file, tmp_path / "step-00000099")
    rewrite(tmp_path, 99, note=lambda note: note.update(step=99, serial=1 << 40))
    with pytest.raises(
        DetrainError, match=r"has serial 1099511627776, too high for another save: remove it, or save elsewhere"
    ):
        training.save(str(tmp_path), filled(2), step=2)
    assert training.load(str(tmp_path), filled(0), step=1).step == 1


def test_note_of_more_values_than_any_has_is_neither_written_nor_parsed(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_NOTE_VALUES", 1000)
    with pytest.raises(SpecError, match="have more than 1,000 values: keep tensors"):
        training.save(str(tmp_path / "new"), filled(0), step=1, extra=[0] * 1000)
    rewrite(saved, 3, note=lambda note: note.update(more=[[]] * 1000))
    listed = catalog.list_checkpoints(locate(saved))
    assert next(each for each in listed if each.step == 3).wrong.endswith("it has more than 1,000 values")


def test_indices_of_a_data_set_can_be_kept(tmp_path: Path) -> None:
    model, order = nn.Linear(2, 2), list(range(1_000_000))
    training.save(str(tmp_path), model, step=1, data_position=order)
    assert training.load(str(tmp_path), model).data_position == order


def test_folder_is_listed_once_however_many_are_damaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing reads every note, so one listing for each damaged checkpoint would take quadratic time."""
    listed: list[Location] = []
    list_them = checkpoint.list_checkpoints
    monkeypatch.setattr(checkpoint, "list_checkpoints", lambda place: listed.append(place) or list_them(place))
    for step in (2, 3):
        file = the_file(saved, step, "rank-*")
        file.write_bytes(flip(file.stat().st_size - 1)(file.read_bytes()))
    with pytest.warns(UserWarning, match="was skipped"):
        assert training.load(str(saved), filled(0)).step == 1
    assert len(listed) == 1


def test_nothing_is_unpickled(saved: Path, tmp_path: Path) -> None:
    """A pickle in the place of any file is never run, even if it has the size that the note gives for the file."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    evil = pickle.dumps(Evil())
    (saved / "step-00000003" / ".metadata").write_bytes(evil)
    data = the_file(saved, 3, "rank-*")
    data.write_bytes(evil.ljust(data.stat().st_size, b"\0"))
    with pytest.raises(DetrainError, match="not a safetensors file"):
        training.load(str(saved), filled(0), step=3)
    for step, pattern in ((3, "index-*"), (2, "checkpoint.json")):
        file = the_file(saved, step, pattern)
        file.write_bytes(evil.ljust(file.stat().st_size, b"\0")[: file.stat().st_size])
    with pytest.warns(UserWarning, match="was skipped"):
        assert training.load(str(saved), filled(0)).step == 1
    (tmp_path / "evil.safetensors").write_bytes(evil)
    with pytest.raises(DetrainError, match="not a safetensors file"):
        training.import_safetensors(str(tmp_path / "evil.safetensors"), filled(0))
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists()


def test_checkpoint_of_another_model_changes_nothing(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SpecError) as error:
        training.load(str(saved), model)
    assert "0.weight was saved with shape [4, 4] but has [5, 4] in the model; 0.bias was" in str(error.value)
    assert "and 2 more" in str(error.value)
    assert is_equal(before, model.state_dict())
    with pytest.raises(SpecError, match=r"1\.bias is not in the model"):
        training.load(str(saved), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)))


def test_optimizer_or_scheduler_that_was_not_saved(saved: Path) -> None:
    model = filled(0)
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SpecError, match="was saved with no optimizer; the given optimizer is Adam"):
        training.load(str(saved), model, adam)
    with pytest.raises(SpecError, match="without a scheduler"):
        training.load(str(saved), model, None, torch.optim.lr_scheduler.StepLR(sgd, 1))
    training.save(str(saved), model, sgd, step=4)
    with pytest.raises(SpecError, match="was saved with SGD; the given optimizer is Adam"):
        training.load(str(saved), model, adam)
    with pytest.raises(SpecError, match="4 parameters that are not the model's"):
        training.save(str(saved), filled(0), sgd, step=5)
    assert bool((model[0].weight == 0).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note["files"].update({"\x1b]52;c;ZXZpbA==\x07\nstep 9 is complete": 3}),
        lambda note: note.update(index_crc32="\x1b]52;"),
        lambda note: note.update(index_crc32="\x1b[31m" * 10**6),
        lambda note: note.update(format="\x1b[31m" * 10**6),
        lambda note: note.update(saved_at=1e300),
        lambda note: note.update(saved_at=-1.0),
        lambda note: note.update(saved_at=float("nan")),
    ],
    ids=["name", "digest", "long digest", "long format", "late", "early", "no number"],
)
def test_note_of_others_says_nothing_that_it_cannot(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(saved, 3, note=change)
    shown = str(training.checkpoints(str(saved)))
    assert "not of this format" in shown and shown.replace("\n", "").isprintable() and len(shown) < 1000
    with pytest.warns(UserWarning, match="step-00000003 was skipped") as told:
        assert training.load(str(saved), filled(0)).step == 2
    assert str(told[0].message).isprintable() and len(str(told[0].message)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["values"].update({"x": {"$dtype": "\x1b]0;owned\x07" * 10**5}}),
        lambda index: index.update(headers=dict.fromkeys(index["headers"], "\x1b[2J\x1b[1m")),
        lambda index: index["tensors"].update({"\x1b[31m" * 10**5: ["F32", [3], []]}),
    ],
)
def test_index_of_others_says_nothing_that_it_cannot(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(saved, 3, index=change)
    with pytest.warns(UserWarning, match="step-00000003 was skipped") as told:
        assert training.load(str(saved), filled(0)).step == 2
    assert str(told[0].message).isprintable() and len(str(told[0].message)) < 1000


def test_list_of_checkpoints_does_not_keep_what_is_in_them(tmp_path: Path) -> None:
    """There may be many checkpoints, each with the sample order of a data set."""
    training.save(str(tmp_path), filled(1), step=1, data_position=list(range(100_000)))
    assert len(pickle.dumps(training.checkpoints(str(tmp_path)))) < 10_000


@pytest.mark.parametrize("is_nested", [False, True])
def test_note_of_others_sets_no_attribute_of_a_schedule_but_its_state(tmp_path: Path, is_nested: bool) -> None:
    model = filled(0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = [schedules.StepLR(sgd, 2), schedules.StepLR(sgd, 3)]
    schedule = schedules.SequentialLR(sgd, inner, milestones=[4]) if is_nested else inner[0]
    training.save(str(tmp_path), model, sgd, schedule, step=1)
    training.load(str(tmp_path), model, sgd, schedule)

    def hijack(note: dict[str, Any]) -> None:
        (note["scheduler"]["_schedulers"][1] if is_nested else note["scheduler"])["optimizer"] = "hijacked"

    rewrite(tmp_path, 1, note=hijack)
    with pytest.raises(SpecError, match="step-00000001 has 'optimizer' in its scheduler state, which"):
        training.load(str(tmp_path), model, sgd, schedule)
    assert all(each.optimizer is sgd for each in inner)


KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda by: schedules.StepLR(by, 2),
    "LambdaLR": lambda by: schedules.LambdaLR(by, lambda step: 0.5**step),
    "SequentialLR": lambda by: schedules.SequentialLR(by, [schedules.ConstantLR(by), schedules.StepLR(by, 2)], [2]),
}


def unchanged(model: nn.Module, *others: Any) -> Callable[[], bool]:
    """Return a function that returns whether the state of all arguments is still as it is now."""

    def look() -> list[str]:
        return [repr(each.state_dict()) for each in (model, *others)] + [repr(torch.get_rng_state().tolist())]

    before = look()
    return lambda: look() == before


@pytest.mark.parametrize("has_kind", [True, False])
def test_state_of_another_kind_of_scheduler_changes_nothing(tmp_path: Path, has_kind: bool) -> None:
    """This holds for older checkpoints without the kind too; they can be loaded into a scheduler of the same kind."""
    model = filled(1)
    for saved_kind, make in KINDS.items():
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        training.save(str(tmp_path), model, sgd, make(sgd), step=1)
        if not has_kind:
            rewrite(tmp_path, 1, note=lambda note: note.pop("scheduler_kind"))
        for kind, make_other in KINDS.items():
            other = filled(0)
            by = torch.optim.SGD(other.parameters(), lr=0.2)
            scheduler = make_other(by)
            is_as_before = unchanged(other, by, scheduler)
            if kind == saved_kind:
                assert training.load(str(tmp_path), other, by, scheduler).step == 1 and not is_as_before()
                continue
            said = f"with {saved_kind}; the given scheduler is {kind}" if has_kind else f"does not fit the given {kind}"
            with pytest.raises(SpecError, match=said):
                training.load(str(tmp_path), other, by, scheduler)
            assert is_as_before()


@pytest.mark.parametrize(
    "said",
    [
        *(5, [1], {}, {"step_size": "2"}, {"base_lrs": 7}, {"base_lrs": [0.1, 0.1]}, {"_last_lr": ["x"]}),
        *({"last_epoch": "x"}, {"last_epoch": 10**400}, {"\x1b[31m": 1}, {"_schedulers": 5}),
    ],
)
def test_state_that_no_scheduler_has_changes_nothing(tmp_path: Path, said: Any) -> None:
    model = filled(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.StepLR(sgd, 2)
    training.save(str(tmp_path), model, sgd, scheduler, step=1)
    forged = {**scheduler.state_dict(), **said} if isinstance(said, dict) and said else said
    if isinstance(said, dict) and "_schedulers" in said:
        scheduler = KINDS["SequentialLR"](sgd)
        forged = {**scheduler.state_dict(), **said}
    rewrite(tmp_path, 1, note=lambda note: note.update(scheduler=forged, scheduler_kind=type(scheduler).__name__))
    nn.init.zeros_(model[0].weight)
    is_as_before = unchanged(model, sgd, scheduler)
    with pytest.raises(SpecError, match="its scheduler state, which does not fit the") as error:
        training.load(str(tmp_path), model, sgd, scheduler)
    assert is_as_before() and str(error.value).isprintable()


def test_scheduler_of_ones_own_that_does_not_take_its_state_changes_nothing(tmp_path: Path) -> None:
    class Own:
        value = 1

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]
            if self.value == 2:
                raise LookupError("of two")

    model, own = filled(1), Own()
    adam = stepped(model)
    own.value = 2
    training.save(str(tmp_path), model, adam, own, step=1)
    own.value = 1
    stepped(model, by=adam)
    is_as_before = unchanged(model, adam, own)
    with pytest.raises(DetrainError, match="the optimizer or the scheduler rejected its saved state: LookupError: of"):
        training.load(str(tmp_path), model, adam, own)
    assert is_as_before()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int = 1) -> None:
    """Send SIGINT to this process at the end of call number ``at`` of a function."""
    call, numbers = getattr(owner, name), itertools.count(1)

    def then_interrupt(*args: Any, **kwargs: Any) -> Any:
        given = call(*args, **kwargs)
        if next(numbers) == at:
            signal.raise_signal(signal.SIGINT)
        return given

    monkeypatch.setattr(owner, name, then_interrupt)


def scheduled(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, schedules.StepLR]:
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = schedules.StepLR(optimizer, 1)
    for _ in range(steps):
        stepped(model, by=optimizer)
        scheduler.step()
    return optimizer, scheduler


@pytest.mark.parametrize(
    "owner, name, at",
    [
        *((OptimizerState, "take", 1), (schedules.StepLR, "load_state_dict", 1), (reading, "read_tensors", 3)),
        *((ModelState, "take", 1), (checkpoint, "set_random_state", 1)),
    ],
)
def test_interrupt_of_a_load_comes_when_all_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int
) -> None:
    model, other = filled(1), filled(0)
    optimizer, scheduler = scheduled(model, 2)
    training.save(str(tmp_path), model, optimizer, scheduler, step=1)
    is_as_saved = unchanged(model, optimizer, scheduler)
    others = scheduled(other, 5)
    torch.rand(1)
    with monkeypatch.context() as patched:
        interrupt_after(patched, owner, name, at=at)
        with pytest.raises(KeyboardInterrupt):
            training.load(str(tmp_path), other, *others)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(others[0].state_dict())
    scheduler.load_state_dict(others[1].state_dict())
    assert is_as_saved()


@pytest.mark.parametrize("at", ["scheduler", "exchange"])
def test_stop_of_a_load_before_the_model_is_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As on a rank, where an interrupt arrives at once while it waits for the others."""
    model, other = filled(1), filled(0)
    training.save(str(tmp_path), model, *scheduled(model, 2), step=1)
    others = scheduled(other, 5)
    is_as_before = unchanged(other, *others)

    def stop(scheduler: Any, state: Any) -> None:
        scheduler.__dict__.update(state)
        monkeypatch.undo()
        if at == "scheduler":
            raise KeyboardInterrupt
        monkeypatch.setattr(Ranks, "_exchange", stop_exchange)

    def stop_exchange(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(schedules.StepLR, "load_state_dict", stop)
    with pytest.raises(KeyboardInterrupt):
        training.load(str(tmp_path), other, *others)
    assert is_as_before()


def stepped(model: nn.Module, *, by: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters()) if by is None else by
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return optimizer


def test_state_of_an_optimizer_that_lacks_something_changes_nothing(tmp_path: Path) -> None:
    """One flipped bit in a key has this effect, where there are no digests."""
    model = filled(1)
    adam = stepped(model)
    training.save(str(tmp_path), model, adam, step=1)

    def lose(kind: str, key: str) -> Callable[[dict[str, Any]], object]:
        def change(index: dict[str, Any]) -> None:
            for name in (f"optimizer/{kind}.0.weight.{key}", f"optimizer/{kind}.0.bias.{key}"):
                for of in (index["tensors"], index["values"]):
                    if name in of:
                        of[name[:-1] + "_"] = of.pop(name)
                        return
            raise AssertionError

        return change

    for change, said in (
        (lose("state", "step"), "rejected its saved state: KeyError: 'step'"),
        (lose("param_groups", "maximize"), "in one group of the optimizer but were saved with different options"),
    ):
        training.save(str(tmp_path), model, adam, step=1)
        rewrite(tmp_path, 1, index=change)
        stepped(model, by=adam)
        is_as_before = unchanged(model, adam)
        with pytest.raises(DetrainError, match=said):
            training.load(str(tmp_path), model, adam)
        assert is_as_before()


@pytest.mark.parametrize("is_first", [True, False])
def test_option_that_one_group_alone_had_is_told(tmp_path: Path, is_first: bool) -> None:
    model = filled(1)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    groups[0 if is_first else 1]["name"] = "own"
    training.save(str(tmp_path), model, torch.optim.SGD(groups, lr=0.1), step=1)
    with pytest.raises(SpecError, match="saved with different options: make the groups as they were"):
        training.load(str(tmp_path), model, torch.optim.SGD(parameters, lr=0.1))


NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    [
        *(NAN, torch.tensor(NAN), torch.tensor([NAN, 1.0]), [1.0, NAN], (NAN,), {"a": {"b": NAN}}, {NAN}),
        *([torch.ones(2)], {"a": torch.tensor(NAN)}, torch.tensor(NAN, dtype=torch.bfloat16), torch.tensor([True])),
    ],
    ids=repr,
)
def test_option_that_is_no_number_comes_back(tmp_path: Path, value: Any) -> None:
    """An example is a best loss of nan, which is not equal to itself."""
    model = filled(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.param_groups[0]["best"] = value
    training.save(str(tmp_path), model, sgd, step=1)
    sgd.param_groups[0]["best"] = 7
    assert training.load(str(tmp_path), model, sgd).step == 1
    assert repr(sgd.param_groups[0]["best"]) == repr(value)


@pytest.mark.parametrize(
    "first, second",
    [
        *((NAN, 1.0), (torch.tensor(NAN), torch.tensor(1.0)), (torch.ones(1), torch.ones(2)), (torch.ones(2), 1.0)),
        *((1.0, torch.ones(2)), (torch.ones(1), torch.ones(1, dtype=torch.float64)), ([NAN], [NAN, NAN])),
        *(({NAN}, {1.0}), ({"a": NAN}, {"b": NAN}), ([torch.ones(2)], [torch.zeros(2)]), ([1.0], (1.0,)), (NAN, "nan")),
    ],
    ids=repr,
)
def test_options_that_are_not_the_same_are_told(tmp_path: Path, first: Any, second: Any) -> None:
    model = filled(1)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "best": first}, {"params": parameters[2:], "best": second}]
    training.save(str(tmp_path), model, torch.optim.SGD(groups, lr=0.1), step=1)
    with pytest.raises(SpecError, match="saved with different options: make the groups as they were"):
        training.load(str(tmp_path), model, torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("rest", [[10**8, 0, 0.0], [-1, 0, 0.0], [625, 0, 0.0], [True, 0, 0.0], [3, 0, "x"], [3], 5])
def test_place_in_random_numbers_that_none_has_is_told(saved: Path, rest: Any) -> None:
    """numpy accepts any position, and then ends the process with the next number or reads memory of others."""
    import numpy as np

    rewrite(saved, 3, index=lambda index: index["values"].update({"random/0/numpy_rest": rest}))
    with pytest.warns(
        UserWarning, match="random number state is invalid .*: random number generators were reseeded with"
    ):
        assert training.load(str(saved), filled(0)).step == 3
    assert 0 <= np.random.get_state()[2] <= 624


@pytest.mark.parametrize("left, following", [(624, 1 << 9), (624, 2), (0, 0), (-1, 5), (1 << 30, 1)])
def test_place_in_the_random_numbers_of_torch_that_none_has_is_refused(left: int, following: int) -> None:
    """Otherwise torch would take the memory after its numbers for random numbers."""
    state = random_state()
    state["torch"][8:24] = torch.tensor(list(struct.pack("=iiQ", left, 1, following)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="invalid state of torch's generator"):
        set_random_state(state)


def test_state_of_an_optimizer_of_very_many_keys_is_damage() -> None:
    """Several names may refer to the same bytes, so that a small file could take any amount of memory."""
    model = nn.Linear(2, 1)
    names = [f"optimizer/state.weight.k{number}" for number in range(100)]
    chunks = {name: [((0,), "file", tensor_files.Piece(torch.float32, (1,), 0, 4))] for name in names}
    index = TensorIndex.of(dict.fromkeys(names, (1,)), chunks, {})
    with pytest.raises(digests.Damaged, match="weight has more than 64 optimizer values"):
        OptimizerState(torch.optim.SGD(model.parameters()), ModelState(model)).targets(index, "optimizer/")


def larger(file: Path, name: str, shape: list[int]) -> Callable[[dict[str, Any]], object]:
    """Return a change to an index that names a byte tensor of this shape; write a sparse file that has its size."""
    size = torch.Size(shape).numel()
    header = json.dumps({name: {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()
    header = len(header).to_bytes(8, "little") + header
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(len(header) + size)

    def change(index: dict[str, Any]) -> None:
        index["values"].pop(name, None)
        index["files"].append(file.name)
        index["headers"][file.name] = digests.digest(header)
        part = [[0] * len(shape), shape, len(index["files"]) - 1, len(header), len(header) + size]
        index["tensors"][name] = ["U8", shape, [[*part, "a7f9ad6e" * -(-size // digests.BLOCK_BYTES)]]]

    return change


@pytest.mark.parametrize("name", ["random/0/python", "optimizer/state.0.weight.exp_avg"])
def test_state_that_is_too_large_takes_no_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(1)
    adam = stepped(model)
    for step in (1, 2):
        training.save(str(tmp_path), model, adam, step=step)
    file = tmp_path / "step-00000002" / "rank-00001-aa.safetensors"
    change = larger(file, name, [1 << 40])
    rewrite(tmp_path, 2, index=change, note=lambda note: note["files"].update({file.name: file.stat().st_size}))
    said = (
        "random number state is invalid"
        if "random" in name
        else r"step-00000002 was skipped: 'exp_avg' of 0.weight has shape \["
    )
    with pytest.warns(UserWarning, match=said):
        assert training.load(str(tmp_path), model, adam).step == (2 if "random" in name else 1)


@pytest.mark.parametrize(
    "is_renamed, told", [(False, "no attribute 'extra'"), (True, "has renamed outside of its modules")]
)
def test_name_that_a_hook_puts_into_the_state_is_told(is_renamed: bool, told: str, tmp_path: Path) -> None:
    def change(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state["renamed" if is_renamed else f"{prefix}extra"] = state.pop(f"{prefix}bias")

    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._register_state_dict_hook(change)
    with pytest.raises(SpecError, match=f"{told}.*a state_dict hook adds or renames"):
        training.save(str(tmp_path), model, step=1)


def test_url_or_step_that_is_not_there(saved: Path) -> None:
    with pytest.raises(SpecError, match="absent does not exist"):
        training.load(str(saved / "absent"), filled(0))
    with pytest.raises(SpecError, match="has no checkpoint of step 7; complete steps: 1, 2, 3"):
        training.load(str(saved), filled(0), step=7)
    (saved / "empty").mkdir()
    with pytest.raises(SpecError, match="empty has no checkpoint that can be loaded"):
        training.load(str(saved / "empty"), filled(0))
    with pytest.raises(SpecError, match="step-00000002 is the folder of one checkpoint: give its parent folder"):
        training.load(str(saved / "step-00000002"), filled(0))
    for wrong in ({"step": -1}, {"step": 1.5}, {"step": 10**19}, {"step": 1, "keep": 0}, {"step": 1, "keep": 2.0}):
        with pytest.raises(SpecError):
            training.save(str(saved), filled(0), **wrong)
    with pytest.raises(SpecError, match="cannot be saved: the safetensors format has"):
        training.save(str(saved), nn.ParameterList([torch.zeros(1, dtype=torch.complex128)]), step=4)
    assert [each.step for each in training.checkpoints(str(saved))] == [1, 2, 3]


def test_error_in_the_background_is_raised_by_the_next_call(saved: Path) -> None:
    (saved / "step-00000004").write_text("a file, where a folder is to be")
    failing = training.save(str(saved), filled(4), step=4, is_async=True)
    with pytest.raises(DetrainError, match="step-00000004"):
        failing.result(20)
    assert failing.is_done and "failed" in repr(failing)
    training.save(str(saved), filled(5), step=5, is_async=True)  # the error is raised only once
    with pytest.warns(UserWarning, match="step-00000004 was skipped: it is not a folder"):
        assert training.load(str(saved), filled(0)).step == 5  # the load has waited for the save
    training.save(str(saved), filled(4), step=4, is_async=True)
    with pytest.raises(DetrainError, match="step-00000004"):
        training.save(str(saved), filled(6), step=6)


def test_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    first = training.save(str(tmp_path), on_ranks._filled(1), step=1, is_async=True)
    second = training.save(str(tmp_path), on_ranks._filled(2), step=2, is_async=True)
    assert first.is_done
    second.result(20)
    assert [(each.step, each.is_complete) for each in training.checkpoints(str(tmp_path))] == [(1, True), (2, True)]


def test_save_in_the_background_has_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    """The next save reuses the copies, even of a tensor that has grown since; a copy is freed with its tensor."""
    model, back = nn.Linear(3, 3), nn.Linear(3, 3)
    model.register_buffer("seen", torch.zeros(2))
    for step in range(1, 4):
        for value in model.state_dict().values():
            value.fill_(step)
        saving = training.save(str(tmp_path), model, step=step, is_async=True)
        for value in model.state_dict().values():
            value.fill_(-1)
        saving.result(20)
        back.register_buffer("seen", torch.zeros(model.seen.shape))
        assert training.load(str(tmp_path), back).step == step
        assert all(bool((value == step).all()) for value in back.state_dict().values()), step
        model.seen.resize_(2 + step)
    gc.collect()  # free what other tests have left
    kept = len(_copies())
    del model, value
    gc.collect()
    assert len(_copies()) == kept - 3


def _copies() -> Any:
    from detrain_nb.training.checkpoint import _stager

    return _stager()._state_dict_stager._cached_storage_mapping


# ---- safetensors


@pytest.mark.parametrize("layout", slow_but("pp"))
def test_exported_file_has_the_whole_model_and_goes_into_any_layout(
    session: Session, layout: str, of_one: tuple[str, list[float]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    url, _ = of_one
    out, back = tmp_path / "out", tmp_path / "back.safetensors"
    run = on_ranks.Run("one")
    run.load(url)
    expected = {name: value for name, value in run.model.state_dict().items() if name != "head.weight"}
    told = session.run_cell(f"on_ranks.export({layout!r}, {url!r}, {str(out)!r})").values
    assert set(map(tuple, told.values())) == {("model.safetensors",)} and os.listdir(out) == ["model.safetensors"]
    assert is_equal(load_file(out / "model.safetensors"), expected)
    told = session.run_cell(f"on_ranks.import_and_export({layout!r}, {str(out)!r}, {str(back)!r})").values
    assert set(map(tuple, told.values())) == {()}
    assert is_equal(load_file(back), expected)


def test_files_of_safetensors_are_read_and_cut(tmp_path: Path) -> None:
    """The safetensors library wrote the file; an export makes several files, and a later one replaces them by one."""
    from safetensors.torch import load_file, save_file

    model, other = filled(1).to(torch.bfloat16), filled(2)
    nn.init.normal_(model[0].weight)
    save_file({**model.state_dict(), "more": torch.zeros(2)}, tmp_path / "their.safetensors")
    with pytest.warns(UserWarning, match="has tensors that the model does not have: more"):
        assert training.import_safetensors(str(tmp_path / "their.safetensors"), other) == ["more"]
    assert is_equal(other.state_dict(), model.float().state_dict())
    for size, count in ((80, 2), (10**9, 1)):
        names = training.export_safetensors(str(tmp_path / "out"), other, most_file_bytes=size)
        parts = [name for name in names if name.endswith(".safetensors")]
        assert len(parts) == count and sorted(os.listdir(tmp_path / "out")) == sorted(names)
        loaded = {name: value for part in parts for name, value in load_file(tmp_path / "out" / part).items()}
        assert is_equal(loaded, other.state_dict())
        again = filled(0)
        training.import_safetensors(str(tmp_path / "out"), again)
        assert is_equal(again.state_dict(), other.state_dict())
    with pytest.raises(SpecError, match=r"2.weight is only in the model; 2.bias is only in the model"):
        training.import_safetensors(str(tmp_path / "out"), nn.Sequential(*filled(0), nn.Linear(2, 2)))
    with pytest.raises(SpecError, match=r"absent\.safetensors does not exist"):
        training.import_safetensors(str(tmp_path / "absent.safetensors"), other)
    os.truncate(tmp_path / "their.safetensors", 400)
    with pytest.raises(DetrainError, match="its tensors need"):
        training.import_safetensors(str(tmp_path / "their.safetensors"), other)


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


OF_LINEAR = {
    "weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "x.safetensors"])
def test_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    url = tmp_path / name if name == "x.safetensors" else tmp_path
    with pytest.raises(DetrainError, match=f"{name} cannot be read: it is not a regular file"):
        training.import_safetensors(str(url), nn.Linear(2, 2))


def test_names_in_files_of_others_are_shown_without_control_characters_and_not_whole(tmp_path: Path) -> None:
    strange = {"dtype": "F32", "shape": [0], "data_offsets": [24, 24]}
    named = {**OF_LINEAR, "\x1b]0;owned\x07\n\x1b[31m": strange, "n" * 10**6: strange}
    (tmp_path / "model.safetensors").write_bytes(header(named, bytes(24)))
    with pytest.warns(UserWarning, match="has tensors that the model does not have") as told:
        assert len(training.import_safetensors(str(tmp_path), nn.Linear(2, 2))) == 2
    assert str(told[0].message).isprintable() and len(str(told[0].message)) < 1000
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "\x1b[2J\x07" * 10**5}})
    )
    with pytest.raises(DetrainError, match="is missing, one of 1 files") as error:
        training.import_safetensors(str(tmp_path), nn.Linear(2, 2))
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "entries, said",
    [
        ([], "its header is not a JSON object of tensors"),
        ({"weight": [1]}, "its header has an entry without dtype, shape and offsets"),
        (
            {"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
            "its header has an entry without dtype",
        ),
        ({"weight": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "its header has an entry without dtype"),
        ({"bias": {**OF_LINEAR["bias"], "data_offsets": [-8, 0]}}, "its tensors overlap each other, or its header"),
        ({**OF_LINEAR, "bias": {**OF_LINEAR["bias"], "data_offsets": [8, 16]}}, "its tensors overlap each other"),
        ({str(number): {} for number in range(1000)}, "it has more than 500 values"),
    ],
)
def test_header_that_is_none_is_told(tmp_path: Path, entries: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_MOST_HEADER_VALUES", 500)
    (tmp_path / "model.safetensors").write_bytes(header(entries, bytes(24)))
    with pytest.raises(DetrainError, match=f"model.safetensors cannot be read: {said}"):
        training.import_safetensors(str(tmp_path), nn.Linear(2, 2))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_header_or_index_in_another_encoding_is_told(tmp_path: Path, encoding: str) -> None:
    text = json.dumps(OF_LINEAR).encode(encoding)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(DetrainError, match=r"model\.safetensors cannot be read: "):
        training.import_safetensors(str(tmp_path), nn.Linear(2, 2))
    file.write_bytes(header(OF_LINEAR, bytes(24)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(json.dumps({"weight_map": dict.fromkeys(OF_LINEAR, file.name)}).encode(encoding))
    with pytest.raises(DetrainError, match=r"model\.safetensors\.index\.json cannot be read: "):
        training.import_safetensors(str(tmp_path), nn.Linear(2, 2))


@pytest.mark.timeout(60)
def test_index_that_an_export_replaces_is_not_parsed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have written the index; if it has too many values, the files that it names are kept."""
    monkeypatch.setattr(safetensors_export, "MOST_INDEX_VALUES", 1000)
    part = tmp_path / "model-00009-of-00009.safetensors"
    for rest, is_kept in (([[]] * 2000, True), ([], False)):
        part.write_bytes(b"")
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": part.name}, "rest": rest})
        )
        training.export_safetensors(str(tmp_path), nn.Linear(2, 2))
        assert part.exists() == is_kept


@pytest.mark.parametrize("index", [[], {"weight_map": [1]}, {"weight_map": {"a": 1}}, {}])
def test_index_of_files_that_is_none_is_told(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DetrainError, match="cannot be read: it has no weight_map, which names the file of each tensor"):
        training.import_safetensors(str(tmp_path), nn.Linear(2, 2))


@pytest.mark.parametrize("most", ["5GB", None, 0, float("nan")])
def test_size_that_files_cannot_have_is_told(tmp_path: Path, most: Any) -> None:
    with pytest.raises(SpecError, match=r"most_file_bytes=.*: give a number of bytes, 1 or more"):
        training.export_safetensors(str(tmp_path), filled(0), most_file_bytes=most)


def test_export_removes_what_an_earlier_one_has_written_and_nothing_else(tmp_path: Path) -> None:
    model = filled(1)
    theirs = ["model_best.safetensors", "model-before.safetensors", "model-00001-of-00009.safetensors"]
    for name in theirs:
        (tmp_path / name).write_bytes(b"the only copy")
    (tmp_path / "model-old.safetensors").mkdir()
    kept = {*theirs, "model-old.safetensors"}
    for size in (80, 40, 10**9):
        names = training.export_safetensors(str(tmp_path), model, most_file_bytes=size)
        assert set(os.listdir(tmp_path)) == {*names, *kept}
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(SpecError, match=r"has a model\.safetensors, which would be read instead of several files"):
        training.export_safetensors(str(tmp_path), filled(2), most_file_bytes=80)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "model.safetensors").unlink()
    names = training.export_safetensors(str(tmp_path), model, most_file_bytes=80)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    kept |= {name for name in names if "-of-" in name}  # without their index, their origin is unknown
    names = training.export_safetensors(str(tmp_path), model)
    assert set(os.listdir(tmp_path)) == {*names, *kept}


@pytest.mark.slow
def test_folder_of_transformers_goes_in_and_out_through_stages(session: Session, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = on_ranks.llama(1)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    model.save_pretrained(source)
    told = session.run_cell(f"on_ranks.llama_through_stages({source!r}, {target!r})").values
    with torch.no_grad():
        expected = float(model(input_ids=on_ranks.tokens(1), use_cache=False).logits.double().sum())
    assert told[1][0] == pytest.approx(expected, rel=1e-4)
    assert {"model.safetensors", "config.json"} <= set(told[0][1])
    loaded = LlamaForCausalLM.from_pretrained(target)
    assert is_equal(dict(loaded.state_dict()), dict(model.state_dict()))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
