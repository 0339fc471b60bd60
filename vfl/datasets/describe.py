"""What a table holds, column by column: format, kinds, ids, dates, what predicts the label.

The table is read some rows at a time, one column after another. Of a column there are in memory at
most its hashes, and the cells of a sample of the rows. What is told are names, kinds and counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from vfl.core.errors import DataError, MisalignedError
from vfl.datasets.alignment.join import align
from vfl.datasets.encode import MAX_CATEGORIES, DateColumn
from vfl.datasets.files import column_names, read_table
from vfl.datasets.sniff import COMMA, NUMBER, is_csv, sniff
from vfl.datasets.table import (
    Source,
    Table,
    TableFormat,
    as_dates,
    as_texts,
    check_column,
    column_blocks,
    is_date,
    kind_of,
    spaced,
)

Role = Literal["id", "label", "number", "boolean", "category", "date", "text", "constant", "other"]

SAMPLE_ROWS = 100_000  # in which columns are compared with the label
ALONE, NEARLY = 0.75, 0.99  # AUC, or R2 of a regression, of one column on rows it was not fitted on
_BINS = 20
FEW_CLASSES = 20  # whole numbers of a label that are classes, not a measure
RARE = 0.2  # share of the rarest class below which classes are worth a weight
#: Signs of a missing cell beside those that pandas knows, in a column that is numbers otherwise.
_SIGNS = ("?", "-", "--", ".", "n.a.", "unknown", "missing")
_DAY_FIRST, _MONTH_FIRST, _DIGITS = "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d"
_DATES = ("%Y-%m-%d", "%d.%m.%Y", _DAY_FIRST, _MONTH_FIRST, "%Y/%m/%d", _DIGITS, "ISO8601")
_MOST = 1000  # different cells that are counted
_WHOLE, _SHORT = re.compile(r"\d+(\.0*)?"), re.compile(r"\d{1,18}(\.0*)?")
_KEY_NAME = re.compile(
    r"(^|[^a-z])(u?u?id|key|nr|no|number|account|customer|client|member|person|patient|case|row)s?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ColumnReport:
    """What one column holds and becomes; no cell of it.

    Attributes:
        name: the column.
        kind: what it is.
        missing: share of the rows without a cell.
        different: how many different cells, or None where they are more than were counted.
        becomes: in words, what is made of it.
        inputs: how many inputs of a model that is; 0 where it is left out.
        notes: what a reader should look at.
        score: how well it predicts the label alone, on rows it was not fitted on: AUC, or R2 of a
            regression; None without a label.
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
        """The same column where a party made so many inputs of it."""
        if inputs == self.inputs:
            return self
        if not inputs:
            return replace(self, inputs=0, becomes="left out: not among the columns")
        becomes = re.sub(r"^\d+ inputs?|^left out", f"{inputs} inputs", self.becomes)
        return replace(self, inputs=inputs, becomes=becomes)


