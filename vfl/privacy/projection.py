"""Principal directions of rows, released with noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.core.registry import require, require_range
from vfl.core.seeds import Secret, fingerprint


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
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    products = unit.T @ unit
    draws = secret.normal(tuple(products.shape), "projection", repr(noise), fingerprint(products))
    upper = torch.from_numpy(draws).triu()
    noisy = products + noise * (upper + upper.triu(1).T)
    directions: Tensor = torch.linalg.eigh(noisy).eigenvectors.flip(1)[:, :width]
    return directions.to(rows.dtype).contiguous()
