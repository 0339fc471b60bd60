"""Known weights and candidate rows: whose values are among those that were seen.

The order hides where a value lies, not that it is there. Matching what is seen against what each
candidate would give is the way permuted inference of language models was broken (arXiv 2505.18332).
"""

from __future__ import annotations

import torch
from torch import Tensor


def found_shares(seen: Tensor, sums: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Share of each candidate's values that are among those seen; axes (candidates,).

    Args:
        seen: values before the first function, of a batch in secret order.
        sums: what the known weights give for each candidate, axes (candidates, outputs).
        tolerance: how far rounding may carry a value; in fast mode 4e-6.

    >>> found_shares(torch.tensor([3.0, 0.5, 1.0]), torch.tensor([[1.0, 3.0], [3.0, 4.0]])).tolist()
    [1.0, 0.5]
    """
    ranked = seen.sort().values
    above = torch.searchsorted(ranked, sums.contiguous()).clamp(max=len(ranked) - 1)
    near = (ranked[above] - sums).abs().minimum((ranked[(above - 1).clamp(min=0)] - sums).abs())
    return (near <= tolerance).double().mean(1)


def like_multisets(seen: Tensor, sums: Tensor) -> Tensor:
    """How far each candidate's sorted values lie from those of one row; axes (candidates,).

    >>> like_multisets(torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 3.0], [3.0, 4.0]])).tolist()
    [0.0, 5.0]
    """
    return (sums.sort(1).values - seen.sort().values).square().sum(1)
