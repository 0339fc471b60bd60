"""What a label party concludes from sums of gradients over bins: most of the bins themselves."""

import numpy as np
import pandas as pd
import pytest

from vfl.config import Experiment
from vfl.training.run import load_data, session_of
from vfl.trees.attacks.sums import solver

ROWS, BINS = 500, 8


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the label party of a session on shares sees, and the bins that nobody sends it."""
    folder = tmp_path_factory.mktemp("sums")
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(ROWS, 4)), columns=list("abcd"))
    table["paid"] = (table.a + table.c + draw.normal(size=ROWS) > 0).astype(int)
    table.to_csv(folder / "table.csv", index=False)
    content = {
        "model": f"trees:max_depth=4,max_bin={BINS},protect=shared,nodes=hidden",
        "data": {"source": str(folder / "table.csv"), "test": 0.2},
        "parties": {"bank": {"columns": ["a", "b"]}, "shop": {"columns": ["c", "d"]}},
        "label": {"party": "shop", "column": "paid"},
        "train": {"epochs": 30},
    }
    experiment = Experiment.model_validate(content)
    data = load_data(experiment)
    session, nodes = session_of(experiment, data, "train"), []
    session.label.network.watch = nodes.append
    session.run()
    bank = next(one.network for one in session.clients if one.name == "bank")
    return nodes, bank._known[: len(data["bank"].split.train)]


def test_sums_are_those_of_the_rows(seen):
    nodes, bins = seen
    for one in nodes[:: max(1, len(nodes) // 20)]:
        for column in range(2):
            for place in range(BINS):
                inside = bins[one.rows, column] == place
                want = one.gradients[inside].sum(axis=0)
                np.testing.assert_allclose(one.sums[2 + column, place], want, atol=1e-9)


def test_most_bins_follow_from_the_sums(seen):
    nodes, bins = seen
    solve = solver([(one.rows, one.gradients) for one in nodes], len(bins), 1e-6)
    for column in range(2):
        shares = np.bincount(bins[:, column], minlength=BINS) / len(bins)
        sums = np.concatenate([one.sums[2 + column, :BINS].T for one in nodes])
        found = solve(sums, shares).argmax(axis=1)
        assert (found == bins[:, column]).mean() > 0.8 > 4 * shares.max()
