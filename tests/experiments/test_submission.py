"""A submission can be repeated in part by strangers, and shows what was changed in it."""

import json
import shutil

import pytest

from vfl.config import Experiment
from vfl.core.errors import ConfigError, DataError, RunFolderError
from vfl.core.registry import PLUGINS
from vfl.experiments.study import plan_study, run_study
from vfl.experiments.submission import submit, verify

EXPERIMENT = {
    "name": "small",
    "data": {"source": "digits"},
    "label": {"party": "label", "top": "linear"},
    "parties": {"client": {"width": 8, "bottom": "mlp:hidden=8"}},
    "train": {"epochs": 1, "batch_size": 64},
    "grid": {
        "defenses": ["none", "clipped_noise:norm=1,sigma=0.5"],
        "attacks": ["logistic"],
        "leaks": [1],
        "draws": 2,
        "seeds": [0, 1],
        "baselines": ["raw"],
        "pictures": 0,
    },
}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "small"
    run_study(plan_study("grid", Experiment.model_validate(EXPERIMENT)), folder, "vfl grid")
    return folder


@pytest.fixture
def submission(grid, tmp_path):
    return submit(grid, tmp_path / "submission", "A. Researcher")


def rewrite(submission, file, change):
    """Change a file as a careful cheat does, who also changes its digest."""
    import hashlib

    from vfl.core.storage import write_json

    path, about = submission / file, json.loads((submission / "submission.json").read_text())
    path.write_text(change(path.read_text()))
    about["sha256"][file] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_json(submission / "submission.json", about)


def test_every_training_is_repeated_and_holds(submission, tmp_path):
    found = verify(submission, tmp_path / "again", share=1.0)
    assert (found.holds, found.cells, found.other_rows) == (True, (4, 4), [])
    undefended = [one for one in found.checks if one.cell.startswith("none")]
    assert undefended
    assert all(one.is_equal for one in undefended)
    assert {one.evaluator for one in found.checks} == {"quality", "attack"}
    assert "4 of 4 trainings were repeated" in found.sentence


def test_a_share_repeats_the_same_few_for_the_same_draw(submission, tmp_path):
    found = [verify(submission, tmp_path / str(n), share=0.1, draw=7) for n in range(2)]
    assert [one.cells for one in found] == [(1, 4), (1, 4)]
    assert {check.cell for check in found[0].checks} == {check.cell for check in found[1].checks}


def test_embellished_figures_fall(submission, tmp_path):
    def better(text):
        record = json.loads(text)
        for row in record["records"]:
            if row["measure"] == "accuracy":
                row["value"] = min(1.0, row["value"] + 0.3)
        return json.dumps(record)

    rewrite(submission, "results.json", better)
    found = verify(submission, tmp_path / "again", share=0.5)
    assert not found.holds
    assert {one.measure for one in found.checks if not one.holds} == {"accuracy"}


def test_wide_repeats_a_left_out_attack_and_copies_do_not_hide_a_figure(submission, tmp_path):
    original = (submission / "results.json").read_text()

    def changed(change):
        def rewritten(text):
            record = json.loads(text)
            change(record["records"])
            return json.dumps(record)

        (submission / "results.json").write_text(original)
        rewrite(submission, "results.json", rewritten)

    def spread(rows):  # the deviation of the submitted repeats becomes huge
        for row in rows:
            if row["measure"] == "accuracy" and row["evaluator"] == "quality":
                row["value"] = 0.99 if row["repeat"] == "0" else 0.01

    changed(spread)
    assert not verify(submission, tmp_path / "spread", share=1.0).holds
    changed(lambda rows: rows.__setitem__(slice(None), [
        row for row in rows if row["evaluator"] != "attack" or row["draw"] == 0]))  # fmt: skip
    found = verify(submission, tmp_path / "left-out", share=1.0)
    assert not found.holds
    assert {one.evaluator for one in found.checks if one.submitted is None} == {"attack"}
    for change in (
        lambda rows: rows.extend(rows[:3]),
        lambda rows: rows[0].update(value=float("inf")),
    ):
        changed(change)
        with pytest.raises(DataError, match="not a number, or occurs twice"):
            verify(submission, tmp_path / "copies")


def test_results_of_other_rows_do_not_count(submission, tmp_path):
    def other(text):
        record = json.loads(text)
        for cell in record["cells"]:
            cell["made_of"]["data"] = "0" * 12
        return json.dumps(record)

    rewrite(submission, "results.json", other)
    found = verify(submission, tmp_path / "again")
    assert not found.holds
    assert len(found.other_rows) == 1


def test_a_changed_or_added_file_is_refused(submission, tmp_path):
    more = shutil.copytree(submission, tmp_path / "more")
    (more / "plugins" / "extra.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError) as refused:
        verify(more, tmp_path / "again")
    assert "extra.py" in str(refused.value)
    (submission / "experiment.toml").write_text('name = "other"\n')
    with pytest.raises(DataError) as refused:
        verify(submission, tmp_path / "again")
    assert "experiment.toml" in str(refused.value)


def test_results_of_another_experiment_are_refused(submission, tmp_path):
    rewrite(submission, "experiment.toml", lambda text: text.replace("epochs = 1", "epochs = 2"))
    with pytest.raises(DataError) as refused:
        verify(submission, tmp_path / "again")
    assert "another experiment" in str(refused.value)


def test_code_of_a_submission_runs_only_if_its_reader_loads_it(grid, tmp_path, monkeypatch):
    plugin = tmp_path / "mine.py"
    plugin.write_text("raise SystemExit\n")
    monkeypatch.setenv(PLUGINS, str(plugin))
    submission = submit(grid, tmp_path / "submission", "A. Researcher")
    monkeypatch.setenv(PLUGINS, "")
    with pytest.raises(ConfigError) as refused:
        verify(submission, tmp_path / "again")
    assert "--plugin" in str(refused.value)
    rewrite(
        submission,
        "experiment.toml",
        lambda text: text.replace('"digits"', '"mine:rows"'),
    )
    monkeypatch.setenv(PLUGINS, str(plugin))
    with pytest.raises(ConfigError) as refused:
        verify(submission, tmp_path / "again")
    assert "function" in str(refused.value)


def test_an_incomplete_study_is_no_submission(grid, tmp_path):
    open_one = shutil.copytree(grid, tmp_path / "open")
    shutil.rmtree(next((open_one / "cells").glob("none*")))
    with pytest.raises(RunFolderError) as refused:
        submit(open_one, tmp_path / "submission", "A. Researcher")
    assert "incomplete" in str(refused.value)
    assert not (tmp_path / "submission").exists()


def test_a_submission_carries_no_rows_and_no_models(submission):
    files = {str(one.relative_to(submission)) for one in submission.rglob("*") if one.is_file()}
    assert files == {"submission.json", "experiment.toml", "results.json"}
