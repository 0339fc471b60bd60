"""Noise on rows with bounded norm, and the differential privacy that this noise gives.

`GradientNoise` adds such noise to gradients at the label party; `ClippedNoise` adds it to cuts at a
feature party.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import require, require_choice
from vfl.core.seeds import Secret, fingerprint
from vfl.defenses.base import (
    Defense,
    LabelKind,
    refuse_batch_norm,
    refuse_hooks_on_labels,
    refuse_mixing,
    require_equal_weights,
)
from vfl.privacy import PrivacyStatement, kernel
from vfl.privacy.accountants import gaussian_epsilon
from vfl.privacy.kernel import Law
from vfl.privacy.statement import Unit

#: Limits of sigma, the noise relative to the clip norm. A smaller sigma hides nothing, and errors
#: of float64 would dominate the epsilon.
_LEAST_SIGMA = 1e-6
_MOST_SIGMA = 1e6
#: Limits of the clip norm. Between them, float32 can represent a row, its norm and its noise.
_LEAST_NORM, _MOST_NORM = 1e-6, 1e6


class RowNoise:
    """Clips rows to a norm and adds noise; holds the options that both defenses of this file share.

    Two rows whose norm is at most C differ by at most 2 C, in the 2-norm for `gaussian` and in the
    1-norm for `laplace`. Without a clip norm, the difference has no bound, so the noise gives no
    epsilon.

    Args:
        norm: clip norm C, from 1e-6 to 1e6; "inf" does not clip.
        sigma: standard deviation (gaussian) or scale (laplace) of the noise, from 1e-6 to 1e6; 0
            adds no noise. The value is relative to `norm`; it is absolute if `norm` is "inf".
        law: distribution of the noise: "gaussian" or "laplace".
        delta: delta of the Gaussian mechanism, from 1e-12 to below 1.

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, norm: float, sigma: float, law: Law, delta: float) -> None:
        wanted = f"{_LEAST_NORM:g} to {_MOST_NORM:g}, or inf"
        require("norm", norm, wanted, norm == math.inf or _LEAST_NORM <= norm <= _MOST_NORM)
        wanted = f"0, or {_LEAST_SIGMA:g} to {_MOST_SIGMA:g}"
        require("sigma", sigma, wanted, sigma == 0 or _LEAST_SIGMA <= sigma <= _MOST_SIGMA)
        wanted = f"{kernel.LEAST_DELTA:g} to below 1"
        require("delta", delta, wanted, kernel.LEAST_DELTA <= delta < 1)
        require_choice("law", law, get_args(Law))
        self.norm = norm
        self.sigma = sigma
        self.law = law
        self.delta = delta if law == "gaussian" else 0.0

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon of one row sent once; None without a clip norm or without noise."""
        if self.norm == math.inf or self.sigma == 0:
            return None
        if self.law == "laplace":
            return 2 / self.sigma
        return gaussian_epsilon(self.sigma, 2.0, self.delta)

    def clip(self, rows: Tensor, unit: float = 1.0) -> Tensor:
        """Clip rows of axes (rows, width) to norm `norm` x `unit`; differentiable. See `noised`."""
        return rows if self.norm == math.inf else kernel.clip_rows(rows, self.norm * unit, self.law)

    def noised(
        self, rows: Tensor, secret: Secret, *purpose: str | int, unit: float = 1.0
    ) -> Tensor:
        """Return clipped rows plus noise, from a random stream that the party's secret determines.

        With a clip norm, the result is rounded to a grid; see `vfl.privacy.kernel.release_rows`. If
        the rows or the noise parameters change, another random stream gives the noise. If the same
        noise was used at two scales, or on two sets of rows, the two results would disclose the
        rows or their difference.

        Args:
            rows: rows to which noise is added, axes (rows, width).
            secret: secret of the protected party.
            purpose: names that select the random stream; a `fingerprint` of the rows and the noise
                parameters also select it.
            unit: factor by which clip norm and noise are multiplied.
        """
        if self.sigma == 0:
            return self.clip(rows, unit)
        law = (self.law, repr(self.norm), repr(self.sigma), repr(unit))
        purpose = (*purpose, *law, fingerprint(rows))
        draw = secret.laplace if self.law == "laplace" else secret.normal
        draws = torch.from_numpy(draw(tuple(rows.shape), *purpose))
        if self.norm == math.inf:
            return rows + (self.sigma * unit * draws).to(rows)
        norm = self.norm * unit
        return kernel.release_rows(rows, norm, self.sigma * norm, self.law, draws)

    def promise(
        self, protects: str, party: str, against: str, unit: Unit
    ) -> tuple[PrivacyStatement, ...]:
        """Return the guarantee that the noise gives against a party, with epsilon per exchange."""
        if self.epsilon is None:
            return (PrivacyStatement(protects, f"{party}, by noise without a bound"),)
        law = "Laplace mechanism" if self.law == "laplace" else "analytic Gaussian mechanism"
        return (
            PrivacyStatement(
                protects,
                f"{party}, {against}",
                self.epsilon,
                self.delta,
                unit,
                "exchange",
                "replace",
                accountant=law,
            ),
        )


class GradientNoise(Defense):
    """Clips gradient rows to a norm; adds noise drawn from the label party's secret.

    For a fixed top, a row's gradient depends on this row's label and on no other label. So one
    exchange has an exact local epsilon (Dwork et al. 2006; Balle and Wang 2018) for this label. A
    whole training has no epsilon: the top learns from true labels, and later gradients of other
    rows depend on the top.

    Args:
        norm: clip norm for the gradient of one row's own loss; this is the sent gradient times the
            number of rows in the batch. "inf" does not clip, and then the defense gives no
            guarantee.
        sigma: standard deviation (gaussian) or scale (laplace) of the noise, relative to `norm`.
        law: distribution of the noise and norm for clipping: "gaussian" (2-norm) or "laplace"
            (1-norm).
        delta: delta of the Gaussian mechanism.

    >>> round(GradientNoise(norm=1.0, sigma=4.0).privacy()[0].epsilon, 3)
    1.993

    Raises:
        BadOptionError: an option is out of range.
        SpecError: the noise gives an epsilon, and the labels are numbers or rows have different
            weights; or another defense of the chain would invalidate the epsilon.
    """

    side = "label"
    label_free = True
    rows_apart = True
    once = True

    def __init__(
        self, norm: float = 1.0, sigma: float = 1.0, law: Law = "gaussian", delta: float = 1e-5
    ) -> None:
        self._noise = RowNoise(norm, sigma, law, delta)
        if self._noise.epsilon is not None:
            self.separate_rows = frozenset({"top"})

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if self._noise.epsilon is not None:
            cure = (
                "gradient_noise:norm=inf, which promises nothing, or only one of the two defenses"
            )
            what = "the epsilon of 'gradient_noise' does not hold"
            refuse_hooks_on_labels(what, (*before, *after), cure)
            refuse_mixing("gradient_noise", before, "gradient")

    def prepare(self, kind: LabelKind) -> None:
        if self._noise.epsilon is not None:
            require_equal_weights("gradient_noise", kind)
            if kind.scaled:
                raise SpecError(
                    "the epsilon of 'gradient_noise' is for classes: the mean and scale of numeric "
                    "labels follow from all labels",
                    want="label.task = 'classification'",
                    fix="gradient_noise:norm=inf, which promises nothing",
                )

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        if self._noise.epsilon is not None:
            refuse_batch_norm(top, "gradient_noise")
        return top

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        assert context.secret is not None, "gradients travel in training only"
        unit = 1 / max(1, len(grad))
        return self._noise.noised(grad, context.secret, "gradient_noise", context.step, unit=unit)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "by one gradient of a row, for the top at that time; epsilons add up over exchanges and"
            " parties, and do not count what the top learns from true labels"
        )
        return self._noise.promise("labels", "a feature party", against, "label")


class ClippedNoise(Defense):
    """Clips rows of the cut to a norm; adds noise drawn from the feature party's secret.

    The difference of two clipped rows has at most twice the norm. So one row that is sent once has
    a local epsilon (Dwork et al. 2006; Gaussian: Balle and Wang 2018), as long as the bottom is
    fixed. The epsilons of several exchanges of a row add up, because the mean of n noisy cuts has
    only 1/sqrt(n) of the noise.

    Args:
        norm: clip norm of a row; "inf" does not clip, and then the defense gives no guarantee.
        sigma: standard deviation (gaussian) or scale (laplace) of the noise, relative to `norm`.
        law: distribution of the noise and norm for clipping: "gaussian" (2-norm) or "laplace"
            (1-norm).
        delta: delta of the Gaussian mechanism.
        queries: whether cuts for evaluation and prediction also get noise. If a query repeats the
            same rows in the same step and with the same bottom, the noise is the same, so averaging
            the answers does not remove it. Queries with other batches or in other steps get new
            noise. With `queries=no`, cuts of queries are only clipped, and the guarantee covers
            only the training.

    >>> round(ClippedNoise(norm=4.0, sigma=2.0, law="laplace").privacy()[0].epsilon, 3)
    1.0

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "feature"
    rows_apart = True
    once = True

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
        if self._noise.epsilon is not None:
            self.separate_rows = frozenset({"bottom"})

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if self._noise.epsilon is not None:
            refuse_mixing("clipped_noise", [*before, *after], "batch")
            refuse_mixing("clipped_noise", before, "embedding")

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        if self._noise.epsilon is not None:
            refuse_batch_norm(bottom, "clipped_noise")
        return bottom

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        if context.secret is None or not (context.training or self.queries):
            return self._noise.clip(cut)
        phase = "train" if context.training else "query"
        return self._noise.noised(cut, context.secret, "clipped_noise", phase, context.step)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        when = (
            "by one cut of a row, sent in training or as a query"
            if self.queries
            else "by one cut that is sent in training"
        )
        against = (
            f"{when}, for the bottom at that time; epsilons add up over epochs and queries, and do"
            " not count what the bottom learns from other rows"
        )
        promised = self._noise.promise("inputs", "the label party", against, "record")
        return tuple(replace(one, training_only=not self.queries) for one in promised)
