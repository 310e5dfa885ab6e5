"""Judgement of which ranks wait or compute, and which collectives differ, from the evidence of all ranks.

Each source is used where it is reliable. The flight recorder names collectives, with op and sequence number, but no
point-to-point operations and no waits in the store; the stack names those, or the call in its innermost frame.
Processor time tells a rank that computes in C from one that sleeps there, except on a GPU, where waiting takes
processor time as well: there a rank waits when others have not joined its collective. The kernel function that the main
thread sleeps in tells a wait for a collective from a sleep while one is in progress. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import format_ranks
from .evidence import Collective, Evidence

_DISTRIBUTED = "/torch/distributed/"
_BACKWARD = "/torch/autograd/"  # DDP waits for its collectives in frames under it
_PASSED_THROUGH = ("/detrain_nb/node/", "/torch/_ops.py:")  # frames between torch.distributed and calls into C
_COMPARED = "/detrain_nb/node/groups/checking.py:"  # its functions are named as those of torch.distributed
_NOT_WAITING = ("/torch/distributed/checkpoint/",)  # they wait for files, not for other ranks
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen ")
_OWN_WAITS = ("os.wait(", "torch.jit.wait(", "torch._C.wait(")
_NO_CALL = re.compile(r"[^\w.:/@+<>()\[\]{}=,*'\"-]+")  # blanks too: it must not read as one of our sentences
_WRAPPERS = {"wrapper", "inner", "decorate_context"}
_MOST_HOSTS = 3  # named individually
_HOPELESS = 3  # times ``hang_s``
_MAY_DIFFER = ("scatter", "reduce_scatter", "_reduce_scatter", "all_to_all", "alltoall", "coalesced")

_STOPPED = "signal_stop"  # the kernel function in which a process stopped by SIGSTOP or SIGTSTP sleeps

_Key = tuple[str, int]  # of a collective: its group and its sequence number there
_Reached = Mapping[str, int]  # group -> sequence number


@dataclass(frozen=True)
class Verdict:
    """The judgement of what one rank does.

    ``kind`` is waits, computes, sleeps (in Python or C, on its own), stopped (by a signal), or the state of a rank that
    runs no cell. ``missing``: the ranks that have not joined ``collective``, in which this rank waits. ``is_in_vain``:
    it is in torch, and each collective that it has begun and not ended lacks a member of its group.
    """

    rank: int
    kind: str
    evidence: Evidence
    waits_in: str = ""
    collective: Collective | None = None
    missing: tuple[int, ...] = ()
    is_in_vain: bool = False

    @property
    def waits(self) -> bool:
        return self.kind == "waits"

    def __str__(self) -> str:
        if self.waits:
            line = self.evidence.line_words
            return f"{self.waits_in} ({line})" if line else self.waits_in
        if self.kind == "computes":
            return f"computing {self.evidence.place}"
        if self.kind == "stopped":
            return f"stopped by a signal {self.evidence.place}"
        return self.evidence.place if self.kind == "sleeps" else self.kind


def judge(ranks: Iterable[Evidence]) -> dict[int, Verdict]:
    """Judge what each rank is doing; returns a verdict per rank."""
    everyone = list(ranks)
    reached = {evidence.rank: _reached(evidence) for evidence in everyone}
    return {evidence.rank: _judge(evidence, reached) for evidence in everyone}


def _judge(evidence: Evidence, reached: Mapping[int, _Reached]) -> Verdict:
    rank = evidence.rank
    if evidence.state != "running":
        return Verdict(rank, evidence.state, evidence)
    if _STOPPED in evidence.asleep_in:
        return Verdict(rank, "stopped", evidence)
    collective, missing = _oldest_pending(evidence, reached)
    is_waiting = bool(missing) if evidence.is_cuda else not evidence.is_busy
    if collective and is_waiting and not _is_elsewhere(evidence):
        is_in_vain = _is_in_torch(evidence) and all(_is_short(each, evidence, reached) for each in evidence.pending)
        return Verdict(rank, "waits", evidence, str(collective), collective, missing, is_in_vain)
    is_on_gpu = evidence.is_cuda and collective is not None  # all ranks have joined: the collective is running
    if not evidence.is_busy and not is_on_gpu and (name := _distributed_function(evidence) or _waiting_call(evidence)):
        return Verdict(rank, "waits", evidence, name)
    return Verdict(rank, "computes" if evidence.is_busy or evidence.cpu_share is None else "sleeps", evidence)


def _reached(evidence: Evidence) -> _Reached:
    """Return the last collective that a rank is known to have begun in each group."""
    reached: dict[str, int] = {}
    for collective in evidence.collectives:
        reached[collective.group] = max(collective.sequence, reached.get(collective.group, 0))
    return reached


def _oldest_pending(evidence: Evidence, reached: Mapping[int, _Reached]) -> tuple[Collective | None, tuple[int, ...]]:
    """Return the oldest collective that lacks members of its group, and these; else the oldest pending one."""
    for collective in evidence.pending:
        if missing := _missing_from(collective, evidence, reached):
            return collective, missing
    return (evidence.pending[0] if evidence.pending else None), ()


def _missing_from(collective: Collective, evidence: Evidence, reached: Mapping[int, _Reached]) -> tuple[int, ...]:
    """Return the members of its group that have not joined it; if the members are unknown, consider all ranks."""
    members = [rank for rank in evidence.members.get(collective.group, reached) if rank in reached]
    return tuple(sorted(rank for rank in members if reached[rank].get(collective.group, 0) < collective.sequence))


def _is_short(collective: Collective, evidence: Evidence, reached: Mapping[int, _Reached]) -> bool:
    """Return whether a member of its group, which must be known, has not joined it."""
    is_known = collective.is_of_all or collective.group in evidence.members
    return is_known and bool(_missing_from(collective, evidence, reached))


def _is_in_torch(evidence: Evidence) -> bool:
    """Return whether the main thread waits where torch waits for other ranks, not in a library with its own threads."""
    is_in_backward = _BACKWARD in evidence.innermost
    return is_in_backward or bool(_distributed_function(evidence) or _waiting_call(evidence))


def _is_elsewhere(evidence: Evidence) -> bool:
    """Return whether the main thread cannot be waiting for a collective: it will wait for a pending one later."""
    if _is_in_standard_library(evidence) or any(part in evidence.innermost for part in _NOT_WAITING):
        return True
    if not evidence.asleep_in:
        return False
    return "nanosleep" in evidence.asleep_in if evidence.is_cuda else "futex" not in evidence.asleep_in


def _is_in_standard_library(evidence: Evidence) -> bool:
    return _STANDARD_LIBRARY.search(evidence.innermost) is not None


def _distributed_function(evidence: Evidence) -> str:
    """Return the innermost public function of torch.distributed that the rank is in; empty if there is none."""
    public = private = ""
    for frame in evidence.stack:
        path, _, function = frame.rpartition(" ")
        if _COMPARED in path and not function.startswith("_"):
            return function
        if any(part in path for part in _PASSED_THROUGH):
            continue
        if _DISTRIBUTED not in path or any(part in path for part in _NOT_WAITING):
            break
        if function == "<module>":
            return ""  # the module is being imported
        if not function.startswith("_") and function not in _WRAPPERS:
            public = public or function
        private = private or function
    return public or private


def _waiting_call(evidence: Evidence) -> str:
    """Return ``request.wait()``, called in C from the user's code or a library's, or a request to a store.

    Not ``os.wait()``, which waits for a child process, nor ``torch.jit.wait(future)``, for a computation of its own.
    """
    called = "" if _is_in_standard_library(evidence) else _called_name(evidence.call)
    is_own = evidence.call.startswith(_OWN_WAITS) or evidence.asleep_in == "do_wait"
    is_wait = called == "wait" and not is_own and "nanosleep" not in evidence.asleep_in
    is_file_store = "nanosleep" in evidence.asleep_in and "store" in evidence.call.lower()  # it polls and sleeps
    is_store = called == "get" and "poll" in evidence.asleep_in or called in ("get", "wait") and is_file_store
    return _NO_CALL.sub("", evidence.call) if is_wait or is_store else ""


def _called_name(call: str) -> str:
    """Return the last name before the arguments: ``wait`` of ``requests[0].wait(timeout=f(3))``."""
    depth = 0
    for index in range(len(call) - 1, -1, -1):
        depth += (call[index] == ")") - (call[index] == "(")
        if depth == 0:
            return re.split(r"\W", call[:index].rstrip())[-1]
    return ""


def ranks_on_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Describe ranks: ``rank 1 on gpu2``, ``ranks 1-2 on gpu2 and gpu3``, ``ranks 1-7 on 4 hosts``; hosts if known."""
    numbers = sorted(ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in numbers if hosts.get(rank)))
    if not names:
        return format_ranks(numbers)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{format_ranks(numbers)} on {listed if len(names) <= _MOST_HOSTS else f'{len(names)} hosts'}"


