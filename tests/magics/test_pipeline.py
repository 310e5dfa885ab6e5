"""%pipeline: a spec in a file or a variable, planned, checked, exported and imported, without a session."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from detrain_nb.magics.pipeline import PipelineMagics
from IPython.core.error import UsageError

from detrain_nb.formats import Imported
from detrain_nb.plan import Plan
from detrain_nb.plan.targets import KINDS
from detrain_nb.spec import PipelineSpec
from detrain_nb.spec.nodes_file import read_nodes

SPEC = PipelineSpec.from_dict(
    {"name": "mnist", "source": {"script_text": "a = 1\n"}, "nodes": [{"host": "a", "ranks": 2}, {"host": "b"}]}
)


@pytest.fixture(scope="module")
def magics() -> PipelineMagics:
    return PipelineMagics(SimpleNamespace(user_ns={"spec": SPEC, "number": 3}))


def test_plan_is_returned(magics: PipelineMagics, tmp_path: Path) -> None:
    SPEC.save(tmp_path / "my spec.toml")
    for where in ("spec", f"'{tmp_path}/my spec.toml'"):
        plan = magics.pipeline(f"plan {where} --parallelism.tp=3")
        assert isinstance(plan, Plan) and plan.world_size == 3
        assert plan.mesh and plan.mesh.axes["tp"] == 3


def test_spec_without_faults_is_told_so(magics: PipelineMagics, capsys: pytest.CaptureFixture[str]) -> None:
    assert magics.pipeline("check spec") is None
    assert capsys.readouterr().out == "spec: no faults found\n"


def test_script_is_printed_or_written(
    magics: PipelineMagics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    magics.pipeline("export torchrun spec --training.epochs 7")
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/sh\n") and '"epochs": 7' in text
    magics.pipeline(f"export torchrun spec --training.epochs 7 --output {tmp_path}/job.sh")
    assert (tmp_path / "job.sh").read_text() == text
    assert capsys.readouterr().out == f"wrote {tmp_path}/job.sh\n"
    magics.pipeline("export torchrun spec --rendezvous.max_restarts 1 --name other --nodes x,y,z")
    said = capsys.readouterr()
    assert said.err.startswith("warning: checkpoint: restarted ranks begin at step 0")
    assert "# other: 3 ranks on 3 nodes" in said.out


def test_import_is_returned_or_written(
    magics: PipelineMagics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = magics.pipeline(
        f"import -o {tmp_path}/s.toml -- torchrun --nproc-per-node 2 t.py --training.x '1 2' # x"
    )
    assert isinstance(imported, Imported) and imported.spec
    assert imported.spec.source.arguments == ("--training.x", "1 2")
    assert capsys.readouterr().out == f"wrote {tmp_path}/s.toml\n"
    assert PipelineSpec.load(tmp_path / "s.toml") == imported.spec
    (tmp_path / "hosts").write_text("gpu[1-2]\n")
    magics.pipeline(f"import {tmp_path}/hosts --from hostfile -o {tmp_path}/nodes.json")
    assert read_nodes(tmp_path / "nodes.json") == magics.pipeline(f"import {tmp_path}/hosts").nodes
    assert "# left out: HF_TOKEN: " in str(magics.pipeline("import -- HF_TOKEN=x torchrun t.py"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import", "give a file, or a command line after --: import -- torchrun train.py"),
        ("import a -- torchrun b.py", "give a file, or a command line after --"),
        ("import a --from hostfil", f"--from 'hostfil': give one of {', '.join(KINDS)}"),
        ("import torchrun t.py", "unexpected argument 't.py': a command line must follow --, as in: import -- t.py"),
        ("plan spec -- x", "-- x: only import takes a command"),
        ("import gone.yaml", "gone.yaml cannot be read: it does not exist"),
        ("import -o a.txt -- torchrun t.py", "a.txt: the name must end in one of .json, .toml, .yaml, .yml"),
        ("plan", "the following arguments are required: SPEC"),
        ("plna spec", "unknown command 'plna': did you mean plan?"),
        ("plan gone.json", "gone.json cannot be read: it does not exist"),
        ("plan titan.toml", "titan.toml: is not a spec, but of the kind torchtitan: make it a spec first: import"),
        ("export torchrn spec", "'torchrn' is not an export format: give one of torchrun, slurm"),
        ("export slurm spec", "a has 2 ranks on cpu, b has 1 on cpu: give both the same"),
        ("plan spec --parallelism.tp 4", "mesh tp=4"),
        ("check spec --rendezvous.min_nodes 3", "rendezvous.min_nodes: 3, but the spec has 2 nodes"),
        ("plan number", "the variable number is of type int, not PipelineSpec"),
        ("export slurm spec --gpus -3", "-3: give 0 or more"),
        ("plan 'spec", "No closing quotation"),
    ],
)
def test_wrong_line_is_one_line(
    magics: PipelineMagics, line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("titan.toml").write_text('model.flavor = "8B"\n')
    with pytest.raises(UsageError) as caught:
        magics.pipeline(line)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_help_is_printed(magics: PipelineMagics, capsys: pytest.CaptureFixture[str]) -> None:
    magics.pipeline("--help")
    assert "COMMAND" in capsys.readouterr().out


def test_line_without_a_command_lists_the_pipelines_of_the_folder(
    magics: PipelineMagics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    magics.pipeline("")
    assert capsys.readouterr().out == f"no pipelines in {tmp_path}/pipelines\n"
    (tmp_path / "other").mkdir()
    SPEC.save(tmp_path / "other" / "mnist.toml")
    magics.pipeline("console other")
    assert "mnist  mnist.toml" in capsys.readouterr().out
