"""Known weights and no candidates: a linear system whose equations lost their order."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_shuffled(
    seen: Tensor, weight: Tensor, bias: Tensor, starts: Tensor, rounds: int = 50, ridge: float = 0.0
) -> Tensor:
    """The row x with x W + b nearest to the values seen, in some order.

    Assign values to outputs by rank, solve least squares, and again until nothing changes; the
    best of all starts (shuffled regression, Abid et al. 2017, section 3).

    Args:
        seen: values of one row, axes (outputs,).
        weight: W, axes (columns, outputs); more outputs than columns, or `ridge` above 0.
        bias: b, axes (outputs,).
        starts: first guesses of the row, axes (starts, columns).
        rounds: at most so many.
        ridge: weight of |x|^2.

    >>> weight, row = torch.eye(2), torch.tensor([5.0, 1.0])
    >>> solve_shuffled(row.flip(0), weight, torch.zeros(2), torch.tensor([[3.0, 0.0]])).tolist()
    [5.0, 1.0]
    """
    ranked = seen.sort().values
    gram = weight @ weight.T + ridge * torch.eye(len(weight), dtype=weight.dtype)
    solve = torch.linalg.solve(gram, weight)  # axes (columns, outputs)
    rows = starts
    for _ in range(rounds):
        wanted = torch.empty_like(rows @ weight)
        order = (rows @ weight + bias).argsort(1)
        wanted.scatter_(1, order, ranked.expand_as(wanted))
        moved = (wanted - bias) @ solve.T
        if torch.equal(moved, rows):
            break
        rows = moved
    fit = ((rows @ weight + bias).sort(1).values - ranked).square().sum(1)
    return rows[fit.argmin()]
