"""The variables of two ranks in one table: whether they agree, without running code of the user's classes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, DetrainError, SessionError, SpecError
from detrain_nb.session.running.agreement import agree
from detrain_nb.session.running.variable_facts import Layout, RankVariable
from detrain_nb.session.running.variable_table import gather_variables
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.values import pack
from detrain_nb.wire import (
    AskVariables,
    CellDone,
    Message,
    Piece,
    RequestDone,
    RequestFailed,
    RunCell,
    Value,
    json_body,
)

from .hostile import INFO, FakeNode
from .inside import state_of
from .soon import assert_soon

pytestmark = pytest.mark.timeout(120)

LONG_S = 60.0  # only a rank that does not answer is waited for so long

DEFINE = """
import os, time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

same, own = torch.arange(12.).reshape(3, 4), torch.ones(3) * rank
count, words, losses = 3, "hello", [4.5, 3.25, 2.0, float(rank)]
odd = torch.zeros(2, 2 + rank)
if rank == 1:
    lonely = 1
mesh = init_device_mesh("cpu", (2,))
split = distribute_tensor(torch.arange(8.).reshape(4, 2), mesh, [Shard(0)])
twice = distribute_tensor(torch.arange(8.).reshape(4, 2), mesh, [Replicate()])
broken = distribute_tensor(torch.arange(8.).reshape(4, 2), mesh, [Replicate()])
broken.to_local()[0, 0] = 10 * rank
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False))
_hidden = 1

def step(x, y=2):
    return x + y

class Model:
    pass
"""

HOSTILE = """
log = []

def run(name):
    log.append(name)
    raise RuntimeError(name)

class Meta(type):
    def __instancecheck__(cls, value):
        run("__instancecheck__")

class Evil(metaclass=Meta):
    __repr__ = __str__ = __len__ = __hash__ = __eq__ = __bool__ = __iter__ = lambda self, *a: run("method")
    shape = dtype = device = nbytes = __class__ = __dict__ = property(lambda self: run("property"))

    def __getattribute__(self, name):
        run(name)

class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        run("__torch_function__")
    shape = property(lambda self: run("shape"))

class Dispatched(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        run("__torch_dispatch__")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 4)
        self.is_made = True
    def __getattr__(self, name):
        return super().__getattr__(name) if "is_made" not in self.__dict__ else run(name)
    parameters = named_parameters = buffers = state_dict = children = extra_repr = lambda self, *a: run("module")

class Text(str):
    __repr__ = __str__ = __len__ = __hash__ = __eq__ = encode = lambda self, *a: run("str")

class Keys(dict):
    __repr__ = __len__ = __iter__ = items = keys = values = lambda self, *a: run("dict")

class Named:
    pass

class Getting(dict):
    get = __getitem__ = lambda self, *a: run("dict.get")

