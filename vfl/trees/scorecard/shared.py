"""Implementations of a scorecard on additive shares, with `protect = "shared"`.

A feature party first joins fine bins with few rows into cells, so that each cell has either no rows
or at least `floor` rows. The party announces the number of rows of each cell. All other numbers
that the label party receives about training rows are sums over rows (`vfl.trees.sums`) and the
stability of each column. For each validation and test row, it then receives the sum of the party's
points:

    feature party                  helper                          label party
      rows of each cell       ----------------------------------->   has labels;
      cells, rows permuted --->      sums shares of bads     ---->   bads of each cell;
      groups of cells, weights of evidence  <---------------------   merges cells;
      stability of its columns  --------------------------------->
      weights of evidence of its rows, opened under masks            X^T X: correlation, inflation;
      its part of the margins --->   means, weights of rows  ---->   X^T m, X^T w X of each step;
      points  <---------------------------------------------------   the card.

After the training, evaluations, predictions and prediction services use the classes of
`vfl.trees.scorecard.ends`, like scorecards without shares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import ProtocolError, TooFewRowsError
from vfl.core.frame import Link
from vfl.datasets.encode import MAX_CATEGORIES
from vfl.mpc.secure.ends import Place, read_description
from vfl.session.label.scored import Scored
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import EVALUATE, TRAIN, OwnRows
from vfl.session.terms import Terms
from vfl.trees.bins import Binning, fit_bins
from vfl.trees.cells import (
    LABEL_PARTY,
    Count,
    RowCounts,
    categories_of,
    cells_of,
    other_parties,
    positions_of,
    row_counts,
)
from vfl.trees.grow import Layout
from vfl.trees.newton import Outcome, Sums, local_sums, outcome_of
from vfl.trees.scorecard.binning import with_floor
from vfl.trees.scorecard.card import Card, OwnColumn, own_of_state, own_state
from vfl.trees.scorecard.ends import (
    MOST_POINTS,
    POINTS,
    bad_class,
    bad_rows,
    label_state,
    logits_of,
    points_in,
    read_columns,
    require_budget,
    written,
)
from vfl.trees.scorecard.fitting import (
    FAMILY,
    Counted,
    MergedColumn,
    counts_of,
    fit_card,
    shift_of,
)
from vfl.trees.scorecard.statistics import standard
from vfl.trees.summing_end import (
    MOST_COLUMNS,
    SummingEnd,
    SummingFacts,
    require_own_rows,
)
from vfl.trees.sums import Asked, Masked, Summing, coarse_bits, fine_bits

if TYPE_CHECKING:
    from vfl.trees.scorecard.mode import Scorecard

_SHIFT = np.dtype("<f8")
#: Limits on the size of JSON messages in bytes: for the merged bin of one cell (joined fine bins),
#: for the entry of one merged bin, and for the rest of a message.
_GROUP_BYTES, _BIN_BYTES, _AROUND_BYTES = 8, 40, 80

_Cells = Annotated[int, Field(ge=2, le=max(256, MAX_CATEGORIES) + 1)]


class OwnColumnFacts(Settings):
    """A column's description that its owner sends to the label party.

    Attributes:
        rows: number of training rows in each cell, which is a fine bin or several joined fine bins;
            the last cell has the rows without a value.
        categorical: whether the column has categories, so that its cells have no order.
        sign: 1: the bad rate may only rise with the column; -1: it may only fall; 0 allows both.
    """

    rows: tuple[Count, ...] = Field(min_length=2, max_length=max(256, MAX_CATEGORIES) + 1)
    categorical: bool
    sign: Annotated[int, Field(ge=-1, le=1)]


class OwnFacts(Settings):
    """A party's announcement to the label party: its columns, and sizes of its row splits."""

    rows: RowCounts
    columns: tuple[OwnColumnFacts, ...] = Field(max_length=MOST_COLUMNS)


class Facts(SummingFacts):
    """Facts that all parties need beyond the terms that they agreed on for the session.

    Attributes:
        cells: for each feature party, the largest number of cells (joined fine bins) of one of its
            columns.
    """

    cells: tuple[_Cells, ...] = Field(min_length=1, max_length=255)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """See `Summing.bin_sums`."""
        return list(zip(self.columns[:-1], self.cells, strict=True))


