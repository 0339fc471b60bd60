"""Without a model behind the cut, the sign of its gradient is the label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.evidence import Heard
from vfl.attacks.gradients import GradientAttack, mean_by_row
from vfl.attacks.view import View
from vfl.errors import UserError


class DirectLabel(GradientAttack):
    """Reads the label where the gradient is negative.

    Where cuts are summed and the sum is the answer (`merge = "sum"`, `top = "identity"`), the
    gradient of the cross-entropy is p - y: negative at the true class and nowhere else.

    Source: Liu et al. 2022, "Batch label inference and replacement attacks in black-boxed vertical
    federated learning"; Fu et al. 2022, "Label inference attacks against vertical federated
    learning" (direct label inference).

    Args:
        epochs: how many epochs it reads.
    """

    def check(self, classes: int, width: int) -> None:
        if width != classes:
            raise UserError(
                "labels show in the signs only where the cut is as wide as there are classes",
                got=f"a cut of width {width} and {classes} classes",
                fix="gradient_similarity or surrogate, which allow for a top model",
            )

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        exchanges = self.exchanges(view)
        width = exchanges[0].gradients.shape[1]
        self.check(view.classes, width)
        return mean_by_row(exchanges, _negative_share, view.targets.rows, width)


def _negative_share(one: Heard) -> Tensor:
    return -normalize(one.gradients, p=1.0, dim=1)
