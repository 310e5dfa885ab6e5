"""Values are transferred exactly or not at all, and received data is not trusted."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import gc
import json
import math
import pathlib
import random
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb import parallel, values
from detrain_nb.errors import ValueNotSupported, WireError
from detrain_nb.values import MAX_DESCRIPTION_BYTES, buffer_sizes, pack, unpack


def receive(value: object) -> Any:
    """Send a value through JSON and bytes, as over the wire."""
    description, buffers = pack(value, name="x")
    sizes = [len(buffer) for buffer in buffers]
    assert all(buffer.c_contiguous and buffer.format == "B" for buffer in buffers)
    description = json.loads(json.dumps(description, allow_nan=False))
    assert buffer_sizes(description) == sizes
    return unpack(description, [bytearray(buffer) for buffer in buffers])


FACTORIES = [bool, int, float, str, tuple, list, set, dict]


def fingerprint(value: Any) -> Any:
    """Return a key that two values share only if they are equal in every type and bit, NaN included."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<2d", value.real, value.imag)
    if kind in (list, tuple):
        return kind, [fingerprint(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted(repr(fingerprint(item)) for item in value)
    if kind in (dict, OrderedDict, defaultdict):
        return (
            kind,
            getattr(value, "default_factory", None),
            [(fingerprint(key), fingerprint(item)) for key, item in value.items()],
        )
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, bytes(value.resolve_conj().flatten().view(torch.uint8).tolist())
    return kind, value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# ---- plain values


def test_expanded_tensors_and_arrays_are_too_large_before_they_are_made_so() -> None:
    """No memory is allocated for 400 TB."""
    one = np.broadcast_to(np.zeros(1), (10**13,))
    for value in (torch.ones(1).expand(10**14), one, [torch.ones(1).expand(10**9)] * 10):
        with pytest.raises(ValueNotSupported, match=r"^x has [\d.]+ GB, at most 4\.3 GB can travel: use a part of it"):
            pack(value, name="x")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        2**63,
        -(2**63),
        -(2**63) - 1,
        3**50_000,
        -(255**4096),
        0.0,
        -0.0,
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
        complex(-0.0, math.nan),
        "",
        "text",
        "\0 \n \u2028 \U0001f600",
        "long" * 1000,
        "\ud800 alone",
        "\ud83d\ude00",
        b"",
        b"\0\xff",
        b"long" * 1000,
        bytearray(b"short"),
        bytearray(5000),
        [],
        (),
        set(),
        frozenset(),
        {},
        [1, [2.5, ["three", [None]]]],
        (1, (2,), []),
        pytest.param({1, "a", (2, frozenset({b"x"}))}, id="set-mixed"),  # its repr has another order in each process
        {"z": 1, "a": 2, 3: 4, None: 5, 1.5: 6, (1, "x"): 7, b"k": 8, frozenset({1}): [9]},
        list(range(1000)),
        [2**64] * 1000,
        [0.1 * n for n in range(1000)],
        [math.nan, -0.0] * 500,
        [True] * 1000,
        [1, 1.0] * 500,
        dict.fromkeys(map(str, range(1000)), 0.5),
        set(range(1000)),
        tuple(float(n) for n in range(1000)),
        {"a": None, "b": bytes(2000), "c": "\ud800", "d": bytes(2000), "e": b"end"},
    ],
    ids=lambda value: f"{type(value).__name__}-{str(repr(value) if type(value) is not int else 'int')[:20]}",
)
def test_plain_value_arrives_exactly(value: object) -> None:
    assert fingerprint(receive(value)) == fingerprint(value)


numbers = st.integers() | st.floats() | st.complex_numbers() | st.booleans() | st.none()
texts = st.text(st.characters(exclude_categories=())) | st.binary() | st.text(min_size=60, max_size=1100)
keys = numbers | texts | st.tuples(numbers, texts) | st.frozensets(numbers)


def dicts_of_a_kind(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.dictionaries(keys, inner)
    return items.map(OrderedDict) | st.builds(defaultdict, st.sampled_from([None, *FACTORIES]), items)


plain_values = st.recursive(
    numbers | texts | st.lists(st.floats(), min_size=30) | st.binary(max_size=9).map(bytearray),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.sets(keys) | st.dictionaries(keys, inner) | dicts_of_a_kind(inner)
    ),
    max_leaves=30,
)


@settings(deadline=None)
@given(plain_values)
def test_any_plain_value_arrives_exactly(value: object) -> None:
    assert fingerprint(receive(value)) == fingerprint(value)


def test_dict_of_a_known_kind_stays_one() -> None:
    ordered = receive(OrderedDict([("b", 1), ("a", 2)]))
    ordered.move_to_end("b")
    assert type(ordered) is OrderedDict and list(ordered.items()) == [("a", 2), ("b", 1)]
    grouped = receive(defaultdict(list, k=[1]))
    grouped["new"].append(2)
    assert type(grouped) is defaultdict and grouped == {"k": [1], "new": [2]}
    assert [type(receive(defaultdict(factory))["missing"]) for factory in FACTORIES] == FACTORIES
    with pytest.raises(KeyError):
        receive(defaultdict(None))["missing"]
    own = receive(defaultdict(lambda: 0, k=1))
    assert type(own) is defaultdict and own == {"k": 1} and own.default_factory is None


