"""The sessions that earlier kernels of a notebook have left: which there are, and what the notebook says of them."""

from __future__ import annotations

from ..deploy.known import KnownSession, known_sessions

__all__ = ["describe_beside", "describe_waiting", "waiting_sessions"]


def waiting_sessions(notebook: str) -> dict[str, KnownSession]:
    """By name, those of ``notebook``: first the one of its own name, then those that were given another one."""
    there = known_sessions()
    own = [name for name in there if name == notebook or there[name].holder == notebook]
    return {name: there[name] for name in sorted(own, key=lambda name: name != notebook)}


def describe_waiting(notebook: str) -> list[str]:
    """Say of each what to do, and what would end it; for a notebook that holds none."""
    there = waiting_sessions(notebook)
    lines = [line for name, known in there.items() for line in _describe(name, known, notebook)]
    if there and notebook not in there:
        them = "it" if len(there) == 1 else "them"
        lines.append(f"without an attach, the next %%distributed cell starts another session beside {them}")
    return lines


def describe_beside(notebook: str, started: str) -> list[str]:
    """Say of each what to do, where ``notebook`` starts the session ``started`` beside them."""
    return [
        f"session {name} of this notebook stays beside the new one ({known}): %distributed detach, then "
        f"%distributed attach {name} goes on with it; %distributed stop {name} ends it; {known.own_end}"
        for name, known in waiting_sessions(notebook).items()
        if name != started
    ]


def _describe(name: str, known: KnownSession, notebook: str) -> list[str]:
    is_named = name != notebook
    which, anew = (f" {name}", "") if is_named else ("", "%distributed restart starts anew, ")
    lines = [
        f"session {name} of this notebook is there ({known}): %distributed attach{which} shows what was missed and "
        f"goes on, {anew}%distributed stop{which} ends it; {known.own_end}"
    ]
    if known.is_left and known.holder == notebook:
        what = f"%distributed start --name {name}" if is_named else "the next %%distributed cell or %distributed start"
        lines.append(f"to keep its variables, attach first: {what} ends its ranks, and all their variables are lost")
    return lines
