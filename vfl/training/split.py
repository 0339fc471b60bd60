"""A split network as one torch module, for anybody's own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.compression import Codec, StepContext
from vfl.core.errors import ConfigError, DataError, SpecError
from vfl.core.frame import Frame, Kind, Observer
from vfl.core.seeds import Secret, scoped
from vfl.core.traffic import Ledger
from vfl.defenses.base import LabelKind, Undefended
from vfl.session.exchange import Draws, check_finite, check_shape, secret_of_end
from vfl.training.specs import checked

_LABEL = "label"
#: Hooks in which a defense looks at the labels of a batch.
_ON_LABELS = ("loss", "gradient")
#: Hooks that act where this module has no hand.
_ELSEWHERE = ("labels", "counts", "batch", "fit", "targets", "received")


class SplitModule(nn.Module):
    """Bottoms, cut and top in one module; every forward and backward pass crosses real frames.

    What the top sees, and the gradients the bottoms get, are decoded from the bytes that would
    travel, so a loop around this module trains what a federation would. `ledger` counts them.
    A defense acts as it does there, or a step ends in an error: where it looks at labels, a forward
    pass in training needs them, and the loss needs `extra_loss`. The loss itself is the caller's;
    gradients of a mean over the batch, with rows of equal weight, are what defenses expect.

    Args:
        bottoms: each feature party's model, from axes (rows, ...) to (rows, its width).
        top: the label party's model, from the merged cuts to outputs; of classes, one for each.
        widths: width of each party's cut.
        codec, defense: specs, as everywhere.
        merge: spec of a merger, as everywhere.
        task: "classification", or "regression" where labels are numbers.
        seed: stands in for the parties' secrets, which in one process protect nobody. Dropout, and
            layers of a defense that draw, follow from it as well.
        observers: told about every frame besides the ledger, a `Trace` for example.

    >>> bottoms = {"bank": nn.Linear(3, 4), "shop": nn.Linear(5, 4)}
    >>> model = SplitModule(bottoms, nn.Linear(8, 2), {"bank": 4, "shop": 4}, codec="topk:k=2")
    >>> model({"bank": torch.ones(6, 3), "shop": torch.ones(6, 5)}).shape
    torch.Size([6, 2])

    Raises:
        ConfigError, SpecError: whatever an experiment file with these settings is refused for, or a
            defense that needs the training loop, the task's loss or all the training rows.
    """

    def __init__(
        self,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        widths: Mapping[str, int],
        *,
        codec: str = "none",
        defense: str = "none",
        merge: str = "concat",
        task: str = "classification",
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__()
        _check_parties(bottoms, widths)
        content = {
            "seed": seed,
            "codec": codec,
            "defense": defense,
            "merge": merge,
            "parties": {name: {"width": width} for name, width in widths.items()},
            "label": {"party": _LABEL, "task": task},
        }
        checked(content, "the arguments of SplitModule")
        self.widths = dict(widths)
        self.task = task
        self.ledger = Ledger()
        self.step = 0
        self._observers: tuple[Observer, ...] = (self.ledger, *observers)
        self._defense = _reachable(defense)
        self._codecs = {name: compression.make(codec) for name in bottoms}
        self._secrets = {name: Secret.of_simulation(seed, name) for name in bottoms}
        self._label_secret = Secret.of_simulation(seed, _LABEL)
        self.bottoms = nn.ModuleDict()
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        self._draws: dict[str, Draws] = {}
        always = not isinstance(self._defense, Undefended)
        for name, bottom in bottoms.items():
            width, own = widths[name], self._codecs[name]
            with scoped(self._secrets[name].number("init")):
                self.bottoms[name] = self._defense.wrap_bottom(bottom, width)
                self.encoders[name] = own.client_module(width) or nn.Identity()
            self.decoders[name] = own.server_module(width) or nn.Identity()
            end = nn.ModuleList([self.bottoms[name], self.encoders[name]])
            self._draws[name] = Draws(self._secrets[name], "rng", end, always=always)
        merging, in_order = models.make_merger(merge), [widths[name] for name in bottoms]
        with scoped(self._label_secret.number("init")):
            self.top = self._defense.wrap_top(top, merging.width(in_order))
            self.merger = merging.build(in_order)
        self._top_draws = Draws(self._label_secret, "rng", self.top, always=always)
        self._on_labels = defenses.uses(self._defense, *_ON_LABELS)
        self._acting = [*self._on_labels, *defenses.uses(self._defense, "local_loss")]
        self._prepared = not defenses.uses(self._defense, "prepare")
        self._additions: list[_Addition] = []

    def forward(self, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Outputs for a batch.

        Args:
            inputs: each party's own rows, axes (rows, ...), in the same order.
            labels: axes (rows,); needed in training by defenses that look at labels.

        Raises:
            SpecError: the defense looks at labels, and there are none, or they are of a kind that
                it means nothing for.
            DataError: labels that are no class of the outputs, or of another number of rows.
        """
        context = StepContext(self.step, self.training)
        addition = _Addition()
        if self.training and labels is None:
            self._refuse_without_labels()
        cuts = {
            name: self._cross(name, inputs[name], labels, context, addition)
            for name in self.bottoms
        }
        with self._top_draws.at(self.step) if self.training else nullcontext():
            outputs: Tensor = self.top(self.merger(*cuts.values()))
            if self.training:
                self._check_labels(labels, outputs)
            here = self._context(context, self._label_secret)
            outputs = self._defense.logits(outputs, here)
            if self.training and labels is not None:
                addition.add(self._defense.loss(cuts, labels, outputs, here))
        if self.training:
            self.step += 1
            if addition.total is not None:
                self._additions.append(addition)
        return outputs

    def extra_loss(self) -> Tensor:
        """What codec and defense add to the loss of the last forward pass; 0 if nothing.

        A training whose loss lacks it ends with an error in the backward pass.
        """
        taken = [one.taken() for one in self._additions]
        self._additions.clear()
        terms = [term for term in taken if term is not None]
        return sum(terms[1:], terms[0]) if terms else torch.zeros(())

    def _cross(
        self,
        name: str,
        rows: Tensor,
        labels: Tensor | None,
        context: StepContext,
        addition: _Addition,
    ) -> Tensor:
        codec = self._codecs[name]
        here = self._context(context, self._secrets[name])
        guarded = StepContext(context.step, context.training, self._secrets[name])
        with self._draws[name].at(context.step) if self.training else nullcontext():
            cut: Tensor = self.bottoms[name](rows)
            check_shape(cut, len(rows), self.widths[name], name)
            cut = self.encoders[name](self._defense.embedding(cut, guarded))
        check_finite(cut.detach(), "cut", name, context.step)
        if self.training:
            addition.add(codec.local_loss(cut, here))
            addition.add(self._defense.local_loss(cut, rows, here))
        there = self._context(context, secret_of_end(self._label_secret, name))
        crossing = _Crossing(
            name, codec, self._defense, self._acting, labels, self._observers, here, there, addition
        )
        arrived: Tensor = self.decoders[name](_Cross.apply(cut, crossing))  # type: ignore[no-untyped-call]
        return arrived

    def _context(self, context: StepContext, secret: Secret) -> StepContext:
        return StepContext(context.step, context.training, secret if context.training else None)

    def _refuse_without_labels(self) -> None:
        """Refuse a training batch without labels where the defense needs them."""
        if self._on_labels:
            raise SpecError(
                "this defense looks at the labels of each training batch, and got none",
                where=f"step {self.step}",
                got=f"no labels for its '{self._on_labels[0]}'",
                want="model(inputs, labels)",
                fix="give the labels, or call model.eval() first if nothing is trained",
            )

    def _check_labels(self, labels: Tensor | None, outputs: Tensor) -> None:
        """Hold labels to what an experiment of this task has, and tell the defense their kind."""
        if self._prepared and not self._on_labels:
            return
        classes = None
        if self.task == "classification":
            classes = outputs.shape[1] if outputs.dim() == 2 else 0
        if labels is not None:
            _require_labels(labels, len(outputs), classes)
        if not self._prepared:
            self._defense.prepare(LabelKind(classes))
            self._prepared = True


