"""Secure modes by name; a mode defines what each party learns about cut-layer activations.

A secure mode defines a promise about privacy, the settings that it refuses, the parties' roles, the
messages, and both endpoints of an exchange. With ``secure = "none"``, a feature party sends its cut
through a codec, and the label party sees the cut. The other secure modes are in `vfl.mpc.secure`
and `vfl.trees`, which vfl imports only if a session needs such a mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
from torch import Tensor, nn

from vfl import compression
from vfl.compression import Codec
from vfl.config import PartyFile, TrainSettings
from vfl.config.validate import further_label_parties
from vfl.core.errors import ExposedCutError, VFLError
from vfl.core.frame import Frame, Kind, Link
from vfl.core.registry import Registry
from vfl.core.seeds import Secret
from vfl.core.traffic import Ledger
from vfl.datasets import Split
from vfl.session.exchange import HONEST, CutAggregator, LabelEnd, Own
from vfl.session.schedule import EarlyStopping, Exchange

if TYPE_CHECKING:
    from vfl.config import Experiment, PartySettings
    from vfl.privacy import PrivacyStatement
    from vfl.session.store.witness import Standing
    from vfl.session.terms import PartyTerms, Terms

#: Largest payload in bytes for each kind of frame: the first dictionary for frames to the label
#: party, the second for frames from the label party.
Limits = tuple[dict[Kind, int], dict[Kind, int]]


#: Settings that all parties know, and settings of one party that has columns; `SecureMode` reads
#: both from an experiment or from agreed terms.
Agreed: TypeAlias = "Experiment | Terms"
AskedParty: TypeAlias = "PartySettings | PartyTerms"


@dataclass(frozen=True, slots=True)
class Revealed:
    """One kind of value that one party learned as plaintext in one phase.

    Attributes:
        observer: the party that learned the value.
        what: kind of value, for example "cut", "sum of the cuts" or "gradient of the sum".
        of: the party that the value describes, or "all" for a sum of all parties' cuts.
        phase: phase in which the party learned the value: "setup", "train" or "evaluate".
        times: number of exchanges in which the party learned the value.
        values: number of disclosed numbers after decoding, over all exchanges; rows that a party
            lacks are included.
    """

    observer: str
    what: str
    of: str
    phase: str
    times: int
    values: int


SETUP, TRAIN, EVALUATE = "setup", "train", "evaluate"
#: Name of a phase, number of exchanges and number of rows that the session has completed in this
#: phase.
Happened = tuple[str, int, int]


class Layers(Protocol):
    """First layers that a party secret-shares, and their need of memory and network bytes."""

    @property
    def parameters(self) -> int:
        """Number of weights in the shared layers."""

    def memory_bytes(self, rows: int) -> int:
        """Return the peak memory in bytes that the party needs in an exchange of this many rows."""

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Return the bytes that the party sends and receives in one exchange, headers included."""


