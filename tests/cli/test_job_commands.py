"""`detrain-nb jobs`, `detrain-nb run SPEC`: real jobs of two ranks on this machine, with separate state folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.cli.commands import main
from detrain_nb.cli.job_commands import split_command
from detrain_nb.jobs.record import Record

LIMIT_S = 240.0  # the machine may be busy
SCRIPT = """
import os, pathlib, sys
from detrain_nb import job_spec
print("rank", os.environ["RANK"], "epochs", job_spec().training.epochs)
pathlib.Path("artifacts").mkdir(exist_ok=True)
pathlib.Path(f"artifacts/{os.environ['RANK']}").write_text("made")
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "0" else 0)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a spec whose job exits with its argument as the status."""
    for name, folder in (("XDG_STATE_HOME", "state"), ("XDG_CACHE_HOME", "cache"), ("DETRAIN_NB_RUNTIME_DIR", "run")):
        (tmp_path / folder).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / folder))
    file = tmp_path / "train.json"
    source = {"script_text": SCRIPT, "arguments": ["0"]}
    fields = {"name": "from-the-shell", "source": source, "training": {"epochs": 1}, "image": "some/image:1"}
    file.write_text(json.dumps(fields))
    yield file


@pytest.mark.timeout(LIMIT_S)
def test_spec_is_run_and_its_exit_status_returned(
    spec: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", str(spec), "--training.epochs", "7"]) == 0
    out, err = capfd.readouterr()
    assert "detrain-nb: note: image: some/image:1: only exports start containers yet" in err
    assert sorted(out.splitlines()) == ["[0] rank 0 epochs 7", "[1] rank 1 epochs 7"]
    assert Record().get("from-the-shell").file == os.fsencode(spec)
    assert main(["jobs", "list"]) == 0
    assert "from-the-shell" in capfd.readouterr().out
    assert main(["jobs", "logs", "from-the-shell", "--rank", "1"]) == 0
    assert capfd.readouterr().out == "[1] rank 1 epochs 7\n"
    assert main(["jobs", "logs", "--rank", "1"]) == 0
    out, err = capfd.readouterr()
    assert out == "[1] rank 1 epochs 7\n"
    assert re.fullmatch(r"detrain-nb: job from-the-shell-\S+ was submitted last\n", err)
    assert main(["jobs", "logs", "from-the-shell", "--tail", "0"]) == 0
    assert main(["jobs", "logs", "from-the-shell", "--tail", "-1"]) == 2
    assert main(["jobs", "logs", "from-the-shell", "--rank", "-1"]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert re.fullmatch(
        r"detrain-nb: tail -1: give 0 to 1,000,000\ndetrain-nb: job \S+ has no rank -1: its ranks are 0 to 1\n", err
    )
    assert main(["jobs", "fetch", "from-the-shell", "--to", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made/artifacts/1").read_text() == "made"
    assert main(["jobs", "exec", "from-the-shell", "--", "cat artifacts/0; exit 4"]) == 4
    assert "made" in capfd.readouterr().out
    assert main(["jobs", "rm", "from-the-shell", "nosuch"]) == 1
    assert "no job 'nosuch'" in capfd.readouterr().err
    assert main(["jobs", "rm", "from-the-shell"]) == 0
    assert main(["jobs", "attach"]) == 1
    assert capfd.readouterr().err == "detrain-nb: no job was submitted from here\n"
    assert main(["jobs", "show", "from-the-shell"]) == 1
    no_job = "no job 'from-the-shell' was submitted from here: detrain-nb jobs list shows those that were"
    assert capfd.readouterr().err == f"detrain-nb: {no_job}\n"


@pytest.mark.timeout(LIMIT_S)
def test_terminal_shows_how_far_a_large_folder_is_on_one_line(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)")
    (folder / "weights.bin").write_bytes(os.urandom(40_000_000))
    spec.write_text(json.dumps({"name": "large", "source": {"path": str(folder), "entry": "train.py"}}))
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "wb") as far:
        argv = [sys.executable, "-m", "detrain_nb", "jobs", "submit", str(spec), "--follow"]
        env = {**os.environ, "COLUMNS": "60"}
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=far, stdin=subprocess.DEVNULL, env=env)
        far.close()
        shown = b""
        with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
            while data := terminal.read(1 << 16):
                shown += data
        assert process.wait(LIMIT_S) == 0, shown
    lines = [line.removeprefix("\x1b[K") for line in shown.decode().split("\r")]
    sent = [line for line in lines if line.startswith("send [")]
    assert sent and "100 %, 40 MB of" in sent[-1], lines  # a fast disk may send all between two updates
    assert max(map(len, sent)) == 59


@pytest.mark.timeout(LIMIT_S)
def test_script_is_run_as_it_stands(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = spec.with_name("my script.py")
    script.write_text(SCRIPT)
    assert main(["run", str(script), "-n", "1", "--source.arguments", "0", "--training.epochs", "5"]) == 0
    assert capfd.readouterr().out == "[0] rank 0 epochs 5\n"
    assert main(["jobs", "list"]) == 0
    assert "my-script-" in capfd.readouterr().out
    assert main(["run", "nowhere.ipynb", "-n", "2"]) == 2
    assert "-n is for specs, but nowhere.ipynb is a notebook" in capfd.readouterr().err


BAR = """
import os, sys, time, pathlib
from tqdm import tqdm
deadline = time.monotonic() + 60
print("begun")
for step in tqdm(range(2), desc=f"bar of {os.environ['RANK']}", file=sys.stdout, mininterval=0):
    while step and not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