def test_same_list_twice_is_not_taken_for_a_circle() -> None:
    shared = [1]
    assert receive([shared, {"k": shared}, shared]) == [[1], {"k": [1]}, [1]]


def test_bytearray_can_grow_while_its_bytes_wait_to_be_sent() -> None:
    value = bytearray(5000)
    _, buffers = pack(value, name="x")
    value += b"more"
    assert len(buffers[0]) == 5000


def test_small_values_share_one_buffer() -> None:
    value = [np.float64(1.5), b"bytes", torch.ones(3), 2**100] * 50
    assert len(pack(value, name="x")[1]) == 1
    assert fingerprint(receive(value)) == fingerprint(value)


# ---- numpy


STRINGS = np.array([["é", "a\ud800", ""], ["\0a", "bc", "\U0001f600"]])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype="i2").reshape(2, 3, 4),
        np.arange(24).reshape(2, 3, 4)[:, ::-2, 1:3],
        np.asfortranarray(np.random.default_rng(0).normal(size=(30, 40))),
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype=">c16"),
        np.array(1.5, dtype="f2"),
        np.zeros((0, 3)),
        np.zeros((3, 0, 2**40), dtype="u1"),
        np.array([True, False] * 2000),
        np.array(["2024-01-31T10:00", "NaT"], dtype="M8[m]"),
        np.array([3, -4], dtype=">m8[25us]"),
        np.array([1]).view("m8"),
        STRINGS,
        STRINGS.astype(">U3"),
        np.array([b"a\0b", b"", b"\xff"]),
        np.ndarray((3,), "S0", b""),
        np.broadcast_to(np.float32(1), (1000, 1000)),
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_array_arrives_exactly(array: np.ndarray[Any, Any]) -> None:
    received = receive(array)
    assert fingerprint(received) == fingerprint(array)
    assert received.flags.writeable


FIXED_SIZE = (
    arrays_of.boolean_dtypes()
    | arrays_of.integer_dtypes(endianness="?")
    | arrays_of.unsigned_integer_dtypes(endianness="?")
    | arrays_of.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | arrays_of.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | arrays_of.datetime64_dtypes(endianness="?")
    | arrays_of.timedelta64_dtypes(endianness="?")
    | arrays_of.byte_string_dtypes()
    | arrays_of.unicode_string_dtypes(endianness="?")
)


@settings(deadline=None)
@given(arrays_of.arrays(FIXED_SIZE, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=12)))
def test_any_array_arrives_exactly(array: np.ndarray[Any, Any]) -> None:
    assert fingerprint(receive(array)) == fingerprint(array)
    assert fingerprint(receive(array.T)) == fingerprint(array.T)


@pytest.mark.parametrize(
    "scalar",
    [
        np.float16(1.5),
        np.float64("nan"),
        np.int8(-1),
        np.bool_(True),
        np.complex64(1j),
        np.datetime64("2024-01-31"),
        np.timedelta64("NaT", "s"),
        np.array([-(2**63)]).view("m8")[0],  # NaT without a unit
        np.str_("a\0"),
        np.str_(""),
        np.str_("\ud800" * 100),
        np.bytes_(b"a\0"),
    ],
    ids=repr,
)
def test_numpy_scalar_arrives_as_the_same_scalar(scalar: np.generic) -> None:
    assert fingerprint(receive(scalar)) == fingerprint(scalar)
    assert fingerprint(receive({scalar: 1})) == fingerprint({scalar: 1})


def test_contiguous_array_is_not_copied() -> None:
    array = np.arange(1000.0)
    _, buffers = pack({"a": array}, name="x")
    assert np.shares_memory(np.frombuffer(buffers[0]), array)


def test_array_lives_in_a_writable_buffer_and_in_a_copy_of_another() -> None:
    description, buffers = pack(np.arange(1000.0), name="x")
    memory = bytearray(buffers[0])
    assert np.shares_memory(unpack(description, [memory]), np.frombuffer(memory))
    received: Any = unpack(description, [bytes(memory)])
    received[0] = 7
    assert received.sum() == np.arange(1000.0).sum() + 7


# ---- torch


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    raw = random.Random(0).randbytes(12 * dtype.itemsize)
    return torch.frombuffer(bytearray(12) if dtype == torch.bool else bytearray(raw), dtype=dtype).reshape(3, 4)