Named.__name__ = Text("Named")
plain, optimizer = torch.nn.Linear(3, 4), torch.optim.SGD([torch.ones(3)])
plain.__dict__, optimizer.__dict__ = Getting(plain.__dict__), Getting(optimizer.__dict__)
named = Named()
named.evil, named.text = Evil(), Text("x")
evil, loud, dispatched, module = Evil(), torch.ones(3).as_subclass(Loud), Dispatched(), Net()
text, keys, inside = Text("x"), Keys(a=1), {"a": [Evil(), Text("y")], "b": (Keys(),)}
log.clear()
seen = log
"""


@pytest.fixture(scope="module")
def defined(session: Session) -> Session:
    session.run_cell(DEFINE)
    return session


@pytest.fixture
def run_beside(session: Session) -> Iterator[Callable[[int], None]]:
    """A function that runs a cell on a rank, in a thread, until the test ends; it returns once the cell runs."""
    going, thread = threading.Event(), threading.Thread()

    class Eyes(CellObserver):
        def output(self, rank: int, stream: str, text: str) -> None:
            going.set()

    def run_until_stopped(rank: int) -> None:
        with contextlib.suppress(CellInterrupted):
            session.run_cell("print('runs')\nwhile True: time.sleep(0.01)", ranks=rank, observer=Eyes())

    def run(rank: int) -> None:
        nonlocal thread
        thread = threading.Thread(target=run_until_stopped, args=(rank,))
        thread.start()
        assert going.wait(30)

    yield run
    session.stop_cells()
    thread.join(30)
    assert not thread.is_alive()


def test_table_says_what_each_is_and_whether_ranks_agree(defined: Session) -> None:
    found = defined.variables()
    names = "Model broken count lonely losses mesh net odd own same split step twice words"
    assert " ".join(row.name for row in found.rows) == names
    told = {row.name: (row.type, row.value, row.dtype, row.bytes, row.words) for row in found.rows}
    assert told["same"] == ("Tensor", "[3, 4]", "float32", 48, "same on 2")
    assert told["own"] == ("Tensor", "[3]", "float32", 12, "differs on every rank")
    assert told["count"] == ("int", "3", "", None, "same on 2")
    assert told["words"][:2] == ("str, 5", "'hello'")
    assert told["losses"][:2] == ("list, 4", "[4.5, 3.25, 2.0, …]")
    assert told["losses"][-1] == "differs on every rank"
    assert told["odd"] == ("Tensor", "[2, 2] … [2, 3]", "float32", 24, "differs on every rank")
    assert told["lonely"][-1] == "only on 1"
    assert told["net"][:3] == ("Sequential", "16 parameters", "float32, int64"), "what a norm counts is none"
    assert [row[1:] for row in defined.preview("net").rows] == [("Linear", "16"), ("BatchNorm1d", "0")]
    assert told["net"][-1] == "differs on every rank", "each rank has seeds of its own"
    assert told["step"] == ("function", "(x, y)", "", None, "same on 2")
    assert (told["Model"][0], told["Model"][-1]) == ("class", "not compared")
    assert found.silent == {} and found.left_out == 0 and found.ranks == (0, 1)


def test_distributed_tensors_tell_shards_and_copies(defined: Session) -> None:
    found = defined.variables(["split", "twice", "broken"])
    assert {row.name: (row.type, row.value, row.state, row.words) for row in found.rows} == {
        "split": ("DTensor", "[4, 2]", "shards", "2 shards"),
        "twice": ("DTensor", "[4, 2]", "shards", "2 copies"),
        "broken": ("DTensor", "[4, 2]", "differ", "copies differ on 0-1"),
    }
    of_rank_1 = found["split"].on[1]
    assert of_rank_1.local == (2, 2) and of_rank_1.bytes == 16
    assert of_rank_1.layout is not None and of_rank_1.layout.at == (1,)


def test_some_are_asked_for_by_name_or_pattern_and_filtered_by_text_and_state(defined: Session) -> None:
    assert [row.name for row in defined.variables("lo*").rows] == ["lonely", "losses"]
    assert [row.name for row in defined.variables(["own", "nothing"], ranks=1).rows] == ["own"]
    assert [row.name for row in defined.variables().filter("TENSOR", state="shards").rows] == ["split", "twice"]
    with pytest.raises(KeyError):
        defined.variables("own")["same"]
    with pytest.raises(SpecError, match="rank 2"):
        defined.variables(ranks=2)
    with pytest.raises(SpecError, match="limit_s"):
        defined.variables(limit_s=0)


def test_table_is_text_and_html_with_the_same_cells(defined: Session) -> None:
    found = defined.variables(["own", "same"])
    title, head, own, same = repr(found).splitlines()
    assert title.startswith("2 names on 2 ranks · read at ")
    assert head.split() == ["name", "type", "shape", "or", "value", "dtype", "device", "bytes", "ranks"]
    assert " ".join(own.split()) == "own Tensor [3] float32 cpu 12 B ≠ differs on every rank"
    assert same.endswith("= same on 2")
    assert found._repr_html_().count("<tr>") == 3
    long = replace(found["own"], value="x" * 1000)
    assert long.cells()[2] == "x" * 39 + "…" and long.value == "x" * 1000


def test_path_is_written_out(defined: Session) -> None:
    defined.run_cell("import pathlib; where = pathlib.Path('/data/images')")
    assert (found := defined.variables("where")["where"]).value == "/data/images" and found.state == "same"
    defined.run_cell("del where")


def test_a_tensor_without_dimensions_has_its_number(defined: Session) -> None:
    defined.run_cell(
        "loss = torch.tensor(2.1 + rank, requires_grad=True)\n"
        "freed = torch.tensor(1.0); freed.untyped_storage().resize_(0)\n"
        "tiny = torch.zeros((), dtype=torch.uint8).view(torch.float8_e8m0fnu)"
    )
    found = defined.variables(["loss", "freed", "tiny"])
    assert (found["loss"].value, found["freed"].value) == ("2.1 … 3.1", "[]")
    assert found["tiny"].dtype == "float8_e8m0fnu" and found["loss"].on[1].shape == ()
    defined.run_cell("del loss, freed, tiny")


def test_preview_is_a_corner_with_statistics_and_no_more(defined: Session) -> None:
    defined.run_cell("wide = torch.arange(4000.).reshape(40, 100); wide[1, 2], wide[30, 3] = torch.nan, -torch.inf")
    seen = defined.preview("wide", 1)
    assert (len(seen.rows), len(seen.columns), seen.note) == (5, 7, "first 5 x 6 of 40 x 100")
    assert seen.rows[1][:4] == ("1", "100.0000", "101.0000", "nan")
    assert (seen.nans, seen.infinite, seen.facts["max"]) == (1, 1, "3999.0000")
    assert sum(seen.bins) == 3998
    assert seen.about.digest == defined.variables("wide")["wide"].on[1].digest
    assert "wide on rank 1: Tensor, [40, 100], float32, cpu, 16 kB" in repr(seen)
    defined.run_cell("packed = torch.tensor([0x21, 0xF0], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)")
    packed = defined.preview("packed")
    assert packed.rows == (("0", "0.5000", "1.0000", "0", "-6.0000"),) and packed.facts["min"] == "-6.0000"
    assert seen._repr_html_().count("<tr>") == 6


@pytest.mark.parametrize(
    "code, rows, text, note",
    [
        ("list(range(1000))", (10, 2), "", "first 10 of 1,000 items"),
        ("{'a': [1, 2], 'b': None}", (2, 2), "", "all 2 items"),
        ("'line\\n' * 1000", (0, 0), "line\n" * 200, "first 1,000 of 5,000 characters"),
        ("torch.tensor(3)", (1, 2), "", "all of 1 number"),
        ("torch.empty(0, 3)", (0, 0), "", "all of 0 x 3"),
        ("torch.ones(2, 3, 4, 5)", (4, 6), "", "first 4 x 5 of 2 x 3 x 4 x 5"),
        ("torch.ones(3, dtype=torch.bfloat16)", (1, 4), "", "all of 3"),
        ("torch.ones(3, 3).to(torch.float8_e4m3fn)", (3, 4), "", "all of 3 x 3"),
        (
            "torch.zeros(2, 4, 3).byte().view(torch.float4_e2m1fn_x2)",
            (4, 7),
            "",
            "first 4 x 6 of 2 x 4 x 6",
        ),
        ("torch.ones(3, dtype=torch.complex64)", (1, 4), "", "all of 3"),
        ("torch.ones(7)", (1, 7), "", "first 6 of 7"),
        ("__import__('numpy').arange(6)", (1, 7), "", "all of 6"),
        ("__import__('numpy').ones(3, dtype='g')", (1, 4), "", "all of 3, read as float64"),
        ("__import__('numpy').frombuffer(b'read-only', dtype='u1')", (1, 7), "", "first 6 of 9"),
        ("__import__('numpy').ones((4, 6, 3), dtype='u1')[..., ::-1]", (5, 4), "", "first 5 x 3 of 4 x 6 x 3"),
        ("__import__('numpy').zeros(3, dtype='u1, f4')['f1']", (1, 4), "", "all of 3"),
        ("torch.nn.Sequential(torch.nn.Linear(2, 3))", (1, 3), "", "1 module"),
        ("torch.eye(3).to_sparse()", (0, 0), "", "a tensor without data, or one that is not dense, has no preview"),
        (
            "(shrunk := torch.ones(1 << 22), shrunk.untyped_storage().resize_(16))[0]",
            (0, 0),
            "",
            "a tensor without data, or one that is not dense, has no preview",
        ),
        ("3", (0, 0), "3", ""),
    ],
)
def test_preview_of(session: Session, code: str, rows: tuple[int, int], text: str, note: str) -> None:
    ran = session.run_cell(f"it = {code}", ranks=0)
    seen = session.preview("it")
    session.run_cell("it", ranks=0)  # by then all earlier output has arrived
    assert ran.cell not in session.log.printed, "nothing is printed by it"
    assert (len(seen.rows), len(seen.columns) if seen.rows else 0) == rows
    assert (seen.text, seen.note) == (text, note)
    assert repr(seen).startswith("it on rank 0: ")


def test_what_is_no_tensor_and_no_plain_value_is_told_in_short_and_not_offered_to_be_pulled(session: Session) -> None:
    session.run_cell("""
