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
    """Rows of images; each column shows versions of the same data row.

    Attributes:
        title, caption: see `Drawing`.
        lines: a description of each row of images, and the images as PNG files in base64.
    """

    title: str
    caption: str
    lines: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page; a section without content is not shown.

    Attributes:
        title: its heading.
        choices: tables among which a reader can choose; the first table is shown initially.
        drawings, standings, tables, strips, pairs: contents of the section, shown in this order.
        below: explanation that is shown below the contents.
        folded: a table that readers can expand.
        roomy: whether the tables have few columns.
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
        count: amount or kind of the work, as text.
        sentence: sentence that describes the work.
        notes: notes on what the page leaves out.
        sections: all else.
        tables: tables that the study's command prints, in Markdown.
        json: content of the study's `results.json`.
        said: lines that the command prints between the tables and the notes.
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
