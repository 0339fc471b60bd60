"""Description of a table, column by column: format, kinds, ids, dates, predictors of the label.

The table is read in blocks of rows, one column after another. Memory holds at most the hashes of a
column and the cells of a sample of rows. The report contains names, kinds and counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd

from vfl.core.errors import DataError, MisalignedError
from vfl.core.storage import is_database
from vfl.datasets.alignment.ids import id_columns
from vfl.datasets.alignment.join import align
from vfl.datasets.cells import (
    AMBIGUOUS,
    DATE_FORMS,
    DIGITS,
    WORDS,
    date_form,
    days_of_texts,
    decimal_counts,
    forms_of,
    is_open_end,
)
from vfl.datasets.csv_file import is_csv, sniff
from vfl.datasets.encode import MAX_CATEGORIES, DateColumn
from vfl.datasets.files import column_names, first_rows, read_table
from vfl.datasets.table import (
    OwnTable,
    Source,
    Table,
    TableFormat,
    as_days,
    as_texts,
    check_column,
    column_blocks,
    is_date,
    kind_of,
    spaced,
)

Cells = TypeVar("Cells", pd.Series, np.ndarray)
Role = Literal["id", "label", "number", "boolean", "category", "date", "text", "constant", "other"]

SAMPLE_ROWS = 100_000  # rows of the sample in which columns are compared with the label
ALONE, NEARLY = 0.75, 0.99  # AUC, or R2 of a regression, of one column on held-out rows
_BINS = 20
FEW_CLASSES = 20  # most different whole numbers in a label of classes
RARE = 0.2  # share of the rarest class that calls for class weights
#: Words for a missing cell besides `WORDS`, in a column of numbers or dates.
_SIGNS = frozenset(("?", "-", "--", ".", "n.a.", "unknown", "missing", "\u2013", "\u2014"))
_TOLD = 2000  # columns between two lines of progress
_MOST = 1000  # limit of counted different cells
_WHOLE, _SHORT = re.compile(r"\d+(\.0*)?"), re.compile(r"\d{1,18}(\.0*)?")
_KEY_NAME = re.compile(
    r"(^|[^a-z])(u?u?id|key|nr|no|number|account|customer|client|member|person|patient|case|row)s?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ColumnReport:
    """Description of one column and of its inputs; it contains no cell.

    Attributes:
        name: name of the column.
        kind: kind of its values.
        missing: share of the rows without a cell.
        different: number of different cells, or None above the limit of counting.
        becomes: its inputs, in words.
        inputs: number of inputs of a model; 0 if it is left out.
        notes: warnings about it.
        score: quality of a prediction of the label by this column only, on rows it was not fitted
            on: AUC, or R2 of a regression; None without a label.
    """

    name: str
    kind: Role
    missing: float
    different: int | None
    becomes: str
    inputs: int
    notes: tuple[str, ...] = ()
    score: float | None = None

    def as_used(self, inputs: int) -> ColumnReport:
        """The same column with the number of inputs that a party made of it."""
        if inputs == self.inputs:
            return self
        if not inputs:
            return replace(self, inputs=0, becomes="left out: not among the columns")
        becomes = re.sub(r"^\d+ inputs?|^left out", f"{inputs} inputs", self.becomes)
        return replace(self, inputs=inputs, becomes=becomes)


@dataclass(frozen=True)
class TableReport:
    """Description of a table, and the settings of a party file that read it.

    Attributes:
        rows: number of rows.
        columns: in the table's order.
        form: format of the table.
        id: name of the id column.
        label: the label column, if there is one.
        task: learning task of the label.
        notes: warnings about the table as a whole.
        whole_ids: whether every id is a whole number, of any length.
    """

    rows: int
    columns: tuple[ColumnReport, ...]
    form: TableFormat
    id: str
    label: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()
    whole_ids: bool = False

    @property
    def features(self) -> list[str]:
        """Names of the columns that become inputs."""
        return [column.name for column in self.columns if column.inputs]

    @property
    def left_out(self) -> list[str]:
        """Lines that name every column without inputs, with the reason."""
        idle = {
            one.name: one.becomes
            for one in self.columns
            if not one.inputs and one.kind not in ("id", "label")
        }
        return left_out_lines(idle, "left out:")

    def settings(self) -> dict[str, Any]:
        """The [data] table of a party file, without its source; default values are left out."""
        plain, form = TableFormat(), asdict(self.form)
        own = {name: value for name, value in form.items() if value != getattr(plain, name)}
        own["columns"] = self.features
        return own | {"id": self.id} | ({"label": self.label} if self.label else {})

    def lines(self) -> list[str]:
        """The table of columns as text."""
        return table_of_columns(self.columns, self.notes)


def table_of_columns(columns: Sequence[ColumnReport], notes: Sequence[str] = ()) -> list[str]:
    """Format columns with kind, missing share and inputs, followed by the warnings."""
    wide = max(6, *(len(column.name) for column in columns))
    lines = [f"{'column':<{wide}}  {'kind':<8}  missing  becomes"]
    lines += [
        f"{column.name:<{wide}}  {column.kind:<8}  {column.missing:>7.1%}  {column.becomes}"
        for column in columns
    ]
    told = [f"look at '{column.name}': {note}" for column in columns for note in column.notes]
    return lines + told + [f"note: {note}" for note in notes]


def describe(
    source: Source,
    form: TableFormat | None = None,
    id_column: str | None = None,
    label: str | None = None,
    task: str | None = None,
    query: str | None = None,
    told: Callable[[str], None] | None = None,
) -> TableReport:
    """Describe a table.

    Args:
        source: a CSV or Parquet file, a database, or a frame.
        form: format of the table; None detects it.
        id_column: name of its id column; None finds it.
        label: name of its label column; None for a table without labels.
        task: "classification" or "regression"; None finds it.
        query: query to a database whose format is to be detected.
        told: receives a line after every few thousand columns.

    Raises:
        DataError: the table is not readable, or no column identifies the rows.
    """
    found_out = form is None
    form = replace(sniff(source), query=query) if form is None else form
    names = column_names(source, form, "data.source")
    for name, what in ((id_column, "the id column"), (label, "the label")):
        if name is not None:
            check_column(names, name, what, "data.id" if name == id_column else "data.label")
    table = read_table(source, form)
    if not len(table):
        raise DataError(
            "this table has no rows",
            where="the frame" if isinstance(source, pd.DataFrame) else "data.source",
            got=f"{len(names)} names of columns and nothing below them",
            fix="write the table again, or check the query",
        )
    facts = dict[str, _Facts]()
    for name in names:
        facts[name] = _facts(table, name, form)
        if told is not None and not len(facts) % _TOLD:
            told(f"read {spaced(len(facts))} of {spaced(len(names))} columns")
    if found_out:
        classes = label if is_csv(source) and task != "regression" else None
        form = _found_form(source, form, facts, classes)
        if changed := [name for name, fact in facts.items() if fact.changed(form)]:
            table = read_table(source, form)
            facts |= {name: _facts(table, name, form) for name in changed}
    letters = dict[str, _Facts]()  # columns that would lose digits as numbers
    if found_out and (long := [name for name, fact in facts.items() if fact.long]):
        texts = read_table(source, form, long, columns=long)
        letters = {name: replace(_facts(texts, name, form), long=True) for name in long}
    ids = id_column or _id_of(source, facts | letters, len(table), label)
    facts[ids] = letters.get(ids, facts[ids])
    whole = facts[ids].whole_numbers
    if found_out:
        short = whole and not facts[ids].long
        form = replace(form, id_type="number" if short else "text")
    truth = _truth(table, label, facts, task, len(table)) if label is not None else None
    columns = tuple(_report(table, fact, ids, label, truth, form.bins) for fact in facts.values())
    notes = () if truth is None else truth.notes
    return TableReport(
        len(table), columns, form, ids, label, None if truth is None else truth.task, notes, whole
    )


@dataclass
class _Facts:
    """Facts about a column before its part in the table is known.

    Attributes:
        different: number of different cells; None above the limit of counting.
        whole_numbers: whether all cells are whole numbers; `long`: whether some exceed the exact
            range of id_type = "number".
        dates: form of dates that are texts or numbers such as 20240131.
        either: whether the order of day and month is ambiguous.
        decimal: decimal separator of numbers that are texts.
        signs: words for a missing cell, besides those of the format.
        words: number of text cells that are among `WORDS`.
        open: whether some days are placeholders, such as 9999-12-31.
    """

    name: str
    rows: int
    missing: int
    different: int | None
    unique: bool
    kind: Literal["number", "boolean", "text", "date", "other"]
    whole_numbers: bool
    repeated: int = 0
    dates: str | None = None
    either: bool = False
    long: bool = False
    decimal: str | None = None
    signs: tuple[str, ...] = ()
    words: int = 0
    open: bool = False

    @property
    def share_missing(self) -> float:
        return self.missing / self.rows

    def changed(self, form: TableFormat) -> bool:
        """Whether the detected format reads the column differently."""
        named = isinstance(form.missing, Mapping) and self.name in form.missing
        return bool(self.decimal or self.signs or named or self.dates)


def _facts(table: Table, name: str, form: TableFormat) -> _Facts:
    found = _Finder(name, form)
    for block in column_blocks(table, name):
        found.add(block)
    return found.facts()


class _Finder:
    """Collects the facts of a column, block by block."""

    def __init__(self, name: str, form: TableFormat) -> None:
        self._name, self._form = name, form
        self._rows = self._missing = self._words = 0
        self._known, self._hashes = np.empty(0, np.uint64), list[np.ndarray]()
        self._whole, self._long, self._many = True, False, False
        self._kinds, self._signs = set[str](), dict[str, None]()
        # Possible forms of all texts; None means that no form is possible.
        self._forms: list[str] | None = list(DATE_FORMS)
        self._mixed, self._open = "", False
        self._decimals: Counter[str] | None = Counter()

    def add(self, block: pd.Series) -> None:
        """Add the next rows."""
        self._rows += len(block)
        known = block.notna().to_numpy()
        present = block if known.all() else block[known]
        self._missing += len(block) - len(present)
        if not len(present):
            return
        kind = _kind(present)
        self._kinds.add(kind)
        if kind == "other":
            return
        if kind == "date":
            self._open |= bool(is_open_end(as_days(present)).any())
        number = kind == "number"
        own = self._add_numbers(present) if number else self._add_texts(present, kind)
        if not self._many:
            self._known = np.unique(np.concatenate([self._known, own]))
            self._many = len(self._known) > _MOST
        self._hashes.append(own)

    def _add_numbers(self, present: pd.Series) -> np.ndarray:
        numbers = np.asarray(present.to_numpy(dtype=float))
        low, high = float(numbers.min()), float(numbers.max())
        self._whole = self._whole and not bool((numbers != np.round(numbers)).any())
        exact = pd.api.types.is_integer_dtype(present.dtype)  # beyond the exact range of float64
        self._long |= self._whole and max(high, -low) >= 2.0 ** (63 if exact else 53)
        self._decimals = None
        if self._forms is not None:
            able = self._whole and low >= 19000101 and high <= 21001231 and DIGITS in self._forms
            texts = as_texts(pd.Series(np.unique(numbers))).tolist() if able else []
            self._forms = forms_of(texts, [DIGITS]) or None
        own: np.ndarray = present.to_numpy(dtype=np.int64) if exact else numbers + 0.0
        return own.view(np.uint64)  # the bits of a number are its hash; -0.0 is 0.0

    def _add_texts(self, present: pd.Series, kind: str) -> np.ndarray:
        codes, different = pd.factorize(present.astype(object) if kind == "text" else present)
        texts = as_texts(pd.Series(different))
        self._whole = self._whole and all(map(_WHOLE.fullmatch, texts))
        self._long |= self._whole and not all(map(_SHORT.fullmatch, texts))
        if kind == "text":
            meant = [text in WORDS or text.lower() in _SIGNS for text in texts]
            self._words += int(np.isin(codes, np.flatnonzero([t in WORDS for t in texts])).sum())
            self._signs |= {text: None for text, one in zip(texts, meant, strict=True) if one}
            self._try_texts([text for text, one in zip(texts, meant, strict=True) if not one])
        return pd.util.hash_array(texts, categorize=False)[codes]

    def _try_texts(self, texts: list[str]) -> None:
        """Exclude forms that these texts cannot have."""
        if not texts:
            return
        if self._forms is not None:
            able = forms_of(texts, self._forms)
            self._mixed = self._mixed or ("" if able else date_form(texts) or "")
            if self._mixed and np.isnan(days_of_texts(texts, self._mixed)).any():
                self._mixed = ""
            self._forms = able or ([] if self._mixed else None)
            if form := able[0] if able else self._mixed:
                self._open |= bool(is_open_end(days_of_texts(texts, form)).any())
        if self._decimals is not None:
            counts = decimal_counts(texts)
            self._decimals = None if counts is None else self._decimals + Counter(counts)

    def facts(self) -> _Facts:
        """The facts over all rows."""
        kinds = self._kinds
        kind: Any = next(iter(kinds)) if len(kinds) == 1 else "text" if kinds else "number"
        every = np.sort(np.concatenate(self._hashes)) if self._hashes else np.empty(0)
        repeated = int((every[1:] == every[:-1]).sum())
        forms, texts, decimal = self._forms or [], kind == "text", None
        dates = forms[0] if len(forms) < len(DATE_FORMS) and forms else self._mixed or None
        said = self._name in self._form.dates or not self._whole
        dates = dates if kind == "number" or (texts and said) else None
        if texts and dates is None and self._decimals and not self._whole:
            usual = self._form.decimal
            decimal = max(self._decimals, key=lambda sign: (self._decimals[sign], sign == usual))  # type: ignore[index]
        read = dates or decimal
        others = self._form.words_of(self._name)[1 if read else 0]
        signs = tuple(sign for sign in self._signs if sign not in others and (read or sign == "?"))
        return _Facts(
            self._name,
            self._rows,
            self._missing,
            None if self._many else len(self._known),
            not repeated and not self._missing and bool(self._rows) and kind != "other",
            "date" if dates else kind,
            self._whole,
            repeated,
            None if kind == "date" else dates,
            any(first == dates and second in forms for first, second in AMBIGUOUS),
            self._long,
            decimal,
            signs,
            self._words,
            self._open,
        )


def _found_form(
    source: Source, form: TableFormat, facts: Mapping[str, _Facts], classes: str | None
) -> TableFormat:
    """Add the columns' missing words, dates and numbers to the format; `classes` is the label."""
    missing: dict[str, tuple[str, ...]] = {
        name: fact.signs for name, fact in facts.items() if fact.signs
    }
    anywhere = tuple({sign for signs in missing.values() for sign in signs if sign == "?"})
    missing = {name: signs for name, signs in missing.items() if signs != anywhere}
    if classes is not None and facts[classes].missing:
        # A class may have the name None.
        texts = _facts(read_table(source, form, [classes], columns=[classes]), classes, form)
        if texts.words and texts.different is not None and texts.different <= FEW_CLASSES:
            missing[classes] = ()
    if missing and anywhere:
        missing["*"] = anywhere
    dates = {name: fact.dates for name, fact in facts.items() if fact.dates}
    numbers = {name: fact.decimal for name, fact in facts.items() if fact.decimal}
    return replace(form, missing=missing or anywhere, dates=dates, numbers=numbers)


