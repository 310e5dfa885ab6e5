"""Ignore rules that decide which files stay here: the lines git reads, in git's order, then those of .detrainignore.

Git's lines are core.excludesFile, .git/info/exclude and every .gitignore. Git is run only to read the user's own
configuration, outside of any repository: a repository can neither have a program run nor name another file to read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from ..copying.sender import open_regular
from ..errors import SpecError
from ..guarded import can_others_write

__all__ = ["GIT_FILE", "OWN_FILE", "Rules", "cannot_read", "extend", "is_left_out", "read_rules_above"]

GIT_FILE, OWN_FILE = ".gitignore", ".detrainignore"
_MOST_BYTES, _MOST_PATTERNS = 1 << 20, 5000  # of one file with patterns
# Matching tries every way to distribute the folders of a path among the ``**`` of a pattern.
_MOST_DOUBLE = 3
_MOST_DEEP = 64
_MOST_LINE_CHARS = 4096
_STAR = r"\[\^/\]\*"  # the regular expression that pathspec writes for a star
_PIECE = re.compile(rf"{_STAR}((?:(?!{_STAR})(?:\\.|\[\^?\]?[^\]]*\]|[^\\\[()/]))*)(?={_STAR})", re.DOTALL)
_ASK_LIMIT_S = 5.0
_PATHS_KEPT = 100_000


@dataclass(frozen=True, eq=False)  # compared by identity: a quick key
class Rules:
    """Rules that apply in a folder: the lines from the outermost folder down to it, and their compiled patterns.

    ``lifted`` are the lines of ``own`` with ``!`` and a name: files they match are not private.
    """

    git: tuple[str, ...]
    own: tuple[str, ...]
    lifted: tuple[str, ...]
    of_files: GitIgnoreSpec
    of_folders: GitIgnoreSpec

    @property
    def num_patterns(self) -> int:
        return len(self.git) + len(self.own)


def read_rules_above(top: Path) -> tuple[str, Rules]:
    """Return the path from the top of the repository to ``top``, and the rules along it. Raises: SpecError."""
    of_user = _read_lines(_users_file(), "")
    nothing = "", _compile(of_user, ())
    repository = next((folder for folder in (top, *top.parents) if os.path.exists(folder / ".git")), top)
    parts = top.relative_to(repository).parts
    prefix, rules = "", _compile(of_user + _read_exclude(repository), ())
    for part in parts:
        folder = str(repository / prefix)
        git = _read_above(os.path.join(folder, GIT_FILE), prefix)
        own = _read_above(os.path.join(folder, OWN_FILE), prefix, may_send=False)
        rules = _compile(rules.git + git, rules.own + own) if git or own else rules
        if is_left_out(rules, prefix + part, is_folder=True):
            return nothing
        prefix += f"{part}/"
    return prefix, rules


def _read_exclude(repository: Path) -> tuple[str, ...]:
    folder = repository / ".git"
    return _read_of(str(folder), lambda: _read_lines(os.path.join(_git_folder(repository), "info/exclude"), ""))


def _read_above(path: str, prefix: str, *, may_send: bool = True) -> tuple[str, ...]:
    return _read_of(path, lambda: _read_lines(path, prefix), may_send=may_send)


def _read_of(path: str, read: Callable[[], tuple[str, ...]], *, may_send: bool = True) -> tuple[str, ...]:
    """Read lines of ``path``, in a folder above the notebook's, which may be a shared one such as /tmp.

    A faulty file that others can write is ignored, not an error; without ``may_send``, its ``!`` lines are dropped, so
    that others cannot cause files to be sent.
    Raises: SpecError for a faulty file that only the user can write.
    """
    try:
        is_others = can_others_write(os.lstat(path), Path(path))
    except OSError:
        return ()
    try:
        lines = read()
    except SpecError:
        if is_others:
            return ()
        raise
    return tuple(line for line in lines if may_send or not is_others or not line.startswith("!"))


def extend(rules: Rules, folder: str, prefix: str, names: set[str]) -> Rules:
    """Add the rules of ``folder``, whose entries are ``names``. Raises: SpecError."""
    git = _read_lines(os.path.join(folder, GIT_FILE), prefix) if GIT_FILE in names else ()
    own = _read_lines(os.path.join(folder, OWN_FILE), prefix) if OWN_FILE in names else ()
    return _compile(rules.git + git, rules.own + own) if git or own else rules


@lru_cache(maxsize=_PATHS_KEPT)
def is_left_out(rules: Rules, path: str, *, is_folder: bool) -> bool:
    """Return True when the rules exclude ``path``, relative to the top of the repository, with slashes.

    Raises: SpecError when the path is too deep to match.
    """
    if path.count("/") > _MOST_DEEP:
        raise SpecError(f"{path} is more than {_MOST_DEEP} folders deep: list it, or a folder above it, in {OWN_FILE}")
    return (rules.of_folders if is_folder else rules.of_files).match_file(path)


def cannot_read(name: str, error: OSError) -> SpecError:
    """Return the error for a file or folder that cannot be read."""
    return SpecError(f"{name} cannot be read: {error.strerror}: make it readable, or list it in {OWN_FILE}")


def _read_lines(path: str, prefix: str) -> tuple[str, ...]:
    lines = _read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if (double := line.split("/").count("**")) > _MOST_DOUBLE:
            raise SpecError(
                f"{path}, line {number} contains ** {double} times, more than {_MOST_DOUBLE}: use fewer in a pattern"
            )
        if len(line) > _MOST_LINE_CHARS and line[0] != "#":
            raise SpecError(
                f"{path}, line {number} has {len(line)} characters, more than {_MOST_LINE_CHARS}: shorten the pattern"
            )
    found = tuple(_anchor(line, prefix) for line in lines if line.strip() and line[0] != "#")
    if len(found) > _MOST_PATTERNS:
        raise SpecError(f"{path} has {len(found)} patterns, more than {_MOST_PATTERNS}: list folders, not their files")
    return found


def _read_text(path: str) -> str:
    """Return the text of a file; empty when it is missing or is not a regular file, such as a pipe or a device."""
    try:
        with open_regular(os.path.realpath(path)) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        if not os.path.isfile(path):
            return ""
        raise cannot_read(path, exc) from exc
    if len(data) > _MOST_BYTES:
        raise SpecError(f"{path} has more than {_MOST_BYTES} bytes: remove patterns")
    return data.decode("utf-8-sig", errors="surrogateescape")


def _git_folder(repository: Path) -> str:
    """Return the .git folder that all worktrees share; in a worktree or submodule, .git is a file that points to it."""
    path = str(repository / ".git")
    if os.path.isfile(path):
        path = _follow(str(repository), _read_text(path).removeprefix("gitdir:"))
        path = _follow(path, _read_text(os.path.join(path, "commondir")))
    return path


def _follow(folder: str, said: str) -> str:
    """Return the path ``said`` in a file of ``folder``; UNC paths are ignored, as Windows would log in at that host."""
    is_path = "\0" not in said and not said.strip().startswith(("//", "\\\\"))
    return os.path.join(folder, said.strip()) if is_path else folder


def _users_file() -> str:
    """Return core.excludesFile of the user's git configuration; empty for none."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return _ask_git(os.environ.get("HOME"), config)


