"""Text of others, before it reaches a terminal, a log, an error, a page or a table."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

#: Of one text from another party; an error's fields may be no longer either.
TEXT_LIMIT = 2000
_MARKS = 3  # combining characters in a row: no script needs more, and they paint over other lines
_REPLACEMENT = "?"
#: Control, format (bidirectional, zero-width), and what is no character.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
_SPACES = {"Zs", "Zl", "Zp"}
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85")
#: Letters and marks that show as nothing, so that two texts look alike (Unicode's
#: Default_Ignorable_Code_Point outside the categories above, and the empty Braille pattern).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def printable(text: str, limit: int = TEXT_LIMIT) -> str:
    r"""One line of visible text; what could steer a terminal or hide in it becomes "?".

    Control characters (with them every ANSI escape sequence), bidirectional overrides, zero-width
    and invisible characters, surrogates and unassigned characters are replaced; line breaks, tabs
    and unusual spaces become spaces; no more than three combining characters follow each other. A
    text that is printable already comes back as it is, so filtering twice is filtering once.

    Args:
        text: of any length; what lies beyond the limit is not looked at.
        limit: characters of the answer, at least 3; a text that was cut ends in "...".

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
    r"""`printable` of every line; for text of our own that has lines and quotes what is not ours.

    >>> printable_lines("2 problems\n  codec = \x1b[2J")
    '2 problems\n  codec = ?[2J'
    """
    return "\n".join(printable(line, limit) for line in text[:limit].split("\n"))


# A cell that begins like this, after quotes and what spreadsheets skip, is computed by them. The
# fullwidth forms count: some programs read them as the plain ones.
_FORMULA = re.compile(
    "[\\s'\"`\u200b-\u200f\u2060\ufeff\x00-\x1f]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|[ '\"]*[\t\r\n]"
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def formula_free(cell: str) -> str:
    r"""A cell of a CSV that no spreadsheet takes for a formula: an apostrophe goes before it.

    Cells that begin with ``= + - @``, a tab or a line break, also after quotes and spaces, are
    changed; plain numbers and all other texts are not. `as_written` takes it back.

    >>> [formula_free(text) for text in ("=1+1", "-5", "-5+2", "o'neill", '"@x')]
    ["'=1+1", '-5', "'-5+2", "o'neill", '\'"@x']
    """
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def as_written(cell: str) -> str:
    """The cell that `formula_free` was given: without the apostrophe, if a formula follows it.

    >>> as_written("'=1+1"), as_written("'t is"), as_written("-5")
    ('=1+1', "'t is", '-5')
    """
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def csv_text(head: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A table as CSV: names of columns, then each row's values, with no formula among them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([formula_free(name) for name in head])
    for row in rows:
        values = [row.get(name, "") for name in head]
        writer.writerow([formula_free(one) if isinstance(one, str) else one for one in values])
    return text.getvalue()


#: Environment variable: "json" has lines of the log written as JSON objects.
LOG_VARIABLE = "VFL_LOG"
_ERROR = re.compile(r"(?:vfl: )?error\[(V[0-9]{3})\]: (.*)")
#: What follows the first line of an error; see `vfl.core.errors.record_lines`.
_FACT = re.compile(r"(?:vfl: )? {2}(where|got|want|try|more) +(.*)")


def logs_json() -> bool:
    """Whether lines of the log are JSON objects."""
    return os.environ.get(LOG_VARIABLE) == "json"


def log_entries(lines: Iterable[str]) -> list[str]:
    r"""Lines of a log as entries: an error with the facts about it is one.

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
    """An entry of the log as it is written: as it stands, or as a JSON object in a line.

    Args:
        text: printable, as everything that vfl says: no cell, id or secret.
        level: "info", "warning" or "error"; None finds it in the text.

    Returns:
        With `VFL_LOG=json` an object of `time` (UTC), `level`, `message`, and of an error `code`
        and its facts `where`, `got`, `want`, `try`.
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
