"""Jobs of real torchrun ranks on one node, run through the job service that notebooks use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from detrain_nb.agents import JOBS_MODULE
from detrain_nb.copying.json_lines import Failed, Talk
from detrain_nb.errors import DetrainError
from detrain_nb.guarded import RUN_MODULE
from detrain_nb.launch import usable_cpus
from detrain_nb.node.job.folders import machine_id
from detrain_nb.node.job.launching import first_environment, torchrun_command
from detrain_nb.node.job.order import JobOrder, JobRendezvous
from detrain_nb.node.job.preparing import RUNNER_MODULE

from ..session.soon import assert_soon
from .jobs_here import Followed, launch, make_order, own_folders, prepare, status_of, talk_here

_SECRET = "a-secret-of-the-test"
_FAILS = """
import json, os, sys, time
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {os.environ['FROM_SETUP']} {os.environ['FROM_ORDER']}")
print("to stderr", file=sys.stderr)
assert os.environ["TOKEN"] == "a-secret-" + "of-the-test" and "DETRAIN_NB_JOB_SOCKET" not in os.environ
from detrain_nb import log_metrics
log_metrics(1, loss=0.5)
os.makedirs("out"); open(f"out/model-{rank}.pt", "wb").write(b"weights of " + rank.encode())
open(os.path.join(os.environ["DETRAIN_NB_ARTIFACTS"], f"made-{rank}"), "w").write("x" * 100)
os.symlink("/etc/passwd", f"link-{rank}.pt")
os.symlink("/etc", os.path.join(os.environ["DETRAIN_NB_ARTIFACTS"], f"folder-{rank}"))
if rank == "1":
    until = time.monotonic() + 60
    made = os.path.join(os.environ["DETRAIN_NB_ARTIFACTS"], "folder-0")
    while not os.path.islink(made) and time.monotonic() < until:
        time.sleep(0.01)  # rank 0 is ended with us: it has made all by then
    os.makedirs(final := os.path.join(os.environ["DETRAIN_NB_ARTIFACTS"], "final"))
    for name in (".metadata", ".other", "__0_0.distcp"):  # as torch.distributed.checkpoint does
        open(os.path.join(final, name), "w").close()
    sys.exit(3)
