"""``secure = "beaver"``: for each feature party, two parties share its first layer's weights.

Every first layer has three roles. The owner of a layer has the inputs and one share of the weights,
the partner has the other share, and the dealer deals correlated randomness
(`vfl.mpc.secure.shared_layer`). The label party learns only the sum of all first layers' outputs,
and continues with it in plaintext.

    setting               owner             partner                      dealer
    label party deals:    a feature party   the next one in merge order  the label party
    third party deals:    a feature party   the label party              the third party

In every training step, the owner opens its masked inputs to the partner, and the partner opens its
masked share of the weights to the owner. Afterwards, owner and partner each have a share of the
layer's outputs. Each feature party adds masks to its share; the masks cancel out in the sum over
all feature parties. Messages between two feature parties are encrypted (sealed) and pass through
the label party. Feature parties never see a layer's output or its gradient.

The wire format, if the label party deals: Feature parties are in merge order; the partner of a
party's layer is the next party. A step has B rows, a layer has d input columns and width h. The
inputs X include a last column of ones for the bias, which d counts. Numbers are little-endian
64-bit words modulo 2^64, row by row. Inputs have 13 bits after the binary point, gradients times
the learning rate 26, weights 39, and outputs 52.

For each feature party and each attempt at the session, the label party draws a key of 32 bytes and
sends it over TLS. All dealt values are derived from these keys. Each party sends the number of
columns d of its own layer in a PROTOCOL frame of step 1 (4 bytes; d is at most 2^15). The label
party replies with the party's key (32 bytes), and with the d of the layer whose partner this party
is (4 bytes). Owner and partner each draw initial weights, torch's uniform distribution times
2^-1/2, from the AES-256 key stream of their own secret. In step t, the owner's key stream gives the
masks U = words("inputs", t), B x d; T = words("outputs", t), B x h; and C = words("update", t), d x
h. The partner's key stream gives the masks V = words("weights", t), d x h; and R =
words("gradient", t), B x h. The owner has the share A of the weights, and the partner has the share
S:

1. The owner seals E = X - U, its masked inputs, for the partner; the associated data is "inputs t".
   The partner seals D = S - V, its masked share of the weights, for the owner; the associated data
   is "weights t". Each party sends the label party its sealed E, and then its sealed D of the layer
   whose partner it is. The frame has the kind OPENING, or in evaluations QUERY_OPENING.
2. The label party sends each party the sealed E and D that are meant for it, and U V - T of the
   layer whose partner the party is.
3. Each party computes X (A + D) + T for its own layer. The party adds E V + (U V - T) of the layer
   whose partner it is, and its masks of all pairs of parties. The party sends the result as a frame
   of kind CUT or QUERY. The sum of these results over the parties is the sum of all layers'
   outputs.
4. In a training, the label party then sends each party a GRAD frame. The frame contains G - R for
   the party's own layer, and U^T R - C for the layer whose partner the party is. G is the gradient
   of the outputs.
5. The owner then computes A -= X^T (G - R) + C, and the partner computes S -= E^T R + (U^T R - C).

If a third party deals, the key offers of the feature parties come first, and then the dealer's key
offer. The key that owner and dealer agree on is the key of the owner's stream, and no message
contains it. The dealer draws 32 bytes per layer as the key of the partner's stream, and sends them
to the label party, which is every layer's partner. Each owner announces the d of its layer (4
bytes), and the label party sends all of them to the dealer, in merge order. Then:

1. The owner sends an OPENING frame with E. The label party sends an OPENING frame with D to each
   owner, and an OPENING frame with the number of rows (4 bytes) to the dealer.
2. The dealer sends an OPENING frame with U V - T of every layer, in merge order; in a training it
   also sends a GRAD frame with U^T R - C.
3. The owner sends X (A + D) + T plus its masks as a frame of kind CUT or QUERY. The label party
   adds E V + (U V - T) for every layer.
4. In a training, the label party sends a GRAD frame with G - R. The owner then computes A -= X^T (G
   - R) + C, and the label party computes S -= E^T R + (U^T R - C).
"""

from __future__ import annotations

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from vfl import defenses
from vfl.compression import INFERENCE, Codec, StepContext
from vfl.compression.none import Uncompressed
from vfl.config.experiment import PARTY_NAME
from vfl.core.errors import ExposedCutError, ProtocolError, RunFolderError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind, Link, Payload
from vfl.core.seeds import Secret
from vfl.core.torch_internals import Compute
from vfl.core.traffic import Ledger
from vfl.defenses import uses
from vfl.mpc.channel import elements_of, pack, size_of, split_payload
from vfl.mpc.ring import ELEMENT_BYTES, multiply_on
from vfl.mpc.secure.base import SummedCuts, SummingMode, check_training, offers_bytes
from vfl.mpc.secure.keys import OFFER_BYTES, TAG_BYTES, Agreement, pair_seals
from vfl.mpc.secure.masks import PairwiseMasks, Ring
from vfl.mpc.secure.shared_layer import (
    COLUMNS_BYTES,
    INPUT_BITS,
    OUTPUT_BITS,
    ROWS_BYTES,
    Dealer,
    LayerAxes,
    Owner,
    Partner,
    bytes_to_deal,
    check_outputs,
    encode_gradient,
    encode_inputs,
    first_weights,
    products_bytes,
    read_columns,
    updates_bytes,
)
from vfl.mpc.secure.sum import QUERY, TRAINING
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.session import rules
from vfl.session.exchange import (
    HONEST,
    Adversary,
    CutAggregator,
    LabelEnd,
    Own,
    expect,
)
from vfl.session.schedule import QUERY_ROWS, EarlyStopping, Exchange
from vfl.session.secure_mode import (
    SETUP,
    Agreed,
    FeatureRound,
    Happened,
    HelperRound,
    Layers,
    Limits,
    Revealed,
    shared_bottom_error,
)
from vfl.session.terms import Terms
from vfl.transport.pairs import SealedPairs

