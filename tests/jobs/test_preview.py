"""What a dry run shows of a spec that somebody else has written: all of it, and no line or escape code of its own."""

from __future__ import annotations

import html
import re

import pytest

from detrain_nb.jobs import submit
from detrain_nb.spec import PipelineSpec

FORGED = "setup on every node: nothing"
SPEC = {
    "name": "forged",
    "source": {
        "script_text": "1",
        "arguments": ["\x1b]52;c;ZXZpbA==\x07\x1b[2K\x1b[1A\x1b[2K", f"a\n{FORGED}\r\u2028{FORGED}"],
        "setup": ["rm -r x # \u202egnihton\u200b"],
    },
    "env": {"LD_PRELOAD": "/tmp/other.so", "BASH_ENV": f"a\n{FORGED}\x1b[2K", "LONG": "x" * 1000},
    "nodes": [{"host": "gpu1", "env": ["HF_TOKEN", "OTHER"]}, {"host": "gpu2"}],
}


@pytest.mark.parametrize("is_page", [False, True])
def test_dry_run_shows_all_that_a_spec_does_and_no_line_of_its_own(is_page: bool) -> None:
    told = submit(PipelineSpec.from_dict(SPEC), dry_run=True)
    shown = html.unescape(re.sub("<[^>]*>|\xa0", "\n", told._repr_html_())) if is_page else str(told)
    lines = shown.split("\n")
    assert not [char for line in lines for char in line if not char.isprintable()]
    assert not [line for line in lines if line.strip().startswith(FORGED)]
    assert "setup on every node: rm -r x # \\u202egnihton\\u200b" in lines
    assert "variable of setup and ranks: LD_PRELOAD='/tmp/other.so'" in lines
    assert f"variable of setup and ranks: BASH_ENV='a\\n{FORGED}\\x1b[2K'" in lines
    assert all(len(line) < 300 for line in lines if "LONG=" in line)
    assert "gpu1 gets from the environment here: HF_TOKEN, OTHER" in lines
    (command,) = [line for line in lines if line.startswith("gpu1: ")]
    assert "\\x1b]52;c;ZXZpbA==\\x07\\x1b[2K" in command and f"'a\\n{FORGED}\\r\\u2028{FORGED}'" in command
