"""``secure = "permuted"``: nobody has a weight, and functions are computed on permuted values.

Two parties with columns hold shares of all inputs, weights and gradients, first layer to last; a
third deals what is random and evaluates functions on values whose order only the two know
(`vfl.mpc.permuted`). The label party is disclosed the outputs, and nobody anything else.

    label party                    P0, P1                        P2
    without columns                the two parties with columns  the label party
    one of the two with columns    the two parties with columns  dealer=NAME, who has no data

The label party has the only streams. What the two others say to each other passes it sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vfl import models
from vfl.config import TrainSettings
from vfl.core.errors import ExposedCutError, WidthError
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets import Split
from vfl.models.mlp import IdentityBottom, MLPBottom
from vfl.mpc.network import Layer
from vfl.mpc.party import Party
from vfl.mpc.ring import ELEMENT_BYTES, multiply_on
from vfl.mpc.rules import P1, P2, Mode, Rules
from vfl.mpc.secure.base import (
    Account,
    KeyedMode,
    check_training,
    offers_bytes,
    refuse_work_on_cuts,
    require_same_rows,
)
from vfl.mpc.secure.description import (
    COLUMNS_BYTES,
    FACTS_BYTES,
    Facts,
    describe,
    take_description,
)
from vfl.mpc.secure.keys import OFFER_BYTES, Agreement, Sealing
from vfl.mpc.secure.relay import SEALED_BYTES, MiddleLinks, OuterLinks
from vfl.mpc.three_party import (
    HOLDERS,
    Rows,
    ThreePartyNetwork,
    first_weights,
    most_frame_bytes,
    targets_of,
    whole_network,
)
from vfl.mpc.trio import Star, make_party
from vfl.privacy import PrivacyStatement
from vfl.session.exchange import Compute, expect
from vfl.session.schedule import Exchange
from vfl.session.secure import (
    EVALUATE,
    SETUP,
    TRAIN,
    Agreed,
    AskedParty,
    Happened,
    Limits,
    LocalStreams,
    OwnRows,
    Revealed,
    WholeNetwork,
)
from vfl.session.terms import Terms

#: A party sends several messages of an operation before it needs an answer, and relays more.
_WINDOW_FRAMES = 32
#: What a holder has at once, in ring elements, of each input, each weight, and each value of the
#: layers in an exchange (resident memory of all three parties, halved; both modes).
_ROW_COPIES, _WEIGHT_COPIES, _EXCHANGE_COPIES = 8, 24, 16
#: How long a thread waits for another one, which may compute a large layer meanwhile.
_LOCAL_S = 600.0
_SPELLINGS = (
    "merge = 'sum' and bottom = 'mlp:hidden=none' at both, which are one linear layer; or merge = "
    "'concat' and bottom = 'identity' at both, where the top gets the columns themselves"
)


@dataclass(frozen=True, slots=True)
class NetworkLayers:
    """The network of a session, whose sizes say how large a frame may be."""

    layers: tuple[Layer, ...]
    parameters: int
    rows: int

    def memory_bytes(self, rows: int) -> int:
        """About what a holder has at once; the factors were measured, and rounded up."""
        inputs = self.layers[0].inputs
        widths = inputs + sum(one.outputs for one in self.layers)
        held = _ROW_COPIES * self.rows * inputs + _WEIGHT_COPIES * self.parameters
        return ELEMENT_BYTES * (held + _EXCHANGE_COPIES * rows * widths)

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Not known before: index lists and dummies depend on the values."""
        return 0


