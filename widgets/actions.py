"""What a page may ask of a view: each action declares its arguments, and nothing else reaches it.

A page is checked as a node is: a notebook of somebody else can hold a script that talks to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import SecretStr

from ..errors import DetrainError
from ..text import show

Check = Callable[[object], Any]  # returns the value, or raises ValueError with what is expected

_LONGEST_SECRET = 4000


class Refused(ValueError):
    """What a page asked for cannot be done; its message is shown there."""


class Action:
    """A method of a view that its page may call, with the checks of its arguments."""

    def __init__(self, method: Callable[..., Any], checks: Mapping[str, Check]) -> None:
        self.name = method.__name__.removeprefix("_")
        self._method = method
        self._checks = dict(checks)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.removeprefix("_")

    def __get__(self, view: object, owner: type | None = None) -> Any:
        return self if view is None else self._method.__get__(view, owner)

    def call(self, view: object, arguments: object) -> Any:
        """Check ``arguments`` and call the method.

        Raises: Refused when one is missing, unknown or wrong.
        """
        if not isinstance(arguments, dict) or set(arguments) != set(self._checks):
            given = sorted(map(str, arguments)) if isinstance(arguments, dict) else arguments
            shown = "what was given" if secret in self._checks.values() else show(given)
            raise Refused(f"{self.name} takes {', '.join(self._checks) or 'nothing'}, not {shown}")
        values = {}
        for name, check in self._checks.items():
            try:
                values[name] = check(arguments[name])
            except ValueError as exc:
                given = "" if check is secret else f", not {show(arguments[name])}"
                raise Refused(f"{self.name}: {name} has to be {exc}{given}") from None
        return self._method(view, **values)


def action(**checks: Check) -> Callable[[Callable[..., Any]], Action]:
    """Let the page call this method: ``@action(rank=whole(0, 63))``.

    It runs in whatever thread the kernel serves messages in, beside a running cell too: it sets an event or hands the
    work on (`LiveView.work`), and returns plain JSON.
    """
    return lambda method: Action(method, checks)


def actions_of(kind: type) -> dict[str, Action]:
    """All actions of a class, by name, those of its bases included."""
    found = (value for base in reversed(kind.__mro__) for value in vars(base).values())
    return {value.name: value for value in found if isinstance(value, Action)}


def text(*, most: int = 1000) -> Check:
    """A text of at most ``most`` characters."""

    def check(value: object) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"a text of at most {most:,} characters")
        return value

    return check


def secret(value: object) -> SecretStr:
    """A text that no message, log or picture of the view shows."""
    if not isinstance(value, str) or len(value) > _LONGEST_SECRET:
        raise ValueError(f"a text of at most {_LONGEST_SECRET:,} characters")
    return SecretStr(value)


def whole(low: int, high: int) -> Check:
    """A whole number between both, these included."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"a whole number from {low:,} to {high:,}")
        return value

    return check


def flag(value: object) -> bool:
    """Yes or no."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def one_of(*choices: str) -> Check:
    """One of these texts."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return check


def list_of(check_item: Check, *, most: int = 1000) -> Check:
    """A list of at most ``most`` items, each of which passes ``check_item``."""

    def check(value: object) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"a list of at most {most:,} items")
        return [check_item(item) for item in value]

    return check


def table_of(check_value: Check, *, most: int = 100) -> Check:
    """A table of at most ``most`` values by their names, each of which passes ``check_value``."""

    def check(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"a table of at most {most:,} values")
        return {str(name): check_value(item) for name, item in value.items()}

    return check


def optional(check_value: Check) -> Check:
    """Nothing (null), or what passes ``check_value``."""
    return lambda value: None if value is None else check_value(value)


def describe_failure(exc: Exception) -> str:
    """Say on one line why an action failed; an error of our own code is said to be one."""
    if isinstance(exc, DetrainError | ValueError | OSError):
        return str(exc) or type(exc).__name__
    return f"this is a fault of detrain_nb: {type(exc).__name__}: {exc}"
