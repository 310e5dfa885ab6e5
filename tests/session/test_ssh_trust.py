"""What hosts over real SSH cannot do to the notebook, its secrets and each other's ports, and whose HTML is shown."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.deploy.kept import drop_kept
from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.deploy.trust import trusted_host_keys
from detrain_nb.errors import DetrainError, LaunchError, SpecError
from detrain_nb.session.running.start import RankStart
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.spec.node import Node
from detrain_nb.spec.nodes_file import parse_nodes, read_nodes
from detrain_nb.transport.ssh_config import SshTarget

from ..testbed.nodes import processes_of_sessions, ssh_nodes
from ..testbed.testbed import Testbed
from .soon import each_below

_CACHE = "~/.cache/detrain_nb"
_SHOW = """
from IPython.display import HTML, SVG, Latex, Image, display
handle = display(HTML('<b>one</b>'), display_id=True)
handle.update(HTML('<b>two</b>'))
display(SVG('<svg xmlns="http://www.w3.org/2000/svg"/>'))
display(Latex('$x$'))
png, jpeg = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB", "/9j/wAARCAABAAED"
display({"image/png": png, "image/jpeg": jpeg, "text/plain": "image"}, raw=True)
display({"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "w"}, raw=True)
HTML('<b>value</b>')
"""


class Eyes(CellObserver):
    """Keeps the MIME types that each rank displays."""

    def __init__(self) -> None:
        self.mimes: dict[int, list[list[str]]] = {0: [], 1: []}

    def display(self, rank: int, bundle: dict[str, Any], display_id: str, is_update: bool) -> None:
        self.mimes[rank].append(sorted(bundle))


_AS_TEXT = [*[["text/plain"]] * 4, ["image/jpeg", "image/png", "text/plain"], ["text/plain"]]
_AS_SENT = [
    *[["text/html", "text/plain"]] * 2,
    ["image/svg+xml", "text/plain"],
    ["text/latex", "text/plain"],
    *_AS_TEXT[-2:],
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty folder the current one, so that no files are sent to the hosts."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder for the user on the notebook's machine."""
    folder = tmp_path / "home"
    (folder / ".config/detrain_nb").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def trust_file(home: Path) -> Path:
    return home / ".config/detrain_nb/trust.toml"


def _fingerprint(testbed: Testbed, name: str) -> str:
    key = testbed.folder / name / "hostkey.pub"
    return subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout.split()[1]


# ---- whose HTML is shown


@pytest.mark.slow
def test_html_of_a_host_is_shown_where_the_user_trusts_its_key_and_nowhere_else(
    testbed: Testbed, trust_file: Path
) -> None:
    trust_file.write_text(f'host_keys = ["{_fingerprint(testbed, "h1")}"]\n')
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as session:
        eyes = Eyes()
        result = session.run_cell(_SHOW, observer=eyes, values=False)
        assert eyes.mimes == {0: _AS_TEXT, 1: _AS_SENT}
        assert [sorted(of_rank.bundle) for of_rank in result] == [["text/plain"], ["text/html", "text/plain"]]
        again = Eyes()
        session.log.show_again(result.cell, again)
        assert again.mimes == eyes.mimes
        followed = Eyes()
        session.log.follow(result.cell, followed)
        assert followed.mimes == eyes.mimes


@pytest.mark.slow
def test_attach_shows_no_more_than_the_cell_did(testbed: Testbed, trust_file: Path) -> None:
    name = f"left-{os.getpid()}"
    session = Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", name=name)
    result = session.run_cell(_SHOW, values=False)
    session.detach(is_seen=False)
    with Session.attach(name, nodes=ssh_nodes(testbed)) as again:
        eyes = Eyes()
        shown = again.log.follow(result.cell, eyes)
        assert eyes.mimes == {0: _AS_TEXT, 1: _AS_TEXT}
        assert [sorted(bundle) for bundle in shown.bundles().values()] == [["text/plain"]] * 2


def test_host_that_shows_another_key_later_is_not_trusted_with_it() -> None:
    class AnotherKey(SshNode):
        def _connect(self) -> Any:
            return SimpleNamespace(host_key_fingerprint="SHA256:x", close=lambda: None)

    node = AnotherKey(Node(host="h0"))
    node.is_trusted = True
    with pytest.raises(DetrainError, match="the host key has changed to SHA256:x"):
        node.connect_agent("session")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host_keys = 'SHA256:x'", "nothing else"),
        ("host_keys = ['x']", "not a fingerprint"),
        ("host_keys = ['SHA256:*']", "not a fingerprint"),
        ("hosts = ['*']", "nothing else"),
        ("host_keys = [", "cannot be read"),
    ],
)
def test_file_that_trusts_nobody_in_particular_is_an_error(trust_file: Path, text: str, complaint: str) -> None:
    trust_file.write_text(text)
    with pytest.raises(SpecError, match=complaint):
        trusted_host_keys()


