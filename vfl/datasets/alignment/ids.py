"""Normalisation of ids by rules that all parties agree on.

A spec joins rules, as in ``case+decimal+zeros``. The rules apply from left to right, to each column
of a composite id. Before any rule, a cell becomes text in Unicode's normal form C, without blanks
at its ends. A whole number that is stored as a float loses its decimal point.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import Literal, overload

import numpy as np
import pandas as pd

from vfl.core.errors import MisalignedError
from vfl.core.registry import Registry, parts, require_choice
from vfl.datasets.alignment.tags import count_repeated
from vfl.datasets.files import column_names, read_table
from vfl.datasets.on_disk import DiskBytes, DiskColumn, OnDisk, scratch
from vfl.datasets.party import IdsDigest
from vfl.datasets.table import (
    BLOCK_ROWS,
    ID_UNIT,
    Source,
    Table,
    TableFormat,
    check_column,
    column_blocks,
    id_columns,
    joined_ids,
    spaced,
)

#: All rules, in the order in which a preview of alignments adds them one by one.
PREVIEW = "plain+space+case+decimal+zeros+date"
_DECIMAL = re.compile(r"\+?(-?[0-9]+)(?:\.0*)?")
_ZEROS = re.compile(r"\A(-?)0+(?=[0-9])")
_DATE = re.compile(r"(\d{1,4})([-/. ])(\d{1,2})\2(\d{1,4})(?:[T ]00:00(?::00(?:\.0*)?)?Z?)?", re.A)
_DIGITS = re.compile(r"(\d{4})(\d\d)(\d\d)", re.A)


class IdRule(ABC):
    """Base class of rules that map different spellings of an id to one spelling.

    Applying a rule twice has the same effect as applying it once.
    """

    @abstractmethod
    def apply(self, text: str) -> str:
        """Apply the rule to one column of an id, and return the result."""


class Plain(IdRule):
    """Change nothing.

    >>> Plain().apply("0017")
    '0017'
    """

    def apply(self, text: str) -> str:
        return text


class Space(IdRule):
    """Removes all white space, also inside an id.

    >>> Space().apply("DE 12 34")
    'DE1234'
    """

    def apply(self, text: str) -> str:
        return "".join(text.split())


class Case(IdRule):
    """Ignores the case and the width of letters, such as full-width ones (NFKC).

    >>> Case().apply("Ab-7")
    'ab-7'
    """

    def apply(self, text: str) -> str:
        if text.isascii():
            return text.lower()
        return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


class Decimal(IdRule):
    """Removes the plus sign and a zero fraction of a whole number.

    >>> Decimal().apply("79499.0"), Decimal().apply("+7"), Decimal().apply("7.5")
    ('79499', '7', '7.5')
    """

    def apply(self, text: str) -> str:
        found = _DECIMAL.fullmatch(text)
        return found[1] if found else text


class Zeros(IdRule):
    """Removes leading zeros of a whole number.

    >>> Zeros().apply("00050379"), Zeros().apply("0"), Zeros().apply("007a")
    ('50379', '0', '007a')
    """

    def apply(self, text: str) -> str:
        digits = text.removeprefix("-")
        return _ZEROS.sub(r"\1", text, count=1) if digits.isascii() and digits.isdigit() else text


class Date(IdRule):
    """Writes a date as year-month-day; a text that is not a date in this order stays unchanged.

    Args:
        order: order of day, month and year in dates that do not begin with the year.

    >>> Date(order="dmy").apply("3.11.1985"), Date().apply("1985-11-03 00:00:00")
    ('1985-11-03', '1985-11-03')
    """

    def __init__(self, order: Literal["dmy", "mdy"] = "dmy") -> None:
        require_choice("order", order, ("dmy", "mdy"))
        self.order = order

    def apply(self, text: str) -> str:
        if found := _DIGITS.fullmatch(text):
            year, month, day = found.groups()
        elif found := _DATE.fullmatch(text):
            first, _, second, third = found.groups()
            if len(first) == 4:
                year, month, day = first, second, third
            else:
                day, month = (first, second) if self.order == "dmy" else (second, first)
                year = third
        else:
            return text
        try:
            return date(int(year), int(month), int(day)).isoformat() if len(year) == 4 else text
        except ValueError:
            return text


_HERE = "vfl.datasets.alignment.ids"
ID_RULES = Registry(
    "id rule",
    IdRule,  # type: ignore[type-abstract]
    {
        "plain": f"{_HERE}:Plain",
        "space": f"{_HERE}:Space",
        "case": f"{_HERE}:Case",
        "decimal": f"{_HERE}:Decimal",
        "zeros": f"{_HERE}:Zeros",
        "date": f"{_HERE}:Date",
    },
    "vfl.id_rules",
)


def make_rules(spec: str) -> list[IdRule]:
    """Make the rules that a spec joins by plus signs.

    Raises:
        SpecError: see `Registry.make`.
    """
    return [ID_RULES.make(part) for part in parts(spec)]


def prefixes(spec: str) -> list[str]:
    """Return the specs that a preview compares: the first rule, the first two rules, and so on.

    >>> prefixes("plain+case+zeros")
    ['plain', 'plain+case', 'plain+case+zeros']
    """
    rules = parts(spec)
    return ["+".join(rules[: count + 1]) for count in range(len(rules))]


def read_ids(table: Table, name: str, where: str) -> np.ndarray:
    """Read the ids of a table as text, in the order of its rows; dtype object, axes (rows,).

    Args:
        table: the party's own table.
        name: name of the id column, or names of several columns joined by plus signs.
        where: owner of the table, for the error text.

    Raises:
        MissingColumnError: the table lacks the id column.
        MisalignedError: some rows have no id; the error states how many.
        DataError: see `id_texts`.
    """
    blocks = list(id_blocks(table, name, where))
    return np.concatenate(blocks) if blocks else np.empty(0, dtype=object)


def id_blocks(table: Table, name: str, where: str) -> Iterator[np.ndarray]:
    """Yield the ids that `read_ids` returns, some rows at a time.

    After the last block, the function raises an error if ids were missing.
    """
    known = list(table.columns)
    names = id_columns(name, known)
    for each in names:
        check_column(known, each, f"the id column of {where}", "data.id")
    missing = 0
    for columns in zip(*(column_blocks(table, each) for each in names), strict=True):
        ids = joined_ids(columns)
        missing += int(pd.isna(ids).sum())
        if not missing:
            yield ids
    if missing:
        raise MisalignedError(
            f"rows of {where} have no id",
            where=f"column '{name}'",
            got=f"{spaced(missing)} of {spaced(len(table))} rows",
            want="one id in each row",
        )


def read_own_ids(source: Source, name: str, form: TableFormat, where: str) -> np.ndarray:
    """Read the ids of a party's file as exact text, without other columns; see `read_ids`."""
    return read_ids(_id_table(source, name, form, where), name, where)