DENSE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.complex128),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_tensor_of_any_dense_dtype_arrives_exactly(dtype: torch.dtype) -> None:
    whole = tensor_of(dtype)
    for tensor in (whole, whole[1, 2], whole[:0], whole[0], whole[1:, 1:3], whole.T):
        expected = fingerprint(tensor.contiguous())
        assert fingerprint(receive(tensor)) == expected
        description, buffers = pack(tensor, name="x")
        assert fingerprint(unpack(description, [bytes(buffer) for buffer in buffers])) == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.tensor([1 + 2j]).conj().imag,  # contiguous, but its bytes have the wrong sign
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1).expand(1000, 5),
        torch.zeros(0, 2**40),
    ],
    ids=["conj", "neg", "one neg", "channels_last", "expanded", "empty"],
)
def test_tensor_of_any_layout_in_memory_arrives_as_its_values(tensor: torch.Tensor) -> None:
    received = receive(tensor)
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


def test_tensor_with_a_gradient_arrives_detached() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for tensor in (parameter, parameter * 2):
        received = receive(tensor)
        assert type(received) is torch.Tensor
        assert not received.requires_grad
        assert torch.equal(received, tensor.detach())


def test_state_of_model_and_optimizer_arrives() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 20)).sum().backward()
    optimizer.step()
    received = receive({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1})
    twin = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    twin.load_state_dict(received["model"])
    assert list(received["model"]) == list(model.state_dict())
    assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    torch.optim.AdamW(twin.parameters()).load_state_dict(received["optimizer"])


def test_torch_size_arrives_as_a_tuple() -> None:
    assert fingerprint(receive(torch.ones(2, 3).shape)) == fingerprint((2, 3))


def test_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.randn(16, 1024).to(torch.bfloat16)
    _, buffers = pack([tensor], name="x")
    assert torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() == tensor.data_ptr()


def test_buffer_keeps_the_memory_of_a_tensor_that_is_gone() -> None:
    _, buffers = pack(torch.full((8192,), 7), name="x")
    gc.collect()
    others = [torch.zeros(8192, dtype=torch.int64) for _ in range(20)]
    assert buffers[0].cast("q").tolist() == [7] * 8192
    del others


def test_tensor_lives_in_a_writable_buffer_and_in_a_copy_of_another() -> None:
    description, buffers = pack(torch.zeros(1000), name="x")
    memory = bytearray(buffers[0])
    received: Any = unpack(description, [memory])
    memory[:4] = struct.pack("<f", 1.5)
    assert received[0] == 1.5
    unwritable = bytes(memory)
    received = unpack(description, [unwritable])
    received[0] = 7
    assert unwritable[:4] == struct.pack("<f", 1.5)


