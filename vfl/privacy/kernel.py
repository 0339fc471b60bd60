"""Clipping and noise for all code that claims an epsilon.

Two properties hold for every float32 input, finite or not, even an input that an attacker chose:

- One row changes a sum by at most its bound. Norms and sums are float64, which can represent the
  square of every float32 number, so no norm underflows to 0 or overflows. A row whose norm is not
  finite adds 0.
- The released numbers, including the noise, are multiples of a grid step, so their low bits
  disclose nothing about the input (Mironov 2012). The sum is rounded to the grid first. Rounding
  the sum of value and Gaussian noise then equals adding rounded noise, so the release is
  post-processing of the continuous mechanism that the accountants bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vfl.core.errors import PrivacyError
from vfl.core.registry import require
from vfl.core.seeds import Secret

Law = Literal["gaussian", "laplace"]
#: Bounds of a clip norm; within these bounds, the grid step and the noise are normal float32
#: numbers.
LEAST_NORM, MOST_NORM = 2.0**-60, 2.0**60
_NO_NORM = 2.0**-80
#: A smaller delta would be below the error that draws from 75 random bits have in the tails of a
#: distribution.
LEAST_DELTA = 1e-12
#: Bounds of a noise multiplier: a smaller multiplier hides no row, and a larger one leaves nothing
#: of a sum.
LEAST_NOISE, MOST_NOISE = 1e-12, 1e9
#: Fraction by which the clip norm of each row is lowered, because rounding float64 sums of clipped
#: rows changes the sums by less than this fraction.
_ROUNDING = 2.0**-40
#: As powers of 2: grid steps per standard deviation of the noise; and clip norm divided by the
#: largest sensitivity that rounding to the grid adds.
_STEPS_A_DEVIATION, _STEPS_A_NORM = 24, 12
#: Largest number of grid steps per standard deviation, as a power of 2; with more, released numbers
#: would show the rounding of float64 draws.
_MOST_STEPS = 36
#: Learning rate by which a clip norm moves towards a quantile of the gradient norms (Andrew et al.
#: 2021, section 3.1).
QUANTILE_RATE = 0.2
#: The largest possible draw of each distribution from 75 random bits, in units of the gaussian's
#: standard deviation or of the laplace's scale.
_LONGEST: dict[Law, float] = {"gaussian": 10.3, "laplace": 52.7}


def require_norm(name: str, norm: float) -> None:
    """Refuse a clip norm for which float32 results would underflow or overflow.

    Raises:
        BadOptionError: the norm is outside 2^-60 to 2^60.
    """
    require(name, norm, "2^-60 to 2^60", LEAST_NORM <= norm <= MOST_NORM)


def require_noise(name: str, noise: float) -> None:
    """Refuse a noise multiplier outside 1e-12 to 1e9.

    Raises:
        BadOptionError: the multiplier is outside that range.
    """
    require(name, noise, "1e-12 to 1e9", LEAST_NOISE <= noise <= MOST_NOISE)


def norms_of(rows: Tensor, law: Law = "gaussian") -> Tensor:
    """Return each row's norm, float64, axes (rows,): 2-norm for gaussian, 1-norm for laplace.

    Float64 can represent the square of every float32 number. Squares of float64 rows may underflow,
    but only for rows that are shorter than every allowed clip norm.

    >>> [f"{norm:.3g}" for norm in norms_of(torch.tensor([[3e-30, 4e-30], [3e30, 4e30]]))]
    ['5e-30', '5e+30']
    """
    order, values = 1 if law == "laplace" else 2, rows.flatten(1)
    norms: Tensor = torch.linalg.vector_norm(values, order, 1, dtype=torch.float64)
    return norms


def norm_bounds(rows: Tensor) -> Tensor:
    """Return an upper bound of each row's 2-norm that is close to it; float64, axes (rows,).

    In float32, n squares and their sum have a relative rounding error of at most n 2^-24 (Higham
    2002, section 3.1), and squares below 2^-126 may be lost. The returned bound exceeds the
    computed norm by more than this rounding error. If a row's float32 squares may overflow, the
    function computes this row's norm in float64; the bound of a row never depends on another row.

    Args:
        rows: float32, axes (rows, parts, numbers); with at most a few hundred numbers the bound is
            close.
    """
    parts = torch.linalg.vector_norm(rows, 2, 2)
    rounding, lost = rows.shape[2] * 2.0**-23, 2.0**-62 * math.sqrt(rows.shape[1:].numel())
    bounds = norms_of(parts.double()).mul_(1 + rounding).add_(lost)
    huge = ~(parts < 2.0**60).all(1)
    if bool(huge.any()):
        bounds[huge] = norms_of(rows[huge])
    return bounds


def clip_factors(norms: Tensor, bound: float | Tensor) -> Tensor:
    """Return the factors that shorten rows to a bound: min(1, bound / norm), float64.

    A row whose norm is not finite gets the factor 0.

    >>> clip_factors(torch.tensor([0.0, 0.5, 4.0, torch.inf]), 2.0).round(decimals=9).tolist()
    [1.0, 1.0, 0.5, 0.0]
    """
    # A norm below `_NO_NORM` needs no clipping, so raising it to `_NO_NORM` changes no factor. A
    # bound divided by an infinite norm is 0, and a NaN factor is replaced by 0.
    norms = norms.double().clamp_min(_NO_NORM)
    return (bound * (1 - _ROUNDING) / norms).clamp(max=1.0).nan_to_num(0.0)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return rows multiplied by their factors, float64.

    A factor of 0 gives zeros for any content of a row, even for NaN.
    """
    factors = factors.reshape(-1, *(1,) * (rows.dim() - 1))
    return (rows.double() * factors).masked_fill(factors == 0, 0.0)


