"""Relaxed JSON: variants that people write are read, strict JSON is read as JSON, and no text takes long."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats.relaxed_json import read_relaxed

JOB = """// as in a request for comments
{
  job_id: <UUID>, model: s3://bucket/model,
  'data': { location: "s3://a", chunk: ["00000", 00001, ...], }
  training: { # how
    steps: 500, lr: 1e-3, path: a/b, quoted: 'it\\'s "so"',
    optimizer: ...,
    ...
  }, /* no
  more */ private: true, none: null
}
"""
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # a lone surrogate is refused everywhere
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


def test_what_people_write_is_read() -> None:
    content, left_open = read_relaxed(JOB)
    assert content == {
        "job_id": "<UUID>",
        "model": "s3://bucket/model",
        "data": {"location": "s3://a", "chunk": ["00000", "00001"]},
        "training": {"steps": 500, "lr": 1e-3, "path": "a/b", "quoted": 'it\'s "so"'},
        "private": True,
        "none": None,
    }
    assert left_open == ("data.chunk", "training.optimizer", "training")


@settings(max_examples=50, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_json_is_read_as_json(value: object, indent: int | None, is_ascii: bool) -> None:
    assert read_relaxed(json.dumps(value, indent=indent, ensure_ascii=is_ascii)) == (value, ())


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "f: line 1, column 1: unexpected end of the text"),
        ("{\na: 1", "f: line 2, column 5: unexpected end of the text"),
        ("[1, 2", "unexpected end of the text"),
        ("{a 1}", "line 1, column 4: unexpected '1': give a colon, and the value of 'a'"),
        ("{a: ]}", "column 5: unexpected '\\]': give a value"),
        ("{a: 1, 'a': 2}", "column 8: duplicate key 'a'"),
        ("{} x", "'x' follows the end: leave it out"),
        ('{a: "x', "column 5: unexpected or unclosed '\"'"),
        ("/* x", "unexpected or unclosed '/'"),
        ("[\0]", "unexpected or unclosed"),
        ('["\\x"]', "column 2: invalid"),
        ("9" * 5000, "too many digits"),
        ("{a: 99999999999999999999}", "f: a: a number of more than 64 bits"),
        ("[" * 1_000_000, "more than 100 levels"),
        ('{"a":' * 100_000, "more than 100 levels"),
        ("[" + "1," * 450_000, "more than 100000 values"),
        ('"' * 1_000_000, "follows the end"),
        ('\\"' * 500_000, "unexpected or unclosed"),
        ("/* " * 300_000, "unexpected or unclosed"),
        ("{" + "<" * 999_999, "unexpected or unclosed"),
        (" " * 1_000_001, "larger than 1 MB"),
    ],
    ids=range(21),
)
def test_fault_is_told_with_its_place_and_soon(text: str, fault: str) -> None:
    begun = time.process_time()
    with pytest.raises(SpecError, match=f"^f: .*{fault.removeprefix('f: ')}"):
        read_relaxed(text, where="f")
    assert time.process_time() - begun < 2
