"""The entrypoint of the image, run for real: what it starts, what it refuses, and that a job is run once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from detrain_nb.formats import export_spec
from detrain_nb.formats.secret_words import SECRET_NAME
from detrain_nb.spec import PipelineSpec

from ..testbed.fixtures import MakeTestbed
from ..testbed.pods import ENTRYPOINT, HOME, Pod
from ..testbed.testbed import Testbed
from .on_nodes import container_of

_PATH = f"{os.environ['PATH']}:/usr/sbin"
_BLOB = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(32)
_KEY = f"ssh-ed25519 {b64encode(_BLOB).decode()} someone"
_PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----"
_ODD = " a \"b\" 'c' \\ \\\\ \\' \\\" $HOME `x` #d 日本\t= "
_PLAIN = {"PORT": "8080", "name": "x", "status": "good", "TOKENIZERS_PARALLELISM": "false"}  # names common in scripts
_ENV = {
    "ODD": _ODD,
    "HF_TOKEN": "very-secret",
    "MINE": "very-secret",
    "DB_PASS": "very-secret",
    "DETRAIN_NB_SECRETS": "YOURS MINE",
    "LINES": "a\nb",
    **_PLAIN,
}
_STATIC = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(sum)
open("model", "w").write(f"{int(sum)}")
print("the sum is", int(sum), os.environ["PORT"], os.environ["status"], flush=True)
os._exit(0)  # gloo's threads may end it otherwise
"""


def _enter(*command: str, env: Mapping[str, str] | None = None, user: int = 65534) -> tuple[int, str]:
    """Run the entrypoint until it exits; return its exit status and its output."""
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if os.getuid() == 0 else []
    given = {"PATH": _PATH, "HOME": "/nonexistent", **(env or {})}
    argv = [*become, "bash", "-c", ENTRYPOINT.read_text(), "entrypoint.sh", *command]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 60}
    done = subprocess.run(argv, env=given, cwd="/", **options)
    return done.returncode, done.stdout.decode()


def test_container_without_a_key_is_its_command() -> None:
    assert _enter("sh", "-c", 'echo "$A" "$1"; exit 3', "sh", "a  b", env={"A": "x  y"}) == (3, "x  y a  b\n")
    assert _enter("bash", "-c", "false; echo $-", env={"SHELLOPTS": "errexit"}) == (0, "hBc\n")
    status, said = _enter()
    assert status == 2 and "there is nothing to do: set SSH_PUBKEY" in said


def test_container_takes_the_same_names_for_secrets_as_imports() -> None:
    (rule,) = re.findall("^_secret='(.*)'$", ENTRYPOINT.read_text(), re.MULTILINE)
    assert rule == SECRET_NAME.pattern.replace("(?:", "(")


@pytest.mark.needs_debian("openssh-server")
@pytest.mark.parametrize("keys, line", [(_PRIVATE, 1), (f"{_KEY}\r\n\n# me\nssh-ed25519 AAAA", 4), ("no key", 1)])
def test_what_is_no_public_key_is_refused_by_its_line_and_not_shown(keys: str, line: int) -> None:
    status, said = _enter(env={"SSH_PUBKEY": keys})
    assert (status, said.count("\n")) == (2, 1)
    assert f"container: SSH_PUBKEY, line {line}: not a public key: give the contents of a file" in said
    assert "b3Blb" not in said and "BEGIN" not in said


@pytest.mark.needs_debian("openssh-server")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_user_who_cannot_be_is_refused_with_one_line(tmp_path: Path) -> None:
    for user, env, words in [
        (0, {}, "the container runs as root and has no user trainer to switch to: start it as another user"),
        (54321, {}, "uid 54321 has no user in this image"),
        (65534, {}, "nobody cannot write to /nonexistent/.detrain_nb: change its owner, or set DETRAIN_NB_STATE to"),
        (65534, {"DETRAIN_NB_STATE": "/dev/shm/detrain_nb"}, "users other than nobody can write to /dev/shm, which"),
    ]:
        status, said = _enter("true", env={"SSH_PUBKEY": _KEY, **env}, user=user)
        assert (status, said.count("\n")) == (2, 1), said
        assert words in said
    Path("/dev/shm/detrain_nb").rmdir()


def _check_that_root_gives_the_volume_away(testbed: Testbed) -> None:
    """In an image that starts as root, the entrypoint gives the volume to the user of the job, but no other folder."""
    start = "mkdir '/run/a volume' /run/other && DETRAIN_NB_VOLUME='/run/a volume' exec /run/entrypoint.sh sh -c"
    job = 'touch "$DETRAIN_NB_VOLUME/x" && id -un && ! touch /run/other/x 2>/dev/null && grep NoNew /proc/self/status'
    assert testbed.output("h0", f"{start} '{job}'").split() == ["trainer", "NoNewPrivs:", "1"]
    through_link = "ln -s /run/other /run/link && DETRAIN_NB_VOLUME=/run/link/ /run/entrypoint.sh true 2>&1"
    said, owner = testbed.output("h0", f"{through_link} || stat -c %U /run/other").splitlines()
    assert "is a link or is below one: give the path of the folder itself" in said and owner == "root"


