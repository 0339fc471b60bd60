"""Scaling features by what unlabelled rows tell; weak directions are made as loud as strong ones.

A defense that hides the classes where the variance is low is undone by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from vfl.defenses.components import principal
from vfl.options import require_choice

Scale = Callable[[Tensor], Tensor]
Scaler = Literal["none", "standard", "whiten", "cosine"]


def scale_by(kind: Scaler, reference: Tensor) -> Scale:
    """A scaling fitted on rows of axes (rows, features).

    Args:
        kind: "standard": mean 0 and variance 1 of each feature; "whiten": of each principal
            component; "cosine": every row on the unit sphere, after centring.
        reference: the rows it is fitted on.

    Raises:
        BadOptionError: no such kind.
    """
    require_choice("scaler", kind, get_args(Scaler))
    if kind == "none":
        return lambda rows: rows
    mean = reference.mean(0)
    if kind == "standard":
        spread = _safe(reference.std(0))
        return lambda rows: (rows - mean) / spread
    if kind == "cosine":
        return lambda rows: torch.nn.functional.normalize(rows - mean, dim=1)
    turned = _whitening(reference)
    return lambda rows: (rows - mean) @ turned


def _whitening(reference: Tensor) -> Tensor:
    """Maps centred rows to uncorrelated features of variance 1; axes (features, components)."""
    _, variance, directions = principal(reference)
    variance = variance * len(reference) / max(1, len(reference) - 1)
    kept = variance > 1e-12 * variance[0]
    turned: Tensor = (directions[:, kept] / variance[kept].sqrt()).float()
    return turned


def _safe(spread: Tensor) -> Tensor:
    """Spreads to divide by; a feature that never varies is left as it is."""
    return torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))