class FeatureRound(Protocol):
    """Interface of a feature party's endpoint, which is `FeatureEnd` in the mode "none".

    A mode may put its own endpoint in place of `FeatureEnd`. In every exchange, `send_cut` or
    `send_query` comes first, then `answer`, then `take_gradient` or `take_receipt`; if a mode has
    more messages, `answer` sends and receives them.
    """

    party: str
    width: int
    link: Link
    in_flight: int

    @property
    def layers(self) -> Layers | None:
        """The layers that the party secret-shares; they are known after the start of an attempt.

        The value is None if the party computes its bottom model without secret sharing.
        """

    @property
    def awaiting(self) -> int:
        """Number of cuts whose gradients have not been received yet."""

    def fit(self, inputs: Any) -> None:
        """Fit the party's defense to the training inputs; called once, before step 0."""

    def send_cut(self, inputs: Tensor, step: int, rows: np.ndarray | None = None) -> None:
        """Begin a training exchange: send the cut of inputs with the axes (rows, ...)."""

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Begin an exchange that evaluates or predicts: send the cut of these rows."""

    def answer(self, step: int) -> None:
        """Answer messages of other parties that the exchange needs before its result."""

    def take_gradient(self) -> None:
        """Wait for the values that other parties return in this step, and update the weights."""

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has received the query.

        The result is the payload of the label party's answer.
        """

    def query_cut(self, inputs: Tensor) -> Tensor:
        """Return the cut that a query with these inputs would encode; send nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that the party stores for later predictions."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""

    def training_state(self) -> dict[str, Any]:
        """Return the state from which training resumes with exactly the same results."""

    def load_training_state(self, saved: Mapping[str, Any], batch: Any) -> None:
        """Restore a state of `training_state`; `batch` returns the rows of a given step."""


class HelperRound(Protocol):
    """Interface of a party without columns that a mode needs, such as a dealer."""

    party: str
    link: Link

    @property
    def layers(self) -> Mapping[str, Layers]:
        """Shared layers with which the helper computes, by party.

        The layers are known after the start of an attempt.
        """

    def serve(self) -> bool:
        """Serve the next exchange that a party requests; return False when the session is over."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """One party's inputs to a whole network; see `WholeNetwork`.

    A dealer, which only supplies randomness, has no rows.

    Attributes:
        secret: the party's secret bytes, from which initial weights are derived.
        agreed: function that is called with the layers of all parties before frames of these
            layers' sizes are sent; it may raise an error to refuse these layers.
        split: split of the aligned rows; None at a dealer.
        inputs: inputs of all the party's aligned rows, axes (rows, ...); None without columns.
        labels: labels of all rows as the model is trained on them, class codes or numbers; only at
            the party that owns the labels.
        weights: sample weight of each row, axes (rows,), at the party that owns the labels; None if
            all weights are equal.
        classes: number of classes of the labels; 0 if the labels are numbers.
        top: spec of the top model, at the label party.
        device: device for large matrix products.
        names: names of the label's classes, at the party that owns the labels.
        columns: names of the inputs, if the inputs have names.
        categories: number of categories of each column, 0 for an ordered column; only if the secure
            mode reads raw values of the table.
        spend: function that is called with the number of exact statistics of its rows that the
            party will disclose next; it may raise an error to refuse the disclosure.
        committed: last training step that the party had committed to its checkpoint when the
            attempt began.
        held: at the label party, a mask for each feature party: which aligned rows this feature
            party has, bool, axes (aligned rows,); empty if every party has all rows. The inputs of
            rows that a party lacks are NaN.
    """

    secret: Secret
    agreed: Callable[[Mapping[str, Layers]], object] = lambda layers: None
    split: Split | None = None
    inputs: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    classes: int = 0
    top: str | nn.Module = ""
    device: str = "cpu"
    names: tuple[str | int, ...] = ()
    columns: tuple[str, ...] = ()
    categories: tuple[int, ...] = ()
    spend: Callable[[int], object] = lambda count: None
    committed: int = 0
    held: Mapping[str, np.ndarray] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the SHA-256 of the inputs; it shows a party whether its rows have changed."""
        if self.inputs is None:
            return hashlib.sha256().hexdigest()
        return hashlib.sha256(self.inputs.contiguous().numpy().ravel().data).hexdigest()


@dataclass(slots=True)
class ServedEnd:
    """The label party's stream to another party.

    During serving, the label party can look at the next frame without removing it.
    """

    link: Link