#: Methods of defenses that work on a feature party's bottom model, cut, inputs or gradient.
_AT_FEATURE_PARTIES = ("wrap_bottom", "fit", "batch", "embedding", "local_loss", "received")
_LABEL_PARTY = "the label party"


def _about(what: str, step: int) -> bytes:
    """Return the associated data by which a message between two feature parties is sealed."""
    return f"{what} {step}".encode()


def _opening(trains: bool) -> Kind:
    return Kind.OPENING if trains else Kind.QUERY_OPENING


class Beaver(SummingMode):
    """The label party sees only the sum of the layers' outputs.

    No party has the weights of a first layer.

    Args:
        dealer: name of the party that deals correlated randomness; the default is the label party.
            A dealer other than the label party has no data; the label party is then the partner of
            each layer and holds its other share.

    >>> Beaver().dealer("lender"), Beaver(dealer="notary").third_party("lender")
    ('lender', 'notary')
    """

    shares_weights: ClassVar[bool] = True

    def __init__(self, dealer: str | None = None) -> None:
        self._dealer = dealer

    def ring(self, parties: int) -> Ring:
        # Each party's summand is uniformly random, so it has no bound of its own.
        return Ring(64, OUTPUT_BITS, parties=1)

    def dealer(self, label_party: str) -> str:
        """Return the name of the dealer."""
        return self._dealer or label_party

    def third_party(self, label_party: str) -> str | None:
        dealer = self.dealer(label_party)
        return None if dealer == label_party else dealer

    def refuse(self, agreed: Agreed) -> None:
        super().refuse(agreed)
        _check_dealer(self.dealer(agreed.label_party), agreed.label_party, agreed.feature_parties)
        check_training(agreed.train)
        if hooks := uses(defenses.make(agreed.defense), *_AT_FEATURE_PARTIES):
            raise ExposedCutError(
                "this defense needs a value that no feature party has: its bottom, its cut or its "
                "gradient",
                got=f"defense = '{agreed.defense}' ({', '.join(hooks)})",
                want="a defense of labels, of gradients at the label party, or of the top",
            )

    def promise(self, agreed: Agreed) -> str:
        label_party, reach = agreed.label_party, self.ring_of(agreed).reach
        rounded = f"inputs rounded to 2^-{INPUT_BITS + 1}, sums within {reach / 2:.5g}"
        dealer, others = self.dealer(label_party), "a feature party"
        if dealer != label_party:
            others = f"{label_party} or {others}"
        what = "the outputs" if len(agreed.feature_parties) == 1 else "the sum"
        return (
            f"{label_party} learns {what} alone and no party has first-layer weights, unless "
            f"{dealer}, which deals, colludes with {others}, or both holders of a layer's shares "
            f"collude; {rounded}"
        )

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        label, order = terms.label_party, tuple(terms.feature_parties)
        dealer = rules.dealer(terms)
        # Owner, partner and dealer must all know the number of columns of a layer.
        for name in order:
            for observer in (label, dealer or partner_of(name, order)):
                yield Revealed(observer, "number of columns", name, SETUP, 1, 1)
        what = "outputs of the first layers"
        of, what = (order[0], what) if len(order) == 1 else ("all", f"sum of the {what}")
        for phase, times, rows in happened:
            yield Revealed(label, what, of, phase, times, rows * terms.parties[order[0]].width)
            if dealer is not None:
                yield Revealed(dealer, "rows of an exchange", "all", phase, times, times)

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Any] | None,
    ) -> Limits:
        if party == rules.dealer(terms):
            return _dealing_limits(terms, rows, layers)
        up = {Kind.PROTOCOL: max(OFFER_BYTES, COLUMNS_BYTES)}
        down = {Kind.PROTOCOL: max(offers_bytes(terms), KEY_BYTES + COLUMNS_BYTES)}
        if layers is None:
            return up, down
        axes: LayerAxes = layers[party]
        for opening, kind in ((Kind.OPENING, Kind.CUT), (Kind.QUERY_OPENING, Kind.QUERY)):
            up[opening] = axes.opened_bytes(rows[kind])
            up[kind] = products_bytes([axes.width], rows[kind])
            down[opening] = axes.relayed_bytes(rows[kind])
        return up, down | {Kind.GRAD: axes.gradient_bytes(rows[Kind.CUT])}

    def layers(
        self, columns: Mapping[str, int], width: int, label_party: str
    ) -> Mapping[str, LayerAxes]:
        if self.third_party(label_party) is not None:
            return {name: LayerAxes(own, width) for name, own in columns.items()}
        order = tuple(columns)
        return {
            name: LayerAxes(own, width, columns[owner_of(name, order)])
            for name, own in columns.items()
        }

    def helper_bytes(self, layers: Sequence[Any], rows: int, trains: bool) -> int:
        return bytes_to_deal(layers, rows, trains)

    def label_codec(self, party: str, terms: Terms, secret: Secret) -> Codec:
        held = None if rules.dealer(terms) is None else Partner(party, secret, party)
        return SharedGradient(party, terms.train.learning_rate, held)

    def feature_round(
        self, party: str, bottom: nn.Module, columns: int, terms: Terms, own: Own, link: Link
    ) -> FeatureRound:
        _refuse_adversary(party, own.adversary)
        _require_linear(bottom, party, columns, terms.parties[party].width)
        width = terms.parties[party].width
        multiply_on(Compute(own.device).device)
        return ShareHolder(party, columns, width, link, own.secret, rules.dealer(terms))

    def aggregator(
        self,
        terms: Terms,
        ends: Mapping[str, LabelEnd],
        links: Mapping[str, Link],
        ledger: Ledger,
        stopping: EarlyStopping,
    ) -> CutAggregator:
        ring = self.ring_of(terms)
        multiply_on(next(iter(ends.values())).device)
        if (dealer := rules.dealer(terms)) is None:
            return DealtSum(ends, ring, ledger, stopping)
        return PartnerSum(ends, ring, ledger, stopping, dealer, links[dealer])

    def helper_round(self, terms: Terms, link: Link) -> HelperRound:
        dealer = rules.dealer(terms)
        assert dealer is not None, "a third party deals"
        owners = {name: terms.parties[name].width for name in terms.feature_parties}
        most_rows = max(terms.train.batch_size, QUERY_ROWS)
        return DealerEnd(dealer, owners, link, most_rows)

    def offer(self, end: FeatureRound | HelperRound, keys: Agreement) -> None:
        super().offer(end, keys)
        assert isinstance(end, ShareHolder | DealerEnd), "every party here has a role"
        end.introduce()

    def _begin(
        self, end: FeatureRound | HelperRound, keys: Mapping[str, bytes], terms: Terms
    ) -> None:
        if isinstance(end, ShareHolder):
            end.begin(tuple(terms.feature_parties), keys)
        elif isinstance(end, DealerEnd):
            end.begin(keys)

    def _refuse_alone(self, agreed: Agreed) -> None:
        dealer = self.dealer(agreed.label_party)
        if len(agreed.feature_parties) < 2 and dealer == agreed.label_party:
            raise ExposedCutError(
                "one feature party has no partner to share its first layer with: the label party "
                "deals, and a dealer that also holds a share could undo every mask",
                got=f"1 feature party, and the label party '{dealer}' deals",
                want="2 feature parties or more",
                fix="secure = 'beaver:dealer=NAME' with a third party that only deals; or secure = "
                "'none'",
            )


