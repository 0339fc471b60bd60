"""The label party's half of a round with one feature party: frame -> cut, and its gradient back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vfl.compression import Codec, Moment
from vfl.defenses import Defense
from vfl.exchange.adversary import HONEST, Adversary
from vfl.exchange.guards import check_finite, expect
from vfl.frame import Frame, Kind
from vfl.link import Link
from vfl.seeds import Secret


class LabelHalf:
    """Receives the cuts of one feature party and returns their gradients.

    Args:
        party: the feature party's name.
        width: the agreed width of its cut.
        codec, defense: the label party's own instances for this party.
        link: the stream to that party.
        secret: the label party's secret, for private draws on gradients.
        adversary: tampering at the label party; honest by default.
    """

    def __init__(
        self,
        party: str,
        width: int,
        codec: Codec,
        defense: Defense,
        link: Link,
        secret: Secret,
        adversary: Adversary = HONEST,
    ) -> None:
        codec.check(width)
        self.party = party
        self.width = width
        self.codec = codec
        self.defense = defense
        self.link = link
        self.adversary = adversary
        self.adapter: nn.Module | None = codec.server_module(width)
        self._wire_width = codec.wire_width(width)
        # Each party's gradients get draws of their own: equal noise on two would cancel out.
        self._secret = Secret(secret.key("half", party))
        self._pending: tuple[Tensor, Any, Moment] | None = None

    def receive_cut(self, step: int, rows: int) -> Tensor:
        """Wait for a training cut; axes (rows, width), ready to be differentiated.

        Raises:
            ProtocolError, FrameError, NonFiniteError: nothing was changed by the frame.
        """
        moment = Moment(step, training=True, secret=self._secret)
        cut, saved = self._receive(Kind.CUT, moment, rows)
        cut.requires_grad_()
        self._pending = (cut, saved, moment)
        return cut if self.adapter is None else self.adapter(cut)

    def send_gradient(self, labels: Tensor) -> None:
        """Send the gradient that backward left at the last cut; `labels` of the same rows."""
        assert self._pending is not None, "no cut was received"
        cut, saved, moment = self._pending
        assert cut.grad is not None, "backward has not run"
        grad = self.defense.gradient(cut.grad, labels, moment)
        grad = self.adversary.gradient(self.party, grad, moment)
        # Checked before the first party gets one: a broken step leaves every weight as it was.
        check_finite(grad, "gradient", self.party, moment.step)
        payload = self.codec.encode_grad(grad, saved, moment)
        self._pending = None
        self.link.send(Frame(Kind.GRAD, moment.step, payload))
        self.codec.commit(moment.step)

    def receive_query(self, step: int, rows: int) -> Tensor:
        """Wait for a cut to evaluate, and confirm it; axes (rows, width)."""
        cut, _ = self._receive(Kind.QUERY, Moment(step), rows)
        self.link.send(Frame(Kind.ACK, step))
        return cut if self.adapter is None else self.adapter(cut)

    def _receive(self, kind: Kind, moment: Moment, rows: int) -> tuple[Tensor, Any]:
        frame = expect(self.link, kind, moment.step, f"party '{self.party}'")
        cut, saved = self.codec.decode(frame.payload, rows, self._wire_width, moment)
        check_finite(cut, "cut", self.party, moment.step)
        self.adversary.received(self.party, cut, moment)
        return cut, saved
