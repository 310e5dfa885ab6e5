"""The first of our code on a node: sent as text to the node's Python, reports what exists, and unpacks what is missing.

It then becomes the attach program, copying/remote_program.py, or node/job/service.py. Standard library only; nothing
newer than Python 3.7 before it has reported its version.

It writes lines of JSON to stdout, after a line that nothing else prints, and reads lines of JSON from stdin. See
deploy/bootstrapped_node.py. A notebook that returns to many nodes waits for this program on all of them: imports that
only some tasks need are in these tasks.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from detrain_nb.guarded import describe, find_guest_parent
from detrain_nb.node.ssh.addresses import list_addresses

MAGIC = b"\ndetrain-nb bootstrap 1\n"
OLDEST_PYTHON = (3, 10)
HOLD_LIMIT_S = 30.0
LIST_NAME = ".files.json"  # in a folder of code: the other files in it, with sizes


def main() -> None:
    """Report the state of this node, then follow the notebook's orders until one says what to become."""
    sys.stdout.buffer.write(MAGIC)
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        found = platform.python_version()
        _fail(f"Python {found} ({sys.executable}) is too old: choose Python {needed} or newer")
    users_umask = os.umask(0o077)  # private: only this user may read or change our files
    cache = _find_folder()
    hold = _hold(cache)
    _say("facts", **_look_around(cache))
    while True:
        order = _read_line()
        if order["type"] == "unpack":
            _unpack(order, cache)
            continue
        incomplete = [digest for digest in order["code"] if not _is_whole(os.path.join(cache, digest))]
        _say("code", incomplete=incomplete)
        if not incomplete:
            break
    code = [os.path.join(cache, digest) for digest in order["code"]]
    os.umask(users_umask)
    sys.path[:0] = code[:1]  # import from there from now on
    if order["type"] == "files":
        from detrain_nb.copying.remote_program import main as serve_files

        serve_files()
    elif order["type"] == "jobs":
        from detrain_nb.node.job.service import main as serve_jobs

        os.environ["PYTHONPATH"] = os.pathsep.join([code[0], *filter(None, [os.environ.get("PYTHONPATH")])])
        os.utime(code[0])  # counts as use for a month; a longer job renews it itself
        os.close(hold)
        serve_jobs()
    else:
        from detrain_nb.node.ssh import attach

        attach.main(order, cache=cache, code=code, hold=hold)


def _unpack(order: dict[str, Any], cache: str) -> None:
    """Turn an archive, which the notebook sends next, into a folder, atomically."""
    import tempfile
    import zipfile

    handle, path = tempfile.mkstemp(prefix=".incoming-", dir=cache)
    try:
        with os.fdopen(handle, "wb") as file:
            _copy_exactly(order["size"], file)
        _unpack_whole(path, os.path.join(cache, order["digest"]), order["digest"])
    except (OSError, zipfile.BadZipFile, ValueError) as exc:
        _fail(f"cannot unpack detrain_nb in {cache}: {exc}")
    finally:
        os.unlink(path)
    _say("unpacked")