@lru_cache(maxsize=10)  # git is run once per kernel, as the rules are read before each cell
def _ask_git(_home: str | None, config: str) -> str:
    usual = os.path.join(config, "git", "ignore")
    git = shutil.which("git")
    if git is None or not os.path.isabs(git):  # a program in the current folder is not the user's
        return usual
    try:
        answer = subprocess.run(
            [git, "config", "--null", "--path", "--get", "core.excludesFile"],
            cwd=os.path.dirname(git),
            env={**os.environ, "GIT_DIR": os.devnull},  # no repository's configuration is read
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ASK_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return usual
    if answer.returncode != 0:
        return usual
    path = os.fsdecode(answer.stdout.removesuffix(b"\0"))
    return path if os.path.isabs(path) else ""


def _anchor(line: str, prefix: str) -> str:
    """Rewrite a pattern of the folder ``prefix`` as a pattern of the outermost folder."""
    if not prefix:
        return line
    sign, pattern = ("!", line[1:]) if line.startswith("!") else ("", line)
    core = pattern.rstrip().rstrip("/")
    if not core:
        return ""
    anywhere = "" if "/" in core else "**/"
    return sign + re.sub(r"([\\*?\[\]!# ])", r"\\\1", prefix) + anywhere + pattern.lstrip("/")


class _Pattern(GitIgnoreSpecPattern):
    """Pattern whose matching time is linear in the length of a name: each star takes the first match."""

    @classmethod
    def pattern_to_regex(cls, pattern: Any) -> tuple[Any, bool | None]:
        regex, include = super().pattern_to_regex(pattern)
        if regex is None or _PIECE.search(regex) is None:
            return regex, include
        linear = _PIECE.sub(r"(?>[^/]*?\1)", regex)
        try:
            re.compile(linear)
        except re.error:
            raise ValueError(f"{pattern!r} cannot be read") from None
        return linear, include


def _compiled(lines: Iterable[str]) -> GitIgnoreSpec:
    return GitIgnoreSpec([pattern for line in lines if (pattern := _pattern(line))], backend="simple")


@lru_cache(maxsize=4 * _MOST_PATTERNS)  # the lines of a folder apply again in each of its subfolders
def _pattern(line: str) -> _Pattern | None:
    """Compile a line; None for an invalid pattern, such as ``[?-.]`` or a lone ``!``, which git ignores too."""
    with warnings.catch_warnings(), contextlib.suppress(ValueError, re.error):
        warnings.simplefilter("ignore", FutureWarning)  # of re: a [ in brackets may have a meaning some day
        return _Pattern(line)
    return None


@lru_cache(maxsize=1000)
def _compile(git: tuple[str, ...], own: tuple[str, ...]) -> Rules:
    """Compile the lines once for files and once for folders; for folders, ``a/`` and ``a`` are equivalent.

    pathspec recognises a folder by its trailing slash, and would then rank ``a`` below an earlier ``!*``.
    """
    lines = [re.sub(r"\*\*/\s*$", "**/*/", line) for line in git + own if _pattern(line)]
    of_folders = _compiled(re.sub(r"/\s*$", "", line) for line in lines)
    lifted = tuple(line for line in own if line.startswith("!") and _pattern(line))
    return Rules(git, own, lifted, _compiled(lines), of_folders)
