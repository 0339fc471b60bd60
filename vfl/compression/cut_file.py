"""Reading a saved cut: a ``.npy`` of numpy, or one array of a ``.npz``; never a pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vfl.errors import DataError, MissingDataError, NonFiniteError, UserError, nearest

_WANTED = "float16, float32 or float64 of axes (rows, width)"


def read_cut(path: Path, array: str | None = None) -> Tensor:
    """The cut in a file, float32 of axes (rows, width).

    Args:
        path: a ``.npy``, or a ``.npz``.
        array: which array of a ``.npz``; it may be left out where there is only one.

    Raises:
        MissingDataError: no such file.
        DataError: not a file of numpy, or not numbers of two axes.
        NonFiniteError: it holds NaN or Inf, or numbers too large for float32.
    """
    values = _load(path, array)
    if values.dtype.kind != "f" or values.dtype.itemsize not in (2, 4, 8):
        raise DataError(
            "a cut is made of floating-point numbers",
            where=str(path),
            got=str(values.dtype),
            want=_WANTED,
        )
    axes = " x ".join(map(str, values.shape)) or "a single number"
    if values.ndim != 2:
        raise DataError(
            "a cut has two axes",
            where=str(path),
            got=axes,
            want=_WANTED,
            fix="values.reshape(rows, -1) flattens each row",
        )
    if not values.size:
        raise DataError("a cut without values", where=str(path), got=axes, want="1 x 1 or more")
    with np.errstate(over="ignore"):
        cut = values.astype(np.float32, order="C")
    _check_finite(cut, path)
    return torch.from_numpy(cut)


def _load(path: Path, array: str | None) -> np.ndarray:
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*")]
        raise MissingDataError(
            "there is no such cut",
            got=str(path),
            want="a .npy or .npz file, or a folder with a trace",
            fix=nearest(path.name, beside),
        )
    with path.open("rb") as file:
        with _readable(path):
            loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            _refuse_name(path, array)
            return loaded
        name = _chosen(loaded.files, path, array)
        with loaded, _readable(path):
            found: np.ndarray = loaded[name]
            return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, TypeError, zipfile.BadZipFile):
        raise DataError(
            "this is not an array that numpy can read without pickle",
            where=str(path),
            want="what numpy.save or numpy.savez wrote of plain numbers",
        ) from None


def _refuse_name(path: Path, array: str | None) -> None:
    if array is not None:
        raise UserError(
            "an .npy file holds a single array, without a name",
            where=str(path),
            got=f"--array {array}",
            fix="leave --array out",
        )


def _chosen(names: list[str], path: Path, array: str | None) -> str:
    if array is None and len(names) == 1:
        return names[0]
    if array in names:
        return str(array)
    listed = ", ".join(sorted(names)) or "no array at all"
    if array is None:
        raise DataError(
            "which of these arrays is the cut?",
            where=str(path),
            got=listed,
            want="one array, or its name",
            fix=f"--array {sorted(names)[0]}" if names else None,
        )
    raise DataError(
        f"no array is called '{array}'",
        where=str(path),
        want=listed,
        fix=nearest(array, names),
    )


def _check_finite(cut: np.ndarray, path: Path) -> None:
    wrong = int(np.count_nonzero(~np.isfinite(cut)))
    if wrong:
        raise NonFiniteError(
            "a cut holds NaN or Inf, or numbers that float32 cannot hold",
            where=str(path),
            got=f"{wrong} of {cut.size} values",
            want="finite numbers",
        )
