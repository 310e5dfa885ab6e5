"""The files of a folder that are sent: which are listed, how a change is seen, and that only those are packed."""

from __future__ import annotations

import hashlib
import io
import os
import pwd
import re
import subprocess
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

from detrain_nb.deploy import folder, ignoring, private
from detrain_nb.deploy.folder import FileState, Manifest, list_folder, pack
from detrain_nb.deploy.private import why_kept
from detrain_nb.errors import SpecError


def _plant(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def _changed(before: Manifest, now: Manifest) -> list[str]:
    kinds = [{name: state.kind for name, state in manifest.items()} for manifest in (before, now)]
    return sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()})


def test_files_are_listed_with_size_digest_and_mode(tmp_path: Path) -> None:
    _plant(tmp_path, {"train.py": "print(1)\n", "pkg/mod.py": "", "pkg/dätä.txt": "ü"})
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    manifest = list_folder(tmp_path)
    assert list(manifest) == ["pkg/dätä.txt", "pkg/mod.py", "run.sh", "train.py"]
    mtime_ns = (tmp_path / "train.py").stat().st_mtime_ns
    assert manifest["train.py"] == FileState(
        9, mtime_ns, hashlib.sha256(b"print(1)\n").hexdigest(), is_executable=False
    )
    assert [name for name, state in manifest.items() if state.is_executable] == ["run.sh"]


def test_what_never_travels(tmp_path: Path) -> None:
    names = [".git/config", "a/.git", "__pycache__/a.pyc", "a/__pycache__/b.pyc", ".venv/bin/python", "node_modules/x"]
    names += [".GIT/config", "a/.Git/config"]
    names += ["myenv/pyvenv.cfg", "myenv/lib/a.py", ".ipynb_checkpoints/a.ipynb", "a/b/.ipynb_checkpoints/c"]
    _plant(tmp_path, dict.fromkeys(["kept.py", "a/kept.py", ".hidden", *names], ""))
    assert list(list_folder(tmp_path)) == [".hidden", "a/kept.py", "kept.py"]


def test_ignore_files_are_honoured_where_they_stand(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            ".gitignore": "*.log\n/data/\nout/*\n!out/keep.txt\n# comment\n",
            "a.log": "",
            "data/x": "",
            "sub/data/x": "",
            "out/a": "",
            "out/keep.txt": "",
            "sub/.gitignore": "\ufeff!b.log\r\n/only_here\r\n",
            "sub/a.log": "",
            "sub/b.log": "",
            "sub/only_here": "",
            "sub/deep/only_here": "",
        },
    )
    assert list(list_folder(tmp_path)) == [
        *(".gitignore", "out/keep.txt", "sub/.gitignore", "sub/b.log", "sub/data/x", "sub/deep/only_here")
    ]


def test_own_ignore_file_has_the_last_word(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            ".detrainignore": "*.ipynb\n!sub/weights.pt\n!data/\n",
            ".gitignore": "*.pt\ndata/\n",
            "a.ipynb": "",
            "a.pt": "",
            "data/x": "",
            "sub/.gitignore": "!b.ipynb\n*.pt\n",
            "sub/b.ipynb": "",
            "sub/weights.pt": "",
        },
    )
    found = list(list_folder(tmp_path))
    assert found == [".detrainignore", ".gitignore", "data/x", "sub/.gitignore", "sub/weights.pt"]


def test_repository_above_counts_unless_it_leaves_out_the_folder(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            ".git/HEAD": "",
            ".gitignore": "*.pt\n/note\\[books]/big/\nscratch/\n",
            "note[books]/a.py": "",
            "note[books]/a.pt": "",
            "note[books]/big/b": "",
            "scratch/a.py": "",
            "scratch/b.pt": "",
            "lone/.gitignore": "!a.pt",
            "lone/a.pt": "",
            "lone/b.pt": "",
        },
    )
    assert list(list_folder(tmp_path / "note[books]")) == ["a.py"]
    assert list(list_folder(tmp_path / "scratch")) == ["a.py", "b.pt"]
    assert list(list_folder(tmp_path / "lone")) == [".gitignore", "a.pt"]


def test_bad_pattern_does_nothing_as_in_git(tmp_path: Path) -> None:
    _plant(tmp_path, {".gitignore": "!\n/\n[\n*.log\n", "a.log": "", "b": "", "sub/.gitignore": "/\n!\n", "sub/c": ""})
    assert list(list_folder(tmp_path)) == [".gitignore", "b", "sub/.gitignore", "sub/c"]


