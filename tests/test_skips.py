"""What tests/conftest.py promises about skips, shown by running pytest on a folder with that conftest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.skip(reason="needs a GPU")
def test_gpu(): pass

@pytest.mark.slow
@pytest.mark.skip(reason="needs a GPU")
def test_gpu_too(): pass

@pytest.mark.slow
@pytest.mark.xfail(reason="known", run=False)
def test_expected_to_fail(): pass

@pytest.mark.slow
def test_passes(): pass
"""
SKIPPED_FOR_NO_GOOD_REASON = """
@pytest.mark.slow
def test_lazy():
    pytest.skip("takes too long")
"""
SKIPPED_FOR_A_PACKAGE = """
@pytest.mark.slow
@pytest.mark.needs_debian("chromium")
def test_browser(): pass

@pytest.fixture(scope="module")
def page(needs_debian): needs_debian("dataset-fashion-mnist", "chromium")

@pytest.mark.slow
def test_page(page): pass
"""


@pytest.fixture
def run(tmp_path: Path):
    """Run pytest on the given source; Debian's packages are missing unless a folder with them is given."""
    conftest = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest.replace("/usr/share/datasets/", "/nowhere/"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs_debian\n")

    def run_pytest(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(source)
        ours = {"DETRAIN_NB_CI", "SYSTEM_DEPS", "PYTEST_ADDOPTS"}
        inherited = {key: value for key, value in os.environ.items() if key not in ours}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:nbval", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**inherited, "PATH": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run_pytest


@pytest.mark.slow
def test_skips_are_counted_by_reason(run) -> None:
    done = run(TESTS + SKIPPED_FOR_NO_GOOD_REASON)
    assert done.returncode == 0, done.stdout
    _, _, summary = done.stdout.partition("skipped, by reason")
    assert "    2  needs a GPU\n    1  takes too long\n" in summary


@pytest.mark.slow
def test_ci_allows_a_missing_gpu(run) -> None:
    done = run(TESTS, DETRAIN_NB_CI="1")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in done.stdout


@pytest.mark.slow
def test_ci_fails_on_any_other_skip(run) -> None:
    done = run(TESTS + SKIPPED_FOR_NO_GOOD_REASON, DETRAIN_NB_CI="1")
    assert done.returncode == 1
    assert "skipped: takes too long" in done.stdout
    assert "1 failed, 1 passed, 2 skipped" in done.stdout


@pytest.mark.slow
def test_ci_fails_on_a_module_that_is_skipped(run) -> None:
    source = "import pytest\npytest.skip('no time', allow_module_level=True)\n"
    assert run(source).returncode == 5  # pytest's status when no test ran
    done = run(source, DETRAIN_NB_CI="1")
    assert done.returncode == 2
    assert "skipped: no time" in done.stdout


@pytest.mark.slow
def test_missing_package_is_skipped_with_the_command_that_installs_it(run) -> None:
    done = run(TESTS + SKIPPED_FOR_A_PACKAGE)
    assert done.returncode == 0, done.stdout
    assert "1  needs chromium: run 'apt-get install chromium' as root" in done.stdout
    assert "'apt-get install dataset-fashion-mnist chromium' as root" in done.stdout


@pytest.mark.slow
def test_ci_allows_a_missing_package_only_where_it_could_not_install_it(run) -> None:
    assert run(SKIPPED_FOR_A_PACKAGE.join(["import pytest\n", ""]), DETRAIN_NB_CI="1", SYSTEM_DEPS="no").returncode == 0
    done = run(TESTS + SKIPPED_FOR_A_PACKAGE, DETRAIN_NB_CI="1")
    assert done.returncode == (1 if os.geteuid() == 0 else 0), done.stdout


def test_package_that_is_there_skips_nothing(run, tmp_path: Path) -> None:
    (tmp_path / "chromium").symlink_to(shutil.which("true") or "/bin/true")
    done = run(SKIPPED_FOR_A_PACKAGE.replace('"dataset-fashion-mnist", ', "").join(["import pytest\n", ""]))
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_unknown_package_is_an_error_of_the_test(run) -> None:
    done = run("import pytest\n@pytest.mark.needs_debian('chrome')\ndef test_x(): pass\n")
    assert done.returncode == 1
    assert "chrome" in done.stdout
