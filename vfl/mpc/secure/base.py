"""The base of the modes `sum` and `beaver`, which sum the feature parties' values under masks.

The contract of every mode is `vfl.session.secure_mode.SecureMode`.

They need keys that every pair of feature parties agrees on before the first exchange, refuse what
would show a single cut, and take the sum at the label party.
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

#: Hooks of defenses with which one does more than replace labels before a training.
_BESIDE_LABELS = (
    "wrap_bottom", "fit", "wrap_top", "counts", "batch", "embedding", "local_loss", "logits",
    "targets", "loss", "gradient", "received",
)  # fmt: skip
_FEWER = "codec = 'none'; secure = 'sum:bits=8' sends a quarter of the bytes"


class KeyedMode(SecureMode):
    """A mode whose parties share keys that the label party does not have."""

    needs_keys: bool = True

    def own_keys(
        self, party: PartyFile, terms: Terms, session: str, attempt: int, standing: Standing
    ) -> Agreement:
        """A party's side of an agreement, with its identity key and the keys it has pinned.

        Raises:
            MissingDataError, DataError: one of the files is missing or holds something else.
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
    """A mode in which only the sum of what the feature parties send tells anything."""

    def ring(self, parties: int) -> Ring:
        """The ring in which what so many feature parties send is summed."""
        raise NotImplementedError

    def ring_of(self, agreed: Agreed) -> Ring:
        """The ring for as many feature parties as there are."""
        return self.ring(max(1, len(agreed.feature_parties)))

    def refuse(self, agreed: Agreed) -> None:
        self.ring_of(agreed)
        self._refuse_alone(agreed)
        if agreed.merge != "sum":
            raise ExposedCutError(
                "cuts side by side are seen one by one",
                got=f"merge = '{agreed.merge}'",
                want="merge = 'sum'",
            )
        models.make_merger(agreed.merge).width([one.width for one in agreed.parties.values()])
        _check_codec(agreed.codec)
        if _reads_cuts(defenses.make(agreed.defense)):
            raise ExposedCutError(
                "this defense has a loss of each party's cut, which the label party would have to "
                "see",
                got=f"defense = '{agreed.defense}'",
                want="a defense of inputs, of a party's own cut, of gradients, labels or models",
            )

    def _refuse_alone(self, agreed: Agreed) -> None:
        """Refuse too few feature parties for a sum to hide anything.

        Raises:
            ExposedCutError: with the reason.
        """
        raise NotImplementedError

    def offer(self, end: FeatureRound | HelperRound, keys: Agreement) -> None:
        end.link.send(Frame(Kind.PROTOCOL, 0, keys.offer))

    def accept(self, end: FeatureRound | HelperRound, keys: Agreement, terms: Terms) -> None:
        """Wait for everybody's offers and use the keys that follow from them from now on.

        Raises:
            AuthenticationError: an offer its party has not signed for this attempt; no cut was
                sent.
            ProtocolError, FrameError: the label party sent something else.
        """
        offers = expect(end.link, Kind.PROTOCOL, 0, "the label party").payload
        self._begin(end, keys.keys(offers), terms)

    def _begin(
        self, end: FeatureRound | HelperRound, keys: Mapping[str, bytes], terms: Terms
    ) -> None:
        """Use the keys of each pair a party is in: a new attempt has begun."""
        raise NotImplementedError


def binding_of(terms: Terms, session: str, attempt: int) -> Binding:
    """What the keys of one attempt are bound to."""
    return Binding(session, attempt, terms.digest(), tuple(rules.peers(terms)))


def offers_bytes(terms: Terms) -> int:
    """Everybody's offers of keys, that of a third party included."""
    return OFFER_BYTES * len(rules.peers(terms))


