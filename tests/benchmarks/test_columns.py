"""What a label party reads of columns: how they are coded, read, stored and put in a table."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import columns
from benchmarks.columns import (
    PROTECTIONS,
    TASKS,
    ColumnRow,
    Decoded,
    Known,
    blended,
    experiment_of,
    opened,
    picture_of,
    ranks_of,
    reached,
    read_category,
    read_number,
    table,
)
from benchmarks.studies import read_rows, write_rows


def rows(count, columns, seed):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def test_ranks_are_those_among_known_rows():
    ranks = ranks_of(np.array([1.0, 2.0, 3.0, 4.0, 100.0]), np.arange(4))
    assert ranks.tolist() == [0.125, 0.375, 0.625, 0.875, 1.0]


@pytest.mark.parametrize(("reads", "least", "most"), [("own", 0.35, 0.65), ("both", 0.95, 1.0)])
def test_a_category_in_the_cut_is_read_there_alone(reads, least, most):
    cuts, own = rows(400, 4, 0), rows(400, 3, 1)
    labels = (cuts[:, 0] > 0).long()
    known, asked = (Known(own[part], cuts[part]) for part in (slice(100), slice(100, 400)))
    found = read_category(known, labels[:100], asked, labels[100:], reads, 0)
    assert least <= found <= most


def test_a_number_is_read_where_it_is_and_not_from_noise():
    cuts = rows(300, 4, 0)
    ranks = ranks_of((cuts[:, 0] + cuts[:, 1]).numpy(), np.arange(100))
    assert read_number(cuts[:100], ranks[:100], cuts[100:], ranks[100:]) > 0.9
    noise = rows(300, 4, 5)
    assert read_number(noise[:100], ranks[:100], noise[100:], ranks[100:]) < 0.1


def test_a_blend_weighs_each_column_of_pixels_by_least_squares():
    """Beside a loop over columns, by normal equations."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.rand(30, 1, 4, 3, generator=draw)
    held = pictures[torch.arange(30) % 3 == 0]
    asked = [torch.rand(7, 1, 4, 3, generator=draw) for _ in range(2)]
    near = [held + 0.3 * torch.randn(held.shape, generator=draw) for _ in range(2)]
    found = blended([Decoded(*each) for each in zip(near, asked, strict=True)], pictures)
    middle = pictures.mean(0)
    for column in range(3):
        at = (slice(None), 0, slice(None), column)
        seen = np.stack([(each - middle)[at].numpy().ravel() for each in near], 1)
        wanted = (held - middle)[at].numpy().ravel()
        weights = np.linalg.solve(seen.T @ seen, seen.T @ wanted)
        total = sum(w * (each - middle)[at].numpy() for w, each in zip(weights, asked, strict=True))
        assert found[at].numpy() == pytest.approx(middle[0, :, column].numpy() + total, abs=1e-4)


def test_rows_are_stored_and_read_back_and_a_line_is_a_protection(tmp_path):
    name = "bank_marketing"
    found = [
        ColumnRow(name, protection, seed, 0.8, column, "auc", 0.5, both, both, 1.0)
        for seed in (0, 1)
        for protection, both in (("none", 0.9), ("sign:grad=8", 0.7))
        for some in TASKS[name].wanted.values()
        for column in some
    ]
    write_rows(tmp_path / "rows.csv", ColumnRow, found)
    assert read_rows(tmp_path / "rows.csv", ColumnRow) == found
    assert reached(found, "balance") == [0.9, 0.7, 0.9, 0.7]
    lines = table(found).splitlines()
    assert any("sign:grad=8" in line and "0.700" in line for line in lines)
    assert not read_rows(tmp_path / "none.csv", ColumnRow)


BANK = [column for some in TASKS["bank_marketing"].wanted.values() for column in some]


def column_rows(protection, utility, reads):
    """Of one seed for each pair of what own columns and cuts tell of two columns."""
    return [
        ColumnRow("bank_marketing", protection, seed, utility, column, "auc", own, cut, 0.0, 1.0)
        for seed, (own, cut) in enumerate(reads)
        for column in ("housing", "contact")
    ]


def test_what_is_read_counts_from_what_own_columns_tell():
    assert opened(column_rows("none", 0.8, [(0.5, 1.0), (0.6, 0.6)])) == [1.0, 0.0]
    assert opened(column_rows("none", 0.8, [(0.5, 0.4)])) == pytest.approx([-0.2])


def test_the_page_is_made_of_stored_rows_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("VFL_DATA", raising=False)
    page, found = tmp_path / "page.md", column_rows("sign:grad=8", 0.8, [(0.5, 1.0)])
    found = [replace(row, column=one) for row in found[:1] for one in BANK]
    write_rows(page.with_suffix(".csv"), ColumnRow, found)
    columns.bench_columns(tasks=["bank_marketing"], page=page, redraw=True)
    text = page.read_text()
    assert "| nothing sent " in text
    assert "`sign:grad=8`" in (tmp_path / "page_table_bank_marketing.csv").read_text()
    assert "(page_bank_marketing.svg)" in text
    assert (tmp_path / "page_bank_marketing.svg").read_text() == picture_of(found)


def test_all_protections_stand_on_one_picture():
    found = [
        *column_rows("none", 0.8, [(0.5, 1.0), (0.5, 1.0)]),
        *column_rows("nopeek:alpha=1", 0.7, [(0.5, 0.9), (0.5, 0.8)]),
    ]
    drawn = picture_of(found)
    assert "none: auc 0.800, inferred 1.00" in drawn
    assert "nopeek:alpha=1: auc 0.700, inferred 0.70" in drawn
    assert drawn.count('class="whisker spread"') == 1  # of seeds that differ


@pytest.mark.parametrize(
    ("name", "protection"),
    [("bank_marketing", each) for each in PROTECTIONS] + [(each, "beaver") for each in TASKS],
)
def test_every_training_is_a_valid_experiment(name, protection, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "data")
    made = experiment_of(name, protection, 3)
    assert made.seed == 3
    assert set(TASKS[name].wanted) <= set(made.feature_parties)
    plain = experiment_of(name, "none", 3)
    assert (made == plain) is (protection == "none")
