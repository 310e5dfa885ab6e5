"""Warm starts: what is kept between two sessions of one process, when it is reused, and when it must not be."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.deploy import kept
from detrain_nb.deploy.kept import begin_on_kept, drop_kept, keep, seconds_kept
from detrain_nb.errors import LaunchError, NodeLost, SessionError, SpecError
from detrain_nb.node.system.surroundings import read_starter
from detrain_nb.transport.local import LocalTransport
from detrain_nb.wire import ALIVE_GAP_S, SILENCE_LIMIT_S, Begin, Begun, FrameReader, Kept, to_frame

from ..node.cgroups import cgroup
from ..raw_frames import prefix
from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .inside import link_of
from .soon import assert_soon, each_below, interrupted

_MOST_TAKEN_BYTES = 8 << 20  # from an agent that sends too much, including the system's buffers

Processes = Callable[[], set[psutil.Process]]
Start = Callable[..., Session]


@pytest.fixture(autouse=True)
def nothing_is_kept(cold_starts: None) -> Iterator[None]:
    yield
    drop_kept()


def _start(**options: object) -> Session:
    return Session.start(**{"ranks": 2, "device": "cpu", "init": False, "warm_s": 60.0, **options})  # type: ignore[arg-type]


def _warm_process(session: Session) -> psutil.Process:
    """The warm process: the ancestor of interpreter, worker and launcher."""
    pid = session.run_cell("import os\nos.getpid()", ranks=0).values[0]
    return psutil.Process(pid).parents()[2]


def _session_stopped(**options: object) -> psutil.Process:
    """Run a session and return the warm process that it leaves."""
    with _start(**options) as session:
        return _warm_process(session)


@contextlib.contextmanager
def _is_warm(before: psutil.Process, **options: object) -> Iterator[Session]:
    with _start(**options) as session:
        assert _warm_process(session) == before
        yield session


@contextlib.contextmanager
def _is_cold(before: psutil.Process, **options: object) -> Iterator[Session]:
    with _start(**options) as session:
        assert _warm_process(session) != before
        assert_soon(lambda: not before.is_running())
        yield session


# ---- what is the same, and what is not


def test_next_session_has_the_warm_process_and_nothing_else_of_the_last() -> None:
    with _start() as first:
        warm = _warm_process(first)
        agent = warm.parent()
        first.run_cell(
            "import os\nx = 1\nos.environ['LEFT'] = 'yes'\nos.chdir('/')\ntorch.set_default_dtype(torch.float64)"
        )
    with _is_warm(warm) as second:
        assert warm.parent() == agent
        left = second.run_cell(
            "import os\n'x' in globals(), os.environ.get('LEFT'), os.getcwd() == '/', str(torch.get_default_dtype())"
        )
        assert left.values[1] == (False, None, False, "torch.float32")
        assert second.name != first.name
        assert not second.run_cell("import sys\n[p for p in sys.path if 'python-' in p]", ranks=0).values[0]


def test_key_of_multiprocessing_is_another_one_in_every_session() -> None:
    look = "import multiprocessing\nmultiprocessing.current_process().authkey.hex()"
    with _start() as session:
        warm, first = _warm_process(session), session.run_cell(look).values
    with _is_warm(warm) as session:
        second = session.run_cell(look).values
    assert first[0] == first[1] != second[0] == second[1]


def test_warm_session_computes_what_a_cold_one_does() -> None:
    code = "import random\n(torch.rand(3).tolist(), random.random(), rank, world_size)"
    with _start(seed=5, init=True) as cold:
        expected = cold.run_cell(code).values
    with _start(seed=5, init=True) as warm:
        assert warm.run_cell(code).values == expected
        assert warm.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}


@pytest.mark.slow
def test_number_of_ranks_and_folder_are_those_of_the_new_session(tmp_path: Path) -> None:
    warm = _session_stopped()
    with _is_warm(warm, ranks=3, folder=str(tmp_path)) as session:
        assert session.run_cell("import os\nos.getcwd(), world_size").values[2] == (str(tmp_path), 3)


def test_warm_process_has_one_thread_and_ranks_have_no_more_descriptors_than_cold_ones() -> None:
    look = "import os\nlen(os.listdir('/proc/self/fd'))"
    with _start(ranks=1) as session:
        cold, warm = session.run_cell(look).values, _warm_process(session)
        assert warm.num_threads() == 1
    with _is_warm(warm, ranks=1) as session:
        assert session.run_cell(look).values == cold


@pytest.mark.slow
def test_twenty_warm_starts_leave_no_descriptor_and_no_process_behind(processes: Processes) -> None:
    warm = _session_stopped(ranks=1)
    agent = warm.parent()
    assert agent is not None
    before = {process: process.num_fds() for process in (warm, agent)}  # may include descriptors of the last session
    for _ in range(20):
        with _start(ranks=1) as session:
            session.run_cell("1")
    assert_soon(lambda: all(process.num_fds() <= count for process, count in before.items()))
    assert processes() == {warm, agent}
    assert len(agent.open_files()) == 0


# ---- what stays, and when it ends


def test_after_a_stop_the_agent_and_the_warm_process_are_all_that_is_left(
    processes: Processes, runtime_folder: Path
) -> None:
    session = _start()
    session.run_cell("import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)")
    warm = _warm_process(session)
    session.stop()
    assert processes() == {warm, warm.parent()}
    assert not (runtime_folder / session.name).exists()
    assert not [c for process in processes() for c in process.net_connections("all") if c.status == psutil.CONN_LISTEN]
    assert 0 < seconds_kept() <= 60
    assert drop_kept() == 1
    assert_soon(lambda: not processes())


@pytest.mark.parametrize("how", ["cold", "never warm", "its time is over"])
def test_nothing_is_left_where_nothing_is_to_be_kept(how: str, processes: Processes) -> None:
    session = _start(warm_s={"cold": 60.0, "never warm": 0.0, "its time is over": 0.3}[how])
    session.run_cell("1")
    session.stop(cold=how == "cold")
    assert_soon(lambda: not processes(), limit_s=20)
    assert seconds_kept() == 0


def test_session_of_a_program_keeps_nothing_unless_it_is_asked_to(processes: Processes) -> None:
    """The program runs in its own process, because the tests ask their sessions to keep processes."""
    code = """
