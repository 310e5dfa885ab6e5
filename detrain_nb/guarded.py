"""The rule for files and folders whose content is executed or trusted: no other user can change them."""

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

# Flags to open a folder for traversal or writing; they also work for a folder that cannot be listed.
SEARCH = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", os.O_RDONLY)
_ACL_HEADER_BYTES = 4
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, uid or gid
_ACL_NAMED = (0x02, 0x08)  # the tags of a named user and a named group

# ``python -c RUN_MODULE MODULE`` is ``python -m MODULE`` that imports nothing from the current folder.
# Python 3.11 has ``-P`` for that; its variable would reach the user's programs.
RUN_MODULE = (
    "import os, sys; sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd())]; import runpy; "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def can_others_write(state: os.stat_result, of: Path | int) -> bool:
    """Return whether other users can write to a file or folder, judged by owner and mode as OpenSSH does.

    They can if it belongs to neither this user nor root, or is writable for its group or for all. A group whose only
    member is the user, which many systems create with the account, counts as the user. ``of`` is the path or an open
    descriptor, whose access control list may name other users.
    """
    if not hasattr(os, "getuid"):
        return False
    if state.st_uid not in _trusted_users():
        return True
    if state.st_mode & 0o002:
        return True
    return bool(state.st_mode & 0o020) and (not _is_own_group(state) or _names_writers(of))  # 0o020 is the list's mask


def open_file(path: str | os.PathLike[str], *, may_be_link: bool = True) -> BinaryIO:
    """Open a regular file for reading; pipes and devices, which may never end, are refused. Raises: OSError.

    On Windows this is not checked.
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
    os.close(opened)  # open() would raise for a folder and leak the descriptor
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is not a regular file")


class _WhatIsThere(io.BufferedReader):
    """Reader that returns what is available and never waits for more: some files, such as those of /proc, never end."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size) or b""


def find_guest_parent(folder: Path) -> Path | None:
    """Return the first parent of ``folder``, a path without links, in which other users could replace the next folder.

    A sticky folder such as /tmp does not count. Parents that do not exist yet are skipped. Raises: OSError.
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
    """Create a folder that the user has named, and its parents.

    Raises: OSError, also when another user has created the folder, or a link to it, in a world-writable folder such as
    /tmp: it need not be the folder that this user means.
    """
    os.close(open_users_folder(folder, is_made=True))


def state_folder() -> Path:
    """Return the folder for this user's long-lived state, created as `make_private_folder` does. Raises: OSError."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return make_private_folder(
        Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"), "detrain_nb")
    )


def make_private_folder(folder: Path) -> Path:
    """Create a folder that only its user can enter, if missing; return its path, without links among its parents.

    Raises: OSError, also for a folder that other users can enter or replace.
    """
    folder = Path(os.path.realpath(folder.parent), folder.name)
    guest = find_guest_parent(folder)  # no :=, as an old Python on a node also reads this module, to report its age
    if guest is not None:
        raise PermissionError(f"other users can replace {folder}: they can write to {describe(guest)}")
    make_parents(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or (hasattr(os, "getuid") and not _is_own(state, folder)):
        raise PermissionError(f"{describe(folder, state)} is not a folder that belongs to this user: remove it")
    if hasattr(os, "getuid") and state.st_mode & 0o077:
        raise PermissionError(f"{describe(folder, state)} is open to others: chmod 700 {folder}")
    return folder


def make_parents(folder: Path) -> None:
    """Create the missing parents of ``folder``, private to the user: a umask of 002 would open them to a group.

    Raises: OSError.
    """
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)


def enter_users_folder(folder: Path) -> None:
    """Make ``folder`` the current folder; checks again who made it. Raises: as `make_users_folder`."""
    opened = open_users_folder(folder, is_made=False)
    try:
        os.fchdir(opened)
    finally:
        os.close(opened)


def open_users_folder(folder: Path, *, is_made: bool) -> int:
    """Open ``folder``; writes through the descriptor reach this folder even if its path is replaced later.

    Raises: OSError.
    """
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
    """Open the folder ``name``, whose full path is ``path``, in an open one.

    Raises: OSError, also for a link, or a folder that another user has created.
    """
    inner = _open_or_make(name, parent) if is_made else _open_in(name, parent)
    state = os.fstat(inner)
    if _is_squatted(state, os.fstat(parent), inner):
        os.close(inner)
        raise _by_another_user(path, state)
    return inner


