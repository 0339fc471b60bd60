"""One exchange between a feature party and the label party: the endpoints at both parties.

    feature party   inputs -> bottom -> cut -> defense -> codec -> frame
    label party     frame -> codec -> cut of each party, or their sum -> top
    label party     gradient -> defense -> codec -> frame
    feature party   frame -> codec -> gradient -> backward pass, optimiser step

Both endpoints (`FeatureEnd`, `LabelEnd`) are defined here, not in the modules of the parties. The
reason: attacks run an attacked party's endpoint again, and a secure mode replaces a codec or an
endpoint. The loops over exchanges, which call the endpoints, are in the classes `FeatureParty` and
`LabelParty`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn, optim

from vfl.compression import INFERENCE, Codec, Encoded, StepContext
from vfl.core.errors import ConfigError, NonFiniteError, ProtocolError, UserError, WidthError
from vfl.core.frame import Frame, Kind, Link, Payload
from vfl.core.seeds import Secret, scoped
from vfl.core.storage import weights_digest
from vfl.core.torch_internals import Compute, OptimizerFactory, go_back
from vfl.core.traffic import Ledger
from vfl.datasets.augment import Augment
from vfl.defenses import Defense, uses
from vfl.defenses.base import Undefended
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import Forward
from vfl.privacy.row_gradients import Call
from vfl.session.passes import Draws, LocalSteps, Stash, drop_gradients, filled, set_training
from vfl.session.ranks import group
from vfl.session.ranks.group import ALONE, Ranks
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.store.checkpoint import Checkpoints
from vfl.session.store.journal import Journal

if TYPE_CHECKING:
    from vfl.session.terms import Terms


class Adversary:
    """A dishonest party. Each method, unless overridden, behaves as an honest party."""

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        """Return the inputs that the party really passes to its bottom model; axes (rows, ...)."""
        return inputs

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        """Return the labels on which the label party really trains; axes (rows,)."""
        return labels

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Return the optimiser that the party really uses for its own model."""
        return optimizer

    def model(self, cuts_of: Callable[[Tensor], Tensor]) -> None:
        """Receive the feature party's model, before all hooks of its batches.

        Args:
            cuts_of: function that returns the current cuts of given inputs, axes (rows, width), in
                evaluation mode. Only `batch` may call it, because a later hook would change the
                mode of the step; any other call raises a `UserError`.
        """

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        """Return the detached cut that the feature party really sends; axes (rows, width)."""
        return cut

    def gradient(self, party: str, grad: Tensor, context: StepContext) -> Tensor:
        """Return the gradient that the label party really sends to `party`; axes (rows, width)."""
        return grad

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        """Read a received gradient (at a feature party) or cut (at the label party)."""

    def training_state(self) -> dict[str, Any]:
        """Return the state from which a run resumes exactly: tensors, numbers and texts.

        At a feature party, the result of `batch` may depend only on its arguments and this state.
        The reason: a resumed training calls `batch` again for the batches whose cuts were in
        flight.
        """
        return {}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `training_state` returned."""


HONEST = Adversary()
#: Key for the sum of all cuts in dictionaries whose keys are otherwise names of parties; it is
#: longer than a party's name may be.
SUM = "the sum of the feature parties' cuts"
_PROCESSOR = torch.device("cpu")


def check_finite(values: Tensor, what: str, party: str, step: int) -> None:
    """Refuse a tensor with NaN or Inf before it reaches a model.

    The check computes the tensor's sum: one pass over the values without allocating memory; if all
    values are finite, the sum is finite, too, unless it overflows. Only if the sum is not finite,
    the check looks at single values. A training step makes several such checks; a comparison of the
    sum as a Python number costs less than the five torch operations of a check on the tensor.

    Raises:
        NonFiniteError: a value is NaN or Inf; the error names the party, the step and the number of
            such values, but contains no value.
    """
    if math.isfinite(values.sum().item()):
        return
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise NonFiniteError(
            f"the {what} of party '{party}' holds NaN or Inf",
            where=f"step {step}",
            got=f"{broken} of {values.numel()} values",
            want="finite numbers",
            fix="lower the learning rate, or look for missing or huge values in the party's rows",
        )


def bytes_of(values: Tensor) -> bytes:
    """Return all values of a tensor as bytes, in the order of its axes."""
    return values.detach().cpu().numpy().tobytes()


def check_shape(cut: Tensor, rows: int, width: int, party: str) -> None:
    """Refuse a bottom model whose output does not have the axes (rows, width).

    Raises:
        WidthError: the shapes differ; the error states both shapes.
    """
    if cut.shape != (rows, width):
        raise WidthError(
            f"the bottom model of party '{party}' returns an output whose shape differs from the "
            "agreed shape",
            got=f"{tuple(cut.shape)}",
            want=f"({rows}, {width})",
            fix=f"let the bottom model end with a layer of {width} units, or change the party's "
            "width",
        )


def expect(link: Link, kind: Kind, step: int, sender: str) -> Frame:
    """Receive the next frame and check its kind and step; an error names `sender`.

    Raises:
        ProtocolError: a frame of a different kind or step arrives, or a frame that was already
            received; the model has not changed.
    """
    frame = link.receive()
    if frame.kind is not kind or frame.step != step or frame.peer != 0:
        raise ProtocolError(
            f"received an unexpected message from {sender}",
            got=f"{frame.kind.name} of step {frame.step}, peer {frame.peer}",
            want=f"{kind.name} of step {step}, peer 0",
        )
    return frame


def of_no_rows(frame: Frame, width: int) -> Tensor:
    """Return the cut or gradient of an exchange without rows, which occurs if batches are sampled.

    The result has the axes (0, width).

    Raises:
        ProtocolError: the frame has a payload, although the exchange has no rows.
    """
    if frame.payload:
        raise ProtocolError(
            "a message of an exchange without rows has a payload",
            got=f"{len(frame.payload)} bytes",
            want="an empty payload",
            where=f"step {frame.step}",
        )
    return torch.zeros(0, width)


def has_own(codec: Codec, hook: str) -> bool:
    """Return whether a codec overrides a method that by default does nothing."""
    return getattr(type(codec), hook) is not getattr(Codec, hook)


class Stateful(Protocol):
    """Interface for the state of codecs and defenses, which a party saves with its weights."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state that training has changed."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