def _unpack_whole(archive: str, folder: str, digest: str) -> None:
    """Write everything to disk before the folder gets its name: power may fail at any moment."""
    import hashlib
    import shutil
    import tempfile
    import zipfile

    with open(archive, "rb") as file:
        if not hashlib.sha256(file.read()).hexdigest().startswith(digest):
            raise ValueError("it arrived damaged")
    made = tempfile.mkdtemp(prefix=".unpacking-", dir=os.path.dirname(folder))
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(made)
            sizes = {info.filename: info.file_size for info in packed.infolist()}
        with open(os.path.join(made, LIST_NAME), "w", encoding="utf-8") as file:
            json.dump(sizes, file)
        _sync_tree(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not os.path.isdir(folder):
                raise
            _mend(folder, made, sizes)
        _sync(os.path.dirname(folder))
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _mend(folder: str, made: str, sizes: dict[str, int]) -> None:
    """Replace broken files one by one: ranks of other sessions may be importing from the folder."""
    for name in [*_find_broken(folder, sizes), LIST_NAME]:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(os.path.join(made, name), path)
    _sync_tree(folder)


def _sync_tree(folder: str) -> None:
    for path, _, names in os.walk(folder):
        for name in [*names, "."]:
            _sync(os.path.join(path, name))


def _sync(path: str) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_whole(folder: str) -> bool:
    """Return whether no file of that code is missing or truncated.

    A folder without a list of its files, from an older version or after a crash, is not whole.
    """
    try:
        with open(os.path.join(folder, LIST_NAME), encoding="utf-8") as file:
            return not _find_broken(folder, json.load(file))
    except (OSError, ValueError, AttributeError):
        return False


def _find_broken(folder: str, sizes: dict[str, int]) -> list[str]:
    return [name for name, size in sizes.items() if _find_size(os.path.join(folder, name)) != size]


def _find_size(path: str) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _copy_exactly(size: int, file: IO[bytes]) -> None:
    while size:
        data = sys.stdin.buffer.read(min(size, 1 << 20))
        if not data:
            raise ValueError("the notebook hung up")
        file.write(data)
        size -= len(data)


# ---- the state of the node


def _find_folder() -> str:
    """Return the folder for our code and sessions: in the home, or in the temporary folder if that one is unusable."""
    tried = []
    for wanted in _possible_folders():
        folder = os.path.join(os.path.realpath(os.path.dirname(wanted)), os.path.basename(wanted))
        try:
            parent = find_guest_parent(Path(folder))
            if parent:
                tried.append(f"{folder}: others could replace it, as they can write to {describe(parent)}")
                continue
            try:
                os.makedirs(folder, mode=0o700)
            except FileExistsError:
                pass
            fault = _what_lets_others_in(folder)
            if fault:
                _fail(f"{folder} {fault}")
            draft = os.path.join(folder, f".incoming-{os.urandom(8).hex()}")
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(draft)
            return folder
        except OSError as exc:
            tried.append(f"{folder}: {exc.strerror or exc}")
    return _fail("no folder for detrain_nb can be used: " + "; ".join(tried))


def _possible_folders() -> Iterator[str]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield os.path.join(base, "detrain_nb")
    import tempfile

    yield os.path.join(tempfile.gettempdir(), f"detrain_nb-{os.getuid()}")


def _hold(cache: str) -> int:
    """Share the lock of our folder: until it is closed, nothing in the folder is removed; see cache_cleanup.py."""
    import fcntl

    lock = os.open(os.path.join(cache, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + HOLD_LIMIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:  # held for the moment that renaming takes
            if time.monotonic() >= deadline:
                _fail(f"{cache}/.lock is held by another process: stop that process")
            time.sleep(0.01)
        except OSError:  # no locks there: no process can hold it exclusively either
            return lock


def _what_lets_others_in(folder: str) -> str:
    """Return why others could change our code; empty if they cannot."""
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode):
        return "is not a directory: remove it"
    if state.st_uid != os.getuid():
        return f"belongs to uid {state.st_uid}: remove it"
    if state.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(state.st_mode):04o}): chmod 700 {folder}"
    return ""


def _look_around(cache: str) -> dict[str, Any]:
    return {
        "python": sys.executable,
        "python_version": list(sys.version_info[:3]),
        "system": platform.system(),
        "host": platform.node(),
        "home": os.path.expanduser("~"),
        "cache": cache,
        "have": [name for name in os.listdir(cache) if len(name) == 32],
        "versions": _find_versions(["torch", "ipython", "numpy"]),
        "addresses": list_addresses(),
        "reached_at": "".join(os.environ.get("SSH_CONNECTION", "").split(" ")[2:3]),
    }


def _find_versions(names: list[str]) -> dict[str, str]:
    """Return the versions of installed packages without importing them; empty for missing ones."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue  # it may not exist, or be an archive
        for entry in entries:
            name, _, rest = entry.partition("-")
            if rest.endswith(".dist-info") and name.lower() in names:
                found.setdefault(name.lower(), rest[: -len(".dist-info")])
    return {name: found.get(name) or _find_version(name) for name in names}


def _find_version(name: str) -> str:
    """Return the version of a package that was installed in another way."""
    from importlib import metadata, util

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown" if util.find_spec(name) else ""


# ---- lines


def _say(kind: str, **fields: Any) -> None:
    sys.stdout.buffer.write(json.dumps(dict(fields, type=kind)).encode() + b"\n")
    sys.stdout.buffer.flush()


def _fail(text: str) -> NoReturn:
    _say("failed", text=text)
    sys.exit(1)


def _read_line() -> dict[str, Any]:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    order: dict[str, Any] = json.loads(line.decode())
    return order


if __name__ == "__main__":
    main()
