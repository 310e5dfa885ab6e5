"""The process groups of a rank. All groups of one generation are made, and end, together.

On a single node, ranks find each other through a file of the generation (meeting.py). On several nodes they use the
engine's store, with the generation's number in the key prefix, so that a new generation never reads keys of an old one.
``init_process_group`` in a cell replaces the default group instead of failing.
The main thread makes generations; the control thread ends them, whatever the main thread waits for.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ...errors import SessionError
from .checking import Checking
from .connections import Connections
from .meeting import Meeting
from .stale_variables import forget_meshes

_GROUP_TIMEOUT = datetime.timedelta(minutes=30)
ON_NCCL = "/nccl"  # suffix of a group's name: NCCL and gloo count their operations in a group separately
GROUP_NAMES = 1000  # group names, which are numbers, from one default group to the next
_MOST_GROUPS = 1000  # default groups in one generation
_MESSAGE_LIMIT_S = 60.0
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0  # between two checks whether data is moving
# How long no data moves before a message is given up: a process may get no processor for a while, and a network that
# has lost a packet may pause for a second in the middle of a message.
_STILL_S, _STILL_IN_BETWEEN_S = 0.06, 2.0
_LIVES_ON_S = 0.2  # how long a destroyed group is kept: far longer than gloo's threads wait for the GIL
_STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Generation:
    """The default process group of this rank, and the generation it belongs to.

    ``folder``: where ranks find each other if all are on this node; only its user can enter it. ``is_apart``: the nodes
    cannot reach each other, and no group can be made.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: str,
        device: torch.device,
        timeout_s: float = 0.0,
        folder: Path | None = None,
        is_apart: bool = False,
    ) -> None:
        self.number = 0
        self.is_in_use = False  # whether the main thread may be in one of its operations
        self.ended = 0  # the highest number of a generation that was ended
        self.started_ns = 0  # Unix time just before the current default group, and so every other group, was made
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_s) if timeout_s else _GROUP_TIMEOUT
        self._store_address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # cells may change them
        self._folder = folder
        self._is_apart = is_apart
        self._meeting: Meeting | None = None  # the file that is the store
        self._store: dist.Store | None = None
        self._groups_made = 0
        self._groups_seen = 0
        self._connections = Connections()
        self._checking = Checking(timeout=self._timeout)
        self._changing = threading.Lock()
        self._torch_init = dist.init_process_group
        self._torch_destroy = dist.destroy_process_group
        self._torch_new_group = dist.distributed_c10d._new_process_group_helper
        self._torch_split_group = dist.distributed_c10d.split_group

    @property
    def has_group(self) -> bool:
        """Whether a default group exists and is not being ended; ending waits for a message in transit."""
        return dist.is_initialized() and self.ended < self.number

    @property
    def operations(self) -> int:
        """The number of operations that needed other ranks: collectives, messages between ranks, groups made."""
        return self._groups_seen + self._checking.begun + sum(self.sequences.values())

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        """See ``Checking.recorded``."""
        return self._checking.recorded()

    @property
    def sequences(self) -> dict[str, int]:
        """The operations of each group by its name, not counting its creation; those on NCCL have their own entry."""
        found: dict[str, int] = {}
        for group in list(dist.distributed_c10d._world.pg_map):
            found.update({group.group_name + of: number for of, number in count_operations(group).items()})
        return found

    def start(self, number: int, *, is_checked: bool = False) -> None:
        """End the current groups and make the default group of generation ``number``; ``is_checked``: see checking.py.

        Collective: every rank starts the same number.
        Raises: SessionError when the generation is ended in the meantime; errors of torch.
        """
        self.begin(number, is_checked=is_checked)
        self._make_group(self._backend)
        self.require_not_ended()
        if self._meeting:
            self._meeting.remove_earlier()

    def begin(self, number: int, *, is_checked: bool = False) -> None:
        """End the current groups; groups made from now on belong to generation ``number``."""
        self.end(self.number)
        with self._changing:
            if dist.is_initialized():  # it was made while its generation was being ended
                self._abort()
            self.number = number
            self._groups_made = 0
            self._store = self._meeting = None
        forget_meshes()
        self._checking.switch(is_checked)

    def renumber(self, rank: int, world_size: int) -> None:
        """Set rank and world size for the next group; call while there is no group."""
        self._rank, self._world_size = rank, world_size

    def end(self, number: int) -> int:
        """End the groups of generation ``number``, and free every rank that waits in them.

        Does nothing if the generation has already ended. A generation that this rank has not started yet cannot be made
        later. May be called from any thread. Returns how many connections were shut.
        """
        with self._changing:
            if number < self.number or number <= self.ended:
                return 0
            self.ended = number
            self._end_meetings(number)
            self._let_message_arrive()
            return self._abort()

    def wait_for_end(self, number: int, limit_s: float) -> None:
        """Wait until a generation after ``number`` starts to end, for at most ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while self.ended <= number and time.monotonic() < deadline:
            time.sleep(0.002)  # rather than wait for the lock: an abort may take long

    def _let_message_arrive(self) -> None:
        """Wait while a message is in transit: gloo never frees a rank that waits for the rest of one.

        Stops waiting when the main thread has left the operation, or has begun another one: the cell then continues
        after the stop.
        """
        operations, before = self.operations, self._connections.flow()
        moved_at = time.monotonic()
        deadline, still_s = moved_at + _MESSAGE_LIMIT_S, _STILL_S
        while before.moved_bytes and self.is_in_use and self.operations == operations and time.monotonic() < deadline:
            look_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, 2 * before.round_trip_s))
            time.sleep(look_s)
            now, looked_at = self._connections.flow(), time.monotonic()
            if now.moved_bytes > before.moved_bytes:
                moved_at, still_s = looked_at, _STILL_IN_BETWEEN_S
            elif looked_at - moved_at >= max(look_s, still_s):
                return
            before = now

    def _end_meetings(self, number: int) -> None:
        """Free ranks that wait for others in the current generation, and let none start to wait in ``number``."""
        if self._folder is None:
            return
        for meeting in (self._meeting, Meeting(self._folder, number)):
            if meeting:
                with contextlib.suppress(OSError):  # the disk is full: the connections are shut in any case
                    meeting.end()

    def _abort(self) -> int:
        shut = self._connections.shut(self._world_size)
        # there is no group, or an unfinished one, or the main thread is destroying one
        with contextlib.suppress(ValueError, AssertionError, RuntimeError, LookupError):
            dist.distributed_c10d._abort_process_group()
        return shut

    def take_over_torch(self) -> None:
        """Let code written for torchrun run in a cell: init_process_group replaces the group, mp.spawn is refused."""
        modules: tuple[Any, ...] = (dist, dist.distributed_c10d)
        for module in modules:
            module.init_process_group = self._replace_group
            module.destroy_process_group = self._destroy_group
        modules[1]._new_process_group_helper = self._new_group
        for module in (*modules, dist.device_mesh):
            module.split_group = self._split_group
        torch.multiprocessing.spawn = _refuse_spawn

    def _replace_group(self, backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
        """Replace the default group; a drop-in for torch's ``init_process_group``.

        Collective: every rank calls this. The session sets rank, world size and the store's address; these arguments
        are ignored with a warning on rank 0. A "fake" group, as a dry run uses it, is left to torch.
        """
        if backend == "fake":
            self._torch_init(backend, init_method, **options)
            return
        given = {"init_method": init_method, **{name: options.pop(name, None) for name in _KNOWN_BY_THE_SESSION}}
        ignored = [name for name, value in given.items() if value not in (None, -1)]
        if ignored and self._rank == 0:
            names = ", ".join(ignored)
            warnings.warn(f"init_process_group: {names} ignored: the session sets them", stacklevel=2)
        if dist.is_initialized():
            self._destroy_group()
        with self._changing:
            if self.ended >= self.number:  # the cell continues in an ended generation: allow ending it again
                self.ended, self._store = self.number - 1, None
        self._make_group(backend or self._backend, **options)

    def _destroy_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a group, or the default one and all others, as torch does; references are kept 0.2 s longer.

        If DDP held the last reference, its destructor would wait for gloo's threads while holding the GIL, which those
        threads may need to release tensors: a deadlock.
        """
        held = [group] if group is not None else list(dist.distributed_c10d._world.pg_map)
        self._torch_destroy(group)
        release = threading.Timer(_LIVES_ON_S, held.clear)
        release.daemon = True
        release.start()

    def _make_group(self, backend: str, **options: Any) -> None:
        with self._connections.recording():
            if self._store is None:
                self._store = self._open_store()
            self.require_not_ended()
            self._groups_made += 1
            self.started_ns = time.time_ns()
            # torch restarts group names at 0: a mesh of an ended generation must not find a group of this one by name
            earlier = max(0, self.number - 1) * _MOST_GROUPS + self._groups_made - 1
            dist.distributed_c10d._world.group_count = earlier * GROUP_NAMES
            prefix = f"detrain_nb/generation{self.number}/group{self._groups_made}"
            if self._device.type == "cuda":
                options.setdefault("device_id", self._device)  # connects now: no first collective hangs in its setup
            options.setdefault("timeout", self._timeout)
            self._torch_init(
                backend,
                store=dist.PrefixStore(prefix, self._store),
                rank=self._rank,
                world_size=self._world_size,
                **options,
            )

    def _open_store(self) -> dist.Store:
        """Open the store through which the ranks find each other. Ending the generation ends the store too."""
        if self._is_apart:
            raise SessionError("there is no process group: the nodes of this session do not reach each other")
        if self._folder is None:
            return dist.TCPStore(*self._store_address, None, is_master=False, timeout=_STORE_TIMEOUT)
        self._meeting = Meeting.next(self._folder, self.number)
        self._meeting.open()
        self._groups_made = self._meeting.again  # the same count as in a restarted rank
        store = dist.FileStore(str(self._meeting.path))
        store.set_timeout(_STORE_TIMEOUT)
        return store

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        """Record a group that torch makes in this block, then check that its other ends belong to this user."""
        self._groups_seen += 1
        with self._connections.recording():
            yield
            try:
                self._connections.require_own()
            except BaseException:  # also an interrupt: the other ends have not been checked
                self.end(self.number)
                raise
            if self._device.type == "cpu":  # NCCL may make connections later
                self._connections.let_nobody_in()

    def require_not_ended(self) -> None:
        if self.ended >= self.number:
            raise SessionError(f"generation {self.number} of process groups was ended")

    def _new_group(self, *args: Any, **options: Any) -> Any:
        """Make a group of any kind: the default one, one of ``new_group``, one of a mesh."""
        with self._connecting():
            made = self._torch_new_group(*args, **options)
            self._checking.add(*made)
            return made

    def _split_group(self, *args: Any, **options: Any) -> Any:
        """Make a group of a mesh on NCCL, which splits the default group and does not use ``_new_group``."""
        with self._connecting():
            return self._torch_split_group(*args, **options)


_KNOWN_BY_THE_SESSION = ("world_size", "rank", "store")


def count_operations(group: dist.ProcessGroup) -> dict[str, int]:
    """Count the operations started in a group: on gloo under ``""``, on NCCL under ``ON_NCCL``; a group may have both.

    The group's own counter covers NCCL only.
    """
    found: dict[str, int] = {}
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # no backend for the device, it is ending, or it does not count
            backend = group._get_backend(torch.device(device))
            number: int = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
            found[ON_NCCL if "nccl" in backend.name().lower() else ""] = number
    return found


def _refuse_spawn(*args: object, **kwargs: object) -> None:
    raise SessionError(
        "mp.spawn starts processes of its own, but this cell runs on every rank already: call the function itself, "
        "with rank and world_size"
    )
