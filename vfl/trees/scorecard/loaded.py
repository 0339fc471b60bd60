"""A run's scorecard, with names, edges and categories that are read from the run's folder.

The folder of a run in one process contains the parts of all parties. In a federation, the label
party's folder contains only its own part, so other parties' columns have numbers instead of names
there; each party reads its part from its own folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.core.storage import write_text
from vfl.datasets.encode import DateColumn, TextColumn
from vfl.session import PartyFolder, secure_mode
from vfl.session.label.summary import SEPARATOR
from vfl.trees.bins import Binning
from vfl.trees.cells import OWN, within
from vfl.trees.scorecard.card import Card, CardColumn, OwnColumn, own_of_state
from vfl.trees.scorecard.ends import column_number, reason_name
from vfl.trees.scorecard.mode import Scorecard

#: Prefix of tensor names: it marks the label party's own part of the model in its saved weights.
_LABEL = "share."
SCORES = "scores.csv"


@dataclass(frozen=True)
class Line:
    """A column of the scorecard, prepared for display.

    Attributes:
        party: name of the party that owns the column.
        name: the column's name, or its number if this host does not have the name.
        column: statistics of the column's bins.
        bins: the merged bins as text, or their numbers if this host does not have the edges.
    """

    party: str
    name: str
    column: CardColumn
    bins: Sequence[str]


class LoadedCard:
    """A scorecard, loaded from the files of its run.

    Args:
        path: folder of the run.

    Raises:
        RunFolderError: the run is not finished, or its model is not a scorecard.
    """

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.open(path)
        self.experiment = self.folder.experiment()
        mode = secure_mode.make(self.experiment.secure)
        if not isinstance(mode, Scorecard):
            raise RunFolderError(
                "the model of this run is not a scorecard",
                where=str(path),
                got=f"model = '{self.experiment.secure.partition(':')[0]}'",
                want="a run of model = 'scorecard'",
                fix="vfl scorecard EXPERIMENT.toml",
            )
        self.mode, self.summary = mode, self.folder.summary()
        self.label_party = self.experiment.label.party
        label = PartyFolder(self.folder.party(self.label_party))
        self._weights = within(_LABEL, label.weights())
        self.card = Card.of_state(self._weights)

    @cached_property
    def parties(self) -> dict[str, int]:
        """Number of columns of each party, in the order of the scorecard."""
        names = list(self.experiment.parties)
        ordered = sorted(names, key=lambda name: (name != self.label_party, names.index(name)))
        counts = self._weights["column_counts"].tolist()
        return dict(zip(ordered, counts, strict=True))

    @cached_property
    def lines(self) -> list[Line]:
        """All columns of the scorecard, in order, prepared for display."""
        columns, found = iter(self.card.columns), list[Line]()
        for party, count in self.parties.items():
            own = [next(columns) for _ in range(count)]
            words = self._words(party, own)
            found += [Line(party, *line) for line in words]
        return found

    def write_scores(self, most: int) -> Path:
        """Write `scores.csv`, with the score of each predicted row and the reasons for this score.

        Args:
            most: largest number of reasons for one row.

        Raises:
            RunFolderError: the run has no predictions, or an older version wrote them without
                scores.
        """
        source, target = self.folder.path / "predictions.csv", self.folder.path / SCORES
        table = pd.read_csv(source, dtype=str, keep_default_na=False) if source.exists() else None
        if table is None or "score" not in table:
            raise RunFolderError(
                "this run contains no scores of predicted rows",
                where=str(source),
                fix=f"vfl predict {self.folder.path}",
            )
        names = {
            reason_name(party, (), place): f"{party} {line.name}"
            for party, own in groupby(self.lines, lambda line: line.party)
            for place, line in enumerate(own)
        }
        found = table[["id", "score"]].copy()
        lists = [text.split(SEPARATOR) if text else [] for text in table["reasons"]]
        for number in range(most):
            found[f"reason_{number + 1}"] = [
                names.get(one[number], one[number]) if number < len(one) else "" for one in lists
            ]
        write_text(target, found.to_csv(index=False))
        return target

    def _words(
        self, party: str, columns: Sequence[CardColumn]
    ) -> Iterator[tuple[str, CardColumn, Sequence[str]]]:
        folder = PartyFolder(self.folder.party(party))
        known = named_bins(folder, columns, party == self.label_party)
        for place, column in enumerate(columns):
            name, bins = column_number(place), numbered(column)
            if known is not None:
                name, bins = known[place]
            yield name, column, bins


def numbered(column: OwnColumn) -> list[str]:
    """Return the numbers of the merged bins as text; the last bin is that of missing cells."""
    return [*(f"bin {place + 1}" for place in range(len(column.points) - 1)), "missing"]


def named_bins(
    folder: PartyFolder, columns: Sequence[OwnColumn], is_label: bool
) -> list[tuple[str, list[str]]] | None:
    """Return the names of a party's columns, and their merged bins as text.

    The result is None if the party's files of the run are not on this host.

    Args:
        folder: folder of the party's part of a run.
        columns: scorecard entries of that party's columns.
        is_label: whether the party is the label party.
    """
    if not folder.path.exists() or (encoder := folder.encoder()) is None:
        return None
    weights = folder.weights()
    if is_label:
        weights = within(f"{_LABEL}{OWN}", weights)
    else:
        columns = own_of_state(weights)  # entries of fine bins; the label party may have only cells
    read = getattr(encoder, "columns", ())
    categories = tuple(len(one.categories) if isinstance(one, TextColumn) else 0 for one in read)
    edges = Binning.of_state(weights, categories).edges
    found = []
    for place, column in enumerate(columns):
        own = read[place]
        if isinstance(own, TextColumn):
            bins = _of_categories(column, own.categories)
        else:
            bins = _of_edges(column, edges[place], isinstance(own, DateColumn))
        found.append((str(own.name), bins))
    return found


def part_of(path: Path) -> list[tuple[str, list[str], OwnColumn]]:
    """Return each column's name, bins as text and entry, from a party's own folder of a run.

    Raises:
        RunFolderError: the run trained another kind of model, or the party has no columns.
    """
    folder = PartyFolder(path)
    terms = folder.terms()
    is_label = terms.label_party == path.name
    weights = folder.weights()
    if isinstance(secure_mode.make(terms.secure), Scorecard):
        state = within(_LABEL, weights) if is_label else weights
        columns = own_of_state(state)
        if is_label:
            columns = columns[: int(state["column_counts"][0]) if path.name in terms.parties else 0]
        if columns and (known := named_bins(folder, columns, is_label)) is not None:
            return [(*one, column) for one, column in zip(known, columns, strict=True)]
    raise RunFolderError(
        "this part of a run has no columns of a scorecard",
        where=str(path),
        want="the folder of a party with columns, of a run of model = 'scorecard'",
    )


def _of_categories(column: OwnColumn, categories: Sequence[str]) -> list[str]:
    texts = [
        ", ".join(categories[fine] for fine in np.flatnonzero(column.groups[:-1] == group).tolist())
        for group in range(len(column.points) - 1)
    ]
    return _with_missing(texts, column)


def _of_edges(column: OwnColumn, edges: np.ndarray, dates: bool) -> list[str]:
    """Format the ranges of numbers that merged bins cover; dates are numbers of days since 1970."""

    def text(edge: float) -> str:
        return str(np.datetime64(int(np.floor(edge)), "D")) if dates else f"{edge:.6g}"

    starts = np.flatnonzero(np.diff(column.groups[:-1])) + 1  # first fine bin of each merged bin
    cuts = [text(float(edges[one - 1])) for one in starts]
    middle = [f"{low} to < {high}" for low, high in pairwise(cuts)]
    ranges = [f"< {cuts[0]}", *middle, f"≥ {cuts[-1]}"] if cuts else ["any"]
    return _with_missing(ranges, column)


def _with_missing(texts: list[str], column: OwnColumn) -> list[str]:
    """Append the bin of missing cells to the texts, or mark the bin with which it was merged."""
    place = int(column.groups[-1])
    if place < len(texts):
        texts[place] += " or missing"
    return [*texts, "missing"]
