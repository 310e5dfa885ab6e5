"""What `.ci/run` reruns and when it is red, shown with a Makefile and a small folder of tests."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import psutil
import pytest
import yaml

from . import conftest
from .checks.ci import _run_part
from .checks.flaky import ChanceFailure, list_repeated, main, read_flaky
from .checks.processes import run_until
from .checks.small import lay_out_tests

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

MAKEFILE = """
lint:
	@exit $${{LINT_STATUS-0}}
docs:
test:
	@{python} -m pytest -m 'not slow' {options} $(PYTEST_ARGS)
test-slow:
	@{python} -m pytest -m slow {options} $(PYTEST_ARGS)
"""
PASSES = """
import pytest
def test_passes(): pass
@pytest.mark.slow
def test_passes_slowly(): pass
"""
# Fails in the first process that runs it; every run logs its process id.
ONCE = """
import os, pytest
from pathlib import Path
def test_before(): _log("before")
{mark}
def test_once():
    _log("once")
    if Path("{name}.log").read_text().count("once") <= {times}:
        raise TimeoutError("no answer after 5 s\\nfrom [a]")
def _log(word):
    with open("{name}.log", "a") as file: file.write(f"{{word}} {{os.getpid()}} ")
"""
LEAKS = """
import pytest
@pytest.fixture(scope="module")
def folder():
    yield
    raise RuntimeError("left 2 processes")
def test_leaks(folder): pass
"""
ALWAYS = "def test_always(): assert 1 == 2\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run `.ci/run` on the given modules, name -> source, and one that passes. Parameter "xdist": on two workers."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    xdist = " -p xdist -n 2 --dist loadfile" if getattr(request, "param", "") == "xdist" else ""
    # Loading other plugins would take most of a run.
    python = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {shlex.quote(sys.executable)}"
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=python, options="-p pytest_timeout" + xdist))
    tests = lay_out_tests(tmp_path)
    (tests / "flaky.toml").write_text("failures = []\n")

    def run_ci(modules: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
        for name, source in {"test_passes.py": PASSES, **modules}.items():
            path = tests / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        ours = {"SYSTEM_DEPS", "PYTEST_ADDOPTS", "PYTEST_ARGS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
        inherited = {key: value for key, value in os.environ.items() if key not in ours and "XDIST" not in key}
        return subprocess.run(
            [tmp_path / ".ci/run"],
            env={**inherited, "PYTHON": sys.executable, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
        )

    return run_ci


def _once(name: str, *, mark: str = "", times: int = 1) -> str:
    return ONCE.format(name=name, mark=mark, times=times)


def test_all_that_passes_is_run_once(run: Run) -> None:
    done = run({})
    assert done.returncode == 0, done.stdout
    assert "make lint: passed" in done.stdout
    assert "make test: passed after" in done.stdout
    assert "make test-slow: passed after" in done.stdout
    assert "again" not in done.stdout


@pytest.mark.parametrize("run", ["one process", "xdist"], indirect=True)
def test_test_that_failed_once_passes_with_its_module_and_is_shown_as_a_line(run: Run, tmp_path: Path) -> None:
    began = date.today()
    done = run({"test_a.py": _once("a")})
    day = began if str(began) in done.stdout else date.today()  # midnight may have passed
    assert done.returncode == 0, done.stdout
    assert "make test: passed, but for failures by chance after" in done.stdout
    said = "TimeoutError: no answer after 5 s"
    assert f"    tests/test_a.py::test_once: {said}: passed with its module after" in done.stdout
    line = f'    {{ name = "tests/test_a.py::test_once", date = {day}, error = "{said}" }},\n'
    assert line in done.stdout
    runs = re.findall(r"(\w+) (\d+)", (tmp_path / "a.log").read_text())
    assert [word for word, _ in runs] == ["before", "once"] * 2  # its module, and only once
    assert runs[1][1] != runs[2][1]  # in a fresh pytest
    assert done.stdout.count("= 2 passed in") == 1  # of the rerun: it had no other module

    (tmp_path / "flaky.toml").write_text(f"failures = [\n{line}]\n")
    assert read_flaky(tmp_path / "flaky.toml") == [ChanceFailure("tests/test_a.py::test_once", day, said)]


def test_two_failures_of_two_parts_are_run_again(run: Run) -> None:
    done = run({"test_a.py": _once("a"), "test_b.py": _once("b", mark="@pytest.mark.slow")})
    assert done.returncode == 0, done.stdout
    assert "once more, tests/test_a.py of make test\n" in done.stdout
    assert "once more, tests/test_b.py of make test-slow\n" in done.stdout
    assert done.stdout.count("{ name = ") == 2


def test_third_failure_is_red_and_nothing_is_run_again(run: Run) -> None:
    slow = "@pytest.mark.slow"
    done = run({"test_a.py": _once("a"), "test_b.py": _once("b", mark=slow), "test_c.py": _once("c", mark=slow)})
    assert done.returncode == 1
    assert "make test-slow: FAILED" in done.stdout
    assert "3 tests failed: at most 2 are run again" in done.stdout
    assert "once more" not in done.stdout
    assert "tests/test_b.py::test_once: TimeoutError: no answer after 5 s" in done.stdout


def test_test_that_fails_again_is_red(run: Run) -> None:
    done = run({"test_a.py": _once("a"), "test_b.py": ALWAYS})
    assert done.returncode == 1
    assert "make test: FAILED" in done.stdout
    assert "tests/test_b.py::test_always: assert 1 == 2: FAILED: it was failed after" in done.stdout
    assert "tests/test_b.py::test_always: failed again" in done.stdout
    assert 'name = "tests/test_a.py::test_once"' in done.stdout  # this one failed by chance
    assert 'name = "tests/test_b.py' not in done.stdout


def test_module_in_which_another_test_fails_the_second_time_is_red(run: Run) -> None:
    turns = "def test_after():\n    assert _log('after') or open('a.log').read().count('after') < 2\n"
    done = run({"test_a.py": _once("a") + turns})
    assert done.returncode == 1
    assert "FAILED: another test of its module failed" in done.stdout


def test_wrong_numbers_are_never_run_again(run: Run, tmp_path: Path) -> None:
    done = run({"parallel/test_a.py": _once("a")})
    assert done.returncode == 1
    said = "tests/parallel/test_a.py::test_once: marked never_rerun: TimeoutError: no answer after 5 s"
    assert said in done.stdout
    assert (tmp_path / "a.log").read_text().count("once") == 1


def test_error_in_a_teardown_is_never_run_again(run: Run) -> None:
    done = run({"test_a.py": LEAKS})
    assert done.returncode == 1
    assert "tests/test_a.py::test_leaks: an error in a teardown: RuntimeError: left 2 processes" in done.stdout
    assert "once more" not in done.stdout


def test_pytest_that_a_test_runs_is_not_counted(run: Run) -> None:
    source = """
