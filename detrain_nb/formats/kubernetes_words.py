"""Names and sizes that Kubernetes accepts, and the options of its export targets."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SpecError
from ..plan.targets import as_typed
from ..spec import PipelineSpec
from .job_script import list_needed, need_image

_MOST_GPUS = 16  # of a node
_MOST_VARIABLES, _MOST_KEY_CHARS = 120, 253  # of a Secret that a TrainJob reads, besides the operator's own
_MOST_CHARS = 63  # of a pod's name, which is also its host name
_LABEL = re.compile("[a-z](?:[a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile("[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_SIZE = re.compile("[1-9][0-9]{0,8}(?:[KMGT]i|[kMGT])")
_CPUS = re.compile("[1-9][0-9]{0,3}|[1-9][0-9]{0,6}m")
_IMAGE = re.compile("[A-Za-z0-9][A-Za-z0-9._:/@-]{0,499}")
_A_NAME = "give a Kubernetes name: a-z, 0-9, - and ., the first and the last a letter or a digit"
_RULES = {
    "namespace": (_NAMESPACE, "give a Kubernetes name: a-z, 0-9 and -, at most 63"),
    **dict.fromkeys(("pvc", "storage_class", "secret"), (_NAME, _A_NAME)),
    **dict.fromkeys(("pvc_size", "shm", "memory"), (_SIZE, "give a Kubernetes size, such as 16Gi")),
    "cpus": (_CPUS, "give a number of CPUs, such as 8, or thousandths of one, such as 500m"),
}


@dataclass(frozen=True)
class Options:
    """The options that the targets share, as given; empty means not given. Raises: SpecError."""

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
            raise SpecError(f"--pvc {self.pvc} is an existing claim: leave out {as_typed(other)}")

    def claim(self, name: str, *, is_needed: bool) -> str:
        """Return the claim to mount; empty: none. A new one gets the ``name`` of the job."""
        return self.pvc or (name if is_needed or self.pvc_size or self.storage_class else "")


def check_word(option: str, value: str, *, rule: str = "") -> None:
    """Check the value of an option, or of a field with that ``rule``. Raises: SpecError when it is invalid."""
    pattern, advice = _RULES[rule or option]
    if value and not pattern.fullmatch(value):
        raise SpecError(f"{option if '.' in option else as_typed(option)} {value!r}: {advice}")


def check_image(spec: PipelineSpec, *, by: str) -> str:
    """Return the image. Raises: SpecError without one, or if its name is invalid."""
    image = need_image(spec, by=by)
    if not _IMAGE.fullmatch(image):
        raise SpecError(f"image {image!r}: give the name of an image, such as ghcr.io/you/train:1")
    return image


def check_name(name: str, *, longest: str) -> None:
    """Check a job's name. Raises: SpecError when it is not a DNS label, or too long with the suffix of its pods."""
    most = _MOST_CHARS - len(longest)
    if not _LABEL.fullmatch(name) or len(name) > most:
        raise SpecError(
            f"name {name}: is invalid in Kubernetes: give a-z, 0-9 and -, at most {most} here, the first a letter, the "
            "last a letter or a digit"
        )


def check_needs(spec: PipelineSpec) -> None:
    """Check what a spec's node must have. Raises: SpecError for too many or long secrets, and for an SSH key."""
    needed = list_needed(spec)
    if len(needed) > _MOST_VARIABLES or any(len(name) > _MOST_KEY_CHARS for name in needed):
        raise SpecError(
            f"secrets: a container reads at most {_MOST_VARIABLES} keys of a Secret, of at most {_MOST_KEY_CHARS} "
            "characters: give fewer, or shorter names"
        )
    if spec.source.git is not None and spec.source.git.ssh_key is not None:
        raise SpecError("source.git.ssh_key: containers have no key file: give source.git.token with an https:// url")


def check_gpus(ranks: int, device: str) -> None:
    """Check the GPUs of a node. Raises: SpecError for more than any node has."""
    if device == "cuda" and ranks > _MOST_GPUS:
        raise SpecError(f"{ranks} GPUs on a node: a node has at most {_MOST_GPUS}: spread them over more nodes")


def find_resources(spec: PipelineSpec, options: Options, *, ranks: int, device: str) -> dict[str, Any]:
    """Return what each container requests, with equal limits. Raises: SpecError."""
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