def _id_table(source: Source, name: str, form: TableFormat, where: str) -> Table:
    known = column_names(source, form, f"the table of {where}")
    names = [each for each in id_columns(name, known) if each in known]
    return read_table(source, form, names, columns=names or None)


class DiskIds(Sequence[bytes]):
    """Normalised ids in a file, as a sequence; a slice of it is a list in memory.

    Args:
        place: folder in which the file is stored.

    >>> ids = DiskIds(scratch())
    >>> ids.add([b"17", b"4", b"250"])
    >>> len(ids), ids[1:], ids[0]
    (3, [b'4', b'250'], b'17')
    """

    def __init__(self, place: OnDisk) -> None:
        self._letters, self._ends = DiskBytes(place), DiskColumn(place, np.int64)

    def add(self, ids: Sequence[bytes]) -> None:
        """Append ids."""
        before = len(self._letters)
        self._letters.write(b"".join(ids))
        self._ends.write(before + np.cumsum([len(each) for each in ids], dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, part: int) -> bytes: ...
    @overload
    def __getitem__(self, part: slice) -> list[bytes]: ...
    def __getitem__(self, part: int | slice) -> bytes | list[bytes]:
        if isinstance(part, int):
            if not 0 <= part < len(self):
                raise IndexError(part)
            return self[part : part + 1][0]
        start, stop, _ = part.indices(len(self))
        if start >= stop:
            return []
        ends = self._ends[max(0, start - 1) : stop].tolist()
        ends = ends if start else [0, *ends]
        letters = self._letters[ends[0] : ends[-1]]
        return [letters[low - ends[0] : high - ends[0]] for low, high in pairwise(ends)]


@dataclass(frozen=True, eq=False)
class OwnIds:
    """The ids of a party's own table.

    Attributes:
        keys: normalised ids without repetition, in the order of the table.
        digest: digest of the ids in their original spelling; see `ids_digest`.
    """

    keys: Sequence[bytes] = field(repr=False)
    digest: str

    @classmethod
    def read(
        cls, source: Source, name: str, form: TableFormat, where: str, rules: str, place: OnDisk
    ) -> OwnIds:
        """Read and normalise the ids of a file, with only few of them in memory at a time.

        Args:
            source: the file.
            name: name of the id column, or names of several columns joined by plus signs.
            form: format of the file.
            where: owner of the file, for error texts.
            rules: normalisation rules.
            place: folder in which the ids are stored.

        Raises:
            MissingColumnError, MisalignedError: see `read_ids` and `check_unique`.
        """
        table = _id_table(source, name, form, where)
        keys, digest = DiskIds(place), IdsDigest()
        for block in id_blocks(table, name, where):
            digest.add(block.tolist())
            keys.add(normalise(block, rules))
        check_unique(keys, lambda: id_blocks(table, name, where), where, rules, place)
        return cls(keys, digest.finish().hex())

    def __len__(self) -> int:
        return len(self.keys)


def normalise(ids: np.ndarray, spec: str) -> list[bytes]:
    """Normalise ids for a protocol: apply all rules to each column, and encode as UTF-8.

    >>> normalise(np.array(["0017", "18.0"], dtype=object), "decimal+zeros")
    [b'17', b'18']
    """
    rules = [rule for rule in make_rules(spec) if not isinstance(rule, Plain)]

    def written(text: str) -> str:
        for rule in rules:
            text = rule.apply(text)
        return text

    if not any(ID_UNIT in text for text in ids[:1]):
        return [written(text).encode() for text in ids]
    return [ID_UNIT.join(map(written, text.split(ID_UNIT))).encode() for text in ids]


def check_unique(
    keys: Sequence[bytes],
    ids: Callable[[], Iterable[np.ndarray]],
    where: str,
    spec: str,
    place: OnDisk | None = None,
) -> None:
    """Refuse ids if several rows have the same id.

    Args:
        keys: normalised ids.
        ids: function that yields the ids in their original spelling, in blocks; called only if a
            normalised id repeats.
        where: owner of the ids, for the error text.
        spec: the rules.
        place: folder in which normalised ids are compared.

    Raises:
        MisalignedError: several rows have the same id; the error states how many, before and after
            normalisation.
    """
    place = place or scratch()
    parts = (keys[start : start + BLOCK_ROWS] for start in range(0, len(keys), BLOCK_ROWS))
    if repeated := count_repeated(parts, len(keys), place):
        plain = ([text.encode() for text in block] for block in ids())
        before = count_repeated(plain, len(keys), place)
        raise MisalignedError(
            f"the ids of {where} do not identify its rows uniquely",
            where=f"id rules {spec}",
            got=f"{spaced(repeated)} rows repeat another row's id, {spaced(before)} of them "
            "before normalisation",
            want="one id in each row, and no id twice",
            fix='repeats = "first", "latest:COLUMN" or "mean" in [data] makes one row of each id'
            if before == repeated
            else "leave out the rule that makes different ids equal; --preview shows it",
        )