class WholeNetwork(Protocol):
    """Interface of one party's part of a network in which no party sends a cut.

    Such a network is secret-shared as a whole, or is a model without cuts, for example boosted
    trees.

    All parties call the same methods in the order of the schedule. The rows of an exchange are
    numbered within each phase, so that a dealer, which has no rows, can follow the schedule.
    """

    party: str

    @property
    def split(self) -> Split:
        """Row numbers of each phase.

        The numbers begin at 0 in every phase (training, validation, test).
        """

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        """Agree with the other parties on the computation.

        A secret-shared network then shares the rows and targets.

        Args:
            weights: weights that `weights` returned after an earlier training; None trains new
                weights.
            state: state that `training_state` returned, from which the training continues; None
                begins a new training.
        """

    def train(self, exchange: Exchange) -> Tensor | None:
        """Train one step on an exchange's rows.

        The result is the outputs of these rows, if the label party learns them.
        """

    def outputs(self, exchange: Exchange) -> Tensor | None:
        """At the label party, return outputs of an exchange's rows, axes (rows, outputs)."""

    def reveals(self, exchange: Exchange) -> bool:
        """Return whether the exchange discloses values that one training may disclose only once.

        Before such an exchange, all parties save a checkpoint and commit it in `everybody_saved`.
        """
        return False

    def everybody_saved(self, commit: Callable[[], None]) -> None:
        """Before an exchange that `reveals` values, wait until all parties saved; then commit."""
        raise AssertionError("this network reveals nothing that must not be revealed twice")

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return privacy statements about the training, for the owners of the party's rows."""
        return ()

    def send_verdict(self, verdict: bytes, step: int) -> None:
        """At the label party, send early stopping's decision to the other parties."""
        raise AssertionError("only the label party sends verdicts")

    def receive_verdict(self) -> bytes:
        """At a party other than the label party, wait for early stopping's decision."""
        raise AssertionError("the label party receives no verdict")

    def end(self, report: Frame) -> list[Frame]:
        """Send this party's report.

        The label party also receives and returns the other parties' reports.
        """

    def weights(self) -> dict[str, Tensor]:
        """Return this party's shares or parts of the model; empty if the party has none."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace this party's shares or parts of the model by those that `weights` returned."""

    def training_state(self) -> dict[str, Any]:
        """Return this party's state, from which a resumed training continues."""

    def revealed(self) -> list[Revealed]:
        """Return the kinds and the numbers of values that this party has learned so far."""

    def traffic(self) -> list[dict[str, Any]]:
        """Return the bytes that this party has sent, by receiver and phase.

        The phases are setup, offline and online.
        """
        return []

    def importance(self) -> dict[str, Any] | None:
        """At the label party, return how much each party and column contributed in an evaluation.

        The result is None if the importance is undefined.
        """
        return None

    def column_values(self) -> np.ndarray | None:
        """Return the Shapley values of this party's columns, if the session explains columns.

        Otherwise the result is None.

        For a prediction: the Shapley values of each row, axes (rows, columns, outputs). For an
        evaluation: their mean absolute values, axes (columns,).
        """
        return None

    @property
    def remark_bytes(self) -> int:
        """Return the largest size in bytes, as JSON, of a remark (additional results of a row)."""
        return 0

    def remarks(self) -> Sequence[Mapping[str, Any]]:
        """At the label party, return the model's remarks on the rows that were answered last.

        A remark contains additional results for one row. There is one remark for each row, all with
        the same names; the result is empty if the model returns only outputs.
        """
        return ()

    def figures(self) -> dict[str, Any]:
        """Return additional metrics of the trained model, by name.

        The run card or the summary shows these metrics.
        """
        return {}


class AnsweringNetwork(Protocol):
    """Interface of a whole network at a feature party of a service; see `serves_rows`."""

    link: Link

    def answer_rows(self, exchange: Exchange) -> None:
        """Answer the queried rows."""