print("end", end="")
"""


@pytest.mark.timeout(LIMIT_S)
def test_terminal_draws_bars_of_a_job_while_they_move(spec: Path, tmp_path: Path) -> None:
    source = {"script_text": BAR, "arguments": [str(tmp_path / "go")]}
    spec.write_text(json.dumps({"name": "bars", "source": source}))
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "wb") as far:
        argv = [sys.executable, "-m", "detrain_nb", "run", str(spec)]
        env = {**os.environ, "COLUMNS": "60"}
        process = subprocess.Popen(argv, stdout=far, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=env)
        far.close()
        shown = b""
        with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
            while data := terminal.read(1 << 16):
                shown += data
                if b"[0] bar of 0:  50%" in shown and b"[1] bar of 1:  50%" in shown:
                    (tmp_path / "go").touch()
        assert process.wait(LIMIT_S) == 0, shown
    assert (tmp_path / "go").exists(), shown
    lines = [line.rpartition("\x1b[J")[2] for line in shown.decode().split("\r\n")]
    for rank in "01":
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own[0] == f"[{rank}] begun" and own[-1] == f"[{rank}] end"
        assert sum("100%" in line for line in own) == 1


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_job_that_fails_gives_its_status(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "submit", str(spec), "--follow", "--source.arguments=3", "--name", "fails"]) == 3
    out, err = capfd.readouterr()
    assert err.splitlines()[-3:] == [
        "  this machine: failed, exit 3, ranks 0-1: rank 0 exited with code 3",
        "the last line of rank 0:",
        "  | rank 0 epochs 1",
    ]
    setup = ["--source.setup=echo one; echo two; false", "--name", "unset"]
    assert main(["jobs", "submit", str(spec), "--follow", *setup]) == 1
    out, err = capfd.readouterr()
    assert out == "[setup] one\n[setup] two\n"
    assert err.endswith("the last line:\n  | two\n")


def test_spec_is_checked_and_shown_dry(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "check", str(spec)]) == 0
    assert main(["jobs", "submit", "--dry-run", str(spec), "--parallelism.pp", "2"]) == 0
    assert "torch.distributed.run" in capfd.readouterr().out
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "secrets": ["NOT_SET_ANYWHERE"]}))
    assert main(["jobs", "check", str(spec)]) == 1
    assert "secrets: secret NOT_SET_ANYWHERE: not set here" in capfd.readouterr().out
    assert main(["jobs", "submit", "--dry-run", str(spec)]) == 2
    assert "secret NOT_SET_ANYWHERE: not set here" in capfd.readouterr().err
    assert main(["jobs", "submit", str(spec), "--parallelism.pq", "2"]) == 2
    assert "parallelism.pq" in capfd.readouterr().err
    assert main(["jobs", "list"]) == 0
    assert "from-the-shell" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["jobs", "exec", "some"],
        ["jobs", "exec", "--", "ls"],
        ["jobs", "exec", "some", "--nodes", "gpu1", "--", "ls"],
        ["jobs", "rm"],
        ["doctor", "gpu1,gpu2", "--save"],
        ["jobs", "submit", "nowhere.yaml"],
        ["run", "nowhere.toml"],
        ["run", "nowhere.ipynb", "--training.epochs", "2"],
        ["run", "nowhere.ipynb", "--nodes", "gpu1"],
        ["run", "nowhere.toml", "--timeout", "5"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "rm", "--older-than", "nan"],
        ["jobs", "exec", "--nodes", "localhost", "--timeout", "-1", "--", "ls"],
        ["export", "slurm", "train.json", "--gpus", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_one_line(
    wrong: list[str], spec: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    assert main(wrong) == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.startswith("detrain-nb: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "jobs list --training.epochs 2",
            "detrain-nb: --training.epochs=2: only a command with a spec accepts spec fields",
        ),
        ("jobs list -- ls", "detrain-nb: -- ls: only import and jobs exec accept a command"),
        ("jobs", "detrain-nb jobs: the following arguments are required: ACTION"),
        ("jobs shw", "detrain-nb jobs: unknown command 'shw': did you mean show?"),
        ("jobs logs x --rnk 1", "detrain-nb jobs logs: unknown option --rnk: did you mean --rank?"),
        ("jobs logs x --rank", "detrain-nb jobs logs: --rank needs a value: --rank R"),
        ("jobs logs x --rank one", "detrain-nb jobs logs: argument --rank: 'one' is not a whole number"),
        ("jobs stop a b", "detrain-nb jobs stop: unexpected argument 'b': leave it out"),
        (
            "jobs exec x ls",
            "detrain-nb jobs exec: unexpected argument 'ls': a command must follow --, as in: exec JOB -- ls",
        ),
        ("jobs restart", "detrain-nb jobs restart: the following arguments are required: JOB"),
    ],
)
def test_what_a_command_does_not_take(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    err = capfd.readouterr().err
    prog = said.partition(":")[0]
    assert err == f"{said} ({prog} --help)\n"


@pytest.mark.parametrize("command", ["", "run", "jobs submit", "jobs restart", "jobs attach", "jobs exec"])
def test_help_says_the_exit_statuses(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "exit status is" in " ".join(capfd.readouterr().out.split())


@pytest.mark.skipif(os.name != "posix", reason="no session without a terminal")
def test_passphrase_is_not_asked_for_without_a_terminal() -> None:
    code = "from detrain_nb.cli.job_commands import _ask_passphrase as ask; print(ask('a key'))"
    ended = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, start_new_session=True, check=False
    )
    assert (ended.stdout, ended.stderr) == (b"None\n", b"")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_interrupt_leaves_the_job_and_says_how_to_go_on(
    num_interrupts: int, spec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endless = "--source.script_text=import time\nwhile True: print('tick', flush=True); time.sleep(0.1)"
    assert main(["jobs", "submit", str(spec), endless, "--name", "endless"]) == 0
    command = [sys.executable, "-m", "detrain_nb", "jobs", "attach", "endless"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
            assert following.stdout and following.stderr
            assert "tick" in following.stdout.readline()
            for _ in range(num_interrupts):
                following.send_signal(signal.SIGINT)
            err = following.stderr.read()
        capfd.readouterr()
    finally:
        stopped = main(["jobs", "stop", "endless", "--grace", "0"])
    assert stopped == 0 and ": stopped" in capfd.readouterr().out, "it went on"
    assert following.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err
    if num_interrupts == 1:
        assert re.fullmatch(
            r"\ndetrain-nb: interrupted: job (\S+) keeps running: detrain-nb jobs attach \1 follows it again, "
            r"detrain-nb jobs stop \1 stops it\n",
            err,
        )


def test_fields_and_command_are_told_apart() -> None:
    argv = ["jobs", "submit", "--training.epochs", "2", "a.json", "--x.y=3", "--z.flag", "--", "ls", "--a.b"]
    assert split_command(argv) == (
        ["jobs", "submit", "a.json"],
        ["--training.epochs=2", "--x.y=3", "--z.flag"],
        ["ls", "--a.b"],
    )
    argv = [
        "run",
        "a.json",
        "--artifacts",
        "*.pt",
        "--checkpoint",
        "none",
        "--source.arguments",
        "--sleep",
        "--name",
        "x",
    ]
    fields = ["--artifacts=*.pt", "--checkpoint=none", "--source.arguments=--sleep"]
    assert split_command(argv) == (["run", "a.json", "--name", "x"], fields, [])


def test_fields_at_the_top_of_a_spec_and_arguments_like_options_are_set(
    spec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = ["--env", '{"A": "1"}', "--secrets", "HOME", "--checkpoint", "none", "--source.arguments", "--sleep 1"]
    assert main(["jobs", "submit", "--dry-run", str(spec), *fields]) == 0
    out = capfd.readouterr().out
    assert "script.py --sleep 1" in out and "secrets from the environment here: HOME" in out
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--SECTION.FIELD VALUE" in capfd.readouterr().out


@pytest.mark.timeout(LIMIT_S)
def test_reader_that_has_enough_is_no_error(spec: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "detrain_nb", "jobs", "list"], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (128 + 13, b"")
