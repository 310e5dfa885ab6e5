"""A commit of a git repository with its submodules: fetched into a mirror in our cache, and checked out as files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...copying.json_lines import FilesError, check_name, clean
from ...errors import SpecError
from ...locks import take_lock
from ...plan.git_urls import GitUrl, check_git_ref, parse_git_url, resolve_submodule
from .blobs import touch
from .git_program import GitAccess, GitFailed, GitLimits, explain, run_git

__all__ = ["MOST_POINTERS", "GitPart", "fetch_parts", "find_pointers", "lay_out_part"]

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAYBE_COMMIT = re.compile(r"[0-9a-f]{4,64}")
_MIRROR = re.compile(r"[0-9a-f]{32}")
_ALL_REFS = ("+refs/heads/*:refs/detrain/heads/*", "+refs/tags/*:refs/detrain/tags/*")
_AS_THEY_ARE = "* -text -eol -ident -filter -working-tree-encoding\n"  # overrides .gitattributes
_WHOLE = "--depth=2147483647"  # git's notation for the full history, also if the mirror is shallow
_LOCK_LIMIT_S = 600.0
_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of a pointer file of git LFS
_POINTER_BYTES = 1024  # a pointer is shorter, by its specification
MOST_POINTERS = 4  # users see three names
_KEY = re.compile(r"submodule\.(.*)\.(path|url)", re.DOTALL)


@dataclass(frozen=True)
class GitPart:
    """A commit, and where it is checked out: its ``folder`` (empty: all of it) at ``place`` (empty: the top)."""

    mirror: str
    commit: str
    folder: str
    place: str

    @classmethod
    def read(cls, said: object) -> GitPart:
        """Read and check a stored part. Raises: FilesError."""
        if not isinstance(said, list) or len(said) != 4 or not all(isinstance(each, str) for each in said):
            raise FilesError("the record of the source is invalid")
        mirror, commit, folder, place = said
        if not _MIRROR.fullmatch(mirror) or not _COMMIT.fullmatch(commit):
            raise FilesError("the record of the source is invalid")
        for name in (folder, place):
            if name:
                check_name(name)
        return cls(mirror, commit, folder, place)


def fetch_parts(
    cache: Path,
    url: str,
    ref: str,
    *,
    folder: str = "",
    access: GitAccess | None = None,
    limits: GitLimits | None = None,
    tick: Callable[[], object] = lambda: None,
) -> list[GitPart]:
    """Fetch ``ref`` of a repository, and the submodules in ``folder``, into mirrors below ``cache``.

    The first part is that of the repository itself. Raises: FilesError.
    """
    access = access or GitAccess()
    try:
        place, ref = parse_git_url(url), check_git_ref(ref)
    except SpecError as exc:
        raise FilesError(str(exc)) from exc
    if access.token and not place.hides_token:
        raise FilesError(f"git {clean(url)}: a token is only sent over https, else others on the network could read it")
    if any(not char.isprintable() or char.isspace() for char in access.token):
        raise FilesError(f"git {clean(url)}: the token contains a space or control character: check its variable")
    if folder:
        check_name(folder)
    fetcher = _Fetcher(cache, access, limits or GitLimits(), tick)
    found = fetcher.fetch(place, ref, access, may_redirect=True)
    fetcher.gather(place, found, folder, "", depth=0)
    return fetcher.parts


class _Fetcher:
    """A fetch of a repository and its submodules, within common limits."""

    def __init__(self, cache: Path, access: GitAccess, limits: GitLimits, tick: Callable[[], object]) -> None:
        self.parts: list[GitPart] = []
        self._cache, self._access, self._limits, self._tick = cache, access, limits, tick
        self._num_files = self._num_bytes = self._fetched_bytes = 0

    def fetch(self, url: GitUrl, ref: str, access: GitAccess, *, may_redirect: bool = False) -> str:
        """Fetch a branch, tag or commit into the mirror unless it is there; return the commit."""
        mirror = self._mirror(url)
        with _locked(mirror, self._tick):
            if not (mirror / "HEAD").is_file():
                self._git(mirror.parent, "init", "--quiet", "--bare", "--template=", str(mirror))
            (mirror / "info").mkdir(exist_ok=True)
            (mirror / "info/attributes").write_text(_AS_THEY_ARE)
            touch(mirror)
            _remove_leftovers(mirror)
            if _COMMIT.fullmatch(ref) and (known := self._find(mirror, ref)):
                return known
            try:
                return self._fetch(url, mirror, ref, access, may_redirect=may_redirect)
            except GitFailed as exc:
                raise explain(exc, url, ref=ref, access=access) from exc

    def _fetch(self, url: GitUrl, mirror: Path, ref: str, access: GitAccess, *, may_redirect: bool) -> str:
        fresh = f"refs/detrain/new-{secrets.token_hex(8)}"
        try:
            only = f"+{ref or 'HEAD'}:{fresh}"
            self._fetch_refs(url, mirror, only, access=access, depth="--depth=1", may_redirect=may_redirect)
        except GitFailed as exc:
            if not exc.is_unknown_ref or not _MAYBE_COMMIT.fullmatch(ref):
                raise
            # an abbreviated hash, or a commit that the host does not serve by its hash
            self._fetch_refs(url, mirror, *_ALL_REFS, access=access, depth=_WHOLE, may_redirect=may_redirect)
            self._git(mirror, "pack-refs", "--all", "--prune")  # into one file
            if known := self._find(mirror, ref):
                return known
            raise
        commit = self._find(mirror, fresh)
        if not commit:
            raise FilesError(f"git {clean(url.text)}: {clean(ref)!r} is not a commit")
        # with a ref of its own: the next fetch transfers only newer objects
        self._git(mirror, "update-ref", f"refs/detrain/commits/{commit}", commit)
        self._git(mirror, "update-ref", "-d", fresh)
        return commit

    def _fetch_refs(
        self, url: GitUrl, mirror: Path, *refs: str, access: GitAccess, depth: str, may_redirect: bool
    ) -> None:
        def look() -> None:
            self._tick()
            if self._fetched_bytes + _size_of(mirror) - before > self._limits.fetched_bytes:
                raise FilesError(
                    f"git {clean(url.text)} sends more than {self._limits.fetched_bytes} bytes, including submodules: "
                    "it is too large"
                )

        before = _size_of(mirror)
        run_git(
            ["fetch", "--quiet", "--force", "--no-tags", "--no-recurse-submodules", depth, "--", url.text, *refs],
            cwd=str(mirror),
            limits=self._limits,
            limit_s=self._limits.fetch_s,
            url=url,
            access=access,
            may_redirect=may_redirect,
            tick=look,
        )
        look()  # a quick fetch may have ended without a check
        self._fetched_bytes += _size_of(mirror) - before

    def gather(self, url: GitUrl, commit: str, folder: str, place: str, *, depth: int) -> None:
        """Add the part of a commit and its place, and fetch the submodules in it, recursively."""
        mirror = self._mirror(url)
        tree = f"{commit}:{folder}"
        try:
            listed = self._git(mirror, "ls-tree", "-r", "-t", "-z", "-l", "--full-tree", tree)
        except GitFailed as exc:
            raise FilesError(f"git {clean(url.text)}: commit {commit[:12]} has no folder {clean(folder)!r}") from exc
        self.parts.append(GitPart(mirror.name, commit, folder, place))
        modules = self._count(listed)
        if len(self.parts) + len(modules) > self._limits.submodules or (modules and depth >= self._limits.depth):
            raise FilesError(
                f"git {clean(url.text)} has more than {self._limits.submodules} submodules, or nests them more than "
                f"{self._limits.depth} deep"
            )
        urls = self._read_urls(mirror, commit) if modules else {}
        for name, inner_commit in modules.items():
            path = f"{folder}/{name}" if folder else name
            if path not in urls:
                continue  # as git does, leave the folder of a submodule without URL empty
            try:
                inner = resolve_submodule(url, urls[path])
            except SpecError as exc:
                raise FilesError(f"git {clean(url.text)}: submodule {clean(path)!r}: {exc}") from exc
            self._fetch_submodule(url, inner, inner_commit)
            self.gather(inner, inner_commit, "", f"{place}/{name}" if place else name, depth=depth + 1)

    def _fetch_submodule(self, url: GitUrl, inner: GitUrl, commit: str) -> None:
        """Fetch a submodule, without the token if its owner differs: it could be a private repository of the user."""
        if inner.owner == url.owner or not self._access.token:
            self.fetch(inner, commit, self._access)
            return
        try:
            self.fetch(inner, commit, GitAccess())
        except FilesError as exc:
            said = f"the token is only used for submodules of {clean(url.owner)!r}, the owner of the repository: {exc}"
            raise FilesError(said) from exc

    def _count(self, listed: bytes) -> dict[str, str]:
        """Add up the files to check out; return the commits of submodules by their path. Raises: FilesError."""
        modules = {}
        for line in listed.split(b"\0")[:-1]:
            about, _, raw_name = line.partition(b"\t")
            mode, _, commit, size = about.decode("ascii").split()
            if mode == "160000":
                modules[check_name(raw_name.decode("utf-8", "surrogateescape"))] = commit
                continue
            self._num_files += 1
            self._num_bytes += int(size) if mode != "040000" else 0
        if self._num_files > self._limits.files or self._num_bytes > self._limits.laid_out_bytes:
            raise FilesError(
                f"the repository has {self._num_files} files and folders of {self._num_bytes} bytes; the limits are "
                f"{self._limits.files} and {self._limits.laid_out_bytes}: choose a folder of it (folder)"
            )
        return modules

    def _read_urls(self, mirror: Path, commit: str) -> dict[str, str]:
        """Return the URLs of .gitmodules by path."""
        with contextlib.suppress(GitFailed):
            pattern = r"^submodule\..*\.(path|url)$"
            listed = self._git(mirror, "config", "-z", "--blob", f"{commit}:.gitmodules", "--get-regexp", pattern)
            found: dict[str, dict[str, str]] = {}
            for line in listed.decode("utf-8", "surrogateescape").split("\0")[:-1]:
                key, _, value = line.partition("\n")
                if match := _KEY.fullmatch(key):
                    found.setdefault(match[1], {})[match[2]] = value
            return {each["path"]: each["url"] for each in found.values() if len(each) == 2}
        return {}

    def _find(self, mirror: Path, name: str) -> str:
        """Return the commit of a ref or hash; empty if the mirror does not have it."""
        with contextlib.suppress(GitFailed):
            said = self._git(mirror, "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}")
            return said.decode("ascii").split()[-1]
        return ""

    def _git(self, folder: Path, *args: str) -> bytes:
        return run_git(args, cwd=str(folder), limits=self._limits, tick=self._tick)

    def _mirror(self, url: GitUrl) -> Path:
        """Return the mirror of a full URL: URLs with different users have different mirrors."""
        folder = self._cache / "git"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / hashlib.sha256(url.text.encode()).hexdigest()[:32]


def lay_out_part(
    cache: Path,
    part: GitPart,
    target: Path,
    *,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Write the files of a commit, unconverted, into ``target``; no hook and no filter runs.

    Raises: FilesError.
    """
    mirror, place = cache / "git" / part.mirror, target / part.place
    index = mirror / f"index-{secrets.token_hex(8)}"
    env = {"GIT_DIR": str(mirror), "GIT_WORK_TREE": str(place), "GIT_INDEX_FILE": str(index)}
    try:
        _make_place(target, part.place)
        for args in (["read-tree", f"{part.commit}:{part.folder}"], ["checkout-index", "--all", "--force", "--quiet"]):
            run_git(args, cwd=str(place), limits=GitLimits(), env=env, tick=tick)
    except GitFailed as exc:
        raise FilesError(f"commit {part.commit[:12]} cannot be checked out: {clean(exc.said.strip()[-300:])}") from exc
    except OSError as exc:
        raise FilesError(f"{place} cannot be written: {exc.strerror or exc}") from exc
    finally:
        for left in (index, index.with_name(f"{index.name}.lock")):
            left.unlink(missing_ok=True)


