"""The parties' code for boosted trees with `protect = "order"` (Tian et al. 2020, section 4).

    feature party                                label party
      layout, number of each cell's bin  ---->     once: joins all columns;
      keeps its splits                   <----     grows a round; splits on the party's columns;
      sides of queried rows              ---->     margins of queried rows.

The label party requests every message of a feature party by an empty frame of the same step, so
each feature party has at most one message under way. The label party refers to a feature party's
columns by number, and does not learn their names. During training, a feature party learns only on
which of its columns trees split, and at which bins. In evaluations and predictions, the feature
party also receives the Shapley values of its own columns, if the label party consents. The bin
numbers disclose the order of a feature party's cells; with an `epsilon`, the party applies
randomised response to bins before it sends them. Answers to queries, for test rows and new rows,
use the true cells; they show whether these rows go left at each split.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import DataError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets.table import BLOCK_ROWS
from vfl.session.exchange import expect
from vfl.session.schedule import QUERY_ROWS, Exchange, own_rows
from vfl.session.secure_mode import (
    EVALUATE,
    TRAIN,
    OwnRows,
)
from vfl.session.terms import Terms
from vfl.trees.boosting import (
    Booster,
    Forest,
    Source,
    blocks,
    owned,
    splits_of,
    splits_of_state,
    splits_state,
)
from vfl.trees.cells import (
    CHUNK_BYTES,
    LABEL_PARTY,
    FeatureCellsEnd,
    LabelCellsEnd,
    counted_state,
    taken,
)
from vfl.trees.explanation import Leaves, importance, mean_absolute
from vfl.trees.grow import Layout, Split
from vfl.trees.histograms import Local, Sides, bin_kind

if TYPE_CHECKING:
    from vfl.trees.mode import Trees

#: Largest number of splits on the columns of one party; with more splits, the answers for the
#: largest query would not fit in one message.
MOST_SPLITS = CHUNK_BYTES // QUERY_ROWS * 8
#: Largest number of positions in a histogram of all columns; a position has 16 bytes, so a node's
#: histogram has at most 64 MiB.
_MOST_PLACES = 1 << 22
#: Largest number of test rows for which the importance of columns is measured.
_EXPLAINED_ROWS = 256


class FeatureEnd(FeatureCellsEnd):
    """A feature party's implementation, with the bins and later the splits of its columns.

    Args:
        mode, party, terms, rows, link: see `FeatureCellsEnd`.
    """

    _mode: Trees

    def __init__(self, mode: Trees, party: str, terms: Terms, rows: OwnRows, link: Link) -> None:
        super().__init__(mode, party, terms, rows, link)
        self._splits: list[Split] = []
        self._sides: Sides | None = None

    def train(self, exchange: Exchange) -> None:
        self._take(bytes(expect(self.link, Kind.PROTOCOL, exchange.step, LABEL_PARTY).payload))

    def _take(self, raw: bytes) -> None:
        """Store a round's splits on this party's columns, which the label party sent."""
        taken = read_splits(raw, self._binning.layout)
        if len(self._splits) + len(taken) > MOST_SPLITS:
            raise _too_many_splits(self.party)
        self._splits, self._sides = self._splits + taken, None
        self._note("splits on its columns", self._terms.label_party, TRAIN, len(taken))

    def answer_rows(self, exchange: Exchange) -> None:
        """Send whether an exchange's rows go left at each split on this party's columns."""
        if self._sides is None:
            self._sides = Sides(self._splits, self._binning.layout)
        answers = np.packbits(self._sides.of(self._bins(self._asked_for(exchange))), axis=1)
        self.link.send(Frame(Kind.PROTOCOL, exchange.step, answers.tobytes()))

    def outputs(self, exchange: Exchange) -> None:
        super().outputs(exchange)
        if self.party in self._terms.explained and _explains(self._terms, exchange):
            self._values.append(self._told(exchange))

    def _told(self, exchange: Exchange) -> np.ndarray:
        """Receive the Shapley values of this party's columns for the rows of an exchange."""
        rows = len(exchange.rows) if self._terms.mode == "predict" else 1
        columns = len(self._binning.layout.bins)
        frame = expect(self.link, Kind.PROTOCOL, exchange.step, LABEL_PARTY)
        raw = bytes(frame.payload)
        fits = bool(raw) and len(raw) % (4 * rows * columns) == 0
        values = np.frombuffer(raw if fits else b"", "<f4")
        if not fits or not np.isfinite(values).all():
            raise ProtocolError(
                "the message contains no Shapley values of this party's columns",
                where="the label party's message",
                got=f"{len(raw)} bytes",
                want=f"a number for each of {columns} columns, {rows} rows and each output",
            )
        what = "what its columns add" if self._terms.mode == "predict" else "their mean weight"
        self._note(what, self._terms.label_party, EVALUATE, values.size)
        return values.reshape(rows, columns, -1)

    def weights(self) -> dict[str, Tensor]:
        own = {} if self._own is None else self._own.state_dict()
        return own | splits_state(self._splits)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._splits, self._sides = splits_of_state(weights), None


