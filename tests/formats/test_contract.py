"""What every exporter must do whose text is run on nodes.

No shell changes a field, no secret is written, and the exporter refuses what its script could not do.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats import EXPORTERS
from detrain_nb.plan.job import JobSpec
from detrain_nb.spec import PipelineSpec

from ..node.git_host import commit, git, git_host
from .on_nodes import READ, WAYS, run_on_node, write_recorder

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)]
exporters = pytest.mark.parametrize("exporter", WAYS)
shells = pytest.mark.parametrize("shell", SHELLS)

NASTY = (
    " a  'b' \"c\" $HOME ${HOME} $(touch x) `touch x` \\ \\n \\0 %s %% ! !! * ? [a] {a,b} ~ # ; & | < > ( ) \t\n\n"
    "EOF\n-e\r\n\x01\x7f\x81\xe9 日本 𝄞 \u2028 Ā ́\n"
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=30)
NAMES = LINES.map(lambda text: "x" + text.replace("/", "").replace("\\", "") + ".py")


def _spec(exporter: str, **fields: Any) -> PipelineSpec:
    source = {"script_text": "print()\n", **fields.pop("source", {})}
    return PipelineSpec.from_dict({"name": "mnist", "source": source, **WAYS[exporter].needs, **fields})


def _export(exporter: str, spec: PipelineSpec) -> str:
    return EXPORTERS[exporter](spec, spec.plan())


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recorder(tmp_path_factory.mktemp("recorder") / "my 'py' $(x) `y` é" / "python 3")


def test_every_exporter_is_run_here_or_only_read() -> None:
    assert WAYS.keys() ^ READ.keys() == EXPORTERS.keys()


@exporters
@shells
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(TEXTS, max_size=4), value=TEXTS, script=TEXTS, description=LINES, name=NAMES, workdir=LINES)
@example(
    arguments=["=ls", "a==ls", "a:=ls"], value="=ls", script="=ls", description="=ls", name="=ls.py", workdir="=ls"
)
@example(
    arguments=[NASTY, "", "-x", "--", NASTY],
    value=NASTY,
    script=NASTY,
    description=NASTY.split("\t")[0],
    name="x'$(a)`b`\" é.py",
    workdir="a 'b' $(c) `d`",
)
def test_no_field_is_changed_by_a_shell(
    exporter: str,
    shell: str,
    recorder: str,
    arguments: list[str],
    value: str,
    script: str,
    description: str,
    name: str,
    workdir: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "scripts").mkdir(exist_ok=True)
    (tmp_path / "scripts" / name).write_bytes(script.encode())
    at = tmp_path / f"work {workdir.replace('/', '')}"
    at.mkdir(exist_ok=True)
    spec = _spec(
        exporter,
        source={"script_text": None, "script": str(tmp_path / "scripts" / name), "arguments": arguments},
        env={"VALUE": value},
        description=description.replace("\t", ""),
        nodes=[{"host": "first", "python": recorder, "workdir": str(at)}],
    )
    ended = run_on_node(exporter, _export(exporter, spec), shell=shell, folder=tmp_path / "node")
    assert (ended.status, ended.errors) == (0, "")
    assert ended.seen
    assert ended.seen.program[1:] == arguments
    assert Path(ended.seen.program[0]).read_bytes() == script.encode()
    assert Path(ended.seen.program[0]).name == name
    assert ended.seen.env["VALUE"] == value
    assert ended.seen.folder == str(at)
    assert ended.seen.stdin == "", "ranks would read the script"
    job = Path(ended.seen.env["DETRAIN_NB_JOB_SPEC"]).read_text()
    assert JobSpec.from_json(job) == spec.job_spec(spec.plan())
    assert not list(tmp_path.rglob("x")), "something was run"


@exporters
@shells
def test_lines_of_setup_are_run_by_the_shell_before_torchrun(
    exporter: str, shell: str, recorder: str, tmp_path: Path
) -> None:
    spec = _spec(
        exporter,
        source={"setup": ['B="$A more"; export B', "cd /", "if true; then", "  export C='it''s'", "fi"]},
        nodes=[{"host": "first", "python": recorder, "setup": "export A=$VALUE"}],
        env={"VALUE": "some"},
    )
    seen = run_on_node(exporter, _export(exporter, spec), shell=shell, folder=tmp_path).seen
    assert seen
    assert [seen.env[name] for name in "ABC"] == ["some", "some more", "its"]
    assert Path(seen.folder) == Path(seen.program[0]).parent, "its ranks run where it lies, wherever setup has gone"


@exporters
@shells
def test_home_is_that_of_the_node(exporter: str, shell: str, tmp_path: Path) -> None:
    write_recorder(tmp_path / "my env" / "python")
    (tmp_path / "$x 'y'").mkdir()
    spec = _spec(exporter, nodes=[{"host": "first", "python": "~/my env/python", "workdir": "~/$x 'y'"}])
    seen = run_on_node(exporter, _export(exporter, spec), shell=shell, folder=tmp_path).seen
    assert seen and seen.folder == str(tmp_path / "$x 'y'")


@exporters
@shells
@pytest.mark.parametrize("line", ["false", "exit 3", "nowhere-to-be-found", "echo 'open", "}", "esac; }"])
def test_line_of_setup_that_fails_ends_the_job(
    exporter: str, shell: str, line: str, recorder: str, tmp_path: Path
) -> None:
    spec = _spec(exporter, source={"setup": [line]}, nodes=[{"host": "first", "python": recorder}])
    ended = run_on_node(exporter, _export(exporter, spec), shell=shell, folder=tmp_path)
    assert ended.status != 0
    assert ended.seen is None


@exporters
def test_secret_is_named_and_never_written(
    exporter: str, recorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    monkeypatch.setenv("OTHER_TOKEN", "very-secret")
    spec = _spec(exporter, secrets=["MY_TOKEN"], nodes=[{"host": "first", "python": recorder, "env": ["OTHER_TOKEN"]}])
    text = _export(exporter, spec)
    assert "very-secret" not in text
    env = {"MY_TOKEN": "a 'b'"}
    ended = run_on_node(exporter, text, shell="sh", folder=tmp_path, env=env)
    assert (ended.status, ended.seen) == (2, None)
    assert ended.errors.startswith("mnist: OTHER_TOKEN is not set: export it on this node first")
    seen = run_on_node(exporter, text, shell="sh", folder=tmp_path, env={**env, "OTHER_TOKEN": "c"}).seen
    assert seen and seen.env["MY_TOKEN"] == "a 'b'"


@exporters
def test_every_node_is_told_its_number_and_where_the_first_one_is(exporter: str, recorder: str, tmp_path: Path) -> None:
    nodes = [{"host": host, "python": recorder, "ranks": 2} for host in ("first", "second")]
    text = _export(exporter, _spec(exporter, nodes=nodes, rendezvous={"port": 29500, "timeout_s": 77}))
    for node_rank in (0, 1):
        seen = run_on_node(exporter, text, shell="sh", folder=tmp_path, node_rank=node_rank).seen
        assert seen
        if (endpoint := WAYS[exporter].endpoint) is None:
            assert seen.options == ["-m", "torch.distributed.run"]
            continue
        assert {
            "--nnodes=2",
            "--nproc-per-node=2",
            f"--node-rank={node_rank}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={endpoint(node_rank)}",
            "--rdzv-conf=timeout=77",
        } <= set(seen.options)


@exporters
@pytest.mark.parametrize("kind", ["env", "secrets"])
def test_no_variable_of_a_spec_is_one_of_the_script(exporter: str, kind: str, recorder: str, tmp_path: Path) -> None:
    """A variable of a spec must not replace one of the script or of Slurm, such as the rank or the job's path."""
    given = {"node": "1", "folder": "/elsewhere"}
    others = {"SLURM_NODEID": "1", "IFS": "01/"} if kind == "env" else {}
    for restarts in (0, 1):
        spec = _spec(
            exporter,
            nodes=[
                {"host": "first", "python": recorder, "address": "10.0.0.1"},
                {"host": "second", "python": recorder},
            ],
            rendezvous={"max_restarts": restarts},
            **({"env": given | others} if kind == "env" else {"secrets": list(given)}),
        )
        ended = run_on_node(exporter, _export(exporter, spec), shell="bash", folder=tmp_path, env=given)
        assert ended.seen, ended.errors
        assert Path(ended.seen.program[0]).parent.parent.name == "0"
        assert Path(ended.seen.program[0]).is_relative_to(tmp_path)
        assert given.items() <= ended.seen.env.items()
        if restarts or WAYS[exporter].endpoint:
            said = ended.seen.options
            assert any(each.endswith("is_host=1") if restarts else each == "--node-rank=0" for each in said)


