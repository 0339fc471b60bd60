"""Implementations of boosted trees on additive shares, with `protect = "shared"`.

The label party packs a row's two derivatives of the loss into one element of the ring 2^64, and
splits this element into two additive shares. One share follows from a seed that the label party has
in common with a feature party, and is not sent. The label party sends the other share to a helper,
which has no data and no labels. The label party sends the helper the rows in a permuted order that
the helper cannot undo. The feature party and the helper each add up their own shares bin by bin;
the label party adds these two sums.

    feature party                  helper                          label party
      bins, rows permuted  ---->     keeps them              <---    shares of rows, permuted;
      sums + pad           --------------------------------->        sums of a node, bin by bin;
                                     sums - the same pad     --->
      sides of rows at its splits  ------------------------->        splits the node.

With `nodes = "known"`, the feature party and the helper know which rows are in which node, as in
SecureBoost (Cheng et al. 2021). With `nodes = "hidden"`, the two shares of a row outside the
requested node add up to zero. So neither the feature party nor the helper learns a node's rows, but
the label party must send the helper a share of every row for each node.

The label party sends every request as one letter and then the content, on a network link of its
own. Row numbers in messages are positions in the list of training rows and then validation rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.compiled import COMPILED, compiled
from vfl.core.errors import DataError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets import Split as Rows
from vfl.mpc.engine import Peer
from vfl.mpc.permuted import permutation
from vfl.mpc.secure.ends import (
    Middle,
    Outer,
    Place,
    receive_verdict,
    report_to_label_party,
)
from vfl.session.exchange import expect
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import SETUP, TRAIN, OwnRows
from vfl.session.terms import Terms
from vfl.trees.boosting import Source, blocks
from vfl.trees.cells import (
    CHUNK_BYTES,
    LABEL_PARTY,
    MOST_BYTES,
    CellsEnd,
    RowCounts,
    chunks,
    other_parties,
    row_counts,
    rows_of,
    spans_of,
)
from vfl.trees.ends import MOST_SPLITS, FeatureEnd, LabelEnd, joined, read_splits, written
from vfl.trees.grow import Division, Layout, Split, Tree, values_of
from vfl.trees.histograms import Partition, Sides, bin_kind, goes_left, sides, sums_of

if TYPE_CHECKING:
    from vfl.trees.mode import Trees

#: Letters with which the label party's requests begin.
_TREE, _SUMS, _SIDES, _END = b"T", b"S", b"D", b"E"
_SEEN_SIDES = "sides of splits"
#: Largest size in bytes of the gradient sums that answer one request.
_MOST_SUMS = CHUNK_BYTES
#: Largest number of nodes in one request; for each hidden node, the helper receives a share of
#: every row.
_MOST_NODES = 16
_NO_ROWS, _NO_ELEMENTS = np.empty(0, np.uint32), np.empty(0, np.uint64)
_NO_NODES = np.empty(0, np.uint8)
#: Size in bytes of the bin numbers in one message to the helper, which requests the messages one by
#: one; a long column takes several messages.
_GROUP_BYTES = 1 << 22
#: Whether a row goes left, indexed by the bit for the row in messages: 0 is right, 1 is left.
_SIDES_LEFT = np.array([False, True])
#: Number of low bits of a packed ring element that hold the sum of second derivatives; the upper
#: bits hold the sum of first derivatives.
_BITS = 32


def rounded(gradients: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Round gradients to integers in the units of `units_of`, int64, axes (rows, 2)."""
    whole: np.ndarray = np.rint(gradients / units).astype(np.int64)
    return whole


def units_of(gradients: np.ndarray) -> np.ndarray:
    """Return units in which the sums of rounded gradients fit half of a ring element.

    The units (the values of the integer 1) are powers of two, so that sums are exact in float64.
    The units follow from the sums of absolute values over all rows, because no sum over some of the
    rows can be larger.

    Args:
        gradients: first and second derivatives, axes (rows, 2); second derivatives are not
            negative.

    Returns:
        The units of first and of second derivatives, float64, axes (2,).

    Raises:
        DataError: a gradient is infinite or NaN.

    >>> units_of(np.array([[0.5, 0.25], [-0.5, 0.25]])) * 2.0**31
    array([2. , 0.5])
    """
    totals = np.zeros(2)
    for part in blocks(len(gradients)):
        totals += np.abs(gradients[part]).sum(axis=0, dtype=np.float64)
    if not np.isfinite(totals).all():
        raise DataError(
            "a gradient is not a finite number",
            want="finite gradients",
            fix="a smaller learning_rate or max_delta_step",
        )
    # Rounding adds at most half a unit to the value of each row.
    most = np.array([2.0 ** (_BITS - 1), 2.0**_BITS]) - len(gradients) - 1
    exponents = np.ceil(np.log2(np.maximum(totals, np.finfo(np.float64).tiny) / most))
    units: np.ndarray = np.where(totals > 0, 2.0 ** np.maximum(exponents, -1000), 1.0)
    return units