@dataclass(frozen=True)
class TableReport:
    """What a table holds, and the settings of a party file that read it.

    Attributes:
        rows: how many there are.
        columns: in the table's order.
        form: how it is written.
        id: the column of ids.
        label: the label column, if there is one.
        task: what the label is for.
        notes: about the table as a whole.
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
        """The columns that become inputs."""
        return [column.name for column in self.columns if column.inputs]

    def settings(self) -> dict[str, Any]:
        """[data] of a party file, without its source; what is as it always is, is left out."""
        plain, form = TableFormat(), asdict(self.form)
        own = {name: value for name, value in form.items() if value != getattr(plain, name)}
        own["columns"] = self.features
        return own | {"id": self.id} | ({"label": self.label} if self.label else {})

    def lines(self) -> list[str]:
        """The table of columns for people."""
        return table_of_columns(self.columns, self.notes)


def table_of_columns(columns: Sequence[ColumnReport], notes: Sequence[str] = ()) -> list[str]:
    """Columns with kind, share missing and what each becomes, then what should be looked at."""
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
) -> TableReport:
    """What a table holds.

    Args:
        source: a CSV or Parquet file, a database, or a frame.
        form: how it is written; None finds it out.
        id_column: its column of ids; None finds it.
        label: its label column; None for a table without labels.
        task: "classification" or "regression"; None finds it.
        query: what is asked of a database whose form is to be found out.

    Raises:
        DataError: no readable table, or no column whose cells name the rows.
    """
    found_out = form is None
    form = replace(sniff(source), query=query) if form is None else form
    names = column_names(source, form, "data.source")
    for name, what in ((id_column, "the id column"), (label, "the label")):
        if name is not None:
            check_column(names, name, what, "data.id" if name == id_column else "data.label")
    table = read_table(source, form)
    if found_out and is_csv(source) and (signs := _missing_signs(table, form)):
        form = replace(form, missing=signs)
        table = read_table(source, form)
    if not len(table):
        raise DataError(
            "this table has no rows",
            where="the frame" if isinstance(source, pd.DataFrame) else "data.source",
            got=f"{len(names)} names of columns and nothing below them",
            fix="write the table again, or look at the query",
        )
    facts = {name: _facts(table, name, form) for name in table.columns}
    letters = dict[str, _Facts]()  # of what would lose digits as numbers
    if found_out and (long := [name for name, fact in facts.items() if fact.long]):
        texts = read_table(source, form, long, columns=long)
        letters = {name: replace(_facts(texts, name, form), long=True) for name in long}
    ids = id_column or _id_of(facts | letters, len(table), label)
    facts[ids] = letters.get(ids, facts[ids])
    whole = facts[ids].whole_numbers
    if found_out:
        short = whole and not facts[ids].long
        dates = {name: fact.written for name, fact in facts.items() if fact.written}
        form = replace(form, id_type="number" if short else "text", dates=dates)
    truth = _truth(table, label, facts, task, len(table)) if label is not None else None
    columns = tuple(_report(table, fact, ids, label, truth, form.bins) for fact in facts.values())
    notes = () if truth is None else truth.notes
    return TableReport(
        len(table), columns, form, ids, label, None if truth is None else truth.task, notes, whole
    )


@dataclass
class _Facts:
    """What was found of a column before its part in the table is known."""

    name: str
    rows: int
    missing: int
    different: int | None  # None: more than _MOST
    unique: bool
    kind: Literal["number", "boolean", "text", "date", "other"]
    whole_numbers: bool
    written: str | None = None
    either: bool = False  # whether days and months cannot be told apart
    long: bool = False  # whether whole numbers are beyond what id_type = "number" reads exactly

    @property
    def share_missing(self) -> float:
        return self.missing / self.rows


def _facts(table: Table, name: str, form: TableFormat) -> _Facts:
    rows = missing = 0
    known, hashes, unique, whole = np.empty(0, np.uint64), list[np.ndarray](), True, True
    kinds, written = set[str](), list(_DATES)
    many = long = False
    for block in column_blocks(table, name):
        rows += len(block)
        present = block.dropna()
        missing += len(block) - len(present)
        if not len(present):
            continue
        kind = _kind(present)
        kinds.add(kind)
        texts: np.ndarray | None = None
        if kind == "number":
            numbers = np.asarray(present.to_numpy(dtype=float))
            fractions = bool((numbers != np.round(numbers)).any())
            whole, unique = whole and not fractions, unique and not fractions
            exact = pd.api.types.is_integer_dtype(present.dtype)  # beyond what float64 tells apart
            long = long or (whole and float(np.abs(numbers).max()) >= 2.0 ** (63 if exact else 53))
            own = pd.util.hash_array(present.to_numpy(dtype=np.int64) if exact else numbers)
            in_range = whole and numbers.min() >= 19000101 and numbers.max() <= 21001231
            written = [one for one in written if one == _DIGITS and in_range]
            texts = as_texts(pd.Series(np.unique(numbers))) if written else None
        else:
            texts = as_texts(pd.Series(present.unique()))
            repeated = len(texts) < len(present)
            unique = unique and not repeated
            whole = whole and all(_WHOLE.fullmatch(text) for text in texts)
            long = long or (whole and not all(_SHORT.fullmatch(text) for text in texts))
            own = pd.util.hash_array(texts, categorize=False)
        if texts is not None:
            written = [one for one in written if _reads(texts, one)]
        if not many:
            known = np.unique(np.concatenate([known, own]))
            many = len(known) > _MOST
        if unique:
            hashes.append(own)
    if unique and hashes:
        every = np.concatenate(hashes)
        every.sort()
        unique = not (every[1:] == every[:-1]).any()
    kind_found = kinds.pop() if len(kinds) == 1 else "number" if not kinds else "text"
    able = {"text": not whole, "number": written == [_DIGITS]}.get(kind_found, False)
    dates = form.dates.get(name) or (written[0] if able and written else None)
    return _Facts(
        name,
        rows,
        missing,
        None if many else len(known),
        unique and missing == 0 and bool(rows),
        "date" if dates else kind_found,  # type: ignore[arg-type]
        whole,
        None if kind_found == "date" else dates,
        dates == _DAY_FIRST and _MONTH_FIRST in written,
        long,
    )


def _kind(present: pd.Series) -> str:
    if is_date(present):
        return "date"
    try:
        return kind_of(present)
    except DataError:
        return "other"


def _reads(texts: np.ndarray, form: str) -> bool:
    """Whether texts are all dates of this form; a few are looked at first."""
    few = pd.Series(texts[:20])
    for part in (few, pd.Series(texts)):
        if pd.to_datetime(part, format=form, errors="coerce", utc=True).isna().any():
            return False
    return True


def _missing_signs(table: Table, form: TableFormat) -> tuple[str, ...]:
    """Signs of a missing cell: '?' anywhere, others among numbers only."""
    signs: dict[str, None] = {}
    number = COMMA if form.decimal == "," else NUMBER
    for name in table.columns:
        found, others = Counter[str](), 0
        for block in column_blocks(table, name):
            present = block.dropna()
            if not len(present) or _kind(present) != "text":
                break
            for text in as_texts(pd.Series(present.unique())):
                if text.lower() in _SIGNS:
                    found[text] += 1
                elif not (number.fullmatch(text) or NUMBER.fullmatch(text)):
                    others += 1
        signs |= dict.fromkeys(sign for sign in found if sign == "?" or not others)
    return tuple(signs)


def _id_of(facts: Mapping[str, _Facts], rows: int, label: str | None) -> str:
    """The column whose cells name the rows: by its name, else the first that can."""
    able = [
        name
        for name, fact in facts.items()
        if fact.unique and name != label and fact.kind in ("number", "text")
    ]
    named = [name for name in able if _KEY_NAME.search(name)]
    if named or able:
        return (named or able)[0]
    close = [name for name in facts if _KEY_NAME.search(name)]
    got = f"{len(facts)} columns, all with cells that are missing or there twice"
    if close:
        fact = facts[close[0]]
        seen = "too many" if fact.different is None else spaced(fact.different)
        got = f"'{close[0]}': {spaced(fact.missing)} missing, {seen} different ids"
    raise DataError(
        "no column of this table names its rows",
        where="data.id",
        got=f"{got}, {spaced(rows)} rows",
        want="a column with one id a row, none of them missing or there twice",
        fix="leave one row for each id, or add a column of row numbers",
    )


@dataclass(frozen=True)
class _Truth:
    """The labels of a sample of the rows, in two parts.

    Attributes:
        rows: positions in the table, ascending.
        fitted: which of them a column is fitted on; it is scored on the others.
        values: axes (rows, classes) of 0 and 1, or (rows, 1) of numbers.
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
            fix="leave those rows out of the table",
        )
    draw = np.random.default_rng(0)
    taken = np.sort(draw.choice(rows, min(rows, SAMPLE_ROWS), replace=False, shuffle=False))
    cells = _cells(table, label, taken, lambda block: block)
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
    table: Table, name: str, taken: np.ndarray, of: Callable[[pd.Series], pd.Series]
) -> pd.Series:
    """What is made of the cells at some rows, which are in ascending order."""
    found, start = [], 0
    for block in column_blocks(table, name):
        low, high = np.searchsorted(taken, (start, start + len(block)))
        found.append(of(block.iloc[taken[low:high] - start]))
        start += len(block)
    return pd.concat(found, ignore_index=True)


