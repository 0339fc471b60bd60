"""What a cut looks like: angles between its rows, and a map of them, as numbers for a page."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

BINS = 36
_PERPLEXITY = 30.0


def pictures_of(cut: Tensor, labels: Tensor) -> dict[str, Any]:
    """Histograms of the angles between rows, and where t-SNE puts the rows.

    Args:
        cut: axes (rows, width), at most a thousand rows.
        labels: int64, axes (rows,).

    Returns:
        `same` and `different`, share of the pairs of one class and of two in each of `BINS` equal
        bins from 0 to pi, with their means in rad; `map`, two coordinates a row; `labels`.
    """
    cut = cut.flatten(1)
    told = angle_histograms(cut, labels)
    return told | {"map": tsne(cut), "labels": labels.tolist()}


def angle_histograms(cut: Tensor, labels: Tensor) -> dict[str, Any]:
    """Shares of pairs by angle (thesis 4.4.5), of one class and of two; see `pictures_of`."""
    rows, columns = torch.triu_indices(len(cut), len(cut), offset=1)
    angles = pair_angles(cut)[rows, columns]
    same = labels[rows] == labels[columns]
    found: dict[str, Any] = {}
    for name, chosen in (("same", angles[same]), ("different", angles[~same])):
        counts = torch.histc(chosen, BINS, 0.0, math.pi)
        found[name] = (counts / max(1, len(chosen))).tolist()
        found[f"{name}_mean"] = float(chosen.mean()) if len(chosen) else None
    return found


def pair_angles(cut: Tensor) -> Tensor:
    """Angles between all rows in rad, axes (rows, rows), exact for small ones as well.

    2 atan2(|u - v|, |u + v|) of unit vectors; the arc cosine of their product loses small angles.
    """
    unit = torch.nn.functional.normalize(cut.double(), dim=1)
    difference = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")
    together = torch.cdist(unit, -unit, compute_mode="donot_use_mm_for_euclid_dist")
    return 2 * torch.atan2(difference, together)


def tsne(cut: Tensor) -> list[list[float]]:
    """Two coordinates a row by t-SNE (van der Maaten and Hinton 2008); none for a few rows."""
    from sklearn.manifold import TSNE

    if len(cut) < 5:
        return []
    model = TSNE(perplexity=min(_PERPLEXITY, (len(cut) - 1) / 3), init="random", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        places = model.fit_transform(cut.numpy())
    return [[round(float(x), 2), round(float(y), 2)] for x, y in places]
