"""Attacks on columns, attributes and membership in a grid, and the pictures they leave."""

import json
import shutil

import pytest
from attack_grids import content, played, timeless

from vfl.config import Experiment, GridSettings
from vfl.core.errors import ConfigError, UserError
from vfl.experiments import GridFolder, attack_runner
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.leaderboard import OF_LABELS
from vfl.experiments.pages import build_report, write_results
from vfl.experiments.pictures import GALLERY
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scheduler import run_cells

COLUMNS = [
    "inversion:steps=100",
    "white_box_inversion:steps=5",
    "unsplit:rounds=1,input_steps=5,model_steps=5",
    "pseudo_client:steps=5",
]
QUERIES = ["membership", "likelihood_ratio:shadows=2,steps=5"]
CONTENT = content(
    {
        "defenses": ["layer_norm"],
        "attacks": [*COLUMNS, "attribute", *QUERIES],
        "baselines": ["raw"],
    },
    data={"validation": 0.3},
)


def columns(**changes):
    grid = CONTENT["grid"] | changes.pop("grid", {})
    return Experiment.model_validate(CONTENT | {"grid": grid} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return played(tmp_path_factory.mktemp("columns") / "grid", columns())


def test_every_measure_is_a_row_beside_its_guess(whole):
    rows = LoadedGrid(whole).attacks
    assert {(row.subject, row.measure) for row in rows} == {
        *((spec, measure) for spec in COLUMNS for measure in ("mse", "psnr", "ssim")),
        *(("attribute", f"attribute_{measure}") for measure in OF_LABELS[:4]),
        *((spec, f"membership_{one}") for spec in QUERIES for one in ("auc", "tpr_at_1_fpr")),
    }
    assert len({row.guess for row in rows if row.measure == "mse"}) == 1  # the mean picture
    assert {row.guess for row in rows if row.measure == "membership_auc"} == {0.5}
    assert all(not row.baselines for row in rows)
    for row in rows:
        who = "outsider" if row.subject in QUERIES else "label party"
        assert row.threat.startswith(f"A semi-honest {who}, alone, in the inference phase")


def test_a_few_known_rows_beat_the_mean_picture(whole):
    found = {
        row.measure: row
        for row in LoadedGrid(whole).attacks
        if (row.training, row.subject) == ("none", "inversion:steps=100")
    }
    assert found["mse"].value < found["mse"].guess
    assert found["psnr"].value > found["psnr"].guess


def test_all_three_stand_in_table_and_page(whole):
    table, content = write_results(whole)
    assert "tpr at 1 fpr" in table
    json.dumps(content["rows"])
    page = build_report(whole.path).read_text()
    assert page.count('src="data:image/png;base64,') == 2 * 4 * 3 * 8
    assert "img-src data:" in page
    assert "<h2>Reconstructed pictures</h2>" in page


@pytest.mark.parametrize(("said", "drawn"), [({}, True), ({"reconstructions": False}, False)])
def test_pictures_of_a_public_set_are_drawn_unless_it_is_said(said, drawn, tmp_path):
    folder = played(
        tmp_path / "grid", columns(grid={"attacks": "inversion:steps=1", "defenses": "none"} | said)
    )
    assert bool(list(folder.path.rglob(GALLERY))) is drawn
    assert ("data:image/png" in build_report(folder.path).read_text()) is drawn


@pytest.mark.parametrize(("said", "drawn"), [(None, False), (True, True), (False, False)])
def test_rows_of_a_party_s_own_table_are_drawn_only_if_it_is_said(said, drawn):
    assert GridSettings(reconstructions=said).draws_rows(own=True) is drawn


def test_pictures_that_are_missing_are_made_again(whole, tmp_path, monkeypatch):
    shutil.copytree(whole.path, tmp_path / "grid")
    folder, tried = GridFolder(tmp_path / "grid"), []
    before = timeless(folder)
    path = next(folder.path.rglob(f"{GALLERY}/*.json"))
    content = path.read_bytes()
    path.unlink()
    plain = attack_runner.run_attack
    monkeypatch.setattr(attack_runner, "run_attack", lambda *all_: tried.append(1) or plain(*all_))
    assert run_cells(folder, folder.cells()) == []
    assert len(tried) == 1
    assert path.read_bytes() == content
    assert timeless(folder) == before


def test_a_top_that_others_feed_too_is_refused(tmp_path):
    two = {"left": {"width": 4}, "right": {"width": 4}}
    with pytest.raises(UserError, match="pseudo_client needs a top model without cuts") as refused:
        grid_cells(columns(parties=two, grid={"attacks": "pseudo_client"}))
    assert refused.value.want == "columns of left"
    with pytest.raises(UserError, match="the data that generative needs"):
        grid_cells(columns(grid={"attacks": "generative"}))


def test_all_attacks_that_nobody_could_run_are_told_at_once():
    two = {"left": {"width": 4}, "right": {"width": 4}}
    grid = {"attacks": ["pseudo_client", "gradient_norm"], "trained_by": "owner", "attribute": 0}
    with pytest.raises(ConfigError) as refused:
        grid_cells(columns(parties=two, grid=grid))
    for why in (
        "pseudo_client needs a top model without cuts of further parties",
        "gradient_norm needs a recorded training",
        "settings would have no effect here (got grid.attribute",
    ):
        assert why in str(refused.value)


def test_a_label_party_with_columns_generates_the_others(tmp_path):
    own = columns(
        parties={"client": {"width": 8}, "label": {"width": 8}},
        grid={"attacks": "generative:steps=5", "defenses": "none"},
    )
    rows = LoadedGrid(played(tmp_path / "grid", own)).attacks
    assert {row.measure for row in rows} == {"mse", "psnr", "ssim"}
    assert "counterfactually the victim's bottom" in rows[0].threat
