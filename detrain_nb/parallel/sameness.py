"""Whether all ranks have made the same model: one that differs is found before it trains, not by a hang."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import SpecError
from .deferred import tapes_of

__all__ = ["require_same_model"]


def require_same_model(model: nn.Module, *, device: torch.device) -> None:
    """Compare classes, code, names and shapes over all ranks; where only values differ, all take those of rank 0.

    ``device``: through which values are sent. Collective: all ranks. Raises: SpecError, which names the ranks and the
    first thing that differs.
    """
    tapes = tapes_of(model)
    lines = [*_describe(model), *(f"values of {len(tape)} operations ({tape.fingerprint()[:8]})" for tape in tapes)]
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    figures = [*map(_figures, tensors), *(tape.drawn_from() for tape in tapes)]
    mine = _digest("\n".join(lines)), _digest(" ".join(figures))
    every: list[tuple[str, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    kinds = Counter(kind for kind, _ in every)
    if len(kinds) > 1:
        _raise_difference(lines, [kind for kind, _ in every])
    if len({values for _, values in every}) > 1:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(_of_first(tensor.detach(), device))
        for tape in tapes:
            tape.states = _of_first(tape.states, device).cpu()


def _of_first(tensor: Tensor, device: torch.device) -> Tensor:
    """What rank 0 has. Collective: all ranks."""
    sent = tensor.to(device)
    dist.broadcast(sent, 0)
    return sent


def _raise_difference(lines: list[str], kinds: list[str]) -> None:
    """Every rank comes here."""
    every: list[list[str]] = [lines] * len(kinds)
    dist.all_gather_object(every, lines)
    usual = Counter(kinds).most_common(1)[0][0]
    others = [rank for rank, kind in enumerate(kinds) if kind != usual]
    one, reference = every[others[0]], every[kinds.index(usual)]
    at = next((i for i, (ours, theirs) in enumerate(zip(one, reference)) if ours != theirs), None)
    if at is None:
        difference = f"it has {len(one)} parts, on rank {kinds.index(usual)} there are {len(reference)}"
    else:
        difference = f"there it has {one[at]}, on rank {kinds.index(usual)} {reference[at]}"
    named = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    raise SpecError(f"the model on {named} is another one: {difference}; run the same code with the same data on all")


def _describe(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        forward = getattr(type(module).forward, "__code__", None)
        code = _digest(forward.co_code.hex() + repr(forward.co_names))[:8] if forward is not None else "-"
        yield f"{name or 'the model'}: {type(module).__qualname__} (forward {code}) {module.extra_repr()}".strip()
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                yield f"{kind} {f'{name}.{key}' if name else key}: {_look_of(tensor)}"


def _look_of(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return "none"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _figures(tensor: Tensor) -> str:
    values = tensor.detach().double() if not tensor.is_complex() else torch.view_as_real(tensor.detach()).double()
    flat = values.flatten()
    places = torch.arange(len(flat), device=flat.device) % 1021 + 1  # the same values in another order are others
    return f"{flat.sum().item()!r},{flat.abs().sum().item()!r},{(flat * places).sum().item()!r}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
