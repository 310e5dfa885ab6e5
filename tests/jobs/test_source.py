"""Every kind of source, from the spec to the ranks' files: planned on this machine, laid out by the node's code."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from detrain_nb.copying.json_lines import FilesError, Talk, Untrue
from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.jobs import submit
from detrain_nb.jobs.shipping import ship
from detrain_nb.jobs.source import ShippedSource, SourceFile, fetch_bundle, fetch_here, plan_source
from detrain_nb.node.job.sources import lay_out
from detrain_nb.spec import PipelineSpec

from ..node.git_host import commit, git, git_host
from ..node.source_talk import Sender, source_talk

KEY = "AKIA-secret-of-a-test"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is HOME for the test; this machine's cache is inside it."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    return home


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return the folder of a node's cache."""
    return tmp_path / "node"


def plan(**source: Any) -> ShippedSource:
    return fetch_bundle(plan_source(PipelineSpec.from_dict({"name": "x", "source": source})))


def arrive(source: ShippedSource, cache: Path, *, at: str = "source", **options: Any) -> dict[str, bytes]:
    """Ship a source to a node, lay it out, and return its files."""
    with source_talk(cache) as talk:
        found = ship(talk, source, **options)
    target = cache.parent / at
    lay_out(found, target, cache=cache)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# ---- what runs, and what is sent to the nodes


def test_script_travels_alone(tmp_path: Path, node: Path) -> None:
    write(tmp_path / "a b", {"größe.py": "print(1)\n", "beside.py": "2"})
    source = plan(script=str(tmp_path / "a b/größe.py"))
    assert (source.program, str(source)) == (("größe.py",), "1 file, 9 B")
    assert arrive(source, node) == {"größe.py": b"print(1)\n"}
    with pytest.raises(DetrainError, match=r"gone\.py.*it does not exist"):
        plan(script=str(tmp_path / "gone.py"))


READS = "from detrain_nb import job_spec"


def test_file_of_a_schedule_travels_with_a_script(tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "here", {"train.py": READS, "sub/own.csv": "0F0,0B0\n"}))

    def spec(schedule: str, **source: str) -> PipelineSpec:
        return PipelineSpec.from_dict({"name": "x", "source": source, "parallelism": {"schedule": schedule}})

    for source, name in (({"script": "train.py"}, "train.py"), ({"script_text": READS}, "script.py")):
        planned = spec("./sub/own.csv", **source)
        assert planned.check() == []
        assert arrive(plan_source(planned), node, at=name) == {name: READS.encode(), "sub/own.csv": b"0F0,0B0\n"}
    folder = spec("sub/own.csv", path=".", entry="train.py")
    assert folder.check() == [] and "sub/own.csv" in arrive(plan_source(folder), node, at="folder")
    for name in ("gone.csv", "../here/sub/own.csv"):
        (fault,) = spec(name, script="train.py").check()
        assert (
            str(fault)
            == f"parallelism.schedule: {name}: no such file in {tmp_path}/here, from which it is sent to the nodes"
        )
        with pytest.raises(DetrainError):
            plan_source(spec(name, script="train.py"))
    for planned in (spec("/x/own.csv", script="train.py"), spec("own.csv", module="package.train")):
        (fault,) = planned.check()
        assert "own.csv is not sent to the nodes: put it at that path" in fault.text and fault.severity == "warning"
        assert len(plan_source(planned).files) <= 1


@pytest.mark.parametrize("path", ["project", "script"])
def test_file_that_hides_a_module_is_told_of(path: str, tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "1", "torch.py": "1", "json/__init__.py": "1", "random/x.csv": "1", "sub/re.py": "1"})
    source = {"path": str(tmp_path), "entry": "train.py"} if path == "project" else {"script": f"{tmp_path}/torch.py"}
    found = PipelineSpec.from_dict({"name": "x", "source": source}).check()
    field, hidden = ("source.path", ["json", "torch"]) if path == "project" else ("source.script", ["torch"])
    assert [str(each) for each in found] == [
        f"warning: {field}: ranks import {name} from the folder of their script, not from Python or torch: rename it"
        for name in hidden
    ]


