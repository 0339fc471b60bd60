"""Scorecards of three parties: their quality, and the time from CSV files to the finished page.

The tables are credit default and German credit, from the folder that VFL_DATA names, and synthetic
rows. The columns of the synthetic rows have much, little or no information about the label, and
include missing cells and categories. All parties run in one process. Metrics are those of the test
rows; the number after ± is the standard deviation over the seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pandas as pd

from benchmarks import harness
from vfl.config import Experiment
from vfl.core.errors import MissingDataError
from vfl.core.seeds import use_one_thread
from vfl.training.run import train
from vfl.trees.scorecard.loaded import LoadedCard
from vfl.trees.scorecard.page import write_card

Source = Literal["credit", "german", "made"]
LABEL = "bad"
#: Columns of each party; the label party comes first.
_CREDIT = {
    "bank": ("LIMIT_BAL", "BILL_*"),
    "payments": ("PAY_*",),
    "registry": ("SEX", "EDUCATION", "MARRIAGE", "AGE"),
}
_GERMAN = {
    "bank": ("status", "history", "savings", "other_plans", "credits"),
    "shop": ("duration", "purpose", "amount", "rate", "debtors"),
    "registry": (
        "employment", "personal", "residence", "property", "age", "housing", "job", "people",
        "telephone", "foreign",
    ),
}  # fmt: skip
_GERMAN_COLUMNS = (
    "status", "duration", "history", "purpose", "amount", "savings", "employment", "rate",
    "personal", "debtors", "residence", "property", "age", "other_plans", "housing", "credits",
    "job", "people", "telephone", "foreign", LABEL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScorecardRow:
    """Scorecards of one table, over all seeds.

    Attributes:
        source: name of the table.
        rows, columns: size of the table, all parties together.
        on_card: mean number of columns on the scorecard.
        auc, ks, stability: means over the seeds on the test rows. Stability compares the scores of
            the test rows with those of the training rows; it is NaN where the training scores are
            missing.
        auc_spread, ks_spread: standard deviations over the seeds; 0 for a single seed.
        cpu_s, wall_s: mean processor and wall time from the CSV files to the page, in seconds.
        sent_bytes: mean payload bytes of a training.
    """

    source: str
    rows: int
    columns: int
    on_card: float
    auc: float
    auc_spread: float
    ks: float
    ks_spread: float
    stability: float
    cpu_s: float
    wall_s: float
    sent_bytes: float


def bench_scorecard(
    sources: Sequence[Source] = ("credit", "german", "made"),
    *,
    seeds: int = 5,
    rows: int = 100_000,
    columns: int = 40,
    options: str = "",
) -> list[ScorecardRow]:
    """Measure scorecards over three parties.

    Args:
        sources: tables.
        seeds: number of trainings of each scorecard, each with a different split of the rows.
        rows: number of synthetic rows.
        columns: number of synthetic columns, of all parties together.
        options: options of the scorecard model.
    """
    use_one_thread()
    found = []
    for source in sources:
        harness.say(source)
        table, parties = _table(source, rows, columns)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "table.csv"
            table.to_csv(path, index_label="row")
            cards = [_made(path, parties, seed, options) for seed in range(seeds)]
        found.append(_row(source, table, cards))
    return found


@dataclass(frozen=True, slots=True)
class _Made:
    on_card: int
    auc: float
    ks: float
    stability: float
    cpu_s: float
    wall_s: float
    sent_bytes: int


def _made(path: Path, parties: dict[str, tuple[str, ...]], seed: int, options: str) -> _Made:
    """Make one scorecard, from the CSV files to its page."""
    content = {
        "name": "benchmark",
        "seed": seed,
        "model": f"scorecard:{options}" if options else "scorecard",
        "data": {"source": str(path), "id": "row"},
        "parties": {name: {"columns": own} for name, own in parties.items()},
        "label": {"party": next(iter(parties)), "column": LABEL},
        "train": {"epochs": 1},
    }
    with harness.measured() as cost:
        summary = train(Experiment.model_validate(content), path.parent, f"seed_{seed}")
        run = Path(summary["run"])
        write_card(run)
    card = LoadedCard(run).card
    tested = card.scores["test"]
    sent = sum(sum(summary[way].values()) for way in ("bytes_up", "bytes_down"))
    return _Made(
        sum(column.on_card for column in card.columns),
        tested.auc(of=0),
        tested.kolmogorov_smirnov(),
        trained.stability(tested) if (trained := card.scores.get("train")) else math.nan,
        cost.cpu_s,
        cost.wall_s,
        sent,
    )


def _row(source: str, table: pd.DataFrame, cards: Sequence[_Made]) -> ScorecardRow:
    def mean(name: str) -> float:
        return fmean(getattr(one, name) for one in cards)

    def spread(name: str) -> float:
        return stdev(getattr(one, name) for one in cards) if len(cards) > 1 else 0.0

    return ScorecardRow(
        source, len(table), table.shape[1] - 1, mean("on_card"),
        mean("auc"), spread("auc"), mean("ks"), spread("ks"), mean("stability"),
        mean("cpu_s"), mean("wall_s"), mean("sent_bytes"),
    )  # fmt: skip


def _table(
    source: Source, rows: int, columns: int
) -> tuple[pd.DataFrame, dict[str, tuple[str, ...]]]:
    """Return a table with its label, which is 1 for a bad loan, and each party's columns."""
    if source == "made":
        return made_table(rows, columns)
    folder = Path(os.environ.get("VFL_DATA", ""))
    if source == "credit":
        table = pd.read_csv(_found(folder / "credit-default" / "UCI_Credit_Card.csv.gz"))
        table = table.drop(columns="ID")
        return table.rename(columns={table.columns[-1]: LABEL}), _CREDIT
    path = _found(folder / "german-credit" / "german.csv.gz")
    table = pd.read_csv(path, names=_GERMAN_COLUMNS)
    table[LABEL] -= 1  # the value 2 means a bad loan
    return table, _GERMAN