def gather(model: nn.Module, owners: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Collect a model's weights, and the state of codec and defense under ``<owner>/``."""
    state = dict(model.state_dict())
    for owner, holder in owners.items():
        state |= {f"{owner}/{key}": value for key, value in holder.state_dict().items()}
    return state


def lasting(state: Mapping[str, Tensor], owners: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Return a state from `gather`, but without the state of codecs that store values of rows.

    Such codecs need their state only during a training.
    """
    passing = tuple(f"{name}/" for name, one in owners.items() if getattr(one, "needs_rows", False))
    return {name: value.cpu() for name, value in state.items() if not name.startswith(passing)}


def restore(model: nn.Module, owners: Mapping[str, Stateful], state: Mapping[str, Tensor]) -> None:
    """Load a state that `gather` returned."""
    model.load_state_dict({key: value for key, value in state.items() if "/" not in key})
    for owner, holder in owners.items():
        prefix = f"{owner}/"
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        holder.load_state_dict(own)


@dataclass(frozen=True, slots=True)
class CutTerms:
    """Terms on which a feature party and the label party agree for the feature party's cuts.

    Attributes:
        party: name of the feature party.
        width: width of the bottom model's output, before the codec.
        codec: codec object of this endpoint only, made from the agreed spec.
        defense: the party's defense object; all endpoints of the label party share one object.
        in_flight: largest number of cuts that may wait for their gradients at the same time.
        precision: floating-point precision of the feature party's forward passes.
        compiled: whether torch compiles the feature party's model.
        weights: for each label party, a factor for its gradient of the cut, in the order in which
            the gradients arrive.
        local: settings of the additional optimiser steps after an exchange.
    """

    party: str
    width: int
    codec: Codec
    defense: Defense
    in_flight: int = 1
    precision: str = "float32"
    compiled: bool = False
    weights: tuple[float, ...] = (1.0,)
    local: LocalSteps = field(default_factory=LocalSteps)


@dataclass(frozen=True, slots=True)
class Own:
    """Private settings and private state of a party.

    Attributes:
        secret: secret from which the party's random numbers are derived: dropout, a defense's
            noise, a codec's random choices.
        adversary: object that changes this party's batches and messages; by default an honest
            party.
        device: device of the party's models, as a device name of torch.
        checkpoints: the party's checkpoints of a training; None saves no checkpoints.
        sent: journal of sent messages; None if the party needs no journal, see
            `vfl.session.store.session_ledger.notes`.
        ranks: the ranks (processes) of the party, which divide each batch; by default only this
            process.
        augment: augmentation of the party's own training rows; None leaves the rows unchanged.
    """

    secret: Secret
    adversary: Adversary = HONEST
    device: str = "cpu"
    checkpoints: Checkpoints | None = None
    sent: Journal | None = None
    ranks: Ranks = ALONE
    augment: Augment | None = None

    def augmented(self, rows: Tensor, step: int) -> Tensor:
        """Return the party's rows of a batch after augmentation; axes (rows, ...)."""
        if self.augment is None or not len(rows):
            return rows
        with scoped(self.secret.number("augment", step)):
            return self.augment(rows)

    def committed(self) -> int:
        """Return the number of the last committed exchange; 0 without checkpoints."""
        return 0 if self.checkpoints is None else self.checkpoints.committed()


def refuse_augment(terms: Terms, own: Own) -> None:
    """Refuse an augmentation with which the training would break the agreed rules.

    Raises:
        ConfigError: a setting does not allow the augmentation; the error names this setting.
    """
    if own.augment is None or terms.mode != "train":
        return
    for stands, got, why in (
        (terms.secure.partition(":")[0] not in ("none", "sum"), f"secure = '{terms.secure}'",
         "no party has its own bottom model in this secure mode"),
        (not own.ranks.alone, "several ranks", "each rank would draw different augmentations"),
        (terms.dp is not None and not own.augment.rows_apart, "[dp] and a user's function",
         "[dp] needs augmentations that change each row independently, as those of vfl do"),
    ):  # fmt: skip
        if stands:
            raise ConfigError(
                f"inputs cannot be augmented in this session: {why}",
                where="augment",
                got=got,
                fix="remove augment from the party's own file",
            )


@dataclass(slots=True)
class _Pending:
    """A cut whose gradient has not arrived yet."""

    cut: Tensor
    inputs: Tensor
    kept: Any
    context: StepContext
    stash: Stash | None
    calls: Sequence[Call]


class _End:
    """Base class of both endpoints: the agreed terms, the party's private state, and the link."""

    #: Names of a defense's methods that change a message between the model and the codec.
    changing: ClassVar[Sequence[str]] = ()

    def __init__(self, terms: CutTerms, own: Own, link: Link) -> None:
        terms.codec.check(terms.width)
        self.party, self.width = terms.party, terms.width
        self.wire_width = terms.codec.wire_width(terms.width)
        self.codec, self.defense = terms.codec, terms.defense
        self.link, self.adversary = link, own.adversary
        self.in_flight = terms.in_flight
        self._journal = own.sent
        self._commits = has_own(terms.codec, "commit")
        self.device = Compute(own.device).device
        if self.codec.on_card:
            self.codec.device = self.device
        self._looked_at = own.adversary is not HONEST or bool(uses(self.defense, *self.changing))

    @property
    def _leaves_from(self) -> torch.device:
        """Device on which the inputs of the codec must be.

        The result is the CPU if an adversary or a defense changes messages, and otherwise the
        device of the codec.
        """
        return _PROCESSOR if self._looked_at else self.codec.device

    def _commit(self, step: int) -> None:
        if self._commits:
            self.codec.commit(step)


class FeatureEnd(_End):
    """A feature party's endpoint: sends its cuts and applies the returned gradients.

    With more than one cut in flight, each forward pass runs on a copy of the weights; the gradient
    is then exact for the weights of the forward pass.

    Args:
        terms: agreed terms of the party's cuts.
        bottom: the party's bottom model, which maps rows to cuts with axes (rows, width).
        own: the party's private state; dropout and the codec's random choices are derived from its
            secret.
        link: stream to the receivers of the cuts: the label parties, or the middle party.
        optimizer: function that builds the optimiser; None for a party that only answers queries.
        private: function that builds the DP-SGD object from the modules of the party's model and
            their forward function; None trains without DP-SGD.
    """

    layers = None

    def __init__(
        self,
        terms: CutTerms,
        bottom: nn.Module,
        own: Own,
        link: Link,
        optimizer: OptimizerFactory | None = None,
        private: Callable[[nn.Module, Forward], PrivateHalf] | None = None,
    ) -> None:
        super().__init__(terms, own, link)
        width, codec, defense = terms.width, terms.codec, terms.defense
        self.model = nn.ModuleDict({"bottom": defense.wrap_bottom(bottom, width)})
        if (adapter := codec.client_module(width)) is not None:
            self.model["codec"] = adapter
        self._weights, self._local = terms.weights, terms.local
        group.fit(self.model, own.ranks)
        self._compute = Compute(own.device, terms.precision, terms.compiled)
        self._compute.take(self.model)
        self._secret, self._own = own.secret, own
        self._has_loss = has_own(codec, "local_loss")
        always = not isinstance(defense, Undefended)
        self._draws = Draws(own.secret, "rng", self.model, always=always)
        self._optimizer = None
        self._hears = uses(self.defense, "received")
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        if optimizer is not None and self._trainable:
            self._optimizer = own.adversary.optimizer(optimizer(self._trainable))
        self._in_batch = False
        own.adversary.model(self._cuts_for_adversary)
        self.private = None
        if private is not None and self._optimizer is not None:
            self.private = private(self.model, self.through_model)
        self._pending: deque[_Pending] = deque()

    def fit(self, inputs: Callable[[], Tensor]) -> None:
        """Pass the training inputs to the defense once, before step 0, if the defense fits."""
        if uses(self.defense, "fit"):
            with scoped(self._secret.number("fit")):
                self.defense.fit(self.model["bottom"], inputs(), self._secret)

    @property
    def awaiting(self) -> int:
        """Number of cuts for which the gradient has not arrived yet."""
        return len(self._pending)

    def send_cut(self, inputs: Tensor, step: int, rows: np.ndarray | None = None) -> None:
        """Compute the cut of a training batch, axes (rows, ...), and send the cut.

        Args:
            inputs: inputs of the batch's rows.
            step: number of the exchange.
            rows: positions of the batch's rows among the aligned rows, int64.

        Raises:
            NonFiniteError: the cut contains NaN or Inf, which the codec cannot encode.
            WidthError: the output of the bottom model does not have the axes (rows, width).
            DisagreementError: an earlier attempt of this training has sent a different cut in this
                exchange.
        """
        payload = self._go_forward(inputs, step, rows)
        self._send(Frame(Kind.CUT, step, payload), self._pending[-1].cut)

    def answer(self, step: int) -> None:
        """Do nothing: without a secure mode, other parties send no messages before the gradient."""

    def take_gradient(self) -> None:
        """Wait for the gradient of the oldest cut in flight.

        Run the backward pass and an optimiser step.

        Raises:
            ProtocolError, FrameError, NonFiniteError, HijackError: the received message is not
                valid; the model is unchanged.
        """
        assert self._pending, "no cut was sent"
        pending = self._pending[0]
        context = pending.context
        grad = self._receive_gradient(pending)
        for weight in self._weights[1:]:
            grad = grad + weight * self._receive_gradient(pending)
        if self.adversary is not HONEST:
            self.adversary.received(self.party, grad.cpu(), context)
        if self._hears:
            grad = self.defense.received(pending.cut.detach().cpu(), grad.cpu(), context)
        self._pending.popleft()
        self._backward(pending, grad.to(self._compute.device))
        self._commit(context.step)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """Send the cut of rows that the label party evaluates or predicts.

        For a query, only a defense may draw random numbers.
        """
        context = StepContext(step)
        cut = self._query_cut(inputs, context).to(self._leaves_from)
        payload, _ = self._encode(self.adversary.cut(cut, context), context)
        self._send(Frame(Kind.QUERY, step, payload), cut)

    def query_cut(self, inputs: Tensor) -> Tensor:
        """Return the cut of rows as an honest party's `send_query` passes it to the codec.

        The result has the axes (rows, width after a codec's trained module). A defense draws the
        random numbers of a query with step 0.
        """
        return self._query_cut(inputs, INFERENCE).cpu()

    def _cuts_for_adversary(self, inputs: Tensor) -> Tensor:
        if not self._in_batch:
            raise UserError(
                "an adversary computed cuts outside of its method 'batch'",
                where=f"{type(self.adversary).__name__} at party '{self.party}'",
                want="calls of 'cuts_of' in 'batch' only: later calls would change this step",
            )
        return self.query_cut(inputs)

    def _query_cut(self, inputs: Tensor, context: StepContext) -> Tensor:
        set_training(self.model, False)
        with torch.no_grad():
            guarded = StepContext(context.step, secret=self._secret)
            return self._forward(inputs.to(self._compute.device), guarded, None, query=True)

    def take_receipt(self, step: int) -> bytes:
        """Wait for the label party's answer to the query, and return the payload of the answer."""
        answer = expect(self.link, Kind.ACK, step, "the label party").payload
        for _ in self._weights[1:]:
            expect(self.link, Kind.ACK, step, "another label party")
        return bytes(answer)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the model, and the state of codec and defense."""
        return gather(self.model, {"codec": self.codec, "defense": self.defense})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""
        restore(self.model, {"codec": self.codec, "defense": self.defense}, state)

    def training_state(self) -> dict[str, Any]:
        """Return the state for an exact resume: weights, optimiser, and cuts in flight."""
        optimizer = self._optimizer.state_dict() if self._optimizer else {}
        in_flight = [
            {"step": pending.context.step, "state": pending.stash.state}
            for pending in self._pending
            if pending.stash is not None
        ]
        own: dict[str, Any] = {
            "state": self.state_dict(),
            "optimizer": optimizer,
            "in_flight": in_flight,
        }
        if self.private is not None:
            own["clips"] = self.private.state()
        return own | {"adversary": self.adversary.training_state()}

    def load_training_state(
        self, saved: Mapping[str, Any], batch: Callable[[int], tuple[Tensor, np.ndarray]]
    ) -> None:
        """Restore a state that `training_state` returned.

        Cuts that were in flight are computed again, but are not sent again.

        Args:
            saved: the state to restore.
            batch: function that takes the number of an exchange in flight, and returns its inputs
                and the positions of its rows.
        """
        self._pending.clear()
        # The adversary must change these batches in the same way as before, and this must not
        # change the adversary's state.
        tampering = saved.get("adversary", {})
        self.adversary.load_training_state(tampering)
        for earlier in saved["in_flight"]:
            self.load_state_dict(earlier["state"])
            inputs, rows = batch(earlier["step"])
            self._go_forward(inputs, earlier["step"], rows)
        self.load_state_dict(saved["state"])
        if self.private is not None:
            self.private.restore(saved.get("clips", ()))
        self.adversary.load_training_state(tampering)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved["optimizer"])

    def _receive_gradient(self, pending: _Pending) -> Tensor:
        """Receive the gradient of a cut, from the label party whose turn it is."""
        context = pending.context
        frame = expect(self.link, Kind.GRAD, context.step, "the label party")
        if len(pending.cut):
            grad = self.codec.decode_grad(
                frame.payload, pending.kept, len(pending.cut), self.wire_width, context
            )
        else:
            grad = of_no_rows(frame, self.wire_width)
        check_finite(grad, "gradient", self.party, context.step)
        return grad

    def _go_forward(self, inputs: Tensor, step: int, rows: np.ndarray | None) -> Payload:
        """Compute a batch's cut, store it until its gradient arrives, and return its bytes."""
        context = StepContext(step, training=True, secret=self._secret, rows=rows)
        inputs = self._own.augmented(inputs, step)
        fed, _ = self.defense.batch(inputs, None, context)
        self._in_batch = True
        try:
            inputs = self.adversary.batch(inputs if fed is None else fed, context)
        finally:
            self._in_batch = False
        inputs = inputs.to(self._compute.device)
        set_training(self.model, True)
        stash = Stash(self.model, self.state_dict()) if self.in_flight > 1 else None
        calls: Sequence[Call] = ()
        if not len(inputs):
            cut = torch.zeros(0, self.wire_width, device=self._compute.device)
        elif self.private is None:
            with self._draws.at(step):
                cut = self._forward(inputs, context, stash)
        else:
            with self._draws.at(step), self.private.recording() as calls:
                cut = self._forward(inputs, context, stash)
        payload, kept = self._encode(
            self.adversary.cut(cut.detach().to(self._leaves_from), context), context
        )
        self._pending.append(_Pending(cut, inputs, kept, context, stash, calls))
        return payload

    def _forward(
        self, inputs: Tensor, context: StepContext, stash: Stash | None, *, query: bool = False
    ) -> Tensor:
        rows, inputs = len(inputs), filled(inputs) if query else inputs
        with self._compute.forward():
            cut = self._through("bottom", inputs, stash).float()
        check_shape(cut, len(inputs), self.width, self.party)
        cut = self.defense.embedding(cut[:rows], context)
        if "codec" not in self.model:
            return cut
        return self._through("codec", filled(cut) if query else cut, stash)[:rows]

    def through_model(self, rows: Tensor) -> Any:
        """Run the party's modules on rows; the defense's method `embedding` is not called."""
        made = self.model["bottom"](rows)
        return self.model["codec"](made) if "codec" in self.model else made

    def _through(self, part: str, values: Tensor, stash: Stash | None) -> Tensor:
        if stash is not None:
            return stash.forward(part, values)
        return self._compute.run(self.model, part, values)

    def _send(self, frame: Frame, cut: Tensor) -> None:
        """Record in the journal what every attempt must send equally; then send the frame."""
        # masks differ in each attempt, so the journal records the unmasked cut
        if self._journal is not None:
            lasting = frame.payload if self.codec.repeats else bytes_of(cut)
            self._journal.admit(frame.step, lasting)
        self.link.send(frame)

    def _encode(self, cut: Tensor, context: StepContext) -> Encoded:
        """Encode a cut; the label party checks whether the decoded values are finite.

        If a codec cannot encode NaN, the method raises an error for a cut with NaN.
        """
        if not len(cut):
            return Encoded(b"", None)
        try:
            return self.codec.encode(cut, context)
        except NonFiniteError:
            check_finite(cut, "cut", self.party, context.step)
            raise

    def _backward(self, pending: _Pending, grad: Tensor) -> None:
        if self._optimizer is None:
            return
        cut, context = pending.cut, pending.context
        if self.private is not None:
            copies = None
            if pending.stash is not None:
                made = pending.stash.weights
                copies = [
                    made[name] for name, weight in self.model.named_parameters()
                    if weight.requires_grad
                ]  # fmt: skip
            # The label party sends the gradient of the mean loss over this batch; DP-SGD needs the
            # gradient of each row's loss.
            self.private.give_gradients(cut, grad * len(cut), pending.calls, context.step, copies)
            self._optimizer.step()
            return
        self._descend(cut, pending.inputs, grad, context, pending.stash)
        for turn in self._local.turns if len(cut) else ():
            with self._draws.at(context.step, turn):
                again = self._forward(pending.inputs, context, None)
            weights = self._local.weights(again, cut.detach())
            own = grad if weights is None else grad * weights[:, None]
            self._descend(again, pending.inputs, own, context, None)

    def _descend(
        self, cut: Tensor, inputs: Tensor, grad: Tensor, context: StepContext, stash: Stash | None
    ) -> None:
        """Run the backward pass from the cut and from the losses of codec and defense.

        Then update the weights with the optimiser.
        """
        assert self._optimizer is not None, "only in a training"
        losses = [self.codec.local_loss(cut, context)] if self._has_loss else []
        losses.append(self.defense.local_loss(cut, inputs, context))
        roots = [cut, *(loss for loss in losses if loss is not None)]
        if not any(root.requires_grad for root in roots):
            return  # no weight gets a gradient, but the optimiser's momentum would change weights
        drop_gradients(self._trainable)
        go_back(roots, [grad, *map(torch.ones_like, roots[1:])])
        if stash is not None:
            stash.hand_over()
        self._optimizer.step()


def secret_of_end(secret: Secret, party: str) -> Secret:
    """Return the secret of the label party's random numbers for one party's gradients.

    The draws for each party differ: if the noise on the gradients of two parties were equal, they
    could compute the difference without noise.
    """
    return Secret(secret.key("half", party))


class LabelEnd(_End):
    """The label party's endpoint for one feature party: receives cuts and returns their gradients.

    Args:
        terms: agreed terms of the party's cuts.
        own: the label party's private state; random numbers for gradients are derived from its
            secret.
        link: link to the feature party.
    """

    changing = ("gradient",)

    def __init__(self, terms: CutTerms, own: Own, link: Link) -> None:
        super().__init__(terms, own, link)
        self.adapter: nn.Module | None = terms.codec.server_module(terms.width)
        self._secret = secret_of_end(own.secret, terms.party)
        self._pending: tuple[Tensor, Any, StepContext] | None = None
        self._last: Tensor | None = None
        # Gradients that may not have arrived at the feature party yet; the codecs of both parties
        # have not committed the steps of these gradients.
        self._sent: deque[Frame] = deque()

    def receive_cut(self, step: int, count: int, rows: np.ndarray | None = None) -> Tensor:
        """Wait for the cut of a training batch; return the cut, axes (rows, width).

        The received cut is a leaf tensor of autograd. If the codec has a module at the label party,
        the result is the module's output for this tensor.

        Args:
            step: number of the exchange.
            count: number of rows in the exchange.
            rows: positions of the rows among the aligned rows, int64.

        Raises:
            ProtocolError, FrameError, NonFiniteError: the received frame is not valid; the model is
                unchanged.
        """
        context = StepContext(step, training=True, secret=self._secret, rows=rows)
        cut, saved = self._receive(Kind.CUT, context, count)
        cut = cut.to(self.device).requires_grad_()
        self._pending, self._last = (cut, saved, context), cut
        return cut if self.adapter is None else self.adapter(cut)

    def last_cut(self) -> Tensor:
        """Return the last training cut again, from a new leaf tensor; see `receive_cut`."""
        assert self._last is not None, "no cut was received"
        cut = self._last.detach().requires_grad_()
        return cut if self.adapter is None else self.adapter(cut)

    def take(self, kind: Kind, step: int) -> Frame:
        """Wait for the party's frame of this kind and step; return it without decoding."""
        return expect(self.link, kind, step, f"party '{self.party}'")

    def await_gradient(self, total: Tensor, step: int) -> None:
        """Let `send_gradient` send the gradient of `total`, a sum of several parties' cuts."""
        self._pending = (total, None, StepContext(step, training=True, secret=self._secret))

    def send_gradient(self, labels: Tensor) -> None:
        """Send the gradient of the last cut; `labels` are the labels of its rows.

        Raises:
            NonFiniteError: the gradient contains NaN or Inf.
            DisagreementError: an earlier attempt of this training has sent a different gradient in
                this exchange.
        """
        assert self._pending is not None, "no cut was received"
        cut, saved, context = self._pending
        assert cut.grad is not None, "backward has not run"
        grad = cut.grad.to(self._leaves_from)
        if len(grad):
            grad = self.defense.gradient(grad, labels, context)
        grad = self.adversary.gradient(self.party, grad, context)
        # The gradient is checked before it is sent and before the label party's optimiser step, so
        # that an invalid gradient changes no weight of these two parties.
        check_finite(grad, "gradient", self.party, context.step)
        # a secure mode's shares differ in each attempt, but the gradient does not
        if self._journal is not None:
            self._journal.admit(context.step, bytes_of(grad), self.party)
        payload = self.codec.encode_grad(grad, saved, context) if len(grad) else b""
        self._pending = None
        frame = Frame(Kind.GRAD, context.step, payload)
        self._sent.append(frame)
        self.link.send(frame)
        self._commit_all_but(self.in_flight - 1)

    def drained(self) -> None:
        """Commit the steps of all sent gradients, after the last training batch of an epoch."""
        self._commit_all_but(0)

    def sent_state(self) -> list[dict[str, Any]]:
        """Return the sent gradients that may not have arrived at the feature party yet.

        The gradients are returned in encoded form.
        """
        return [
            {
                "step": frame.step,
                "payload": torch.from_numpy(np.frombuffer(frame.payload, np.uint8).copy()),
            }
            for frame in self._sent
        ]

    def send_again(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Send a `sent_state` again unchanged, because new noise would disclose more."""
        self._sent.clear()
        for kept in saved:
            frame = Frame(Kind.GRAD, kept["step"], kept["payload"].numpy().tobytes())
            self._sent.append(frame)
            self.link.send(frame)

    def receive_query(self, step: int, rows: int) -> Tensor:
        """Wait for the cut of queried rows; axes (rows, width). `confirm` answers the query."""
        cut = self._receive(Kind.QUERY, StepContext(step), rows)[0].to(self.device)
        return cut if self.adapter is None else self.adapter(filled(cut))[:rows]

    def confirm(self, step: int, verdict: bytes = b"") -> None:
        """Confirm that the party's query has arrived.

        `verdict` is the decision of early stopping as a byte.
        """
        self.link.send(Frame(Kind.ACK, step, verdict))

    def _commit_all_but(self, last: int) -> None:
        """Commit the steps of sent gradients except the last `last`.

        The feature party commits the same steps.
        """
        while len(self._sent) > last:
            self._commit(self._sent.popleft().step)

    def _receive(self, kind: Kind, context: StepContext, rows: int) -> tuple[Tensor, Any]:
        frame = self.take(kind, context.step)
        if not rows:
            return of_no_rows(frame, self.wire_width), None
        cut, saved = self.codec.decode(frame.payload, rows, self.wire_width, context)
        check_finite(cut, "cut", self.party, context.step)
        if self.adversary is not HONEST:
            self.adversary.received(self.party, cut.cpu(), context)
        return cut, saved


class TrainedParty:
    """Base class of every party that owns a part of the trained model."""

    @property
    def name(self) -> str:
        """The party's name."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Return this party's weights and states, which never leave the party."""
        raise NotImplementedError

    def weights_digest(self) -> str:
        """Return the SHA-256 of the weights; no other value about the weights is disclosed."""
        return weights_digest(self.weights())


class CutReceiver(TrainedParty):
    """Base class of the parties that receive cuts: label parties, and the middle party.

    Attributes:
        ends: the party's endpoints of the exchanges, one for each feature party, in merge order.
        model: the modules that the party trains.
    """

    ends: Mapping[str, LabelEnd]
    model: nn.ModuleDict

    def _own_states(self) -> Mapping[str, Stateful]:
        """Return further objects whose states belong to the weights, by name."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        return lasting(self._state(), self._stateful())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restore the weights that the method `weights` returned."""
        restore(self.model, self._stateful(), weights)

    def _state(self) -> dict[str, Tensor]:
        """Return weights and states, including states that only a training needs."""
        state = gather(self.model, self._stateful())
        return {name: value.cpu() for name, value in state.items()}

    def _stateful(self) -> dict[str, Stateful]:
        codecs = {f"codec-{name}": end.codec for name, end in self.ends.items()}
        return {**self._own_states(), **codecs}


class CutAggregator:
    """Receives the cuts of an exchange from all feature parties, one party after another.

    A secure mode that sums cuts has its own aggregator, which receives only the sum.

    Args:
        ends: the label party's endpoints, one for each feature party, in merge order.
        ledger: ledger that records how long the label party waits for each party.
        stopping: the label party's part in early stopping; if a query decides whether to stop, it
            is confirmed only after the decision.

    Attributes:
        without: parties from which the next query receives no cuts, because they are absent; only
            for models that allow this.
    """

    def __init__(
        self, ends: Mapping[str, LabelEnd], ledger: Ledger, stopping: EarlyStopping
    ) -> None:
        self.ends = ends
        self.without: Collection[str] = ()
        self._ledger = ledger
        self._stopping = stopping

    @property
    def helpers(self) -> Sequence[Link]:
        """Links to parties without columns, which receive a message when the session ends."""
        return ()

    def begin(self) -> Mapping[str, int]:
        """Begin a new attempt; the parties agree on keys if the secure mode needs keys.

        Returns:
            The number of columns of each party's first layer, if first layers are secret-shared;
            otherwise an empty mapping.
        """
        return {}

    def relay(self, exchange: Exchange) -> None:
        """Relay the messages between the feature parties before they send their cuts."""

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        """Receive the cuts of all feature parties, by party; axes (rows, width) each."""
        rows = exchange.rows
        return {name: self._one(name, end, exchange, rows) for name, end in self.ends.items()}

    def send_gradients(self, exchange: Exchange, labels: Tensor) -> None:
        """Send each feature party the gradient of its cut.

        `labels` are the labels of the exchange's rows.
        """
        for end in self.ends.values():
            end.send_gradient(labels)
            if exchange.last:
                end.drained()

    def _one(self, name: str, end: LabelEnd, exchange: Exchange, rows: np.ndarray) -> Tensor:
        started = time.perf_counter()
        if exchange.trains:
            cut = end.receive_cut(exchange.step, len(rows), rows)
        else:
            cut = end.receive_query(exchange.step, len(rows))
            self._confirm(end, exchange)
        self._waited(name, exchange, started)
        return cut

    def _confirm(self, end: LabelEnd, exchange: Exchange) -> None:
        if exchange.confirmed and not self._stopping.judges(exchange):
            end.confirm(exchange.step)

    def _waited(self, name: str, exchange: Exchange, started: float) -> None:
        phase = "train" if exchange.trains else "evaluate"
        self._ledger.waited(name, phase, time.perf_counter() - started)
