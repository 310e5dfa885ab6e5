"""The notebook's folder on the nodes: files that are sent or left alone, and the comparison of data between nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from detrain_nb import Session
from detrain_nb.copying import folder_sync_remote
from detrain_nb.copying.remote_program import MAGIC
from detrain_nb.copying.sync_manifest import Sent, read_state, write_note
from detrain_nb.deploy import sync
from detrain_nb.deploy.bootstrapped_node import BootstrappedNode
from detrain_nb.deploy.files import Patience, open_talk
from detrain_nb.deploy.folder import Manifest
from detrain_nb.deploy.sync import DataCheck, DataState, FolderSync, check
from detrain_nb.errors import DetrainError, SessionError, SpecError, WireError
from detrain_nb.session.files import SessionFiles

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed


class FolderNode:
    """A node whose program runs on this machine, in folders of its own."""

    is_this_machine = False
    shares_paths = False
    program = "from detrain_nb.copying.remote_program import main; main()"

    def __init__(self, base: Path, name: str = "node", work: Path | None = None) -> None:
        self.name = name
        self.work = work or base / name / "work"
        self.cache = str(base / "cache")
        self.reconnect()
        self.runs = 0
        self.sent_bytes = 0

    def work_folder(self, folder: str) -> str:
        return str(self.work)

    @contextlib.contextmanager
    def run_files(self) -> Iterator[socket.socket]:
        self.runs += 1
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                command = [sys.executable, "-c", self.program]
                program = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
            try:
                assert ours.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
                yield ours
            finally:
                ours.close()
                program.wait(60)

    def reconnect(self) -> None:
        self.contact = object()
        self.folder_state: tuple[object, object] = read_state(self.cache, str(self.work))

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.work)): path.read_text()
            for path in sorted(self.work.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The notebook's folder."""
    folder = tmp_path / "notebook"
    folder.mkdir()
    return folder


