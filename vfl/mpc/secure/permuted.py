"""``secure = "permuted"``: weights are shared, and functions are computed on permuted values.

Two parties with columns hold additive shares of all inputs, weights and gradients, from the first
layer to the last. A third party deals correlated randomness, and evaluates functions on values in a
permuted order. Only the two share holders know the order of these values (`vfl.mpc.permuted`). Only
the label party sees the network's outputs.

    label party                     P0, P1                        P2
    without columns:                the two parties with columns  the label party
    one of the two with columns:    the two parties with columns  dealer=NAME, without data

Only the label party has streams; it relays the sealed messages of the two other parties to each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from vfl import models
from vfl.config.toml import Settings
from vfl.core.errors import DisagreementError, ExposedCutError, ProtocolError, WidthError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind, Link
from vfl.datasets import Split
from vfl.models.mlp import IdentityBottom, MLPBottom
from vfl.mpc.permuted import FUNCTIONS
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.rules import HOLDERS, LEAST_PERMUTED, P2, Mode, Rules
from vfl.mpc.secure.base import check_training, refuse_work_on_cuts
from vfl.mpc.secure.ends import NetworkEnd, NetworkMode, NetworkSizes, Place
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.mpc.three_party.network import Layer
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.training import (
    Rows,
    ThreePartyNetwork,
    first_weights,
    most_frame_bytes,
    require_frames,
    targets_of,
    whole_network,
)
from vfl.mpc.three_party.trio import make_party
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import (
    EVALUATE,
    SETUP,
    TRAIN,
    Agreed,
    AskedParty,
    Happened,
    Limits,
    OwnRows,
    Revealed,
)
from vfl.session.terms import Terms

#: Number of ring elements that a holder stores for each input, for each weight, and for each value
#: of the layers in one step. These factors were measured: they are half of the resident memory, in
#: ring elements, of a process that runs all three parties, in both modes.
_ROW_COPIES, _WEIGHT_COPIES, _EXCHANGE_COPIES = 8, 24, 16
_COLUMNS_BYTES = 4
_Size = Annotated[int, Field(ge=0, lt=2**32)]
_SPELLINGS = (
    "merge = 'sum' and bottom = 'mlp:hidden=none' at both, which are one linear layer; or merge = "
    "'concat' and bottom = 'identity' at both, where the top gets the columns themselves"
)


class Facts(Settings):
    """Facts about rows and layers that all three parties need besides the session's terms.

    Attributes:
        columns: numbers of columns of P0 and P1.
        rows: number of shared rows in each phase (training, validation, test) of this session.
        classes: number of label classes; 0 if the labels are real numbers.
        layers: shapes and kinds of the network's layers.
    """

    columns: tuple[_Size, _Size]
    rows: dict[Rows, _Size]
    classes: int = Field(ge=0, lt=2**32)
    layers: tuple[Layer, ...] = Field(min_length=1, max_length=64)

    @property
    def parameters(self) -> int:
        """Number of weights of the network."""
        return sum((one.inputs + one.bias) * one.outputs for one in self.layers)

    def check(self, own: tuple[int, Mapping[Rows, int]] | None, role: int) -> None:
        """Compare the facts that the label party announced with this party's own data.

        Args:
            own: this party's number of columns, and its number of rows in each phase, at P0 and P1;
                None at the dealer.
            role: role number of this party.

        Raises:
            DisagreementError: the party has another number of columns or rows than the facts state.
            ProtocolError: the layers do not form a network for these columns.
        """
        if own is not None and (self.columns[role], self.rows) != (own[0], dict(own[1])):
            raise DisagreementError(
                "the label party's description states other rows than this party has",
                got=f"{self.columns[role]} columns, rows {_told_counts(self.rows)}",
                want=f"{own[0]} columns, rows {_told_counts(own[1])}",
                fix="keep only the ids all parties share, with one split at all of them",
            )
        widths = [sum(self.columns), *(one.outputs for one in self.layers)]
        fit = all(one.inputs == width for one, width in zip(self.layers, widths, strict=False))
        if not fit or not {one.function for one in self.layers} <= {"", *FUNCTIONS}:
            raise ProtocolError(
                "the label party's description has layers that form no network for these columns",
                got=", ".join(f"{one.inputs}-{one.outputs}" for one in self.layers),
                want=f"layers that follow one another from {widths[0]} columns, with a function of "
                + ", ".join(sorted(FUNCTIONS)),
            )


@dataclass(frozen=True, slots=True)
class NetworkLayers(NetworkSizes):
    """Sizes of the network of a session, from which frame limits and memory follow.

    Attributes:
        layers: layers of the network.
        weights: number of weights.
        rows: number of rows of all phases together.
    """

    layers: tuple[Layer, ...]
    weights: int
    rows: int

    @property
    def parameters(self) -> int:
        return self.weights

    def memory_bytes(self, rows: int) -> int:
        """Return the approximate number of bytes of memory that a holder uses at once.

        The factors in this estimate were measured and rounded up.
        """
        inputs = self.layers[0].inputs
        widths = inputs + sum(one.outputs for one in self.layers)
        held = _ROW_COPIES * self.rows * inputs + _WEIGHT_COPIES * self.weights
        return ELEMENT_BYTES * (held + _EXCHANGE_COPIES * rows * widths)

    def limits(self, rows: int) -> dict[Kind, int]:
        most = most_frame_bytes(self.layers, rows)
        return {Kind.PROTOCOL: most, Kind.OPENING: most + TAG_BYTES}


class Permuted(NetworkMode):
    """Network whose weights are shared; a third party computes functions of permuted values.

    Args:
        mode: "fast", or "thesis", which is the protocol of chapter 5 as the thesis prints it; see
            `vfl.mpc.Rules`.
        bits, magnitude_bits, delta_bits, least_permuted, flips: see `vfl.mpc.Rules`.
        dealer: name of the dealer, a party without data; the option is required if the label party
            has columns.
        validate: whether the label party may see the outputs of validation rows after every epoch.

    >>> Permuted(mode="thesis").rules.bits, Permuted(dealer="notary").third_party("bank")
    (23, 'notary')
    """

    #: Largest numbers of frames on the way in one direction, and of frames from one party that wait
    #: at the label party: a party sends several messages before it needs an answer.
    window: ClassVar[int] = 32
    waiting: ClassVar[int] = 64
    announced_bytes: ClassVar[int] = _COLUMNS_BYTES
    facts_bytes: ClassVar[int] = 1 << 14
    facts: ClassVar[type[Settings]] = Facts

    def __init__(
        self,
        mode: Mode = "fast",
        bits: int = 0,
        magnitude_bits: int = 8,
        delta_bits: int = 16,
        least_permuted: int = LEAST_PERMUTED,
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
        """Return the names of the parties that have the roles P0, P1 and P2."""
        one, other = agreed.parties
        return one, other, self._dealer or agreed.label_party

    def refuse(self, agreed: Agreed) -> None:
        _check_roles(agreed, self._dealer)
        _check_bottoms(agreed.merge, agreed.parties)
        check_training(agreed.train)
        refuse_work_on_cuts(agreed)
        if agreed.validation and not self._validate:
            raise ExposedCutError(
                "the outputs of every epoch would be one more equation for the columns of"
                " validation rows",
                got=f"data.validation = {agreed.validation}",
                want="data.validation = 0",
                fix="secure = 'permuted:validate=True', if the label party may see these outputs",
            )

    def promise(self, agreed: Agreed) -> str:
        _, _, helper = self.roles(agreed)
        more = ", those of validation rows after every epoch too" if agreed.validation else ""
        return (
            f"{agreed.label_party} learns the outputs{more}, {helper} sees permuted values before "
            "every function, and no party has a weight, unless two of the three collude or one "
            "breaks the protocol; statistical, not cryptographic"
        )

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Yield the numbers of columns, layers and rows that each party learned.

        `WholeNetwork.revealed` yields the other values that each party learned.
        """
        for name in self.roles(terms):
            if name != terms.label_party:
                yield Revealed(name, "columns, layers and numbers of rows", "all", SETUP, 1, 1)
        for role in HOLDERS:
            holder = self.roles(terms)[role]
            if holder != terms.label_party:
                yield Revealed(terms.label_party, "number of columns", holder, SETUP, 1, 1)

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Any] | None,
    ) -> Limits:
        up, down = super().limits(terms, party, rows, layers)
        return up, down | {Kind.ACK: 1}

    # With three parties, a frame that the label party relays can only be meant for the one
    # remaining party. Such a frame has the kind OPENING and needs no number of its receiver.

    def on_stream(self, frame: Frame) -> Frame:
        return Frame(Kind.OPENING, frame.step, frame.payload) if frame.peer else frame

    def off_stream(self, frame: Frame, other: int) -> Frame:
        if frame.kind is not Kind.OPENING or frame.peer:
            return frame
        return Frame(Kind.PROTOCOL, frame.step, frame.payload, other)

    def about(self, frame: Frame) -> bytes:
        return super().about(frame).replace(Kind.PROTOCOL.name.encode(), b"operation", 1)

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Place) -> PermutedEnd:
        return PermutedEnd(self, party, terms, rows, place)


