"""Which threat model an attack is tried under, and grids that record trainings for some."""

import shlex
from functools import partial

import pytest
from attack_grids import content, played, with_grid

from vfl.attacks import Attack, Grant, make
from vfl.config import Experiment, TraceSettings
from vfl.config.run_folder import RunFolder
from vfl.config.toml import override
from vfl.core.errors import ExposedCutError, RunFolderError, UserError
from vfl.core.storage import read_json
from vfl.experiments import cells as identity
from vfl.experiments import training
from vfl.experiments.attack_grid import attack_finished_run, grid_cells
from vfl.experiments.attack_runner import AttackRunner
from vfl.experiments.leaderboard import in_measure, leaderboard
from vfl.experiments.pages import write_results
from vfl.experiments.results import LoadedGrid, records_of
from vfl.experiments.scenarios import (
    COLLUSION,
    INFERENCE_TIME,
    PREDICTIONS,
    QUERIES_ATTRIBUTE,
    RECORDED_QUERIES,
    RECORDED_TRAINING,
    SECURE_SUM,
    SNAPSHOTS,
    TRAINING_ATTRIBUTE,
    TRAINING_TIME,
    scenario_of,
)
from vfl.experiments.scores import AttackJob
from vfl.training.run import load_data
from vfl.training.run import train as train_once

CONTENT = content(
    {
        "attacks": ["gradient_similarity", "inversion:steps=5", "kmeans:starts=1"],
        "baselines": ["raw"],
    },
    data={"validation": 0.2},
)
recorded = partial(with_grid, CONTENT)


@pytest.mark.parametrize(
    ("spec", "scenario"),
    [
        ("fine_tuning", INFERENCE_TIME),
        ("principal", INFERENCE_TIME),
        ("averaging", TRAINING_TIME),
        ("gradient_norm", TRAINING_TIME),
        ("inversion", RECORDED_QUERIES),
        ("attribute", QUERIES_ATTRIBUTE),
        ("averaging:over=snapshots", SNAPSHOTS),
        ("pooled:of=fine_tuning", COLLUSION),
        ("averaging:of=inversion", RECORDED_TRAINING),
        ("averaging:of=inversion,over=queries", RECORDED_QUERIES),
        ("averaging:of=attribute", TRAINING_ATTRIBUTE),
        ("averaging:of=attribute,over=queries", QUERIES_ATTRIBUTE),
        ("subtraction", SECURE_SUM),
        ("membership", PREDICTIONS),
        ("likelihood_ratio", PREDICTIONS),
    ],
)
def test_what_it_needs_decides(spec, scenario):
    assert scenario_of(make(spec), spec) == scenario


def test_an_attack_that_nobody_could_run():
    class Burglar(Attack):
        needs = frozenset({Grant.OTHERS_BOTTOM, Grant.CUTS})

        def run(self, view, draw):
            return view.targets.cuts

    with pytest.raises(
        UserError, match="no attacker of a grid has the data that burglar needs"
    ) as refused:
        scenario_of(Burglar(), "burglar")
    assert refused.value.got == "the victim's bottom"
    assert scenario_of(make("generative"), "generative", own_columns=True) == RECORDED_QUERIES
    with pytest.raises(UserError, match="data that generative needs"):
        scenario_of(make("generative"), "generative")


def test_recorded_trainings_are_attacked_and_let_go(tmp_path):
    folder = played(tmp_path / "grid", recorded())
    found = in_measure(LoadedGrid(folder).attacks, "accuracy")
    rows = {row.subject: row for row in reversed(found)}  # the first measure of each
    assert rows["gradient_similarity"].value > 0.9
    assert "in the training phase" in rows["gradient_similarity"].threat
    assert rows["inversion:steps=5"].measure == "mse"
    assert "label party" in rows["inversion:steps=5"].threat
    assert rows["gradient_similarity"].baselines == {}
    assert set(rows["kmeans:starts=1"].baselines) == {"scratch", "raw"}
    assert not list(folder.path.rglob("trace"))
    (place,) = leaderboard(list(records_of(folder.path)), 0.5)
    assert place.worst.attack == "gradient_similarity"  # though nothing is set against it
    assert place.worst.baseline in ("scratch", "guess", "kmeans:starts=1 on raw")
    table, _ = write_results(folder)
    assert "gradient_similarity" in table


def test_scores_are_of_the_rarer_class(tmp_path):
    """Malignant, which is class 0; of the first 300 rows it is nearly half."""
    specs = ["principal", "gradient_norm", "gradient_direction"]
    specs += ["averaging:of=principal,over=snapshots"]
    about = {"data": {"source": "breast_cancer", "rows": 300}}
    two = CONTENT | about | {"grid": CONTENT["grid"] | {"attacks": specs}}
    rows = LoadedGrid(played(tmp_path / "grid", Experiment.model_validate(two))).attacks
    values = {(row.subject, row.measure): row.value for row in rows}
    assert set(values) == {(spec, one) for spec in specs for one in ("auc", "tpr_at_1_fpr")}
    for spec in specs[:1] + specs[2:]:
        assert values[spec, "auc"] > 0.9, spec


