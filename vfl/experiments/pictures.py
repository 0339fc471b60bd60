"""Pictures for the page of a grid: images from attacks on inputs, and charts of cuts.

Charts of cuts consist of angles between rows and a t-SNE map, stored as numbers. Pages read these
numbers without an import of torch.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vfl.core.storage import check_format, read_json, stamp, write_json

if TYPE_CHECKING:
    from torch import Tensor


#: Name of the subfolder of a run's folder that contains the pictures.
GALLERY = "reconstructions"
_ROWS = 8


def keep_pictures(run: Path, key: str, true: Tensor, found: Tensor) -> None:
    """Store the first images of an attack on a run; afterwards the files survive a crash.

    Args:
        run: folder of the run.
        key: key of the attack's score record.
        true: true images, axes (targets, channels, height, width); their values determine the grey
            scale.
        found: reconstructed images, with the same axes.
    """
    low, high = float(true.min()), float(true.max())

    def drawn(pictures: Tensor) -> list[str]:
        return [_png(picture, low, high) for picture in pictures.numpy()]

    record = {"true": drawn(true[:_ROWS]), "found": drawn(found[:_ROWS])}
    record |= {"mean": drawn(true.mean(0, keepdim=True))}
    write_json(run / GALLERY / f"{key}.json", stamp() | record)


def kept_pictures(run: Path, key: str) -> dict[str, list[str]] | None:
    """Return an attack's stored images as PNG files in base64; None if no images were stored.

    Returns:
        Images by name: `true`, `found` and `mean`. The entry `mean` contains the mean image, which
        an attacker without evidence would guess for each target.

    Raises:
        RunFolderError: the file is damaged, or has another format.
    """
    path = run / GALLERY / f"{key}.json"
    if not path.exists():
        return None
    record: Any = read_json(path)
    check_format(record, path)
    return {name: record[name] for name in ("true", "found", "mean")}


def _png(picture: np.ndarray, low: float, high: float) -> str:
    """Return an image, axes (channels, height, width), as PNG; grey unless it has 3 channels."""
    share = np.clip((picture - low) / (high - low or 1.0), 0, 1)
    pixels = (255 * share).round().astype(np.uint8)
    image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode("ascii")


BINS = 36
_PERPLEXITY = 30.0


def pictures_of(cut: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return histograms of angles between rows of a cut, and the rows' t-SNE coordinates.

    Args:
        cut: cut-layer activations, axes (rows, width), at most a thousand rows.
        labels: labels of the rows, int64, axes (rows,).

    Returns:
        Entries of `angle_histograms`; `map`: two coordinates per row, empty for fewer than five
        rows; `labels`.
    """
    cut = cut.flatten(1)
    return angle_histograms(cut, labels) | {"map": tsne(cut), "labels": labels.tolist()}


def angle_histograms(cut: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return shares of pairs of rows by angle (thesis 4.4.5), within and between classes.

    Returns:
        Entries `same` and `different`: shares of the pairs in each of `BINS` equal bins of angles
        from 0 to pi; `same_mean` and `different_mean`: mean angles in rad, None without pairs.
    """
    import torch

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
    """Return the angle between each pair of rows in rad, axes (rows, rows); small angles are exact.

    The angle between unit vectors u and v is 2 atan2(|u - v|, |u + v|); the arc cosine of their
    inner product would lose small angles.
    """
    import torch

    unit = torch.nn.functional.normalize(cut.double(), dim=1)
    difference = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")
    together = torch.cdist(unit, -unit, compute_mode="donot_use_mm_for_euclid_dist")
    return 2 * torch.atan2(difference, together)


def tsne(cut: Tensor) -> list[list[float]]:
    """Return two t-SNE coordinates of each row (van der Maaten and Hinton 2008).

    The list is empty for fewer than five rows.
    """
    from sklearn.manifold import TSNE

    if len(cut) < 5:
        return []
    model = TSNE(perplexity=min(_PERPLEXITY, (len(cut) - 1) / 3), init="random", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        positions = model.fit_transform(cut.numpy())
    return [[round(float(x), 2), round(float(y), 2)] for x, y in positions]
