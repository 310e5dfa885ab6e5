"""Pictures of views: they go into the docs on request, and are small files there."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator

__all__ = ["are_for_docs", "picture_path", "shrink", "take_picture"]

_IN_DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_COLOURS = 256  # the maximum of a PNG palette
_ROUNDS = 3  # of fitting the palette to the picture


def are_for_docs() -> bool:
    """Return whether the pictures of this run go into the docs: ``DETRAIN_NB_PICTURES=1``."""
    return os.environ.get("DETRAIN_NB_PICTURES") == "1"


def picture_path(name: str, folder: Path) -> Path:
    """Return the path of a picture: in ``docs/pictures`` if it is for the docs, otherwise in ``folder``."""
    to = _IN_DOCS if are_for_docs() else folder
    to.mkdir(parents=True, exist_ok=True)
    return to / f"{name}.png"


def take_picture(view: Locator, name: str, folder: Path, *, is_for_docs: bool = True) -> Path:
    """Write a picture of ``view``, to `picture_path` if it is for the docs, otherwise into ``folder``."""
    path = picture_path(name, folder) if is_for_docs else folder / f"{name}.png"
    view.screenshot(path=path)
    if is_for_docs and are_for_docs():
        shrink(path)  # takes a second or two
    return path


def shrink(path: Path) -> None:
    """Rewrite a picture with 256 colours: less than half the bytes, and no visible difference."""
    with Image.open(path) as opened:
        whole = opened.convert("RGB")
    reduced = whole.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, _ROUNDS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
