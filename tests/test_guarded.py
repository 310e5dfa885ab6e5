"""Folders that others can write are recognised; a folder that the user names is created, but not taken from others."""

from __future__ import annotations

import grp
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from detrain_nb import guarded
from detrain_nb.guarded import can_others_write, enter_users_folder, find_guest_parent, make_users_folder

_UID = 12345
pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A folder like /tmp, which every user can write."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def _theirs(path: Path) -> Path:
    os.chown(path, _UID, _UID, follow_symlinks=False)
    return path


def test_folder_is_made_where_there_is_none_or_ones_own(everybodys: Path) -> None:
    for _ in range(2):
        make_users_folder(everybodys / "mine" / "work")
    assert (everybodys / "mine" / "work").is_dir()


def test_folder_that_a_colleague_keeps_for_the_group_is_used(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    make_users_folder(_theirs(tmp_path / "project") / "work")
    assert (tmp_path / "project" / "work").is_dir()


@pytest.mark.parametrize("below", ["", "work/deep"])
def test_folder_of_another_user_among_everybodys_is_refused(everybodys: Path, below: str) -> None:
    (everybodys / "work").mkdir()
    _theirs(everybodys / "work")
    with pytest.raises(
        PermissionError, match=r"/work \(mode \d+, uid 12345\) was made by another user in a world-writable"
    ):
        make_users_folder(everybodys / "work" / below)
    assert not list((everybodys / "work").iterdir())


def test_folder_of_another_user_behind_ones_own_link_is_refused(everybodys: Path, tmp_path: Path) -> None:
    (everybodys / "scratch").mkdir()
    _theirs(everybodys / "scratch")
    (tmp_path / "mine").symlink_to(everybodys / "scratch")
    with pytest.raises(PermissionError, match="was made by another user"):
        make_users_folder(tmp_path / "mine" / "work")
    assert not list((everybodys / "scratch").iterdir())


def test_folder_of_another_user_that_comes_and_goes_is_not_taken(
    everybodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is absent whenever its path is checked, and exists when the folder below it is created."""
    monkeypatch.setattr(guarded, "refuse_squatted", lambda folder: None)
    (everybodys / "tz").mkdir()
    _theirs(everybodys / "tz")
    with pytest.raises(PermissionError, match=r"/tz \(mode \d+, uid 12345\) was made by another user"):
        make_users_folder(everybodys / "tz" / "w")
    assert not list((everybodys / "tz").iterdir())


def test_folder_of_whoever_has_no_number_in_a_user_namespace_is_not_the_users(everybodys: Path) -> None:
    """In a container without a user, the folder seems to belong to the user "nobody", too."""
    as_nobody = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if subprocess.run([*as_nobody, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("this system makes no user namespaces")
    for path in (everybodys, *everybodys.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o055)
    (everybodys / "work").mkdir(mode=0o777)
    _theirs(everybodys / "work").chmod(0o777)
    (everybodys / "own").mkdir()
    code = "import pathlib, sys; from detrain_nb import guarded; guarded.enter_users_folder(pathlib.Path(sys.argv[1]))"
    taken = {}
    for name in ("own", "work"):
        asked = [*as_nobody, sys.executable, "-c", code, str(everybodys / name)]
        taken[name] = subprocess.run(asked, capture_output=True, text=True, timeout=60).stderr
    assert taken["own"] == ""
    assert "was made by another user" in taken["work"]


def test_link_of_another_user_among_everybodys_is_refused(everybodys: Path, tmp_path: Path) -> None:
    (everybodys / "work").symlink_to(tmp_path)
    _theirs(everybodys / "work")
    with pytest.raises(PermissionError, match="was made by another user"):
        make_users_folder(everybodys / "work" / "deep")
    assert not (tmp_path / "deep").exists()


def test_folder_that_another_user_has_put_in_the_place_of_ours_is_not_entered(everybodys: Path) -> None:
    make_users_folder(everybodys / "work")
    before = os.getcwd()
    try:
        enter_users_folder(everybodys / "work")
        assert os.getcwd() == str(everybodys / "work")
        (everybodys / "work").rename(everybodys / "moved")
        (everybodys / "work").mkdir()
        _theirs(everybodys / "work")
        with pytest.raises(PermissionError, match="was made by another user"):
            enter_users_folder(everybodys / "work")
        (everybodys / "work").rmdir()
        with pytest.raises(FileNotFoundError):
            enter_users_folder(everybodys / "work")
        assert os.getcwd() == str(everybodys / "moved")
    finally:
        os.chdir(before)


def test_number_of_all_who_are_outside_of_a_namespace_is_not_taken_for_root(
    everybodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside, root has this number, but so have all other users: the folder's owner cannot be trusted."""
    monkeypatch.setattr(guarded, "_trusted_users", lambda: {0, os.getuid(), _UID})
    (everybodys / "work").mkdir()
    _theirs(everybodys / "work")
    with pytest.raises(PermissionError, match="was made by another user"):
        make_users_folder(everybodys / "work")
    assert find_guest_parent(everybodys / "work" / "x") == everybodys / "work"
    assert not can_others_write((everybodys / "work").stat(), everybodys / "work")


@pytest.fixture
def of_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the user's own group can write, the default of many systems."""
    user = SimpleNamespace(pw_uid=os.getuid(), pw_gid=7007, pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_gid=gid, gr_name="me", gr_mem=["me"]))
    guarded._users_of_first_group.cache_clear()
    os.chown(tmp_path, os.getuid(), 7007)
    tmp_path.chmod(0o770)
    assert not can_others_write(tmp_path.stat(), tmp_path)
    return tmp_path


def test_own_group_that_is_the_first_of_another_user_is_not_ones_own(
    of_own_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = SimpleNamespace(pw_uid=_UID, pw_gid=7007, pw_name="svc")
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.getpwuid(0), another])
    guarded._users_of_first_group.cache_clear()
    assert can_others_write(of_own_group.stat(), of_own_group)
    guarded._users_of_first_group.cache_clear()


