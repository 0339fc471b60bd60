import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from vfl.cli import app
from vfl.federation import deployment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def well(vfl):
    """Runs a command that ends well."""

    def run(*arguments):
        done = vfl(*arguments)
        assert done.code == 0, done.err
        return done

    return run


@pytest.fixture
def refused(vfl):
    """Runs a command that refuses what a user has mistaken."""

    def run(*arguments):
        done = vfl(*arguments)
        assert done.code == 2, done.err
        return done

    return run


@pytest.fixture(scope="session")
def made_project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "project"
    assert CliRunner().invoke(app, ["init", str(folder), "--party", "bank"]).exit_code == 0
    return folder


@pytest.fixture
def bank_project(made_project, tmp_path):
    """A project of the feature party "bank", as `vfl init project --party bank` writes it."""
    shutil.copytree(made_project, tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture
def without_worker(monkeypatch):
    """`vfl up` starts no standing worker: its process imports torch and Flower for seconds."""
    monkeypatch.setattr(deployment, "kept_worker_of", lambda whose: nullcontext(lambda: None))


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