def _kind(present: pd.Series) -> str:
    if is_date(present):
        return "date"
    try:
        return kind_of(present)
    except DataError:
        return "other"


def _id_of(source: Source, facts: Mapping[str, _Facts], rows: int, label: str | None) -> str:
    """The column that identifies the rows: by its name, else the first possible one."""
    may_be = {
        name: fact
        for name, fact in facts.items()
        if name != label and (fact.kind == "text" or (fact.kind == "number" and fact.whole_numbers))
    }
    able = [name for name, fact in may_be.items() if fact.unique]
    named = [name for name in able if _KEY_NAME.search(name)]
    if named or able:
        return (named or able)[0]
    close = [name for name in may_be if _KEY_NAME.search(name)] or list(may_be)
    got, fix = f"{len(facts)} columns, none of them with texts or whole numbers", None
    if close:
        fact = min((facts[name] for name in close), key=lambda fact: fact.repeated + fact.missing)
        different = fact.rows - fact.missing - fact.repeated
        got = (
            f"'{fact.name}' is nearest: {spaced(different)} different ids in "
            f"{spaced(rows)} rows; {spaced(fact.repeated)} rows repeat another row's id, "
            f"{spaced(fact.missing)} have none"
        )
        fix = _one_row_each(source, fact, facts)
    raise DataError(
        "no column of this table identifies its rows",
        where="data.id",
        got=got,
        want="a column that identifies the object of each row, the same at every party, each "
        "id once",
        fix=fix or "add the column by which the parties identify the same rows",
    )


