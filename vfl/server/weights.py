"""How much each training row counts; only the label party knows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vfl.errors import DataError


def training_weights(
    labels: Tensor, train: Tensor, row_weights: Tensor | None, class_weight: str
) -> Tensor | None:
    """The weight of every row in the training loss, sum(w * loss) / sum(w) over a batch.

    "balanced" gives each row (training rows) / (classes * training rows of its class), as
    scikit-learn does, times its own weight.

    Args:
        labels: of all rows, axes (rows,).
        train: positions of the training rows.
        row_weights: of all rows, axes (rows,), not negative; None weighs all alike.
        class_weight: "none" or "balanced".

    Returns:
        float32 of axes (rows,); None where all training rows weigh the same, which is a training
        without weights.

    >>> labels = torch.tensor([0, 0, 0, 1])
    >>> training_weights(labels, torch.arange(4), None, "balanced")
    tensor([0.6667, 0.6667, 0.6667, 2.0000])

    Raises:
        DataError: weights of another number of rows, negative, not finite, or 0 for all.
    """
    weights = torch.ones(len(labels), dtype=torch.float64)
    if row_weights is not None:
        _check(row_weights, len(labels), train)
        weights *= row_weights
    if class_weight == "balanced":
        codes = labels[train]
        counts = torch.bincount(codes)
        weights[train] *= len(train) / (int((counts > 0).sum()) * counts[codes].double())
    counted = weights[train]
    return None if bool((counted == counted[0]).all()) else weights.float()


def batch_weights(
    weights: Tensor | None, rows: np.ndarray, counts: Tensor | None, device: torch.device
) -> Tensor | None:
    """What a batch's rows weigh, axes (rows,); None where all weigh the same.

    Args:
        weights: of all rows, as `training_weights` gives them.
        rows: positions of the batch's rows.
        counts: which of them are learned from, axes (rows,); None for all.
        device: where the weights go.
    """
    if weights is None:
        return None if counts is None else counts.float().to(device)
    own = weights[rows]
    return (own if counts is None else own * counts).to(device)


def _check(row_weights: Tensor, rows: int, train: Tensor) -> None:
    if row_weights.shape != (rows,):
        got = f"axes {tuple(row_weights.shape)}"
        raise DataError("every row needs one weight", got=got, want=f"axes ({rows},)")
    if not bool((torch.isfinite(row_weights) & (row_weights >= 0)).all()):
        raise DataError("a row's weight is negative or not finite", want="finite numbers from 0")
    if not bool(row_weights[train].any()):
        raise DataError("the weights of all training rows are zero", want="at least one above 0")
