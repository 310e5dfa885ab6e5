"""A pipeline as an Akash SDL: each node is a service of one lease, which runs the job or waits for a session.

This module writes the services, their ports and how the nodes meet; `akash_terms` their resources and prices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..documents import format_document
from ..errors import SpecError
from ..plan import Plan
from ..plan.targets import CHOICES
from ..spec import PipelineSpec
from ..spec.lease import SSH_PORT
from ..spec.node import default_name
from .akash_terms import CHECKPOINT, SHM, Terms
from .alike import list_chosen_there
from .job_script import (
    DEFAULT_PORT,
    FOLDER,
    NODE,
    JobProgram,
    describe,
    find_checkpoint_folder,
    launch_on,
    list_needed,
    need_image,
    read_program,
    write_begin,
    write_left_out,
    write_preparation,
    write_setup,
)
from .shell import MOST_ARGUMENT_BYTES, quote, quote_command

__all__ = ["export"]

_KEY = "SSH_PUBKEY"  # the entrypoint authorizes these keys
_PLACEMENT = "akash"
_MOST_NODES = 20  # of a lease: validation_config.go of Akash's chain-sdk
# Kubernetes derives names from it for volumes and ports, with suffixes of up to ten characters.
_SERVICE = re.compile(r"[a-z](?:[-a-z0-9]{0,50}[a-z0-9])?")
_PUBLIC_KEY = re.compile(r"(?:ssh|ecdsa|sk)-[!-~]+ [A-Za-z0-9+/=]+(?: [ -~]*)?")
_ADDRESS = "DETRAIN_NB_JOB_ADDRESS"
_PORTS = "gloo and NCCL listen on ports that no lease forwards"


def export(
    spec: PipelineSpec, plan: Plan, *, start: str = "job", part: str = "all", ssh_key: str = "", **terms: str
) -> str:
    """Return the SDL of a lease that has a service for each node.

    ``start`` is "job", or "session" for nodes that only run sshd, for ``%distributed start``. ``part`` is "all",
    "first" or "others": which nodes the lease has. ``ssh_key`` is a public key; ``terms`` are the fields of `Terms`.
    Raises: SpecError.
    """
    image = need_image(spec, by="Akash")
    _check_choices(plan, start, part, ssh_key)
    names = _name_services(spec, plan)
    chosen = {"all": names, "first": names[:1], "others": names[1:]}[part]
    if len(chosen) > _MOST_NODES:
        raise SpecError(f"{len(chosen)} nodes: an Akash lease has at most {_MOST_NODES}: give fewer, with more ranks")
    asked, mount = Terms(**terms), find_checkpoint_folder(spec, by="Akash")
    _check_use(asked, has_gpus=any(plan.nodes[names.index(name)].device == "cuda" for name in chosen), mount=mount)
    program = read_program(spec, plan) if start == "job" else None
    storage = {SHM: {"mount": "/dev/shm"}, **({CHECKPOINT: {"mount": mount}} if mount else {})}
    services, compute, pricing = {}, {}, {}
    for name in chosen:
        index = names.index(name)
        services[name] = {
            "image": image,
            **({"args": ["/bin/sh", "-c", _write_script(spec, plan, program, index, names)]} if program else {}),
            "env": _write_env(spec, ssh_key, mount, is_job=program is not None),
            "expose": _expose(chosen, name, _port(spec)),
            "params": {"storage": storage},
        }
        memory_gb = spec.nodes[index].memory_gb if spec.nodes else None
        resources = asked.resources_of(plan.nodes[index], memory_gb=memory_gb, has_volume=bool(mount))
        compute[name], pricing[name] = {"resources": resources}, asked.price_of(plan.nodes[index])
    content = {
        "version": "2.0",
        "services": services,
        "profiles": {"compute": compute, "placement": {_PLACEMENT: {"pricing": pricing}}},
        "deployment": {name: {_PLACEMENT: {"profile": name, "count": 1}} for name in chosen},
    }
    head = _write_head(spec, plan, chosen, is_session=program is None, has_key=bool(ssh_key))
    return "\n".join([*head, format_document(content, ".yaml")])


def _check_choices(plan: Plan, start: str, part: str, ssh_key: str) -> None:
    for name, value in {"start": start, "part": part}.items():
        if value not in CHOICES[name]:
            raise SpecError(f"--{name} {value!r}: give one of {', '.join(CHOICES[name])}")
    if part == "others" and len(plan.nodes) < 2:
        raise SpecError("--part others: the spec has only one node: give --part all")
    if start == "job" and part != "all" and len(plan.nodes) > 1:
        raise SpecError(
            f"--part {part}: the nodes would be in two leases, and a process group across leases hangs in its first "
            f"collective: {_PORTS}: give --part all; or --start session, and start sessions with --no-init"
        )
    if ssh_key and not _PUBLIC_KEY.fullmatch(ssh_key):
        raise SpecError('--ssh-key: not a public key: give the text of its file: "$(cat ~/.ssh/id_ed25519.pub)"')


def _check_use(asked: Terms, *, has_gpus: bool, mount: str) -> None:
    """Check that this lease uses every option. Raises: SpecError for one that nothing in it uses."""
    if asked.gpu_model and not has_gpus:
        raise SpecError(
            f"--gpu-model {asked.gpu_model!r}: no node of this lease has a GPU: leave it out, or give --gpus"
        )
    if asked.volume and not mount:
        raise SpecError(
            f"--volume {asked.volume!r}: no checkpoints are saved to a path: leave it out, or give checkpoint.url"
        )


def _name_services(spec: PipelineSpec, plan: Plan) -> list[str]:
    """Return the nodes' names, or node-0, node-1, ... if a name derived from a host is invalid for a service."""
    for index, node in enumerate(spec.nodes):
        if node.name != default_name(node.host) and not _is_service(node.name):
            raise SpecError(
                f"nodes[{index}].name {node.name}: is invalid as the name of an Akash service: give a-z, 0-9 and -, at "
                "most 52, the first a letter, the last not -"
            )
    names = [node.name for node in spec.nodes]
    if names and all(map(_is_service, names)):
        return names
    return [f"node-{index}" for index in range(len(plan.nodes))]