def _one_row_each(source: Source, ids: _Facts, facts: Mapping[str, _Facts]) -> str:
    """Advice for one row of each id: the latest row, or an aggregate of all its rows."""
    if not isinstance(source, str | Path) or is_database(source):
        table = "the query" if is_database(source) else "the frame"
        return f"make one row of each '{ids.name}' in {table}: the latest, or an aggregate"
    dated = next((name for name, fact in facts.items() if fact.kind == "date"), None)
    table, key = f"FROM '{source}'", f'"{ids.name}"'
    measured = next((name for name, fact in facts.items() if fact.kind == "number"), None)
    whole = f', avg("{measured}") AS "{measured}"' if measured and measured != ids.name else ""
    aggregate = f"SELECT {key}, count(*) AS times{whole} {table} GROUP BY {key}"
    order = f' ORDER BY "{dated}" DESC' if dated else ""
    latest = f"SELECT * {table} QUALIFY row_number() OVER (PARTITION BY {key}{order}) = 1"
    which = "the latest row of each id" if dated else "one row of each id"
    return (
        f"if '{ids.name}' is the id, ask for {which} with --from NAME=duckdb: --query '{latest}', "
        f"or aggregate its rows, such as --query '{aggregate}'"
    )


@dataclass(frozen=True)
class _Truth:
    """Labels of a sample of the rows, in two parts.

    Attributes:
        rows: positions in the table, ascending.
        fitted: which of them a column is fitted on; its score uses the others.
        values: labels, axes (rows, classes) of 0 and 1, or (rows, 1) of numbers.
    """

    task: str
    rows: np.ndarray
    fitted: np.ndarray
    values: np.ndarray
    notes: tuple[str, ...] = field(default=())