def test_checkpoint_of_several_nodes_in_a_folder_of_each_is_told_of() -> None:
    def check(url: str, *nodes: dict[str, str]) -> list[str]:
        fields = {"name": "x", "source": {"script_text": "1"}, "checkpoint": {"url": url}, "nodes": nodes}
        return [str(each) for each in PipelineSpec.from_dict(fields).check() if each.field == "checkpoint.url"]

    two = ({"host": "a"}, {"host": "b"})
    (said,) = check("runs/1", *two)
    assert said.startswith("warning: checkpoint.url: runs/1 is a different folder on each node, and would have only")
    assert not check("runs/1", two[0]) and not check("/shared/runs", *two) and not check("s3://bucket/runs", *two)
    assert not check("runs/1", *({**each, "workdir": "/shared"} for each in two))


def test_text_and_module(node: Path) -> None:
    assert arrive(plan(script_text="print('ü')\n"), node) == {"script.py": "print('ü')\n".encode()}
    source = plan(module="package.train")
    assert (source.program, source.files) == (("-m", "package.train"), ())
    assert arrive(source, node, at="nothing") == {}


def test_tagged_cells_of_a_notebook_are_one_script(tmp_path: Path, node: Path) -> None:
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["job"]}, "source": ["a = 1\n", "b = 2"]},
        {"cell_type": "code", "metadata": {}, "source": "%matplotlib inline"},
        {"cell_type": "markdown", "metadata": {"tags": ["job"]}, "source": "text"},
        {"cell_type": "code", "metadata": {"tags": ["x", "job"]}, "source": "print(a + b)"},
    ]
    saved = tmp_path / "train.ipynb"
    saved.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    spec = PipelineSpec.from_dict({"name": "x", "source": {"notebook": str(saved)}})
    source = plan_source(spec)
    assert source.program == ("train.py",) and not source.notices
    script = arrive(source, node)["train.py"].decode()
    said: list[object] = []
    exec(script, {"print": said.append})
    assert said == [3]
    saved.write_text(json.dumps({"cells": [], "nbformat": 4}))
    with pytest.raises(SpecError, match="no code cell has the tag"):
        plan_source(spec)


def test_folder_travels_without_what_stays_here(tmp_path: Path, node: Path) -> None:
    files = {
        "train.py": "1",
        "pkg/a b.py": "2",
        "data/big.csv": "3",
        ".gitignore": "data/\n",
        ".env": "KEY=1",
        "id_rsa": "key",
        "__pycache__/x.pyc": "x",
    }
    folder = write(tmp_path / "project", files)
    (folder / "train.py").chmod(0o755)
    source = plan(path=str(folder), entry="train.py")
    (notice,) = source.notices
    assert "not sent, as they may hold keys: .env, id_rsa" in notice
    assert arrive(source, node) == {"train.py": b"1", "pkg/a b.py": b"2", ".gitignore": b"data/\n"}
    assert os.access(tmp_path / "source/train.py", os.X_OK) and not os.access(tmp_path / "source/pkg/a b.py", os.X_OK)
    for entry, said in {"data/x.py": ".detrainignore leaves it out", "gone.py": "it does not exist"}.items():
        with pytest.raises(SpecError, match=said):
            plan(path=str(folder), entry=entry)
    with pytest.raises(SpecError, match="is a home directory or contains one"):
        plan(path="~", entry="train.py")