def clip_rows(rows: Tensor, norm: float, law: Law = "gaussian") -> Tensor:
    """Clip rows to a norm, differentiably.

    Rounding may make a row longer than the norm by one last bit.

    Args:
        rows: axes (rows, width).
        norm: the bound.
        law: see `norms_of`.
    """
    return scaled(rows, clip_factors(norms_of(rows, law), norm)).to(rows)


@dataclass(frozen=True, slots=True)
class NoisySum:
    """A sum of clipped rows that is released with Gaussian noise.

    Attributes:
        norm: largest change that one row can cause in the released sum before noise (2-norm).
        deviation: standard deviation of the noise in each number of the sum.
        count: number of numbers in the sum.

    >>> NoisySum(1.0, 1.0, 10_000).step == 2.0**-24
    True
    """

    norm: float
    deviation: float
    count: int

    @property
    def step(self) -> float:
        """Step of the grid to which the sum is rounded; the step is a power of 2.

        Rounding changes the distance between two neighbouring sums by at most step * sqrt(count).
        The step keeps this change at or below 2^-12 of the norm, unless the grid would then have
        more than 2^36 steps per standard deviation.
        """
        coarse = min(
            self.deviation * 2.0**-_STEPS_A_DEVIATION,
            self.norm * 2.0**-_STEPS_A_NORM / math.sqrt(max(1, self.count)),
        )
        return float(2.0 ** math.floor(math.log2(max(coarse, self.deviation * 2.0**-_MOST_STEPS))))

    @property
    def bound(self) -> float:
        """Clip norm for each row with which one row changes the rounded sum by at most `norm`."""
        return max(0.0, self.norm - self.step * math.sqrt(self.count))


def release(laws: Sequence[NoisySum], total: Tensor, secret: Secret, *purpose: str | int) -> Tensor:
    """Round a sum to its grid and add noise in whole grid steps.

    The result is float64, axes (count,), on the CPU. The noise depends on the noise laws and on the
    sum itself. If equal noise were added to another sum, or under another law, the difference of
    the two releases would disclose data.

    Args:
        laws: noise laws of the consecutive parts of the sum, one law for each part.
        total: sum of rows, whose parts were clipped to the bounds of the laws; float64, axes
            (count,).
        secret: secret from which the noise is derived.
        purpose: words that separate the noise of one purpose from the noise of all others.

    Raises:
        PrivacyError: the sum has another length or is not finite, so that noise would not protect
            it.
    """
    total, counts = total.detach().double().cpu(), [law.count for law in laws]
    if total.shape != (sum(counts),) or not math.isfinite(float(total.sum())):
        raise PrivacyError(
            "noise cannot protect this sum",
            got=f"axes {tuple(total.shape)}, or a number that is not finite",
            want=f"{sum(counts)} finite numbers",
        )
    bound_to = repr(tuple(laws)), secret.tag(total.numpy(), "noise")
    noisy = normal_draws(secret, len(total), *purpose, *bound_to)
    for law, part, of in zip(
        laws, torch.split(noisy, counts), torch.split(total, counts), strict=True
    ):
        part.mul_(law.deviation / law.step).round_().add_((of / law.step).round_()).mul_(law.step)
    return noisy


