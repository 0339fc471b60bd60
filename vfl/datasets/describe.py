"""Description of a table, column by column: format, kinds, ids, dates, and predictors of the label.

A report joins the facts about the columns (`facts`) with their scores as predictors (`alone`). The
report contains names, kinds and counts, but no cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from vfl.core.errors import ConfigError, DataError, MisalignedError
from vfl.core.sources import is_database
from vfl.core.text import printable
from vfl.datasets.alignment.join import align
from vfl.datasets.alone import Truth, sampled, scores
from vfl.datasets.csv_file import is_csv, may_be_thousands, sniff
from vfl.datasets.encode import MAX_CATEGORIES, DateColumn
from vfl.datasets.encodings import WESTERN
from vfl.datasets.facts import Facts, facts_of
from vfl.datasets.files import column_names, first_rows, read_table
from vfl.datasets.repeats import Repeats
from vfl.datasets.table import (
    AS_TEXT,
    OwnTable,
    Source,
    Table,
    TableFormat,
    check_column,
    id_columns,
    row_blocks,
    spaced,
)

Role = Literal["id", "label", "number", "boolean", "category", "date", "text", "constant", "other"]

SAMPLE_ROWS = 100_000  # number of sampled rows that score columns
ALONE, NEARLY = 0.75, 0.99  # AUC or R2 of one column that gives a warning
FEW_CLASSES = 20  # largest number of different whole numbers that count as classes
_TOP_ROWS = 1000
RARE = 0.2  # share of the rarer of two classes below which a warning suggests class weights
_FEW_NUMBERS = 5  # a column with fewer different numbers may contain categories, such as sizes
_KEY_NAME = re.compile(
    r"(^|[^a-z])(u?u?id|key|nr|no|number|account|customer|client|member|person|patient|case|row)s?$",
    re.IGNORECASE,
)


#: The form in which spreadsheets write long numbers, which loses the last digits.
_ROUNDED = r"\d(\.\d+)?[eE]\+\d+"
_SAME_CLASS = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class ColumnReport:
    """Description of a column and of its inputs; it contains no value of a cell.

    Attributes:
        name: name of the column.
        kind: kind of the column's values.
        missing: share of rows in which the cell is missing.
        different: number of different values; None if they are too many to count.
        becomes: description of the inputs that the column becomes.
        inputs: number of model inputs that the column becomes; 0 if it is left out.
        notes: warnings about the column.
        score: AUC (R2 for a regression) of a prediction of the label from this column alone, on
            held-out rows; None without a label, and for columns that cannot become inputs.
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
        """Return this description, with the number of inputs that a party's encoder made."""
        if inputs == self.inputs:
            return self
        if not inputs:
            return replace(self, inputs=0, becomes="left out: not among the columns")
        becomes = re.sub(r"^\d+ inputs?|^left out", f"{inputs} inputs", self.becomes)
        return replace(self, inputs=inputs, becomes=becomes)


