"""One round between a feature party and the label party: both ends, and what they share.

    feature party   inputs -> bottom -> cut -> defense -> codec -> frame
    label party     frame -> codec -> cut of each party, or their sum -> top
    label party     gradient -> defense -> codec -> frame
    feature party   frame -> codec -> gradient -> backward pass, optimiser step

Both ends stand here, below the rooms of the parties: an attack plays a victim's end, and a secure
mode stands in the place of a codec or of a whole end. The loops around them are `FeatureParty` and
`LabelParty`.

With several exchanges in flight the optimiser moves the weights between the forward and the
backward pass of a cut. The exact gradient of that cut belongs to the weights that made it, and
autograd refuses weights that were changed in place, so such a forward pass runs on copies (weight
stashing: Harlap et al. 2018, PipeDream, section 3.3).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.func import functional_call

from vfl.compression import INFERENCE, Codec, Encoded, StepContext
from vfl.core.errors import ConfigError, NonFiniteError, ProtocolError, WidthError
from vfl.core.frame import Frame, Kind, Link, Payload
from vfl.core.seeds import Secret, scoped
from vfl.core.torch_internals import Compute, OptimizerFactory, go_back
from vfl.core.traffic import Ledger
from vfl.datasets.augment import Augment
from vfl.defenses import Defense, uses
from vfl.defenses.base import Undefended
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import Forward
from vfl.privacy.row_gradients import Call
from vfl.session.ranks import group
from vfl.session.ranks.group import ALONE, Ranks
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.store.checkpoint import Checkpoints
from vfl.session.store.journal import Journal

if TYPE_CHECKING:
    from vfl.session.terms import Terms


class Adversary:
    """A dishonest party. Every hook defaults to honest behaviour."""

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        """The inputs its bottom is really fed; axes (rows, ...)."""
        return inputs

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        """The labels of a batch that it really trains on (label party); axes (rows,)."""
        return labels

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """The optimiser it really uses for its own half."""
        return optimizer

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        """The cut it really sends (feature party); detached, axes (rows, width)."""
        return cut

    def gradient(self, party: str, grad: Tensor, context: StepContext) -> Tensor:
        """The gradient it really sends to `party` (label party); axes (rows, width)."""
        return grad

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        """What just arrived: a gradient (feature party) or a party's cut (label party)."""

    def training_state(self) -> dict[str, Any]:
        """What it needs to go on exactly, and to use afterwards: tensors, numbers and texts.

        What it makes of an exchange's batch follows from the exchange's number and this state at a
        feature party, whose batches in flight are made again after a resume.
        """
        return {}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `training_state` gave."""


HONEST = Adversary()
#: Stands where a party's name does; no party has it, for it is longer than a name can be.
SUM = "the sum of the feature parties' cuts"
_PROCESSOR = torch.device("cpu")


#: Layers whose forward pass draws nothing. Any other class, a user's above all, may draw.
_PLAIN = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Linear,
    nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.GroupNorm, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.MaxPool2d,
    nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


class Draws:
    """The private draws of one model, a stream of its own for every step.

    Args:
        secret: of the party that owns the model.
        purpose: keeps models of one party apart.
        model: what will run; without a layer that may draw, no generator is set up.
        always: something else that may draw runs beside it, a defense for example.
    """

    def __init__(
        self, secret: Secret, purpose: str, model: nn.Module, *, always: bool = False
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        # The exact class: a subclass of a plain layer may do anything.
        self._needed = always or any(type(part) not in _PLAIN for part in model.modules())

    def at(self, step: int, turn: int = 0) -> AbstractContextManager[None]:
        """What the model's forward pass of a step runs under, and of the local steps after it."""
        if not self._needed:
            return nullcontext()
        purpose = (self._purpose, step, turn) if turn else (self._purpose, step)
        return scoped(self._secret.number(*purpose))