@pytest.mark.parametrize(("tag", "may", "is_open"), [(0x02, 7, True), (0x08, 2, True), (0x02, 5, False)])
def test_access_control_list_that_names_others_is_seen(of_own_group: Path, tag: int, may: int, is_open: bool) -> None:
    nobody = 0xFFFFFFFF
    entries = [(0x01, 7, nobody), (0x02, 7, os.getuid()), (0x04, 7, nobody), (0x10, 7, nobody), (0x20, 0, nobody)]
    entries = sorted([*entries, (tag, may, _UID)])
    listed = b"".join([b"\2\0\0\0", *(struct.pack("<HHI", *entry) for entry in entries)])
    try:
        os.setxattr(of_own_group, "system.posix_acl_access", listed)
    except OSError as exc:
        pytest.skip(f"this file system has no access control lists: {exc}")
    assert of_own_group.stat().st_mode & 0o777 == 0o770
    assert can_others_write(of_own_group.stat(), of_own_group) is is_open
    assert (find_guest_parent(of_own_group / "x") == of_own_group) is is_open


@pytest.mark.parametrize("mask", [0o002, 0o000, 0o077])
def test_folders_that_we_make_above_ours_are_not_open_to_others(tmp_path: Path, mask: int) -> None:
    """The user's primary group has other members."""
    (home := tmp_path / "home").mkdir()
    for path in (home, *list(home.parents)[:2]):
        path.chmod(0o755)
    os.chown(home, _UID, 100)
    code = f"""
import os
import encodings.ascii, grp, pwd, detrain_nb.guarded, detrain_nb.node.job.blobs as blobs
os.setgroups([]); os.setgid(100); os.setuid({_UID}); os.umask({mask})
for _ in range(2):
    print(detrain_nb.guarded.state_folder(), blobs.sources_folder())
"""
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{home}/.local/state/detrain_nb {home}/.cache/detrain_nb/sources"] * 2, done
