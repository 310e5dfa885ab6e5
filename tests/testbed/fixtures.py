"""Several SSH hosts for a test of any room; tests/conftest.py loads this.

`testbed` has two hosts, h0 and h1, which all tests share: they are whole again after each test. A test that needs other
hosts takes `make_testbed`. Both skip with the reason where this machine cannot have them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator
from typing import Any, Protocol

import pytest

from .testbed import Testbed, unavailable

_TTL_S = 6 * 3600.0  # no run takes so long; should the keeper not see that pytest has ended


class MakeTestbed(Protocol):
    def __call__(self, num_hosts: int, **options: Any) -> Testbed:
        """Bring another testbed up; ``options`` are those of `Testbed.up`. It goes down after the test."""


@pytest.fixture(scope="session")
def testbed_of_two(needs_debian: Callable[..., None], request: pytest.FixtureRequest) -> Generator[Testbed]:
    """Two hosts for all tests. A test takes `testbed` instead, which is whole again after it."""
    _skip_where_unavailable(needs_debian)
    older = request.config.getoption("--older-python")
    share = _folders_of_python(older) if older else []
    testbed = Testbed(f"t{os.getpid()}")  # so runs may go on side by side
    try:
        testbed.up(2, ttl_s=_TTL_S, owner_pid=os.getpid(), share=share)
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def testbed(cold_starts: None, testbed_of_two: Testbed) -> Generator[Testbed]:
    """Two hosts. After the test: links healed, sshd started, a dead host booted; files and processes stay."""
    try:
        yield testbed_of_two
    finally:
        testbed_of_two.repair()


@pytest.fixture
def make_testbed(cold_starts: None, needs_debian: Callable[..., None]) -> Generator[MakeTestbed]:
    """Return a function that brings up another testbed, of its own size and options, for this test."""
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
