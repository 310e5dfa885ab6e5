"""The resources of a node on Akash, and its price: the options of an export, within the network's limits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..plan import NodePlan
from ..plan.targets import CHOICES

SHM, CHECKPOINT = "shm", "checkpoint"  # volumes, by name
# The network's limits for one service: validation_config.go of Akash's chain-sdk.
_MOST_GPUS, _MOST_CPUS, _MOST_PRICE = 24, 384, 10_000_000
_MOST_MEMORY_GI, _MOST_STORAGE_GI = 2 << 10, 32 << 10
_NUMBER = re.compile(r"[0-9]{1,12}")
_SIZE = re.compile(r"([0-9]{1,9})(?:Gi)?")
_MODEL = re.compile(r"([a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?)(?::([1-9][0-9]{0,3}Gi))?")
# The defaults for each rank, by its device; the last two are per node.
_CPUS_FOR_EACH = {"cpu": 2, "cuda": 8}
_MEMORY_FOR_EACH_GI = {"cpu": 4, "cuda": 32}
_SHM_GI = {"cpu": 2, "cuda": 16}
_PRICE = {"cpu": 10_000, "cuda": 100_000}


@dataclass(frozen=True)
class Terms:
    """The options of an export that set what nodes have, as given; empty means the default for the node."""

    gpu_model: str = ""
    price: str = ""
    denom: str = ""
    cpus: str = ""
    memory: str = ""
    disk: str = ""
    shm: str = ""
    volume: str = ""

    def price_of(self, node: NodePlan) -> dict[str, Any]:
        """Return the highest price per block. Raises: SpecError."""
        if (denom := self.denom or CHOICES["denom"][0]) not in CHOICES["denom"]:
            raise SpecError(f"--denom {denom!r}: give one of {', '.join(CHOICES['denom'])}")
        advice = f"give a whole number of {denom} per block, 1 to {_MOST_PRICE}"
        return {"denom": denom, "amount": _read_number("price", self.price, _PRICE[node.device], _MOST_PRICE, advice)}

    def resources_of(self, node: NodePlan, *, memory_gb: float | None, has_volume: bool) -> dict[str, Any]:
        """Return the resources of a profile; ``memory_gb`` is the spec's value for the node. Raises: SpecError."""
        return {
            "cpu": {"units": self._count_cpus(node)},
            "memory": {"size": self._size_memory(node, memory_gb)},
            "storage": [
                {"size": _read_size("disk", self.disk, 20, _MOST_STORAGE_GI)},
                {
                    "name": SHM,
                    "size": _read_size("shm", self.shm, _SHM_GI[node.device], _MOST_MEMORY_GI),
                    "attributes": {"persistent": False, "class": "ram"},
                },
                *self._list_volumes(has_volume),
            ],
            **self._gpus_of(node),
        }

    def _count_cpus(self, node: NodePlan) -> int:
        usual = min(_MOST_CPUS, _CPUS_FOR_EACH[node.device] * len(node.ranks))
        return _read_number("cpus", self.cpus, usual, _MOST_CPUS, f"give a whole number, 1 to {_MOST_CPUS}")

    def _size_memory(self, node: NodePlan, memory_gb: float | None) -> str:
        usual = min(_MOST_MEMORY_GI, _MEMORY_FOR_EACH_GI[node.device] * len(node.ranks))
        if memory_gb is not None and node.device == "cpu":  # otherwise it is the memory of a GPU
            usual = max(1, math.ceil(round(min(memory_gb, 1e9) * 1e9 / (1 << 30), 6)))  # whole GiB stay exact
            if usual > _MOST_MEMORY_GI and not self.memory:
                raise SpecError(f"memory_gb {memory_gb:g} of a node: Akash allows {_MOST_MEMORY_GI}Gi: give less")
        return _read_size("memory", self.memory, usual, _MOST_MEMORY_GI)

    def _list_volumes(self, has_volume: bool) -> Sequence[dict[str, Any]]:
        size = _read_size("volume", self.volume, 50, _MOST_STORAGE_GI)
        persistent = {"persistent": True, "class": "beta3"}  # beta3 is NVMe
        return [{"name": CHECKPOINT, "size": size, "attributes": persistent}] if has_volume else []

    def _gpus_of(self, node: NodePlan) -> dict[str, Any]:
        models = _read_models(self.gpu_model)
        if node.device == "cpu":
            return {}
        if (gpus := len(node.ranks)) > _MOST_GPUS:
            where = f"node {node.name}" if node.name else "one node"
            raise SpecError(f"{gpus} GPUs on {where}: Akash allows at most {_MOST_GPUS}: spread them over more nodes")
        # no GPU interface is requested: providers look for it in a label that nodes do not have
        return {"gpu": {"units": gpus, "attributes": {"vendor": {"nvidia": models or None}}}}


def _read_number(name: str, text: str, usual: int, most: int, advice: str) -> int:
    number = int(text) if _NUMBER.fullmatch(text) else 0
    if text and not 1 <= number <= most:
        raise SpecError(f"--{name} {text!r}: {advice}")
    return number or usual


def _read_size(name: str, text: str, usual: int, most: int) -> str:
    match = _SIZE.fullmatch(text)
    number = int(match[1]) if match else 0
    if text and not 1 <= number <= most:
        raise SpecError(f"--{name} {text!r}: give a size in GiB, 1Gi to {most}Gi")
    return f"{number or usual}Gi"


def _read_models(text: str) -> list[dict[str, str]]:
    """Parse ``a100:80Gi,h100``; empty means any model."""
    models = []
    for word in text.split(",") if text else ():
        if not (match := _MODEL.fullmatch(word.strip())):
            raise SpecError(f"--gpu-model {word!r}: give NVIDIA models as Akash names them, such as a100:80Gi,h100")
        models.append({"model": match[1], **({"ram": match[2]} if match[2] else {})})
    return models
