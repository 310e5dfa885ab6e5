"""Documents: what is written can be read again in every format; excessive or ambiguous documents are refused."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.documents import (
    format_document,
    parse_content,
    parse_document,
    read_document,
    suffix_of,
    write_document,
)
from detrain_nb.errors import SpecError

TRAPS = ["no", "1e3", "1_0", "012", "1:30", "~", "null", ".5", "0x1", "<<", "=", "a: b", "a #b", "- a", "x\ny\n", "\n"]
TRAPS += ['say "hi"\nbye\\n', '"""\n', "\r\n", "\x7f\n", "\x85", "\u2028", "\ufeff", "2020-01-01", "a\tb\nc ", " \n "]
TRAPS += [
    "  two\nthree",
    "back\\\nslash\\n",
    "yes",
    "# no comment",
    "---",
    "...\n---\n",
    "%YAML",
    "é\n𝄞",
    "a\n\n\n",
    "...",
]
TEXTS = st.text(max_size=30) | st.sampled_from(TRAPS)
SCALARS = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def _content(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
    )
    return st.dictionaries(TEXTS, values, max_size=5)


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@settings(deadline=None)  # other tests may keep the processors busy
@given(data=_content(SCALARS | st.none()))
def test_what_is_written_is_read_again(suffix: str, data: dict[str, Any]) -> None:
    text = format_document(data, suffix)
    assert parse_document(text, suffix) == data
    read = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    assert read == data, "others read it otherwise"


@settings(deadline=None)  # other tests may keep the processors busy
@given(data=_content(SCALARS))
def test_what_is_written_as_toml_is_read_again(data: dict[str, Any]) -> None:
    text = format_document(data, ".toml")
    assert parse_document(text, ".toml") == tomllib.loads(text) == data


@pytest.mark.parametrize("suffix", [".json", ".toml", ".yaml"])
def test_types_stay_what_they_are(suffix: str) -> None:
    data = {"a": True, "b": 1, "c": 1.0, "d": "1", "e": "true", "f": [], "g": {}, "h": [{}, {"i": [1.5, "x"]}]}
    assert repr(parse_document(format_document(data, suffix), suffix)) == repr(data)


SCRIPT = {
    "source": {"script_text": "import torch\nif \"a\" in \"\\n\":\n    print('''x''')\n"},
    "nodes": [{"host": "gpu1", "devices": [0, 1]}],
}
WRITTEN = {
    ".yaml": r"""source:
  script_text: |
    import torch
    if "a" in "\n":
        print('''x''')
nodes:
- host: gpu1
  devices: [0, 1]
""",
    ".toml": r'''[source]
script_text = """
import torch
if "a" in "\\n":
    print(\'\'\'x\'\'\')
"""

[[nodes]]
host = "gpu1"
devices = [0, 1]
'''.replace(r"\'", "'"),
}


@pytest.mark.parametrize("suffix", WRITTEN)
def test_script_is_written_as_lines(suffix: str) -> None:
    assert format_document(SCRIPT, suffix) == WRITTEN[suffix]


def test_yaml_is_read_by_its_version_1_2() -> None:
    text = "a: no\nc: 0x1F\nd: 0o17\ne: 2020-01-01\nf: 1:30\ng:\nh: ~\ni: .5\nj: 1e3\nk: True\nl: '1'\nm: =\n"
    assert repr(list(parse_document(text, ".yml").values())) == (
        "['no', 31, 15, '2020-01-01', '1:30', None, None, 0.5, 1000.0, True, '1', '=']"
    )


def test_what_other_parsers_of_yaml_take_for_no_text_is_written_in_quotes() -> None:
    texts = ["y", "N", "no", "0X1F", "0B1", "0O7", "0o7", "1_0e3", "1_0", "1_" * 9999 + "1", "2001-1-1", "1:30", "1e3"]
    for text in texts:  # the name of a job, of a namespace, of an image
        assert format_document({"a": text}, ".yaml") == f'a: "{text}"\n'
    assert format_document({"yes-1": "2Gi"}, ".yaml") == "yes-1: 2Gi\n"


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    return "\n".join(lines)


