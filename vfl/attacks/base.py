"""The attack contract, which turns a view into a guess, and functions that attacks share.

Hyper-parameters are the constructor's arguments and are fixed in advance; an attack may tune
further values only on data that its view contains. An attack never receives the true values of its
targets; `vfl.attacks.scoring` compares its guess with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl.attacks.transcript import at_scale
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.errors import UserError
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import scoped
from vfl.defenses.components import principal
from vfl.defenses.label_free import AnchoredBottom
from vfl.models import JointBottom
from vfl.models.optimizers import descend

Goal = Literal["labels", "values", "clusters", "inputs", "tokens", "scores"]


class Attack(ABC):
    """Base class of an attack.

    Attributes:
        goal: kind of values that the attack guesses; it fixes the form of the result of `run`.
            "labels": a score for each class, axes (targets, classes); the class with the largest
            score is the guess. "values": numeric labels, in the unit of the labels, axes
            (targets,). "clusters": int64 numbers of clusters, axes (targets,). "inputs":
            reconstructed columns, axes (targets, ...). "tokens": int64 token ids of texts, axes
            (targets, tokens); a guess shorter than the text counts as the beginning of the text.
            "scores": one number for each target, axes (targets,); a larger number means that the
            target is more likely a member, or of the class that `rarest` returns.
        needs: every grant that the attack uses; the attack's view contains exactly these grants.
    """

    goal: Goal = "labels"
    needs: frozenset[Grant] = frozenset()

    def check(self, classes: int, width: int) -> None:
        """Refuse a task or cut that the attack cannot handle, before the attack trains anything.

        Args:
            classes: number of classes of the view.
            width: width of the attacked cut when it is sent.

        Raises:
            UserError: the task or cut does not fit; the error suggests another attack. `run`
                raises the same error.
        """

    @abstractmethod
    def run(self, view: View, draw: torch.Generator) -> Tensor:
        """Return the guess about `view.targets`, in the form of `goal`.

        Args:
            view: the attacker's view.
            draw: generator from which the attack draws all random numbers.

        Raises:
            NotGrantedError: the attack read a value whose grant is not in `needs`.
        """

    def last_report(self) -> dict[str, Any] | None:
        """Return a report on how the last `run` worked; vfl stores it with the attack's score.

        The report is JSON without cell values, row ids or labels; None if the attack has no report.
        """
        return None


def rarest(prior: Tensor) -> int:
    """Return the rarest class, which goal "scores" ranks; of equally rare classes, the last one.

    Args:
        prior: share of each class among the training rows, axes (classes,).

    >>> rarest(torch.tensor([0.37, 0.63])), rarest(torch.tensor([0.5, 0.5]))
    (0, 1)
    """
    return len(prior) - 1 - int(prior.flip(0).argmin())


def require_two_classes(classes: int, instead: str) -> None:
    """Refuse a task that does not have exactly two classes.

    Args:
        classes: number of classes.
        instead: specs of attacks that work with any number of classes, which the error suggests.

    Raises:
        UserError: the task does not have two classes; the error states the number of classes.
    """
    if classes != 2:
        raise UserError(
            "this attack distinguishes two classes only",
            got=f"{classes} classes",
            want="2 classes",
            fix=instead,
        )


def require_at_least(least: float, **options: float) -> None:
    """Refuse option values below a bound, NaN and infinity; each keyword is an option's name.

    Raises:
        BadOptionError: an option is below its bound, NaN or infinite; the error names the first
            such option.
    """
    for option, given in options.items():
        require_range(option, given, least)


def key_of(draw: torch.Generator) -> int:
    """Draw a number from the attack's generator, as a key for `seeds.scoped`."""
    return int(torch.randint(2**62, (), generator=draw))


def fit(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    steps: int,
    learning_rate: float,
    draw: torch.Generator,
    keep_norms: bool = False,
    batch: int = 0,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> nn.Module:
    """Train a module by Adam on the cross-entropy, and return it (Kingma and Ba 2015).

    Args:
        module: module that returns logits, axes (rows, classes).
        inputs: inputs of the rows, axes (rows, ...).
        labels: int64 class numbers, axes (rows,), or class shares, axes (rows, classes).
        steps: number of Adam steps.
        learning_rate: Adam's learning rate.
        draw: generator from which batches and dropout are drawn.
        keep_norms: whether batch normalisation uses its stored mean and variance and does not
            update them.
        batch: number of rows in a batch, drawn with replacement; with 0, or if there are not more
            rows than this, a step uses all rows.
        loss: loss function of logits and labels; None uses the cross-entropy.
    """
    training(module, keep_norms)
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)
    with scoped(key_of(draw)):
        for _ in range(steps):
            some, truth = inputs, labels
            if 0 < batch < len(inputs):
                drawn = torch.randint(len(inputs), (batch,))
                some, truth = inputs[drawn], labels[drawn]
            descend(optimizer, (loss or F.cross_entropy)(module(some), truth))
    return module.eval()