# Pairs of owner and partner, and the messages that feature parties seal for each other.


def partner_of(party: str, order: Sequence[str]) -> str:
    """Return the partner of a party: the next party, which holds the other share of its layer.

    >>> partner_of("shop", ("bank", "shop"))
    'bank'
    """
    return order[(order.index(party) + 1) % len(order)]


def owner_of(party: str, order: Sequence[str]) -> str:
    """Return the owner of the layer whose other share `party` holds.

    >>> owner_of("bank", ("bank", "shop", "clinic"))
    'clinic'
    """
    return order[order.index(party) - 1]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The neighbours of a feature party: its layer's partner, and the owner whose partner it is.

    With two parties the other party is both neighbours: messages of both layers in one direction
    then have numbers of one sequence.
    """

    partner: str
    owner: str
    seals: SealedPairs[Payload, bytes]


def add_masks(masks: PairwiseMasks, elements: Tensor, purpose: str, step: int) -> None:
    """Add the masks of a party, summed over all its pairs, to ring elements, in place.

    Args:
        masks: the party's masks.
        elements: int64, contiguous, of any shape.
        purpose: purpose of the masks, from which they are derived together with the step.
        step: number of the training step or query.

    Raises:
        ReusedPadError: masks for this step, or for a later one, were already used.
    """
    flat = elements.view(-1).numpy().view("<u8")
    flat += masks.elements(len(flat), flat.dtype, purpose, step)


# A feature party owns its layer. If the label party deals, a feature party is also the partner of
# another feature party's layer.


@dataclass(slots=True)
class _Pending:
    """A step that is not finished, with its inputs as ring elements, axes (rows, columns)."""

    step: int
    trains: bool
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A party's state in one attempt at the session: its role as owner, its masks and its seals."""

    owner: Owner
    masks: PairwiseMasks
    near: Neighbours | None


