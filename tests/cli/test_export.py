"""`detrain-nb export` and `import` print or write a script or spec, with the options of the command line applied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detrain_nb.cli.commands import main
from detrain_nb.documents import parse_document, write_document
from detrain_nb.plan.targets import OPTIONS
from detrain_nb.spec import PipelineSpec


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "my spec.yaml"
    nodes = [{"host": "a"}, {"host": "b"}]
    write_document(path, {"name": "mnist", "source": {"script_text": "job_spec()\n"}, "nodes": nodes})
    return str(path)


def test_script_is_printed(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--training.epochs", "7", "--rendezvous.port=77"]
    assert main(["export", "torchrun", spec, *words]) == 0
    text, errors = capsys.readouterr()
    assert text.startswith("#!/bin/sh\n# mnist: 2 ranks on 2 nodes")
    assert '"epochs": 7' in text and "--rdzv-endpoint=a:77" in text
    told = "no GPUs are exported for a, b: if each has some, give their number as --gpus"
    assert errors == f"detrain-nb: warning: nodes.devices: {told}\n"
    assert main(["export", "runai", spec, *words, "--gpus", "2", "--image", "a/b:1"]) == 0
    assert capsys.readouterr().err == "", "what is said of an image is about jobs of ours"
    assert subprocess.run(["sh", "-n"], input=text, text=True, timeout=60).returncode == 0


def test_list_of_hosts_that_is_taken_for_a_host_is_told(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text("gpu1\n")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "slurm", spec, "--gpus", "1", "--nodes", "hostfile"]) == 0
    said = "hostfile is also a file of the kind hostfile: to use its hosts, first import hostfile -o nodes.toml"
    assert capsys.readouterr().err == f"detrain-nb: warning: nodes.host: {said}\n"
    assert main(["import", "hostfile", "-o", "nodes.toml"]) == 0
    capsys.readouterr()
    assert main(["export", "slurm", spec, "--gpus", "1", "--nodes", "nodes.toml"]) == 0
    assert capsys.readouterr().err == ""


def test_script_is_written(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "job.sbatch"
    words = ["--output", str(output), "--gpus", "4", "--time", "01:00:00", "--nodes", "x,y,z", "--name", "other"]
    assert main(["export", "slurm", spec, *words]) == 0
    assert capsys.readouterr() == ("", f"wrote {output}\n")
    assert main(["export", "slurm", spec, *words]) == 0
    assert capsys.readouterr() == ("", f"wrote {output}, replacing the old file\n")
    text = output.read_text()
    assert (
        "#SBATCH --nodes=3\n" in text
        and "--job-name=other\n" in text
        and "#SBATCH --gpus-per-node=4\n" in text
        and "--time=01:00:00\n" in text
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_disk_behind_the_output_is_one_line(spec: str) -> None:
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "detrain_nb", "export", "torchrun", spec]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "detrain-nb: output is incomplete: No space left on device"
    assert "Traceback" not in done.stderr


def test_help_names_the_options_of_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    shown = capsys.readouterr().out
    slurm = shown.partition("\noptions of slurm:\n")[2].partition("\n\n")[0]
    assert "--time" in slurm and "--namespace" not in slurm
    text = "".join(shown.split())  # the help also breaks lines at hyphens
    for name, words in OPTIONS.items():
        assert "".join(f"--{name.replace('_', '-')}{name.upper()}{words}".split()) in text


def test_spec_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", "torchrun", "--nproc-per-node=2", "--tee", "3", "a.py", "--training.lr", "1"]
    assert main(["import", "--as", "toml", *command]) == 0
    text, errors = capsys.readouterr()
    assert parse_document(text, ".toml")["source"] == {"script": "a.py", "arguments": ["--training.lr", "1"]}
    assert errors == "detrain-nb: left out: --tee: a spec has no field for it\n"
    for before in ("", ", replacing the old file"):
        assert main(["import", "-o", str(tmp_path / "a.json"), *command]) == 0
        assert capsys.readouterr() == ("", f"{errors}wrote {tmp_path}/a.json{before}\n")
    assert PipelineSpec.load(tmp_path / "a.json").source.script == "a.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import"], "give a file, or a command line after --"),
        (["import", "SPEC", "--from", "command"], "my spec.yaml: no command starts torchrun or accelerate"),
        (["export", "torchrn", "SPEC"], "'torchrn' is not an export format: give one of torchrun, slurm"),
        (["export", "torchrun", "SPEC", "--time", "5"], "torchrun has no option --time: it has no options"),
        (
            ["export", "akash", "SPEC", "--time", "5"],
            "akash has no option --time: it has --start, --part, --ssh-key, --gpu",
        ),
        (
            ["export", "akash", "SPEC", "--image", "a/b:1", "--gpu-model", "A_1"],
            "detrain-nb: --gpu-model 'A_1': no node",
        ),
        (["export", "slurm", "SPEC", "--training.epoch", "5"], "training.epoch"),
        (["export", "slurm", "gone.yaml"], "gone.yaml cannot be read: it does not exist"),
        (
            ["export", "slurm", "TITAN"],
            "titan.toml: is not a spec, but of the kind torchtitan: make it a spec first: import",
        ),
    ],
)
def test_wrong_line_is_one_line(words: list[str], said: str, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    titan = Path(spec).with_name("titan.toml")
    titan.write_text('model.flavor = "8B"\n')
    files = {"SPEC": spec, "TITAN": str(titan)}
    assert main([files.get(word, word) for word in words]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.startswith("detrain-nb: ") and errors.count("\n") == 1


def test_what_the_nodes_may_lack_is_told_of(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_document(tmp_path / "a.toml", {"name": "a", "source": {"path": str(tmp_path / "gone"), "entry": "a.py"}})
    assert main(["export", "torchrun", str(tmp_path / "a.toml")]) == 0
    assert f"detrain-nb: source.path: {tmp_path}/gone: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["90", "2:30", "02:00:00", "1-0", "1-12:30", "2-00:00:00", "unlimited"])
def test_time_is_one_that_sbatch_reads(text: str, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "slurm", spec, "--time", text]) == 0
    assert f"--time={text}" in capsys.readouterr().out
    assert main(["export", "slurm", spec, "--time", f"{text} banana"]) != 0
    assert f"--time '{text} banana': give minutes, HH:MM:SS or" in capsys.readouterr().err
