"""CSV files: detects the format from the first lines, and yields the rows in blocks."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import DataError
from vfl.core.sources import may_be_csv
from vfl.core.text import printable
from vfl.datasets.cells import read_with, whole_numbers_of
from vfl.datasets.encodings import encoding_of, marked, wide
from vfl.datasets.table import Source, TableFormat, cells_of, check_names

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")
_TOP_BYTES = 1 << 18
_TOP_LINES = 200
_MOST_CELLS = 10_000
#: Separators to try first, and separators to try if no separator of the first group fits the table.
_SEPARATORS, _RARE_SEPARATORS = (",", ";", "\t", "|", "\x1f"), ("^", "~", ":", " ")
#: Invisible characters: byte order marks inside concatenated files, and zero-width spaces.
_INVISIBLE = ("\ufeff", "\u200b", "\u2060")
_PADDING = "\0\x1a"  # bytes that some systems append to a file
_RULER = re.compile(r"(?=.*--|.*==)[-=+:|\s]+")
#: Functions that unpack compressed files, by the first bytes of such files.
_PACKED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
_LONGEST_CELL = 1 << 24
_KIND_BYTES = 4096
_ZERO_BYTES = "text with zero bytes (NUL) in it", "remove them: tr -d '\\000' < OLD > NEW"
_TOO_LONG = (
    "a cell of more than 16 million characters begins",
    "close the quotation mark in it, or write long texts to a file of their own",
)
_BINARY = re.compile(rb"[\0-\x06\x0e-\x19]")  # never in a table of text
#: An extra last line for the reader: it is a row of its own unless a quotation mark is open.
_END = "\x1eend-of-file"
#: First bytes of files that are not CSV files, with the kind of file and the suggested fix.
_OTHERS = (
    (b"\xff\xfe\0\0", "text in UTF-32", "save the table as UTF-8"),
    (b"\0\0\xfe\xff", "text in UTF-32", "save the table as UTF-8"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook (.xls)", "save its sheet as CSV"),
    (b"PAR1", "a Parquet file", "give its name the ending .parquet"),
    (b"SQLite format 3\0", "a database of SQLite", "name it sqlite:///FILE, with a query"),
    (b"ARROW1", "a Feather file", "write it as Parquet"),
    (b"ORC", "an ORC file", "write it as Parquet"),
    (b"Obj\x01", "an Avro file", "write it as Parquet"),
    (b"\x89HDF", "an HDF5 file", "write its table as Parquet"),
    (b"$FL2", "a data set of SPSS", "export it as CSV"),
    (b"<stata_dta>", "a data set of Stata", "export it as CSV"),
    (b"\x93NUMPY", "an array of numpy", "write it as Parquet, with names of columns"),
    (b"\x28\xb5\x2f\xfd", "a file that was packed by Zstandard", "unpack it"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it"),
    (b"Rar!", "a RAR archive", "unpack it"),
    (b"@relation", "a file of Weka (.arff)", "export the table as CSV"),
    (b"@RELATION", "a file of Weka (.arff)", "export the table as CSV"),
    (b"INSERT INTO", "SQL", "export the table as CSV"),
    (b"CREATE TABLE", "SQL", "export the table as CSV"),
    (b"%PDF", "a PDF", "export the table as CSV"),
    (b"<", "HTML or XML", "export the table as CSV"),
    (b"{", "JSON", "write it as CSV or Parquet"),
    (b"[{", "JSON", "write it as CSV or Parquet"),
)


def is_csv(source: Source) -> bool:
    """Return whether a table comes from a CSV file."""
    return not isinstance(source, pd.DataFrame) and may_be_csv(source)


# The format.


def sniff(source: Source, encoding: str | None = None) -> TableFormat:
    """Detect the format of a CSV: encoding, separator, decimals, and lines above the column names.

    Other sources get the default format.

    Args:
        source: the table.
        encoding: encoding of the file's text; None detects it.

    Raises:
        DataError: the file is no CSV, its first line does not contain column names, or its encoding
            cannot be detected.
    """
    if not is_csv(source):
        return TableFormat()
    assert not isinstance(source, pd.DataFrame), "a frame is not a CSV file"
    path = Path(source)
    if not path.is_file():
        return TableFormat()
    _check_kind(path)
    encoding = encoding or text_encoding(path)
    try:
        with _opened(path) as file:
            top = codecs.getincrementaldecoder(encoding)().decode(file.read(_TOP_BYTES))
    except (OSError, EOFError, ValueError, lzma.LZMAError):
        return TableFormat()  # opening the file will raise the error
    lines = list(io.StringIO(top, newline=""))[:_TOP_LINES]
    declared = re.fullmatch(r"\ufeff?sep=(.)\s*", lines[0], re.IGNORECASE) if lines else None
    skip = 1 if declared else 0
    separator = declared[1] if declared else _separator(lines[skip:])
    remarks = next((at for at, line in enumerate(lines[skip:]) if not line.startswith("#")), 0)
    if remarks and _fit(lines[skip:], separator)[0][0] < 2:
        skip += remarks
        separator = declared[1] if declared else _separator(lines[skip:])
    skip += _fit(lines[skip:], separator)[1]
    rows = [row for row in _reader(lines[skip:], separator) if row]
    if rows and len(rows[0]) == 1:
        _check_header(lines[skip:], path)
    _check_names(rows[0] if rows else [], path)
    cells = [cell for row in rows[1:] for cell in row if re.search(r"\d[.,]", cell)]
    signs = read_with(cells[:_MOST_CELLS])
    decimal = "," if separator != "," and signs[","].sum() > signs["."].sum() else "."
    return TableFormat(separator, encoding=encoding, decimal=decimal, skip_lines=skip)


def text_encoding(path: Path) -> str:
    """Detect the encoding of a file, which may be compressed; see `encoding_of`."""
    return encoding_of(partial(_opened, path), str(path))


def _reader(lines: Iterable[str], separator: str) -> Any:
    csv.field_size_limit(_LONGEST_CELL)  # this limit is a global setting of the module csv
    return csv.reader(lines, delimiter=separator, skipinitialspace=True)


def _separator(lines: Sequence[str]) -> str:
    """Return the separator that fits the lines best."""
    usual = max(_SEPARATORS, key=lambda sign: _fit(lines, sign)[0])
    if _fit(lines, usual)[0][0]:
        return usual
    rare = max(_RARE_SEPARATORS, key=lambda sign: _fit(lines, sign)[0])
    return rare if _fit(lines, rare)[0][0] == 2 else usual


def _fit(lines: Sequence[str], separator: str) -> tuple[tuple[int, int], int]:
    """Rate how well a separator fits the lines, and count the lines above the column names.

    Returns:
        A pair of a score and the number of lines above the column names. The score's first number
        is 2 if all rows have equally many cells, and more than one. It is 1 if only the rows below
            some first lines have equally many cells, and otherwise 0. The score's second number is
            the number of cells.
    """
    reader = _reader(lines, separator)
    rows, begins, begin = list[list[str]](), list[int](), 0
    for row in reader:
        if row and not _RULER.fullmatch("".join(row)):
            rows.append(row)
            begins.append(begin)
        begin = reader.line_num
    counts = [len(row) for row in rows]
    whole = counts[:-1] if len(counts) > 2 else counts  # the last line may be incomplete
    if not whole:
        return (0, 1), 0
    first = next(at for at in range(len(whole)) if set(whole[at:]) == {whole[-1]})
    if 0 < first < len(whole) - 1 and max(whole[:first]) <= max(1, whole[-1] // 2):
        names = [name.strip() for name in rows[first]]
        if all(names) and len({*names}) == len(names) and not any(map(_NUMBER.fullmatch, names)):
            return (1, whole[-1]), begins[first]
    return (2 * (whole[0] > 1 and first == 0), whole[0]), 0


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse a first line of data instead of column names; names may be counters or years."""
    numbers = [float(name) for name in names if _NUMBER.fullmatch(name.strip())]
    counted = numbers in (list(range(len(numbers))), list(range(1, len(numbers) + 1)))
    if numbers and not counted and not all(1800 <= number <= 2200 for number in numbers):
        raise DataError(
            "the first line of this table contains no column names",
            where=str(path),
            got=f"{len(numbers)} of its {len(names)} cells are numbers",
            want="one name for each column, in the first line of a CSV",
            fix="write a line of column names above it",
        )


