"""What the parties learn of each other: secure modes by name, and the one that hides nothing.

A mode says itself what it promises and refuses, which roles it has, what crosses the links, and
what stands at both ends of a round. ``secure = "none"`` is the contract as it stands: a feature
party sends its cut through a codec, and the label party sees it. The other members live in
`vfl.mpc.secure` and are imported when a session asks for one; a plain session imports none of it.
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

#: Largest payload by kind, up and down.
Limits = tuple[dict[Kind, int], dict[Kind, int]]


#: The settings that all parties know, and what they say of a party with columns.
Agreed: TypeAlias = "Experiment | Terms"
AskedParty: TypeAlias = "PartySettings | PartyTerms"


@dataclass(frozen=True, slots=True)
class Revealed:
    """One kind of thing that one party learned in one phase, in plain text.

    Attributes:
        observer: who learned it.
        what: "cut", "sum of the cuts" or "gradient of the sum", for example.
        of: the party it tells of, or "all" whose cuts were summed.
        phase: "setup", "train" or "evaluate".
        times: in how many exchanges.
        values: how many numbers, all times together.
    """

    observer: str
    what: str
    of: str
    phase: str
    times: int
    values: int


SETUP, TRAIN, EVALUATE = "setup", "train", "evaluate"
#: Phase, exchanges and rows of what has happened.
Happened = tuple[str, int, int]


class Layers(Protocol):
    """What of first layers a party has shares of, and what follows from it."""

    @property
    def parameters(self) -> int:
        """How many weights the party has shares of."""

    def memory_bytes(self, rows: int) -> int:
        """What the party holds at once in an exchange of so many rows, at most."""

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included."""


class FeatureRound(Protocol):
    """A feature party's end of a round; `FeatureEnd` where nothing is hidden.

    A mode may put another in its place. In every exchange `send_cut` or `send_query` comes first,
    then `answer`, then `take_gradient` or `take_receipt`: a mode with more turns takes them in
    `answer`.
    """

    party: str
    width: int
    link: Link
    in_flight: int

    @property
    def layers(self) -> Layers | None:
        """The layers it has shares of, once an attempt has begun; None for a bottom of its own."""

    @property
    def awaiting(self) -> int:
        """Cuts whose gradients have not been taken yet."""

    def fit(self, inputs: Any) -> None:
        """Look at the training inputs once, before step 0."""

    def send_cut(self, inputs: Tensor, step: int, rows: np.ndarray | None = None) -> None:
        """Begin a training exchange on rows of axes (rows, ...)."""

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Begin an exchange on rows to evaluate or predict."""

    def answer(self, step: int) -> None:
        """Say what follows from what other parties said."""

    def take_gradient(self) -> None:
        """Wait for what comes back, and move the weights."""

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has the query; what it says to it."""

    def query_cut(self, inputs: Tensor) -> Tensor:
        """The cut of some rows, as a query sends it."""

    def state_dict(self) -> dict[str, Tensor]:
        """What the party keeps to predict."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly."""

    def load_training_state(self, saved: Mapping[str, Any], batch: Any) -> None:
        """Restore what `training_state` gave."""


class HelperRound(Protocol):
    """A party without columns that a mode needs, a dealer for example."""

    party: str
    link: Link

    @property
    def layers(self) -> Mapping[str, Layers]:
        """The layers it serves, by party, once an attempt has begun."""

    def serve(self) -> bool:
        """Serve the exchange that is asked for next; False when the session is over."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """What one party brings into a network that nobody holds; no rows at a dealer.

    Attributes:
        secret: its own; first weights follow from it.
        agreed: told the network by party, before frames of its size are sent; it may refuse.
        split: which aligned rows serve what; None at a dealer.
        inputs: all its aligned rows, axes (rows, ...); None without columns.
        labels: of all rows, as they are learned: codes of classes, or numbers; at their owner.
        weights: how much each row counts, axes (rows,), at the labels' owner; None where all alike.
        classes: how many the labels have; 0 for numbers.
        top: spec of the top model, at the label party.
        device: where large products are computed.
        names: what the codes stand for, at an owner of labels.
        columns: what the inputs are called, where they have names.
        categories: how many each column has, 0 of one whose values have an order; where cells are
            inputs.
        spend: told how many exact statistics of its rows the party is about to show to others; it
            may refuse.
        committed: the last step that the party had committed when the attempt began.
        held: which aligned rows each feature party has, bool, axes (aligned rows,), at the label
            party; empty where all have all. Cells of the others are not numbers.
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
        """SHA-256 of the inputs, by which a party knows whether its rows changed."""
        if self.inputs is None:
            return hashlib.sha256().hexdigest()
        return hashlib.sha256(self.inputs.contiguous().numpy().ravel().data).hexdigest()


