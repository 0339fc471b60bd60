"""A grid of attacks: what it does, keeps, does anew, and its table after a kill."""

import json
import shutil
from functools import partial
from statistics import fmean

import pytest
from attack_grids import content, played, timeless, with_grid, written
from pydantic import ValidationError

from vfl.config import Experiment, GridSettings, with_overrides
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, RunFolderError, SpecError
from vfl.core.storage import read_json
from vfl.experiments import GridFolder, attack_runner
from vfl.experiments.attack_grid import draw_pictures, grid_cells
from vfl.experiments.cells import PICTURES, grid_settings_of
from vfl.experiments.leaderboard import in_measure, leaderboard
from vfl.experiments.pages import write_results
from vfl.experiments.results import LoadedGrid, records_of
from vfl.experiments.scheduler import run_cells
from vfl.experiments.scores import (
    SCORES,
    ScoresFile,
)
from vfl.experiments.study import Results
from vfl.training.run import load_data, train
from vfl.training.specs import check_specs

CONTENT = content(
    {
        "defenses": ["layer_norm"],
        "attacks": ["fine_tuning:steps=20", "kmeans:starts=1"],
        "baselines": ["scratch", "raw", "pca"],
        "leaks": [1, 3],
        "draws": 2,
        "seeds": [0, 1],
        "pictures": 20,
    }
)
tiny = partial(with_grid, CONTENT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return played(tmp_path_factory.mktemp("grid") / "whole", tiny())


def copied(whole, path):
    shutil.copytree(whole.path, path)
    return GridFolder(path)


def test_the_cells_are_baselines_and_victims_seed_by_seed():
    cells = grid_cells(tiny())
    assert [cell.title for cell in cells] == [
        "baselines seed=0", "none seed=0", "layer_norm seed=0",
        "baselines seed=1", "none seed=1", "layer_norm seed=1",
    ]  # fmt: skip
    assert [cell.experiment.defense for cell in cells[:3]] == ["none", "none", "layer_norm"]
    assert len({cell.name for cell in cells}) == 6
    assert all(cell.experiment.grid is None for cell in cells)


def test_a_codec_is_a_victim_like_a_defense():
    cells = grid_cells(tiny(codecs=["topk:k=2"], seeds=[0]))
    assert [(cell.victim, cell.experiment.defense, cell.experiment.codec) for cell in cells] == [
        ("baselines", "none", "none"),
        ("none", "none", "none"),
        ("layer_norm", "layer_norm", "none"),
        ("topk:k=2", "none", "topk:k=2"),
    ]


def test_a_codec_that_does_not_fit_the_cut_is_told_before_anything_is_trained():
    with pytest.raises(SpecError, match="topk:k=9: "):
        check_specs(tiny(codecs=["topk:k=9"]))


def test_every_victim_meets_every_attack(whole):
    rows = in_measure(LoadedGrid(whole).attacks, "accuracy")
    seen = {(row.training, row.subject, row.k, row.repeat, row.draw) for row in rows}
    wanted = {
        (defense, "fine_tuning:steps=20", k, seed, draw)
        for defense in ("none", "layer_norm")
        for k in (1, 3)
        for seed in "01"
        for draw in (0, 1)
    } | {
        (defense, "kmeans:starts=1", 0, seed, 0)
        for defense in ("none", "layer_norm")
        for seed in "01"
    }
    assert seen == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        assert set(row.baselines) == {"scratch", "raw", "pca"}
        assert 0 < row.guess < 0.2
        assert row.threat.startswith("A semi-honest feature party, alone, in the inference phase")


def test_a_bottom_that_rebuilds_the_rows_is_a_baseline_when_asked_for(tmp_path, monkeypatch):
    assert "autoencoder" not in GridSettings().baselines
    stands_on: set[str] = set()
    monkeypatch.setattr(attack_runner, "code_of", lambda *modules: stands_on.update(modules) or "")
    asked = {"attacks": ["fine_tuning:steps=20"], "leaks": [3], "draws": 1, "seeds": [0]}
    asked |= {"defenses": ["none"], "baselines": ["autoencoder"], "pictures": 0}
    folder = played(tmp_path / "free", tiny(**asked))
    (row,) = in_measure(LoadedGrid(folder).attacks, "accuracy")
    assert row.guess < row.baselines["autoencoder"] < 1
    (place,) = leaderboard(list(records_of(folder.path)), margin=0.5)
    assert place.worst.baseline == "fine_tuning:steps=20 on autoencoder"
    assert place.worst.advantage.mean == row.value - row.baselines["autoencoder"]
    assert "vfl.defenses.self_supervision" in stands_on


def test_leaked_rows_and_baselines_are_the_same_for_every_defense(whole):
    rows = LoadedGrid(whole).attacks
    mine, theirs = ([row for row in rows if row.training == one] for one in ("none", "layer_norm"))
    assert [row.baselines for row in mine] == [row.baselines for row in theirs]
    assert [row.value for row in mine] != [row.value for row in theirs]
    labelled = [row for row in mine if row.k]
    assert (
        len({row.baselines["scratch"] for row in labelled}) > 4
    )  # a draw of its own for each victim


def test_what_is_done_is_not_done_again(whole, tmp_path, monkeypatch):
    folder, before = copied(whole, tmp_path / "again"), timeless(whole)
    monkeypatch.setattr(attack_runner, "run_attack", None)
    assert run_cells(folder, folder.cells()) == []
    assert timeless(folder) == before


def test_a_grid_that_grows_does_only_what_is_new(whole, tmp_path, monkeypatch):
    folder, tried = copied(whole, tmp_path / "more"), []
    plain = attack_runner.run_attack

    def counted(case, attack, draw):
        tried.append(type(attack).__name__)
        return plain(case, attack, draw)

    monkeypatch.setattr(attack_runner, "run_attack", counted)
    more = tiny(attacks=[*CONTENT["grid"]["attacks"], "nearest_mean"], leaks=[3], seeds=[0])
    written(folder.path, more)
    assert run_cells(folder, folder.cells()) == []
    assert tried == ["NearestMean"] * 2 * 4  # two draws, on raw, pca and two victims
    assert {row.subject for row in LoadedGrid(folder).attacks} == {*more.grid.attacks}
    assert {row.k for row in LoadedGrid(folder).attacks} == {0, 3}


@pytest.mark.parametrize(
    "other", [with_overrides(tiny(), ["data.rows=399"]), tiny(leaks_from="validation")]
)
def test_scores_of_other_rows_or_another_setting_are_not_shown(whole, tmp_path, other):
    folder = copied(whole, tmp_path / "other")
    written(folder.path, other)
    assert LoadedGrid(folder).attacks == []


def test_scores_of_code_that_is_no_more_are_in_no_verdict(whole, tmp_path, monkeypatch):
    folder = copied(whole, tmp_path / "stale")
    before = [one for one in records_of(folder.path) if one.evaluator == "attack"]
    assert {one.stale for one in before} == {""}
    plain, edited = attack_runner.code_of, "vfl.attacks.labels.clusters"
    monkeypatch.setattr(
        attack_runner,
        "code_of",
        lambda *made: (
            plain(*made) + "!" * any(edited == getattr(one, "__module__", "") for one in made)
        ),
    )
    stale = {one.subject for one in records_of(folder.path) if one.stale}
    assert stale
    assert stale == {one.subject for one in before if one.subject.startswith("kmeans")}
    _, content = write_results(folder)
    assert {one["subject"] for one in content["stale"]} == stale
    assert not {one["subject"] for one in content["rows"]} & stale
    ranked = {one["attack"] for entry in content["leaderboard"] for one in entry["standings"]}
    assert not ranked & stale


class Killed(BaseException):
    """Stands for a process that ends between two attacks."""


def test_what_was_begun_goes_on_to_the_same_table(whole, tmp_path, monkeypatch):
    left, plain = iter(range(30)), attack_runner.run_attack

    def dying(case, attack, draw):
        if next(left, None) is None:
            raise Killed
        return plain(case, attack, draw)

    monkeypatch.setattr(attack_runner, "run_attack", dying)
    with pytest.raises(Killed):
        played(tmp_path / "begun", tiny())
    monkeypatch.setattr(attack_runner, "run_attack", plain)
    (torn,) = [path for path in (tmp_path / "begun").rglob(SCORES) if "layer_norm" in str(path)]
    with torn.open("a") as file:
        file.write('{"key": "half a li')
    folder = played(tmp_path / "begun", tiny())
    assert timeless(folder) == timeless(whole)
    assert len(torn.read_text().splitlines()) == 5


def test_results_are_files_and_rows(whole):
    shown, content = write_results(whole)
    records = content["rows"]
    assert {"training", "subject", "k", "value", "baselines", "guess"} <= set(records[0])
    assert len(records) == 20 * 4  # of classes
    assert all(one["no_model"] == max(one["baselines"].values()) for one in records)
    assert json.loads((whole.path / "results.json").read_text()) == json.loads(json.dumps(content))
    assert {place["defense"] for place in content["leaderboard"]} == {"none", "layer_norm"}
    table = Results.of(whole.path).table
    rows = table[table.evaluator == "attack"]
    assert rows.value.tolist() == [one["value"] for one in records]
    assert rows.no_model.tolist() == [one["no_model"] for one in records]
    assert set(table[table.evaluator == "quality"].training) == {"none", "layer_norm"}
    assert shown == (whole.path / "table.md").read_text()
    assert "| none " in shown


def test_mistakes_are_told_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError, match="no feature party has that name"):
        grid_cells(tiny(party="label"))
    with pytest.raises(SpecError, match="no attack is called"):
        grid_cells(tiny(attacks=["fine_tunning"]))
    with pytest.raises(ConfigError, match="no setting says what is attacked"):
        grid_settings_of(Experiment.model_validate(CONTENT | {"grid": None}))


