"""Damaged checkpoints: a load refuses them before anything changes on any rank, and takes the checkpoint before."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch import nn

from detrain_nb import training
from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.storage import locate
from detrain_nb.training import catalog, digests, reading, tensor_files
from detrain_nb.training.tensor_files import Piece, compare_rows, read_rows
from detrain_nb.training.tensor_index import TensorIndex

from ..parallel.memory_ranks import LiveStorages
from . import checkpoint_ranks as on_ranks
from .damage import changed, flip, pieces_of, the_file

HERE = Path(__file__).parent
MIB = 1 << 20


# ---- any damage to any file


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with steps 1 and 2 of one process."""
    folder = tmp_path_factory.mktemp("both")
    on_ranks.save_twice("one", str(folder))
    return folder


@pytest.fixture(scope="module")
def run() -> on_ranks.Run:
    """Return one run for all tests: a load that is refused leaves it unchanged."""
    started = on_ranks.Run("one", seed=7)
    started.train(1)
    return started


def require_refusal(run: on_ranks.Run, both: Path, file: Path, *, is_named: bool = True) -> None:
    """Check that step 2 is refused with the name of ``file``, and that the run is unchanged."""
    said, is_unchanged = on_ranks.load_damaged("one", str(both), 2, run)
    assert is_unchanged and said.startswith("DetrainError: ") and "step-00000002 is damaged" in said
    assert not is_named or file.name in said


def require_the_one_before(run: on_ranks.Run, both: Path, file: Path, *, is_named: bool = True) -> None:
    """Check that step 2 is refused, and that step 1 is loaded instead, bit for bit."""
    require_refusal(run, both, file, is_named=is_named)
    step, notes, is_step = on_ranks.load_whole("one", str(both))
    assert (step, is_step, len(notes)) == (1, True, 1) and "step-00000002 was skipped" in notes[0]
    assert not is_named or file.name in notes[0]


def files_of(both: Path) -> list[Path]:
    return sorted((both / "step-00000002").iterdir())


@settings(max_examples=50, deadline=None)
@given(data=some.data())
def test_flip_of_any_bit_is_found_before_anything_changes(run: on_ranks.Run, both: Path, data: some.DataObject) -> None:
    file = data.draw(some.sampled_from(files_of(both)))
    place = data.draw(some.integers(0, file.stat().st_size - 1))
    with changed(file, flip(place, bit=data.draw(some.integers(0, 7)))):
        require_refusal(run, both, file)


@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_file_that_is_cut_off_anywhere_is_found(run: on_ranks.Run, both: Path, data: some.DataObject) -> None:
    file = data.draw(some.sampled_from(files_of(both)))
    size = data.draw(some.integers(0, file.stat().st_size - 1))
    with changed(file, lambda whole: whole[:size]):
        require_refusal(run, both, file)


@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_bytes_that_are_others_are_found(run: on_ranks.Run, both: Path, data: some.DataObject) -> None:
    """A disk may return a block of zeros, or a block of another file."""
    file = data.draw(some.sampled_from(files_of(both)))
    whole, pattern = file.read_bytes(), f"{file.name.partition('-')[0]}*"
    other = data.draw(some.sampled_from([bytes(len(whole)), the_file(both, 1, pattern).read_bytes()]))
    begin = data.draw(some.integers(0, min(len(whole), len(other)) - 1))
    end = data.draw(some.integers(begin + 1, min(len(whole), len(other))))
    mixed = whole[:begin] + other[begin:end] + whole[end:]
    assume(mixed != whole)
    with changed(file, lambda _: mixed):
        require_refusal(run, both, file, is_named=file.name != "checkpoint.json")


