"""Parsing of cells: words for missing cells; numbers and dates as people write them; Arrow types.

All sources use this module: a CSV gives texts; Parquet files and databases give Arrow types. Types
that the source states take precedence. A column of texts becomes numbers or dates only if the
table's format says so (`TableFormat.numbers`, `TableFormat.dates`). In a CSV, a column in which
every cell is a plain number becomes numbers too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

#: Words that mean a missing cell in a column of numbers or dates; in a column of texts they stay
#: texts.
WORDS = frozenset(
    (
        *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
        *("n/a", "NA", "na", "NaN", "nan", "-NaN", "-nan", "NaT", "NULL", "Null", "null"),
        *("None", "none", "\\N", "#DIV/0!", "#NAME?", "#NULL!", "#NUM!", "#REF!", "#VALUE!"),
        # MySQL and Excel write these dates for a missing date.
        *("0000-00-00", "0000-00-00 00:00:00", "1900-01-00", "00.01.1900", "1/0/1900"),
    )
)
_EXACT_DIGITS = 18  # of int64
_PER_DAY = {"s": 86400.0, "ms": 86400e3, "us": 86400e6, "ns": 86400e9}
_LONGEST = 60  # largest number of characters in a date
_LOOKED_AT = 20  # number of a column's texts that are parsed first, as a trial
_BOOLEANS = ("true", "false", "True", "False", "TRUE", "FALSE")
_ZERO_FRACTION = re.compile(r"(?<=\d)\.0*\Z")
_SIGN = "[-+\u2212\u2013]"
_CODES = (
    "USD|EUR|GBP|CHF|JPY|CNY|SEK|NOK|DKK|PLN|CZK|HUF|RON|BGN|TRY|RUB|UAH|INR|BRL|MXN|CAD|AUD|NZD"
    "|ZAR|KRW|SGD|HKD|THB|ILS|AED|SAR|Euro|euro|kr\\.?|Fr\\.?|Rs\\.?|zł|Kč|Ft|lei"
)
_MONEY = rf"(?:[A-Z]{{0,3}}\p{{Sc}}[A-Z]{{0,3}}|{_CODES})"
_UNIT_BEHIND = re.compile(r"[-+\u2212(]?\d(?:[\d.,'\s]*\d)?\s*([^\W\d_][^\d\s]{0,7}|°[^\d\s]{0,3})")
_UNIT = rf"(?:%|\x{{2030}}|{_MONEY})"
_OTHER_DIGITS = r"[\x{0660}-\x{0669}\x{06F0}-\x{06F9}\x{0966}-\x{096F}\x{09E6}-\x{09EF}]"
_NO_UNIT = r"\d[eE][-+]?\d|[-+\x{2212}\x{2013}\x{2014}()\s\d.,'\x{2019}]"
_UNITS = {
    **{"%": "%", "\u2030": "%", "€": "EUR", "Euro": "EUR", "euro": "EUR", "£": "GBP", "₹": "INR"},
    **{"₽": "RUB", "₺": "TRY", "₩": "KRW", "₴": "UAH", "₪": "ILS", "zł": "PLN", "Kč": "CZK"},
    **{"Ft": "HUF", "lei": "RON", "US$": "USD", "R$": "BRL", "C$": "CAD", "CA$": "CAD"},
    **{"A$": "AUD", "AU$": "AUD", "NZ$": "NZD", "HK$": "HKD", "S$": "SGD"},
}


def _written_number(decimal: str) -> str:
    """Return an RE2 pattern of human-written numbers with the separator `decimal`."""
    other = r"\." if decimal == "," else ","
    whole = "|".join(
        [
            rf"\d{{1,3}}(?:{other}\d{{3}})+",
            rf"\d{{1,2}}(?:{other}\d{{2}})*{other}\d{{3}}",  # Indian digit groups (lakh, crore)
            r"\d{1,3}(?: \d{3})+",
            r"\d{1,3}(?:['\x{2019}]\d{3})+",
            r"\d+",
        ]
    )
    sign = re.escape(decimal)
    core = rf"(?:{whole})(?:{sign}\d+)?(?:[eE][-+]?\d+)?|{sign}\d+"
    price = rf"(?:{sign}[-\x{{2013}}\x{{2014}}]{{0,2}})?"  # such as the ",-" of "5,-"
    before = rf"(?:{_SIGN}|\(|{_MONEY}| )*"
    after = rf"(?:{_UNIT}|\)|-|\x{{2212}}| )*"
    return rf"^(?P<before>{before})(?P<core>{core}){price} ?(?P<after>{after})$"


_FORMS = {decimal: _written_number(decimal) for decimal in ".,"}


def plain(cells: pa.Array) -> pa.Array:
    """Convert cells to the types that later steps can read: numbers, booleans, texts and dates.

    Compatible types are converted; lists, structs, maps and bytes stay unchanged.

    >>> plain(pa.array(["a", "b", "a"]).dictionary_encode()).type
    DataType(string)
    """
    of = pa.types
    if isinstance(cells, pa.ExtensionArray):
        cells = _texts_of_uuids(cells.storage) if cells.type == pa.uuid() else cells.storage
    if of.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if of.is_run_end_encoded(cells.type):
        cells = pc.run_end_decode(cells)
    if of.is_decimal(cells.type):
        whole = cells.type.scale == 0 and cells.type.precision <= _EXACT_DIGITS
        cells = cells.cast(pa.string()) if of.is_decimal256(cells.type) else cells  # exact
        return cells.cast(pa.int64() if whole else pa.float64())
    if of.is_time64(cells.type):
        # Pandas cannot store these times in nanoseconds.
        return cells.cast(pa.time64("us"), safe=False)
    if of.is_float16(cells.type):
        return cells.cast(pa.float32())
    if of.is_string_view(cells.type):
        return cells.cast(pa.large_string())
    if of.is_duration(cells.type):
        ticks = cells.cast(pa.int64()).cast(pa.float64(), safe=False)
        return pc.divide(ticks, _PER_DAY[cells.type.unit])
    return cells


def _texts_of_uuids(cells: pa.Array) -> pa.Array:
    texts = [None if one is None else str(UUID(bytes=one)) for one in cells.to_pylist()]
    return pa.array(texts, pa.large_string())


def without_zero_fraction(text: str) -> str:
    """Remove a zero fraction from the end of a number in a text.

    >>> without_zero_fraction("79499.0"), without_zero_fraction("7."), without_zero_fraction("7.5")
    ('79499', '7', '7.5')
    """
    return _ZERO_FRACTION.sub("", text)


def text_of_decimal(number: Decimal) -> str:
    """Return a decimal as exact text without exponent, as ids need it; a whole one has no point.

    >>> text_of_decimal(Decimal("7.00")), text_of_decimal(Decimal("1E-10"))
    ('7', '0.0000000001')
    """
    return without_zero_fraction(format(number, "f"))


def texts_of_decimals(cells: pa.Array) -> pa.Array:
    """Return decimals as texts; see `text_of_decimal`.

    >>> texts_of_decimals(pa.array([Decimal("12345678901234567890.00")])).to_pylist()
    ['12345678901234567890']
    """
    texts = cells.cast(pa.large_string())
    if pc.any(pc.match_substring(texts, "E")).as_py():  # Arrow writes 0.0000000001 as 1E-10
        known = (None if one is None else text_of_decimal(one) for one in cells.to_pylist())
        return pa.array(known, pa.large_string())
    return pc.replace_substring_regex(texts, r"\.0+$", "")


def of_values(values: Sequence[Any]) -> pa.Array:
    """Return values of a database without column types as cells; mixed kinds become texts.

    >>> of_values([1, None, "a"]).to_pylist()
    ['1', None, 'a']
    """
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if one is None else str(one) for one in values], pa.large_string())


def without(cells: pa.Array, words: Collection[str]) -> pa.Array:
    """Replace words that mean a missing cell by null."""
    meant = pa.array([*words], cells.type)
    return pc.if_else(pc.is_in(cells, meant), pa.scalar(None, cells.type), cells)


def whole_numbers_of(cells: pa.Array, decimal: str = ".") -> pa.Array | None:
    """Parse texts as int64 or float64 in one fast step.

    The result is None if this step cannot read all texts. This does not mean that some text is no
    number: for example, the step does not read "1", "2.5".
    """
    first = cells[0].as_py() if len(cells) and decimal == "." else ""
    if not first[:1].isdigit() and first[:1] != "-":
        return None
    try:
        read = cells.cast(pa.float64() if "." in first else pa.int64())
    except pa.ArrowInvalid:  # discarded: the error quotes a cell
        return None
    if "." in first:
        return read if np.isfinite(read.to_numpy()).all() else None
    return None if pc.any(pc.match_substring(cells, "x", ignore_case=True)).as_py() else read


def plain_numbers(cells: pa.Array, decimal: str) -> pa.Array | None:
    """Parse texts as numbers or as booleans; return None unless all present cells are of one kind.

    >>> plain_numbers(pa.array(["1", None]), ".").to_pylist(), plain_numbers(pa.array(["a"]), ".")
    ([1, None], None)
    """
    if cells.null_count == len(cells):
        return cells.cast(pa.float64())
    first = cells[pc.index(cells.is_valid(), True).as_py()].as_py()
    if first in _BOOLEANS:
        known = pc.is_in(cells, pa.array([*_BOOLEANS, None], cells.type))
        return cells.cast(pa.bool_()) if pc.all(known).as_py() else None
    if not re.match(r"[-+.,\d]|[iI]nf", first):
        return None
    if not first.isascii():
        cells = _alike(cells)
    if decimal == ",":
        if pc.any(pc.match_substring(cells, ".")).as_py():
            return None
        cells = pc.replace_substring(cells, ",", ".")
    for kind in (pa.int64(), pa.float64()):
        try:
            read = cells.cast(kind)
        except pa.ArrowInvalid:  # discarded: the error quotes a cell
            continue
        # Arrow casts 0x1F to a number, but such a text is not a number here.
        return None if pc.any(pc.match_substring(cells, "x", ignore_case=True)).as_py() else read
    return None


def unit_of(texts: Sequence[str]) -> str:
    """Return the unit that follows the number in all texts; empty if it is missing or differs.

    >>> unit_of(["12 kg", "3.5 kg"]), unit_of(["-3.5°C", "12°C"]), unit_of(["12 kg", "13 lb"])
    ('kg', '°C', '')
    """
    found = _UNIT_BEHIND.fullmatch(texts[0]) if len(texts) else None
    return found[1] if found and all(text.endswith(found[1]) for text in texts) else ""


def _unit_named(mark: str) -> str:
    """Return one name for all signs of a currency, such as €, EUR and Euro; $ is any dollar."""
    codes = [code for code in re.findall("[A-Z]{3}", mark) if code in _CODES.split("|")]
    return _UNITS.get(mark) or (codes[0] if codes else mark)


def _is_currency_or_percent(unit: str) -> bool:
    known = unit in _UNITS.values() or unit in re.sub(r"\\.\?", "", _CODES).split("|")
    return known or any(unicodedata.category(sign) == "Sc" for sign in unit)


def _units(numbers: pa.Array) -> pa.Array:
    """Return the unit of each text's number: a currency, "%", or "" for none; null if missing."""
    marks = pc.replace_substring_regex(numbers, _NO_UNIT, "").dictionary_encode()
    named = [_unit_named(mark) for mark in marks.dictionary.to_pylist()]
    return pa.array(named, pa.string()).take(marks.indices)