def test_file_that_others_can_write_is_refused(trust_file: Path) -> None:
    trust_file.write_text("host_keys = []")
    assert trusted_host_keys() == frozenset()
    trust_file.chmod(0o666)
    with pytest.raises(SpecError, match="is writable by others"):
        trusted_host_keys()
    trust_file.chmod(0o600)
    trust_file.parent.parent.chmod(0o777)
    with pytest.raises(SpecError, match=r"others can replace .*trust\.toml, as they can write to .*config"):
        trusted_host_keys()
    trust_file.parent.parent.chmod(0o755)
    trust_file.unlink()
    assert trusted_host_keys() == frozenset()


@pytest.mark.parametrize("field", ["trust", "trusted", "is_trusted", "trusted_hosts", "host_keys", "host_key"])
def test_file_of_nodes_cannot_grant_trust(tmp_path: Path, field: str) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(f'{field} = ["SHA256:x"]\n[[nodes]]\nhost = "h0"\n')
    with pytest.raises(SpecError, match=field):
        read_nodes(file)
    file.write_text(f'[[nodes]]\nhost = "h0"\n{field} = true\n')
    with pytest.raises(SpecError, match=field):
        read_nodes(file)
    with pytest.raises(SpecError, match=field):
        Node(**{"host": "h0", field: True})


# ---- secrets


def _files_with(testbed: Testbed, host: str, words: str) -> str:
    find = f"grep -rlF -D skip -- {shlex.quote(words)} ~/.cache /tmp /run /dev/shm 2>/dev/null || true"
    return testbed.output(host, find)


def test_variable_of_a_node_that_is_not_set_here_is_named(testbed: Testbed) -> None:
    nodes = ssh_nodes(testbed, 1, env=["NOT_SET_HERE", "HOME"])
    with Session.start(1, nodes=nodes, sync=False, device="cpu") as session:
        assert list(session.news.notices) == ["h0 should get NOT_SET_HERE, which this process has not set"]


