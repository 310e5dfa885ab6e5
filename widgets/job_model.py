"""The models that a job has written: the files of each, and how they get to the server's disk or to a browser."""

from __future__ import annotations

import glob
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from ..deploy.files import Stop
from ..errors import JobError
from ..jobs import Fetched, Job, MadeFile
from ..node.job.terms import FILES_OF_A_LINE
from ..plan.names import CHECKPOINT_FOLDER
from ..session.output.safe_output import one_line
from ..text import count_of, format_size, name_some, told_node
from .actions import Refused
from .downloads import MOST_DOWNLOAD_BYTES, require_small

_FIRST = ("model.*", ".metadata", "artifacts/", "model*")  # listed first, as there may be too many files to list
_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".gguf", ".bin", ".ckpt")
_OF_HUGGING_FACE = (".safetensors", ".bin")
_CONFIGS = ("config.json", "adapter_config.json")
_SHARD = re.compile(r"-\d+-of-\d+\.")  # of a model of Hugging Face
_BESIDE = (  # files without which such a model or its tokenizer is unusable
    *("*config.json", "*.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template.*", "modeling_*.py", "configuration_*.py"),
)
_OF_DCP = ".metadata"  # in the folder of a distributed checkpoint (DCP)
_MOST_SHOWN = 20

OnBytes = Callable[[int, int], object]  # done, total


@dataclass(frozen=True)
class Model:
    """The unit of a download: a file, or the files of a folder that belong together, on one or several nodes."""

    name: str  # of a folder, with a trailing slash
    files: tuple[MadeFile, ...]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(file.name for file in self.files))

    @property
    def num_nodes(self) -> int:
        return len({file.node for file in self.files})

    @property
    def size_bytes(self) -> int:
        """Total size with each file counted once, at its largest where nodes differ."""
        sizes: dict[str, int] = {}
        for file in self.files:
            sizes[file.name] = max(file.size_bytes, sizes.get(file.name, 0))
        return sum(sizes.values())


# ---- which files a model is


def list_models(job: Job) -> tuple[list[Model], list[MadeFile], bool]:
    """Return the models, the likeliest first; other files; and whether more were not listed. Raises: DetrainError."""
    made = job.list_made(first=_FIRST)
    folders = dict.fromkeys(
        _folder_of(file.name) for file in filter(_is_weights, made) if file.name.endswith(_OF_HUGGING_FACE)
    )
    wanted = [f"{glob.escape(folder)}{name}" for folder in [*folders][:_MOST_SHOWN] for name in _BESIDE]
    beside = [file for file in (job.list_made(wanted) if wanted else []) if _folder_of(file.name) in folders]
    models = choose_models(list({(file.node, file.name): file for file in [*made, *beside]}.values()))
    taken = {name for model in models for name in model.names}
    has_more = max(Counter(file.node for file in made).values(), default=0) >= FILES_OF_A_LINE
    return models, [file for file in made if file.name not in taken], has_more


def choose_models(made: Sequence[MadeFile]) -> list[Model]:
    """Return the models, the likeliest first; distributed checkpoints only if there is no other model."""
    names = {file.name for file in made}
    pieces, beside = defaultdict[str, list[MadeFile]](list), defaultdict[str, list[MadeFile]](list)
    for file in sorted(made, key=lambda file: file.name):
        folder = _folder_of(file.name)
        if _is_weights(file):
            pieces[_whole_of(file)].append(file)
        elif any(fnmatchcase(file.name.removeprefix(folder), pattern) for pattern in _BESIDE):
            beside[folder].append(file)
    models: list[Model] = []
    for file in sorted(filter(_is_weights, made), key=_likeliest_first):
        folder = _folder_of(file.name)
        has_config = file.name.endswith(_OF_HUGGING_FACE) and any(f"{folder}{name}" in names for name in _CONFIGS)
        if not has_config and _whole_of(file) == file.name:
            models.append(Model(file.name, (file,)))
        elif together := pieces.pop(_whole_of(file), []):  # else another model contains it
            together += beside.pop(folder, [])
            is_folder = folder and len({each.name for each in together}) > 1
            models.append(Model(folder if is_folder else file.name, tuple(together)))
    return models or _choose_cut(made)


def _likeliest_first(file: MadeFile) -> tuple[bool, bool, bool, int, str]:
    name = PurePosixPath(file.name).name
    is_shard = bool(_SHARD.search(name))
    is_plain = is_shard or name.partition(".")[0] == "model"
    size = 0 if is_shard else -file.size_bytes
    return not name.startswith("model"), not name.endswith(".safetensors"), not is_plain, size, file.name


def _is_weights(file: MadeFile) -> bool:
    return file.name.endswith(_SUFFIXES) and not _is_in_checkpoint(file.name)


def _whole_of(file: MadeFile) -> str:
    """Return the name that all shards of a model share."""
    return _SHARD.sub(".", file.name)


