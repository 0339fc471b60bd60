"""Feature parties that pool, and bottoms of every epoch, stand beside baselines of their own."""

import pytest
import torch
from attack_grids import content, played, with_grid

from vfl.attacks.labels.classifiers import NearestMean
from vfl.core.seeds import generator
from vfl.experiments.attack_runner import AttackRunner
from vfl.experiments.leaderboard import in_measure, leaderboard
from vfl.experiments.results import LoadedGrid, records_of
from vfl.experiments.scenarios import INFERENCE_TIME
from vfl.training.run import load_data

POOLED, KEPT = "pooled:of=nearest_mean", "averaging:of=nearest_mean,over=snapshots"
CONTENT = content(
    {
        "attacks": [POOLED, KEPT, "nearest_mean"],
        "baselines": ["scratch", "raw", "pca"],
        "leaks": [5],
    },
    parties={name: {"width": 8, "bottom": "mlp:hidden=16"} for name in ("bank", "shop")},
    train={"epochs": 2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return played(tmp_path_factory.mktemp("grid"), with_grid(CONTENT))


def test_each_has_all_baselines_and_counts(folder):
    rows = {row.subject: row for row in in_measure(LoadedGrid(folder).attacks, "accuracy")}
    assert all(set(row.baselines) == {"scratch", "raw", "pca"} for row in rows.values())
    (place,) = leaderboard(list(records_of(folder.path)), 0.5)
    best = max(rows.values(), key=lambda row: row.value)
    assert place.worst.attack == best.subject
    # A label-free bottom is the same after every epoch, so who averages has the same baselines.
    assert rows[KEPT].baselines == rows["nearest_mean"].baselines
    assert rows[POOLED].baselines != rows["nearest_mean"].baselines
    scratch = {row.subject: row.baselines.get("scratch") for row in rows.values()}
    assert scratch[POOLED] != scratch["nearest_mean"]
    assert place.worst.over_scratch.mean == pytest.approx(best.value - scratch[best.subject])


def test_who_pools_is_set_against_all_their_inputs_together(folder):
    experiment = folder.experiment()
    data = load_data(experiment)
    runner = AttackRunner(experiment, data, experiment.grid)
    case = runner._cases_of.case(INFERENCE_TIME, 5, generator(0, "leak", 0))
    leaked, targets = case.view.leaked.inputs.flatten(1), case.view.targets.inputs
    own, others = (data[name].inputs.flatten(1) for name in ("bank", "shop"))
    both = torch.cat([own, others], 1)
    train = torch.from_numpy(data["label"].split.train)
    places = [int(train[(own[train] == row).all(1)][0]) for row in leaked]
    test = torch.from_numpy(data["label"].split.test)
    assert torch.equal(own[test], targets.flatten(1))
    held = case.view.with_cuts({"targets": both[test], "leaked": both[places]})
    guesses = NearestMean().run(held, generator(0, "attack", 0)).argmax(1)
    wanted = float((guesses == case.labels).float().mean())
    rows = in_measure(LoadedGrid(folder).attacks, "accuracy")
    (row,) = [row for row in rows if row.subject == POOLED]
    assert row.baselines["raw"] == pytest.approx(wanted)
