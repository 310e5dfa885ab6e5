"""The examples as a user starts them: torchrun and gloo ranks; then the saved file in one process without ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ..testbed.machine import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--epochs=1", "--batch_size=40", "--lr=0.001", "--model_name=m", "--samples=1200", "--report=1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(folder: Path, argv: list[str], **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(folder: Path, script: str, processes: int, *options: str) -> tuple[int, str, str]:
    """Run a script in an empty folder, so that the files there come from this run."""
    argv = [*TORCHRUN, "--standalone", f"--nproc_per_node={processes}", str(EXAMPLES / script), *options]
    with start(folder, argv) as process:
        out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def run_line(line: str, folder: str, tmp_path: Path) -> tuple[str, Path]:
    """Run a line that a user types in the example's folder, here a copy: the files there come from this run."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    own = tmp_path / "examples" / folder
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    argv = shlex.split(line)
    argv[0] = str(shutil.which(argv[0], path=path))
    # torchrun has one default port for the whole machine, which other tests may be using.
    with start(own, argv, PATH=path, PET_MASTER_PORT=str(free_ports(1)[0])) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out, own


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_" + script.replace("/", "_"), EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def told(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+)", line)}


def losses_of(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*: loss ([\d.]+)$", out, re.MULTILINE)]


def evaluate_alone(script: str, file: Path, samples: int) -> dict[str, float]:
    """Return the loss and accuracy of the saved file in the plain model, computed by hand."""
    module = load(script)
    model: nn.Module = module.make_model()
    model.load_state_dict(load_file(file))
    model.eval()
    images, labels = module.common.fashion_mnist(samples)[1].tensors
    with torch.no_grad():
        output = model(images)
    return {
        "loss": F.cross_entropy(output, labels).item(),
        "accuracy": (output.argmax(1) == labels).float().mean().item(),
    }


@pytest.mark.slow
@pytest.mark.needs_debian("dataset-fashion-mnist")
@pytest.mark.parametrize("script, processes", [("tp/nn/sequence_main.py", 2), ("fsdp_tp/main.py", 4)])
def test_saved_file_is_the_whole_model_and_as_good_as_was_printed(script: str, processes: int, tmp_path: Path) -> None:
    """The other examples are run by the lines of the README, below."""
    gpu = "_".join("0" * processes)
    code, out, err = torchrun(tmp_path, script, processes, f"--gpu={gpu}", *SMALL)
    assert code == 0, err
    check_saved(script, tmp_path / "m.safetensors", out, samples=1200)
    losses = losses_of(out)
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0], losses


