"""Common code of sessions whose models read binned table cells, and the messages with bins.

If the mode discloses bins, a feature party's `CellsEnd` sends the bin number of each training and
validation cell, in one or two bytes; the label party requests every message by an empty frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vfl.config import PartyFile, PartySettings, TrainSettings
from vfl.core.errors import ExposedCutError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.core.seeds import Secret
from vfl.datasets import Split as Rows
from vfl.datasets.encode import MAX_CATEGORIES
from vfl.mpc.secure.base import refuse_work_on_cuts
from vfl.mpc.secure.ends import (
    NetworkMode,
    collect_reports,
    receive_verdict,
    report_to_label_party,
    require_same_rows,
)
from vfl.privacy import PrivacyStatement
from vfl.session.exchange import expect
from vfl.session.relay import Switchboard
from vfl.session.schedule import QUERY_ROWS, Exchange
from vfl.session.secure_mode import (
    SETUP,
    Agreed,
    Happened,
    Limits,
    OwnRows,
    Revealed,
    ServedEnd,
    WholeNetwork,
)
from vfl.session.store.witness import Standing
from vfl.session.terms import Terms
from vfl.transport.pairs import TAG_BYTES
from vfl.trees.bins import Binning, fit_bins, randomised
from vfl.trees.grow import Layout
from vfl.trees.histograms import bin_kind

Count = Annotated[int, Field(ge=0, lt=2**32)]
#: Numbers of training rows, of validation rows and of test rows.
RowCounts = tuple[Count, Count, Count]
#: Largest payload of any message of these sessions.
CHUNK_BYTES = QUERY_ROWS << 15
LABEL_PARTY = "the label party"
#: Prefix of the names of the label party's binning tensors in its saved weights.
OWN = "own."
#: Largest total size of the bins of one party that the label party accepts; the size follows from
#: the columns that the party announces.
MOST_BYTES = 1 << 32
#: Settings in [train] and in each party's section that only neural networks use.
_IDLE = (
    "optimizer", "schedule", "warmup_steps", "clip_norm", "learning_rate", "momentum",
    "weight_decay", "in_flight", "batch_size", "shuffle", "checkpoint_every", "precision",
    "compile", "local_steps",
)  # fmt: skip
_IDLE_OF_PARTIES = ("bottom", "width", "branches")


class CellsMode(NetworkMode):
    """A mode whose models read table cells; the label party has one stream to each other party.

    Attributes:
        takes_noisy_labels: whether a defense may replace labels before the training. Models that
            report p-values and intervals set False, because these would describe the replaced
            labels.
        instead: for each neural-network setting that is refused, by name, the suggested
            replacement.
        fits_once: whether the model is fitted in a single epoch.
        plain_ends: for sessions without additive shares, the class of a feature party's
            implementation and the class of the label party's.
        with_helper: example of a value of `model` that names a helper, for error messages.
        sized: whether `NetworkSizes` limits the size of frames in a training on shares; in all
            other sessions, CHUNK_BYTES limits it.
        helper: name of the party without data that takes part in trainings on shares.
        max_bin: largest number of bins of an ordered column.
        epsilon: epsilon of the randomised response on each cell's bin that a feature party sends;
            None sends the true bins.
    """

    needs_keys: bool = False
    reads_cells: ClassVar[bool] = True
    whole_epochs: ClassVar[bool] = True
    serves_rows: ClassVar[bool] = True
    window: ClassVar[int] = 32
    waiting: ClassVar[int] = 32
    answers_without: ClassVar[bool] = True
    helps_to_train: ClassVar[bool] = True
    takes_noisy_labels: ClassVar[bool] = False
    fits_once: ClassVar[bool] = False
    plain_ends: ClassVar[tuple[type[FeatureCellsEnd], type[LabelCellsEnd]]]
    with_helper: ClassVar[str]
    sized: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {}
    helper: str
    max_bin: int
    epsilon: float | None = None
    _signs: Mapping[str, int] = {}

    def refuse(self, agreed: Agreed) -> None:
        usual, party = TrainSettings(), PartySettings()
        given = [("merge", agreed.merge, "concat")]
        given += [
            (f"train.{one}", getattr(agreed.train, one), getattr(usual, one)) for one in _IDLE
        ]
        given += [
            (f"parties.{name}.{one}", getattr(asked, one), getattr(party, one))
            for name, asked in agreed.parties.items()
            for one in _IDLE_OF_PARTIES
        ]
        for setting, got, want in given:
            if got != want:
                raise ExposedCutError(
                    "only neural networks use this setting; set this model's options instead",
                    got=f"{setting} = {got}",
                    want=f"{setting} = {want}, the default, or none",
                    fix=self.instead.get(setting),
                )
        refuse_work_on_cuts(agreed, self.takes_noisy_labels)
        if self.fits_once and agreed.train.epochs != 1:
            raise ExposedCutError(
                "this model is fitted once, on all rows",
                got=f"train.epochs = {agreed.train.epochs}",
                want="train.epochs = 1",
            )
        if self.needs_keys and self.helper in {*agreed.parties, agreed.label_party}:
            raise ExposedCutError(
                "a party with data could reveal shares if it were also the helper",
                got=f"helper '{self.helper}'",
                want=f"model = '{self.with_helper}' with a further party",
            )

    def shares(self, terms: Terms) -> bool:
        """Return whether a session computes on additive shares; only trainings can do so."""
        return self.needs_keys and terms.mode == "train"

    def third_party(self, label_party: str) -> str | None:
        return self.helper if self.needs_keys else None

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the differential privacy guarantee for the cells of a feature party."""
        return ()

    def signs(self, names: Sequence[str], columns: int) -> list[int]:
        """Return each column's monotone constraint: 1 rising, -1 falling, 0 none."""
        return [self._signs.get(name, 0) for name in names] if names else [0] * columns

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Any] | None,
    ) -> Limits:
        up = down = {Kind.PROTOCOL: CHUNK_BYTES + TAG_BYTES}
        if self.sized and self.shares(terms):
            up, down = super().limits(terms, party, rows, layers)
        return up, down | {Kind.ACK: 1}

    def roles(self, agreed: Terms) -> list[str]:
        third = [self.helper] if self.shares(agreed) else []
        return [*agreed.feature_parties, agreed.label_party, *third]

    def outer_network(
        self, party: str, terms: Terms, keys: Any, stream: Link, rows: OwnRows
    ) -> WholeNetwork:
        if self.shares(terms):
            return super().outer_network(party, terms, keys, stream, rows)
        return self.plain_ends[0](self, party, terms, rows, stream)

    def middle_network(
        self,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        rows: OwnRows,
    ) -> WholeNetwork:
        if self.shares(terms):
            return super().middle_network(terms, attempt, streams, receive_any, rows)
        return self.plain_ends[1](self, terms, rows, links_of(terms, streams, receive_any))

    def own_keys(
        self, party: PartyFile, terms: Terms, session: str, attempt: int, standing: Standing
    ) -> Any:
        if not self.needs_keys:  # without shares, a party needs no identity key
            return None
        return super().own_keys(party, terms, session, attempt, standing)

    def simulated_keys(
        self, secrets: Mapping[str, Secret], terms: Terms, session: str, attempt: int
    ) -> dict[str, Any]:
        if not self.needs_keys:
            return dict.fromkeys(secrets)
        return {**super().simulated_keys(secrets, terms, session, attempt)}

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Yield what sessions on shares reveal to each party: numbers of rows and columns."""
        if self.shares(terms):
            for name in self.roles(terms):
                yield Revealed(name, "numbers of rows and columns", "all", SETUP, 1, 1)


class CellsEnd(WholeNetwork):
    """A party's implementation of a session whose model reads table cells.

    Args:
        mode, terms, rows: see `SecureMode.outer_network`.
        party: name of the party.
    """

    def __init__(self, mode: CellsMode, party: str, terms: Terms, rows: OwnRows) -> None:
        self.party = party
        self._mode, self._terms, self._rows = mode, terms, rows
        self._digest = rows.digest()
        self._seen: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._own: Binning | None = None
        #: Shapley values of the party's own columns, axes (rows, columns, outputs), if the session
        #: explains its predictions.
        self._values = list[np.ndarray]()

    @property
    def split(self) -> Rows:
        return rows_of(row_counts(self._rows))

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return self._mode.privacy()

    def revealed(self) -> list[Revealed]:
        return [
            Revealed(self.party, what, of, phase, times, values)
            for (what, of, phase), (times, values) in self._seen.items()
        ]

    def column_values(self) -> np.ndarray | None:
        if not self._values:
            return None
        values = np.concatenate(self._values)
        return values if self._terms.mode == "predict" else values[0, :, 0]

    def training_state(self) -> dict[str, Any]:
        seen = [[*key, *counts] for key, counts in self._seen.items()]
        return {"weights": self.weights(), "inputs": self._digest, "revealed": seen}

    def _restored(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the weights of a saved training, after a check that rows are the same."""
        require_same_rows(self.party, self._digest, state["inputs"])
        for what, of, phase, times, values in state["revealed"]:
            self._seen[what, of, phase] = times, values
        weights: Mapping[str, Tensor] = state["weights"]
        return weights

    def _note(self, what: str, of: str, phase: str, values: int) -> None:
        times, before = self._seen.get((what, of, phase), (0, 0))
        self._seen[what, of, phase] = times + 1, before + values

    @property
    def _trains(self) -> bool:
        return self._terms.mode == "train"

    def _bin_columns(self, weights: Mapping[str, Tensor] | None) -> None:
        """Learn the bins of the party's columns, or restore an earlier training's bins."""
        if weights is not None:
            self._own = Binning.of_state(weights, categories_of(self._rows))
        elif self._rows.inputs is not None:
            train = self._cells(self._positions("train"))
            self._own = fit_bins(train, categories_of(self._rows), self._mode.max_bin)

    @property
    def _binning(self) -> Binning:
        assert self._own is not None, "the party has columns, and its attempt has begun"
        return self._own

    def _positions(self, phase: str) -> np.ndarray:
        return positions_of(self._rows, phase)

    def _asked_for(self, exchange: Exchange) -> np.ndarray:
        """Return the positions of the rows of an exchange among the aligned rows.

        In a service, an exchange already contains positions among the aligned rows.
        """
        return (
            self._positions(exchange.phase)[exchange.rows] if exchange.confirmed else exchange.rows
        )

    def _cells(self, positions: np.ndarray) -> np.ndarray:
        cells = cells_of(self._rows, positions)
        assert cells is not None, "the party has columns"
        return cells

    def _bins(self, positions: np.ndarray) -> np.ndarray:
        return self._binning.bins(self._cells(positions))

    def _known_rows(self) -> np.ndarray:
        """Return positions of the rows whose bins the label party gets: training, validation."""
        return np.concatenate([self._positions("train"), self._positions("validation")])


