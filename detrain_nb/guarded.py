"""What is executed, or believed, is nobody else's to change: the rule for files and folders."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

# How a folder is opened to go through it, or write to it: one that cannot be listed, too.
SEARCH = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", os.O_RDONLY)
_ACL_HEADER_BYTES = 4
_ACL_ENTRY = struct.Struct("<HHI")  # a tag, what is allowed, whom
_ACL_NAMED = (0x02, 0x08)  # a user, a group

# ``python -c RUN_MODULE MODULE`` is ``python -m MODULE`` that imports nothing from the folder in which it is started.
# Python 3.11 has ``-P`` for that; its variable would reach the user's programs.
RUN_MODULE = (
    "import os, sys; sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd())]; import runpy; "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def can_others_write(state: os.stat_result, of: Path | int) -> bool:
    """By its owner and mode, as OpenSSH asks: it is neither ours nor root's, or its group, or all, can write it.

    A group that only has the user in it, made with the account on many systems, counts as the user. ``of``: its path,
    or a descriptor of it; an access control list may name others.
    """
    if not hasattr(os, "getuid"):
        return False
    if state.st_uid not in _trusted_users():
        return True
    if state.st_mode & 0o002:
        return True
    return bool(state.st_mode & 0o020) and (not _is_own_group(state) or _names_writers(of))  # 0o020 is the list's mask


def open_file(path: str | os.PathLike[str], *, may_be_link: bool = True) -> BinaryIO:
    """Open a file to read; a pipe or a device, of which nobody knows when it ends, is none. Raises: OSError.

    On Windows nobody looks.
    """
    if not hasattr(os, "O_NOFOLLOW"):
        return open(path, "rb")
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if may_be_link else os.O_NOFOLLOW))
    except OSError as exc:
        raise OSError(exc.errno, "it is a link" if exc.errno == errno.ELOOP else os.strerror(exc.errno or 0)) from exc
    kind = os.fstat(opened).st_mode
    if stat.S_ISREG(kind):
        return _WhatIsThere(io.FileIO(opened))
    os.close(opened)  # open() would raise for a folder, and leave it open
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is no file")


class _WhatIsThere(io.BufferedReader):
    """Some files, as those of /proc, never end: what is there now is read, and nothing is waited for."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size) or b""


def find_guest_parent(folder: Path) -> Path | None:
    """The first folder above ``folder``, a path without links, in which others can put another one in its place.

    A sticky folder like /tmp is none. One that is not there yet is passed over. Raises: OSError.
    """
    above: os.stat_result | None = None
    for parent in reversed(folder.parents):
        with contextlib.suppress(FileNotFoundError):
            state = parent.lstat()
            is_sticky = state.st_mode & stat.S_ISVTX and state.st_uid in _trusted_users()
            is_squatted = above is not None and _is_squatted(state, above, parent)
            if stat.S_ISLNK(state.st_mode) or is_squatted or (can_others_write(state, parent) and not is_sticky):
                return parent
            above = state
    return None


def make_users_folder(folder: Path) -> None:
    """Make a folder that the user has named, and those above it.

    Raises: OSError, also for one that another user has made, or put a link to, where everybody can, as in /tmp: nobody
    says that the user means that one.
    """
    os.close(open_users_folder(folder, is_made=True))


def state_folder() -> Path:
    """The folder of what is kept of this user for months, made if need be; as `make_private_folder`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return make_private_folder(
        Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"), "detrain_nb")
    )


def make_private_folder(folder: Path) -> Path:
    """Make a folder that only its user can enter, or find one; return its path, without links above it.

    Raises: OSError, also for one that others can enter, or put another one in the place of.
    """
    folder = Path(os.path.realpath(folder.parent), folder.name)
    guest = find_guest_parent(folder)  # an old Python on a node reads this module too, to say how old it is
    if guest is not None:
        raise PermissionError(f"others can put another one in the place of {folder}: they can write {describe(guest)}")
    make_parents(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or (hasattr(os, "getuid") and not _is_own(state, folder)):
        raise PermissionError(f"{describe(folder, state)} is not a folder of this user: remove it")
    if hasattr(os, "getuid") and state.st_mode & 0o077:
        raise PermissionError(f"{describe(folder, state)} is open to others: chmod 700 {folder}")
    return folder


def make_parents(folder: Path) -> None:
    """Make the folders above it that are not there, for their user alone: a umask of 002 would open them to a group.

    Raises: OSError.
    """
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)


def enter_users_folder(folder: Path) -> None:
    """Make it the current folder; it may have been exchanged since it was made. Raises: as `make_users_folder`."""
    opened = open_users_folder(folder, is_made=False)
    try:
        os.fchdir(opened)
    finally:
        os.close(opened)


def open_users_folder(folder: Path, *, is_made: bool) -> int:
    """Open it, for who writes into it whatever stands in the place of its name later. Raises: OSError."""
    refuse_squatted(folder)
    real = Path(os.path.realpath(folder))  # where the user's own links lead
    opened = os.open(real.anchor, SEARCH)
    try:
        for number, name in enumerate(real.parts[1:], 2):
            inner = open_inside(name, opened, Path(*real.parts[:number]), is_made=is_made)
            os.close(opened)
            opened = inner
        refuse_squatted(folder)
    except BaseException:
        os.close(opened)
        raise
    return opened


def open_inside(name: str, parent: int, path: Path, *, is_made: bool) -> int:
    """Open a folder of an opened one, which is ``path``. Raises: OSError, also for a link, or another user's."""
    inner = _open_or_make(name, parent) if is_made else _open_in(name, parent)
    state = os.fstat(inner)
    if _is_squatted(state, os.fstat(parent), inner):
        os.close(inner)
        raise _by_another_user(path, state)
    return inner