def test_tensor_from_an_odd_address_is_aligned() -> None:
    description, buffers = pack(torch.arange(1000.0), name="x")
    received: Any = unpack(description, [memoryview(bytearray(b"." + buffers[0]))[1:]])
    assert received.data_ptr() % 4 == 0
    assert torch.equal(received, torch.arange(1000.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_on_a_gpu_arrives_on_the_cpu() -> None:
    tensor = torch.randn(300, 400, device="cuda").to(torch.bfloat16).T
    received = receive({"w": tensor, "z": torch.ones(2, dtype=torch.complex64, device="cuda").conj()})
    assert received["w"].device.type == "cpu"
    assert torch.equal(received["w"], tensor.cpu())
    assert torch.equal(received["z"], torch.ones(2, dtype=torch.complex64))


# ---- what cannot be transferred


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


@dataclasses.dataclass
class Config:
    lr: float


class Color(enum.IntEnum):
    RED = 1


class Runs:
    """An object for which pickle would run code on arrival."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


class Named(str):
    __slots__ = ()


def make_circle() -> list[Any]:
    circle: list[Any] = [1]
    circle.append({"back": circle})
    return circle


def make_ordered_circle() -> OrderedDict[str, Any]:
    circle: OrderedDict[str, Any] = OrderedDict()
    circle["back"] = circle
    return circle


def make_freed(left_bytes: int = 0) -> torch.Tensor:
    tensor = torch.ones(9)
    tensor.untyped_storage().resize_(left_bytes)
    return tensor


ONLY = "only numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays and torch tensors can"

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "function": (lambda: make_circle, f"x is a function and cannot travel: {ONLY}"),
    "lambda inside": (lambda: {"a": [1, lambda: 0]}, f"x['a'][1] is a function and cannot travel: {ONLY}"),
    "lambda in a set": (lambda: {len}, f"an element of x is a builtin_function_or_method and cannot travel: {ONLY}"),
    "lambda in a key": (lambda: [{(1, len): 2}], "a key of x[0][1] is a builtin_function_or_method and cannot travel"),
    "class": (lambda: Config, f"x is a type and cannot travel: {ONLY}"),
    "object": (object, f"x is an object and cannot travel: {ONLY}"),
    "reduce": (Runs, f"Runs and cannot travel: {ONLY}"),
    "generator": (lambda: (n for n in "ab"), "x is a generator and cannot travel: use list(x) instead"),
    "range": (lambda: range(3), "x is a range and cannot travel: use list(x) instead"),
    "namedtuple": (lambda: Point(1, 2), "Point and cannot travel: use x._asdict() instead"),
    "dataclass": (lambda: {"c": Config(1e-3)}, "Config and cannot travel: use dataclasses.asdict(x['c']) instead"),
    "enum": (lambda: Color.RED, "Color and cannot travel: use x.value instead"),
    "str subclass": (lambda: Named("a"), "Named and cannot travel: use str(x) instead"),
    "ordered circle": (
        make_ordered_circle,
        "x['back'] is a collections.OrderedDict and cannot travel: it contains itself",
    ),
    "counter": (lambda: collections.Counter("a"), "collections.Counter and cannot travel: use dict(x) instead"),
    "path": (lambda: pathlib.PurePosixPath("a"), "PurePosixPath and cannot travel: use str(x) instead"),
    "circle": (make_circle, "x[1]['back'] is a list and cannot travel: it contains itself"),
    "deep": (lambda: nested(64), "x is nested more than 64 deep: use a part of it"),
    "object array": (
        lambda: np.array([{}]),
        "numpy array of dtype object with 1 dimensions and cannot travel: use x.t",
    ),
    "structured": (lambda: np.zeros(2, "i4,f4"), "with 1 dimensions and cannot travel: use x.tolist() instead"),
    "longdouble": (lambda: np.longdouble(1), "cannot travel: use x.astype('float64') instead"),
    "clongdouble": (lambda: np.clongdouble(1), "cannot travel: use x.astype('complex128') instead"),
    "masked": (lambda: np.ma.array([1]), "MaskedArray and cannot travel: use x.filled() instead"),
    "matrix": (lambda: np.array([1]).view(np.recarray), "recarray and cannot travel: use numpy.asarray(x) instead"),
    "array of 40 dims": (lambda: np.zeros([1] * 40), "numpy array of dtype float64 with 40 dimensions"),
    "module": (lambda: [torch.nn.ReLU()], "ReLU and cannot travel: assign x[0].state_dict() to a variable and "),
    "parallelized": (
        lambda: parallel.WholeModel(torch.nn.ReLU(), device="cpu"),
        'WholeModel and cannot travel: run training.export_safetensors("out", x) on all ranks',
    ),
    "optimizer": (
        lambda: torch.optim.SGD([torch.ones(1)]),
        "x is a torch.optim.sgd.SGD and cannot travel: assign x.state_dict() to a variable and copy that instead",
    ),
    "dtype": (lambda: torch.float32, "x is a torch.dtype and cannot travel: use str(x) instead"),
    "device": (lambda: torch.device("cpu"), "x is a torch.device and cannot travel: use str(x) instead"),
    "sparse": (
        lambda: torch.eye(2).to_sparse(),
        "x is a tensor of layout torch.sparse_coo and cannot travel: use x.to_d",
    ),
    "empty and huge": (
        lambda: torch.empty(2**62, 0, 8),
        "x is a tensor of shape [4611686018427387904, 0, 8] and cannot",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "x is a tensor without data and cannot travel: it is on the meta"),
    "freed": (make_freed, "x is a tensor without data and cannot travel"),
    "shrunk tensor": (lambda: make_freed(32), "x is a tensor without data and cannot travel"),
    "bits": (
        lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8),
        "dtype torch.bits8 and cannot travel: use x.vi",
    ),
    "tensor of 40 dims": (lambda: torch.zeros([1] * 40), "x is a tensor of 40 dimensions"),
    "subclass": (torch.nn.UninitializedParameter, "UninitializedParameter and cannot travel: use a plain torch.Tensor"),
    "tensor as a key": (
        lambda: {torch.ones(1): 1},
        "a key of x is a torch.Tensor and cannot travel: such a key is found by its identity, which a copy lacks",
    ),
    "tensor in a set": (lambda: {(1, torch.ones(1))}, "an element of x[1] is a torch.Tensor and cannot travel"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_value_that_cannot_travel_is_refused_with_its_place_and_what_to_do(
    make: Callable[[], object], message: str
) -> None:
    value = make()
    with pytest.raises(ValueNotSupported) as caught:
        pack(value, name="x")
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore")  # torch warns that both are deprecated or experimental
def test_nested_and_quantized_tensors_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueNotSupported, match=r"x is a nested tensor and cannot travel: use list\(x.unbind\(\)\)"):
        pack(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), name="x")
    with pytest.raises(ValueNotSupported, match=r"x is a quantized tensor and cannot travel: use x.dequantize\(\)"):
        pack(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), name="x")


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_sharded_tensor_is_refused_with_both_ways_out() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueNotSupported) as caught:
        pack({"w": tensor}, name="x")
    assert "use x['w'].to_local() instead, or x['w'].full_tensor() called on every rank" in str(caught.value)


def test_name_in_a_message_is_the_users_expression() -> None:
    with pytest.raises(ValueNotSupported) as caught:
        pack([1, print], name="model.layers")
    assert str(caught.value).startswith("model.layers[1] is a builtin_function_or_method")


def test_key_too_long_for_a_message_is_shortened() -> None:
    with pytest.raises(ValueNotSupported) as caught:
        pack({10**5000: {"k" * 5000: print}}, name="x")
    assert len(str(caught.value)) < 500


def test_value_too_long_to_describe_is_refused() -> None:
    words = [f"{n:060}" for n in range(MAX_DESCRIPTION_BYTES // 63)]
    assert len(receive(words)) == len(words)
    with pytest.raises(
        ValueNotSupported, match=r"x needs a description of 8\d* bytes, the limit is 8388608: use numpy arrays"
    ):
        pack([*words, *words[:100]], name="x")
    pairs: list[Any] = [(1, 2)] * 200_000
    assert receive(pairs) == pairs
    with pytest.raises(ValueNotSupported, match=r"x needs a description of 1\d{6} values, the limit is 1048576"):
        pack([*pairs, *pairs[:50_000]], name="x")


def test_value_that_multiplies_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_ITEMS", 10_000)
    value: list[Any] = []
    for _ in range(16):
        value = [value, value]
    with pytest.raises(ValueNotSupported, match="x has more than 10000 items"):
        pack(value, name="x")


# ---- what a hostile sender may send


HOSTILE: dict[str, object] = {
    "no JSON": object(),
    "bytes": b"raw",
    "empty object": {},
    "two kinds": {"tuple": [], "set": []},
    "unknown kind": {"pickle": "gASVAAAA"},
    "no string kind": {1: []},
    "list as a kind": {"list": [1]},
    "tuple of a tuple": {"tuple": {"tuple": []}},
    "tuple of a string": {"tuple": "ab"},
    "tuple of bytes": {"tuple": {"bytes": 0}},
    "dict of strings": {"dict": [{"str": 1}, {"str": 1}]},
    "tuple of nothing": {"tuple": None},
    "dict of one list": {"dict": [[1]]},
    "dict of three lists": {"dict": [[], [], []]},
    "dict of an object": {"dict": {"a": 1}},
    "dict with a value too few": {"dict": [["a", "b"], [1]]},
    "dict with many values too few": {"dict": [["a"], {"int64": 40}]},
    "ordered dict of one list": {"OrderedDict": [[1]]},
    "ordered dict with a value too few": {"OrderedDict": [["a", "b"], [1]]},
    "defaultdict of two lists": {"defaultdict": [[], []]},
    "defaultdict of an object": {"defaultdict": {"int": 1}},
    "defaultdict with a value too few": {"defaultdict": ["int", ["a"], []]},
    "defaultdict of a list as factory": {"defaultdict": [["int"], [], []]},
    "size of a string": {"bytes": "12"},
    "size of a bool": {"bytes": True},
    "size of a float": {"bytes": 4.0},
    "size below zero": {"bytearray": -1},
    "size without end": {"str": 2**80},
    "size of thousands of digits": {"int": 10**5000},
    "count below zero": {"float64": -1},
    "count without end": {"int64": 2**61},
    "array of one": {"array": ["|u1"]},
    "array of three": {"array": ["|u1", [1], 0]},
    "array of an object": {"array": {"dtype": "|u1"}},
    "array without dtype": {"array": [None, [1]]},
    "array with a list as dtype": {"array": [["|u1"], [1]]},
    "array with a number as shape": {"array": ["|u1", 1]},
    "array with a string as shape": {"array": ["|u1", "12"]},
    "array with a shape of strings": {"array": ["|u1", ["1"]]},
    "array with a shape of bools": {"array": ["|u1", [True]]},
    "array with a shape of floats": {"array": ["|u1", [1.0]]},
    "array with a negative shape": {"array": ["|u1", [-1]]},
    "array with two negatives": {"array": ["|u1", [-2, -2]]},
    "array with 33 dims": {"array": ["|u1", [1] * 33]},
    "array with a huge dim": {"array": ["<f8", [2**62]]},
    "array that overflows": {"array": ["<f8", [2**32, 2**32]]},
    "array that overflows to 8": {"array": ["<f8", [2**63 + 1, 2**64]]},
    "empty array that overflows": {"array": ["<f8", [0, 2**62]]},
    "array with dims of thousands of digits": {"array": ["<f8", [10**5000, 10**5000]]},
    "tensor that overflows": {"tensor": ["float32", [2**31, 2**31, 2**31]]},
    "empty tensor that overflows": {"tensor": ["float32", [2**40, 0, 2**40]]},
    "tensor with 33 dims": {"tensor": ["float32", [0] * 33]},
    "tensor with a list as dtype": {"tensor": [["float32"], []]},
    "scalar of one element": {"scalar": {"array": ["|u1", [1]]}},
    "scalar of an int": {"scalar": 1},
    "scalar of a list": {"scalar": []},
    "scalar of a tuple": {"scalar": {"tuple": []}},
    "scalar of a scalar": {"scalar": {"scalar": "a"}},
    "scalar of an empty array": {"scalar": {"array": []}},
    "deep lists": nested(10_000),
    "deep lists by one": nested(64),
    "inside": [1, {"tuple": [{"dict": [["a"], [{"bytes": -1}]]}]}],
}
for _factory in [
    "",
    "object",
    "print",
    "exit",
    "os.system",
    "builtins.int",
    "Int",
    "lambda: 0",
    "frozenset",
    0,
    True,
    {},
]:
    HOSTILE[f"defaultdict of {_factory!r}"] = {"defaultdict": [_factory, [], []]}
for _dtype in ["object", "O", "|O", "|O8", "V8", "|V8", "f4", "=f4", "float32", "<f16", "<c32", "<i3", "|S", "<U", ""]:
    HOSTILE[f"array of {_dtype!r}"] = {"array": [_dtype, [1]]}
for _dtype in [
    "<M8[0D]",
    "<M8[x]",
    "<M8[99999999999D]",
    "|S-1",
    "|S9999999999",
    "<U999999999",
    "<i4,<f4",
    "|u1\n",
    "|S\u0661",
]:
    HOSTILE[f"array of {_dtype!r}"] = {"array": [_dtype, [0]]}
for _dtype in [
    "torch.float32",
    "torch.nn.Module",
    "nn",
    "os.system",
    "save",
    "load",
    "qint8",
    "bits8",
    "uint4",
    "object",
]:
    HOSTILE[f"tensor of {_dtype!r}"] = {"tensor": [_dtype, [1]]}


@pytest.mark.parametrize("description", HOSTILE.values(), ids=HOSTILE)
def test_malformed_description_is_a_wire_error_and_allocates_nothing(description: object) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            buffer_sizes(description)
        with pytest.raises(WireError):
            unpack(description, [])
        with pytest.raises(WireError):
            unpack(description, [bytearray(8)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000


def test_description_that_contains_itself_is_a_wire_error() -> None:
    circle: list[Any] = []
    circle.append({"tuple": circle})
    with pytest.raises(WireError, match="nested more than 64 deep"):
        buffer_sizes(circle)


def test_what_is_as_deep_as_allowed_arrives() -> None:
    assert receive(nested(63)) == nested(63)


def test_description_of_too_many_items_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_ITEMS", 10_000)
    buffer_sizes([0] * 9_999)
    with pytest.raises(WireError, match="more than 10000 items"):
        buffer_sizes([0] * 10_000)


def test_buffers_over_the_limit_are_a_wire_error() -> None:
    description = [{"array": ["<f8", [100, 100]]}, {"tensor": ["bfloat16", [10_000]]}, {"bytes": 1}]
    assert buffer_sizes(description, limit_bytes=100_016) == [16, 80_000, 20_000]
    with pytest.raises(WireError, match="more than 100015 bytes"):
        buffer_sizes(description, limit_bytes=100_015)


def test_many_small_sizes_cannot_pass_the_limit() -> None:
    with pytest.raises(WireError, match="more than 1000 bytes"):
        buffer_sizes([{"bytes": 1}] * 100, limit_bytes=1000)


def test_sizes_are_limited_unless_the_caller_says_otherwise() -> None:
    with pytest.raises(WireError, match="more than 4294967296 bytes"):
        buffer_sizes({"tensor": ["uint8", [2**32 + 1]]})
    assert buffer_sizes({"tensor": ["uint8", [2**40]]}, limit_bytes=2**40) == [2**40]


@pytest.mark.parametrize("change", ["short", "long", "missing", "extra", "swapped", "none"])
def test_buffers_that_do_not_fit_are_a_wire_error(change: str) -> None:
    description, packed = pack([b"small", torch.zeros(1000), np.zeros(3000, "u1")], name="x")
    small, tensor, array = (bytearray(buffer) for buffer in packed)
    buffers = {
        "short": [small, tensor[:-1], array],
        "long": [small, tensor + b".", array],
        "missing": [small, tensor],
        "extra": [small, tensor, array, bytearray()],
        "swapped": [small, array, tensor],
        "none": [],
    }[change]
    with pytest.raises(WireError, match="a value announces"):
        unpack(description, buffers)


@pytest.mark.parametrize(
    ("description", "raw", "message"),
    [
        ({"str": 1}, b"\xff", "invalid start byte"),
        ({"float": 9}, b"", "requires a buffer of 8 bytes"),
        ({"complex": 8}, b"", "requires a buffer of 16 bytes"),
        ({"array": ["|b1", [2]]}, b"\1\2", "an array of bool holds bytes that are neither 0 nor 1"),
        ({"tensor": ["bool", [2]]}, b"\1\xff", "a tensor of bool holds bytes that are neither 0 nor 1"),
        ({"array": ["<U1", [1]]}, b"\0\0\x11\0", "an array of strings holds an invalid character"),
        ({"array": [">U1", [1]]}, b"\0\x11\0\0", "an array of strings holds an invalid character"),
        ({"scalar": {"array": ["<U1", []]}}, b"\xff\xff\xff\xff", "an array of strings holds an invalid character"),
        ({"set": [[]]}, None, "unhashable type: 'list'"),
        ({"frozenset": [{"tuple": [{"set": []}]}]}, None, "unhashable type: 'set'"),
        ({"dict": [[{"array": ["|u1", [1]]}], [1]]}, b"", "unhashable type: 'numpy.ndarray'"),
        ({"dict": [[{"bytearray": 1}], [1]]}, b"", "unhashable type: 'bytearray'"),
    ],
    ids=str,
)
def test_raw_bytes_that_are_no_such_value_are_a_wire_error(
    description: object, raw: bytes | None, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        unpack(description, [] if raw is None else [raw.ljust(16, b"\0")])


def test_key_that_numpy_does_not_hash_is_a_wire_error() -> None:
    description = {"set": [{"scalar": {"array": ["<m8", []]}}]}
    with contextlib.suppress(WireError):  # older versions of numpy hash it
        unpack(description, [b"\1".ljust(16, b"\0")])


def test_hashes_are_not_counted_under_numbers_that_a_node_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different hashes can be chosen to collide in a dict: 87,380 of them took 17 s."""
    counted: list[int] = []

    class Counter(collections.Counter[int]):
        def update(self, numbers: Any = None, /, **options: Any) -> None:
            kept = list(numbers or ())
            counted.extend(kept)
            super().update(kept)

    monkeypatch.setattr(values.collections, "Counter", Counter)
    numbers = range(1000, 101_000)
    raw = struct.pack(f"<{len(numbers)}q", *numbers)
    for _ in range(2):
        assert unpack({"set": {"int64": len(numbers)}}, [raw]) == set(numbers)
    assert len(set(counted)) == 2 * len(numbers), "never the same"
    assert not set(counted) & set(numbers)


def test_keys_made_to_collide_are_a_wire_error() -> None:
    number = 20_000
    collide = [{"int": 16}] * number
    raw = b"".join((n * ((1 << 61) - 1)).to_bytes(16, "little") for n in range(number))  # all have the hash 0
    pair = [collide, {"int64": number}]
    for description in ({"set": collide}, {"dict": pair}, {"OrderedDict": pair}, {"defaultdict": [None, *pair]}):
        with pytest.raises(WireError, match="20000 keys or elements take too long to compare"):
            unpack(description, [raw] if "set" in description else [raw, bytes(8 * number)])
    alike = {"frozenset": [{"int": 16}] * 60}  # each is quick to make and slow to compare
    raw = b"".join((n * ((1 << 61) - 1)).to_bytes(16, "little") for n in range(60 * 30))
    with pytest.raises(WireError, match="30 keys or elements take too long to compare"):
        unpack({"set": [alike] * 30}, [raw])
    long = [{"int": 100_000}] * 20  # they share a hash, too, and differ only in their first digits
    raws = [((1 << 799_000) + n * ((1 << 61) - 1)).to_bytes(100_000, "little") for n in range(20)]
    with pytest.raises(WireError, match="20 keys or elements take too long to compare"):
        unpack({"set": long}, raws)
    many = {n << 40 for n in range(50_000)}
    assert receive(many) == many
    grid = {(x, y, z) for x in range(-9, 9) for y in range(-9, 9) for z in range(-9, 9)}
    assert receive(grid) == grid


EVERYTHING: list[Any] = [
    [None, True, 1, 2**70, 0.5, math.nan, 1j, "text", "\ud800", b"bytes", bytearray(b"more")],
    {(1, "a"): frozenset({2, 3}), "k": {4}, "numbers": list(range(40)), "floats": [0.5] * 40},
    [np.ones((2, 3)), np.array(["a", "b"]), np.array([True]), np.array(["2024"], "M8[D]"), np.array([b"x"])],
    [np.float64(1), np.str_("a"), np.bytes_(b"b"), np.datetime64("2024"), {np.int8(1): 2}],
    [OrderedDict(b=1, a=[2.5]), defaultdict(list, k=[1]), defaultdict(None, {(1, 2): {3}}), {"d": defaultdict(int)}],
    [torch.ones(2, 3), torch.tensor(True), torch.ones(300, dtype=torch.bfloat16), torch.zeros(0, 4)],
]
POISON: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2,
        3,
        8,
        33,
        2**31,
        2**63,
        10**400,
        0.5,
        math.nan,
        "",
        "a",
        "int64",
        "<f4",
        "|O",
        "float32",
    ),
    *("<U1", "|b1", "|S0", "<M8[s]", "bool", "object", [], {}, [[]], [0], [2, 3], [0, 2**61], [["<f4", [1]], 1]),
    *({"tuple": []}, {"list": []}, {"int64": 1}, {"str": 3}, {"array": ["|b1", [4]]}, {"tensor": ["bool", []]}),
    *(
        {"scalar": "a"},
        {"scalar": {"array": [">U1", []]}},
        {"set": [{"tensor": ["int8", [2]]}, 1]},
        {"set": [{"scalar": {"array": ["<m8", []]}}]},
        {"os.system": "ls"},
        {"defaultdict": ["os.system", [], []]},
        {"defaultdict": ["int", ["a"], [1]]},
        {"OrderedDict": [["a"], [1]]},
    ),
]


