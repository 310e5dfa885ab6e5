"""The storage of torch.distributed.checkpoint, whose plans say which rank writes and reads what.

Tensors are in safetensors files, one from each rank; the index of all tensors, and every other value, is JSON. torch's
own storage pickles its index, and reading a pickle can execute code: it is neither used nor opened.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import DetrainError, SpecError
from ..parallel.interrupts import HeldInterrupts
from ..storage import Location, is_local
from ..wire import count_values
from . import catalog
from .digests import digest, seal
from .plain import to_json
from .tensor_files import Piece, compare_rows, foreign_errors, make_header, read_header_of, read_rows, write_file
from .tensor_index import MOST_INDEX_VALUES, TensorIndex, WrittenPiece, make_index


class JsonSavePlanner(DefaultSavePlanner):
    """A planner that converts values other than tensors to JSON, where torch would pickle them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(json.dumps(to_json(object, write_item.index.fqn)).encode())


class StepWriter(StorageWriter):
    """A writer of one checkpoint: each rank writes its tensors; rank 0 completes it and removes what is not kept."""

    def __init__(self, place: Location, step: int, keep: int | None, note: Mapping[str, Any]) -> None:
        self._place = place
        self._folder = catalog.step_folder(place, step)
        self._keep = keep
        self._note = note
        self._token = secrets.token_hex(8)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove leftovers and number the plans, on rank 0, before any rank writes."""
        catalog.clear_leftovers(self._place)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        tensors: list[tuple[str, Tensor]] = []
        items_of: dict[Any, tuple[str, list[WriteItem]]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                text = data.getvalue()
                results.append(WriteResult(item.index, len(text), text.decode()))
                continue
            tensor = data.detach()
            same = _memory_of(tensor) if tensor.numel() else item.index  # tied tensors are written once
            if same not in items_of:
                tensors.append((_chunk_name(item), tensor))
            items_of.setdefault(same, (tensors[-1][0], []))[1].append(item)
        if tensors:
            file_name = f"rank-{plan.storage_data:05d}-{self._token}.safetensors"
            header, pieces = make_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors})
            catalog.require_no_link(self._folder)
            with foreign_errors(self._folder.name, "made"):
                self._folder.files.makedirs(self._folder.path, exist_ok=True)
            written = write_file(self._folder / file_name, header, (tensor for _, tensor in tensors))
            of_piece = {name: digests for (name, _), digests in zip(tensors, written)}
            for name, items in items_of.values():
                piece = replace(pieces[name], digests=of_piece[name])
                where = WrittenPiece(file_name, digest(header), piece)
                results += [WriteResult(item.index, piece.end - piece.begin, where) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, on rank 0, when all ranks have written."""
        catalog.require_no_link(self._folder)
        index = make_index(metadata, [result for of_rank in results for result in of_rank])
        sizes = index.pop("sizes")
        seen = catalog.read_files(self._folder)
        for name, size_bytes in sizes.items():
            if seen.get(name) != size_bytes:
                rank = int(name.split("-")[1])
                raise DetrainError(
                    f"{self._folder.name}: rank {rank}'s part is not visible on rank 0's host ({seen.get(name, 0):,} "
                    f"of {size_bytes:,} bytes of {name}): the folder is not shared: give a path on a disk that all "
                    "hosts share, or a URL such as s3://bucket/checkpoints"
                )
        index_name, index_text = f"index-{self._token}.json", json.dumps(index, separators=(",", ":")).encode()
        if count_values(index_text, most=MOST_INDEX_VALUES) > MOST_INDEX_VALUES:
            raise SpecError(f"the index of tensors has more than {MOST_INDEX_VALUES:,} values: it could not be read")
        note = self._make_note(len(results), index_name, index_text, sizes)
        with HeldInterrupts():  # an interrupt would leave an index without its note, which nothing removes
            self._write_last(index_name, index_text, note)
        catalog.clear_leftovers(self._place)
        catalog.prune(self._place, self._keep)

    def _write_last(self, index_name: str, index_text: bytes, note: bytes) -> None:
        (self._folder / index_name).write(index_text, may_be_link=False)
        try:
            (self._folder / catalog.NOTE).write(note, may_be_link=False)
        except DetrainError:  # a full disk: without its index the folder is unfinished, and the next save removes it
            if is_local(self._folder.files):  # elsewhere the note may have arrived
                with contextlib.suppress(DetrainError):
                    catalog.remove_files(self._folder, [index_name])
            raise

    def _make_note(self, world_size: int, index_name: str, index_text: bytes, sizes: Mapping[str, int]) -> bytes:
        """Return the note, before the index is written. Raises: SpecError, DetrainError if it could not be read."""
        there = catalog.list_checkpoints(self._place)
        unread = sum(each.serial < 0 and each.name != self._folder.name for each in there)  # any may be the last save
        serial = 1 + max([0, *(each.serial for each in there)]) + unread
        if serial > catalog.MOST_SAVES:  # it would count as damaged
            raise DetrainError(
                f"{self._place.name}: a checkpoint there has serial {serial - 1 - unread}, too high for another save: "
                "remove it, or save elsewhere"
            )
        note = {
            "format": 2,
            **self._note,
            "serial": serial,
            "saved_at": time.time(),
            "world_size": world_size,
            "index": index_name,
            "index_crc32": digest(index_text),
            "files": {**sizes, index_name: len(index_text)},
        }
        text = seal(json.dumps(note, indent=1).encode())
        if len(text) > catalog.MOST_NOTE_BYTES:
            raise SpecError(
                f"data_position, extra and scheduler have {len(text)} bytes: the limit is {catalog.MOST_NOTE_BYTES}"
            )
        most = catalog.MOST_NOTE_VALUES
        if count_values(text, most=most) > most:
            raise SpecError(
                f"data_position, extra and scheduler have more than {most:,} values: keep tensors in the "
                "state of the model or of the optimizer, or in a file of your own"
            )
        return text

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _memory_of(tensor: Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _chunk_name(item: WriteItem) -> str:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    is_whole = chunk.sizes == item.tensor_data.size
    return item.index.fqn if is_whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


# ---- reading


def read_tensors(
    folder: Location, index: TensorIndex, tensors: dict[str, Tensor], *, may_be_links: bool = False
) -> None:
    """Read into ``tensors``, whose parts may differ from the saved parts; each rank reads what it needs.

    ``may_be_links``: the files may be links, as in a hub's cache. Raises: DetrainError.
    """
    _read(folder, index, tensors, may_be_links=may_be_links)


def compare_tensors(folder: Location, index: TensorIndex, tensors: dict[str, Tensor]) -> None:
    """Read all that `read_tensors` would, and compare it with its digests; ``tensors`` are unchanged.

    Raises: DetrainError that names what is damaged.
    """
    _read(folder, index, tensors, is_only_compared=True)


def _read(
    folder: Location,
    index: TensorIndex,
    tensors: dict[str, Tensor],
    *,
    may_be_links: bool = False,
    is_only_compared: bool = False,
) -> None:
    """Do what dcp.load does, without its messages between ranks: the plan of one does not depend on the others'."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, index.metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    by_file: dict[str, list[tuple[Piece, ReadItem]]] = {}
    for item in plan.items:
        file_name, piece = index.pieces[item.storage_index]
        by_file.setdefault(file_name, []).append((piece, item))
    for file_name, wanted in by_file.items():
        place = folder / file_name
        with foreign_errors(place.name, "read"), place.open(may_be_link=may_be_links) as file:
            # otherwise an index could name bytes of any file that others created after the listing
            header = read_header_of(file, digest=index.headers.get(file_name, ""), what=place.name)
            _require_parts(header.values(), (piece for piece, _ in wanted))
            compared = set()
            for piece, item in sorted(wanted, key=lambda each: each[0].begin):
                what, rows = f"{place.name}: {item.storage_index.fqn!r}", _rows(piece, item)
                if not is_only_compared:
                    _read_item(file, piece, item, planner, what)
                elif (piece.begin, rows) not in compared:  # tied tensors are stored once
                    compared.add((piece.begin, rows))
                    compare_rows(file, piece, *rows, what=what)


def _require_parts(there: Iterable[Piece], wanted: Iterable[Piece]) -> None:
    """Check that the file's header has every wanted piece. Raises: ValueError when one is missing."""
    known = {(piece.begin, piece.end, piece.dtype) for piece in there}
    for piece in wanted:
        if (piece.begin, piece.end, piece.dtype) not in known:
            raise ValueError(f"none of its tensors has the bytes {piece.begin} to {piece.end}")


def _rows(piece: Piece, item: ReadItem) -> tuple[int, int]:
    """Return the first wanted row, and how many are wanted."""
    return (item.storage_offsets[0], item.lengths[0]) if piece.shape else (0, 1)


def _read_item(file: Any, piece: Piece, item: ReadItem, planner: LoadPlanner, what: str) -> None:
    """Read the rows that hold what is wanted, and copy the wanted part."""
    part = read_rows(file, piece, *_rows(piece, item), what=what)
    for dim in range(1, part.dim()):
        part = part.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)