def units_of(numbers: pa.Array) -> frozenset[str]:
    """Return the currencies and percent signs of numbers in texts; "" if some number has none.

    >>> sorted(units_of(pa.array(["€ 5", "6,50 EUR", "$7", "8", "1e5"])))
    ['', '$', 'EUR']
    """
    found = _units(_alike(numbers.cast(pa.string())))
    return frozenset(found.drop_null().unique().to_pylist())


def numbers_of(cells: pa.Array, written: str) -> tuple[pa.Array, int]:
    """Parse texts as numbers, which may have a currency, digit groups, a percent sign or a minus.

    Args:
        cells: texts; missing ones are null.
        written: the decimal separator (point or comma); if the numbers have a unit, a blank and
            this unit follow. The unit is a currency, a percent sign, or another ending. A text
            without its currency is still a number; a text without its percent sign or other ending
            is not. A text with a different unit is not a number. The separator that is not the
            decimal separator, blanks and apostrophes may group thousands. If a text is a number
            only with the opposite decimal separator, the function reads it with that separator.

    Returns:
        The numbers as float64, null if a cell is missing or is not a number; and the count of cells
        that are not numbers. One percent becomes 0.01.

    >>> cells = pa.array(["€ 75 997,97", "73.208,40", "(1.234)", "12,5 %", "5,-", "$5,156.91", "-"])
    >>> numbers_of(cells, ",")[0].to_pylist()
    [75997.97, 73208.4, -1234.0, 0.125, 5.0, 5156.91, None]
    >>> numbers_of(pa.array(["1.250 kg", "0,5 kg", "3 lb"]), ", kg")[0].to_pylist()
    [1250.0, 0.5, None]
    >>> numbers_of(pa.array(["€ 5", "6", "$7"]), ". EUR")[0].to_pylist()
    [5.0, 6.0, None]
    """
    decimal, texts, unit = written[0], cells.cast(pa.string()), _unit_named(written[1:].strip())
    named = _is_currency_or_percent(unit)
    if unit and not named:
        texts = pc.utf8_trim_whitespace(texts)
        bare = pc.utf8_slice_codeunits(texts, 0, -len(unit))
        texts = pc.if_else(pc.ends_with(texts, unit), bare, None)
    texts = _alike(texts)
    values = _numbers_written(texts, decimal)
    if values.null_count > cells.null_count:
        values = pc.coalesce(values, _numbers_written(texts, "." if decimal == "," else ","))
    if named:
        meant = pa.array([unit] if unit == "%" else [unit, ""], pa.string())
        values = pc.if_else(pc.is_in(_units(texts), meant), values, None)
    return values, values.null_count - cells.null_count