def shared_out(total: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Split a sum, axes (numbers,), into one tensor per weight.

    Each tensor has the weight's shape, type and device.
    """
    parts = torch.split(total, [one.numel() for one in weights])
    return [one.to(of).view(of.shape) for one, of in zip(parts, weights, strict=True)]


def share_within(
    within: Tensor, size: float, deviation: float | None, secret: Secret, *purpose: str | int
) -> Tensor:
    """Return the share of rows whose norm is within the clip norm, from a noisy count of rows.

    A row counts as plus or minus one half, so that a row that is added or changed has a bounded
    effect on the count. A clip norm that follows a quantile changes by this share. The share is
    limited to -1 to 2, because noise alone must not change a clip norm by a large factor.

    Source: Andrew et al. 2021, algorithm 1.

    Args:
        within: whether each row's norm is within the clip norm of a group, axes (groups, rows).
        size: number of rows by which the count is divided, such as the expected number.
        deviation: standard deviation of the noise in a group's count, above 0; None adds no noise.
        secret: secret from which the noise is derived.
        purpose: see `release`.

    Returns:
        Shares, float64, axes (groups,).

    >>> share_within(torch.tensor([[True, True, True, False]]), 4, None, Secret(bytes(32))).item()
    0.75
    """
    counts = within.double().sum(1) - within.shape[1] / 2
    if deviation is not None:  # every release is a multiple of 1/2, like the counts
        counts = release([NoisySum(0.5, deviation, 1)] * len(counts), counts, secret, *purpose)
    return (counts / size + 0.5).clamp(-1.0, 2.0)


def release_rows(rows: Tensor, norm: float, scale: float, law: Law, draws: Tensor) -> Tensor:
    """Clip each row, round it towards 0, and add noise; the result has the axes and type of `rows`.

    Rounding towards 0 only shortens rows, so any two rounded rows differ by at most twice the norm.
    A released number has at most 24 significant bits, which float32 represents exactly. The
    backward pass treats the result like the result of `clip_rows`.

    Args:
        rows: axes (rows, width).
        norm: clip norm: a 2-norm for the gaussian law, a 1-norm for the laplace law.
        scale: standard deviation (gaussian) or scale (laplace) of the noise; 0 adds no noise.
        law: see `norms_of`.
        draws: draws from the law with scale 1; axes (rows, width).
    """
    clipped = scaled(rows, clip_factors(norms_of(rows, law), norm))
    step = 2.0 ** math.ceil(math.log2((norm + _LONGEST[law] * scale) * 2.0**-23))
    noise = (draws.to(rows.device) * (scale / step)).round_()
    released = ((clipped.detach() / step).trunc_() + noise) * step
    given: Tensor = _InPlaceOf.apply(clipped, released).to(rows)  # type: ignore[no-untyped-call]
    return given


class _InPlaceOf(torch.autograd.Function):
    """Return the second argument in the forward pass; the first argument receives the gradient."""

    @staticmethod
    def forward(ctx: object, value: Tensor, given: Tensor) -> Tensor:
        return given

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def normal_draws(secret: Secret, count: int, *purpose: str | int) -> Tensor:
    """Draw standard normal numbers from a secret's key stream; float64, axes (count,).

    Both numbers that a Box-Muller pair (1958) gives are used; each is made from 53 random bits.
    Near 0, 22 further bits refine the number, because otherwise the normal distribution's tail
    would have gaps; see `vfl.core.seeds.log_unit`.
    """
    half = (count + 1) // 2
    words = torch.from_numpy(secret.words(2 * half, *purpose))
    unit = (words & ((1 << 53) - 1)).double()
    above = unit[:half].neg_().add_(2.0**53)
    # For draws that are not near 0, 53 bits are finer than any grid
    rare = (above < 2.0**40).nonzero()[:, 0]
    upper, lower = ((words[at] >> 53 & 2047).double() for at in (rare, half + rare))
    above[rare] -= (2048 * upper + lower + 0.5) * 2.0**-22
    radius = above.mul_(2.0**-53).log_().mul_(-2).sqrt_()
    angle = unit[half:].mul_(2.0**-53 * 2 * math.pi)
    draws = torch.empty_like(unit)
    torch.cos(angle, out=draws[:half])
    torch.sin(angle, out=draws[half:])
    return draws.view(2, half).mul_(radius).view(-1)[:count]