def _choose_cut(made: Sequence[MadeFile]) -> list[Model]:
    """Return the distributed checkpoints, the newest first."""
    heads = [file.name for file in made if PurePosixPath(file.name).name == _OF_DCP and "/" in file.name]
    found: dict[str, list[MadeFile]] = {_folder_of(name): [] for name in heads if not _is_in_checkpoint(name)}
    for file in made:
        for folder in {f"{above}/" for above in PurePosixPath(file.name).parents} & found.keys():
            found[folder].append(file)
    models = [Model(folder, tuple(files)) for folder, files in found.items()]
    return sorted(models, key=lambda model: -max(file.written_at for file in model.files))


def _folder_of(name: str) -> str:
    """Return the folder with a trailing slash; empty for a file in no folder."""
    return name[: name.rfind("/") + 1]


def _is_in_checkpoint(name: str) -> bool:
    return any(CHECKPOINT_FOLDER.fullmatch(part) for part in name.split("/")[:-1])


# ---- fetching the files


def fetch_models(
    job: Job, models: Sequence[Model], folder: str, on_bytes: OnBytes, *, num_nodes: int = 1, cancel: Stop | None = None
) -> Fetched:
    """Copy the models into ``folder``, each file checked by its SHA-256.

    ``num_nodes``: how many nodes may have files of these names.
    Raises: DetrainError; Refused when the files have grown since they were listed.
    """
    told = sum(file.size_bytes for model in models for file in model.files)

    def note(done: int, total: int) -> None:
        if total > told * num_nodes:
            raise Refused(f"the model has grown from {format_size(told)} to {format_size(total)}: show the job again")
        on_bytes(done, total)

    return _fetch(job, models, folder, note, cancel)


def _fetch(job: Job, models: Sequence[Model], folder: str, on_bytes: OnBytes, cancel: Stop | None) -> Fetched:
    """Fetch the models; an exception from ``on_bytes`` ends the copy."""
    names = [glob.escape(name) for name in dict.fromkeys(name for model in models for name in model.names)]
    try:
        tell = lambda _, done, total: on_bytes(done, total)  # noqa: E731
        return job.fetch(names, folder, anyway=True, on_progress=tell, cancel=cancel)
    except JobError as exc:
        exc.prog = "%job"
        raise


def fetch_for_browser(
    job: Job, model: Model, folder: Path, on_bytes: OnBytes, *, num_nodes: int = 1, cancel: Stop | None = None
) -> Path:
    """Fetch a model into ``folder``; returns its path: several files become a .zip.

    ``num_nodes``: how many nodes have files of these names.
    Raises: DetrainError; Refused when the model is too large, even if that shows during the copy.
    """
    require_small(model.size_bytes)

    def note(done: int, total: int) -> None:
        require_small(total, MOST_DOWNLOAD_BYTES * num_nodes)
        on_bytes(done, total)

    fetched, file = _fetch(job, [model], str(folder / "fetched"), note, cancel), model.files[0]
    if len(model.names) > 1:
        packed = folder / f"{PurePosixPath(model.name).name if model.name.endswith('/') else job.id}.zip"
        return _pack(folder / "fetched", fetched.files, packed)
    found = next((name for name in (f"{file.node}/{file.name}", file.name) if name in fetched.files), None)
    if found is None:
        raise Refused(f"{file.name} no longer exists on its node")
    return folder / "fetched" / found


def _pack(root: Path, names: Sequence[str], packed: Path) -> Path:
    with zipfile.ZipFile(packed, "w", strict_timestamps=False) as archive:
        for name in names:
            archive.write(root / name, name)
            (root / name).unlink()
    return packed


# ---- in words


def describe_models(models: Sequence[Model], *, has_many_nodes: bool) -> list[dict[str, Any]]:
    """Return the first models for pages; `check_name` has already checked their file names."""
    return [
        {
            "node": told_node(model.files[0].node) if has_many_nodes and model.num_nodes == 1 else "",
            "name": model.name,
            "size": model.size_bytes,
            "count": len(model.names),
        }
        for model in models[:_MOST_SHOWN]
    ]


def tell_others(made: Sequence[MadeFile], command: str, *, has_more: bool = False) -> str:
    """Name the other files by folder and size, with the ``command`` that copies them; empty if there are none.

    ``has_more``: not all files were listed.
    """
    told: list[tuple[int, str]] = []
    for folder, each in groupby(sorted(made, key=lambda file: file.name), key=lambda file: _folder_of(file.name)):
        files = list(each)
        if folder and len(files) > 1:
            size = sum(file.size_bytes for file in files)
            told.append((size, f"{folder} ({count_of(len(files), 'file')}, {format_size(size)})"))
        else:
            told += [(file.size_bytes, f"{file.name} ({format_size(file.size_bytes)})") for file in files]
    words = [word for _, word in sorted(told, key=lambda one: -one[0])]
    more = ", and more files not listed" if has_more else ""
    return one_line(f"{name_some(words)}{more}: {command}", most_chars=1000) if words else ""
