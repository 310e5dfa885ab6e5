"""Damaged checkpoints: nothing of what is given changes, on any rank, and the one before is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch import nn

from detrain_nb import Session, training
from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.storage import locate
from detrain_nb.training import catalog, digests, reading
from detrain_nb.training.tensor_files import Piece

from . import checkpoint_ranks as on_ranks

HERE = Path(__file__).parent
MIB = 1 << 20


# ---- any damage to any file


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of one process."""
    folder = tmp_path_factory.mktemp("both")
    on_ranks.save_twice("one", str(folder))
    return folder


@contextlib.contextmanager
def changed(file: Path, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """For as long as the block lasts; None removes it."""
    whole = file.read_bytes()
    found = change(whole)
    file.unlink() if found is None else file.write_bytes(found)
    try:
        yield
    finally:
        file.write_bytes(whole)


def flip(place: int, *, bit: int = 3) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        data = bytearray(whole)
        data[place] ^= 1 << bit
        return bytes(data)

    return change


def require_refusal(both: Path, file: Path, *, is_named: bool = True) -> None:
    """Step 2 is refused by the name of ``file``, and step 1 comes instead, bit for bit."""
    said, is_unchanged = on_ranks.load_damaged("one", str(both), 2)
    assert is_unchanged and said.startswith("DetrainError: ") and "step-00000002 is broken" in said
    step, notes, is_step = on_ranks.load_whole("one", str(both))
    assert (step, is_step, len(notes)) == (1, True, 1) and "step-00000002 is passed over" in notes[0]
    assert not is_named or (file.name in said and file.name in notes[0])


def the_file(folder: Path, step: int, pattern: str) -> Path:
    return next((folder / f"step-{step:08d}").glob(pattern))


def files_of(both: Path) -> list[Path]:
    return sorted((both / "step-00000002").iterdir())


@settings(max_examples=50, deadline=None)
@given(data=some.data())
def test_flip_of_any_bit_is_found_before_anything_changes(both: Path, data: some.DataObject) -> None:
    file = data.draw(some.sampled_from(files_of(both)))
    place = data.draw(some.integers(0, file.stat().st_size - 1))
    with changed(file, flip(place, bit=data.draw(some.integers(0, 7)))):
        require_refusal(both, file)


@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_file_that_is_cut_off_anywhere_is_found(both: Path, data: some.DataObject) -> None:
    file = data.draw(some.sampled_from(files_of(both)))
    size = data.draw(some.integers(0, file.stat().st_size - 1))
    with changed(file, lambda whole: whole[:size]):
        require_refusal(both, file)


@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_bytes_that_are_others_are_found(both: Path, data: some.DataObject) -> None:
    """As a disk gives a block of zeros back, or one of another file."""
    file = data.draw(some.sampled_from(files_of(both)))
    whole, pattern = file.read_bytes(), f"{file.name.partition('-')[0]}*"
    other = data.draw(some.sampled_from([bytes(len(whole)), the_file(both, 1, pattern).read_bytes()]))
    begin = data.draw(some.integers(0, min(len(whole), len(other)) - 1))
    end = data.draw(some.integers(begin + 1, min(len(whole), len(other))))
    mixed = whole[:begin] + other[begin:end] + whole[end:]
    assume(mixed != whole)
    with changed(file, lambda _: mixed):
        require_refusal(both, file, is_named=file.name != "checkpoint.json")


@pytest.mark.parametrize("pattern", ["rank-*", "index-*", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["missing", "of the other"])
def test_file_that_is_missing_or_of_another_checkpoint_is_found(both: Path, pattern: str, harm: str) -> None:
    file, other = the_file(both, 2, pattern), the_file(both, 1, pattern)
    with changed(file, lambda _: None if harm == "missing" else other.read_bytes()):
        require_refusal(both, file, is_named=pattern != "checkpoint.json")


# ---- on ranks


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(f"import sys; sys.path.insert(0, {str(HERE)!r}); import checkpoint_ranks as on_ranks")
        yield started


@pytest.fixture(scope="module")
def of_shards(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks, each with a shard of every tensor."""
    folder = tmp_path_factory.mktemp("shards")
    session.run_cell(f"on_ranks.save_twice('fsdp', {str(folder)!r})")
    return folder


def pieces_of(file: Path, kind: str) -> list[tuple[str, int, int]]:
    """Names, and where they begin and end, of what ``file`` has, without the head, which is the embedding."""
    index = json.loads(next(file.parent.glob("index-*")).read_text())
    return [
        (name, begin, end)
        for name, (_, _, chunks) in index["tensors"].items()
        for _, _, number, begin, end, _ in chunks
        if name.startswith(kind) and "head." not in name and index["files"][number] == file.name and end > begin
    ]


@pytest.mark.parametrize("kind", ["model/", "optimizer/", "random/1/"])
@pytest.mark.parametrize("layout", ["fsdp", "pp", pytest.param("tp", marks=pytest.mark.slow)])
def test_damage_that_one_rank_reads_is_found_by_all(session: Session, of_shards: Path, layout: str, kind: str) -> None:
    """In the file of the second rank: of shards, the first one reads nothing of it."""
    file = the_file(of_shards, 2, "rank-00001*")
    name, begin, _ = next(each for each in pieces_of(file, kind) if "1.down.bias" in each[0] or kind == "random/1/")
    with changed(file, flip(begin)):
        told = session.run_cell(f"on_ranks.load_damaged({layout!r}, {str(of_shards)!r}, 2)").values
        assert told[0][1] and told[1][1], "nobody has changed anything"
        assert told[1][0].endswith(told[0][0].removeprefix("DetrainError: "))
        assert f"{file.name}: '{name}', bytes 0 to" in told[0][0] and "step-00000002 is broken: rank " in told[0][0]
        found = session.run_cell(f"on_ranks.load_whole({layout!r}, {str(of_shards)!r})").values
        assert found[0] == found[1] and found[0][0] == 1 and found[0][2]
        assert "step-00000002 is passed over" in found[0][1][0] and name in found[0][1][0]


@pytest.mark.parametrize("number", [0, 1])
def test_damage_in_shards_is_found_by_one_process(of_shards: Path, number: int) -> None:
    file = the_file(of_shards, 2, f"rank-0000{number}*")
    for kind in ("model/", "optimizer/"):
        for name, begin, end in pieces_of(file, kind)[0::7]:
            with changed(file, flip(end - 1)):
                said, is_unchanged = on_ranks.load_damaged("one", str(of_shards), 2)
                assert is_unchanged and f"{file.name}: '{name}', bytes 0 to {end - begin}, is damaged" in said


def test_shards_are_compared_by_what_they_read(session: Session, tmp_path: Path) -> None:
    """Of one tensor of 8 MiB: each rank reads its half twice, and finds damage in it; the other half is the other's."""
    training.save(str(tmp_path), nn.Linear(1024, 2048, bias=False), step=1)
    counts = session.run_cell(f"on_ranks.count_read({str(tmp_path)!r})").values
    assert set(counts.values()) == {(2 * 4 * MIB, 4 * MIB)}
    file = the_file(tmp_path, 1, "rank-*")
    [(_, begin, _)] = pieces_of(file, "model/")
    with changed(file, flip(begin + 6 * MIB + 5)), pytest.raises(Exception) as error:
        session.run_cell(f"on_ranks.count_read({str(tmp_path)!r})")
    assert f"rank 1: {file}: 'model/weight', bytes {6 * MIB} to {7 * MIB}, is damaged" in str(error.value)


# ---- one process


def weights(rows: int) -> nn.Module:
    model = nn.Linear(512, rows, bias=False)
    nn.init.normal_(model.weight)
    return model


def test_checkpoint_of_before_there_were_digests_is_loaded() -> None:
    """Saved by the program as it was then."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = training.load(str(HERE / "checkpoint_of_format_1"), model, optimizer)
    assert found.step == 1 and found.data_position == {"batch": 7} and found.notes == ()
    assert all(bool((parameter == 1.5).all()) for parameter in model.parameters())
    assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoint_does_not_become_one_of_before(both: Path) -> None:
    """Else one damaged byte, or a copy without its last line, would be taken as it is."""
    file = the_file(both, 2, "checkpoint.json")
    text = file.read_bytes()
    for harmed in (text[: text.rindex(b",")] + b"\n}", text.replace(b'"crc32"', b'"crc33"')):
        with changed(file, lambda _, harmed=harmed: harmed):  # type: ignore[misc]
            require_refusal(both, file)


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


def test_parts_that_begin_within_a_block_are_read_right(tmp_path: Path) -> None:
    """Rows of 2 KiB, of which a block ends within one: saved whole, read in thirds by their own offsets."""
    model = nn.Linear(500, 2500, bias=False)
    training.save(str(tmp_path), model, step=1)
    from detrain_nb.training.tensor_files import compare_rows, read_rows
    from detrain_nb.training.tensor_index import TensorIndex

    note = json.loads(the_file(tmp_path, 1, "checkpoint.json").read_text())
    index = TensorIndex.read(
        catalog.step_folder(locate(tmp_path), 1), note["index"], note["files"], digest=note["index_crc32"]
    )
    [(name, piece)] = [where for key, where in index.pieces.items() if key.fqn == "model/weight"]
    with open(tmp_path / "step-00000001" / name, "rb") as file:
        for first, count in ((0, 833), (833, 834), (1667, 833), (2499, 1), (3, 0)):
            compare_rows(file, piece, first, count, what="it")
            assert torch.equal(read_rows(file, piece, first, count, what="it"), model.weight[first : first + count])


def test_file_that_changes_after_it_was_compared_is_told(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has parts of both then: nobody may take it for one of them."""
    file = the_file(both, 2, "rank-*")
    name, begin, _ = pieces_of(file, "model/")[-2]
    find_damage = reading.Reading.find_damage

    def then_damage(self: reading.Reading, **options: Any) -> str:
        wrong = find_damage(self, **options)
        file.write_bytes(flip(begin)(file.read_bytes()))
        return wrong

    with changed(file, lambda whole: whole):
        monkeypatch.setattr(reading.Reading, "find_damage", then_damage)
        with pytest.raises(DetrainError, match=f"'{name}'.* is damaged.*it was whole a moment ago, and the model has"):
            on_ranks.Run("one").load(str(both))


def test_options_that_cannot_be_are_told_before_anything_changes(both: Path) -> None:
    """Of an optimizer whose one group was two when it was saved."""
    run = on_ranks.Run("one", seed=7)
    before = on_ranks.everything(run)
    optimizer = torch.optim.AdamW([each for each in run.model.parameters() if each.requires_grad])
    with pytest.raises(SpecError, match="saved with other options each: make the groups as they were"):
        training.load(str(both), run.model, optimizer, is_random_state_wanted=False)
    assert on_ranks.everything(run) == before


def test_later_save_of_an_earlier_step_is_told_of_when_it_is_passed_over(tmp_path: Path) -> None:
    model = weights(2)
    for step in (400, 350):
        training.save(str(tmp_path), model, step=step)
    file = the_file(tmp_path, 350, "rank-*")
    with changed(file, flip(-1 + file.stat().st_size)), pytest.warns(UserWarning, match="step-00000350 is passed over"):
        assert training.load(str(tmp_path), model).step == 400


def test_all_that_are_damaged_are_named_and_one_of_another_model_too(tmp_path: Path) -> None:
    small, large = weights(2), weights(3)
    training.save(str(tmp_path), large, step=1)
    training.save(str(tmp_path), small, step=2)
    second = the_file(tmp_path, 2, "rank-*")
    with changed(second, flip(second.stat().st_size - 1)):
        with pytest.raises(SpecError, match=r"step-00000001 is of another model: .*; .*step-00000002 is passed over"):
            training.load(str(tmp_path), small)
        first = the_file(tmp_path, 1, "index-*")
        with changed(first, flip(9)), pytest.raises(SpecError) as error:
            training.load(str(tmp_path), small)
    said = str(error.value)
    assert "has no checkpoint that can be loaded" in said and first.name in said and second.name in said


MEMORY = """
import resource, sys, torch
from torch import nn
from detrain_nb import training
model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(10))
training.save(sys.argv[1], model, step=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
training.load(sys.argv[1], model)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_load_takes_no_memory_for_a_second_model(tmp_path: Path) -> None:
    """Of ten tensors of 4 MiB: one at a time."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert int(told) * 1024 < 20 * MIB


# ---- a Trainer that goes on


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
    assert f"step-00000003 is passed over: {file}: '{name}', bytes 0 to {end - begin}, is damaged" in str(
        told[0].message
    )


def test_trainer_with_nothing_but_damage_does_not_begin_anew(tmp_path: Path) -> None:
    """Its next saves would remove what may still be rescued."""
    trainer(tmp_path, 1).fit()
    harms: list[tuple[str, Callable[[bytes], bytes]]]
    harms = [("rank-*", flip(-1)), ("rank-*", lambda whole: whole[:-1]), ("checkpoint.json", flip(5))]
    for pattern, harm in harms:
        file = the_file(tmp_path, 1, pattern)
        said = r"step-00000001 is passed over: .*; to begin anew, give resume=False"
        with changed(file, harm), pytest.raises(SpecError, match=said):
            trainer(tmp_path, 2).fit()


def test_trainer_begins_anew_where_no_save_has_ended(tmp_path: Path) -> None:
    trainer(tmp_path, 1).fit()
    the_file(tmp_path, 1, "checkpoint.json").unlink()
    with pytest.warns(UserWarning, match="step-00000001: its save has not ended, and nothing is before it: begun anew"):
        result = trainer(tmp_path, 1).fit()
    assert result.resumed_from == "" and training.checkpoints(str(tmp_path)).last is not None
    shutil.rmtree(tmp_path / "step-00000001")
    assert trainer(tmp_path, 1).fit().resumed_from == ""
