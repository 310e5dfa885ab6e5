"""Names, sizes and folders as Kubernetes takes them; and the options of its targets."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SpecError
from ..spec import PipelineSpec
from .job_script import list_needed, need_image

_MOST_GPUS = 16  # of a node
_MOST_VARIABLES, _MOST_KEY_CHARS = 120, 253  # of a Secret that a TrainJob reads, beside what the operator sets
_MOST_CHARS = 63  # of the name of a pod, which is a host's, too
_LABEL = re.compile("[a-z](?:[a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile("[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_SIZE = re.compile("[1-9][0-9]{0,8}(?:[KMGT]i|[kMGT])")
_CPUS = re.compile("[1-9][0-9]{0,3}|[1-9][0-9]{0,6}m")
_IMAGE = re.compile("[A-Za-z0-9][A-Za-z0-9._:/@-]{0,499}")
_A_NAME = "give a name of Kubernetes: a-z, 0-9, - and ., the first and the last a letter or a digit"
_RULES = {
    "namespace": (_NAMESPACE, "give a name of Kubernetes: a-z, 0-9 and -, at most 63"),
    **dict.fromkeys(("pvc", "storage_class", "secret"), (_NAME, _A_NAME)),
    **dict.fromkeys(("pvc_size", "shm", "memory"), (_SIZE, "give a size of Kubernetes, as 16Gi")),
    "cpus": (_CPUS, "give a number of processors, as 8, or thousandths of one, as 500m"),
}


@dataclass(frozen=True)
class Options:
    """The options that the targets share, as they were given; empty: not given. Raises: SpecError."""

    namespace: str = ""
    pvc: str = ""
    pvc_size: str = ""
    storage_class: str = ""
    shm: str = ""
    cpus: str = ""
    memory: str = ""
    secret: str = ""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            check_word(name, getattr(self, name))
        if self.pvc and (other := next((name for name in ("pvc_size", "storage_class") if getattr(self, name)), "")):
            raise SpecError(f"pvc {self.pvc} is a claim that is there: leave out {other}")

    def claim(self, name: str, *, is_needed: bool) -> str:
        """Return the claim that is mounted; empty: none. One that is made has the ``name`` of the job."""
        return self.pvc or (name if is_needed or self.pvc_size or self.storage_class else "")


def check_word(option: str, value: str, *, rule: str = "") -> None:
    """Raises: SpecError for a value that an option, or another one of the same ``rule``, cannot have."""
    pattern, advice = _RULES[rule or option]
    if value and not pattern.fullmatch(value):
        raise SpecError(f"{option} {value!r}: {advice}")


def check_image(spec: PipelineSpec, *, by: str) -> str:
    """Return the image. Raises: SpecError without one, or with one that no registry has."""
    image = need_image(spec, by=by)
    if not _IMAGE.fullmatch(image):
        raise SpecError(f"image {image!r}: give the name of an image, as ghcr.io/you/train:1")
    return image


def check_name(name: str, *, longest: str) -> None:
    """Raises: SpecError for a name of a job that is no label of DNS, or is too long with the end of its last pod's."""
    most = _MOST_CHARS - len(longest)
    if not _LABEL.fullmatch(name) or len(name) > most:
        raise SpecError(
            f"name {name}: Kubernetes takes a-z, 0-9 and -, at most {most} here, the first a letter, the last a letter "
            "or a digit: give such a name"
        )


def check_needs(spec: PipelineSpec) -> None:
    """Raises: SpecError for a variable that no Secret has, and a key that no container has."""
    needed = list_needed(spec)
    if len(needed) > _MOST_VARIABLES or any(len(name) > _MOST_KEY_CHARS for name in needed):
        raise SpecError(
            f"secrets: a container reads at most {_MOST_VARIABLES} of a Secret, of at most {_MOST_KEY_CHARS} "
            "characters: give fewer, or shorter names"
        )
    if spec.source.git is not None and spec.source.git.ssh_key is not None:
        raise SpecError("source.git.ssh_key: a container has no key file: give source.git.token with an https:// url")


def check_gpus(ranks: int, device: str) -> None:
    """Raises: SpecError for more GPUs than any node has."""
    if device == "cuda" and ranks > _MOST_GPUS:
        raise SpecError(f"{ranks} GPUs on a node: a node has at most {_MOST_GPUS}: share them among more nodes")


def find_resources(spec: PipelineSpec, options: Options, *, ranks: int, device: str) -> dict[str, Any]:
    """Return what each container asks for, and gets no more of. Raises: SpecError."""
    is_cuda = device == "cuda"
    check_gpus(ranks, device)
    found = {
        **({"nvidia.com/gpu": ranks} if is_cuda else {}),
        **({"cpu": options.cpus} if options.cpus else {}),
        **({"memory": memory} if (memory := options.memory or ("" if is_cuda else _memory_of(spec))) else {}),
    }
    return {"requests": found, "limits": found} if found else {}


def _memory_of(spec: PipelineSpec) -> str:
    given = [node.memory_gb for node in spec.nodes if node.memory_gb is not None]
    if not given:
        return ""
    size = f"{max(given):.0f}G" if max(given) >= 1 and max(given) % 1 == 0 else f"{max(given) * 1000:.0f}M"
    check_word("nodes.memory_gb", size, rule="memory")
    return size