def _check_header(lines: Sequence[str], path: Path) -> None:
    """Refuse a line of names whose separator differs from that of the rows.

    Args:
        lines: the first lines, where the best separator finds a single column.
        path: path of the file.
    """
    for sign in _SEPARATORS:
        counts = {len(row) for row in _reader(lines[1:], sign) if row}
        if len(counts) == 1 and len(re.split(r"[,;|\s]+", lines[0].strip())) in counts - {1}:
            raise DataError(
                "the column names have another separator than the rows",
                where=str(path),
                got=f"1 name, and {counts.pop()} cells in each of the first rows",
                fix="write the names with the separator of the rows",
            )


# The rows.


def _opened(path: Path) -> IO[bytes]:
    """Open a file, and decompress it if its content is compressed, whatever its name is.

    Raises:
        DataError: a zip archive is damaged or has a password, or does not contain exactly one file;
            or the file is an Office file.
    """
    with path.open("rb") as file:
        top = file.read(8)
    if top.startswith(b"PK\x03\x04"):
        return _unzipped(path)
    packed = next((unpack for mark, unpack in _PACKED.items() if top.startswith(mark)), None)
    return path.open("rb") if packed is None else packed(path, "rb")


def _unzipped(path: Path) -> IO[bytes]:
    """Open the only file in a zip archive."""
    try:
        archive = zipfile.ZipFile(path)
        files = [
            one
            for one in archive.infolist()
            if not one.is_dir() and not re.match(r"__MACOSX/|(.*/)?\.", one.filename)
        ]
        names = {one.filename for one in files}
        office = any(re.match(r"\[Content_Types|(xl|word|ppt)/", name) for name in names)
        if not office and len(files) == 1 and not files[0].flag_bits & 1:
            return archive.open(files[0])
    except (zipfile.BadZipFile, NotImplementedError):
        names, files, office = set(), [], False
    if office:
        got, fix = "an Excel workbook (.xlsx) or another Office file", "save its sheet as CSV"
    elif "mimetype" in names:
        got, fix = "an OpenDocument file (.ods)", "save its sheet as CSV"
    elif len(files) == 1:
        got, fix = "a zip archive with a password", "unpack it"
    else:
        got = f"a zip archive of {len(files)} files" if files else "a damaged zip archive"
        fix = "unpack it, and name the one table" if files else "write it again"
    raise DataError(
        "this file is not a CSV file", where=str(path), got=got, want="one CSV", fix=fix
    )