class FeatureCellsEnd(CellsEnd):
    """A feature party in a session over cells: sends bins, if its mode has them, and answers.

    Args:
        mode, party, terms, rows: see `CellsEnd`.
        link: network link to the label party.
    """

    def __init__(
        self, mode: CellsMode, party: str, terms: Terms, rows: OwnRows, link: Link
    ) -> None:
        super().__init__(mode, party, terms, rows)
        self.link = link

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        self._prepare(weights, state)
        if self._trains:
            self._show_bins()

    def _prepare(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None
    ) -> None:
        """Learn the bins, or restore the bins and the model of an earlier training."""
        if state is not None:
            weights = self._restored(state)
        self._bin_columns(weights)
        if weights is not None:
            self.load_weights(weights)

    def outputs(self, exchange: Exchange) -> None:
        if exchange.phase != "validation":  # the label party has the bins of validation rows
            expect(self.link, Kind.PROTOCOL, exchange.step, LABEL_PARTY)
            self.answer_rows(exchange)

    def answer_rows(self, exchange: Exchange) -> None:
        """Answer the label party's request about the rows of an exchange."""
        raise NotImplementedError

    def receive_verdict(self) -> bytes:
        return receive_verdict(self.link)

    def end(self, report: Frame) -> list[Frame]:
        return report_to_label_party(self.link, report)

    def _show_bins(self) -> None:
        """Send each cell's bin number; with an epsilon, after randomised response."""
        self._answer(0, self._about())
        raw = self._shown_bins().tobytes("F")  # the message contains the bins column by column
        for start, end in chunks(len(raw)):
            self._answer(0, raw[start:end])

    def _shown_bins(self) -> np.ndarray:
        """Return the bins of training and validation rows, as other parties may receive them."""
        bins, epsilon = self._bins(self._known_rows()), self._mode.epsilon
        if epsilon is None:
            return bins
        return randomised(bins, self._binning.layout, epsilon, self._rows.secret)

    def _about(self) -> bytes:
        """Describe this party's columns to the label party, without their names and bin edges."""
        layout = self._binning.layout
        about = {
            "bins": layout.bins,
            "categorical": layout.categorical,
            "monotone": self._mode.signs(self._rows.columns, len(layout.bins)),
        }
        return json.dumps(about).encode()

    def _answer(self, step: int, payload: bytes) -> None:
        """Send one message as soon as the label party requests it."""
        expect(self.link, Kind.PROTOCOL, step, LABEL_PARTY)
        self.link.send(Frame(Kind.PROTOCOL, step, payload))