def describe_wait(verdicts: Iterable[Verdict], *, hosts: Mapping[int, str] | None = None) -> str:
    """Describe what ranks do, grouped: ``ranks 0, 2 wait in all_reduce #6 (line 7); rank 1 is computing at line 3``.

    ``hosts`` are named for ranks that do not wait: the others wait for them.
    """
    everyone = list(verdicts)
    newest = max((v.evidence.cell for v in everyone if v.evidence.state == "running"), default=0)
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for verdict in everyone:
        groups.setdefault((not verdict.waits, *_words(verdict, newest)), []).append(verdict.rank)
    order = sorted(groups.items(), key=lambda item: (item[0][0], item[1]))
    return "; ".join(
        f"{ranks_on_hosts(ranks, (hosts or {}) if is_away else {})} {one if len(ranks) == 1 else many}"
        for (is_away, one, many), ranks in order
    )


def _words(verdict: Verdict, cell: int) -> tuple[str, str]:
    """Return what one rank does, and the same for several."""
    of_cell = f" of cell {verdict.evidence.cell}" if verdict.evidence.cell != cell else ""
    if verdict.waits:
        return f"waits in {verdict}{of_cell}", f"wait in {verdict}{of_cell}"
    if verdict.kind == "idle" and of_cell:
        return "does not run the cell", "do not run the cell"
    if verdict.kind == "idle":
        return "has ended the cell", "have ended the cell"
    if verdict.kind == "no answer":
        return "does not answer", "do not answer"
    place = f"{verdict}{of_cell}" if verdict.evidence.state == "running" else str(verdict)
    return f"is {place}", f"are {place}"


