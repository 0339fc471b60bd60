"""Clipped gradients with noise, for every row of every cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from vfl.compression import Moment
from vfl.defenses.base import Defense, LabelKind, PrivacyStatement, Side
from vfl.defenses.noise import Law, RowNoise
from vfl.defenses.refusals import (
    refuse_batch_norm,
    refuse_label_readers,
    refuse_mixing,
    require_equal_weights,
)

_CURE = "gradient_noise:norm=inf, which promises nothing, or one of the two alone"


class GradientNoise(Defense):
    """Each row of the gradient is clipped to a norm and gets noise of the label party's secret.

    A gradient shows its row's label and nothing of other labels while the top stays as it is, so
    one exchange has an exact local epsilon (Dwork et al. 2006; Balle and Wang 2018). A training
    has none: the top itself learns from true labels, and later gradients of other rows tell of it.

    Args:
        norm: bound of a row's gradient, of the row's own loss: what travels times the rows of the
            batch. "inf" clips nothing and promises nothing.
        sigma: deviation or scale of the noise in units of `norm`.
        law: "gaussian" (2-norm) or "laplace" (1-norm).
        delta: of the Gaussian law.

    >>> round(GradientNoise(norm=1.0, sigma=4.0).privacy()[0].epsilon, 3)
    1.993

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "label"
    label_free: ClassVar[bool] = True
    rows_apart: ClassVar[bool] = True
    once: ClassVar[bool] = True

    def __init__(
        self, norm: float = 1.0, sigma: float = 1.0, law: Law = "gaussian", delta: float = 1e-5
    ) -> None:
        self._noise = RowNoise(norm, sigma, law, delta)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if self._noise.epsilon is not None:
            refuse_label_readers("gradient_noise", before, after, _CURE)
            refuse_mixing("gradient_noise", before, "gradient", _CURE)

    def prepare(self, kind: LabelKind) -> None:
        if self._noise.epsilon is not None:
            require_equal_weights("gradient_noise", kind)

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        if self._noise.epsilon is not None:
            refuse_batch_norm(top, "gradient_noise")
        return top

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        assert moment.secret is not None, "gradients travel in training only"
        unit = 1 / max(1, len(grad))
        return self._noise.noised(grad, moment.secret, "gradient_noise", moment.step, unit=unit)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "a feature party, in one exchange and for the top as it is then; it adds up over"
            " exchanges and parties, and what the top learns from true labels is not counted"
        )
        if self._noise.epsilon is None:
            return (PrivacyStatement("labels", "a feature party, by noise without a bound"),)
        return (
            PrivacyStatement(
                "labels", against, self._noise.epsilon, self._noise.delta, "one gradient of a row"
            ),
        )