def mutate(node: Any, chance: random.Random) -> Any:
    """Return a copy of a description with poison in some places."""
    if chance.random() < 0.04:
        return chance.choice(POISON)
    if isinstance(node, list):
        items = [mutate(item, chance) for item in node]
        return items + items[-1:] if chance.random() < 0.03 else items
    if isinstance(node, dict):
        return {
            chance.choice(POISON_KINDS) if chance.random() < 0.05 else key: mutate(v, chance) for key, v in node.items()
        }
    return node


POISON_KINDS = [
    "tuple",
    "set",
    "dict",
    "OrderedDict",
    "defaultdict",
    "int",
    "float",
    "str",
    "bytes",
    "int64",
    "float64",
    "array",
    "tensor",
    "scalar",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EVERYTHING), st.randoms(use_true_random=False), st.booleans())
def test_mutated_description_is_a_value_or_a_wire_error(value: object, chance: random.Random, fits: bool) -> None:
    description, packed = pack(value, name="x")
    description = mutate(description, chance)
    try:
        sizes = buffer_sizes(description, limit_bytes=1 << 20)
        buffers = [chance.randbytes(size) for size in sizes] if fits else [bytes(buffer) for buffer in packed]
        received = unpack(description, buffers)
    except (WireError, ValueNotSupported):
        return
    repr(received)