MANY = 100_001
FAULTS = {
    "JSON's syntax": (".json", '{"a": 1,\n "b" 2}', "line 2, column 6: expecting ':' delimiter"),
    "TOML's syntax": (".toml", "a = 1\nb 2", "line 2, column 3: expected '=' after a key"),
    "YAML's syntax": (".yaml", "a: 1\nb: [2", "line "),
    "an indent of YAML": (".yaml", "a: 1\n  b: 2", "line 2, column 4: mapping values are not allowed"),
    "a name twice in JSON": (
        ".json",
        '{"a": {"b": "a"},\n "c": ["a", "a"],\n "\\u0061": 2}',
        "line 3: duplicate key 'a'",
    ),
    "a name twice below": (".json", '{"a": [{"a": 1,\n"x": 1}, {"x": 1,\n"x": 2}]}', "line 3: duplicate key 'x'"),
    "a name twice in TOML": (".toml", "a = 1\na = 2\nb = 3", "line 2, column 6: cannot overwrite"),
    "UTF-16": (".json", "{\0\n\0", "is not UTF-8"),
    "a name twice in YAML": (".yaml", "a: 1\n'a': 2", "line 2, column 1: duplicate key 'a'"),
    "billion laughs": (".yaml", _bomb(), "line 1, column 5: anchors and aliases are refused"),
    "an alias": (".yaml", "a: *b", "line 1, column 4: anchors and aliases are refused"),
    "an anchor": (".yaml", "a: &b c", "line 1, column 4: anchors and aliases are refused"),
    "a tag that runs code": (".yaml", "a: !!python/object/apply:os.system ['id']", "line 1, column 4: the tag "),
    "a tag": (".yaml", "a: !!str 1", "line 1, column 4: the tag 'tag:yaml.org,2002:str' is refused"),
    "names for tags": (
        ".yaml",
        "a: 1\n" + "".join(f"%TAG !{n}! x\n" for n in range(50_000)),
        "line 2: %TAG directives",
    ),
    "a merge key": (".yaml", "a:\n  <<: {b: 1}", "line 2, column 3: merge keys"),
    "a number that may be octal": (
        ".yaml",
        "a: 1\nb: [0, -012]",
        "line 2, column 8: a number with a leading 0",
    ),
    "two documents": (".yaml", "a: 1\n---\nb: 2", "line 2, column 1: a second document"),
    "a name that is a number": (".yaml", "1: a", "line 1, column 1: a key is not a string"),
    "a name that is a list": (".yaml", "[a]: b", "line 1, column 1: a key is not a string"),
    "no name": (".yaml", "? ~\n: b", "line 1, column 3: a key is not a string"),
    "a control character": (".yaml", "a: 1\nb: \x00", "line 2: '\\x00' is not allowed in YAML"),
    "half a character of JSON": (".json", '{"a": "\\ud800"}', "a: '\\ud800' cannot be encoded in UTF-8"),
    "half a character in a name": (".json", '{"\\ud800": 1}', "the key '\\ud800' cannot be encoded"),
    "a date": (".toml", "[a]\nb = [2020-01-01]", "a.b[0]: 2020-01-01 is a date or a time"),
    "NaN in JSON": (".json", '{"a": {"b": NaN}}', "a.b: nan is not a finite number"),
    "NaN in TOML": (".toml", "a = nan", "a: nan is not a finite number"),
    "NaN in YAML": (".yaml", "a: .NaN", "a: nan is not a finite number"),
    "infinity in YAML": (".yaml", "a: -.inf", "a: -inf is not a finite number"),
    "infinity in JSON": (".json", '{"a": 1e999}', "a: inf is not a finite number"),
    "65 bits in JSON": (".json", '{"a": [1, 9223372036854775808]}', "a[1]: a number of more than 64 bits"),
    "65 bits in TOML": (".toml", f"a = 0x{'f' * 5000}", "a: a number of more than 64 bits"),
    "65 bits in YAML": (".yaml", f"a: 0x{'f' * 5000}", "a: a number of more than 64 bits"),
    "many digits in JSON": (".json", f'{{"a": {"1" * 5000}}}', "a number has too many digits"),
    "many digits in TOML": (".toml", f"a = {'1' * 5000}", "a number has too many digits"),
    "many digits in YAML": (".yaml", f"a: {'1' * 5000}", "a number has too many digits"),
    "101 levels of JSON": (".json", '{"a":' * 101 + "1" + "}" * 101, "nested more than 100 levels deep"),
    "101 levels of TOML": (".toml", "a = " + "[" * 101 + "]" * 101, "nested more than 100 levels deep"),
    "101 levels of YAML": (
        ".yaml",
        "a: " + "[" * 101 + "]" * 101,
        "line 1, column 104: nested more than 100 levels deep",
    ),
    "endless levels of JSON": (".json", "[" * 500_000, "nested more than 100 levels deep"),
    "endless levels of TOML": (".toml", "a = " + "[" * 500_000, "nested more than 100 levels deep"),
    "endless levels of YAML": (".yaml", "[" * 500_000, "line 1, column "),
    "many values of JSON": (".json", f'{{"a": [{", ".join(["1"] * MANY)}]}}', "has more than 100000 values"),
    "many values of TOML": (".toml", f"a = [{', '.join(['1'] * MANY)}]", "has more than 100000 values"),
    "many values of YAML": (".yaml", "a:\n" + "- 1\n" * MANY, "has more than 100000 values"),
    "endless values of YAML": (
        ".yaml",
        "a:\n" + "- \n" * 300_000,
        "line 199999, column 2: has more than 100000 values",
    ),
    "many bytes": (".toml", "#" * 1_000_001, "larger than 1 MB"),
    "many bytes in few characters": (".json", json.dumps({"a": "ä" * 600_000}, ensure_ascii=False), "larger than 1 MB"),
    "dots in a key": (".toml", "x = 1\n" + "a." * 21 + "b = 1", "line 2: a key has more than 20 dots"),
    "a list": (".json", "[]", "must be a table of named fields"),
    "nothing": (".yaml", "# only a comment", "must be a table of named fields"),
    "another suffix": (".ini", "", "'.ini' is not a document format"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_shown_with_its_place(case: str) -> None:
    suffix, text, start = FAULTS[case]
    with pytest.raises(SpecError) as caught:
        parse_document(text, suffix, where="my.file")
    assert str(caught.value).removeprefix("my.file: ").startswith(start)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml"])
def test_what_is_just_not_too_much_is_read(suffix: str) -> None:
    deep: Any = "x"
    for _ in range(99):
        deep = {"a": deep}
    data = {"deep": deep, "many": [0] * 99_000}
    assert parse_document(format_document(data, suffix), suffix) == data
    full = {"a": "x" * 999_980}
    assert parse_document(format_document(full, suffix), suffix) == full


YAML_UNITS = [
    "[",
    "{a: ",
    "- ",
    "? ",
    "a: b\n",
    "'",
    "&a ",
    "[a,",
    "#\n",
    "- [1, 2]\n",
    "-\n ",
    "\t",
    ":",
    "[: ",
    "|\n",
    '"',
]


@pytest.mark.parametrize("unit", YAML_UNITS)
def test_yaml_is_looked_at_in_time_by_its_length(unit: str) -> None:
    began = time.thread_time()
    with pytest.raises(SpecError):
        parse_document((unit * 1_000_000)[:1_000_000], ".yaml")
    assert time.thread_time() - began < 10  # a quadratic parser would take hours


def test_long_names_are_not_written_out_for_every_value_below() -> None:
    text = json.dumps({"n" * 500_000: [0] * 99_000})
    assert len(parse_document(text, ".json")) == 1
    with pytest.raises(SpecError, match=r"^n{60}\[1\]: nan is no"):
        parse_document(json.dumps({"n" * 500_000: [0, float("nan")]}), ".json")


def _itself() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["a"] = data
    return data


def _laughs() -> dict[str, Any]:
    data: dict[str, Any] = {}
    for _ in range(90):
        data = {"a": data, "b": data}
    return data


@pytest.mark.parametrize("suffix", [".json", ".toml", ".yaml"])
def test_text_that_controls_a_terminal_or_turns_the_writing_is_seen(suffix: str) -> None:
    odd = "a\x7f\x9b2J\u202eb\u2066\u2028 é日"
    data = {odd: odd, "b": [f"x\n{odd}\ny\n", f"x: '{odd}'\n"]}
    text = format_document(data, suffix)
    assert text.replace("\n", "").isprintable() and "é日" in text
    assert parse_document(text, suffix) == data


UNWRITABLE = {
    "itself": (_itself(), "nested more than 100 levels deep"),
    "laughs": (_laughs(), "has more than 100000 values"),
    "an object": ({"a": [Path("b")]}, r"a\[0\]: PosixPath\('b'\) is of type PosixPath"),
    "a number of 65 bits": ({"a": 1 << 64}, "a: a number of more than 64 bits"),
    "NaN": ({"a": float("nan")}, "a: nan is not a finite number"),
    "a name that is no text": ({"a": {1: 2}}, "a: the key 1 is not a string"),
    "half a character": ({"a": "\udcff"}, "a: .* cannot be encoded in UTF-8"),
    "too much text": ({"a": "x" * 1_000_000}, "larger than 1 MB"),
    "one text very often": ({"a": ["x" * 900_000] * 300}, "larger than 1 MB"),
}


@pytest.mark.parametrize("suffix", [".json", ".toml", ".yaml"])
@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_could_not_be_read_again_is_not_written(case: str, suffix: str) -> None:
    data, message = UNWRITABLE[case]
    with pytest.raises(SpecError, match=f"^out: {message}"):
        format_document(data, suffix, where="out")


def test_toml_says_that_it_has_no_null() -> None:
    with pytest.raises(SpecError, match=r"^b: TOML has no null: omit the key, or use JSON or YAML"):
        format_document({"a": {"b": None}}, ".toml")


@pytest.mark.parametrize("name", ["spec.json", "spec.TOML", "spec.yaml", "spec.yml"])
@pytest.mark.parametrize("base", ["memory://documents/", "file://{}/", "{}/"])
def test_document_is_read_where_it_was_written(base: str, name: str, tmp_path: Path) -> None:
    where = base.format(tmp_path) + name
    write_document(where, {"name": "mnist", "training": {"epochs": 2}})
    assert read_document(where) == {"name": "mnist", "training": {"epochs": 2}}


def test_suffix_of_a_url_stands_before_its_query() -> None:
    assert suffix_of("https://example.org/spec.yaml?token=x.json") == ".yaml"
    with pytest.raises(SpecError, match=r"^spec\.txt: the name must end in one of \.json, \.toml, \.yaml"):
        suffix_of("s3://bucket/spec.txt?token=x")


def test_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: mnist\nname: other\n")
    with pytest.raises(SpecError, match=rf"^{path}: line 2, column 1: duplicate key 'name'"):
        read_document(path)
    path.write_bytes(b"name: mnist\nb: \xff")
    with pytest.raises(SpecError, match=rf"^{path}: line 2: is not UTF-8"):
        read_document(path)
    path.write_bytes(b"#" * 1_000_001)
    with pytest.raises(SpecError, match=rf"^{path}: larger than 1 MB"):
        read_document(path)
    with pytest.raises(SpecError, match=r"gone\.json cannot be read: it does not exist"):
        read_document(tmp_path / "gone.json")
    with pytest.raises(SpecError, match=r"memory://gone\.json cannot be read: it does not exist"):
        read_document("memory://gone.json")


def test_list_may_stand_at_the_top_where_that_is_asked_for() -> None:
    assert parse_content("- a\n- b", ".yaml") == ["a", "b"]