time.sleep(100)
""".replace('os.makedirs("out")', 'os.makedirs("out", exist_ok=True)')


@dataclass
class Ran:
    order: JobOrder
    followed: Followed
    folder: Path


@pytest.fixture(scope="module")
def jobs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("jobs")
    base.chmod(0o700)
    with own_folders(base) as folder:
        yield folder
        with talk_here() as talk:  # clean up the jobs of a failed test
            talk.say("status", ids=None)
            for job in talk.hear("status")["jobs"]:
                if job["state"] not in ("ended", "unreadable"):
                    talk.say("stop", id=job["id"], grace_s=0)
                    talk.hear("stopped")


@pytest.fixture(scope="module")
def failed(jobs_folder: Path) -> Ran:
    """Return a finished job of two ranks whose rank 1 exited with code 3."""
    order = make_order(
        _FAILS,
        name="fails",
        ranks=(0, 1),
        world_size=2,
        setup=("echo setting up", "export FROM_SETUP='a b'"),
        env={"FROM_ORDER": "c"},
        secret_names=("TOKEN",),
    )
    with talk_here() as talk:
        launch(talk, order, secrets={"TOKEN": _SECRET})
        followed = Followed(order).begin(talk).to_end(talk)
    return Ran(order, followed, jobs_folder / order.id / f"{machine_id()}-0")


def test_rank_that_fails_gives_the_job_its_exit_code_and_its_last_lines(failed: Ran) -> None:
    job = failed.followed.job
    assert (job["state"], job["exit_code"], job["failed_rank"]) == ("ended", 3, 1)
    assert job["reason"] == "rank 1 exited with code 3"
    assert job["last_lines"] == ["rank 1 of 2: a b c", "to stderr"]
    written = json.loads((failed.folder / "exit.json").read_text())
    assert {name: job[name] for name in written} == written


def test_output_of_each_rank_of_the_setup_and_of_torchrun_is_in_its_own_log(failed: Ran) -> None:
    data = failed.followed.data
    assert data["setup.log"] == b"setting up\n"
    assert data["rank-0.log"] == b"rank 0 of 2: a b c\nto stderr\n"
    assert b"ChildFailedError" in data["torchrun.log"]
    assert json.loads(data["metrics/rank-1.jsonl"])["loss"] == 0.5
    assert data["rank-0.log"] == (failed.folder / "rank-0.log").read_bytes()


def test_files_of_a_job_are_its_users_alone_and_hold_no_secret(failed: Ran) -> None:
    for folder in (failed.folder, failed.folder.parent, failed.folder.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in failed.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10
    assert not [path for path in files if _SECRET.encode() in path.read_bytes()]


def test_artifacts_are_listed_and_read_from_where_a_fetch_stood(failed: Ran) -> None:
    where = {"id": failed.order.id, "node_rank": 0}
    with talk_here() as talk:
        talk.say("artifacts", **where, patterns=[])
        said = talk.hear("files")
        assert [name for name, *_ in said["files"]] == [
            *("out/model-0.pt", "out/model-1.pt", "artifacts/made-0", "artifacts/made-1"),
            *("artifacts/final/.metadata", "artifacts/final/__0_0.distcp"),
        ], "a link is none of them, nor what is hidden, but for what a checkpoint needs"
        assert not said["more"] and said["left_out"] == 4, "and of each rank's links it is said that they stay"
        name, size, _ = said["files"][1]
        assert size == len(b"weights of 1")
        talk.say("read", **where, name=name, offset=8)
        assert b"".join(talk.read(talk.hear("file")["size"])) == b"of 1"


@pytest.mark.parametrize("name", ["link-0.pt", "../order.json", "/etc/passwd", "out", "nothing.pt", "a\nb"])
def test_no_file_but_an_artifact_is_read(failed: Ran, name: str) -> None:
    with pytest.raises(DetrainError), talk_here() as talk:
        talk.say("read", id=failed.order.id, node_rank=0, name=name, offset=0)
        talk.hear("file")


def test_command_runs_where_the_ranks_did(failed: Ran) -> None:
    with talk_here() as talk:
        talk.say("exec", command="echo $FROM_ORDER >&2; ls out; exit 7", id=failed.order.id, timeout_s=20)
        printed = b""
        while (said := talk.hear("output", "exit"))["type"] == "output":
            printed += b"".join(talk.read(said["size"]))
        assert (printed, said["status"]) == (b"c\nmodel-0.pt\nmodel-1.pt\n", 7)


def test_command_that_takes_too_long_is_ended_with_what_it_started(jobs_folder: Path) -> None:
    with talk_here() as talk:
        talk.say("exec", command="sleep 1000 & echo $!; sleep 1000", timeout_s=1.5)
        pid = int(b"".join(talk.read(talk.hear("output")["size"])))
        assert talk.hear("exit") == {"type": "exit", "status": 124, "timed_out": True}
        assert_soon(lambda: not psutil.pid_exists(pid))


def test_command_ends_with_a_service_that_is_killed(jobs_folder: Path) -> None:
    with pytest.raises(DetrainError), talk_here() as talk:
        talk.say("exec", command="echo $$; exec sleep 1000", timeout_s=100)
        command = psutil.Process(int(b"".join(talk.read(talk.hear("output")["size"]))))
        os.kill(command.ppid(), signal.SIGKILL)
        talk.hear("exit")
    assert not psutil.wait_procs([command], timeout=10)[1]


# ---- a job that runs

_RUNS = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    print("child", child.pid, flush=True)
for number in range(10_000):
    print("line", number, flush=True)
    time.sleep(0.02)
"""


def _alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may exit meanwhile
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return found


def _parents_of(pids: list[int]) -> set[int]:
    """Return the parent pids, torchrun's among them."""
    return {psutil.Process(pid).ppid() for pid in pids} - {0, 1}


def _child_of(followed: Followed) -> int:
    return int(followed.data["rank-0.log"].split()[1])