import subprocess, sys
def test_outer():
    assert subprocess.run([sys.executable, "-m", "pytest", "-p", "pytest_timeout", "tests/inner.py"]).returncode == 1
"""
    done = run({"test_a.py": source, "inner.py": ALWAYS})
    assert done.returncode == 0, done.stdout
    assert "test_always" not in done.stdout


def test_error_in_a_fixture_is_run_again(run: Run) -> None:
    source = """
import pytest, pathlib
@pytest.fixture
def late():
    if not pathlib.Path("there").exists():
        pathlib.Path("there").touch()
        raise OSError("not there")
def test_late(late): pass
"""
    done = run({"test_a.py": source})
    assert done.returncode == 0, done.stdout
    assert "tests/test_a.py::test_late: OSError: not there: passed with its module" in done.stdout


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_to_be_found\n", "could not be collected"),
        ("import os\ndef test_crash(): os.abort()\n", "crash"),
        ("import pytest\ndef test_exit(): pytest.exit('enough', returncode=7)\n", "pytest ended with status"),
    ],
    ids=["collection", "crash", "exit"],
)
def test_what_is_no_failure_of_a_test_is_red(run: Run, source: str, reason: str) -> None:
    done = run({"test_a.py": source, "test_b.py": _once("b")})
    assert done.returncode == 1
    assert "make test: FAILED" in done.stdout
    assert reason in done.stdout.split("\n.ci/run\n")[1]
    assert "once more" not in done.stdout
    assert "make test-slow:" in done.stdout


@pytest.mark.parametrize("run", ["xdist"], indirect=True)
def test_workers_say_why_a_failure_is_red(run: Run) -> None:
    crash = "import os, pytest\n@pytest.mark.slow\ndef test_crash(): os.abort()\n"
    done = run({"training/test_a.py": _once("a"), "test_b.py": LEAKS, "test_c.py": crash})
    assert done.returncode == 1
    assert "test_a.py::test_once: marked never_rerun: TimeoutError: no answer after 5 s" in done.stdout
    assert "test_b.py::test_leaks: an error in a teardown: RuntimeError: left 2 processes" in done.stdout
    assert "test_c.py::test_crash: a crash: " in done.stdout
    assert "once more" not in done.stdout


@pytest.mark.parametrize("run", ["xdist"], indirect=True)
def test_module_that_workers_cannot_collect_is_red(run: Run) -> None:
    done = run({"test_a.py": "import nowhere_to_be_found\n", "test_b.py": _once("b")})
    assert done.returncode == 1
    assert "tests/test_a.py: could not be collected: " in done.stdout
    assert "once more" not in done.stdout


def test_lint_that_fails_is_red_and_the_tests_run(run: Run) -> None:
    done = run({"test_a.py": _once("a")}, LINT_STATUS="1")
    assert done.returncode == 1
    assert "make lint: make ended with status 2, and no test failed" in done.stdout
    assert "not run again, since the run is red:\n    tests/test_a.py::test_once: TimeoutError" in done.stdout


def test_second_time_is_announced(run: Run, tmp_path: Path) -> None:
    line = ChanceFailure("tests/test_a.py::test_once", date(2026, 1, 31), "OSError: busy")
    (tmp_path / "tests/flaky.toml").write_text(f"failures = [\n{line}\n]\n")
    done = run({"test_a.py": _once("a")})
    assert done.returncode == 0, done.stdout
    assert "tests/test_a.py::test_once stands there already: with this line `make test` stops" in done.stdout


# Deadlines


def test_part_at_its_deadline_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text("test:\n\t@sleep 100\n")
    monkeypatch.chdir(tmp_path)
    part = _run_part("test", timeout_s=0.5)
    assert not part.is_passed
    assert part.why_red == "was ended at its deadline, after 0.5 s"
    assert part.seconds < 60


def test_deadline_stops_as_ctrl_c_does(tmp_path: Path) -> None:
    code = "import time\ntry: print('on', flush=True); time.sleep(100)\nfinally: print('cleaned')"
    with (tmp_path / "out").open("w") as out:
        assert run_until([sys.executable, "-IS", "-c", code], timeout_s=2, environment=os.environ, output=out) is None
    assert (tmp_path / "out").read_text().startswith("on\n")
    assert "cleaned\n" in (tmp_path / "out").read_text()


def test_deadline_ends_what_does_not_stop(tmp_path: Path) -> None:
    script = f"trap '' INT; sleep 100 & echo $! >{tmp_path}/pid; wait"
    command = ["bash", "-c", script]
    assert run_until(command, timeout_s=1, environment=os.environ, grace_s=0.2) is None
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(timeout=10)  # raises if it is still running


# tests/flaky.toml


def test_line_is_read_back_as_it_was(tmp_path: Path) -> None:
    failure = ChanceFailure('tests/a.py::test[a"\\b]', date(2026, 1, 31), "E: 'x' \"y\" \\ \x1b[0m \x7f ünï 🙂")
    path = tmp_path / "flaky.toml"
    path.write_text(f"failures = [\n{failure}\n{failure}\n]\n", encoding="utf-8")
    assert read_flaky(path) == [failure, failure]


def test_test_that_is_listed_twice_stops_the_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flaky.toml"
    first, second = (ChanceFailure("tests/a.py::test", date(2026, 1, day), f"E{day}") for day in (1, 2))
    other = ChanceFailure("tests/a.py::test_other", date(2026, 1, 3), "E")
    path.write_text(f"failures = [\n{first}\n{other}\n]\n")
    assert main(path) == 0
    path.write_text(f"failures = [\n{first}\n{other}\n{second}\n]\n")
    assert main(path) == 1
    said = capsys.readouterr().err
    assert "tests/a.py::test failed by chance 2 times (2026-01-01, 2026-01-02), last: E2\n" in said
    assert "fix it before any other work" in said
    assert "test_other" not in said


def test_make_test_looks_at_the_list_first() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "test", "SYSTEM_DEPS=no"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert 0 < done.stdout.index("tests.checks.flaky") < done.stdout.index("bin/pytest ")


@pytest.mark.parametrize("text", ["", "failures = 3", "x = []\nfailures = []", "failures = [{ name = 'a' }]", "["])
def test_list_of_another_form_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "flaky.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_flaky(path)


def test_our_list_can_be_read_and_names_no_test_twice() -> None:
    assert list_repeated(read_flaky()) == []


def test_what_is_never_run_again_is_there() -> None:
    assert [name for name in conftest.NEVER_RERUN if not (TESTS / name).exists()] == []
    promises = re.findall(r"`tests/(.+?)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert promises
    assert [name for name in promises if not {name, name.partition("/")[0]} & conftest.NEVER_RERUN] == []


@pytest.mark.parametrize("letter", ["a", "ü", "日"])
def test_hook_refuses_a_subject_of_72_characters(letter: str) -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    [hook] = [hook for repo in repos for hook in repo["hooks"] if hook["id"] == "subject"]
    assert (hook["language"], hook["stages"], hook["args"]) == ("pygrep", ["commit-msg"], ["--multiline"])
    pattern = re.compile(hook["entry"].encode(), re.MULTILINE | re.DOTALL)  # as pygrep compiles it
    body = "\n\n" + "b" * 200 + "\n"
    assert not pattern.search((letter * 71 + body).encode())
    assert pattern.search((letter * 72 + body).encode())
