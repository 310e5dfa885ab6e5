"""An Akash SDL as a spec, if one of its services starts torchrun; otherwise as nodes, one per container."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..documents.content import MOST_VALUES
from ..errors import SpecError
from ..plan.names import MOST_NAME_CHARS, VARIABLE
from .command_import import Launch, find_launcher, put_secret, put_variable
from .command_words import find_text
from .imported import Foreign, Imported, Importer
from .reading import Part, Whole
from .script_import import import_command
from .shell_words import Word, as_words, split_script

__all__ = ["AKASH"]

_VERSIONS = ("2.0", "2.1")
_MOST_CONTAINERS, _MOST_GPUS = 1000, 64
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kMGTPE]i?)?B?")
_UNITS = {unit: index + 1 for index, unit in enumerate("kMGTPE")}
_OF_IMAGE = {  # read by the entrypoint of our images
    "SSH_PUBKEY": "the keys that may log in: give --ssh-key to the export",
    "DETRAIN_NB_SECRETS": "the names of the secrets: each export writes them",
    "DETRAIN_NB_VOLUME": "the mount path of the checkpoint volume: each export writes it",
}
_OF_LEASE = "belongs to the lease: give it as an option of the export"
_MARKET = "providers and prices: give the price as an option of the export"
_PORTS = "only the lease has the address of sshd: give each node's host, port and user once it exists"
_OF_GPU = "for nodes with GPUs, memory_gb is the memory of one GPU"
_NO_PROGRAM = "no service starts torchrun, so only nodes are imported"
_NO_RANKS = "does not start torchrun, so it is not a node"
_DIFFERS = "differs from that of {}: a spec has one for all nodes"


@dataclass(frozen=True)
class _Service:
    """One service: its part of the document, the resources of each container, and the number of containers."""

    name: str
    part: Part
    resources: Part
    count: int

    def node_names(self) -> Iterator[str]:
        """Yield a name for each of its containers."""
        yield from [self.name] if self.count == 1 else (f"{self.name}-{index}" for index in range(self.count))

    def words(self) -> list[str]:
        """Return the command and arguments of a container, as Kubernetes passes them on: it reads $$ as $."""
        given = [*self.part.texts("command"), *self.part.texts("args")]
        return [word.replace("$$", "$") for word in given]


def _is_one(foreign: Foreign) -> bool:
    document = foreign.document
    return isinstance(document, dict) and all(
        isinstance(document.get(key), dict) for key in ("services", "profiles", "deployment")
    )


def _read(foreign: Foreign) -> Imported:
    whole = Whole(foreign)
    whole.need("version", "services", "profiles", "deployment")
    if str(whole.take("version")) not in _VERSIONS:
        raise whole.fault("version", f"give one of {', '.join(_VERSIONS)}, in quotes")
    whole.leave("endpoints", _OF_LEASE)
    whole.part("profiles").leave("placement", _MARKET)
    services = list(_list_services(whole))
    each = list({service.name: service for service in services}.values())  # a service may have several placements
    started = dict(_find_programs(each))
    if started:
        for section in ("services", "deployment"):
            table = whole.part(section)
            for service in services:
                if service.name not in started:
                    table.leave(service.name, _NO_RANKS)
        services = [service for service in services if service.name in started]
        each = [service for service in each if service.name in started]
    _read_nodes(whole, services, started)
    if started:
        _read_programs(whole, each, started)
        _read_image(each)
        _read_env(whole, each)
        return whole.imported("akash")
    for service in services:
        for key in ("image", "env", "command", "args"):
            service.part.leave(key, _NO_PROGRAM)
    return whole.imported_nodes("akash")


def _list_services(whole: Whole) -> Iterator[_Service]:
    services, deployment = whole.part("services"), whole.part("deployment")
    compute = whole.part("profiles").part("compute")
    if unknown := [name for name in deployment if name not in services]:
        raise deployment.fault(unknown[0], "services has no such service")
    num_containers = 0
    for name in services:
        deployment.need(name)
        if len(name) > MOST_NAME_CHARS:  # its containers are named after it
            raise services.fault(name, f"give it a name of at most {MOST_NAME_CHARS} characters")
        for placement in deployment.part(name):
            entry = deployment.part(name).part(placement)
            entry.need("profile")
            if (profile := entry.text("profile")) not in compute:
                raise entry.fault("profile", "profiles.compute has no such profile")
            count = entry.whole_number("count", 1, least=1, most=_MOST_CONTAINERS)
            num_containers += count
            if num_containers > _MOST_CONTAINERS:
                raise entry.fault("count", f"there are more than {_MOST_CONTAINERS} containers: give fewer")
            yield _Service(name, services.part(name), compute.part(profile).part("resources"), count)


def _read_nodes(whole: Whole, services: list[_Service], started: Mapping[str, Launch]) -> None:
    """Put a node for each container; if its service ``started`` ranks, with what the command line sets."""
    index, table = 0, whole.part("services")
    for service in services:
        fields = {**(started[service.name].node if service.name in started else {}), **_read_resources(service)}
        if isinstance(fields["devices"], list):
            fields.pop("ranks", None)  # it has one per GPU
        service.part.leave("expose", _PORTS)
        for key in ("params", "credentials", "dependencies"):
            service.part.leave(key, _OF_LEASE)
        for name in service.node_names():
            for key, value in {"name": name, "host": service.name, **fields}.items():
                whole.put(f"nodes[{index}].{key}", value)
                table.stands_for(service.name, f"nodes[{index}].{key}")
            index += 1
    if not index:
        raise whole.fault("services", "none is deployed: add one to deployment")
    whole.stands_for("services", "nodes")


def _read_resources(service: _Service) -> dict[str, Any]:
    resources, gpu = service.resources, service.resources.part("gpu")
    units = gpu.take("units") if "gpu" in resources else 0
    if isinstance(units, str) and re.fullmatch("[0-9]{1,3}", units):
        units = int(units)
    if type(units) is not int or not 0 <= units <= _MOST_GPUS:
        raise gpu.fault("units", f"give a whole number, 0 to {_MOST_GPUS}")
    for key in ("cpu", "storage"):
        resources.leave(key, _OF_LEASE)
    gpu.leave("attributes", _OF_LEASE)
    if units:
        resources.leave("memory", _OF_GPU)
        return {"devices": list(range(units))}
    memory = resources.part("memory")
    return {"devices": "cpu", **({"memory_gb": _read_size(memory)} if "size" in memory else {})}


def _read_size(memory: Part) -> float:
    """Return a size such as 4Gi or 512M in GB. Raises: SpecError."""
    size = memory.take("size")
    match = _SIZE.fullmatch(str(size)) if isinstance(size, str | int | float) else None
    if match is None or float(match[1]) <= 0:
        raise memory.fault("size", "give a size, such as 4Gi")
    unit = match[2] or ""
    return float(match[1]) * float((1024 if unit.endswith("i") else 1000) ** _UNITS.get(unit[:1], 0)) / 1e9


# The programs of services


def _find_programs(services: list[_Service]) -> Iterator[tuple[str, Launch]]:
    """Yield the services that start torchrun, with what they start. Raises: SpecError."""
    num_words = 0
    for service in services:
        words = service.words()
        try:
            text = find_text(words)
            commands = [as_words(words)] if text is None else [command.words for command in split_script(text)]
        except SpecError:
            continue  # it runs some other program, which is reported as left out
        num_words += sum(4 + len(command) + sum(len(word.fills) for word in command) for command in commands)
        if num_words > MOST_VALUES:
            said = "the services up to here have too many commands, or too many words in them: give fewer"
            raise service.part.fault(_key_of(service), said)
        if launch := _find_program(service, words, commands):
            yield service.name, launch


def _find_program(service: _Service, words: list[str], commands: list[list[Word]]) -> Launch | None:
    """Return what a container starts if that is torchrun, else None. Raises: SpecError."""
    try:
        if not any(find_launcher(command) for command in commands):
            return None
        found = import_command(words)
    except SpecError as exc:
        raise service.part.fault(_key_of(service), str(exc).splitlines()[0]) from None
    assert found.spec is not None
    fields = found.spec.to_dict()
    node = (fields.pop("nodes", None) or [{}])[0]
    known = {key: value for key, value in node.items() if key in ("ranks", "devices", "python", "workdir")}
    # the SDL itself defines the nodes
    left_out = [line for line in found.left_out if not line.startswith(("nodes: ", "node ", "localhost: "))]
    return Launch(fields, node=known, left_out=left_out)


def _without_meeting(launch: Launch) -> dict[str, Any]:
    """Return the fields that are equal on all nodes: the first node's endpoint is written differently."""
    return {key: value for key, value in launch.fields.items() if key != "rendezvous"}


