"""Readers: classifiers of a few leaked rows, on features that rows without labels may scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.scaling import Scale, Scaler, scale_by
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_choice

#: From rows of axes (rows, features) to scores of axes (rows, classes).
Read = Callable[[Tensor], Tensor]


class Reader(EmbeddingAttack):
    """Learns from the leaked rows and reads the targets.

    Args:
        scaler: see `scale_by`; all but "none" are fitted on the unlabelled rows.
        at: the layer it reads.

    Raises:
        BadOptionError: no such scaler or layer.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset({Grant.LEAKED})

    def __init__(self, scaler: Scaler, at: Layer) -> None:
        super().__init__(at)
        require_choice("scaler", scaler, get_args(Scaler))
        self.scaler: Scaler = scaler
        if scaler != "none":
            self.needs |= {Grant.UNLABELLED}

    @abstractmethod
    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Read:
        """Fit the leaked rows, of axes (rows, features), scaled already."""

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale = self.scale(view)
        leaked = view.leaked
        read = self.learn(scale(self.rows(view, leaked)), leaked.labels, view.classes)
        return read(scale(self.rows(view, view.targets)))

    def scale(self, view: View) -> Scale:
        """The scaling, fitted on the unlabelled rows if it has anything to fit."""
        if self.scaler == "none":
            return lambda rows: rows
        return scale_by(self.scaler, self.rows(view, view.unlabelled))


def as_scores(found: np.ndarray, present: Sequence[int], classes: int) -> Tensor:
    """A decision function's numbers as scores, float32, axes (rows, classes).

    Args:
        found: axes (rows, present), or (rows,) for two classes: the evidence for the second.
        present: the classes among the leaked rows, ascending; others score below them.
        classes: how many there are.
    """
    numbers = torch.from_numpy(found).float()
    if numbers.dim() == 1:
        numbers = numbers[:, None] * torch.tensor([-0.5, 0.5])
    scores = numbers.min().repeat(len(numbers), classes) - 1
    scores[:, list(present)] = numbers
    return scores
