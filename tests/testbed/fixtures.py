"""SSH hosts for the tests of any room; tests/conftest.py loads this.

`testbed` has two hosts, h0 and h1, which all tests share: they are repaired after each test. A test that needs other
hosts uses `make_testbed`. Both skip with the reason if this machine cannot run them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator
from typing import Any, Protocol

import pytest

from .testbed import Testbed, unavailable

_TTL_S = 6 * 3600.0  # longer than any run; in case the keeper misses that pytest has exited


class MakeTestbed(Protocol):
    def __call__(self, num_hosts: int, **options: Any) -> Testbed:
        """Bring up another testbed; ``options`` are those of `Testbed.up`. It goes down after the test."""


@pytest.fixture(scope="session")
def testbed_of_two(needs_debian: Callable[..., None], request: pytest.FixtureRequest) -> Generator[Testbed]:
    """Two hosts for all tests. Tests use `testbed` instead, which repairs the hosts after each test."""
    _skip_where_unavailable(needs_debian)
    older = request.config.getoption("--older-python")
    share = _folders_of_python(older) if older else []
    testbed = Testbed(f"t{os.getpid()}")  # several runs can work at the same time
    try:
        testbed.up(2, ttl_s=_TTL_S, owner_pid=os.getpid(), share=share)
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def testbed(cold_starts: None, testbed_of_two: Testbed) -> Generator[Testbed]:
    """Two hosts. After the test, links are healed, sshd runs and dead hosts are booted; files and processes stay."""
    try:
        yield testbed_of_two
    finally:
        testbed_of_two.repair()


@pytest.fixture
def make_testbed(cold_starts: None, needs_debian: Callable[..., None]) -> Generator[MakeTestbed]:
    """Return a function that brings up another testbed for this test, with its own size and options."""
    made: list[Testbed] = []

    def make(num_hosts: int, **options: Any) -> Testbed:
        _skip_where_unavailable(needs_debian, **options)
        testbed = Testbed(f"{'abcdefgh'[len(made)]}{os.getpid()}")
        made.append(testbed)
        testbed.up(num_hosts, **{"ttl_s": _TTL_S, "owner_pid": os.getpid(), **options})
        return testbed

    try:
        yield make
    finally:
        for testbed in made:
            testbed.down()


def _folders_of_python(python: str) -> list[str]:
    code = "import os, sys\nfor path in (sys.prefix, sys.base_prefix): print(path, os.path.realpath(path), sep='\\n')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def _skip_where_unavailable(needs_debian: Callable[..., None], **options: Any) -> None:
    needs_debian("openssh-server", "iproute2")
    if reason := unavailable(options.get("mode", "netns"), has_link=options.get("link") is not None):
        pytest.skip(reason)
