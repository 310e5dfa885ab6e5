"""Faults in an SDL that Akash's parser in TypeScript accepts, but that providers refuse, as they run the one in Go.

The rules are those of Akash's chain-sdk: go/sdl, go/manifest/v2beta3, go/node/deployment/v1beta4. The rules marked
"ours" are about SDLs that nothing refuses, but whose nodes could not reach each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_SERVICE = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_HOST = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?")
_POWERS = {suffix: power for power, suffix in enumerate("kMGTPE", 1)}
_MIB, _TIB = 1 << 20, 1 << 40
_MOST = {"gpu": 24, "cpu": 384, "count": 50, "units": 20, "price": 10_000_000}


def lint(sdl: Mapping[str, Any]) -> list[str]:
    """Return the faults of an SDL, one line each; ``sdl`` has passed the parser."""
    return [*_lint_services(sdl), *_lint_exposed(sdl), *_lint_profiles(sdl), *_lint_deployment(sdl)]


def _lint_services(sdl: Mapping[str, Any]) -> Iterator[str]:
    for name, service in sdl["services"].items():
        if not _SERVICE.fullmatch(name):
            yield f"service {name!r}: invalid name"
        for line in service.get("env") or []:
            variable = line.partition("=")[0]
            if not _VARIABLE.fullmatch(variable) or variable.startswith("..") or variable == ".":
                yield f"{name}: {variable!r} is no name of a variable"


def _lint_exposed(sdl: Mapping[str, Any]) -> Iterator[str]:
    placed = {name: set(places) for name, places in sdl["deployment"].items()}
    hosts: list[str] = []
    global_ports = 0
    for name, service in sdl["services"].items():
        for exposed in service.get("expose") or []:
            if not exposed.get("to"):
                yield f"{name}: port {exposed['port']} is exposed to nobody"  # ours
            for host in exposed.get("accept") or []:
                if not _HOST.fullmatch(host) or "/" in host:
                    yield f"{name}: accept {host!r} is no host name"
                if host in hosts:
                    yield f"{name}: accept {host!r} stands twice"
                hosts.append(host)
            for target in exposed.get("to") or []:
                global_ports += bool(target.get("global"))
                peer = target.get("service")
                if peer and peer not in sdl["services"]:
                    yield f"{name}: to service {peer!r}, which is none"  # ours
                elif peer and placed.get(peer) != placed.get(name):
                    yield f"{name}: to service {peer!r}, which is in another placement"  # ours: another DNS domain
    if not global_ports:
        yield "no service is exposed globally"


def _lint_profiles(sdl: Mapping[str, Any]) -> Iterator[str]:
    for name, profile in sdl["profiles"]["compute"].items():
        resources = profile["resources"]
        yield from _lint_size(f"{name}: memory", resources["memory"]["size"], least=_MIB, most=2 * _TIB)
        storage = resources["storage"]
        for volume in storage if isinstance(storage, list) else [storage]:
            yield from _lint_volume(name, volume)
        units = str(resources["cpu"]["units"])
        cpus = float(units[:-1]) / 1000 if units.endswith("m") else float(units)
        if not 0.01 <= cpus <= _MOST["cpu"]:
            yield f"{name}: {units} units of cpu, at most {_MOST['cpu']}"
        gpus = str((resources.get("gpu") or {}).get("units", 0))
        if not gpus.isdigit() or int(gpus) > _MOST["gpu"]:
            yield f"{name}: {gpus} units of gpu, a whole number up to {_MOST['gpu']}"


def _lint_volume(profile: str, volume: Mapping[str, Any]) -> Iterator[str]:
    where = f"{profile}: storage {volume.get('name', 'default')}"
    yield from _lint_size(where, volume["size"], least=5 * _MIB, most=32 * _TIB)
    attributes = volume.get("attributes") or {}
    kind, persistent = attributes.get("class"), attributes.get("persistent")
    if kind == "ram" and persistent is not False:
        yield f"{where}: of class ram without persistent: false"  # otherwise the provider creates no volume for it
    if kind not in (None, "ram") and not persistent:
        yield f"{where}: of class {kind} and not persistent"


def _lint_size(what: str, size: object, *, least: int, most: int) -> Iterator[str]:
    if not (match := _SIZE.fullmatch(str(size))):
        yield f"{what}: {size!r} is no size: its suffix is one of k, Ki, M, Mi, G, Gi, ..."
        return
    suffix = match[2] or ""
    power = _POWERS.get(suffix.removesuffix("i").replace("K", "k"), 0)
    if not least <= float(match[1]) * (1024 if suffix.endswith("i") else 1000) ** power <= most:
        yield f"{what}: {size} is not between {least} and {most} bytes"


def _lint_deployment(sdl: Mapping[str, Any]) -> Iterator[str]:
    for name in sdl["deployment"].keys() - sdl["services"].keys():
        yield f"{name}: deployed, and no service"
    placements = sdl["profiles"]["placement"]
    prices = [price for placement in placements.values() for price in placement["pricing"].values()]
    if len({price["denom"] for price in prices}) > 1:
        yield "prices are in several denominations"
    for price in prices:
        if not 0 < float(price["amount"]) <= _MOST["price"]:
            yield f"a price of {price['amount']}, at most {_MOST['price']}"
    deployed = [(place, each) for places in sdl["deployment"].values() for place, each in places.items()]
    for placement in placements:
        if (units := sum(place == placement for place, _ in deployed)) > _MOST["units"]:
            yield f"{placement}: {units} services, at most {_MOST['units']}"
    for _, each in deployed:
        if each["count"] > _MOST["count"]:
            yield f"a count of {each['count']}, at most {_MOST['count']}"