class AskingNetwork(Protocol):
    """Interface of a whole network at the label party of a service; see `serves_rows`."""

    @property
    def ends(self) -> Mapping[str, ServedEnd]: ...

    def answered(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> Tensor:
        """Return outputs of rows after the other parties were queried; see `WholeNetwork.outputs`.

        Args:
            exchange: the queried rows.
            inputs: the label party's inputs of these rows; if None, the method reads the inputs
                from the label party's table.
            without: names of absent parties, which were not queried; see
                `SecureMode.answers_without`.
        """

    def contributions(self, row: int) -> Mapping[str, Tensor]:
        """Return the Shapley value of each party for each output of one row, axes (outputs,).

        The result is empty if the model cannot compute such values.

        Args:
            row: index of the row among the rows that were answered last.
        """


class SharedLink(Link, Protocol):
    """A link between two threads of a process; a thread can report its error to the other."""

    def fail(self, error: VFLError) -> None:
        """Report this thread's error to the other thread, then close the link."""


class LocalStreams(Protocol):
    """Streams between the parties of one process, each of which runs in its own thread.

    Attributes:
        outer: each party's stream to the label party, by the party's name.
        inner: the label party's streams, by the other party's name; these streams can only send.
    """

    @property
    def outer(self) -> Mapping[str, SharedLink]: ...
    @property
    def inner(self) -> Mapping[str, SharedLink]: ...

    def receive_any(self) -> tuple[str, Frame]:
        """At the label party, receive the next frame from any party, with the party's name."""

    def play(self, programs: Mapping[str, Callable[[], object]]) -> None:
        """Run each party's program in its own thread; `programs` maps each party to its program.

        Raises:
            VFLError: a party failed; this is the error of the party that failed first.
        """


class SecureMode:
    """Defines how the label party receives the cuts (cut-layer activations) of feature parties.

    In the base class, which is the mode "none", the label party receives each cut separately.

    A subclass overrides the methods whose behaviour differs. Subclasses import no module that runs
    a party; they receive the objects of a party as arguments: links, secrets, the bottom model, the
    label party's endpoints.

    Attributes:
        needs_keys: whether the parties agree on keys before the first exchange.
        reveals_model: whether every party with columns has the complete model at the end of the
            training.
        shares_weights: whether feature parties secret-share their first layers, so that no party
            has a bottom model or sees a whole cut.
        whole_network: whether no party sends a cut, because all layers including the top are
            secret-shared, or because the model has no cuts, like boosted trees; the networks of
            `outer_network` and `middle_network` then replace both endpoints.
        reads_cells: whether a whole network reads raw table values, labels in their original units,
            and row weights; otherwise table values and labels are standardised, and all row weights
            are equal. Each party has to list such a secure mode in `consent.models`.
        whole_epochs: whether each training exchange contains all training rows.
        serves_rows: whether a whole network can also answer queries of single rows.
        answers_without: whether a service with a whole network can answer while a feature party is
            absent, if the label party allows such answers.
        explains_columns: whether a whole network computes how much each column contributes, for the
            party that owns the column.
        helps_to_train: whether the third party takes part in trainings only.
        keeps: names of the model's parts that a feature party and the label party store, as cards
            and pages print them; None means a bottom model and the top model.
        exports: maps a format of `vfl export` to the import path of a function that writes this
            format, for models without bottom and top; the function's arguments are the run's
            folder, the party's folder in it, and the target folder.
    """

    needs_keys: bool = False
    reveals_model: ClassVar[bool] = False
    shares_weights: ClassVar[bool] = False
    whole_network: ClassVar[bool] = False
    reads_cells: ClassVar[bool] = False
    whole_epochs: ClassVar[bool] = False
    serves_rows: ClassVar[bool] = False
    answers_without: ClassVar[bool] = False
    explains_columns: ClassVar[bool] = False
    helps_to_train: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, str] | None] = None
    exports: ClassVar[Mapping[str, str]] = {}

    # Participants, promise and refusals.

    @property
    def divides_rows(self) -> bool:
        """Return whether each party has separate rows, with all their columns and labels."""
        return False

    def third_party(self, label_party: str) -> str | None:
        """Return the third party, which has no columns and only helps to compute.

        The result is None if the mode has no third party.
        """
        return None

    def ring(self, parties: int) -> object | None:
        """Return the ring in which the cuts of this many feature parties are summed.

        The result is None if the mode sums no cuts in a ring.
        """
        return None

    def refuse(self, agreed: Agreed) -> None:
        """Refuse every setting that would disclose values that the secure mode has to hide.

        Raises:
            ExposedCutError: with these settings, the mode would hide nothing; the error states the
                reason.
            SpecError: the codec or a defense cannot be built.
        """

    def promise(self, agreed: Agreed) -> str:
        """Return a short text that states which party learns what about the cuts."""
        if agreed.middle is not None:
            middle = agreed.middle.party
            return (
                f"{middle} sees every cut and no label, {agreed.label_party} sees the outputs "
                f"of {middle}"
            )
        takers = label_parties(agreed)
        return f"{' and '.join(takers)} {'sees' if len(takers) == 1 else 'see'} every cut"

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Yield the values that each party learned in completed exchanges, by kind, as counts.

        Masked numbers are left out, because they disclose nothing unless parties collude.
        """
        cut, gradient = "cut", "gradient of its cut"
        if terms.codec != "none":
            cut, gradient = f"{cut} ({terms.codec})", f"{gradient} ({terms.codec})"
        for phase, times, rows in happened:
            taker, middle = terms.label_party, terms.middle
            if middle is not None:
                taker, count = middle.party, rows * middle.width
                yield Revealed(terms.label_party, "output", taker, phase, times, count)
                if phase == TRAIN:
                    what = "gradient of its output"
                    yield Revealed(taker, what, terms.label_party, phase, times, count)
            values = {name: rows * terms.parties[name].width for name in terms.feature_parties}
            for one in (taker, *terms.tasks):
                for name, count in values.items():
                    yield Revealed(one, cut, name, phase, times, count)
                if phase == TRAIN:
                    for name, count in values.items():
                        yield Revealed(name, gradient, one, phase, times, count)

    # Messages on the links.

    def window_frames(self, train: TrainSettings) -> int:
        """Return the largest number of unread frames in transit in one direction of a stream.

        The result counts the training frames in flight, one query after them, and two more frames
        as a reserve.
        """
        return train.in_flight + 3

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Layers] | None,
    ) -> Limits:
        """Return the largest payload of each kind of frame, in bytes.

        The first dictionary is for frames from the party to the label party, the second for the
        other direction.

        Args:
            terms: the agreed terms.
            party: name of the other party.
            rows: number of rows in the largest exchange; keys are the kinds of an exchange's first
                message.
            layers: layers that each party secret-shares, if they are known already; see
                `frame_limits`.
        """
        codec, width = compression.make(terms.codec), terms.parties[party].width
        wire_width = codec.wire_width(width)
        up = {kind: codec.payload_limit(count, wire_width) for kind, count in rows.items()}
        return up, {Kind.GRAD: codec.payload_limit(rows[Kind.CUT], wire_width)}

    def layers(self, columns: Mapping[str, int], width: int, label_party: str) -> Mapping[str, Any]:
        """Return the layers that each feature party secret-shares.

        The result is empty if every party keeps its bottom model unshared.

        Args:
            columns: number of inputs of every party's layer, plus one for the bias; parties are in
                merge order.
            width: width of the layers' outputs.
            label_party: name of the label party.
        """
        return {}

    def helper_bytes(self, layers: Sequence[Any], rows: int, trains: bool) -> int:
        """Return how many bytes a third party sends and receives in an exchange, with headers."""
        return 0

    # Objects at the two endpoints of an exchange.

    def feature_codec(self, party: str, terms: Terms) -> Codec:
        """Make the codec that encodes a feature party's cuts, at that party."""
        return compression.make(terms.codec)

    def label_codec(self, party: str, terms: Terms, secret: Secret) -> Codec:
        """Make the label party's codec for one feature party's cuts and gradients."""
        return compression.make(terms.codec)

    def feature_round(
        self, party: str, bottom: nn.Module, columns: int, terms: Terms, own: Own, link: Link
    ) -> FeatureRound | None:
        """Make the endpoint that replaces a feature party's `FeatureEnd`; None keeps `FeatureEnd`.

        Args:
            party: name of the party.
            bottom: bottom model that the party would train in the secure mode "none".
            columns: number of the party's inputs per row: the product of the axes of a row.
            terms: the agreed terms.
            own: private state of the party.
            link: stream to the label party.
        """
        return None

    def aggregator(
        self,
        terms: Terms,
        ends: Mapping[str, LabelEnd],
        links: Mapping[str, Link],
        ledger: Ledger,
        stopping: EarlyStopping,
    ) -> CutAggregator:
        """Make the label party's object that receives cuts, and the messages before the cuts."""
        return CutAggregator(ends, ledger, stopping)

    def helper_round(self, terms: Terms, link: Link) -> HelperRound:
        """Make the third party's endpoint, over its stream to the label party."""
        raise AssertionError("this mode has no third party")

    # A whole network; these methods are called only with `whole_network`.

    def outer_network(
        self, party: str, terms: Terms, keys: Any, stream: Link, rows: OwnRows
    ) -> WholeNetwork:
        """Make the network of a party whose only stream leads to the label party.

        Args:
            party: name of the party.
            terms: the agreed terms.
            keys: the party's object for key agreement, which `own_keys` made.
            stream: stream to the label party.
            rows: the party's own rows.
        """
        raise AssertionError("this mode has no secret-shared network")

    def middle_network(
        self,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        rows: OwnRows,
    ) -> WholeNetwork:
        """Make the label party's network; the label party relays messages between other parties.

        Args:
            terms: the agreed terms.
            attempt: identifier of the session, and number of its restarts.
            streams: streams to the other parties, by party.
            receive_any: function that returns the next frame from any party, and the party's name.
            rows: the label party's inputs.
        """
        raise AssertionError("this mode has no secret-shared network")

    def local_streams(self, terms: Terms) -> LocalStreams:
        """Make streams for a process that runs all parties."""
        raise AssertionError("this mode has no secret-shared network")

    # Key agreement before the first exchange; these methods are called only with `needs_keys`.

    def own_keys(
        self, party: PartyFile, terms: Terms, session: str, attempt: int, standing: Standing
    ) -> Any:
        """Make the object that agrees on one attempt's keys, from a party's file and its store."""
        raise AssertionError("this mode needs no keys")

    def simulated_keys(
        self, secrets: Mapping[str, Secret], terms: Terms, session: str, attempt: int
    ) -> Mapping[str, Any]:
        """Make the key-agreement objects of all parties for a simulation in one process.

        Their keys protect no party.
        """
        raise AssertionError("this mode needs no keys")

    def offer(self, end: FeatureRound | HelperRound, keys: Any) -> None:
        """Send this party's offer of a key.

        All parties call `offer` before any party calls `accept`.
        """

    def accept(self, end: FeatureRound | HelperRound, keys: Any, terms: Terms) -> None:
        """Wait for the key offers of all parties.

        Afterwards the object uses the keys that are derived from these offers.
        """


