"""`vfl mpc`: train and infer for people and for machines, and mistakes."""

import json

import pytest


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_train_and_infer_for_machines(vfl, loans, mode):
    words = ("--in-process", "--json")
    done = vfl("mpc", "train", loans, "--mode", mode, "--hidden", "4", "--out", "run", *words)
    assert done.code == 0, done.err
    card = json.loads(done.out)
    assert card["mode"] == mode
    assert card["parties"] == {"P0": "bank", "P1": "shop", "P2": "lender"}
    assert {"test_accuracy", "bytes_online", "leakage", "run"} <= set(card)
    assert len(done.err.splitlines()) == 3
    again = vfl("mpc", "infer", "run", *words)
    assert json.loads(again.out)["test_accuracy"] == card["test_accuracy"]


def test_what_people_read(vfl, loans):
    done = vfl("mpc", "train", loans, "--in-process", "--out", "run")
    lines = done.out.splitlines()
    assert lines[2].split(maxsplit=1) == ["P2", "lender (deals, sees permuted sums, the labels)"]
    assert any(line.startswith("P2 saw") and "layer 0" in line for line in lines)
    assert lines[-1].split() == ["run", "run"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mode", "quick"], "V103"),
        (["--hidden", "4,x"], "--hidden"),
        (["--learning-rate", "-1"], "V103"),
        (["-s", "train.batch_rows=5000"], "V103"),
    ],
)
def test_mistakes(vfl, loans, words, told):
    done = vfl("mpc", "train", loans, "--in-process", "--out", "run", *words)
    assert done.code == 2
    assert told in done.err
    assert not (loans.parent / "run").exists()


def test_a_folder_that_is_no_private_run(vfl, tmp_path):
    done = vfl("mpc", "infer", tmp_path)
    assert done.code == 2
    assert "V007" in done.err