class _Addition:
    """What codec and defense add to the loss of one forward pass.

    Attributes:
        total: the sum; None for nothing.
        arrived: whether a backward pass has come through it.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.arrived = False

    def add(self, term: Tensor | None) -> None:
        """One more term."""
        if term is not None:
            self.total = term if self.total is None else self.total + term

    def taken(self) -> Tensor | None:
        """The sum, for the caller's loss.

        It is a node made after the forward pass, which autograd comes through before any cut.
        """
        if self.total is None or not self.total.requires_grad:
            return self.total
        taken = self.total.view_as(self.total)
        taken.register_hook(self._note)  # type: ignore[no-untyped-call]
        return taken

    def _note(self, grad: Tensor) -> None:
        self.arrived = True

    def require(self, party: str, step: int) -> None:
        """Refuse a gradient that lacks what belongs into it."""
        if self.total is not None and self.total.requires_grad and not self.arrived:
            raise SpecError(
                "codec or defense add to the loss, and this loss lacks it",
                where=f"step {step}, at the gradient of party '{party}'",
                want="loss + model.extra_loss() in one backward pass",
            )


@dataclass(frozen=True, eq=False)
class _Crossing:
    """One cut's way to the label party and its gradient's way back."""

    party: str
    codec: Codec
    defense: defenses.Defense
    acting: Sequence[str]
    labels: Tensor | None
    observers: Sequence[Observer]
    here: StepContext
    there: StepContext
    addition: _Addition

    def up(self, cut: Tensor) -> tuple[Tensor, Any, Any]:
        payload, kept = self.codec.encode(cut, self.here)
        kind = Kind.CUT if self.here.training else Kind.QUERY
        self._tell("up", Frame(kind, self.here.step, payload))
        rows, width = cut.shape
        decoded, saved = self.codec.decode(payload, rows, width, self.there)
        return decoded, kept, saved

    def down(self, grad: Tensor, kept: Any, saved: Any) -> Tensor:
        self.addition.require(self.party, self.there.step)
        grad = self._defended(grad)
        check_finite(grad, "gradient", self.party, self.there.step)
        payload = self.codec.encode_grad(grad.contiguous(), saved, self.there)
        self._tell("down", Frame(Kind.GRAD, self.there.step, payload))
        rows, width = grad.shape
        received = self.codec.decode_grad(payload, kept, rows, width, self.here)
        self.codec.commit(self.here.step)
        return received

    def _defended(self, grad: Tensor) -> Tensor:
        """The gradient that is really encoded; a defense acts on those of training steps alone."""
        if self.acting and not self.there.training:
            raise SpecError(
                "this defense acts in training steps, and this is a gradient of an evaluation",
                where=f"the gradient of party '{self.party}'",
                got=f"model.eval() before it, where '{self.acting[0]}' does not act",
                fix="model.train() before the forward pass; single layers may be in eval()",
            )
        if self.labels is None:  # then no hook looks at them
            return grad
        return self.defense.gradient(grad, self.labels, self.there)

    def _tell(self, direction: str, frame: Frame) -> None:
        for observer in self.observers:
            observer(self.party, direction, frame)


class _Cross(torch.autograd.Function):
    """A crossing as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, crossing: _Crossing) -> Tensor:
        decoded, kept, saved = crossing.up(cut.detach())
        ctx.way_back = (crossing, kept, saved)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        crossing, kept, saved = ctx.way_back
        return crossing.down(grads[0], kept, saved), None


