"""Labels from the logits of a batch, of which P2 knows all but the order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import lsq_linear
from scipy.sparse import csr_matrix
from torch import Tensor


def labels_by_place(logits: Tensor) -> Tensor:
    """The class of the row at each place, as if nothing had been permuted; bool, axes (rows,).

    >>> labels_by_place(torch.tensor([-1.5, 0.5])).tolist()
    [False, True]
    """
    return logits > 0


def labels_from_sums(batches: Sequence[Tensor], seen: Sequence[Tensor], rows: int) -> Tensor:
    """How likely each row is of class 1, from sums over many batches that share rows.

    The order inside a batch is secret, its rows are public, and so is what no order changes: the
    sum of the probabilities. Every batch is one linear equation, and least squares with unknowns
    between 0 and 1 solves them (Dinur & Nissim 2003, section 3, by least squares).

    Args:
        batches: the rows of each batch, int64.
        seen: the logits of each, in any order; as many as rows.
        rows: how many rows there are in all.

    Returns:
        Axes (rows,), between 0 and 1.

    >>> pairs = [torch.tensor(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    >>> logits = torch.tensor([9.0, -9.0, 9.0])
    >>> labels_from_sums(pairs, [logits[pair].flip(0) for pair in pairs], 3).round().tolist()
    [1.0, 0.0, 1.0]
    """
    lengths = [len(batch) for batch in batches]
    columns = torch.cat(list(batches)).numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    system = csr_matrix((np.ones(len(columns)), columns, starts), shape=(len(lengths), rows))
    sums = np.array([float(torch.sigmoid(each.double()).sum()) for each in seen])
    found = lsq_linear(system, sums, bounds=(0, 1), max_iter=200)
    return torch.from_numpy(found.x)
