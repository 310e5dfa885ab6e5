"""Messages of a page are checked: an action gets the arguments that it declares, and nothing else."""

from __future__ import annotations

import pytest
from detrain_nb.widgets.actions import (
    Check,
    Refused,
    action,
    actions_of,
    describe_failure,
    flag,
    list_of,
    one_of,
    optional,
    secret,
    table_of,
    text,
    whole,
)

from detrain_nb.errors import SessionError


class Asked:
    @action(rank=whole(0, 3), again=flag)
    def stop(self, rank: int, again: bool) -> str:
        return f"{rank} {again}"


class AskedMore(Asked):
    @action()
    def start(self) -> None: ...


def test_actions_are_those_of_the_class_and_of_its_bases() -> None:
    assert sorted(actions_of(AskedMore)) == ["start", "stop"]
    assert actions_of(Asked)["stop"].call(Asked(), {"rank": 2, "again": True}) == "2 True"
    assert Asked().stop(2, False) == "2 False"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"rank": 1}, r"stop takes rank, again, not \['rank'\]"),
        ({"rank": 1, "again": True, "__class__": 1}, "stop takes rank, again, not "),
        ([1], r"stop takes rank, again, not \[1\]"),
        (None, "stop takes rank, again, not None"),
        ({"rank": 4, "again": True}, "rank must be a whole number from 0 to 3, not 4"),
        ({"rank": True, "again": True}, "rank must be a whole number from 0 to 3, not True"),
        ({"rank": 1.0, "again": True}, "rank must be a whole number"),
        ({"rank": 1, "again": 1}, "again must be true or false, not 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: object, said: str) -> None:
    with pytest.raises(Refused, match=said):
        actions_of(Asked)["stop"].call(Asked(), arguments)


@pytest.mark.parametrize(
    "arguments", ["hunter2", ["hunter2"], {"hunter2": 1}, {"number": "x", "passphrase": "hunter2"}]
)
def test_no_refusal_shows_a_secret_wherever_it_stands(arguments: object) -> None:
    """All pages of a kernel receive an answer, so it must not repeat a secret."""

    class Asking:
        @action(number=whole(0, 3), passphrase=secret)
        def answer(self, number: int, passphrase: str) -> None: ...

    with pytest.raises(Refused) as refused:
        actions_of(Asking)["answer"].call(Asking(), arguments)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "check, value",
    [
        (text(most=3), "abcd"),
        (text(), None),
        (one_of("a", "b"), "c"),
        (one_of("a", "b"), ["a"]),
        (list_of(text(), most=1), ["a", "b"]),
        (list_of(text()), ["a", 1]),
        (list_of(text()), "a"),
        (table_of(text(most=3)), {"a": "abcd"}),
        (table_of(text(), most=1), {"a": "", "b": ""}),
        (table_of(text()), ["a"]),
        (optional(flag), 0),
    ],
)
def test_check_refuses(check: Check, value: object) -> None:
    with pytest.raises(ValueError):
        check(value)


def test_check_passes_what_it_declares() -> None:
    assert table_of(flag)({"a": True}) == {"a": True}
    assert optional(flag)(None) is None and list_of(whole(0, 1))([1]) == [1] and one_of("a")("a") == "a"


def test_failure_is_told_in_one_line_and_a_fault_of_ours_as_one() -> None:
    assert describe_failure(SessionError("no session: start one")) == "no session: start one"
    assert describe_failure(KeyError("x")) == "this is a bug in detrain_nb: KeyError: 'x'"
