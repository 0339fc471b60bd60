"""Secure sum in an exchange: a feature party sends words of a ring, the label party gets their sum.

Gradients travel as ever: with a sum every party's gradient is that of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vfl.compression import INFERENCE, Encoded, Moment
from vfl.compression.none import Uncompressed
from vfl.errors import ProtocolError, TruncatedFrameError
from vfl.exchange.dealer_line import DealerLine
from vfl.exchange.label_half import LabelHalf
from vfl.frame import Kind, Payload
from vfl.mpc.masked_sum import Ring
from vfl.mpc.pairwise import PairwiseMasks

TRAINING, QUERY = "cut", "query"


class MaskedCut(Uncompressed):
    """What stands in a feature party's place of a codec: cuts go out under masks.

    Args:
        party: whose cuts.
        ring: what its words are numbers of.
    """

    def __init__(self, party: str, ring: Ring) -> None:
        self._party = party
        self._ring = ring
        self._masks: PairwiseMasks | None = None

    def begin(self, masks: PairwiseMasks) -> None:
        """Use these masks from now on: a new attempt has begun."""
        self._masks = masks

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        """Masked words, each mask used once.

        Raises:
            RingOverflowError, NonFiniteError: the cut cannot be encoded; nothing is sent.
            ReusedPadError: this step was masked before in this attempt.
            ProtocolError: no keys were agreed on.
        """
        if self._masks is None:
            raise ProtocolError(
                f"party '{self._party}' has no keys to mask its cuts with",
                want="an agreement between the feature parties before the first exchange",
            )
        masks, purpose = self._masks, TRAINING if moment.training else QUERY

        def mask(count: int) -> np.ndarray:
            return masks.words(count, self._ring.dtype, purpose, moment.step)

        words = self._ring.encode(cut, self._party, moment.step, mask)
        return Encoded(words.data.cast("B"), None)

    def formula_ratio(self, width: int) -> float:
        return self._ring.bits / 32


class MaskedHalves:
    """The label party's halves of all feature parties, whose cuts come out as one sum.

    Args:
        halves: by party.
        ring: what the words are numbers of.
    """

    def __init__(self, halves: Mapping[str, LabelHalf], ring: Ring) -> None:
        self._halves = list(halves.values())
        self._ring = ring

    @property
    def dealer(self) -> DealerLine | None:
        """The line to a third party that deals; None where there is no such party."""
        return None

    def begin(self) -> Mapping[str, int]:
        """A new attempt has begun; the feature parties' keys are all there is to it.

        Returns:
            Columns of each party's layer, where layers are shared.
        """
        return {}

    def relay(self, step: int, rows: int, trains: bool) -> None:
        """Carry what the parties say to each other before they send: nothing."""

    def receive_cut(self, step: int, rows: int) -> Tensor:
        """The sum of the training cuts; axes (rows, width), ready to be differentiated.

        Raises:
            ProtocolError, FrameError: nothing was changed by the frames.
        """
        total = self._sum(Kind.CUT, step, rows).requires_grad_()
        for half in self._halves:
            half.await_gradient(total, step)
        return total

    def receive_query(self, step: int, rows: int) -> Tensor:
        """The sum of the cuts to evaluate; axes (rows, width). Each half's `confirm` answers."""
        return self._sum(Kind.QUERY, step, rows)

    def _sum(self, kind: Kind, step: int, rows: int, own: Sequence[Payload] = ()) -> Tensor:
        """The sum of what the parties send, and of the label party's own words if it adds any."""
        first = self._halves[0]
        payloads = [self._words(half, kind, step, rows) for half in self._halves]
        payloads += own
        return self._ring.decode(payloads, rows, first.width).to(first.device)

    def _words(self, half: LabelHalf, kind: Kind, step: int, rows: int) -> Payload:
        payload = half.take(kind, step).payload
        try:
            self._ring.check(payload, rows, half.width)
        except TruncatedFrameError as error:  # in a sum nobody could say whose it was
            error.where = f"step {step} of party '{half.party}'"
            raise
        return payload
