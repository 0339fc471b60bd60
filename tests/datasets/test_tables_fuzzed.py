"""Damaged tables: each is read or refused with a coded error that quotes no cell."""

from __future__ import annotations

import random
from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vfl.core.errors import VFLError
from vfl.datasets import read_table
from vfl.datasets.describe import describe

#: No setting, message or name of a test has these letters.
CELL = "zq8"
CELLS = (
    *("1", "2.5", "-3", "1,5", "€ 1.234,50", "$5,156.91", "(1,234)", "12 %", "5,-", "1e5", "0x1F"),
    *("2024-01-31", "31.12.9999", "0001-01-01", "2024-01-31T10:00:00+02:00", "20240230", "NA"),
    *("", " ", "None", "inf", "nan", "true", f"{CELL}a", f"{CELL}b", '"', "'", "\ufeff", "\0", "é"),
    *("e\u0301", f'"{CELL},{CELL}"', f'"{CELL}\n{CELL}"', "9" * 25, "1" * 400, "\u202f1", "٣"),
)
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1")


@st.composite
def tables(draw):
    """A CSV of odd cells whose bytes are damaged here and there."""
    source = random.Random(draw(st.integers(0, 2**32 - 1)))
    columns, separator = source.randint(1, 5), source.choice(",;\t|")
    lines = [separator.join(f"c{number}" for number in range(columns))]
    for row in range(source.randint(0, 40)):
        cells = [f"{CELL}{row}", *source.choices(CELLS, k=columns)][:columns]
        if source.random() < 0.02:
            cells.append(source.choice(CELLS))
        lines.append(separator.join(cells))
    text = "\n".join(
        [*source.choices(["", "sep=;", "made by us"], k=source.choice([0, 0, 2])), *lines]
    )
    content = bytearray(text.encode(source.choice(ENCODINGS), errors="replace"))
    for _ in range(source.choice([0, 0, 1, 5])):
        if content:
            content[source.randrange(len(content))] = source.randrange(256)
    return bytes(content[: source.choice([len(content), len(content) * 2 // 3])])


@settings(
    max_examples=150,
    derandomize=True,
    deadline=timedelta(seconds=20),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=tables())
def test_every_table_is_read_or_refused_without_a_cell(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    try:
        report = describe(path)
        told = "\n".join(report.lines())
        assert len(read_table(path, report.form)) == report.rows
    except VFLError as refused:
        told = str(refused)
    assert CELL not in told


@pytest.mark.parametrize("seed", range(20))
def test_parquet_of_which_bytes_are_damaged_is_read_or_refused(tmp_path, seed):
    path, source = tmp_path / "table.parquet", random.Random(seed)
    frame = pd.DataFrame({"id": range(50), "x": [f"{CELL}{n % 3}" for n in range(50)]})
    frame.to_parquet(path)
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[source.randrange(len(content))] = source.randrange(256)
    path.write_bytes(content)
    told = ""
    try:
        describe(path)
    except VFLError as refused:
        told = str(refused)
    assert CELL not in told