# ---- with and without numpy and torch


def run_python(code: str, *, hidden: str = "") -> str:
    """Run code in a fresh interpreter in which the module ``hidden`` cannot be imported; returns what it prints."""
    lines = ["import json, sys", f"sys.modules[{hidden!r}] = None" if hidden else "", code]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def receive_elsewhere(value: object, *, hidden: str = "", before: str = "") -> str:
    description, buffers = pack(value, name="x")
    return run_python(
        f"{before}\n"
        f"from detrain_nb.values import unpack\n"
        f"from detrain_nb.errors import ValueNotSupported\n"
        f"try:\n"
        f"    value = unpack(json.loads({json.dumps(description)!r}), {[bytes(buffer) for buffer in buffers]!r})\n"
        f"    print(type(value).__module__, value.dtype, value.tolist())\n"
        f"except ValueNotSupported as exc:\n"
        f"    print(exc)",
        hidden=hidden,
    )


def test_plain_values_import_neither_numpy_nor_torch() -> None:
    code = (
        "from detrain_nb.errors import ValueNotSupported\n"
        "from detrain_nb.values import pack, unpack\n"
        "value = [1, 2.5, 'a', b'b', {'k': (1,)}, {2}, [0.5] * 100]\n"
        "description, buffers = pack(value, name='x')\n"
        "assert unpack(description, buffers) == value\n"
        "try:\n"
        "    pack([object()], name='x')\n"
        "except ValueNotSupported:\n"
        "    print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex64], ids=str)
def test_tensor_arrives_as_an_array_where_torch_is_missing(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 2], [3, 4]]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert receive_elsewhere(tensor, hidden="torch") == f"numpy {name} {tensor.tolist()}"


