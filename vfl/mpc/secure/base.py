"""Base class of the modes `sum` and `beaver`, which sum the feature parties' values under masks.

The interface that every mode implements is `vfl.session.secure_mode.SecureMode`.

Before the first exchange, every pair of feature parties agrees on a key. The modes refuse settings
that would disclose a single party's cut-layer activations ("cut"), and the label party receives
only the sum of all cuts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from vfl import compression, defenses, models
from vfl.compression.none import Uncompressed
from vfl.compression.topk import SparseCodec
from vfl.config import PartyFile, TrainSettings
from vfl.core.errors import (
    ExposedCutError,
    ProtocolError,
    TruncatedFrameError,
)
from vfl.core.frame import Frame, Kind, Payload
from vfl.core.seeds import Secret
from vfl.core.traffic import Ledger
from vfl.defenses import Chain, Defense, uses
from vfl.mpc.secure.keys import OFFER_BYTES, Agreement, Binding
from vfl.mpc.secure.masks import Ring
from vfl.session import rules
from vfl.session.exchange import SUM, CutAggregator, LabelEnd, expect
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.secure_mode import Agreed, FeatureRound, HelperRound, SecureMode
from vfl.session.store.identity import Identity, read_pins
from vfl.session.store.witness import Standing
from vfl.session.terms import Terms

#: Methods of defenses; a defense that implements one of these does more than replace labels before
#: the training.
_BESIDE_LABELS = (
    "wrap_bottom", "fit", "wrap_top", "counts", "batch", "embedding", "local_loss", "logits",
    "targets", "loss", "gradient", "received",
)  # fmt: skip
_FEWER = "codec = 'none'; secure = 'sum:bits=8' sends a quarter of the bytes"


class KeyedMode(SecureMode):
    """A secure mode in which the other parties share keys that the label party does not have."""

    needs_keys: bool = True

    def own_keys(
        self, party: PartyFile, terms: Terms, session: str, attempt: int, standing: Standing
    ) -> Agreement:
        """Return a party's keys for the key agreement.

        The keys are its identity key, and the keys of other parties that it has pinned.

        Raises:
            MissingDataError, DataError: a key file is missing, or has other content than expected.
        """
        others = [name for name in rules.peers(terms) if name != party.party]
        return Agreement(
            party.party,
            Identity.kept_at(party.beside(party.identity.key)),
            read_pins(party.beside(party.identity.peers), others),
            binding_of(terms, session, attempt),
            standing.announce().count,
            standing.admit_count,
        )

    def simulated_keys(
        self, secrets: Mapping[str, Secret], terms: Terms, session: str, attempt: int
    ) -> dict[str, Agreement]:
        own = {
            name: Identity.of_simulation(secrets[name].key("identity"))
            for name in rules.peers(terms)
        }
        pins = {name: identity.public for name, identity in own.items()}
        binding = binding_of(terms, session, attempt)
        return {name: Agreement(name, own[name], pins, binding) for name in rules.peers(terms)}


class SummingMode(KeyedMode):
    """A mode in which the label party learns only the sum of the feature parties' values."""

    def ring(self, parties: int) -> Ring:
        """Return the ring in which the values of this many feature parties are added."""
        raise NotImplementedError

    def ring_of(self, agreed: Agreed) -> Ring:
        """Return the ring for the number of feature parties in the agreed settings."""
        return self.ring(max(1, len(agreed.feature_parties)))

    def refuse(self, agreed: Agreed) -> None:
        self.ring_of(agreed)
        self._refuse_alone(agreed)
        if agreed.merge != "sum":
            raise ExposedCutError(
                "the label party sees each cut if cuts are concatenated",
                got=f"merge = '{agreed.merge}'",
                want="merge = 'sum'",
            )
        models.make_merger(agreed.merge).width([one.width for one in agreed.parties.values()])
        _check_codec(agreed.codec)
        if _reads_cuts(defenses.make(agreed.defense)):
            raise ExposedCutError(
                "this defense needs a loss of each party's cut, but the label party must not see"
                " any cut",
                got=f"defense = '{agreed.defense}'",
                want="a defense of inputs, of a party's own cut, of gradients, labels or models",
            )

    def _refuse_alone(self, agreed: Agreed) -> None:
        """Refuse a number of feature parties with which the sum hides no single cut.

        Raises:
            ExposedCutError: with so few parties the sum would expose a party's cut.
        """
        raise NotImplementedError

    def offer(self, end: FeatureRound | HelperRound, keys: Agreement) -> None:
        end.link.send(Frame(Kind.PROTOCOL, 0, keys.offer))

    def accept(self, end: FeatureRound | HelperRound, keys: Agreement, terms: Terms) -> None:
        """Wait for all parties' key offers; from then on, use the keys that follow from them.

        Raises:
            AuthenticationError: a relayed key offer is not the one that its party signed for this
                attempt; no cut-layer activations were sent in this attempt.
            RolledBackError: the store of another party was restored from an old copy.
            ProtocolError, FrameError: the label party sent an unexpected message.
        """
        offers = expect(end.link, Kind.PROTOCOL, 0, "the label party").payload
        self._begin(end, keys.keys(offers), terms)

    def _begin(
        self, end: FeatureRound | HelperRound, keys: Mapping[str, bytes], terms: Terms
    ) -> None:
        """Begin an attempt with new keys, one for each pair that includes this party."""
        raise NotImplementedError


