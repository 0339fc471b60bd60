"""How alike pictures are: peak signal-to-noise ratio and structural similarity."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def peak_ratio(guess: Tensor, pictures: Tensor) -> float:
    """Mean over pictures of 10 log10(R^2 / MSE) in decibels, R being the range of all true pixels.

    A picture hit exactly counts as 100 dB.

    >>> pictures = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    >>> round(peak_ratio(pictures + 0.1, pictures), 3)
    20.0
    """
    error = (guess.double() - pictures.double()).square().flatten(1).mean(1)
    ratios = 10 * (_range(pictures).square() / error).log10()
    return float(ratios.clamp(max=100).mean())


def structural_similarity(guess: Tensor, pictures: Tensor) -> float:
    """Mean SSIM over pictures and channels, 1 for equal ones.

    Wang et al. 2004, with their Gaussian window of 11 pixels and deviation 1.5 (smaller for
    smaller pictures) wherever it fits whole, K1 = 0.01, K2 = 0.03, and the range of all true
    pixels.

    Args:
        guess: axes (rows, channels, height, width).
        pictures: the true ones, alike.
    """
    one, other = (each.double().flatten(0, 1)[:, None] for each in (guess, pictures))
    window = _window(min(_WINDOW, *pictures.shape[2:]))
    mean_one, mean_other = conv2d(one, window), conv2d(other, window)
    spread_one = conv2d(one.square(), window) - mean_one.square()
    spread_other = conv2d(other.square(), window) - mean_other.square()
    together = conv2d(one * other, window) - mean_one * mean_other
    c1, c2 = (_K1 * _range(pictures)) ** 2, (_K2 * _range(pictures)) ** 2
    luminance = (2 * mean_one * mean_other + c1) / (mean_one.square() + mean_other.square() + c1)
    structure = (2 * together + c2) / (spread_one + spread_other + c2)
    return float((luminance * structure).mean())


def _range(pictures: Tensor) -> Tensor:
    return (pictures.max() - pictures.min()).double()


def _window(side: int) -> Tensor:
    """Gaussian weights that sum to 1, axes (1, 1, side, side)."""
    places = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    line = torch.exp(-places.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    return torch.outer(line, line)[None, None]