def _alike(texts: pa.Array) -> pa.Array:
    """Return texts with uniform blanks and percent signs (NFKC), and with ASCII digits."""
    alike = pc.utf8_trim_whitespace(pc.utf8_normalize(texts, form="NFKC"))
    if not pc.any(pc.match_substring_regex(alike, _OTHER_DIGITS)).as_py():
        return alike
    digits = {ord(sign): str(unicodedata.digit(sign)) for sign in _digits_in(alike)}
    signs = digits | {0x66B: ".", 0x66C: ","}  # Arabic separators
    words = [None if text is None else text.translate(signs) for text in alike.to_pylist()]
    return pa.array(words, alike.type)


def _digits_in(texts: pa.Array) -> set[str]:
    return {sign for text in texts.to_pylist() for sign in text or "" if sign.isdecimal()}


def _numbers_written(texts: pa.Array, decimal: str) -> pa.Array:
    """Parse texts as float64; a text that is not a number becomes null."""
    found = pc.extract_regex(texts, _FORMS[decimal])
    core, before, after = (found.field(name) for name in ("core", "before", "after"))
    digits = pc.replace_substring_regex(core, rf"[^\deE{decimal}+-]", "")
    if decimal == ",":
        digits = pc.replace_substring(digits, ",", ".")
    values = pc.if_else(found.is_valid(), digits, None).cast(pa.float64())
    negative = pc.or_(
        pc.match_substring_regex(before, r"[-\x{2212}\x{2013}(]"),
        pc.match_substring_regex(after, r"[-\x{2212}]"),
    )
    values = pc.if_else(negative, pc.negate(values), values)
    for sign, parts in (("%", 100.0), ("\u2030", 1000.0)):
        values = pc.if_else(pc.match_substring(after, sign), pc.divide(values, parts), values)
    return values