class LabelCellsEnd(CellsEnd):
    """The label party in a session over cells, with a network link to each feature party.

    Args:
        mode, terms, rows: see `CellsEnd`.
        links: see `links_of`.

    Attributes:
        ends: network link to each feature party, by the party's name.
    """

    def __init__(
        self, mode: CellsMode, terms: Terms, rows: OwnRows, links: Mapping[str, Link]
    ) -> None:
        super().__init__(mode, terms.label_party, terms, rows)
        self.ends = {name: ServedEnd(link) for name, link in links.items()}
        #: Number of columns of each party; the label party's columns come first.
        self._counts: dict[str, int] = {}

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        if state is not None:
            weights = self._restored(state)
        has_columns = self._rows.inputs is not None
        self._bin_columns(None if weights is None or not has_columns else within(OWN, weights))
        if weights is not None:
            self.load_weights(weights)
        if self._trains:
            self._start(resumes=state is not None)

    def _start(self, *, resumes: bool) -> None:
        """Start a training on the bins of the columns of all parties."""
        raise NotImplementedError

    def send_verdict(self, verdict: bytes, step: int) -> None:
        for end in self.ends.values():
            end.link.send(Frame(Kind.ACK, step, verdict))

    def end(self, report: Frame) -> list[Frame]:
        links = {name: end.link for name, end in self.ends.items()}
        return collect_reports(links, self._terms, report)

    def contributions(self, row: int) -> Mapping[str, Tensor]:
        """See `AskingNetwork.contributions`; empty unless a model overrides it."""
        return {}

    def _ask_all(self, step: int) -> None:
        """Request each feature party's answer about the rows of a step."""
        for name in self._terms.feature_parties:
            self.ends[name].link.send(Frame(Kind.PROTOCOL, step, b""))

    def _own_bins(self, exchange: Exchange, inputs: Tensor | None) -> np.ndarray:
        """Return bins of the label party's columns, for the rows of a query or for given cells."""
        if inputs is not None:
            return self._binning.bins(inputs.flatten(1).numpy())
        return self._bins(self._asked_for(exchange))

    @property
    def _spans(self) -> dict[str, slice]:
        return spans_of(self._counts)

    def _load_counts(self, counts: Tensor) -> None:
        own = [self.party] if self.party in self._terms.parties else []
        names = [*own, *self._terms.feature_parties]
        self._counts = dict(zip(names, counts.tolist(), strict=True))

    def _pull(self, name: str, step: int) -> memoryview:
        """Request and return the next message that a party has for a step."""
        self.ends[name].link.send(Frame(Kind.PROTOCOL, step, b""))
        return self._next(name, step)

    def _next(self, name: str, step: int) -> memoryview:
        frame = expect(self.ends[name].link, Kind.PROTOCOL, step, f"party '{name}'")
        return memoryview(frame.payload)

    def _layout_of(self, raw: bytes, name: str) -> tuple[Layout, list[int]]:
        """Parse a feature party's description of its columns; return layout and constraints.

        Raises:
            ProtocolError: the description is invalid, or it describes more columns or bins than the
                label party accepts.
        """
        rows = len(self._known_rows())
        try:
            about = json.loads(raw)
            counts, kinds, signs = about["bins"], about["categorical"], about["monotone"]
            most = max(self._mode.max_bin, MAX_CATEGORIES)
            fits = 0 < len(counts) == len(kinds) == len(signs)
            fits = fits and all(type(one) is int and 1 <= one <= most for one in counts)
            fits = fits and all(type(one) is int and abs(one) <= 1 for one in signs)
            layout = Layout(tuple(counts), tuple(one is True for one in kinds))
            fits = fits and rows * len(counts) * 2 <= MOST_BYTES
        except (ValueError, TypeError, KeyError, RecursionError):
            fits = False
        if not fits:
            where = f"the message of party '{name}'"
            raise ProtocolError(
                "the description of the columns is not valid",
                where=where,
                want="bins of each column",
            )
        return layout, signs

    def _all_bins(self) -> tuple[dict[str, tuple[np.ndarray, Layout]], list[int]]:
        """Return each party's bins and layout, label party first, and all monotone constraints."""
        parts, signs = dict[str, tuple[np.ndarray, Layout]](), list[int]()
        if self._own is not None:
            parts[self.party] = self._bins(self._known_rows()), self._own.layout
            signs += self._mode.signs(self._rows.columns, len(self._own.layout.bins))
        for name in self._terms.feature_parties:
            parts[name], own = self._received(name)
            signs += own
        self._counts = {name: len(layout.bins) for name, (_, layout) in parts.items()}
        return parts, signs

    def _received(self, name: str) -> tuple[tuple[np.ndarray, Layout], list[int]]:
        """Receive a feature party's bins, with their layout and monotone constraints."""
        where, rows = f"the message of party '{name}'", len(self._known_rows())
        layout, signs = self._layout_of(bytes(self._pull(name, 0)), name)
        kind, columns = bin_kind(layout.width), len(layout.bins)
        raw = bytearray()
        for start, end in chunks(rows * columns * kind.itemsize):
            part = self._pull(name, 0)
            if len(part) != end - start:
                raise ProtocolError(
                    "the message has a wrong number of bins",
                    where=where,
                    want="one bin per cell",
                )
            raw += part
        bins = np.frombuffer(raw, kind).reshape(columns, rows).T
        for cells, count in zip(bins.T, layout.bins, strict=True):
            if ((cells >= np.intp(count)) & (cells != layout.width - 1)).any():
                raise ProtocolError("a bin number is larger than its column has bins", where=where)
        self._note("bins of cells", name, SETUP, bins.size)
        return (bins, layout), signs


