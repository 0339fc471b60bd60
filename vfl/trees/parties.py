"""Both ends of boosting with `protect = "order"` (Tian et al. 2020, FederBoost, section 4).

    feature party                                label party
      layout, number of each cell's bin  ---->     grows all trees on bins
      keeps its splits                   <----     splits on the party's columns, in order
      answers for asked rows             ---->     margins of the asked rows

A feature party's columns have numbers for the label party, no names. Nothing of the labels leaves
the label party but which of a party's columns were split at which bins. A feature party shows the
order of its cells, and with an `epsilon` only after randomised response. Predictions use cells as
they are: the answers show on which side of each split they lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.core.seeds import Secret
from vfl.trees.bins import MAX_BINS, Binning, randomised
from vfl.trees.boosting import Boosting, Forest, Round, boost
from vfl.trees.grow import Layout, Split
from vfl.trees.histograms import Local, sides
from vfl.trees.objectives import Objective

_LAYOUT, _BINS, _SPLITS, _ANSWERS = range(4)
_MAX_COLUMNS = 1 << 16
#: Places of a histogram that a party may ask for, of 16 bytes each: 64 MiB a node.
_MAX_PLACES = 1 << 22


class Owner:
    """A feature party: its bins, and later its splits.

    Args:
        binning: edges and categories of its columns.
        link: to the label party.
        epsilon: of the randomised response of each cell; None sends bins as they are.
        secret: of the party and this training alone.

    Attributes:
        splits: tests of its own columns that the forest makes, in the forest's order.
    """

    def __init__(
        self,
        binning: Binning,
        link: Link,
        epsilon: float | None = None,
        secret: Secret | None = None,
    ) -> None:
        self._binning, self._link = binning, link
        self._epsilon, self._secret = epsilon, secret
        self.splits: list[Split] = []

    def send_bins(self, bins: np.ndarray) -> None:
        """Send the number of each cell's bin once.

        Args:
            bins: of the aligned rows, axes (rows, columns).
        """
        layout = self._binning.layout
        if self._epsilon is not None:
            secret = self._secret or Secret.fresh()
            bins = randomised(bins, layout, self._epsilon, secret)
        about = {"bins": layout.bins, "categorical": layout.categorical}
        self._link.send(Frame(Kind.PROTOCOL, _LAYOUT, json.dumps(about).encode()))
        self._link.send(Frame(Kind.PROTOCOL, _BINS, np.asfortranarray(bins).tobytes("F")))

    def receive_splits(self) -> None:
        """Learn which splits the forest has on this party's columns.

        Raises:
            ProtocolError: these are no splits of these columns.
        """
        raw = bytes(_payload(self._link, _SPLITS))
        try:
            self.splits = [_split(one, self._binning.layout) for one in json.loads(raw)]
        except (ValueError, TypeError, IndexError, RecursionError):
            raise ProtocolError(
                "splits that no forest has on these columns",
                where="the label party's message",
                want="a column, bins of it and a direction for each split",
            ) from None

    def answer(self, bins: np.ndarray) -> None:
        """Say where rows go at each of this party's splits.

        Args:
            bins: of the asked rows, axes (rows, columns).
        """
        answers = goes_left(self.splits, bins, self._binning.layout)
        self._link.send(Frame(Kind.PROTOCOL, _ANSWERS, np.packbits(answers, axis=1).tobytes()))


@dataclass
class Booster:
    """The label party: it grows the forest and puts answers together.

    Args:
        links: to the feature parties, in the order of their columns.
        own: bins of the label party's own columns, axes (rows, columns), with their layout; None
            without columns.
    """

    links: Mapping[str, Link]
    own: tuple[np.ndarray, Layout] | None = None
    forest: Forest | None = None
    #: Owner of each column, "" for the label party, and its number there.
    owners: list[tuple[str, int]] = field(default_factory=list)

    def train(
        self,
        settings: Boosting,
        objective: Objective,
        labels: np.ndarray,
        weights: np.ndarray,
        train: np.ndarray,
        validation: np.ndarray,
        on_round: Callable[[Round], None] = lambda round: None,
    ) -> None:
        """Receive bins, grow the forest and give each owner its splits; see `boost`."""
        parts = {"": self.own} if self.own else {}
        parts |= {name: _received(link, len(labels)) for name, link in self.links.items()}
        bins, layout = _joined([one for one in parts.values() if one])
        counts = {name: len(one[1].bins) for name, one in parts.items() if one}
        self.owners = [(name, column) for name, count in counts.items() for column in range(count)]
        source = Local(bins, layout)
        self.forest = boost(
            settings, objective, source, labels, weights, train, validation,
            lambda splits: goes_left(splits, bins, layout), on_round,
        )  # fmt: skip
        for name, link in self.links.items():
            own = [
                _written(self.owners[one.column][1], one)
                for one in self.forest.splits
                if self.owners[one.column][0] == name
            ]
            link.send(Frame(Kind.PROTOCOL, _SPLITS, json.dumps(own).encode()))

    def margins(self, rows: int, own: np.ndarray | None) -> np.ndarray:
        """Margins of asked rows, axes (rows, outputs), from one answer of each feature party.

        Args:
            rows: how many rows are asked for.
            own: bins of the label party's columns of these rows, axes (rows, columns).
        """
        assert self.forest is not None, "trained before"
        splits = self.forest.splits
        answers = np.empty((rows, len(splits)), bool)
        for name in ("", *self.links):
            of_owner = [at for at, one in enumerate(splits) if self.owners[one.column][0] == name]
            if name:
                answers[:, of_owner] = _answers(self.links[name], rows, len(of_owner))
            elif of_owner:
                assert own is not None
                assert self.own is not None
                mine = [splits[at] for at in of_owner]
                answers[:, of_owner] = goes_left(mine, own, self.own[1])
        return self.forest.margins(answers)


def goes_left(splits: Sequence[Split], bins: np.ndarray, layout: Layout) -> np.ndarray:
    """Whether rows go left at splits, bool, axes (rows, splits).

    Args:
        splits: on columns of `bins`.
        bins: axes (rows, columns), as `Binning.transform` makes them.
        layout: of the columns.
    """
    found = np.empty((len(bins), len(splits)), bool)
    for place, split in enumerate(splits):
        found[:, place] = sides(split, layout.width)[bins[:, split.column]]
    return found


def _written(column: int, split: Split) -> list[Any]:
    """A split as JSON: of an ordered column how many bins go left, else the categories."""
    left = split.left.stop if isinstance(split.left, range) else list(split.left)
    return [column, left, split.missing_left]


def _split(written: Any, layout: Layout) -> Split:
    """What `_written` wrote.

    Raises:
        ValueError, TypeError, IndexError: no split of these columns.
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