import pandas
from torch.distributed.device_mesh import init_device_mesh
table = pandas.DataFrame({"a": [1, 2], "b" * 30: 0.5, 3: "x", "d": None})
series_of_nothing = pandas.DataFrame()
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
optimizer = torch.optim.SGD([torch.ones(3)], lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
optimizer.step(); scheduler.step()
class Client:
    def __init__(self):
        self.retries, self.rate, self.key, self.inner, self._hidden, self.last = 3, 0.1, "sk-secret", table, 1, None
client = Client()
""")
    names = ["table", "series_of_nothing", "mesh", "scheduler", "client"]
    told = {row.name: row.value for row in session.variables(names).rows}
    assert told == {
        "table": "[2, 4] a, bbbbbbbbbbbbbbbbbbb…, 3, …",
        "series_of_nothing": "[0, 0]",
        "mesh": "cpu, dp=2 x tp=1",
        "scheduler": "step=1, lr=0.05",
        "client": "retries=3, rate=0.1, inner=DataFrame, …",
    }
    seen = session.preview("table")
    assert [row[1] for row in seen.rows][:2] == ["int64", "float64"] and seen.note == "all 4 columns"
    assert session.preview("client").text == "retries=3, rate=0.1, inner=DataFrame, last=None"
    assert not any(session.preview(name).travels for name in names)
    session.run_cell("plain, scalar = [1], __import__('numpy').float32(1)")
    assert session.preview("plain").travels and session.preview("scalar").travels


def test_array_with_a_mask_is_not_compared(session: Session) -> None:
    session.run_cell("import numpy; masked = numpy.ma.array([1, 2], mask=[rank, 1 - rank])")
    row = session.variables("masked")["masked"]
    assert (row.words, row.on[0].why) == ("not compared", "MaskedArray is a custom class")
    assert (session.preview("masked").rows, session.preview("masked").note[:16]) == ((), "MaskedArray has ")


def test_nothing_of_the_users_classes_is_run(session: Session) -> None:
    session.run_cell(HOSTILE)
    names = ["evil", "loud", "dispatched", "module", "text", "keys", "inside", "Evil", "Meta"]
    names += ["named", "plain", "optimizer"]
    found = {row.name: row for row in session.variables(names).rows}
    assert sorted(found) == sorted(names)
    assert (found["loud"].type, found["loud"].value, found["loud"].words) == ("Loud", "[3]", "same on 2")
    assert (found["module"].type, found["module"].value) == ("Net", "16 parameters")
    assert {found[name].words for name in ("evil", "dispatched", "text", "keys", "inside", "Evil")} == {"not compared"}
    assert found["inside"].value == "{'a': [Evil, Text], 'b': (Keys)}"
    assert found["named"].value == "evil=Evil, text=Text"
    assert found["evil"].on[0].why == "Evil is a custom class"
    for name in names:
        assert session.preview(name, 0).name == name
    assert session.pull("seen", ranks=0)[0] == [], "code of the user's ran"
    with pytest.raises(DetrainError):
        session.run_cell("repr(evil)", ranks=0)
    assert session.pull("seen", ranks=0)[0], "it is noticed where it does run"


def test_busy_rank_is_named_at_once_and_the_others_are_shown(
    session: Session, run_beside: Callable[[int], None]
) -> None:
    session.run_cell("import time; here = 1")
    run_beside(1)
    began = time.monotonic()
    found = session.variables("here", limit_s=LONG_S)
    with pytest.raises(SessionError, match=r"^rank 1 is busy: running cell \d+$"):
        session.preview("here", 1, limit_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2, "it was waited for"
    assert found.ranks == (0,) and found["here"].words == "on 0"
    assert repr(found).splitlines()[1].startswith("rank 1 is busy: running cell ")


def test_preview_of_what_is_not_there_says_what_is_near(session: Session) -> None:
    session.run_cell("gradient = 1")
    with pytest.raises(SessionError, match=r"^rank 0: there is no variable 'gradent': did you mean 'gradient'\?$"):
        session.preview("gradent")


def test_of_very_many_names_the_first_are_shown_and_the_rest_counted(session: Session) -> None:
    session.run_cell("globals().update({f'many_{n:05}': n for n in range(10_000)})")
    try:
        found = session.variables("many_*")
        assert (len(found), found.left_out) == (2000, 8000)
        assert "8,000 more names: select some by name or pattern, such as x*" in repr(found)
        assert len(repr(found).splitlines()) < 300
        assert len(session.variables("many_0999*")) == 10
    finally:
        session.run_cell("for name in [n for n in globals() if n.startswith('many_')]: del globals()[name]")


def test_huge_values_are_compared_in_a_sample_and_said_to_be(session: Session) -> None:
    session.run_cell("huge, long, text = torch.zeros(1 << 28), list(range(3_000_000)), 'x' * (64 << 20)")
    session.run_cell("wide, block = torch.nn.Module(), torch.nn.Linear(2, 2, bias=False)\nblock.weight.data.zero_()")
    session.run_cell("wide._modules = {str(n): block for n in range(200_000)}")
    try:
        found = session.variables(["huge", "long", "text", "wide"], limit_s=LONG_S)
        assert [row.words for row in found.rows] == ["same on 2 (sampled)"] * 4
        assert found["wide"].value == "at least 4 parameters"
        seen = session.preview("wide")
        assert (seen.note, seen.rows[0]) == ("first 10 of at least 50,001 modules", ("0", "Linear", "4"))
        assert found["huge"].bytes == 1 << 30
        session.run_cell("huge += rank")
        assert session.variables("huge")["huge"].words == "differs on every rank"
        assert session.preview("huge", 1).sampled == 1 << 16
    finally:
        session.run_cell("del huge, long, text, wide, block")


def test_what_a_view_shows_many_times_counts_once(session: Session) -> None:
    session.run_cell("import numpy\nstretched = torch.ones(3, 1).expand(3, 1 << 30)")
    session.run_cell("stretched_array = numpy.broadcast_to(numpy.ones(2), (1 << 20, 2))")
    found = session.variables("stretched*")
    assert (found["stretched"].value, found["stretched"].bytes) == ("[3, 1073741824]", 12)
    assert found["stretched_array"].bytes == 16


def test_views_with_overlaps_count_each_number_once(session: Session) -> None:
    """The oracle: the number of distinct values in the same view of a tensor of distinct values."""
    session.run_cell("import numpy")
    flat, image = "torch.arange(400)", "torch.arange(400).reshape(20, 20)"
    views = [
        f"{flat}.unfold(0, 8, 1)",
        f"{flat}.unfold(0, 8, 3)",
        f"{flat}.unfold(0, 3, 8)",
        f"{flat}.unfold(0, 50, 2)[:, ::2]",
        f"{image}.unfold(0, 5, 2).unfold(1, 5, 1)",
        f"{image}.unfold(1, 6, 3).expand(4, -1, -1, -1)",
        f"{flat}[:0].expand(3, 0)",
        f"numpy.lib.stride_tricks.sliding_window_view({flat}.numpy()[::-1], 10)",
    ]
    session.run_cell("views = dict(" + ", ".join(f"view_{n}={view}" for n, view in enumerate(views)) + ")")
    session.run_cell("globals().update(views)")
    different = session.run_cell("[len(set(view.reshape(-1).tolist())) for view in views.values()]").values[0]
    found = session.variables("view_*")
    assert [found[f"view_{n}"].bytes for n in range(len(views))] == [8 * count for count in different]


def test_dtypes_that_torch_can_hardly_use_are_shown_as_their_memory(session: Session) -> None:
    names = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)] + ["bits8"]
    names = [name for name in names if hasattr(torch, name)]
    made = "torch.tensor([3, 250], dtype=torch.uint8).view(getattr(torch, name))"
    session.run_cell(f"globals().update({{'odd_' + name: {made} for name in {names}}})")
    found = session.variables("odd_*")
    for name in names:
        assert found[f"odd_{name}"].words == "same on 2"
        seen = session.preview(f"odd_{name}")
        assert seen.rows == (("0", "3", "250"),)
        assert seen.note == f"all of 2, raw memory, as torch cannot read {name}"


def test_names_that_are_none_are_only_counted(session: Session) -> None:
    session.run_cell("globals().update({'a b': 1, 'x' * 1000: 2, 3: 4, 'naïve': 5, 'x\\u200by': 6})")
    try:
        found = session.variables()
        assert "naïve" in [row.name for row in found.rows]
        assert all(row.name.isidentifier() for row in found.rows)
        assert found.left_out == 3
    finally:
        session.run_cell("for name in ['a b', 'x' * 1000, 3, 'naïve', 'x\\u200by']: del globals()[name]")


# ---- whether ranks agree


def _row(digest: str = "aa", **other: Any) -> RankVariable:
    said = {"type": "Tensor", "value": "", "shape": (3,), "dtype": "float32", "device": "cpu", "bytes": 12}
    return RankVariable(**{**said, "digest": digest, "is_sample": False, "why": "", **other})


@pytest.mark.parametrize(
    "on, agreed",
    [
        ([_row()] * 4, ("same", "same on 4")),
        ([_row(is_sample=True)] * 4, ("same", "same on 4 (sampled)")),
        ([_row(), _row(), _row("bb"), _row()], ("differ", "differs on 2")),
        ([_row(), _row(), _row("bb"), _row("bb")], ("differ", "2 values on 4")),
        ([_row(), _row("bb"), _row("cc"), _row("dd")], ("own", "differs on every rank")),
        ([_row(), _row(), _row(), _row(shape=(4,))], ("differ", "differs on 3")),
        ([_row(), _row(), _row(""), _row()], ("other", "not compared")),
        ([_row(""), _row(""), _row(""), _row("", type="int")], ("differ", "differs on 3")),
        ([_row(), None, _row(), None], ("partly", "only on 0, 2")),
    ],
)
def test_agreement_of(on: list[RankVariable | None], agreed: tuple[str, str]) -> None:
    assert agree({rank: row for rank, row in enumerate(on) if row}, range(4)) == agreed


def test_copies_of_one_part_that_are_not_like_most_are_named() -> None:
    def on(digests: str) -> dict[int, RankVariable]:
        """One rank for each digest: the first half of the ranks has copies of shard 0, the second half of shard 1."""
        size = len(digests) // 2
        layouts = [Layout((2, size), ("S(0)", "R"), ("shard", "copy"), (n // size, n % size)) for n in range(2 * size)]
        return {rank: _row(digest * 2, layout=layouts[rank]) for rank, digest in enumerate(digests)}

    assert agree(on("aabb"), range(4)) == ("shards", "2 shards, 2 copies")
    assert agree(on("aaabbc"), range(6)) == ("differ", "copies differ on 5")
    assert agree(on("acbb"), range(4)) == ("differ", "copies differ on 0-1")


def test_devices_of_one_kind_are_one_word() -> None:
    said = {rank: {"x": _row(device=f"cuda:{rank}", bytes=1 << 30)} for rank in range(2)}
    found = gather_variables(said, {}, left_out=0, most=10)
    assert found["x"].device == "cuda"
    assert "2.15 GB on GPUs" in found.title


# ---- a rank that is not trusted


@pytest.fixture
def pair() -> Iterator[tuple[Session, FakeNode, FakeNode]]:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    for node in (good, bad):
        node.attached = replace(node.attached, info={**INFO, "tells_variables": True})
    session = Session.attach("mine", nodes=[good, bad])
    yield session, good, bad
    session.detach()


def test_rank_of_an_earlier_release_is_not_asked() -> None:
    old, older = FakeNode("old", 0), FakeNode("older", 1)
    session = Session.attach("theirs", nodes=[old, older])
    old.answers[AskVariables] = older.answers[AskVariables] = lambda message: [Value(0, 1, "it would hang up", b"")]
    assert "ranks 0-1 are from an earlier release" in repr(session.variables())
    with pytest.raises(SessionError, match="rank 0 is from an earlier release"):
        session.preview("x")
    assert session.is_alive
    session.detach()


def _say(rank: int, value: Any) -> Callable[[Any], list[Message]]:
    def answer(message: Any) -> list[Message]:
        description, buffers = pack(value, name="it")
        sent = [Value(rank, message.request, AskVariables.ANSWER, json_body(description))]
        pieces = [Piece([rank], message.request, AskVariables.ANSWER, n, bytes(each)) for n, each in enumerate(buffers)]
        return [*sent, *pieces, RequestDone(rank, message.request)]

    return answer


ROW = {"type": "int", "value": "3", "shape": None, "dtype": "", "device": "", "bytes": None}
ROW |= {"digest": "ab12", "is_sample": False, "why": ""}
GOOD = {"rows": {"x": ROW}, "left_out": 0}
LAYOUT = {"mesh": [2], "placements": ["S(0)"], "kinds": ["shard"], "at": [0]}


@pytest.mark.parametrize(
    "said",
    [
        3,
        {"rows": [], "left_out": 0},
        {"rows": {}},
        {"rows": {}, "left_out": -1},
        {"rows": {f"x{n}": ROW for n in range(2001)}, "left_out": 0},
        *({"rows": {"x": row}, "left_out": 0} for row in (3, {}, {**ROW, "type": 3}, {**ROW, "bytes": -1})),
        *({"rows": {"x": {**ROW, "shape": shape}}, "left_out": 0} for shape in ("x", [-1], [1.0], [True], [1] * 40)),
        *({"rows": {"x": {**ROW, "digest": digest}}, "left_out": 0} for digest in (None, "<b>", "a" * 100)),
        *(
            {"rows": {"x": {**ROW, "layout": {**LAYOUT, **wrong}}}, "left_out": 0}
            for wrong in ({"mesh": [2, 2]}, {"mesh": [1 << 40]}, {"kinds": ["evil"]}, {"at": [0, 0]})
        ),
    ],
)
def test_rank_that_says_what_no_rank_says_is_not_believed(pair: tuple[Session, FakeNode, FakeNode], said: Any) -> None:
    session, good, bad = pair
    good.answers[AskVariables], bad.answers[AskVariables] = _say(0, GOOD), _say(1, said)
    found = session.variables()
    assert found.ranks == (0,) and found["x"].value == "3"
    assert found.silent[1].startswith("sending invalid data: ")
    with pytest.raises(SessionError, match="rank 1 is sending invalid data"):
        session.preview("x", 1)
    assert session.run_cell("1", ranks=1).ranks == (1,)


def test_words_of_a_rank_are_cleaned_and_bounded(pair: tuple[Session, FakeNode, FakeNode]) -> None:
    session, good, bad = pair
    evil = "<script>\x1b]52;c;x\x07\n\u202e" + "x" * 100_000
    row = {**ROW, **dict.fromkeys(("type", "value", "dtype", "device", "why"), evil)}
    rows = {"x": row, "evil name": row, "<b>": row, "x\u200by": row, "y" * 100: row}
    good.answers[AskVariables], bad.answers[AskVariables] = _say(0, GOOD), _say(1, {"rows": rows, "left_out": 0})
    found = session.variables()
    assert [row.name for row in found.rows] == ["x"] and found.left_out == 4
    for shown in (repr(found), found._repr_html_()):
        assert not {"\x1b", "\x07", "\u202e"} & set(shown) and len(shown) < 5000
    assert "<script>" not in found._repr_html_()
    preview = {**row, "columns": [evil], "rows": [[evil]], "note": evil, "facts": {"min": evil, evil: "1"}}
    bad.answers[AskVariables] = _say(1, preview)
    seen = session.preview("x", 1)
    assert list(seen.facts) == ["min"]
    for shown in (repr(seen), seen._repr_html_()):
        assert not {"\x1b", "\x07", "\u202e"} & set(shown) and len(shown) < 10_000
    assert "<script>" not in seen._repr_html_()


def test_rank_that_announces_gigabytes_refuses_or_is_silent_costs_nothing(
    pair: tuple[Session, FakeNode, FakeNode],
) -> None:
    session, good, bad = pair
    good.answers[AskVariables] = _say(0, GOOD)
    bad.answers[AskVariables] = lambda message: [RequestFailed(1, message.request, "no\x1b[2J\nrank 0: evil")]
    assert "\nrank 1: no" in repr(session.variables()) and "\nrank 0: evil" not in repr(session.variables())
    bad.answers[AskVariables] = lambda message: []
    assert session.variables(limit_s=1.0).silent == {1: "silent: no answer within 1 s"}
    bad.answers[AskVariables] = lambda message: [RequestDone(1, message.request)]
    assert session.variables().silent[1] == "sending invalid data: rank 1 did not send variables"
    huge = json_body({"bytes": 1 << 30})
    bad.answers[AskVariables] = lambda message: [Value(1, message.request, AskVariables.ANSWER, huge)]
    assert session.variables(limit_s=2).ranks == (0,)
    assert 1 in state_of(session).lost_nodes, "what announces more than was asked for is hung up on"


def test_rank_that_begins_a_cell_meanwhile_is_not_waited_for(pair: tuple[Session, FakeNode, FakeNode]) -> None:
    session, good, bad = pair
    begun: list[int] = []
    thread = threading.Thread(target=lambda: session.run_cell("1", ranks=1))

    def begin_instead(message: Message) -> list[Message]:
        thread.start()
        return []

    def note(message: Any) -> list[Message]:
        begun.append(message.cell)
        return []

    good.answers[AskVariables], bad.answers[AskVariables], bad.answers[RunCell] = _say(0, GOOD), begin_instead, note
    began = time.monotonic()
    found = session.variables(limit_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2, "it was waited for"
    assert_soon(lambda: bool(begun))  # the notebook knows the cell before the rank receives it
    assert found.silent[1] == f"busy: running cell {begun[0]}" and len(found) == 1
    bad.say(CellDone(1, begun[0], 0.1, True, False, b""))
    thread.join(20)
    assert not thread.is_alive()