@pytest.fixture
def node(tmp_path: Path) -> FolderNode:
    return FolderNode(tmp_path)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of names of each archive that was packed, in order."""
    found: list[list[str]] = []

    def pack(root: Path, manifest: Manifest, names: list[str]) -> bytes:
        found.append(names)
        return real(root, manifest, names)

    real = sync.pack
    monkeypatch.setattr(sync, "pack", pack)
    return found


def write(folder: Path, contents: dict[str, str] | None = None, /, **more: str) -> None:
    """Write files; the keyword ``pkg__b_py`` stands for pkg/b.py."""
    named = {name.replace("__", "/").replace("_py", ".py"): text for name, text in more.items()}
    for name, text in {**(contents or {}), **named}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# ---- files that are sent


def test_changes_go_and_nothing_else(root: Path, node: FolderNode, packed: list[list[str]]) -> None:
    write(root, a_py="a = 1", pkg__b_py="b = 1", pkg__c_py="c = 1")
    (root / "run.sh").write_text("#!/bin/sh")
    (root / "run.sh").chmod(0o755)
    (root / "Grüße 世界.txt").write_text("")
    keeper = FolderSync(root)
    keeper.bring([node])
    assert node.files() == {path: (root / path).read_text() for path in node.files()} and len(node.files()) == 5
    assert os.access(node.work / "run.sh", os.X_OK) and not os.access(node.work / "a.py", os.X_OK)

    write(root, pkg__b_py="b = 2")
    (root / "pkg" / "c.py").unlink()
    keeper.bring([node])
    assert packed[1:] == [["pkg/b.py"]]
    assert node.files()["pkg/b.py"] == "b = 2" and "pkg/c.py" not in node.files()

    shutil.rmtree(root / "pkg")
    (root / "run.sh").chmod(0o644)
    keeper.bring([node])
    assert packed[2:] == [["run.sh"]]
    assert not (node.work / "pkg").exists() and not os.access(node.work / "run.sh", os.X_OK)


def test_file_that_lost_its_end_with_the_power_comes_again(root: Path, node: FolderNode, tmp_path: Path) -> None:
    """The torn file has the modification time that was sent; a file that a rank has changed has a new one."""
    write(root, torn_py="x = 1", changed_py="y = 1")
    FolderSync(root).bring([node])
    torn, came = node.work / "torn.py", (node.work / "torn.py").stat().st_mtime_ns
    torn.write_text("")
    os.utime(torn, ns=(came, came))
    (node.work / "changed.py").write_text("")
    FolderSync(root).bring([FolderNode(tmp_path)])
    assert node.files() == {"torn.py": "x = 1", "changed.py": ""}


def test_note_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def note_replace(draft: str, path: str) -> None:
        assert synced == [os.stat(draft).st_ino]
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_note(str(tmp_path / "note.json"), "/root", "/folder", {})
    assert synced == [(tmp_path / "note.json").stat().st_ino]


def test_while_nothing_changes_nothing_is_said(root: Path, node: FolderNode) -> None:
    write(root, a_py="a = 1")
    keeper = FolderSync(root)
    for _ in range(3):
        keeper.bring([node])
        os.utime(root / "a.py")  # written again, with the same contents
    assert node.runs == 1


def test_gitignore_is_honoured(root: Path, node: FolderNode) -> None:
    write(root, a_py="a", data__x="x")
    (root / ".gitignore").write_text("data/\n")
    (root / ".detrainignore").write_text("*.secret\n")
    (root / "key.secret").write_text("s")
    FolderSync(root).bring([node])
    assert sorted(node.files()) == [".detrainignore", ".gitignore", "a.py"]


def test_hidden_files_that_go_and_keys_that_stay_are_named_once(root: Path, node: FolderNode) -> None:
    write(root, {".github/a.yml": "", ".github/b.yml": "", ".gitignore": "", ".env": "KEY=1", "a.py": "", "x.pem": ""})
    write(root, {f".{letter}": "" for letter in "abcdefghijkl"})
    write(root, {"a\x1b": ""})
    with pytest.raises(SpecError, match="'a\\?' has control or invisible characters: rename it, or list it in"):
        FolderSync(root).bring([node])
    (root / "a\x1b").unlink()
    keeper = FolderSync(root)
    keeper.bring([node])
    assert keeper.notices == [
        "hidden files are sent to the nodes too: .a, .b, .c, .d, .e, .f, .g, .github/, .h, .i and 3 more: "
        "list those that should stay here in .detrainignore",
        "not sent, as they may hold keys: .env, x.pem: "
        "to send a file that holds none, add a line !NAME to .detrainignore",
    ]
    assert not {".env", "x.pem"} & node.files().keys() and ".github/b.yml" in node.files()
    write(root, {".later": "", ".github/c.yml": ""})
    keeper.bring([node])
    assert keeper.notices[2:] == [
        "hidden files are sent to the nodes too: .later: list those that should stay here in .detrainignore"
    ]
    write(root, {"id_rsa": "made while nothing else has changed"})
    keeper.bring([node])
    keeper.bring([node])
    assert [words.partition(": to send")[0] for words in keeper.notices[3:]] == [
        "not sent, as they may hold keys: id_rsa"
    ]


def test_home_and_a_folder_that_is_too_much_for_a_session_that_goes_on_stay_here(
    root: Path, node: FolderNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, a_py="a", **{".ssh/id": "secret"})
    large = root / "large"
    with large.open("wb") as file:
        file.truncate(60_000_000)
    with pytest.raises(SpecError, match="60 MB to send"):
        SessionFiles([cast(Any, node)], str(root), is_synced=True)
    going_on = SessionFiles([cast(Any, node)], str(root), is_synced=True, takes_over=False)
    (words,) = going_on.notices
    assert not going_on.is_synced
    assert (
        words.startswith("changes here are not copied to the nodes until the next attach: the folder ")
        and "\n" not in words
    )
    monkeypatch.setenv("HOME", str(root))
    at_home = SessionFiles([cast(Any, node)], str(root), is_synced=True)
    assert not at_home.is_synced and at_home.bring() == [] and node.runs == 0
    assert at_home.notices == [
        f"{root} is a home directory or contains one: none of its files are sent to the nodes; "
        "to send a project's files, open the notebook in a folder of the project's own, or %cd there before the start"
    ]
    assert SessionFiles([cast(Any, node)], str(root), is_synced=False).notices == []


def test_folder_that_is_too_much_is_told_before_anything_is_said(root: Path, node: FolderNode) -> None:
    with open(root / "large", "wb") as file:
        file.truncate(60_000_000)
    with pytest.raises(SpecError, match=r"large 60 MB: .*--no-sync"):
        FolderSync(root).bring([node])
    assert node.runs == 0


def test_file_becomes_a_folder_and_back(root: Path, node: FolderNode) -> None:
    keeper = FolderSync(root)
    write(root, a="file")
    keeper.bring([node])
    (root / "a").unlink()
    write(root, a__b="below")
    keeper.bring([node])
    assert node.files() == {"a/b": "below"}
    shutil.rmtree(root / "a")
    write(root, a="file")
    keeper.bring([node])
    assert node.files() == {"a": "file"} and keeper.notices == []


# ---- restarted kernels and nodes


def test_kernel_started_anew_sends_nothing_again(root: Path, node: FolderNode, packed: list[list[str]]) -> None:
    write(root, a_py="a = 1", b_py="b = 1")
    FolderSync(root).bring([node])
    write(root, b_py="b = 2")
    FolderSync(root, takes_over=False).bring([node])
    assert packed == [["a.py", "b.py"], ["b.py"]]


def test_what_has_gone_there_comes_again_at_the_next_contact(
    root: Path, node: FolderNode, packed: list[list[str]]
) -> None:
    write(root, a_py="a = 1", b_py="b = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    (node.work / "a.py").unlink()
    keeper.bring([node])
    assert node.runs == 1, "nobody can know"
    node.reconnect()
    keeper.bring([node])
    shutil.rmtree(node.work)
    node.reconnect()
    keeper.bring([node])
    assert packed == [["a.py", "b.py"], ["a.py"], ["a.py", "b.py"]]
    assert node.files() == {"a.py": "a = 1", "b.py": "b = 1"}


def test_node_that_says_that_all_is_there_is_not_asked(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, a_py="a = 1")
    FolderSync(root).bring([node])
    node.reconnect()
    keeper = FolderSync(root, takes_over=False)  # of a restarted kernel
    keeper.bring([node])
    write(node.work, a_py="what a rank made of it", result="of a rank")
    node.reconnect()
    keeper.bring([node])
    assert node.runs == 1
    write(root, a_py="a = 2")
    keeper.bring([node])
    assert node.runs == 2 and node.files() == {"a.py": "a = 2", "result": "of a rank"}
    write(root, a_py="a = 1")
    node.reconnect()
    keeper.bring([node])
    assert node.runs == 3 and node.files()["a.py"] == "a = 1"
    write(tmp_path / "other", a_py="a = 1")
    FolderSync(tmp_path / "other").bring([node])
    assert node.runs == 4, "the same files, of another folder"


def test_node_where_something_was_left_alone_is_asked(root: Path, node: FolderNode) -> None:
    write(root, a_py="a = 1")
    write(node.work, a_py="theirs")
    for runs in (1, 2):
        node.reconnect()
        keeper = FolderSync(root)
        keeper.bring([node])
        assert node.runs == runs
        assert "not overwritten, as the notebook did not send the existing files: a.py" in keeper.notices[0]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"root": 1, "files": {"../x": [1]}}', '{"files": {"a.py": [1, 2]}}'])
def test_note_that_cannot_be_read_means_comparing(
    note: str, root: Path, node: FolderNode, packed: list[list[str]], tmp_path: Path
) -> None:
    write(root, a_py="a = 1")
    FolderSync(root).bring([node])
    (file,) = (tmp_path / "cache" / "sync").glob("*.json")
    file.write_text(note)
    write(root, b_py="b = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    assert packed == [["a.py"], ["b.py"]] and keeper.notices == []


def test_session_that_goes_on_elsewhere_is_left_alone(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, a_py="a = 1")
    FolderSync(root).bring([node])
    other = tmp_path / "other"
    write(other, b_py="b = 1")
    keeper = FolderSync(other, takes_over=False)
    keeper.bring([node])
    write(other, c_py="c = 1")
    keeper.bring([node])
    assert node.files() == {"a.py": "a = 1"} and node.runs == 2
    (words,) = keeper.notices
    assert re.fullmatch(
        rf"node: its work folder mirrors .*:{root}, not {other}: changes here are not sent to it", words
    )
    FolderSync(other).bring([node])
    assert node.files() == {"b.py": "b = 1", "c.py": "c = 1"}


def test_session_that_was_started_without_stays_without(root: Path, node: FolderNode) -> None:
    write(root, a_py="a = 1")
    keeper = FolderSync(root, takes_over=False)
    keeper.bring([node])
    assert not node.work.exists() and keeper.notices == []


def test_nodes_get_the_same_and_it_is_packed_once(root: Path, tmp_path: Path, packed: list[list[str]]) -> None:
    write(root, a_py="a = 1", b_py="b = 1")
    nodes = [FolderNode(tmp_path, name) for name in ("left", "right")]
    keeper = FolderSync(root)
    keeper.bring(nodes[:1])
    write(root, a_py="a = 2")
    keeper.bring(nodes)
    write(root, b_py="b = 2")
    keeper.bring(nodes)
    assert sorted(packed) == [["a.py"], ["a.py", "b.py"], ["a.py", "b.py"], ["b.py"]]
    assert nodes[0].files() == nodes[1].files() == {"a.py": "a = 2", "b.py": "b = 2"}


def test_nodes_that_share_a_folder_get_it_once(root: Path, tmp_path: Path, packed: list[list[str]]) -> None:
    write(root, a_py="a = 1")
    nodes = [FolderNode(tmp_path, name, tmp_path / "shared") for name in ("left", "right")]
    keeper = FolderSync(root)
    keeper.bring(nodes)
    assert packed == [["a.py"]]
    write(root, a_py="a = 2")
    keeper.bring(nodes)
    assert packed == [["a.py"]] * 2 and nodes[0].files() == {"a.py": "a = 2"}


def test_file_that_is_made_private_is_private_there(root: Path, node: FolderNode, packed: list[list[str]]) -> None:
    write(root, a="a", sub__b="b", c="c")
    keeper = FolderSync(root)

    def private() -> set[str]:
        keeper.bring([node])
        return {path for path in node.files() if not (node.work / path).stat().st_mode & 0o077}

    assert private() == set()
    (root / "a").chmod(0o600)
    (root / "sub").chmod(0o700)
    assert private() == {"a", "sub/b"}
    keeper = FolderSync(root)
    assert private() == {"a", "sub/b"}
    (root / "a").chmod(0o644)
    assert private() == {"sub/b"}
    assert packed == [["a", "c", "sub/b"], ["a", "sub/b"], ["a"]]


def test_what_comes_is_for_others_to_write_under_no_umask(root: Path, node: FolderNode) -> None:
    write(root, {"open/a.py": "a"})
    before = os.umask(0)
    try:
        FolderSync(root).bring([node])
    finally:
        os.umask(before)
    assert [(node.work / name).stat().st_mode & 0o777 for name in ("open", "open/a.py")] == [0o755, 0o644]


def test_file_of_the_host_and_one_of_an_earlier_version_keep_their_modes(
    root: Path, node: FolderNode, packed: list[list[str]]
) -> None:
    write(root, theirs="a", ours="b")
    node.work.mkdir(parents=True)
    (node.work / "theirs").write_text("a")
    FolderSync(root).bring([node])
    (note,) = Path(node.cache, "sync").glob("*.json")
    noted = json.loads(note.read_text())
    noted["files"] = {name: fields[:5] for name, fields in noted["files"].items()}
    note.write_text(json.dumps(noted))
    for name in ("theirs", "ours"):
        (root / name).chmod(0o600)
    (node.work / "ours").write_text("what a rank made of it")
    FolderSync(root).bring([node])
    assert packed == [["ours"]]
    assert node.files() == {"theirs": "a", "ours": "what a rank made of it"}


def test_node_waits_for_another_that_writes_to_the_same_folder(
    root: Path, tmp_path: Path, packed: list[list[str]]
) -> None:
    write(root, a_py="a = 1")
    first, second = (FolderNode(tmp_path, name, tmp_path / "shared") for name in ("left", "right"))
    with open_talk(first) as talk:
        listed = json.dumps([["a.py", "0" * 64, False, False]]).encode()
        talk.say("sync", base=str(first.work), cache=first.cache, root="", takes_over=True, size=len(listed))
        talk.send(listed)
        talk.hear("want")
        bringing = threading.Thread(target=FolderSync(root).bring, args=([second],))
        bringing.start()
        bringing.join(1.0)
        assert bringing.is_alive() and packed == []
    bringing.join(60)
    assert second.files() == {"a.py": "a = 1"}


def test_notebook_that_is_gone_without_a_word_holds_up_no_other_for_ever(root: Path, node: FolderNode) -> None:
    write(root, a_py="a")
    limits = "from detrain_nb.copying import folder_sync_remote as sync; "
    limits += "sync._DONE_LIMIT_S = 0.5; sync.SLOWEST_BYTES_PER_S = 1e9; "
    order = {"type": "sync", "base": str(node.work), "cache": node.cache, "root": "x", "takes_over": True, "size": 14}
    said = json.dumps(order) + '\n[["b","",0,0]]'
    command = [sys.executable, "-c", f"{limits}from detrain_nb.copying.remote_program import main; main()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin and program.stdout
        program.stdin.write(said.encode())
        program.stdin.flush()
        assert program.wait(30) == 1
        assert b'"want"' in program.stdout.read()
    assert not list(node.work.rglob(".detrain_nb-*"))
    FolderSync(root).bring([node])
    assert list(node.files()) == ["a.py"]


def test_node_that_was_not_reached_gets_nothing(root: Path, node: FolderNode) -> None:
    node.work_folder = lambda folder: ""  # type: ignore[method-assign]
    with pytest.raises(SessionError, match="node has no work folder until"):
        FolderSync(root).bring([node])


# ---- what is left alone


def test_what_ranks_made_is_left_alone(root: Path, node: FolderNode) -> None:
    write(root, a_py="a = 1", pkg__b_py="b = 1", log="")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(node.work, results="1", pkg__made_py="made", log="step 1", pkg__b_py="changed there")
    write(root, a_py="a = 2")
    keeper.bring([node])
    shutil.rmtree(root / "pkg")
    keeper.bring([node])
    assert node.files() == {
        "a.py": "a = 2",
        "log": "step 1",
        "pkg/b.py": "changed there",
        "pkg/made.py": "made",
        "results": "1",
    }
    assert keeper.notices == []


def test_file_of_somebody_else_is_not_replaced_and_that_is_said_once(root: Path, node: FolderNode) -> None:
    write(node.work, results="theirs", same="equal")
    (node.work / "folder").mkdir()
    write(root, results="ours", same="equal", folder="a file here")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(root, results="ours again")
    keeper.bring([node])
    assert node.files() == {"results": "theirs", "same": "equal"}
    assert keeper.notices == [
        "node: not overwritten, as the notebook did not send the existing files: folder, results: "
        "replace them with %distributed put, or delete them there"
    ]
    for name in ("results", "same"):
        (root / name).unlink()
    keeper.bring([node])
    assert node.files() == {"results": "theirs", "same": "equal"}, "what did not come from here is not removed"


def test_file_changed_there_and_here_is_the_notebooks(root: Path, node: FolderNode) -> None:
    write(root, a_py="a = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(node.work, a_py="a = 'there'")
    write(root, a_py="a = 'here'")
    keeper.bring([node])
    assert node.files() == {"a.py": "a = 'here'"}


@pytest.mark.parametrize("is_file_link", [True, False])
def test_nothing_is_written_or_removed_through_a_link_there(
    is_file_link: bool, root: Path, node: FolderNode, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    write(outside, b_py="mine")
    node.work.mkdir(parents=True)
    if is_file_link:
        write(root, b_py="b = 1")
        (node.work / "b.py").symlink_to(outside / "b.py")
    else:
        write(root, pkg__b_py="b = 1")
        (node.work / "pkg").symlink_to(outside)
    keeper = FolderSync(root)
    keeper.bring([node])
    shutil.rmtree(root)
    root.mkdir()
    keeper.bring([node])
    assert (outside / "b.py").read_text() == "mine" and len(keeper.notices) == 1


def test_link_that_leads_elsewhere_holds_up_nothing_else(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, pkg__b_py="b = 1", other_py="c = 1")
    (tmp_path / "outside").mkdir()
    node.work.mkdir(parents=True)
    (node.work / "pkg").symlink_to(tmp_path / "outside")
    keeper = FolderSync(root)
    keeper.bring([node])
    assert list((tmp_path / "outside").iterdir()) == [] and (node.work / "other.py").exists()
    assert "pkg/b.py" in keeper.notices[0]


def test_folder_replaced_by_a_link_is_not_emptied_through_it(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, pkg__b_py="b = 1", a_py="a")
    keeper = FolderSync(root)
    keeper.bring([node])
    shutil.move(node.work / "pkg", tmp_path / "outside")
    (node.work / "pkg").symlink_to(tmp_path / "outside")
    shutil.rmtree(root / "pkg")
    keeper.bring([node])
    assert (tmp_path / "outside" / "b.py").read_text() == "b = 1"


def test_compiled_code_goes_with_its_source(root: Path, node: FolderNode) -> None:
    write(root, pkg__b_py="b = 1", pkg__c_py="c = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(node.work, {f"pkg/__pycache__/{name}.cpython-311.pyc": "old" for name in "bc"})
    write(root, pkg__b_py="b = 2")
    keeper.bring([node])
    assert sorted(path.name for path in (node.work / "pkg" / "__pycache__").iterdir()) == ["c.cpython-311.pyc"]
    shutil.rmtree(root / "pkg")
    keeper.bring([node])
    assert not (node.work / "pkg").exists()


def test_compiled_code_is_not_removed_through_a_link(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, b_py="b = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(tmp_path, {"elsewhere/b.cpython-311.pyc": "of another module"})
    (node.work / "__pycache__").symlink_to(tmp_path / "elsewhere")
    write(root, b_py="b = 2")
    keeper.bring([node])
    assert (tmp_path / "elsewhere" / "b.cpython-311.pyc").exists()


def test_link_in_the_place_of_the_notebook_s_folder_sends_nothing(root: Path, node: FolderNode, tmp_path: Path) -> None:
    """Where a group can write the parent folder, others can plant the link; the user never meant to send its target."""
    write(root, a_py="a = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    write(tmp_path, {"home/diary": "secret"})
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "home")
    with pytest.raises(SpecError, match=f"now points to {tmp_path}/home, no longer to {root}: none of its files"):
        keeper.bring([node])
    assert sorted(path.name for path in node.work.iterdir()) == ["a.py"]


def test_link_that_is_put_on_the_way_meanwhile_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a group can write the work folder, others can replace a folder between the check and the removal."""
    private, sub = tmp_path / "private", tmp_path / "work" / "sub"
    write(tmp_path, {f"{place}/{name}": "x" for place in ("private", "work/sub") for name in ("a.py", "b.txt")})
    sent = {}
    for name in ("a.py", "b.txt"):
        write(tmp_path, {f"{place}/__pycache__/a.cpython-311.pyc": "x" for place in ("private", "work/sub")})
        status = (sub / name).lstat()
        os.utime(private / name, ns=(status.st_mtime_ns, status.st_mtime_ns))
        sent[f"sub/{name}"] = Sent("", False, status.st_size, status.st_mtime_ns, is_ours=True)
    look = Sent.is_untouched

    def exchange(self: Sent, status: os.stat_result | None) -> bool:
        if not sub.is_symlink():
            sub.rename(tmp_path / "moved")
            sub.symlink_to(private)
        return look(self, status)

    monkeypatch.setattr(Sent, "is_untouched", exchange)
    folder_sync_remote._remove_unwanted(str(tmp_path / "work"), {}, sent)
    assert sorted(path.name for path in private.rglob("*.*")) == ["a.cpython-311.pyc", "a.py", "b.txt"]
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["b.txt"], "what was looked at has gone"
    assert not sent