SECURE: Registry[SecureMode] = Registry(
    kind="secure mode",
    contract=SecureMode,
    members={
        "none": "vfl.session.secure_mode:SecureMode",
        "sum": "vfl.mpc.secure.sum:MaskedSum",
        "beaver": "vfl.mpc.secure.beaver:Beaver",
        "permuted": "vfl.mpc.secure.permuted:Permuted",
        "pea": "vfl.mpc.secure.pea:Pea",
    },
    group="vfl.secure",
)


def make(spec: str) -> SecureMode:
    """Make the secure mode that a spec names.

    Raises:
        SpecError: the name or an option is unknown; the error suggests the nearest known name.
    """
    return SECURE.make(spec)


def shares_weights(agreed: Agreed) -> bool:
    """Return whether feature parties secret-share first layers, so that no party has a bottom.

    Raises:
        SpecError: the mode cannot be built.
    """
    return make(agreed.secure).shares_weights


def third_party(agreed: Agreed) -> str | None:
    """Return the name of the dealer, a third party without columns; None if there is no dealer.

    Raises:
        SpecError: the mode cannot be built.
    """
    return make(agreed.secure).third_party(agreed.label_party)


def label_parties(agreed: Agreed) -> list[str]:
    """Return the parties that hold labels, with the leading label party first."""
    return [agreed.label_party, *further_label_parties(agreed)]


