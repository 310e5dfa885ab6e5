"""A check that nodes can reach each other: this node listens on its address briefly, and connects to the others once.

Each connection is sent a random token of the notebook, by which the other side knows that it has reached this node and
no other machine. Nothing is read from incoming connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .json_lines import FilesError, Talk, reason_of

__all__ = ["meet"]

_AT_ONCE = 64
_ANOTHER = "another machine or program answers there"


def meet(talk: Talk, order: dict[str, Any]) -> None:
    """Listen until the notebook has the results of all nodes; report how this node reached the others."""
    try:
        listener = _listen(str(order["address"]))
    except OSError as exc:
        raise FilesError(f"cannot listen on {order['address']}: {reason_of(exc)}") from exc
    with _greeting(listener, order["token"].encode()):
        talk.say("listening", port=listener.getsockname()[1])
        asked = talk.hear("reach")
        peers, within_s = asked["peers"], float(asked["within_s"])
        with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(peers)))) as pool:
            faults = list(pool.map(lambda peer: _reach(*peer, within_s=within_s), peers))
        talk.say("reached", faults=faults)
        talk.hear("done")  # until then others may still be connecting


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_AT_ONCE)


@contextlib.contextmanager
def _greeting(listener: socket.socket, token: bytes) -> Iterator[None]:
    """Send ``token`` to every connection while the block runs."""

    def greet() -> None:
        with contextlib.suppress(OSError):  # the listener was shut
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(token)

    thread = threading.Thread(target=greet, name="detrain_nb ways", daemon=True)
    with listener:
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            thread.join()


def _reach(address: str, port: int, token: str, *, within_s: float) -> str:
    """Connect to a node; returns why it cannot be reached, empty if it can."""
    until = time.monotonic() + within_s
    try:
        with socket.create_connection((address, port), timeout=within_s) as sock:
            wanted, came = token.encode(), b""
            while len(came) < len(wanted):
                sock.settimeout(max(0.001, until - time.monotonic()))
                if not (more := sock.recv(len(wanted) - len(came))):
                    break
                came += more
            return "" if came == wanted else _ANOTHER
    except TimeoutError:
        return f"no answer within {within_s:g} s"
    except OSError as exc:
        return reason_of(exc)
