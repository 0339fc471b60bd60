"""The parties' implementations of a session that trains or uses a scorecard.

    feature party                                label party
      layout, number of each cell's bin  ---->     counts goods and bads of each bin;
                                                   merges bins; regression on weights of evidence;
      keeps its bins' weights and points <----     groups, weights of evidence and points;
      points of queried rows             ---->     scores of queried rows.

Parties send bins in the same way as for boosted trees (`vfl.trees.cells`), so the label party
learns the same facts about cells as in a training of boosted trees. A feature party learns the
weight of evidence of each merged bin of its own columns, except for bins with fewer rows than the
floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import BadOptionError, DataError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.session.exchange import expect
from vfl.session.label.scored import Scored
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import EVALUATE, TRAIN, OwnRows
from vfl.session.terms import Terms
from vfl.trees.bins import Binning
from vfl.trees.cells import FeatureCellsEnd, LabelCellsEnd, counted_state, positions_of
from vfl.trees.grow import Layout
from vfl.trees.scorecard.card import (
    Card,
    CardColumn,
    OwnColumn,
    own_of_state,
    own_state,
)
from vfl.trees.scorecard.fitting import Local, fit_card
from vfl.trees.scorecard.points import Scale, reasons

if TYPE_CHECKING:
    from vfl.trees.scorecard.mode import Scorecard

POINTS = np.dtype("<i4")
#: Largest number of reasons that are given for a row's score. US Regulation B (12 CFR 1002.9) sets
#: no number; its commentary expects that more than four do not help.
MOST_REASONS = 4
#: Limits: largest number of points of a party for one row, largest number of points of a bin, and
#: largest absolute weight of evidence.
MOST_POINTS, _MOST_POINTS_OF_BIN, _MOST_WEIGHT = 1 << 24, 1 << 20, 64.0


class FeatureEnd(FeatureCellsEnd):
    """A feature party's implementation, with fine bins first, then merged bins and their points."""

    _mode: Scorecard

    def __init__(
        self, mode: Scorecard, party: str, terms: Terms, rows: OwnRows, link: Link
    ) -> None:
        super().__init__(mode, party, terms, rows, link)
        self._columns: list[OwnColumn] = []

    def train(self, exchange: Exchange) -> None:
        raw = bytes(expect(self.link, Kind.PROTOCOL, exchange.step, "the label party").payload)
        try:
            self._columns = read_columns(json.loads(raw), self._binning.layout, self._mode)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ProtocolError(
                "the message has merged bins that these columns cannot have",
                where="the label party's message",
                want="a merged bin for each fine bin, and a weight and points for each merged bin",
            ) from None
        told = sum(len(one.weights) for one in self._columns)
        self._note("weights of evidence of its bins", self._terms.label_party, TRAIN, told)

    def answer_rows(self, exchange: Exchange) -> None:
        """Send points of rows: per column if the mode requires it, else their sum per row."""
        points = points_in(self._bins(self._asked_for(exchange)), self._columns)
        if self._mode.reasons == "party":
            points = points.sum(axis=1, keepdims=True)
        self.link.send(Frame(Kind.PROTOCOL, exchange.step, points.astype(POINTS).tobytes()))

    def weights(self) -> dict[str, Tensor]:
        own = {} if self._own is None else self._own.state_dict()
        return own | (own_state(self._columns) if self._columns else {})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if "sizes" in weights:
            self._columns = own_of_state(weights)