def _report(
    table: Table, fact: _Facts, ids: str, label: str | None, truth: _Truth | None, bins: int
) -> ColumnReport:
    kind, becomes, inputs = _becomes(fact, bins)
    notes: list[str] = []
    score = None
    if fact.either:
        notes.append("days and months cannot be told apart; [data.dates] says which is which")
    if fact.name == ids:
        how = (
            "compared as numbers"
            if fact.whole_numbers and not fact.long
            else "compared letter by letter"
        )
        kind, becomes, inputs = "id", f"the row's id, {how}", 0
        if not fact.unique:
            notes.append("ids are missing or there twice")
    elif fact.name == label:
        kind, becomes, inputs = "label", "what is learned", 0
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
    """A column's kind, what it becomes, and how many inputs that is."""
    more, also = (1, ", and whether it is missing") if fact.missing else (0, "")
    if fact.different is not None and fact.different <= 1 and not (fact.missing and fact.different):
        return "constant", "left out: all its cells are alike", 0
    if fact.kind == "other":
        return "other", "left out: neither number, text nor date", 0
    if fact.kind == "date":
        days = min(bins, (fact.different or bins + 1) - 1) if bins else 1
        words = "days in bins" if bins else "days since the median"
        inputs = days + DateColumn.CIRCLES + more
        circles = "month and weekday as points of a circle"
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
        return "text", f"left out: {many} different texts are no categories", 0
    return "category", f"{count + more} inputs: one a category{also}", count + more


