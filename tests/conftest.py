"""Skips: counted by reason at the end, and in `.ci/run` allowed only if their cause cannot be removed there.

A test that needs a Debian package is marked ``@pytest.mark.needs_debian("chromium")``; a fixture of any scope that
needs one requests `needs_debian` and calls it. Both skip with the command that installs the package. With DETRAIN_NB_CI
set, every other skip is a failure unless its reason contains GPU; so is a missing Debian package, unless SYSTEM_DEPS=no
or the user is not root (the Makefile could then not install it).

Fixtures of a room are in ``tests/<room>/conftest.py``. Fixtures for any room are elsewhere: `testbed` and
`make_testbed` in ``tests/testbed/fixtures.py``, ranks that modules share in ``tests/checks/shared_ranks.py``, and the
start of sessions in ``tests/checks/starts.py``.

NEVER_RERUN lists the tests that `.ci/run` never reruns.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

# Empty when tests/test_skips.py copies only this file into a folder. tests/checks/small.py keeps only the last plugin.
_PLUGINS = ("testbed.fixtures", "checks.starts", "checks.shared_ranks", "checks.outcomes")
pytest_plugins = [f"{__package__}.{name}" for name in _PLUGINS] if __package__ else []

# The program or the file that shows that a package is installed. Other systems may install it differently.
DEBIAN = {
    "chromium": "chromium",
    "dataset-fashion-mnist": "/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz",
    "iproute2": "ip",
    "munge": "munged",
    "openssh-server": "sshd",
    "slurm-client": "sbatch",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}
# A failure here never counts as chance: folders and modules that compare numbers with an oracle, check a promise of
# SECURITY.md, or compare the tree with the design.
NEVER_RERUN = {
    "parallel",
    "plan",
    "training",
    "examples",
    "test_agents.py",
    "test_guarded.py",
    "test_storage.py",
    "test_text.py",
    "test_values.py",
    "formats/test_akash.py",
    "formats/test_all_targets.py",
    "formats/test_bad_imports.py",
    "formats/test_container.py",
    "formats/test_contract.py",
    "formats/test_document_imports.py",
    "formats/test_script_import.py",
    "jobs/test_record.py",
    "jobs/test_source.py",
    "pipelines/test_form.py",
    "pipelines/test_my_pipelines.py",
    "widgets",
    "jobs/test_source_runs.py",
    "magics/test_rank_terminal.py",
    "node/test_far_ends.py",
    "node/test_job_files.py",
    "node/test_job_outputs.py",
    "node/test_job_rendezvous.py",
    "node/test_job_service.py",
    "node/test_job_source.py",
    "session/test_beside.py",
    "session/test_hostile_node.py",
    "session/test_safe_output.py",
    "session/test_second_user.py",
    "session/test_ssh_trust.py",
    "session/test_warm.py",
    "transport/test_known_hosts.py",
    "transport/test_ssh.py",
    "cli/test_commands.py",
    "jobs/test_lying_nodes.py",
    "jobs/test_report_checks.py",
    "deploy/test_files.py",
    "deploy/test_folder.py",
    "deploy/test_cache_cleanup.py",
    "deploy/test_remote_program.py",
    "deploy/test_ways.py",
    "deploy/test_sync.py",
    "test_layout.py",
    "test_environment.py",
    "test_types.py",
    "test_ci.py",
}
FOR_ADMINISTRATORS = "/usr/sbin:/sbin"  # these folders may be missing on a user's PATH
ADVICE = "apt-get install"


@pytest.fixture(scope="session")
def needs_debian() -> Callable[..., None]:
    """Return a function that skips the test, or the tests of the fixture that calls it, if a package is missing."""
    return _skip_without


def _skip_without(*packages: str) -> None:
    missing = [name for name in packages if not _is_there(DEBIAN[name])]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: run '{ADVICE} {' '.join(missing)}' as root")


def _is_there(sign: str) -> bool:
    return bool(shutil.which(sign) or shutil.which(sign, path=FOR_ADMINISTRATORS)) or Path(sign).exists()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--older-python", help="a Python that nodes may have and the notebook may not: make test-pythons")
    parser.addoption("--kernel-python", help="the Python of the kernels of notebooks in a browser: make test-kernels")


def pytest_configure() -> None:
    """Restore SIGINT: in a shell's background, Python and its children ignore the stop signal that tests send."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path
        if any(parent.as_posix() in NEVER_RERUN for parent in (path, *path.parents)):
            item.add_marker("never_rerun")


def pytest_collection_finish() -> None:
    """Exempt modules and tests, which live to the end, from garbage collection, so that it does not scan them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_debian"):
        _skip_without(*mark.args)


def _is_allowed(reason: str) -> bool:
    can_install = os.environ.get("SYSTEM_DEPS") != "no" and os.geteuid() == 0
    return "GPU" in reason or (ADVICE in reason and not can_install)


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("DETRAIN_NB_CI"):
        reason = _read_reason(report)
        if not _is_allowed(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped: {reason}\nhere only a missing GPU may be a reason: install what the test needs"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter(_read_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if counts:
        terminalreporter.section("skipped, by reason")
        for reason, count in counts.most_common():
            terminalreporter.line(f"{count:5}  {reason}")


def _read_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")