def promise(agreed: Agreed) -> str:
    """Return a short text that states which party learns what about the cuts.

    Raises:
        SpecError: the mode cannot be built.
        ExposedCutError: the mode would hide nothing with the other settings; the error states the
            reason.
    """
    mode = make(agreed.secure)
    mode.refuse(agreed)
    return mode.promise(agreed)


def shared_bottom_error(party: str) -> ExposedCutError:
    """Make the error for a request for a bottom model or a cut, which no party has in this mode."""
    return ExposedCutError(
        "no party has a bottom or a cut in this secure mode",
        got=f"bottom or cut of party '{party}'",
        want="secure = 'none' or 'sum' for a request that needs a bottom or a cut",
    )


def require_honest(party: str, own: Own, bottom: object) -> None:
    """Refuse settings that need a bottom model or a cut, if no party has one in this secure mode.

    Raises:
        ExposedCutError: the party has its own bottom model, or an adversary.
    """
    wrong = {
        "bottom": None if bottom is None else str(bottom),
        "adversary": None if own.adversary is HONEST else type(own.adversary).__name__,
    }
    for name, got in wrong.items():
        if got is not None:
            raise ExposedCutError(
                f"party '{party}' has no model and no cut in this secure mode",
                got=f"{name} {got}",
                want="the agreed model, which all parties compute together",
            )