@dataclass(frozen=True)
class TableReport:
    """Description of a table, and the settings of a party file that can read it.

    Attributes:
        rows: number of rows.
        columns: descriptions of the columns, in the table's order.
        form: format of the table.
        id: name of the id column.
        label: name of the label column, if there is one.
        task: learning task for the label.
        notes: warnings about the whole table.
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
        """Return the names of the columns that become inputs."""
        return [column.name for column in self.columns if column.inputs]

    @property
    def left_out(self) -> list[str]:
        """Return lines with the names of all columns without inputs, and the reasons."""
        idle = {
            one.name: one.becomes
            for one in self.columns
            if not one.inputs and one.kind not in ("id", "label")
        }
        return left_out_lines(idle, "left out:")

    def settings(self) -> dict[str, Any]:
        """Return the [data] table of a party file, without source and default values."""
        plain, form = TableFormat(), asdict(self.form)
        own = {name: value for name, value in form.items() if value != getattr(plain, name)}
        if self.form.repeats is not None:
            own["repeats"] = self.form.repeats.how
        own["columns"] = self.features
        return own | {"id": self.id} | ({"label": self.label} if self.label else {})

    def lines(self) -> list[str]:
        """Return the descriptions of all columns as lines of text."""
        return table_of_columns(self.columns, self.notes)


def table_of_columns(columns: Sequence[ColumnReport], notes: Sequence[str] = ()) -> list[str]:
    """Return lines with each column's kind, share of missing cells, inputs; then the warnings."""
    columns = [replace(column, name=printable(column.name)) for column in columns]
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
    say: Callable[[str], None] | None = None,
    repeats: str | None = None,
    encoding: str | None = None,
) -> TableReport:
    """Describe a table.

    Args:
        source: a CSV or Parquet file, a database, or a frame.
        form: format of the table; None detects the format.
        id_column: name of the id column; None finds a possible one.
        label: name of the label column; None if the table has no label.
        task: "classification" or "regression"; None derives the task from the labels.
        query: query to a database; used only if `form` is None.
        say: function that receives a progress line after every few thousand columns.
        repeats: rule for rows with the same id; used only if `form` is None; see `Repeats`. A rule
            needs `id_column`.
        encoding: encoding of a CSV; used only if `form` is None; None detects the encoding too.

    Raises:
        MissingColumnError: the table lacks the id column or the label.
        ConfigError: `repeats` is set without `id_column`.
        DataError: the table cannot be read, no column identifies its rows, or the label cannot be
            predicted.
    """
    found_out = form is None
    form = replace(sniff(source, encoding), query=query) if form is None else form
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
    facts = facts_of(table, names, form, id_column, say)
    letters = dict[str, Facts]()
    if found_out:
        classes = label if is_csv(source) and task != "regression" else None
        form = _found_form(source, form, facts, classes)
        if changed := [name for name, fact in facts.items() if fact.changed(form)]:
            table = read_table(source, form)
            found = facts_of(table, changed, form, id_column)
            facts |= {name: replace(fact, units=facts[name].units) for name, fact in found.items()}
        letters = _of_long_numbers(source, form, facts)
    ids = id_column or _id_of(source, facts | letters, len(table), label, form)
    facts[ids] = letters.get(ids, facts[ids])
    if facts[ids].kind == "other":
        raise DataError(
            f"the id column '{ids}' contains neither texts nor numbers",
            where="data.id",
            fix=AS_TEXT,
        )
    _require_exact(source, form, facts[ids])
    whole = facts[ids].whole_numbers
    if found_out:
        short = whole and not facts[ids].long
        form = replace(form, id_type="number" if short else "text")
        if repeats is not None:
            form = replace(form, repeats=_repeats(id_column, repeats))
            table = read_table(source, form)
            facts = facts_of(table, names, form, id_column, say)
    truth = _truth(table, label, facts, task, len(table)) if label is not None else None
    scored = _scored(table, facts.values(), (ids, label), truth, form, say)
    columns = tuple(
        _report(fact, ids, label, truth, scored.get(fact.name), form) for fact in facts.values()
    )
    notes = () if truth is None else truth.notes
    if found_out:
        notes += _doubts(source, table, facts, form, encoding)
    return TableReport(
        len(table), columns, form, ids, label, None if truth is None else truth.task, notes, whole
    )


def _of_long_numbers(
    source: Source, form: TableFormat, facts: dict[str, Facts]
) -> dict[str, Facts]:
    """Return the facts about columns of long numbers, read as texts, which keep all digits.

    In `facts`, these columns are marked as rounded if they contain only whole numbers.
    """
    if not (long := [name for name, fact in facts.items() if fact.long]):
        return {}
    found = facts_of(read_table(source, form, long, columns=long), long, form)
    for name, fact in found.items():  # float64 holds all digits of 1.5e20
        facts[name] = replace(facts[name], rounded=fact.whole_numbers)
    return {name: replace(fact, long=True) for name, fact in found.items()}