def test_job_that_runs_is_followed_again_stopped_and_removed(jobs_folder: Path) -> None:
    order = make_order(_RUNS, name="runs", ranks=(0, 1), world_size=2, secret_names=("TOKEN",))
    with talk_here() as talk:
        launch(talk, order, secrets={"TOKEN": _SECRET})
        followed = Followed(order).begin(talk).until(talk, b"line 5\n", name="rank-0.log")
    # The notebook disconnects and comes back.
    with talk_here() as talk:
        before = dict(followed.data)
        followed.begin(talk).until(talk, b"line 15\n", name="rank-0.log")
        assert followed.data["rank-0.log"].startswith(before["rank-0.log"])
        lines = followed.data["rank-0.log"].decode().splitlines()[1:]
        assert lines[:16] == [f"line {number}" for number in range(16)], "nothing twice, nothing missing"
        assert followed.job["state"] == "running"
        pids = [followed.job["pid"], *(rank["pid"] for rank in followed.job["ranks"]), _child_of(followed)]
        assert _alive(pids) == pids
        assert _SECRET not in str([psutil.Process(pid).cmdline() for pid in (*pids, *_parents_of(pids))])
        with pytest.raises(Failed, match=f"job {order.id} is running: stop it first"):
            talk.say("remove", id=order.id, node_rank=0)
            talk.hear("removed")
        with pytest.raises(Failed, match=f"a job named runs is already running on this node: {order.id}"):
            prepare(talk, make_order("0", name="runs"))
        prepare(talk, make_order("0", name="runs-2"))  # its id shares a prefix with the first job's
        talk.say("stop", id=order.id, grace_s=20)
        assert talk.hear("stopped")["was"] == "running"
        assert _alive(pids) == []
        job = status_of(talk, order)
        assert (job["state"], job["exit_code"], job["reason"]) == ("stopped", 143, "")
        talk.say("stop", id=order.id, grace_s=20)
        assert talk.hear("stopped")["was"] == "stopped"
        rest = Followed(order, followed.offsets).begin(talk).to_end(talk)
        assert rest.begins["rank-0.log"] == followed.offsets["rank-0.log"]
        talk.say("remove", id=order.id, node_rank=0)
        talk.hear("removed")
    assert not (jobs_folder / order.id).exists()


def test_job_whose_runner_was_killed_is_lost_and_its_rest_is_ended_by_a_stop(jobs_folder: Path) -> None:
    order = make_order(_RUNS, name="lost")
    with talk_here() as talk:
        launch(talk, order)
        followed = Followed(order).begin(talk).until(talk, b"line 1\n", name="rank-0.log")
        (rank,) = followed.job["ranks"]
        child = _child_of(followed)
        os.kill(followed.job["pid"], signal.SIGKILL)
        lost = Followed(order).begin(talk).to_end(talk).job
        assert lost["state"] == "lost" and "its runner was killed" in lost["reason"]
        assert_soon(lambda: not _alive([rank["pid"]]))
        assert _alive([child]) == [child], "ranks end with the runner; what has left them does not"
        talk.say("stop", id=order.id, grace_s=5)
        assert talk.hear("stopped")["was"] == "lost"
        assert _alive([child]) == []
        assert (status_of(talk, order)["state"], status_of(talk, order)["exit_code"]) == ("ended", 137)
        talk.say("remove", id=order.id)
        talk.hear("removed")


def test_setup_that_fails_ends_the_job_with_its_status_and_its_last_words(jobs_folder: Path) -> None:
    order = make_order(
        "print('never')", setup=("sleep 1000 & disown; echo $!", "echo no such wheel >&2; exit 4", "echo on")
    )
    with talk_here() as talk:
        launch(talk, order)
        followed = Followed(order).begin(talk).to_end(talk)
    assert (followed.job["exit_code"], followed.job["reason"]) == (4, "the setup exited with code 4")
    left, *words = followed.job["last_lines"]
    assert words == ["no such wheel"] and "rank-0.log" not in followed.data
    assert _alive([int(left)]) == []