def test_tensor_that_numpy_cannot_hold_says_what_to_install() -> None:
    message = "the value holds a tensor of bfloat16, unknown to numpy: install torch here"
    assert receive_elsewhere(torch.ones(2, dtype=torch.bfloat16), hidden="torch") == message


def test_tensor_that_an_older_torch_cannot_hold_says_to_upgrade() -> None:
    older = "import torch; del torch.uint16"
    message = f"the value holds a tensor of uint16, unknown to torch {torch.__version__}: upgrade it"
    assert receive_elsewhere(torch.ones(2, dtype=torch.uint16), before=older) == message


@pytest.mark.parametrize("value", [np.ones(2), np.float32(1), np.str_("a")], ids=["array", "scalar", "string"])
def test_array_says_what_to_install_where_numpy_is_missing(value: object) -> None:
    message = "the value holds numpy arrays or numbers, or tensors: install numpy here"
    assert receive_elsewhere(value, hidden="numpy") == message


def test_tensors_travel_between_machines_that_have_torch_alone() -> None:
    code = (
        "import warnings\n"
        "warnings.simplefilter('ignore')  # torch says that numpy is missing\n"
        "import torch\n"
        "from detrain_nb.values import pack, unpack\n"
        "value = [torch.arange(1000.0), torch.ones(2, dtype=torch.bfloat16), torch.tensor(True)]\n"
        "description, buffers = pack(value, name='x')\n"
        "print(all(map(torch.equal, value, unpack(description, buffers))), sys.modules['numpy'])"
    )
    assert run_python(code, hidden="numpy") == "True None"