@pytest.mark.parametrize("pattern", ["rank-*", "index-*", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["missing", "of the other"])
def test_file_that_is_missing_or_of_another_checkpoint_is_found(
    run: on_ranks.Run, both: Path, pattern: str, harm: str
) -> None:
    file, other = the_file(both, 2, pattern), the_file(both, 1, pattern)
    with changed(file, lambda _: None if harm == "missing" else other.read_bytes()):
        require_the_one_before(run, both, file, is_named=pattern != "checkpoint.json")


# ---- one process


def weights(rows: int) -> nn.Module:
    model = nn.Linear(512, rows, bias=False)
    nn.init.normal_(model.weight)
    return model


def test_checkpoint_of_before_there_were_digests_is_loaded() -> None:
    """A version of the program from before digests saved this checkpoint."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = training.load(str(HERE / "checkpoint_of_format_1"), model, optimizer)
    assert found.step == 1 and found.data_position == {"batch": 7} and found.notes == ()
    assert all(bool((parameter == 1.5).all()) for parameter in model.parameters())
    assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoint_does_not_become_one_of_before(run: on_ranks.Run, both: Path) -> None:
    """Otherwise one damaged byte, or a copy without its last line, would be loaded without any check."""
    file = the_file(both, 2, "checkpoint.json")
    text = file.read_bytes()
    for harmed in (text[: text.rindex(b",")] + b"\n}", text.replace(b'"crc32"', b'"crc33"')):
        with changed(file, lambda _, harmed=harmed: harmed):  # type: ignore[misc]
            require_the_one_before(run, both, file)


def test_digests_are_those_of_everybody() -> None:
    assert digests.digest(b"123456789") == "cbf43926"
    data = bytes(range(256)) * (5 * MIB // 512)
    blocks = [f"{zlib.crc32(data[at : at + MIB]):08x}" for at in (0, MIB, 2 * MIB)]
    assert digests.digests(data) == "".join(blocks) and digests.digests(b"") == ""
    assert digests.is_digests("0" * 24, len(data)) and digests.is_digests("", 0)
    assert not any(digests.is_digests(each, len(data)) for each in ("0" * 16, "0" * 32, None, ["0"] * 24))


@given(size=some.integers(0, 5 * MIB), ends=some.tuples(some.integers(0, 5 * MIB), some.integers(0, 5 * MIB)))
def test_what_is_read_for_a_part_is_made_of_blocks(size: int, ends: tuple[int, int]) -> None:
    begin, end = sorted(min(each, size) for each in ends)
    piece = Piece(torch.uint8, (size,), 100, 100 + size, digests.digests(bytes(size)))
    low, high = piece.around(begin, end)
    if size:
        assert low % MIB == 0 and low <= begin and end <= high <= size and (high % MIB == 0 or high == size)
        assert begin - low < MIB and high - end < MIB
    assert Piece(torch.uint8, (size,), 100, 100 + size).around(begin, end) == (begin, end)


def test_parts_that_begin_within_a_block_are_read_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have 2000 bytes, so a block of 1 MiB ends within a row; the whole tensor is saved, and its thirds are read.

    A read has at most two blocks, so the five blocks need three reads. Damage in the last block of each read is found.
    """
    monkeypatch.setattr(tensor_files, "_READ_BYTES", 2 * MIB)
    model = nn.Linear(500, 2500, bias=False)
    training.save(str(tmp_path), model, step=1)
    note = json.loads(the_file(tmp_path, 1, "checkpoint.json").read_text())
    index = TensorIndex.read(
        catalog.step_folder(locate(tmp_path), 1), note["index"], note["files"], digest=note["index_crc32"]
    )
    [(name, piece)] = [where for key, where in index.pieces.items() if key.fqn == "model/weight"]
    path = tmp_path / "step-00000001" / name
    with open(path, "rb") as file:
        for first, count in ((0, 833), (833, 834), (1667, 833), (2499, 1), (3, 0), (0, 2500)):
            compare_rows(file, piece, first, count, what="it")
            assert torch.equal(read_rows(file, piece, first, count, what="it"), model.weight[first : first + count])
    for block in (1, 3, 4):
        told = f"it, bytes {block * MIB} to {min((block + 1) * MIB, model.weight.nbytes)}, is damaged"
        with changed(path, flip(piece.begin + block * MIB + 5)), open(path, "rb") as file:
            for read in (compare_rows, read_rows):
                with pytest.raises(DetrainError, match=told):
                    read(file, piece, 0, 2500, what="it")


def test_file_that_changes_after_it_was_compared_is_told(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model then has parts of both versions of the file, and the error must say so."""
    file = the_file(both, 2, "rank-*")
    name, begin, _ = pieces_of(file, "model/")[-2]
    find_damage = reading.Reading.find_damage

    def then_damage(self: reading.Reading, **options: Any) -> str:
        wrong = find_damage(self, **options)
        file.write_bytes(flip(begin)(file.read_bytes()))
        return wrong

    with changed(file, lambda whole: whole):
        monkeypatch.setattr(reading.Reading, "find_damage", then_damage)
        with pytest.raises(DetrainError, match=f"'{name}'.* is damaged.*it was intact just now, and the model has"):
            on_ranks.Run("one").load(str(both))


def test_options_that_cannot_be_are_told_before_anything_changes(both: Path) -> None:
    """The optimizer has one parameter group, but had two when it was saved."""
    run = on_ranks.Run("one", seed=7)
    before = on_ranks.everything(run)
    optimizer = torch.optim.AdamW([each for each in run.model.parameters() if each.requires_grad])
    with pytest.raises(SpecError, match="saved with different options: make the groups as they were"):
        training.load(str(both), run.model, optimizer, is_random_state_wanted=False)
    assert on_ranks.everything(run) == before


def test_later_save_of_an_earlier_step_is_told_of_when_it_is_passed_over(tmp_path: Path) -> None:
    model = weights(2)
    for step in (400, 350):
        training.save(str(tmp_path), model, step=step)
    file = the_file(tmp_path, 350, "rank-*")
    with changed(file, flip(-1 + file.stat().st_size)), pytest.warns(UserWarning, match="step-00000350 was skipped"):
        assert training.load(str(tmp_path), model).step == 400


def test_all_that_are_damaged_are_named_and_one_of_another_model_too(tmp_path: Path) -> None:
    small, large = weights(2), weights(3)
    training.save(str(tmp_path), large, step=1)
    training.save(str(tmp_path), small, step=2)
    second = the_file(tmp_path, 2, "rank-*")
    with changed(second, flip(second.stat().st_size - 1)):
        with pytest.raises(SpecError, match=r"step-00000001 does not match the model: .*; .*step-00000002 was skipped"):
            training.load(str(tmp_path), small)
        first = the_file(tmp_path, 1, "index-*")
        with changed(first, flip(9)), pytest.raises(SpecError) as error:
            training.load(str(tmp_path), small)
    said = str(error.value)
    assert "has no checkpoint that can be loaded" in said and first.name in said and second.name in said


def test_load_takes_no_memory_for_a_second_model(tmp_path: Path) -> None:
    """Ten tensors of 4 MiB are loaded one at a time, counted among torch's tensors and among Python's bytes."""
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(10))
    training.save(str(tmp_path), model, step=1)
    tracemalloc.start()
    try:
        with LiveStorages() as storages:
            storages.add(model.parameters())
            training.load(str(tmp_path), model)
        assert 4 * MIB <= storages.most_bytes - 40 * MIB < 12 * MIB
        assert 4 * MIB <= tracemalloc.get_traced_memory()[1] < 12 * MIB
    finally:
        tracemalloc.stop()


# ---- a Trainer that resumes


def trainer(folder: Path, steps: int) -> training.Trainer:
    torch.manual_seed(0)
    batches = [(torch.ones(2, 4), torch.zeros(2, 2))]
    return training.Trainer(
        nn.Linear(4, 2), train=batches, steps=steps, loss=nn.functional.mse_loss, checkpoint=str(folder), save_every=1,
        metrics_folder=str(folder / "metrics"), show_progress=False,
    )  # fmt: skip


def test_trainer_goes_on_from_the_one_before_and_warns_once(tmp_path: Path) -> None:
    trainer(tmp_path, 3).fit()
    file = the_file(tmp_path, 3, "rank-*")
    name, begin, end = pieces_of(file, "model/")[0]
    with changed(file, flip(begin)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = trainer(tmp_path, 2).fit()
    assert result.resumed_from.endswith("step-00000002") and len(told) == 1
    assert f"step-00000003 was skipped: {file}: '{name}', bytes 0 to {end - begin}, is damaged" in str(told[0].message)


def test_trainer_with_nothing_but_damage_does_not_begin_anew(tmp_path: Path) -> None:
    """If it started over, its next saves would remove what may still be rescued."""
    trainer(tmp_path, 1).fit()
    harms: list[tuple[str, Callable[[bytes], bytes]]]
    harms = [("rank-*", flip(-1)), ("rank-*", lambda whole: whole[:-1]), ("checkpoint.json", flip(5))]
    for pattern, harm in harms:
        file = the_file(tmp_path, 1, pattern)
        said = r"step-00000001 was skipped: .*; to start over, give resume=False"
        with changed(file, harm), pytest.raises(SpecError, match=said):
            trainer(tmp_path, 2).fit()


@pytest.mark.parametrize(
    "harm, said",
    [
        ("link", r"checkpoint\.json is a link, and links are not followed"),
        ("all links", r"checkpoint\.json is a link, and links are not followed"),
        ("pipe", r"checkpoint\.json is not a file"),
        ("folder", r"checkpoint\.json is not a file"),
        ("gone", r"checkpoint\.json is missing"),
    ],
)
def test_checkpoint_whose_note_is_no_file_is_not_taken_for_an_unfinished_one(
    tmp_path: Path, harm: str, said: str
) -> None:
    """dvc and git-annex replace files by links; if training started over, it would remove the tensors."""
    trainer(tmp_path, 1).fit()
    folder, elsewhere = tmp_path / "step-00000001", tmp_path / "elsewhere"
    elsewhere.mkdir()
    note = folder / "checkpoint.json"
    for file in sorted(folder.iterdir()) if harm == "all links" else [note]:
        file.rename(elsewhere / file.name)
        if "link" in harm:
            file.symlink_to(elsewhere / file.name)
    if harm == "pipe":
        os.mkfifo(note)
    if harm == "folder":
        note.mkdir()
    before = sorted(file.name for file in folder.iterdir())
    with pytest.raises(SpecError, match=f"step-00000001 was skipped: {said}.*; to start over, give resume=False"):
        trainer(tmp_path, 2).fit()
    with pytest.raises(DetrainError, match=f"step-00000001 is damaged: {said}"):
        training.load(str(tmp_path), nn.Linear(4, 2), step=1)
    training.save(str(tmp_path), nn.Linear(4, 2), step=2, keep=1)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_trainer_begins_anew_where_no_save_has_ended(tmp_path: Path) -> None:
    trainer(tmp_path, 1).fit()
    for pattern in ("checkpoint.json", "index-*"):
        the_file(tmp_path, 1, pattern).unlink()
    with pytest.warns(UserWarning, match="step-00000001: its save has not finished, and there is no complete one"):
        result = trainer(tmp_path, 1).fit()
    assert result.resumed_from == "" and training.checkpoints(str(tmp_path)).last is not None
    shutil.rmtree(tmp_path / "step-00000001")
    assert trainer(tmp_path, 1).fit().resumed_from == ""
