"""A preview of one variable: a corner of a tensor with statistics, the head of a list or a text.

Only what is shown leaves the rank, and no code of the value's class is run.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from ...text import count_of
from ...values import has_data, may_travel
from .described import Row, label_text, object_text, short_text
from .digests import SAMPLE, NotCompared, as_bytes, require_done, sample_of
from .untouched import (
    MOST_PARTS,
    Inside,
    as_array,
    as_tensor,
    children_of,
    is_dense,
    is_dtensor,
    is_of,
    is_table,
    name_of,
    plain_torch,
    tensors_of,
)

_ROWS, _COLUMNS = 5, 6  # of a corner
_ITEMS = 10  # of a list, a dict, a module
_ITEM_CHARS = 100
_TEXT_CHARS = 1000
_BINS = 18
_WHOLE_NUMBERS = 1 << 20  # up to this size, statistics use all elements; else a sample
_FLOAT4 = "torch.float4_e2m1fn_x2"  # missing in older torch
_FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
_WIDE = {"g": "f8", "G": "c16"}  # numpy's long types, which torch lacks, and what they are read as


def preview(value: object, *, deadline: float) -> Row:
    """Return a table (``columns``, ``rows``) or ``text``, with a ``note`` on which part of the value it shows.

    Numbers also have statistics, ``facts`` and ``bins``. ``travels``: values of this type can be pulled.
    """
    try:
        with plain_torch():
            return {"travels": may_travel(type(value)), **_preview(value, deadline)}
    except NotCompared as exc:
        return {"note": f"no preview now: {exc}"}
    except Exception as exc:  # noqa: BLE001  torch rejects a layout, a thread changes a dict: the rank must survive
        return {"note": f"no preview: {name_of(type(exc))}"}


def _preview(value: Any, deadline: float) -> Row:
    kind = type(value)
    if is_of(value, torch.Tensor):
        return _of_tensor(value, deadline)
    if (array := as_array(value)) is not None:
        if array.dtype.kind not in "biufc":
            return {"note": f"an array of {array.dtype.name} has no preview"}
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        wide = _WIDE.get(array.dtype.char)
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):  # unsupported by torch
            array = array.copy()
        with warnings.catch_warnings():  # about read-only arrays, not written here, or wide types
            warnings.simplefilter("ignore")
            array = array.astype(wide) if wide else array
            return _of_numbers(torch.from_numpy(array), whose="read as float64" if wide else "")
    if kind in (list, tuple, deque, set, frozenset, torch.Size):
        rows = [[str(n), _item(item)] for n, item in enumerate(itertools.islice(value, _ITEMS))]
        return {"columns": ["", "value"], "rows": rows, "note": _first_of(len(rows), len(value), "items")}
    if kind in (dict, OrderedDict, defaultdict):
        items = itertools.islice(dict.items(value), _ITEMS)
        rows = [[_item(key), _item(item)] for key, item in items]
        return {"columns": ["key", "value"], "rows": rows, "note": _first_of(len(rows), len(value), "items")}
    if kind in (str, bytes, bytearray):
        head = value[:_TEXT_CHARS]
        text = head if kind is str else repr(bytes(head))
        return {"text": text, "note": _first_of(len(head), len(value), "characters" if kind is str else "bytes")}
    if (inside := tensors_of(value)) is not None:
        return _of_parts(value, inside)
    if is_table(value):
        kinds = [
            [label_text(name), str(dtype)[:_ITEM_CHARS]] for name, dtype in zip(value.columns[:_ITEMS], value.dtypes)
        ]
        return {"columns": ["column", "dtype"], "rows": kinds, "note": _first_of(len(kinds), value.shape[1], "columns")}
    text = short_text(value, most=_TEXT_CHARS) or object_text(value, most=_ITEMS)
    return {
        "text": text,
        "note": "" if text else f"{name_of(kind)} has no preview: it would run code of the class",
    }


def _item(value: object) -> str:
    return short_text(value, most=_ITEM_CHARS) or name_of(type(value))


def _first_of(shown: int, size: int, what: str, *, is_cut: bool = False) -> str:
    of = f"at least {size:,}" if is_cut else f"{size:,}"
    if shown < size or is_cut:
        return f"first {shown:,} of {of} {what}"
    return f"all {of} {what}" if size > 1 else count_of(size, what[:-1])


def _of_parts(value: Any, inside: Inside) -> Row:
    """List the direct children of a module; for other values, all tensors."""
    rows = []
    children = list(children_of(value)) if is_of(value, torch.nn.Module) else []
    for name, child in children[:_ITEMS]:
        of_child = tensors_of(child)
        rows.append([name[:_ITEM_CHARS], name_of(type(child)), of_child.count_numbers() if of_child else ""])
    if rows:
        note = _first_of(len(rows), len(children), "modules", is_cut=len(children) > MOST_PARTS)
        return {"columns": ["module", "class", "parameters"], "rows": rows, "note": note}
    for path, part in inside.tensors[:_ITEMS]:
        tensor = as_tensor(part)
        shape = "" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        rows.append([path[:_ITEM_CHARS], name_of(type(part)), shape])
    note = _first_of(len(rows), len(inside.tensors), "tensors", is_cut=inside.is_cut)
    return {"columns": ["name", "class", "shape"], "rows": rows, "note": note}


def _of_tensor(value: object, deadline: float) -> Row:
    tensor = as_tensor(value)
    if tensor is None:
        return {"note": f"{name_of(type(value))} has no preview: it would run code of the class"}
    if not is_dense(tensor) or not has_data(tensor):
        return {"note": "a tensor without data, or one that is not dense, has no preview"}
    require_done(tensor, by=deadline)
    if (numbers := as_bytes(tensor)) is not tensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _of_numbers(numbers, whose=f"raw memory, as torch cannot read {dtype}")
    return _of_numbers(tensor, whose="the part of this rank" if is_dtensor(value) else "")


def _of_numbers(tensor: torch.Tensor, *, whose: str = "") -> Row:
    shape = list(tensor.shape)
    corner = tensor[(0,) * max(0, len(shape) - 2)] if tensor.numel() else tensor.reshape(-1)
    corner = corner.reshape(1, -1) if corner.ndim < 2 and corner.numel() <= 1 else corner
    corner = corner.unsqueeze(0) if corner.ndim == 1 else corner
    corner = _readable(corner[:_ROWS, :_COLUMNS].cpu())[:, :_COLUMNS]
    if str(tensor.dtype) == _FLOAT4:
        shape[-1:] = [2 * size for size in shape[-1:] or [1]]
    cells = [[_number(number) for number in row] for row in corner.tolist()]
    height, width = corner.shape
    of = " x ".join(f"{size:,}" for size in shape) or "1 number"
    shown = f"{height} x {width}" if len(shape) > 1 else f"{width}"
    note = f"first {shown} of {of}" if math.prod(shape) > height * width else f"all of {of}"
    found: Row = {
        "columns": ["", *map(str, range(width))] if tensor.numel() else [],
        "rows": [[str(number), *row] for number, row in enumerate(cells) if row],
        "note": f"{note}, {whose}" if whose else note,
    }
    return {**found, **_statistics(tensor)} if tensor.numel() and not tensor.is_complex() else found


def _readable(numbers: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that torch can compute with; float4, two in a byte, doubles the last axis."""
    if str(numbers.dtype) == _FLOAT4:
        packed = torch.atleast_1d(numbers.view(torch.uint8))
        places = torch.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
        return torch.tensor([*_FLOAT4_NUMBERS, *(-number for number in _FLOAT4_NUMBERS)])[places.long()]
    return numbers.float() if numbers.dtype.is_floating_point and numbers.element_size() < 4 else numbers