def decimal_of(texts: Collection[str], usual: str) -> str | None:
    """Return the decimal separator of texts that are all numbers; return None for other texts.

    The majority of the texts decides; for example, `1.234,50` and `12,5` count for a comma. If both
    separators are possible for every text, such as `1,234`, the result is the usual separator.

    >>> decimal_of(["73.208,40", "1.000"], "."), decimal_of(["$5,156.91"], ",")
    (',', '.')
    """
    counts = decimal_counts(texts)
    return None if counts is None else max(counts, key=lambda sign: (counts[sign], sign == usual))


def read_with(texts: Collection[str]) -> dict[str, np.ndarray]:
    """Return a mask of the texts that are numbers for each decimal separator, axes (texts,)."""
    cells = _alike(pa.array(list(texts), pa.string()))
    return {sign: np.asarray(_numbers_written(cells, sign).is_valid()) for sign in ".,"}


def decimal_counts(texts: Collection[str]) -> dict[str, int] | None:
    """Count, for each decimal separator, the texts that are numbers; None if a text is no number.

    >>> decimal_counts(["73.208,40", "1.000"])
    {'.': 1, ',': 2}
    """
    return decimal_counts_of_each([list(texts)])[0]


def decimal_counts_of_each(columns: Sequence[Sequence[str]]) -> list[dict[str, int] | None]:
    """Return `decimal_counts` for several columns, which are parsed together."""
    found: list[dict[str, int] | None] = [None] * len(columns)
    able = [at for at, texts in enumerate(columns) if len(texts)]
    for part in (slice(_LOOKED_AT), slice(None)):
        read = read_with([text for at in able for text in columns[at][part]])
        starts = np.cumsum([0, *(len(columns[at][part]) for at in able)])
        for at, low, high in zip(able, starts[:-1], starts[1:], strict=True):
            whole = (read["."][low:high] | read[","][low:high]).all()
            counts = {sign: int(one[low:high].sum()) for sign, one in read.items()}
            found[at] = counts if whole else None
        able = [at for at in able if found[at] and len(columns[at]) > _LOOKED_AT]
        if not able:
            break
    return found