def test_job_is_stopped_in_its_setup_though_that_does_not_listen(jobs_folder: Path) -> None:
    order = make_order("print('never')", setup=("trap '' TERM", "echo begun", "sleep 1000"))
    with talk_here() as talk:
        launch(talk, order)
        Followed(order).begin(talk).until(talk, b"begun", name="setup.log")
        talk.say("stop", id=order.id, grace_s=0.5)
        assert talk.hear("stopped")["was"] == "preparing"
        job = status_of(talk, order)
    assert (job["state"], job["exit_code"], job["reason"]) == ("stopped", 143, "")


def test_workdir_is_where_ranks_start_and_a_script_is_found_from_there(jobs_folder: Path, tmp_path: Path) -> None:
    """The test inspects the command line and does not start torchrun."""
    order = replace(make_order("0", workdir=str(tmp_path / "w")), argv=("train.py", "--x"))
    argv, _ = torchrun_command(order, tmp_path, {}, store=("127.0.0.1", 1), key="")
    assert argv[-2:] == [f"{tmp_path}/source/train.py", "--x"]
    env = first_environment(order, tmp_path, {})
    assert env["PYTHONPATH"].split(":")[-1] == f"{tmp_path}/source", "modules of the source, too"


@pytest.mark.skipif(usable_cpus() < 2, reason="needs 2 processors")
def test_ranks_on_the_cpu_share_its_processors(tmp_path: Path) -> None:
    order = make_order("0")

    def threads(order: JobOrder, **env: str) -> str:
        return torchrun_command(order, tmp_path, env, store=("127.0.0.1", 1), key="")[1]["OMP_NUM_THREADS"]

    assert threads(order) == str(usable_cpus() // len(order.ranks))
    assert threads(order, OMP_NUM_THREADS="7") == "7", "the user's own"
    assert threads(replace(order, device="cuda")) == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_workdir_of_another_user_is_not_entered(jobs_folder: Path, tmp_path: Path) -> None:
    """In a folder like /tmp, another user's workdir could supply modules to the ranks and false artifacts."""
    everybodys = tmp_path / "tmp"
    (everybodys / "work").mkdir(parents=True)
    everybodys.chmod(0o1777)
    os.chown(everybodys / "work", 12345, 12345)
    order = make_order("0", workdir=str(everybodys / "work"), setup=("touch here",))
    with talk_here() as talk:
        launch(talk, order)
        job = Followed(order).begin(talk).to_end(talk).job
        assert (job["exit_code"], "was made by another user" in job["reason"]) == (127, True)
        for kind, fields in {"exec": {"command": "touch here"}, "artifacts": {"patterns": ["*"]}}.items():
            talk.say(kind, id=order.id, node_rank=0, **fields)
            with pytest.raises(Failed, match="was made by another user"):
                talk.hear("output", "exit", "files")
    assert not list((everybodys / "work").iterdir())


def test_python_and_pip_of_setup_lines_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = [first_environment(make_order("0", python=python), Path("/job"), {})["PATH"] for python in _PYTHONS]
    assert path == ["/env/bin:/usr/bin:/bin", "/usr/bin:/bin", "/usr/bin:/bin"]


_PYTHONS = ("/env/bin/python", "/usr/bin/python3", "python3")


def test_what_was_prepared_and_not_launched_leaves_nothing(jobs_folder: Path) -> None:
    order = make_order("print('never')")
    with talk_here() as talk:
        assert prepare(talk, order) > 0
        assert status_of(talk, order)["state"] == "preparing"
    assert not (jobs_folder / order.id).exists()


def test_checkpoints_in_the_folder_of_a_job_are_those_of_the_one_that_restarts_it(
    jobs_folder: Path, tmp_path: Path
) -> None:
    def source_of(order: JobOrder) -> Path:
        return next(jobs_folder.glob(f"{order.id}/*")) / "source"

    def prepared(url: str, before: JobOrder, **fields: Any) -> Path:
        order = make_order("0", spec={"checkpoint": {"url": url}}, **fields)
        prepare(talk, order, before=before.id)
        return source_of(order)

    first = make_order("0")
    with talk_here() as old, talk_here() as talk:
        prepare(old, first)
        (source_of(first) / "kept/last").mkdir(parents=True)
        (source_of(first) / "kept/last/step").write_text("7")
        (source_of(first) / "kept/latest").symlink_to("last")
        (source_of(first) / "away").symlink_to(tmp_path)
        (tmp_path / "step").write_text("8")
        found = prepared("./kept/", first) / "kept"
        assert (found / "latest/step").read_text() == "7" and (found / "latest").is_symlink()
        for url in ("away", "../source/kept", ".", f"{tmp_path}/x", "~/kept", "s3://bucket/kept", "gone"):
            assert not list(prepared(url, first).iterdir()), url
        assert not list(prepared("kept", first, workdir=str(tmp_path)).iterdir())
        assert not list(prepared("kept", make_order("0")).iterdir()), "that one was removed"
        with pytest.raises(Failed, match=r"'\.\./x' is not a job id"):
            prepare(talk, make_order("0"), before="../x")


def test_runner_that_fails_says_so_in_its_last_words(jobs_folder: Path) -> None:
    order = make_order("print('never')", name="faulty", setup=("sleep 1000 & true",))
    with talk_here() as talk:
        prepare(talk, order)
        (part,) = (jobs_folder / order.id).iterdir()
        ran = subprocess.run(
            [sys.executable, "-c", RUN_MODULE, RUNNER_MODULE, str(part)],
            input=b'{"secrets": {}}',  # without the store's address
            capture_output=True,
            timeout=60,
        )
        assert (ran.returncode, ran.stdout) == (0, b"ready\n")
        assert b"Traceback" in ran.stderr
        job = status_of(talk, order)
    assert (job["state"], job["exit_code"], job["reason"]) == ("ended", 127, "the runner failed: KeyError('store')")


def test_secret_that_did_not_come_is_named(jobs_folder: Path) -> None:
    with talk_here() as talk, pytest.raises(Failed, match="the secrets B were not sent"):
        prepare(talk, make_order("0", secret_names=("A", "B")), secrets={"A": "1"})


def _fields(**fields: Any) -> dict[str, Any]:
    return {**make_order("0").to_dict(), **fields}


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        (_fields(format=2), "the order has format 2, .* this one reads up to format 1: use that release"),
        (_fields(id="../x"), "id: '../x' is not a job id"),
        (_fields(env={"A=B": "c"}), "env: 'A=B' is not a valid variable name"),
        (_fields(argv=["no.py"]), "'no.py' is not in the source"),
        (_fields(address="192.0.2.1"), "cannot listen on 192.0.2.1"),
        (5, "the order is not an object"),
    ],
)
def test_order_that_cannot_be_is_refused_and_the_service_goes_on(
    jobs_folder: Path, order: object, complaint: str
) -> None:
    before = sorted(jobs_folder.glob("*"))
    with talk_here() as talk:
        with pytest.raises(Failed, match=complaint):
            talk.say("prepare", order=order, source="")
            talk.hear("prepared")
        talk.say("status", ids=None)
        assert isinstance(talk.hear("status")["jobs"], list)
    assert sorted(jobs_folder.glob("*")) == before