def may_be_thousands(source: Source, form: TableFormat, names: Sequence[str]) -> list[str]:
    """Return columns whose points may group thousands: their first numbers look like 1.234 or 999.

    If the separator of the table is a comma, the function returns no column, because points are
    then decimal separators. A column with other decimals, such as 12.5, shows that the table's
    points are decimal separators; in this case the function returns no column at all.

    Args:
        source: the table.
        form: its format.
        names: the table's columns of numbers with decimals.
    """
    if not names or not is_csv(source) or form.separator == "," or form.decimal != ".":
        return []
    assert not isinstance(source, pd.DataFrame), "a frame is not a CSV file"
    rows = next(CsvRows(Path(source), form).blocks(_TOP_LINES, names, as_text=names))
    cells = [pc.utf8_trim_whitespace(rows.column(name)).unique() for name in names]
    pointed = [pc.match_substring_regex(each, r"^[-+]?[1-9]\d{0,2}\.\d{3}$") for each in cells]
    short = [pc.match_substring_regex(each, r"^([-+]?\d{1,3}|\D*)$") for each in cells]
    able = (pc.all(pc.or_(*each), min_count=0) for each in zip(pointed, short, strict=True))
    counts = [pc.sum(each, min_count=0).as_py() for each in pointed]  # without missing cells
    return list(names) if all(one.as_py() for one in able) and max(counts) >= 3 else []


