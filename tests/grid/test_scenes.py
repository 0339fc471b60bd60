"""Which threat model an attack is tried under, and grids that record trainings for some."""

import pytest

from vfl.attacks import Attack, Grant, make
from vfl.config import Experiment, TraceSettings
from vfl.errors import ExposedCutError, RunFolderError, UserError
from vfl.grid import GridFolder, train
from vfl.grid.attack import grid_cells
from vfl.grid.attack_rows import read_rows
from vfl.grid.attack_run import attacked
from vfl.grid.attack_table import write_attack_results
from vfl.grid.leaderboard import leaderboard
from vfl.grid.run import go_through
from vfl.grid.scenes import recorded_phases, scene_of
from vfl.run import train as train_once
from vfl.run_folder import RunFolder
from vfl.storage import read_json

CONTENT = {
    "name": "recorded",
    "data": {"rows": 400, "validation": 0.2},
    "parties": {"client": {"width": 8, "bottom": "mlp:hidden=16"}},
    "label": {"top": "linear"},
    "train": {"epochs": 3, "learning_rate": 0.02},
    "grid": {
        "attacks": ["gradient_similarity", "inversion:steps=5", "kmeans:starts=1", "principal"],
        "baselines": ["raw"],
        "leaks": [1],
        "draws": 1,
        "seeds": [0],
        "pictures": 0,
    },
}


def recorded(**changes):
    return Experiment.model_validate(CONTENT | {"grid": CONTENT["grid"] | changes})


def done(path, experiment):
    folder = GridFolder(path)
    folder.write(experiment, grid_cells(experiment), "vfl grid recorded.toml")
    assert go_through(folder, folder.cells()) == []
    return folder


@pytest.mark.parametrize(
    ("spec", "scene"),
    [
        ("fine_tuning", "asked"),
        ("principal", "asked"),
        ("averaging", "heard"),
        ("gradient_norm", "heard"),
        ("inversion", "received"),
        ("attribute", "attribute"),
        ("membership", "queried"),
        ("likelihood_ratio", "queried"),
    ],
)
def test_what_it_needs_decides(spec, scene):
    assert scene_of(make(spec), spec) == scene


def test_an_attack_that_nobody_could_run():
    class Burglar(Attack):
        needs = frozenset({Grant.OTHERS_TOP, Grant.CUTS})

        def run(self, view, draw):
            return view.targets.cuts

    with pytest.raises(UserError, match="no attacker of a grid has what burglar needs") as refused:
        scene_of(Burglar(), "burglar")
    assert refused.value.got == "the label party's top"
    assert scene_of(make("generative"), "generative", own_columns=True) == "received"
    with pytest.raises(UserError, match="what generative needs"):
        scene_of(make("generative"), "generative")


def test_only_what_is_needed_is_recorded():
    assert not recorded_phases(["asked"]).enabled
    assert recorded_phases(["asked", "heard"]).phases == ("train",)
    assert set(recorded_phases(["received", "heard"]).phases) == {"train", "validation", "test"}


def test_recorded_trainings_are_attacked_and_let_go(tmp_path):
    folder = done(tmp_path / "grid", recorded())
    rows = {row.attack: row for row in reversed(read_rows(folder))}  # the first measure of each
    assert rows["gradient_similarity"].value > 0.9
    assert "in the training phase" in rows["gradient_similarity"].threat
    assert rows["inversion:steps=5"].measure == "mse"
    assert "label party" in rows["inversion:steps=5"].threat
    assert rows["principal"].measure == "auc"
    assert rows["gradient_similarity"].baselines == {}
    assert set(rows["kmeans:starts=1"].baselines) == {"scratch", "raw"}
    assert not list(folder.path.rglob("trace"))
    (place,) = leaderboard(list(rows.values()), 0.5)
    assert place.worst.attack == "kmeans:starts=1"
    table, _ = write_attack_results(folder)
    assert "| none    | none      | gradient_similarity | 1 | accuracy" in table


def test_a_victim_is_recorded_again_when_only_that_is_missing(tmp_path, monkeypatch):
    folder = done(tmp_path / "grid", recorded(attacks="kmeans:starts=1"))
    before = read_rows(folder)
    (victim,) = [cell for cell in folder.cells() if cell.called == "none"]
    weights = read_json(folder.cells_path / victim.name / "summary.json")["weights_sha256"]
    trained = []

    def noted(experiment, *arguments, **options):
        trained.append(experiment.trace.phases)
        return train_once(experiment, *arguments, **options)

    monkeypatch.setattr(train, "train", noted)
    done(folder.path, recorded(attacks=["kmeans:starts=1", "surrogate"]))
    assert trained == [("train",)]
    rows = read_rows(folder)
    assert [row for row in rows if row.attack == "kmeans:starts=1"] == before
    assert len(rows) == 2
    again = read_json(folder.cells_path / victim.name / "summary.json")["weights_sha256"]
    assert again == weights
    done(folder.path, recorded(attacks=["surrogate"]))
    assert len(trained) == 1


def test_nobody_saw_the_training_of_an_owner():
    with pytest.raises(UserError, match="where the owner trained alone nobody saw it"):
        grid_cells(recorded(trained_by="owner"))


def test_a_grid_has_no_bottom_to_attack_where_first_layers_are_shared():
    shared = {
        "secure": "beaver",
        "merge": "sum",
        "parties": {name: {"width": 8, "bottom": "mlp:hidden=none"} for name in ("a", "b")},
        "train": {"optimizer": "sgd", "momentum": 0},
        "grid": CONTENT["grid"] | {"attacks": ["fine_tuning"]},
    }
    with pytest.raises(ExposedCutError, match="no party has a bottom"):
        grid_cells(Experiment.model_validate(CONTENT | shared))


def test_a_run_is_attacked_by_what_it_recorded(tmp_path):
    plain = recorded().model_copy(update={"grid": None})
    settings = recorded(attacks="surrogate").grid
    train_once(plain, tmp_path, "silent")
    with pytest.raises(RunFolderError):
        attacked(RunFolder.open(tmp_path / "silent"), settings)
    heard = plain.model_copy(update={"trace": TraceSettings(phases=("train",))})
    train_once(heard, tmp_path, "heard")
    (row,) = attacked(RunFolder.open(tmp_path / "heard"), settings)
    assert row.attack == "surrogate"
    assert row.measure == "matched_accuracy"
