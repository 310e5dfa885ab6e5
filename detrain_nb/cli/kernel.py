"""The kernel of ``detrain-nb run``: IPython's, without the TCP port that receives the output of its child processes.

Any user of the machine can connect to a port, and what they send is printed without limit and stored in the executed
notebook. Here it is a Unix socket next to the kernel's others, in a folder that only its user can enter.
"""

from __future__ import annotations

import os
from typing import Any

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import launch_new_instance
from zmq.eventloop.zmqstream import ZMQStream

_HERE = b"ipc://"
_LINGER_MS = 3000  # how long an exiting child waits until its output has been read


_Thread: Any = IOPubThread  # it has no type hints
_listen_at_port, _connect_to_port = _Thread._setup_pipe_in, _Thread._setup_pipe_out


def _listen(thread: Any) -> None:
    """Bind the socket for the output of children; replaces ``_setup_pipe_in``."""
    endpoint: bytes = thread.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0")
    if not endpoint.startswith(_HERE):
        _listen_at_port(thread)
        return
    thread.childrens_endpoint = endpoint + b"-children"
    thread._pipe_uuid = os.urandom(16)
    socket = thread.socket.context.socket(zmq.PULL)
    socket.linger = 0
    socket.bind(thread.childrens_endpoint)
    thread._pipe_in = ZMQStream(socket, thread.io_loop)
    thread._pipe_in.on_recv(thread._handle_pipe_msg)


def _connect(thread: Any) -> Any:
    """Connect a forked child, which needs its own context, to that socket; replaces ``_setup_pipe_out``."""
    if not hasattr(thread, "childrens_endpoint"):
        return _connect_to_port(thread)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger = _LINGER_MS
    socket.connect(thread.childrens_endpoint)
    return context, socket


if __name__ == "__main__":
    _Thread._setup_pipe_in, _Thread._setup_pipe_out = _listen, _connect
    launch_new_instance()