def test_links_out_of_the_folder_are_told_of(tmp_path: Path, node: Path) -> None:
    write(tmp_path, {"data/big.csv": "1", "helper.py": "2"})
    folder = write(tmp_path / "project", {"train.py": "1", ".gitignore": "scratch\n"})
    links = {
        "data": "../data",
        "lib/helper.py": "../../helper.py",
        "gone": "nowhere",
        "scratch": "../data",
        "here": ".",
    }
    (folder / "lib").mkdir()
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    source = plan(path=str(folder), entry="train.py")
    (notice,) = source.notices
    assert "links out of the folder or not files: data, gone, lib/helper.py, pipe: copy into" in notice
    assert arrive(source, node) == {"train.py": b"1", ".gitignore": b"scratch\n"}
    with pytest.raises(SpecError, match="it is a link out of the folder"):
        plan(path=str(folder), entry="lib/helper.py")


def test_only_what_has_changed_travels(tmp_path: Path, node: Path) -> None:
    folder = write(tmp_path / "project", {"train.py": "1", "other.py": "2" * 1000})

    def arrive_again() -> list[str]:
        source, sent = plan(path=str(folder), entry="train.py"), list[str]()

        def watched(file: SourceFile) -> SourceFile:
            return replace(file, open=lambda: sent.append(file.name) or file.open())

        source.files = tuple(map(watched, source.files))
        arrive(source, node)
        return sorted(sent)

    assert arrive_again() == ["other.py", "train.py"]
    assert arrive_again() == []
    write(folder, {"train.py": "33"})
    assert arrive_again() == ["train.py"]


def test_file_that_others_put_in_the_place_of_one_is_not_sent(tmp_path: Path, node: Path) -> None:
    folder = write(tmp_path / "project", {"train.py": "1", "other.py": "222"})
    secret = tmp_path / "secret"
    secret.write_text("333")
    source = plan(path=str(folder), entry="train.py")
    (folder / "other.py").unlink()
    (folder / "other.py").symlink_to(secret)
    with source_talk(node) as talk, pytest.raises(SpecError, match=r"other\.py was changed while it was being sent"):
        ship(talk, source)
    assert not any(path.read_bytes() == b"333" for path in (node / "blobs").rglob("*") if path.is_file())


def test_folder_at_a_url(node: Path) -> None:
    files = MemoryFileSystem()
    files.store.clear()
    for name, data in {"train.py": b"1", "pkg/x.py": b"2", ".ssh/id_rsa": b"key", "pkg/.git/config": b"x"}.items():
        files.pipe_file(f"/project/{name}", data)
    source = plan(path="memory://project", entry="train.py")
    assert arrive(source, node) == {"train.py": b"1", "pkg/x.py": b"2"}
    assert ".ssh/id_rsa" in source.notices[0]
    with pytest.raises(SpecError, match="no such folder"):
        plan(path="memory://gone", entry="train.py")
    files.store.clear()


class Pages(BaseHTTPRequestHandler):
    """A folder served by HTTP; data.py redirects to the server's ``leads_to``, and /endless has endless subfolders."""

    def do_GET(self) -> None:
        leads_to, names = self.server.leads_to, ["train.py", "data.py"]  # type: ignore[attr-defined]
        if self.path.startswith("/endless"):
            names = ["more/"]
        if self.path.endswith("data.py") and leads_to:
            self.send_response(302)
            self.send_header("Location", leads_to)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        here = f"http://{self.headers['Host']}{self.path.rstrip('/')}"
        page = "".join(f'<a href="{here}/{name}">x</a>' for name in names)
        body = (page if "." not in self.path else f"# {self.path}").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain" if "." in self.path else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def pages(leads_to: str = "") -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.leads_to = leads_to  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_no_other_server_answers_for_a_folder_at_http(node: Path) -> None:
    with pages() as inner, pages(leads_to=f"{inner}/secret.py") as outer, pages(leads_to="/moved.py") as moved:
        assert arrive(plan(path=f"{inner}/top", entry="train.py"), node)["data.py"] == b"# /top/data.py"
        assert arrive(plan(path=f"{moved}/top", entry="train.py"), node, at="moved")["data.py"] == b"# /moved.py"
        with pytest.raises(DetrainError, match=f"/top redirects to another server, {inner}: give"):
            plan(path=f"{outer}/top", entry="train.py")


