"""The label party's half of a round with one feature party: frame -> cut, and its gradient back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression import Codec, Moment
from vfl.defenses import Defense
from vfl.exchange.adversary import HONEST, Adversary
from vfl.exchange.compute import Compute
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
        in_flight: how many cuts of the party may await their gradients at once.
        compute: where the label party's models run.
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
        in_flight: int = 1,
        compute: Compute | None = None,
    ) -> None:
        codec.check(width)
        self.party = party
        self.width = width
        self.codec = codec
        self.defense = defense
        self.link = link
        self.adversary = adversary
        self.adapter: nn.Module | None = codec.server_module(width)
        self.device = (compute or Compute()).device
        self._wire_width = codec.wire_width(width)
        # Each party's gradients get draws of their own: equal noise on two would cancel out.
        self._secret = Secret(secret.key("half", party))
        self._pending: tuple[Tensor, Any, Moment] | None = None
        # Gradients the party may not have taken yet: their steps are final at neither end.
        self._sent: deque[Frame] = deque()
        self._in_flight = in_flight

    def receive_cut(self, step: int, rows: int) -> Tensor:
        """Wait for a training cut; axes (rows, width), ready to be differentiated.

        Raises:
            ProtocolError, FrameError, NonFiniteError: nothing was changed by the frame.
        """
        moment = Moment(step, training=True, secret=self._secret)
        cut, saved = self._receive(Kind.CUT, moment, rows)
        cut = cut.to(self.device).requires_grad_()
        self._pending = (cut, saved, moment)
        return cut if self.adapter is None else self.adapter(cut)

    def take(self, kind: Kind, step: int) -> Frame:
        """Wait for the party's frame of this kind and step, which is not decoded yet."""
        return expect(self.link, kind, step, f"party '{self.party}'")

    def await_gradient(self, total: Tensor, step: int) -> None:
        """What `send_gradient` sends is the gradient of this tensor, which several may share."""
        self._pending = (total, None, Moment(step, training=True, secret=self._secret))

    def send_gradient(self, labels: Tensor) -> None:
        """Send the gradient that backward left at the last cut; `labels` of its rows."""
        assert self._pending is not None, "no cut was received"
        cut, saved, moment = self._pending
        assert cut.grad is not None, "backward has not run"
        grad = self.defense.gradient(cut.grad.cpu(), labels, moment)
        grad = self.adversary.gradient(self.party, grad, moment)
        # Checked before the first party gets one: a broken step leaves every weight as it was.
        check_finite(grad, "gradient", self.party, moment.step)
        payload = self.codec.encode_grad(grad, saved, moment)
        self._pending = None
        frame = Frame(Kind.GRAD, moment.step, payload)
        self._sent.append(frame)
        self.link.send(frame)
        self._commit_all_but(self._in_flight - 1)

    def drained(self) -> None:
        """The party takes every gradient before it goes on: an epoch's training has ended."""
        self._commit_all_but(0)

    def sent_state(self) -> list[dict[str, Any]]:
        """The gradients the party's own checkpoint of this moment still awaits, as they left."""
        return [
            {
                "step": frame.step,
                "payload": torch.from_numpy(np.frombuffer(frame.payload, np.uint8).copy()),
            }
            for frame in self._sent
        ]

    def send_again(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Send what `sent_state` gave; the same bytes, for new noise would tell more."""
        self._sent.clear()
        for kept in saved:
            frame = Frame(Kind.GRAD, kept["step"], kept["payload"].numpy().tobytes())
            self._sent.append(frame)
            self.link.send(frame)

    def receive_query(self, step: int, rows: int) -> Tensor:
        """Wait for a cut to evaluate; axes (rows, width). `confirm` answers it."""
        cut = self._receive(Kind.QUERY, Moment(step), rows)[0].to(self.device)
        return cut if self.adapter is None else self.adapter(cut)

    def confirm(self, step: int, told: bytes = b"") -> None:
        """Tell the party that its query is here, and what followed from it."""
        self.link.send(Frame(Kind.ACK, step, told))

    def _commit_all_but(self, last: int) -> None:
        """The party's end commits the same steps before it makes its next cut."""
        while len(self._sent) > last:
            self.codec.commit(self._sent.popleft().step)

    def _receive(self, kind: Kind, moment: Moment, rows: int) -> tuple[Tensor, Any]:
        frame = self.take(kind, moment.step)
        cut, saved = self.codec.decode(frame.payload, rows, self._wire_width, moment)
        check_finite(cut, "cut", self.party, moment.step)
        self.adversary.received(self.party, cut, moment)
        return cut, saved