def _reachable(spec: str) -> defenses.Defense:
    """The defense, unless it acts where this module has no hand."""
    defense = defenses.make(spec)
    missed = defenses.uses(defense, *_ELSEWHERE)
    members = defense.members if isinstance(defense, defenses.Chain) else (defense,)
    for member in members:
        # Noise in the loss that is as large as a row's part of the task's own, which is not ours.
        if defenses.uses(member, "loss") and any(
            one.epsilon is not None for one in member.privacy()
        ):
            missed.append("the task's own loss")
    if missed:
        raise SpecError(
            "SplitModule cannot apply this defense: labels, loss and loop are the caller's",
            got=f"{spec}, which acts on {', '.join(missed)}",
            want="a defense of models, cuts or gradients, or a term of the loss without an epsilon",
            fix="train with VFLClassifier or vfl train",
        )
    return defense


def _require_labels(labels: Tensor, rows: int, classes: int | None) -> None:
    """Refuse labels that are not those of the batch and the task."""
    if labels.shape != (rows,):
        got = f"axes {tuple(labels.shape)}"
        raise DataError("a defense needs one label a row", got=got, want=f"axes ({rows},)")
    if labels.is_floating_point() is not (classes is None):
        raise DataError(
            "labels of another kind than the task's",
            got=f"{str(labels.dtype).removeprefix('torch.')}",
            want="floating-point numbers" if classes is None else "codes of classes, from 0 on",
            fix=f"task='{'classification' if classes is None else 'regression'}', or other labels",
        )
    if classes is not None and classes < 2:
        raise DataError(
            "a defense of classes needs an output for each",
            got="one output a row",
            want="outputs of axes (rows, classes), and cross-entropy",
        )
    if classes is not None and bool(((labels < 0) | (labels >= classes)).any()):
        raise DataError(
            "labels that are none of the classes", want=f"codes from 0 to {classes - 1}"
        )


def _check_parties(bottoms: Mapping[str, nn.Module], widths: Mapping[str, int]) -> None:
    if set(bottoms) != set(widths) or not bottoms:
        raise DataError(
            "every party needs one bottom and one width",
            got=f"bottoms of {', '.join(bottoms)}; widths of {', '.join(widths)}",
        )
    if _LABEL in bottoms:
        raise ConfigError(
            "the label party's own columns cross no frame",
            got=f"a bottom of '{_LABEL}', which is the label party",
            fix="another name, or that bottom as a part of the top",
        )
