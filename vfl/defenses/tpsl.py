"""Transcript-private split learning: noise where the label enters, before anything follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.core.seeds import fingerprint
from vfl.defenses.base import (
    MOST_EPSILON,
    Cuts,
    Defense,
    LabelKind,
    Loss,
    refuse_hooks_on_labels,
    require_classes,
    require_equal_weights,
)
from vfl.privacy import PrivacyStatement

#: With less, the noise is larger than what float32 adds a gradient to.
_LEAST_EPSILON = 1e-6


class TranscriptPrivacy(Defense):
    """Laplace noise on the gradient of every row's logits (TPSL: Yang et al. 2022).

    The label enters a row's gradient through its one-hot code alone. With two classes the gradients
    of both labels differ by (1, -1), and noise of scale 1 / epsilon along that direction is enough;
    with more, each logit gets noise of scale 2 / epsilon. What follows, every message to every
    party and the top's own weights, only processes the noisy gradient (arXiv 2203.02073).

    Args:
        epsilon: of one label in one epoch.

    >>> logit_noise(np.array([[1.0]]), epsilon=2.0).tolist()
    [[0.5, -0.5]]

    Raises:
        BadOptionError: an option out of range.
    """

    side = "label"
    label_free = True
    once = True
    reads_cuts = False

    def __init__(self, epsilon: float = 1.0) -> None:
        require_range("epsilon", epsilon, _LEAST_EPSILON, MOST_EPSILON)
        self.epsilon = epsilon

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        what = "the epsilon of 'tpsl' does not hold"
        refuse_hooks_on_labels(what, (*before, *after), "one of the two alone")

    def prepare(self, kind: LabelKind) -> None:
        require_classes("tpsl", kind)
        require_equal_weights("tpsl", kind)

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        assert context.secret is not None, "losses are for training only"
        rows, classes = logits.shape
        # Bound to the logits: were a step repeated with other cuts, after a restart, equal noise on
        # both would show the difference of the exact gradients.
        purpose = "tpsl", context.step, repr(self.epsilon), fingerprint(logits)
        draws = context.secret.laplace((rows, 1 if classes == 2 else classes), *purpose)
        noise = torch.from_numpy(logit_noise(draws, self.epsilon)).to(logits)
        # The gradient of this term is the noise: the mean loss's is (p - onehot) / rows.
        return (noise * logits).sum() / max(1, rows)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "everybody, in one epoch; it adds up over epochs, and every training draws anew"
        one = PrivacyStatement("labels", against, self.epsilon, 0.0, "label", "epoch")
        return (replace(one, relation="replace", accountant="Laplace mechanism"),)


def logit_noise(draws: np.ndarray, epsilon: float) -> np.ndarray:
    """Noise for logits from Laplace draws of scale 1; axes (rows, classes).

    Args:
        draws: axes (rows, classes), or (rows, 1) for two classes.
        epsilon: of one row.
    """
    if draws.shape[1] == 1:
        return np.concatenate([draws, -draws], axis=1) / epsilon
    return draws * (2 / epsilon)
