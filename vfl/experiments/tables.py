"""Tables and numbers as readable text. Spaces inside a number are non-breaking spaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from vfl.experiments.statistics import Estimate

NOT_MEASURED = "not measured"

_SPACE = "\u00a0"
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


#: Display names of measures that tables show in percent: shares of rows, and similar measures.
MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "f1": "F1",
    "hit_rate": "hit rate",
    "r2": "R²",
}
SHARES = frozenset(MEASURES)


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose cells are texts.

    Attributes:
        head: its headings.
        rows: its lines.
        words: number of columns from the left that contain words instead of numbers.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def markdown(self) -> str:
        """Return the table in Markdown, with aligned columns."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines]
        padded.insert(1, ["-" * width for width in widths])
        return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def estimate_text(found: Estimate | None, sign: str = "", unit: str = " %") -> str:
    """Return a share and the half-width of its interval, in percent; empty without an estimate.

    >>> estimate_text(Estimate(0.7213, 0.0131, 3)), estimate_text(Estimate(0.5, None, 1), "+")
    ('72.1 ± 1.3 %', '+50.0 %')

    Args:
        found: the share.
        sign: "+" for a difference, so that positive numbers have a sign.
        unit: unit after the number.
    """
    if found is None:
        return ""
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:{sign}.1f}{half}{unit}"


def score_text(found: Estimate | None, measure: str, sign: str = "") -> str:
    """Return a measure and its interval as text, shares in percent; `sign` is for differences.

    >>> score_text(Estimate(0.7213, 0.0131, 3), "accuracy")
    '72.1 ± 1.3 %'
    """
    if found is None:
        return ""
    if measure in SHARES:
        return estimate_text(found, sign, "" if sign else " %")
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:{sign}.4g}{half}"


def figures_of(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as a record for a JSON file."""
    return None if found is None else asdict(found)


def byte_unit(largest: float) -> tuple[float, str]:
    """Return divisor and name of the decimal unit that suits this number of bytes.

    >>> byte_unit(1_500_000)
    (1000000, 'MB')
    """
    power = 0
    while largest >= 999.5 * 1000**power and power < len(_BYTE_UNITS) - 1:
        power += 1
    return 1000**power, _BYTE_UNITS[power]


def bytes_text(count: float | None) -> str:
    """Return a number of bytes as text with three significant digits and a decimal unit.

    >>> bytes_text(1_442_816).replace(chr(160), " ")
    '1.44 MB'
    """
    if count is None:
        return NOT_MEASURED
    divisor, unit = byte_unit(count)
    number = f"{count:.0f}" if divisor == 1 else three_digits(count / divisor)
    return f"{number}{_SPACE}{unit}"


def three_digits(value: float) -> str:
    """Format a number with three significant digits; from 1,000 to a million as a whole number.

    >>> [three_digits(value) for value in (0.012345, 1.5, 25.04, 999.7, 2.5e7)]
    ['0.0123', '1.5', '25', '1,000', '2.5e+07']
    """
    if 999.5 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def number_text(value: float | None) -> str:
    """Return a metric without a unit as text, or a note that it was not measured."""
    return NOT_MEASURED if value is None else three_digits(value)


def p_value_text(value: float | None) -> str:
    """Return a p-value as text; for a very small p-value, the text is an upper bound.

    >>> p_value_text(4.9e-203), p_value_text(0.0315)
    ('< 0.001', '0.0315')
    """
    return "< 0.001" if value is not None and value < 0.001 else number_text(value)


def percent_text(fraction: float | None) -> str:
    """Return a fraction as a text in percent.

    >>> percent_text(0.9722).replace(chr(160), " ")
    '97.2 %'
    """
    return NOT_MEASURED if fraction is None else f"{100 * fraction:.1f}{_SPACE}%"


def seconds_text(seconds: float | None) -> str:
    """Return a duration in seconds as text with a suitable unit.

    >>> [seconds_text(s).replace(chr(160), " ") for s in (0.034, 8.128, 125, 3720)]
    ['34 ms', '8.13 s', '2 min 5 s', '1 h 2 min']
    """
    if seconds is None:
        return NOT_MEASURED
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g}{_SPACE}ms"
    if seconds < 59.95:
        return f"{seconds:.3g}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min{_SPACE}{rest}{_SPACE}s"
    return f"{minutes // 60}{_SPACE}h{_SPACE}{minutes % 60}{_SPACE}min"


def date_text(iso: str) -> str:
    """Return an ISO 8601 time as readable text; return other texts unchanged.

    >>> date_text("2026-11-21T04:19:07+00:00")
    '21 November 2026, 04:19 UTC'
    """
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    offset = moment.utcoffset()
    zone = "" if offset is None else " UTC" if offset == timedelta(0) else f"{moment: UTC%z}"
    return f"{moment.day} {moment:%B %Y, %H:%M}{zone}"


def list_text(names: tuple[str, ...], shown: int = 4) -> str:
    """Return names as a list for use within a sentence.

    >>> list_text(("left", "right")), list_text(("a", "b", "c", "d", "e", "f"))
    ('left and right', 'a, b, c, d and 2 more')
    """
    if len(names) > shown + 1:
        return f"{', '.join(names[:shown])} and {len(names) - shown} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