def _doubts(
    source: Source,
    table: Table,
    facts: Mapping[str, Facts],
    form: TableFormat,
    encoding: str | None,
) -> tuple[str, ...]:
    """Return warnings about a detected format; `encoding` is the one that the user has set."""
    notes = []
    if encoding is None and form.encoding in WESTERN:
        notes.append(
            f"its text is no UTF-8 and is read as Western European ({form.encoding}); if letters "
            "look wrong, set encoding in [data]"
        )
    decimals = [
        name
        for name, fact in facts.items()
        if fact.kind == "number" and not fact.whole_numbers and name not in form.numbers
    ]
    if months := _months(table, decimals):
        how = ", ".join(f'"{name}" = "%m.%Y"' for name in months)
        notes.append(
            "are numbers such as 12.2023 months and years? They are read as decimals; otherwise "
            f"set dates = {{ {how} }} in [data]"
        )
    if grouped := may_be_thousands(source, form, decimals):
        how = ", ".join(f'"{name}" = ","' for name in grouped)
        notes.append(
            "do the points in numbers such as 1.234 group thousands? They are read as decimals; "
            f"otherwise set numbers = {{ {how} }} in [data]"
        )
    return tuple(notes)


def _months(table: Table, names: Sequence[str]) -> list[str]:
    """Return columns whose sampled numbers all look like month and year, such as 12.2023."""
    if not names:
        return []
    block = next(iter(row_blocks(table, names, _TOP_ROWS)))
    cells = block.to_numpy(dtype=float, na_value=np.nan)
    missing, within = np.isnan(cells), (cells >= 1) & (cells < 13)
    years = np.round(np.where(within, cells, 0) % 1 * 1e4, 6)
    dated = within & (years >= 1900) & (years < 2100) & (years % 1 == 0)
    able = (dated | missing).all(0) & (dated & (years % 100 != 0)).any(0)
    return [name for name, one in zip(names, able, strict=True) if one]


def _found_form(
    source: Source, form: TableFormat, facts: Mapping[str, Facts], classes: str | None
) -> TableFormat:
    """Add words for missing cells, forms of dates and numbers; `classes` is the label column."""
    missing: dict[str, tuple[str, ...]] = {
        name: fact.signs for name, fact in facts.items() if fact.signs
    }
    anywhere = tuple({sign for signs in missing.values() for sign in signs if sign == "?"})
    missing = {name: signs for name, signs in missing.items() if signs != anywhere}
    if classes is not None and facts[classes].missing:
        # A class may have the text None as its name.
        cells = read_table(source, form, [classes], columns=[classes])
        texts = facts_of(cells, [classes], form)[classes]
        if texts.words and texts.different is not None and texts.different <= FEW_CLASSES:
            missing[classes] = ()
    if missing and anywhere:
        missing["*"] = anywhere
    dates = {name: fact.dates for name, fact in facts.items() if fact.dates}
    numbers = {name: fact.decimal for name, fact in facts.items() if fact.decimal}
    return replace(form, missing=missing or anywhere, dates=dates, numbers=numbers)


def _require_exact(source: Source, form: TableFormat, fact: Facts) -> None:
    """Refuse ids that a spreadsheet has rounded, such as 1.2E+10."""
    if not is_csv(source) or not (fact.whole_numbers or fact.long):
        return
    texts = read_table(source, form, [fact.name], columns=[fact.name])[fact.name]
    if rounded := int(texts.astype(str).str.fullmatch(_ROUNDED).sum()):
        raise DataError(
            "a spreadsheet has rounded the ids of this table",
            where="data.id",
            got=f"{spaced(rounded)} of {spaced(fact.rows)} cells of '{fact.name}' have an exponent "
            "(E+) in place of their last digits",
            want="ids with all their digits",
            fix="export the table again, with that column formatted as text",
        )