def links_of(
    terms: Terms,
    streams: Mapping[str, Link],
    receive_any: Callable[[], tuple[str, Frame]],
) -> Mapping[str, Link]:
    """Return the label party's link to each feature party, in modes with no other links.

    Args:
        terms: terms of the session.
        streams: see `SecureMode.middle_network`.
        receive_any: see `SecureMode.middle_network`.
    """
    if terms.mode == "serve":  # in a service, the caller itself reads each stream's frames
        return streams
    return Switchboard(streams, receive_any, lambda one, two: False, 2).links


def taken(of_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the entries of chosen rows; for all rows in order, return the array itself."""
    if len(positions) == len(of_rows) and (positions[1:] > positions[:-1]).all():
        return of_rows
    found: np.ndarray = of_rows[positions]
    return found


def positions_of(rows: OwnRows, phase: str) -> np.ndarray:
    """Return the positions of the rows of a phase, such as training, among the aligned rows."""
    assert rows.split is not None, "a party with rows or labels has a split"
    found: np.ndarray = getattr(rows.split, "test" if phase == "predict" else phase)
    return found


def cells_of(rows: OwnRows, positions: np.ndarray) -> np.ndarray | None:
    """Return the cells of chosen aligned rows, axes (rows, columns); None without columns."""
    return None if rows.inputs is None else taken(rows.inputs.flatten(1).numpy(), positions)


def categories_of(rows: OwnRows) -> tuple[int, ...]:
    """Return the number of categories of each column of a party; 0 for a column of numbers."""
    assert rows.inputs is not None, "the party has columns"
    return rows.categories or (0,) * rows.inputs[:1].numel()


def row_counts(rows: OwnRows) -> RowCounts:
    """Return how many training, validation and test rows a party has."""
    whole = rows.split
    assert whole is not None, "a party with rows or labels has a split"
    return len(whole.train), len(whole.validation), len(whole.test)


def spans_of(counts: Mapping[str, int]) -> dict[str, slice]:
    """Return each party's part of a list of all parties' columns, which follow each other.

    >>> spans_of({"bank": 2, "shop": 1})
    {'bank': slice(0, 2, None), 'shop': slice(2, 3, None)}
    """
    ends = pairwise(accumulate(counts.values(), initial=0))
    return {name: slice(*span) for name, span in zip(counts, ends, strict=True)}


def other_parties() -> ProtocolError:
    """Return the error for facts that describe other parties than the agreed terms."""
    return ProtocolError("the label party describes parties that differ from the terms")


def rows_of(counts: Sequence[int]) -> Rows:
    """Number the rows of each split (train, validation, test) from 0; int32 if all numbers fit.

    >>> rows_of((2, 0, 1)).train
    array([0, 1], dtype=int32)
    """
    kind = np.int32 if max(counts) < 1 << 31 else np.int64
    return Rows(*(np.arange(count, dtype=kind) for count in counts))


def counted_state(own: Binning | None, counts: Sequence[int]) -> dict[str, Tensor]:
    """Return, as tensors, the label party's binning and the number of columns of each party.

    Args:
        own: binning of the label party's columns, if it has any.
        counts: number of columns of each party, the label party first.
    """
    bins = {} if own is None else own.state_dict()
    found = {f"{OWN}{name}": value for name, value in bins.items()}
    return found | {"column_counts": torch.tensor(counts, dtype=torch.int64)}


def within(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without the prefix in their names."""
    size = len(prefix)
    return {name[size:]: value for name, value in weights.items() if name.startswith(prefix)}


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each chunk of a message that has `size` bytes."""
    return ((at, min(size, at + CHUNK_BYTES)) for at in range(0, size, CHUNK_BYTES))
