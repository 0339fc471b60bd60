"""The feature party's half of a round: inputs -> bottom -> cut -> frame, and the gradient back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl.compression import INFERENCE, Codec, Encoded, Moment
from vfl.defenses import Defense, uses
from vfl.defenses.none import Undefended
from vfl.errors import NonFiniteError
from vfl.exchange.adversary import HONEST, Adversary
from vfl.exchange.compute import Compute
from vfl.exchange.draws import Draws
from vfl.exchange.guards import check_finite, check_shape, expect
from vfl.exchange.optimizers import OptimizerFactory, drop_gradients
from vfl.exchange.stash import Stash
from vfl.exchange.state import gather, restore
from vfl.frame import Frame, Kind, Payload
from vfl.link import Link
from vfl.seeds import Secret, scoped


@dataclass(slots=True)
class _Pending:
    """A cut whose gradient has not come yet."""

    cut: Tensor
    inputs: Tensor
    kept: Any
    moment: Moment
    stash: Stash | None


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
        in_flight: how many cuts may await their gradients at once. With more than one, each
            forward pass runs on a copy of the weights, which its gradient is then the exact one of.
        compute: where the model runs.
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
        in_flight: int = 1,
        compute: Compute | None = None,
    ) -> None:
        codec.check(width)
        self.party = party
        self.width = width
        self.wire_width = codec.wire_width(width)
        self.codec = codec
        self.defense = defense
        self.link = link
        self.adversary = adversary
        self.in_flight = in_flight
        self.model = nn.ModuleDict({"bottom": defense.wrap_bottom(bottom, width)})
        if (adapter := codec.client_module(width)) is not None:
            self.model["codec"] = adapter
        self._compute = compute or Compute()
        self.model.to(self._compute.device)
        self._secret = secret
        self._draws = Draws(secret, "rng", self.model, always=not isinstance(defense, Undefended))
        self._optimizer = None
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        if optimizer is not None and self._trainable:
            self._optimizer = adversary.optimizer(optimizer(self._trainable))
        self._pending: deque[_Pending] = deque()

    def fit(self, inputs: Callable[[], Tensor]) -> None:
        """Let the defense look at the training inputs once, if it wants to, before step 0."""
        if uses(self.defense, "fit"):
            with scoped(self._secret.number("fit")):
                self.defense.fit(self.model["bottom"], inputs(), self._secret)

    @property
    def awaiting(self) -> int:
        """Cuts whose gradients have not been taken yet."""
        return len(self._pending)

    def send_cut(self, inputs: Tensor, step: int) -> None:
        """Forward a training batch of axes (rows, ...) and send its cut.

        Raises:
            NonFiniteError: the cut holds NaN or Inf.
            WidthError: the bottom's output is not (rows, width).
        """
        self.link.send(Frame(Kind.CUT, step, self._go_forward(inputs, step)))

    def answer(self, step: int) -> None:
        """Nothing is relayed between parties that each hold a bottom."""

    def take_gradient(self) -> None:
        """Wait for the gradient of the oldest cut, go backward, step the optimiser.

        Raises:
            ProtocolError, FrameError, NonFiniteError, HijackError: the model is left as it was.
        """
        assert self._pending, "no cut was sent"
        pending = self._pending[0]
        moment = pending.moment
        frame = expect(self.link, Kind.GRAD, moment.step, "the label party")
        grad = self.codec.decode_grad(
            frame.payload, pending.kept, len(pending.cut), self.wire_width, moment
        )
        check_finite(grad, "gradient", self.party, moment.step)
        self.adversary.received(self.party, grad, moment)
        grad = self.defense.received(pending.cut.detach().cpu(), grad, moment)
        self._pending.popleft()
        self._backward(pending, grad.to(self._compute.device))
        self.codec.commit(moment.step)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Forward rows for evaluation or prediction and send their cut; only a defense may draw."""
        moment = Moment(step)
        cut = self.query_cut(inputs, moment)
        payload, _ = self._encode(self.adversary.cut(cut, moment), moment)
        self.link.send(Frame(Kind.QUERY, step, payload))

    def query_cut(self, inputs: Tensor, moment: Moment = INFERENCE) -> Tensor:
        """What `send_query` encodes: nothing is random; axes (rows, width on the wire)."""
        self._set_training(False)
        with torch.no_grad():
            guarded = Moment(moment.step, secret=self._secret)
            return self._forward(inputs.to(self._compute.device), guarded, None).cpu()

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has the query; what it says to it."""
        return bytes(expect(self.link, Kind.ACK, step, "the label party").payload)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, and the state of codec and defense."""
        return gather(self.model, {"codec": self.codec, "defense": self.defense})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        restore(self.model, {"codec": self.codec, "defense": self.defense}, state)

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly: state, optimiser, and the cuts in flight."""
        optimizer = self._optimizer.state_dict() if self._optimizer else {}
        in_flight = [
            {"step": pending.moment.step, "state": pending.stash.state}
            for pending in self._pending
            if pending.stash is not None
        ]
        own = {"state": self.state_dict(), "optimizer": optimizer, "in_flight": in_flight}
        return own | {"adversary": self.adversary.training_state()}

    def load_training_state(self, saved: Mapping[str, Any], batch: Callable[[int], Tensor]) -> None:
        """Restore what `training_state` gave; cuts in flight are made again, but not sent.

        Args:
            saved: the state.
            batch: the inputs of an exchange that was in flight, by its step.
        """
        self._pending.clear()
        for earlier in saved["in_flight"]:
            self.load_state_dict(earlier["state"])
            self._go_forward(batch(earlier["step"]), earlier["step"])
        self.load_state_dict(saved["state"])
        self.adversary.load_training_state(saved.get("adversary", {}))
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved["optimizer"])

    def _go_forward(self, inputs: Tensor, step: int) -> Payload:
        """Make the cut of a training batch and await its gradient; the payload to send."""
        moment = Moment(step, training=True, secret=self._secret)
        fed, _ = self.defense.batch(inputs, None, moment)
        inputs = self.adversary.batch(inputs if fed is None else fed, moment)
        inputs = inputs.to(self._compute.device)
        self._set_training(True)
        stash = Stash(self.model, self.state_dict()) if self.in_flight > 1 else None
        with self._draws.at(step):
            cut = self._forward(inputs, moment, stash)
        payload, kept = self._encode(self.adversary.cut(cut.detach().cpu(), moment), moment)
        self._pending.append(_Pending(cut, inputs, kept, moment, stash))
        return payload

    def _forward(self, inputs: Tensor, moment: Moment, stash: Stash | None) -> Tensor:
        with self._compute.forward():
            cut = self._through("bottom", inputs, stash).float()
        check_shape(cut, len(inputs), self.width, self.party)
        cut = self.defense.embedding(cut, moment)
        return self._through("codec", cut, stash) if "codec" in self.model else cut

    def _through(self, part: str, values: Tensor, stash: Stash | None) -> Tensor:
        if stash is not None:
            return stash.forward(part, values)
        outputs: Tensor = self.model[part](values)
        return outputs

    def _encode(self, cut: Tensor, moment: Moment) -> Encoded:
        """The label party checks what it decodes; a codec that would hide NaN refuses it here."""
        try:
            return self.codec.encode(cut, moment)
        except NonFiniteError:
            check_finite(cut, "cut", self.party, moment.step)
            raise

    def _backward(self, pending: _Pending, grad: Tensor) -> None:
        if self._optimizer is None:
            return
        cut, moment = pending.cut, pending.moment
        roots, grads = [cut], [grad]
        for local in (
            self.codec.local_loss(cut, moment),
            self.defense.local_loss(cut, pending.inputs, moment),
        ):
            if local is not None:
                roots.append(local)
                grads.append(torch.ones_like(local))
        drop_gradients(self._trainable)
        torch.autograd.backward(roots, grads)
        if pending.stash is not None:
            pending.stash.hand_over()
        self._optimizer.step()

    def _set_training(self, training: bool) -> None:
        if self.model.training is not training:
            self.model.train(training)