def _truth(
    table: Table, label: str, facts: Mapping[str, _Facts], task: str | None, rows: int
) -> _Truth:
    fact = facts[label]
    if task is None:
        few = fact.different is not None and fact.different <= FEW_CLASSES
        measured = fact.kind == "number" and not (fact.whole_numbers and few)
        task = "regression" if measured else "classification"
    if fact.missing:
        raise DataError(
            f"the label column '{label}' has missing cells",
            got=f"{spaced(fact.missing)} of {spaced(fact.rows)} rows",
            fix="leave these rows out of the table",
        )
    draw = np.random.default_rng(0)
    taken = np.sort(draw.choice(rows, min(rows, SAMPLE_ROWS), replace=False, shuffle=False))
    cells = pd.concat(_cells(table, label, taken, lambda block: block), ignore_index=True)
    fitted = draw.permutation(len(taken)) < len(taken) // 2
    if task == "regression":
        return _Truth(task, taken, fitted, cells.to_numpy(dtype=float)[:, None])
    codes, classes = pd.factorize(cells)
    counts = np.bincount(codes)
    frequent = np.argsort(-counts)[:FEW_CLASSES]
    notes = [f"{len(classes)} classes, the rarest with {counts.min() / len(codes):.1%} of the rows"]
    if counts.min() / len(codes) < RARE and len(classes) == 2:
        notes.append('rare labels: see label.class_weight = "balanced" of the experiment')
    return _Truth(task, taken, fitted, (codes[:, None] == frequent) * 1.0, tuple(notes))


