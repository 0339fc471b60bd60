"""Principal directions of rows, released with differential privacy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.core.registry import require, require_range
from vfl.core.seeds import Secret
from vfl.privacy import kernel


def private_projection(rows: Tensor, width: int, *, noise: float, secret: Secret) -> Tensor:
    """Return the first principal directions of normalised rows, with noise; axes (columns, width).

    Source: Abadi et al. 2016, section 4; Dwork et al. 2014, algorithm 1 (analyze Gauss). Each row
    is scaled to length 1, so adding or removing one row changes the sum of the rows' outer products
    by at most 1. The release is therefore one step of the Gaussian mechanism with this noise and
    sampling rate 1. Results computed from the released directions cost no further privacy.

    Args:
        rows: axes (rows, columns).
        width: number of directions to return.
        noise: standard deviation of the noise; 0 adds no noise, and then there is no privacy
            guarantee.
        secret: secret from which the noise is derived.

    >>> rows = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    >>> private_projection(rows, 1, noise=0.0, secret=Secret(bytes(32))).abs().flatten()
    tensor([0.6000, 0.8000])

    Raises:
        BadOptionError: a number is out of range.
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
