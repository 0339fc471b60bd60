"""A party of horizontal trainings with a table of its own, and a server's end to play against."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from vfl.config import read_party_file
from vfl.core.errors import PeerFailedError
from vfl.core.seeds import Secret
from vfl.horizontal import Averager, NoisePlan
from vfl.horizontal.client import build_model
from vfl.horizontal.simulation import Evaluator

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.clientapp import ClientApp

    from vfl.horizontal.flower import HorizontalStrategy, arrays_of
    from vfl.horizontal.party import add_rounds

SMALL = {
    "source": "digits",
    "model": "mlp:hidden=8",
    "clients": 6,
    "sampled": 3,
    "rounds": 3,
    "local_steps": 2,
    "batch_size": 16,
    "test_every": 1,
}
PRIVATE = SMALL | {"epsilon": 8.0}
CLASSES = tuple(map(str, range(10)))


def write_party(folder, consent="", rows=60):
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(rows, 4)), columns=list("abcd"))
    table["digit"] = draw.permutation(np.arange(rows) % 10)
    table["id"] = [f"r{row}" for row in range(rows)]
    table.to_csv(folder / "rows.csv", index=False)
    (folder / "party.toml").write_text(
        'party = "north"\n[data]\nsource = "rows.csv"\nid = "id"\nlabel = "digit"\n'
        f'[consent]\nmodes = ["horizontal"]\n{consent}'
    )
    return read_party_file(folder / "party.toml")


def one_round(party, asked, number=1, run="run", **witness):
    app = ClientApp()
    add_rounds(app, lambda context: party)
    model = build_model(asked, (4,), 10)
    averager = Averager(asked, NoisePlan(), model, Secret.fresh())
    rows = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    evaluator = Evaluator(asked, averager, model, *rows)
    strategy = HorizontalStrategy(averager, evaluator, run, [100], **witness)
    arrays = arrays_of(averager.layers)
    (message,) = strategy.configure_train(number, arrays, ConfigRecord(), None)
    reply = app(message, Context(1, 100, {}, RecordDict(), {}))
    return strategy, reply


def refusal(party, asked, **more):
    strategy, reply = one_round(party, asked, **more)
    with pytest.raises(PeerFailedError) as told:
        strategy.aggregate_train(1, [reply])
    return str(told.value)