from detrain_nb import Session
from detrain_nb.deploy.kept import seconds_kept

with Session.start(1, device="cpu") as session:
    session.run_cell("1")
print(session.settings.warm_s, seconds_kept())
input()
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "0.0 0.0\n"
        assert_soon(lambda: {process.pid for process in processes()} == {program.pid})
    finally:
        program.communicate("\n", timeout=30)


@pytest.mark.slow
def test_agent_ends_by_itself_when_its_time_is_over(processes: Processes) -> None:
    """The notebook may be suspended or may forget the agent, so the agent has to exit by itself."""
    session = _start(warm_s=0.5)
    agent = _warm_process(session).parent()
    link = link_of(session).node_links[0]
    link_of(session).end(limit_s=10, keep_s=0.5)
    assert link.is_kept
    assert agent is not None
    assert_soon(lambda: not processes())
    link.take_socket().close()
    session.stop()


@pytest.mark.slow
def test_kill_of_the_notebooks_process_ends_what_it_kept(processes: Processes) -> None:
    code = """
        import time
        from detrain_nb import Session
        with Session.start(1, device="cpu", init=False, warm_s=600) as session:
            session.run_cell("1")
        print("stopped", flush=True)
        time.sleep(600)
    """
    notebook = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    try:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"stopped\n"
        assert len(processes()) == 3
    finally:
        notebook.kill()
        notebook.communicate()
    assert_soon(lambda: not processes())


@pytest.mark.slow
def test_end_of_a_program_ends_what_it_kept(processes: Processes) -> None:
    code = "from detrain_nb import Session\ns = Session.start(1, device='cpu', init=False, warm_s=600)\ns.stop()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not processes()


@pytest.mark.slow
def test_forked_process_leaves_what_is_kept_to_its_parent(processes: Processes) -> None:
    code = """
import os, sys
from detrain_nb import Session
from detrain_nb.deploy.kept import seconds_kept

Session.start(1, device="cpu", init=False, warm_s=600).stop()
child = os.fork()
if child == 0:
    assert seconds_kept() == 0
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(seconds_kept() > 0)
with Session.start(1, device="cpu", init=False) as session:
    pass
"""
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (program.stdout, program.returncode) == ("True\n", 0), program.stderr
    assert not processes()


@pytest.mark.slow
def test_forked_process_does_not_hold_what_is_kept_when_its_parent_is_killed(processes: Processes) -> None:
    code = """
import os, time
from detrain_nb import Session

Session.start(1, device="cpu", init=False, warm_s=600).stop()
if child := os.fork():
    print(child, flush=True)
time.sleep(600)
"""
    _kill_the_parent(code, processes)