# Dates.

DAY_FIRST, MONTH_FIRST, DIGITS = "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d"
#: Forms of dates, most usual forms first.
DATE_FORMS = (
    *("%Y-%m-%d", "%d.%m.%Y", DAY_FIRST, MONTH_FIRST, "%Y/%m/%d", DIGITS, "ISO8601"),
    *("%d-%m-%Y", "%m-%d-%Y", "%Y.%m.%d", "%d %b %Y", "%d-%b-%Y", "%b %d, %Y", "%d. %b %Y"),
    *("%d-%b-%y", "%d %b %y", "%Y年%m月%d日", "%m/%Y", "%b %Y", "%b-%Y", "%Y-%b-%d", "%b %d %Y"),
    *("%d/%b/%Y", "%d.%b.%Y", "%d %b %Y %H:%M", "%d %b %Y %H:%M:%S", "%d. %b %Y %H:%M"),
    *("%d. %b %Y, %H:%M", "%b %d, %Y %I:%M %p", "%b %d %H:%M:%S %Y", "%d %b %Y %H:%M:%S %z"),
    *("%d%b%Y", "%d%b%Y:%H:%M:%S"),  # of SAS
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
    *("%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S"),
    *("%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %I:%M %p"),
)
#: Character that separates the forms, if a column has dates in several forms.
EITHER = "|"
#: For each form of dates, the form with day and month exchanged, if there is one; the exchanged
#: form reads the same text as a different day.
OTHER_ORDER = {
    form: other
    for form in DATE_FORMS
    if (other := form.translate({ord("d"): "m", ord("m"): "d"})) in DATE_FORMS and other != form
}
_DIGITS, _LETTERS, _BLANKS = re.compile(r"\d+"), re.compile(r"[^\W\d_]+"), re.compile(r"\s+")
_SHAPES = {
    form: re.sub(r"%[bBp]", "a", re.sub(r"(%[YymdHMSI])+", "9", form)).replace("%z", "+9")
    for form in DATE_FORMS
}
#: Names of months, casefolded: English, German, French, Spanish, Italian, Dutch, Portuguese and
#: Scandinavian, with their abbreviations; no word means two months. In a date, accents of these
#: names may be missing. Slavic names are not among them: listopad is October in Croatia and
#: November in Poland.
_NAMES = """
january jan januar jänner jän janvier janv enero ene gennaio gen januari janeiro
february feb februar feber février févr fév febrero febbraio februari fevereiro
march mar märz mär mrz maerz mars marzo maart mrt março marts
april apr avril avr abril abr aprile
may mai mayo maggio mag mei maio maj
june jun juni juin junio giugno giu junho
july jul juli juillet juil julio luglio lug julho
august aug août agosto ago augustus augusti
september sept sep septembre septiembre settembre sett set setembro
october oct oktober okt octobre octubre ottobre ott outubro out
november nov novembre noviembre novembro
december dec dezember dez décembre déc diciembre dicembre dic dezembro desember des
"""
_ENGLISH = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ORDINALS = ("st", "nd", "rd", "th", "er")
#: Words that add nothing to a date. In French, "mar." means both Tuesday and March; it counts as
#: March, so a date with this weekday and a month is not parsed.
_ADDED = """
de del of uhr monday mon tuesday tue tues wednesday wed thursday thu thur thurs friday fri saturday
sat sunday sun montag mo dienstag di mittwoch mi donnerstag do freitag fr samstag sonnabend sa
sonntag so lundi lun mardi mercredi mer jeudi jeu vendredi ven samedi sam dimanche dim
"""
_IDLE = frozenset(_ADDED.split())