def _key_of(service: _Service) -> str:
    return "args" if "args" in service.part else "command"


def _read_programs(whole: Whole, services: list[_Service], started: Mapping[str, Launch]) -> None:
    """Use the program of the first service for all nodes, and report services that start another."""
    first = next(iter(started))
    whole.put("name", whole.name_after())
    for key, value in started[first].fields.items():
        whole.put(key, value)
    for launch in started.values():
        for key, value in launch.fields.get("rendezvous", {}).items():
            if key != "endpoint":  # that is a service, which is the first node of the spec
                whole.put(f"rendezvous.{key}", value)
    for service in services:
        launch = started[service.name]
        if _without_meeting(launch) != _without_meeting(started[first]):
            for key in ("command", "args"):
                service.part.leave(key, _DIFFERS.format(first))
        if service.name == first:
            for key in launch.fields:
                service.part.stands_for(_key_of(service), key)
            whole.notes += [f"{service.part.path}.{_key_of(service)}: {line}" for line in launch.left_out]


def _read_image(services: list[_Service]) -> None:
    named = [service for service in services if "image" in service.part]
    for service in named:
        if service.part.look("image") == named[0].part.look("image"):
            service.part.carry("image", "image")
        else:
            service.part.leave("image", _DIFFERS.format(named[0].name))


