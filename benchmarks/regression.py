"""Regressions over columns of several parties: seconds, bytes, and error against a central fit.

    python -m benchmarks.regression --rows 100000 --columns 40

All parties are threads of one process and exchange the same frames as in a federation. Times cover
the whole training, but not the reading of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pandas as pd

from benchmarks import harness
from vfl.config import Experiment
from vfl.training.run import train
from vfl.trees.newton import Fit, family, fit, local_sums, outcome_of

Family = Literal["linear", "logistic", "poisson"]
_FAMILIES = {"linear": "gaussian", "logistic": "binomial", "poisson": "poisson"}
_LABEL = "label"


@dataclass(frozen=True, slots=True)
class RegressionRow:
    """Results of one family of regressions.

    Attributes:
        family: "linear", "logistic" or "poisson".
        train_s: seconds of the joint training.
        central_s: seconds of the same fit with all columns in one process.
        sent_bytes: bytes that all parties sent; a relayed byte counts at its sender.
        helper_bytes: bytes that the helper sent.
        coefficient_error: largest difference of the coefficients of standardised columns from the
            central fit.
        error_error: largest relative difference of the standard errors from the central fit.
    """

    family: str
    train_s: float
    central_s: float
    sent_bytes: int
    helper_bytes: int
    coefficient_error: float
    error_error: float


def bench_regression(
    rows: int = 100_000,
    *,
    columns: int = 40,
    parties: int = 3,
    families: Sequence[Family] = ("linear", "logistic", "poisson"),
    seed: int = 0,
) -> list[RegressionRow]:
    """Measure regressions over several parties' columns, and the same fit on all columns together.

    Args:
        rows: training rows.
        columns: number of columns of all parties together.
        parties: number of parties that divide the columns evenly; the last party has the labels.
        families: families of regressions to measure.
        seed: seed of the table.
    """
    return [_measured(rows, columns, parties, one, seed) for one in families]


def _measured(rows: int, columns: int, parties: int, name: str, seed: int) -> RegressionRow:
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((rows, columns), dtype=np.float32)
    inputs[:, 1:] += 0.5 * inputs[:, :-1]  # neighbouring columns are correlated
    margins = inputs @ (draw.standard_normal(columns) / np.sqrt(columns)) / 2
    labels = {
        "linear": lambda: margins + draw.standard_normal(rows),
        "logistic": lambda: draw.random(rows) < 1 / (1 + np.exp(-margins)),
        "poisson": lambda: draw.poisson(np.exp(margins)),
    }[name]()
    names = [f"c{at}" for at in range(columns)]
    table = pd.DataFrame(inputs, columns=names)
    table[_LABEL] = labels.astype(np.float32 if name == "linear" else np.int64)
    shares = [list(one) for one in np.array_split(names, parties)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        table.to_parquet(path)
        experiment = Experiment.model_validate({
            "model": f"regression:family={name}",
            "data": {"source": str(path), "validation": 0.0, "test": 0.0},
            "parties": {f"p{at}": {"columns": own} for at, own in enumerate(shares)},
            "label": {
                "party": f"p{parties - 1}",
                "column": _LABEL,
                "task": "classification" if name == "logistic" else "regression",
            },
            "train": {"epochs": 1},
        })  # fmt: skip
        found = train(experiment, Path(folder), "run")
    with harness.measured() as cost:
        central = _central(table, name)
    told = {(one["party"], one["column"]): one for one in found["regression"]["columns"]}
    last = f"p{parties - 1}"
    mine = [told[last, "intercept"]]
    for at, own in enumerate(shares):
        mine += [told[f"p{at}", name if f"p{at}" == last else 1 + place]
                 for place, name in enumerate(own)]  # fmt: skip
    coefficients = np.array([one["coefficient"] for one in mine])
    errors = np.array([one["standard_error"] for one in mine])
    traffic = found["traffic"]
    return RegressionRow(
        name,
        found["seconds"],
        cost.wall_s,
        sum(one["wire_bytes"] for one in traffic),
        sum(one["wire_bytes"] for one in traffic if one["party"] == "helper"),
        float(np.abs(coefficients - central.coefficients).max()),
        float(np.abs(errors / central.standard_errors - 1).max()),
    )


def _central(table: pd.DataFrame, name: str) -> Fit:
    of = family(_FAMILIES[name])
    inputs = table.drop(columns=_LABEL).to_numpy(float)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    inputs = np.column_stack([np.ones(len(table)), inputs])
    labels = table[_LABEL].to_numpy(float)
    return fit(of, outcome_of(of, inputs.T @ labels, labels), local_sums(of, inputs))


TABLE = harness.table(
    ("family", "<10", "family"),
    ("s", ">8.1f", "train_s"),
    ("in one place", ">13.1f", "central_s"),
    ("MB sent", ">9.1f", lambda row: row.sent_bytes / 1e6),
    ("by helper", ">10.1f", lambda row: row.helper_bytes / 1e6),
    ("coefficients off", ">17.1e", "coefficient_error"),
    ("errors off", ">11.1e", "error_error"),
)


main = harness.command(bench_regression, TABLE)


if __name__ == "__main__":
    main()