def find_pointers(
    cache: Path, parts: Sequence[GitPart], target: Path, *, tick: Callable[[], object] = lambda: None
) -> list[str]:
    """Find up to `MOST_POINTERS` files in ``target`` that are pointers of git LFS, without their contents."""
    found: list[str] = []
    for part in parts:
        has_lfs = ["grep", "--quiet", "-e", "filter=lfs", part.commit, "--", ":(glob)**/.gitattributes"]
        try:
            run_git(has_lfs, cwd=str(cache / "git" / part.mirror), limits=GitLimits(), tick=tick)
        except GitFailed:  # no file of the commit uses LFS
            continue
        for above, _, names in os.walk(target / part.place):
            tick()
            found += [os.path.relpath(path, target) for name in sorted(names) if _is_pointer(path := Path(above, name))]
            if len(found) >= MOST_POINTERS:
                return found[:MOST_POINTERS]
    return found


def _is_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and len(_POINTER) < state.st_size < _POINTER_BYTES:
            with path.open("rb") as file:
                return file.read(len(_POINTER)) == _POINTER
    return False


def _make_place(target: Path, name: str) -> None:
    """Create the folder of a part; follow no link, as a repository can have one there. Raises: FilesError."""
    target.mkdir(parents=True, exist_ok=True)
    folder = target
    for each in name.split("/") if name else ():
        folder = folder / each
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise FilesError(f"submodule {clean(name)!r}: {clean(each)!r} is not a folder in its repository")


def _remove_leftovers(mirror: Path) -> None:
    """Remove files of a killed git; under the lock, others only check files out, with indexes of their own."""
    for pattern in ("*.lock", "refs/detrain/**/*.lock", "objects/pack/tmp_*"):
        for path in mirror.glob(pattern):
            if not path.name.startswith("index-"):
                path.unlink(missing_ok=True)


def _size_of(mirror: Path) -> int:
    """Return the disk space of a mirror, including a running fetch."""
    total = 0
    for folder, _, files in os.walk(mirror):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total += max(status.st_size, getattr(status, "st_blocks", 0) * 512)
    return total


@contextlib.contextmanager
def _locked(mirror: Path, tick: Callable[[], object]) -> Iterator[None]:
    """Allow one fetch into a mirror at a time. Raises: FilesError after 10 minutes."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    path = mirror.with_name(f"{mirror.name}.lock")
    while (lock := take_lock(path, is_new=True)) is None:
        if time.monotonic() > deadline:
            raise FilesError(
                f"another fetch of the same repository has locked {path} for more than {_LOCK_LIMIT_S:.0f} s"
            )
        tick()
        time.sleep(0.05)
    try:
        touch(path)
        yield
    finally:
        os.close(lock)