@dataclass(slots=True)
class ServedEnd:
    """The label party's stream to another party, which whoever serves may look at first."""

    link: Link


class WholeNetwork(Protocol):
    """One party's end of a network that nobody holds, or of another model than a split network.

    All parties make the same calls along the schedule; rows of an exchange are positions inside
    the rows of its phase, so that a dealer, who has none, follows too.
    """

    party: str

    @property
    def split(self) -> Split:
        """How many rows each phase has; positions are those inside the phase."""

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        """Agree with the others, then share rows and targets.

        Args:
            weights: what `weights` gave after the training; None trains from new ones.
            state: what `training_state` gave, to go on from there.
        """

    def train(self, exchange: Exchange) -> Tensor | None:
        """One step on some training rows; their outputs if the label party has them after it."""

    def outputs(self, exchange: Exchange) -> Tensor | None:
        """Logits or numbers of some rows at the label party, axes (rows, outputs)."""

    def reveals(self, exchange: Exchange) -> bool:
        """Whether the exchange discloses what a training must not disclose twice.

        Everybody saves before it, and `everybody_saved` then lets everybody commit that.
        """
        return False

    def everybody_saved(self, commit: Callable[[], None]) -> None:
        """Before what `reveals`: wait until all have saved, and commit; the label party first."""
        raise AssertionError("nothing is revealed that must not be revealed anew")

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """What the training promises to whoever has a row in it."""
        return ()

    def send_verdict(self, verdict: bytes, step: int) -> None:
        """At the label party: send the others its verdict on an epoch."""
        raise AssertionError("the label party alone judges")

    def receive_verdict(self) -> bytes:
        """At another party: wait for it."""
        raise AssertionError("the label party does not wait for itself")

    def end(self, report: Frame) -> list[Frame]:
        """A last word to the label party, which says nothing but its own; what it received."""

    def weights(self) -> dict[str, Tensor]:
        """This party's shares; empty where it has none."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from what `weights` gave."""

    def training_state(self) -> dict[str, Any]:
        """What this party needs to go on."""

    def revealed(self) -> list[Revealed]:
        """What this party learned so far: kinds and sizes."""

    def traffic(self) -> list[dict[str, Any]]:
        """What this party has sent, by receiver and phase: setup, offline, online."""
        return []

    def importance(self) -> dict[str, Any] | None:
        """At the label party: what an evaluation says of parties and columns; None of nothing."""
        return None

    def column_values(self) -> np.ndarray | None:
        """What each of the party's own columns added, where the session explains it; else None.

        Of a prediction the Shapley value of each row, axes (rows, columns, outputs); of an
        evaluation their mean absolute values, axes (columns,).
        """
        return None

    @property
    def remark_bytes(self) -> int:
        """Most bytes of the JSON of one remark."""
        return 0

    def remarks(self) -> Sequence[Mapping[str, Any]]:
        """At the label party: what the model says of the rows it answered last, beside outputs.

        One for each row, all with the same names; none where outputs say it all.
        """
        return ()

    def figures(self) -> dict[str, Any]:
        """What a training says of its model, by a name; for the owner's card or the summary."""
        return {}


class AnsweringNetwork(Protocol):
    """The part of a whole network that answers requests at a feature party; see `serves_rows`."""

    link: Link

    def answer_rows(self, exchange: Exchange) -> None:
        """Answer rows that were asked for."""


