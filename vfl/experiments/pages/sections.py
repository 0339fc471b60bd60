"""Content of a page: a sequence of sections, each with a title, charts, tables and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from vfl.experiments.glance import Glance
from vfl.experiments.leaderboard import LeaderboardEntry
from vfl.experiments.pages.charts import Drawing
from vfl.experiments.tables import Table


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of images; each column has several versions of the same data row.

    Attributes:
        title, caption: see `Drawing`.
        lines: for each row of images, its description, and its images as PNG files in base64.
    """

    title: str
    caption: str
    lines: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page; the page shows the title, and all contents that are not empty.

    Attributes:
        title: its heading.
        choices: tables of which the reader can choose one; the page first shows the first table.
        drawings, standings, tables, strips, pairs: contents of the section; the page shows them in
            this order.
        below: explanation below the contents.
        folded: a table that is hidden until the reader expands it.
        roomy: whether the section's tables have few columns, so that the page can use wide columns.
    """

    title: str
    choices: Sequence[tuple[str, Table]] = ()
    drawings: Sequence[Drawing] = ()
    standings: Sequence[LeaderboardEntry] = ()
    tables: Sequence[Table] = ()
    strips: Sequence[Strip] = ()
    pairs: Sequence[tuple[str, str]] = ()
    below: str | Markup = ""
    folded: Table | None = None
    roomy: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """The content of the page of a run or of a study.

    Attributes:
        glance: summary at the top of the page.
        count: amount or kind of the study's work, as text.
        sentence: sentence that describes the study's work.
        notes: notes on results that the page leaves out.
        sections: all else.
        tables: tables that the study's command prints, in Markdown.
        json: content of the study's `results.json`.
        said: lines that the study's command prints between the tables and the notes.
        weights: digest of a run's weights.
    """

    glance: Glance
    count: str
    sentence: str
    notes: Sequence[str]
    sections: Sequence[Section]
    tables: Sequence[Table] = ()
    json: Mapping[str, Any] = field(default_factory=dict)
    said: Sequence[str] = ()
    weights: str = ""
