"""The models that a job has made: which files each is, and how they come to the server's disk or to a browser."""

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

_FIRST = ("model.*", ".metadata", "artifacts/", "model*")  # listed before all else, of which there may be too much
_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".gguf", ".bin", ".ckpt")
_OF_HUGGING_FACE = (".safetensors", ".bin")
_CONFIGS = ("config.json", "adapter_config.json")
_SHARD = re.compile(r"-\d+-of-\d+\.")  # of a model of Hugging Face
_BESIDE = (  # of which such a model is of no use, or its tokenizer
    *("*config.json", "*.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template.*", "modeling_*.py", "configuration_*.py"),
)
_OF_DCP = ".metadata"  # in the folder of a distributed checkpoint of torch
_MOST_SHOWN = 20

OnBytes = Callable[[int, int], object]  # done, and in all


@dataclass(frozen=True)
class Model:
    """What is downloaded at once: a file, or those of a folder that are of use together only, on whatever nodes."""

    name: str  # a folder's ends with a slash
    files: tuple[MadeFile, ...]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(file.name for file in self.files))

    @property
    def num_nodes(self) -> int:
        return len({file.node for file in self.files})

    @property
    def size_bytes(self) -> int:
        """Of each file once, the largest where nodes differ."""
        sizes: dict[str, int] = {}
        for file in self.files:
            sizes[file.name] = max(file.size_bytes, sizes.get(file.name, 0))
        return sum(sizes.values())


# ---- which files it is


def list_models(job: Job) -> tuple[list[Model], list[MadeFile], bool]:
    """The models, the likeliest first, what else the job has made, and whether there is more. Raises: DetrainError."""
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
    """The models, the likeliest first. One that torch has cut into a folder is one where there is no other."""
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
        elif together := pieces.pop(_whole_of(file), []):  # else it is in another one
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
    """The name that all shards of a model share."""
    return _SHARD.sub(".", file.name)


def _choose_cut(made: Sequence[MadeFile]) -> list[Model]:
    """Folders in which torch keeps a model in pieces, the one written last first."""
    heads = [file.name for file in made if PurePosixPath(file.name).name == _OF_DCP and "/" in file.name]
    found: dict[str, list[MadeFile]] = {_folder_of(name): [] for name in heads if not _is_in_checkpoint(name)}
    for file in made:
        for folder in {f"{above}/" for above in PurePosixPath(file.name).parents} & found.keys():
            found[folder].append(file)
    models = [Model(folder, tuple(files)) for folder, files in found.items()]
    return sorted(models, key=lambda model: -max(file.written_at for file in model.files))


def _folder_of(name: str) -> str:
    """With a slash at its end; empty for what is in none."""
    return name[: name.rfind("/") + 1]


def _is_in_checkpoint(name: str) -> bool:
    return any(CHECKPOINT_FOLDER.fullmatch(part) for part in name.split("/")[:-1])


# ---- its files, fetched


def fetch_models(
    job: Job, models: Sequence[Model], folder: str, on_bytes: OnBytes, *, num_nodes: int = 1, cancel: Stop | None = None
) -> Fetched:
    """Copy them, of as many nodes as may have one of their names, into ``folder``, each file whole by its SHA-256.

    Raises: DetrainError, Refused where nodes say that they are larger than they have said before.
    """
    told = sum(file.size_bytes for model in models for file in model.files)

    def note(done: int, total: int) -> None:
        if total > told * num_nodes:
            raise Refused(f"it has grown from {format_size(told)} to {format_size(total)}: show the job again")
        on_bytes(done, total)

    return _fetch(job, models, folder, note, cancel)


def _fetch(job: Job, models: Sequence[Model], folder: str, on_bytes: OnBytes, cancel: Stop | None) -> Fetched:
    """What ``on_bytes`` raises ends it, before much has come."""
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
    """Fetch one, of as many nodes as have its names, into ``folder``; returns where it is: several files are a .zip.

    Raises: DetrainError, Refused for one too large, also where its node says so only now.
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
        raise Refused(f"{file.name} is not there any more")
    return folder / "fetched" / found


def _pack(root: Path, names: Sequence[str], packed: Path) -> Path:
    with zipfile.ZipFile(packed, "w", strict_timestamps=False) as archive:
        for name in names:
            archive.write(root / name, name)
            (root / name).unlink()
    return packed


# ---- in words


def describe_models(models: Sequence[Model], *, has_many_nodes: bool) -> list[dict[str, Any]]:
    """The first of them as pages get them; their names are those of files, which `check_name` has let in."""
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
    """Name what is no model, by folder and size, and the ``command`` that brings it; nothing where there is none.

    ``has_more``: there is more than was listed.
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
    more = ", and more that is not listed" if has_more else ""
    return one_line(f"{name_some(words)}{more}: {command}", most_chars=1000) if words else ""