@exporters
def test_restarts_are_those_of_torchrun(exporter: str, recorder: str, tmp_path: Path) -> None:
    nodes = [{"host": host, "python": recorder} for host in ("first", "second")]
    text = _export(exporter, _spec(exporter, nodes=nodes, rendezvous={"max_restarts": 3, "timeout_s": 77}))
    for node_rank in (0, 1):
        seen = run_on_node(exporter, text, shell="sh", folder=tmp_path, node_rank=node_rank).seen
        assert seen
        assert {"--rdzv-backend=c10d", "--max-restarts=3"} <= set(seen.options)
        assert f"--rdzv-endpoint={WAYS[exporter].store(node_rank)}" in seen.options
        assert f"--rdzv-conf=join_timeout=77,is_host={int(node_rank == 0)}" in seen.options


@exporters
def test_cells_of_a_notebook_become_the_script(exporter: str, recorder: str, tmp_path: Path) -> None:
    def cell(text: str, *tags: str, kind: str = "code") -> dict[str, Any]:
        return {"cell_type": kind, "metadata": {"tags": [*tags]}, "source": text.splitlines(keepends=True)}

    path = tmp_path / "my notebook.ipynb"
    cells = [
        cell("%matplotlib"),
        cell("import torch", "job"),
        cell("# x", "job", kind="markdown"),
        cell("a = 1\n", "job"),
    ]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    spec = _spec(
        exporter, source={"script_text": None, "notebook": str(path)}, nodes=[{"host": "first", "python": recorder}]
    )
    seen = run_on_node(exporter, _export(exporter, spec), shell="sh", folder=tmp_path / "node").seen
    assert seen and Path(seen.program[0]).name == "my notebook.py"
    assert Path(seen.program[0]).read_text() == "# Cell 2\nimport torch\n\n\n# Cell 4\na = 1\n"
    path.write_text(json.dumps({"cells": [cell("a = 1\n%time b", "job")]}))
    with pytest.raises(SpecError, match=r"notebook\.ipynb, cell 1, line 2: is not Python: a script cannot have magics"):
        _export(exporter, spec)
    path.write_text(json.dumps({"cells": [cell("a = 1")]}))
    with pytest.raises(SpecError, match=r"no code cell has the tag 'job': tag the cells of the job"):
        _export(exporter, spec)
    path.unlink()
    with pytest.raises(SpecError, match=r"notebook\.ipynb cannot be read: it does not exist"):
        _export(exporter, spec)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a tag, a branch and main, each with another text in the script."""
    folder = tmp_path_factory.mktemp("repositories") / "it's"
    (folder / "a 'b'").mkdir(parents=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "main"],):
        subprocess.run(["git", *who, *command], cwd=folder, check=True, timeout=60)
    for text, then in [("first", ["tag", "v1"]), ("second", ["branch", "side"]), ("third", ["status"])]:
        (folder / "a 'b'" / "train me.py").write_text(text)
        for command in (["add", "."], ["commit", "-qm", text], then):
            subprocess.run(["git", *who, *command], cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return folder


@exporters
@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("kind", ["a folder", "a link"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folder_of_another_user_is_not_that_of_the_job(
    exporter: str, shell: str, kind: str, recorder: str, tmp_path: Path
) -> None:
    (at := tmp_path / "all").mkdir()
    at.chmod(0o1777)
    (theirs := at / WAYS[exporter].folder).mkdir()
    (theirs / "0").mkdir()
    os.chown(theirs, 65534, 65534)
    if kind == "a link":
        theirs.rename(tmp_path / "elsewhere")
        os.chown(tmp_path / "elsewhere", 0, 0)
        theirs.symlink_to(tmp_path / "elsewhere")
    spec = _spec(exporter, name="train", nodes=[{"host": "a", "python": recorder}])
    text = _export(exporter, spec)
    ended = run_on_node(exporter, text, shell=shell, folder=at)
    assert (ended.seen, ended.status) == (None, 2)
    assert "another user owns it in a world-writable folder: start this elsewhere" in ended.errors
    os.rename(theirs, tmp_path / "gone")
    for _ in range(2):
        assert run_on_node(exporter, text, shell=shell, folder=at).seen
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o700


@exporters
@pytest.mark.parametrize("ref, text", [(None, "third"), ("v1", "first"), ("side", "second"), ("commit", "second")])
def test_repository_is_cloned_at_its_ref(
    exporter: str, ref: str | None, text: str, repository: Path, recorder: str, tmp_path: Path
) -> None:
    if ref == "commit":
        found = subprocess.run(["git", "rev-parse", "side"], cwd=repository, capture_output=True, text=True, timeout=60)
        ref = found.stdout.strip()
    git = {"url": str(repository), **({"ref": ref} if ref else {}), "folder": "a 'b'"}
    spec = _spec(
        exporter,
        source={"script_text": None, "git": git, "entry": "train me.py"},
        nodes=[{"host": "a", "python": recorder}],
    )
    for _ in range(2):  # the script can be run again
        ended = run_on_node(exporter, _export(exporter, spec), shell="sh", folder=tmp_path)
        assert ended.seen, ended.errors
        assert Path(ended.seen.program[0]).read_text() == text
        assert ended.seen.folder.endswith("/source/a 'b'")
    git["ref"] = "gone"
    spec = _spec(exporter, source={"script_text": None, "git": git, "entry": "train me.py"})
    ended = run_on_node(exporter, _export(exporter, spec), shell="sh", folder=tmp_path)
    assert ended.status != 0 and "gone" in ended.errors


@exporters
@pytest.mark.parametrize("kind", ["heads", "tags"])
def test_commit_is_no_branch_or_tag_of_that_name(exporter: str, kind: str, recorder: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    pinned, other = (commit(work, {"train.py": text}) for text in ("pinned", "other"))
    for ref in (pinned, "0" * 64):
        git("update-ref", f"refs/{kind}/{ref}", other, at=work)
        wanted = {"url": str(work), "ref": ref}
        nodes = [{"host": "a", "python": recorder}]
        spec = _spec(exporter, source={"script_text": None, "git": wanted, "entry": "train.py"}, nodes=nodes)
        ended = run_on_node(exporter, _export(exporter, spec), shell="sh", folder=tmp_path)
        if ref == pinned:
            assert ended.seen and Path(ended.seen.program[0]).read_text() == "pinned", ended.errors
        else:
            assert ended.status != 0 and not ended.seen


@exporters
def test_token_is_read_where_it_is_and_stands_nowhere(exporter: str, recorder: str, tmp_path: Path) -> None:
    commit(tmp_path / "work", {"train.py": "private"})
    with git_host(tmp_path / "host", token="very-secret") as host:
        git = {"url": host.publish(tmp_path / "work", "a.git"), "token": "MY_TOKEN"}
        spec = _spec(
            exporter,
            source={"script_text": None, "git": git, "entry": "train.py"},
            nodes=[{"host": "a", "python": recorder}],
        )
        text, folder = _export(exporter, spec), tmp_path / "node"
        ended = run_on_node(exporter, text, shell="sh", folder=folder)
        assert (ended.status, ended.seen) == (2, None) and "MY_TOKEN is not set" in ended.errors
        ended = run_on_node(exporter, text, shell="sh", folder=folder, env={"MY_TOKEN": "wrong"})
        assert ended.status != 0 and ended.seen is None
        ended = run_on_node(exporter, text, shell="sh", folder=folder, env={"MY_TOKEN": "very-secret"})
    assert ended.seen, ended.errors
    assert Path(ended.seen.program[0]).read_text() == "private"
    assert "MY_TOKEN" not in ended.seen.env, "the ranks need it no more"
    assert not [path for path in folder.rglob("*") if path.is_file() and b"very-secret" in path.read_bytes()]


@exporters
def test_folder_that_all_nodes_have_is_named_by_its_whole_path(exporter: str, recorder: str, tmp_path: Path) -> None:
    folder = tmp_path / "my $folder"
    source = {"script_text": None, "path": str(folder), "entry": "a/train.py"}
    text = _export(exporter, _spec(exporter, source=source, nodes=[{"host": "a", "python": recorder}]))
    ended = run_on_node(exporter, text, shell="sh", folder=tmp_path / "node")
    assert ended.status == 2
    assert ended.errors == f"mnist: source.path: {folder}/a/train.py does not exist: every node needs it at this path\n"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "train.py").touch()
    seen = run_on_node(exporter, text, shell="sh", folder=tmp_path / "node").seen
    assert seen and (seen.program, seen.folder) == ([f"{folder}/a/train.py"], str(folder))


@exporters
def test_module_is_run_as_one(exporter: str, recorder: str, tmp_path: Path) -> None:
    spec = _spec(
        exporter,
        source={"script_text": None, "module": "a.b", "arguments": ["$x"]},
        nodes=[{"host": "a", "python": recorder}],
    )
    seen = run_on_node(exporter, _export(exporter, spec), shell="sh", folder=tmp_path).seen
    assert seen and (seen.options[-1], seen.program) == ("-m", ["a.b", "$x"])


@exporters
def test_folder_for_what_the_script_makes_is_there(exporter: str, recorder: str, tmp_path: Path) -> None:
    text = _export(exporter, _spec(exporter, nodes=[{"host": "a", "python": recorder}]))
    seen = run_on_node(exporter, text, shell="sh", folder=tmp_path).seen
    assert seen and Path(seen.env["DETRAIN_NB_ARTIFACTS"]).parent == Path(seen.env["DETRAIN_NB_JOB_SPEC"]).parent
    assert Path(seen.env["DETRAIN_NB_ARTIFACTS"]).is_dir()


GIT = {"url": "https://example.org/a.git"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a token that all can read": (
        {"source": {"script_text": None, "git": {"url": "http://a.org/a.git", "token": "T"}, "entry": "a.py"}},
        r"source\.git\.token: http://a\.org would receive it unencrypted: give an https:// url",
    ),
    "a bundle": (
        {"source": {"script_text": None, "git": {**GIT, "how": "bundle"}, "entry": "a.py"}},
        r'source\.git\.how "bundle": .* give "clone"',
    ),
    "a URL": (
        {"source": {"script_text": None, "path": "s3://bucket/a", "entry": "a.py"}},
        r"source\.path: a shell script cannot fetch a URL: give",
    ),
    "a script that is gone": ({"source": {"script_text": None, "script": "gone.py"}}, "gone.py cannot be read"),
}


@exporters
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_script_cannot_do_is_refused_with_one_line(exporter: str, case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(SpecError, match=message) as caught:
        _export(exporter, _spec(exporter, **fields))
    assert "\n" not in str(caught.value)


@exporters
def test_image_is_needed_where_a_container_is_started_and_named_elsewhere(exporter: str) -> None:
    if "image" not in WAYS[exporter].needs:
        text = _export(exporter, _spec(exporter, image="a/b:1"))
        assert "# Left out, because nothing here uses it: image" in text
        return
    with pytest.raises(SpecError, match=r"^image: .* give image, "):
        _export(exporter, _spec(exporter, image=None))


@pytest.mark.parametrize("exporter", [exporter for exporter, way in WAYS.items() if way.is_script])
@shells
def test_shells_take_the_whole_script(exporter: str, shell: str, tmp_path: Path) -> None:
    path = tmp_path / "exported"
    path.write_text(_export(exporter, _spec(exporter, nodes=[{"host": "a", "ranks": 2}, {"host": "b", "ranks": 2}])))
    done = subprocess.run([shell, "-n", path], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
