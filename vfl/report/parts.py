"""What pages are made of: drawings, tables, rows of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart with its caption, and its legend as (swatch, words)."""

    title: str
    caption: str
    chart: Markup
    legend: Sequence[tuple[Markup, str]] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table in words.

    Attributes:
        head: its headings.
        rows: its lines.
        words: how many of its first columns hold words.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Pictures above each other, column by column about the same row.

    Attributes:
        title, caption: as of a drawing.
        lines: what each line of pictures is, and the pictures as PNG files in base64.
    """

    title: str
    caption: str
    lines: Sequence[tuple[str, Sequence[str]]]
