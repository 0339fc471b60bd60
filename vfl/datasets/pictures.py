"""Number columns that are pixels: one mean and one spread for the whole block."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import numpy as np

from vfl.datasets.columns import Table
from vfl.datasets.table import check_column
from vfl.datasets.values import centre, numbers
from vfl.errors import DataError


@dataclass(frozen=True)
class PictureEncoder:
    """Columns in reading order (channel, row, column of the picture) as pictures.

    Attributes:
        names: the pixel columns.
        shape: (channels, height, width) of one party's part of the picture.
        mean, scale: of all training pixels together; scale 0 where all are alike.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    mean: float = field(repr=False)
    scale: float = field(repr=False)

    @classmethod
    def fit(cls, frame: Table, shape: tuple[int, ...]) -> PictureEncoder:
        """Learn the block's mean and spread.

        Args:
            frame: the training rows only, and only the pixel columns.
            shape: axes of one picture.

        Raises:
            DataError: the shape does not hold the columns, or a cell is no finite number.
        """
        names = tuple(map(str, frame.columns))
        if min(shape) < 1 or math.prod(shape) != len(names):
            raise DataError(
                "the shape of a picture does not hold its columns",
                got=f"shape {list(shape)} for {len(names)} columns",
                want="positive sizes whose product is the number of columns",
            )
        pixels = _pixels(frame, names)
        return cls(names, shape, *centre(pixels))

    def transform(self, frame: Table) -> np.ndarray:
        """Pictures of any rows, float32, axes (rows, channels, height, width); 0 where missing.

        Raises:
            MissingColumnError: the table lacks a pixel.
            DataError: a cell is no finite number.
        """
        pixels = _pixels(frame, self.names)
        if self.scale == 0:
            return np.zeros((len(frame), *self.shape), dtype=np.float32)
        pixels -= self.mean
        pixels /= self.scale
        np.nan_to_num(pixels, copy=False, nan=0.0)
        return pixels.reshape(len(frame), *self.shape).astype(np.float32)

    def to_json(self) -> str:
        """Everything learnt."""
        return json.dumps(
            {
                "encoder": "pictures",
                "names": self.names,
                "shape": self.shape,
                "mean": self.mean,
                "scale": self.scale,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> PictureEncoder:
        """The encoder `to_json` wrote.

        Raises:
            DataError: the text is something else.
        """
        try:
            record = json.loads(text)
            return cls(
                names=tuple(record["names"]),
                shape=tuple(record["shape"]),
                mean=float(record["mean"]),
                scale=float(record["scale"]),
            )
        except (ValueError, KeyError, TypeError):
            raise DataError(
                "this is not a stored picture encoder", want="what PictureEncoder.to_json wrote"
            ) from None


def _pixels(frame: Table, names: tuple[str, ...]) -> np.ndarray:
    """float64, axes (rows, pixels)."""
    pixels = np.empty((len(frame), len(names)))
    for position, name in enumerate(names):
        check_column(frame.columns, name, f"the encoder's '{name}'")
        pixels[:, position] = numbers(frame[name])
    return pixels
