"""Grids whose victims are trained against adversaries as well."""

import json
import shutil
from functools import partial

import pytest
from attack_grids import content, played, timeless, with_grid

from vfl.clients import FeatureParty
from vfl.config import read_experiment
from vfl.core.errors import ConfigError, HijackError, UserError
from vfl.experiments import GridFolder, attack_runner, training
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.leaderboard import in_measure, leaderboard, utility_of
from vfl.experiments.pages import build_report, write_results
from vfl.experiments.results import LoadedGrid, records_of
from vfl.experiments.scheduler import run_cells
from vfl.training.run import train as train_once
from vfl.training.specs import check_specs

EAGER, BACKDOOR = "malicious_optimizer:gain=3", "replacement:target=3,columns=2,share=1"
NOISE, BENT = "noisy_labels:share=0.9", "hijacking:critic_steps=1"
CONTENT = content(
    {
        "adversaries": [EAGER, BACKDOOR, NOISE, BENT],
        "attacks": ["logistic", "inversion:steps=5"],
        "baselines": ["scratch"],
    },
    data={"validation": 0.2},
    train={"epochs": 6, "checkpoint_every": 5},
)
tampered = partial(with_grid, CONTENT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return played(tmp_path_factory.mktemp("tampered") / "grid", tampered())


def found(folder, adversary, attack, measure=None):
    (row,) = [
        row
        for row in in_measure(LoadedGrid(folder).attacks, "accuracy")
        if (row.adversary, row.subject) == (adversary, attack) and measure in (None, row.measure)
    ]
    return row


def accuracy(folder, adversary):
    """Of the victim's own answers; None if a party stopped its training."""
    return utility_of(records_of(folder.path), "accuracy", "none", adversary).get("0")


def test_an_adversary_that_the_grid_knows_less_of_is_another_cell():
    names = [
        {cell.name for cell in grid_cells(tampered(known=known)) if cell.adversary != "none"}
        for known in (50, 20)
    ]
    assert not names[0] & names[1]
    assert grid_cells(tampered(known=50))[1] == grid_cells(tampered(known=20))[1]


def test_who_tampered_attacks_and_nobody_else(whole):
    tried = {(row.adversary, row.subject) for row in LoadedGrid(whole).attacks}
    assert tried == {
        ("none", "logistic"), ("none", "inversion:steps=5"), ("none", BACKDOOR), ("none", NOISE),
        (EAGER, "logistic"), (BACKDOOR, "logistic"), (BACKDOOR, BACKDOOR),
        (NOISE, "inversion:steps=5"), (NOISE, NOISE), (BENT, "inversion:steps=5"), (BENT, BENT),
    }  # fmt: skip


def test_a_trigger_is_answered_with_its_class_at_the_same_accuracy(whole):
    honest, tampering = (found(whole, one, BACKDOOR) for one in ("none", BACKDOOR))
    assert tampering.measure == honest.measure == "backdoor"
    assert tampering.value > honest.value + 0.3
    assert tampering.guess < 0.1
    assert accuracy(whole, BACKDOOR) > accuracy(whole, "none") - 0.1


def test_noise_spoils_the_network(whole):
    honest, tampering = (found(whole, one, NOISE) for one in ("none", NOISE))
    assert honest.value == pytest.approx(1 - accuracy(whole, "none"))
    assert tampering.value > honest.value + 0.3
    assert tampering.guess > 0.8


def test_a_bent_bottom_is_decoded_beside_the_mean_picture(whole):
    measures = {
        row.measure: row
        for row in LoadedGrid(whole).attacks
        if row.subject == row.adversary == BENT
    }
    assert set(measures) == {"mse", "psnr", "ssim"}
    assert measures["mse"].guess == found(whole, "none", "inversion:steps=5", "mse").guess


def test_the_leaderboard_takes_the_worst_case_over_adversaries_too(whole):
    rows = LoadedGrid(whole).attacks
    (place,) = leaderboard(list(records_of(whole.path)), 0.5)
    attackers = {row.attacker for row in rows if row.measure == "accuracy"}
    assert place.worst.attack in attackers
    best = max(row.value for row in rows if row.measure == "accuracy" and row.k)
    assert place.worst.value.mean == best
    assert place.utility.mean == accuracy(whole, "none")


def test_the_table_and_the_page_name_them(whole):
    table, content = write_results(whole)
    assert {record["adversary"] for record in content["rows"]} == {
        "none",
        EAGER,
        BACKDOOR,
        NOISE,
        BENT,
    }
    assert f"| {BACKDOOR} | {BACKDOOR}" in table
    page = build_report(whole.path).read_text()
    assert f"none against {NOISE}" in page
    assert "without an adversary and against 4 adversaries" in page


class Killed(BaseException):
    """Stands for a process that ends in the middle of a training, or of its attacks."""


@pytest.mark.parametrize("spec", [BENT])
def test_a_training_that_is_killed_goes_on_to_the_same_table(spec, whole, tmp_path, monkeypatch):
    left, finish = iter(range(20)), FeatureParty.finish

    def dying(self, exchange):
        if next(left, None) is None:
            raise Killed
        finish(self, exchange)

    (cell,) = [one for one in whole.cells() if one.adversary == spec]
    shutil.copytree(whole.path, tmp_path / "grid")
    folder = GridFolder(tmp_path / "grid")
    shutil.rmtree(folder.cells_path / cell.name)
    monkeypatch.setattr(FeatureParty, "finish", dying)
    with pytest.raises(Killed):
        run_cells(folder, [cell])
    monkeypatch.setattr(FeatureParty, "finish", finish)
    assert list((folder.cells_path / cell.name).rglob("committed.json"))
    assert run_cells(folder, [cell]) == []
    assert timeless(folder) == timeless(whole)


def test_attacks_that_are_killed_go_on_to_the_same_table(whole, tmp_path, monkeypatch):
    shutil.copytree(whole.path, tmp_path / "grid")
    folder, trained = GridFolder(tmp_path / "grid"), []
    for path in folder.path.rglob("attacks.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:1]) + lines[-1][:30])

    def noted(experiment, *arguments, **options):
        trained.append(experiment.trace.phases)
        return train_once(experiment, *arguments, **options)

    monkeypatch.setattr(training, "train", noted)
    assert run_cells(folder, folder.cells()) == []
    assert timeless(folder) == timeless(whole)
    assert set(trained) == {("validation", "test")}  # once more, for what only that records
    monkeypatch.setattr(attack_runner, "run_attack", None)
    assert run_cells(folder, folder.cells()) == []


def test_who_is_found_out_is_told_and_not_trained_again(tmp_path, monkeypatch):
    def stopped(*arguments, **options):
        raise HijackError("the gradients do not depend on whose rows were sent")

    plain = training.train
    monkeypatch.setattr(
        training,
        "train",
        lambda *all_, **more: (stopped if more["adversaries"] else plain)(*all_, **more),
    )
    folder = played(tmp_path / "grid", tampered(adversaries=BENT, attacks="logistic"))
    row = found(folder, BENT, BENT)
    assert (row.measure, row.value) == ("found_out", 1.0)
    assert accuracy(folder, BENT) is None
    monkeypatch.setattr(training, "train", None)
    played(folder.path, tampered(adversaries=BENT, attacks="logistic"))
    assert found(folder, BENT, BENT) == row
    assert "found out" in write_results(folder)[0]
    build_report(folder.path)


def test_mistakes_are_told_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="impossible if one owner trains alone"):
        grid_cells(tampered(trained_by="owner"))
    file = tmp_path / "tampered.toml"
    file.write_text(
        '[parties.client]\n[grid]\nadversaries = ["hijakcing", "noisy_labels:shar=1"]\n'
    )
    with pytest.raises(ConfigError) as refused:
        check_specs(read_experiment(file))
    assert "no adversary is called 'hijakcing'" in str(refused.value)
    assert "no option 'shar'" in str(refused.value)
    json.dumps(refused.value.record())