def test_folders_at_http_have_an_end() -> None:
    with pages() as where, pytest.raises(SpecError, match="more than 100 levels"):
        plan(path=f"{where}/endless", entry="train.py")


@pytest.mark.parametrize("by_store", [False, True])
def test_large_source_tells_how_far_it_is(tmp_path: Path, node: Path, by_store: bool) -> None:
    folder = write(tmp_path / "project", {"train.py": "1", "sub/small": "2"})
    (folder / "weights.bin").write_bytes(os.urandom(20_000_000))
    source, told = plan(path=str(folder), entry="train.py"), list[tuple[int, int, int]]()
    storage = f"file://{tmp_path}/store" if by_store else None
    arrive(source, node, storage=storage, on_progress=lambda *done: told.append(done))
    assert told[0] == (0, 0, 20_000_002) and told[-1] == (3, 20_000_002, 20_000_002)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert len({done for _, done, _ in told}) > 10
    told.clear()
    arrive(source, node.with_name("second"), storage=storage, on_progress=lambda *done: told.append(done))
    assert told[-1] == (3, 20_000_002, 20_000_002)
    told.clear()
    arrive(source, node, at="again", storage=storage, on_progress=lambda *done: told.append(done))
    assert set(told) == {(0, 0, 0)}


# ---- a node that lies


@pytest.mark.parametrize("indices", [None, [2], [0, 0], [-1], ["0"], [0, 1, 0, 1], [True], 7])
def test_node_gets_no_file_that_does_not_travel(indices: object) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)

    def lie() -> None:
        with theirs, theirs.makefile("rb") as reader, theirs.makefile("wb") as writer:
            reader.readline()
            writer.write(json.dumps({"type": "need", "indices": indices}).encode() + b"\n")
            writer.flush()
            reader.read()

    thread = threading.Thread(target=lie)
    thread.start()
    with ours, ours.makefile("rb") as reader:
        with pytest.raises(Untrue):
            ship(Talk(reader, Sender(ours)), plan(script_text="print(1)"))
        ours.shutdown(socket.SHUT_RDWR)
    thread.join(20)


def test_what_a_node_says_of_a_git_host_is_cleaned_and_cut() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs, theirs.makefile("wb") as writer, ours.makefile("rb") as reader:
        writer.write(json.dumps({"type": "unreached", "text": "\x1b[2J\n" + "x" * 10_000}).encode() + b"\n")
        writer.flush()
        source = plan(git={"url": "https://git.example/x"}, entry="train.py")
        assert ship(Talk(reader, Sender(ours)), source, node="a") == ""
    assert source.unreached == "a: ?[2J?" + "x" * 295


# ---- git


