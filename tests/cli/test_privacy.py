"""`vfl privacy`: from noise to epsilon, and back."""

import json

import pytest

from vfl.experiments.pages import build_report
from vfl.privacy.accountants import gaussian_epsilon

KNOWN = {"moments": 1.2586, "strong_composition": 9.3536, "rdp": 1.0355, "pld": 0.947}


def test_the_command_prints_all_four(vfl):
    words = ("--sampling-rate", ".01", "--noise", "4", "--steps", "10000", "--delta", "1e-5")
    told = json.loads(vfl("privacy", "epsilon", *words, "--json").out)
    for name, value in KNOWN.items():
        if told[name] is not None:
            assert told[name] == pytest.approx(value, rel=0.005)
    assert "1.03549" in vfl("privacy", "epsilon", *words).out


def test_the_command_and_back(vfl):
    planned = ("--rows", "60000", "--batch-size", "600", "--epochs", "100", "--delta", "1e-5")
    found = json.loads(vfl("privacy", "noise", "--epsilon", "2", *planned, "--json").out)
    assert (found["steps"], found["sampling_rate"]) == (10_000, 0.01)
    assert found["noise"] == pytest.approx(2.278, rel=0.005)  # dp-accounting's calibration
    told = json.loads(
        vfl("privacy", "epsilon", "--noise", str(found["noise"]), *planned, "--json").out
    )
    assert told["rdp"] == pytest.approx(2, rel=1e-3)


def test_shuffled_batches_gain_nothing_by_sampling(vfl):
    planned = ("--rows", "60000", "--batch-size", "600", "--epochs", "100", "--noise", "4")
    told = json.loads(vfl("privacy", "epsilon", *planned, "--sampling", "shuffled", "--json").out)
    assert told["exact"] == gaussian_epsilon(2.0, 10.0, 1e-5)  # 100 steps, two norms apart
    assert told["relation"] == "replace"


@pytest.mark.parametrize(
    "words",
    [(), ("--rows", "10"), ("--steps", "5"), ("--rows", "10", "--batch-size", "5", "--epochs", "1",
     "--sampling-rate", ".1", "--steps", "2"),
     ("--sampling-rate", ".1", "--steps", "2", "--sampling", "shuffled")],
)  # fmt: skip
def test_the_command_wants_one_plan(refused, words):
    refused("privacy", "epsilon", "--noise", "1", *words)


def test_an_audit_of_a_run_is_kept_beside_it_and_shown(vfl, refused, tmp_path):
    lines = ["[parties.left]", "[parties.right]", "[data]", "rows = 400", "[train]", "epochs = 1",
             "[dp]", "noise = 2.0"]  # fmt: skip
    (tmp_path / "private.toml").write_text("\n".join(lines))
    trained = json.loads(vfl("train", "private.toml", "--json").out)
    asked = ("privacy", "audit", trained["run"], "--canaries", 20)
    told = json.loads(vfl(*asked, "--json").out)
    assert told["proved"]["canaries"] == 20
    assert told["claimed"]["epsilon"] == pytest.approx(trained["privacy"][0]["epsilon"], rel=0.1)
    assert told["text"] in build_report(tmp_path / trained["run"]).read_text()
    refused(*asked, "-s", "seed=1")
    assert "not refuted" in vfl("privacy", "audit", "private.toml", "--canaries", 20).out
