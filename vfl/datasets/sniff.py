"""How a CSV is written, found from its first lines: encoding, separator and decimals."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pandas as pd

from vfl.core.errors import DataError
from vfl.core.storage import may_be_csv
from vfl.datasets.table import Source, TableFormat

#: A number with a point, and one with a decimal comma.
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")
COMMA = re.compile(r"[-+]?\d+,\d+")
_TOP_BYTES = 1 << 18
_TOP_LINES = 200
_CHUNK_BYTES = 1 << 20
_SEPARATORS = (",", ";", "\t", "|")


def is_csv(source: Source) -> bool:
    """Whether a table is read from a CSV."""
    return not isinstance(source, pd.DataFrame) and may_be_csv(source)


def sniff(source: Source) -> TableFormat:
    """How a CSV is written: encoding, separator and decimals; of anything else there is no doubt.

    Raises:
        DataError: its first line is no line of names.
    """
    if not is_csv(source):
        return TableFormat()
    assert not isinstance(source, pd.DataFrame), "a frame is no CSV"
    path = Path(source)
    if not path.is_file():
        return TableFormat()
    encoding = _encoding(path)
    try:
        with _opened(path) as file:
            top = codecs.getincrementaldecoder(encoding)().decode(file.read(_TOP_BYTES))
    except (OSError, EOFError, ValueError):
        return TableFormat()  # reading it says what is wrong
    lines = [line for line in top.splitlines()[:_TOP_LINES] if line.strip()]
    separator = max(_SEPARATORS, key=lambda sign: _fit(lines, sign))
    rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    _check_names(rows[0] if rows else [], path)
    cells = [cell.strip() for row in rows[1:] for cell in row]
    commas = sum(bool(COMMA.fullmatch(cell)) for cell in cells) if separator != "," else 0
    points = sum("." in cell and bool(NUMBER.fullmatch(cell)) for cell in cells)
    decimal = "," if commas > points else "."
    return TableFormat(separator, encoding=encoding, decimal=decimal)


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _encoding(path: Path) -> str:
    """By its mark, else UTF-8 if all of it is that; any bytes are latin-1."""
    try:
        with _opened(path) as file:
            mark = file.read(4)
            if mark.startswith(codecs.BOM_UTF8):
                return "utf-8-sig"
            if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "utf-16"
            decoder = codecs.getincrementaldecoder("utf-8")()
            decoder.decode(mark)
            while chunk := file.read(_CHUNK_BYTES):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "latin-1"
    except (OSError, EOFError):
        return "utf-8"
    return "utf-8"


def _fit(lines: Sequence[str], separator: str) -> tuple[bool, int]:
    """Whether every line has as many cells as the first, and how many those are."""
    counts = [len(row) for row in csv.reader(lines, delimiter=separator, skipinitialspace=True)]
    if not counts or counts[0] < 2:
        return False, 1
    whole = counts[:-1] if len(counts) > 2 else counts  # the last line may be cut
    return len(set(whole)) == 1, counts[0]


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse a first line of data; names that count columns or years are names."""
    numbers = [float(name) for name in names if NUMBER.fullmatch(name.strip())]
    counted = numbers in (list(range(len(numbers))), list(range(1, len(numbers) + 1)))
    if numbers and not counted and not all(1800 <= number <= 2200 for number in numbers):
        raise DataError(
            "the first line of this table is no line of column names",
            where=str(path),
            got=f"{len(numbers)} of its {len(names)} cells are numbers",
            want="one name a column, in the first line of a CSV",
            fix="write a line of names above it",
        )