def _number(value: Any) -> str:
    if type(value) is not float:
        return f"{value:.4g}" if type(value) is complex else str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _statistics(tensor: torch.Tensor) -> Row:
    """Return statistics of all elements, or of a sample of very many; NaNs and infinities are only counted."""
    is_sample = tensor.numel() > _WHOLE_NUMBERS
    picked = (sample_of(tensor, SAMPLE) if is_sample else tensor).cpu()
    if is_sample and tensor.dtype.is_floating_point and tensor.element_size() == 1:
        picked = picked.view(tensor.dtype)
    numbers = _readable(picked).reshape(-1).to(torch.float64)
    finite = numbers[torch.isfinite(numbers)]
    nans, infinite = int(torch.isnan(numbers).sum()), int(torch.isinf(numbers).sum())
    found: Row = {
        "nans": nans,
        "infinite": infinite,
        "facts": {},
        "bins": [],
        "sampled": len(numbers) if is_sample else 0,
    }
    if len(finite):
        low, high = float(finite.min()), float(finite.max())
        mean, deviation = float(finite.mean()), float(finite.std(correction=0))
        if not tensor.dtype.is_floating_point:
            low, high = int(finite.min()), int(finite.max())
        facts = {"min": low, "max": high, "mean": mean, "std": deviation}
        found["facts"] = {name: _number(number) for name, number in facts.items()}
        if high > low and math.isfinite(high - low):
            found["bins"] = [int(count) for count in torch.histc(finite, _BINS, low, high)]
    return found
