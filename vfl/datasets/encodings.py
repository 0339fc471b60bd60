"""Encoding of a text file without byte order mark: UTF-8, UTF-16, Western European, or refused.

UTF-8 and UTF-16 can be recognised, because text in other encodings breaks their rules. In cp1252
nearly every byte is a valid character. As cp1252, Cyrillic or Japanese names would silently be read
as other letters. Therefore a file is read as cp1252 only if its words look Western European. Such
words have letters of one language, no sign between letters, and no capital after a small letter.
Otherwise an error suggests encodings whose languages have such words.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import codecs
import lzma
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import IO, NamedTuple

from vfl.core.errors import DataError

#: Encodings for a text without byte order mark that is not UTF-8.
WESTERN = ("cp1252", "latin-1")
#: Letters beyond ASCII, in one entry per language or group of languages.
_WESTERN = (
    *("äöüßé", "àâæçéèêëîïôœùûüÿñ", "áéíóúüñ", "àèéíïòóúüç", "áâãàçéêíóôõúü", "àèéìíîòóùú"),
    *("áéèêëíïóöúü", "æøåé", "åäöéàü", "äöõüšž", "çëéâ", "áðéíóúýþæö"),
)
_CENTRAL = (
    *("áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "ąćęłńóśźż", "áéíóöőúüű", "ăâîșțşţ"),
    *("čćđšž", "äöüßé"),
)
_CYRILLIC = (
    "абвгдежзийклмнопрстуфхцчшщъыьэюяё",
    "абвгдежзийклмнопрстуфхцчшщьюяєіїґ",
    "абвгдежзијклмнопрстуфхцчшђљњћџ",
)
_GREEK = ("αβγδεζηθικλμνξοπρστυφχψωςάέήίόύώϊϋΐΰ",)
_LETTERS_OF = {
    "cp1250": ("Central European", _CENTRAL),
    "iso8859-2": ("Central European", _CENTRAL),
    "cp1251": ("Cyrillic", _CYRILLIC),
    "koi8-r": ("Cyrillic", _CYRILLIC),
    "cp866": ("Cyrillic", _CYRILLIC),
    "iso8859-5": ("Cyrillic", _CYRILLIC),
    "cp1253": ("Greek", _GREEK),
    "iso8859-7": ("Greek", _GREEK),
    "cp1254": ("Turkish", ("çğıöşüâîû\u0307",)),
    "cp1257": ("Baltic", ("ąčęėįšųūž", "āčēģīķļņšūž", "äöõüšž")),
    "cp1255": ("Hebrew", ("אבגדהוזחטיךכלםמןנסעףפץצקרשת",)),
    "cp1256": ("Arabic", ("".join(map(chr, range(0x621, 0x653))) + "پچژگ",)),
    "cp874": ("Thai", ("".join(map(chr, range(0xE01, 0xE4F))),)),
    "cp850": ("Western European of DOS", _WESTERN),
    "mac-roman": ("Western European of old Macs", _WESTERN),
}
#: East Asian encodings: the character set, and the range of lead bytes that common characters have.
_ROWS_OF = {
    "cp949": ("Korean", "euc_kr", range(0xB0, 0xC9)),
    "cp932": ("Japanese, Shift-JIS", "euc_jp", (0xA4, 0xA5, *range(0xB0, 0xD0))),
    "euc-jp": ("Japanese", "euc_jp", (0xA4, 0xA5, *range(0xB0, 0xD0))),
    "gb18030": ("Chinese, GBK", "gb2312", range(0xB0, 0xD8)),
    "big5": ("Chinese", "big5", range(0xA4, 0xC7)),
}
_SPELLED, _USUAL = 0.95, 0.8  # share of a file's words or characters that must fit an encoding
_SAMPLE_BYTES = 1 << 16
_TOP_BYTES = 1 << 12
_CHUNK_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_MOST_CANDIDATES = 6
_WORD = re.compile(r"[A-Za-z\x80-\U0010ffff]+")
_BETWEEN_WORDS = re.compile("[\xa0\xad\u2013\u2014\u2019´·×÷…•№]")
_QUOTES = "«»‹›“”„‚‘"
#: Punctuation before and after a word in Latin letters.
_BEFORE, _BEHIND = _QUOTES + "¿¡€£¥¢§©±µ°", _QUOTES + "ªº°²®™©€£¥¢½¼¾‰"
_UNIT = re.compile("[A-Za-zµ°]{1,3}[²³]")
#: Only Icelandic words have three letters beyond ASCII in a row.
_HIGH = re.compile(r"[^\x00-\x7f]{3}")
_ALONE = frozenset("àáäåæçèéëñóôöøüß")
#: Letters of only a few Western languages, and letters of which every text in these languages has
#: some.
_COMPANIONS = {"æ": "øåáí", "ø": "åæ", "õ": "ãä", "ð": "áó", "þ": "áó", "ý": "áó"}
_FEW_WORDS = 4
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")  # byte values undefined in cp1252
Opened = Callable[[], IO[bytes]]


def encoding_of(opened: Opened, where: str) -> str:
    """Detect the encoding of a text file.

    Args:
        opened: function that opens the file and decompresses it.
        where: name of the file, for the error text.

    Raises:
        DataError: the text has an encoding that vfl does not read, or mixes two encodings. The
            error quotes no text.
    """
    try:
        with opened() as file:
            top = file.read(_TOP_BYTES)
            if found := marked(top) or wide(top):
                return found
            if b"\x1b$" in top:
                raise _refused(where, ["iso-2022-jp (Japanese)"])
            beyond = _beyond_utf8(file, top)
        if beyond is None:
            return "utf-8"
        lines = _Lines.of(opened)
    except (OSError, EOFError, lzma.LZMAError):
        return "utf-8"  # reading the file will raise the error
    western = _is_western(lines.others.decode("cp1252", "replace"))
    candidates = [] if western else _candidates(lines.sample)
    if lines.utf8 and lines.other and not candidates:
        raise DataError(
            "this file mixes two encodings",
            where=where,
            got=f"line {lines.utf8} is UTF-8, and line {lines.other} is not",
            want="one encoding, such as UTF-8",
            fix="write the table again; were files of two programs joined?",
        )
    if not western:
        raise _refused(where, candidates)
    of_windows = beyond & set(range(0x80, 0xA0))
    return "cp1252" if of_windows and not of_windows & _UNDEFINED else "latin-1"


def marked(top: bytes) -> str | None:
    r"""Return the encoding that a file's byte order mark states.

    >>> marked("\ufeffid".encode("utf-16-be"))
    'utf-16'
    """
    if top.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    return "utf-16" if top.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


def wide(top: bytes) -> str | None:
    r"""Detect UTF-16 without byte order mark: bytes 0, a line break, and no unknown character.

    >>> wide("id,地址\n1,一\n".encode("utf-16-be"))
    'utf-16-be'
    """
    if not top.count(0):
        return None
    encoding = "utf-16-le" if top[1::2].count(0) > top[::2].count(0) else "utf-16-be"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(top)
    except UnicodeDecodeError:
        return None
    kinds = {unicodedata.category(sign) for sign in {*text} - {*"\t\r\n"}}
    ended = "\n" in text or "\r" in text
    return None if not ended or kinds & {"Cc", "Cn", "Co", "Cs"} else encoding


def _beyond_utf8(file: IO[bytes], chunk: bytes) -> set[int] | None:
    """Return a file's byte values from the first block on that is not UTF-8; None if all is."""
    decoder, beyond = codecs.getincrementaldecoder("utf-8")(), set[int]()
    broken = False
    while True:
        if not broken:
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError:
                broken = True
        if broken:
            beyond.update(chunk)
        if not chunk:
            return beyond if broken else None
        chunk = file.read(_CHUNK_BYTES)