def _received(link: Link, rows: int) -> tuple[np.ndarray, Layout]:
    """A feature party's bins."""
    try:
        about = json.loads(bytes(_payload(link, _LAYOUT)))
        counts, kinds = about["bins"], about["categorical"]
        fits = 0 < len(counts) == len(kinds) <= _MAX_COLUMNS
        fits = fits and all(type(one) is int and 1 <= one <= MAX_BINS for one in counts)
        layout = Layout(tuple(counts), tuple(one is True for one in kinds))
        fits = fits and len(counts) * layout.width <= _MAX_PLACES
    except (ValueError, TypeError, KeyError, RecursionError):
        fits = False
    raw = _payload(link, _BINS)
    kind = np.dtype(np.uint8 if fits and layout.width <= 256 else "<u2")
    if not fits or len(raw) != rows * len(layout.bins) * kind.itemsize:
        raise ProtocolError(
            "bins that fit no columns", where="a feature party's message", want="a bin a cell"
        )
    bins = np.frombuffer(raw, kind).reshape(len(layout.bins), rows).T
    missing = layout.width - 1
    if ((bins >= np.array(layout.bins)) & (bins != missing)).any():
        raise ProtocolError("a cell in no bin of its column", where="a feature party's message")
    return bins, layout


def _joined(parts: Sequence[tuple[np.ndarray, Layout]]) -> tuple[np.ndarray, Layout]:
    """All columns side by side; a missing cell has the last place of the widest histogram."""
    layout = Layout(
        tuple(one for _, own in parts for one in own.bins),
        tuple(one for _, own in parts for one in own.categorical),
    )
    missing = layout.width - 1
    kind = np.uint8 if missing < 256 else np.uint16
    moved = [np.where(bins == own.width - 1, missing, bins).astype(kind) for bins, own in parts]
    return np.concatenate(moved, axis=1), layout


def _answers(link: Link, rows: int, splits: int) -> np.ndarray:
    """A feature party's answers, bool, axes (rows, splits)."""
    raw, width = _payload(link, _ANSWERS), -(-splits // 8)
    if len(raw) != rows * width:
        raise ProtocolError(
            "answers of another number", where="a feature party's message", want="a bit a split"
        )
    bits = np.frombuffer(raw, np.uint8).reshape(rows, width)
    return np.unpackbits(bits, axis=1, count=splits).astype(bool)


def _payload(link: Link, step: int) -> memoryview:
    frame = link.receive()
    if frame.kind is not Kind.PROTOCOL or frame.step != step:
        raise ProtocolError(
            "a message out of turn", got=f"{frame.kind.name}, {frame.step}", want=f"message {step}"
        )
    return memoryview(frame.payload)
