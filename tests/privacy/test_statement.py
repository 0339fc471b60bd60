"""Promises are stated whole, reach everybody who reads a run, and add up only where they may."""

import json

import pytest

from vfl.config import Experiment
from vfl.core.errors import PrivacyError
from vfl.experiments.pages import build_report
from vfl.privacy import PrivacyStatement, added
from vfl.session import PartyFolder
from vfl.training.run import train

LABEL = {"epsilon": 2.0, "unit": "label", "relation": "replace", "accountant": "a coin"}


def test_epsilons_of_the_same_thing_add_up_with_their_assumptions():
    one = PrivacyStatement("labels", "everybody", delta=1e-5, assumes=("a", "b"), **LABEL)
    two = PrivacyStatement("labels", "everybody", delta=1e-6, assumes=("b", "c"), **LABEL)
    both = added([one, two])
    assert (both.epsilon, both.delta) == (4.0, pytest.approx(1.1e-5))
    assert (both.accountant, both.assumes) == ("basic composition", ("a", "b", "c"))
    assert added([one]).accountant == "a coin"


@pytest.mark.parametrize(
    "other",
    [
        {"unit": "record"},
        {"unit": "client"},
        {"relation": "add or remove"},
        {"per": "epoch"},
        {"adversary": "outsider with the model"},
        {"epsilon": None},
    ],
    ids=str,
)
def test_other_epsilons_are_never_added(other):
    one = PrivacyStatement("labels", "everybody", **LABEL)
    with pytest.raises(PrivacyError, match="same kind"):
        added([one, PrivacyStatement("labels", "everybody", **LABEL | other)])
    with pytest.raises(PrivacyError):
        added([])


def test_a_promise_reaches_run_card_and_report(tmp_path):
    experiment = Experiment.model_validate(
        {
            "defense": "label_dp:flip=0.1+clipped_noise:sigma=4",
            "parties": {"left": {"width": 4, "bottom": "mlp:hidden=none"}},
            "data": {"rows": 120},
            "train": {"epochs": 1},
        }
    )
    summary = train(experiment, tmp_path, "run")
    label, row = summary["privacy"]
    assert (label["unit"], label["epsilon"]) == ("label", pytest.approx(4.394, abs=1e-3))
    assert (row["unit"], row["per"]) == ("record", "exchange")
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["privacy"] == [label, row]
    card = PartyFolder(tmp_path / "run" / "parties" / "left").card()
    assert row in card["privacy"]["states"]
    page = build_report(tmp_path / "run").read_text()
    assert "epsilon 4.394 for one label in one training" in page