def packed(whole: np.ndarray) -> np.ndarray:
    """Pack the two integer derivatives of each row into one ring element; uint64, axes (rows,).

    >>> opened(packed(np.array([[-3, 2], [1, 5]])).sum(keepdims=True))
    array([[-2.,  7.]])
    """
    elements: np.ndarray = ((whole[..., 0] << _BITS) + whole[..., 1]).view(np.uint64)
    return elements


def opened(elements: np.ndarray) -> np.ndarray:
    """Unpack sums of ring elements into sums of both derivatives; float64, last axis 2."""
    low = elements & np.uint64((1 << _BITS) - 1)
    high = (elements - low).view(np.int64) >> _BITS
    return np.stack([high, low.view(np.int64)], axis=-1).astype(np.float64)


def chosen(bins: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the bins of chosen columns; if all columns are chosen, return the array itself."""
    return bins if len(columns) == bins.shape[1] else np.ascontiguousarray(bins[:, columns])


def renumber(nodes: np.ndarray, places: np.ndarray, told: np.ndarray) -> None:
    """Assign new tree nodes to the rows that the label party's request lists.

    Args:
        nodes: number of the node of each row, in an integer type that can hold all node numbers;
            changed in place.
        places: for each row, the position of its new node's number in `told`; a position after the
            end of `told` leaves the row's node unchanged.
        told: numbers of the new nodes, uint32.
    """
    if COMPILED:
        _renumber(nodes, places, told)
        return
    inside = places < len(told)
    nodes[inside] = told[places[inside]]


@compiled
def _renumber(nodes: Any, places: Any, told: Any) -> None:
    for row, place in enumerate(places):
        if place < len(told):
            nodes[row] = told[place]


_Columns = Annotated[int, Field(ge=1, le=1 << 16)]
_Width = Annotated[int, Field(ge=2, le=(1 << 16) + 1)]


class Facts(Settings):
    """Sizes that all parties need beyond the terms that they agreed on for the session.

    Attributes:
        rows: number of training rows, of validation rows and of test rows.
        columns: number of columns of each feature party.
        widths: for each feature party, number of positions in the histogram of one of its columns.
    """

    rows: RowCounts
    columns: tuple[_Columns, ...] = Field(max_length=1 << 10)
    widths: tuple[_Width, ...] = Field(max_length=1 << 10)


class _Meeting:
    """A party's connection to the other parties, with the facts and keys that they have agreed on.

    Args:
        place: object that connects this party to the other parties; see `Place`.
        end: object that announces the party's rows; see `NetworkEnd`.
        terms: terms of the session.
        roles: names of all parties; a party's role is its position in the list.
        party: name of this party.
    """

    def __init__(
        self, place: Place, end: Any, terms: Terms, roles: Sequence[str], party: str
    ) -> None:
        links = place.meet()
        self.facts: Facts = place.describe(end)
        others = len(terms.feature_parties)
        if not others == len(self.facts.columns) == len(self.facts.widths):
            raise other_parties()
        place.confirm(self.facts)
        by_role = {roles.index(name): link for name, link in links.items()}
        self._peer, self._roles = Peer(roles.index(party), by_role, {"model": "trees"}), roles
        about = {"terms": terms.digest(), "facts": self.facts.model_dump(mode="json")}
        self._peer.agree(about, *place.attempt)
        self.links = links

    def pads(self, party: str) -> Any:
        """Return the stream of pads that both this party and the other party can draw."""
        return self._peer.pads[self._roles.index(party)]


class SharedFeatureEnd(FeatureEnd):
    """Feature party of trees on secret shares.

    It adds its shares of gradients per bin. At each split by one of its columns, it sends whether
    each row goes left or right.

    Args:
        mode, party, terms, rows: see `CellsEnd`.
        place: object that connects this party to the other parties; see `Place`.
    """

    def __init__(self, mode: Trees, party: str, terms: Terms, rows: OwnRows, place: Outer) -> None:
        super().__init__(mode, party, terms, rows, place.stream)
        self._place = place
        self._known = np.empty((0, 0), np.uint8)
        self._training = 0
        self._elements = _NO_ELEMENTS
        #: Bins of the training rows, for the columns that the current tree may split on.
        self._summed = self._known
        #: The node of each row, if the mode discloses nodes to this party, and the largest node
        #: number.
        self._nodes, self._last_node = _NO_NODES, 0
        self._drawn = self._hidden_sums = 0
        self._answered: list[Split] = []

    def announced(self) -> bytes:
        """Describe the party's columns to the label party."""
        return self._about()

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        self._prepare(weights, state)
        mode, terms, label = self._mode, self._terms, self._terms.label_party
        met = _Meeting(self._place, self, terms, mode.roles(terms), self.party)
        self.link, self._pads = met.links[label], met.pads(label)
        self._hiding = met.pads(mode.helper)
        self._require_own(met.facts)
        self._known, self._training = self._shown_bins(), met.facts.rows[0]
        order = permutation(self._pads, self._training, "rows", 0)
        bins = self._known[: self._training]
        for columns in _groups(bins.shape, bins.itemsize):
            expect(met.links[mode.helper], Kind.PROTOCOL, 0, "the helper")
            permuted = np.stack([column[order] for column in bins[:, columns].T])
            _send(met.links[mode.helper], 0, permuted)
        self._serve(0)
        self._require_taken(self._splits, 0)  # splits from before a training was resumed

    def train(self, exchange: Exchange) -> None:
        before, self._answered = len(self._splits), []
        self._take(self._serve(exchange.step))
        self._require_taken(self._splits[before:], exchange.step)

    def _require_taken(self, taken: Sequence[Split], step: int) -> None:
        if sorted(map(repr, taken)) != sorted(map(repr, self._answered)):
            raise ProtocolError(
                "the label party requested splits that its trees do not have",
                where=f"round {step}",
                want="requests for exactly the splits that its trees have on this party's columns",
            )

    def _require_own(self, facts: Facts) -> None:
        place = self._terms.feature_parties.index(self.party)
        own = (len(self._binning.layout.bins), self._binning.layout.width)
        rows = row_counts(self._rows)
        if (facts.rows, facts.columns[place], facts.widths[place]) != (rows, *own):
            raise ProtocolError(
                "the label party describes other numbers of rows or columns than this party has"
            )

    def _serve(self, step: int) -> bytes:
        """Answer the requests of a round; return the content of the request that ends the round."""
        while True:
            raw = bytes(expect(self.link, Kind.PROTOCOL, step, LABEL_PARTY).payload)
            letter, content = raw[:1], raw[1:]
            if letter == _END:
                self._elements, self._nodes = _NO_ELEMENTS, _NO_NODES
                return content
            if letter == _TREE:
                columns = _columns(_read(content)["columns"], self._known.shape[1])
                self._summed = chosen(self._known[: self._training], columns)
                self._nodes, self._last_node = np.zeros(len(self._known), np.uint8), 0
                if self._mode.nodes == "known":
                    self._elements = self._share()
            elif letter == _SUMS:
                self._send_sums(_read(content), step)
            elif letter == _SIDES:
                self._send_sides(_read(content), step)
            else:
                raise _unknown(LABEL_PARTY)

    def _share(self) -> np.ndarray:
        self._drawn += 1
        share: np.ndarray = self._pads.elements64(self._training, "gradients", self._drawn)
        # the array is read-only, as received arrays are, so that numba compiles the loop for one
        # type only
        share.flags.writeable = False
        return share

    def _send_sums(self, asked: Any, step: int) -> None:
        count, width = asked["count"], self._binning.layout.width
        bins = self._summed
        _require_nodes(count)
        if not len(self._nodes):
            raise _unknown(LABEL_PARTY)  # no tree has been started
        if self._mode.nodes == "known":
            told = _numbers(asked["nodes"], len(self._known))
            kind = _kind(len(told))
            raw = _receive(self.link, step, len(self._known) * kind.itemsize, LABEL_PARTY)
            places = raw.view(kind)
            self._last_node = max(self._last_node, *told.tolist(), 0)
            self._nodes = self._nodes.astype(_kind(1 + self._last_node), copy=False)
            renumber(self._nodes, places, told)
            self._note("rows of nodes", self._terms.label_party, TRAIN, len(places))
            trained = places[: self._training]
            sums = sums_of(bins, trained, count, self._elements, width)
        else:
            nodes = np.zeros(self._training, np.uint8)
            sums = np.concatenate(
                [sums_of(bins, nodes, 1, self._share(), width) for _ in range(count)]
            )
        self._rows.spend(sums.size)
        # The label party can compute this party's share of each row's gradient. So without a pad
        # that this party shares with the helper, a sum of such shares would disclose to the label
        # party which rows are in a bin.
        self._hidden_sums += 1
        hidden = sums.ravel() + self._hiding.elements64(sums.size, "sums", self._hidden_sums)
        _send(self.link, step, hidden.astype("<u8", copy=False))

    def _send_sides(self, asked: Any, step: int) -> None:
        layout = self._binning.layout
        splits = read_splits(asked["splits"], layout)
        if len(self._answered) + len(splits) > MOST_SPLITS:
            raise _unknown(LABEL_PARTY)
        if asked["nodes"] is None:
            if step and self._mode.nodes == "known":
                raise _unknown(LABEL_PARTY)  # if nodes are known, a request must list them
            packed = [np.packbits(goes_left([one], self._known, layout)) for one in splits]
            _send(self.link, step, b"".join(one.tobytes() for one in packed))
        else:
            nodes = _numbers(asked["nodes"], len(self._known))
            if len(nodes) != len(splits) or not len(self._nodes):
                raise _unknown(LABEL_PARTY)
            places = np.full(1 + max(self._last_node, nodes.max(initial=0)), -1)
            places[nodes] = np.arange(len(nodes))
            side = Sides(splits, layout).of_nodes(self._nodes, places, self._known)
            _send(self.link, step, np.packbits(side))
        self._answered += splits


class HelperEnd(CellsEnd):
    """Implementation of the helper, a party without data: it sums shares of rows in permuted order.

    Args:
        mode, terms, rows: see `CellsEnd`.
        place: object that connects the helper to the other parties; see `Place`.
    """

    def __init__(self, mode: Trees, terms: Terms, rows: OwnRows, place: Outer) -> None:
        super().__init__(mode, mode.helper, terms, rows)
        self._trees, self._place = mode, place
        self._facts: Facts | None = None
        self._bins_of: dict[str, np.ndarray] = {}
        self._elements: dict[str, np.ndarray] = {}
        #: Bins of the columns that the current tree may split on, for each party with such columns.
        self._summed: dict[str, np.ndarray] = {}
        self._hidden_sums = 0

    @property
    def split(self) -> Rows:
        return rows_of(self._agreed.rows)

    def announced(self) -> None:
        """Return None, because the helper has no rows to announce."""

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        if state is not None:
            self._restored(state)
        roles = self._trees.roles(self._terms)
        met = _Meeting(self._place, self, self._terms, roles, self.party)
        facts = self._facts = met.facts
        self.link = met.links[self._terms.label_party]
        self._hiding = {name: met.pads(name) for name in self._terms.feature_parties}
        for name, columns, width in self._parts():
            kind, sender = bin_kind(width), f"party '{name}'"
            size = facts.rows[0] * columns * kind.itemsize
            if size > MOST_BYTES:
                raise ProtocolError(
                    "the columns have more bins than a helper accepts", where=f"bins of {sender}"
                )
            bins = self._bins_of[name] = np.empty((facts.rows[0], columns), kind)
            for part in map(bins.T.__getitem__, _groups(bins.shape, kind.itemsize)):
                met.links[name].send(Frame(Kind.PROTOCOL, 0, b""))
                raw = _receive(met.links[name], 0, part.size * kind.itemsize, sender)
                part[:] = raw.view(kind).reshape(part.shape)
            if bins.size and bins.max() >= width:
                raise ProtocolError(
                    "a bin number is larger than its column has bins", where=f"bins of {sender}"
                )
            self._note("bins of cells, rows permuted", name, SETUP, bins.size)
        self.link.send(Frame(Kind.PROTOCOL, 0, b""))
        self._serve(0)

    def train(self, exchange: Exchange) -> None:
        self._serve(exchange.step)

    def outputs(self, exchange: Exchange) -> None:
        """Do nothing, because parties answer queries without the helper."""

    def receive_verdict(self) -> bytes:
        return receive_verdict(self.link)

    def end(self, report: Frame) -> list[Frame]:
        return report_to_label_party(self.link, report)

    def weights(self) -> dict[str, Tensor]:
        return {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load no weights, because the helper saves none."""

    @property
    def _agreed(self) -> Facts:
        assert self._facts is not None, "an attempt has begun"
        return self._facts

    def _parts(self) -> Iterator[tuple[str, int, int]]:
        """Yield each feature party's name, number of columns, and positions per histogram."""
        facts = self._agreed
        return zip(self._terms.feature_parties, facts.columns, facts.widths, strict=True)

    def _asked(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yield name, bins and histogram positions of each party whose columns a tree may use."""
        for name, _, width in self._parts():
            if name in self._summed:
                yield name, self._summed[name], width

    def _chosen(self, columns: Any) -> dict[str, np.ndarray]:
        """Return, by party, the bins of the columns that a tree may use; None means all columns."""
        counts = {name: count for name, count, _ in self._parts()}
        if columns is None:
            columns = [None] * len(counts)
        if not isinstance(columns, list) or len(columns) != len(counts):
            raise _unknown(LABEL_PARTY)
        found = zip(counts, map(_columns, columns, counts.values()), strict=True)
        return {name: chosen(self._bins_of[name], own) for name, own in found if len(own)}

    def _serve(self, step: int) -> None:
        """Answer the requests of a round, up to the request that ends the round."""
        known = self._trees.nodes == "known"
        while True:
            raw = bytes(expect(self.link, Kind.PROTOCOL, step, LABEL_PARTY).payload)
            if raw == _END:
                self._elements.clear()
                return
            if raw[:1] == _TREE:
                self._summed = self._chosen(_read(raw[1:])["columns"])
                if known:
                    self._elements = {name: self._received_share(step) for name in self._summed}
            elif raw[:1] == _SUMS:
                count = _read(raw[1:])["count"]
                _require_nodes(count)
                if not self._summed:
                    raise _unknown(LABEL_PARTY)  # no tree has been started
                self._hidden_sums += 1
                self._sum_nodes(count, step) if known else self._sum_all(count, step)
            else:
                raise _unknown(LABEL_PARTY)

    def _received_share(self, step: int) -> np.ndarray:
        raw = _receive(self.link, step, 8 * self._agreed.rows[0], LABEL_PARTY)
        return raw.view("<u8")

    def _sum_nodes(self, count: int, step: int) -> None:
        """Sum the shares over the rows of each requested node, and send the sums."""
        kind, sums = _kind(count), []
        for name, bins, width in self._asked():
            raw = _receive(self.link, step, self._agreed.rows[0] * kind.itemsize, LABEL_PARTY)
            nodes = raw.view(kind)
            self._note("rows of nodes, permuted", self._terms.label_party, TRAIN, len(nodes))
            own = sums_of(bins, nodes, count, self._elements[name], width)
            sums.append(self._hidden(name, own))
        _send(self.link, step, b"".join(sums))

    def _sum_all(self, count: int, step: int) -> None:
        """Sum the shares over all rows; for each node, every row has a separate share."""
        nodes, sums = np.zeros(self._agreed.rows[0], np.uint8), []
        for name, bins, width in self._asked():
            own = [sums_of(bins, nodes, 1, self._received_share(step), width) for _ in range(count)]
            sums.append(self._hidden(name, np.concatenate(own)))
        _send(self.link, step, b"".join(sums))

    def _hidden(self, name: str, sums: np.ndarray) -> bytes:
        """Subtract a pad from the helper's sums; the feature party adds the same pad to its own."""
        pad = self._hiding[name].elements64(sums.size, "sums", self._hidden_sums)
        hidden: np.ndarray = sums.ravel() - pad
        return hidden.astype("<u8").tobytes()


class SharedLabelEnd(LabelEnd):
    """The label party's implementation: splits gradients into shares, and adds the parties' sums.

    Args:
        mode, terms, rows: see `CellsEnd`.
        place: object that connects the label party to the other parties; see `Place`.
    """

    def __init__(self, mode: Trees, terms: Terms, rows: OwnRows, place: Middle) -> None:
        super().__init__(mode, terms, rows, place.direct)
        self._place = place
        self._columns_of: dict[str, tuple[Layout, list[int]]] = {}
        self._sums: SharedSums | None = None
        #: Callback that receives the label party's knowledge of each requested node; None calls
        #: nothing.
        self.watch: Callable[[SeenSums], object] | None = None

    def announced(self) -> bytes:
        """Return an empty description, because other parties need no facts about this party."""
        return b""

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        """Return the sizes that all parties need, from each feature party's description."""
        if self._own is not None:
            layout = self._own.layout
            signs = self._mode.signs(self._rows.columns, len(layout.bins))
            self._columns_of[self.party] = layout, signs
        for name in self._terms.feature_parties:
            self._columns_of[name] = self._layout_of(told[name], name)
        layouts = [self._columns_of[name][0] for name in self._terms.feature_parties]
        return Facts(
            rows=row_counts(self._rows),
            columns=tuple(len(one.bins) for one in layouts),
            widths=tuple(one.width for one in layouts),
        )

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        super().begin(weights, state)
        for name in (*self._terms.feature_parties, self._mode.helper):
            self._request(name, 0, _END)

    def train(self, exchange: Exchange) -> Tensor:
        assert self._sums is not None, "a training has begun"
        self._sums.step = exchange.step
        found = super().train(exchange)
        self._request(self._mode.helper, exchange.step, _END)
        return found

    def _histograms(self) -> tuple[Source, list[int]]:
        mode, terms = self._mode, self._terms
        met = _Meeting(self._place, self, terms, mode.roles(terms), self.party)
        expect(met.links[mode.helper], Kind.PROTOCOL, 0, "the helper")  # the helper has all bins
        layouts = {name: layout for name, (layout, _) in self._columns_of.items()}
        self._counts = {name: len(layout.bins) for name, layout in layouts.items()}
        own = None if self._own is None else self._bins(self._known_rows())
        self._sums = SharedSums(met, layouts, own, mode, self._note)
        self._sums.watch = self.watch
        return self._sums, [sign for _, signs in self._columns_of.values() for sign in signs]

    def _send_taken(self, name: str, step: int, splits: bytes) -> None:
        self._request(name, step, _END + splits)

    def _request(self, name: str, step: int, payload: bytes) -> None:
        self.ends[name].link.send(Frame(Kind.PROTOCOL, step, payload))


@dataclass(frozen=True, eq=False, slots=True)
class SeenSums:
    """The label party's knowledge of one node: its rows, their gradients, and its sums over bins.

    Attributes:
        rows: positions of the node's rows among the training rows.
        gradients: gradients of these rows, axes (rows, 2).
        sums: the node's gradient sums over the bins of all parties' columns, axes (columns, width,
            2).
    """

    rows: np.ndarray
    gradients: np.ndarray
    sums: np.ndarray


class SharedSums:
    """Gradient histograms at the label party, from sums that other parties send; see `Source`.

    Args:
        met: the label party's connection to the other parties.
        layouts: layout of the columns of each party that has columns, in the order of all columns.
        own: bins of the label party's own columns for training and then validation rows; None if it
            has no columns.
        mode: mode that contains the helper's name and whether nodes are hidden.
        note: see `CellsEnd`.

    Attributes:
        layout: layout of all parties' columns, in order.
        step: number of the step to which the current round's messages belong.
        watch: callback that receives the label party's knowledge of each requested node.
    """

    watch: Callable[[SeenSums], object] | None = None

    def __init__(
        self,
        met: _Meeting,
        layouts: Mapping[str, Layout],
        own: np.ndarray | None,
        mode: Trees,
        note: Callable[[str, str, str, int], None],
    ) -> None:
        self.layout, self.step = joined(list(layouts.values())), 0
        self._met, self._layouts, self._own, self._note = met, layouts, own, note
        self._hidden, self._helper = mode.nodes == "hidden", mode.helper
        self._training, self._count = met.facts.rows[0], sum(met.facts.rows[:2])
        self._spans = spans_of({name: len(one.bins) for name, one in layouts.items()})
        self._pads = {name: met.pads(name) for name in layouts if name in met.links}
        self._own_width = next(iter(layouts.values())).width
        self._orders = {
            name: permutation(pads, self._training, "rows", 0).astype(np.uint32)
            for name, pads in self._pads.items()
        }
        self._drawn = dict.fromkeys(self._pads, 0)
        #: For each party, the columns that the tree may split on, and the names of the parties that
        #: must send sums.
        self._columns, self._asked = dict[str, np.ndarray](), list[str]()
        #: Units of the packed gradients (see `units_of`), and the sum of all gradients.
        self._units, self._total = np.ones(2), np.zeros(2)
        self._forget()
        #: Nodes whose rows the feature parties have not received yet.
        self._new: list[int] = []

    def start(
        self, gradients: np.ndarray, rows: np.ndarray, columns: np.ndarray | None = None
    ) -> None:
        every = len(rows) == len(gradients)  # indexing all rows would double the memory
        own = gradients if every else gradients[rows]
        self._units, self._elements = units_of(own), np.zeros(self._training, np.uint64)
        for part in blocks(len(rows)):
            self._elements[rows[part]] = packed(rounded(own[part], self._units))
        self._grows, self._rows = True, Partition(np.arange(self._count, dtype=np.uint32))
        self._new = [0]
        self._choose(columns)
        for name in self._asked:
            self._ask(name, _TREE, self._told(self._columns[name].tolist(), columns))
        if self._asked:
            chosen = [self._columns[name].tolist() for name in self._pads]
            self._ask(self._helper, _TREE, self._told(chosen, columns))
        self._total = opened(self._elements.sum(keepdims=True))[0] * self._units
        if not self._hidden:
            for name in self._asked:
                self._send_share(name, self._elements)
            if self._own is None and self.watch is None:
                self._elements = _NO_ELEMENTS  # both other parties have their shares now

    def _choose(self, columns: np.ndarray | None) -> None:
        """Store, for each party, which of its columns the tree may split on.

        A party without such columns receives no requests for sums.
        """
        for name, span in self._spans.items():
            own = np.arange(span.stop - span.start)
            self._columns[name] = own if columns is None else own[columns[span]]
        self._asked = [name for name in self._pads if len(self._columns[name])]

    @staticmethod
    def _told(chosen: list[Any], columns: np.ndarray | None) -> dict[str, Any]:
        return {} if columns is None else {"columns": chosen}

    def total(self) -> np.ndarray:
        return self._total

    def of(self, nodes: Sequence[int]) -> np.ndarray:
        found = np.zeros((len(nodes), len(self.layout.bins), self.layout.width, 2))
        if self._own is not None:
            places = self._places(nodes)[: self._training]
            own, columns = next(iter(self._columns.items()))  # the label party's columns come first
            width, bins = self._layouts[own].width, chosen(self._own[: self._training], columns)
            sums = sums_of(bins, places, len(nodes), self._elements, width)
            self._put(own, sums, found)
        asked = sum(len(self._columns[name]) * self._layouts[name].width for name in self._asked)
        most = max(1, min(_MOST_NODES, _MOST_SUMS // (8 * max(1, asked))))
        for at in range(0, len(nodes), most) if self._asked else ():
            self._add_sums(nodes[at : at + most], found[at : at + most])
        if self.watch is not None:
            for node, sums in zip(nodes, found, strict=True):
                rows = self._trained(node).astype(np.int64)  # rows move later
                gradients = opened(self._elements[rows]) * self._units
                self.watch(SeenSums(rows, gradients, sums.copy()))
        return found

    def smaller(self, left: int, right: int) -> int:
        return left if len(self._rows[left]) <= len(self._rows[right]) else right

    def divide(self, divisions: Sequence[Division]) -> None:
        asked = dict[str, list[Division]]()
        for one in divisions:
            name, split = self._owner_of(one.split)
            asked.setdefault(name, []).append(replace(one, split=split))
        for name, own in asked.items():
            if name in self._pads:
                self._request_sides(name, own)
        for name, own in asked.items():
            for one, test in zip(own, self._tests(name, own), strict=True):
                self._rows.divide(one, *test)
        self._new = [child for one in divisions for child in (one.left, one.right)]

    def values(self, tree: Tree) -> np.ndarray:
        if self._grows:
            values = np.empty(self._count)
            for leaf in self._rows.nodes:
                values[self._rows[leaf]] = tree.values[leaf]
            self._forget()
            return values
        splits = [split for split in tree.splits if split is not None]
        left = np.empty((self._count, len(splits)), bool)
        owned = [self._owner_of(split) for split in splits]
        for name in dict.fromkeys(name for name, _ in owned):
            places = [place for place, (owner, _) in enumerate(owned) if owner == name]
            own = [Division(-1, owned[place][1], -1, -1) for place in places]
            if name in self._pads:
                self._request_sides(name, own, everywhere=True)
            tests = self._tests(name, own, everywhere=True)
            for place, (bins, column, to_left) in zip(places, tests, strict=True):
                left[:, place] = to_left[bins[:, column]]
        return values_of(tree, left)

    def _forget(self) -> None:
        """Release the state that is only needed while a tree grows.

        It contains the packed gradients of the training rows, which are 0 for rows that do not
        grow the tree.
        """
        self._grows, self._rows, self._elements = False, Partition(_NO_ROWS), _NO_ELEMENTS

    def _trained(self, node: int) -> np.ndarray:
        """Return the training rows of a node; in its list, they come before validation rows."""
        rows = self._rows[node]
        return rows[: np.searchsorted(rows, self._training)]

    def _places(self, nodes: Sequence[int]) -> np.ndarray:
        """Return the position in `nodes` of each row's node; the type's maximum means absent."""
        kind = _kind(len(nodes))
        places = np.full(self._count, np.iinfo(kind).max, kind)
        for place, node in enumerate(nodes):
            places[self._rows[node]] = place
        return places

    def _put(self, name: str, elements: np.ndarray, out: np.ndarray) -> None:
        """Write the unpacked sums over a party's bins to the positions of its columns."""
        found = opened(elements) * self._units
        columns = self._spans[name].start + self._columns[name]
        out[:, columns, : found.shape[2] - 1] = found[:, :, :-1]
        out[:, columns, -1] = found[:, :, -1]

    def _owner_of(self, split: Split) -> tuple[str, Split]:
        """Return the owner of a split's column, and the split with the owner's column number."""
        name, span = next(one for one in self._spans.items() if split.column < one[1].stop)
        return name, replace(split, column=split.column - span.start)

    # Requests to other parties, and the answers to them.

    def _ask(self, name: str, letter: bytes, about: Any = None) -> None:
        content = b"" if about is None else json.dumps(about).encode()
        self._met.links[name].send(Frame(Kind.PROTOCOL, self.step, letter + content))

    def _send_share(self, name: str, elements: np.ndarray) -> None:
        """Send the helper its share: ring elements minus the pad in common with a feature party."""
        self._drawn[name] += 1
        share = self._pads[name].elements64(self._training, "gradients", self._drawn[name])
        np.subtract(elements, share, out=share)
        self._send_permuted(name, share.astype("<u8", copy=False))

    def _send_permuted(self, name: str, of_rows: np.ndarray) -> None:
        """Send the helper one value per training row, in the order permuted for a feature party."""
        order, permuted = self._orders[name], np.empty_like(of_rows)
        for part in blocks(len(order)):
            permuted[part] = of_rows[order[part]]
        _send(self._met.links[self._helper], self.step, permuted)

    def _add_sums(self, nodes: Sequence[int], out: np.ndarray) -> None:
        """Request sums over nodes from feature parties and the helper; add each pair of sums."""
        if self._hidden:
            self._ask_hidden(nodes)
        else:
            self._ask_known(nodes)
        shapes = {
            name: (len(nodes), len(self._columns[name]), self._layouts[name].width)
            for name in self._asked
        }
        size = 8 * sum(map(math.prod, shapes.values()))
        helped = _receive(self._met.links[self._helper], self.step, size, "the helper").view("<u8")
        at = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            raw = _receive(self._met.links[name], self.step, 8 * count, f"party '{name}'")
            both = raw.view("<u8") + helped[at : at + count]
            at += count
            self._note("sums of gradients over bins", name, TRAIN, both.size)
            self._put(name, both.reshape(shape), out)

    def _ask_known(self, nodes: Sequence[int]) -> None:
        told = [*nodes, *(node for node in self._new if node not in nodes)]
        self._new, places = [], self._places(told)
        for name in self._asked:
            self._ask(name, _SUMS, {"count": len(nodes), "nodes": told})
            _send(self._met.links[name], self.step, places)
        self._ask(self._helper, _SUMS, {"count": len(nodes)})
        trained, kind = places[: self._training], _kind(len(nodes))
        trained = np.where(trained < len(nodes), trained, np.iinfo(kind).max).astype(kind)
        for name in self._asked:
            self._send_permuted(name, trained)

    def _ask_hidden(self, nodes: Sequence[int]) -> None:
        for name in self._asked:
            self._ask(name, _SUMS, {"count": len(nodes)})
        self._ask(self._helper, _SUMS, {"count": len(nodes)})
        for name in self._asked:
            for node in nodes:
                rows, elements = self._trained(node), np.zeros_like(self._elements)
                elements[rows] = self._elements[rows]
                self._send_share(name, elements)

    def _request_sides(
        self, name: str, divisions: Sequence[Division], everywhere: bool = False
    ) -> None:
        everywhere = everywhere or self._hidden
        nodes = None if everywhere else [one.node for one in divisions]
        self._ask(
            name, _SIDES, {"nodes": nodes, "splits": [written(one.split) for one in divisions]}
        )

    def _tests(
        self, name: str, divisions: Sequence[Division], everywhere: bool = False
    ) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """Yield, for each division, bins of rows, a column number, and which bins go left.

        For a split on another party's column, the bins are the directions of rows (0 is right, 1 is
        left). These directions cover the node's rows, or all rows if `everywhere` is true.
        """
        if name not in self._pads:
            assert self._own is not None, "it has columns"
            for one in divisions:
                goes_left = sides(one.split, self._layouts[name].width)
                yield self._own, one.split.column, goes_left
            return
        link, sender = self._met.links[name], f"party '{name}'"
        if everywhere or self._hidden:
            width = -(-self._count // 8)
            raw = _receive(link, self.step, len(divisions) * width, sender)
            self._note(_SEEN_SIDES, name, TRAIN, len(divisions) * self._count)
            for bits in raw.reshape(len(divisions), width):
                yield np.unpackbits(bits, count=self._count)[:, None], 0, _SIDES_LEFT
            return
        inside, side = np.zeros(self._count, bool), np.zeros(self._count, np.uint8)
        for one in divisions:
            inside[self._rows[one.node]] = True
        count = int(np.count_nonzero(inside))
        raw = _receive(link, self.step, -(-count // 8), sender)
        self._note(_SEEN_SIDES, name, TRAIN, count)
        side[inside] = np.unpackbits(raw, count=count)
        for _ in divisions:
            yield side[:, None], 0, _SIDES_LEFT


def _groups(shape: tuple[int, ...], cell_bytes: int) -> Iterator[slice]:
    """Yield groups of columns whose bins fit in one message; `shape` has axes (rows, columns)."""
    count = max(1, _GROUP_BYTES // max(1, shape[0] * cell_bytes))
    return (slice(at, min(shape[1], at + count)) for at in range(0, shape[1], count))


def _send(link: Link, step: int, content: bytes | np.ndarray) -> None:
    """Send bytes in as many messages as they need; an array is not copied."""
    raw = content if isinstance(content, bytes) else content.reshape(-1).view(np.uint8).data
    for start, end in chunks(len(raw)):
        link.send(Frame(Kind.PROTOCOL, step, raw[start:end]))


def _receive(link: Link, step: int, size: int, sender: str) -> np.ndarray:
    """Receive exactly `size` bytes that `_send` sent in one or more messages; returns uint8.

    Raises:
        ProtocolError: the sender sent a different number of bytes.
    """
    parts = list[np.ndarray]()
    for start, end in chunks(size):
        payload = expect(link, Kind.PROTOCOL, step, sender).payload
        if len(payload) != end - start:
            raise ProtocolError(
                "a message has an unexpected length",
                where=f"the message of {sender}",
                got=f"{len(payload)} bytes",
                want=f"{end - start} bytes",
            )
        parts.append(np.frombuffer(payload, np.uint8))
    found = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])
    found.flags.writeable = False
    return found


def _read(content: bytes) -> Any:
    """Parse a request of the label party, which is JSON.

    Raises:
        ProtocolError: the message is not a valid request.
    """
    try:
        found = json.loads(content)
        return {"count": found.get("count", 0), "nodes": found.get("nodes"),
                "columns": found.get("columns"),
                "splits": json.dumps(found.get("splits", [])).encode()}  # fmt: skip
    except (ValueError, AttributeError, RecursionError):
        raise _unknown(LABEL_PARTY) from None


def _require_nodes(count: Any) -> None:
    if type(count) is not int or not 1 <= count <= _MOST_NODES:
        raise ProtocolError(
            "the message requests sums of too many nodes at once",
            where=f"the message of {LABEL_PARTY}",
            want=f"1 to {_MOST_NODES} nodes",
        )


def _numbers(nodes: Any, rows: int) -> np.ndarray:
    """Parse node numbers of one tree, which are below 2 x rows, because each leaf has a row.

    Raises:
        ProtocolError: the values are no valid node numbers.
    """
    if not isinstance(nodes, list) or not all(
        type(one) is int and 0 <= one < 2 * rows for one in nodes
    ):
        raise _unknown(LABEL_PARTY)
    return np.array(nodes, np.uint32)


def _columns(columns: Any, count: int) -> np.ndarray:
    """Parse numbers of columns that a tree may split on, int64, ascending; None means all columns.

    Raises:
        ProtocolError: the values are no valid numbers of this party's columns.
    """
    if columns is None:
        return np.arange(count)
    if not isinstance(columns, list) or not all(type(one) is int for one in columns):
        raise _unknown(LABEL_PARTY)
    if columns != sorted({*columns}) or not all(0 <= one < count for one in columns):
        raise _unknown(LABEL_PARTY)
    return np.array(columns, np.int64)


def _kind(count: int) -> np.dtype[Any]:
    """Return an integer type for `count` positions and one more value, which means "absent"."""
    return np.dtype(np.uint8 if count < 256 else "<u2" if count < 1 << 16 else "<u4")


def _unknown(sender: str) -> ProtocolError:
    return ProtocolError("an unknown request", where=f"the message of {sender}")