def _bare(word: str) -> str:
    """Return a word without accents."""
    return "".join(sign for sign in unicodedata.normalize("NFD", word) if sign.isalpha())


_MONTHS = {
    word: english
    for english, line in zip(_ENGLISH, _NAMES.split("\n")[1:-1], strict=True)
    for name in line.split()
    for word in (name, _bare(name))
}
#: A word in a date, with the point if the word is an abbreviation.
_WORD, _MONTH = re.compile(r"([^\W\d_]+)(?:\.(?!\d))?"), re.compile("|".join(_ENGLISH))
_MAY_BE_DATE = re.compile(
    rf"(?=(?:\D*\d){{4}})(?:[\d ,./:+年月日-]|T|Z|[AaPp][Mm]|{_MONTH.pattern}){{6,40}}"
)
#: Days outside the years 1600 to 2499 are placeholders, such as 9999-12-31 for no end and year 1
#: for no start; `LAST_DAY` is the first day after these years.
FIRST_DAY, LAST_DAY = (date(year, 1, 1).toordinal() - 719163 for year in (1600, 2500))


@lru_cache(1 << 14)
def _english(text: str) -> str:
    """Write months in English without weekdays and ordinals: `Mo., 1. Mai` becomes `1. May`."""
    if len(text) > _LONGEST or (text.isascii() and text.isdigit()):
        return text

    def swap(found: re.Match[str]) -> str:
        word = found[1].casefold()
        if word in _IDLE or (word in _ORDINALS and found.string[found.start() - 1].isdigit()):
            return ""
        return "Z" if word in ("utc", "gmt") else _MONTHS.get(word, found[0])

    short = _BLANKS.sub(" ", _WORD.sub(swap, unicodedata.normalize("NFC", text)))
    return short.replace(" Z", "Z").strip(" ,.")