def binding_of(terms: Terms, session: str, attempt: int) -> Binding:
    """Return the facts to which the keys of one attempt are bound."""
    return Binding(session, attempt, terms.digest(), tuple(rules.peers(terms)))


def offers_bytes(terms: Terms) -> int:
    """Return the size in bytes of all parties' key offers, including that of a third party."""
    return OFFER_BYTES * len(rules.peers(terms))


class SummedCuts(CutAggregator):
    """Receives the feature parties' values as one sum; masks hide the single values.

    Gradients are sent as in any mode: in a sum, the gradient of every party's cut equals the
    gradient of the sum.

    Args:
        ends: the label party's endpoints, by feature party, in merge order.
        ring: ring in which the elements are summed.
        ledger, stopping: see `CutAggregator`.
    """

    def __init__(
        self,
        ends: Mapping[str, LabelEnd],
        ring: Ring,
        ledger: Ledger,
        stopping: EarlyStopping,
    ) -> None:
        super().__init__(ends, ledger, stopping)
        self._ring = ring

    def begin(self) -> Mapping[str, int]:
        """Receive each party's key offer, and send all offers to all parties.

        See the module `keys`.

        Raises:
            ProtocolError: a party sent an unexpected message.
            LostPeerError: a party disconnected.
        """
        offers = self._offers()
        for name, offer in offers.items():
            if len(offer) != OFFER_BYTES:
                raise ProtocolError(
                    f"party '{name}' offered keys of the wrong length",
                    got=f"{len(offer)} bytes",
                    want=f"{OFFER_BYTES} bytes",
                )
        together = b"".join(bytes(offer) for offer in offers.values())
        for link in [*(end.link for end in self.ends.values()), *self.helpers]:
            link.send(Frame(Kind.PROTOCOL, 0, together))
        return {}

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        """Return the sum of all cuts under the key `SUM`; axes (rows, width).

        In a training, the sum records gradients.

        Raises:
            ProtocolError, FrameError: the frames are wrong; the state of this object is unchanged.
        """
        started = time.perf_counter()
        total = self._sum(exchange)
        if exchange.trains:
            total.requires_grad_()
            for end in self.ends.values():
                end.await_gradient(total, exchange.step)
        else:
            for end in self.ends.values():
                self._confirm(end, exchange)
        self._waited_for_all(exchange, started)
        return {SUM: total}

    def _offers(self) -> dict[str, Payload]:
        return {name: end.take(Kind.PROTOCOL, 0).payload for name, end in self.ends.items()}

    def _sum(self, exchange: Exchange, own: Sequence[Payload] = ()) -> Tensor:
        """Return the sum of the parties' values, and of the label party's own value if any."""
        kind, rows = Kind.CUT if exchange.trains else Kind.QUERY, len(exchange.rows)
        first = next(iter(self.ends.values()))
        payloads = [self._elements(end, kind, exchange.step, rows) for end in self.ends.values()]
        payloads += own
        return self._ring.decode(payloads, rows, first.width).to(first.device)

    def _elements(self, end: LabelEnd, kind: Kind, step: int, rows: int) -> Payload:
        payload = end.take(kind, step).payload
        try:
            self._ring.check(payload, rows, end.width)
        # The sum alone does not show which party's payload was wrong.
        except TruncatedFrameError as error:
            error.where = f"step {step} of party '{end.party}'"
            raise
        return payload

    def _waited_for_all(self, exchange: Exchange, started: float) -> None:
        """Record the time of waiting for all parties' frames.

        No frame is usable before all frames have arrived.
        """
        for name in self.ends:
            self._waited(name, exchange, started)