def test_the_undefended_model_is_always_a_victim():
    assert GridSettings(defenses="layer_norm").victims == ("none", "layer_norm")
    assert GridSettings(defenses=["layer_norm", "none"]).victims == ("none", "layer_norm")
    assert GridSettings(attacks=["thesis", "svm", "kmeans"]).attack_specs == (
        "fine_tuning", "kmeans", "svm",
    )  # fmt: skip


def test_attacks_that_label_free_bottoms_do_not_meet_stand_beside_the_others_baselines(tmp_path):
    named = {"attacks": ["logistic", "kmeans", "svm"], "baseline_attacks": "logistic"}
    asked = tiny(defenses="none", baselines=["scratch", "pca"], leaks=3, seeds=0, **named)
    folder = played(tmp_path / "grid", asked)
    rows = in_measure(LoadedGrid(folder).attacks, "accuracy")
    found = {row.subject: set(row.baselines) for row in rows}
    assert found == {"logistic": {"scratch", "pca"}, "svm": {"scratch"}, "kmeans": {"scratch"}}
    references = {
        "scratch": [row.baselines["scratch"] for row in rows if row.subject == "svm"],
        "kmeans on raw": [row.baselines["scratch"] for row in rows if row.subject == "kmeans"],
        "logistic on pca": [row.baselines["pca"] for row in rows if row.subject == "logistic"],
    }
    best = max(references, key=lambda name: fmean(references[name]))
    standing = leaderboard(list(records_of(folder.path)), margin=0.5)[0].standings[0]
    assert standing.baseline == best
    assert standing.baseline_value.mean == pytest.approx(fmean(references[best]))