@lru_cache(1 << 14)  # cached, because a text is parsed by several forms
def _in_numbers(text: str) -> str:
    """Write the one month's name as a number, as strptime depends on the locale; "" if not one."""
    named, count = _MONTH.subn(lambda name: f" {1 + _ENGLISH.index(name[0])} ", _english(text))
    return _BLANKS.sub(" ", named).strip() if count == 1 else ""


def days_of_texts(texts: Sequence[str] | np.ndarray, written: str) -> np.ndarray:
    """Parse texts as days since 1970 in UTC, float64, axes (texts,); NaN if a text is not a date.

    Args:
        texts: none missing.
        written: form of the dates as in `strptime`, or "ISO8601". Several forms are joined by `|`,
            and tried in this order. Both `%b` and `%B` stand for a month's name, complete or
            abbreviated, in several languages, whatever the locale is.

    >>> days_of_texts(["1970-01-02", "31.12.9999", "never"], "%Y-%m-%d|%d.%m.%Y").tolist()
    [1.0, 2932896.0, nan]
    """
    days, cells = np.full(len(texts), np.nan), np.asarray(texts, dtype=object)
    for form in written.split(EITHER):
        (left,) = np.nonzero(np.isnan(days))
        if len(left):
            days[left] = _days_of_form(cells[left], form)
    return days


def _days_of_form(texts: np.ndarray, form: str) -> np.ndarray:
    if "%b" in form or "%B" in form:
        form = _BLANKS.sub(" ", re.sub("%[bB]", " %m ", _english(form))).strip()
        texts = np.array([*map(_in_numbers, texts)], dtype=object)
    try:
        read = pd.to_datetime(pd.Series(texts), format=form, errors="coerce", utc=True)
    except (ValueError, TypeError, OverflowError):  # strptime does not know this form
        return np.full(len(texts), np.nan)
    days = days_of_times(read)
    # Older versions of pandas read only the years 1677 to 2262.
    for place in np.flatnonzero(np.isnan(days)):
        days[place] = _far_day(texts[place], form)
    return days


def _far_day(text: str, form: str) -> float:
    text = _english(text) if form == "ISO8601" else text
    if not _MAY_BE_DATE.fullmatch(text):
        return np.nan
    try:
        found = datetime.fromisoformat(text) if form == "ISO8601" else datetime.strptime(text, form)
    except ValueError:
        return np.nan
    return day_of(found)


def day_of(moment: date) -> float:
    """Return the days since 1970 in UTC of a date or time; a time without a zone counts as UTC.

    >>> day_of(date(9999, 12, 31)), day_of(date(1, 1, 1))
    (2932896.0, -719162.0)
    """
    days = float(moment.toordinal() - 719163)
    if isinstance(moment, datetime):
        clock = moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
        offset = moment.utcoffset()
        days += (clock - (offset.total_seconds() if offset else 0.0)) / _PER_DAY["s"]
    return days


def days_of_times(column: pd.Series) -> np.ndarray:
    """Return days since 1970 in UTC of a column of dates or times, float64; NaN if missing."""
    if isinstance(column.dtype, pd.PeriodDtype):
        column = column.dt.to_timestamp()
    if column.dtype == object:
        codes, found = pd.factorize(column)
        return np.array([*map(day_of, found), np.nan])[codes]
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        column = column.dt.tz_convert(UTC).dt.tz_localize(None)
    times = column.to_numpy()
    per_day = _PER_DAY[np.datetime_data(times.dtype)[0]]
    return np.where(np.isnat(times), np.nan, times.view(np.int64) / per_day)


def is_open_end(days: np.ndarray) -> np.ndarray:
    """Return a mask of the days that are placeholders, such as 9999-12-31; axes (rows,)."""
    return (days < FIRST_DAY) | (days >= LAST_DAY)


