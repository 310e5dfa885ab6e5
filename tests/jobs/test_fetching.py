"""Which path each file gets when the files of several nodes are fetched into one folder here."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from detrain_nb.errors import SpecError
from detrain_nb.jobs import fetching
from detrain_nb.jobs.fetching import Fetched, choose_places
from detrain_nb.jobs.report_checks import NodeFile
from detrain_nb.node.job.terms import fits

ONE, OTHER = "1" * 64, "2" * 64


def paths(*listed: list[NodeFile]) -> list[list[str]]:
    return [[place.path for place in of_node] for of_node in choose_places(["a", "b"], listed)]


def test_file_of_one_node_keeps_its_name() -> None:
    assert paths([NodeFile("m.pt", 1, ONE)], [NodeFile("x/n.pt", 1, ONE)]) == [["m.pt"], ["x/n.pt"]]


def test_same_file_on_two_nodes_comes_once() -> None:
    assert paths([NodeFile("m.pt", 1, ONE)], [NodeFile("m.pt", 1, ONE)]) == [["m.pt"], []]


def test_files_that_differ_go_below_their_nodes() -> None:
    assert paths([NodeFile("m.pt", 1, ONE)], [NodeFile("m.pt", 1, OTHER)]) == [["a/m.pt"], ["b/m.pt"]]


def test_file_that_is_a_folder_elsewhere_goes_below_its_node() -> None:
    assert paths([NodeFile("x", 1, ONE)], [NodeFile("x/n", 1, ONE)]) == [["a/x"], ["x/n"]]


def test_no_file_is_left_out_for_another_of_its_place() -> None:
    first = [NodeFile("m", 1, ONE), NodeFile("a/m", 1, OTHER)]
    places = [path for of_node in paths(first, [NodeFile("m", 1, OTHER)]) for path in of_node]
    assert len(places) == len(set(places)) == 3


def test_joiners_in_a_name_are_seen() -> None:
    assert str(Fetched("here", ("a\u200d.pt",), 5)) == "1 file, 5 B: a\\u200d.pt in here"


def test_file_in_a_folder_with_the_name_of_a_node_is_not_that_nodes() -> None:
    assert paths(
        [NodeFile("m", 1, ONE), NodeFile("B/m", 1, ONE), NodeFile("b", 1, ONE)], [NodeFile("m", 1, OTHER)]
    ) == [
        ["a/m", "a/B/m", "a/b"],
        ["b/m"],
    ]


def test_node_that_is_silent_keeps_its_name() -> None:
    (chosen,) = choose_places(["a"], [[NodeFile("b/m", 1, ONE)]], reserved=["a", "b"])
    assert [place.path for place in chosen] == ["a/b/m"]


def test_what_stays_on_the_nodes_is_told() -> None:
    fetched = Fetched("here", ("a.pt",), 5, num_left_out=2)
    assert str(fetched) == "1 file, 5 B: a.pt in here; left out 2 links, special files or odd names"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_of_torch_comes_whole_and_nothing_else_that_is_hidden(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "artifacts" / "dcp", no_dist=True)
    made = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) > 1
    assert [name for name in made if not fits(name, "artifacts/")] == []
    assert not any(fits(name, "artifacts/") for name in ("artifacts/.metadata/x", "artifacts/.metadata.sh"))


@pytest.mark.parametrize("is_ignored", [True, False])
def test_files_that_differ_in_case_alone_are_refused_where_they_would_be_one(
    is_ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs before anything is written.

    ``ignores_case`` is replaced, because a test cannot mount a case-insensitive file system on every machine.
    """
    monkeypatch.setattr(fetching, "ignores_case", lambda made: is_ignored and Path(made).is_dir())
    for paths in (["a/Model.pt", "a/model.pt"], ["Out/m.pt", "out/n.pt"]):
        refused = pytest.raises(SpecError, match=r"would be one file in .*/new, as its file system ignores case")
        with refused if is_ignored else contextlib.nullcontext():
            fetching._check_case(tmp_path / "new", tmp_path, paths)
    fetching._check_case(tmp_path / "new", tmp_path, ["a/m.pt", "a/n.pt", "m.pt"])
    assert list(tmp_path.iterdir()) == []