class TrainingEnd(SummingEnd[Facts]):
    """Code that the implementations of all parties share.

    Args:
        mode, party, terms, rows, place: see `NetworkEnd`.
    """

    _mode: Scorecard

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        raise AssertionError("only the label party makes the facts")

    def _check(self, facts: Facts) -> None:
        if len(facts.cells) != len(facts.columns) - 1:
            raise other_parties()
        floor = self._mode.floor
        if facts.rows[0] < 2 * floor:
            raise TooFewRowsError(
                "there are too few training rows for two cells (joined fine bins)",
                got=f"{facts.rows[0]} rows",
                want=f"{2 * floor} rows, because floor={floor} requires {floor} rows in each cell",
                fix="more rows, or a smaller floor if all parties accept it",
            )

    def _beside_bytes(self, facts: Facts) -> int:
        columns = max(facts.columns)
        told = columns * (max(facts.cells) * (_GROUP_BYTES + _BIN_BYTES) + _AROUND_BYTES)
        return max(told, columns * POINTS.itemsize * max(facts.rows))

    def _player_of(self, links: Mapping[int, Link]) -> Summing:
        player = super()._player_of(links)
        player.dithers = True  # rows of the same bin have equal weights of evidence
        return player

    def weights(self) -> dict[str, Tensor]:
        return {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load no weights, because this party saves none."""

    # Steps that parties with columns and the helper take alike.

    def _follow(self, own: np.ndarray | None, columns: Sequence[int]) -> None:
        """At a party without labels: take part in sums until the scorecard is fitted.

        Args:
            own: this party's standardised columns of weights of evidence, axes (rows, columns);
                None at the helper.
            columns: number of standardised columns of each party with columns.
        """
        player = self._begun
        player.columns = list(columns)
        values = None if own is None else torch.from_numpy(own)
        fine = player.open_columns(values, fine_bits(player.rows))
        player.gram(fine)
        raw = player.channels[player.label].receive_bytes(player.next_number(), sum(columns))
        keep = np.frombuffer(raw, np.uint8) != 0
        first = sum(columns[:-1])
        if not keep[first]:
            raise ProtocolError("a regression needs an intercept", where=LABEL_PARTY)
        if keep.sum() == 1:
            return
        if own is not None:
            start = sum(columns[: player.role])
            own = own[:, keep[start : start + columns[player.role]]]
        fine, coarse = opened_again(player, fine, keep, own)
        player.label_products(fine, None)
        most = self._mode.most_sums(sum(columns))
        Asked(player, FAMILY, fine, coarse, own).follow(most, 0)

    def _columns_of_holders(self, told: object) -> list[int]:
        """Parse the number of columns that each party keeps for the regression.

        Raises:
            ValueError: the numbers do not fit the parties or their columns.
        """
        most = self._facts.columns
        if not (isinstance(told, list) and len(told) == len(most)):
            raise ValueError
        if not all(
            type(one) is int and 0 <= one <= top for one, top in zip(told, most, strict=True)
        ):
            raise ValueError
        if not told[-1]:
            raise ValueError  # the intercept is missing
        return told


class HelperEnd(TrainingEnd):
    """The implementation of the helper, a party without data; it draws masks and adds up shares."""

    def announced(self) -> None:
        """Return None, because the helper has no rows to announce."""

    def train(self, exchange: Exchange) -> None:
        player = self._begun
        player.bin_sums(self._facts.sizes)
        raw = player.channels[player.label].receive_bytes(player.next_number(), 2, 1 << 12)
        try:
            columns = self._columns_of_holders(json.loads(bytes(raw)))
        except (ValueError, RecursionError):
            raise _unfit(LABEL_PARTY) from None
        self._follow(None, columns)
        player.next_number()  # skip the message with the points
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> None:
        self._begun.next_number()


class FeatureEnd(TrainingEnd):
    """A feature party's implementation."""

    def __init__(
        self, mode: Scorecard, party: str, terms: Terms, rows: OwnRows, place: Place
    ) -> None:
        super().__init__(mode, party, terms, rows, place)
        self._own: Binning | None = None
        #: For each column: the cell (joined fine bins) to which each fine bin belongs, and the
        #: number of cells.
        self._cells: list[np.ndarray] = []
        self._counts: list[int] = []
        self._columns: list[OwnColumn] = []

    def announced(self) -> bytes:
        own = self._own = fit_own(self._mode, self._rows)
        fine = fine_bins(own, self._rows, "train")
        categorical = own.layout.categorical
        counts = [
            np.bincount(column, minlength=1 + count)
            for column, count in zip(fine.T, own.layout.bins, strict=True)
        ]
        found = [
            with_floor(one, self._mode.floor, categorical=kind)
            for one, kind in zip(counts, categorical, strict=True)
        ]
        self._cells, self._counts = map(list, zip(*found, strict=True))
        rows = [
            np.bincount(cells, weights=one, minlength=count).astype(np.int64)
            for (cells, count), one in zip(found, counts, strict=True)
        ]
        # The number of training rows in every cell, and later the stability index of every column.
        self._rows.spend(sum(map(len, rows)) + len(rows))
        signs = self._mode.signs(self._rows.columns, len(rows))
        columns = tuple(
            OwnColumnFacts(rows=tuple(one.tolist()), categorical=kind, sign=sign)
            for one, kind, sign in zip(rows, categorical, signs, strict=True)
        )
        return OwnFacts(rows=row_counts(self._rows), columns=columns).model_dump_json().encode()

    def _check(self, facts: Facts) -> None:
        super()._check(facts)
        own = row_counts(self._rows), (len(self._cells), max(self._counts))
        said = facts.rows, (facts.columns[self._role], facts.cells[self._role])
        require_own_rows(own, said)

    def train(self, exchange: Exchange) -> None:
        player = self._begun
        cells = self._in_cells("train")
        player.bin_sums(self._facts.sizes, cells)
        number, link = player.next_number(), player.channels[player.label]
        raw = bytes(link.receive_bytes(number, 2, self._most_told))
        try:
            told = json.loads(raw)
            columns = self._columns_of_holders(told["counts"])
            groups = read_columns(told["columns"], self._layout_of_cells, self._mode)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _unfit(LABEL_PARTY) from None
        count = sum(len(one.weights) for one in groups)
        player.leakage.count("weights of evidence", "its bins", count, count)
        trained = _grouped(cells, groups)
        later = _grouped(np.concatenate([*map(self._in_cells, ("validation", "test"))]), groups)
        rows = [
            np.bincount(bins, minlength=len(one.weights))
            for bins, one in zip(trained.T, groups, strict=True)
        ]
        shifts = [shift_of(one, bins) for one, bins in zip(rows, later.T, strict=True)]
        link.send_bytes(np.array(shifts, _SHIFT).tobytes(), number, "online")
        parts = [
            (one.weights[bins] - mean) / scale
            for one, bins, (mean, scale) in zip(
                groups, trained.T, map(standard, (one.weights for one in groups), rows), strict=True
            )
            if scale
        ]
        if len(parts) != columns[self._role]:
            raise _unfit(LABEL_PARTY)
        values = np.stack(parts, axis=1) if parts else np.empty((len(cells), 0))
        self._follow(values, columns)
        raw = bytes(link.receive_bytes(player.next_number(), 2, self._most_told))
        try:
            known = zip(map(written, groups), json.loads(raw), strict=True)
            final = [before | {"points": points} for before, points in known]
            found = read_columns(final, self._layout_of_cells, self._mode)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _unfit(LABEL_PARTY) from None
        self._columns = [
            OwnColumn(one.groups[cell], one.weights, one.points)
            for one, cell in zip(found, self._cells, strict=True)
        ]
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> None:
        player = self._begun
        fine = fine_bins(self._binning, self._rows, exchange.phase, exchange.rows)
        points = points_in(fine, self._columns).sum(axis=1)
        link = player.channels[player.label]
        link.send_bytes(points.astype(POINTS).tobytes(), player.next_number(), "online")
        self._note(EVALUATE)

    def weights(self) -> dict[str, Tensor]:
        if not self._columns:
            return {}
        return self._binning.state_dict() | own_state(self._columns)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if "sizes" in weights:
            self._columns = own_of_state(weights)

    @property
    def _binning(self) -> Binning:
        assert self._own is not None, "a training has begun"
        return self._own

    @property
    def _layout_of_cells(self) -> Layout:
        own = self._binning.layout
        return Layout(tuple(count - 1 for count in self._counts), own.categorical)

    @property
    def _most_told(self) -> int:
        return self._sizes(self._facts).frame_bytes

    def _in_cells(self, phase: str) -> np.ndarray:
        """Return each row's cell (joined fine bins) in each column, int64, axes (rows, columns)."""
        fine = fine_bins(self._binning, self._rows, phase)
        return np.stack(
            [cell[bins] for cell, bins in zip(self._cells, fine.T, strict=True)], axis=1
        )


class LabelEnd(TrainingEnd):
    """The label party's implementation: it receives sums over rows and fits the scorecard."""

    def __init__(
        self, mode: Scorecard, party: str, terms: Terms, rows: OwnRows, place: Place
    ) -> None:
        super().__init__(mode, party, terms, rows, place)
        self._bad = bad_class(mode, rows)
        self._own: Binning | None = None
        self._told: dict[str, OwnFacts] = {}
        self._card: Card | None = None

    def announced(self) -> bytes:
        if self._rows.inputs is not None:
            self._own = fit_own(self._mode, self._rows)
        return b""  # other parties learn only how many columns

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        names = self._roles[: self._label_role]
        for name in names:
            said = self._told[name] = read_description(OwnFacts, told[name], f"party '{name}'")
            if not said.columns or {sum(one.rows) for one in said.columns} != {said.rows[0]}:
                raise ProtocolError(
                    "the numbers of rows in a column's cells do not add up to the number of rows",
                    where=f"the message of party '{name}'",
                )
        own = 0 if self._own is None else len(self._own.layout.bins)
        return Facts(
            rows=row_counts(self._rows),
            columns=(*(len(self._told[name].columns) for name in names), 1 + own),
            cells=tuple(max(len(one.rows) for one in self._told[name].columns) for name in names),
        )

    def train(self, exchange: Exchange) -> None:
        player, mode = self._begun, self._mode
        bad = self._bad_rows("train")
        source = OnShares(player, mode, self._told, self._facts, self._rows, self._own, bad)
        bads = int(bad.sum())
        self._card = fit_card(mode, source, len(bad) - bads, bads)
        source.finish(self._card.columns)
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> Tensor:
        player, card = self._begun, self._card
        assert card is not None, "it has been fitted"
        number, rows = player.next_number(), len(exchange.rows)
        scores = np.full(rows, card.base, np.int64)
        if self._own is not None:
            fine = fine_bins(self._own, self._rows, exchange.phase, exchange.rows)
            own = card.columns[: len(self._own.layout.bins)]
            scores += points_in(fine, own).sum(axis=1)
        for other in player.others:
            channel = player.channels[other]
            raw = channel.receive_bytes(number, rows * POINTS.itemsize)
            points = np.frombuffer(raw, POINTS).astype(np.int64)
            if np.abs(points).max(initial=0) > MOST_POINTS:
                raise ProtocolError("a party cannot give a row so many points", where=channel.peer)
            scores += points
            player.leakage.count("points of rows", f"{exchange.phase} rows", rows, rows)
        if exchange.phase in ("validation", "test"):
            bad = self._bad_rows(exchange.phase)[exchange.rows]
            self._card = card.with_scores(exchange.phase, Scored.counted(scores, bad))
        self._note(EVALUATE)
        return logits_of(scores, self._bad, self._mode.scale)

    def weights(self) -> dict[str, Tensor]:
        counts = [0 if self._own is None else len(self._own.layout.bins)]
        counts = [
            *(counts if counts[0] else []),
            *(len(one.columns) for one in self._told.values()),
        ]
        return label_state(self._own, counts, self._bad, self._card)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if "sizes" in weights:
            self._card = Card.of_state(weights)

    def _bad_rows(self, phase: str) -> np.ndarray:
        return bad_rows(self._rows, phase, self._bad)


class OnShares:
    """Counts and sums over all parties' columns, at the label party; see `fitting.Source`.

    The scorecard lists the label party's columns first, whereas the order of party roles ends with
    the label party.

    Args:
        player: the label party's connection to the sums protocol.
        mode: settings of the scorecard (`model = "scorecard"`).
        told: each feature party's description of its columns, by party name, in the order of the
            party roles.
        facts: facts that all parties have.
        rows: the label party's rows.
        own: fine bins of the label party's columns; None if it has no columns.
        bad: whether each training row belongs to the bad class.
    """

    def __init__(
        self,
        player: Summing,
        mode: Scorecard,
        told: Mapping[str, OwnFacts],
        facts: Facts,
        rows: OwnRows,
        own: Binning | None,
        bad: np.ndarray,
    ) -> None:
        self._player, self._mode, self._told, self._facts = player, mode, told, facts
        self._rows, self._own, self._bad = rows, own, bad
        self._mine = np.empty((len(bad), 0), np.int64)
        if own is not None:
            self._mine = fine_bins(own, rows, "train")
        #: Mean and standard deviation of each column's weights of evidence over rows; the standard
        #: deviation is 0 if all weights are equal.
        self._standards: list[tuple[float, float]] = []
        self._fine: Masked | None = None
        self._asked: Asked | None = None
        self._values = np.empty((len(bad), 0))

    def by_holder(self, columns: Sequence[Any]) -> dict[int, Sequence[Any]]:
        """Split a list with one entry per column of the feature parties by the parties' roles."""
        ends = np.cumsum([self._mine.shape[1], *(len(one.columns) for one in self._told.values())])
        return {
            role: columns[start:end] for role, (start, end) in enumerate(pairwise(ends.tolist()))
        }

    def counted(self) -> Sequence[Counted]:
        found = []
        if self._own is not None:
            layout = self._own.layout
            signs = self._mode.signs(self._rows.columns, len(layout.bins))
            found = [
                Counted(counts_of(fine, self._bad, 1 + count), kind, sign)
                for fine, count, kind, sign in zip(
                    self._mine.T, layout.bins, layout.categorical, signs, strict=True
                )
            ]
        sums = self._player.bin_sums(self._facts.sizes, numbers=self._bad.astype(np.int64))
        assert sums is not None, "the label party learns these sums"
        for (name, said), bads in zip(self._told.items(), sums, strict=True):
            for column, own in zip(said.columns, bads, strict=True):
                rows = np.array(column.rows)
                if (own < 0).any() or (own[: len(rows)] > rows).any() or own[len(rows) :].any():
                    raise ProtocolError(
                        "a cell has more bad rows than rows",
                        where=f"sums of party '{name}' and of the helper",
                    )
                counts = np.stack([rows - own[: len(rows)], own[: len(rows)]], axis=1)
                found.append(Counted(counts, column.categorical, column.sign))
        return found

    def shifts(self, columns: Sequence[MergedColumn]) -> Sequence[float]:
        player, number = self._player, self._player.next_number()
        self._standards = [standard(one.weights, one.counts.sum(axis=1)) for one in columns]
        holders = self.by_holder(columns)
        ends = np.cumsum([len(one.columns) for one in self._told.values()])
        parts = np.split(self._in_roles(self._varies), ends)
        counts = [int(part.sum()) for part in parts]
        player.columns = counts
        for (name, _), (role, own) in zip(self._told.items(), holders.items(), strict=True):
            plain = [OwnColumn(one.groups, one.weights, 0 * one.counts[:, 0]) for one in own]
            require_budget(self._mode, name, plain)
            content = {"counts": counts, "columns": [*map(written, plain)]}
            player.channels[role].send_bytes(json.dumps(content).encode(), number, "online")
        player.channels[player.dealer].send_bytes(json.dumps(counts).encode(), number, "online")
        found = []
        if self._own is not None:
            both = [fine_bins(self._own, self._rows, one) for one in ("validation", "test")]
            later = _grouped(np.concatenate(both), columns[: self._mine.shape[1]])
            found = [
                shift_of(column.counts.sum(axis=1), bins)
                for column, bins in zip(columns, later.T, strict=False)
            ]
        for role, own in holders.items():
            raw = player.channels[role].receive_bytes(number, _SHIFT.itemsize * len(own))
            player.leakage.count("stability", "columns", len(own), len(own))
            found += np.frombuffer(raw, _SHIFT).tolist()
        return found

    def correlation(self, columns: Sequence[MergedColumn]) -> np.ndarray:
        player, rows = self._player, len(self._bad)
        mine = zip(columns, self._mine.T, self._standards, strict=False)
        parts = [np.ones(rows)]
        parts += [
            (column.weights[column.groups[fine]] - mean) / scale
            for column, fine, (mean, scale) in mine
            if scale
        ]
        self._values = np.stack(parts, axis=1)
        self._fine = player.open_columns(torch.from_numpy(self._values), fine_bits(rows))
        gram = player.gram(self._fine)
        assert gram is not None, "the label party learns this matrix"
        found = np.eye(len(columns))
        places, order = np.flatnonzero(self._varies), self._order_of(self._varies)[1:]
        found[np.ix_(places, places)] = gram.numpy()[np.ix_(order, order)] / rows
        np.fill_diagonal(found, 1.0)
        return found.clip(-1, 1)

    def regression(
        self, columns: Sequence[MergedColumn], chosen: np.ndarray
    ) -> tuple[Outcome, Callable[[np.ndarray], Sums]]:
        player, labels = self._player, (~self._bad).astype(np.float64)
        number = player.next_number()
        keep = self._in_roles(chosen)[self._in_roles(self._varies)]
        for channel in player.channels.values():
            channel.send_bytes(keep.astype(np.uint8).tobytes(), number, "online")
        if not chosen.any():
            ones = np.ones((len(labels), 1))
            return outcome_of(FAMILY, ones.T @ labels, labels), local_sums(FAMILY, ones)
        assert self._fine is not None, "correlation comes before"
        own = self._values[:, keep[-self._values.shape[1] :]]
        fine, coarse = opened_again(player, self._fine, keep, own)
        products = player.label_products(fine, torch.from_numpy(labels))
        assert products is not None, "the label party learns these sums"
        asked = self._asked = Asked(player, FAMILY, fine, coarse, own)
        # A matrix T relates the columns X of weights of evidence to the standardised columns Z: X =
        # Z T. Therefore sums over rows of X follow from sums over rows of Z.
        order = self._order_of(chosen)
        into = np.diag(
            [1.0, *(one[1] for one, on in zip(self._standards, chosen, strict=True) if on)]
        )
        into[0, 1:] = [one[0] for one, on in zip(self._standards, chosen, strict=True) if on]
        ends = np.cumsum(player.columns)[:-1]

        def sums(b: np.ndarray) -> Sums:
            there = np.empty(len(b))
            there[order] = into @ b
            found = asked.at(np.split(there, ends))
            curvature = found.curvature[np.ix_(order, order)]
            means = found.means[order]
            return Sums(into.T @ means, into.T @ curvature @ into, found.normaliser)

        return outcome_of(FAMILY, into.T @ products.numpy()[order], labels), sums

    def _in_roles(self, flags: np.ndarray) -> np.ndarray:
        """Reorder flags from scorecard order to role order; insert the intercept's flag."""
        mine = self._mine.shape[1]
        return np.concatenate([flags[mine:], [True], flags[:mine]])

    @property
    def _varies(self) -> np.ndarray:
        """For each scorecard column, whether its weights of evidence differ between rows."""
        return np.array([scale > 0 for _, scale in self._standards])

    def _order_of(self, flags: np.ndarray) -> np.ndarray:
        """Return positions, in the order of roles, of the intercept and of chosen columns.

        Args:
            flags: whether each of the scorecard's columns is chosen.
        """
        mine = int(flags[: self._mine.shape[1]].sum())
        others = int(flags.sum()) - mine
        found: np.ndarray = np.r_[others : others + 1 + mine, :others]
        return found

    def finish(self, columns: Sequence[OwnColumn]) -> None:
        """End the requests for sums; send every feature party the points of its columns."""
        if self._asked is not None:
            self._asked.end({})
        number = self._player.next_number()
        for role, own in self.by_holder(columns).items():
            points = json.dumps([one.points.tolist() for one in own]).encode()
            self._player.channels[role].send_bytes(points, number, "online")


def opened_again(
    player: Summing, fine: Masked, keep: np.ndarray, own: np.ndarray | None
) -> tuple[Masked, Masked]:
    """Keep some of the opened columns, and open the kept columns again with fewer bits."""
    fine = player.narrowed(fine, keep)
    values = None if own is None else torch.from_numpy(np.ascontiguousarray(own))
    return fine, player.open_columns(values, coarse_bits(player.rows))


def fit_own(mode: Scorecard, rows: OwnRows) -> Binning:
    """Learn the fine bins of a party's columns from its training rows."""
    cells = cells_of(rows, positions_of(rows, "train"))
    assert cells is not None, "the party has columns"
    return fit_bins(cells, categories_of(rows), mode.max_bin)


def fine_bins(
    own: Binning, rows: OwnRows, phase: str, chosen: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return the fine bins of chosen rows of a phase, int64, axes (rows, columns).

    Args:
        own: fine bins of the party's columns.
        rows: the party's data.
        phase: phase of the session, such as "train".
        chosen: positions of the chosen rows within the phase; a full slice selects all rows.
    """
    cells = cells_of(rows, positions_of(rows, phase)[chosen])
    assert cells is not None, "the party has columns"
    found: np.ndarray = np.minimum(own.bins(cells).astype(np.int64), np.array(own.layout.bins))
    return found


def _grouped(cells: np.ndarray, columns: Sequence[Any]) -> np.ndarray:
    """Return each row's merged bin in each column, given its cell numbers; axes (rows, columns)."""
    return np.stack([one.groups[cell] for one, cell in zip(columns, cells.T, strict=True)], axis=1)


def _unfit(sender: str) -> ProtocolError:
    return ProtocolError(
        "the message has merged bins that these columns cannot have",
        where=f"the message of {sender}",
        want="a merged bin for each cell, and a weight and points for each merged bin",
    )
