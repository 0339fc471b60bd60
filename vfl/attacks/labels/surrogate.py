"""Gradient matching: fits a top and labels that would give the received gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from torch.optim import Optimizer

from vfl.attacks.base import key_of, require_at_least
from vfl.attacks.labels.gradients import GradientAttack
from vfl.attacks.transcript import RecordedExchange, Transcript
from vfl.attacks.view import Grant, View
from vfl.core.errors import NonFiniteError
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_SETTLING = 10  # number of exchanges on which surrogate tops are compared
_BALANCING = 5


class Surrogate(GradientAttack):
    """Replays the training with a surrogate top and soft labels, to match received gradients.

    For each exchange, it minimises the squared distance between two gradients at the recorded cut:
    the surrogate top's gradient and the recorded gradient (thesis eq 2-4; ExPLoit: Kariyappa and
    Qureshi 2021). For a given surrogate top, the best soft labels follow in closed form from the
    distance that each class gives for a row; so the attack trains only the top. The mean of the
    soft labels equals the known class shares, which has the effect of ExPLoit's regularisation by
    the prior. The attack replays the exchanges in their order, because the victim's top also
    changes. If two classes of equal shares are exchanged, the gradients stay the same. So the
    attack returns clusters, not classes.

    Args:
        epochs: number of epochs to replay, from the first one.
        starts: number of random surrogate tops; the attack continues with the one that matches the
            first exchanges best.
        steps: number of Adam steps on each exchange.
        learning_rate: Adam's learning rate.
        temperature: temperature of the soft labels, relative to the mean squared norm of a row's
            gradient.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "clusters"
    uses = frozenset({Grant.PRIOR, Grant.TOP_RECIPE, Grant.EPOCHS})

    def __init__(
        self,
        epochs: int = 1,
        starts: int = 3,
        steps: int = 5,
        learning_rate: float = 0.01,
        temperature: float = 0.1,
    ) -> None:
        require_at_least(1, starts=starts, steps=steps)
        require_at_least(0, learning_rate=learning_rate, temperature=temperature)
        super().__init__(epochs)
        self.starts = starts
        self.steps = steps
        self.learning_rate = learning_rate
        self.temperature = temperature

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        exchanges = self.transcript(view).messages
        with scoped(key_of(draw)):
            top, optimizer = self._settled(view, [*exchanges[:_SETTLING]] * 2)
            matched = [self._follow(top, optimizer, one, view.prior) for one in exchanges]
        told = {id(one): -found for one, found in zip(exchanges, matched, strict=True)}
        scores = Transcript(view.targets.rows, exchanges).mean(lambda one: told[id(one)])
        if not torch.isfinite(scores).all():
            raise NonFiniteError(
                "the surrogate cannot reproduce the received gradients",
                where="surrogate",
                got="distances that are not finite",
                want="finite distances; NaN would select the first class, and look like protection",
                fix="a smaller learning_rate, or another temperature",
            )
        return scores.argmax(1)

    def _settled(
        self, view: View, exchanges: Sequence[RecordedExchange]
    ) -> tuple[nn.Module, Optimizer]:
        """Fit a surrogate top to the first exchanges; return the top and its optimiser."""
        found: list[tuple[float, nn.Module, Optimizer]] = []
        for _ in range(self.starts):
            top = view.new_top(exchanges[0].gradients.shape[1])
            optimizer: Optimizer = torch.optim.Adam(top.parameters(), lr=self.learning_rate)
            distances = [self._follow(top, optimizer, one, view.prior) for one in exchanges]
            last = distances[len(distances) // 2 :]
            mismatch = float(torch.stack([each.min(1).values.mean() for each in last]).mean())
            found.append((mismatch, top, optimizer))
        _, top, optimizer = min(found, key=lambda one: one[0])
        return top, optimizer

    def _follow(
        self, top: nn.Module, optimizer: Optimizer, one: RecordedExchange, prior: Tensor
    ) -> Tensor:
        """Train the surrogate for some steps on one exchange; return distances, (rows, classes)."""
        wanted = one.gradients * len(one.rows)  # the recorded loss is a mean over the batch
        sent = wanted != 0  # a sparse codec sends no zeros
        cuts = one.cuts()
        scale = wanted.square().sum(1).mean().clamp(min=torch.finfo(wanted.dtype).tiny)
        for _ in range(self.steps):
            gradients = gradients_of_classes(top, cuts, len(prior))
            distances = ((gradients - wanted[:, None]) * sent[:, None]).square().sum(2) / scale
            labels = balanced(-distances.detach() / self.temperature, prior)
            descend(optimizer, (labels * distances).sum(1).mean())
        return distances.detach()


def gradients_of_classes(top: nn.Module, cuts: Tensor, classes: int) -> Tensor:
    """Return the gradient of each row's cross-entropy with every class, with respect to its cut.

    Returns:
        Gradients, axes (rows, classes, width), with an autograd graph to the top's weights.
    """
    cuts = cuts.detach().requires_grad_()
    logits = top(cuts)
    slopes = torch.stack(
        [
            torch.autograd.grad(logits[:, code].sum(), cuts, create_graph=True)[0]
            for code in range(classes)
        ],
        dim=1,
    )
    expected = (softmax(logits, 1)[:, :, None] * slopes).sum(1, keepdim=True)
    return expected - slopes


def balanced(scores: Tensor, prior: Tensor) -> Tensor:
    """Return soft labels, axes (rows, classes), whose mean over the rows is close to the prior.

    >>> balanced(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0.5, 0.5])).argmax(1)
    tensor([0, 1])
    """
    labels = softmax(scores, 1)
    for _ in range(_BALANCING):
        scores = scores + 0.5 * (prior / labels.mean(0).clamp(min=1e-6)).log()
        labels = softmax(scores, 1)
    return labels