@pytest.mark.slow
def test_secrets_are_in_no_argv_no_file_no_repr_and_no_error(
    testbed: Testbed, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_node, of_start = f"canary-{uuid.uuid4().hex}", f"canary-{uuid.uuid4().hex}"
    monkeypatch.setenv("TOKEN_OF_NODE", of_node)
    seen: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            argvs = testbed.processes("h0").values()
            seen.extend(word for argv in argvs if "grep -rlF" not in " ".join(argv) for word in argv)  # the test's grep
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    nodes = ssh_nodes(testbed, 1, env=["TOKEN_OF_NODE"])
    try:
        with Session.start(1, sync=False, nodes=nodes, device="cpu", env={"TOKEN_OF_START": of_start}) as session:
            lengths = "len(os.environ['TOKEN_OF_NODE']), len(os.environ['TOKEN_OF_START'])"
            code = f"import os, time\nprint('print' 'ed')\ntime.sleep(0.5)\n{lengths}"
            assert session.run_cell(code).values == {0: (len(of_node), len(of_start))}
            ranks = session.ranks
            parts = (session, nodes[0], nodes[0].node, ranks.nodes, ranks.plan, session.status())
            texts = [repr(part) for part in parts]
            texts += [str([getattr(session, name) for name in Session.__slots__]), *session.news.notices]
            texts += each_below(runtime_folder, lambda path: path.read_text(errors="replace") if path.is_file() else "")
            assert any("h0" in text for text in texts[6:]), "the record of the session is among them"
            for secret in (of_node, of_start):
                assert _files_with(testbed, "h0", secret) == ""
            assert f"{_CACHE[2:]}/run/" in _files_with(testbed, "h0", "printed"), "the spool is among the files"
            with pytest.raises(DetrainError) as caught:
                session.run_cell("1 / 0")
            texts += [str(caught.value), repr(caught.value), *caught.value._render_traceback_()]
    finally:
        is_over.set()
        watcher.join()
    with pytest.raises(DetrainError) as failed:
        broken = ssh_nodes(testbed, 1, env=["TOKEN_OF_NODE"], python="/bin/false")
        Session.start(1, sync=False, nodes=broken, device="cpu", env={"TOKEN_OF_START": of_start})
    texts += [str(failed.value), repr(RankStart("/", {"A": of_start}, "fork", 0, True, 0.0, 0))]
    assert any("detrain_nb.node.agent.agent" in word for word in seen), "the agent was seen"
    for secret in (of_node, of_start):
        assert not [word for word in seen if secret in word]
        assert not [text for text in texts if secret in text]


# ---- folders


@pytest.mark.slow
def test_folder_of_a_session_is_its_user_s_alone(testbed: Testbed) -> None:
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu", name="own"):
        found = testbed.output("h0", f"find {_CACHE} -maxdepth 0 -perm /077; find {_CACHE}/run ! -type l -perm /077")
        assert found == ""
        assert testbed.output("h0", f"stat -c %a {_CACHE}/run/*/own").split() == ["700"]


_WRITE = """
import os, subprocess
mask = os.umask(0)
os.umask(mask)
open("own", "w").close()
os.mkdir("folder")
subprocess.run("touch child; command umask", shell=True, check=True)
[oct(mask), *(oct(os.stat(name).st_mode & 0o777) for name in ("own", "folder", "child", "."))]
"""


@pytest.mark.slow
def test_ranks_have_the_umask_of_the_login_and_what_is_ours_stays_private(testbed: Testbed) -> None:
    """The umask is 0: files of detrain_nb that depended on it would be open to other users."""
    login = testbed.path_home("h0") / ".bashrc"
    login.write_text("umask 0\n")
    testbed.output("h0", "rm -rf ~/.cache")
    options: dict[str, Any] = {"sync": True, "device": "cpu", "warm_s": 60.0}
    agents = set()
    try:
        for _ in ("cold", "warm"):
            nodes = ssh_nodes(testbed, 1, workdir="/tmp/shared/work")
            with Session.start(1, nodes=nodes, **options) as session:
                assert session.run_cell(_WRITE).values == {0: ["0o0", "0o666", "0o777", "0o666", "0o777"]}
                assert testbed.output("h0", "find ~/.cache ! -name __pycache__ ! -type l -perm /077") == ""
                running = testbed.processes("h0").items()
                agents.add(next(pid for pid, argv in running if "detrain_nb.node.agent.agent" in argv))
            testbed.output("h0", "rm -rf /tmp/shared")
        assert len(agents) == 1, "the second start was not warm"
    finally:
        drop_kept()
        login.unlink()


def test_work_folder_that_another_user_has_made_is_refused(testbed: Testbed) -> None:
    testbed.output("h0", "mkdir -p /tmp/squat && chmod 777 /tmp/squat && chown 12345 /tmp/squat")
    try:
        with pytest.raises(LaunchError, match=r"/tmp/squat \(mode 0777, uid 12345\) was made by another user"):
            Session.start(1, nodes=ssh_nodes(testbed, 1, workdir="/tmp/squat/work"), device="cpu", sync=False)
    finally:
        testbed.output("h0", "rm -rf /tmp/squat")


_LOOSE = "mkdir -p {0} && chmod 777 {0}"
_FOREIGN = "mkdir -p {0} && chmod 700 {0} && chown 12345 {0}"
_LINK = "mkdir -p -m 700 /tmp/elsewhere && mkdir -p -m 700 $(dirname {0}) && ln -s /tmp/elsewhere {0}"
_DANGLING = "mkdir -p -m 700 $(dirname {0}) && ln -s /tmp/nothing-there {0}"


@pytest.mark.parametrize("where", ["", "/run", "/run/$(hostname)", "/run/$(hostname)/mine"])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_LOOSE, "is open to others .mode 0777.: chmod 700"),
        (_FOREIGN, "belongs to uid 12345"),
        (_LINK, "is not a directory"),
        (_DANGLING, "is not a directory|cannot create|File exists"),
    ],
    ids=["loose", "foreign", "link", "dangling"],
)
def test_folder_that_others_may_have_made_is_refused(testbed: Testbed, where: str, make: str, complaint: str) -> None:
    base = f"{_CACHE}{where}"
    keep = f"mv {_CACHE} ~/kept 2>/dev/null; umask 077; mkdir -p ~/.cache; [ -z '{where}' ] || mkdir -p -m 700 "
    above = (
        _CACHE
        if where in ("", "/run")
        else f"{_CACHE}/run"
        if where == "/run/$(hostname)"
        else f"{_CACHE}/run/$(hostname)"
    )
    testbed.output("h0", f"{keep} {above}; {make.format(base)}")
    try:
        with pytest.raises(LaunchError, match=complaint):
            Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu", name="mine")
        assert testbed.output("h0", "ls -A /tmp/elsewhere /tmp/nothing-there 2>/dev/null || true").split("\n")[-1:] == [
            ""
        ]
    finally:
        testbed.output("h0", f"rm -rf {_CACHE} /tmp/elsewhere; mv ~/kept {_CACHE} 2>/dev/null || true")


# ---- names that are code for a shell