class ShareHolder:
    """A feature party's endpoint if layers are shared; it replaces `FeatureEnd`.

    Args:
        party: name of the party, for error messages.
        columns: number of input columns.
        width: the width of every layer's outputs, on which the parties agreed.
        link: the stream to the label party.
        secret: the party's own secret, from which its first shares are drawn.
        dealer: name of a third party that deals; None if the label party deals, so that this party
            is also the partner of another party's layer.
    """

    in_flight = 1

    def __init__(
        self,
        party: str,
        columns: int,
        width: int,
        link: Link,
        secret: Secret,
        dealer: str | None = None,
    ) -> None:
        self.party = party
        self.width = width
        self.link = link
        self.columns = columns + 1
        self._dealer = dealer
        self._own = first_weights(self.columns, width, secret, party)
        self._other = Partner("", secret, "of another") if dealer is None else None
        self._attempt: _Attempt | None = None
        self._pending: _Pending | None = None

    def introduce(self) -> None:
        """Announce the number of columns of this party's layer before the dealer begins to deal."""
        self.link.send(Frame(Kind.PROTOCOL, 1, self.columns.to_bytes(COLUMNS_BYTES, "little")))

    def begin(self, order: Sequence[str], keys: Mapping[str, bytes]) -> None:
        """Begin a new attempt at the session with new keys.

        If the label party deals, it also sends the key of this party's stream, and the number of
        columns of the layer whose partner this party is.

        Args:
            order: all feature parties, in merge order.
            keys: key of each pair of parties that includes this party; if a third party deals, also
                the key of the pair with the dealer.

        Raises:
            TruncatedFrameError: the dealer's message has the wrong length.
            ProtocolError: the number of columns is invalid, or another message arrived than
                expected.
            RunFolderError: the saved shares belong to other layers.
        """
        masks, near = PairwiseMasks(self.party, order, keys), None
        if self._other is None:
            assert self._dealer is not None, "a third party deals"
            stream = PadStream(keys[self._dealer])
        else:
            deal = expect(self.link, Kind.PROTOCOL, 1, _LABEL_PARTY).payload
            key, named = split_payload(deal, [KEY_BYTES, COLUMNS_BYTES], "deal")
            columns = read_columns(named, self.width, _LABEL_PARTY)
            owner, partner = owner_of(self.party, order), partner_of(self.party, order)
            stream = PadStream(bytes(key))
            near = Neighbours(partner, owner, pair_seals(self.party, keys))
            self._other.begin(stream, columns, self.width, owner)
        self._attempt = _Attempt(Owner(stream), masks, near)
        self._pending = None

    @property
    def layers(self) -> LayerAxes:
        """Axes of the layers of which this party has a share, after the start of an attempt."""
        other = 0 if self._other is None else self._other.shape[0]
        return LayerAxes(self.columns, self.width, other)

    def fit(self, inputs: Callable[[], Tensor]) -> None:
        """Ignore the training inputs, because this endpoint has no bottom model to fit."""

    @property
    def awaiting(self) -> int:
        """Number of training steps whose gradients have not arrived yet."""
        return 0 if self._pending is None or not self._pending.trains else 1

    def send_cut(self, inputs: Tensor, step: int, rows: np.ndarray | None = None) -> None:
        """Send a masked training batch of axes (rows, ...); `answer` continues the training step.

        Raises:
            RingRangeError, NonFiniteError: the inputs cannot be encoded; nothing was sent.
            ReusedPadError: values of this step, or of a later step, were already opened in this
                attempt.
            ProtocolError: the parties have not agreed on keys.
        """
        self._open(inputs, step, trains=True)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Send masked rows for an evaluation or prediction, in the way of `send_cut`."""
        self._open(inputs, step, trains=False)

    def answer(self, step: int) -> None:
        """Receive the openings for this party; send this party's share of the outputs.

        Raises:
            ProtocolError, FrameError, AuthenticationError: the received frame was wrong; nothing
                was sent.
        """
        attempt, pending = self._begun(), self._under_way()
        payload = expect(self.link, _opening(pending.trains), step, _LABEL_PARTY).payload
        rows, weights = len(pending.inputs), (self.columns, self.width)
        where, total = f"step {step} of party '{self.party}'", None
        if self._other is None or attempt.near is None:
            (masked,) = elements_of(payload, [weights], where)
        else:
            near, opened, outputs = attempt.near, (rows, self._other.shape[0]), (rows, self.width)
            sizes = [size_of(opened) + TAG_BYTES, size_of(weights) + TAG_BYTES, size_of(outputs)]
            sealed_inputs, sealed_weights, dealt = split_payload(payload, sizes, where)
            from_owner = near.seals.opened(near.owner, sealed_inputs, _about("inputs", step))
            from_partner = near.seals.opened(near.partner, sealed_weights, _about("weights", step))
            (inputs,) = elements_of(from_owner, [opened], where)
            (masked,) = elements_of(from_partner, [weights], where)
            (products,) = elements_of(dealt, [outputs], where)
            total = self._other.outputs(inputs, products, step)
        own = attempt.owner.outputs(pending.inputs, self._own, masked, step)
        total = own if total is None else own + total
        add_masks(attempt.masks, total, TRAINING if pending.trains else QUERY, step)
        self.link.send(Frame(Kind.CUT if pending.trains else Kind.QUERY, step, pack([total])))

    def take_gradient(self) -> None:
        """Receive this party's share of the gradient, and update its shares of the weights by it.

        Raises:
            ProtocolError, FrameError: the frame was wrong; the shares are unchanged.
        """
        attempt, pending = self._begun(), self._under_way()
        step, shapes = pending.step, [(len(pending.inputs), self.width)]
        shapes += [] if self._other is None else [self._other.shape]
        payload = expect(self.link, Kind.GRAD, step, _LABEL_PARTY).payload
        shared, *dealt = elements_of(payload, shapes, f"gradient of step {step}")
        change = attempt.owner.change(pending.inputs, shared, step)
        if self._other is not None:
            self._other.move(self._other.change(dealt[0], step))
        self._own = self._own - change
        self._pending = None

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has received the query, and return its reply."""
        self._pending = None
        return bytes(expect(self.link, Kind.ACK, step, _LABEL_PARTY).payload)

    def query_cut(self, inputs: Tensor) -> Tensor:
        """Refuse, because in this mode no party has the cut-layer activations of a single party.

        Raises:
            ExposedCutError: always.
        """
        raise shared_bottom_error(self.party)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this party's share of its own layer.

        The result also has the share of the layer whose partner it is, if there is one.
        """
        other = None if self._other is None else self._other.share
        return {"own": self._own} | ({} if other is None else {"other": other})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            RunFolderError: the state has shares of another layer, or has no shares.
        """
        own, other = state.get("own"), state.get("other")
        if own is None or own.shape != self._own.shape:
            raise RunFolderError(
                "these tensors are no shares of this party's first layer",
                got="none" if own is None else f"{len(own)} columns",
                want=f"{len(self._own)} columns, as secure = 'beaver' keeps them",
            )
        self._own = own.clone()
        if self._other is not None:
            self._other.share = None if other is None else other.clone()

    def training_state(self) -> dict[str, Any]:
        """Return the state for an exact resume of the training, after all steps have ended."""
        return {"state": self.state_dict()}

    def load_training_state(self, saved: Mapping[str, Any], batch: Callable[[int], Tensor]) -> None:
        """Restore a state that `training_state` returned."""
        self._pending = None
        self.load_state_dict(saved["state"])

    def _open(self, inputs: Tensor, step: int, trains: bool) -> None:
        """Send the masked inputs, and store the step until its answer arrives."""
        attempt = self._begun()
        elements = encode_inputs(inputs, self.party)
        opened: Payload = pack([attempt.owner.opened(elements, step)])
        if self._other is not None and (near := attempt.near) is not None:
            weights = pack([self._other.opened(step)])
            opened = near.seals.sealed(near.partner, opened, _about("inputs", step))
            opened += near.seals.sealed(near.owner, weights, _about("weights", step))
        self._pending = _Pending(step, trains, elements)
        self.link.send(Frame(_opening(trains), step, opened))

    def _begun(self) -> _Attempt:
        if self._attempt is None:
            raise ProtocolError(
                f"party '{self.party}' has no keys to mask its numbers with",
                want="an agreement between the feature parties before the first exchange",
            )
        return self._attempt

    def _under_way(self) -> _Pending:
        assert self._pending is not None, "nothing was opened"
        return self._pending