def describe_mismatch(ranks: Iterable[Evidence], *, is_over: bool = False) -> str:
    """Describe a collective that differs between the ranks of its group; empty if all match.

    Only collectives that some rank has not finished are compared; with ``is_over``, all that are known.
    """
    return next(iter(_find_mismatches(list(ranks), is_over=is_over).values()), "")


def describe_last(ranks: Iterable[Evidence]) -> str:
    """Describe the collective that each rank is known to have begun last: ``all_reduce #1 Float[3] on rank 0``."""
    last = {evidence.rank: evidence.collectives[-1] for evidence in ranks if evidence.collectives}
    return _by_value({rank: f"{collective} {collective.tensors}".rstrip() for rank, collective in last.items()})


def are_in_step(ranks: Iterable[Evidence]) -> bool:
    """Return whether idle ranks have begun the same collectives, and nothing else, in every group that they share.

    If so, their next collectives match. If not, the data of one would be taken for that of another.
    """
    everyone = list(ranks)
    if not all(evidence.is_known for evidence in everyone) or describe_mismatch(everyone):
        return False
    reached: dict[str, set[int]] = {}
    for evidence in everyone:
        for group, steps in evidence.steps.items():
            reached.setdefault(group, set()).add(steps)
    return all(len(steps) == 1 and -1 not in steps for steps in reached.values())


def _find_mismatches(everyone: list[Evidence], *, is_over: bool = False) -> dict[_Key, str]:
    """Describe every collective that differs between ranks; see ``describe_mismatch``."""
    looked_at = {
        _key(collective): evidence.members
        for evidence in everyone
        for collective in (evidence.collectives if is_over else evidence.pending)
    }
    begun: dict[_Key, dict[int, Collective]] = {}
    for evidence in everyone:
        for collective in evidence.collectives:
            begun.setdefault(_key(collective), {})[evidence.rank] = collective
    found = {}
    for key, members in looked_at.items():
        called = {rank: each for rank, each in begun[key].items() if rank in members.get(key[0], (rank,))}
        if len(called) > 1 and (words := _describe_difference(called)):
            found[key] = words
    return found


def _describe_difference(called: Mapping[int, Collective]) -> str:
    """Describe how the collectives ``called`` by ranks in one place of the sequence differ; empty if they match."""
    any_of_them = next(iter(called.values()))
    if len({collective.op for collective in called.values()}) > 1:
        ops = _by_value({rank: f"{each.op} {each.tensors}".rstrip() for rank, each in called.items()})
        return f"collective #{any_of_them.sequence}{any_of_them.of_group} differs: {ops}"
    tensors = {rank: collective.tensors for rank, collective in called.items()}
    if len(set(tensors.values())) > 1 and not any_of_them.op.startswith(_MAY_DIFFER):
        return f"{any_of_them} has different tensors: {_by_value(tensors)}"
    return ""


def _by_value(values: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())


_SLOW = 4  # times as long, before a collective that all have begun is reported as not ending
_ALL_CAME = (
    "all ranks have begun it: it is slow, or its arguments (such as the root) differ between ranks: "
    "%distributed config check=on compares them"
)


@dataclass
class _Seen:
    """Times when a rank was last seen computing, beginning an operation with others, or elsewhere than in ``waits_in``.

    ``first_at``: when it was looked at for the first time; the other times may be earlier.
    """

    first_at: float
    busy_at: float
    moved_at: float
    elsewhere_at: float
    operations: int
    waits_in: str = ""