def _is_service(name: str) -> bool:
    return bool(_SERVICE.fullmatch(name)) and name != "localhost"


def _port(spec: PipelineSpec) -> int:
    port = spec.rendezvous.port or DEFAULT_PORT
    if port == SSH_PORT:
        raise SpecError(
            f"rendezvous.port {port}: the container's sshd listens there: give another, such as {DEFAULT_PORT}"
        )
    return port


def _write_env(spec: PipelineSpec, ssh_key: str, mount: str, *, is_job: bool) -> list[str]:
    """Return the container's variables: a job's script sets those of the spec, a session brings its own secrets."""
    secrets = list_needed(spec) if is_job else []
    if _KEY in spec.env or _KEY in list_needed(spec):
        raise SpecError(f"{_KEY} holds the keys that may log in: leave it out of env and secrets, and give --ssh-key")
    env = {
        _KEY: ssh_key,
        **dict.fromkeys(secrets, ""),
        **({"DETRAIN_NB_SECRETS": " ".join(secrets)} if secrets else {}),  # no file, and no login, gets their values
        **({"DETRAIN_NB_VOLUME": mount} if mount else {}),  # it is mounted for root; an image may change its owner
        **({} if is_job else spec.env),
    }
    return [_keep_from_kubernetes(f"{name}={value}") for name, value in env.items()]


def _expose(chosen: Sequence[str], name: str, port: int) -> list[dict[str, Any]]:
    """Expose sshd to everyone, and the rendezvous of the first node only to its peers."""
    peers = [{"service": peer} for peer in chosen if peer != name]
    exposed = [{"port": SSH_PORT, "as": SSH_PORT, "proto": "tcp", "to": [{"global": True}, *peers]}]
    if peers and name == chosen[0]:
        exposed.append({"port": port, "as": port, "proto": "tcp", "to": peers})
    return exposed


def _write_script(spec: PipelineSpec, plan: Plan, program: JobProgram, index: int, names: Sequence[str]) -> str:
    """Return the job script of one node: its peers reach the first by its service, the first itself by its address."""
    several, is_elastic, port = len(names) > 1, spec.rendezvous.is_elastic, _port(spec)
    launch = launch_on(
        spec,
        plan,
        program,
        node_rank=index,
        endpoint=("localhost" if index == 0 else names[0], port if several else spec.rendezvous.port),
        local_address=_ADDRESS if several and is_elastic else "",
    )
    # a pod may be unable to reach itself through its service, and its own host name does not resolve on its peers
    filled = {"--local-addr": f'"${_ADDRESS}"'}
    if several and index == 0 and not is_elastic:
        filled["--rdzv-endpoint"] = f'"${_ADDRESS}":{port}'
    script = "\n".join(
        [
            *write_begin(spec.name),
            "",
            f"{NODE}={index}",
            f'{FOLDER}="$PWD"/{quote(spec.name)}.job/${NODE}',
            *([f"{_ADDRESS}=$(hostname -i)", f"{_ADDRESS}=${{{_ADDRESS}%% *}}"] if several else []),
            *write_preparation(spec, plan, program, env=launch.env),
            *_need_volume(spec),
            *write_setup(spec, spec.nodes[index] if spec.nodes else None),
            f"exec {quote_command(launch.argv, options=filled, below=program.below)}",
        ]
    )
    if (size := len(script.encode())) > MOST_ARGUMENT_BYTES:
        raise SpecError(
            f"source: the job's script has {size:,} bytes, but is passed as one argument of at most "
            f"{MOST_ARGUMENT_BYTES:,}: give source.git, or a module of the image"
        )
    return _keep_from_kubernetes(script)


def _need_volume(spec: PipelineSpec) -> list[str]:
    mount = find_checkpoint_folder(spec, by="Akash")
    fault = f"checkpoint.url: this user cannot write to {mount}: give a storage URL, or an image that starts as root"
    return [f"[ -w {quote(mount)} ] || fail {quote(fault)}"] if mount else []


def _keep_from_kubernetes(text: str) -> str:
    """Double each $: Kubernetes expands $(NAME) and reads $$ as $, in arguments and in variables."""
    return text.replace("$", "$$")


def _write_head(spec: PipelineSpec, plan: Plan, chosen: Sequence[str], *, is_session: bool, has_key: bool) -> list[str]:
    is_part = len(chosen) < len(plan.nodes)
    to_fill = [*([] if has_key else [_KEY]), *([] if is_session else list_needed(spec))]
    lines = [f"# {describe(spec, plan)}. An Akash SDL{', for ' + ', '.join(chosen) if is_part else ''}."]
    if is_session:
        lines += [
            "# Its nodes run no job: save the output of `provider-services lease-status` as lease.json, then",
            f"#   %distributed start --nodes lease.json{' --no-init' if is_part else ''}",
        ]
    if is_part:
        lines.append(f"# Nodes of different leases cannot form a process group: {_PORTS}.")
    if to_fill:
        lines.append(f"# Fill in the empty values below: {', '.join(to_fill)}. The provider can read them.")
    if find_checkpoint_folder(spec, by="Akash"):
        lines.append("# Each node has its own volume, which belongs to root: the image must start as root.")
    endpoint = ["rendezvous.endpoint"] if spec.rendezvous.endpoint else []
    return [*lines, *write_left_out(spec, *list_chosen_there(spec), *endpoint)]