# The label party knows the gradient in plaintext. The label party is either the dealer, or the
# partner of every layer.


class SharedGradient(Uncompressed):
    """Replaces the label party's codec for one feature party; it sends a gradient as shares.

    Args:
        party: name of the party that owns the layer.
        learning_rate: learning rate; the gradient is multiplied by it before it is shared.
        held: the label party's share of this layer, if the label party is its partner; it is saved
            with the label party's weights.
    """

    on_card: ClassVar[bool] = False

    def __init__(self, party: str, learning_rate: float, held: Partner | None = None) -> None:
        self.held = held
        #: Function that the attempt sets: from the gradient as ring elements, axes (rows, width),
        #: and the step, it makes the payload.
        self.share: Callable[[Tensor, int], Payload] | None = None
        self._party = party
        self._learning_rate = learning_rate

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        """Encode a party's share of the gradient.

        The payload also has the update for the layer whose partner the party is.

        Raises:
            RingRangeError, NonFiniteError: the gradient cannot be encoded; nothing is sent.
            ReusedPadError: the gradient of this step was already shared.
            ProtocolError, FrameError: a third party that deals sent a wrong message; no gradient is
                sent.
        """
        assert self.share is not None, "no exchange is in progress"
        elements = encode_gradient(grad, self._learning_rate, self._party)
        return self.share(elements, context.step)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the label party's share of the layer, as soon as its axes are known."""
        share = None if self.held is None else self.held.share
        return {} if share is None else {"share": share}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            RunFolderError: a share that the label party needs is missing.
        """
        if self.held is None:
            return
        if (share := state.get("share")) is None:
            raise RunFolderError(
                f"the label party has no share of the first layer of party '{self._party}'",
                want="weights of a training in which a third party dealt",
            )
        self.held.share = share.clone()


class LayerSum(SummedCuts, ABC):
    """The label party's endpoints, which receive the outputs of shared layers as one sum.

    Args:
        ends: endpoints by feature party, in merge order; the codec of each endpoint is a
            `SharedGradient`.
        ring: ring of the outputs' shares.
        ledger, stopping: see `CutAggregator`.
    """

    def relay(self, exchange: Exchange) -> None:
        started = time.perf_counter()
        self._relay(exchange.step, len(exchange.rows), exchange.trains)
        self._waited_for_all(exchange, started)

    @abstractmethod
    def _relay(self, step: int, rows: int, trains: bool) -> None:
        """Send each party the opened values from which it computes its share of the outputs."""

    def _sum(self, exchange: Exchange, own: Sequence[Payload] = ()) -> Tensor:
        total = super()._sum(exchange, own)
        check_outputs(total, exchange.step)
        return total


class DealtSum(LayerSum):
    """Sums outputs if the label party deals; it then also relays sealed openings."""

    def begin(self) -> Mapping[str, int]:
        """Draw keys, and send each party its key.

        The message also has the number of columns of the layer whose partner the party is.

        Raises:
            ProtocolError, FrameError: a party sent another message than its number of columns.
            LostPeerError: a party disconnected.
        """
        super().begin()
        order = tuple(self.ends)
        keys = {name: secrets.token_bytes(KEY_BYTES) for name in order}
        columns = {name: columns_of(end) for name, end in self.ends.items()}
        self._dealers = {}
        for name, end in self.ends.items():
            streams = PadStream(keys[name]), PadStream(keys[partner_of(name, order)])
            self._dealers[name] = Dealer(*streams, columns[name], end.width)
            other = columns[owner_of(name, order)].to_bytes(COLUMNS_BYTES, "little")
            end.link.send(Frame(Kind.PROTOCOL, 1, keys[name] + other))
        return columns

    def _relay(self, step: int, rows: int, trains: bool) -> None:
        """Relay the parties' openings to each other; add the dealt products for the receiver.

        Raises:
            ProtocolError, FrameError: a party sent an unexpected message.
            ReusedPadError: values of this step, or of a later step, were already dealt in this
                attempt.
        """
        dealt = {name: pack([dealer.deal(rows, step)]) for name, dealer in self._dealers.items()}
        kind, order = _opening(trains), tuple(self.ends)
        opened = {name: self._opened(name, kind, step, rows) for name in order}
        for name, end in self.ends.items():
            owner, partner = owner_of(name, order), partner_of(name, order)
            inputs, weights = opened[owner][0], opened[partner][1]
            end.link.send(Frame(kind, step, b"".join([inputs, weights, dealt[owner]])))
        if trains:  # the parties compute their outputs at the same time
            for name, end in self.ends.items():
                other = self._dealers[owner_of(name, order)].deal_update(step)
                _codec(end).share = self._sharing(name, other)

    def _sharing(self, name: str, other: Tensor) -> Callable[[Tensor, int], Payload]:
        """Return a function that makes G - R and the weight update for a party.

        The update is for the layer whose partner the party is.
        """
        dealer = self._dealers[name]
        return lambda gradient, step: pack([dealer.share_gradient(gradient, step), other])

    def _opened(self, name: str, kind: Kind, step: int, rows: int) -> list[memoryview]:
        """Receive the two sealed openings of a party.

        The first opening has the party's masked inputs; the second has its masked share of the
        layer whose partner it is.
        """
        other = self._dealers[owner_of(name, tuple(self.ends))]
        sizes = [
            size_of((rows, self._dealers[name].columns)) + TAG_BYTES,
            size_of((other.columns, other.width)) + TAG_BYTES,
        ]
        payload = self.ends[name].take(kind, step).payload
        return split_payload(payload, sizes, f"step {step} of party '{name}'")


class PartnerSum(LayerSum):
    """Sums outputs if a third party deals: the label party is then the partner of every layer.

    The label party sees inputs only under masks that it does not know. The label party knows the
    gradient, so it computes G - R itself.

    Args:
        ends: endpoints by feature party, in merge order; the codec of each endpoint has a
            `Partner`.
        ring: ring of the outputs' shares.
        ledger, stopping: see `CutAggregator`.
        dealer: name of the third party, which deals.
        link: stream to the dealer.
    """

    def __init__(
        self,
        ends: Mapping[str, LabelEnd],
        ring: Ring,
        ledger: Ledger,
        stopping: EarlyStopping,
        dealer: str,
        link: Link,
    ) -> None:
        super().__init__(ends, ring, ledger, stopping)
        self._dealer = dealer
        self._link = link

    @property
    def helpers(self) -> Sequence[Link]:
        return (self._link,)

    def begin(self) -> Mapping[str, int]:
        """Receive this attempt's keys from the dealer; send the dealer the numbers of columns.

        Raises:
            ProtocolError, FrameError: a party sent an unexpected message.
            LostPeerError: a party disconnected.
            RunFolderError: a saved share belongs to another layer.
        """
        super().begin()
        columns = {name: columns_of(end) for name, end in self.ends.items()}
        keys = self._take(Kind.PROTOCOL, 1)
        parts = split_payload(keys, [KEY_BYTES] * len(columns), f"keys of party '{self._dealer}'")
        for (name, end), key in zip(self.ends.items(), parts, strict=True):
            _held(end).begin(PadStream(bytes(key)), columns[name], end.width)
        named = [one.to_bytes(COLUMNS_BYTES, "little") for one in columns.values()]
        self._link.send(Frame(Kind.PROTOCOL, 1, b"".join(named)))
        return columns

    def _offers(self) -> dict[str, Payload]:
        return super()._offers() | {self._dealer: self._take(Kind.PROTOCOL, 0)}

    def _relay(self, step: int, rows: int, trains: bool) -> None:
        """Request this step from the dealer, and open masked shares of weights to their owners.

        Raises:
            ReusedPadError: values of this step, or of a later step, were already opened in this
                attempt.
        """
        kind = _opening(trains)
        self._link.send(Frame(kind, step, rows.to_bytes(ROWS_BYTES, "little")))
        for end in self.ends.values():
            end.link.send(Frame(kind, step, pack([_held(end).opened(step)])))

    def _sum(self, exchange: Exchange, own: Sequence[Payload] = ()) -> Tensor:
        step, rows, trains = exchange.step, len(exchange.rows), exchange.trains
        total = super()._sum(exchange, [*own, self._outputs(step, rows, trains)])
        if trains:

            @cache
            def updates() -> dict[str, Tensor]:  # the dealer deals this while the top model runs
                return self._dealt(Kind.GRAD, step, {n: _held(e).shape for n, e in ends.items()})

            ends = self.ends
            for name, end in ends.items():
                _codec(end).share = self._sharing(name, _held(end), updates)
        return total

    @staticmethod
    def _sharing(
        name: str, held: Partner, updates: Callable[[], Mapping[str, Tensor]]
    ) -> Callable[[Tensor, int], Payload]:
        """Return a function that makes G - R for the owner.

        The function also updates the label party's own share of the weights.
        """

        def share(gradient: Tensor, step: int) -> Payload:
            dealt = updates()[name]
            shared = held.share_gradient(gradient, step)
            held.move(held.change(dealt, step))
            return pack([shared])

        return share

    def _outputs(self, step: int, rows: int, trains: bool) -> Payload:
        """Return the label party's own share of the sum of outputs."""
        shapes = {name: (rows, end.width) for name, end in self.ends.items()}
        dealt = self._dealt(_opening(trains), step, shapes)
        shares = []
        for name, end in self.ends.items():
            held, where = _held(end), f"step {step} of party '{end.party}'"
            payload = end.take(_opening(trains), step).payload
            (inputs,) = elements_of(payload, [(rows, held.shape[0])], where)
            shares.append(held.outputs(inputs, dealt[name], step))
        return pack([sum(shares[1:], start=shares[0])])

    def _dealt(
        self, kind: Kind, step: int, shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Receive the dealer's products for all layers.

        The dealer sends U V - T for each layer, or U^T R - C in a GRAD frame.

        Raises:
            ProtocolError, FrameError: the dealer sent another message than expected.
        """
        where = f"step {step} of party '{self._dealer}'"
        parts = elements_of(self._take(kind, step), list(shapes.values()), where)
        return dict(zip(shapes, parts, strict=True))

    def _take(self, kind: Kind, step: int) -> Payload:
        """Wait for the dealer's frame of this kind and step; return its payload."""
        return expect(self._link, kind, step, f"party '{self._dealer}'").payload


def columns_of(end: LabelEnd) -> int:
    """Receive the number of columns that a party announces; it includes the column of ones.

    Raises:
        ProtocolError: the party's announcement is malformed, or the announced layer is too large to
            be shared.
    """
    told = end.take(Kind.PROTOCOL, 1).payload
    return read_columns(told, end.width, f"party '{end.party}'")


def _codec(end: LabelEnd) -> SharedGradient:
    assert isinstance(end.codec, SharedGradient), "gradients leave as shares"
    return end.codec


def _held(end: LabelEnd) -> Partner:
    held = _codec(end).held
    assert held is not None, "the label party has a share of this layer"
    return held


# A third party that deals and has no data.


class DealerEnd:
    """The dealer's endpoint of its stream to the label party; it answers requests for steps.

    For each layer, the dealer draws a key for the label party's stream. The key of each owner's
    stream is the key on which the dealer and the owner agreed. The label party relayed the messages
    of this agreement, and does not know the key.

    Args:
        party: name of the dealer, for error messages.
        owners: the feature parties in merge order, each with the width of its layer.
        link: the stream to the label party.
        most_rows: number of rows of the largest step on which the parties agreed.
    """

    def __init__(
        self, party: str, owners: Mapping[str, int], link: Link, most_rows: int = LIMIT_BYTES
    ) -> None:
        self.party = party
        self._most_rows = most_rows
        self.link = link
        self._owners = owners
        self._keys: Sequence[bytes] = ()
        self._dealers: list[Dealer] = []

    def introduce(self) -> None:
        """Draw keys for a new attempt, and send the label party the keys of its own key streams."""
        self._dealers = []
        self._keys = [secrets.token_bytes(KEY_BYTES) for _ in self._owners]
        self.link.send(Frame(Kind.PROTOCOL, 1, b"".join(self._keys)))

    def begin(self, keys: Mapping[str, bytes]) -> None:
        """Begin to deal for layers whose numbers of columns the label party announces.

        Args:
            keys: for each owner, the key on which the dealer and the owner agreed.

        Raises:
            TruncatedFrameError: the announcement has the wrong length.
            ProtocolError: the number of columns is invalid, or the dealer drew no keys for this
                attempt.
        """
        named = expect(self.link, Kind.PROTOCOL, 1, _LABEL_PARTY).payload
        parts = split_payload(named, [COLUMNS_BYTES] * len(self._owners), "columns of the layers")
        drawn, self._keys = self._keys, ()
        if len(drawn) != len(parts):
            raise ProtocolError(
                "the label party announced the numbers of columns twice", fix="begin a new attempt"
            )
        self._dealers, dealers = [], []
        for (name, width), key, part in zip(self._owners.items(), drawn, parts, strict=True):
            columns = read_columns(part, width, _LABEL_PARTY)
            dealers.append(Dealer(PadStream(keys[name]), PadStream(key), columns, width))
        self._dealers = dealers

    @property
    def layers(self) -> Mapping[str, Layers]:
        """The layers for which this party deals, after the start of an attempt."""
        dealers = zip(self._owners, self._dealers, strict=True)
        return {name: LayerAxes(one.columns, one.width) for name, one in dealers}

    def serve(self) -> bool:
        """Deal for the next requested step; return False when the session is over."""
        return self.deal().kind is not Kind.DONE

    def deal(self) -> Frame:
        """Wait for a request, and answer it if it is for a step; return the request's frame.

        Raises:
            ProtocolError, FrameError: the request was invalid; nothing was dealt.
            ReusedPadError: values of this step, or of a later step, were already dealt in this
                attempt.
        """
        frame = self.link.receive()
        if frame.kind is Kind.DONE:
            return frame
        asks = frame.kind in (Kind.OPENING, Kind.QUERY_OPENING)
        if not asks or frame.peer != 0 or not self._dealers:
            raise ProtocolError(
                "the label party sent the dealer an unexpected message",
                got=frame.kind.name,
                want="rows of an exchange, after keys were agreed on, or DONE",
            )
        rows, step = self._rows(frame), frame.step
        products = [one.deal(rows, step) for one in self._dealers]
        self.link.send(Frame(frame.kind, step, pack(products)))
        if frame.kind is Kind.OPENING:  # the other parties compute their outputs meanwhile
            updates = [one.deal_update(step) for one in self._dealers]
            self.link.send(Frame(Kind.GRAD, step, pack(updates)))
        return frame

    def _rows(self, frame: Frame) -> int:
        """Return the number of rows in a request; refuse more rows than were agreed on."""
        (part,) = split_payload(frame.payload, [ROWS_BYTES], f"rows of step {frame.step}")
        rows = int.from_bytes(part, "little")
        row = max(max(one.columns, one.width) for one in self._dealers)
        if rows > self._most_rows or not 1 <= rows * ELEMENT_BYTES * row <= LIMIT_BYTES:
            raise ProtocolError(
                "the parties agreed on no exchange of this size, or it does not fit into a frame",
                got=f"{rows} rows",
                want=f"1 to {self._most_rows} rows",
            )
        return rows


def _dealing_limits(
    terms: Terms, rows: Mapping[Kind, int], layers: Mapping[str, LayerAxes] | None
) -> Limits:
    """Return the frame limits of a third party that deals: of requests, products and updates."""
    owners = terms.feature_parties
    down = {
        Kind.PROTOCOL: max(offers_bytes(terms), COLUMNS_BYTES * len(owners)),
        Kind.OPENING: ROWS_BYTES,
        Kind.QUERY_OPENING: ROWS_BYTES,
    }
    up = {Kind.PROTOCOL: max(OFFER_BYTES, KEY_BYTES * len(owners))}
    if layers is None:
        return up, down
    widths = [terms.parties[name].width for name in owners]
    up |= {
        Kind.OPENING: products_bytes(widths, rows[Kind.CUT]),
        Kind.QUERY_OPENING: products_bytes(widths, rows[Kind.QUERY]),
        Kind.GRAD: updates_bytes(list(layers.values())),
    }
    return up, down


# Refused settings.


def _refuse_adversary(party: str, adversary: Adversary) -> None:
    """Refuse a dishonest feature party, because it has no plaintext values to tamper with."""
    if adversary is not HONEST:
        raise ExposedCutError(
            f"party '{party}' has no bottom or gradient to tamper with",
            got=type(adversary).__name__,
            want="an honest feature party, or secure = 'none' or 'sum'",
        )


def _require_linear(bottom: nn.Module, party: str, columns: int, width: int) -> None:
    """Refuse a bottom model that is not one linear layer of these axes.

    The weights of the model are ignored.
    """
    layers = [part for part in bottom.modules() if not isinstance(part, nn.Sequential | nn.Flatten)]
    want = "bottom = 'mlp:hidden=none', with all hidden layers in the top model"
    if len(layers) != 1 or not isinstance(layer := layers[0], nn.Linear):
        raise ExposedCutError(
            f"the bottom of party '{party}' is more than one linear layer, which cannot be shared",
            got=", ".join(type(part).__name__ for part in layers[:4]) or "nothing",
            want=want,
        )
    axes = f"{layer.in_features} to {layer.out_features}"
    if axes != f"{columns} to {width}":
        raise ExposedCutError(
            f"the bottom of party '{party}' does not fit its columns and width",
            got=axes,
            want=f"{columns} to {width}",
        )


def _check_dealer(dealer: str, label_party: str, feature_parties: Sequence[str]) -> None:
    if dealer in feature_parties:
        raise ExposedCutError(
            "a dealer that holds a share could undo every mask",
            got=f"dealer '{dealer}', a feature party",
            want=f"dealer={label_party}, the label party, or a third party that has no columns",
        )
    if not re.fullmatch(PARTY_NAME, dealer):
        raise ExposedCutError(
            "no party can have the dealer's name",
            got=f"dealer '{dealer}'",
            want=f"dealer={label_party}, the label party, or the name of a third party",
        )