_OF_TWO = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(100)"


@pytest.mark.slow
def test_node_that_fails_ends_the_other_which_says_so(jobs_folder: Path) -> None:
    orders = _make_two("two", _OF_TWO)
    with talk_here() as first, talk_here() as second:
        _launch_two(first, second, orders)
        jobs = [Followed(order).begin(talk).to_end(talk).job for order, talk in zip(orders, (first, second))]
        assert [job["reason"] for job in jobs] == [
            "node b failed: rank 1 exited with code 5",
            "rank 1 exited with code 5",
        ]
        assert (jobs[1]["exit_code"], jobs[1]["failed_rank"], jobs[0]["failed_rank"]) == (5, 1, None)
        assert jobs[0]["exit_code"]
        first.say("status", ids=[orders[0].id])
        assert [job["node_rank"] for job in first.hear("status")["jobs"]] == [0, 1]


def _make_two(name: str, code: str) -> list[JobOrder]:
    """Return the orders of one job's two nodes; they would wait for each other for longer than a test may run."""
    common: dict[str, Any] = {"nodes": ("a", "b"), "world_size": 2, "interface": "lo", "silence_s": 300.0}
    orders = [make_order(code, name=name, node_rank=rank, ranks=(rank,), **common) for rank in (0, 1)]
    return [orders[0], replace(orders[1], id=orders[0].id)]