def _id_of(
    source: Source, facts: Mapping[str, Facts], rows: int, label: str | None, form: TableFormat
) -> str:
    """Return the column that identifies the rows, preferably one whose name says so.

    Raises:
        DataError: no column identifies the rows.
    """
    may_be = {
        name: fact
        for name, fact in facts.items()
        if name != label and (fact.kind == "text" or (fact.kind == "number" and fact.whole_numbers))
    }
    able = [name for name, fact in may_be.items() if fact.unique]
    named = [name for name in able if _KEY_NAME.search(name)]
    nearly = [
        name
        for name, fact in may_be.items()
        if _KEY_NAME.search(name) and 0 < fact.missing + fact.repeated <= rows // 20
    ]
    if named or (able and not nearly):
        return (named or able)[0]
    close = nearly or [name for name in may_be if _KEY_NAME.search(name)] or list(may_be)
    unread = [name for name, fact in facts.items() if fact.kind == "other"]
    got, fix = f"{len(facts)} columns, none of them with texts or whole numbers", None
    if keys := list(filter(_KEY_NAME.search, unread)):
        got = f"'{keys[0]}' contains neither texts nor numbers"
        fix = f"if it is the id, {AS_TEXT}"
    elif close:
        fact = min((facts[name] for name in close), key=lambda fact: fact.repeated + fact.missing)
        _require_exact(source, form, fact)
        different = fact.rows - fact.missing - fact.repeated
        got = (
            f"'{fact.name}' comes closest: {spaced(different)} different ids in "
            f"{spaced(rows)} rows; {spaced(fact.repeated)} rows repeat another row's id, "
            f"{spaced(fact.missing)} have none"
        )
        fix = "delete the rows without an id, such as a line of totals or units"
        fix = _one_row_each(source, fact, facts) if fact.repeated else fix
    if isinstance(source, pd.DataFrame) and any(source.index.names):
        fix = "the index of a frame is not a column: pass frame.reset_index()"
    raise DataError(
        "no column of this table identifies its rows",
        where="data.id",
        got=got,
        want="an id column: one id for each row, each id once, and the same ids at every party",
        fix=fix or "add the column by which the parties identify the same rows",
    )


def _one_row_each(source: Source, ids: Facts, facts: Mapping[str, Facts]) -> str:
    """Return advice on how to get one row per id."""
    if is_database(source):
        return f"make one row of each '{ids.name}' in the query: the latest, or an aggregate"
    dated = next((name for name, fact in facts.items() if fact.kind == "date"), None)
    named = f"--id {ids.name} --repeats"
    how = f'"{named} latest:{dated}" keeps the latest row' if dated else f'"{named} first"'
    keeps = how if dated else f"{how} keeps the first row"
    return (
        f"if '{ids.name}' is the id, {keeps} of each, and \"mean\" averages them; for vfl join, "
        "set repeats in [data] instead"
    )


def _repeats(id_column: str | None, how: str) -> Repeats:
    if id_column is None:
        raise ConfigError(
            "repeated ids need the name of the id column",
            where="--repeats, or repeats in [data]",
            fix="add --id COLUMN",
        )
    return Repeats(id_column, how)


def _truth(
    table: Table, label: str, facts: Mapping[str, Facts], task: str | None, rows: int
) -> Truth:
    fact = facts[label]
    unread = {"date": "dates", "other": "values that are neither number nor text"}.get(fact.kind)
    if fact.mixes_units:
        unread = "amounts in several currencies or units"
    if unread is not None:
        raise DataError(
            f"the label column '{label}' contains neither classes nor numbers",
            where="data.label",
            got=unread,
            want="classes as text or whole numbers, or numbers for a regression",
            fix="name another column, or make it a number, such as days until a date, or amounts "
            "in one currency",
        )
    if task is None:
        few = fact.different is not None and fact.different <= FEW_CLASSES
        measured = fact.kind == "number" and not (fact.whole_numbers and few)
        task = "regression" if measured else "classification"
    if fact.missing:
        raise DataError(
            f"the label column '{label}' has missing cells",
            where="data.label",
            got=f"{spaced(fact.missing)} of {spaced(fact.rows)} rows",
            fix="leave these rows out of the table",
        )
    draw = np.random.default_rng(0)
    taken = np.sort(draw.choice(rows, min(rows, SAMPLE_ROWS), replace=False, shuffle=False))
    parts = [block[label] for block in sampled(table, [label], taken)]
    cells = pd.concat(parts, ignore_index=True)
    fitted = draw.permutation(len(taken)) < len(taken) // 2
    if task == "regression":
        numbers = cells.astype(float)
        return Truth(task, taken, fitted, np.stack([numbers, numbers.rank()], axis=1))
    codes, classes = pd.factorize(cells)
    if len(classes) < 2 and len(cells) == rows:
        raise DataError(
            f"the label column '{label}' has only one class",
            where="data.label",
            want="at least 2 classes",
            fix="name another column, or add rows of other classes",
        )
    counts = np.bincount(codes)
    frequent = np.argsort(-counts)[:FEW_CLASSES]
    notes = [f"{len(classes)} classes, the rarest with {counts.min() / len(codes):.1%} of the rows"]
    if counts.min() / len(codes) < RARE and len(classes) == 2:
        notes.append('rare labels: see label.class_weight = "balanced" of the experiment')
    folded = {_SAME_CLASS.get(name, name) for name in map(str.casefold, map(str, classes))}
    if alike := len(classes) - len(folded):
        notes.append(
            f"{alike} of the classes differ from another one only in its spelling (capitals, or "
            "True for 1); write each class in one way"
        )
    return Truth(task, taken, fitted, (codes[:, None] == frequent) * 1.0, tuple(notes))


