import dataclasses

import pandas as pd
import pytest
import torch
from sealed import reseal_json, reseal_weights

from vfl.core import storage
from vfl.core.errors import RunFolderError
from vfl.core.storage import read_json, weights_digest
from vfl.datasets import Dealing, Label, OwnTable, load_table
from vfl.session import PartyFolder

WEIGHTS = {"bottom.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(4)}


@pytest.fixture
def tables():
    """A feature party with an encoder, and a label party with classes."""
    frame = pd.DataFrame(
        {
            "id": [f"r{row:03}" for row in range(40)],
            "income": [row * 10.0 for row in range(40)],
            "town": ["north", "south"] * 20,
            "repaid": ["no", "yes"] * 20,
        }
    )
    columns = {"bank": ["income", "town"]}
    return load_table(OwnTable(frame, "id"), columns, [Label("lender", "repaid")], Dealing(0))


@pytest.fixture
def folder(tmp_path):
    return PartyFolder(tmp_path / "parties" / "bank")


def test_what_a_party_keeps_comes_back(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    again = PartyFolder(folder.path)
    assert weights_digest(again.weights()) == weights_digest(WEIGHTS)
    assert again.encoder().to_json() == tables["bank"].encoder.to_json()
    assert again.classes() is None
    record = read_json(folder.path / "party.json")
    assert (record["party"], record["terms"]["run"]) == ("bank", "trial-1")


def test_a_label_party_keeps_its_classes(folder, tables, terms):
    folder.save(tables["lender"], terms, WEIGHTS)
    assert folder.classes() == ("no", "yes")
    assert folder.encoder() is None


def test_another_format_is_refused_before_anything_is_read(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    reseal_json(folder.path / "party.json", lambda record: record.update(format=7))
    for read in (folder.weights, folder.classes):
        with pytest.raises(RunFolderError, match="another format"):
            read()


def test_a_run_that_a_party_has_not_trained(folder):
    for read in (folder.weights, folder.encoder, folder.classes):
        with pytest.raises(RunFolderError, match="are not in this run"):
            read()


def test_a_crash_before_the_record_leaves_no_run(folder, tables, terms, monkeypatch):
    real = storage.write_sealed_json

    def crash(path, content, seal):
        if path.name == "party.json":
            raise KeyboardInterrupt
        real(path, content, seal)

    monkeypatch.setattr("vfl.session.store.party_folder.write_sealed_json", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.save(tables["bank"], terms, WEIGHTS)
    with pytest.raises(RunFolderError, match="missing"):
        folder.weights()


def test_files_of_two_parties_or_two_trainings_are_not_exchanged(tmp_path, tables, terms):
    other = terms.model_copy(update={"run": "trial-2"})
    folders = {}
    for name, run in (("bank", terms), ("shop", terms), ("again", other)):
        folders[name] = PartyFolder(tmp_path / name / ("bank" if name == "again" else name))
        folders[name].save(tables["bank"], run, WEIGHTS)
    for name in ("shop", "again"):
        for file in ("weights.safetensors", "encoder.json", "party.json"):
            path = folders["bank"].path / file
            whole = path.read_bytes()
            path.write_bytes((folders[name].path / file).read_bytes())
            with pytest.raises(RunFolderError, match="another kind, party or run"):
                folders["bank"].encoder() if file == "encoder.json" else folders["bank"].weights()
            path.write_bytes(whole)


def test_weights_of_another_end_of_the_same_run_are_refused(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    reseal_weights(folder.path / "weights.safetensors", lambda state: state.popitem())
    with pytest.raises(RunFolderError, match="not the final weights of the training"):
        folder.weights()


def test_a_card_says_what_a_half_is_and_shows_no_cell(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    card = folder.card()
    assert card["role"] == "feature party"
    assert card["model"]["weights_sha256"] == weights_digest(WEIGHTS)
    assert card["model"]["numbers"] == 7
    assert sum(card["data"]["rows"].values()) == 40
    assert card["test_figures"] == "known to the label party"
    assert card["terms"] == terms.model_dump(mode="json")
    assert card["privacy"]["cuts"] == f"{terms.label_party} sees every cut"
    text = (folder.path / "card.json").read_text()
    assert not [word for word in ("north", "south", "r000", "income", "town") if word in text]


def test_a_label_partys_card_has_the_figures(tmp_path, tables, terms):
    folder = PartyFolder(tmp_path / "parties" / terms.label_party)
    folder.save(tables["lender"], terms, WEIGHTS, {"test_auc": 0.75})
    assert folder.card()["role"] == "label party"
    assert folder.card()["test_figures"] == {"test_auc": 0.75}
    text = (folder.path / "card.json").read_text()
    assert '"no"' not in text
    assert '"yes"' not in text


def test_a_card_states_what_a_defense_promises(folder, tables, terms):
    noisy = terms.model_copy(update={"defense": "clipped_noise:sigma=1"})
    folder.save(tables["bank"], noisy, WEIGHTS)
    (states, *_) = folder.card()["privacy"]["states"]
    assert states["text"].startswith("inputs against")
    assert (states["unit"], states["adversary"]) == ("record", "partner")


def test_the_owner_alone_can_tell_whether_a_table_is_that_of_the_training(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    first = folder.card()["data"]["hmac_sha256"]
    assert folder.is_of(tables["bank"])
    changed = dataclasses.replace(tables["bank"], inputs=tables["bank"].inputs.clone())
    changed.inputs[7, 0] += 1e-6
    assert not folder.is_of(changed)
    folder.save(tables["bank"], terms, WEIGHTS)  # whoever guesses the table cannot try it out
    assert folder.card()["data"]["hmac_sha256"] != first


def test_the_card_of_other_weights_is_refused(folder, tables, terms, tmp_path):
    folder.save(tables["bank"], terms, WEIGHTS)
    other = PartyFolder(tmp_path / "other" / "bank")
    other.save(tables["bank"], terms, {**WEIGHTS, "steps": torch.tensor(5)})
    (folder.path / "card.json").write_bytes((other.path / "card.json").read_bytes())
    with pytest.raises(RunFolderError, match="other weights"):
        folder.card()
