"""Membership inference by likelihood ratio, with networks that did not train on the row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from vfl.attacks.base import Attack, fit, require_at_least, through, untrained
from vfl.attacks.view import Grant, View
from vfl.core.errors import TooFewRowsError
from vfl.core.registry import require_range

#: Smallest number of labelled rows; a shadow network trains on half of these rows, and needs two
#: rows.
_LEAST = 4


class LikelihoodRatio(Attack):
    """Offline LiRA: compares the victim with shadow networks that did not train on the row.

    Each shadow network is trained on a random half of the attacker's own labelled rows. A row's
    score is the victim network's scaled confidence in the row's label, minus the shadows' mean
    confidence, divided by the shadows' standard deviation. The standard deviation is the same for
    all rows, because a few shadows cannot estimate it for each row.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles" (offline LiRA,
    with a global variance, on scaled confidences).

    Args:
        shadows: number of shadow networks.
        steps: number of full-batch Adam steps for each shadow.
        learning_rate: Adam's learning rate.

    Raises:
        BadOptionError: an option is out of range; `shadows` must be at least two, because one
            shadow has no standard deviation.
        TooFewRowsError: the attacker has too few labelled rows to train a shadow.
    """

    goal = "scores"
    needs = frozenset(
        {Grant.INPUTS, Grant.OUTPUTS, Grant.LABELS, Grant.LEAKED_INPUTS}
        | {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
    )

    def __init__(self, shadows: int = 8, steps: int = 200, learning_rate: float = 0.01) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        require_range("shadows", shadows, 2)
        self.shadows = shadows
        self.steps = steps
        self.learning_rate = learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        targets, own = view.targets, view.leaked
        if own.rows < _LEAST:
            raise TooFewRowsError(
                "shadow networks are trained on labelled rows of the attacker's own, which are the "
                "validation rows",
                where="data.validation",
                got=f"{own.rows} rows",
                want=f"{_LEAST} or more",
                fix="a larger data.validation, or 'membership', which trains nothing",
            )
        seen = torch.stack(
            [
                scaled_confidence(through(self._shadow(view, draw), targets.inputs), targets.labels)
                for _ in range(self.shadows)
            ]
        )
        found = scaled_confidence(targets.outputs, targets.labels)
        spread = seen.var(0).mean().sqrt().clamp(min=torch.finfo(seen.dtype).tiny)
        return (found - seen.mean(0)) / spread

    def _shadow(self, view: View, draw: torch.Generator) -> nn.Module:
        own = view.leaked
        half = torch.randperm(own.rows, generator=draw)[: own.rows // 2]
        inputs, labels = own.inputs[half], own.labels[half]
        return fit(untrained(view, draw), inputs, labels, self.steps, self.learning_rate, draw)


def scaled_confidence(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for the probability p of each row's label, axes (rows,).

    Args:
        outputs: logits, axes (rows, classes).
        labels: true classes of the rows, int64, axes (rows,).

    >>> scaled_confidence(torch.tensor([[2.0, 0.5]]), torch.tensor([0]))
    tensor([1.5000])
    """
    logs = log_softmax(outputs, 1)
    own = logs.gather(1, labels[:, None])[:, 0]
    others = logs.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    return own - others
