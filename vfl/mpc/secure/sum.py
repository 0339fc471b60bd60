"""``secure = "sum"``: the label party learns only the sum of the cut-layer activations ("cuts").

Every feature party sends its cut as ring elements, under masks that cancel out in the sum of all
cuts.

In step t, party i sends enc(cut) + sum over j > i of pad_ij - sum over j < i of pad_ji, modulo
2^bits. The function enc rounds cut * 2^fraction to whole numbers. The pad pad_ij comes from the key
stream of the pair i, j for ("cut", t), or for ("query", t) in evaluations and predictions
(`vfl.mpc.stream`). The label party adds all received elements modulo 2^bits, reads the results as
signed numbers, and divides them by 2^fraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from vfl.compression import INFERENCE, Codec, Decoded, Encoded, StepContext, Symbols
from vfl.compression.none import Uncompressed
from vfl.core.errors import ExposedCutError, ProtocolError
from vfl.core.frame import Kind, Link, Payload
from vfl.core.traffic import Ledger
from vfl.mpc.secure.base import SummedCuts, SummingMode, offers_bytes
from vfl.mpc.secure.keys import OFFER_BYTES
from vfl.mpc.secure.masks import PairwiseMasks, Ring
from vfl.session import secure_mode
from vfl.session.exchange import CutAggregator, LabelEnd
from vfl.session.schedule import EarlyStopping
from vfl.session.secure_mode import (
    TRAIN,
    Agreed,
    FeatureRound,
    Happened,
    HelperRound,
    Layers,
    Limits,
    Revealed,
)
from vfl.session.terms import Terms

TRAINING, QUERY = "cut", "query"


class MaskedSum(SummingMode):
    """The label party sees only the sum of the cuts: every party adds masks that cancel out in it.

    Args:
        bits: number of bits of each value in a message: 8, 16 or 32.
        fraction: number of these bits after the binary point; the default is 16 of 32 bits, 8 of
            16, or 3 of 8. The rounding error of a value is at most 2^-(fraction + 1).

    >>> MaskedSum(bits=8).ring(parties=2).reach
    7.875
    """

    def __init__(self, bits: int = 32, fraction: int | None = None) -> None:
        self._bits = bits
        self._fraction = fraction
        self.ring(parties=1)  # this call refuses option values that form no ring

    def ring(self, parties: int) -> Ring:
        return Ring.of(self._bits, self._fraction, parties)

    def promise(self, agreed: Agreed) -> str:
        ring = self.ring_of(agreed)
        return (
            f"{agreed.label_party} learns the sum alone, unless it colludes with all parties but "
            f"one; {ring.bits / 32:g} x the bytes of float32, each value exact to "
            f"2^-{ring.fraction + 1} and within {ring.reach:.5g}"
        )

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        label, order = terms.label_party, terms.feature_parties
        for phase, times, rows in happened:
            values = {name: rows * terms.parties[name].width for name in order}
            yield Revealed(label, "sum of the cuts", "all", phase, times, values[order[0]])
            if phase == TRAIN:
                for name in order:
                    gradient = "gradient of the sum"
                    yield Revealed(name, gradient, label, phase, times, values[name])

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Layers] | None,
    ) -> Limits:
        element = self.ring_of(terms).dtype.itemsize
        up = {kind: count * terms.parties[party].width * element for kind, count in rows.items()}
        _, down = super().limits(terms, party, rows, layers)
        return up | {Kind.PROTOCOL: OFFER_BYTES}, down | {Kind.PROTOCOL: offers_bytes(terms)}

    def feature_codec(self, party: str, terms: Terms) -> Codec:
        return MaskedCut(party, self.ring_of(terms))

    def aggregator(
        self,
        terms: Terms,
        ends: Mapping[str, LabelEnd],
        links: Mapping[str, Link],
        ledger: Ledger,
        stopping: EarlyStopping,
    ) -> CutAggregator:
        return SummedCuts(ends, self.ring_of(terms), ledger, stopping)

    def _refuse_alone(self, agreed: Agreed) -> None:
        if len(agreed.feature_parties) < 2:
            raise ExposedCutError(
                "the sum of one cut is that cut",
                got="1 feature party",
                want="2 feature parties or more",
                fix="use secure = 'none'; the label party then sees the cut",
            )

    def _begin(
        self, end: FeatureRound | HelperRound, keys: Mapping[str, bytes], terms: Terms
    ) -> None:
        codec = getattr(end, "codec", None)
        assert isinstance(codec, MaskedCut), "only masked cuts need keys"
        codec.begin(PairwiseMasks(end.party, terms.feature_parties, keys))


def ring_of(agreed: Agreed) -> Ring | None:
    """Return the ring in which cuts are summed; None if the mode does not sum cuts.

    Raises:
        SpecError: the secure mode cannot be made from its spec, or refuses another setting, for
            example with an `ExposedCutError`; the error states the reason.
    """
    mode = secure_mode.make(agreed.secure)
    mode.refuse(agreed)
    return mode.ring_of(agreed) if isinstance(mode, SummingMode) else None


class RingCut(Uncompressed):
    """Codec that sends a cut as ring elements without masks, to measure the mode's rounding alone.

    Args:
        party: name of the party that sends its cuts.
        ring: ring of the sent elements.

    >>> import torch
    >>> codec, cut = RingCut("bank", Ring.of(8, None, parties=2)), torch.tensor([[1.0, -0.4]])
    >>> codec.decode(codec.encode(cut).payload, rows=1, width=2).cut.tolist()
    [[1.0, -0.375]]
    """

    on_card: ClassVar[bool] = False  # ring elements are computed on the CPU

    def __init__(self, party: str, ring: Ring) -> None:
        self._party = party
        self._ring = ring

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        """Return the cut as ring elements in row order.

        Raises:
            RingOverflowError, NonFiniteError: the cut cannot be encoded as ring elements; nothing
                is sent.
        """
        elements = self._ring.encode(cut, self._party, context.step)
        return Encoded(elements.data.cast("B"), None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        return Decoded(self._ring.decode([payload], rows, width), None)

    def formula_ratio(self, width: int) -> float:
        return self._ring.bits / 32

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols:
        """Return the ring elements as symbols for an entropy coder.

        With masks, the elements are uniformly distributed, so an entropy coder cannot use their
        frequencies.
        """
        elements = self._ring.encode(cut, self._party, context.step)
        return Symbols(np.ones(cut.shape, np.bool_), elements, choices=2**self._ring.bits)


class MaskedCut(RingCut):
    """Replaces a feature party's codec; it sends the party's cuts under masks.

    The label party decodes only sums of cuts, so `decode` is not used.
    """

    repeats: ClassVar[bool] = False

    def __init__(self, party: str, ring: Ring) -> None:
        super().__init__(party, ring)
        self._masks: PairwiseMasks | None = None

    def begin(self, masks: PairwiseMasks) -> None:
        """Use these masks from now on, because a new attempt at the session has begun."""
        self._masks = masks

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        """Return a cut as masked ring elements; each mask is used only once.

        Raises:
            RingOverflowError, NonFiniteError: the cut cannot be encoded as ring elements; nothing
                is sent.
            ReusedPadError: the cut of this step, or of a later step, was already masked in this
                attempt.
            ProtocolError: the parties have not agreed on keys.
        """
        if self._masks is None:
            raise ProtocolError(
                f"party '{self._party}' has no keys to mask its cuts with",
                want="an agreement between the feature parties before the first exchange",
            )
        masks, purpose = self._masks, TRAINING if context.training else QUERY

        def mask(count: int) -> np.ndarray:
            return masks.elements(count, self._ring.dtype, purpose, context.step)

        elements = self._ring.encode(cut, self._party, context.step, mask)
        return Encoded(elements.data.cast("B"), None)

    @property
    def unmasked(self) -> RingCut:
        return RingCut(self._party, self._ring)
