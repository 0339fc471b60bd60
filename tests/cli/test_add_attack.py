"""`vfl grid --add-attack`: an attack of one's own file against what a grid stored."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

from vfl.attacks import ATTACKS
from vfl.config import Experiment
from vfl.core.errors import RunFolderError, UserError
from vfl.core.registry import PLUGINS, load_plugin
from vfl.core.storage import read_json, write_json
from vfl.experiments import GridFolder, attack_grid, attack_runner
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.pages import build_report
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scheduler import run_cells
from vfl.experiments.staleness import CODE, UNKNOWN
from vfl.testing import add_attack

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_pipeline.py"
CONTENT = {
    "name": "stored",
    "data": {"rows": 400},
    "parties": {"client": {"width": 8, "bottom": "mlp:hidden=16"}},
    "label": {"top": "linear"},
    "train": {"epochs": 2, "learning_rate": 0.02},
    "grid": {
        "defenses": ["layer_norm"],
        "attacks": ["fine_tuning:steps=20"],
        "baselines": ["scratch", "pca"],
        "leaks": [3],
        "draws": 2,
        "seeds": [0],
        "pictures": 0,
    },
}
OWN = """
__author__, __date__ = "A. Reader", "2026-11-25"
from vfl.attacks import ATTACKS, make
from vfl.attacks.labels.gradients import GradientSimilarity
class Mine(GradientSimilarity):
    def run(self, view, draw):
        {body}
ATTACKS.register("{name}", Mine)
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("grid") / "stored")


def trained(path, **changes):
    experiment = Experiment.model_validate(CONTENT | {"grid": CONTENT["grid"] | changes})
    folder = GridFolder(path)
    folder.write(experiment, grid_cells(experiment), "vfl grid stored.toml")
    assert run_cells(folder, folder.cells()) == []
    return folder


@pytest.fixture
def copy(stored, tmp_path):
    shutil.copytree(stored.path, tmp_path / "copy")
    return GridFolder(tmp_path / "copy")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", dict(ATTACKS._members))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in {"mine", "outside_pipeline"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def mine(tmp_path):
    """Writes a file with an attack on gradients."""

    def write(body="return super().run(view, draw)", name="mine", text=OWN):
        (tmp_path / "mine.py").write_text(text.format(body=body, name=name))
        return tmp_path / "mine.py"

    return write


def own_rows(folder):
    return [vars(row) | {"seconds": None} for row in LoadedGrid(folder).attacks if not row.author]