class AskingNetwork(Protocol):
    """The part of a whole network that answers requests at the label party; see `serves_rows`."""

    @property
    def ends(self) -> Mapping[str, ServedEnd]: ...

    def answered(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> Tensor:
        """Outputs of rows that all others were asked for; see `WholeNetwork.outputs`.

        Args:
            exchange: which rows.
            inputs: the label party's own of them; those of its table if not given.
            without: parties that are away and were not asked; see `SecureMode.answers_without`.
        """

    def contributions(self, row: int) -> Mapping[str, Tensor]:
        """The Shapley value of each party for each output of one row, axes (outputs,).

        Empty where the model has none.

        Args:
            row: which of the rows that were answered last.
        """


class SharedLink(Link, Protocol):
    """A link between threads whose end can say why it stops."""

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close."""


class LocalStreams(Protocol):
    """Streams of the parties of one process, each of which plays in a thread of its own.

    Attributes:
        outer: each party's end, by its name.
        inner: the label party's ends, by the party at the other one; they only send.
    """

    @property
    def outer(self) -> Mapping[str, SharedLink]: ...
    @property
    def inner(self) -> Mapping[str, SharedLink]: ...

    def receive_any(self) -> tuple[str, Frame]:
        """At the label party: the next frame of whoever sends first, and who it is."""

    def play(self, programs: Mapping[str, Callable[[], object]]) -> None:
        """Let everybody play, by name.

        Raises:
            VFLError: what went wrong first.
        """


class SecureMode:
    """How the parties' cuts come together at the label party; as it stands: each by itself.

    A member overrides what differs. It lives below the rooms of the parties and is handed what is
    theirs: links, secrets, the bottom, the label party's end of the round with each party.

    Attributes:
        needs_keys: whether the parties agree on keys before the first exchange.
        reveals_model: whether everybody with columns has the whole model in the end.
        shares_weights: whether no feature party has a bottom of its own, and nobody a cut.
        whole_network: whether nobody has any layer, the top included; `outer_network` and
            `middle_network` then stand in the place of both ends of a round.
        reads_cells: whether a whole network gets cells as they stand, labels in their own units and
            weights of rows; else both are standardised, and all rows weigh the same. A party that
            takes part in one names it in `consent.models`.
        whole_epochs: whether an exchange of a training has all training rows.
        serves_rows: whether a whole network also answers rows as they are asked for.
        answers_without: whether it then answers without a feature party that is away, where the
            label party's service may.
        explains_columns: whether a whole network tells a party what each of its columns adds.
        helps_to_train: whether a third party takes part in trainings alone.
        keeps: what a feature party and the label party keep of the model, for cards and pages; None
            where these are a bottom and the top.
        exports: form of `vfl export` -> path of what writes it in place of a bottom or a top, from
            the run's folder, the party's part of it and the folder to write to.
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

    # Who takes part, what is promised and refused.

    @property
    def divides_rows(self) -> bool:
        """Whether each party has rows of its own, with all columns and labels."""
        return False

    def third_party(self, label_party: str) -> str | None:
        """Who has no columns and only helps; None where there is no such party."""
        return None

    def ring(self, parties: int) -> object | None:
        """The ring in which the cuts of so many feature parties are summed; None if in no ring."""
        return None

    def refuse(self, agreed: Agreed) -> None:
        """Refuse every setting through which the mode would tell what it is to hide.

        Raises:
            ExposedCutError: with the reason.
            SpecError: codec or defense cannot be built.
        """

    def promise(self, agreed: Agreed) -> str:
        """Who learns what of the cuts, in a few words."""
        if agreed.middle is not None:
            middle = agreed.middle.party
            return f"{middle} sees every cut and no label, {agreed.label_party} what {middle} makes"
        takers = label_parties(agreed)
        return f"{' and '.join(takers)} {'sees' if len(takers) == 1 else 'see'} every cut"

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Who learned what in exchanges that have happened; kinds and sizes only.

        Numbers under masks are left out: they tell nothing to whoever does not collude.
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

    # What crosses the links.

    def window_frames(self, train: TrainSettings) -> int:
        """Most frames that may be on their way unread in one direction of a stream.

        Those in flight, a query that follows the last of them, and a greeting's worth of slack.
        """
        return train.in_flight + 3

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Layers] | None,
    ) -> Limits:
        """The largest payloads between the label party and another one, up and down.

        Args:
            terms: what was agreed.
            party: the other one.
            rows: of the largest exchange, by the kind of what begins it.
            layers: what each party has shares of, once it is known; see `frame_limits`.
        """
        codec, width = compression.make(terms.codec), terms.parties[party].width
        wire_width = codec.wire_width(width)
        up = {kind: codec.payload_limit(count, wire_width) for kind, count in rows.items()}
        return up, {Kind.GRAD: codec.payload_limit(rows[Kind.CUT], wire_width)}

    def layers(self, columns: Mapping[str, int], width: int, label_party: str) -> Mapping[str, Any]:
        """What each feature party has shares of; nothing where each has a bottom of its own.

        Args:
            columns: of every party's layer, that of ones included, in merge order.
            width: of all their outputs.
            label_party: its name.
        """
        return {}

    def helper_bytes(self, layers: Sequence[Any], rows: int, trains: bool) -> int:
        """Bytes that a third party sends and receives in an exchange, headers included."""
        return 0

    # What stands at the ends of a round.

    def feature_codec(self, party: str, terms: Terms) -> Codec:
        """What encodes a feature party's cuts, at that party."""
        return compression.make(terms.codec)

    def label_codec(self, party: str, terms: Terms, secret: Secret) -> Codec:
        """What decodes them at the label party."""
        return compression.make(terms.codec)

    def feature_round(
        self, party: str, bottom: nn.Module, columns: int, terms: Terms, own: Own, link: Link
    ) -> FeatureRound | None:
        """What stands in the place of the whole end of a feature party; None keeps the plain one.

        Args:
            party: whose.
            bottom: what the plain one would train.
            columns: of the party's inputs, all axes of a row together.
            terms: what was agreed.
            own: what is the party's own.
            link: the stream to the label party.
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
        """What takes the cuts at the label party, and plays whatever turns there are before."""
        return CutAggregator(ends, ledger, stopping)

    def helper_round(self, terms: Terms, link: Link) -> HelperRound:
        """What the third party does, over its stream to the label party."""
        raise AssertionError("this mode has no third party")

    # A network that nobody holds; only where `whole_network`.

    def outer_network(
        self, party: str, terms: Terms, keys: Any, stream: Link, rows: OwnRows
    ) -> WholeNetwork:
        """The end of a party that has a stream to the label party only.

        Args:
            party: whose.
            terms: what was agreed.
            keys: its part in the agreement, from `own_keys`.
            stream: to the label party.
            rows: what it brings.
        """
        raise AssertionError("this mode has no network that nobody holds")

    def middle_network(
        self,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        rows: OwnRows,
    ) -> WholeNetwork:
        """The end of the label party, which carries what the two others say to each other.

        Args:
            terms: what was agreed.
            attempt: name of the session, and how often it was begun anew.
            streams: to the others, by party.
            receive_any: the next frame of whoever sends first, and who it is.
            rows: what the label party brings.
        """
        raise AssertionError("this mode has no network that nobody holds")

    def local_streams(self, terms: Terms) -> LocalStreams:
        """Streams for a process that plays every party."""
        raise AssertionError("this mode has no network that nobody holds")

    # Keys, before the first exchange; only where `needs_keys`.

    def own_keys(
        self, party: PartyFile, terms: Terms, session: str, attempt: int, standing: Standing
    ) -> Any:
        """A party's part in the agreement on keys of one attempt, from its own file and store."""
        raise AssertionError("this mode needs no keys")

    def simulated_keys(
        self, secrets: Mapping[str, Secret], terms: Terms, session: str, attempt: int
    ) -> Mapping[str, Any]:
        """Everybody's part in it, in a process that plays every party; it protects nobody."""
        raise AssertionError("this mode needs no keys")

    def offer(self, end: FeatureRound | HelperRound, keys: Any) -> None:
        """Send what this party offers; everybody has done so before anybody calls `accept`."""

    def accept(self, end: FeatureRound | HelperRound, keys: Any, terms: Terms) -> None:
        """Wait for everybody's offers and use the keys that follow from them from now on."""


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
    """The mode a spec names.

    Raises:
        SpecError: an unknown name or option, with the nearest known one.
    """
    return SECURE.make(spec)


