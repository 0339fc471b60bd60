"""Principal directions of rows, released with noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.core.registry import require, require_range
from vfl.core.seeds import Secret
from vfl.privacy import kernel


def private_projection(rows: Tensor, width: int, *, noise: float, secret: Secret) -> Tensor:
    """The first principal directions of rows scaled to length 1; axes (columns, width).

    Abadi et al. 2016, section 4; Dwork et al. 2014, algorithm 1 (analyze Gauss). A row more or less
    moves the sum of the outer products by at most 1, so what is released is one Gaussian step of
    this noise, of sampling rate 1; what follows from the directions costs nothing more.

    Args:
        rows: axes (rows, columns).
        width: how many directions.
        noise: deviation of the noise; 0 adds none, and promises nothing.
        secret: the noise follows from it.

    >>> rows = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    >>> private_projection(rows, 1, noise=0.0, secret=Secret(bytes(32))).abs().flatten()
    tensor([0.6000, 0.8000])

    Raises:
        BadOptionError: a number out of range.
    """
    require_range("width", width, 1, rows.shape[1])
    require("noise", noise, "0 or more", 0 <= noise < math.inf)
    values = rows.double()
    unit = kernel.scaled(values, 1 / kernel.norms_of(rows).clamp_min(kernel.LEAST_NORM))
    products = unit.nan_to_num(0.0).T @ unit.nan_to_num(0.0)
    upper = torch.triu_indices(*products.shape)
    numbers = products[upper[0], upper[1]]
    if noise:
        law = kernel.NoisySum(1.0, noise, len(numbers))
        numbers = kernel.release([law], numbers * law.bound, secret, "projection")
    noisy = torch.zeros_like(products)
    noisy[upper[0], upper[1]] = noisy[upper[1], upper[0]] = numbers
    directions: Tensor = torch.linalg.eigh(noisy).eigenvectors.flip(1)[:, :width]
    return directions.to(rows.dtype).contiguous()