def test_a_pipeline_is_scored_on_every_victim_beside_its_baselines(copy, monkeypatch):
    monkeypatch.setattr(attack_grid, "train_cell", None)  # nothing is trained
    before = own_rows(copy)
    results = add_attack(copy.path, EXAMPLE, ["pipeline:learner=spreading"])
    found = [row for row in LoadedGrid(copy).attacks if row.author]
    assert len(found) == 2 * 2 * 4  # defenses, draws, measures
    assert len(results.content["rows"]) == len(found)
    assert {(row.author, row.date) for row in found} == {("the examples of vfl", "2026-11-25")}
    assert {frozenset(row.baselines) for row in found} == {frozenset({"scratch", "pca"})}
    assert all(row.value > row.guess for row in found if row.measure == "accuracy")
    assert own_rows(copy) == before
    with (copy.path / "results.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["author"]]
    assert {line["subject"] for line in lines} == {"pipeline:learner=spreading"}
    assert len(lines) == len(found)
    assert "| pipeline:learner=spreading | the examples of vfl | 2026-11-25 |" in results.text

    ran = []
    monkeypatch.setattr(attack_runner, "run_attack", lambda *given: ran.append(given))
    for cell in copy.cells():  # as if it had been killed before the last was written down
        (copy.cells_path / cell.name / "outside.json").unlink()
    assert add_attack(copy.path, EXAMPLE, ["pipeline:learner=spreading"]).content == results.content
    assert not ran


def test_an_attack_that_fails_takes_no_row_of_the_grid_and_tells_no_value(vfl, copy, mine):
    before = own_rows(copy)
    body = "raise ValueError(f'row 17 is {view.targets.cuts[0]}')"
    text = OWN.replace("gradients import GradientSimilarity", "classifiers import Logistic")
    file = mine(body, text=text.replace("(GradientSimilarity)", "(Logistic)"))
    done = vfl("grid", "--add-attack", file, copy.path)
    assert done.code == 1
    assert "a plug-in stopped: ValueError" in done.err
    assert "row 17" not in done.err + done.out
    assert own_rows(copy) == before


@pytest.mark.parametrize("record", [(), ("training",)])
def test_an_attack_on_gradients_uses_what_was_recorded(tmp_path, mine, monkeypatch, record):
    folder = trained(tmp_path / "split", trained_by="split", draws=1, record=record)
    before, ran = own_rows(folder), []
    train = attack_grid.train_cell
    monkeypatch.setattr(attack_grid, "train_cell", lambda *a: (ran.append(a), train(*a)))
    results = add_attack(folder.path, mine())
    assert len(ran) == (0 if record else 2)
    assert not results.failed
    assert {row["subject"] for row in results.content["rows"]} == {"mine"}
    assert own_rows(folder) == before
    traces = list(folder.path.glob("cells/*/parties/client/trace"))
    assert bool(traces) == bool(record)


def test_what_else_is_refused(vfl, copy, mine, tmp_path):
    assert "--draws" in vfl("grid", "--add-attack", mine(), copy.path, "--draws", "3").err
    with pytest.raises(UserError, match="registers no attack, or not"):
        add_attack(copy.path, EXAMPLE, ["kmeans"])
    with pytest.raises(RunFolderError, match="no grid"):
        add_attack(tmp_path, EXAMPLE)
    for made_of in (copy.path / "made_of").iterdir():
        write_json(made_of, read_json(made_of) | {"data": "others"})
    failed = add_attack(copy.path, EXAMPLE).failed
    assert len(failed) == len(copy.cells())
    assert failed[0].failure["what"] == "this victim was trained on other rows or by other code"


def whys(folder):
    """Why rows of attacks from outside are not current."""
    return {row.stale for row in LoadedGrid(folder).attacks if row.author}


def test_an_attack_from_outside_is_stale_once_its_code_is_another(copy, mine):
    add_attack(copy.path, mine(), ["mine"])
    assert whys(copy) == {""}
    for name in list(sys.modules):
        if name == "mine":
            del sys.modules[name]
    ATTACKS._members.pop("mine")
    assert whys(copy) == {""}  # a report that has not loaded it knows its file by the digest
    listed = json.loads((copy.path / "attackers.json").read_text())
    listed["attackers"][0]["sha256"] = "another"
    (copy.path / "attackers.json").write_text(json.dumps(listed))
    assert whys(copy) == {CODE}
    load_plugin(mine(body="return -super().run(view, draw)"))
    assert whys(copy) == {CODE}
    for cell in copy.cells():
        file = copy.cells_path / cell.name / "outside.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"code": {}}))
    assert whys(copy) == {UNKNOWN}
    assert "Stale results, whose rows or code" in build_report(copy.path).read_text()


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (OWN.replace("__author__, __date__", "a, b"), "mine", "no valid author and date"),
        (OWN.replace("2026-11-25", "last week"), "mine", "no valid author and date"),
        (OWN.replace("A. Reader", "A.\\nReader"), "mine", "no valid author and date"),
        (OWN, "kmeans", "two members have the attack name 'kmeans'"),
        ("", "", "registers no attack, or not"),
    ],
)
def test_files_that_are_refused(copy, mine, text, name, says):
    with pytest.raises(UserError, match=says):
        add_attack(copy.path, mine(name=name, text=text))
    assert not (copy.path / "attackers.json").exists()
