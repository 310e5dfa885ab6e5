"""Python values, numpy arrays and torch tensors <-> a JSON description plus raw buffers; nothing is ever pickled.

A description is a node: null, a bool, an int of 64 bits, a finite float, a short string, a list of nodes, or one of
    {"tuple": LIST}  {"set": LIST}  {"frozenset": LIST}  {"dict": [LIST of keys, LIST of values]}
    {"OrderedDict": [LIST of keys, LIST of values]}  {"defaultdict": [FACTORY, LIST of keys, LIST of values]}
    {"int": SIZE}  {"float": 8}  {"complex": 16}  {"str": SIZE}  {"bytes": SIZE}  {"bytearray": SIZE}
    {"int64": COUNT}  {"float64": COUNT}                               a long LIST of numbers
    {"array": [DTYPE, SHAPE]}  {"tensor": [DTYPE, SHAPE]}
    {"scalar": a string, bytes, or an array without dimensions}        a numpy scalar
A FACTORY is null or the name of a type in ``_FACTORIES``, nothing else.
Each SIZE, COUNT or SHAPE stands for raw bytes, in this order: a large block is a buffer of its own, all small ones
share the first buffer.
"""

from __future__ import annotations

import collections
import ctypes
import json
import math
import re
import reprlib
import secrets
import struct
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .errors import ValueNotSupported, WireError
from .wire import MAX_DESCRIPTION_BYTES, MAX_DESCRIPTION_VALUES, count_values, read_text

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = [
    "MAX_DESCRIPTION_BYTES",
    "Announced",
    "Json",
    "buffer_sizes",
    "may_travel",
    "pack",
    "read_announcement",
    "unpack",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_BYTES = 4 << 30  # of all buffers of a value
_MAX_ITEMS = MAX_DESCRIPTION_VALUES  # an item takes at least one value of the description
_MAX_DEPTH = 64
_MAX_DIMS = 32  # the limit of numpy 1.26
_MOST_ALIKE, _MOST_ALIKE_CONTAINERS = 64, 16  # dict keys or set elements with equal hashes
_MOST_SHAPE_BYTES = 1 << 63  # of a shape, counting a dimension of 0 as 1
_LARGE_BYTES = 1024
_ALIGN_BYTES = 16
_SHORT_CHARS = 64
_LONG_LIST = 32
_MOST_KEYS_AT_ONCE, _COMPARISONS_AT_ONCE = 256, 1 << 24  # each key may be compared with all others
_NUMBERS_AT_ONCE, _MANY_BITS = 1 << 16, 10_000
_LARGE_PRIME = (1 << 61) - 1
_KEYS_LIMIT_S, _KEY_LIMIT_S = 0.5, 10e-6  # for a dict, and for each of its keys: many times the usual time

_NUMBERS = {"int64": "q", "float64": "d"}
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, int, float, str, tuple, list, set, dict)
}
_DICTS = ("dict", "OrderedDict", "defaultdict")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ARRAY_DTYPE = re.compile(
    r"\|[biu]1|[<>]([iuf][248]|c8|c16)|\|S[0-9]{1,9}|[<>]U[0-9]{1,8}"
    r"|[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_TENSOR_DTYPES = {  # the bytes of an element, and numpy's name
    "bool": (1, "|b1"), "uint8": (1, "|u1"), "uint16": (2, "<u2"), "uint32": (4, "<u4"), "uint64": (8, "<u8"),
    "int8": (1, "|i1"), "int16": (2, "<i2"), "int32": (4, "<i4"), "int64": (8, "<i8"),
    "float16": (2, "<f2"), "float32": (4, "<f4"), "float64": (8, "<f8"), "bfloat16": (2, ""),
    "float8_e4m3fn": (1, ""), "float8_e4m3fnuz": (1, ""), "float8_e5m2": (1, ""), "float8_e5m2fnuz": (1, ""),
    "float8_e8m0fnu": (1, ""), "float4_e2m1fn_x2": (1, ""),
    "complex32": (4, ""), "complex64": (8, "<c8"), "complex128": (16, "<c16"),
}  # fmt: skip

