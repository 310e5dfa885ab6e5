"""A variable as one rank has it, and a preview of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...text import format_size, html_cells, html_table, html_text, table_lines

__all__ = ["Layout", "Preview", "RankVariable"]


@dataclass(frozen=True)
class Layout:
    """The layout of a DTensor on a mesh of sizes ``mesh``: for each axis of the mesh a placement and its kind.

    ``at`` is the coordinate of the rank on each axis; None for a rank that is not on the mesh.
    """

    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    kinds: tuple[str, ...]
    at: tuple[int, ...] | None


@dataclass(frozen=True)
class RankVariable:
    """A variable as one rank has it: ``value`` is a short text, ``shape`` the shape of a tensor or array.

    A tensor without dimensions has both, if its number is at hand; a DataFrame has its shape, and its column names as
    ``value``. For a DTensor, ``local`` is the shape of the rank's part and ``bytes`` the size of that part. ``digest``
    is the checksum, of a sample if ``is_sample``; without one, ``why`` gives the reason.
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
        """The short value; for a tensor or array with dimensions the shape, for a DataFrame both."""
        if self.shape is None or self.shape == () and self.value:
            return self.value
        return f"{[*self.shape]} {self.value}".rstrip()


@dataclass(frozen=True)
class Preview:
    """A preview of variable ``name`` of ``rank``: ``rows`` under ``columns``, or ``text``; ``note`` says how much.

    For numbers: ``facts`` (min, max, mean, std), the counts of ``nans`` and ``infinite`` values, and ``bins`` of a
    histogram from min to max; if ``sampled`` is not 0, they cover only that many sampled numbers. ``travels``: its type
    can be pulled.
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
        """The name, the rank, and the type, shape, device and size of the variable."""
        about = self.about
        size = "" if about.bytes is None else format_size(about.bytes)
        parts = [about.type, "" if about.shape is None else about.text, about.dtype, about.device, size]
        return f"{self.name} on rank {self.rank}: {', '.join(part for part in parts if part)}"

    @property
    def numbers(self) -> str:
        """The statistics and the counts of nan and infinite in one line; empty when there are none."""
        parts = [f"{name} {number}" for name, number in self.facts.items()]
        parts += [f"{count:,} {what}" for count, what in ((self.nans, "nan"), (self.infinite, "infinite")) if count]
        return ", ".join(parts) + (f" (of {self.sampled:,} sampled)" if self.sampled and parts else "")

    @property
    def checksum(self) -> str:
        """A text with the checksum, or the reason why there is none."""
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