def check_saved(script: str, file: Path, out: str, samples: int) -> None:
    """Check that the file alone has the scores that the ranks reported at the end, and is better than a guess."""
    shown = re.findall(r"^step .*: test (.*)$", out, re.MULTILINE)
    [saved] = re.findall(rf"^saved {file.name}: test (.*)$", out, re.MULTILINE)
    assert told(saved) == told(shown[-1]), "who has saved it was told what the ranks have scored"
    alone = evaluate_alone(script, file, samples)
    assert told(saved)["loss"] == pytest.approx(alone["loss"], abs=2e-6)
    assert told(saved)["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-6)
    assert alone["accuracy"] > 0.3


PIPELINE = "torchrun --nproc_per_node=3 main.py --gpu=0_0_0 --epochs=2 --batch_size=40 --lr=0.001 --model_name=m"
TENSOR = (
    'torchrun --nnodes=1 --node_rank=0 --nproc_per_node=2 --rdzv_id=101 --rdzv-backend=c10d --rdzv_endpoint="{host}" '
    'main.py --gpu="0_0_0" --epochs=4 --batch_size=50 --lr=0.001 --model_name="ppl_04"'
)


@pytest.mark.slow
@pytest.mark.needs_debian("dataset-fashion-mnist")
@pytest.mark.parametrize("folder", ["ppl/nn", "ppl/restnet"])
def test_line_of_the_readme_runs_in_its_folder(folder: str, tmp_path: Path) -> None:
    """A master and two stages; only ``--samples`` is added to the line."""
    assert f"`{PIPELINE}`" in (EXAMPLES / "README.md").read_text()
    assert PIPELINE in str(load(f"{folder}/main.py").__doc__)
    out, own = run_line(f"{PIPELINE} --samples=600", folder, tmp_path)
    assert [file.name for file in own.glob("*.safetensors")] == ["m.safetensors"]
    check_saved(f"{folder}/main.py", own / "m.safetensors", out, samples=600)


@pytest.mark.slow
@pytest.mark.needs_debian("dataset-fashion-mnist")
def test_detrains_line_for_tensors_runs_in_its_folder(tmp_path: Path) -> None:
    line = TENSOR.format(host=f"localhost:{free_ports(1)[0]}")
    out, own = run_line(f"{line} --samples=600", "tp/nn", tmp_path)
    check_saved("tp/nn/main.py", own / "ppl_04.safetensors", out, samples=600)


@pytest.mark.thorough
@pytest.mark.needs_debian("dataset-fashion-mnist")
def test_log_is_shown_when_torchrun_leaves_it_alone(tmp_path: Path) -> None:
    line = TENSOR.format(host=f"localhost:{free_ports(1)[0]}").replace(" main.py", " -- main.py")
    out, _ = run_line(f"{line} --log=6 --samples=600", "tp/nn", tmp_path)
    assert re.findall(r"^step +(\d+) of 48: loss", out, re.MULTILINE) == ["1", "7", "13", "19", "25", "31", "37", "43"]


@pytest.mark.thorough
@pytest.mark.needs_debian("dataset-fashion-mnist")
def test_three_machines_each_start_one_process(tmp_path: Path) -> None:
    """DeTrain's own command: ``--nnodes=3 --node_rank=k``. The master is on the first machine and has the file."""
    port = free_ports(1)[0]
    nodes = []
    for rank in range(3):
        folder = tmp_path / f"machine{rank}"
        folder.mkdir()
        where = [f"--node_rank={rank}", "--master_addr=localhost", f"--master_port={port}"]
        argv = [*TORCHRUN, "--nnodes=3", "--nproc_per_node=1", *where, str(EXAMPLES / "ppl/nn/main.py")]
        nodes.append(start(folder, [*argv, "--gpu=0_0_0", *SMALL]))
    outputs = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], outputs
    assert [(tmp_path / f"machine{rank}" / "m.safetensors").exists() for rank in range(3)] == [True, False, False]
    alone = evaluate_alone("ppl/nn/main.py", tmp_path / "machine0/m.safetensors", samples=1200)
    assert told(outputs[0][0])["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_sorter_sorts(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "gpt_sorter/main.py", 2, "--epochs=1", "--samples=10400", "--report=10")
    assert code == 0, err
    [saved] = re.findall(r"^saved sorter.safetensors: test (.*)$", out, re.MULTILINE)
    assert told(saved)["sorted"] > 0.95
    module = load("gpt_sorter/main.py")
    model = module.make_model()
    model.load_state_dict(load_file(tmp_path / "sorter.safetensors"))
    rows, _ = module.make_data(10400)[1].tensors
    questions = rows[:100, : module.DIGITS].tolist()
    right = sum(module.sort(model, digits) == sorted(digits) for digits in questions)
    assert right / 100 == pytest.approx(told(saved)["sorted"], abs=0.05)


@pytest.mark.parametrize(
    "layout", [pytest.param("--pp=1", marks=pytest.mark.thorough), pytest.param("--pp=2", marks=pytest.mark.slow)]
)
def test_bert_learns_and_from_pretrained_takes_it(layout: str, tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "bert/main.py", 2, layout, "--epochs=1", "--samples=600", "--report=1")
    assert code == 0, err
    losses = losses_of(out)
    assert losses[0] > 7 and sum(losses[-5:]) / 5 < 0.8 * losses[0]
    module = load("bert/main.py")
    model = module.BertForMaskedLM.from_pretrained(tmp_path / "bert").eval()
    rows = module.make_words()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    inputs, targets = module.hide(rows[:300], seed=2).tensors
    with torch.no_grad():
        logits = model(inputs).logits
    [shown] = re.findall(r"^step .*: test (.*)$", out, re.MULTILINE)
    assert told(shown)["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), abs=1e-5
    )


@pytest.mark.thorough
def test_wrong_arguments_are_told_once(tmp_path: Path) -> None:
    code, _, err = torchrun(tmp_path, "ppl/nn/main.py", 3, "--gpu=0_0", "--batch_size=40")
    assert code != 0
    assert re.findall(r"^error: .*", err, re.MULTILINE) == [
        "error: --gpu=0_0: give 0 or 1 for each of 3 processes, as 0_0_0"
    ]
    assert "examples/ppl" not in err.split("ChildFailedError")[0], "no traceback of a rank"


@pytest.mark.parametrize(
    "options, message",
    [
        ("--gpu=0_0", "give 0 or 1 for each of 3 processes, as 0_0_0"),
        ("--gpu=0_0_2", "give 0 or 1 for each of 3 processes"),
        ("--gpu=0_0_0_0", "give 0 or 1 for each of 3 processes"),
        ("--gpu=0_0_1", "those that train are all on GPUs, or all on CPUs"),
        pytest.param(
            "--gpu=0_1_1",
            "2 GPUs are asked for here",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has a GPU for each"),
        ),
        ("--batch_size=0", "argument --batch_size: 0 is not a whole number, 1 or more"),
        ("--epochs=two", "argument --epochs: two is not a whole number"),
        ("--epoch_s=2", "unrecognized arguments: --epoch_s=2"),
    ],
)
def test_wrong_arguments_are_a_line_on_the_first_process_of_a_machine(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = load("common.py")
    monkeypatch.setattr(sys, "argv", ["main.py", *options.split()])
    for local_rank in range(3):
        ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        for name, value in ranks.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as caught:
            common.Parser("").get_args(has_master=True)
        assert message in caught.value.code if local_rank == 0 else caught.value.code == 0
