"""The nearest leaked rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.attacks.features import Layer
from vfl.attacks.reader import Read, Reader
from vfl.attacks.scaling import Scaler
from vfl.options import require_range


class KNN(Reader):
    """Lets the nearest leaked rows vote, each with the inverse of its distance.

    Source: Dudani 1976 (votes weighted by distance).

    Args:
        neighbours: how many vote, at most; with fewer leaked rows all of them do.
        scaler: see `scale_by`; "cosine" compares directions.
        at: the layer it reads.

    Raises:
        BadOptionError: no neighbour at all.
    """

    def __init__(self, neighbours: int = 5, scaler: Scaler = "none", at: Layer = "cut") -> None:
        require_range("neighbours", neighbours, 1)
        super().__init__(scaler, at)
        self.neighbours = neighbours

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Read:
        votes = one_hot(labels, classes).float()

        def read(some: Tensor) -> Tensor:
            distance, near = torch.cdist(some, rows).topk(
                min(self.neighbours, len(rows)), dim=1, largest=False
            )
            say = 1 / distance.clamp_min(1e-12)
            return (say / say.sum(1, keepdim=True))[:, None, :].matmul(votes[near])[:, 0]

        return read