def test_a_victim_is_recorded_again_when_only_that_is_missing(tmp_path, monkeypatch):
    folder = played(tmp_path / "grid", recorded(attacks="kmeans:starts=1"))
    before = in_measure(LoadedGrid(folder).attacks, "accuracy")
    (victim,) = [cell for cell in folder.cells() if cell.victim == "none"]
    weights = read_json(folder.cells_path / victim.name / "summary.json")["weights_sha256"]
    trained = []

    def noted(experiment, *arguments, **options):
        trained.append(experiment.trace.phases)
        return train_once(experiment, *arguments, **options)

    monkeypatch.setattr(training, "train", noted)
    played(folder.path, recorded(attacks=["kmeans:starts=1", "surrogate"]))
    assert trained == [("train",)]
    rows = in_measure(LoadedGrid(folder).attacks, "accuracy")
    assert [row for row in rows if row.subject == "kmeans:starts=1"] == before
    assert len(rows) == 2
    again = read_json(folder.cells_path / victim.name / "summary.json")["weights_sha256"]
    assert again == weights
    played(folder.path, recorded(attacks=["surrogate"]))
    assert len(trained) == 1


def test_a_run_is_attacked_by_what_it_recorded(tmp_path):
    plain = recorded().model_copy(update={"grid": None})
    settings = recorded(attacks="surrogate").grid
    train_once(plain, tmp_path, "silent")
    with pytest.raises(RunFolderError, match="surrogate needs a recording") as refused:
        attack_finished_run(RunFolder.open(tmp_path / "silent"), settings)
    assert "-s trace.phases=train," in refused.value.fix
    assert not (tmp_path / "silent" / "attacks.jsonl").exists()
    heard = plain.model_copy(update={"trace": TraceSettings(phases=("train",))})
    train_once(heard, tmp_path, "heard")
    found = attack_finished_run(RunFolder.open(tmp_path / "heard"), settings)
    (row,) = in_measure(found, "accuracy")
    assert row.subject == "surrogate"
    assert row.measure == "matched_accuracy"
    both = recorded(attacks=["surrogate", "kmeans", "inversion:steps=5"]).grid
    with pytest.raises(RunFolderError, match=": inversion:steps=5 needs a recording") as refused:
        attack_finished_run(RunFolder.open(tmp_path / "heard"), both)
    setting = shlex.split(refused.value.fix)[4].rstrip(",")
    asked = Experiment.model_validate(override(plain.model_dump(), [setting]))
    assert asked.trace.phases == ("validation", "test")


def together(**changes):
    parties = {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in ("bank", "shop")}
    grid = CONTENT["grid"] | {"attacks": changes.pop("attacks")} | changes.pop("grid", {})
    return Experiment.model_validate(CONTENT | {"parties": parties, "grid": grid} | changes)


def test_who_kept_recalls_or_colludes_has_a_line(tmp_path):
    specs = {
        "averaging:of=kmeans:starts=1,over=snapshots": "its own bottom after every epoch",
        "pooled:of=kmeans:starts=1": "together with shop",
        "averaging:of=inversion:steps=5": "in the training phase",
        "averaging:of=inversion:steps=5,over=queries": "the cuts of queries it repeats",
        "averaging:of=attribute": "the cuts of every epoch",
    }
    folder = played(tmp_path / "grid", together(attacks=list(specs)))
    threats = {row.subject: row.threat for row in LoadedGrid(folder).attacks}
    assert list(threats) == list(specs)
    assert all(specs[attack] in told for attack, told in threats.items())
    assert not list(folder.path.rglob("trace"))


def test_sums_are_attacked_by_who_colludes_and_by_nobody_who_saw_single_cuts(tmp_path):
    sums = {"secure": "sum", "merge": "sum"}
    specs = ["subtraction:of=inversion:steps=5", "pooled:of=kmeans:starts=1"]
    folder = played(tmp_path / "grid", together(attacks=[*specs, "membership"], **sums))
    first, *_, last = LoadedGrid(folder).attacks
    assert first.measure == "mse"
    assert first.threat.startswith("A semi-honest label party, together with shop, in the")
    assert (last.subject, last.measure) == ("membership", "membership_tpr_at_1_fpr")
    assert last.threat.startswith("A semi-honest outsider")  # who sees predictions and no cut
    for spec in ("averaging", "averaging:of=inversion", "inversion", "attribute"):
        with pytest.raises(
            ExposedCutError, match=f"{spec} reads recorded frames: a trace contains single cuts"
        ):
            grid_cells(together(attacks=[spec], **sums))
    with pytest.raises(ExposedCutError, match="reads bottoms of every epoch, which a trace stores"):
        grid_cells(together(attacks=["averaging:over=snapshots"], **sums))
    with pytest.raises(UserError, match="here the label party sees every cut"):
        grid_cells(together(attacks=specs))
    with pytest.raises(UserError, match="there is only one"):
        grid_cells(recorded(attacks="pooled"))


@pytest.mark.parametrize(
    "spec", ["gradient_similarity", "averaging:over=snapshots", "averaging:of=inversion"]
)
def test_where_the_owner_trained_nobody_kept_anything(spec):
    with pytest.raises(UserError, match="an owner that trains alone sends no frames"):
        grid_cells(together(attacks=[spec], grid={"trained_by": "owner"}))


def test_the_attack_inside_another_decides_what_is_done_anew(monkeypatch):
    experiment, read_source = recorded(), identity._source
    runner = AttackRunner(experiment, load_data(experiment), experiment.grid)
    jobs = [AttackJob(f"averaging:of={name}", 0, 0) for name in ("kmeans", "nearest_mean")]
    before = [runner._key(job) for job in jobs]

    def changed(module):
        return read_source(module) + (
            b"\nx = 1" if module == "vfl.attacks.labels.clusters" else b""
        )

    monkeypatch.setattr(identity, "_source", changed)
    after = [runner._key(job) for job in jobs]
    assert after[0] != before[0]
    assert after[1] == before[1]