def _found(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(
            "this table is not on this machine", where=str(path), fix="name its folder in VFL_DATA"
        )
    return path


def made_table(rows: int, columns: int) -> tuple[pd.DataFrame, dict[str, tuple[str, ...]]]:
    """Make rows with columns that have much, little or no information about the odds.

    One column in ten is a category, and one in five has missing cells.
    """
    draw = np.random.default_rng(0)
    cells = draw.normal(size=(rows, columns))
    effects = draw.normal(size=columns) * (draw.random(columns) < 0.6) / np.sqrt(columns / 4)
    odds = (cells + 0.3 * cells**2) @ effects - 1.5
    bad = draw.random(rows) < 1 / (1 + np.exp(-odds))
    table = pd.DataFrame(cells.round(4), columns=[f"c{one}" for one in range(columns)])
    for place in range(0, columns, 10):
        table[f"c{place}"] = pd.cut(cells[:, place], 12, labels=list("fblckdaejhig")).astype(str)
    for place in range(3, columns, 5):
        table.loc[draw.random(rows) < 0.1, f"c{place}"] = np.nan
    names = np.array_split(np.array(table.columns), 3)
    parties = {name: tuple(own) for name, own in zip(("bank", "shop", "web"), names, strict=True)}
    return table.assign(**{LABEL: bad.astype(int)}), parties


TABLE = harness.table(
    ("table", "<8", "source"),
    ("rows", ">8,", "rows"),
    ("columns", ">8", "columns"),
    ("on card", ">8.1f", "on_card"),
    ("AUC", ">17", lambda row: f"{row.auc:.4f} ± {row.auc_spread:.4f}"),
    ("KS", ">15", lambda row: f"{row.ks:.3f} ± {row.ks_spread:.3f}"),
    ("stability", ">10", lambda row: f"{row.stability:.4f}" if row.stability >= 0 else "-"),
    ("CPU s", ">7.1f", "cpu_s"),
    ("wall s", ">7.1f", "wall_s"),
    ("MB sent", ">8.2f", lambda row: row.sent_bytes / 1e6),
)


main = harness.command(bench_scorecard, TABLE)


if __name__ == "__main__":
    main()