def _scored(
    table: Table,
    facts: Collection[Facts],
    beside: tuple[str, str | None],
    truth: Truth | None,
    form: TableFormat,
    say: Callable[[str], None] | None,
) -> dict[str, tuple[float, float]]:
    """Return the scores of columns that may become inputs; an empty dict if there is no label."""
    if truth is None:
        return {}
    kinds = {fact.name: _becomes(fact, form)[0] for fact in facts if fact.name not in beside}
    able = [fact for fact in facts if kinds.get(fact.name, "other") not in ("other", "constant")]
    return scores(table, able, truth, say)


def _report(
    fact: Facts,
    ids: str,
    label: str | None,
    truth: Truth | None,
    scored: tuple[float, float] | None,
    form: TableFormat,
) -> ColumnReport:
    kind, becomes, inputs = _becomes(fact, form)
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
        present = fact.rows - fact.missing
        if 0 < (others := present - fact.numeric) <= present // 20 and fact.kind == "text":
            notes.append(
                f"{spaced(others)} of {spaced(present)} ids are no numbers: delete lines of "
                "totals, units or names among the rows"
            )
    elif fact.name == label:
        kind, becomes, inputs = "label", "learning target", 0
    elif kind in ("text", "category"):
        notes += _mostly_others(fact)
    if "" in fact.units and fact.units != {""} and not fact.mixes_units:
        notes.append(
            "some cells have a percent sign and count as hundredths, others count as they stand; "
            "write them in one way"
            if "%" in fact.units
            else "some amounts name a currency and others none; all are read as one currency"
        )
    if fact.rounded and kind == "number":
        notes.append(
            "some whole numbers are beyond 2**53 (9e15): vfl reads about 16 digits of them, and "
            "inputs keep about 7; if they are codes, leave the column out"
        )
    if fact.infinite:
        notes.append(
            "some numbers are infinite or beyond 1e150, which training refuses; name them in "
            "'missing', or mend them"
        )
    if truth is not None and scored is not None:
        score = scored[0]
        notes += _predicts(scored, truth)
    return ColumnReport(
        fact.name,
        kind,
        fact.share_missing,
        fact.different,
        becomes,
        inputs,
        tuple(notes),
        None if score is None else round(score, 3) + 0.0,  # without -0.0
    )


def _mostly_others(fact: Facts) -> list[str]:
    """Return a warning if at least half of a column's texts are numbers or look like dates."""
    present = fact.rows - fact.missing
    if fact.dated >= _FEW_NUMBERS and 2 * fact.dated >= present:
        return [
            f"{spaced(fact.dated)} of {spaced(present)} cells look like dates, but no form reads "
            "all cells; write them in one order and language, mend impossible dates, and name the "
            "words for a missing cell in 'missing'"
        ]
    if not _FEW_NUMBERS <= fact.numeric < present <= 2 * fact.numeric:
        return []
    return [
        f"{spaced(fact.numeric)} of {spaced(present)} cells are numbers; name the other ones in "
        "'missing' if they mean a missing cell, or mend them"
    ]