_ITEM, _KEY, _ELEMENT = "{}[{}]", "a key of {}", "an element of {}"
_INSTEAD = {  # an attribute of a type -> what to use in place of its value
    "state_dict": "assign {}.state_dict() to a variable and copy that instead",
    "share_statistics": (  # of parallel.ParallelModel
        'run training.export_safetensors("out", {}) on all ranks; then rank 0\'s host has its weights in out/'
        " (from another machine: %distributed get out --nodes HOST)"
    ),
    "full_tensor": "use {0}.to_local() instead, or {0}.full_tensor() called on every rank",
    "as_subclass": "use a plain torch.Tensor instead",
    "to_numpy": "use {}.to_numpy() instead",
    "filled": "use {}.filled() instead",
    "__array_wrap__": "use numpy.asarray({}) instead",
    "_asdict": "use {}._asdict() instead",
    "__dataclass_fields__": "use dataclasses.asdict({}) instead",
    "__members__": "use {}.value instead",
    "__fspath__": "use str({}) instead",
}
_WHAT_TRAVELS = "only numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays and torch tensors can"


def pack(value: object, *, name: str) -> tuple[Json, list[memoryview]]:
    """Describe ``value``, which the user calls ``name``; return the description and the raw buffers.

    Buffers are C-contiguous bytes. Large contiguous arrays and CPU tensors are not copied: send the buffers before the
    value changes or is freed. Tensors arrive detached, on the CPU, sharing no memory; a Parameter arrives as a tensor,
    a torch.Size as a tuple, and a defaultdict with a factory of the user's own arrives without a factory.
    Raises: ValueNotSupported with the path inside the value, the type found there and what to do.
    """
    packer = _Packer(name)
    description = packer.pack(value)
    text = json.dumps(description, allow_nan=False, separators=(",", ":")).encode()
    for count, most, what in (
        (len(text), MAX_DESCRIPTION_BYTES, "bytes"),
        (count_values(text, most=MAX_DESCRIPTION_VALUES), MAX_DESCRIPTION_VALUES, "values"),
    ):
        if count > most:
            raise ValueNotSupported(
                f"{name} needs a description of {count} {what}, the limit is {most}: use numpy arrays, or a part of it"
            )
    buffers = packer.buffers()
    if (total_bytes := sum(buffer.nbytes for buffer in buffers)) > MAX_BYTES:
        raise _too_large(name, total_bytes)
    return description, buffers


def may_travel(kind: type) -> bool:
    """Return whether values of a type can be packed, judged by the type alone: their content may still prevent it.

    Runs no code of the type.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    known: list[type] = [type(None), bool, *_TO_BYTES, list, tuple, set, frozenset, dict, OrderedDict, defaultdict]
    known += [torch.Size, torch.Tensor, torch.nn.Parameter] if torch else []
    known += [numpy.ndarray] if numpy else []
    return any(kind is each for each in known) or (numpy is not None and issubclass(kind, numpy.generic))


def _too_large(name: str, size_bytes: int) -> ValueNotSupported:
    return ValueNotSupported(
        f"{name} has {size_bytes / 1e9:.1f} GB, at most {MAX_BYTES / 1e9:.1f} GB can travel: "
        "use a part of it, or torch.save it to a file on the rank"
    )


class Announced(NamedTuple):
    """Sizes in bytes that a description announces: of its buffers, and of the memory for building the value."""

    buffer_sizes: list[int]
    memory_bytes: int


def read_announcement(description: object, *, limit_bytes: int = MAX_BYTES) -> Announced:
    """Check a description received from the peer; return the sizes it announces.

    Raises: WireError when it is not a description, or its buffers would exceed ``limit_bytes``.
    """
    checker = _check(description, limit_bytes=limit_bytes)
    return Announced(_buffer_sizes(checker.sizes), checker.memory_bytes)


def buffer_sizes(description: object, *, limit_bytes: int = MAX_BYTES) -> list[int]:
    """Return the sizes in bytes that the buffers of a description must have. Raises: as ``read_announcement``."""
    return read_announcement(description, limit_bytes=limit_bytes).buffer_sizes


def unpack(description: object, buffers: Sequence[bytes | bytearray | memoryview]) -> object:
    """Rebuild the value that ``pack`` described.

    Arrays and tensors use the memory of ``buffers`` when it is writable, else a copy. Without torch installed, a
    tensor arrives as a numpy array.
    Raises: WireError when ``pack`` cannot have produced the input; ValueNotSupported when numpy or torch is missing.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    found = [len(view) for view in views]
    sizes = _check(description, limit_bytes=sum(found)).sizes
    if found != (needed := _buffer_sizes(sizes)):
        raise WireError(f"a value announces buffers of {_short(needed)} bytes, but {_short(found)} arrived")
    try:
        return _build(description, _cut(sizes, views))
    except (UnicodeDecodeError, struct.error) as exc:
        raise WireError(f"raw bytes do not match their description: {exc}") from exc


