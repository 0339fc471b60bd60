"""The feature party's half of a round: inputs -> bottom -> cut -> frame, and the gradient back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl.compression import Codec, Moment
from vfl.defenses import Defense
from vfl.defenses.none import Undefended
from vfl.errors import NonFiniteError
from vfl.exchange.adversary import HONEST, Adversary
from vfl.exchange.draws import Draws
from vfl.exchange.guards import check_finite, check_shape, expect
from vfl.exchange.optimizers import OptimizerFactory, drop_gradients
from vfl.exchange.state import gather, restore
from vfl.frame import Frame, Kind
from vfl.link import Link
from vfl.seeds import Secret


@dataclass(slots=True)
class _Pending:
    """A cut whose gradient has not come yet."""

    cut: Tensor
    inputs: Tensor
    kept: Any
    moment: Moment


class FeatureHalf:
    """Sends the cuts of one feature party and applies the gradients that come back.

    Args:
        party: its name, for messages.
        bottom: its model; rows in, axes (rows, width) out.
        width: the agreed width of the cut.
        codec, defense: this party's own instances.
        link: the stream to the label party.
        secret: the party's secret; dropout and the codec's private draws follow from it.
        optimizer: builds the optimiser; None for a party that only answers queries.
        adversary: tampering on this side; honest by default.
    """

    def __init__(
        self,
        party: str,
        bottom: nn.Module,
        width: int,
        codec: Codec,
        defense: Defense,
        link: Link,
        secret: Secret,
        optimizer: OptimizerFactory | None = None,
        adversary: Adversary = HONEST,
    ) -> None:
        codec.check(width)
        self.party = party
        self.width = width
        self.wire_width = codec.wire_width(width)
        self.codec = codec
        self.defense = defense
        self.link = link
        self.adversary = adversary
        self.model = nn.ModuleDict({"bottom": defense.wrap_bottom(bottom, width)})
        if (adapter := codec.client_module(width)) is not None:
            self.model["codec"] = adapter
        self._secret = secret
        self._draws = Draws(secret, "rng", self.model, always=not isinstance(defense, Undefended))
        self._optimizer = None
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        if optimizer is not None and self._trainable:
            self._optimizer = adversary.optimizer(optimizer(self._trainable))
        self._pending: _Pending | None = None

    def send_cut(self, inputs: Tensor, step: int) -> None:
        """Forward a training batch of axes (rows, ...) and send its cut.

        Raises:
            NonFiniteError: the cut holds NaN or Inf.
            WidthError: the bottom's output is not (rows, width).
        """
        moment = Moment(step, training=True, secret=self._secret)
        fed, _ = self.defense.batch(inputs, None, moment)
        inputs = self.adversary.batch(inputs if fed is None else fed, moment)
        self._set_training(True)
        with self._draws.at(step):
            cut = self._forward(inputs, moment)
        payload, kept = self._encode(self.adversary.cut(cut.detach(), moment), moment)
        self._pending = _Pending(cut, inputs, kept, moment)
        self.link.send(Frame(Kind.CUT, step, payload))

    def take_gradient(self) -> None:
        """Wait for the gradient of the cut just sent, go backward, step the optimiser.

        Raises:
            ProtocolError, FrameError, NonFiniteError: the model is left as it was.
        """
        assert self._pending is not None, "no cut was sent"
        cut, inputs, kept, moment = (
            self._pending.cut,
            self._pending.inputs,
            self._pending.kept,
            self._pending.moment,
        )
        frame = expect(self.link, Kind.GRAD, moment.step, "the label party")
        grad = self.codec.decode_grad(frame.payload, kept, len(cut), self.wire_width, moment)
        check_finite(grad, "gradient", self.party, moment.step)
        self.adversary.received(self.party, grad, moment)
        self._pending = None
        self._backward(cut, grad, inputs, moment)
        self.codec.commit(moment.step)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Forward rows for evaluation or prediction and send their cut; nothing is random."""
        moment = Moment(step)
        self._set_training(False)
        with torch.no_grad():
            cut = self._forward(inputs, moment)
        payload, _ = self._encode(self.adversary.cut(cut, moment), moment)
        self.link.send(Frame(Kind.QUERY, step, payload))

    def take_receipt(self, step: int) -> None:
        """Wait until the label party has the query."""
        expect(self.link, Kind.ACK, step, "the label party")

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, and the state of codec and defense."""
        return gather(self.model, {"codec": self.codec, "defense": self.defense})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        restore(self.model, {"codec": self.codec, "defense": self.defense}, state)

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly: state and optimiser."""
        optimizer = self._optimizer.state_dict() if self._optimizer else {}
        return {"state": self.state_dict(), "optimizer": optimizer}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `training_state` gave."""
        self.load_state_dict(saved["state"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved["optimizer"])

    def _forward(self, inputs: Tensor, moment: Moment) -> Tensor:
        cut: Tensor = self.model["bottom"](inputs)
        check_shape(cut, len(inputs), self.width, self.party)
        cut = self.defense.embedding(cut, moment)
        return self.model["codec"](cut) if "codec" in self.model else cut

    def _encode(self, cut: Tensor, moment: Moment) -> tuple[Any, Any]:
        """The label party checks what it decodes; a codec that would hide NaN refuses it here."""
        try:
            return self.codec.encode(cut, moment)
        except NonFiniteError:
            check_finite(cut, "cut", self.party, moment.step)
            raise

    def _backward(self, cut: Tensor, grad: Tensor, inputs: Tensor, moment: Moment) -> None:
        if self._optimizer is None:
            return
        roots, grads = [cut], [grad]
        for local in (
            self.codec.local_loss(cut, moment),
            self.defense.local_loss(cut, inputs, moment),
        ):
            if local is not None:
                roots.append(local)
                grads.append(torch.ones_like(local))
        drop_gradients(self._trainable)
        torch.autograd.backward(roots, grads)
        self._optimizer.step()

    def _set_training(self, training: bool) -> None:
        if self.model.training is not training:
            self.model.train(training)
