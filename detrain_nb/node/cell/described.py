"""The row of a variable in a table: its type, shape, a short text, its size, its checksum.

It is plain JSON, bounded, and built without running any code of the value's class.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from ...values import has_data
from .digests import digest_of
from .untouched import (
    Inside,
    as_tensor,
    bases_of,
    is_dense,
    is_of,
    is_table,
    layout_of,
    learning_rates,
    loaded,
    module_of,
    name_of,
    plain_torch,
    tensors_of,
    variables_of,
    whole_shape,
)

_TEXT_CHARS = 60
_FIRST = 3  # items of a list, in its short text
_MOST_BITS = 200  # of an int that is written out
_MOST_DIMS = 32
_COUNTED = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, str, bytes, bytearray)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
_BY_TEXT = (bool, float, complex, type(None), type(...), range, torch.dtype, torch.device, *_PATHS)
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("{", "}"), deque: ("[", "]")
}  # fmt: skip

Row = dict[str, Any]


def describe(value: object, *, deadline: float) -> Row:
    """Describe one variable; the checksum is ready at ``deadline`` or soon after, or missing."""
    kind = type(value)
    row: Row = {"type": name_of(kind), "value": "", "shape": None, "dtype": "", "device": "", "bytes": None}
    try:
        with plain_torch():
            row.update(_facts(value))
    except Exception:  # noqa: BLE001  a tensor without shape or memory, a race with another thread: show the type alone
        row["value"] = ""
    digest = digest_of(value, deadline=deadline)
    row.update(digest=digest.text, is_sample=digest.is_sample, why=digest.why)
    return row


def _facts(value: Any) -> Row:
    kind = type(value)
    if is_of(value, torch.Tensor):
        return _of_tensor(value)
    if (inside := tensors_of(value)) is not None:
        return _of_parts(value, inside)
    numpy: Any = sys.modules.get("numpy")
    if numpy and numpy.ndarray in bases_of(kind):
        array = numpy.ndarray.view(value, numpy.ndarray)
        shape = list(array.shape[:_MOST_DIMS])
        size = _size_of_view(array.shape, array.strides, array.itemsize)
        return {"shape": shape, "dtype": str(array.dtype)[:_TEXT_CHARS], "bytes": size}
    if is_table(value):
        names = [label_text(name) for name in itertools.islice(value.columns, _FIRST + 1)]
        return {
            "shape": list(value.shape),
            "value": _cut(", ".join([*names[:_FIRST], *(["…"] * (len(names) > _FIRST))])),
        }
    if type in bases_of(kind):
        return {"type": "class", "value": f"{module_of(value)}.{name_of(value)}".removeprefix("__main__.")}
    if kind is types.FunctionType:
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        return {"type": "function", "value": _cut(f"({', '.join(names)})")}
    if kind in _COUNTED:
        size = sys.getsizeof(value) if len(value) else 0
        return {"type": f"{kind.__name__}, {len(value):,}", "value": short_text(value), "bytes": size or None}
    is_torch = kind in (torch.dtype, torch.device)
    return {
        "type": f"torch.{kind.__name__}" if is_torch else name_of(kind),
        "value": short_text(value) or object_text(value),
    }


def label_text(label: object) -> str:
    """Return the name of a column, shortened."""
    return _cut(label, 20) if type(label) is str else short_text(label, most=20, depth=1)


def object_text(value: Any, *, most: int = _FIRST) -> str:
    """Describe a mesh, a learning rate schedule, or the attributes of any other object; no texts: maybe secrets."""
    if type(value) is loaded("torch.distributed.device_mesh", "DeviceMesh"):
        sizes = [str(size) for size in value.shape]
        names = value.mesh_dim_names or ()
        axes = [f"{name}={size}" for name, size in zip(names, sizes)] if names else sizes
        return _cut(f"{value.device_type}, {' x '.join(axes)}")
    own = variables_of(value)
    if is_of(value, torch.optim.lr_scheduler.LRScheduler):
        rates, steps = own.get("_last_lr"), own.get("last_epoch")
        own = {"step": steps, "lr": rates[0] if type(rates) is list and len(rates) == 1 else rates}
    shown = {name: each for name, each in own.items() if name[:1] != "_" and type(each) not in (str, bytes, bytearray)}
    words = [f"{name[:40]}={_number_or_type(each)}" for name, each in itertools.islice(shown.items(), most)]
    return ", ".join([*words, *(["…"] * (len(shown) > most))])


def _number_or_type(value: object) -> str:
    if type(value) is float:
        return f"{value:.6g}"
    return short_text(value) if type(value) in (int, *_BY_TEXT) else name_of(type(value))


def _of_tensor(value: Any) -> Row:
    tensor, layout = as_tensor(value), layout_of(value)
    if tensor is None:
        return {}
    shape = whole_shape(value) if layout else list(tensor.shape)
    return {
        "value": "" if layout else _only_number(tensor),
        "shape": shape[:_MOST_DIMS],
        "local": list(tensor.shape[:_MOST_DIMS]) if layout else None,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "bytes": _size_of(tensor),
        "layout": layout,
    }


def _only_number(tensor: torch.Tensor) -> str:
    """Return the value of a CPU tensor without dimensions, such as a loss: reading from a GPU would wait."""
    if tensor.dim() or not tensor.is_cpu or not is_dense(tensor) or not has_data(tensor):
        return ""
    try:
        number = tensor.item()
    except (RuntimeError, NotImplementedError):  # a dtype without a Python equivalent
        return ""
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _size_of(tensor: torch.Tensor) -> int:
    if not is_dense(tensor):
        return tensor.numel() * tensor.element_size()
    return _size_of_view(tensor.shape, tensor.stride(), tensor.element_size())


def _size_of_view(shape: Sequence[int], steps: Sequence[int], item_bytes: int) -> int:
    """Return the bytes that a view covers; an element shown many times, as by ``expand`` or ``unfold``, counts once.

    If axes overlap with gaps in between, the result may be slightly too large.
    """
    if not math.prod(shape):
        return 0
    axes: dict[int, int] = {}  # size by step: no element is on two of them, as far as steps are multiples
    for step, size in sorted((abs(step), size) for size, step in zip(shape, steps) if step and size > 1):
        fine = next((fine for fine in axes if step % fine == 0 and axes[fine] >= step // fine), 0)
        if fine:
            axes[fine] += (size - 1) * step // fine
        else:
            axes[step] = size
    reach = sum((size - 1) * step for step, size in axes.items())
    return item_bytes * min(math.prod(axes.values()), reach // (math.gcd(*axes) or 1) + 1)


def _of_parts(value: Any, inside: Inside) -> Row:
    """Describe a module or an optimizer: its size on this rank, its devices, and the layout of its tensors."""
    size, devices, dtypes, layouts = 0, [], [], []
    for _, part in inside.tensors:
        if (tensor := as_tensor(part)) is not None:
            size += _size_of(tensor)
            devices.append(str(tensor.device))
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            layouts.append(layout_of(part))
    is_optimizer = is_of(value, torch.optim.Optimizer)
    if is_optimizer:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(learning_rates(value)))
        words = f"lr {rates}, {inside.counted(len(inside.tensors))} states"
    else:
        words = f"{inside.count_numbers()} parameters"
    return {
        "value": _cut(words),
        "dtype": "" if is_optimizer else _all(dtypes),
        "device": _all(devices),
        "bytes": size,
        "layout": next((layout for layout in layouts if layout), None),
    }


def _all(words: list[str]) -> str:
    return _cut(", ".join(dict.fromkeys(words)))


def short_text(value: Any, *, most: int = _TEXT_CHARS, depth: int = 0) -> str:
    """Return a plain Python value in a few characters, as Python writes it; of other values, the name of the class."""
    kind = type(value)
    if kind is int:
        bits = value.bit_length()
        return str(value) if bits <= _MOST_BITS else f"a number of {bits:,} bits"
    if kind in _BY_TEXT:
        return _cut(str(value), most)
    if kind in (str, bytes, bytearray):
        return repr(value) if len(value) <= most else f"{value[:most]!r}…"
    if kind in (dict, OrderedDict, defaultdict):
        return _cut(_short_dict(value, depth), most)
    if kind in _BRACKETS or kind is torch.Size:
        return _cut(_short_items(value, depth), most)
    numpy: Any = sys.modules.get("numpy")
    if numpy and numpy.generic in bases_of(kind) and module_of(kind) == "numpy":
        return _cut(str(value), most)
    return "" if depth == 0 else name_of(kind)


def _short_items(value: Any, depth: int) -> str:
    begin, end = _BRACKETS.get(type(value), ("(", ")"))
    if depth > 1:
        return f"{begin}…{end}" if len(value) else f"{begin}{end}"
    first = [item for item, _ in zip(value, range(_FIRST))]
    more = ["…"] if len(value) > _FIRST else []
    return begin + ", ".join([*(short_text(item, most=20, depth=depth + 1) for item in first), *more]) + end


def _short_dict(value: Any, depth: int) -> str:
    if depth > 1:
        return "{…}" if len(value) else "{}"
    first: list[tuple[Any, Any]] = [pair for pair, _ in zip(dict.items(value), range(_FIRST))]
    words = [f"{short_text(k, most=20, depth=depth + 1)}: {short_text(v, most=20, depth=depth + 1)}" for k, v in first]
    return "{" + ", ".join([*words, *(["…"] if len(value) > _FIRST else [])]) + "}"


def _cut(text: str, most: int = _TEXT_CHARS) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 1]}…"