def _is_json(value: Any) -> bool:
    """Return whether a plain value is written into the description itself: it is valid JSON and short."""
    if type(value) is str:  # JSON would join two surrogates into one character
        return len(value) <= _SHORT_CHARS and not _SURROGATE.search(value)
    return math.isfinite(value) if type(value) is float else type(value) is int and value.bit_length() < 64


_TO_BYTES: dict[type, Callable[[Any], bytes]] = {
    int: lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
    float: lambda value: struct.pack("<d", value),
    complex: lambda value: struct.pack("<2d", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    bytearray: bytes,  # a copy: a bytearray cannot grow while it has a view
}
_FROM_BYTES: dict[str, Callable[[memoryview], object]] = {
    "int": lambda raw: int.from_bytes(raw, "little", signed=True),
    "float": lambda raw: struct.unpack("<d", raw)[0],
    "complex": lambda raw: complex(*struct.unpack("<2d", raw)),
    "str": read_text,
    "bytes": bytes,
    "bytearray": bytearray,
}
_COPIED = {"int": 1, "float": 1, "complex": 1, "str": 4, "bytes": 1, "bytearray": 1}  # of a str: 4 bytes a character


def _padded(size_bytes: int) -> int:
    return size_bytes if size_bytes >= _LARGE_BYTES else -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _buffer_sizes(sizes: list[int]) -> list[int]:
    small = sum(_padded(size) for size in sizes if size < _LARGE_BYTES)
    large = [size for size in sizes if size >= _LARGE_BYTES]
    return [small, *large] if small else large


def _cut(sizes: list[int], views: list[memoryview]) -> Iterator[memoryview]:
    """Yield the raw bytes of each node, from views that have the sizes of ``_buffer_sizes(sizes)``."""
    large = iter(views)
    small = next(large) if any(0 < size < _LARGE_BYTES for size in sizes) else memoryview(b"")
    start = 0
    for size in sizes:
        if size >= _LARGE_BYTES:
            yield next(large)
        else:
            yield small[start : start + size]
            start += _padded(size)


class _Step:
    """A container that is being packed; ``label`` names the current item."""

    def __init__(self, container: object, template: str) -> None:
        self.container, self.template = container, template
        self.label: object = None


class _Packer:
    """Turns a value into nodes and raw bytes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._trail: list[_Step] = []
        self._num_items = 0
        self._data_bytes = 0  # of arrays and tensors
        self._small = bytearray()
        self._large: list[memoryview] = []

    def buffers(self) -> list[memoryview]:
        return [memoryview(self._small), *self._large] if self._small else self._large

    def pack(self, value: Any) -> Any:
        self._num_items += 1
        if self._num_items > _MAX_ITEMS:
            raise ValueNotSupported(f"{self._name} has more than {_MAX_ITEMS} items: use numpy arrays, or a part of it")
        kind = type(value)
        if value is None or kind is bool:
            return value
        elif kind in _TO_BYTES:
            return value if _is_json(value) else {kind.__name__: self._add_raw(_TO_BYTES[kind](value))}
        elif kind is list:
            return self._pack_items(value, value[:])
        elif kind is tuple:
            return {"tuple": self._pack_items(value, value)}
        elif kind is set or kind is frozenset:
            return {kind.__name__: self._pack_items(value, list(value), template=_ELEMENT)}
        elif kind in (dict, OrderedDict, defaultdict):
            return {kind.__name__: self._pack_dict(value)}
        return self._pack_foreign(value)

    def _pack_items(
        self, container: object, items: Sequence[Any], *, template: str = _ITEM, labels: Iterable[object] | None = None
    ) -> Json:
        if numbers := self._pack_numbers(items):
            return numbers
        if any(step.container is container for step in self._trail):
            raise self._refuse(container, advice="it contains itself")
        if len(self._trail) == _MAX_DEPTH:
            raise ValueNotSupported(f"{self._name} is nested more than {_MAX_DEPTH} deep: use a part of it")
        step = _Step(container, template)
        self._trail.append(step)
        nodes = []
        for label, item in zip(range(len(items)) if labels is None else labels, items, strict=True):
            step.label = label
            nodes.append(self.pack(item))
        self._trail.pop()
        return nodes

    def _pack_dict(self, value: dict[Any, Any]) -> list[Json]:
        factory: list[Json] = []
        if isinstance(value, defaultdict):
            names = [name for name, known in _FACTORIES.items() if known is value.default_factory]
            factory = [*names] or [None]  # a factory of the user's own does not travel
        pairs = list(value.items())
        keys, items = [key for key, _ in pairs], [item for _, item in pairs]
        return [*factory, self._pack_items(value, keys, template=_KEY), self._pack_items(value, items, labels=keys)]

    def _pack_numbers(self, items: Sequence[Any]) -> Json:
        """Pack a long list of floats, or of 64-bit ints, as raw bytes; return None for any other list."""
        kinds = set(map(type, items)) if len(items) >= _LONG_LIST else set()
        if kinds not in ({int}, {float}):
            return None
        kind = "int64" if kinds == {int} else "float64"
        try:
            raw = struct.pack(f"<{len(items)}{_NUMBERS[kind]}", *items)
        except struct.error:  # an int of more bits
            return None
        self._add_raw(raw)
        return {kind: len(items)}

    def _pack_foreign(self, value: Any) -> Json:
        """Pack a value of numpy or torch, which are imported already if such a value exists."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        kind = type(value)
        if torch and kind is torch.Size:
            return {"tuple": self._pack_items(value, list(value))}
        elif torch and kind in (torch.Tensor, torch.nn.Parameter):
            return {"tensor": self._pack_tensor(value)}
        elif numpy and kind is numpy.ndarray:
            return {"array": self._pack_array(value)}
        elif numpy and kind in (numpy.str_, numpy.bytes_):  # as arrays, or by .item(), they lose NULs at their end
            return {"scalar": self.pack("".join(value) if kind is numpy.str_ else bytes(value))}
        elif numpy and isinstance(value, numpy.generic):
            return {"scalar": {"array": self._pack_array(numpy.asarray(value))}}
        raise self._refuse(value)

    def _pack_array(self, array: numpy.ndarray[Any, Any]) -> Json:
        import numpy

        if not _ARRAY_DTYPE.fullmatch(array.dtype.str) or array.ndim > _MAX_DIMS:
            what = f"numpy array of dtype {array.dtype} with {array.ndim} dimensions"
            instead = {"f": "{}.astype('float64')", "c": "{}.astype('complex128')"}.get(array.dtype.kind, "{}.tolist()")
            raise self._refuse(array, what=what, advice=f"use {instead} instead")
        self._require_room(array.nbytes)
        flat = numpy.ascontiguousarray(array).reshape(-1)
        self._add_raw(flat.view(numpy.uint8).data if flat.nbytes else b"")
        return [array.dtype.str, list(array.shape)]

    def _pack_tensor(self, tensor: torch.Tensor) -> Json:
        if any(step.template is not _ITEM for step in self._trail):
            raise self._refuse(
                tensor, advice="such a key is found by its identity, which a copy lacks; use a name instead"
            )
        if problem := _tensor_problem(tensor):
            raise self._refuse(tensor, what=problem[0], advice=problem[1])
        self._require_room(tensor.numel() * tensor.element_size())
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._add_raw(_tensor_bytes(whole))
        return [str(whole.dtype).removeprefix("torch."), list(whole.shape)]

    def _require_room(self, size_bytes: int) -> None:
        """Check the total size before copying: an expanded tensor may be larger than the memory when contiguous."""
        self._data_bytes += size_bytes
        if self._data_bytes > MAX_BYTES:
            raise _too_large(self._name, self._data_bytes)

    def _add_raw(self, raw: bytes | memoryview) -> int:
        if len(raw) >= _LARGE_BYTES:
            self._large.append(memoryview(raw))
        else:
            self._small += raw
            self._small += bytes(_padded(len(raw)) - len(raw))
        return len(raw)

    def _refuse(self, value: object, *, what: str = "", advice: str = "") -> ValueNotSupported:
        path = self._name
        for step in self._trail:
            path = step.template.format(path, _short(step.label))
        what = what or _type_name(value)
        article = "an" if what[0] in "aeiouAEIOU" else "a"
        advice = (advice or _advice(value)).format(path)
        return ValueNotSupported(f"{path} is {article} {what} and cannot travel: {advice}")


def _tensor_bytes(tensor: torch.Tensor) -> bytes | memoryview:
    """Return the memory of a contiguous CPU tensor, without numpy, which a node may lack."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return b""
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # keeps the tensor alive as long as the view
    return memoryview(memory).cast("B")


def has_data(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor has all its data in memory: its storage can have been freed or shrunk."""
    if tensor.is_meta or not tensor.numel():
        return not tensor.is_meta
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _tensor_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot travel, and what to do about it; None when it can."""
    import torch

    if tensor.is_nested:
        return "nested tensor", "use list({}.unbind()) instead"
    elif tensor.layout != torch.strided:
        return f"tensor of layout {tensor.layout}", "use {}.to_dense() instead"
    elif tensor.is_quantized:
        return "quantized tensor", "use {}.dequantize() instead"
    elif not has_data(tensor):
        return "tensor without data", "it is on the meta device or its storage was freed; fill it first"
    elif str(tensor.dtype).removeprefix("torch.") not in _TENSOR_DTYPES:
        return f"tensor of dtype {tensor.dtype}", "use {}.view(torch.uint8) instead"
    elif math.prod(dim or 1 for dim in tensor.shape) * tensor.element_size() >= _MOST_SHAPE_BYTES:
        return f"tensor of shape {list(tensor.shape)}", "it is empty, but its other dimensions are too large"
    elif tensor.dim() > _MAX_DIMS:
        return f"tensor of {tensor.dim()} dimensions", f"use {{}}.flatten() instead, the limit is {_MAX_DIMS}"
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: object) -> str:
    for attribute, advice in _INSTEAD.items():
        if hasattr(type(value), attribute):
            return advice
    for plain in (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict):
        if isinstance(value, plain):
            return f"use {plain.__name__}({{}}) instead"
    if _type_name(value) in ("torch.dtype", "torch.device"):
        return "use str({}) instead"
    return "use list({}) instead" if isinstance(value, Iterable) else _WHAT_TRAVELS


def _check(description: object, *, limit_bytes: int) -> _Checker:
    checker = _Checker(limit_bytes)
    checker.check(description, depth=0)
    return checker


class _Checker:
    """Validates a whole description of the peer and collects the sizes of its raw bytes; what passes can be built."""

    def __init__(self, limit_bytes: int) -> None:
        self.sizes: list[int] = []
        self.memory_bytes = 0
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._num_items = 0

    def check(self, node: object, *, depth: int) -> None:
        self._num_items += 1
        if self._num_items > _MAX_ITEMS:
            raise WireError(f"a value has more than {_MAX_ITEMS} items")
        if node is None or type(node) in (bool, int, float, str):
            return
        if type(node) is list:
            self._check_list(node, depth=depth)
            return
        kind, content = _only_item(node)
        if kind in _NUMBERS:
            self._check_list(node, depth=depth)
        elif kind in ("tuple", "set", "frozenset"):
            self._check_list(content, depth=depth)
        elif kind in _DICTS:
            keys, items = _pair(content if kind != "defaultdict" else _without_factory(content))
            if self._check_list(keys, depth=depth) != self._check_list(items, depth=depth):
                raise WireError("a dict has more keys than values, or fewer")
        elif kind in _FROM_BYTES:
            self._add_raw(_natural(content), takes=_COPIED[kind])
        elif kind == "array" or kind == "tensor":
            self._add_raw(_data_bytes(kind, *_pair(content)))
        elif kind == "scalar" and _is_scalar(content):
            self.check(content, depth=depth)
        else:
            raise WireError(f"{_short(node)} is not the description of a value")

    def _check_list(self, node: object, *, depth: int) -> int:
        """Check a LIST; return its length."""
        if type(node) is list:
            if depth == _MAX_DEPTH:
                raise WireError(f"a value is nested more than {_MAX_DEPTH} deep")
            for item in node:
                self.check(item, depth=depth + 1)
            return len(node)
        kind, content = _only_item(node)
        if kind not in _NUMBERS:
            raise WireError(f"{_short(node)} is not the description of a list")
        self._add_raw(8 * _natural(content), takes=6)  # a number in a list has 40 bytes, and for a moment 8 in a tuple
        return _natural(content)

    def _add_raw(self, size_bytes: int, *, takes: int = 0) -> None:
        """Count raw bytes; building their value takes ``takes`` times their size in further memory."""
        self.sizes.append(size_bytes)
        self.memory_bytes += size_bytes * (1 + takes)
        self._num_bytes += _padded(size_bytes)
        if self._num_bytes > self._limit_bytes:
            raise WireError(f"a value announces more than {self._limit_bytes} bytes")


def _only_item(node: object) -> tuple[str, Any]:
    if type(node) is dict and len(node) == 1:
        return next(iter(node.items()))
    raise WireError(f"{_short(node)} is not the description of a value")


def _pair(content: object) -> tuple[Any, Any]:
    if type(content) is list and len(content) == 2:
        return content[0], content[1]
    raise WireError(f"{_short(content)} is not a pair")


def _without_factory(content: object) -> list[Any]:
    if type(content) is list and content:
        factory, *rest = content
        if factory is None or type(factory) is str and factory in _FACTORIES:
            return rest
    raise WireError(f"{_short(content)} is not a defaultdict that can travel")


def _natural(number: object) -> int:
    if type(number) is int and number >= 0:
        return number
    raise WireError(f"{_short(number)} is not a size")


def _is_scalar(node: object) -> bool:
    if type(node) is str:
        return True
    kind, content = _only_item(node)
    return kind in ("str", "bytes") or (kind == "array" and _pair(content)[1] == [])


def _data_bytes(kind: str, dtype: object, shape: object) -> int:
    """Return the size in bytes of an array or a tensor."""
    if kind == "tensor" and type(dtype) is str and dtype in _TENSOR_DTYPES:
        item_bytes = _TENSOR_DTYPES[dtype][0]
    elif kind == "array" and type(dtype) is str and _ARRAY_DTYPE.fullmatch(dtype):
        item_bytes = int(dtype[2:].partition("[")[0]) * (4 if dtype[1] == "U" else 1)
    else:
        raise WireError(f"{_short(dtype)} is not a dtype of an {kind} that can travel")
    if type(shape) is not list or len(shape) > _MAX_DIMS:
        raise WireError(f"{_short(shape)} is not a shape")
    dims = [_natural(dim) for dim in shape]
    if math.prod(dim or 1 for dim in dims) * (item_bytes or 1) >= _MOST_SHAPE_BYTES:  # also where another dim is 0
        raise WireError(f"{_short(shape)} is larger than any memory")
    return math.prod(dims) * item_bytes


def _short(value: object) -> str:
    """Return the repr of a value, of bounded length whatever the value is."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 120
    try:
        return shortener.repr(value)
    except ValueError:  # an int of thousands of digits
        return f"<{type(value).__name__}>"


def _build(node: Any, raws: Iterator[memoryview]) -> Any:
    """Build a value from checked nodes and their raw bytes."""
    if type(node) is list:
        return [_build(item, raws) for item in node]
    if type(node) is not dict:
        return node
    kind, content = _only_item(node)
    if kind == "tuple":
        return tuple(_build(content, raws))
    elif kind == "set" or kind == "frozenset":
        elements: set[Any] = set()
        add_keys(_build(content, raws), lambda keys, _: elements.update(keys))
        return elements if kind == "set" else frozenset(elements)
    elif kind in _DICTS:
        made, (*_, keys, items) = _empty_dict(kind, content), content
        keys, items = _build(keys, raws), _build(items, raws)
        add_keys(keys, lambda some, at: made.update(zip(some, items[at : at + len(some)], strict=True)))
        return made
    elif kind in _NUMBERS:
        return _build_numbers(_NUMBERS[kind], content, next(raws))
    elif kind in _FROM_BYTES:
        return _FROM_BYTES[kind](next(raws))
    elif kind == "tensor":
        return _build_tensor(content[0], content[1], next(raws))
    elif kind == "array":
        return _build_array(content[0], content[1], next(raws))
    assert kind == "scalar", kind
    return _build_scalar(_build(content, raws))


def _empty_dict(kind: str, content: list[Any]) -> dict[Any, Any]:
    if kind == "defaultdict":
        return defaultdict(None if content[0] is None else _FACTORIES[content[0]])
    return OrderedDict() if kind == "OrderedDict" else {}


def add_keys(keys: list[Any], add: Callable[[list[Any], int], object]) -> None:
    """Add keys of a dict, or elements of a set, in portions, so that a stop can interrupt.

    Raises: WireError for keys that are not hashable, or were chosen to collide: adding them all would take hours.
    """
    deadline = time.thread_time() + _KEYS_LIMIT_S + len(keys) * _KEY_LIMIT_S
    too_slow = WireError(f"{len(keys)} keys or elements take too long to compare: too many have the same hash")
    has_containers = not {tuple, frozenset}.isdisjoint(map(type, keys)) or any(
        type(key) is int and key.bit_length() > _MANY_BITS for key in keys
    )
    most_alike = _MOST_ALIKE_CONTAINERS if has_containers else _MOST_ALIKE
    at_once = min(_MOST_KEYS_AT_ONCE, _COMPARISONS_AT_ONCE // max(1, len(keys)))
    step = 1 if has_containers else max(1, at_once)  # comparing two containers may take long
    alike: collections.Counter[int] = collections.Counter()
    factor = 1 + secrets.randbelow(_LARGE_PRIME - 1)  # else hashes could be chosen to collide in the counter
    try:
        for at in range(0, len(keys), _NUMBERS_AT_ONCE):
            alike.update(number * factor % _LARGE_PRIME for number in map(hash, keys[at : at + _NUMBERS_AT_ONCE]))
        if max(alike.values(), default=0) > most_alike:
            raise too_slow
        for at in range(0, len(keys), step):
            add(keys[at : at + step], at)
            if time.thread_time() > deadline:
                raise too_slow
    except (TypeError, ValueError) as exc:  # ValueError: a timedelta64 without unit
        raise WireError(f"invalid key or element: {exc}") from exc


def _build_numbers(kind: str, count: int, raw: memoryview) -> list[Any]:
    """Unpack numbers in portions, so that other threads can run in between."""
    one = struct.calcsize(kind)
    made: list[Any] = []
    for at in range(0, count, _NUMBERS_AT_ONCE):
        made += struct.unpack_from(f"<{min(_NUMBERS_AT_ONCE, count - at)}{kind}", raw, at * one)
    return made


def _build_scalar(value: Any) -> Any:
    numpy = _import_numpy()
    if type(value) is str:
        return numpy.str_(value)
    return numpy.bytes_(value) if type(value) is bytes else value[()]


def _build_array(dtype: str, shape: list[int], raw: memoryview) -> Any:
    numpy = _import_numpy()
    memory = bytearray(raw) if raw.readonly else raw
    if dtype == "|b1" and numpy.ndarray(len(raw), "|u1", memory).max(initial=0) > 1:
        raise WireError("an array of bool holds bytes that are neither 0 nor 1")
    if dtype[1] == "U" and numpy.ndarray(len(raw) // 4, f"{dtype[0]}u4", memory).max(initial=0) > sys.maxunicode:
        raise WireError("an array of strings holds an invalid character")
    return numpy.ndarray(shape, dtype, memory)


def _import_numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ValueNotSupported("the value holds numpy arrays or numbers, or tensors: install numpy here") from None
    return numpy


def _build_tensor(dtype: str, shape: list[int], raw: memoryview) -> Any:
    item_bytes, numpy_dtype = _TENSOR_DTYPES[dtype]
    try:
        import torch
    except ImportError:
        if not numpy_dtype:
            raise ValueNotSupported(
                f"the value holds a tensor of {dtype}, unknown to numpy: install torch here"
            ) from None
        return _build_array(numpy_dtype, shape, raw)
    if not hasattr(torch, dtype):
        raise ValueNotSupported(
            f"the value holds a tensor of {dtype}, unknown to torch {torch.__version__}: upgrade it"
        )
    memory = bytearray(raw) if raw.readonly else raw
    flat = torch.frombuffer(memory, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    if dtype == "bool" and raw and flat.max() > 1:
        raise WireError("a tensor of bool holds bytes that are neither 0 nor 1")
    aligned = flat.clone() if flat.data_ptr() % item_bytes else flat
    return aligned.view(getattr(torch, dtype)).reshape(shape)