class SummedCuts(CutAggregator):
    """Takes what the feature parties send as one sum, under masks.

    Gradients travel as ever: with a sum every party's gradient is that of the sum.

    Args:
        ends: by party, in merge order.
        ring: of the elements that are summed.
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
        """Wait for everybody's offer of keys and send all of them to everybody; see `keys`.

        Raises:
            ProtocolError: a party sent something else.
            LostPeerError: a party went away.
        """
        offers = self._offers()
        for name, offer in offers.items():
            if len(offer) != OFFER_BYTES:
                raise ProtocolError(
                    f"party '{name}' offered keys of another form",
                    got=f"{len(offer)} bytes",
                    want=f"{OFFER_BYTES} bytes",
                )
        together = b"".join(bytes(offer) for offer in offers.values())
        for link in [*(end.link for end in self.ends.values()), *self.helpers]:
            link.send(Frame(Kind.PROTOCOL, 0, together))
        return {}

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        """The sum, under `SUM`; axes (rows, width), ready to be differentiated in a training.

        Raises:
            ProtocolError, FrameError: nothing was changed by the frames.
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
        """The sum of what the parties send, and of what the label party adds, if anything."""
        kind, rows = Kind.CUT if exchange.trains else Kind.QUERY, len(exchange.rows)
        first = next(iter(self.ends.values()))
        payloads = [self._elements(end, kind, exchange.step, rows) for end in self.ends.values()]
        payloads += own
        return self._ring.decode(payloads, rows, first.width).to(first.device)

    def _elements(self, end: LabelEnd, kind: Kind, step: int, rows: int) -> Payload:
        payload = end.take(kind, step).payload
        try:
            self._ring.check(payload, rows, end.width)
        except TruncatedFrameError as error:  # in a sum nobody could say whose it was
            error.where = f"step {step} of party '{end.party}'"
            raise
        return payload

    def _waited_for_all(self, exchange: Exchange, started: float) -> None:
        """Nobody's frame is worth anything before the last is here."""
        for name in self.ends:
            self._waited(name, exchange, started)


def _reads_cuts(defense: Defense) -> bool:
    members = defense.members if isinstance(defense, Chain) else (defense,)
    return any(member.reads_cuts and uses(member, "loss") for member in members)


def _check_codec(spec: str) -> None:
    codec = compression.make(spec)
    if isinstance(codec, SparseCodec):
        raise ExposedCutError(
            "which values a party sends would tell of its cut, and masks must cover all of them",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )
    if type(codec) is not Uncompressed:
        raise ExposedCutError(
            "masked payloads add up only as numbers of the ring, not as a codec writes them",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )


def check_training(train: TrainSettings) -> None:
    """Only what is linear in the gradient, with public numbers that need no division.

    Raises:
        ExposedCutError: with the reason.
    """
    wanted = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "schedule": "none"}
    wanted |= {"in_flight": 1, "warmup_steps": 0, "clip_norm": 0}
    reasons = {
        "optimizer": "its steps are no linear function of the gradient, which nobody may see",
        "momentum": "a fraction of shared numbers would have to be cut off at every step",
        "weight_decay": "a fraction of shared numbers would have to be cut off at every step",
        "schedule": "the learning rate is a number of the protocol, and stays",
        "warmup_steps": "the learning rate is a number of the protocol, and stays",
        "clip_norm": "the norm of a gradient would be disclosed",
        "in_flight": "weights that wait for several gradients are not built for shares",
    }
    for name, value in wanted.items():
        if (got := getattr(train, name)) != value:
            raise ExposedCutError(
                f"train.{name} cannot be so where weights are shared: {reasons[name]}",
                got=f"train.{name} = {got}",
                want=f"train.{name} = {value}",
            )


def refuse_work_on_cuts(agreed: Agreed, of_labels: bool = False) -> None:
    """Refuse a codec, a defense or another precision where nobody has a cut.

    Args:
        agreed: by the parties.
        of_labels: whether a defense may replace labels before the training.

    Raises:
        ExposedCutError: with the reason.
    """
    reason = "no party has a cut here that it could work on"
    idle = [] if agreed.codec == "none" else ["codec"]
    if agreed.defense != "none" and (
        not of_labels or uses(defenses.make(agreed.defense), *_BESIDE_LABELS)
    ):
        idle.append("defense")
    for name in idle:
        more = ", or a defense of labels, such as 'label_dp:epsilon=2'" if of_labels else ""
        raise ExposedCutError(
            f"a {name} has nothing to do: {reason}",
            got=f"{name} = '{getattr(agreed, name)}'",
            want=f"{name} = 'none'" + (more if name == "defense" else ""),
        )
    if agreed.train.precision != "float32":
        raise ExposedCutError(
            "shares are numbers of a ring, whose precision is that of the mode",
            got=f"train.precision = '{agreed.train.precision}'",
            want="train.precision = 'float32', and bits of the mode",
        )
    if agreed.train.compile:
        raise ExposedCutError(
            "no party has a model here that could be compiled: its weights are shares",
            got="train.compile = true",
            want="train.compile = false",
        )