def shares_weights(agreed: Agreed) -> bool:
    """Whether the feature parties share each other's first layers, and none has its own.

    Raises:
        SpecError: the mode cannot be built.
    """
    return make(agreed.secure).shares_weights


def third_party(agreed: Agreed) -> str | None:
    """Who deals and does nothing else; None where the label party deals, or nobody.

    Raises:
        SpecError: the mode cannot be built.
    """
    return make(agreed.secure).third_party(agreed.label_party)


def label_parties(agreed: Agreed) -> list[str]:
    """Whoever holds labels, the one that leads first."""
    return [agreed.label_party, *further_label_parties(agreed)]


def promise(agreed: Agreed) -> str:
    """Who learns what of the cuts, in a few words.

    Raises:
        SpecError: the mode cannot be built.
        ExposedCutError: beside the other settings it would hide nothing, and why.
    """
    mode = make(agreed.secure)
    mode.refuse(agreed)
    return mode.promise(agreed)


def nobodys_bottom(party: str) -> ExposedCutError:
    """What is said to whoever asks for a party's bottom, or for its cut."""
    return ExposedCutError(
        "no party has a bottom or a cut in this secure mode",
        got=f"bottom or cut of party '{party}'",
        want="secure = 'none' or 'sum' for what looks at one",
    )


def require_honest(party: str, own: Own, bottom: object) -> None:
    """Refuse what would work on a bottom or a cut, which nobody has here.

    Raises:
        ExposedCutError: a bottom of the party's own, or an adversary.
    """
    wrong = {
        "bottom": None if bottom is None else str(bottom),
        "adversary": None if own.adversary is HONEST else type(own.adversary).__name__,
    }
    for name, got in wrong.items():
        if got is not None:
            raise ExposedCutError(
                f"party '{party}' has neither model nor cut of its own in this secure mode",
                got=f"{name} {got}",
                want="shares of a network that nobody holds, by all parties as agreed",
            )