def _cells(
    table: Table, name: str, taken: np.ndarray, of: Callable[[pd.Series], Cells]
) -> list[Cells]:
    """Convert the cells at some rows, which are in ascending order, block by block."""
    found, start = [], 0
    for block in column_blocks(table, name):
        low, high = np.searchsorted(taken, (start, start + len(block)))
        whole = high - low == len(block)
        found.append(of(block if whole else block.iloc[taken[low:high] - start]))
        start += len(block)
    return found


def _report(
    table: Table, fact: _Facts, ids: str, label: str | None, truth: _Truth | None, bins: int
) -> ColumnReport:
    kind, becomes, inputs = _becomes(fact, bins)
    notes: list[str] = []
    score = None
    if fact.either:
        notes.append("the order of day and month is ambiguous; set it in [data.dates]")
    if fact.name == ids:
        how = (
            "compared as numbers"
            if fact.whole_numbers and not fact.long
            else "compared letter by letter"
        )
        kind, becomes, inputs = "id", f"the row's id, {how}", 0
        if not fact.unique:
            notes.append("ids are missing or repeated")
    elif fact.name == label:
        kind, becomes, inputs = "label", "learning target", 0
    elif truth is not None and fact.kind != "other" and kind != "constant":
        score, more = _predicts(table, fact, truth)
        notes += more
    return ColumnReport(
        fact.name,
        kind,
        fact.share_missing,
        fact.different,
        becomes,
        inputs,
        tuple(notes),
        None if score is None else round(score, 3),
    )


