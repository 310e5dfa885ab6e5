"""Buffers that the forward passes of replicas change, each on its own: statistics, counts, averages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

Place = tuple[nn.Module, str, Tensor]


class RunningBuffers:
    """Record of the buffers of some modules, which finds those that have changed."""

    def __init__(self, modules: Sequence[nn.Module], *, device: torch.device) -> None:
        """Note the buffers of ``modules``; ``device``: from which they are sent.

        Changes are found by digests: a write through ``.data``, or by torch's BatchNorm kernels, does not raise a
        tensor's version, and a tensor made in inference mode has none.
        """
        self._modules, self._device = modules, device
        self._note(self._places())

    def share(self, replicas: Sequence[dist.ProcessGroup]) -> None:
        """Copy buffers that changed on any replica from the first replica to all. Collective: the replicas.

        A buffer whose size differs between replicas, such as a growing table, is left alone.
        """
        places = self._places()
        if not places or not replicas:
            return
        sizes = [(self._is_changed(*place), place[2].numel()) for place in places]
        told = torch.tensor([[is_changed, size, -size] for is_changed, size in sizes], device=self._device)
        for group in replicas:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        for (part, key, buffer), (is_changed, most, least) in zip(places, told.tolist()):
            if is_changed and most == -least:
                part._buffers[key] = _of_first(buffer, replicas)
        self._note(self._places())

    def _places(self) -> list[Place]:
        """Return the places of all buffers; a buffer with several names counts once."""
        found: dict[int, Place] = {}
        for module in self._modules:
            for part in module.modules():
                for key, buffer in part._buffers.items():
                    if buffer is not None and not isinstance(buffer, DTensor):
                        found.setdefault(id(buffer), (part, key, buffer))
        return list(found.values())

    def _note(self, places: Sequence[Place]) -> None:
        self._known = {(id(part), key): (buffer, _digest(buffer)) for part, key, buffer in places}

    def _is_changed(self, part: nn.Module, key: str, buffer: Tensor) -> bool:
        known, digest = self._known.get((id(part), key), (None, ""))
        return buffer is not known or _digest(buffer) != digest


def _digest(buffer: Tensor) -> str:
    """Return a digest of the values of a buffer, or "" if it has none that can be sent."""
    if buffer.is_meta or isinstance(buffer, FakeTensor) or buffer.layout != torch.strided or not buffer.numel():
        return ""
    values = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def _of_first(buffer: Tensor, replicas: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return ``buffer`` with the values of the first replica; a copy if it cannot be written into."""
    with torch.no_grad():
        own = buffer.clone() if buffer.is_inference() else buffer.contiguous()
        sent = torch.view_as_real(own) if own.is_complex() else own
        for group in replicas:
            dist.broadcast(sent, group_src=0, group=group)
    return own
