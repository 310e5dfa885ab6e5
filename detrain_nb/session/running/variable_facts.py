"""A variable as one rank has it, and a look into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...text import format_size, html_cells, html_table, html_text, table_lines

__all__ = ["Layout", "Preview", "RankVariable"]


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies on its mesh, of the sizes ``mesh``: for each of its axes a placement, and its kind.

    ``at`` is where the rank is on each axis; None for one that is not on the mesh.
    """

    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    kinds: tuple[str, ...]
    at: tuple[int, ...] | None


@dataclass(frozen=True)
class RankVariable:
    """A variable as one rank has it: ``value`` is a short text, ``shape`` that of a tensor or an array. A tensor
    without dimensions has both, where its number is at hand; a DataFrame has its shape, and the names of columns.

    Of a DTensor ``local`` is the shape of the rank's part, and ``bytes`` its size. ``digest`` is the checksum, of a
    sample where ``is_sample``; where there is none, ``why`` says why.
    """

    type: str
    value: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    bytes: int | None
    digest: str
    is_sample: bool
    why: str
    local: tuple[int, ...] | None = None
    layout: Layout | None = None

    @property
    def text(self) -> str:
        """Its value in short; of a tensor or an array with dimensions its shape, of a DataFrame both."""
        if self.shape is None or self.shape == () and self.value:
            return self.value
        return f"{[*self.shape]} {self.value}".rstrip()


@dataclass(frozen=True)
class Preview:
    """A look into variable ``name`` of ``rank``: ``rows`` below ``columns``, or ``text``; ``note`` says how much.

    Of numbers: ``facts`` (min, max, mean, std), how many are ``nans`` or ``infinite``, ``bins`` of a histogram between
    min and max; of ``sampled`` numbers, where that is not 0. ``travels``: its type is one that can be pulled.
    """

    name: str
    rank: int
    about: RankVariable
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    note: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    nans: int = 0
    infinite: int = 0
    bins: tuple[int, ...] = ()
    sampled: int = 0
    travels: bool = True

    @property
    def title(self) -> str:
        """What it is, and where."""
        about = self.about
        size = "" if about.bytes is None else format_size(about.bytes)
        parts = [about.type, "" if about.shape is None else about.text, about.dtype, about.device, size]
        return f"{self.name} on rank {self.rank}: {', '.join(part for part in parts if part)}"

    @property
    def numbers(self) -> str:
        """The statistics, and what is no number, in one line; empty where there are none."""
        parts = [f"{name} {number}" for name, number in self.facts.items()]
        parts += [f"{count:,} {what}" for count, what in ((self.nans, "nan"), (self.infinite, "infinite")) if count]
        return ", ".join(parts) + (f" (of {self.sampled:,} sampled)" if self.sampled and parts else "")

    @property
    def checksum(self) -> str:
        """The checksum in words, or why there is none."""
        about = self.about
        return f"checksum {about.digest}{' of a sample' if about.is_sample else ''}" if about.digest else about.why

    def __repr__(self) -> str:
        table = table_lines([self.columns, *self.rows], num_right=len(self.columns)) if self.rows else []
        lines = [self.title, self.text, *table, self.note, self.numbers, self.checksum]
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        if not self.rows:
            return html_text(repr(self))
        rows = "".join(f"<tr>{html_cells(row)}</tr>" for row in self.rows)
        caption = [line for line in (self.title, self.note, self.numbers, self.checksum) if line]
        return html_table(html_cells(self.columns, tag="th"), rows, caption=caption)
