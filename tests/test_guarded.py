"""A folder that the user has named is made, but not taken from another user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from detrain_nb.guarded import make_users_folder

_UID = 12345
pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A folder like /tmp."""
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
        PermissionError, match=r"/work \(mode \d+, uid 12345\) was made by another user, in a folder that"
    ):
        make_users_folder(everybodys / "work" / below)
    assert not list((everybodys / "work").iterdir())


def test_link_of_another_user_among_everybodys_is_refused(everybodys: Path, tmp_path: Path) -> None:
    (everybodys / "work").symlink_to(tmp_path)
    _theirs(everybodys / "work")
    with pytest.raises(PermissionError, match="was made by another user"):
        make_users_folder(everybodys / "work" / "deep")
    assert not (tmp_path / "deep").exists()