def circles_of(days: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each day's position in the year, by months, and in the week, as fractions in [0, 1).

    >>> [turn.tolist() for turn in circles_of(np.array([0.0, 31.0]))]  # a Thursday, a Sunday
    [[0.0, 0.08333333333333333], [0.42857142857142855, 0.8571428571428571]]
    """
    whole = np.floor(np.nan_to_num(days)).astype(np.int64)
    months = whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    return months % 12 / 12, (whole + 3) % 7 / 7


def forms_of(texts: Sequence[str], forms: Iterable[str] = DATE_FORMS) -> list[str]:
    """Return the forms in which all texts are dates, most usual forms first.

    >>> forms_of(["31/12/2024"]), forms_of(["2024-01-31 10:00+02:00"]), forms_of(["12345"])
    (['%d/%m/%Y'], ['ISO8601'], [])
    """
    return forms_of_each([texts], [list(forms)])[0]


def forms_of_each(
    columns: Sequence[Sequence[str]], forms: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return `forms_of` for several columns in one pass; each column has its own possible forms."""
    able = [
        _forms_shaped(texts[:_LOOKED_AT], own) for texts, own in zip(columns, forms, strict=True)
    ]
    for part in (slice(_LOOKED_AT), slice(_LOOKED_AT, None)):
        for form in dict.fromkeys(form for own in able for form in own):
            tried = [at for at, own in enumerate(able) if form in own and len(columns[at][part])]
            days = days_of_each([columns[at][part] for at in tried], [form] * len(tried))
            for at, own in zip(tried, days, strict=True):
                if np.isnan(own).any():
                    able[at].remove(form)
    return able


def days_of_each(columns: Sequence[Sequence[str]], forms: Sequence[str]) -> list[np.ndarray]:
    """Return `days_of_texts` for several columns, each by its form; empty for the form ""."""
    found = [np.empty(0)] * len(columns)
    for form in {*forms} - {""}:
        places = [at for at, own in enumerate(forms) if own == form]
        days = days_of_texts([text for at in places for text in columns[at]], form)
        ends = np.cumsum([len(columns[at]) for at in places])[:-1]
        for at, own in zip(places, np.split(days, ends), strict=True):
            found[at] = own
    return found


def _forms_shaped(texts: Sequence[str], forms: Sequence[str]) -> list[str]:
    """Return the forms whose digits, letters and separators match the texts."""
    shapes = set()
    for text in map(_english, texts):
        if not _MAY_BE_DATE.fullmatch(text):
            return []
        shapes.add(_shape(text))
    if not shapes:
        return []
    return [form for form in forms if form == "ISO8601" or {_SHAPES[form]} == shapes]


def _shape(text: str) -> str:
    """Replace digits by 9, letters by a, and several blanks by one."""
    shape = _BLANKS.sub(" ", _LETTERS.sub("a", _DIGITS.sub("9", text)))
    return shape.replace(" -9", " +9")  # the minus sign of a time zone


def date_form(texts: Sequence[str], known: str = "") -> str | None:
    """Return the form of texts that are all dates, or up to three forms joined by `|`; else None.

    Args:
        texts: none missing.
        known: forms that were found for earlier texts of the same column; the result begins with
            these forms.

    >>> date_form(["2024-01-31", "2023-05-01"]), date_form(["2024-01-31", "31.12.9999"])
    ('%Y-%m-%d', '%Y-%m-%d|%d.%m.%Y')
    """
    if not known and (able := forms_of(texts)):
        return able[0]
    left, found = np.asarray(texts, dtype=object), known.split(EITHER) if known else list[str]()
    if known:
        left = left[np.isnan(days_of_texts(left, known))]
    while len(left) and len(found) < 3:
        if not all(_MAY_BE_DATE.fullmatch(_english(text)) for text in left[:_LOOKED_AT]):
            return None
        against = {*map(OTHER_ORDER.get, found)}
        able = [form for form in DATE_FORMS if form not in against | {*found}]
        read = {
            form: int((~np.isnan(days_of_texts(left[:_LOOKED_AT], form))).sum()) for form in able
        }
        best = max(read, key=lambda form: read[form])
        unread = np.isnan(days_of_texts(left, best))
        if unread.all():
            return None
        found.append(best)
        left = left[unread]
    return EITHER.join(found) if found and not len(left) else None
