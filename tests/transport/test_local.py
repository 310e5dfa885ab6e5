"""This machine as a node whose ranks use another Python, which is queried as a remote host's Python is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from detrain_nb import __version__
from detrain_nb.deploy.jobs import open_job_talk
from detrain_nb.errors import DetrainError, LaunchError
from detrain_nb.jobs.asking import ask_facts
from detrain_nb.session.session import Session
from detrain_nb.spec import Node
from detrain_nb.transport.local import LocalTransport

Transports = Callable[[str], LocalTransport]


@pytest.fixture
def here_with(tmp_path: Path) -> Transports:
    """Return a function that turns a shell script into a node: this machine, with the script as its Python."""

    def make(script: str) -> LocalTransport:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return LocalTransport(Node(host="localhost", python=str(path)))

    return make


def _with_release(folder: Path, name: str, version: str) -> str:
    """Return the script of a Python that reports another version of a library."""
    known = folder / "other" / f"{name}-{version}.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f'PYTHONPATH={folder}/other exec {sys.executable} "$@"'


def test_version_of_torch_is_that_of_the_python_of_the_ranks(here_with: Transports, tmp_path: Path) -> None:
    here = here_with(_with_release(tmp_path, "torch", "2.0.1+cu118"))
    with open_job_talk(here) as talk:
        assert ask_facts(talk).torch == "2.0.1+cu118"
    assert here.torch == "2.0.1+cu118"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (f'exec {sys.executable} -I -S "$@"', "torch is missing in {python}: install it there ({python} -m pip"),
        ("echo it is broken >&2; exit 3", "python {python} failed to report its packages: it is broken"),
        ("exit 3", "python {python} failed to report its packages: no output"),
    ],
)
def test_python_that_cannot_be_used_is_told_before_anything_starts(
    script: str, complaint: str, here_with: Transports
) -> None:
    here = here_with(script)
    for start in (lambda: open_job_talk(here).__enter__(), lambda: Session.start(nodes=[here], device="cpu")):
        with pytest.raises(LaunchError) as caught:
            start()
        assert complaint.format(python=here.python) in str(caught.value)


def test_python_that_is_not_there_is_told() -> None:
    here = LocalTransport(Node(host="localhost", python="/nowhere/python"))
    with pytest.raises(LaunchError, match="cannot start python /nowhere/python: No such file"), here.run_jobs():
        pass


def test_other_release_of_ours_is_told(here_with: Transports, tmp_path: Path) -> None:
    here = here_with(_with_release(tmp_path, "detrain_nb", "0.0.1"))
    with pytest.raises(LaunchError, match=f"0.0.1, this process has {__version__}: install"), here.run_jobs():
        pass


def test_service_that_ends_at_once_says_why(here_with: Transports) -> None:
    here = here_with(f'[ "$1" != -X ] || {{ echo out of order >&2; exit 3; }}; exec {sys.executable} "$@"')
    with pytest.raises(DetrainError, match="the job service exited at once: out of order"), here.run_jobs():
        pass
