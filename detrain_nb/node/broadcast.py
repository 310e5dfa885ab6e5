"""Variables from one rank to others, over the default process group: the ranks of one job trust each other.

Everything travels in one piece of pickled data, so that what belongs together (a model and its optimizer) still does
when it arrives. Tensors come to the device of the rank that gets them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DetrainError, SessionError

_PIECE_BYTES = 64 << 20


def broadcast(
    look_up: Callable[[], dict[str, Any]], ranks: list[int], source: int, device: torch.device
) -> dict[str, Any]:
    """Send the variables that ``look_up`` finds on ``source`` to ``ranks``; returns what arrived, by name.

    Collective among ``ranks``. Raises: SessionError on every one of them when the source cannot send, or where the data
    cannot be read.
    """
    carrier = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device
    if dist.get_rank() == source:
        _send(look_up, [rank for rank in ranks if rank != source], carrier)
        return {}
    return _receive(source, carrier, device)


def _send(look_up: Callable[[], dict[str, Any]], targets: list[int], carrier: torch.device) -> None:
    try:
        data, problem = _pickled(look_up()), ""
    except DetrainError as exc:
        data, problem = b"", str(exc)
    notice = torch.frombuffer(bytearray(problem.encode() or b"\0"), dtype=torch.uint8).to(carrier)
    sizes = torch.tensor([len(data), len(problem.encode())], device=carrier)
    content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    for target in targets:
        dist.send(sizes, target)
        if problem:
            dist.send(notice, target)
            continue
        for piece in content.split(_PIECE_BYTES):
            dist.send(piece.to(carrier), target)
    if problem:
        raise SessionError(problem)


def _receive(source: int, carrier: torch.device, device: torch.device) -> dict[str, Any]:
    sizes = torch.zeros(2, dtype=torch.int64, device=carrier)
    dist.recv(sizes, source)
    size, problem_size = (int(number) for number in sizes)
    data = bytearray(problem_size or size)
    for piece in torch.frombuffer(data, dtype=torch.uint8).split(_PIECE_BYTES):
        arrived = piece.to(carrier)
        dist.recv(arrived, source)
        if carrier.type != "cpu":
            piece.copy_(arrived)
    if problem_size:
        raise SessionError(data.decode())
    try:
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=False)  # from a rank of our own job
    except AttributeError as exc:
        raise SessionError(
            f"{exc}: run the cell that defines it here first, %distributed replay -r {dist.get_rank()}"
        ) from exc
    return dict(found)


def _pickled(variables: dict[str, Any]) -> bytes:
    """Raises: SessionError naming the variable that cannot be pickled."""
    buffer = io.BytesIO()
    try:
        torch.save(variables, buffer)
    except Exception as exc:
        name = next((name for name, value in variables.items() if not _can_pickle(value)), ", ".join(variables))
        raise SessionError(f"{name} cannot be pickled: {exc}") from exc
    return buffer.getvalue()


def _can_pickle(value: object) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # noqa: BLE001  whatever a user's __reduce__ raises
        return False
    return True
