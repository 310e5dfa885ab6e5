"""Akash's own parser of SDLs, which `make test-deps` installs with npm into the virtual environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from .sdl_lint import lint

INSTALLED = Path(sys.prefix) / "share/akash"
_VALIDATE = Path(__file__).with_name("validate.mjs")


def find_faults(texts: Sequence[str]) -> list[list[str]]:
    """Return the faults that the parser finds in each text; one run of Node.js parses all texts."""
    if not (INSTALLED / "node_modules").is_dir() or not shutil.which("node"):
        pytest.skip("needs Akash's parser of SDLs: make test-deps")
    done = subprocess.run(
        ["node", str(_VALIDATE), str(INSTALLED)], input=json.dumps(texts), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    faults: list[list[str]] = json.loads(done.stdout)
    assert len(faults) == len(texts)
    return faults


def require_sound(*texts: str) -> None:
    """Check that neither the parser nor our lint finds a fault in the texts."""
    for text, faults in zip(texts, find_faults(texts), strict=True):
        assert (faults, lint(yaml.safe_load(text)) if not faults else []) == ([], []), text
