"""Filters for untrusted text before a terminal, a log, an error, a page or a table shows it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

#: Largest number of characters that vfl shows of a text from another party.
TEXT_LIMIT = 2000
# Largest number of combining characters after a letter: no script needs more, and more of them
# could cover neighbouring lines of text.
_MARKS = 3
_REPLACEMENT = "?"
#: Characters that control output: control, format (bidirectional, zero-width) and unassigned ones.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
_SPACES = {"Zs", "Zl", "Zp"}
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85")
#: Invisible letters and marks that make two different texts look alike (Unicode's
#: Default_Ignorable_Code_Point outside the categories above, and the empty Braille pattern).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def printable(text: str, limit: int = TEXT_LIMIT) -> str:
    r"""Return one line of visible text; control and invisible characters become "?".

    The function replaces control characters (and thus every ANSI escape sequence), bidirectional
    overrides, zero-width and invisible characters, surrogates and unassigned characters. Line
    breaks, tabs and unusual spaces become spaces. At most three combining characters in a row are
    kept. Printable text is returned unchanged, so filtering twice has the same effect as once.

    Args:
        text: text of any length; characters far beyond the limit are ignored.
        limit: largest number of characters of the result, at least 3; a text that is cut off ends
            in "...".

    >>> printable("bank\x1b[31m is gone\nerror[V000]: \u202eall well")
    'bank?[31m is gone error[V000]: ?all well'
    >>> printable("x" * 100, limit=8)
    'xxxxx...'
    """
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isascii() and text.isprintable():
        return text
    shown, marks = [], 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category[0] == "M" else 0
        if character in _BREAKS or category in _SPACES:
            shown.append(" ")
        elif category in _HIDDEN or marks > _MARKS or _INVISIBLE.match(character):
            shown.append(_REPLACEMENT)
        else:
            shown.append(character)
    return "".join(shown)


def printable_lines(text: str, limit: int = TEXT_LIMIT) -> str:
    r"""Apply `printable` to every line of a text of vfl that may quote untrusted text.

    >>> printable_lines("2 problems\n  codec = \x1b[2J")
    '2 problems\n  codec = ?[2J'
    """
    return "\n".join(printable(line, limit) for line in text[:limit].split("\n"))


# A spreadsheet program treats a table cell as a formula if the cell begins with one of these signs,
# even after quotes or characters that the program skips. Fullwidth forms of the signs
# count too, because some programs treat them as the plain signs.
_FORMULA = re.compile(
    "[\\s'\"`\u200b-\u200f\u2060\ufeff\x00-\x1f]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|[ '\"]*[\t\r\n]"
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def formula_free(cell: str) -> str:
    r"""Put an apostrophe before a CSV cell that a spreadsheet would treat as a formula.

    The function changes table cells that begin with ``= + - @``, a tab or a line break, even after
    quotes and spaces; it does not change plain numbers or other texts. `as_written` reverses this
    change.

    >>> [formula_free(text) for text in ("=1+1", "-5", "-5+2", "o'neill", '"@x')]
    ["'=1+1", '-5', "'-5+2", "o'neill", '\'"@x']
    """
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def as_written(cell: str) -> str:
    """Return the original table cell from `formula_free`: remove its apostrophe before a formula.

    >>> as_written("'=1+1"), as_written("'t is"), as_written("-5")
    ('=1+1', "'t is", '-5')
    """
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def csv_text(head: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Format a table as CSV: column names, then each row's values; no cell acts as a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([formula_free(name) for name in head])
    for row in rows:
        values = [row.get(name, "") for name in head]
        writer.writerow([formula_free(one) if isinstance(one, str) else one for one in values])
    return text.getvalue()


#: Environment variable: if it is "json", each line of the log is a JSON object.
LOG_VARIABLE = "VFL_LOG"
_ERROR = re.compile(r"(?:vfl: )?error\[(V[0-9]{3})\]: (.*)")
#: First words of the lines of an error message below its first line; see
#: `vfl.core.errors.record_lines`.
_FACT = re.compile(r"(?:vfl: )? {2}(where|got|want|try|more) +(.*)")


def logs_json() -> bool:
    """Return whether each line of the log is to be a JSON object."""
    return os.environ.get(LOG_VARIABLE) == "json"


def log_entries(lines: Iterable[str]) -> list[str]:
    r"""Group the lines of a log into entries; an error and the lines of its details form one entry.

    >>> log_entries(["begins", "error[V405]: bank is gone", "  got   a closed stream", "ends"])
    ['begins', 'error[V405]: bank is gone\n  got   a closed stream', 'ends']
    """
    entries = list[str]()
    for line in lines:
        if entries and _FACT.fullmatch(line) and _ERROR.match(entries[-1]):
            entries[-1] += f"\n{line}"
        else:
            entries.append(line)
    return entries


def logged(text: str, level: str | None = None) -> str:
    """Format a log entry: unchanged, or as a JSON object on one line.

    Args:
        text: printable text without table cells, ids or secrets, like all output of vfl.
        level: "info", "warning" or "error"; with None, the text determines the level.

    Returns:
        With `VFL_LOG=json`, the object has the keys `time` (UTC), `level` and `message`; for an
        error also `code`, its fields `where`, `got`, `want`, `try`, and other lines as `details`.
    """
    if not logs_json():
        return text
    first, *rest = text.split("\n")
    error = _ERROR.fullmatch(first)
    facts = [found for line in rest if (found := _FACT.fullmatch(line))]
    if level is None:
        level = "error" if error else "warning" if first.startswith("warning: ") else "info"
    record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level}
    record["message"] = error[2] if error else text.removeprefix("vfl: ")
    if error:
        record["code"] = error[1]
        record |= {found[1]: found[2] for found in facts if found[1] != "more"}
        unknown = [line for line in rest if not _FACT.fullmatch(line)]
        record |= {"details": "\n".join(unknown)} if unknown else {}
    return json.dumps(record, ensure_ascii=False)