class PermutedEnd(NetworkEnd[Facts, Party]):
    """One party's endpoint of a permuted session, in the role of P0, P1 or P2."""

    _mode: Permuted

    def __init__(
        self, mode: Permuted, party: str, terms: Terms, rows: OwnRows, place: Place
    ) -> None:
        super().__init__(mode, party, terms, rows, place)
        self._network: ThreePartyNetwork | None = None
        if self._role == self._label_role:
            # The label party refuses a wrong top model before it sends a message of this protocol.
            # For concatenated inputs, the agreed widths are the numbers of columns.
            self._layers((terms.merged_width, 0))

    @property
    def split(self) -> Split:
        counts = self._facts.rows
        train, validation, test = (
            np.arange(counts.get(phase, 0)) for phase in ("train", "validation", "test")
        )
        if self._terms.mode == "predict":
            test = np.arange(counts.get("predict", 0))
        return Split(train, validation, test)

    def train(self, exchange: Exchange) -> None:
        network, rate = self._shared, self._terms.train.learning_rate
        network.train_step(torch.from_numpy(exchange.rows), rate)
        if not any(layer.function for layer in network.layers):
            self._wait_for_the_dealt(self._begun.number)
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> Tensor | None:
        phase, index = exchange.phase, torch.from_numpy(exchange.rows)
        found = self._shared.outputs(phase, index, f"{phase} outputs")
        self._note(EVALUATE)
        return found

    def weights(self) -> dict[str, Tensor]:
        return {} if self._network is None else self._network.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._shared.load_weights(weights)

    def training_state(self) -> dict[str, Any]:
        return {"network": self._shared.state_dict(), **self._kept()}

    # Steps before the training begins; see `NetworkEnd`.

    def announced(self) -> bytes | None:
        columns = self._columns()
        return None if columns is None else columns.to_bytes(_COLUMNS_BYTES, "little")

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        one, other = (_told_columns(self._terms, *each) for each in told.items())
        return Facts(
            columns=(one, other),
            rows=self._counts(),
            classes=self._rows.classes,
            layers=self._layers((one, other)),
        )

    def sizes_of(self, facts: Facts) -> NetworkLayers:
        columns = self._columns()
        facts.check(None if columns is None else (columns, self._counts()), self._role)
        require_frames(facts.layers, facts.columns, facts.classes, self._label_role)
        return NetworkLayers(facts.layers, facts.parameters, sum(facts.rows.values()))

    def _player_of(self, links: Mapping[int, Link]) -> Party:
        return make_party(self._role, links, self._mode.rules)

    def _started(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None
    ) -> None:
        facts, holds = self._facts, self._role in HOLDERS
        network = self._network = ThreePartyNetwork(
            self._begun, facts.layers, facts.columns, self._label_role
        )
        if state is None and weights is None:
            network.share_weights(first_weights(facts.layers, self._rows.secret) if holds else None)
        elif state is None and weights is not None:
            network.load_weights(weights)
        own = self._own_rows()
        for phase, count in facts.rows.items():
            network.share_rows(phase, count, own.get(phase), f"{phase} inputs")
        if "train" in facts.rows:
            network.share_targets(facts.rows["train"], self._targets())
        if state is not None:
            network.load_state_dict(state["network"])

    @property
    def _shared(self) -> ThreePartyNetwork:
        assert self._network is not None, "an attempt has begun"
        return self._network

    def _layers(self, columns: tuple[int, int]) -> tuple[Layer, ...]:
        classes, top = self._rows.classes, self._rows.top
        summed = self._terms.merge == "sum"
        width = self._terms.merged_width if summed else sum(columns)
        if not isinstance(top, nn.Module):
            top = models.make_top(top).build(width, classes if classes > 2 else 1)
        return tuple(whole_network(columns, width if summed else None, top, classes))

    def _columns(self) -> int | None:
        if self._role == P2 or self._rows.inputs is None:
            return None
        columns = self._rows.inputs[0].numel()
        asked = self._terms.parties[self.party].width
        if self._terms.merge == "concat" and asked != columns:
            raise WidthError(
                "without bottom models, the width of a party's cut is its number of columns",
                where=f"parties.{self.party}.width",
                got=str(asked),
                want=str(columns),
                fix=f"-s parties.{self.party}.width={columns}",
            )
        return columns

    def _phases(self) -> dict[Rows, np.ndarray]:
        """Return the positions of the rows in each phase of this session."""
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

    def _counts(self) -> dict[Rows, int]:
        return {phase: len(rows) for phase, rows in self._phases().items()}


