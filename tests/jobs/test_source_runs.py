"""Jobs on this machine whose source is a repository that needs a token, or a folder that is sent through a store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import DetrainError
from detrain_nb.jobs import find_job, jobs, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import PipelineSpec

from ..node.git_host import commit, git_host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROGRAM = {
    "train.py": "import os, beside\nprint('rank', os.environ['RANK'], beside.word, 'TOKEN' in os.environ)\n",
    "beside.py": "word = 'größe'\n",
}
# Prints which of these variables a rank has in its environment, and which the runner above the rank has.
SEES = """
import json, os, pathlib
names = ["A_SECRET", "GIT_TOKEN", "OF_NODE", "PLAIN"]
pid, above = os.getpid(), []
while "node.job.runner" not in above:
    pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    above = " ".join(pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\\0"))
runner = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\\0")
there = [name for name in names if any(each.startswith(name + "=") for each in runner)]
print("seen", json.dumps([[name for name in names if name in os.environ], there]))
"""
SHOWN = ["[0] rank 0 größe False", "[1] rank 1 größe False"]


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


def run(name: str, *, storage: str | None = None, secrets: dict[str, str] | None = None, **source: Any) -> list[str]:
    lines: list[str] = []
    spec = PipelineSpec.from_dict({"name": name, "source": {"entry": "train.py", **source}})
    job = submit(spec, storage=storage, secrets=secrets)
    status = job.attach(lambda line: lines.append(str(line)))
    assert (status.state, status.exit_code) == ("ended", 0), lines
    return sorted([*job.notices, *(line for line in lines if "rank" in line)])


def test_ranks_run_a_repository_that_wants_a_token(home: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    commit(work, {f"sub/{name}": text for name, text in {**PROGRAM, "weights.bin": POINTER}.items()})
    commit(work, {".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n"})
    with git_host(tmp_path / "host", token="t0ken") as host:
        wanted = {"url": host.publish(work, "x.git"), "ref": "main", "folder": "sub", "token": "TOKEN"}
        before = len(jobs())
        with pytest.raises(DetrainError, match="TOKEN is not set here"):
            run("cloned", git=wanted)
        with pytest.raises(DetrainError, match="there is no branch, tag or commit 'gone'"):
            run("cloned", git={**wanted, "ref": "gone"}, secrets={"TOKEN": "t0ken"})
        *shown, notice = run("cloned", git=wanted, secrets={"TOKEN": "t0ken"})
        assert shown == SHOWN and notice.startswith("git LFS has the contents of weights.bin: ")
    assert len(jobs()) == before + 1, "a submission that fails is no job"
    for path in home.rglob("*"):
        assert not path.is_file() or b"t0ken" not in path.read_bytes(), path


def test_ranks_run_a_folder_that_went_through_a_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in PROGRAM.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run("stored", path="project", storage="store") == SHOWN
    assert Record().get("stored").storage == f"file://{tmp_path}/store"
    assert len(os.listdir(tmp_path / "store")) == 2
    (folder / "beside.py").write_text("word = 'anew'\n")
    monkeypatch.chdir("/")
    again = find_job("stored").restart()
    assert (again.wait().exit_code, Record().get(again.id).storage) == (0, f"file://{tmp_path}/store")
    assert len(os.listdir(tmp_path / "store")) == 3


def test_job_here_inherits_no_variable_that_its_spec_names_as_secret(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("A_SECRET", "GIT_TOKEN", "OF_NODE", "PLAIN"):
        monkeypatch.setenv(name, "t0ken")
    commit(tmp_path / "work", {"train.py": SEES})
    with git_host(tmp_path / "host", token="t0ken") as host:
        fields = {
            "name": "inherits",
            "source": {
                "git": {"url": host.publish(tmp_path / "work", "x.git"), "token": "GIT_TOKEN"},
                "entry": "train.py",
            },
            "nodes": [{"host": "localhost", "ranks": 1, "env": ["OF_NODE"]}],
            "secrets": ["A_SECRET"],
        }
        job = submit(PipelineSpec.from_dict(fields))
        lines = [str(line) for line in job.logs(follow=True).lines]
    (seen,) = [json.loads(line.partition("seen ")[2]) for line in lines if "seen " in line]
    assert seen == [["A_SECRET", "OF_NODE", "PLAIN"], ["PLAIN"]]
    said: list[str] = []
    job.execute("echo ${A_SECRET-1} ${GIT_TOKEN-2} ${OF_NODE-3} $PLAIN", on_line=lambda line: said.append(line.text))
    assert said == ["1 2 3 t0ken"]
