"""A private training is the training in clear, and its card tells what happened."""

import json
import stat

import numpy as np
import pandas as pd
import pytest
import torch
from sealed import weights_at

from vfl.config.experiment import LabelSettings, PartySettings
from vfl.core.errors import BadOptionError, ConfigError, RingRangeError, RunFolderError
from vfl.core.storage import read_lines
from vfl.mpc.ring import decode
from vfl.training.run import load_data
from vfl.triple import infer_private, program, train_private
from vfl.triple.program import first_weights


def opened(folder, bits):
    """The weights, which only both holders together can tell."""
    shares = [weights_at(folder / holder / "share.safetensors") for holder in ("P0", "P1")]
    return {name: decode(shares[0][name] + shares[1][name], bits) for name in shares[0]}


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize(
    ("source", "label", "hidden", "rate"),
    [
        ("breast_cancer", "lender", (), 0.5),
        ("breast_cancer", "bank", (8,), 0.5),
        ("digits", "shop", (16,), 0.5),
    ],
)
def test_the_curve_is_that_in_clear(
    tmp_path, experiment, in_clear, mode, source, label, hidden, rate
):
    asked = experiment(source, label, rows=300)
    card = train_private(
        asked,
        tmp_path / "run",
        mode=mode,
        hidden=hidden,
        learning_rate=rate,
        processes=False,
        weights_seed=0,
    )
    outputs, weights, labels = in_clear(card, asked)
    found = opened(tmp_path / "run", card["plan"]["bits"])
    for name, value in weights.items():
        error = float((found[name] - value.detach()).abs().max())
        assert error < 1e-4 * max(1.0, float(value.detach().abs().max())), name
    assert len(card["history"]) == 1
    guess = (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(1)
    assert card["test_accuracy"] == pytest.approx(
        float((guess == labels).double().mean()), abs=0.001
    )


def regression(folder, experiment, unit=1.0, label="lender", **train):
    """An experiment whose labels are sums of columns, in some unit."""
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(200, 4))
    table = pd.DataFrame(columns, columns=list("abcd"))
    table["y"] = unit * (columns @ [3.0, -2.0, 1.0, 0.5] + 4 + 0.1 * draw.normal(size=200))
    table.to_csv(folder / "table.csv", index=False)
    labels = LabelSettings(party=label, column="y", task="regression")
    parties = {"bank": PartySettings(columns=("a", "b")), "shop": PartySettings(columns=("c", "d"))}
    asked = experiment(str(folder / "table.csv"), **train)
    return asked.model_copy(update={"label": labels, "parties": parties})


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_a_regression(tmp_path, experiment, in_clear, mode):
    asked = regression(tmp_path, experiment, epochs=10)
    card = train_private(
        asked, tmp_path / "run", mode=mode, learning_rate=0.1, processes=False, weights_seed=0
    )
    outputs, _, labels = in_clear(card, asked)
    rmse = float(((outputs[:, 0] - labels) ** 2).mean().sqrt())
    assert rmse < 0.2
    assert card["test_rmse"] == pytest.approx(rmse, rel=1e-3)


@pytest.mark.parametrize("label", ["lender", "bank"])
def test_labels_that_are_too_large_are_named(tmp_path, experiment, label):
    asked = regression(tmp_path, experiment, unit=100.0, label=label)
    with pytest.raises(RingRangeError, match="does not fit") as caught:
        train_private(asked, tmp_path / "run", learning_rate=0.1, processes=False)
    assert (caught.value.where, caught.value.got) == ("targets", "11 bits before the point")
    assert "scale the labels" in caught.value.fix


def test_first_weights_that_are_too_large_are_named(tmp_path, experiment, monkeypatch):
    drawn = first_weights

    def large(plan, holder):
        return {
            name: value + 256 * (name == "0.bias") for name, value in drawn(plan, holder).items()
        }

    monkeypatch.setattr(program, "first_weights", large)
    with pytest.raises(RingRangeError) as caught:
        train_private(experiment(rows=100), tmp_path / "run", processes=False)
    assert caught.value.where == "0.bias"


def test_columns_that_are_too_large_are_named(tmp_path, experiment, monkeypatch):
    """An outlier among the test rows, which the encoder has not seen."""
    asked = regression(tmp_path, experiment)
    table = pd.read_csv(tmp_path / "table.csv")
    test = load_data(asked)["shop"].split.test
    table.loc[test[0], "c"] = 1e6
    table.to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(RingRangeError) as caught:
        train_private(asked, tmp_path / "run", processes=False)
    assert caught.value.where == "test inputs of P1"
    assert caught.value.fix.startswith("scale the columns")