# Refused settings.


def _check_roles(agreed: Agreed, dealer: str | None) -> None:
    held, label = list(agreed.parties), agreed.label_party
    if len(held) != 2:
        raise ExposedCutError(
            "shares are held by two parties with columns",
            got=f"{len(held)} in [parties]",
            want="2",
            fix="move the columns of all other parties to one of these two",
        )
    if label in held and dealer is None:
        raise ExposedCutError(
            "the label party has columns, so another party must deal",
            got="no dealer",
            want="secure = 'permuted:dealer=NAME' with a third party that only deals",
        )
    if dealer is not None and (label not in held or dealer in held):
        raise ExposedCutError(
            "the dealer is one party that has neither columns nor the labels",
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
        "no party can train its own bottom model if all weights are shared",
        got=f"merge = '{merge}', bottom = {bottoms}",
        want=_SPELLINGS,
    )


def _told_columns(terms: Terms, holder: str, raw: bytes) -> int:
    """Parse the number of columns that a holder announces.

    The number is parsed before any network for these columns is built.

    Raises:
        ProtocolError: the number differs from the agreed number, or one row of so many columns does
            not fit a frame.
    """
    columns, most = int.from_bytes(raw, "little"), LIMIT_BYTES // ELEMENT_BYTES
    least = 1
    if terms.merge == "concat":
        least = most = terms.parties[holder].width
    if not least <= columns <= most:
        raise ProtocolError(
            f"party '{holder}' announces an invalid number of columns",
            got=f"{columns}",
            want=f"{least} to {most}" if least < most else f"{most}, as was agreed",
        )
    return columns


def _told_counts(rows: Mapping[Rows, int]) -> str:
    return ", ".join(f"{phase} {count}" for phase, count in rows.items())