def _becomes(fact: _Facts, bins: int) -> tuple[Role, str, int]:
    """A column's kind, its inputs in words, and the number of inputs."""
    more, also = (1, ", and whether it is missing") if fact.missing else (0, "")
    if fact.kind == "other":
        return "other", "left out: neither number, text nor date", 0
    if fact.different is not None and fact.different <= 1 and not (fact.missing and fact.different):
        return "constant", "left out: all cells are equal", 0
    if fact.kind == "date":
        days = min(bins, (fact.different or bins + 1) - 1) if bins else 1
        words = "days in bins" if bins else "days since the median"
        inputs = days + DateColumn.CIRCLES + fact.open + more
        circles = "month and weekday as points of a circle"
        if fact.open:
            circles += ", whether it is an open end (before 1600 or after 2499)"
        return "date", f"{inputs} inputs: {words}, {circles}{also}", inputs
    if fact.kind == "number" and bins:
        inputs = min(bins, (fact.different or bins + 1) - 1) + more
        return "number", f"{inputs} input{'s' * (inputs > 1)}: one a bin{also}", inputs
    if fact.kind in ("number", "boolean"):
        of = "standardised" if fact.kind == "number" else "0 or 1"
        return fact.kind, f"{1 + more} input{'s' * more}: {of}{also}", 1 + more
    count = fact.different
    present = fact.rows - fact.missing
    if count is None or count > MAX_CATEGORIES or (count > 20 and count > present / 2):
        many = "many" if count is None else spaced(count)
        return "text", f"left out: {many} different texts are too many categories", 0
    return "category", f"{count + more} inputs: one for each category{also}", count + more


def _predicts(table: Table, fact: _Facts, truth: _Truth) -> tuple[float, list[str]]:
    """Score of a column that alone predicts the label, with warnings."""
    score, error = _alone(table, fact, truth)
    measure = "R2" if truth.task == "regression" else "AUC"
    shown = f"{measure} {score:.2f} alone, on {spaced(int((~truth.fitted).sum()))} other rows"
    if score >= NEARLY:
        return score, [f"nearly equal to the label ({shown}); is it known before the label is?"]
    if score >= ALONE and score - 2 * error > (ALONE + 0.5) / 2:  # a few rows prove nothing
        return score, [f"predicts the label ({shown}); is it known before the label is?"]
    return score, []


def left_out(table: OwnTable, read: Collection[str], begin: str) -> list[str]:
    """Lines that name the columns of a table that no model reads, with the reasons.

    Args:
        table: the table; its id columns are no inputs and have no line.
        read: columns that become inputs or labels.
        begin: start of each line.
    """
    names = column_names(table.source, table.form)
    known = {*id_columns(table.id_column, names), *read}
    idle = [name for name in names if name not in known]
    rows = first_rows(table.source, table.form, idle) if idle else ()
    facts = [_facts(rows, name, table.form) for name in idle if len(rows)]  # type: ignore[arg-type]
    return left_out_lines({fact.name: _becomes(fact, table.form.bins)[1] for fact in facts}, begin)


def left_out_lines(becomes: Mapping[str, str], begin: str) -> list[str]:
    """One line for each reason, with all its columns.

    >>> for line in left_out_lines({"a": "left out: too long", "b": "1 input"}, "bank leaves out"):
    ...     print(line)
    bank leaves out 'a' (too long)
    bank leaves out 'b': add them to some 'columns', or leave them unread
    """
    reasons = dict[str, list[str]]()
    for name, what in becomes.items():
        _, out, why = what.partition("left out: ")
        reasons.setdefault(why if out else "", []).append(f"'{name}'")
    return [
        f"{begin} {', '.join(names)}"
        + (f" ({why})" if why else ": add them to some 'columns', or leave them unread")
        for why, names in reasons.items()
    ]


