"""Real tables cut in three, ids written in three ways: aligned, trained on, and never shown."""

import numpy as np
import pandas as pd
import pytest
from cut_tables import TABLES, cut, real_table

from vfl.config import read_experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import MisalignedError, MissingDataError, RunFolderError
from vfl.datasets.alignment import protocols
from vfl.datasets.alignment.positions import Alignment
from vfl.training import alignment
from vfl.training.run import evaluate, load_data, predict, train

EXPERIMENT = """\
[data]
id = "key"
id_rules = "{rules}"
source = "label.csv"
alignment = "alignment"
[parties.bank]
source = "bank.csv"
width = 8
[parties.shop]
source = "shop.csv"
width = 8
[label]
column = "{label}"
[train]
epochs = 1
"""
RULES = "decimal+zeros"


@pytest.fixture
def made(tmp_path, data_root):
    """An experiment over three files of a real table, and the numbers that all of them have."""

    def make(name="bank", overlap=0.8, rules=RULES, rows=1500):
        frame, label = real_table(data_root, name)
        common = cut(frame, label, tmp_path, overlap=overlap, rows=rows)
        path = tmp_path / "experiment.toml"
        path.write_text(EXPERIMENT.format(label=label, rules=rules))
        return read_experiment(path), common

    return make


def numbers_of(folder, party, positions):
    keys = pd.read_csv(folder / f"{party}.csv", dtype=str)["key"]
    return [int(float(keys[row])) for row in positions]


@pytest.mark.parametrize(("protocol", "overlap"), [("server_aided", 0.6), ("ecdh:pad=2000", 0.9)])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_positions_lead_to_the_same_people(made, tmp_path, name, protocol, overlap):
    experiment, common = made(name, overlap)
    done = alignment.align(experiment, protocol, tmp_path / "alignment")
    assert done.common == len(common)
    orders = []
    for party in ("bank", "shop", "label"):
        kept = Alignment.newest(tmp_path / "alignment" / party, party)
        orders.append(numbers_of(tmp_path, party, kept.positions))
    assert orders[0] == orders[1] == orders[2]
    assert set(orders[0]) == common


def test_training_evaluating_and_predicting_use_the_positions(made, tmp_path):
    experiment, common = made()
    with pytest.raises(MisalignedError):
        load_data(experiment.model_copy(update={"data": _without(experiment)}))
    with pytest.raises(MissingDataError, match="has no alignment"):
        load_data(experiment)
    alignment.align(experiment, "server_aided", tmp_path / "alignment")
    data = load_data(experiment)
    assert {own.rows for own in data.values()} == {len(common)}
    assert {own.id_rules for own in data.values()} == {experiment.data.id_rules}
    assert len({own.row_digest("x") for own in data.values()}) == 1
    labels = pd.read_csv(tmp_path / "label.csv", dtype=str).set_index("key")["y"]
    label = data["label"]
    assert [label.classes[code] for code in label.labels] == labels[list(label.ids)].tolist()
    summary = train(experiment, tmp_path / "runs", "run")
    assert 0 < summary["test_accuracy"] <= 1
    folder = RunFolder.open(tmp_path / "runs" / "run")
    assert evaluate(folder)["test_accuracy"] == summary["test_accuracy"]
    predicted = pd.read_csv(predict(folder), dtype=str)
    assert set(map(int, predicted["id"])) <= common


def _without(experiment):
    return experiment.data.model_copy(update={"alignment": None, "id_rules": "plain"})


def test_a_version_is_used_until_ids_change(made, tmp_path):
    experiment, common = made()
    folder = tmp_path / "alignment"
    first = alignment.align(experiment, "server_aided", folder)
    again = alignment.align(experiment, "server_aided", folder)
    assert (first.reused, again.reused, again.common) == (False, True, len(common))
    cells = pd.read_csv(tmp_path / "bank.csv", dtype=str)
    cells.assign(age="1").to_csv(tmp_path / "bank.csv", index=False)
    assert alignment.align(experiment, "server_aided", folder).reused
    cells[::-1].to_csv(tmp_path / "bank.csv", index=False)
    with pytest.raises(MisalignedError, match="have changed since"):
        load_data(experiment)
    third = alignment.align(experiment, "server_aided", folder)
    assert (third.reused, third.versions) == (False, {"bank": 2, "shop": 2, "label": 2})
    load_data(experiment)
    assert not alignment.align(experiment, "ecdh", folder).reused


def test_positions_of_two_alignments_are_not_mixed(made, tmp_path):
    experiment, _ = made()
    folder = tmp_path / "alignment"
    alignment.align(experiment, "server_aided", folder)
    alignment.align(experiment, "ecdh", folder)
    (folder / "shop" / "0002.positions").unlink()
    with pytest.raises(MisalignedError, match="different alignments"):
        load_data(experiment)


