"""Mixup: every party trains on the same random mixtures of two rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.core.seeds import derive
from vfl.defenses.base import (
    Batch,
    Cuts,
    Defense,
    LabelKind,
    Loss,
    require_classes,
    require_cross_entropy,
    require_equal_weights,
    uses,
)
from vfl.privacy import PrivacyStatement

_MOST_SEED = 2**63 - 1
_LEAST_ALPHA = 1e-3


class Mixup(Defense):
    """Each row's inputs x become lambda x + (1 - lambda) x', and so do labels (Zhang et al. 2018).

    x' are the inputs of a partner row in the batch. All parties must use the same partners and the
    same lambda. So they derive both from a public seed in each step; lambda has the distribution
    Beta(alpha, alpha). Mixing therefore hides nothing from a party; it only makes the models
    memorise less about single rows. Cross-entropy is linear in the labels, so the label party
    minimises lambda L(y) + (1 - lambda) L(y'), for the labels y of a row and y' of its partner.

    Args:
        alpha: parameter alpha of the Beta distribution from which lambda is drawn. At 1, every
            lambda is equally likely; with an alpha near 0, lambda is near 0 or 1, so rows are
            hardly mixed.
        seed: seed of the public random numbers, the same at every party.

    >>> pairs, share = mixture(step=1, rows=4, alpha=1.0, seed=0)
    >>> sorted(pairs.tolist()), 0 <= share <= 1
    ([0, 1, 2, 3], True)

    Raises:
        BadOptionError: an option is out of range.
        SpecError: the loss is not the plain cross-entropy, rows have different weights, or another
            defense of the chain replaces the targets.
    """

    once = True
    reads_cuts = False

    def __init__(self, alpha: float = 0.2, seed: int = 0) -> None:
        require_range("alpha", alpha, _LEAST_ALPHA, MOST_WEIGHT)
        require_range("seed", seed, 0, _MOST_SEED)
        self.alpha = alpha
        self.seed = seed

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return 4 * 2 * rows * columns

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        for member in (*before, *after):
            if uses(member, "targets"):
                raise SpecError(
                    f"'mixup' mixes labels, and {type(member).__name__} trains on other targets",
                    fix="use one of the two",
                )

    def prepare(self, kind: LabelKind) -> None:
        require_classes("mixup", kind)
        require_equal_weights("mixup", kind)
        require_cross_entropy("mixup", kind)

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        if inputs is None:
            return inputs, labels
        pairs, share = mixture(context.step, len(inputs), self.alpha, self.seed)
        return torch.lerp(inputs[pairs], inputs, share), labels

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        pairs, share = mixture(context.step, len(labels), self.alpha, self.seed)
        others = labels[pairs.to(labels.device)]
        # The task loss L(y) plus the returned term is share L(y) + (1 - share) L(y'), with share =
        # lambda.
        return (1 - share) * (cross_entropy(logits, others) - cross_entropy(logits, labels))

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "an outsider who queries the trained model; not against parties of the training"
        return (PrivacyStatement("inputs", against),)


def mixture(step: int, rows: int, alpha: float, seed: int) -> tuple[Tensor, float]:
    """Return each row's partner, axes (rows,), and lambda, the share of the row itself."""
    draw = np.random.default_rng(derive(seed, "mixup", step))
    return torch.from_numpy(draw.permutation(rows)), float(draw.beta(alpha, alpha))
