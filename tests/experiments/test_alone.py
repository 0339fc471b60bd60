"""What a run gains over each of its parties alone, on its page."""

import numpy as np
import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.experiments.pages import build_report, glance
from vfl.experiments.study import plan_study, run_study, train_alone
from vfl.experiments.value import alone_scores
from vfl.training.run import train

ABOUT = {
    "data": {"source": "breast_cancer", "rows": 300},
    "parties": {"clinic": {"width": 4}, "laboratory": {"width": 4}},
    "codec": "topk:k=2",
    "train": {"epochs": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(Experiment.model_validate(ABOUT), root, "joined")
    return root / "joined"


def test_a_run_stands_beside_each_party_alone(run, tmp_path):
    before = glance(run).sentence
    assert "alone" not in before
    said = []
    train_alone(run, on_end=lambda ended: said.append(ended.cell.about["what"]))
    assert said == ["clinic alone", "laboratory alone"]
    scores = {party: own["0"] for party, own in alone_scores(run).items()}
    reached = RunFolder(run).summary()["test_auc"]
    gains = [100 * (reached - scores[name]["test_auc"]) for name in ("clinic", "laboratory")]
    words = f"({gains[0]:+.1f} points beside clinic alone, {gains[1]:+.1f} points beside laboratory"
    assert words in glance(run).sentence
    assert words in build_report(run).read_text(encoding="utf-8")
    # The same as a training of that party's columns and nobody else's on the same rows.
    assert scores["clinic"]["bytes_up"].keys() == {"alone"}
    assert scores["clinic"]["codec"] == "none"
    assert scores["clinic"]["test_auc"] != scores["laboratory"]["test_auc"]


def test_a_run_that_did_not_end_has_nothing_to_stand_beside(tmp_path):
    experiment = Experiment.model_validate(ABOUT)
    folder = RunFolder.create(tmp_path / "half", experiment, "in-process", "vfl train")
    with pytest.raises(RunFolderError):
        train_alone(folder.path)


def test_rows_of_a_federation_are_nobodys(run, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "mode", "federated")
    with pytest.raises(RunFolderError, match="rows of all parties") as caught:
        train_alone(run)
    assert "vfl value" in caught.value.fix


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("compare", {"codecs": ["none", "topk:k=2"], "folds": 2}),
        ("grid", {"attacks": ["kmeans"], "baselines": ["raw"], "leaks": [1], "draws": 1,
                  "seeds": [0, 1], "pictures": 0}),
    ],
)  # fmt: skip
def test_a_study_says_what_joining_gains_over_each_party(kind, table, tmp_path):
    study = plan_study(kind, Experiment.model_validate(ABOUT | {"codec": "none", kind: table}))
    found = run_study(study, tmp_path / "study", f"vfl {kind}", study.cells)
    frame, scores = found.table, alone_scores(found.path)["clinic"]
    joined = frame[(frame.subject == "test rows") & (frame.measure == "auc")]
    joined = joined[(joined.defense == "none") & (joined.codec == "none")].set_index("repeat").value
    assert set(scores) == set(joined.index) == ({"0", "1"} if kind == "grid" else set(scores))
    assert len(scores) == 2
    gain = np.mean([joined[repeat] - own["test_auc"] for repeat, own in scores.items()])
    assert f"({100 * gain:+.1f} ± " in found.sentence
    assert "points beside clinic alone, " in found.sentence