class LabelEnd(LabelCellsEnd):
    """The label party's implementation: it fits the scorecard, and adds up points to scores."""

    _mode: Scorecard

    def __init__(
        self,
        mode: Scorecard,
        terms: Terms,
        rows: OwnRows,
        links: Mapping[str, Link],
    ) -> None:
        super().__init__(mode, terms, rows, links)
        self._bad = bad_class(mode, rows) if self._trains else 0
        self._card: Card | None = None
        self._parts: dict[str, tuple[np.ndarray, Layout]] = {}
        self._known = np.empty((0, 0), np.int64)
        #: Points of the rows in the last answered exchange.
        self._answers = self._known

    def _start(self, *, resumes: bool) -> None:
        self._parts, self._signs = self._all_bins()
        if self._card is not None:
            self._score_known()

    def train(self, exchange: Exchange) -> Tensor:
        bad = self._bad_rows("train")
        bads = int(bad.sum())
        source = Local(self._parts, self._signs, bad)
        self._card = fit_card(self._mode, source, len(bad) - bads, bads)
        for name in self.ends:
            own = self._columns_of(name)
            require_budget(self._mode, name, own)
            frame = Frame(Kind.PROTOCOL, exchange.step, json.dumps([*map(written, own)]).encode())
            self.ends[name].link.send(frame)
        self._score_known()
        count = len(self._positions("train"))
        for part, rows in (("train", slice(count)), ("validation", slice(count, None))):
            scores = self._base + self._known[rows].sum(axis=1)
            self._card = self._card.with_scores(part, Scored.counted(scores, self._bad_rows(part)))
        return self._outputs_of(self._known[exchange.rows])

    def outputs(self, exchange: Exchange) -> Tensor:
        if exchange.phase == "validation":
            after = len(self._positions("train"))
            return self._outputs_of(self._known[after + exchange.rows])
        self._ask_all(exchange.step)
        points = self._asked_points(exchange, None)
        if self._trains and exchange.phase == "test":
            assert self._card is not None, "it has been fitted"
            bad = self._bad_rows("test")[exchange.rows]
            scores = Scored.counted(self._base + points.sum(axis=1), bad)
            self._card = self._card.with_scores("test", scores)
        return self._outputs_of(points)

    def answered(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> Tensor:
        return self._outputs_of(self._asked_points(exchange, inputs, without))

    @property
    def remark_bytes(self) -> int:
        longest = sorted(self._reason_names, key=len)[-MOST_REASONS:]
        return len(json.dumps({"score": -(1 << 31), "reasons": longest}))

    def remarks(self) -> Sequence[Mapping[str, Any]]:
        names = self._reason_names
        usual = np.concatenate([self._usual(name) for name in self._counts])
        scores = self._base + self._answers.sum(axis=1)
        return [
            {"score": score, "reasons": [names[place] for place in places]}
            for score, places in zip(
                scores.tolist(), reasons(self._answers, usual, MOST_REASONS), strict=True
            )
        ]

    @property
    def _reason_names(self) -> list[str]:
        """Return the names for reasons, parties or columns; an unknown name becomes a number."""
        if self._mode.reasons == "party":
            return list(self._counts)
        return [
            reason_name(name, self._rows.columns if name == self.party else (), place)
            for name, count in self._counts.items()
            for place in range(count)
        ]

    def contributions(self, row: int) -> Mapping[str, Tensor]:
        # A score is a sum of the parties' points, so a party's Shapley value is the difference
        # between its points and their mean over the training rows.
        found, first = dict[str, Tensor](), 0
        for name in self._counts:
            usual = self._usual(name)
            beside = self._answers[row, first : first + len(usual)] - usual
            first += len(usual)
            logits = torch.zeros(2, dtype=torch.float64)
            logits[self._bad] = -float(beside.sum()) / self._mode.scale.factor
            found[name] = logits
        return found

    def weights(self) -> dict[str, Tensor]:
        return label_state(self._own, [*self._counts.values()], self._bad, self._card)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if "sizes" in weights:
            self._card, self._bad = Card.of_state(weights), int(weights["bad"])
            self._load_counts(weights["column_counts"])

    @property
    def _base(self) -> int:
        assert self._card is not None, "it has been fitted"
        return self._card.base

    def _columns_of(self, name: str) -> Sequence[CardColumn]:
        assert self._card is not None, "it has been fitted"
        return self._card.columns[self._spans[name]]

    def _bad_rows(self, part: str) -> np.ndarray:
        return bad_rows(self._rows, part, self._bad)

    def _score_known(self) -> None:
        """Compute points of training and validation rows, in the form that parties send."""
        points = [
            self._added(points_in(bins, self._columns_of(name)))
            for name, (bins, _) in self._parts.items()
        ]
        self._known = np.concatenate(points, axis=1)

    def _added(self, points: np.ndarray) -> np.ndarray:
        """Return a party's points as reasons need them: per column, or summed over its columns."""
        return points if self._mode.reasons == "column" else points.sum(axis=1, keepdims=True)

    def _usual(self, name: str) -> np.ndarray:
        """Return a party's mean points over training rows, per column or summed over columns."""
        usual = np.array([[one.usual for one in self._columns_of(name)]])
        return self._added(usual).ravel()

    def _asked_points(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> np.ndarray:
        """Return points of rows from all parties' answers, axes (rows, columns or parties).

        For an absent party, the function uses the party's mean points over the training rows.
        """
        found = []
        for name, count in self._counts.items():
            if name in without:
                usual = np.rint(self._usual(name)).astype(np.int64)
                found.append(np.tile(usual, (len(exchange.rows), 1)))
            elif name != self.party:
                found.append(self._points_from(name, exchange, count))
            else:
                own = points_in(self._own_bins(exchange, inputs), self._columns_of(name))
                found.append(self._added(own))
        self._answers = np.concatenate(found, axis=1)
        return self._answers

    def _points_from(self, name: str, exchange: Exchange, columns: int) -> np.ndarray:
        raw, rows = self._next(name, exchange.step), len(exchange.rows)
        width = columns if self._mode.reasons == "column" else 1
        points = np.empty((0, 0), np.int64)
        if len(raw) == rows * width * POINTS.itemsize:
            points = np.frombuffer(raw, POINTS).astype(np.int64).reshape(rows, width)
        if len(points) != rows or np.abs(points).max(initial=0) > MOST_POINTS:
            raise ProtocolError(
                "the message has the wrong number of points, or a point is too large",
                where=f"the message of party '{name}'",
                got=f"{len(raw)} bytes",
                want=f"{rows * width * POINTS.itemsize} bytes of points",
                fix="predict with the run that all parties have trained",
            )
        self._note("points of rows", name, EVALUATE, points.size)
        return points

    def _outputs_of(self, points: np.ndarray) -> Tensor:
        return logits_of(self._base + points.sum(axis=1), self._bad, self._mode.scale)


def points_in(bins: np.ndarray, columns: Sequence[OwnColumn]) -> np.ndarray:
    """Return the points of each row in each column, int64, axes (rows, columns).

    Args:
        bins: number of the fine bin of each cell, axes (rows, columns); a missing cell has the
            largest number.
        columns: scorecard entries of the columns, which belong to the same party.
    """
    found = np.empty(bins.shape, np.int64)
    for place, column in enumerate(columns):
        fine = np.minimum(bins[:, place], len(column.groups) - 1)
        found[:, place] = column.points[column.groups[fine]]
    return found


def logits_of(scores: np.ndarray, bad: int, scale: Scale) -> Tensor:
    """Return the logits of both classes that follow from scores, axes (rows, 2); 0 for good.

    Args:
        scores: score of each row.
        bad: number (0 or 1) of the bad class.
        scale: scale that converts log odds to scores.
    """
    logits = np.zeros((len(scores), 2))
    logits[:, bad] = -scale.log_odds(scores)
    return torch.from_numpy(logits)


def label_state(
    own: Binning | None, counts: Sequence[int], bad: int, card: Card | None
) -> dict[str, Tensor]:
    """Return the label party's saved state, as tensors.

    Args:
        own: fine bins of the label party's own columns; None if it has no columns.
        counts: number of columns of each party, in the order of the scorecard's columns.
        bad: number (0 or 1) of the bad class.
        card: the fitted scorecard.
    """
    found = counted_state(own, counts) | {"bad": torch.tensor(bad)}
    return found | ({} if card is None else card.state_dict())


def require_budget(mode: Scorecard, name: str, columns: Sequence[OwnColumn]) -> None:
    """Refuse to send a party more weights of evidence than the budget that all parties agreed on.

    Raises:
        DataError: the party would receive more weights of evidence than the agreed budget.
    """
    told = sum(len(one.weights) for one in columns)
    if told > mode.budget:
        raise DataError(
            f"party '{name}' would learn too many statistics",
            got=f"{told} weights of evidence",
            want=f"at most {mode.budget}, the budget that all parties agreed on",
            fix="fewer columns, fewer bins, or a larger budget",
        )


def reason_name(party: str, names: Sequence[str], place: int) -> str:
    """Return the name under which a column appears in reasons.

    >>> reason_name("shop", (), 0), reason_name("bank", ("income",), 0)
    ('shop column 1', 'bank income')
    """
    return f"{party} {names[place] if names else column_number(place)}"


def column_number(place: int) -> str:
    """Return a column's number as text, in place of a name that this host does not have.

    >>> column_number(0)
    'column 1'
    """
    return f"column {place + 1}"


def bad_class(mode: Scorecard, rows: OwnRows) -> int:
    """Return the number (0 or 1) of the class that counts as bad."""
    if rows.classes != 2:
        raise BadOptionError(
            "a scorecard separates good rows from bad rows",
            where="label.column",
            got=f"{rows.classes} classes" if rows.classes else "numbers",
            want="labels of two classes",
        )
    if rows.weights is not None:
        raise BadOptionError(
            "a scorecard must count every row once",
            got="rows or classes of different weights",
            want="label.class_weight = 'none', and no weights of rows",
        )
    names = [str(one) for one in rows.names]
    if not mode.bad:
        return 1
    if mode.bad not in names:
        raise BadOptionError(
            "the option 'bad' names no class of the labels",
            where="option bad",
            got="the given name is not a label",
            want="one of the two labels",
        )
    return names.index(mode.bad)


def bad_rows(rows: OwnRows, part: str, bad: int) -> np.ndarray:
    """Return, for each row of a split (such as training), whether it is of the bad class."""
    assert rows.labels is not None, "a training has labels"
    return np.asarray(rows.labels[torch.from_numpy(positions_of(rows, part))].numpy() == bad)


def written(column: OwnColumn) -> dict[str, Any]:
    """Return a column's entry as JSON data, which is sent to the column's owner."""
    return {
        "groups": column.groups.tolist(),
        "weights": column.weights.tolist(),
        "points": column.points.tolist(),
    }


def read_columns(told: Any, layout: Layout, mode: Scorecard) -> list[OwnColumn]:
    """Parse a party's columns from JSON data that `written` made.

    Raises:
        ValueError, TypeError, KeyError: the columns do not fit the party's fine bins, or have more
            weights of evidence than the budget.
    """
    found = []
    for one, fine in zip(told, layout.bins, strict=True):
        groups, weights, points = one["groups"], one["weights"], one["points"]
        count = len(points)
        whole = all(type(each) is int for each in (*groups, *points))
        fits = whole and len(groups) == fine + 1 and 0 < count == len(weights) <= mode.bins + 1
        fits = fits and all(0 <= each < count for each in groups)
        fits = fits and all(abs(each) <= _MOST_POINTS_OF_BIN for each in points)
        if not (fits and all(math.fabs(each) <= _MOST_WEIGHT for each in weights)):
            raise ValueError
        weights = np.array(weights, np.float64)
        found.append(OwnColumn(np.array(groups, np.int64), weights, np.array(points, np.int64)))
    if sum(len(one.weights) for one in found) > mode.budget:
        raise ValueError
    return found
