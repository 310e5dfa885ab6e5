"""Pictures of views: they go into the docs where that is asked for, and take few bytes there."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator

__all__ = ["are_for_docs", "picture_path", "shrink", "take_picture"]

_IN_DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_COLOURS = 256  # that a palette of PNG may have
_ROUNDS = 3  # in which the palette is fitted to the picture


def are_for_docs() -> bool:
    """``DETRAIN_NB_PICTURES=1``: the pictures of this run go into the docs."""
    return os.environ.get("DETRAIN_NB_PICTURES") == "1"


def picture_path(name: str, folder: Path) -> Path:
    """Where a picture goes: ``docs/pictures``, or ``folder`` where the docs keep theirs."""
    to = _IN_DOCS if are_for_docs() else folder
    to.mkdir(parents=True, exist_ok=True)
    return to / f"{name}.png"


def take_picture(view: Locator, name: str, folder: Path, *, is_for_docs: bool = True) -> Path:
    """Write a picture of ``view``; one for the docs goes where `picture_path` says, any other into ``folder``."""
    path = picture_path(name, folder) if is_for_docs else folder / f"{name}.png"
    view.screenshot(path=path)
    if is_for_docs and are_for_docs():
        shrink(path)  # takes a second or two
    return path


def shrink(path: Path) -> None:
    """Write a picture again with 256 colours: less than half the bytes, and no difference that is seen."""
    with Image.open(path) as opened:
        whole = opened.convert("RGB")
    reduced = whole.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, _ROUNDS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