def test_damaged_and_foreign_positions_are_refused(made, tmp_path):
    experiment, _ = made()
    folder = tmp_path / "alignment"
    alignment.align(experiment, "server_aided", folder)
    path = folder / "shop" / "0001.positions"
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for damaged in (whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        path.write_bytes(damaged)
        with pytest.raises(RunFolderError):
            load_data(experiment)
    path.write_bytes((folder / "bank" / "0001.positions").read_bytes())
    with pytest.raises(RunFolderError, match="another kind, party or run"):
        load_data(experiment)


@pytest.mark.parametrize("protocol", ["server_aided", "ecdh"])
def test_no_id_is_on_a_wire_or_in_a_file(made, tmp_path, monkeypatch, capfd, protocol):
    """Every id gets a mark that no random bytes hold by chance."""
    experiment, common = made()
    for party in ("bank", "shop", "label"):
        cells = pd.read_csv(tmp_path / f"{party}.csv", dtype=str)
        cells["key"] = "planted-marker-" + cells["key"].map(lambda key: str(int(float(key))))
        cells.to_csv(tmp_path / f"{party}.csv", index=False)
    wire, play = [], protocols.play

    def recorded(name, owns, label_party, observe):
        def noted(sender, to, payload):
            wire.append(bytes(payload))
            observe(sender, to, payload)

        return play(name, owns, label_party, noted)

    monkeypatch.setattr(alignment, "play", recorded)
    done = alignment.align(experiment, protocol, tmp_path / "alignment")
    assert done.common == len(common)
    load_data(experiment)
    assert len(b"".join(wire)) == sum(done.traffic.payload_bytes.values()) > 16 * 3 * 1000
    written = [path for path in (tmp_path / "alignment").rglob("*.positions")]
    assert len(written) == 3
    for content in (b"".join(wire), *(path.read_bytes() for path in written)):
        assert b"planted-marker" not in content
    assert "planted-marker" not in "".join(capfd.readouterr())


def test_gains_are_counted_and_nothing_is_kept(made, tmp_path):
    experiment, common = made(rules="plain")
    gains = alignment.preview(experiment, "server_aided", "plain+decimal+zeros")
    assert [gain.common for gain in gains] == [0, 0, len(common)]
    assert [gain.gained for gain in gains] == [0, 0, len(common)]
    sizes = {party: len(pd.read_csv(tmp_path / f"{party}.csv")) for party in ("bank", "shop")}
    assert gains[1].changed == {"bank": 0, "shop": sizes["shop"], "label": 0}
    assert gains[2].changed["bank"] == sizes["bank"]
    assert not (tmp_path / "alignment").exists()


def test_tables_that_hardly_meet_are_told_in_counts(made, tmp_path):
    experiment, _ = made(rules="plain")
    with pytest.raises(MisalignedError) as caught:
        alignment.align(experiment, "server_aided", tmp_path / "alignment")
    assert str(caught.value).startswith("error[V206]: no ids are common")
    assert "--preview" in caught.value.fix
    assert not (tmp_path / "alignment").exists()


def test_rows_that_a_rule_makes_alike_are_counted(made, tmp_path):
    experiment, _ = made()
    cells = pd.read_csv(tmp_path / "shop.csv", dtype=str)
    cells.loc[0, "key"] = f"00{cells.loc[1, 'key']}"
    cells.to_csv(tmp_path / "shop.csv", index=False)
    with pytest.raises(MisalignedError) as caught:
        alignment.align(experiment, "server_aided", tmp_path / "alignment")
    assert caught.value.got == "1 rows repeat another row's id, 0 of them before normalisation"


def test_a_composite_id_aligns_and_is_no_feature(tmp_path):
    names = [f"Name {number}" for number in range(300)]
    days = [f"{1 + number % 28}.3.1985" for number in range(300)]
    draw = np.random.default_rng(0)
    order = draw.permutation(300)
    pd.DataFrame({"name": names, "born": days, "a": draw.normal(size=300)}).to_csv(
        tmp_path / "bank.csv", index=False
    )
    iso = [f"1985-03-{1 + number % 28:02}" for number in order]
    pd.DataFrame(
        {"name": [names[row].upper() for row in order], "born": iso, "y": order % 2}
    ).to_csv(tmp_path / "label.csv", index=False)
    text = EXPERIMENT.format(label="y", rules="space+case+date").replace("key", "name+born")
    a, b = text.index("[parties.shop]"), text.index("[label]")
    (tmp_path / "experiment.toml").write_text(text[:a] + text[b:])
    experiment = read_experiment(tmp_path / "experiment.toml")
    assert alignment.align(experiment, "server_aided", tmp_path / "alignment").common == 300
    data = load_data(experiment)
    assert data["bank"].inputs.shape == (300, 1)
    assert "\x1f" not in "".join(data["label"].ids)
