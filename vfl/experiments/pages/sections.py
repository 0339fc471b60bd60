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
    """Rows of pictures; each column shows versions of the same data row.

    Attributes:
        title, caption: see `Drawing`.
        lines: a description of each line of pictures, and the pictures as PNG files in base64.
    """

    title: str
    caption: str
    lines: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page; empty sections are not shown.

    Attributes:
        title: its heading.
        choices: tables of which a reader can select one; the first is shown initially.
        drawings, standings, tables, strips, pairs: contents of the section, in this order.
        below: explanation below the contents.
        folded: a table that readers can unfold.
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
    """The page of a run or of a study of any kind.

    Attributes:
        glance: summary at the top.
        count: amount or kind of the work, in words.
        sentence: description of the work.
        notes: notes on what the page leaves out.
        sections: all else.
        tables: tables that the command of a study prints, in Markdown.
        json: content of the study's `results.json`.
        said: lines below the printed tables, before the notes.
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
