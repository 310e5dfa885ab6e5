"""The judgement of each host alone: what is good, and what is a problem with advice. One function per row."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import HostKeyError
from ..text import HERE, count_of, format_size
from .examination import Host
from .host_facts import Disk, Fault, HostFacts
from .report import Cell

if TYPE_CHECKING:
    from ..spec.node import Node

__all__ = ["FOLDER", "OF_CONNECTION", "OF_FACTS", "Group", "command_on", "not_known"]

FOLDER = "cache folder"

_OLDEST_PYTHON = (3, 10)
_LITTLE_DISK_BYTES = 1e9
_LITTLE_SHM_BYTES = 512e6  # Docker's default of 64 MB is too small for DataLoader workers and for NCCL
_LITTLE_MEMORY_BYTES = 1e9
_FEW_DESCRIPTORS = 256
_size = functools.partial(format_size, smallest="MB")
_MUCH_GPU_MEMORY_BYTES = 2e9  # the driver itself uses some

_VERSION = re.compile(r"\d{1,4}\.\d{1,4}[0-9A-Za-z.+!-]{0,40}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}")
_BUILD = re.compile(r".*\+(cu\d+|cpu|rocm[\d.]+)")

_SET_PYTHON = 'set python = "/path/to/python" in a nodes file'
_FOLDER_IS_WELL = {"private": "", "absent": ": created when needed"}
_FOLDER_AILS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "loose": ("is open to others", "close it (doctor.fix does so)", ("chmod", "700")),
    "foreign": ("belongs to another user", "remove it, or set XDG_CACHE_HOME in the setup lines", ()),
    "no folder": ("is not a directory", "move it away", ()),
    "not writable": ("is not writable", "make it writable, or set XDG_CACHE_HOME in the setup lines", ()),
}


@dataclass(frozen=True)
class Group:
    """The values that hosts are compared with: the most common torch version, and all versions of NCCL."""

    torch: str
    torch_host: str
    nccl: frozenset[str]

    @classmethod
    def of(cls, hosts: Iterable[Host]) -> Group:
        found = [(host.name, host.facts.torch) for host in hosts if host.facts]
        torches = [(name, torch) for name, torch in found if not isinstance(torch, Fault)]
        versions = [(name, torch.version) for name, torch in torches if _VERSION.fullmatch(torch.version)]
        nccl = frozenset(torch.nccl for _, torch in torches if torch.nccl)
        if not versions:
            return cls("", "", nccl)
        [(minor, _)] = Counter(_minor(version) for _, version in versions).most_common(1)
        [(torch, _)] = Counter(version for _, version in versions if _minor(version) == minor).most_common(1)
        return cls(torch, next(name for name, version in versions if version == torch), nccl)


def _judge_ssh(host: Host) -> Cell:
    if host.is_here and host.ssh_fault is None:
        return Cell(HERE, "good")
    if host.ssh_fault is None:
        return Cell(host.where, "good")
    if isinstance(host.ssh_fault, HostKeyError):
        return Cell("stopped: see host key")
    return Cell(str(host.ssh_fault), "bad")


def _judge_host_key(host: Host) -> Cell:
    if isinstance(host.ssh_fault, HostKeyError):
        return Cell(host.ssh_fault.fault, "bad", host.ssh_fault.advice, host.ssh_fault.command)
    return Cell(host.fingerprint, "good") if host.fingerprint else Cell()


def _judge_python(host: Host) -> Cell:
    if host.facts is None:
        return Cell(host.fault, "bad") if host.fault else Cell()
    text = f"{'.'.join(map(str, host.facts.python_version))} ({host.facts.python})"
    if host.facts.python_version[:2] < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return Cell(f"{text} is too old", "bad", f"{_SET_PYTHON}, to Python {oldest} or newer")
    return Cell(text, "good")


def _judge_name(host: Host, facts: HostFacts, group: Group) -> Cell:
    text = f"{facts.host}, {facts.system}"
    is_linux = facts.system.startswith("Linux ")
    return Cell(text, "good") if is_linux else Cell(f"{text}: ranks need Linux", "bad", "leave this host out")


def _judge_torch(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.torch, Fault):
        return not_known(facts.torch)
    version = facts.torch.version
    if not version:
        return Cell(f"missing in {facts.python}", "bad", f"install it, or {_SET_PYTHON}", _install(host, group))
    if not _VERSION.fullmatch(version):
        return Cell(f"unknown version {version!r}", "warning", "install a release of torch")
    if version == group.torch:
        return Cell(version, "good")
    text = f"{version}, but {group.torch_host} has {group.torch}"
    if _minor(version) != _minor(group.torch):
        return Cell(text, "bad", "install the same version everywhere", _install(host, group))
    return Cell(text, "warning", "if they turn out to be incompatible, install the same", _install(host, group))


def _judge_cuda(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.torch, Fault) or not facts.torch.version:
        return Cell()
    cuda, gpus = facts.torch.cuda, facts.gpus
    if isinstance(gpus, Fault) or not gpus.gpus:
        return Cell(cuda, "good") if cuda else Cell("none: CPU build", "good")
    if not cuda:
        there = f"torch is a CPU build, but the host has {count_of(len(gpus.gpus), 'GPU')}"
        return Cell("none", "good") if host.node.devices == "cpu" else Cell(there, "warning", "install a CUDA build")
    text = f"{cuda} (driver {gpus.driver}, up to CUDA {gpus.cuda})" if gpus.driver else cuda
    is_newer = _major(cuda) > _major(gpus.cuda) > 0
    advice = "update the driver, or install a torch for an older CUDA"
    return Cell(f"{text}: the driver is too old", "bad", advice) if is_newer else Cell(text, "good")


def _judge_nccl(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.torch, Fault) or not facts.torch.nccl:
        return Cell()
    others = sorted(group.nccl - {facts.torch.nccl})
    if others:
        return Cell(
            f"{facts.torch.nccl}, elsewhere {', '.join(others)}", "warning", "install the same torch everywhere"
        )
    return Cell(facts.torch.nccl, "good")


def _judge_ipython(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.ipython, Fault):
        return not_known(facts.ipython)
    if facts.ipython or facts.python_version[:2] < _OLDEST_PYTHON:
        return Cell(facts.ipython, "good") if facts.ipython else Cell()
    if _can_send_ipython(facts.python_version):
        return Cell("none: the notebook's is copied automatically", "good")
    install = command_on(host.node, _python(host), "-m", "pip", "install", "ipython")
    return Cell("missing, and the notebook's does not support this Python", "bad", "install it", install)


def _judge_gpus(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.gpus, Fault):
        return Cell(facts.gpus.text, "warning", "run nvidia-smi there")
    gpus, wanted = facts.gpus.gpus, host.node.devices
    if isinstance(wanted, tuple) and (missing := [index for index in wanted if index >= len(gpus)]):
        text = f"{count_of(len(gpus), 'GPU')}, but devices lists {', '.join(map(str, missing))}"
        return Cell(text, "bad", "correct devices in the nodes file")
    kinds = Counter(f"{gpu.name} {_size(gpu.total_bytes)}" for gpu in gpus)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "none"
    return Cell(f"{text}, CUDA_VISIBLE_DEVICES={facts.gpus.visible}" if facts.gpus.visible else text, "good")


def _judge_gpu_use(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.gpus, Fault) or not facts.gpus.gpus or host.node.devices == "cpu":
        return Cell()
    used = [
        f"GPU {index}: {_size(gpu.used_bytes)}" + (f" by {', '.join(gpu.users)}" if gpu.users else "")
        for index, gpu in enumerate(facts.gpus.gpus)
        if gpu.users or gpu.used_bytes > _MUCH_GPU_MEMORY_BYTES
    ]
    return Cell("; ".join(used), "warning", "choose other devices, or ask the users") if used else Cell("free", "good")


def _judge_memory(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.memory, Fault):
        return not_known(facts.memory)
    text = f"{_size(facts.memory.free)} free of {_size(facts.memory.total)}"
    limit = facts.memory.limit
    if limit is not None and limit < facts.memory.total:
        text += f", its cgroup allows {_size(limit)}"
    if min(facts.memory.free, limit or math.inf) < _LITTLE_MEMORY_BYTES:
        return Cell(text, "warning", "a rank needs more: stop what uses it, or request a larger share")
    return Cell(text, "good")


def _judge_processors(host: Host, facts: HostFacts, group: Group) -> Cell:
    found = facts.processors
    if isinstance(found, Fault):
        return not_known(found)
    text = f"{found.total:g}" if found.free == found.total else f"{found.free:g} of {found.total:g}"
    if found.limit is not None and found.limit < found.total:
        text += f", its cgroup allows {found.limit:g}"
    if min(found.free, found.limit or math.inf) < 1:
        return Cell(text, "warning", "request a larger share of the machine")
    return Cell(text, "good")


def _judge_descriptors(host: Host, facts: HostFacts, group: Group) -> Cell:
    text = f"{facts.descriptors:,} per process"
    if facts.descriptors < _FEW_DESCRIPTORS:
        return Cell(text, "warning", f"a rank needs more: ulimit -n {4 * _FEW_DESCRIPTORS} in the setup lines")
    return Cell(text, "good")


def _judge_home(host: Host, facts: HostFacts, group: Group) -> Cell:
    return _judge_disk(facts.home, _LITTLE_DISK_BYTES, "free some space there")


def _judge_tmp(host: Host, facts: HostFacts, group: Group) -> Cell:
    return _judge_disk(facts.tmp, _LITTLE_DISK_BYTES, "free some space there, or set TMPDIR in the setup lines")


def _judge_shm(host: Host, facts: HostFacts, group: Group) -> Cell:
    if isinstance(facts.shm, Fault) or not facts.shm.free_bytes:
        text = facts.shm.text if isinstance(facts.shm, Fault) else "it is full"
        return Cell(text, "bad", "ranks need a writable tmpfs there (mode 1777) with free space")
    return _judge_disk(facts.shm, _LITTLE_SHM_BYTES, "DataLoader workers need more: docker run --shm-size=8g")


def _judge_disk(disk: Disk | Fault, little_bytes: float, advice: str) -> Cell:
    if isinstance(disk, Fault):
        return not_known(disk)
    text = f"{_size(disk.free_bytes)} free of {_size(disk.total_bytes)}"
    return Cell(text, "good") if disk.free_bytes >= little_bytes else Cell(text, "warning", advice)


def _judge_folder(host: Host, facts: HostFacts, group: Group) -> Cell:
    if host.is_here:
        return Cell()  # sessions of this machine use the run directory
    found = facts.folder
    if isinstance(found, Fault):
        return not_known(found)
    if found.state in _FOLDER_IS_WELL:
        return Cell(f"{found.path}{_FOLDER_IS_WELL[found.state]}", "good")
    what, advice, command = _FOLDER_AILS.get(found.state, ("cannot be used", "inspect it", ()))
    text, shown = f"{found.path} {what}", command_on(host.node, *command, found.path) if command else ""
    if found.other_state in _FOLDER_IS_WELL:
        return Cell(f"{text}: {found.other} is used instead", "warning", advice, shown)
    return Cell(text, "bad", advice, shown)


def _judge_logout(host: Host, facts: HostFacts, group: Group) -> Cell:
    found = facts.logout
    if isinstance(found, Fault):
        return not_known(found)
    if not found.kills:
        return Cell("jobs and sessions survive a logout", "good")
    if found.lingers:
        return Cell("jobs survive; sessions end at logout (KillUserProcesses)", "good")
    user = found.user if _USER.fullmatch(found.user) else "USER"
    return Cell(
        "jobs and sessions end at logout (KillUserProcesses)",
        "warning",
        "let jobs survive; may need an administrator",
        command_on(host.node, "loginctl", "enable-linger", user),
    )


OF_CONNECTION: Mapping[str, Callable[[Host], Cell]] = {
    "ssh": _judge_ssh,
    "host key": _judge_host_key,
    "python": _judge_python,
}
OF_FACTS: Mapping[str, Callable[[Host, HostFacts, Group], Cell]] = {
    "name": _judge_name,
    "torch": _judge_torch,
    "CUDA": _judge_cuda,
    "NCCL": _judge_nccl,
    "IPython": _judge_ipython,
    "GPUs": _judge_gpus,
    "GPU use": _judge_gpu_use,
    "memory": _judge_memory,
    "processors": _judge_processors,
    "open files": _judge_descriptors,
    "home": _judge_home,
    "/tmp": _judge_tmp,
    "/dev/shm": _judge_shm,
    FOLDER: _judge_folder,
    "logout": _judge_logout,
}


def not_known(fault: Fault) -> Cell:
    """Return the cell of a fact that could not be determined."""
    return Cell(f"unknown: {fault.text or 'the host was not asked'}", "warning", "check it on the host")


def _can_send_ipython(python_version: tuple[int, int, int]) -> bool:
    from ..deploy.code import ipython_code

    return ipython_code(python_version[:2]) is not None


def _install(host: Host, group: Group) -> str:
    """Return the command that installs the other hosts' torch, from PyTorch's index for the build if it names one."""
    words = [_python(host), "-m", "pip", "install", f"torch=={group.torch}" if group.torch else "torch"]
    if build := _BUILD.fullmatch(group.torch):
        words += ["--index-url", f"https://download.pytorch.org/whl/{build[1]}"]
    return command_on(host.node, *words)


def _python(host: Host) -> str:
    """Return Python as the user calls it on the host; on this machine it may be the notebook's."""
    return host.facts.python if host.is_here and host.facts else host.node.python


def command_on(node: Node, *words: str) -> str:
    """Return the command to type here that runs ``words`` on the node, quoted for both shells, whatever it contains."""
    if node.is_this_machine:
        return shlex.join(words)
    options: list[str] = []
    for option, value in (("-p", node.port), ("-i", node.identity_file), ("-J", node.proxy_jump)):
        options += [option, str(value)] if value is not None else []
    where = f"{node.user}@{node.host}" if node.user else node.host
    return shlex.join(["ssh", *options, where, shlex.join(words)])


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdecimal() and len(first) < 4 else 0