def _check_that_checkpoints_need_a_volume_that_the_job_can_write(testbed: Testbed) -> None:
    """Start what an SDL starts when root owns the volume: user trainer is refused, and a start as root succeeds."""
    fields = {"source": {"script_text": "print()"}, "nodes": [{"host": "h0", "python": "/run/python"}]}
    spec = PipelineSpec.from_dict({"name": "x", "image": "a/b:1", "checkpoint": {"url": "/run/saved"}, **fields})
    (service,) = yaml.safe_load(export_spec(spec, "akash"))["services"].values()
    container = container_of(service)
    given = (f"{name}={value}" for name, value in container.env.items())
    start = shlex.join(["env", *given, "/run/entrypoint.sh", *container.argv])
    python = "#!/bin/sh\ntouch /run/saved/x && stat -c '%U has written %n' /run/saved/x\n"  # replaces torchrun
    prepare = "cat >/run/python && chmod 755 /run/python && mkdir -m 755 /run/saved"
    testbed.exec("h0", prepare, input=python.encode(), check=True)
    as_trainer = f"setpriv --reuid=12345 --regid=12345 --clear-groups {start}"
    said = testbed.output("h0", f"cd {HOME}; {as_trainer} 2>&1; echo $?; ls -A /run/saved")
    refused = "x: checkpoint.url: this user cannot write to /run/saved: give a storage URL, or an image that starts as"
    assert said == f"{refused} root\n2\n"
    assert testbed.output("h0", f"cd {HOME} && {start}") == "trainer has written /run/saved/x\n"


def _check_that_only_the_key_lets_in(pod: Pod, folder: Path) -> None:
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other := folder / "other")]
    subprocess.run(make, check=True, timeout=60)
    for refused in (pod.ask("true", identity_file=other), pod.ask("true", methods="password")):
        assert refused.returncode == 255
        assert refused.stderr.strip().endswith("Permission denied (publickey)."), refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_job_runs_once_beside_sshd_and_its_model_can_be_fetched(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    testbed = make_testbed(2)
    first, other = (Pod(testbed, host.name, tmp_path) for host in testbed.hosts)
    _check_that_root_gives_the_volume_away(testbed)
    _check_that_checkpoints_need_a_volume_that_the_job_can_write(testbed)
    options = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=static --rdzv-endpoint"
    for rank, (pod, address) in enumerate([(first, "$(hostname -i)"), (other, first.host.hostname)]):
        job = f'exec python3 -m torch.distributed.run {options}="{address}:29500" --node-rank={rank} job.py'
        pod.start("sh", "-c", f'printf %s "$JOB" >job.py && {job}', SSH_PUBKEY=pod.public_key, JOB=_STATIC, **_ENV)
    for pod in (first, other):
        pod.wait_for("container: the job has exited with status")
        assert "with status 0; sshd keeps running" in pod.output, pod.output
        assert "the sum is 3 8080 good" in pod.output
        assert pod.run("cat", "model") == "3"
    seen = dict(line.partition("=")[::2] for line in first.run("env").splitlines())
    assert (seen["ODD"], seen["HOME"]) == (_ODD, HOME)
    assert {name: seen[name] for name in _PLAIN} == _PLAIN
    assert "very-secret" not in seen.values() and "LINES" not in seen
    assert "sessions do not get HF_TOKEN: it is a secret" in first.output
    _check_that_only_the_key_lets_in(first, tmp_path)
    assert first.stop() == 143
    assert not [port for _, port in testbed.listening("h0") if port == 2222]

    testbed.exec("h0", "mkdir /run/volume && chown 12345 /run/volume", check=True)
    keys, begun = set(), []
    for _ in range(2):  # a new container begins with an empty home
        testbed.exec("h0", f"rm -r {HOME}/.detrain_nb", check=True)
        job = ("sh", "-c", "echo begun; mkdir ~/.detrain_nb; exit 7")
        first.start(
            *job, SSH_PUBKEY=f"{first.public_key}\n{_KEY}", DETRAIN_NB_VOLUME="/run/volume", SHELLOPTS="errexit"
        )
        first.wait_for("exited with status 7")
        first.wait_for("Server listening")
        keys.add(testbed.output("h0", "cat /run/volume/.detrain_nb/host_key.pub"))
        begun.append("begun" in first.output)
        assert first.stop() == 143
    assert len(keys) == 1, "it is another host for who knows it"
    assert begun == [True, False]
    assert "the job has already exited with status 7, and is not run again" in first.output

    other.stop()
    other.start("sh", "-c", "trap 'echo told; exit' TERM; echo waiting; while :; do sleep 0.1; done", SSH_PUBKEY=_KEY)
    other.wait_for("waiting")
    assert other.stop() == 143
    assert "told" in other.output, "SIGTERM comes to the job"