SEGMENTS = st.sampled_from(["a", "b", "c", "a.x", "*", "*.x", "?", "[ab]", "**", "b*"])
PATTERNS = st.builds(
    lambda sign, start, segments, end: sign + start + "/".join(segments) + end,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(SEGMENTS, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)
NAMES = st.sampled_from(["a", "b", "c", "a.x", "b.x"])
PLACES = st.lists(NAMES, max_size=2).map("/".join)


# The examples are the same each time: new ones would find faults of pathspec, not of a change here.
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    paths=st.sets(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=12),
    ignores=st.dictionaries(PLACES, st.lists(PATTERNS, min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(paths={"a/b/a.x", "a/a.x"}, ignores={"": ["*.x"], "a": ["!b/"]})
@example(paths={"a/b"}, ignores={"": ["!*", "a"]})
@example(paths={"a/a/a"}, ignores={"": ["a/a", "!a/"]})
@example(paths={"a/a"}, ignores={"": ["a/a/", "a/**/"]})
@example(paths={"a/b", "b"}, ignores={"": ["/*", "!/a"], "a": ["/*", "!b"]})
def test_same_files_as_git(
    paths: set[str], ignores: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("repository")
    for path in sorted(paths, key=len, reverse=True):
        if not (root / path).exists() and not any(parent.is_file() for parent in (root / path).parents):
            _plant(root, {path: ""})
    for place, lines in ignores.items():
        if (root / place).is_dir():
            _plant(root, {f"{place}/.gitignore" if place else ".gitignore": "\n".join(lines)})
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "--quiet"], cwd=root, env=environment, check=True, timeout=60)
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, timeout=60).stdout
    assert set(list_folder(root)) == set(listed.decode().split("\0")[:-1])


def test_link_that_stays_inside_travels_as_its_content(tmp_path: Path) -> None:
    root = _plant(tmp_path / "root", {"real.py": "x", "pkg/mod.py": "y", ".git/config": "s", "env/pyvenv.cfg": ""})
    _plant(tmp_path / "outside", {"secret": "s"})
    (root / "alias.py").symlink_to("real.py")
    (root / "absolute.py").symlink_to(root / "real.py")
    (root / "also").symlink_to("pkg", target_is_directory=True)
    for name, target in {
        "out.txt": tmp_path / "outside" / "secret",
        "outer": "../outside",
        "etc": "/etc",
        "prefix": "../root_of_another",
        "config": ".git/config",
        "environment": "env",
        "dangling": "nowhere",
        "self": "self",
        "up": ".",
        "pkg/loop": "../pkg",
        "pkg/top": "..",
    }.items():
        (root / name).symlink_to(target)
    _plant(tmp_path / "root_of_another", {"a": ""})
    assert list(list_folder(root)) == ["absolute.py", "alias.py", "also/mod.py", "pkg/mod.py", "real.py"]
    with zipfile.ZipFile(io.BytesIO(pack(root, list_folder(root), ["alias.py", "also/mod.py"]))) as packed:
        assert [packed.read(name) for name in packed.namelist()] == [b"x", b"y"]


def test_file_behind_a_link_that_is_put_on_the_way_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a group can write, others can plant the link after the check; its target would be listed and sent."""
    root = _plant(tmp_path / "root", {"own.txt": "own", "sub/notes.txt": "notes"})
    private = _plant(tmp_path / "private", {"notes.txt": "secret"})
    for shared in (root, root / "sub"):
        shared.chmod(0o777)
    look = folder.open_regular

    def exchange(path: str) -> Any:
        if not (root / "sub").is_symlink():
            (root / "sub").rename(tmp_path / "moved")
            (root / "sub").symlink_to(private)
        return look(path)

    monkeypatch.setattr(folder, "open_regular", exchange)
    assert list(list_folder(root)) == ["own.txt"]


def test_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    _plant(tmp_path, {"a/1": "", "b/2": ""})
    (tmp_path / "a/to_b").symlink_to("../b")
    (tmp_path / "b/to_a").symlink_to("../a")
    assert list(list_folder(tmp_path)) == ["a/1", "a/to_b/2", "b/2", "b/to_a/1"]


def test_root_may_be_a_link_and_a_pipe_is_left_out(tmp_path: Path) -> None:
    root = _plant(tmp_path / "real", {"a": ""})
    os.mkfifo(root / "pipe")
    (tmp_path / "link").symlink_to(root)
    assert list(list_folder(tmp_path / "link")) == ["a"]


def test_too_much_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    _plant(tmp_path, {f"data/{n}.bin": b"x" * (n * 1000) for n in range(1, 8)})
    assert len(list_folder(tmp_path, limit_bytes=28_000)) == 7
    with pytest.raises(SpecError) as caught:
        list_folder(tmp_path, limit_bytes=27_000)
    assert str(caught.value) == (
        f"the folder {tmp_path} has 28 kB to send, more than 27 kB; the largest files are data/7.bin 7 kB, "
        "data/6.bin 6 kB, data/5.bin 5 kB, data/4.bin 4 kB, data/3.bin 3 kB: list what the ranks do not need in "
        ".detrainignore, which has the syntax of .gitignore, or give --no-sync"
    )
    _plant(tmp_path, {".detrainignore": "data/"})
    assert list(list_folder(tmp_path, limit_bytes=27_000)) == [".detrainignore"]


def test_folder_with_very_many_files_is_given_up(tmp_path: Path) -> None:
    _plant(tmp_path, dict.fromkeys(["a", "b", "c", "d/e"], ""))
    with pytest.raises(SpecError, match="has more than 4 files: work in a smaller folder, list what"):
        list_folder(tmp_path, most_entries=4)


def test_what_cannot_be_listed_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="gone: no such folder"):
        list_folder(tmp_path / "gone")
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("")
    with pytest.raises(SpecError, match=r"^'caf\\xe9': its name is not UTF-8: rename it, or list it in"):
        list_folder(tmp_path)
    (tmp_path / ".detrainignore").write_text("caf*")
    assert list(list_folder(tmp_path)) == [".detrainignore"]


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(tmp_path, {"sub/private": ""})

    def refuse(path: str, *_state: int) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(folder, "_digest", refuse)  # root, who may run the tests, can read any file
    with pytest.raises(SpecError, match=r"^sub/private cannot be read: Permission denied: make it readable, or list"):
        list_folder(tmp_path)
    (tmp_path / ".gitignore").write_text("*")
    assert list_folder(tmp_path) == {}


def test_change_is_seen_even_where_size_and_time_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1")
    os.utime(path, ns=(10**18, 10**18))
    before = list_folder(tmp_path)
    path.write_text("x = 2")
    os.utime(path, ns=(10**18, 10**18))
    now = list_folder(tmp_path)
    assert before["a.py"].mtime_ns == now["a.py"].mtime_ns
    assert _changed(before, now) == ["a.py"]


def test_settled_file_is_read_once(tmp_path: Path) -> None:
    _plant(tmp_path, {"a.py": "x", "b.py": "y"})
    list_all_as_old = partial(list_folder, settled_ns=-1)
    before = folder._read_digest.cache_info().misses
    first = list_all_as_old(tmp_path)
    assert list_all_as_old(tmp_path) == first
    assert folder._read_digest.cache_info().misses == before + 2
    (tmp_path / "b.py").write_text("z")
    assert _changed(first, list_all_as_old(tmp_path)) == ["b.py"]
    assert folder._read_digest.cache_info().misses == before + 3


def test_file_is_another_one_by_its_content_and_its_mode(tmp_path: Path) -> None:
    _plant(tmp_path, {"same": "1", "content": "2", "mode": "3", "gone": "4", "file": "5", "touched": "6"})
    before = list_folder(tmp_path)
    (tmp_path / "content").write_text("7")
    (tmp_path / "mode").chmod(0o755)
    (tmp_path / "gone").unlink()
    (tmp_path / "file").unlink()
    _plant(tmp_path, {"file/inside": "5", "new": "8"})
    os.utime(tmp_path / "touched")
    after = list_folder(tmp_path)
    assert _changed(before, after) == ["content", "file", "file/inside", "gone", "mode", "new"]


@pytest.mark.timeout(20)
def test_what_stands_in_the_place_of_a_listed_file_is_not_read(tmp_path: Path) -> None:
    """In a folder that a group can write, others may have replaced the file since it was listed."""
    _plant(tmp_path, {"root/a.py": "a", "root/b.py": "b", "root/sub/c.py": "c", "root/to-a": "", "secret/c.py": "key"})
    root = tmp_path / "root"
    (root / "to-a").unlink()
    (root / "to-a").symlink_to("a.py")
    manifest = list_folder(root)
    assert manifest["to-a"].sha256 == manifest["a.py"].sha256
    (root / "a.py").unlink()
    (root / "a.py").symlink_to(tmp_path / "secret" / "c.py")
    (root / "sub" / "c.py").unlink()
    (root / "sub").rmdir()
    (root / "sub").symlink_to(tmp_path / "secret")
    with zipfile.ZipFile(io.BytesIO(pack(root, manifest, manifest))) as packed:
        assert packed.namelist() == ["b.py"]
    _plant(root, {".env": "key"})  # a file of this name is never sent
    (root / "to-a").unlink()
    (root / "to-a").symlink_to(".env")
    with zipfile.ZipFile(io.BytesIO(pack(root, manifest, ["to-a"]))) as packed:
        assert packed.namelist() == []
    (root / "b.py").unlink()
    os.mkfifo(root / "b.py")
    with pytest.raises(SpecError, match=r"b\.py"):
        pack(root, manifest, manifest)


def test_file_of_a_folder_that_only_its_owner_could_enter_travels_as_private(tmp_path: Path) -> None:
    root = _plant(tmp_path / "root", {"keys/inner/a.txt": "", "open/b.txt": ""})
    (root / "keys").chmod(0o700)
    (root / "link.txt").symlink_to("keys/inner/a.txt")
    root.chmod(0o700)  # does not count: the work folder has a mode of its own
    manifest = list_folder(root)
    with zipfile.ZipFile(io.BytesIO(pack(root, manifest, manifest))) as packed:
        modes = {info.filename: info.external_attr >> 16 & 0o077 for info in packed.infolist()}
    assert {name for name, mode in modes.items() if not mode} == {"keys/inner/a.txt", "link.txt"}


def test_packed_files_are_what_was_there(tmp_path: Path) -> None:
    modes = {"a/b.py": 0o755, "c": 0o644, "own": 0o600, "own.sh": 0o700}
    _plant(tmp_path, {"a/b.py": "1", "c": b"\0\xff" * 1000, "gone": "", "own": "", "own.sh": ""})
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    manifest = list_folder(tmp_path)
    (tmp_path / "gone").unlink()
    packed = pack(tmp_path, manifest, manifest)
    os.utime(tmp_path / "c")
    assert pack(tmp_path, manifest, reversed(list(manifest))) == packed
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()} == modes
        assert archive.read("c") == b"\0\xff" * 1000


# ---- what is private


@pytest.fixture(autouse=True)
def _nobodys_git(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set a home without a git configuration; return it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return home


SECRETS = [
    *(".ssh/config", ".ssh/my_key", ".aws/credentials", ".netrc", ".git-credentials", ".kube/config", ".gnupg/x"),
    *(".cache/huggingface/token", ".huggingface/token", ".docker/config.json", ".pypirc", ".config/gcloud/x.db"),
    *(".azure/x.json", ".env", ".env.local", "sub/.env", "sub/server.pem", "id_rsa", "sub/id_ed25519", "ID_RSA.bak"),
    *(".env~", "server.key.bak", "credentials.json.old", ".netrc.orig~"),
    *(".bash_history", ".python_history", ".ipython/profile_default/history.sqlite", "kernel-1a2b.json"),
    *("wandb/settings", ".SSH/other", "sub/Server.PEM", ".local/share/jupyter/runtime/jpserver-7.json"),
]


def test_keys_tokens_and_histories_stay_unless_named(tmp_path: Path) -> None:
    root = _plant(tmp_path, dict.fromkeys([*SECRETS, "train.py", ".env.example", ".github/ci.yml"], "secret"))
    kept: list[str] = []
    manifest = list_folder(root, kept=kept)
    assert list(manifest) == [".env.example", ".github/ci.yml", "train.py"]
    assert folder.name_hidden(manifest) == [".env.example", ".github/"]
    assert {".ssh/", ".env", "sub/server.pem", ".cache/huggingface/token"} <= set(kept)

    _plant(root, {".gitignore": "!.env\n!id_rsa\n", ".detrainignore": "!*\n!*/\n!sub/**\n"})
    assert ".env" not in list_folder(root) and "sub/.env" not in list_folder(root)
    (root / ".detrainignore").write_text("!/.ENV\n!sub/*.pem\n!.ssh/\n!.azure/\n/.azure/\n")
    lifted = {".env", ".env~", "sub/server.pem", "sub/Server.PEM", ".ssh/config", ".ssh/my_key", ".SSH/other"}
    assert set(list_folder(root)) - set(manifest) - {".gitignore", ".detrainignore"} == lifted


@pytest.mark.parametrize("line", [line for line in private._PRIVATE if line[0] != "!"])
def test_every_name_in_the_list_is_private_anywhere(line: str) -> None:
    name = line.removeprefix("**/").replace("*", "x")
    assert private.is_private(name) and private.is_private(f"sub/{name.upper()}")
    assert private.is_private(f"{name}/inside") and not private.is_private(f"{name}/inside", (f"!{name}",))


def test_link_to_a_key_stays_as_well(tmp_path: Path) -> None:
    _plant(tmp_path, {"a.py": "", ".ssh/deploy": "secret", ".env": "secret", ".config/gcloud/db": "secret"})
    for name, target in {"notes.txt": ".env", "keys": ".ssh", "deploy": ".ssh/deploy", "settings": ".config"}.items():
        (tmp_path / name).symlink_to(target)
    assert list(list_folder(tmp_path)) == ["a.py"]
    (tmp_path / ".detrainignore").write_text("!.env\n!data/\n")
    _plant(tmp_path, {"data/.ssh/deep/x": "secret"})
    (tmp_path / "x").symlink_to("data/.ssh/deep/x")
    assert list(list_folder(tmp_path)) == [".detrainignore", ".env", "a.py", "notes.txt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a link of another user's")
def test_link_of_another_user_leads_to_nothing_that_lines_leave_out(tmp_path: Path) -> None:
    files = {"a.py": "", "notes/private.txt": "secret", "data/raw/x": "", "data/.gitignore": "raw/\n", "data/y": ""}
    _plant(tmp_path, {**files, ".detrainignore": "notes/\n", "theirs/b.py": ""})
    links = {
        "plain": "../notes",
        "one": "../notes/private.txt",
        "all": "../data",
        "raw": "../data/raw/x",
        "a": "../a.py",
    }
    for name, target in links.items():
        (tmp_path / "theirs" / name).symlink_to(target)
        os.lchown(tmp_path / "theirs" / name, 12345, 12345)
    (tmp_path / "own").symlink_to("notes")
    kept: list[str] = []
    found = [name for name in list_folder(tmp_path, kept=kept) if name.startswith(("theirs/", "own/"))]
    assert found == ["own/private.txt", "theirs/a", "theirs/all/.gitignore", "theirs/all/y", "theirs/b.py"]
    assert kept == []


def test_home_and_what_holds_it_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _plant(tmp_path / "homes" / "ann", {"work/a.py": "", ".ssh/x": "", ".config/gcloud/x/y": ""})
    (tmp_path / "link").symlink_to(home)
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for value in (str(home), f"{home}/", str(tmp_path / "link")):
        monkeypatch.setenv("HOME", value)
        for here in (home, tmp_path / "link", tmp_path / "homes", Path("/"), own):
            assert re.fullmatch(f"{here} is a home directory or contains one: none of its files .*", why_kept(here))
        assert why_kept(home / "work") == ""
    for here in (home / ".ssh", tmp_path / "link/.config/gcloud/x", home / ".config", home / ".Cache/huggingface"):
        assert "is a folder for keys or tokens: none of its files are sent" in why_kept(here)
    for nothing in ("", "relative", str(tmp_path / "gone")):
        monkeypatch.setenv("HOME", nothing)
        assert why_kept(own) and why_kept("/") and not why_kept(home)
    monkeypatch.delenv("HOME")
    assert why_kept(own) and why_kept("/") and not why_kept(home / "work")


# ---- further files that git reads


def _others(repository: Path) -> set[str]:
    """Return the files that ``git add`` would add."""
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1"}
    listed = subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True, timeout=60)
    return set(listed.stdout.decode().split("\0")[:-1])


def test_what_git_leaves_out_by_its_configuration_stays(tmp_path: Path, _nobodys_git: Path) -> None:
    root = tmp_path / "repository"
    commit = ["-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--allow-empty", "-m", "a"]
    for command in (["init", "--quiet", "."], commit, ["worktree", "add", "--quiet", str(tmp_path / "worktree")]):
        root.mkdir(exist_ok=True)
        subprocess.run(["git", *command], cwd=root, check=True, timeout=60)
    worktree = _plant(tmp_path / "worktree", {"a.private": "", "b": ""})
    _plant(root, {".git/info/exclude": "*.private\n!kept.user\n", ".gitignore": "!shown.private\n"})
    _plant(root, dict.fromkeys(["a.py", "a.private", "sub/shown.private", "a.user", "sub/kept.user"], ""))
    _plant(_nobodys_git, {".config/git/ignore": "*.user\n", "mine": "*.py\n"})
    assert set(list_folder(root)) == {".gitignore", "a.py", "sub/kept.user", "sub/shown.private"} == _others(root)
    assert list(list_folder(root / "sub")) == ["kept.user", "shown.private"]
    assert list(list_folder(worktree)) == ["b"]
    (_nobodys_git / ".gitconfig").write_text("[core]\n excludesFile = ~/mine\n")
    ignoring._ask_git.cache_clear()
    assert set(list_folder(root)) == {".gitignore", "a.user", "sub/kept.user", "sub/shown.private"} == _others(root)


def test_repository_has_nothing_run_and_nothing_else_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"touch {tmp_path}/was-run"
    root = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", str(root)], check=True, timeout=60)
    _plant(
        root,
        {
            "a.py": "",
            ".git/config": f"[core]\n excludesFile = {tmp_path}/outside\n fsmonitor = {run}\n pager = {run}\n"
            f"[alias]\n config = !{run}\n",
            "git": f"#!/bin/sh\n{run}\n",
        },
    )
    (root / "git").chmod(0o755)
    (tmp_path / "outside").write_text("*.py")
    monkeypatch.chdir(root)
    for path in (os.environ["PATH"], f".:{os.environ['PATH']}"):
        monkeypatch.setenv("PATH", path)
        ignoring._ask_git.cache_clear()
        assert list(list_folder(root)) == ["a.py", "git"]
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("name", [".gitignore", ".detrainignore", ".git/info/exclude", ".git"])
def test_patterns_that_never_end_are_not_read(name: str, tmp_path: Path) -> None:
    _plant(tmp_path, {"a.py": ""})
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    assert list(list_folder(tmp_path)) == ["a.py"]
    path.unlink()
    path.symlink_to("/dev/zero")
    assert list(list_folder(tmp_path)) == ["a.py"]
    path.unlink()
    path.write_bytes(b"x" * (1 << 20) + b"\n")
    if name != ".git":
        with pytest.raises(SpecError, match="has more than 1048576 bytes: remove patterns"):
            list_folder(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_lines_of_another_user_above_the_folder_send_nothing_and_stop_nothing(tmp_path: Path) -> None:
    """In a folder like /tmp, any user can create a repository."""
    root = _plant(tmp_path / "project", {"train.py": "", ".env": "key", "deploy.pem": "key"})
    (tmp_path / ".git").mkdir()
    for theirs in (True, False):
        _plant(tmp_path, {".detrainignore": "!.env\n!*.pem\nlater\n"})
        os.chown(tmp_path / ".detrainignore", 12345 if theirs else 0, 0)
        assert list(list_folder(root)) == (["train.py"] if theirs else [".env", "deploy.pem", "train.py"])
    _plant(tmp_path, {".gitignore": "**/a/" * 12})
    os.chown(tmp_path / ".gitignore", 12345, 0)
    assert "train.py" in list_folder(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what is another user's")
@pytest.mark.parametrize("planted", ["**/a/**/b/**/c/**/d", "x" * 5000, "x\n" * 600_000, "gitdir: elsewhere", "link"])
def test_repository_of_another_user_above_the_folder_stops_nothing(tmp_path: Path, planted: str) -> None:
    root = _plant(tmp_path / "project", {"train.py": ""})
    if planted == "link":
        (tmp_path / ".git").symlink_to("/proc/1/cwd/nothing/of/that/name")
    elif planted.startswith("gitdir"):
        _plant(tmp_path, {".git": planted, "elsewhere/info/exclude": "**/a/" * 12})
    else:
        _plant(tmp_path, {".git/info/exclude": planted})
    os.lchown(tmp_path / ".git", 12345, 0)
    assert list(list_folder(root)) == ["train.py"]


def test_pattern_that_can_be_matched_in_too_many_ways_is_refused(tmp_path: Path) -> None:
    _plant(tmp_path, {".gitignore": f"*.log\n{'**/a/' * 12}c\n", "a/" * 45 + "b": ""})
    with pytest.raises(SpecError, match=r"\.gitignore, line 2 contains \*\* 12 times, more than 3: use fewer"):
        list_folder(tmp_path)


def test_line_that_is_longer_than_any_path_is_refused(tmp_path: Path) -> None:
    """Compiling a pattern of 200,000 stars alone takes seconds."""
    _plant(tmp_path, {".gitignore": f"#{'#' * 5000}\n{'*' * 4096}x"})
    with pytest.raises(SpecError, match="line 2 has 4097 characters, more than 4096: shorten the pattern"):
        list_folder(tmp_path)
    _plant(tmp_path, {".gitignore": f"#{'#' * 5000}\n{'*' * 4095}x"})
    assert list(list_folder(tmp_path)) == [".gitignore"]


def test_file_with_more_patterns_than_take_their_time_is_refused(tmp_path: Path) -> None:
    _plant(tmp_path, {".gitignore": "# comment\n\n" + "".join(f"?{number}\n" for number in range(5001)), "a": ""})
    with pytest.raises(
        SpecError, match=r"\.gitignore has 5001 patterns, more than 5000: list folders, not their files$"
    ):
        list_folder(tmp_path)


def test_patterns_that_are_too_many_for_the_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(tmp_path, {f"{folder}/.gitignore": "x\n" * 10 for folder in range(10)})
    assert len(list_folder(tmp_path)) == 10
    monkeypatch.setattr("detrain_nb.deploy.folder._MOST_TRIED", 10 * 10 * 500)
    with pytest.raises(SpecError, match=r"too many patterns for the number of files: list folders, not files$"):
        list_folder(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern", ["*a" * 20 + "*c", "a*a*a*a*b", "**/*a*a*a*b", "[a-z]*[a-z]*[a-z]*[a-z]*1", "a?*" * 9 + "c"]
)
def test_stars_take_time_by_the_length_of_a_name(pattern: str, tmp_path: Path) -> None:
    """A matcher that tries every combination would never finish with twenty stars."""
    names = [f"{'a' * 240}{number}" for number in range(10)]
    _plant(
        tmp_path, {".gitignore": "".join(f"{pattern}{number}\n" for number in range(10)), **dict.fromkeys(names, "")}
    )
    assert list(list_folder(tmp_path)) == [".gitignore", *names]


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab*?/[]!.-\\", min_size=1, max_size=9),
    st.lists(st.lists(st.text(alphabet="ab.", min_size=1, max_size=6), min_size=1, max_size=3), min_size=1, max_size=9),
)
@example("[?-.]", [["a"]])
@example("*a?*[!b]*b", [["aab"], ["ab", "aab"], ["aaaab"]])
def test_pattern_means_what_pathspec_makes_of_it(line: str, paths: list[list[str]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            whole = GitIgnoreSpec.from_lines([line], backend="simple")
        except (ValueError, re.error):
            assert ignoring._pattern(line) is None
            return
    for path in map("/".join, paths):
        assert ignoring._compiled([line]).match_file(path) == whole.match_file(path)


def test_folder_that_is_too_deep_for_patterns_is_named(tmp_path: Path) -> None:
    _plant(tmp_path, {"a/" * 100 + "b": ""})
    with pytest.raises(SpecError, match=r"^a/[a/]+ is more than 64 folders deep: list it, or a folder above it, in"):
        list_folder(tmp_path)
    _plant(tmp_path, {".detrainignore": "a/*/*/*/*/a/*\n"})
    assert list(list_folder(tmp_path)) == [".detrainignore"]


def test_git_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _plant(tmp_path, {"bin/git": "#!/bin/sh\nexec sleep 1000\n", "folder/a.py": ""}) / "bin" / "git"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(ignoring, "_ASK_LIMIT_S", 0.1)
    ignoring._ask_git.cache_clear()
    assert list(list_folder(tmp_path / "folder")) == ["a.py"]
    ignoring._ask_git.cache_clear()