_CODE = [
    "x;touch /tmp/pwned",
    "$(touch /tmp/pwned)",
    "`touch /tmp/pwned`",
    "x\ntouch /tmp/pwned\n",
    "x' touch /tmp/pwned '",
    'x";touch /tmp/pwned;"',
    "x|touch /tmp/pwned",
    "x&&touch /tmp/pwned",
    "\u202ex\x1b]0;t\x07",
    "é;touch /tmp/pwned",
    "-oProxyCommand=touch /tmp/pwned",
    "-x",
]


@pytest.mark.parametrize("text", _CODE)
def test_host_user_name_and_names_of_variables_are_no_code(text: str) -> None:
    for field in ("host", "user", "name", "proxy_jump", "address", "env"):
        fields = {"host": "h0", field: [text] if field == "env" else text}
        with pytest.raises(SpecError) as caught:
            Node(**fields)
        assert str(caught.value).isprintable() or "\n" in str(caught.value)
        assert "\x1b" not in str(caught.value)
    for options in ({"name": text}, {"name": "h0", "user": text}, {"name": "h0", "proxy_jump": text}):
        with pytest.raises(SpecError):
            SshTarget(**options)
    with pytest.raises(SpecError):
        parse_nodes(text)


@pytest.mark.parametrize("text", _CODE)
def test_paths_of_a_node_are_taken_as_they_are(testbed: Testbed, text: str) -> None:
    testbed.output("h0", "rm -f /tmp/pwned")
    for fields in ({"python": text}, {"identity_file": text}):
        with pytest.raises(DetrainError):
            nodes = ssh_nodes(testbed, 1, **fields)
            Session.start(1, sync=False, nodes=nodes, device="cpu")
    assert testbed.output("h0", "ls /tmp/pwned 2>/dev/null || true") == ""
    assert not Path("/tmp/pwned").exists()


@pytest.mark.slow
def test_folder_with_code_in_its_name_is_a_folder(testbed: Testbed) -> None:
    env = {"A": "$(touch pwned)"}
    workdir = "/tmp/a b;touch pwned $(touch pwned) `touch pwned` 'é' \"q\" -x"
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, workdir=workdir), device="cpu", env=env) as session:
        assert session.run_cell("import os; os.getcwd(), os.environ['A']").values == {0: (workdir, "$(touch pwned)")}
    assert testbed.output("h0", "find / -xdev -name 'pwned*' -not -path '/proc/*' 2>/dev/null || true") == ""
    for wrong in ("/tmp/x\ntouch pwned", "-x", "x", "/tmp/\x1b]0;t\x07"):
        with pytest.raises(SpecError):
            ssh_nodes(testbed, 1, workdir=wrong)


# ---- ports


def _our_listeners() -> set[tuple[str, int]]:
    """The addresses at which this process and its children listen."""
    own, found = psutil.Process(), set()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sockets = process.net_connections("tcp")
            found |= {(sock.laddr.ip, sock.laddr.port) for sock in sockets if sock.status == psutil.CONN_LISTEN}
    return found


@pytest.fixture
def before(testbed: Testbed) -> Iterator[dict[str, list[tuple[str, int]]]]:
    """The listening sockets of the hosts before a session; the same ones must listen after it."""
    listening = {host.name: testbed.listening(host.name) for host in testbed.hosts}
    ours = _our_listeners()
    yield listening
    _wait_until(lambda: {host.name: testbed.listening(host.name) for host in testbed.hosts} == listening)
    assert _our_listeners() <= ours


def _wait_until(holds: Callable[[], bool]) -> None:
    """Wait until ``holds``: a process closes its connection a moment before it has exited."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_only_sshd_and_the_job_listen_each_on_the_one_address_of_its_node(
    testbed: Testbed, before: dict[str, list[tuple[str, int]]], start: str
) -> None:
    ours = _our_listeners()
    for host in testbed.hosts:
        assert before[host.name] == [(host.ip, host.port)]
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", start=start) as session:
        session.run_cell("t = torch.ones(1); dist.all_reduce(t); dist.barrier()")
        session.run_cell("g = dist.new_group([0, 1]); dist.all_reduce(t, group=g)")
        for host in testbed.hosts:
            listening = testbed.listening(host.name)
            assert {address for address, _ in listening} == {host.ip}, "on every address, or another"
        assert len(testbed.listening("h0")) >= 2, "the store listens there"
        assert _our_listeners() == ours
    _wait_until(lambda: not any(processes_of_sessions(testbed, host.name) for host in testbed.hosts))


def test_this_python_is_the_hosts(testbed: Testbed) -> None:
    """Otherwise the tests above would prove nothing."""
    assert testbed.output("h0", sys.executable, "-c", "print(1)") == "1\n"
