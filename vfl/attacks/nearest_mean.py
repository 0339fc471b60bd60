"""The nearest class mean."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.features import Layer
from vfl.attacks.reader import Read, Reader
from vfl.attacks.scaling import Scaler
from vfl.options import require_choice

Measure = Literal["cosine", "euclid"]


class NearestMean(Reader):
    """Gives each target the class whose mean over the leaked rows is nearest.

    Source: Snell et al. 2017 (prototypes), without training.

    Args:
        measure: "cosine" compares directions, "euclid" places.
        scaler: see `scale_by`.
        at: the layer it reads.

    Raises:
        BadOptionError: no such measure.
    """

    def __init__(
        self, measure: Measure = "cosine", scaler: Scaler = "none", at: Layer = "cut"
    ) -> None:
        require_choice("measure", measure, get_args(Measure))
        super().__init__(scaler, at)
        self.measure: Measure = measure

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Read:
        means = torch.zeros(classes, rows.shape[1]).index_add_(0, labels, rows)
        means /= labels.bincount(minlength=classes).clamp_min(1)[:, None]
        if self.measure == "euclid":
            return lambda some: -torch.cdist(some, means)
        return lambda some: normalize(some, dim=1) @ normalize(means, dim=1).T
