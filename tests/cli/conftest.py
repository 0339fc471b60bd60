from pathlib import Path

import numpy as np
import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def breast_cancer():
    return EXAMPLES / "breast_cancer.toml"


@pytest.fixture
def table(tmp_path):
    """A table of 200 loans whose label follows from two columns."""
    draw = np.random.default_rng(0)
    income, debt = draw.normal(size=(2, 200))
    frame = pd.DataFrame(
        {
            "customer": [f"c{number:03d}" for number in range(200)],
            "income": income,
            "debt": debt,
            "town": draw.choice(["Aa", "Bb", "Cc"], 200),
            "paid": np.where(income > debt, "yes", "no"),
        }
    )
    frame.to_csv(tmp_path / "loans.csv", index=False)
    return frame


LOANS = """\
name = "loans"

[data]
source = "loans.csv"
id = "customer"

[parties.bank]
width = 4
bottom = "mlp:hidden=8"
columns = ["income", "town"]

[parties.shop]
width = 4
bottom = "mlp:hidden=8"
columns = ["debt"]

[label]
party = "lender"
column = "paid"
top = "linear"

[train]
epochs = 3
"""


@pytest.fixture
def loans(tmp_path, table):
    path = tmp_path / "loans.toml"
    path.write_text(LOANS)
    return path
