"""Tables: how they are written, finding columns in them, and checking who owns which column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pandas as pd

from vfl.errors import (
    DataError,
    LabelLeakError,
    MissingColumnError,
    SharedColumnError,
    nearest,
)

IdType = Literal["text", "number"]
Source = Path | str | pd.DataFrame


@dataclass(frozen=True)
class TableFormat:
    """How a party's file is written.

    Attributes:
        separator: between the cells of a CSV line.
        missing: further texts that mean a missing cell in a CSV, such as "?".
        id_type: "text" compares ids letter by letter; "number" reads 007 and 7 as the same id.
    """

    separator: str = ","
    missing: tuple[str, ...] = ()
    id_type: IdType = "text"


def check_names(names: pd.Series, where: str) -> None:
    """Refuse columns without a name, or two of one name.

    Raises:
        DataError: quoting none of them.
    """
    if names.isna().any() or names.duplicated().any():
        raise DataError(  # the first line of a file may be a row of data: quote nothing
            "this table has columns without a name, or of the same name",
            where=where,
            got=f"{len(names)} columns, {names.nunique()} different names",
            want="one name a column, in the first line of a CSV",
        )


def pick_columns(
    columns: Iterable[str],
    patterns: Sequence[str],
    who: str,
    leave_out: Sequence[str] = (),
    setting: str | None = None,
) -> list[str]:
    """The columns that names and globs such as ``loan_*`` stand for, each once.

    Args:
        columns: the table's column names.
        patterns: names or globs; their order is kept, and within a glob the table's.
        who: who asks, for the message ("party 'bank'").
        leave_out: the id and the label: a glob passes over them, only their full name takes them.
        setting: what holds the patterns, for the message.

    >>> pick_columns(["age", "loan_a", "loan_b"], ["loan_*", "age"], "party 'bank'")
    ['loan_a', 'loan_b', 'age']

    Raises:
        MissingColumnError: a pattern that fits no column, with the nearest name.
    """
    known = list(columns)
    picked: dict[str, None] = {}
    for pattern in patterns:
        if pattern in known:
            picked[pattern] = None
            continue
        found = [name for name in known if fnmatchcase(name, pattern) and name not in leave_out]
        if not found:
            raise MissingColumnError(
                f"{who} names a column that the table lacks",
                where=setting,
                got=pattern,
                want=_counted(known),
                fix=nearest(pattern, known) or _separator_hint(known),
            )
        picked.update(dict.fromkeys(found))
    return list(picked)


def check_column(columns: Iterable[str], name: str, what: str, setting: str | None = None) -> None:
    """Refuse a single column name, such as the id's, that the table lacks.

    Args:
        columns: the table's column names.
        name: the one that is looked for.
        what: what it should be, for the message ("the label").
        setting: what names it, for the message.

    Raises:
        MissingColumnError: with the nearest name.
    """
    known = list(columns)
    if name not in known:
        raise MissingColumnError(
            f"{what} is not a column of the table",
            where=setting,
            got=name,
            want=_counted(known),
            fix=nearest(name, known) or _separator_hint(known),
        )


def _counted(columns: Sequence[str]) -> str:
    noun = "column" if len(columns) == 1 else "columns"
    return f"one of the table's {len(columns)} {noun}"


def _separator_hint(columns: Sequence[str]) -> str | None:
    """A CSV that is cut at the wrong sign has one long column."""
    return "is the separator right?" if len(columns) == 1 else None


def check_features(
    party: str, columns: Sequence[str], label: str | None, ids: str | None, setting: str
) -> None:
    """Refuse a party whose features hold the label or the row id.

    Args:
        party: the party's name.
        columns: its resolved columns.
        label: the label column, where it is known.
        ids: the id column, where there is one.
        setting: what names the columns, for the message.

    Raises:
        LabelLeakError: the label is a feature.
        DataError: the id is a feature.
    """
    if label is not None and label in columns:
        raise LabelLeakError(
            f"the label column '{label}' is also a feature of '{party}'",
            where=setting,
            fix=f"remove it from {setting}; it would make every result perfect and worthless",
        )
    if ids is not None and ids in columns:
        raise DataError(
            f"the id column '{ids}' is also a feature of '{party}'",
            where=setting,
            fix=f"remove it from {setting}; an id says nothing about a new row",
        )


def check_owners(party_columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse one table's column in the hands of two parties.

    Args:
        party_columns: resolved columns by party.

    Raises:
        SharedColumnError: names the first such column and its owners, and counts the others.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    for party, columns in party_columns.items():
        for column in columns:
            owners[column].append(party)
    shared = [column for column, parties in owners.items() if len(parties) > 1]
    if shared:
        more = f", and {len(shared) - 1} more such columns" if len(shared) > 1 else ""
        count = {2: "two"}.get(len(owners[shared[0]]), str(len(owners[shared[0]])))
        raise SharedColumnError(
            f"column '{shared[0]}' belongs to {count} parties",
            where=f"parties.{owners[shared[0]][-1]}.columns",
            got=" and ".join(owners[shared[0]]) + more,
            want="one owner per column",
            fix="leave it in the columns of one of them",
        )