class _Lines(NamedTuple):
    """Lines of a file with bytes beyond ASCII.

    Attributes:
        sample: the first lines with bytes beyond ASCII.
        others: the first lines that are not valid UTF-8.
        utf8, other: number of the first line with valid UTF-8 beyond ASCII, and number of the first
            line that is not valid UTF-8; 0 if there is none.
    """

    sample: bytes
    others: bytes
    utf8: int
    other: int

    @classmethod
    def of(cls, opened: Opened) -> _Lines:
        sample, others, first = bytearray(), bytearray(), {True: 0, False: 0}
        with opened() as file:
            for number, line in enumerate(iter(partial(file.readline, _LINE_BYTES), b""), 1):
                if line.isascii():
                    continue
                valid = _is_utf8(line)
                first[valid] = first[valid] or number
                if len(sample) < _SAMPLE_BYTES:
                    sample += line
                if not valid and len(others) < _SAMPLE_BYTES:
                    others += line
                elif all(first.values()):
                    break
        return cls(bytes(sample), bytes(others), first[True], first[False])


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_western(text: str) -> bool:
    if _share(text, _WESTERN) < _SPELLED:
        return False
    words, small = _words(text), text.lower()
    return all(
        any(other in small for other in others)
        or sum(letter in word.lower() for word in words) < _FEW_WORDS
        for letter, others in _COMPANIONS.items()
    )


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text) if not word.isascii()}


