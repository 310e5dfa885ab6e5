"""Actions: the methods of a view that its page may call, with checks of their arguments.

Pages are trusted as little as nodes are: someone else's notebook can contain a script that talks to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import SecretStr

from ..errors import DetrainError
from ..text import show

Check = Callable[[object], Any]  # returns the value, or raises ValueError that says what is expected

_LONGEST_SECRET = 4000


class Refused(ValueError):
    """A request of a page that cannot be carried out; the page shows the message."""


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

        Raises: Refused when an argument is missing, unknown or invalid.
        """
        if not isinstance(arguments, dict) or set(arguments) != set(self._checks):
            given = sorted(map(str, arguments)) if isinstance(arguments, dict) else arguments
            shown = "the arguments given" if secret in self._checks.values() else show(given)
            raise Refused(f"{self.name} takes {', '.join(self._checks) or 'nothing'}, not {shown}")
        values = {}
        for name, check in self._checks.items():
            try:
                values[name] = check(arguments[name])
            except ValueError as exc:
                given = "" if check is secret else f", not {show(arguments[name])}"
                raise Refused(f"{self.name}: {name} must be {exc}{given}") from None
        return self._method(view, **values)


def action(**checks: Check) -> Callable[[Callable[..., Any]], Action]:
    """Let the page call this method: ``@action(rank=whole(0, 63))``.

    Each argument has a check that returns its value, or raises ValueError with what is expected. The module
    ``detrain_nb.widgets.actions`` has ``text``, ``whole``, ``flag``, ``one_of``, ``list_of``, ``table_of``,
    ``optional`` and ``secret``. The page sees the message of a `Refused`.

    The method runs in the thread in which the kernel serves messages, also while a cell runs. It must return quickly:
    it sets an event or starts the work with `LiveView.work`, and returns plain JSON.
    """
    return lambda method: Action(method, checks)


def actions_of(kind: type) -> dict[str, Action]:
    """Return all actions of a class by name, including those of its bases."""
    found = (value for base in reversed(kind.__mro__) for value in vars(base).values())
    return {value.name: value for value in found if isinstance(value, Action)}


def text(*, most: int = 1000) -> Check:
    """Return a check for a string of at most ``most`` characters."""

    def check(value: object) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"a string of at most {most:,} characters")
        return value

    return check


def secret(value: object) -> SecretStr:
    """Check a string that no message, log or display of the view may show."""
    if not isinstance(value, str) or len(value) > _LONGEST_SECRET:
        raise ValueError(f"a string of at most {_LONGEST_SECRET:,} characters")
    return SecretStr(value)


def whole(low: int, high: int) -> Check:
    """Return a check for a whole number from ``low`` to ``high``, both included."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"a whole number from {low:,} to {high:,}")
        return value

    return check


def flag(value: object) -> bool:
    """Check a boolean."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def one_of(*choices: str) -> Check:
    """Return a check for one of these strings."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return check


def list_of(check_item: Check, *, most: int = 1000) -> Check:
    """Return a check for a list of at most ``most`` items, each of which passes ``check_item``."""

    def check(value: object) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"a list of at most {most:,} items")
        return [check_item(item) for item in value]

    return check


def table_of(check_value: Check, *, most: int = 100) -> Check:
    """Return a check for a dict of at most ``most`` values by name, each of which passes ``check_value``."""

    def check(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"a mapping of at most {most:,} values")
        return {str(name): check_value(item) for name, item in value.items()}

    return check


def optional(check_value: Check) -> Check:
    """Return a check for null or a value that passes ``check_value``."""
    return lambda value: None if value is None else check_value(value)


def describe_failure(exc: Exception) -> str:
    """Describe on one line why an action failed; an error that only a bug of ours can cause is called a bug."""
    if isinstance(exc, DetrainError | ValueError | OSError):
        return str(exc) or type(exc).__name__
    return f"this is a bug in detrain_nb: {type(exc).__name__}: {exc}"