# ---- syncs that end early


def test_full_disk_leaves_old_files_whole_and_the_rest_comes_later(
    root: Path, node: FolderNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: list[list[str]]
) -> None:
    write(root, a_py="a = 1", b_py="b = 1")
    keeper = FolderSync(root)
    keeper.bring([node])
    full = """
from detrain_nb.copying import receiver, remote_program

def check_room(self, name, size):
    if name == "b.py":
        raise receiver.FilesError(f"{self.folder}/{name} cannot be written: the disk is full")

receiver.TreeWriter.check_room = check_room
remote_program.main()
"""
    with monkeypatch.context() as patch:
        patch.setattr(node, "program", full)
        write(root, a_py="a = 2", b_py="b = 2")
        with pytest.raises(DetrainError, match=r"node: .*/work/b.py cannot be written: the disk is full"):
            keeper.bring([node])
    assert node.files() == {"a.py": "a = 2", "b.py": "b = 1"}
    keeper.bring([node])
    assert node.files() == {"a.py": "a = 2", "b.py": "b = 2"}
    assert packed == [["a.py", "b.py"], ["a.py", "b.py"], ["b.py"]]
    (root / "a.py").unlink()
    keeper.bring([node])
    assert node.files() == {"b.py": "b = 2"}, "what came before the disk was full is known as ours"


