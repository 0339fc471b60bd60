"""One reading of table cells for the whole room: as numbers, as text, and how to count in messages.

Whatever is raised here or by a caller names columns and counts; a cell's value stays in its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import pandas as pd

from vfl.errors import DataError

ROUNDING = 1e-12  # of the largest number; float64 itself rounds at 1e-16
Kind = Literal["number", "boolean", "text"]
_OBJECT_KINDS: dict[str, Kind] = {
    "boolean": "boolean",
    "integer": "number",
    "floating": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "empty": "number",
    "string": "text",
    "mixed-integer": "text",
}


def kind_of(column: pd.Series) -> Kind:
    """What a column holds, missing cells left aside; a column without any cell holds numbers.

    Raises:
        DataError: dates, bytes, lists and other things no encoder reads.
    """
    dtype = column.dtype
    if pd.api.types.is_bool_dtype(dtype) and not isinstance(dtype, pd.CategoricalDtype):
        return "boolean"
    if pd.api.types.is_any_real_numeric_dtype(dtype):
        return "number"
    if isinstance(dtype, pd.CategoricalDtype):
        return "text"
    kind = _OBJECT_KINDS.get(pd.api.types.infer_dtype(column, skipna=True))
    if kind is None:
        raise DataError(
            f"column '{column.name}' holds something that is neither number nor text",
            got=f"type {dtype}",
            want="numbers, booleans or text",
            fix="turn it into a number first (a date into days, say) or leave it out",
        )
    return kind


def numbers(column: pd.Series) -> np.ndarray:
    """A column as float64 of shape (rows,), missing cells as NaN.

    Raises:
        DataError: a cell that is no number, or an infinite one; a column of dates and the like.
    """
    (values,) = number_blocks([column])
    return values


def number_blocks(blocks: Iterable[pd.Series]) -> Iterator[np.ndarray]:
    """What `numbers` gives, block by block of a column; its error comes after the last one."""
    unread = infinite = 0
    for block in blocks:
        values = _numbers(block)
        unread += max(0, int(np.isnan(values).sum()) - int(block.isna().sum()))
        infinite += int(np.isinf(values).sum())
        yield values
    if unread or infinite:
        raise DataError(
            f"column '{block.name}' is not a column of finite numbers",
            got=f"{spaced(unread)} cells of another kind, {spaced(infinite)} infinite ones",
            want="numbers",
            fix="name the table's own sign of a missing cell in the option 'missing'",
        )


def _numbers(column: pd.Series) -> np.ndarray:
    if column.dtype == np.float64:
        return column.to_numpy()  # as it is: the general way makes a copy
    kind_of(column)
    plain = column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column
    read = pd.to_numeric(plain, errors="coerce")
    return np.asarray(read.to_numpy(dtype=np.float64, na_value=np.nan))


def texts(column: pd.Series) -> np.ndarray:
    """A column as text, shape (rows,), dtype object, missing cells as None.

    Blanks around a text are dropped and a whole number is written without a point, so that 7, 7.0
    and " 7" read alike whatever file they came from.
    """
    present = column.notna().to_numpy()
    found = np.full(len(column), None, dtype=object)
    found[present] = [_text(cell) for cell in column.to_numpy(dtype=object)[present]]
    return found


def _text(cell: object) -> str:
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def centre(values: np.ndarray) -> tuple[float, float]:
    """Mean and spread of the numbers that are present, both 0 where they do not really differ.

    The spread is the standard deviation over all of them (no correction). It counts as none when
    it is no larger than rounding makes it for numbers that are alike.

    >>> centre(np.array([1.0, 3.0, np.nan]))
    (2.0, 1.0)
    """
    missing = np.isnan(values)
    present = values[~missing] if missing.any() else values
    if not present.size:
        return 0.0, 0.0
    spread = float(present.std())
    if spread <= ROUNDING * float(max(present.max(), -present.min())):
        return 0.0, 0.0
    return float(present.mean()), spread


def spaced(count: int) -> str:
    """A count for a reader.

    >>> spaced(10000)
    '10 000'
    """
    return f"{count:,}".replace(",", " ")
