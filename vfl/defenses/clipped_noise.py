"""Clipped cuts with noise, for every row that leaves a feature party."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from vfl.compression import Moment
from vfl.defenses.base import Defense, PrivacyStatement, Side
from vfl.defenses.noise import Law, RowNoise
from vfl.defenses.refusals import refuse_batch_norm, refuse_mixing

_CURE = "clipped_noise:norm=inf, which promises nothing, or one of the two alone"


class ClippedNoise(Defense):
    """Each row of the cut is clipped to a norm and gets noise of the feature party's secret.

    Any two clipped rows are at most twice the norm apart, so a row sent once keeps a local epsilon
    (Dwork et al. 2006; Gaussian: Balle and Wang 2018), for the bottom as it is then. It adds up:
    whoever gets n cuts of one row averages them and is left with 1/sqrt(n) of the noise.

    Args:
        norm: bound of a row; "inf" clips nothing and promises nothing.
        sigma: deviation or scale of the noise in units of `norm`.
        law: "gaussian" (2-norm) or "laplace" (1-norm).
        delta: of the Gaussian law.
        queries: also noise on cuts for evaluation and prediction. The same rows asked again in the
            same step, of the same bottom, get the same noise, so there is nothing to average; in
            other company or another step it is a new draw. Without it those cuts are only clipped,
            and the promise is about training alone.

    >>> round(ClippedNoise(norm=4.0, sigma=2.0, law="laplace").privacy()[0].epsilon, 3)
    1.0

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "feature"
    rows_apart: ClassVar[bool] = True
    once: ClassVar[bool] = True

    def __init__(
        self,
        norm: float = 4.0,
        sigma: float = 0.1,
        law: Law = "gaussian",
        delta: float = 1e-5,
        queries: bool = True,
    ) -> None:
        self._noise = RowNoise(norm, sigma, law, delta)
        self.queries = queries

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if self._noise.epsilon is not None:
            refuse_mixing("clipped_noise", [*before, *after], "batch", _CURE)
            refuse_mixing("clipped_noise", before, "embedding", _CURE)

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        if self._noise.epsilon is not None:
            refuse_batch_norm(bottom, "clipped_noise")
        return bottom

    def embedding(self, cut: Tensor, moment: Moment) -> Tensor:
        if moment.secret is None or not (moment.training or self.queries):
            return self._noise.clip(cut)
        phase = "train" if moment.training else "query"
        return self._noise.noised(cut, moment.secret, "clipped_noise", phase, moment.step)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        if self._noise.epsilon is None:
            return (PrivacyStatement("inputs", "the label party, by noise without a bound"),)
        when = "sent in training or as a query" if self.queries else "sent in training only"
        against = (
            f"the label party, {when}, for the bottom as it is then; it adds up over epochs"
            " and queries, and what the bottom learns from other rows is not counted"
        )
        return (
            PrivacyStatement(
                "inputs", against, self._noise.epsilon, self._noise.delta, "one cut of a row"
            ),
        )