def test_node_that_fails_is_named_and_the_others_have_all(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, a_py="a = 1")
    bad = FolderNode(tmp_path, "bad", tmp_path / "a file" / "work")
    (tmp_path / "a file").write_text("")
    keeper = FolderSync(root)
    with pytest.raises(DetrainError, match=r"bad: .*: Not a directory"):
        keeper.bring([bad, node])
    assert node.files() == {"a.py": "a = 1"}
    with pytest.raises(DetrainError, match="bad: "):
        keeper.bring([bad, node])
    assert node.runs == 1


# ---- nodes that lie


class Liar(FolderNode):
    """A node that answers with lines of the test; ``told`` holds the bytes that it received."""

    def __init__(self, base: Path, *lines: dict[str, object]) -> None:
        super().__init__(base, "liar")
        self._lines = lines
        self.told = b""

    @contextlib.contextmanager
    def run_files(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()

        def run() -> None:
            with contextlib.suppress(OSError):  # the notebook has closed the connection
                self.told = theirs.recv(1 << 16)
                for line in self._lines:
                    theirs.sendall(json.dumps(line).encode() + b"\n")
                while data := theirs.recv(1 << 16):
                    self.told += data

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ours
        finally:
            ours.close()
            thread.join(10)
            theirs.close()


@pytest.mark.parametrize("indices", [[7], [-1], ["../secret"], [True], [0.0], None, {"0": 1}, [0] * 3])
def test_node_gets_no_file_but_those_that_travel(indices: object, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret")
    write(root, a_py="a", left_out="the secret")
    (root / ".gitignore").write_text("left_out")
    liar = Liar(tmp_path, {"type": "want", "indices": indices}, {"type": "done"})
    with pytest.raises(WireError, match="liar: "):
        FolderSync(root).bring([liar])
    assert b"PK" not in liar.told and b"secret" not in liar.told


def test_files_that_a_node_leaves_alone_are_of_those_that_were_sent(root: Path, tmp_path: Path) -> None:
    write(root, a_py="a")
    names = ["a.py", "invented", "\x1b[3J", 7, *(str(number) for number in range(10_000))]
    keeper = FolderSync(root)
    keeper.bring([Liar(tmp_path, {"type": "want", "indices": []}, {"type": "done", "left_alone": names})])
    assert keeper._left_alone == {("liar", "a.py")}
    (notice,) = keeper.notices
    assert "did not send the existing files: a.py: replace them" in notice


class Sloth(Liar):
    """A node that never finishes, in one of several ways."""

    def __init__(self, base: Path, way: str) -> None:
        super().__init__(base)
        self.name = self._way = way

    @contextlib.contextmanager
    def run_files(self) -> Iterator[socket.socket]:
        self.runs += 1
        ours, theirs = socket.socketpair()
        is_over = threading.Event()

        def run() -> None:
            if self._way == "takes nothing":
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            elif self._way == "waits after all has come":
                theirs.recv(1 << 16)
                theirs.sendall(b'{"type": "want", "indices": [0]}\n')
            while not is_over.wait(0.01) and self._way not in ("says nothing", "takes nothing"):
                with contextlib.suppress(OSError):
                    if self._way == "waits after all has come":
                        theirs.recv(1 << 20, socket.MSG_DONTWAIT)
                with contextlib.suppress(OSError):
                    theirs.sendall(b'{"type": "wait"}\n' if "waits" in self._way else b" ")

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ours
        finally:
            is_over.set()
            ours.close()
            thread.join(10)
            theirs.close()


def test_node_that_does_not_come_to_an_end_is_gone_on_without(root: Path, node: FolderNode, tmp_path: Path) -> None:
    write(root, a_py=os.urandom(500_000).hex())
    ways = ["waits", "waits after all has come", "says a line without end", "says nothing", "takes nothing"]
    sloths = [Sloth(tmp_path, way) for way in ways]
    keeper = FolderSync(root, patience=Patience(silence_s=2.5, bring_s=2.5))
    keeper.bring([*sloths, node])
    assert list(node.files()) == ["a.py"]
    assert set(keeper.notices) == {
        f"{way} did not receive the files of {root} in time; cells no longer wait for it, and its ranks keep the "
        "files received earlier: check whether its disk hangs, then try %distributed restart"
        for way in ways
    }
    write(root, a_py="a = 2")
    keeper.bring([*sloths, node])
    assert node.files() == {"a.py": "a = 2"}
    assert [sloth.runs for sloth in sloths] == [1] * len(ways) and len(keeper.notices) == len(ways)
    sloths[0].reconnect()
    keeper.bring([*sloths, node])
    assert [sloth.runs for sloth in sloths] == [2, 1, 1, 1, 1] and keeper.notices[-1].startswith(
        "waits did not receive"
    )


# ---- in a session


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the notebook's folder the working directory; return it."""
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(run))
    monkeypatch.chdir(root)
    return root


@pytest.mark.slow
def test_module_of_the_notebook_is_imported_on_the_ranks(
    here: Path, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, mymodule_py="value = 1", ignored__big="x")
    (here / ".gitignore").write_text("ignored/\n")
    with Session.start(1, nodes=ssh_nodes(testbed), device="cpu", init=False) as session:
        assert session.run_cell("import mymodule; mymodule.value").values == {0: 1, 1: 1}
        write(here, {"mymodule.py": "value = 2", "pkg/__init__.py": "from .inner import x", "pkg/inner.py": "x = 3"})
        result = session.run_cell("import importlib; importlib.reload(mymodule); import pkg; (mymodule.value, pkg.x)")
        assert result.values == {0: (2, 3), 1: (2, 3)}
        write(here, mymodule_py="value = 4")  # of the same size, within the same second
        assert session.run_cell("importlib.reload(mymodule).value", ranks="h1").values == {1: 4}
        assert session.run_cell("import os; sorted(os.listdir())").values[1] == [
            ".gitignore",
            "__pycache__",
            "mymodule.py",
            "pkg",
        ]
        folders = session.run_cell("os.getcwd()").values

        session.run_cell("open(f'result-{rank}', 'w').write(str(rank))")
        write(here, new="new")
        (here / "mymodule.py").unlink()
        assert session.run_cell("os.path.exists('mymodule.py'), os.path.exists(f'result-{rank}')").values == {
            0: (False, True),
            1: (False, True),
        }
        assert sorted(session.files.get(".", here / "back")) == ["h0", "h1"]
        assert (here / "back" / "h1" / "h1" / "result-1").read_text() == "1"
        assert not (here / "back" / "h1" / "h1" / "result-0").exists()
        session.files.put(here / "new", "data", nodes="h0")
        assert repr(session.files.check_data("data")).splitlines()[0] == "data: not the same on 2 nodes"
        with pytest.raises(SpecError, match="'h7' is not a node of this session; its nodes: h0, h1"):
            session.files.put(here / "new", nodes=["h7"])
        session.detach()

    with Session.attach(session.name, nodes=ssh_nodes(testbed)) as again:
        write(here, new="newer")
        assert again.run_cell("open('new').read()").values == {0: "newer", 1: "newer"}
        again.detach()
    with Session.attach(session.name, nodes=ssh_nodes(testbed)) as again:
        with monkeypatch.context() as patch:
            patch.delattr(BootstrappedNode, "run_files")  # the nodes have reported that they have all files
            assert again.run_cell("open('new').read()").values == {0: "newer", 1: "newer"}
        write(here, later_py="x = 5")
        assert again.run_cell("import later; later.x, __import__('os').getcwd()").values == {
            rank: (5, folder) for rank, folder in folders.items()
        }
        assert not again.news.notices


@pytest.mark.slow
def test_session_of_a_home_leaves_it_here_and_goes_on_in_a_folder_that_is_too_much(
    here: Path, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path.home())
    session = Session.start(1, nodes=ssh_nodes(testbed, 1), device="cpu", init=False)
    try:
        assert [words for words in session.news.notices if "is a home" in words]
        assert session.run_cell("import os; os.listdir()").values == {0: []}
        session.detach()
        monkeypatch.chdir(here)
        with open("large", "wb") as file:
            file.truncate(60_000_000)
        session = Session.attach(session.name, nodes=ssh_nodes(testbed, 1))
        assert [
            words
            for words in session.news.notices
            if "not copied to the nodes until the next attach: the folder" in words
        ]
        assert session.run_cell("import os; os.listdir()").values == {0: []}
    finally:
        session.stop(cold=True)


@pytest.mark.slow
def test_session_without_sync_leaves_the_folder_here(here: Path, testbed: Testbed) -> None:
    write(here, mymodule_py="value = 1")
    with Session.start(1, nodes=ssh_nodes(testbed, 1), device="cpu", init=False, sync=False) as session:
        assert session.run_cell("import os; os.listdir()").values == {0: []}


def test_folder_that_is_too_much_starts_no_session(here: Path, testbed: Testbed) -> None:
    with open(here / "large", "wb") as file:
        file.truncate(60_000_000)
    log = testbed.folder / "h0" / "sshd.log"
    before = log.read_text()
    with pytest.raises(SpecError, match="--no-sync"):
        Session.start(1, nodes=ssh_nodes(testbed, 1), device="cpu", init=False)
    assert log.read_text() == before, "no host was connected to"


@pytest.mark.slow
def test_session_of_this_machine_has_its_folder_already(here: Path) -> None:
    write(here, mymodule_py="value = 1")
    with Session.start(ranks=1, device="cpu", init=False) as session:
        assert session.run_cell("import mymodule; mymodule.value").values == {0: 1}
        assert session.files.put("mymodule.py")["this machine"].files == 0
        assert session.files.put("mymodule.py", "copies")["this machine"].files == 1
        assert (here / "copies" / "mymodule.py").exists()
        assert session.files.check_data("copies").is_same
        session.files.get("copies/mymodule.py", here / "back")
        assert (here / "back" / "mymodule.py").read_text() == "value = 1"


# ---- data


@pytest.fixture
def data_nodes(tmp_path: Path) -> list[FolderNode]:
    nodes = [FolderNode(tmp_path, name) for name in ("n0", "n1", "n2")]
    for node in nodes:
        (node.work / "data" / "in").mkdir(parents=True)
        for number in range(100):
            (node.work / "data" / "in" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        for name in (b"w\tx", b"w\t\xff"):  # names that could not be sent
            (node.work / "data" / "in" / os.fsdecode(name)).write_bytes(name[:5].ljust(5))
        (node.work / "data" / "large.bin").write_bytes(b"a" * (1 << 20) + b"b" * (1 << 20) + b"c" * (1 << 20))
    return nodes


SIZE = 100_010 + (3 << 20)


def test_same_data_is_the_same(data_nodes: list[FolderNode]) -> None:
    found = check(data_nodes, "data")
    assert found.is_same and found.differences == {"n0": [], "n1": [], "n2": []}
    title, head, *rows = repr(found).splitlines()
    assert title == "data: the same on 3 nodes" and head.split() == ["node", "files", "bytes", "checksum"]
    assert [row.split()[:3] for row in rows] == [[name, "103", f"{SIZE:,}"] for name in ("n0", "n1", "n2")]
    assert len({row.split()[3] for row in rows}) == 1
    assert check(data_nodes, str(data_nodes[0].work / "data" / "large.bin")).states["n2"].files == 1


def lose_one(data: Path) -> None:
    (data / "in" / "7.bin").unlink()


def change_the_end(data: Path) -> None:
    with open(data / "large.bin", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def change_the_beginning(data: Path) -> None:
    with open(data / "large.bin", "r+b") as file:
        file.write(b"x")


def rename(data: Path) -> None:
    (data / "in" / "7.bin").rename(data / "in" / "seven.bin")


def link(data: Path) -> None:
    (data / "more").symlink_to("in")


def change_odd_name(data: Path) -> None:
    (data / "in" / "w\tx").write_bytes(b"other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose_one, r"1 file fewer, 1,000 bytes fewer"),
        (change_the_end, r"contents differ: large\.bin"),
        (change_the_beginning, r"contents differ: large\.bin"),
        (rename, r"names or sizes differ"),
        (link, r"1 link to a folder, or device, elsewhere 0"),
        (change_odd_name, r"contents differ: 'in/w\\tx'"),
        (shutil.rmtree, r"missing"),
    ],
)
def test_node_that_differs_is_named_with_what_differs(
    change: Callable[[Path], Any], words: str, data_nodes: list[FolderNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(data_nodes[1].work / "data")
    found = check(data_nodes, "data")
    assert not found.is_same
    rows = repr(found).splitlines()
    assert rows[0] == "data: not the same on 3 nodes"
    assert re.search(rf"^n1 .*{words}", rows[3])
    assert found.differences["n0"] == found.differences["n2"] == []


def test_what_is_not_looked_at_is_said(data_nodes: list[FolderNode]) -> None:
    for node in data_nodes:
        link(node.work / "data")
    found = check(data_nodes, "data")
    assert found.is_same and repr(found).count("1 link to a folder, or device, not compared") == 3


def test_links_to_files_count_as_files(data_nodes: list[FolderNode], tmp_path: Path) -> None:
    file = data_nodes[1].work / "data" / "large.bin"
    file.rename(tmp_path / "elsewhere.bin")
    file.symlink_to(tmp_path / "elsewhere.bin")
    assert check(data_nodes, "data").is_same


def test_data_that_is_nowhere_is_told(data_nodes: list[FolderNode]) -> None:
    nothing = check(data_nodes, "nothing")
    where = "relative paths are resolved in the folder where the ranks of each node start"
    assert repr(nothing) == f"nothing: on no node\n{where}"
    assert nothing._repr_html_() == f"<p>nothing: on no node<br>{where}</p>"


def test_names_of_nodes_and_files_are_text_in_html() -> None:
    bad = "<script>alert(1)</script>"
    states = {"a": DataState(True, 1, 1, "x", ((bad, 1, "1"),)), bad: DataState(True, 1, 1, "x", ((bad, 1, "2"),))}
    shown = DataCheck(bad, states)._repr_html_()
    assert "<script" not in shown and shown.count("&lt;script&gt;") == 3


@pytest.mark.parametrize(
    "said",
    [
        {"exists": True},
        {"exists": True, "sample": {"x": 1}, "files": 1, "folders": 1, "size": 1, "skipped": 0},
        {"exists": True, "sample": {"x": ["1", "2"]}, "files": 1, "folders": 1, "size": 1, "skipped": 0},
        {"exists": True, "sample": {}, "files": "1", "folders": 1, "size": 1, "skipped": 0},
        {"exists": True, "sample": {str(n): [1, "2"] for n in range(65)}, "files": 1, "size": 1, "skipped": 0},
    ],
)
def test_state_that_cannot_be_is_not_believed(said: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(WireError, match="liar: "):
        check([Liar(tmp_path, {"type": "state", **said})], "data")


def test_control_characters_of_a_node_are_not_shown(tmp_path: Path) -> None:
    liars = []
    for digest in ("\x07", "\x08\x08"):
        said = {"sample": {"\x1b[2J": [1, digest]}, "files": 1, "size": 1, "skipped": 0, "names": "\x1b"}
        liars.append(Liar(tmp_path, {"type": "state", "exists": True, **said}))
        liars[-1].name = f"liar {len(liars)}"
    shown = repr(check(liars, "d"))
    assert "contents differ: ?[2J" in shown and all(line.isprintable() for line in shown.splitlines())