def training(module: nn.Module, keep_norms: bool) -> None:
    """Set training mode; with `keep_norms`, batch normalisation keeps its stored statistics."""
    module.train()
    for part in module.modules():
        if keep_norms and isinstance(part, _BatchNorm):
            part.eval()


class OwnBottom(nn.Module):
    """A party's bottom together with the layers that a defense or a codec puts around it.

    Args:
        parts: the bottom with a defense's layers and, for some codecs, an adapter after it.
        core: the bottom without these layers; if a defense replaced the bottom, `core` is the first
            module in `parts`.
    """

    def __init__(self, parts: Iterable[nn.Module], core: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        replaced = all(one is not core for one in self.parts.modules())
        self.core = self.parts[0] if replaced else core

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cut, axes (rows, width), for inputs of axes (rows, ...)."""
        sent: Tensor = self.parts(inputs)
        return sent


def last_layer(bottom: nn.Module, row: Tensor) -> nn.Module | None:
    """Return the last layer with weights in the bottom itself, or None if it has no such layer.

    Args:
        bottom: the party's module; in an `OwnBottom`, the function ignores layers around the core,
            such as a passport or an adapter.
        row: a row of inputs, axes (1, ...), which runs through the bottom to find the last layer
            that it uses.
    """
    core = bottom.core if isinstance(bottom, OwnBottom) else bottom
    called: list[nn.Module] = []
    hooks = [
        one.register_forward_pre_hook(lambda layer, _: called.append(layer))
        for one in core.modules()
        if _maps(one)
    ]
    try:
        with torch.no_grad():
            bottom.eval()(row)
    finally:
        for hook in hooks:
            hook.remove()
    return called[-1] if called else None


def _maps(layer: nn.Module) -> bool:
    """Return whether each output of a layer combines several inputs, as in linear layers."""
    weight = layer._parameters.get("weight")
    looks_up = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    return weight is not None and weight.dim() > 1 and not looks_up


Layer = Literal[
    "cut", "bottom", "learned", "before", "inputs", "outputs", "gradients", "accumulated"
]
#: For each name of a layer, the grants that an attack needs to read the layer's outputs.
LAYER_NEEDS: dict[str, frozenset[Grant]] = {
    "cut": frozenset({Grant.CUTS}),
    "bottom": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "learned": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "before": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "inputs": frozenset({Grant.INPUTS}),
    "outputs": frozenset({Grant.OUTPUTS}),
    "gradients": frozenset({Grant.GRADIENTS}),
    "accumulated": frozenset({Grant.GRADIENTS}),
}
_ROWS = 4096  # number of rows in one forward pass


class EmbeddingAttack(Attack):
    """Base class of attacks that read one layer's outputs for each row.

    Attributes:
        uses: grants that the attack needs besides the grants of the layer that it reads.

    Args:
        at: the layer that the attack reads; see `features`.

    Raises:
        BadOptionError: the layer does not exist.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset()

    def __init__(self, at: Layer) -> None:
        require_choice("at", at, tuple(LAYER_NEEDS))
        self.at: Layer = at
        self.needs = LAYER_NEEDS[at] | self.uses

    def rows(self, view: View, seen: GrantedRows) -> Tensor:
        """Return the features of one group of rows, axes (rows, features)."""
        return features(view, seen, self.at)


def features(view: View, seen: GrantedRows, layer: Layer) -> Tensor:
    """Return the features of one group of rows from one layer, float32, axes (rows, features).

    Args:
        view: the attacker's view, which also provides the bottom.
        seen: the group of rows, for example the targets.
        layer: the layer that provides the features. "cut": the cut as it was sent. "bottom": the
            bottom's output before noise and codec; the bottom's owner can compute this output.
            "learned": the output of the learned part of an `anchored` bottom, without its fixed
            components; for another bottom, the same as "bottom". "before": the input of the
            bottom's last layer with weights (thesis 4.4.3). "inputs": the party's columns.
            "outputs": the network's predictions. "gradients": each row's mean gradient in each
            epoch; the gradients of all epochs are concatenated. "accumulated": the mean of a row's
            gradients over all epochs, where each gradient is divided by the root mean square of its
            batch.
    """
    if layer == "cut":
        return seen.cuts.flatten(1)
    if layer == "inputs":
        return seen.inputs.flatten(1)
    if layer == "outputs":
        return seen.outputs
    if layer in ("gradients", "accumulated"):
        return _gradients(view, seen, layer)
    if layer == "bottom":
        return through(view.bottom(), seen.inputs).flatten(1)
    if layer == "learned":
        return through(learned_part(view.bottom()), seen.inputs).flatten(1)
    kept = seen.before
    return before_last(view.bottom(), seen.inputs) if kept is None else kept


def _gradients(view: View, seen: GrantedRows, layer: Layer) -> Tensor:
    """Return each row's gradients, per epoch or averaged; a row without gradients gets zeros."""
    first = view.targets.rows if seen.leaked else 0
    if layer == "accumulated":
        means = view.transcript.mean(at_scale)
    else:
        means = view.transcript.by_epoch(lambda one: one.gradients).flatten(1)
    return means[first : first + seen.rows]


def learned_part(bottom: nn.Module) -> nn.Module:
    """Return the trained part of an `anchored` bottom, or the whole of any other bottom."""
    if isinstance(bottom, JointBottom):
        return bottom.each(learned_part)
    anchored = (part for part in bottom.modules() if isinstance(part, AnchoredBottom))
    return next((part.learned for part in anchored), bottom)


def before_last(bottom: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a bottom's last layer with weights, axes (rows, features).

    Layers that a defense or a codec adds do not count; see `last_layer`. If a bottom has no
    weights, the result is the bottom's inputs.
    """
    if isinstance(bottom, JointBottom):
        return torch.cat([before_last(one, part) for one, part in bottom.parts(inputs)], 1)
    layer = last_layer(bottom, inputs[:1])
    if layer is None:
        return inputs.flatten(1)
    found: list[Tensor] = []
    hook = layer.register_forward_pre_hook(
        lambda _, given: found.append(given[0].flatten(1).float())
    )
    try:
        through(bottom, inputs)
    finally:
        hook.remove()
    return torch.cat(found)


def through(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a module's outputs for many rows, in evaluation mode, without an autograd graph."""
    module.eval()
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(inputs, _ROWS)])