@pytest.mark.slow
def test_process_that_was_forked_while_a_session_ran_does_not_hold_what_is_kept_then(processes: Processes) -> None:
    code = """
import os, time
from detrain_nb import Session

session = Session.start(1, device="cpu", init=False, warm_s=600)
if child := os.fork():
    session.run_cell("1")
    session.stop()
    print(child, flush=True)
time.sleep(600)
"""
    _kill_the_parent(code, processes)


def _kill_the_parent(code: str, processes: Processes) -> None:
    """Kill a program that prints the pid of its forked child; only that child may be left."""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    child = psutil.Process(int(program.stdout.readline()))
    try:
        assert len(processes()) == 4
        program.kill()
        program.wait(10)
        assert_soon(lambda: processes() == {child})
    finally:
        program.stdout.close()
        child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_interrupted_stop_goes_on_to_its_end(after_s: float, processes: Processes) -> None:
    session = _start(ranks=1)
    with interrupted(after_s) as begin:
        begin()
        session.stop()
    session.stop()
    assert len(processes()) == 2
    assert drop_kept() == 1
    assert_soon(lambda: not processes())


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.2, 0.3])
def test_interrupted_warm_start_leaves_nothing_but_what_is_kept(after_s: float, processes: Processes) -> None:
    _session_stopped(ranks=1)
    with interrupted(after_s) as begin:
        begin()
        session = _start(ranks=1)  # held, so that it is finalised only after the interrupt
        session.stop()
    assert_soon(lambda: drop_kept() == 0 and not processes())  # an interrupted stop continues meanwhile


@pytest.mark.slow
def test_of_two_sessions_one_is_kept_for_the_next(processes: Processes) -> None:
    with _start(ranks=1) as first, _start(ranks=1) as second:
        assert _warm_process(first) != (left := _warm_process(second).pid)
    assert_soon(lambda: len(processes()) == 2)
    with _start(ranks=1) as third:
        assert _warm_process(third).pid != left, "the first was stopped last"


def test_name_that_is_taken_is_refused_and_the_warm_process_stays() -> None:
    with _start(ranks=1, name="mine"):
        warm = _session_stopped(ranks=1)
        with pytest.raises(SessionError, match="'mine' is already running"):
            _start(ranks=1, name="mine")
        with _is_warm(warm, ranks=1, name="yours"):
            pass


@pytest.mark.slow
def test_session_that_is_attached_to_can_be_kept() -> None:
    first = _start(ranks=1, name="left")
    warm = _warm_process(first)
    first.detach()
    again = Session.attach("left")
    again.settings.warm_s = 60.0
    again.stop()
    with _is_warm(warm, ranks=1, name="left"):
        pass


@pytest.mark.parametrize("warm_s", [-1, 1e9, float("inf"), float("nan")])
def test_time_that_is_none_is_refused(warm_s: float) -> None:
    with pytest.raises(SpecError, match="give a number of seconds"):
        _start(warm_s=warm_s)


# ---- what must not be reused


def test_environment_of_the_notebook_is_that_of_a_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "1")
    warm = _session_stopped()
    monkeypatch.setenv("NEW", "2")
    monkeypatch.delenv("BEFORE")
    with _is_cold(warm) as session:
        assert session.run_cell("import os\nos.environ.get('BEFORE'), os.environ.get('NEW')").values[1] == (None, "2")
        assert list(session.news.notices) == ["started cold: the environment (BEFORE, NEW) changed"], (
            "names, and no values"
        )


@pytest.mark.slow
def test_variable_of_a_session_is_there_at_the_import() -> None:
    warm = _session_stopped()
    with _is_cold(warm, env={"TORCH_SHOW_CPP_STACKTRACES": "1"}):
        pass