def _predicts(table: Table, fact: _Facts, truth: _Truth) -> tuple[float, list[str]]:
    """How well a column alone predicts the label, and what a reader should look at."""
    score, error = _alone(table, fact, truth)
    measure = "R2" if truth.task == "regression" else "AUC"
    shown = f"{measure} {score:.2f} alone, on {spaced(int((~truth.fitted).sum()))} other rows"
    if score >= NEARLY:
        return score, [f"nearly the label itself ({shown}); is it known before the label is?"]
    if score >= ALONE and score - 2 * error > (ALONE + 0.5) / 2:  # a few rows prove nothing
        return score, [f"predicts the label ({shown}); is it known before the label is?"]
    return score, []


def tells_label(
    labelled: tuple[Source, TableReport], other: tuple[Source, TableReport], party: str
) -> list[str]:
    """What another party's columns tell of the label, where both tables are on one machine.

    Args:
        labelled: the label party's table, with a label, and what it holds.
        other: the other party's.
        party: its name, for the lines.

    Raises:
        MisalignedError: the tables have hardly any id in common.
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
            return []  # long ones that are written differently; an alignment has rules for them
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
    """How well a column alone predicts the label on the rows it was not fitted on, and its error.

    The column is cut into at most 20 bins of equal size, or taken by its texts; a bin's guess is
    the mean of its fitted labels, drawn towards the mean of all as if one more row had it.
    """
    kind, fitted = fact.kind, truth.fitted

    def of(block: pd.Series) -> pd.Series:
        if kind == "date":
            since = as_dates(block, fact.written) - pd.Timestamp(0, tz="UTC")
            return pd.Series(since / pd.Timedelta(days=1), dtype=float)
        if kind in ("number", "boolean"):
            return pd.Series(block.to_numpy(dtype=float, na_value=np.nan))
        return pd.Series(as_texts(block))

    cells = _cells(table, fact.name, truth.rows, of)
    codes = pd.factorize(cells)[0]
    if kind != "text" and codes.max(initial=0) >= _BINS and cells[fitted].notna().any():
        edges = np.unique(np.nanquantile(cells[fitted], np.linspace(0, 1, _BINS + 1)[1:-1]))
        codes = np.where(cells.isna(), -1, np.searchsorted(edges, cells.to_numpy(dtype=float)))
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
    """Area under the curve, ties counting half, and its error (Hanley and McNeil 1982, eq. 2)."""
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return 0.5, 0.5
    ranks = pd.Series(scores).rank().to_numpy()
    area = (ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros)
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
    return float(area), float(np.sqrt(max(0.0, spread) / (ones * zeros)))
