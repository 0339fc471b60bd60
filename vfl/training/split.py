"""A split network as one torch module, for your own training loop.

`SplitModule` combines bottom models and a top model in one module. `vfl.split` instead splits an
existing model (`vfl.training.cutting`). Both kinds of modules send cuts and gradients as frames;
the class `Crossings` does this.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from secrets import token_hex
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.compression import Codec, StepContext
from vfl.core.errors import ConfigError, DataError, SpecError, VFLError
from vfl.core.frame import Frame, Kind, Observer
from vfl.core.seeds import Secret, scoped
from vfl.core.traffic import Ledger
from vfl.defenses.base import LabelKind, Undefended
from vfl.privacy import PrivacyStatement
from vfl.session.exchange import check_finite, check_shape, secret_of_end
from vfl.session.passes import Draws
from vfl.training.specs import checked

_LABEL = "label"
#: Hooks in which a defense reads the labels of a batch.
_ON_LABELS = ("loss", "gradient")
#: Hooks of defenses that act outside of this module, such as in the training loop.
_ELSEWHERE = ("labels", "counts", "batch", "fit", "targets", "received")
#: Beginning of the error message that torch's batch normalisation raises in training.
_ONE_ROW = "Expected more than 1 value per channel"
#: Directions of a cut and of its gradient, and directions for a cut that a server sends back
#: (U-shape).
_FORTH, _BACK = ("up", "down"), ("down", "up")


class Crossings(nn.Module):
    """Codecs, defenses and frames at every cut of a module that runs all parties.

    A subclass runs the parties' models in its method `forward`. `state_dict` contains all weights,
    the step, and the state of codecs and defense, so that a training can resume. The state does not
    contain the ledger and the observers.

    Attributes:
        experiment: the settings in the form of an experiment file; the codec is left out if parties
            have different codecs.
        step: number of forward passes in training so far.
        ledger: ledger of all frames that were sent.

    Args:
        widths: width of each feature party's cut: the number of values per row.
        codec, defense, merge, task, seed, observers: see `SplitModule`.
        elsewhere: hooks of defenses that the subclass cannot call.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        *,
        codec: str | Mapping[str, str],
        defense: str,
        merge: str = "concat",
        task: str,
        seed: int,
        observers: Sequence[Observer],
        elsewhere: Sequence[str] = (),
    ) -> None:
        super().__init__()
        codecs = dict.fromkeys(widths, codec) if isinstance(codec, str) else dict(codec)
        _require_names("codec", codecs, widths)
        where = f"the arguments of {type(self).__name__}"
        label = {"party": _LABEL, "task": task}
        common = {"seed": seed, "defense": defense, "label": label}
        parties = {name: {"width": width} for name, width in widths.items()}
        if one_codec := isinstance(codec, str):
            common["codec"] = codec
        self.experiment = checked({**common, "merge": merge, "parties": parties}, where)
        for name in () if one_codec else parties:
            checked({**common, "codec": codecs[name], "parties": {name: parties[name]}}, where)
        self.task = task
        self.ledger = Ledger()
        self.step = 0
        self._observers: tuple[Observer, ...] = (self.ledger, *observers)
        self._watching: tuple[Observer, ...] = ()
        self._defense = _reachable(defense, elsewhere)
        self._codecs = {name: compression.make(codecs[name]) for name in widths}
        self._specs = {name: codecs[name] for name in widths}
        # this value is the same in copies of the module, for example in an average of weights
        self._lineage = token_hex(8)
        self._secrets = {name: Secret.of_simulation(seed, name) for name in widths}
        self._label_secret = Secret.of_simulation(seed, _LABEL)
        self._end_secrets = {name: secret_of_end(self._label_secret, name) for name in widths}
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        self._on_labels = defenses.uses(self._defense, *_ON_LABELS)
        self._acting = [*self._on_labels, *defenses.uses(self._defense, "local_loss")]
        self._prepared = not defenses.uses(self._defense, "prepare")
        self._additions: list[Addition] = []

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Codec of each cut, with its learned state."""
        return self._codecs

    @property
    def codec_specs(self) -> frozenset[str]:
        """Specs of the codecs, as the caller gave them."""
        return frozenset(self._specs.values())

    @property
    def codec_text(self) -> str:
        """Spec of the codec; if parties have different codecs, all of their specs."""
        if len(self.codec_specs) == 1:
            return next(iter(self.codec_specs))
        return "; ".join(f"{name}: {spec}" for name, spec in self._specs.items())

    @property
    def lineage(self) -> str:
        """Random identifier of this module; copies of the module have the same identifier."""
        return self._lineage

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Send the frames of passes in a block to an observer; copies of the module do not."""
        self._watching = (*self._watching, observer)
        try:
            yield
        finally:
            self._watching = tuple(one for one in self._watching if one is not observer)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the defense's privacy statements; empty if it makes no statement."""
        return self._defense.privacy()

    def extra_loss(self) -> Tensor:
        """Return the loss terms that codec and defense add; 0 if they add none.

        The result is the sum over all forward passes since the last call. If a training omits these
        terms from its loss, the backward pass raises an error.
        """
        taken = [one.taken() for one in self._additions]
        self._additions.clear()
        terms = [term for term in taken if term is not None]
        return sum(terms[1:], terms[0]) if terms else torch.zeros(())

    def get_extra_state(self) -> dict[str, Any]:
        """Return the step, and the states of codecs and defense, for `state_dict`."""
        codecs = {name: dict(codec.state_dict()) for name, codec in self._codecs.items()}
        return {"step": self.step, "codecs": codecs, "defense": dict(self._defense.state_dict())}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the step and the states that `get_extra_state` returned.

        Raises:
            DataError: the state belongs to a module with other parties.
        """
        if set(state) != {"step", "codecs", "defense"} or set(state["codecs"]) != set(self._codecs):
            raise DataError(
                "this state belongs to another module",
                got=f"parties {', '.join(map(str, state.get('codecs', ()))) or 'none'}",
                want=f"parties {', '.join(self._codecs)}",
            )
        self.step = int(state["step"])
        for name, codec in self._codecs.items():
            codec.load_state_dict(state["codecs"][name])
        self._defense.load_state_dict(state["defense"])

    def __reduce__(self) -> Any:
        raise SpecError(
            "a split module holds secrets of its parties, which must not be written to a file",
            want="torch.save(model.state_dict(), file), or copy.deepcopy(model)",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy, without forward passes that wait for gradients."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        fresh: dict[str, Any] = {"_additions": [], "_observers": (), "_watching": ()}
        copied.__dict__.update(copy.deepcopy(self.__dict__ | fresh, memo))
        copied._observers = (copied.ledger, *self._observers[1:])
        return copied

    # Methods that subclasses use.

    def _add_ends(self, name: str, width: int) -> None:
        """Add a codec's modules for both parties of one cut; the caller seeds the random draws."""
        self.encoders[name] = self._codecs[name].client_module(width) or nn.Identity()
        self.decoders[name] = self._codecs[name].server_module(width) or nn.Identity()

    def _begin(self, labels: Tensor | None, rows: Any) -> ForwardPass:
        """Begin a forward pass."""
        if self.training and labels is None and self._on_labels:
            raise SpecError(
                "this defense reads the labels of each training batch, and received none",
                where=f"step {self.step}",
                got=f"no labels for its '{self._on_labels[0]}'",
                want="model(inputs, labels)",
                fix="give the labels, or call model.eval() first if nothing is trained",
            )
        positions = _positions(rows) if self.training and rows is not None else None
        context = StepContext(self.step, self.training, rows=positions)
        return ForwardPass(context, labels, Addition())

    def _guarded(self, name: str, cut: Tensor, context: StepContext) -> Tensor:
        """Return a bottom model's output after the defense; axes (rows, width)."""
        return self._defense.embedding(cut, _with_secret(context, self._secrets[name]))

    def _send(
        self,
        name: str,
        cut: Tensor,
        rows: Tensor | None,
        forward_pass: ForwardPass,
        *,
        back: bool = False,
    ) -> Tensor:
        """Send a cut; return the cut as the receiver decodes it.

        Args:
            name: name of the party that owns the cut.
            cut: result of `_guarded`, after the codec's module.
            rows: the party's inputs, for defenses that use inputs.
            forward_pass: the forward pass.
            back: whether a server sends the cut back to the feature party (U-shape), which
                then returns its gradient.
        """
        context, labels, addition = forward_pass
        codec, own = self._codecs[name], self._context(context, self._secrets[name])
        check_finite(cut.detach(), "cut", name, context.step)
        if self.training:
            addition.add(codec.local_loss(cut, own))
            if rows is not None:
                addition.add(self._defense.local_loss(cut, rows, own))
        other = self._context(context, self._end_secrets[name])
        here, there, ways = (other, own, _BACK) if back else (own, other, _FORTH)
        crossing = _Crossing(
            name, codec, self._defense, self._acting, labels,
            (*self._observers, *self._watching), ways, here, there, addition,
        )  # fmt: skip
        arrived: Tensor = self.decoders[name](_Cross.apply(cut, crossing))  # type: ignore[no-untyped-call]
        return arrived

    def _finish(
        self, cuts: Mapping[str, Tensor], outputs: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Return the module's outputs after the defense, for the caller."""
        context, labels, addition = forward_pass
        if self.training:
            self._check_labels(labels, outputs)
        here = self._context(context, self._label_secret)
        outputs = self._defense.logits(outputs, here)
        if self.training and labels is not None:
            addition.add(self._defense.loss(cuts, labels, outputs, here))
        return outputs

    def _count(self, addition: Addition) -> None:
        """Count a finished forward pass in training as one step."""
        if self.training:
            self.step += 1
            if addition.total is not None:
                self._additions.append(addition)

    def _context(self, context: StepContext, secret: Secret) -> StepContext:
        return _with_secret(context, secret if context.training else None)

    def _check_labels(self, labels: Tensor | None, outputs: Tensor) -> None:
        """Check labels as an experiment with this task does; pass their kind to the defense."""
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


class SplitModule(Crossings):
    """Bottom models, cut and top model in one module; each pass sends real frames.

    The top's inputs and the bottoms' gradients are decoded from real frames, so a loop around this
    module trains the same model as a federation. The attribute `ledger` counts the frames. A
    defense acts as in a federation; if the module cannot apply the defense, the constructor or the
    first training step raises an error. A defense that reads labels needs the labels in every
    forward pass of a training, and the loss must include `extra_loss`. The caller computes the
    loss; a defense expects the gradient of a mean over the batch in which all rows have the same
    weight.

    Frames contain float32 values. A cut of another floating-point type is converted before sending,
    and converted back after receiving.

    Args:
        bottoms: model of each feature party, by party, which maps inputs to a cut with axes (rows,
            width).
        top: the label party's model, which maps merged cuts to outputs; a classification has one
            output per class.
        widths: width of each party's cut, or the axes of one row of the cut, such as (64, 8, 8);
            merger and top model receive cuts with several axes unchanged.
        codec: spec of a codec, or one spec per party.
        defense: spec of a defense.
        merge: spec of a merger.
        task: "classification", or "regression" if labels are numbers.
        seed: seed from which the parties' secrets are derived; real secrets would protect nothing,
            because one process holds all of them. The seed also determines dropout and the random
            layers of a defense.
        observers: objects that receive every frame in addition to the ledger, for example a
            `Trace`.

    >>> bottoms = {"bank": nn.Linear(3, 4), "shop": nn.Linear(5, 4)}
    >>> model = SplitModule(bottoms, nn.Linear(8, 2), {"bank": 4, "shop": 4}, codec="topk:k=2")
    >>> model({"bank": torch.ones(6, 3), "shop": torch.ones(6, 5)}).shape
    torch.Size([6, 2])

    Raises:
        ConfigError, SpecError: an experiment file with these settings would be rejected, a defense
            needs the training loop, the task's loss or all training rows, or two parties use the
            same weights.
        DataError: a party lacks a bottom model, a width or a codec.
    """

    def __init__(
        self,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        widths: Mapping[str, int | Sequence[int]],
        *,
        codec: str | Mapping[str, str] = "none",
        defense: str = "none",
        merge: str = "concat",
        task: str = "classification",
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        _check_parties(bottoms, widths)
        _check_weights({**bottoms, _LABEL: top})
        shapes = {name: _axes(widths[name]) for name in bottoms}
        flat = {name: own[0] if len(own) == 1 else prod(own) for name, own in shapes.items()}
        super().__init__(
            flat,
            codec=codec,
            defense=defense,
            merge=merge,
            task=task,
            seed=seed,
            observers=observers,
        )
        self.widths, self._shapes = flat, shapes
        self.bottoms = nn.ModuleDict()
        self._draws: dict[str, Draws] = {}
        always = not isinstance(self._defense, Undefended)
        for name, bottom in bottoms.items():
            with scoped(self._secrets[name].number("init")):
                self.bottoms[name] = self._defense.wrap_bottom(bottom, flat[name])
                self._add_ends(name, flat[name])
            end = nn.ModuleList([self.bottoms[name], self.encoders[name]])
            self._draws[name] = Draws(self._secrets[name], "rng", end, always=always)
        merging, in_order = models.make_merger(merge), [flat[name] for name in bottoms]
        self._defense.merged(merging.blocks(in_order))
        with scoped(self._label_secret.number("init")):
            self.top = self._defense.wrap_top(top, merging.width(in_order))
            self.merger = merging.build(in_order)
        self._top_draws = Draws(self._label_secret, "rng", self.top, always=always)

    def forward(
        self, inputs: Mapping[str, Any], labels: Tensor | None = None, rows: Any = None
    ) -> Tensor:
        """Return the outputs for a batch.

        Args:
            inputs: rows of each party in the same order: a tensor with axes (rows, ...), or a tuple
                or dict of arguments for the party's bottom model, of which the first has axes
                (rows, ...).
            labels: labels, axes (rows,); defenses that read labels need them in training.
            rows: position of each row in your table, integers with axes (rows,); codecs with state
                for each row need it in training.

        Raises:
            SpecError: the defense reads labels and the call has none, or the defense does not
                support labels of this kind; or the codec needs `rows`.
            DataError: a party's rows are missing; or labels are not classes of the outputs, or have
                a different number of rows.
        """
        _check_inputs(inputs, self.widths)
        forward_pass = self._begin(labels, rows)
        cuts = {name: self._cut(name, inputs[name], forward_pass) for name in self.bottoms}
        _require_same_rows(cuts, labels)
        with self._top_draws.at(self.step) if self.training else nullcontext():
            merged = self.merger(*cuts.values())
            with taking("the top", merged):
                outputs: Tensor = self.top(merged)
            outputs = self._finish(cuts, outputs, forward_pass)
        self._count(forward_pass.addition)
        return outputs

    def is_flat(self, party: str) -> bool:
        """Return whether a party's cut has exactly one axis besides the row axis."""
        return len(self._shapes[party]) == 1

    def _cut(self, name: str, inputs: Any, forward_pass: ForwardPass) -> Tensor:
        """Compute the cut of one party; return the cut as the receiver decodes it."""
        args, named = arguments_of(inputs)
        rows, context = next(iter((*args, *named.values()))), forward_pass.context
        with self._draws[name].at(context.step) if self.training else nullcontext():
            with taking(f"the bottom of party '{name}'", inputs):
                cut: Tensor = self.bottoms[name](*args, **named)
            if not isinstance(cut, Tensor):
                raise DataError(
                    f"the bottom of party '{name}' gives no tensor",
                    got=f"a {type(cut).__name__}",
                    want="one tensor, whose first axis is rows",
                )
            shape = self._shapes[name]
            if len(shape) > 1 and cut.shape[1:] == shape:
                cut = cut.flatten(1)
            check_shape(cut, len(rows), self.widths[name], name)
            cut = self.encoders[name](self._guarded(name, cut, context))
        arrived = self._send(name, cut, rows, forward_pass)
        return arrived if len(shape) == 1 else arrived.reshape(-1, *shape)


def _with_secret(context: StepContext, secret: Secret | None) -> StepContext:
    """Return a step context with a secret; this is much faster than `dataclasses.replace`."""
    return StepContext(context.step, context.training, secret, context.rows)


class Addition:
    """Terms that codec and defense add to the loss of one forward pass.

    Attributes:
        total: sum of the additional terms; None if there are none.
        arrived: whether a backward pass has passed through these terms, so that the loss included
            them.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.arrived = False

    def add(self, term: Tensor | None) -> None:
        """Add a term to the sum; None adds nothing."""
        if term is not None:
            self.total = term if self.total is None else self.total + term

    def taken(self) -> Tensor | None:
        """Return the sum of the terms, for the caller's loss.

        The sum is an autograd node that was created after the forward pass, so the backward pass
        visits it before any cut.
        """
        if self.total is None or not self.total.requires_grad:
            return self.total
        taken = self.total.view_as(self.total)
        taken.register_hook(self._note)  # type: ignore[no-untyped-call]
        return taken

    def _note(self, grad: Tensor) -> None:
        self.arrived = True

    def require(self, party: str, step: int) -> None:
        """Reject a gradient if the caller's loss did not include these terms."""
        if self.total is not None and self.total.requires_grad and not self.arrived:
            raise SpecError(
                "codec or defense add a term to the loss, which the given loss lacks",
                where=f"step {step}, at the gradient of party '{party}'",
                want="loss + model.extra_loss() in one backward pass",
            )


class ForwardPass(NamedTuple):
    """One forward pass of a module that runs all parties.

    Attributes:
        context: step context of the pass.
        labels: labels of the rows; None if the caller gave none.
        addition: collector of the loss terms that the pass adds.
    """

    context: StepContext
    labels: Tensor | None
    addition: Addition


@dataclass(eq=False)
class _Crossing:
    """Transfer of one cut to the other party, and of the cut's gradient back."""

    party: str
    codec: Codec
    defense: defenses.Defense
    acting: Sequence[str]
    labels: Tensor | None
    observers: Sequence[Observer]
    ways: tuple[str, str]
    here: StepContext
    there: StepContext
    addition: Addition
    went_back: bool = False

    def forth(self, cut: Tensor) -> tuple[Tensor, Any, Any]:
        """Return the decoded cut, and the codec states of sender and receiver for the gradient."""
        payload, kept = self.codec.encode(self._for_codec(cut), self.here)
        kind = Kind.CUT if self.here.training else Kind.QUERY
        self._report(self.ways[0], Frame(kind, self.here.step, payload))
        rows, width = cut.shape
        decoded, saved = self.codec.decode(payload, rows, width, self.there)
        return decoded if _alike(decoded, cut) else decoded.to(cut), kept, saved

    def back(self, grad: Tensor, kept: Any, saved: Any) -> Tensor:
        """Return a gradient as its receiver decodes it."""
        self._require_first()
        self.addition.require(self.party, self.there.step)
        sent = self._defended(self._for_codec(grad))
        check_finite(sent, "gradient", self.party, self.there.step)
        payload = self.codec.encode_grad(sent.contiguous(), saved, self.there)
        self._report(self.ways[1], Frame(Kind.GRAD, self.there.step, payload))
        rows, width = grad.shape
        received = self.codec.decode_grad(payload, kept, rows, width, self.here)
        self.codec.commit(self.here.step)
        return received if _alike(received, grad) else received.to(grad)

    def _for_codec(self, values: Tensor) -> Tensor:
        """Convert values for codecs: float32, and on the CPU unless the codec runs elsewhere."""
        values = values.detach()
        if values.dtype is not torch.float32:
            values = values.float()
        return values if self.codec.on_card else values.cpu()

    def _require_first(self) -> None:
        """Reject a gradient of a gradient, or a second gradient; a federation can send neither."""
        where = f"step {self.there.step}, at the gradient of party '{self.party}'"
        if torch.is_grad_enabled():
            raise SpecError(
                "the gradient of a gradient cannot cross a cut",
                where=where,
                got="a backward pass with create_graph=True",
                fix="differentiate twice within the bottom or within the top",
            )
        if self.went_back:
            raise SpecError(
                "an exchange has only one gradient, but a second backward pass requests another",
                where=where,
                fix="add the losses and call backward once, or run the forward pass again",
            )
        self.went_back = True

    def _defended(self, grad: Tensor) -> Tensor:
        """Return the gradient after the defense, which acts only in training steps."""
        if self.acting and not self.there.training:
            raise SpecError(
                "this defense acts in training steps, but this gradient belongs to an evaluation",
                where=f"the gradient of party '{self.party}'",
                got=f"model.eval() before it, where '{self.acting[0]}' does not act",
                fix="model.train() before the forward pass; single layers may be in eval()",
            )
        if self.labels is None:  # hooks in an evaluation read no labels
            return grad
        return self.defense.gradient(grad, self.labels, self.there)

    def _report(self, direction: str, frame: Frame) -> None:
        for observer in self.observers:
            observer(self.party, direction, frame)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type and device; faster than calling `to`."""
    return one.dtype is other.dtype and one.device == other.device


class _Cross(torch.autograd.Function):
    """Autograd function that sends a cut, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, crossing: _Crossing) -> Tensor:
        decoded, kept, saved = crossing.forth(cut)
        ctx.way_back = (crossing, kept, saved)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        crossing, kept, saved = ctx.way_back
        return crossing.back(grads[0], kept, saved), None


def crossings_of(module: object, *, averaged: bool = True) -> Crossings:
    """Return the split module inside a torch wrapper, for example a compiled module.

    Args:
        module: a split module, or a wrapper of a split module.
        averaged: whether a wrapper that averages weights, or that has replicas in several
            processes, is allowed.

    Raises:
        DataError: the module contains no split module.
    """
    found = module
    while isinstance(found, nn.Module) and not isinstance(found, Crossings):
        found = getattr(found, "_orig_mod", getattr(found, "module", None) if averaged else None)
    if isinstance(found, Crossings):
        return found
    parts = module.named_modules() if isinstance(module, nn.Module) else ()
    inner = [name for name, one in parts if isinstance(one, Crossings)]
    raise DataError(
        "this is not a split module",
        got=f"a {type(module).__name__}",
        want="a SplitModule, or the result of vfl.split",
        fix=f"return the part of it that is one: model.{inner[0]}" if inner else None,
    )


def _reachable(spec: str, elsewhere: Sequence[str]) -> defenses.Defense:
    """Build a defense; raise an error if the defense acts outside of this module."""
    defense = defenses.make(spec)
    missed = defenses.uses(defense, *_ELSEWHERE, *elsewhere)
    members = defense.members if isinstance(defense, defenses.Chain) else (defense,)
    for member in members:
        # A defense of this kind adds noise to the loss in proportion to a row's part of the task's
        # loss, which this module does not compute.
        if defenses.uses(member, "loss") and any(
            one.epsilon is not None for one in member.privacy()
        ):
            missed.append("the task's own loss")
    if missed and set(missed) <= set(elsewhere):
        raise SpecError(
            "the layers of a split model stay unchanged, but this defense replaces some",
            got=f"{spec}, which acts on {', '.join(missed)}",
            want="a defense of cuts, gradients or outputs",
            fix="SplitModule({party: bottom}, top, {party: width}, defense=...) joins models",
        )
    if missed:
        raise SpecError(
            "this module cannot apply the defense: labels, loss and loop are the caller's",
            got=f"{spec}, which acts on {', '.join(missed)}",
            want="a defense of models, cuts, outputs or sent gradients; a loss without an epsilon",
            fix="train with VFLClassifier or vfl train",
        )
    return defense


class taking:
    """Context whose errors name the model that rejected inputs, with the inputs' axes.

    Args:
        whose: text that names the model in error messages.
        given: inputs of the model: a tensor, or a sequence or dict that contains tensors.

    Raises:
        DataError: the model raised an error for an index, an axis or a type.
    """

    __slots__ = ("given", "whose")

    def __init__(self, whose: str, given: Any) -> None:
        self.whose, self.given = whose, given

    def __enter__(self) -> None:
        """Do nothing; a class is faster than a generator, and each step uses it several times."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Replace the model's error by an error that names the model."""
        if error is None or isinstance(error, VFLError | torch.OutOfMemoryError):
            return
        # torch's error text contains the index, which is a value of a row
        if isinstance(error, IndexError):
            raise DataError(
                f"{self.whose} received an index for which it has no entry",
                got=_described(self.given),
                want="whole numbers from 0 on, below the size of its table",
            ) from None
        if isinstance(error, RuntimeError | TypeError | ValueError):
            alone = str(error).startswith(_ONE_ROW)
            raise DataError(
                f"{self.whose} does not take {'a single row' if alone else 'these inputs'}",
                got=_described(self.given),
                want="two rows or more in training, for batch normalisation"
                if alone
                else "the axes, the type and the device of its layers",
                fix="drop_last=True in the loader, or another normalisation"
                if alone
                else "move model and inputs to one device, such as tensor.to('cuda'), and "
                "convert the inputs, such as tensor.float()",
            ) from error


def _described(given: Any) -> str:
    """Return a text with the axes and types of inputs."""
    if isinstance(given, Tensor):
        kind = str(given.dtype).removeprefix("torch.")
        return f"axes {tuple(given.shape)}, {kind}, on {given.device}"
    values = given.values() if isinstance(given, Mapping) else given
    if isinstance(values, str) or not isinstance(values, Iterable):
        return f"a {type(given).__name__}"
    return "; ".join(map(_described, values)) or "nothing"


def _require_same_rows(cuts: Mapping[str, Tensor], labels: Tensor | None) -> None:
    """Raise an error if parties or labels have different numbers of rows."""
    rows = {name: len(cut) for name, cut in cuts.items()}
    if labels is not None and labels.dim():
        rows["the labels"] = len(labels)
    if len(set(rows.values())) > 1:
        raise DataError(
            "all parties must have the same rows in a batch",
            got=", ".join(f"{name}: {count} rows" for name, count in rows.items()),
        )


def _require_labels(labels: Tensor, rows: int, classes: int | None) -> None:
    """Raise an error if labels do not fit the batch or the task."""
    if labels.shape != (rows,):
        got = f"axes {tuple(labels.shape)}"
        raise DataError("a defense needs one label for each row", got=got, want=f"axes ({rows},)")
    if labels.is_floating_point() is not (classes is None):
        raise DataError(
            "the labels have a type that does not fit the task",
            got=f"{str(labels.dtype).removeprefix('torch.')}",
            want="floating-point numbers" if classes is None else "codes of classes, from 0 on",
            fix=f"task='{'classification' if classes is None else 'regression'}', or other labels",
        )
    if classes is not None and classes < 2:
        raise DataError(
            "a defense of classes needs one output for each class",
            got="one output for each row",
            want="outputs of axes (rows, classes), and cross-entropy",
        )
    if classes is not None and bool(((labels < 0) | (labels >= classes)).any()):
        raise DataError(
            "some labels are not among the classes", want=f"codes from 0 to {classes - 1}"
        )


def _positions(rows: Any) -> np.ndarray:
    """Return the positions of a batch's rows in the table, as an array for codecs.

    Raises:
        DataError: the values are not positions of rows.
    """
    found = torch.as_tensor(rows)
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.lt(0).any():
        raise DataError(
            "rows must be positions of rows in a table",
            where="rows",
            got=f"axes {tuple(found.shape)}, {str(found.dtype).removeprefix('torch.')}",
            want="axes (rows,): each row's position in the table, a whole number from 0 on",
        )
    return found.long().cpu().numpy()


def _check_weights(models: Mapping[str, nn.Module]) -> None:
    owners: dict[nn.Parameter, str] = {}
    for name, model in models.items():
        for weight in model.parameters():
            if (owner := owners.setdefault(weight, name)) != name:
                raise SpecError(
                    "two parties use the same weights, but each party must have its own",
                    got=f"a weight of '{owner}' in the model of '{name}'",
                    fix="copy.deepcopy(model) for one of the two parties",
                )


def _check_parties(bottoms: Mapping[str, nn.Module], widths: Mapping[str, Any]) -> None:
    for what, given in (("bottoms", bottoms), ("widths", widths)):
        if not isinstance(given, Mapping):
            raise DataError(
                f"SplitModule takes {what} by party",
                where=what,
                got=f"a {type(given).__name__}",
                want="a dict, such as {'bank': ..., 'shop': ...}",
            )
    if set(bottoms) != set(widths) or not bottoms:
        raise DataError(
            "every party needs one bottom and one width",
            got=f"bottoms of {', '.join(bottoms)}; widths of {', '.join(widths)}",
        )
    for name, bottom in bottoms.items():
        width = widths[name]
        axes = width if isinstance(width, Sequence) else [width]
        if not isinstance(bottom, nn.Module) or any(isinstance(one, str) for one in axes):
            raise ConfigError(
                "a party needs a bottom that is a module, and a width that is a whole number",
                where=name,
                got=f"a {type(bottom).__name__}, and a width of {type(width).__name__}",
                fix="vfl.models.make_bottom(SPEC).build(shape, width) makes a module of a spec",
            )
    if _LABEL in bottoms:
        raise ConfigError(
            "the label party's own columns are not sent in frames",
            got=f"a bottom of '{_LABEL}', which is the label party",
            fix="use another name, or make that bottom a part of the top",
        )


def _check_inputs(inputs: Any, parties: Collection[str]) -> None:
    if not isinstance(inputs, Mapping):
        raise DataError(
            "SplitModule takes the rows of each party by its name",
            got=f"a {type(inputs).__name__}",
            want=f"a dict with {', '.join(parties)}",
        )
    _require_names("inputs", inputs, parties)


def _require_names(what: str, given: Collection[str], parties: Collection[str]) -> None:
    """Raise an error if an argument has no entry for a party, or an entry for an unknown party."""
    if set(given) != set(parties):
        raise DataError(
            "an argument names parties that the module does not have, or lacks some",
            where=what,
            got=", ".join(map(str, given)) or "no party",
            want=", ".join(parties),
        )


def arguments_of(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the inputs of a bottom model as positional and as named arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list) and inputs:
        return inputs, {}
    if isinstance(inputs, Mapping) and inputs:
        return (), inputs
    raise DataError(
        "a bottom model does not accept inputs of this type",
        got=f"a {type(inputs).__name__}",
        want="a tensor, or a tuple or a dict of arguments, the first with a row of axis 0 each",
    )


def _axes(width: int | Sequence[int]) -> tuple[Any, ...]:
    """Return the axes of one row of a cut."""
    return tuple(width) if isinstance(width, Sequence) and width else (width,)