@pytest.mark.slow
def test_what_a_process_inherits_is_that_of_a_cold_start() -> None:
    """The rank gets the limit of the notebook's process at the start, not the one when torch was imported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    warm = _session_stopped(ranks=1)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        with _is_cold(warm, ranks=1) as session:
            found = session.run_cell("import resource\nresource.getrlimit(resource.RLIMIT_NOFILE)[0]").values
            assert found == {0: soft - 1}
            assert list(session.news.notices) == ["started cold: inherited process settings (limits) changed"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_ranks_have_the_umask_of_the_notebook_at_the_start_and_what_is_ours_stays_private(runtime_folder: Path) -> None:
    look = "import os\nmask = os.umask(0)\nos.umask(mask)\nmask"
    before = os.umask(0)
    try:
        with _start(ranks=1) as session:
            warm = _warm_process(session)
            assert session.run_cell(look).values == {0: 0}
            assert set(each_below(runtime_folder, lambda path: path.stat().st_mode & 0o077)) == {0}
        os.umask(0o027)
        with _is_cold(warm, ranks=1) as session:
            assert session.run_cell(look).values == {0: 0o027}
            assert list(session.news.notices) == ["started cold: inherited process settings (umask) changed"]
    finally:
        os.umask(before)


@pytest.mark.slow
def test_trait_that_cannot_be_changed_here_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the description of this process is changed, not the process itself."""
    warm = _session_stopped(ranks=1)
    monkeypatch.setattr(kept, "read_starter", lambda: {**read_starter(), "cgroup": "another"})
    with _is_cold(warm, ranks=1):
        pass