def untrained(view: View, draw: torch.Generator) -> nn.Module:
    """Return an untrained network of the victim's architecture for the attacker's columns."""
    with scoped(key_of(draw)):
        bottom = view.new_bottom()
        width = through(bottom, view.leaked.inputs[:1]).shape[1]
        return nn.Sequential(bottom, view.new_top(width))


Scale = Callable[[Tensor], Tensor]
Scaler = Literal["none", "standard", "whiten", "shrink", "zca", "cosine", "batch", "rank"]
_SHRINKAGE = 0.1
_FEWEST = 32  # smallest number of rows whose mean and standard deviation "batch" uses


def scale_by(kind: Scaler, reference: Tensor) -> Scale:
    """Return a scaling function, fitted on reference rows of axes (rows, features).

    Args:
        kind: "standard": each feature gets mean 0 and variance 1. "whiten": each principal
            component gets mean 0 and variance 1. "shrink": as "whiten", after a tenth of the
            components' mean variance is added to each variance. "zca": as "shrink", and then
            rotated back to the original features. "cosine": rows are centred and scaled to length
            1. "batch": as "standard", but with the mean and standard deviation of the rows to be
            scaled, if these are at least 32 rows. "rank": each feature becomes the normal quantile
            of its rank.
        reference: the rows on which the scaling is fitted.

    Raises:
        BadOptionError: the scaler's name is unknown.
    """
    require_choice("scaler", kind, get_args(Scaler))
    if kind == "none":
        return lambda rows: rows
    mean = reference.mean(0)
    if kind == "standard":
        spread = _safe(reference.std(0))
        return lambda rows: (rows - mean) / spread
    if kind == "cosine":
        return lambda rows: torch.nn.functional.normalize(rows - mean, dim=1)
    if kind == "batch":
        return lambda rows: scale_by("standard", rows if len(rows) >= _FEWEST else reference)(rows)
    if kind == "rank":
        ordered = reference.sort(0).values.T.contiguous()
        return lambda rows: _normal_scores(ordered, rows)
    turned = _whitening(reference, kind)
    return lambda rows: (rows - mean) @ turned


def _whitening(reference: Tensor, kind: Scaler) -> Tensor:
    """Return a matrix that maps centred rows to uncorrelated components of variance 1."""
    _, variance, directions = principal(reference)
    variance = variance * len(reference) / max(1, len(reference) - 1)
    kept = variance > 1e-12 * variance[0]
    directions, variance = directions[:, kept], variance[kept]
    if kind != "whiten":
        variance = variance + _SHRINKAGE * variance.mean()
    turned: Tensor = directions / variance.sqrt()
    return (turned @ directions.T if kind == "zca" else turned).float()


def _normal_scores(ordered: Tensor, rows: Tensor) -> Tensor:
    """Return the normal quantile of each value's rank among reference values; ties share a rank.

    Args:
        ordered: reference values of each feature in ascending order, axes (features, rows).
        rows: features of the rows, axes (rows, features).
    """
    values = rows.T.contiguous()
    places = torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)
    share = (places + 1) / (2 * ordered.shape[1] + 2)
    scores: Tensor = torch.special.ndtri(share.double())
    return scores.T.float()


def _safe(spread: Tensor) -> Tensor:
    """Return standard deviations to divide by; 1 for a constant feature, so that it stays."""
    return torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))
