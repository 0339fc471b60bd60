"""A feature party's half where a third party deals: the label party has the other share.

In every exchange it sends the label party its inputs, masked, gets the other share of its layer,
masked, and answers with its share of the outputs. Several feature parties add masks that cancel
out between them. What masks its inputs follows from its key with the dealer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vfl.exchange.guards import expect
from vfl.exchange.masked import QUERY, TRAINING
from vfl.exchange.neighbours import add_masks
from vfl.exchange.share_holder import Pending, ShareHolder, no_keys
from vfl.exchange.wire_words import read_words, size_of, split_payload, words_bytes
from vfl.frame import Frame, Kind
from vfl.mpc.pairwise import PairwiseMasks
from vfl.mpc.shared_layer import Owner, encode_inputs
from vfl.mpc.shared_traffic import OwnerAxes
from vfl.mpc.stream import PadStream


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The party's role in one attempt, and its masks with the other feature parties."""

    owner: Owner
    masks: PairwiseMasks


class OwnerHalf(ShareHolder):
    """A feature party that holds a share of its own layer and of no other."""

    _attempt: _Attempt | None = None

    def begin(self, order: Sequence[str], keys: Mapping[str, bytes], dealer: str) -> None:
        """A new attempt has begun, with new keys.

        Args:
            order: all feature parties.
            keys: of each pair this party is in.
            dealer: which of them is with the dealer.
        """
        owner = Owner(PadStream(keys[dealer]))
        self._attempt = _Attempt(owner, PairwiseMasks(self.party, order, keys))
        self._pending = None

    @property
    def axes(self) -> OwnerAxes:
        """Its layer."""
        return OwnerAxes(self.columns, self.width)

    def answer(self, step: int) -> None:
        """Take the masked other share of the layer, and send this party's share of the outputs.

        Raises:
            ProtocolError, FrameError: nothing was sent.
        """
        attempt, pending = self._begun(), self._pending
        assert pending is not None, "nothing was opened"
        kind = Kind.OPENING if pending.trains else Kind.QUERY_OPENING
        payload = expect(self.link, kind, step, "the label party").payload
        shape = (self.columns, self.width)
        (opened,) = split_payload(payload, [size_of(shape)], f"step {step} of party '{self.party}'")
        total = attempt.owner.outputs(pending.inputs, self._own, read_words(opened, shape), step)
        add_masks(attempt.masks, total, TRAINING if pending.trains else QUERY, step)
        self.link.send(Frame(Kind.CUT if pending.trains else Kind.QUERY, step, words_bytes(total)))

    def take_gradient(self) -> None:
        """Wait for this party's share of the gradient and move its share of the weights.

        Raises:
            ProtocolError, FrameError: the share is left as it was.
        """
        attempt, pending = self._begun(), self._pending
        assert pending is not None, "nothing was opened"
        step, shape = pending.step, (len(pending.inputs), self.width)
        payload = expect(self.link, Kind.GRAD, step, "the label party").payload
        (shared,) = split_payload(payload, [size_of(shape)], f"gradient of step {step}")
        change = attempt.owner.change(pending.inputs, read_words(shared, shape), step)
        self._own = self._own - change
        self._pending = None

    def _open(self, inputs: Tensor, step: int, trains: bool) -> None:
        attempt = self._begun()
        words = encode_inputs(inputs, self.party)
        masked = words_bytes(attempt.owner.opened(words, step))
        self._pending = Pending(step, trains, words)
        self.link.send(Frame(Kind.OPENING if trains else Kind.QUERY_OPENING, step, masked))

    def _begun(self) -> _Attempt:
        if self._attempt is None:
            raise no_keys(self.party)
        return self._attempt