def _becomes(fact: Facts, form: TableFormat) -> tuple[Role, str, int]:
    """Return a column's kind, the description of its inputs, and their number."""
    bins = form.bins
    more, also = (1, ", and whether it is missing") if fact.missing else (0, "")
    if fact.kind == "other":
        return "other", "left out: neither number, text nor date", 0
    if fact.different is not None and fact.different <= 1 and not (fact.missing and fact.different):
        if fact.long:
            return "constant", "left out: the first 15 digits of all numbers are equal", 0
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
    if fact.mixes_units:
        return "text", "left out: amounts in several currencies or units; convert them into one", 0
    count = fact.different
    present = fact.rows - fact.missing
    if count is None or count > MAX_CATEGORIES or (count > 20 and count > present / 2):
        if form.tokenizer is not None and not form.cells:
            from vfl.datasets.sources.texts import TEXT_LENGTH

            length = form.length or TEXT_LENGTH
            return "text", f"{length} inputs: tokens of '{form.tokenizer}'", length
        many = "many" if count is None else spaced(count)
        return "text", f"left out: {many} different texts are too many categories", 0
    return "category", f"{count + more} inputs: one for each category{also}", count + more


def _predicts(scored: tuple[float, float], truth: Truth) -> list[str]:
    """Return a warning if a column alone predicts the label; `scored` is its score and error."""
    score, error = scored
    measure = "R2" if truth.task == "regression" else "AUC"
    shown = f"{measure} {score:.2f} alone, on {spaced(int((~truth.fitted).sum()))} other rows"
    if score >= NEARLY:
        return [f"nearly equal to the label ({shown}); is it known before the label is?"]
    if score >= ALONE and score - 2 * error > (ALONE + 0.5) / 2:  # a score on few rows is uncertain
        return [f"predicts the label ({shown}); is it known before the label is?"]
    return []


def left_out(table: OwnTable, read: Collection[str], begin: str) -> list[str]:
    """Return lines with the names of all columns that no model reads, and the reasons.

    Args:
        table: the table; its id columns never become inputs, so they get no line.
        read: names of the columns that become inputs or labels.
        begin: text with which each line begins.
    """
    names = column_names(table.source, table.form)
    known = {*id_columns(table.id_column, names), *read}
    idle = [name for name in names if name not in known]
    rows = first_rows(table.source, table.form, idle) if idle else ()
    facts = facts_of(rows, idle, table.form) if len(rows) else {}  # type: ignore[arg-type]
    becomes = {name: _becomes(fact, table.form)[1] for name, fact in facts.items()}
    return left_out_lines(becomes, begin)


def left_out_lines(becomes: Mapping[str, str], begin: str) -> list[str]:
    """Return one line for each reason, with the names of all its columns.

    >>> for line in left_out_lines({"a": "left out: too long", "b": "1 input"}, "bank leaves out"):
    ...     print(line)
    bank leaves out 'a' (too long)
    bank leaves out 'b': add them to some 'columns', or leave them unread
    """
    reasons = dict[str, list[str]]()
    for name, what in becomes.items():
        _, out, why = what.partition("left out: ")
        reasons.setdefault(why if out else "", []).append(f"'{printable(name)}'")
    return [
        f"{begin} {', '.join(names)}"
        + (f" ({why})" if why else ": add them to some 'columns', or leave them unread")
        for why, names in reasons.items()
    ]


def tells_label(
    labelled: tuple[Source, TableReport], other: tuple[Source, TableReport], party: str
) -> list[str]:
    """Return warnings about another party's columns that predict the label; needs both tables.

    Args:
        labelled: the table of the label party, with a label, and its description.
        other: the table of the other party, and its description.
        party: name of the other party, for the lines.

    Raises:
        MisalignedError: ids are missing or repeated, or the tables have very few common ids.
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
            return []  # long ids may be spelled differently; an alignment normalises them
        raise
    labels = frames[_LABELLED]
    facts = facts_of(labels, [own.label], own.form)
    truth = _truth(labels, own.label, facts, own.task, len(labels))
    theirs = facts_of(frames[party], report.features, report.form)
    able = [fact for fact in theirs.values() if fact.kind != "other"]
    return [
        f"look at '{name}' of {party}: {note}"
        for name, scored in scores(frames[party], able, truth).items()
        for note in _predicts(scored, truth)
    ]


_LABELLED = "the label party"  # not a party's name: these have no spaces
