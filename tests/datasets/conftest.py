from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def jpeg_of(pixels: np.ndarray) -> bytes:
    """One JPEG of pixels of axes (height, width) or (height, width, 3)."""
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def flat_jpeg(level: int, side: int) -> bytes:
    """A picture of one grey level, which JPEG keeps exactly."""
    return jpeg_of(np.full((side, side), level))


def write_jpeg_archive(
    path: Path, levels: list[int], labels: list[int], names: dict[str, list[str]], side: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [flat_jpeg(level, side) for level in levels]
    np.savez_compressed(
        path,
        jpeg=np.frombuffer(b"".join(files), np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        label=np.array(labels, np.uint8),
        **{key: np.array(value) for key, value in names.items()},
    )


@pytest.fixture
def jpegs():
    """The three helpers above, for tests that write pictures."""

    class Jpegs:
        of = staticmethod(jpeg_of)
        flat = staticmethod(flat_jpeg)
        write = staticmethod(write_jpeg_archive)

    return Jpegs
