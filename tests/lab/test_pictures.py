"""The pictures of the docs are small, without a visible difference."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image, ImageDraw

from .pictures import shrink

IN_DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MOST_BYTES = 150_000


def test_picture_is_written_in_few_colours_and_looks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "drawn.png"
    drawn = Image.new("RGB", (400, 300), "white")
    pen = ImageDraw.Draw(drawn)
    for row, colour in enumerate(("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#222")):
        pen.text((10, 10 + 45 * row), "rank 0 waits in all_reduce #6 for rank 1", fill=colour)
        pen.rectangle((10, 30 + 45 * row, 60 + 50 * row, 40 + 45 * row), fill=colour)
    drawn.resize((800, 600), Image.Resampling.BICUBIC).save(path)
    before, size = numpy.asarray(Image.open(path).convert("RGB")).astype(int), path.stat().st_size
    shrink(path)
    with Image.open(path) as small:
        assert small.mode == "P"
        after = numpy.asarray(small.convert("RGB")).astype(int)
    assert path.stat().st_size < 0.6 * size
    assert numpy.abs(after - before).max() < 32


def test_pictures_of_the_docs_are_small() -> None:
    assert [path.name for path in IN_DOCS.glob("*.png") if path.stat().st_size > MOST_BYTES] == []
