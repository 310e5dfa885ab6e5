"""The sessions that earlier kernels of a notebook left, and the lines that describe them."""

from __future__ import annotations

from ..deploy.known import KnownSession, known_sessions

__all__ = ["describe_beside", "describe_waiting", "waiting_sessions"]


def waiting_sessions(notebook: str) -> dict[str, KnownSession]:
    """Return the sessions of ``notebook`` by name: first the one with its own name, then the others."""
    there = known_sessions()
    own = [name for name in there if name == notebook or there[name].holder == notebook]
    return {name: there[name] for name in sorted(own, key=lambda name: name != notebook)}


def describe_waiting(notebook: str) -> list[str]:
    """Describe each session, what to do with it and what would stop it, for a notebook that holds none."""
    there = waiting_sessions(notebook)
    lines = [line for name, known in there.items() for line in _describe(name, known, notebook)]
    if there and notebook not in there:
        them = "it" if len(there) == 1 else "them"
        lines.append(f"unless you attach, the next %%distributed cell starts another session next to {them}")
    return lines


def describe_beside(notebook: str, started: str) -> list[str]:
    """Describe the other sessions of ``notebook``, and what to do with them, when it starts ``started``."""
    return [
        f"session {name} of this notebook stays next to the new one ({known}): %distributed detach, then "
        f"%distributed attach {name} reconnects to it; %distributed stop {name} stops it; {known.own_end}"
        for name, known in waiting_sessions(notebook).items()
        if name != started
    ]


def _describe(name: str, known: KnownSession, notebook: str) -> list[str]:
    is_named = name != notebook
    which, anew = (f" {name}", "") if is_named else ("", "%distributed restart starts new ranks, ")
    state = "was left running" if known.nodes else "is still running"  # on hosts, it may have ended meanwhile
    lines = [
        f"session {name} of this notebook {state} ({known}): %distributed attach{which} reconnects to it and "
        f"shows missed output, {anew}%distributed stop{which} stops it; {known.own_end}"
    ]
    if known.is_left and known.holder == notebook:
        what = f"%distributed start --name {name}" if is_named else "the next %%distributed cell or %distributed start"
        lines.append(f"to keep its variables, attach first: {what} stops its ranks, and all their variables are lost")
    return lines