def tells_label(
    labelled: tuple[Source, TableReport], other: tuple[Source, TableReport], party: str
) -> list[str]:
    """Warnings about another party's columns that predict the label, if both tables are local.

    Args:
        labelled: the label party's table with a label, and its description.
        other: table and description of the other party.
        party: name of the other party, for the lines.

    Raises:
        MisalignedError: the tables have very few common ids.
    """
    (source, own), (others, report) = labelled, other
    assert own.label is not None, "a label is there"
    tables, names = dict[str, Table](), {_LABELLED: own.id, party: report.id}
    for name, its, table in ((_LABELLED, own, source), (party, report, others)):
        tables[name] = read_table(table, its.form, [its.id] * its.form.text_ids)
    alike = own.form.id_type == report.form.id_type
    try:
        frames = align(tables, names, own.form.id_type if alike else "text").frames
    except MisalignedError:
        if own.whole_ids and report.whole_ids and "text" in (own.form.id_type, report.form.id_type):
            return []  # long ids in different spellings; rules of an alignment normalise them
        raise
    labels = frames[_LABELLED]
    facts = {own.label: _facts(labels, own.label, own.form)}
    truth = _truth(labels, own.label, facts, own.task, len(labels))
    lines = []
    for name in report.features:
        fact = _facts(frames[party], name, report.form)
        if fact.kind != "other":
            _, notes = _predicts(frames[party], fact, truth)
            lines += [f"look at '{name}' of {party}: {note}" for note in notes]
    return lines


_LABELLED = "the label party"  # no party's name has a space


def _alone(table: Table, fact: _Facts, truth: _Truth) -> tuple[float, float]:
    """Score of a column that alone predicts the label, on rows it was not fitted on, and its error.

    The column is cut into at most 20 bins of equal size, or split by its texts. The prediction of a
    bin is the mean of its fitted labels, shrunk towards the overall mean by one additional row.
    """
    kind, fitted = fact.kind, truth.fitted

    def of(block: pd.Series) -> np.ndarray:
        if kind == "date":
            return as_days(block, fact.dates)
        if kind in ("number", "boolean"):
            return block.to_numpy(dtype=float, na_value=np.nan)
        return as_texts(block)

    cells = np.concatenate(_cells(table, fact.name, truth.rows, of))
    codes = pd.factorize(cells)[0]
    if kind != "text" and codes.max(initial=0) >= _BINS:
        missing = np.isnan(cells)
        known = cells[fitted & ~missing]
        if len(known):
            edges = np.unique(np.quantile(known, np.linspace(0, 1, _BINS + 1)[1:-1]))
            codes = np.where(missing, -1, np.searchsorted(edges, cells))
    codes = codes + 1  # a missing cell is a bin of its own
    bins, mean = codes.max(initial=0) + 1, truth.values[fitted].mean(0)
    counts = np.bincount(codes[fitted], minlength=bins)
    guesses = np.stack(
        [
            (np.bincount(codes[fitted], own[fitted], minlength=bins) + prior) / (counts + 1)
            for own, prior in zip(truth.values.T, mean, strict=True)
        ],
        axis=1,
    )[codes[~fitted]]
    actual = truth.values[~fitted]
    if truth.task == "regression":
        spread = float(((actual - mean) ** 2).mean())
        return (1 - float(((actual - guesses) ** 2).mean()) / spread if spread else 0.0), 0.0
    found = [_auc(guesses[:, one], actual[:, one] > 0) for one in range(actual.shape[1])]
    shares = actual.mean(0)
    auc = float(np.average([score for score, _ in found], weights=shares + 1e-12))
    return auc, max(error for _, error in found)


def _auc(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """AUC, where ties count half, and its standard error (Hanley and McNeil 1982, eq. 2)."""
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return 0.5, 0.5
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # the mean rank of equal scores
    area = (ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros)
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
    return float(area), float(np.sqrt(max(0.0, spread) / (ones * zeros)))
