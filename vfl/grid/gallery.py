"""Pictures that attacks on inputs made, kept beside the true ones for the page of a grid."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vfl.storage import check_format, read_json, stamp, write_json

if TYPE_CHECKING:
    from torch import Tensor

#: Of a run's folder.
GALLERY = "reconstructions"
_ROWS = 8


@dataclass(frozen=True, slots=True)
class Reconstructed:
    """Some pictures as PNG files in base64.

    Attributes:
        true: what the attack was after.
        found: what it made of it.
        mean: the mean picture, which is what whoever saw nothing would say of each.
    """

    true: tuple[str, ...]
    found: tuple[str, ...]
    mean: str


class Gallery:
    """The pictures of one run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / GALLERY

    def keep(self, key: str, true: Tensor, found: Tensor) -> None:
        """Keep the first few pictures of an attack; they are on disk when this returns.

        Args:
            key: of its score.
            true: axes (targets, channels, height, width); its range is that of all pictures.
            found: alike.
        """
        low, high = float(true.min()), float(true.max())

        def drawn(pictures: Tensor) -> list[str]:
            return [_png(picture, low, high) for picture in pictures.numpy()]

        record = {"true": drawn(true[:_ROWS]), "found": drawn(found[:_ROWS])}
        record |= {"mean": drawn(true.mean(0, keepdim=True))}
        write_json(self._folder / f"{key}.json", stamp() | record)

    def get(self, key: str) -> Reconstructed | None:
        """The pictures of a score; None if none were kept.

        Raises:
            RunFolderError: the file is damaged, or of another format.
        """
        path = self._folder / f"{key}.json"
        if not path.exists():
            return None
        record: Any = read_json(path)
        check_format(record, path)
        return Reconstructed(tuple(record["true"]), tuple(record["found"]), record["mean"][0])


def _png(picture: np.ndarray, low: float, high: float) -> str:
    """A picture with axes (channels, height, width), grey unless it has three channels."""
    share = np.clip((picture - low) / (high - low or 1.0), 0, 1)
    pixels = (255 * share).round().astype(np.uint8)
    image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode("ascii")