def _read_env(whole: Whole, services: list[_Service]) -> None:
    """Put the variables that all services share, and report the others; of a secret only the name is kept."""
    given = {service.name: dict(_read_variables(service)) for service in services}
    times = Counter(item for variables in given.values() for item in variables.items())
    common = Launch({"env": dict(whole.fields.get("env", {})), "secrets": list(whole.fields.get("secrets", []))})
    token = whole.fields.get("source", {}).get("git", {}).get("token")  # our own script unsets it for the ranks
    for service in services:
        for name, value in given[service.name].items():
            place = f"{service.part.path}.env: {name}"
            if not name:
                whole.notes.append(f"{service.part.path}.env: an entry has no variable name")
            elif name in _OF_IMAGE:
                whole.notes.append(f"{place}: {_OF_IMAGE[name]}")
            elif times[name, value] < len(given):
                whole.notes.append(f"{place}: differs among the services: a spec has one value for all nodes")
            elif service is services[0] and (value or name != token):
                _put_variable(common, service, name, value)
    whole.notes += [f"{services[0].part.path}.env: {line}" for line in common.left_out]
    for key, value in common.fields.items():
        whole.put(key, value)
        services[0].part.stands_for("env", key)


def _put_variable(common: Launch, service: _Service, name: str, value: str) -> None:
    try:
        if value:
            put_variable(common, name, Word(value))
        else:
            put_secret(common, name)  # its value must be filled in
    except SpecError as exc:
        raise service.part.fault("env", str(exc)) from None


def _read_variables(service: _Service) -> Iterator[tuple[str, str]]:
    for text in service.part.texts("env"):
        name, has_value, value = text.partition("=")
        # an entry that is not a name, and has no value, may be a secret
        yield name if has_value or VARIABLE.fullmatch(name) else "", value.replace("$$", "$")


AKASH = Importer(_is_one, _read, "an Akash SDL")