def check_finite(values: Tensor, what: str, party: str, step: int) -> None:
    """Refuse NaN and Inf before they reach a model.

    The sum is finite for every finite tensor that does not overflow, and costs one pass without
    allocating; only when it is not are the entries looked at. A step makes nine such checks, so
    the sum is judged as a Python number: torch would run five operations on it.

    Raises:
        NonFiniteError: names the party and the step, and the share of entries, never a value.
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
    """All values of a tensor, in the order of its axes."""
    return values.detach().cpu().numpy().tobytes()


def check_shape(cut: Tensor, rows: int, width: int, party: str) -> None:
    """Refuse a bottom whose output is not (rows, width).

    Raises:
        WidthError: with both shapes.
    """
    if cut.shape != (rows, width):
        raise WidthError(
            f"the bottom of party '{party}' gives another shape than agreed",
            got=f"{tuple(cut.shape)}",
            want=f"({rows}, {width})",
            fix=f"end the bottom in a layer of {width} units, or set the party's width",
        )


def expect(link: Link, kind: Kind, step: int, sender: str) -> Frame:
    """The next frame, which must be of this kind and step; `sender` is for the message.

    Raises:
        ProtocolError: anything else, a repeated frame included; nothing was changed by it.
    """
    frame = link.receive()
    if frame.kind is not kind or frame.step != step or frame.branch != 0:
        raise ProtocolError(
            f"a message out of turn from {sender}",
            got=f"{frame.kind.name} of step {frame.step}, branch {frame.branch}",
            want=f"{kind.name} of step {step}, branch 0",
        )
    return frame


def of_no_rows(frame: Frame, width: int) -> Tensor:
    """What an exchange about no rows brings, where batches are sampled; axes (0, width).

    Raises:
        ProtocolError: it brings something.
    """
    if frame.payload:
        raise ProtocolError(
            "a message about no rows holds something",
            got=f"{len(frame.payload)} bytes",
            want="an empty payload",
            where=f"step {frame.step}",
        )
    return torch.zeros(0, width)


#: Fewest rows a query's forward pass has. Libraries multiply fewer by other routines, whose last
#: bits differ, so that a row's answer would tell how many others were asked with it.
_FULL_ROWS = 32
#: By how many rows there are: each of them, and the last one again.
_REPEATED = [torch.arange(_FULL_ROWS).clamp(max=max(rows - 1, 0)) for rows in range(_FULL_ROWS)]


def filled(rows: Tensor) -> Tensor:
    """The rows of a query, the last one repeated up to the fewest a forward pass has."""
    count = rows.shape[0]
    if not 0 < count < _FULL_ROWS:
        return rows
    return rows.index_select(0, _REPEATED[count].to(rows.device))


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Optimiser steps between two exchanges, with what the last one brought.

    Liu et al. 2022 (FedBCD), algorithm 1, here with gradients of cuts; Fu et al. 2022 (CELU-VFL),
    section 3, for the weights of rows.

    Attributes:
        steps: for one exchange, the usual one included.
        angle: see `TrainSettings.local_angle`, degrees.

    >>> cuts = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    >>> LocalSteps(steps=2, angle=60).weights(cuts, torch.tensor([[1.0, 0.0]] * 3))
    tensor([1.0000, 0.7071, 0.0000])
    """

    steps: int = 1
    angle: float = 0.0

    @property
    def turns(self) -> range:
        """Numbers of the further steps, from 1."""
        return range(1, self.steps)

    def weights(self, now: Tensor, then: Tensor) -> Tensor | None:
        """What each row weighs in a further step, axes (rows,); None for all alike.

        Args:
            now: cuts or gradients, axes (rows, width).
            then: the same rows at the exchange.
        """
        if not self.angle:
            return None
        cosine = nn.functional.cosine_similarity(now.detach(), then, dim=1)
        return torch.where(cosine >= math.cos(math.radians(self.angle)), cosine, 0.0)