def _open_or_make(name: str, parent: int) -> int:
    """A folder of an opened one, which nobody can put another in the place of before it is looked at."""
    with contextlib.suppress(FileNotFoundError):
        return _open_in(name, parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return _open_in(name, parent)


def _open_in(name: str, parent: int) -> int:
    return os.open(name, SEARCH | os.O_NOFOLLOW, dir_fd=parent)


def refuse_squatted(folder: Path) -> None:
    """Raises: OSError for one that is not the user's, as `make_users_folder`."""
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if _is_squatted(state, path.parent.stat(), path):
                raise _by_another_user(path, state)


def _is_squatted(state: os.stat_result, parent: os.stat_result, of: Path | int) -> bool:
    """In a user namespace root outside has the number that all others have: there its folders are none of ours, too."""
    return bool(parent.st_mode & 0o002) and state.st_uid != 0 and not _is_own(state, of)  # 0 on Windows


def _is_own(state: os.stat_result, of: Path | int) -> bool:
    if state.st_uid != os.getuid() or not shares_its_number():
        return state.st_uid == os.getuid()
    place = f"/proc/self/fd/{of}" if isinstance(of, int) else of  # a descriptor may be only a place
    try:  # only its owner can
        os.chmod(place, stat.S_IMODE(state.st_mode), follow_symlinks=isinstance(of, int))
    except (OSError, NotImplementedError):
        return False
    return True


def shares_its_number() -> bool:
    """In this user namespace others have the user's number: the one of all who have none there, as nobody's is."""
    return os.getuid() in _strangers()


def _by_another_user(path: Path, state: os.stat_result) -> PermissionError:
    made = describe(path, state)
    return PermissionError(f"{made} was made by another user, in a folder that is everybody's: name one of your own")


def describe(path: Path, state: os.stat_result | None = None) -> str:
    """The path with its mode and owner, for a message. Raises: OSError."""
    state = state or path.lstat()
    return f"{path} (mode {stat.S_IMODE(state.st_mode):04o}, uid {state.st_uid})"


def _trusted_users() -> set[int]:
    """Root and this user; where root is outside our user namespace, the number that stands for all who are."""
    return {0, os.getuid(), *_strangers()}


def _strangers() -> set[int]:
    """The number that stands for all who have none in our user namespace; none where it has all."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", "4294967295"]:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))}
    return set()


def _is_own_group(state: os.stat_result) -> bool:
    """It is the user's first group, has the user's name, and no other member; nor is it the first of somebody else."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(state.st_gid)
    except KeyError:  # they have no names
        return False
    is_first = (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name)
    is_of_nobody_else = set(group.gr_mem) <= {user.pw_name} and _users_of_first_group(group.gr_gid) <= {user.pw_uid}
    return state.st_uid == user.pw_uid and is_first and is_of_nobody_else


@lru_cache(maxsize=8)
def _users_of_first_group(gid: int) -> frozenset[int]:
    """Those that the system lists: a directory service may keep its own to itself."""
    import pwd

    return frozenset(each.pw_uid for each in pwd.getpwall() if each.pw_gid == gid)


def _names_writers(of: Path | int) -> bool:
    """Its access control list, in the form of Linux, lets somebody write whom it names."""
    try:
        listed = os.getxattr(of, "system.posix_acl_access")
    except (OSError, AttributeError):  # it has none, or this system has none of that form
        return False
    entries = [
        listed[begin : begin + _ACL_ENTRY.size] for begin in range(_ACL_HEADER_BYTES, len(listed), _ACL_ENTRY.size)
    ]
    return any(
        tag in _ACL_NAMED and may & 0o2 and number != os.getuid()
        for tag, may, number in map(_ACL_ENTRY.unpack, entries)
    )