def test_baseline_attacks_are_some_of_the_attacks():
    settings = GridSettings(attacks=["thesis", "svm"], baseline_attacks="thesis")
    assert settings.baseline_specs == ("fine_tuning", "kmeans")
    assert GridSettings(attacks="svm").baseline_specs == ("svm",)
    with pytest.raises(ValidationError, match="a part of attacks, and knn is not one"):
        GridSettings(attacks="svm", baseline_attacks="knn")


def test_damaged_scores_are_told(tmp_path):
    (tmp_path / SCORES).write_text('{"key": 1}\n')
    with pytest.raises(RunFolderError, match="a score is damaged"):
        ScoresFile(tmp_path)


def test_cuts_are_drawn_of_the_party_that_attacks(tmp_path):
    asked = tiny().model_copy(update={"parties": dict.fromkeys("ab", tiny().parties["client"])})
    data = load_data(asked)
    train(asked, tmp_path, "run", data=data)
    run, drawn = RunFolder.open(tmp_path / "run"), {}
    for party in ("a", "b", "b"):
        draw_pictures(run, data, asked.grid.model_copy(update={"party": party}))
        found = read_json(run.path / PICTURES)
        drawn.setdefault(party, []).append((found["party"], found["same"]))
    assert [found[0] for found in drawn["b"]] == ["b", "b"]
    assert drawn["a"][0][1] != drawn["b"][0][1] == drawn["b"][1][1]
