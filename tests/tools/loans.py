"""Loans at a lender with labels, a shop and a registry: cards of one process and of a session."""

import numpy as np
import pandas as pd
from played_session import PlayedSession
from stand_in_flower import Flower

from vfl.config import Experiment
from vfl.training.run import train
from vfl.trees.scorecard.loaded import LoadedCard

ROWS, OTHERS = 1500, ("shop", "registry")
PARTIES = {"lender": {"columns": ["income"]}, "shop": {"columns": ["basket", "city"]},
           "registry": {"columns": ["age"]}}  # fmt: skip


def made_table(rows=ROWS, seed=0):
    """Loans whose odds follow from columns at three parties, with missing cells and texts."""
    draw = np.random.default_rng(seed)
    table = pd.DataFrame({"id": [f"r{row:05}" for row in range(rows)]})
    table["income"], table["basket"], table["age"] = draw.normal(size=(3, rows)).round(3)
    table["city"] = draw.choice(["ulm", "bonn", "jena", "kiel"], rows)
    effect = table.city.map({"ulm": 1.0, "bonn": -1.0, "jena": 0.9, "kiel": -0.9})
    odds = 1.2 * table.income - table.basket + effect + 0.8 * table.age.abs() - 1.0
    table["paid"] = np.where(draw.random(rows) < 1 / (1 + np.exp(-odds)), "good", "bad")
    table.loc[draw.random(rows) < 0.2, "basket"] = np.nan
    return table


def content_of(source, model="scorecard:bad=bad,bins=3", **more):
    return {
        "model": model,
        "data": {"source": str(source), "id": "id", "validation": 0.2, **more.pop("data", {})},
        "parties": PARTIES,
        "label": {"party": "lender", "column": "paid"},
        "train": {"epochs": 1},
        **more,
    }


def trained(folder, table, model="scorecard:bad=bad,bins=3", **more):
    table.to_csv(folder / "loans.csv", index=False)
    experiment = Experiment.model_validate(content_of(folder / "loans.csv", model, **more))
    summary = train(experiment, folder, "run")
    return LoadedCard(folder / "run"), summary


COLUMNS = "scorecard:bad=bad,bins=3,rising=basket,reasons=column"
ACCEPTS = '[consent]\nmodels = ["scorecard:*"]\nmodes = ["train", "evaluate", "predict", "serve"]\n'


class Session(PlayedSession):
    """The same loans at a lender with labels, a shop and a registry, over streams.

    Args:
        folder: folder of all parties' folders.
        model: model of the experiment.
        helper: name of a further party without data, if the model has one.
    """

    def __init__(self, folder, model=COLUMNS, helper=None):
        content = content_of("", model)
        content |= {
            "data": {"validation": 0.2},
            "parties": {name: {} for name in ("lender", *OTHERS)},
            "label": {"party": "lender"},
            "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 60.0},
        }
        streams = (*OTHERS, helper) if helper else OTHERS
        super().__init__(folder, Flower(streams), content)
        table = made_table()
        for name, own in PARTIES.items():
            (folder / name).mkdir()
            columns = [*own["columns"], *(["paid"] if name == "lender" else [])]
            table[["id", *columns]].to_csv(folder / name / "data.csv", index=False)
            self.describe(name, ACCEPTS)
        if helper:
            (folder / helper).mkdir()
            self.write(helper, f'party = "{helper}"\nrole = "dealer"\n{ACCEPTS}')
        self.introduce(*streams)

    def describe(self, name, more=""):
        """Write a party's own file, with more settings."""
        label = 'label = "paid"\n' if name == "lender" else ""
        data = f'[data]\nsource = "data.csv"\nid = "id"\npredict = "data.csv"\n{label}'
        self.write(name, f'party = "{name}"\n{data}{more}')
