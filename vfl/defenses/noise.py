"""Noise on rows of a bounded norm, and the differential privacy that follows from it."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from vfl.options import require, require_choice, require_range
from vfl.seeds import Secret

Law = Literal["gaussian", "laplace"]


class RowNoise:
    """Rows clipped to a norm, then noise; the same options wherever rows get noise.

    Any two rows of norm C are at most 2 C apart, in the 2-norm for `gaussian` and in the 1-norm
    for `laplace`. Without a norm there is no such bound, and no epsilon.

    Args:
        norm: C; "inf" clips nothing.
        sigma: deviation (gaussian) or scale (laplace) of the noise, in units of `norm`; with
            norm=inf in the units of the row.
        law: "gaussian" or "laplace".
        delta: of the Gaussian mechanism.

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(self, norm: float, sigma: float, law: Law, delta: float) -> None:
        require("norm", norm, "above 0, or inf", norm > 0)
        require_range("sigma", sigma, 0)
        require("delta", delta, "between 0 and 1", 0 < delta < 1)
        require_choice("law", law, get_args(Law))
        self.norm = norm
        self.sigma = sigma
        self.law = law
        self.delta = delta if law == "gaussian" else 0.0

    @property
    def epsilon(self) -> float | None:
        """Of one row sent once; None where the norm is not bounded or there is no noise."""
        if self.norm == math.inf or self.sigma == 0:
            return None
        if self.law == "laplace":
            return 2 / self.sigma
        return gaussian_epsilon(self.sigma, 2.0, self.delta)

    def clip(self, rows: Tensor, unit: float = 1.0) -> Tensor:
        """Rows of axes (rows, width) within the norm; differentiable. See `noised` for `unit`."""
        if self.norm == math.inf:
            return rows
        sizes = rows.norm(1 if self.law == "laplace" else 2, dim=1, keepdim=True)
        smallest = torch.finfo(rows.dtype).tiny
        factors: Tensor = (self.norm * unit / sizes.clamp_min(smallest)).clamp(max=1.0)
        return rows * factors

    def noised(
        self, rows: Tensor, secret: Secret, *purpose: str | int, unit: float = 1.0
    ) -> Tensor:
        """Clipped rows with noise from a stream of the secret.

        The stream belongs to these rows under this law: the same noise at two scales, or on two
        contents, would show the rows or their difference.

        Args:
            rows: axes (rows, width).
            secret: of the party that is protected.
            purpose: of the stream; `fingerprint` of the rows and the law's parameters are added.
            unit: what norm and sigma are multiples of.
        """
        law = (self.law, repr(self.norm), repr(self.sigma), repr(unit))
        purpose = (*purpose, *law, fingerprint(rows))
        draw = secret.laplace if self.law == "laplace" else secret.normal
        scale = self.sigma * unit * (1.0 if self.norm == math.inf else self.norm)
        noise = torch.from_numpy(scale * draw(tuple(rows.shape), *purpose))
        return self.clip(rows, unit) + noise.to(rows)


def fingerprint(rows: Tensor) -> str:
    """A text that two tensors share only when all their values are the same.

    Noise is bound to it: were a step repeated with other rows, after a restart or in another
    session, equal noise on both would show their difference.
    """
    return hashlib.sha256(rows.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def gaussian_epsilon(sigma: float, sensitivity: float, delta: float) -> float:
    """The least epsilon of Gaussian noise, exact for every epsilon.

    The root of Phi(s/2 - e/s) - exp(e) Phi(-s/2 - e/s) = delta in e, s = sensitivity / sigma
    (Balle and Wang 2018). The classic formula holds below epsilon 1 only.

    >>> round(gaussian_epsilon(sigma=3.7306, sensitivity=1.0, delta=1e-5), 4)
    1.0
    """
    ratio = sensitivity / sigma

    def excess(epsilon: float) -> float:
        near, far = ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio
        return math.exp(_log_phi(near)) - math.exp(epsilon + _log_phi(far)) - delta

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _log_phi(at: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(at, dtype=torch.float64)))
