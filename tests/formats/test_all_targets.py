"""What every target has in common, whether its text is run or read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.formats import EXPORTERS, export_spec, write_export
from detrain_nb.plan.targets import TARGETS, as_typed
from detrain_nb.spec import PipelineSpec

from .on_nodes import NEEDS

targets = pytest.mark.parametrize("target", EXPORTERS)


def _spec(target: str, **fields: Any) -> PipelineSpec:
    source = {"script_text": "print()\n"}
    return PipelineSpec.from_dict({"name": "mnist", "source": source, **NEEDS[target], **fields})


@targets
def test_text_is_the_same_each_time_and_ends_with_one_newline(target: str) -> None:
    first, second = (export_spec(_spec(target), target) for _ in range(2))
    assert first == second
    assert first.endswith("\n") and not first.endswith("\n\n") and "\r" not in first


@targets
def test_value_of_a_secret_is_written_nowhere(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_TOKEN", "GIT_TOKEN"):
        monkeypatch.setenv(name, "very-secret")
    git = {"url": "https://example.org/a.git", "token": "GIT_TOKEN"}
    nodes = [{"host": "a", "env": ["MY_TOKEN"]}]
    spec = _spec(target, source={"git": git, "entry": "train.py"}, secrets=["MY_TOKEN"], nodes=nodes)
    assert "very-secret" not in export_spec(spec, target)


@pytest.mark.parametrize(
    "target, option", [(target, name) for target, each in TARGETS.items() for name in each.options]
)
def test_option_that_is_none_is_refused_with_one_line(target: str, option: str) -> None:
    with pytest.raises(SpecError, match=f"^{as_typed(option)}[ :]") as caught:
        export_spec(_spec(target), target, options={option: "$(id)\n'b'"})
    assert "\n" not in str(caught.value)
    with pytest.raises(SpecError, match=f"^{as_typed(option)} has 5,000 characters: give at most"):
        export_spec(_spec(target), target, options={option: "9" * 5000})


def test_targets_are_those_that_can_be_exported() -> None:
    assert TARGETS.keys() == EXPORTERS.keys() == NEEDS.keys()
    assert all(target.suffix.startswith(".") and target.about for target in TARGETS.values())


def test_password_in_the_url_of_a_file_is_not_shown() -> None:
    assert write_export("text", "memory://me:secret@x/a.sh") == "wrote memory://***@x/a.sh"


def test_page_of_targets_tells_of_each_and_of_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs/targets.md").read_text()
    assert re.findall(r"^(##.*)\n+##? ", page, re.MULTILINE) == [], "headings with nothing below"
    for name, target in TARGETS.items():
        assert re.search(rf"(`|export ){name}\b", page), name
        for option in target.options:
            assert re.search(rf"`(--)?({option}|{option.replace('_', '-')})\b", page), (name, option)
