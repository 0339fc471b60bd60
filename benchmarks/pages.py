"""Pages of docs/results: stored results, links to them, and templates that they fill.

A link names a file, values that select its rows, and a column:
``pea.csv?table=noise&task=mnist#accuracy*100``. If a link selects several rows (seeds), the result
is their average. `codec:SPEC@WIDTH` is the compression ratio of a codec in percent, and `ours:KEY`
is a line of `published_ours.csv`. Links and numbers may be subtracted and divided; the minus or
division sign then has spaces around it. A template is the text of a page, with names in braces in
place of numbers and tables.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TypeVar

from benchmarks import harness
from vfl.compression import make
from vfl.core.errors import DataError, VFLError, nearest
from vfl.core.text import csv_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Type variable: a dataclass whose fields are the columns of a file.
Row = TypeVar("Row", bound="DataclassInstance")
FOLDER = Path("docs/results")
_TERM = re.compile(r"(?P<file>[\w.]+)\?(?P<where>.*)#(?P<column>\w+)(?P<factors>(?:[*/][\d.]+)*)")


@dataclass(frozen=True, slots=True)
class Figure:
    """A stored result.

    Attributes:
        value: value in the unit of the page.
        noise: half the width of a 95 % interval over seeds; 0 for one seed.
    """

    value: float
    noise: float = 0.0


def records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV or JSONL file as texts; an empty list if there is no file."""
    if not path.exists():
        return []
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{key: "" if it is None else str(it) for key, it in line.items()} for line in lines]


def cells_of(row: DataclassInstance, digits: int | None) -> dict[str, object]:
    """Return the cells of a record by column; floats get so many decimal places, if any."""
    return {
        name: f"{one:.{digits}f}" if isinstance(one, float) and digits is not None else one
        for name, one in asdict(row).items()
    }


def written(rows: Iterable[Row], file: Path | None, digits: int | None = None) -> Iterator[Row]:
    """Yield records; the CSV file has each record as soon as it exists.

    Args:
        rows: records, all of one dataclass.
        file: the CSV file; None writes nothing.
        digits: number of decimal places of floats; by default, all digits.
    """
    lines = []
    for row in rows:
        lines.append(cells_of(row, digits))
        if file is not None:
            file.write_text(csv_text([one.name for one in fields(row)], lines), encoding="utf-8")
        yield row


_records_read = cache(records)


def read_figure(link: str, folder: Path) -> Figure:
    """Return the stored result to which a link points.

    >>> read_figure("codec:topk:k=3@128", Path())
    Figure(value=2.8564453125, noise=0.0)

    Args:
        link: link in the form that the module describes.
        folder: folder of the files.

    Raises:
        DataError: the file, row or column of the link does not exist.
    """
    parts = re.split(r" ([-/]) ", link)
    found = _term(parts[0], folder)
    for sign, term in zip(parts[1::2], parts[2::2], strict=True):
        found = _joined(found, sign, _term(term, folder))
    return found


def _joined(one: Figure, sign: str, other: Figure) -> Figure:
    if sign == "-":
        return Figure(one.value - other.value, math.hypot(one.noise, other.noise))
    value = one.value / other.value
    return Figure(value, abs(value) * math.hypot(one.noise / one.value, other.noise / other.value))


def _term(term: str, folder: Path) -> Figure:
    if re.fullmatch(r"[\d.]+", term):
        return Figure(float(term))
    kind, _, rest = term.partition(":")
    if kind == "codec":
        spec, _, width = rest.rpartition("@")
        return Figure(100 * make(spec).formula_ratio(int(width)))
    if kind == "ours":
        term = f"published_ours.csv?key={rest}#value"
    found = _TERM.fullmatch(term)
    if found is None or not (folder / found["file"]).exists():
        raise DataError("this stored result does not exist", where="a link", got=f"'{term}'")
    factor = 1.0
    for sign, number in re.findall(r"([*/])([\d.]+)", found["factors"]):
        factor *= float(number) if sign == "*" else 1 / float(number)
    rows = _matching(_records_read(folder / found["file"]), found["where"], term)
    return _figure(rows, found["column"], factor)


def _matching(
    records: Sequence[Mapping[str, str]], where: str, term: str
) -> Sequence[Mapping[str, str]]:
    wanted = dict(part.split("=", 1) for part in where.split("&"))
    found = [row for row in records if all(row.get(key) == it for key, it in wanted.items())]
    if not found:
        known = [row["key"] for row in records if "key" in row]
        raise DataError(
            "this stored row does not exist",
            where="a link",
            got=f"'{term}'",
            fix=nearest(wanted.get("key", ""), known) if known else "",
        )
    return found


def _figure(rows: Sequence[Mapping[str, str]], column: str, factor: float) -> Figure:
    values = [factor * float(row[column]) for row in rows]
    if len(values) > 1:
        return Figure(fmean(values), 2 * stdev(values) / math.sqrt(len(values)))
    (row,) = rows
    if row.get("half_width"):
        return Figure(values[0], factor * float(row["half_width"]))
    if row.get("deviation"):
        error = factor * float(row["deviation"]) / math.sqrt(int(row["seeds"]))
        return Figure(values[0], 2 * error)
    return Figure(values[0])


def filled(name: str, field: Callable[[str], str]) -> str:
    """Return the text of a page: its template, in which each name in braces is replaced.

    Args:
        name: name of the page; its template is `NAME.template.md` beside this file.
        field: function that returns the text for a name.
    """
    template = Path(__file__).with_name(f"{name}.template.md").read_text("utf-8")
    return re.sub(r"\{([^{}\n]+)\}", lambda found: field(found[1]), template)


def keep(page: Path, text: str, check: bool = False) -> None:
    """Write a page; with `check`, only compare it.

    Raises:
        VFLError: with `check`, the page differs from the text.
    """
    if not check:
        page.write_text(text, encoding="utf-8")
        harness.say(f"{'page':<16} {page}")
    elif page.read_text("utf-8") != text:
        raise VFLError(
            "the page differs from the stored results",
            where=str(page),
            fix=f"run `python -m benchmarks.{page.stem}`",
        )