def _launch_two(first: Talk, second: Talk, orders: list[JobOrder]) -> None:
    port = prepare(first, orders[0])
    assert prepare(second, orders[1]) == 0
    for talk in (first, second):
        talk.say("launch", store=["127.0.0.1", port], key="")
        talk.hear("launched")


@pytest.mark.slow
def test_node_whose_torchrun_is_killed_ends_the_other_which_says_so(jobs_folder: Path) -> None:
    orders = _make_two("killed-two", "import time; print('ready', flush=True); time.sleep(100)")
    with talk_here() as first, talk_here() as second:
        _launch_two(first, second, orders)
        both = list(zip(orders, (first, second)))
        for order, talk in both:
            followed = Followed(order).begin(talk).until(talk, b"ready\n", name=f"rank-{order.node_rank}.log")
        runner = psutil.Process(followed.job["pid"])
        (torchrun,) = runner.children()
        assert not runner.net_connections(kind="tcp")
        torchrun.kill()
        jobs = [Followed(order).begin(talk).to_end(talk).job for order, talk in both]
    assert [job["reason"] for job in jobs] == [
        "node b failed: torchrun was killed by SIGKILL",
        "torchrun was killed by SIGKILL",
    ]
    assert (jobs[1]["exit_code"], jobs[1]["failed_rank"]) == (137, None)


@pytest.mark.slow
def test_node_whose_setup_fails_ends_the_other_which_says_so(jobs_folder: Path) -> None:
    first_order, second_order = _make_two("setup-two", "print('never')")
    orders = [first_order, replace(second_order, setup=("exit 4",))]
    with talk_here() as first, talk_here() as second:
        _launch_two(first, second, orders)
        jobs = [Followed(order).begin(talk).to_end(talk).job for order, talk in zip(orders, (first, second))]
    assert [job["reason"] for job in jobs] == [
        "node b failed: the setup exited with code 4",
        "the setup exited with code 4",
    ]