def _share(text: str, alphabets: Sequence[str]) -> float:
    """Return the share of a text's different non-ASCII words that these alphabets can spell."""
    words = _words(text)
    return sum(_is_spelled(word, alphabets) for word in words) / max(1, len(words))


def _is_spelled(word: str, alphabets: Sequence[str]) -> bool:
    latin = alphabets[0][0] < "\u0250"
    before, behind = (_BEFORE, _BEHIND) if latin else (_QUOTES, _QUOTES)
    parts = (part.lstrip(before).rstrip(behind) for part in _BETWEEN_WORDS.split(word))
    return all(
        part.isascii() or _UNIT.fullmatch(part) or _is_word(part, alphabets, latin)
        for part in parts
    )


def _is_word(part: str, alphabets: Sequence[str], latin: bool) -> bool:
    own = {*part.lower()}
    letters = {sign for sign in own if not (latin and sign.isascii())}
    if not any(letters <= {*alphabet} for alphabet in alphabets):
        return False
    if any(one.islower() and two.isupper() and not two.isascii() for one, two in pairwise(part)):
        return False
    if alphabets is not _WESTERN:
        return True
    if len(part) == 1:
        return part.lower() in _ALONE
    return not _HIGH.search(part) or bool(letters & {*"þð"})


def _candidates(sample: bytes) -> list[str]:
    """Return the encodings that fit a sample, with their languages, the best encoding first."""
    found = list[tuple[float, float, str]]()
    for name, (language, alphabets) in _LETTERS_OF.items():
        text = sample.decode(name, "replace")
        if (share := _share(text, alphabets)) >= _SPELLED:
            small = sum(map(str.islower, text)) / len(text)
            found.append((share, small, f"{name} ({language})"))
    for name, (language, charset, rows) in _ROWS_OF.items():
        text = sample.decode(name, "replace")
        signs = [sign for sign in text if sign > "\x7f" and unicodedata.category(sign)[0] != "P"]
        usual = [sign.encode(charset, "replace")[0] in rows for sign in signs]
        if (share := sum(usual) / max(1, len(usual))) >= _USUAL:
            found.append((share, 0, f"{name} ({language})"))
    found.sort(key=lambda one: one[:2], reverse=True)
    return [shown for _, _, shown in found[:_MOST_CANDIDATES]]


def _refused(where: str, candidates: Sequence[str]) -> DataError:
    name = candidates[0].partition(" ")[0] if candidates else "NAME"
    ask = "if it is that, " if candidates else "ask the owner of the program that wrote it, and "
    return DataError(
        "this file is neither UTF-8 nor text in a Western European language",
        where=where,
        got="bytes that fit " + (" or ".join(candidates) or "no other known encoding either"),
        want="UTF-8, or the name of the encoding",
        fix=f'{ask}set encoding = "{name}" in [data] (vfl join --encoding {name}, vfl init '
        f"--encoding [PARTY=]{name}); or save the table as UTF-8",
    )