class Permuted(KeyedMode):
    """Nobody has a weight; functions are computed by a third party on permuted values.

    Args:
        mode: "fast", or "thesis", which is chapter 5 as written; see `vfl.mpc.Rules`.
        bits, magnitude_bits, delta_bits, least_permuted, flips: see `vfl.mpc.Rules`.
        dealer: who deals where the label party has columns of its own; a party without data.
        validate: let the label party have the validation rows' outputs after every epoch.

    >>> Permuted(mode="thesis").rules.bits, Permuted(dealer="notary").third_party("bank")
    (23, 'notary')
    """

    shares_weights: ClassVar[bool] = True
    whole_network: ClassVar[bool] = True

    def __init__(
        self,
        mode: Mode = "fast",
        bits: int = 0,
        magnitude_bits: int = 8,
        delta_bits: int = 16,
        least_permuted: int = 32,
        flips: bool | None = None,
        dealer: str | None = None,
        validate: bool = False,
    ) -> None:
        self.rules = Rules(mode, bits, magnitude_bits, delta_bits, least_permuted, flips)
        self._dealer = dealer
        self._validate = validate

    def third_party(self, label_party: str) -> str | None:
        return self._dealer

    def roles(self, agreed: Agreed) -> tuple[str, str, str]:
        """Who plays P0, P1 and P2."""
        one, other = agreed.parties
        return one, other, self._dealer or agreed.label_party

    def refuse(self, agreed: Agreed) -> None:
        _check_roles(agreed, self._dealer)
        _check_bottoms(agreed.merge, agreed.parties)
        check_training(agreed.train)
        refuse_work_on_cuts(agreed)
        if agreed.validation and not self._validate:
            raise ExposedCutError(
                "outputs of every epoch are as many equations for the validation rows' columns",
                got=f"data.validation = {agreed.validation}",
                want="data.validation = 0",
                fix="secure = 'permuted:validate=True' where the label party may have them",
            )

    def promise(self, agreed: Agreed) -> str:
        _, _, helper = self.roles(agreed)
        more = ", those of validation rows after every epoch too" if agreed.validation else ""
        return (
            f"{agreed.label_party} learns the outputs{more}, {helper} sees permuted values before "
            "every function, and no party has a weight, unless two of the three collude or one "
            "does not follow the protocol; statistical, not cryptographic"
        )

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Who learned which sizes; `WholeNetwork.revealed` has what the values themselves tell."""
        for name in self.roles(terms):
            if name != terms.label_party:
                yield Revealed(name, "columns, layers and numbers of rows", "all", SETUP, 1, 1)
        for role in HOLDERS:
            holder = self.roles(terms)[role]
            if holder != terms.label_party:
                yield Revealed(terms.label_party, "number of columns", holder, SETUP, 1, 1)

    def window_frames(self, train: TrainSettings) -> int:
        return _WINDOW_FRAMES

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Any] | None,
    ) -> Limits:
        up = {Kind.PROTOCOL: max(OFFER_BYTES, COLUMNS_BYTES)}
        down = {Kind.PROTOCOL: max(offers_bytes(terms), FACTS_BYTES), Kind.ACK: 1}
        if layers is None:
            return up, down
        network: NetworkLayers = layers[party]
        most = most_frame_bytes(network.layers, max(rows.values()))
        both = {Kind.PROTOCOL: most, Kind.OPENING: most + SEALED_BYTES}
        return both, down | both

    def outer_network(
        self, party: str, terms: Terms, keys: Agreement, stream: Link, rows: OwnRows
    ) -> WholeNetwork:
        multiply_on(Compute(rows.device).device)
        return OuterNetwork(self, party, terms, rows, keys, stream)

    def middle_network(
        self,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        rows: OwnRows,
    ) -> WholeNetwork:
        multiply_on(Compute(rows.device).device)
        return MiddleNetwork(self, terms, rows, attempt, streams, receive_any)

    def local_streams(self, terms: Terms) -> LocalStreams:
        return Star(self.roles(terms), terms.label_party, _LOCAL_S)


class _End:
    """What the ends of all three parties do alike."""

    def __init__(self, mode: Permuted, party: str, terms: Terms, rows: OwnRows) -> None:
        self.party = party
        self._mode, self._terms = mode, terms
        self._roles = mode.roles(terms)
        self._role = self._roles.index(party)
        self._label_role = self._roles.index(terms.label_party)
        self._rows = rows
        self._digest = rows.digest()
        self._account = Account(party, self._roles)
        self._facts: Facts | None = None
        self._network: ThreePartyNetwork | None = None

    @property
    def split(self) -> Split:
        assert self._facts is not None, "an attempt has begun"
        counts = self._facts.rows
        train, validation, test = (
            np.arange(counts.get(phase, 0)) for phase in ("train", "validation", "test")
        )
        if self._terms.mode == "predict":
            test = np.arange(counts.get("predict", 0))
        return Split(train, validation, test)

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        links, facts, session, attempt = self._join()
        party, self._facts = make_party(self._role, links, self._mode.rules), facts
        about = {"terms": self._terms.digest(), "facts": facts.model_dump(mode="json")}
        party.agree(about, session, attempt)
        network = self._network = ThreePartyNetwork(
            party, facts.layers, facts.columns, self._label_role
        )
        if state is None and weights is None:
            holds = self._role in HOLDERS
            network.share_weights(first_weights(facts.layers, self._rows.secret) if holds else None)
        elif state is None and weights is not None:
            network.load_weights(weights)
        own = self._own_rows()
        for phase, count in facts.rows.items():
            network.share_rows(phase, count, own.get(phase), f"{phase} inputs")
        if "train" in facts.rows:
            network.share_targets(facts.rows["train"], self._targets())
        if state is not None:
            self._restore(state)
        self._note(SETUP)

    def train(self, exchange: Exchange) -> None:
        network, rate = self._begun, self._terms.train.learning_rate
        network.train_step(torch.from_numpy(exchange.rows), rate)
        if not any(layer.function for layer in network.layers):
            self._wait_for_the_dealt(network.party)
        self._note(TRAIN)

    @staticmethod
    def _wait_for_the_dealt(party: Party) -> None:
        """P2, which is asked for no function here, would else deal all steps ahead of the others.

        It stands in the middle of their streams, and carries only while it waits.
        """
        if party.role == P1:
            party.channels[P2].send_bytes(b"", party.number, "online")
        elif party.role == P2:
            party.channels[P1].receive_bytes(party.number, 0)

    def outputs(self, exchange: Exchange) -> Tensor | None:
        phase, index = exchange.phase, torch.from_numpy(exchange.rows)
        found = self._begun.outputs(phase, index, f"{phase} outputs")
        self._note(EVALUATE)
        return found

    def weights(self) -> dict[str, Tensor]:
        return {} if self._network is None else self._network.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._begun.load_weights(weights)

    def training_state(self) -> dict[str, Any]:
        return {
            "network": self._begun.state_dict(),
            "inputs": self._digest,
            "revealed": self._account.state(),
        }

    def revealed(self) -> list[Revealed]:
        return self._account.revealed()

    def traffic(self) -> list[dict[str, Any]]:
        return self._account.traffic(self._begun.party)

    def reveals(self, exchange: Exchange) -> bool:
        return False

    def everybody_saved(self, commit: Callable[[], None]) -> None:
        raise AssertionError("nothing is revealed that must not be revealed anew")

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return ()

    @property
    def _begun(self) -> ThreePartyNetwork:
        assert self._network is not None, "an attempt has begun"
        return self._network

    def _join(self) -> tuple[Mapping[int, Link], Facts, str, int]:
        """Links, a description of the network, and which attempt of which session it is."""
        raise NotImplementedError

    def _tell_layers(self, facts: Facts) -> None:
        network = NetworkLayers(facts.layers, facts.parameters, sum(facts.rows.values()))
        self._rows.agreed(
            {name: network for name in self._roles if name != self._terms.label_party}
        )

    def _columns(self) -> int | None:
        if self._role == P2 or self._rows.inputs is None:
            return None
        columns = self._rows.inputs[0].numel()
        asked = self._terms.parties[self.party].width
        if self._terms.merge == "concat" and asked != columns:
            raise WidthError(
                "the rows themselves are as wide as they are",
                where=f"parties.{self.party}.width",
                got=str(asked),
                want=str(columns),
                fix=f"-s parties.{self.party}.width={columns}",
            )
        return columns

    def _phases(self) -> dict[Rows, np.ndarray]:
        """Positions of the rows of each phase of this session."""
        split = self._rows.split
        assert split is not None, "a party with rows"
        if self._terms.mode == "train":
            found: dict[Rows, np.ndarray] = {
                "train": split.train,
                "validation": split.validation,
                "test": split.test,
            }
            return {phase: rows for phase, rows in found.items() if len(rows)}
        return {"test" if self._terms.mode == "evaluate" else "predict": split.test}

    def _own_rows(self) -> dict[Rows, Tensor]:
        if self._role == P2 or self._rows.inputs is None:
            return {}
        inputs = self._rows.inputs.double().flatten(1)
        return {phase: inputs[torch.from_numpy(rows)] for phase, rows in self._phases().items()}

    def _targets(self) -> Tensor | None:
        if self._role != self._label_role or self._terms.mode != "train":
            return None
        assert self._rows.labels is not None, "training needs labels"
        train = torch.from_numpy(self._phases()["train"])
        return targets_of(self._rows.labels[train], self._rows.classes)

    def _restore(self, state: Mapping[str, Any]) -> None:
        require_same_rows(self.party, self._digest, state["inputs"])
        self._begun.load_state_dict(state["network"])
        self._account.restore(state["revealed"], self._begun.party)

    def _note(self, phase: str) -> None:
        """What was learned since the last call belongs to this phase."""
        self._account.note(self._begun.party, phase)


class OuterNetwork(_End):
    """The end of a party with a stream to the label party only: a holder, or a dealer.

    Args:
        mode, party, terms, rows, keys, stream: see `SecureMode.outer_network`.
    """

    def __init__(
        self,
        mode: Permuted,
        party: str,
        terms: Terms,
        rows: OwnRows,
        keys: Agreement,
        stream: Link,
    ) -> None:
        super().__init__(mode, party, terms, rows)
        self._keys, self._stream = keys, stream
        self._links: OuterLinks | None = None

    def send_verdict(self, verdict: bytes, step: int) -> None:
        raise AssertionError("the label party alone judges")

    def receive_verdict(self) -> bytes:
        assert self._links is not None, "an attempt has begun"
        return bytes(self._links.receive(Kind.ACK).payload)

    def end(self, report: Frame) -> list[Frame]:
        assert self._links is not None, "an attempt has begun"
        self._stream.send(report)
        return [self._links.receive(Kind.DONE)]

    def _join(self) -> tuple[Mapping[int, Link], Facts, str, int]:
        self._stream.send(Frame(Kind.PROTOCOL, 0, self._keys.offer))
        offers = expect(self._stream, Kind.PROTOCOL, 0, "the label party").payload
        ((other, key),) = self._keys.keys(offers).items()
        columns = self._columns()
        facts = take_description(self._stream, columns)
        own = None if columns is None else (columns, self._counts())
        facts.check(own, self._role)
        self._tell_layers(facts)
        there, back = Sealing(key, self.party, other), Sealing(key, other, self.party)
        self._links = OuterLinks(
            self._stream,
            self._label_role,
            self._roles.index(other),
            there,
            back,
            also=[Kind.ACK, Kind.DONE],
        )
        binding = self._keys.binding
        return self._links.links, facts, binding.session, binding.attempt

    def _counts(self) -> dict[Rows, int]:
        return {phase: len(rows) for phase, rows in self._phases().items()}


class MiddleNetwork(_End):
    """The end of the label party, which carries what the two others say to each other.

    Args:
        mode, terms, rows, attempt, streams, receive_any: see `SecureMode.middle_network`.
    """

    def __init__(
        self,
        mode: Permuted,
        terms: Terms,
        rows: OwnRows,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
    ) -> None:
        super().__init__(mode, terms.label_party, terms, rows)
        self._attempt = attempt
        self._streams = streams
        roles = {name: role for role, name in enumerate(self._roles)}
        self._links = MiddleLinks(roles, streams, receive_any, also=[Kind.DONE])
        # The top is refused before anybody is asked; where rows stand side by side, the widths
        # that all parties agreed on are their columns.
        self._layers((terms.merged_width, 0))

    def send_verdict(self, verdict: bytes, step: int) -> None:
        for stream in self._streams.values():
            stream.send(Frame(Kind.ACK, step, verdict))

    def receive_verdict(self) -> bytes:
        raise AssertionError("the label party alone judges")

    def end(self, report: Frame) -> list[Frame]:
        last = [self._links.receive(name, Kind.DONE) for name in self._terms.peers]
        for stream in self._streams.values():
            stream.send(report)
        return last

    def _join(self) -> tuple[Mapping[int, Link], Facts, str, int]:
        links = self._links.links
        offers = b"".join(
            expect(links[self._roles.index(name)], Kind.PROTOCOL, 0, f"party '{name}'").payload
            for name in self._terms.peers
        )
        for stream in self._streams.values():
            stream.send(Frame(Kind.PROTOCOL, 0, offers))
        facts = describe(links, self._columns(), self._facts_of)
        return links, facts, *self._attempt

    def _facts_of(self, columns: tuple[int, int]) -> Facts:
        counts = {phase: len(rows) for phase, rows in self._phases().items()}
        facts = Facts(
            columns=columns,
            rows=counts,
            classes=self._rows.classes,
            layers=self._layers(columns),
        )
        self._tell_layers(facts)
        return facts

    def _layers(self, columns: tuple[int, int]) -> tuple[Layer, ...]:
        classes, top = self._rows.classes, self._rows.top
        summed = self._terms.merge == "sum"
        width = self._terms.merged_width if summed else sum(columns)
        if not isinstance(top, nn.Module):
            top = models.make_top(top).build(width, classes if classes > 2 else 1)
        return tuple(whole_network(columns, width if summed else None, top, classes))


# What is refused.


def _check_roles(agreed: Agreed, dealer: str | None) -> None:
    held, label = list(agreed.parties), agreed.label_party
    if len(held) != 2:
        raise ExposedCutError(
            "shares are held by two parties with columns",
            got=f"{len(held)} in [parties]",
            want="2",
            fix="give the columns of the others to one of two",
        )
    if label in held and dealer is None:
        raise ExposedCutError(
            "the label party has columns, so somebody else must deal",
            got="no dealer",
            want="secure = 'permuted:dealer=NAME' with a third party that only deals",
        )
    if dealer is not None and (label not in held or dealer in held):
        raise ExposedCutError(
            "who deals has neither columns nor the labels, and only one party can",
            got=f"dealer '{dealer}'",
            want="no dealer: the label party, which has no columns, deals"
            if label not in held
            else "a third party",
        )


def _check_bottoms(merge: str, parties: Mapping[str, AskedParty]) -> None:
    recipes = [models.make_bottom(asked.bottom) for asked in parties.values()]
    linear = all(
        isinstance(each, MLPBottom) and not each.hidden and each.last == "none" for each in recipes
    )
    rows = all(isinstance(each, IdentityBottom) for each in recipes)
    if (merge == "sum" and linear) or (merge == "concat" and rows):
        return
    bottoms = ", ".join(f"'{asked.bottom}'" for asked in parties.values())
    raise ExposedCutError(
        "no party trains a bottom of its own where nobody has a weight",
        got=f"merge = '{merge}', bottom = {bottoms}",
        want=_SPELLINGS,
    )