def _open_or_make(name: str, parent: int) -> int:
    """Open a folder in an open one, created if missing, so that it cannot be replaced before it is checked."""
    with contextlib.suppress(FileNotFoundError):
        return _open_in(name, parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return _open_in(name, parent)


def _open_in(name: str, parent: int) -> int:
    return os.open(name, SEARCH | os.O_NOFOLLOW, dir_fd=parent)


def refuse_squatted(folder: Path) -> None:
    """Check that no other user has created the folder or a parent of it. Raises: OSError, as `make_users_folder`."""
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if _is_squatted(state, path.parent.stat(), path):
                raise _by_another_user(path, state)


def _is_squatted(state: os.stat_result, parent: os.stat_result, of: Path | int) -> bool:
    """Return whether another user has created a folder in a world-writable one.

    In a user namespace the outer root has the uid of all unmapped users, so its folders do not count as root's there.
    """
    return bool(parent.st_mode & 0o002) and state.st_uid != 0 and not _is_own(state, of)  # 0 on Windows


def _is_own(state: os.stat_result, of: Path | int) -> bool:
    if state.st_uid != os.getuid() or not shares_its_number():
        return state.st_uid == os.getuid()
    place = f"/proc/self/fd/{of}" if isinstance(of, int) else of  # fchmod fails on a descriptor of O_PATH
    try:  # only the owner may chmod
        os.chmod(place, stat.S_IMODE(state.st_mode), follow_symlinks=isinstance(of, int))
    except (OSError, NotImplementedError):
        return False
    return True


def shares_its_number() -> bool:
    """Return whether this user has the uid that stands for all unmapped users of this user namespace."""
    return os.getuid() in _strangers()


def _by_another_user(path: Path, state: os.stat_result) -> PermissionError:
    made = describe(path, state)
    return PermissionError(f"{made} was made by another user in a world-writable folder: name a folder of your own")


def describe(path: Path, state: os.stat_result | None = None) -> str:
    """Format a path with its mode and owner for a message. Raises: OSError."""
    state = state or path.lstat()
    return f"{path} (mode {stat.S_IMODE(state.st_mode):04o}, uid {state.st_uid})"


def _trusted_users() -> set[int]:
    """Return the uids of root and this user, and that of unmapped users: the outer root of a namespace has it."""
    return {0, os.getuid(), *_strangers()}


def _strangers() -> set[int]:
    """Return the uid that stands for all unmapped users of our user namespace; empty when all are mapped."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", "4294967295"]:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))}
    return set()


def _is_own_group(state: os.stat_result) -> bool:
    """Return whether a group is the user's own: primary group of the user alone, of its name, without other members."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(state.st_gid)
    except KeyError:  # the uid or gid has no name
        return False
    is_first = (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name)
    is_of_nobody_else = set(group.gr_mem) <= {user.pw_name} and _users_of_first_group(group.gr_gid) <= {user.pw_uid}
    return state.st_uid == user.pw_uid and is_first and is_of_nobody_else


@lru_cache(maxsize=8)
def _users_of_first_group(gid: int) -> frozenset[int]:
    """Return the users with this primary group, as far as the system lists them; directory services may not."""
    import pwd

    return frozenset(each.pw_uid for each in pwd.getpwall() if each.pw_gid == gid)


def _names_writers(of: Path | int) -> bool:
    """Return whether a Linux access control list gives write access to a user or group that it names."""
    try:
        listed = os.getxattr(of, "system.posix_acl_access")
    except (OSError, AttributeError):  # there is no list, or this system has none of that form
        return False
    entries = [
        listed[begin : begin + _ACL_ENTRY.size] for begin in range(_ACL_HEADER_BYTES, len(listed), _ACL_ENTRY.size)
    ]
    return any(
        tag in _ACL_NAMED and may & 0o2 and number != os.getuid()
        for tag, may, number in map(_ACL_ENTRY.unpack, entries)
    )