def test_repository_is_cloned_there_or_sent_from_here(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = write(
        tmp_path / "work", {"train.py": "print(1)", "sub/main.py": "print(2)", ".env": "in git, so it travels"}
    )
    (work / "link.py").symlink_to("train.py")
    (work / "leads_out").symlink_to("/etc/hostname")
    first = commit(work, {})
    wanted = {"ref": "main", "token": "GIT_TOKEN"}
    with git_host(tmp_path / "host", token="t0ken") as host:
        where = {"url": host.publish(work, "x.git"), **wanted}
        cloned = plan(git=where, entry="train.py")
        with source_talk(node) as talk, pytest.raises(SpecError, match="GIT_TOKEN is not set here"):
            ship(talk, cloned)
        with pytest.raises(SpecError, match="GIT_TOKEN is not set here"):
            plan(git={**where, "how": "bundle"}, entry="train.py")
        monkeypatch.setenv("GIT_TOKEN", "wrong")
        with pytest.raises(DetrainError, match=r"this machine: git .* does not accept the token"):
            plan(git={**where, "how": "bundle"}, entry="train.py")
        with source_talk(node) as talk, pytest.raises(FilesError, match="does not accept the token"):
            ship(talk, cloned)
        monkeypatch.setenv("GIT_TOKEN", "t0ken")
        there = arrive(cloned, node, at="cloned", node="a")
        assert cloned.commit == first and there["train.py"] == b"print(1)"
        bundled = plan(git={**where, "how": "bundle"}, entry="train.py")
        commit(work, {"train.py": "print(3)"})
        host.publish(work, "x.git")
        with pytest.raises(
            Untrue, match=f"main is commit .* on this node, but {first[:12]} on a: submit again if the branch"
        ):
            arrive(cloned, node.with_name("second node"), node="b")  # one of the nodes lies, or the branch has moved on
        pinned = plan(git={**where, "ref": first.upper()}, entry="train.py")
        assert pinned.commit == first and arrive(pinned, node.with_name("third node"), at="third") == there
        assert plan(git={**where, "how": "bundle", "folder": "sub"}, entry="main.py").files[0].size == 8
    assert bundled.commit == first and bundled.notices == ("links that are not sent: leads_out",)
    del there["leads_out"]
    assert arrive(bundled, node, at="bundled") == there
    assert "t0ken" not in repr((cloned, bundled))


def test_files_that_git_lfs_has_the_contents_of_are_told_of(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    work = tmp_path / "work"
    commit(work, {".gitattributes": "*.bin filter=lfs\n", "train.py": "1", "weights.bin": pointer})
    (notice,) = plan(git={"url": str(work), "how": "bundle"}, entry="train.py").notices
    assert notice.startswith("git LFS has the contents of weights.bin: the ranks find only pointers to them")
    commit(work, {f"{number}.bin": pointer for number in range(3)})
    (notice,) = plan(git={"url": str(work), "how": "bundle"}, entry="train.py").notices
    assert notice.startswith("git LFS has the contents of 0.bin, 1.bin, 2.bin and others: ")


def test_repository_is_sent_from_here_to_all_where_a_node_does_not_reach_its_host(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    first = commit(work, {"train.py": "print(1)"})
    with git_host(tmp_path / "host") as host:
        source = plan(git={"url": host.publish(work, "x.git"), "ref": "main"}, entry="train.py")
        with source_talk(node) as talk:
            assert ship(talk, source, node="a") and source.commit == first
        second = commit(work, {"train.py": "print(2)"})
        host.publish(work, "x.git")
        with monkeypatch.context() as patch, source_talk(node) as talk:
            patch.setenv("PATH", str(tmp_path))  # without git
            assert ship(talk, source, node="b") == ""
            with pytest.raises(FilesError, match=r'git is not installed; source\.git\.how = "auto" fetches it where'):
                ship(talk, plan(git={"url": host.url("x.git"), "how": "clone"}, entry="train.py"))
        assert source.unreached == "b: git is not installed"
        asked = len(host.asked)
        with source_talk(node) as talk:
            assert ship(talk, source, node="c") == "" and len(host.asked) == asked  # node c is not asked to fetch it
        sent = fetch_here(source, {})
    assert sent.commit == second and sent.program == source.program  # whichever commit the first node reported
    assert arrive(sent, node.with_name("second")) == {"train.py": b"print(2)"}


def test_repository_that_is_sent_from_here_is_no_larger_than_a_folder(tmp_path: Path, node: Path) -> None:
    work = tmp_path / "work"
    commit(work, {"train.py": "1"})
    number = git("rev-parse", "HEAD:train.py", at=work)
    (tmp_path / "tree").write_bytes(
        b"".join(f"100644 {name:06}".encode() + b"\0" + bytes.fromhex(number) for name in range(50_001))
    )
    tree = git("hash-object", "-w", "-t", "tree", str(tmp_path / "tree"), at=work)
    git("reset", "--quiet", "--soft", git("commit-tree", tree, "-m", "x", at=work), at=work)
    with pytest.raises(DetrainError, match=r"has 50001 files .* the limits are 50000 and"):
        plan(git={"url": str(work), "how": "bundle"}, entry="train.py")


@pytest.mark.parametrize("how", ["auto", "clone", "bundle"])
def test_dry_run_says_who_would_get_a_token_and_gives_it_to_nobody(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with git_host(tmp_path / "host") as host:
        of = {"url": host.url("x.git"), "token": "OPENAI_API_KEY", "how": how}
        spec = PipelineSpec.from_dict({"name": "x", "source": {"git": of, "entry": "train.py"}})
        told = str(submit(spec, dry_run=True))
        assert not host.asked
    to = "127.0.0.1" if how == "bundle" else "every node and to 127.0.0.1"
    assert f"\nthe value of OPENAI_API_KEY here is sent to {to}" in told and KEY not in told
    assert f"{'this machine' if how == 'bundle' else 'every node'} fetches {host.url('x.git')}" in told


def test_links_of_a_repository_do_not_multiply_what_is_sent(tmp_path: Path, home: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for number in range(60):
        (work / f"link{number}").symlink_to("big")
    commit(work, {"train.py": "1", "big": b"\0" * 10_000_000})
    with pytest.raises(SpecError, match="more than 500 MB, including link targets"):
        plan(git={"url": str(work), "how": "bundle"}, entry="train.py")


# ---- a store between this machine and the nodes


def test_files_go_through_a_folder_that_all_can_read(tmp_path: Path, node: Path) -> None:
    folder = write(tmp_path / "project", {"train.py": "1", "other.py": "2" * 1000})
    source, store = plan(path=str(folder), entry="train.py"), tmp_path / "store"
    files = arrive(source, node, storage=f"file://{store}")
    assert files == {"train.py": b"1", "other.py": b"2" * 1000}
    assert sorted(os.listdir(store)) == sorted(file.sha256 for file in source.files)
    second = node.with_name("second")
    for path in store.iterdir():
        path.write_bytes(b"x" * path.stat().st_size)  # a file that others have changed in the store is not run
    with source_talk(second) as talk, pytest.raises(FilesError, match="does not match its SHA-256: remove it"):
        ship(talk, source, storage=f"file://{store}")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a folder in an S3 bucket, which moto serves on loopback."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("jobs")
    yield "s3://jobs/sources"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_files_go_through_s3(bucket: str, tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plan(script_text="print(1)")
    given = {"AWS_SECRET_ACCESS_KEY": KEY, "OTHER": "x"}
    assert arrive(source, node, storage=bucket, environment=given) == {"script.py": b"print(1)"}
    for path in node.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()
    broken = write(tmp_path / "broken", {"s3fs.py": "raise ImportError('no s3fs here')\n"})
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with source_talk(node) as talk, pytest.raises(FilesError, match=r"cannot be read from this node: .*s3fs"):
        ship(talk, source, storage=bucket)


class _Store(BaseHTTPRequestHandler):
    """A store that claims to have every file; it returns a different file, or 404."""

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_GET(self) -> None:
        self._answer(200 if "there" in self.path else 404)
        self.wfile.write(b"print(2)")

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "8")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing: the tests do not need a log of the requests."""


@pytest.mark.parametrize("path", ["there", "gone"])
@pytest.mark.parametrize("url", ["http://me:S3CRET@{}/{}", "http://{}/{}?sig=S3CRET"])
def test_what_lets_into_a_store_is_in_no_error(url: str, path: str, node: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        storage = url.format(f"127.0.0.1:{server.server_port}", path)
        with source_talk(node) as talk, pytest.raises(FilesError) as caught:
            ship(talk, plan(script_text="print(1)"), storage=storage)
        server.shutdown()
    assert "S3CRET" not in str(caught.value)
    said = "does not match its SHA-256: remove it" if path == "there" else "cannot be read: ClientResponseError"
    assert said in str(caught.value) and "***" in str(caught.value)
