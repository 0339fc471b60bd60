"""`vfl check`: the plan of an experiment, a party's own file and a project, and their mistakes."""

import json

import pandas as pd
import pytest

from vfl.config import read_experiment
from vfl.training.run import train

PARTY = """\
party = "bank"
[data]
source = "loans.csv"
id = "customer"
columns = ["income", "debt", "town"]
"""


def facts_of(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_plan_of_an_experiment(vfl, breast_cancer, tmp_path):
    facts = facts_of(vfl("check", breast_cancer, "--json"))
    assert (facts["train_rows"], facts["validation_rows"], facts["test_rows"]) == (398, 57, 114)
    assert facts["steps_per_epoch"] == 13  # 398 rows, 32 at a time
    assert facts["inputs"] == {"radiology": "15", "pathology": "15"}
    assert (facts["parties"], facts["label_party"]) == ("radiology", "pathology")
    summary = train(read_experiment(breast_cancer, ["train.epochs=2"]), tmp_path, "short")
    asked = facts_of(vfl("check", breast_cancer, "--json", "-s", "train.epochs=2"))
    sent = sum(summary["bytes_up"].values()) + sum(summary["bytes_down"].values())
    assert sent <= asked["at_most_bytes"] < 2 * sent
    assert asked["at_most_bytes"] < facts["at_most_bytes"]


def test_a_partys_own_file(vfl, tmp_path, table):
    path = tmp_path / "bank.toml"  # whatever it is called
    path.write_text(PARTY)
    facts = facts_of(vfl("check", path, "--json"))
    assert (facts["party"], facts["rows"]) == ("bank", 200)
    assert facts["inputs"] == "5"  # income, debt, and three towns
    assert facts["consent"]["max_width"] == 256
    assert "c000" not in json.dumps(facts)


def test_settings_change_experiments_only(refused, tmp_path, table):
    path = tmp_path / "party.toml"
    path.write_text(PARTY)
    done = refused("check", path, "-s", "train.epochs=3")
    assert "not a party's own file" in done.err


@pytest.fixture
def project(vfl, table, tmp_path):
    """A project whose label party has its table."""
    done = vfl("init", "project", "--party", "bank", "--party", "shop")
    assert (done.code, done.out) == (0, "")
    folder = tmp_path / "project"
    labels = table[["customer", "paid"]].rename(columns={"customer": "id", "paid": "label"})
    labels.to_csv(folder / "label" / "data.csv", index=False)
    return folder


def test_a_project_and_its_label_folder(vfl, project):
    facts = facts_of(vfl("check", project, "--json"))
    assert facts == facts_of(vfl("check", project / "label", "--json"))
    assert facts["keys_of"] == ["bank", "shop"]
    assert (facts["train_rows"], facts["validation_rows"], facts["test_rows"]) == (140, 20, 40)
    assert facts_of(vfl("check", project, "--json", "-s", "train.epochs=3"))["epochs"] == 3


def test_the_label_partys_file_is_checked_with_its_project(vfl, project):
    labels = project / "label" / "data.csv"
    lines = [f"c{number},{number / 7}" for number in range(30)]
    labels.write_text("\n".join(["id,label", *lines]))
    experiment = project / "label" / "app" / "experiment.toml"
    assert "set task" in vfl("check", project / "label" / "party.toml").err
    experiment.write_text(experiment.read_text().replace("classification", "regression"))
    facts = facts_of(vfl("check", project / "label" / "party.toml", "--json"))
    assert facts == facts_of(vfl("check", project, "--json"))
    assert facts["test_rows"] == 6


@pytest.mark.parametrize("setting", ["columns=['income']", "source=mine.csv", "shape=[1, 2, 2]"])
def test_a_project_names_nobodys_table(refused, project, setting):
    done = refused("check", project, "-s", f"parties.bank.{setting}")
    assert f"parties.bank.{setting.partition('=')[0]}" in done.err
    assert "party.toml" in done.err


def test_every_spec_that_cannot_be_used(refused, breast_cancer):
    specs = ["codec=topkk:k=3", "defense=layer_nrm", "label.top=mpl"]
    specs += ["parties.radiology.bottom=mlp:hiden=4", "parties.pathology.bottom=cnnn"]
    done = refused("check", breast_cancer, *(word for spec in specs for word in ("-s", spec)))
    assert "5 problems in breast_cancer.toml" in done.err
    for setting, hint in [
        ("codec", "did you mean 'topk'?"),
        ("defense", "did you mean 'layer_norm'?"),
        ("label.top", "did you mean 'mlp'?"),
        ("parties.radiology.bottom", "did you mean 'hidden'?"),
        ("parties.pathology.bottom", "did you mean 'cnn'?"),
    ]:
        (line,) = (text for text in done.err.splitlines() if f".toml: {setting}: " in text)
        assert line.endswith(hint)


def test_the_same_table_at_two_parties_in_another_order(vfl, tmp_path, table):
    shuffled = table.sample(frac=1, random_state=1)
    shuffled.drop(columns=["income", "paid"]).to_parquet(tmp_path / "shop.parquet", index=False)
    table[["customer", "income"]].to_parquet(tmp_path / "bank.parquet")
    (tmp_path / "joined.toml").write_text(
        "[data]\nsource = 'loans.csv'\nid = 'customer'\n[label]\ncolumn = 'paid'\n"
        "[parties.bank]\nsource = 'bank.parquet'\n[parties.shop]\nsource = 'shop.parquet'\n"
    )
    facts = facts_of(vfl("check", "joined.toml", "--json"))
    assert facts["inputs"] == {"bank": "1", "shop": "4"}
    assert sum(facts[f"{part}_rows"] for part in ("train", "validation", "test")) == 200


def test_advice_for_a_slow_link(vfl, well, project):
    slow = ("--round-trip-ms", "40", "--mbps", "80", "-s", "train.in_flight=6")
    done = well("check", project, *slow)
    assert "round trip ms            40.0" in done.out
    assert "train.in_flight above 5 reduces accuracy" in done.out
    facts = facts_of(vfl("check", project, "--json", "--round-trip-ms", "40", "--mbps", "80"))
    # 64 rows of two cuts of 32 float32 take 1.64 ms on 80 Mbit/s, one way.
    assert facts["exchanges_per_second"] == pytest.approx(
        1 / (0.040 + 0.001 + 2 * 0.00164), abs=0.1
    )
    (line,) = facts["advice"]  # 140 training rows are too few for a larger batch
    assert line.startswith("-s train.batch_size=64 -s train.learning_rate=0.001 -s train.in_flight")
    *words, _, _, _, _, _, _, _, _ = line.split()
    well("check", project, *words)
    assert facts_of(vfl("check", project, "--json", "--round-trip-ms", "2"))["advice"] == []


def test_the_round_trip_is_measured_where_a_party_connects(vfl, project, monkeypatch):
    asked = []

    def measured(address):
        asked.append(address)
        return 0.041

    monkeypatch.setattr("vfl.transport.round_trip_s", measured)
    pd.DataFrame({"id": [f"c{n:03d}" for n in range(200)], "x": range(200)}).to_csv(
        project / "bank" / "data.csv", index=False
    )
    facts = facts_of(vfl("check", project / "bank" / "party.toml", "--measure", "--json"))
    assert facts["round_trip_ms"] == 41.0
    assert "--round-trip-ms 41" in facts["advice"][0]
    assert facts_of(vfl("check", project, "--measure", "--json"))["round_trip_ms"] == 41.0
    assert asked == ["127.0.0.1:8000"] * 2


def test_all_of_a_grid_that_does_not_fit_its_rows(vfl, refused, tmp_path):
    path = tmp_path / "ten.toml"
    path.write_text(
        "data.rows = 400\n[parties.client]\nwidth = 8\n[grid]\n"
        "defenses = ['layer_norm', 'marvell']\n"
        "attacks = ['logistic', 'gradient_norm']\nleaks = [1, 50]\n"
    )
    done = refused("check", path)
    assert "3 problems in ten.toml" in done.err
    told = ["ten.toml:5: grid.defenses: marvell: 'marvell' hides which of two classes a row has"]
    told += ["ten.toml:6: grid.attacks: gradient_norm: this attack distinguishes two classes only"]
    told += ["ten.toml:7: grid.leaks: 50 labels of each class should leak, but a class has fewer"]
    assert [mistake for mistake in told if mistake not in done.err] == []
    assert not (tmp_path / "runs").exists()

    one = vfl("check", path, "-s", "grid.leaks=[1]", "-s", "grid.attacks=['logistic']")
    assert "where ten.toml:5: grid.defenses" in one.err
    assert "got   10 classes" in one.err
    fitting = ("-s", "grid.defenses=layer_norm")
    assert (
        vfl("check", path, "-s", "grid.leaks=[1]", "-s", "grid.attacks=light", *fitting).code == 0
    )
    owned = vfl(
        "check", path, *fitting, "-s", "grid.attacks=surrogate", "-s", "grid.trained_by=owner"
    )
    assert "ten.toml: grid.attacks" in owned.err
    assert "an owner that trains alone sends no frames" in owned.err


def test_one_process_has_no_link_to_measure(refused, breast_cancer):
    done = refused("check", breast_cancer, "--measure")
    assert "has no network link" in done.err
