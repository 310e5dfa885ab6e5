"""Nodes: invalid ones are refused, and the error names the field and a valid value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.plan import parse_ranks
from detrain_nb.spec import Node
from detrain_nb.spec.node import Target, default_name, parse_target


def test_host_alone_is_a_node() -> None:
    node = Node(host="gpu1")
    assert node.name == "gpu1"
    assert (node.port, node.user, node.ranks, node.devices, node.python) == (None, None, None, "auto", "python3")
    assert (node.setup, node.env, node.workdir) == ((), (), None)


def test_node_is_frozen_and_hashable() -> None:
    node = Node(host="gpu1", devices=[0, 1], setup=["module load cuda"])
    with pytest.raises(ValueError, match="frozen"):
        node.host = "gpu2"
    assert len({node, Node(host="gpu1", devices=(0, 1), setup="module load cuda")}) == 1


ACCEPTED = [
    ("host", "gpu_1.example.org"),
    ("host", "10.0.0.1"),
    ("host", "fe80::1%eth0"),
    ("user", "alice@corp.example"),
    ("user", "CORP\\alice"),
    ("port", 65535),
    ("name", "node-10"),
    ("address", "2001:db8::1"),
    ("proxy_jump", "jump1,alice@[::1]:22,u@jump2:2222"),
    ("devices", "cpu"),
    ("ranks", 1),
    ("python", "/opt/my pythön/bin/python3"),
    ("workdir", "~/trainings läufe"),
    ("identity_file", "C:\\Users\\alice\\key file"),
    ("setup", ("module load cuda", "export A='b c'\t# $(x)")),
    ("env", ("HF_TOKEN", "_x")),
    ("bandwidth_mbit_s", 940.5),
    ("latency_ms", 0.0),
]


@pytest.mark.parametrize("field, value", ACCEPTED)
def test_value_is_accepted(field: str, value: Any) -> None:
    assert getattr(Node(**{"host": "gpu1", field: value}), field) == value


REFUSED = [
    *(("host", text) for text in ["", "-oProxyCommand=x", "a b", "a\n", "a;b", "a'b", 'a"b', "a$b", "bücher", "::g"]),
    *(("host", text) for text in ["alice@gpu1", "gpu1:22", "[::1]", "a`b", "a\\b", "a|b", "a/b", "fe80::1%a;b"]),
    ("host", 7),
    *(("user", text) for text in ["", "-l", "a b", "a;b", "a'", "ü", "a\0", "a$", "a\\", "\\a", "a\\b\\c"]),
    *(("name", text) for text in ["", "-a", ".a", "a b", "all", "ALL", "0", "12", "0-3", "1_0", "a" * 64, "é", "a,b"]),
    *(("port", port) for port in [0, -1, 65536, True, "22", 22.0]),
    *(("address", text) for text in ["", "-x", "a b", "10.0.0.1:22", "10.0.0.300", "0.0.0.0", "::"]),
    *(("proxy_jump", text) for text in ["", "-oX", "a,,b", "a b", "j:0", "j:99999", "::1", "a;b@c"]),
    *(("devices", value) for value in ["cuda", "0", 0, [], [-1], [0, 0], [True], ["0"], [0.0], None]),
    *(("ranks", value) for value in [0, -1, True, "2", 2.0]),
    *(("python", text) for text in ["", " ", "-c", "a\nb", "a\0b", "a\ud800", None]),
    *(("workdir", text) for text in ["", "relative", "-x", "/a\nb", "~/a\0"]),
    *(("identity_file", text) for text in ["", "-x", "a\nb", "a\0"]),
    *(("setup", value) for value in ["a\0b", "a\x1b[2J", ["a", 1], {"a": 1}, 3, "\ud800"]),
    *(("env", value) for value in ["HF_TOKEN", ["1A"], ["A-B"], ["A", "A"], ["A=b"], {"A": "b"}, [1], ["Ä"], ["A\n"]]),
    *(("bandwidth_mbit_s", value) for value in [0, -1.0, float("nan"), float("inf"), "10", True]),
    *(("latency_ms", value) for value in [-0.1, float("nan"), "1"]),
    ("password", "hunter2"),
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_value_is_refused_in_one_line_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        Node(**{"host": "gpu1", field: value})
    message = str(caught.value)
    assert message.startswith((field, repr(field)))
    assert len(message.splitlines()) == 1
    assert "give " in message or "is not a field" in message or "write [" in message
    assert "pydantic" not in message


def test_every_fault_has_its_line() -> None:
    with pytest.raises(SpecError) as caught:
        Node(host="a b", port=70000, devices="cuda", user_name="alice")
    assert str(caught.value).splitlines() == [
        "host 'a b': give a host name, a Host of your ssh config or an address, without user and port",
        "port 70000: give a number from 1 to 65535",
        """devices 'cuda': give "auto", "cpu", or the indices of GPUs, each once, such as [0, 1]""",
        "user_name is not a field: did you mean 'user'?",
    ]


def test_missing_host_is_named() -> None:
    with pytest.raises(SpecError, match=r"^host is missing: give a host name"):
        Node(port=22)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_beside_gpus_are_as_many(ranks: int) -> None:
    with pytest.raises(SpecError, match=rf"^ranks {ranks} but devices has 2 GPUs, one for each rank: leave out ranks$"):
        Node(host="gpu1", devices=[0, 1], ranks=ranks)
    assert Node(host="gpu1", devices=[0, 1], ranks=2).ranks == 2
    assert Node(host="gpu1", devices="cpu", ranks=ranks).ranks == ranks


@pytest.mark.parametrize(
    "fields",
    [{"env": ["HF_TOKEN=s3cret"]}, {"env": {"HF_TOKEN": "s3cret"}}, {"setup": "export A=s3cret\0"}, {"key": "s3cret"}],
)
def test_no_error_repeats_a_secret(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        Node(**{"host": "gpu1", **fields})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__suppress_context__  # a traceback must not show pydantic's own error


def test_long_value_is_cut() -> None:
    with pytest.raises(SpecError) as caught:
        Node(host="x y" * 1000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "setup, lines",
    [
        ("module load cuda", ("module load cuda",)),
        ("\nmodule load cuda\r\n\nsource env.sh\n", ("module load cuda", "", "source env.sh")),
        (["a\nb", "c"], ("a", "b", "c")),
        ("", ()),
    ],
)
def test_setup_is_lines(setup: Any, lines: tuple[str, ...]) -> None:
    assert Node(host="gpu1", setup=setup).setup == lines
    assert Node(host="gpu1", setup=lines).setup == lines


@pytest.mark.parametrize(
    "host, name", [("::1", "ip6---1"), ("fe80::1%eth0", "ip6-fe80--1-eth0"), ("10.0.0.1", "10.0.0.1")]
)
def test_address_gives_a_name(host: str, name: str) -> None:
    assert Node(host=host).name == default_name(host) == name


def test_host_that_cannot_be_a_name_asks_for_one() -> None:
    with pytest.raises(SpecError, match=r"^name '10': give a-z, A-Z"):
        Node(host="10")
    assert Node(host="10", name="ten").host == "10"


NAME_LIKE = st.text("0123456789-_.al", min_size=1, max_size=8) | st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)


@given(NAME_LIKE)
def test_no_name_reads_as_a_choice_of_ranks(name: str) -> None:
    try:
        Node(host="gpu1", name=name)
    except SpecError:
        return
    with pytest.raises(SpecError, match="invalid ranks"):
        parse_ranks(name, world_size=10**9)


@pytest.mark.parametrize(
    "text, target",
    [
        ("gpu1", Target("gpu1")),
        ("alice@gpu1:2222", Target("gpu1", "alice", 2222)),
        ("a@realm@gpu1", Target("gpu1", "a@realm")),
        ("CORP\\alice@gpu1:22", Target("gpu1", "CORP\\alice", 22)),
        ("[::1]:22", Target("::1", None, 22)),
        ("alice@[fe80::1%eth0]", Target("fe80::1%eth0", "alice")),
        ("[alice@::1]:22", Target("::1", "alice", 22)),
    ],
)
def test_target_is_taken_apart(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "@h", "h:", "h:x", "h:123456", "h:0", "h:65536", "[gpu1]", "[::1", "::1", "u@", "a/b", "-o", "u;v@h"]
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"give |write "):
        parse_target(text)


def test_bare_ipv6_is_told_its_brackets_and_no_password_is_shown() -> None:
    with pytest.raises(SpecError, match=r"write \[2001:db8::1\]"):
        parse_target("2001:db8::1")
    with pytest.raises(SpecError, match=r"^'me:\*\*\*@host': it contains a password: leave it out"):
        parse_target("me:secret@host")
