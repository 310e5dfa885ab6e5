"""Run docs/two_hosts.md as a notebook on two hosts of a testbed: like the tour, its blocks are cells and their output.

`python -m tests.checks.two_hosts` runs the cells and rewrites the text blocks. It needs root, as the testbed does.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import home_with_hosts
from ..testbed.testbed import Testbed
from .tour import TOUR, read_cells, run_cells, write_shown

TWO_HOSTS = TOUR.with_name("two_hosts.md")
SHARED, NOTEBOOKS, PYTHON = "/mnt/shared", "/home/alice/notebooks", "/opt/venv/bin/python"  # as on the page
_NODES_FILE = re.compile(r"```toml\n(.*?)```", re.DOTALL)
_VARIES = (
    (re.compile(r"kernel-[0-9a-f]{12}"), "kernel-707dd514fcdd"),
    (re.compile(r"\[\d\d:\d\d<\d\d:\d\d, +[\d.]+step/s"), "[00:10<00:00,  6.00step/s"),
    (re.compile(r"(\d+ steps) in [\d.]+ s"), r"\1 in 10.0 s"),
    (re.compile(r"(\d+ hosts, \d+ problems, )\d+ warnings?\n.*", re.DOTALL), r"\g<1>0 warnings\n...\n"),  # the doctor
)


def run_page(text: str, make_testbed: MakeTestbed, folder: Path) -> list[str]:
    """Run the cells of ``text`` in ``folder``; returns the output of each, with the names and paths of the page.

    Sets HOME of this process to a folder whose ssh config has the two hosts.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        testbeds: list[Testbed] = []

        def make(num_hosts: int, **options: Any) -> Testbed:
            testbeds.append(make_testbed(num_hosts, **options))
            return testbeds[0]

        os.environ["HOME"] = str(home_with_hosts(make, folder, share=[shared]))
        notebooks = folder / "notebooks"
        notebooks.mkdir()
        (nodes,) = _NODES_FILE.findall(text)
        (notebooks / "nodes.toml").write_text(nodes.replace(PYTHON, sys.executable), "utf-8")
        (notebooks / ".detrainignore").write_text("fetched/\n", "utf-8")
        codes = [code.replace(SHARED, shared) for code, _ in read_cells(text)]
        instead = {str(notebooks): NOTEBOOKS, shared: SHARED}
        instead |= {host.hostname: f"gpu{number}" for number, host in enumerate(testbeds[0].hosts, start=1)}
        return [_as_on_the_page(shown, instead) for shown in run_cells(codes, notebooks)]


def _as_on_the_page(shown: str, instead: dict[str, str]) -> str:
    for here, there in instead.items():
        shown = shown.replace(here, there)
    for pattern, always in _VARIES:
        shown = pattern.sub(always, shown)
    return shown


def main() -> None:
    testbed = Testbed(f"p{os.getpid()}")

    def make(num_hosts: int, **options: Any) -> Testbed:
        testbed.up(num_hosts, owner_pid=os.getpid(), **options)
        return testbed

    text = TWO_HOSTS.read_text("utf-8")
    try:
        with tempfile.TemporaryDirectory() as folder:
            TWO_HOSTS.write_text(write_shown(text, run_page(text, make, Path(folder))), "utf-8")
    finally:
        testbed.down()


if __name__ == "__main__":
    main()