@dataclass
class HangWatch:
    """A watch over the ranks of one cell, look by look: which have waited for others for ``hang_s``?"""

    hang_s: float
    message_s: float = 60.0  # how long a message may take to arrive
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _verdicts: Mapping[int, Verdict] = field(default_factory=dict)  # of the last look

    def wants_stack(self, *, now: float) -> bool:
        """Return whether a rank may have waited long enough to justify the signal that fetches the stack."""
        return any(now - max(seen.busy_at, seen.moved_at) >= self.hang_s - 1.0 for seen in self._seen.values())

    def note(self, verdicts: Mapping[int, Verdict], *, now: float) -> None:
        """Note a look, with or without stacks."""
        self._verdicts = verdicts
        running = {rank: each.evidence for rank, each in verdicts.items() if each.evidence.state == "running"}
        self._seen = {rank: self._seen[rank] for rank in self._seen if rank in running}
        for rank, evidence in running.items():
            began = now - evidence.seconds
            seen = self._seen.setdefault(rank, _Seen(now, began, began, began, evidence.operations))
            if evidence.is_busy and not evidence.is_cuda:
                seen.busy_at = now
            if evidence.operations != seen.operations:
                seen.operations, seen.moved_at = evidence.operations, now

    def report(self, *, running: Collection[int], now: float, hosts: Mapping[int, str] | None = None) -> str:
        """Describe which ranks wait in what for whom; the last look noted must have had stacks.

        ``running`` are the ranks that run the cell, ``hosts`` as in ``describe_wait``. Empty while none of them has
        waited for ``hang_s``. A collective that all ranks have joined is usually just slow: it is reported later.
        """
        verdicts, mismatches = self._verdicts, self._mismatches()
        hung = [v for v in self._hung(mismatches, now, limit_s=self.hang_s) if v.rank in running]
        if not hung:
            limit_s = _SLOW * max(self.hang_s, 1.0)
            slow = [v for v in verdicts.values() if v.collective and self.waited_s(v, now) >= limit_s]
            is_everybody = bool(slow) and {verdict.rank for verdict in slow} >= set(running)
            return f"{describe_wait(slow, hosts=hosts)}; {_ALL_CAME}" if is_everybody else ""
        away = {rank for verdict in hung for rank in verdict.missing}
        is_for_anybody = any(verdict.collective is None for verdict in hung)
        shown = [verdict for rank, verdict in verdicts.items() if rank in running or rank in away or is_for_anybody]
        wrong = [mismatches[_key(v.collective)] for v in hung if v.collective and _key(v.collective) in mismatches]
        return "; ".join([describe_wait(shown, hosts=hosts), *wrong[:1]])

    def is_hopeless(self, *, now: float) -> bool:
        """Return whether all ranks still in a cell have waited for several times ``hang_s``, with no rank left to join.

        The last look must have had stacks. A message may be in transit for a long time unseen: a rank that waits for
        one is given at least ``message_s``.
        """
        left = {rank for rank, verdict in self._verdicts.items() if verdict.kind != "idle"}
        limit_s = _HOPELESS * max(self.hang_s, 1.0)
        hung = self._hung(self._mismatches(), now, limit_s=limit_s)
        if not left or left != {verdict.rank for verdict in hung}:
            return False
        if any(verdict.collective is None for verdict in hung):
            limit_s = max(limit_s, self.message_s)
        waited_s = (min(self.waited_s(verdict, now), now - self._seen[verdict.rank].first_at) for verdict in hung)
        return min(waited_s) >= limit_s

    def _mismatches(self) -> dict[_Key, str]:
        return _find_mismatches([verdict.evidence for verdict in self._verdicts.values()])

    def _hung(self, mismatches: Collection[_Key], now: float, *, limit_s: float) -> list[Verdict]:
        """Return the ranks that have waited for ``limit_s``, except in collectives that all joined: these are slow."""
        return [
            verdict
            for verdict in self._verdicts.values()
            if self.waited_s(verdict, now) >= limit_s
            and (verdict.collective is None or verdict.missing or _key(verdict.collective) in mismatches)
        ]

    def waited_s(self, verdict: Verdict, now: float) -> float:
        """Return how long a rank has been waiting, in seconds; negative if it is not."""
        seen = self._seen.get(verdict.rank)
        if seen is None:
            return -1.0
        if not verdict.waits or seen.waits_in not in ("", str(verdict)):
            seen.elsewhere_at = now
        seen.waits_in = str(verdict) if verdict.waits else ""
        if not verdict.waits:
            return -1.0
        if verdict.collective:
            return min(verdict.collective.seconds, now - seen.busy_at)
        return now - max(seen.busy_at, seen.moved_at, seen.elsewhere_at)


def _key(collective: Collective) -> _Key:
    return collective.group, collective.sequence