def test_the_card(tmp_path, experiment):
    folder = tmp_path / "run"
    card = train_private(experiment(), folder, hidden=(4,), processes=False)
    kept = json.loads((folder / "mpc.json").read_text())
    assert {key: kept[key] for key in card} == json.loads(json.dumps(card))
    assert card["parties"] == {"P0": "bank", "P1": "shop", "P2": "lender"}
    assert card["bytes_online"] > card["bytes_offline"] > 0
    assert sum(row["wire_bytes"] for row in card["traffic"]) == sum(
        card[f"bytes_{phase}"] for phase in ("setup", "offline", "online")
    )
    seen = {(leak["observer"], leak["what"]) for leak in card["leakage"]}
    assert seen == {
        ("P1", "indices near the turning point"),
        ("P2", "permuted values"),
        ("P2", "result"),
        *((observer, "digest of row ids") for observer in ("P0", "P1", "P2")),
    }
    digests = [leak for leak in card["leakage"] if leak["what"] == "digest of row ids"]
    assert [(leak["observer"], leak["where"]) for leak in digests] == [
        ("P0", "P1"), ("P0", "P2"), ("P1", "P0"), ("P1", "P2"), ("P2", "P0"), ("P2", "P1"),
    ]  # fmt: skip
    for holder in ("P0", "P1"):
        mode = (folder / holder / "share.safetensors").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_every_question_has_a_card(tmp_path, experiment):
    folder = tmp_path / "run"
    train_private(experiment(), folder, processes=False)
    cards = [infer_private(folder, processes=False) for _ in range(2)]
    kept = list(read_lines(folder / "asked.jsonl"))
    assert [one["leakage"] for one in kept] == [card["leakage"] for card in cards]
    assert all(one["test_accuracy"] == cards[0]["test_accuracy"] for one in kept)


@pytest.mark.parametrize("label", ["lender", "bank"])
@pytest.mark.parametrize("every", [False, True])
def test_test_outputs_are_revealed_once_unless_asked_for(tmp_path, experiment, label, every):
    """Those of a regression are linear: with enough of them columns follow by linear algebra."""
    told, asked = [], experiment(label=label, rows=200, epochs=4)
    card = train_private(
        asked, tmp_path / "run", test_every_epoch=every, processes=False, tell=told.append
    )
    reveals = 4 if every else 1
    (seen,) = [leak for leak in card["leakage"] if leak["where"] == "test outputs"]
    assert (seen["what"], seen["times"]) == ("result", reveals)
    assert seen["elements"] == reveals * card["plan"]["test_rows"]
    assert len(card["history"]) == reveals
    assert [each["epoch"] for each in told] == [1, 2, 3, 4]
    assert ["accuracy" in each for each in told] == [*[every] * 3, True]
    assert told[-1] == {"epoch": 4, **card["history"][-1]}


def test_first_weights_and_shares_are_secret(tmp_path, experiment):
    """Two trainings from one seed share nothing that P2 could know beforehand."""
    asked = experiment(rows=100)
    for name in ("one", "two"):
        train_private(asked, tmp_path / name, processes=False)
    one, two = (weights_at(tmp_path / name / "P1" / "share.safetensors") for name in ("one", "two"))
    assert not torch.equal(one["0.weight"], two["0.weight"])
    weights = [opened(tmp_path / name, 21)["0.weight"] for name in ("one", "two")]
    assert float((weights[0] - weights[1]).abs().max()) > 1e-3


def test_the_shares_answer_later(tmp_path, experiment):
    card = train_private(experiment(), tmp_path / "run", hidden=(4,), processes=False)
    again = infer_private(tmp_path / "run", processes=False)
    assert again["test_accuracy"] == card["test_accuracy"]
    assert again["test_log_loss"] == pytest.approx(card["test_log_loss"], abs=1e-4)
    with pytest.raises(RunFolderError, match="no private network"):
        infer_private(tmp_path, processes=False)


def test_shares_are_held_by_two(tmp_path, experiment):
    asked = experiment()
    third = asked.model_copy(update={"parties": {**asked.parties, "club": asked.parties["bank"]}})
    with pytest.raises(ConfigError, match="two parties"):
        train_private(third, tmp_path / "run", processes=False)


def test_a_batch_that_is_too_large(tmp_path, experiment):
    with pytest.raises(BadOptionError, match="batch"):
        train_private(experiment(rows=100, batch_rows=99), tmp_path / "run", processes=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_mnist_as_in_figure_5_4(tmp_path, experiment, in_clear, data_root, monkeypatch, mode):
    """784-128-10, half of the rows: within 0.1 point of the training in clear."""
    monkeypatch.setenv("VFL_DATA", str(data_root))
    asked = experiment("mnist", rows=35_000, epochs=2, batch_rows=128)
    card = train_private(
        asked,
        tmp_path / "run",
        mode=mode,
        hidden=(128,),
        learning_rate=0.1,
        processes=False,
        weights_seed=0,
    )
    outputs, _, labels = in_clear(card, asked)
    accuracy = float((outputs.argmax(1) == labels).double().mean())
    assert accuracy > 0.8
    print(f"{mode}: {card['test_accuracy']:.4f}, in clear {accuracy:.4f}")
    assert abs(card["test_accuracy"] - accuracy) <= 0.001
