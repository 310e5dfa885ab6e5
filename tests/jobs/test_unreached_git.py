"""A repository on a git host that only this machine can reach: hosts over real SSH get its commit from this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.errors import DetrainError
from detrain_nb.jobs import Job, LogLine, Submission, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import Node, PipelineSpec
from detrain_nb.transport.local import LocalTransport

from ..node.git_host import GitHost, commit, git_host
from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TOKEN = "t0ken-of-the-tests"
PROGRAM = "import os\nprint('first', os.path.exists('.git'), flush=True)\n"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[GitHost]:
    """Yield a git host on this machine's loopback, which no host of the testbed can reach."""
    with git_host(tmp_path / "host", token=TOKEN) as running:
        yield running


def follow(job: Job) -> list[str]:
    lines: list[LogLine] = []
    status = job.attach(lines.append)
    assert (status.state, status.exit_code) == ("ended", 0), lines
    return sorted(map(str, lines))


def test_hosts_that_do_not_reach_the_git_host_get_the_commit_from_here_and_at_a_restart_again(
    testbed: Testbed, host: GitHost, home: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    first = commit(work, {"train.py": PROGRAM})
    git = {"url": host.publish(work, "x.git"), "ref": "main", "token": "GIT_TOKEN"}
    spec = PipelineSpec.from_dict({"name": "unreached", "source": {"git": git, "entry": "train.py"}})
    told = submit(spec, dry_run=True)
    assert isinstance(told, Submission) and "all get it from here if one does not reach its host" in str(told)
    nodes = [LocalTransport(Node(host="localhost")), *ssh_nodes(testbed, 1)]
    secrets = {"GIT_TOKEN": TOKEN}
    steps: list[str] = []
    job = submit(spec, nodes=nodes, secrets=secrets, on_progress=steps.append)
    (notice,) = job.notices
    assert f"h0: git {host.url('x.git')} cannot be reached: " in notice
    assert notice.endswith(f"commit {first[:12]} was fetched here and sent to all nodes")
    assert f"note: {notice}" in steps
    assert follow(job) == ["[h0:1] first False", "[localhost:0] first False"]
    second = commit(work, {"train.py": PROGRAM.replace("first", "second")})
    host.publish(work, "x.git")
    again = job.restart(secrets=secrets)
    assert again.notices[0].endswith(f"commit {second[:12]} was fetched here and sent to all nodes")
    assert follow(again) == ["[h0:1] second False", "[localhost:0] second False"]
    found = testbed.exec("h0", f"grep -rl {TOKEN} ~ /tmp /run /dev/shm", capture_output=True, text=True)
    assert found.stdout == ""
    for each in (job, again):
        each.remove()


def test_nothing_is_sent_where_nodes_have_to_clone_or_it_is_their_token_that_is_refused(
    testbed: Testbed, host: GitHost, home: Path, tmp_path: Path
) -> None:
    commit(work := tmp_path / "work", {"train.py": PROGRAM})
    git = {"url": host.publish(work, "x.git"), "token": "GIT_TOKEN"}
    nodes = [LocalTransport(Node(host="localhost")), *ssh_nodes(testbed, 1)]

    def try_it(**changed: str) -> None:
        fields = {"name": "must-clone", "source": {"git": {**git, **changed}, "entry": "train.py"}}
        submit(PipelineSpec.from_dict(fields), nodes=nodes, secrets={"GIT_TOKEN": TOKEN})

    with pytest.raises(DetrainError, match=r'^h0: git .* cannot be reached: .*; source\.git\.how = "auto" fetches'):
        try_it(how="clone")
    host.token = "another"
    with pytest.raises(DetrainError, match=r"^(h0|localhost): git [^\n]*") as caught:
        try_it()
    assert "localhost: git" in str(caught.value) or "this machine: git" in str(caught.value)
    assert "does not accept the token" in str(caught.value)
    assert Record().summaries(name="must-clone") == []
    assert testbed.output("h0", "ls ~/.local/state/detrain_nb/jobs | grep -c ^must-clone || true").strip() == "0"