@dataclass(frozen=True, eq=False, slots=True)
class _Asking:
    """The splits on the columns of one party, in the form that requests about rows need.

    Attributes:
        places: positions of these splits among all splits of the forest, axes (splits of the
            party,).
        missing_left: for each split, whether rows with a missing cell go left, axes (splits of the
            party,).
        sides: object that returns whether rows go left at the label party's own splits; None for
            splits of another party.
    """

    places: np.ndarray
    missing_left: np.ndarray
    sides: Sides | None


class LabelEnd(LabelCellsEnd):
    """The label party's implementation: it grows the forest and computes margins.

    Args:
        mode, terms, rows, links: see `LabelCellsEnd`.
    """

    _mode: Trees

    def __init__(self, mode: Trees, terms: Terms, rows: OwnRows, links: Mapping[str, Link]) -> None:
        super().__init__(mode, terms, rows, links)
        self._objective = mode.objective_of(rows.classes)
        self._forest = Forest(np.zeros(self._objective.outputs))
        self._booster: Booster | None = None
        #: For each party, the number of the forest's splits on its columns.
        self._split_counts = Counter[str]()
        #: Whether the rows of the last answered exchange go left at each split, axes (rows,
        #: splits).
        self._answers = np.empty((0, 0), bool)
        self._leaves: Leaves | None = None
        #: For each party by name, the splits on its columns; None until a finished forest is
        #: queried.
        self._askings: dict[str, _Asking] | None = None
        #: Test rows for which importance is measured: whether they go left at each split, and their
        #: labels.
        self._tested = list[tuple[np.ndarray, np.ndarray]]()

    def _start(self, *, resumes: bool) -> None:
        source, signs = self._histograms()
        train, weights_of_rows = self._positions("train"), self._rows.weights
        assert self._rows.labels is not None, "a training has labels"
        labels = taken(self._rows.labels.numpy(), train)
        counted = np.broadcast_to(1.0, len(train))
        if weights_of_rows is not None:
            counted = weights_of_rows[torch.from_numpy(train)].double().numpy()
        own_columns = self._counts.get(self.party, 0)
        self._booster = Booster(
            self._mode.boosting(signs, self._terms.seed, own_columns), self._objective,
            source, labels if self._rows.classes else labels.astype(np.float64),
            counted, len(self._known_rows()),
        )  # fmt: skip
        if resumes:
            self._booster.go_on(self._forest)
        self._forest = self._booster.forest
        splits = self._forest.splits
        self._split_counts = Counter(
            {name: len([*owned(splits, self._spans[name])]) for name in self._terms.feature_parties}
        )

    def _histograms(self) -> tuple[Source, list[int]]:
        """Return the object that computes histograms, and all columns' monotone constraints."""
        parts, signs = self._all_bins()
        return Local(*_side_by_side(list(parts.values()))), signs

    def train(self, exchange: Exchange) -> Tensor:
        booster, self._askings = self._boosts, None
        taken = splits_of(booster.add_round())
        for name in self._terms.feature_parties:
            own = [written(one) for _, one in owned(taken, self._spans[name])]
            self._split_counts[name] += len(own)
            if self._split_counts[name] > MOST_SPLITS:
                raise _too_many_splits(name)
            self._send_taken(name, exchange.step, json.dumps(own).encode())
        return self._outputs_of(booster.margins, exchange.rows)

    def _send_taken(self, name: str, step: int, splits: bytes) -> None:
        """Send a feature party those splits of a round that are on its columns."""
        self.ends[name].link.send(Frame(Kind.PROTOCOL, step, splits))

    def outputs(self, exchange: Exchange) -> Tensor:
        if exchange.phase == "validation":
            after = len(self._positions("train"))
            return self._outputs_of(self._boosts.margins, after + exchange.rows)
        self._ask_all(exchange.step)
        outputs = self.answered(exchange, None)
        if self._terms.mode == "evaluate":
            self._keep_some(exchange)
        if _explains(self._terms, exchange):
            self._explain(exchange)
        return outputs

    def _explain(self, exchange: Exchange) -> None:
        """Send parties their columns' Shapley values: of each predicted row, or test-row means.

        Raises:
            DataError: the Shapley values of one party do not fit in a message.
        """
        answers = self._answers
        if self._terms.mode == "evaluate":
            answers = np.concatenate([own for own, _ in self._tested])
        values = self._paths().contributions(answers, self._columns, sum(self._counts.values()))
        if self._terms.mode == "evaluate":
            values = mean_absolute(values)[None, :, None]
        for name in self._terms.explained:
            own = values[:, self._spans[name]].astype("<f4")
            if name == self.party:
                self._values.append(own)
                continue
            if own.nbytes > CHUNK_BYTES:
                raise DataError(
                    f"the Shapley values of party '{name}' do not fit one message",
                    got=f"{own.shape[1]} columns, {own.shape[2]} outputs",
                    want=f"columns x outputs of at most {CHUNK_BYTES // (4 * QUERY_ROWS)}",
                )
            self.ends[name].link.send(Frame(Kind.PROTOCOL, exchange.step, own.tobytes()))

    def answered(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> Tensor:
        if self._askings is None:
            splits = self._forest.splits
            self._askings = {name: self._asking(name, splits) for name in self._counts}
        asked_for = sum(len(one.places) for one in self._askings.values())
        answers = np.zeros((len(exchange.rows), asked_for), bool)
        known = np.ones(answers.shape, bool)
        for name, asking in self._askings.items():
            places = asking.places
            if name == self.party:
                assert asking.sides is not None, "they are here"
                answers[:, places] = asking.sides.of(self._own_bins(exchange, inputs))
            else:
                # If a party does not have a row, the row's cells in its columns are treated as
                # missing.
                answers[:, places] = asking.missing_left
                asked = self._asked_of(name, exchange)
                if name in without:
                    known[np.ix_(asked, places)] = False
                elif len(asked):
                    answers[np.ix_(asked, places)] = self._sides(name, exchange, asked, len(places))
        self._answers = answers
        if known.all():
            return self._outputs_of(self._forest.margins(answers))
        return self._outputs_of(self._paths().margins(answers, known))

    def contributions(self, row: int) -> dict[str, Tensor]:
        players = self._owners[self._columns]
        found = self._paths().contributions(self._answers[[row]], players, len(self._counts))[0]
        return dict(zip(self._counts, torch.from_numpy(self._objective.parts(found)), strict=True))

    def importance(self) -> dict[str, Any] | None:
        if not self._tested:
            return None
        answers, labels = map(np.concatenate, zip(*self._tested, strict=True))
        parties: list[dict[str, Any]] = [{"party": name} for name in self._counts]
        columns: list[dict[str, Any]] = [
            {"party": name, "column": 1 + number}
            for name, count in self._counts.items()
            for number in range(count)
        ]
        for heads, players in ((parties, self._owners[self._columns]), (columns, self._columns)):
            found = importance(self._forest, self._objective, answers, labels, players, len(heads))
            for name, values in vars(found).items():
                for head, value in zip(heads, values.tolist(), strict=True):
                    head[name] = value
        return {"rows": len(labels), "parties": parties, "columns": columns}

    @property
    def _columns(self) -> np.ndarray:
        """For each split, the number of its column among all columns, axes (splits,)."""
        return np.array([split.column for split in self._forest.splits], np.int64)

    @property
    def _owners(self) -> np.ndarray:
        """For each column, the party that owns it, as a position in `_counts`, axes (columns,)."""
        return np.repeat(np.arange(len(self._counts)), list(self._counts.values()))

    def _keep_some(self, exchange: Exchange) -> None:
        """Keep split answers and labels of a sample of rows, spread evenly over the phase."""
        positions, labels = self._positions(exchange.phase), self._rows.labels
        chosen = np.linspace(0, len(positions) - 1, _EXPLAINED_ROWS).astype(np.int64)
        kept = np.flatnonzero(np.isin(exchange.rows, chosen))
        assert labels is not None, "an evaluation has labels"
        own = labels[torch.from_numpy(positions[exchange.rows[kept]])].numpy()
        self._tested.append((self._answers[kept], own))

    def _paths(self) -> Leaves:
        """Return the leaves of the finished forest, with the paths to them."""
        if self._leaves is None:
            self._leaves = Leaves(self._forest)
        return self._leaves

    def weights(self) -> dict[str, Tensor]:
        return counted_state(self._own, [*self._counts.values()]) | self._forest.state_dict()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._forest, self._leaves, self._askings = Forest.of_state(weights), None, None
        self._load_counts(weights["column_counts"])

    @property
    def _boosts(self) -> Booster:
        assert self._booster is not None, "a training has begun"
        return self._booster

    def _outputs_of(self, margins: np.ndarray, rows: np.ndarray | None = None) -> Tensor:
        """Return the outputs of some rows, or of all rows, float32, axes (rows, outputs)."""
        count = len(margins) if rows is None else len(rows)
        found = [
            self._objective.logits(margins[part if rows is None else rows[part]]).astype(np.float32)
            for part in blocks(count)
        ]
        return torch.from_numpy(np.concatenate(found))

    def _asking(self, name: str, splits: Sequence[Split]) -> _Asking:
        """Return the splits on a party's columns, in the form that requests about rows need."""
        placed = list(owned(splits, self._spans[name]))
        own = [one for _, one in placed]
        here = self._own if name == self.party else None
        return _Asking(
            np.array([place for place, _ in placed], np.int64),
            np.array([one.missing_left for one in own], bool),
            None if here is None else Sides(own, here.layout),
        )

    def _asked_of(self, name: str, exchange: Exchange) -> np.ndarray:
        """Return the positions, within an exchange, of the rows that a feature party can answer.

        The positions are those of all rows of the exchange, or, if no confirmation follows, only of
        rows that the party has.
        """
        held = self._rows.held
        if exchange.confirmed or not held:
            return np.arange(len(exchange.rows))
        return own_rows(exchange, held[name])

    def _sides(self, name: str, exchange: Exchange, asked: np.ndarray, splits: int) -> np.ndarray:
        """Receive whether rows go left at splits on a feature party's columns, (rows, splits)."""
        raw = self._next(name, exchange.step)
        rows, width = len(asked), -(-splits // 8)
        if len(raw) != rows * width:
            raise ProtocolError(
                "the message has a wrong number of answers",
                where=f"the message of party '{name}'",
                got=f"{len(raw)} bytes",
                want=f"{rows * width} bytes, one bit per split",
                fix="predict with the run that all parties have trained",
            )
        self._note("sides of splits", name, EVALUATE, rows * splits)
        bits = np.frombuffer(raw, np.uint8).reshape(rows, width)
        return np.unpackbits(bits, axis=1, count=splits).astype(bool)


def _explains(terms: Terms, exchange: Exchange) -> bool:
    """Return whether the label party sends Shapley values to other parties after an exchange."""
    return bool(terms.explained) and (terms.mode == "predict" or exchange.last)


def _too_many_splits(party: str) -> DataError:
    return DataError(
        f"the forest has too many splits on the columns of party '{party}'",
        want=f"at most {MOST_SPLITS} splits, because answers about more do not fit in one message",
        fix="fewer rounds, or smaller trees",
    )


def written(split: Split) -> list[Any]:
    """Return a split as JSON data: how many bins, or which categories, go left."""
    left = split.left.stop if isinstance(split.left, range) else list(split.left)
    return [split.column, left, split.missing_left]


def read_splits(raw: bytes, layout: Layout) -> list[Split]:
    """Parse the label party's message with splits, which is JSON that `written` made.

    Raises:
        ProtocolError: a split does not fit this party's columns.
    """
    try:
        return [_split(one, layout) for one in json.loads(raw)]
    except (ValueError, TypeError, IndexError, RecursionError):
        raise ProtocolError(
            "the message contains splits that these columns cannot have",
            where="the label party's message",
            want="a column, bins of it and a direction for each split",
        ) from None


def _split(written: Any, layout: Layout) -> Split:
    """Parse the JSON data of one split.

    Raises:
        ValueError, TypeError, IndexError: the split does not fit these columns.
    """
    column, left, missing_left = written
    if not (type(column) is int and column >= 0 and isinstance(missing_left, bool)):
        raise ValueError
    count = layout.bins[column]
    if not layout.categorical[column]:
        if not (type(left) is int and 0 <= left <= count):
            raise ValueError
        return Split(column, range(left), missing_left)
    if not all(type(one) is int and 0 <= one < count for one in left):
        raise ValueError
    return Split(column, tuple(left), missing_left)


def joined(layouts: Sequence[Layout]) -> Layout:
    """Join the layouts of all parties; missing cells get the last position of the widest histogram.

    Raises:
        DataError: the histogram of all columns is larger than the limit.
    """
    layout = Layout(
        tuple(one for own in layouts for one in own.bins),
        tuple(one for own in layouts for one in own.categorical),
    )
    if len(layout.bins) * layout.width > _MOST_PLACES:
        raise DataError(
            "all columns together have too many bins",
            got=f"{len(layout.bins)} columns of up to {layout.width - 1} bins",
            want=f"at most {_MOST_PLACES} positions in a histogram",
            fix="fewer columns, or a smaller max_bin",
        )
    return layout


def _side_by_side(parts: Sequence[tuple[np.ndarray, Layout]]) -> tuple[np.ndarray, Layout]:
    layout = joined([own for _, own in parts])
    missing, rows = layout.width - 1, len(parts[0][0])
    found = np.empty((rows, len(layout.bins)), bin_kind(layout.width))
    begin = 0
    for bins, own in parts:
        part = found[:, begin : begin + len(own.bins)]
        for start in range(0, rows, BLOCK_ROWS):
            block = bins[start : start + BLOCK_ROWS]
            lacks = block == own.width - 1
            part[start : start + BLOCK_ROWS] = np.where(lacks, found.dtype.type(missing), block)
        begin += len(own.bins)
    return found, layout