def test_service_that_nobody_waits_for_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    argv = [sys.executable, "-c", RUN_MODULE, JOBS_MODULE]
    with theirs:
        ended = subprocess.run(argv, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("is_torchrun", [True, False])
def test_what_started_a_rank_is_blamed_where_that_was_ended(is_torchrun: bool, jobs_folder: Path) -> None:
    order = make_order("import os, time; print(os.getppid(), flush=True); time.sleep(100)")
    with talk_here() as talk:
        launch(talk, order)
        followed = Followed(order).begin(talk).until(talk, b"\n", name="rank-0.log")
        between = psutil.Process(int(followed.data["rank-0.log"]))
        (psutil.Process(between.ppid()) if is_torchrun else between).send_signal(signal.SIGSEGV)
        job = Followed(order).begin(talk).to_end(talk).job
    if is_torchrun:
        assert (job["reason"], job["exit_code"]) == ("torchrun was killed by SIGSEGV", 139)
    else:
        said = f"rank 0 was lost with process {between.pid}, its parent: see torchrun.log for its exit"
        assert (job["reason"], job["exit_code"]) == (said, 137)


_PRINTS = """
for number in range(50_000):
    print(f"{number:06d} {'x' * 60}")
"""


@pytest.mark.slow
def test_output_of_ranks_that_print_as_fast_as_they_can_is_followed_whole(jobs_folder: Path) -> None:
    order = make_order(_PRINTS, ranks=(0, 1, 2, 3), world_size=4)
    with talk_here() as talk:
        launch(talk, order)
        followed = Followed(order).begin(talk).to_end(talk)
        assert (followed.job["exit_code"], followed.job["reason"]) == (0, "")
        for rank in range(4):
            lines = followed.data[f"rank-{rank}.log"].decode().splitlines()
            assert [int(line[:6]) for line in lines] == list(range(50_000))


_RESTARTS = """
import os, pathlib, sys
done = pathlib.Path(f"done-{os.environ['RANK']}")
print("begins with", done.exists(), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["RANK"] == "1" and not done.exists():
    done.touch()
    os.kill(os.getpid(), 9)
done.touch()
"""


@pytest.mark.slow
def test_rank_of_an_elastic_job_that_is_killed_is_started_again(jobs_folder: Path) -> None:
    rendezvous = JobRendezvous(kind="elastic", max_restarts=2, timeout_s=30)
    order = make_order(_RESTARTS, ranks=(0, 1), world_size=2, interface="lo", rendezvous=rendezvous)
    with talk_here() as talk:
        port = prepare(talk, order)
        talk.say("launch", store=["127.0.0.1", port], key="ab" * 32)
        talk.hear("launched")
        followed = Followed(order).begin(talk).to_end(talk)
    assert (followed.job["state"], followed.job["exit_code"], followed.job["restarts"]) == ("ended", 0, 1), (
        followed.data
    )
    assert followed.data["rank-1.log"] == b"begins with False restart 0\nbegins with True restart 1\n"


def test_ranks_that_start_after_a_logout_find_their_runner(
    jobs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd removes a user's runtime directory when that user's last login session ends."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(run))
    wait = f"while [ -e {shlex.quote(str(run))} ]; do sleep 0.05; done"
    order = make_order("print('on')", name="logged-out", setup=(wait,))
    with talk_here() as talk:
        launch(talk, order)
        shutil.rmtree(run)
        followed = Followed(order).begin(talk).to_end(talk)
    assert (followed.job["exit_code"], followed.data.get("rank-0.log")) == (0, b"on\n"), followed.data


_OF_AN_OLDER_LIBC = """
import os, signal
for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")):
    vars(module).pop(name, None)
"""


def test_python_that_was_built_for_an_older_libc_is_enough(
    jobs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OF_AN_OLDER_LIBC)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import os, time; print(hasattr(os, 'memfd_create'), os.environ['SET'], flush=True); time.sleep(600)"
    order = make_order(code, name="older", setup=("export SET=up",))
    with talk_here() as talk:
        launch(talk, order)
        Followed(order).begin(talk).until(talk, b"False up\n", name="rank-0.log")
        talk.say("exec", id=order.id, command="sleep 600 & exit 4", timeout_s=60)
        assert talk.hear("exit") == {"type": "exit", "status": 4, "timed_out": False}
        talk.say("stop", id=order.id, grace_s=10)
        assert talk.hear("stopped")["was"] == "running"


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "nonsense"}\n',
        b'{"type": "follow", "id": "../x"}\n',
        b'{"type": "follow", "id": "a-1", "offsets": {"../x": 1}}\n',
        b'{"type": "status", "ids": 5}\n',
        b'{"type": "launch"}\n',
        b'{"type": "stop", "id": "a-1", "grace_s": -1}\n',
        b'{"type": "exec", "command": ""}\n',
        b'{"type": "exec", "command": "true", "timeout_s": "x"}\n',
        b'{"type": "read", "id": "a-1", "name": "..", "offset": -1}\n',
        b"[" * 300_000 + b"\n",
    ],
)
def test_service_says_what_it_cannot_do(jobs_folder: Path, line: bytes) -> None:
    with talk_here() as talk, pytest.raises(Failed):
        talk.send(line)
        talk.hear("done")


@pytest.mark.slow
def test_rank_that_is_killed_with_all_that_watches_it_is_named(jobs_folder: Path) -> None:
    """The kernel can kill a whole cgroup at once; then no process is left to report how the rank ended."""
    order = make_order("import os, signal; os.killpg(0, signal.SIGKILL)", name="killed")
    with talk_here() as talk:
        launch(talk, order)
        job = Followed(order).begin(talk).to_end(talk).job
    assert (job["exit_code"], job["failed_rank"]) == (137, 0)
    assert re.fullmatch(r"rank 0 was lost with process \d+, its parent: see torchrun.log .*", job["reason"])
