"""The parties of sessions that boost trees."""

import numpy as np
import pandas as pd
from played_session import PlayedSession
from stand_in_flower import Flower

from vfl.clients.whole_network import WholeNetworkParty
from vfl.session.store.party_folder import PartyFolder

ROWS, OTHERS = 600, ("bank", "shop")
SPEC = "trees:max_depth=3,max_bin=16"
CONTENT = {
    "model": SPEC,
    "data": {"validation": 0.2},
    "parties": {name: {} for name in (*OTHERS, "lender")},
    "label": {"party": "lender"},
    "train": {"epochs": 6},
    "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "restart_timeout_s": 20.0},
}
ACCEPTS = '[consent]\nmodels = ["trees:*"]\nmodes = ["train", "evaluate", "predict", "serve"]\n'


class TreesSession(PlayedSession):
    """A bank, a shop with texts and missing cells, and a lender with labels and a column."""

    def __init__(self, folder):
        super().__init__(folder, Flower(OTHERS), CONTENT)
        draw = np.random.default_rng(0)
        table = pd.DataFrame({"id": [f"r{row:03}" for row in range(ROWS)]})
        table["income"], table["age"] = draw.normal(size=(2, ROWS))
        table["city"] = draw.choice(["ulm", "bonn", "jena"], ROWS)
        table.loc[draw.random(ROWS) < 0.2, "city"] = None
        table.loc[7, ["income", "age"]] = table.loc[3, ["income", "age"]]
        table.loc[[3, 7], "city"] = ["ulm", "bonn"]
        effect = table.city.map({"ulm": 2, "bonn": -2, "jena": 0}).fillna(0)
        table["paid"] = (2 * table.income + effect + draw.normal(size=ROWS) > 0).astype(int)
        self.table = table
        own = {"bank": ["income"], "shop": ["city"], "lender": ["age", "paid"]}
        for name, columns in own.items():
            (folder / name).mkdir()
            table[["id", *columns]].to_csv(folder / name / "data.csv", index=False)
            new = table[["id", *(one for one in columns if one != "paid")]]
            new.to_csv(folder / name / "new.csv", index=False)
            self.describe(name, ACCEPTS)

    def describe(self, name, more=""):
        label = 'label = "paid"\n' if name == "lender" else ""
        data = f'[data]\nsource = "data.csv"\nid = "id"\npredict = "new.csv"\n{label}'
        self.write(name, f'party = "{name}"\n{data}{more}')

    def kept(self, name):
        path = self.folder / name / "store" / "runs" / "run" / "parties" / name
        return PartyFolder(path)


def lose_once(monkeypatch, name, step):
    """End a party without a word when it comes to an exchange, the first time only."""
    left, play = [1], WholeNetworkParty.play

    def dying(party, start, through, *more):
        def until(schedule):
            for exchange in through(schedule):
                if exchange.step == step and party.name == name and left:
                    left.pop()
                    raise SystemExit
                yield exchange

        return play(party, start, until, *more)

    monkeypatch.setattr(WholeNetworkParty, "play", dying)