def set_training(model: nn.Module, training: bool) -> None:
    """Put a model into its training or evaluation mode, unless it is there already."""
    if model.training is not training:
        model.train(training)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Forget the last step's gradients.

    An optimiser's own `zero_grad` does the same inside a profiler range that costs more than it,
    and a split step has one optimiser a party.
    """
    for parameter in parameters:
        parameter.grad = None


def has_own(codec: Codec, hook: str) -> bool:
    """Whether a codec has a version of its own of a hook that does nothing by default."""
    return getattr(type(codec), hook) is not getattr(Codec, hook)


class Stateful(Protocol):
    """What codecs and defenses have in common: state that a party keeps to predict or go on."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """State that moved during training."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


def gather(model: nn.Module, owners: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """The model's weights under their own names, each owner's state under ``<owner>/``."""
    state = dict(model.state_dict())
    for owner, holder in owners.items():
        state |= {f"{owner}/{key}": value for key, value in holder.state_dict().items()}
    return state


def lasting(state: Mapping[str, Tensor], owners: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """A gathered state without what codecs keep for each row: no model needs it once trained."""
    passing = tuple(f"{name}/" for name, one in owners.items() if getattr(one, "needs_rows", False))
    return {name: value.cpu() for name, value in state.items() if not name.startswith(passing)}


def restore(model: nn.Module, owners: Mapping[str, Stateful], state: Mapping[str, Tensor]) -> None:
    """Load what `gather` gave."""
    model.load_state_dict({key: value for key, value in state.items() if "/" not in key})
    for owner, holder in owners.items():
        prefix = f"{owner}/"
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        holder.load_state_dict(own)


@dataclass(frozen=True, slots=True)
class CutTerms:
    """What both ends agreed on about the cuts of one feature party.

    Attributes:
        party: the feature party's name.
        width: of its bottom's output.
        codec, defense: instances of this end alone, from the specs that were agreed on.
        in_flight: how many cuts may await their gradients at once.
        precision: of the feature party's forward passes.
        compiled: whether its model is.
        weights: of the gradients that come back, one a label party, in the order they are received.
        local: steps between exchanges.
    """

    party: str
    width: int
    codec: Codec
    defense: Defense
    in_flight: int = 1
    precision: str = "float32"
    compiled: bool = False
    weights: tuple[float, ...] = (1.0,)
    local: LocalSteps = LocalSteps()


@dataclass(frozen=True, slots=True)
class Own:
    """What a party keeps to itself.

    Attributes:
        secret: private draws follow from it: dropout, a defense's noise, a codec's choices.
        adversary: tampering on this side; honest by default.
        device: where its models run, as torch names it.
        checkpoints: where it saves while it trains; None saves nothing.
        sent: notes what its training sends, where something protecting is drawn.
        ranks: the processes that share its batches; this one alone by default.
        augment: what it does with its own training rows; None leaves them.
    """

    secret: Secret
    adversary: Adversary = HONEST
    device: str = "cpu"
    checkpoints: Checkpoints | None = None
    sent: Journal | None = None
    ranks: Ranks = ALONE
    augment: Augment | None = None

    def augmented(self, rows: Tensor, step: int) -> Tensor:
        """The own rows of a training batch as its bottom gets them; axes (rows, ...)."""
        if self.augment is None or not len(rows):
            return rows
        with scoped(self.secret.number("augment", step)):
            return self.augment(rows)

    def committed(self) -> int:
        """The last step that was committed; 0 without checkpoints."""
        return 0 if self.checkpoints is None else self.checkpoints.committed()


def refuse_augment(terms: Terms, own: Own) -> None:
    """Refuse rows that change at each step where a training could not be what was agreed on.

    Raises:
        ConfigError: with what is in the way.
    """
    if own.augment is None or terms.mode != "train":
        return
    for stands, got, why in (
        (terms.secure.partition(":")[0] not in ("none", "sum"), f"secure = '{terms.secure}'",
         "no party has a bottom of its own there"),
        (not own.ranks.alone, "several ranks", "each rank would draw by itself"),
        (terms.dp is not None and not own.augment.rows_apart, "[dp] and a function of one's own",
         "[dp] needs augmentations that change each row by itself, which those by name do"),
    ):  # fmt: skip
        if stands:
            raise ConfigError(
                f"inputs are not augmented here: {why}",
                where="augment",
                got=got,
                fix="leave augment out",
            )


class Stash:
    """A copy of a party's state at one step, and the gradients of its weights.

    Args:
        model: the party's modules by name.
        state: everything the party's state is at this step; see `gather`.

    Attributes:
        state: the copy.
        weights: of it, by name, which gradients are left at.
    """

    def __init__(self, model: nn.ModuleDict, state: Mapping[str, Tensor]) -> None:
        self.state = {name: value.detach().clone() for name, value in state.items()}
        self._model = model
        self.weights = {
            name: self.state[name].detach().requires_grad_(weight.requires_grad)
            for name, weight in model.named_parameters()
        }

    def forward(self, part: str, inputs: Tensor) -> Tensor:
        """What one of the modules makes of `inputs` with the weights of this step.

        Buffers, such as running statistics, move as in any forward pass of the module.
        """
        module, prefix = self._model[part], f"{part}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }
        moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
        outputs: Tensor = functional_call(module, own | moved, (inputs,))
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(moved[name])
        return outputs

    def hand_over(self) -> None:
        """Add the gradients that backward left at the copies to those of the party's weights."""
        for name, weight in self._model.named_parameters():
            grad = self.weights[name].grad
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad + grad


@dataclass(slots=True)
class _Pending:
    """A cut whose gradient has not come yet."""

    cut: Tensor
    inputs: Tensor
    kept: Any
    context: StepContext
    stash: Stash | None
    calls: Sequence[Call]


class _End:
    """What both ends of a round hold: what was agreed, what is the party's own, and the link."""

    #: Hooks of a defense between a model and what leaves.
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
        """Where a codec gets what leaves: adversaries, and defenses but models, take no card's."""
        return _PROCESSOR if self._looked_at else self.codec.device

    def _commit(self, step: int) -> None:
        if self._commits:
            self.codec.commit(step)


class FeatureEnd(_End):
    """Sends the cuts of one feature party and applies the gradients that come back.

    With more than one cut in flight, each forward pass runs on a copy of the weights, which its
    gradient is then the exact one of.

    Args:
        terms: what was agreed about its cuts.
        bottom: its model; rows in, axes (rows, width) out.
        own: its secret, which dropout and the codec's private draws follow from, and its device.
        link: the stream to the label party.
        optimizer: builds the optimiser; None for a party that only answers queries.
        private: gives DP-SGD of its half, from modules and from what they make of rows; None
            trains without.
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
        self.private = None
        if private is not None and self._optimizer is not None:
            self.private = private(self.model, self.through_model)
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

    def send_cut(self, inputs: Tensor, step: int, rows: np.ndarray | None = None) -> None:
        """Forward a training batch of axes (rows, ...) and send its cut.

        Args:
            inputs: the batch.
            step: number of the exchange.
            rows: positions of the batch in the aligned rows, int64.

        Raises:
            NonFiniteError: the cut holds NaN or Inf.
            WidthError: the bottom's output is not (rows, width).
            DisagreementError: this training has sent another cut of this step.
        """
        payload = self._go_forward(inputs, step, rows)
        self._send(Frame(Kind.CUT, step, payload), self._pending[-1].cut)

    def answer(self, step: int) -> None:
        """Nothing is relayed between parties that each hold a bottom."""

    def take_gradient(self) -> None:
        """Wait for the gradient of the oldest cut, go backward, step the optimiser.

        Raises:
            ProtocolError, FrameError, NonFiniteError, HijackError: the model is left as it was.
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
        """Forward rows for evaluation or prediction and send their cut; only a defense may draw."""
        context = StepContext(step)
        cut = self._query_cut(inputs, context).to(self._leaves_from)
        payload, _ = self._encode(self.adversary.cut(cut, context), context)
        self._send(Frame(Kind.QUERY, step, payload), cut)

    def query_cut(self, inputs: Tensor) -> Tensor:
        """What `send_query` encodes: nothing is random; axes (rows, width on the wire)."""
        return self._query_cut(inputs, INFERENCE).cpu()

    def _query_cut(self, inputs: Tensor, context: StepContext) -> Tensor:
        set_training(self.model, False)
        with torch.no_grad():
            guarded = StepContext(context.step, secret=self._secret)
            return self._forward(inputs.to(self._compute.device), guarded, None, query=True)

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has the query; what it says to it."""
        answer = expect(self.link, Kind.ACK, step, "the label party").payload
        for _ in self._weights[1:]:
            expect(self.link, Kind.ACK, step, "another label party")
        return bytes(answer)

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
        """Restore what `training_state` gave; cuts in flight are made again, but not sent.

        Args:
            saved: the state.
            batch: the inputs and positions of an exchange that was in flight, by its step.
        """
        self._pending.clear()
        # What it makes of a batch again must not differ; making it again must not move its state.
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
        """The next label party's gradient of a cut."""
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
        """Make the cut of a training batch and await its gradient; the payload to send."""
        context = StepContext(step, training=True, secret=self._secret, rows=rows)
        inputs = self._own.augmented(inputs, step)
        fed, _ = self.defense.batch(inputs, None, context)
        inputs = self.adversary.batch(inputs if fed is None else fed, context)
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
        """What the modules make of rows, without the defense's own draws."""
        made = self.model["bottom"](rows)
        return self.model["codec"](made) if "codec" in self.model else made

    def _through(self, part: str, values: Tensor, stash: Stash | None) -> Tensor:
        if stash is not None:
            return stash.forward(part, values)
        return self._compute.run(self.model, part, values)

    def _send(self, frame: Frame, cut: Tensor) -> None:
        """Send what a cut was encoded to, noted before by what is the same in every attempt."""
        if self._journal is not None:  # masks are not, so it is the cut below them
            lasting = frame.payload if self.codec.repeats else bytes_of(cut)
            self._journal.admit(frame.step, lasting)
        self.link.send(frame)

    def _encode(self, cut: Tensor, context: StepContext) -> Encoded:
        """The label party checks what it decodes; a codec that would hide NaN refuses it here."""
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
            # What came back is of the mean loss of this batch's rows.
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
        """Go backward from a cut and from what codec and defense add to the loss, and step."""
        assert self._optimizer is not None, "only where something is trained"
        losses = [self.codec.local_loss(cut, context)] if self._has_loss else []
        losses.append(self.defense.local_loss(cut, inputs, context))
        roots = [cut, *(loss for loss in losses if loss is not None)]
        if not any(root.requires_grad for root in roots):
            return  # nothing learned of this cut; an optimiser's momentum would move on
        drop_gradients(self._trainable)
        go_back(roots, [grad, *map(torch.ones_like, roots[1:])])
        if stash is not None:
            stash.hand_over()
        self._optimizer.step()


def secret_of_end(secret: Secret, party: str) -> Secret:
    """What the label party draws from for one party's cuts and gradients.

    Each has draws of its own: equal noise on the gradients of two would cancel out.
    """
    return Secret(secret.key("half", party))


class LabelEnd(_End):
    """Receives the cuts of one feature party and returns their gradients.

    Args:
        terms: what was agreed about the party's cuts.
        own: the label party's secret, for private draws on gradients, and its device.
        link: the stream to that party.
    """

    changing = ("gradient",)

    def __init__(self, terms: CutTerms, own: Own, link: Link) -> None:
        super().__init__(terms, own, link)
        self.adapter: nn.Module | None = terms.codec.server_module(terms.width)
        self._secret = secret_of_end(own.secret, terms.party)
        self._pending: tuple[Tensor, Any, StepContext] | None = None
        self._last: Tensor | None = None
        # Gradients the party may not have taken yet: their steps are final at neither end.
        self._sent: deque[Frame] = deque()

    def receive_cut(self, step: int, count: int, rows: np.ndarray | None = None) -> Tensor:
        """Wait for a training cut; axes (rows, width), ready to be differentiated.

        Args:
            step: number of the exchange.
            count: how many rows.
            rows: their positions in the aligned rows, int64.

        Raises:
            ProtocolError, FrameError, NonFiniteError: nothing was changed by the frame.
        """
        context = StepContext(step, training=True, secret=self._secret, rows=rows)
        cut, saved = self._receive(Kind.CUT, context, count)
        cut = cut.to(self.device).requires_grad_()
        self._pending, self._last = (cut, saved, context), cut
        return cut if self.adapter is None else self.adapter(cut)

    def last_cut(self) -> Tensor:
        """The last training cut again, for a step between exchanges; nothing is received."""
        assert self._last is not None, "no cut was received"
        cut = self._last.detach().requires_grad_()
        return cut if self.adapter is None else self.adapter(cut)

    def take(self, kind: Kind, step: int) -> Frame:
        """Wait for the party's frame of this kind and step, which is not decoded yet."""
        return expect(self.link, kind, step, f"party '{self.party}'")

    def await_gradient(self, total: Tensor, step: int) -> None:
        """What `send_gradient` sends is the gradient of this tensor, which several may share."""
        self._pending = (total, None, StepContext(step, training=True, secret=self._secret))

    def send_gradient(self, labels: Tensor) -> None:
        """Send the gradient that backward left at the last cut; `labels` of its rows."""
        assert self._pending is not None, "no cut was received"
        cut, saved, context = self._pending
        assert cut.grad is not None, "backward has not run"
        grad = cut.grad.to(self._leaves_from)
        if len(grad):
            grad = self.defense.gradient(grad, labels, context)
        grad = self.adversary.gradient(self.party, grad, context)
        # Checked before the first party gets one: a broken step leaves every weight as it was.
        check_finite(grad, "gradient", self.party, context.step)
        if self._journal is not None:  # the gradient itself: shares of one are new in each attempt
            self._journal.admit(context.step, bytes_of(grad), self.party)
        payload = self.codec.encode_grad(grad, saved, context) if len(grad) else b""
        self._pending = None
        frame = Frame(Kind.GRAD, context.step, payload)
        self._sent.append(frame)
        self.link.send(frame)
        self._commit_all_but(self.in_flight - 1)

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
        cut = self._receive(Kind.QUERY, StepContext(step), rows)[0].to(self.device)
        return cut if self.adapter is None else self.adapter(filled(cut))[:rows]

    def confirm(self, step: int, verdict: bytes = b"") -> None:
        """Tell the party that its query is here, and what followed from it."""
        self.link.send(Frame(Kind.ACK, step, verdict))

    def _commit_all_but(self, last: int) -> None:
        """The party's end commits the same steps before it makes its next cut."""
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


class CutAggregator:
    """Takes the cuts of one exchange after the other, each feature party's by itself.

    A secure mode has one of its own, which takes their sum.

    Args:
        ends: the label party's end of the round with every feature party, in merge order.
        ledger: where time spent waiting is counted.
        stopping: says which answers are left to it.

    Attributes:
        without: parties that take no part in the next query, where one may be missing.
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
        """Streams to parties without columns, which are told when the session is over."""
        return ()

    def begin(self) -> Mapping[str, int]:
        """A new attempt has begun: let the parties agree on keys, where a mode needs any.

        Returns:
            Columns of each party's first layer, where layers are shared.
        """
        return {}

    def relay(self, exchange: Exchange) -> None:
        """Carry what the feature parties say to each other before they send their cuts."""

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        """What arrived, by feature party; axes (rows, width) each."""
        rows = exchange.rows
        return {name: self._one(name, end, exchange, rows) for name, end in self.ends.items()}

    def send_gradients(self, exchange: Exchange, labels: Tensor) -> None:
        """Send each party the gradient of what it sent; `labels` of the exchange's rows."""
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