def _reads_cuts(defense: Defense) -> bool:
    members = defense.members if isinstance(defense, Chain) else (defense,)
    return any(member.reads_cuts and uses(member, "loss") for member in members)


def _check_codec(spec: str) -> None:
    codec = compression.make(spec)
    if isinstance(codec, SparseCodec):
        raise ExposedCutError(
            "the choice of values to send would disclose part of a cut; masks cover all values",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )
    if type(codec) is not Uncompressed:
        raise ExposedCutError(
            "masked payloads add up only as ring elements, not in a codec's form",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )


def check_training(train: TrainSettings) -> None:
    """Allow only weight updates that are linear in the gradient.

    The factors in an update must be public, and an update must not divide.

    Raises:
        ExposedCutError: a setting needs an update that is not linear in the gradient.
    """
    wanted = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "schedule": "none"}
    wanted |= {"in_flight": 1, "warmup_steps": 0, "clip_norm": 0}
    reasons = {
        "optimizer": "the optimiser's steps are not linear in the gradient, which no party may see",
        "momentum": "every training step would have to truncate shared numbers",
        "weight_decay": "every training step would have to truncate shared numbers",
        "schedule": "the protocol has one constant learning rate",
        "warmup_steps": "the protocol has one constant learning rate",
        "clip_norm": "the norm of a gradient would be disclosed",
        "in_flight": "shared weights take one gradient at a time",
    }
    for name, value in wanted.items():
        if (got := getattr(train, name)) != value:
            raise ExposedCutError(
                f"train.{name} does not work with shared weights: {reasons[name]}",
                got=f"train.{name} = {got}",
                want=f"train.{name} = {value}",
            )


def refuse_work_on_cuts(agreed: Agreed, of_labels: bool = False) -> None:
    """Refuse settings that a mode cannot apply, because no party has a cut or model in plaintext.

    The settings are a codec, a defense, another precision than float32, and compiled models.

    Args:
        agreed: settings that the parties agreed on.
        of_labels: whether a defense that replaces labels before the training is allowed.

    Raises:
        ExposedCutError: a setting has no effect in this mode.
    """
    reason = "in this mode, no party has a cut in plaintext that it could change"
    idle = [] if agreed.codec == "none" else ["codec"]
    if agreed.defense != "none" and (
        not of_labels or uses(defenses.make(agreed.defense), *_BESIDE_LABELS)
    ):
        idle.append("defense")
    for name in idle:
        more = ", or a defense of labels, such as 'label_dp:epsilon=2'" if of_labels else ""
        raise ExposedCutError(
            f"a {name} has no effect: {reason}",
            got=f"{name} = '{getattr(agreed, name)}'",
            want=f"{name} = 'none'" + (more if name == "defense" else ""),
        )
    if agreed.train.precision != "float32":
        raise ExposedCutError(
            "shares are elements of a ring, and the mode sets their precision",
            got=f"train.precision = '{agreed.train.precision}'",
            want="train.precision = 'float32', and bits of the mode",
        )
    if agreed.train.compile:
        raise ExposedCutError(
            "no party has a model here that could be compiled: its weights are shares",
            got="train.compile = true",
            want="train.compile = false",
        )