class CsvRows:
    """The rows of a CSV file, in blocks.

    Args:
        path: path of the file.
        form: format of the file.

    Raises:
        DataError: the file is of another kind, a column has no unique name, or a line has another
            number of cells. The error states the line and quotes no cell.
    """

    def __init__(self, path: Path, form: TableFormat) -> None:
        self._path, self._form = path, form
        _check_kind(path)
        with self._text() as text:
            rows = self._reader(text)
            names = next((row for row in rows if row), [_END])
        if names == [_END]:
            raise DataError(
                "this file has no line of column names",
                where=str(path),
                got=f"nothing below line {form.skip_lines}" if form.skip_lines else "blank lines",
                want="a line of column names and one line for each row",
            )
        self.names = _names(names, path)

    def _text(self) -> IO[str]:
        return io.TextIOWrapper(_opened(self._path), self._form.encoding, newline="")

    def _reader(self, text: IO[str]) -> _Rows:
        def lines() -> Iterator[str]:
            skipped = self._form.skip_lines
            for number, line in enumerate(islice(text, skipped, None), skipped + 1):
                if line[:1] in _PADDING and not line.strip(_PADDING + "\r\n"):
                    line = "\n"
                elif "\0" in line and "\0" in line.rstrip(_PADDING + "\r\n"):
                    raise _bad_line(self._path, number, *_ZERO_BYTES)
                if not line.isascii():
                    for sign in _INVISIBLE:
                        line = line.replace(sign, "")
                yield line
            yield _END

        return _Rows(lines(), self._form, self._path)

    def blocks(
        self, rows: int, columns: Sequence[str] | None = None, as_text: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the cells in blocks of rows; if there are no rows, yield one block without rows.

        Args:
            rows: number of rows in a block.
            columns: columns to keep; None keeps all columns. Every line is still parsed completely,
                including the columns that are not kept.
            as_text: columns whose cells stay texts.
        """
        kept = self.names if columns is None else list(columns)
        places = {name: place for place, name in enumerate(self.names)}
        at = [places[name] for name in kept]
        with self._text() as text:
            given = self._whole(self._reader(text))
            block = list(islice(given, rows))
            while True:
                turned = list(zip(*block, strict=True)) or [()] * len(self.names)
                cells = [self._column(self.names[place], turned[place], as_text) for place in at]
                yield pa.record_batch(cells, names=kept)
                if len(block) < rows or not (block := list(islice(given, rows))):
                    return

    def _column(self, name: str, texts: Sequence[str], as_text: Sequence[str]) -> pa.Array:
        raw, stays = pa.array(texts, pa.large_string()), {*as_text}
        form = self._form
        if raw and raw[0].as_py().startswith('="'):  # Excel writes ="..." to mark a cell as text
            raw = pc.replace_substring_regex(raw, '^="(.*)"$', r"\1")
        elif raw and re.match(r"'\d", raw[0].as_py()):
            raw = pc.replace_substring_regex(raw, r"^'(\d+)$", r"\1")
        usual = name not in stays and name not in form.numbers and name not in form.dates
        # A word for a missing cell may be a number, such as -999.
        if words := form.words_of(name)[0]:
            usual = usual and not pc.any(pc.is_in(raw, pa.array([*words], raw.type))).as_py()
        if usual and (read := whole_numbers_of(raw, form.decimal)) is not None:
            return read
        cells = pc.utf8_trim_whitespace(raw)
        return cells_of(cells, name, self._form, as_text=name in as_text, of_csv=True)

    def _whole(self, rows: _Rows) -> Iterator[list[str]]:
        """Yield the rows that have as many cells as there are names; skip repeated header lines."""
        wanted, ended = len(self.names), False
        header = next((row for row in rows if row), [])
        after = True
        for row in rows:
            if not row or row == header:
                continue
            if wanted > 1 and row[0] == header[0] != "" and not _NUMBER.fullmatch(header[0]):
                error = self._odd(
                    rows, "further column names, different from those above: a second table"
                )
                error.fix = "write each table to a file of its own"
                raise error
            if after and _RULER.fullmatch("".join(row)):  # a blank line between names and rows
                continue
            after = False
            if ended or (row[-1].endswith(_END) and row != [_END]):
                raise self._odd(rows, "a quotation mark that opens in this line and never closes")
            if row == [_END]:
                ended = True
                continue
            if len(row) > wanted and not any(row[wanted:]):
                # The row has more cells than names, because its line ends with separators.
                row = row[:wanted]
            if len(row) != wanted:
                what = f"{len(row)} cells, where {wanted} columns have a name"
                error = self._odd(rows, what)
                if len(row) < wanted:
                    below = all(len(one) < wanted for one in rows)
                    error.fix = (
                        "the table seems to end above this line: delete this line and all below it"
                        if below
                        else f"{error.fix}; if it is not a row, delete it"
                    )
                raise error
            if wanted == 1 or any(row):
                yield row

    def _odd(self, rows: _Rows, what: str) -> DataError:
        begin, end = rows.begin + self._form.skip_lines, rows.line + self._form.skip_lines
        told = f"line {begin}: {what}"
        if end > begin and "never" not in what:
            told += f"; a quotation mark opens in it and closes in line {end}"
        return DataError(
            "this file cannot be read as a table",
            where=str(self._path),
            got=told,
            want="the same number of cells in every line as there are column names",
            fix=written_otherwise(self._path, self._form)
            or f"look at line {begin}: a text that contains the separator "
            f"({printable(self._form.separator)!r}) or a quotation mark needs double quotation "
            "marks around it, and each one within it is doubled",
        )


class _Rows:
    """Yields each row's cells, with its first and last line, counted from 1 below skipped lines."""

    def __init__(self, lines: Iterator[str], form: TableFormat, path: Path) -> None:
        self._rows = _reader(lines, form.separator)
        self._path, self._skipped = path, form.skip_lines
        self.begin = self.line = 0

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        self.begin = self._rows.line_num + 1
        try:
            row: list[str] = next(self._rows)
        except csv.Error:
            raise _bad_line(self._path, self.begin + self._skipped, *_TOO_LONG) from None
        self.line = self._rows.line_num
        return row


def _bad_line(path: Path, line: int, got: str, fix: str) -> DataError:
    return DataError(
        "this file cannot be read as a table", where=str(path), got=f"line {line}: {got}", fix=fix
    )


def _names(row: Sequence[str], path: Path) -> list[str]:
    """Return column names; an unnamed first column is a frame's index, and is called "index"."""
    names = [re.sub(r"\s*[\r\n]\s*", " ", name.strip()) for name in row]
    names[0] = names[0].removeprefix("\ufeff")
    while len(names) > 1 and not names[-1]:
        names.pop()  # the last names are empty, because the line ends with separators
    if len(names) > 1 and not names[0] and "index" not in names:
        names[0] = "index"
    hint = "; is the line of names further down (skip_lines), or the separator another one?"
    check_names(pd.Series(names), str(path), hint)
    return names


def _check_kind(path: Path) -> None:
    try:
        with _opened(path) as file:
            whole = file.read(_KIND_BYTES)
    except (OSError, EOFError, lzma.LZMAError):
        return  # the later reading of the rows raises the error
    top = whole.removeprefix(codecs.BOM_UTF8).lstrip()
    for mark, what, fix in _OTHERS:
        if top.startswith(mark):
            raise DataError(
                "this file is not a CSV file",
                where=str(path),
                got=what,
                want="CSV or Parquet",
                fix=fix,
            )
    is_wide = marked(whole) == "utf-16" or wide(whole)
    if whole[257:262] == b"ustar" or (not is_wide and _BINARY.search(whole.rstrip(b"\0\x1a"))):
        got, fix = "binary data", "export the table as CSV or Parquet"
        if whole[257:262] == b"ustar":
            got, fix = "a tar archive", "unpack it"
        elif b"\n" in whole and not _BINARY.search(whole.replace(b"\0", b"")):
            got, fix = _ZERO_BYTES
        raise DataError(
            "this file is not a CSV file", where=str(path), got=got, want="CSV or Parquet", fix=fix
        )


def written_otherwise(path: Path, form: TableFormat, encoding: str | None = None) -> str | None:
    """Return settings for the CSV's real format, as text, if `form` differs from it.

    Args:
        path: path of the file.
        form: format that the user has set.
        encoding: encoding of the file, if that of `form` is wrong.
    """
    usual = TableFormat()
    try:
        own = None if form.encoding == usual.encoding else form.encoding
        found = sniff(path, encoding or own)
        with _opened(path) as file:
            if b"\0" in file.read(4096) and not found.encoding.startswith("utf-16"):
                return None
    except (DataError, OSError, EOFError):
        return None
    told = []
    for name in ("separator", "encoding", "decimal", "skip_lines"):
        value = getattr(found, name)
        if value != getattr(form, name):
            told.append(f"{name} = {value}" if name == "skip_lines" else f'{name} = "{value!s}"')
    if not told:
        return None
    settings = printable(", ".join(told).replace("\t", "\\t"))
    return f"this file seems to be written with {settings}: set that in [data]"
