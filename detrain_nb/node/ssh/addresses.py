"""The addresses of a node; part of the texts of bootstrap.py and probe.py, so nothing newer than Python 3.7."""

from __future__ import annotations

import socket
import struct


def list_addresses() -> list[list[str]]:
    """Return [interface, address] of every interface."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                found.append([name, socket.inet_ntoa(fcntl.ioctl(asker.fileno(), 0x8915, asked)[20:24])])  # SIOCGIFADDR
            except OSError:
                pass
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, _, _, scope, _, name = line.split()
                if scope != "20":  # a link-local one would need its interface named
                    found.append([name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))])
    except OSError:
        pass
    return found