@pytest.mark.slow
def test_warm_process_that_was_moved_is_not_used() -> None:
    warm, own = _session_stopped(ranks=1), os.getpriority(os.PRIO_PROCESS, 0)
    warm.nice(own + 1)
    with _is_cold(warm, ranks=1) as session:
        assert session.run_cell("import os\nos.getpriority(os.PRIO_PROCESS, 0)").values == {0: own}
        assert list(session.news.notices) == ["started cold: inherited process settings (priority) changed"]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of ``sys.path`` whose ``sitecustomize`` every process of the ranks imports."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import library\n")
    (folder / "library.py").write_text("VERSION = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return folder


@pytest.mark.slow
def test_what_was_imported_and_has_changed_is_imported_anew(imported: Path) -> None:
    """tests/node/test_imported.py tests which changes are detected."""
    warm = _session_stopped(ranks=1)
    agent = warm.parent()
    assert agent is not None
    (imported / "library.py").write_text("VERSION = 'two'\n")
    with _is_cold(warm, ranks=1) as session:
        assert session.run_cell("import library\nlibrary.VERSION").values == {0: "two"}
        assert not agent.is_running(), "it has imported the library too"
        assert list(session.news.notices) == [f"started cold: {imported}/library.py changed"]


@pytest.mark.parametrize("warm_s", [0.0, 60.0])
def test_change_in_every_start_delays_none(warm_s: float, imported: Path) -> None:
    """The imports themselves change the library. The new process is used all the same: a retry would not help."""
    (imported / "sitecustomize.py").write_text(
        f"import library\nwith open({str(imported / 'library.py')!r}, 'a') as file:\n    file.write('# ')\n"
    )
    with _start(ranks=1, warm_s=warm_s) as session:
        assert list(session.news.notices) == []
        first = _warm_process(session)
    with _is_cold(first, ranks=1, warm_s=warm_s) as session:
        assert list(session.news.notices) == ([f"started cold: {imported}/library.py changed"] if warm_s else [])


@pytest.mark.slow
def test_shared_library_that_was_installed_anew_is_loaded_anew(imported: Path) -> None:
    """Torch consists mostly of shared libraries. The test leaves torch's own alone: other tests use them meanwhile."""
    extensions = Path(sysconfig.get_config_var("DESTSHARED"))
    library = shutil.copy(next(extensions.glob("_json*.so")), imported / "native")
    (imported / "sitecustomize.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n")
    warm = _session_stopped(ranks=1)
    os.utime(library, ns=(0, library.stat().st_mtime_ns + 1_000_000))
    with _is_cold(warm, ranks=1) as session:
        assert list(session.news.notices) == [f"started cold: {library} changed"]


@pytest.mark.slow
def test_plain_torchrun_between_two_warm_starts() -> None:
    warm = _session_stopped(ranks=1)
    with _start(ranks=1, start="exec") as session:
        assert session.run_cell("1 + 1").values == {0: 2}
    assert_soon(lambda: not warm.is_running())
    with _start(ranks=1) as session:
        assert session.run_cell("1 + 1").values == {0: 2}


# ---- faults


_AT_FORK = """
import os, signal, sys
import library
if "detrain_nb.node.rank.launcher" in " ".join(sys.orig_argv):
    warm_pid, flag = os.getpid(), {flag!r}
    def is_due():
        return os.path.exists(flag) and os.getpid() == warm_pid
    {what}
"""
_WHAT = {
    "before the fork": "os.register_at_fork(before=lambda: is_due() and os.kill(warm_pid, signal.SIGKILL))",
    "after the fork": "os.register_at_fork(after_in_parent=lambda: is_due() and os.kill(warm_pid, signal.SIGKILL))",
    "in the fork": "os.register_at_fork(after_in_child=lambda: os.path.exists(flag) and os.kill(warm_pid, 9))",
}


# A cgroup limited to one process: the system itself refuses the fork.
_JOIN_CGROUP = "os.register_at_fork(before=lambda: is_due() and print(0, file=open({procs!r}, 'w'), flush=True))"
# Where no cgroup can be made, only the call of fork is replaced.
_REFUSE_FORK = """
    fork = os.fork
    def refuse():
        if is_due():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()
    os.fork = refuse
"""


@contextlib.contextmanager
def _refused_fork() -> Iterator[str]:
    with contextlib.ExitStack() as made:
        try:
            folder = made.enter_context(cgroup("pids"))
        except OSError:
            yield _REFUSE_FORK
            return
        (folder / "pids.max").write_text("1")
        yield _JOIN_CGROUP.format(procs=str(folder / "cgroup.procs"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", _WHAT)
def test_warm_process_that_is_killed_in_a_fork_leaves_nothing_and_the_next_start_is_cold(
    moment: str, imported: Path, tmp_path: Path, processes: Processes
) -> None:
    flag = tmp_path / "now"
    (imported / "sitecustomize.py").write_text(_AT_FORK.format(flag=str(flag), what=_WHAT[moment]))
    warm = _session_stopped(ranks=1)
    flag.touch()
    with pytest.raises(LaunchError, match="the ranks did not start"):
        _start(ranks=1)
    assert_soon(lambda: not processes())
    flag.unlink()
    with _is_cold(warm, ranks=1) as session:
        assert session.run_cell("1 + 1").values == {0: 2}


@pytest.mark.slow
def test_fork_that_the_system_refuses_is_told_and_the_next_start_works(
    imported: Path, tmp_path: Path, processes: Processes
) -> None:
    flag = tmp_path / "now"
    with _refused_fork() as what:
        (imported / "sitecustomize.py").write_text(_AT_FORK.format(flag=str(flag), what=what))
        _session_stopped(ranks=1)
        flag.touch()
        with pytest.raises(LaunchError, match=r"the launcher's process cannot be forked: .*Resource temporarily"):
            _start(ranks=1)
        assert_soon(lambda: not processes())
        flag.unlink()
        with _start(ranks=1) as session:
            assert session.run_cell("1 + 1").values == {0: 2}


@pytest.mark.slow
def test_warm_process_that_does_not_answer_is_not_waited_for() -> None:
    warm = _session_stopped(ranks=1)
    warm.suspend()
    with _is_cold(warm, ranks=1) as session:
        assert session.run_cell("1 + 1").values == {0: 2}
        assert list(session.news.notices) == ["started cold: the warm process has not answered for 10 s"]


@pytest.mark.slow
def test_environment_of_the_next_session_is_the_notebooks_though_that_is_empty() -> None:
    code = """
import os
from detrain_nb import Session

os.environ["SECRET"] = "1"
Session.start(1, device="cpu", init=False, warm_s=600).stop()
os.environ.clear()
with Session.start(1, device="cpu", init=False) as session:
    print(session.run_cell("import os\\nos.environ.get('SECRET')").values)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "{0: None}\n"


@pytest.mark.slow
def test_python_that_was_called_by_a_relative_path_starts_warm(tmp_path: Path) -> None:
    code = """
from detrain_nb import Session
for _ in range(2):
    with Session.start(1, device="cpu", init=False, warm_s=600) as session:
        print(list(session.news.notices))
"""
    command = [os.path.relpath(sys.executable, tmp_path), "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n[]\n"


def test_variable_that_an_import_sets_is_there_in_every_session(imported: Path) -> None:
    """The notebook's process does not have the variable, as it imports from other folders."""
    (imported / "sitecustomize.py").write_text("import os\nos.environ['FROM_IMPORT'] = '1'\n")
    look = "import os\nos.environ.get('FROM_IMPORT')"
    with _start(ranks=1) as session:
        warm = _warm_process(session)
        assert session.run_cell(look).values == {0: "1"}
    for _ in range(2):
        with _is_warm(warm, ranks=1) as session:
            assert session.run_cell(look).values == {0: "1"}


def test_warm_process_that_is_killed_while_it_waits_is_not_missed(processes: Processes) -> None:
    warm = _session_stopped(ranks=1)
    warm.kill()
    assert_soon(lambda: not processes())
    with _start(ranks=1) as session:
        assert session.run_cell("1 + 1").values == {0: 2}


@pytest.mark.slow
def test_warm_process_that_is_killed_takes_the_ranks_along_and_is_told(processes: Processes) -> None:
    session = _start()
    _warm_process(session).kill()
    assert_soon(lambda: not session.is_alive)
    with session, pytest.raises(NodeLost, match="exited: exit code -9"):
        session.run_cell("1")
    assert_soon(lambda: not processes())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_full_disk_is_told_and_what_was_kept_serves_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", str(disk)], check=True)
    try:
        monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(disk))
        _session_stopped(ranks=1)
        with contextlib.suppress(OSError), open(disk / "full", "wb") as file:
            while file.write(b"x" * 4096):
                file.flush()
        with pytest.raises(LaunchError, match="No space left on device"):
            _start(ranks=1)
        (disk / "full").unlink()
        with _start(ranks=1) as session:
            assert session.run_cell("1 + 1").values == {0: 2}
        drop_kept()
        assert not [path for path in disk.iterdir() if not path.name.startswith(".log-")]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_memory_of_a_session_is_given_back_between_warm_starts() -> None:
    warm = _session_stopped(ranks=1)
    before = warm.memory_info().rss
    for _ in range(5):
        with _start(ranks=1) as session:
            session.run_cell("x = torch.ones(1 << 24)")
    assert warm.memory_info().rss < before + (8 << 20)


# ---- hosts over SSH


@pytest.fixture
def start_on_hosts(testbed: Testbed) -> Start:
    return lambda **options: Session.start(
        1, **{"nodes": ssh_nodes(testbed), "device": "cpu", "sync": False, "warm_s": 60.0, **options}
    )


_ABOVE = """
import os
def stat(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
pid = os.getpid()
for _ in ("worker", "launcher", "warm process"):
    pid = int(stat(pid)[1])
pid, stat(pid)[19]
"""


def _warm_processes(session: Session) -> dict[int, tuple[int, str]]:
    """PID and start time of each rank's warm process, as read on the rank's host: hosts number processes separately."""
    return session.run_cell(_ABOVE).values


def _agents(testbed: Testbed) -> list[str]:
    """The hosts of the running agents, one entry for each agent."""
    running = {host.name: testbed.processes(host.name).values() for host in testbed.hosts}
    return [name for name, lines in running.items() for line in lines if "detrain_nb.node.agent.agent" in line]


@pytest.mark.slow
def test_hosts_keep_their_warm_processes_and_the_connection(start_on_hosts: Start, testbed: Testbed) -> None:
    with start_on_hosts(name="first") as first:
        warm = _warm_processes(first)
    with start_on_hosts(name="second") as second:
        assert _warm_processes(second) == warm
        code = "import os\nt = torch.ones(1); dist.all_reduce(t)\nt.item(), os.getcwd().rpartition('/')[2]"
        assert second.run_cell(code).values == {0: (2.0, "second"), 1: (2.0, "second")}
    assert _agents(testbed) == ["h0", "h1"]
    assert drop_kept() == 2
    assert_soon(lambda: not _agents(testbed))


@pytest.mark.thorough  # half a minute of waiting
def test_host_that_hears_nothing_but_signs_of_life_keeps_its_warm_process(start_on_hosts: Start) -> None:
    """The wait is longer than a host waits for a notebook that has vanished."""
    with start_on_hosts() as first:
        warm = _warm_processes(first)
    ended = threading.Event()
    assert not ended.wait(SILENCE_LIMIT_S + 2 * ALIVE_GAP_S)
    with start_on_hosts() as second:
        assert _warm_processes(second) == warm


@pytest.mark.slow
def test_host_whose_connection_broke_meanwhile_starts_cold(start_on_hosts: Start, testbed: Testbed) -> None:
    with start_on_hosts() as first:
        warm = _warm_processes(first)
    testbed.kill_sessions("h1")
    assert_soon(lambda: _agents(testbed) == ["h0"])
    with start_on_hosts() as second:
        now = _warm_processes(second)
        assert now[0] == warm[0]
        assert now[1] != warm[1]


@pytest.mark.slow
def test_node_that_is_described_otherwise_is_another(testbed: Testbed, start_on_hosts: Start) -> None:
    with start_on_hosts() as first:
        warm = _warm_processes(first)
    with start_on_hosts(nodes=ssh_nodes(testbed, setup=["export SET=1"])) as second:
        assert not _warm_processes(second).items() & warm.items()
        assert second.run_cell("import os\nos.environ['SET']").values == {0: "1", 1: "1"}


# ---- messages of a kept agent


class _Agent(LocalTransport):
    """The transport to an agent that the test plays."""

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        pass


@pytest.fixture
def agent_side() -> Iterator[socket.socket]:
    """The agent's end of the connection to a kept agent."""
    ours, theirs = socket.socketpair()
    keep(_Agent(), ours, keep_s=600.0)
    theirs.settimeout(20)
    with theirs:
        yield theirs


def _talk_until_hung_up_on(agent_side: socket.socket) -> None:
    frames = to_frame(Kept()).to_bytes() * 1000
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        for _ in range(_MOST_TAKEN_BYTES // len(frames)):
            agent_side.sendall(frames)


def _wait_for_begin(agent_side: socket.socket) -> None:
    reader = FrameReader()
    while not any(isinstance(frame.message(), Begin) for frame in reader.feed(agent_side.recv(1 << 16))):
        pass


def test_agent_that_talks_without_end_is_hung_up_on(agent_side: socket.socket) -> None:
    _talk_until_hung_up_on(agent_side)
    assert_soon(lambda: seconds_kept() == 0)


def test_agent_whose_time_is_over_is_hung_up_on_though_it_would_stay() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(20)
        keep(_Agent(), ours, keep_s=0.2)
        assert theirs.recv(1) == b""
    assert_soon(lambda: seconds_kept() == 0)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hangs up", "does not answer"),
        ("no frame", "the unknown kind 255"),
        ("a frame without end", "more than any message"),
        ("another message", "does not answer"),
        ("talks on", "does not answer"),
        ("says nothing", "timed out"),
    ],
)
def test_agent_that_does_not_answer_is_hung_up_on(
    how: str, why: str, agent_side: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_ANSWER_LIMIT_S", 0.5 if how == "says nothing" else 600.0)

    def play() -> None:
        _wait_for_begin(agent_side)
        if how == "talks on":
            _talk_until_hung_up_on(agent_side)
        elif how == "says nothing":
            assert agent_side.recv(1) == b""
        else:
            said = {
                "hangs up": b"",
                "no frame": b"\xff" * 100,
                "a frame without end": prefix(Begun, 0xFFFFFFFF, 0xFFFFFFFF) + b"\xff" * 100,
                "another message": to_frame(Kept()).to_bytes() * 100,
            }
            agent_side.sendall(said[how])
            agent_side.close()

    with ThreadPoolExecutor() as pool:
        playing = pool.submit(play)
        begun = begin_on_kept(_Agent(), "next")
        assert isinstance(begun, str)
        assert why in begun
        playing.result(10)
    assert seconds_kept() == 0


def test_agent_that_refuses_is_replaced_by_a_fresh_one_and_its_words_are_text(agent_side: socket.socket) -> None:
    def refuse() -> None:
        _wait_for_begin(agent_side)
        agent_side.sendall(to_frame(Begun("no\x1b]52;c;x\x07\nrank 0: lost")).to_bytes())

    with ThreadPoolExecutor() as pool:
        playing = pool.submit(refuse)
        with _start(ranks=1) as session:
            assert session.run_cell("1 + 1").values == {0: 2}
            assert list(session.news.notices) == ["started cold: no?]52;c;x? rank 0: lost"]
        playing.result(10)


def test_agent_that_serves_another_session_of_that_name_stays_and_its_words_are_one_line(
    agent_side: socket.socket,
) -> None:
    def refuse() -> None:
        _wait_for_begin(agent_side)
        agent_side.sendall(to_frame(Begun("it runs\nrank 0: lost", is_taken=True)).to_bytes())

    with ThreadPoolExecutor() as pool:
        playing = pool.submit(refuse)
        with pytest.raises(SessionError, match=r"^it runs rank 0: lost$"):
            begin_on_kept(_Agent(), "next")
        playing.result(10)
    assert drop_kept() == 1


def test_of_agents_that_are_kept_at_the_same_moment_one_stays() -> None:
    pairs, together = [socket.socketpair() for _ in range(8)], threading.Barrier(8)

    def keep_one(ours: socket.socket) -> None:
        together.wait(10)
        keep(_Agent(), ours, keep_s=600.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep_one, [ours for ours, _ in pairs]))
    assert drop_kept() == 1
    for _, theirs in pairs:
        with theirs:
            theirs.settimeout(10)
            assert theirs.recv(1) == b""


def test_agent_with_which_another_thread_begins_a_session_is_not_dropped(agent_side: socket.socket) -> None:
    with ThreadPoolExecutor() as pool:
        beginning = pool.submit(begin_on_kept, _Agent(), "next")
        _wait_for_begin(agent_side)
        assert drop_kept() == 0
        agent_side.sendall(to_frame(Begun()).to_bytes())
        begun = beginning.result(10)
    assert not isinstance(begun, str)
    with begun[1] as sock:
        agent_side.sendall(b"x")
        assert sock.recv(1) == b"x"


def test_agent_is_not_dropped_where_the_wait_for_the_thread_that_begins_with_it_was_interrupted(
    agent_side: socket.socket,
) -> None:
    begun: list[object] = []
    beginning = threading.Thread(target=lambda: begun.append(begin_on_kept(_Agent(), "next")))
    beginning.start()
    _wait_for_begin(agent_side)
    with interrupted(0.05) as begin:
        begin()
        beginning.join()
    assert drop_kept() == 0
    agent_side.sendall(to_frame(Begun()).to_bytes())
    assert_soon(lambda: bool(begun))
    assert isinstance(begun[0], tuple)
    begun[0][1].close()


def test_agent_that_an_interrupted_start_was_about_to_take_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python treats a thread as ended once a join of it was interrupted; the rest of its work was not awaited."""
    wait, is_released = kept._KeptAgent._wait, threading.Event()

    def wait_and_linger(agent: kept._KeptAgent) -> bool:
        is_taken = wait(agent)
        return is_released.wait(10) and is_taken

    monkeypatch.setattr(kept._KeptAgent, "_wait", wait_and_linger)
    ours, theirs = socket.socketpair()
    keep(_Agent(), ours, keep_s=600.0)
    with interrupted(0.1) as begin:
        begin()
        begin_on_kept(_Agent(), "next")
    threading.Timer(0.2, is_released.set).start()
    assert drop_kept() == 1
    with ours, theirs:
        theirs.settimeout(2)
        assert theirs.recv(1) == b""


@pytest.mark.slow
def test_folder_of_sessions_that_others_can_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warm = _session_stopped(ranks=1)
    ask, answers = kept._ask, []
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    asked = {"folder": str(tmp_path / "open/next"), "work_folder": "", "uses": []}
    monkeypatch.setattr(LocalTransport, "begin", lambda *_: asked)
    monkeypatch.setattr(kept, "_ask", lambda *given: answers.append(ask(*given)) or answers[-1])
    with _is_cold(warm, ranks=1):
        assert f"run directory {tmp_path}/open is open to others" in answers[0].error
    assert not (tmp_path / "open/next").exists()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["folder", "work_folder"])
def test_text_that_the_system_does_not_take_is_answered_and_nothing_is_left(
    field: str, monkeypatch: pytest.MonkeyPatch, runtime_folder: Path
) -> None:
    warm = _session_stopped(ranks=1)
    ask, answers = kept._ask, []
    asked = {"folder": str(runtime_folder / "apart"), "work_folder": "", "uses": [], field: "a\0b"}
    monkeypatch.setattr(LocalTransport, "begin", lambda *_: asked)
    monkeypatch.setattr(kept, "_ask", lambda *given: answers.append(ask(*given)) or answers[-1])
    with _is_cold(warm, ranks=1):
        assert "the session cannot start" in answers[0].error
    assert not (runtime_folder / "apart").exists()


def test_agent_lets_go_of_the_cells_of_the_last_session() -> None:
    session = _start(ranks=1)
    agent = _warm_process(session).parent()
    assert agent is not None
    before = agent.memory_info().rss
    for number in range(8):
        session.run_cell(f"# {str(number) * (2 << 20)}")
    grown = agent.memory_info().rss - before
    assert grown > 12 << 20, "it remembers them while the session lasts"
    session.stop()
    assert_soon(lambda: agent.memory_info().rss < before + grown / 2)


@pytest.mark.slow
def test_stop_signal_ends_an_agent_that_is_kept(processes: Processes) -> None:
    agent = _session_stopped(ranks=1).parent()
    assert agent is not None
    agent.send_signal(signal.SIGTERM)
    assert_soon(lambda: not processes())
