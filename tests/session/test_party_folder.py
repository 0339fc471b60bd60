import pandas as pd
import pytest
import torch

from vfl.datasets import load_table
from vfl.errors import RunFolderError
from vfl.session import PartyFolder
from vfl.storage import read_json, weights_digest, write_json

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
    return load_table(frame, "id", "repaid", columns, "lender", "classification", seed=0)


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
    record = read_json(folder.path / "party.json")
    write_json(folder.path / "party.json", record | {"format": 2})
    for read in (folder.weights, folder.classes):
        with pytest.raises(RunFolderError, match="another format"):
            read()


def test_a_run_that_a_party_has_not_trained(folder):
    with pytest.raises(RunFolderError, match="missing"):
        folder.weights()
    assert folder.encoder() is None


def test_a_crash_before_the_record_leaves_no_run(folder, tables, terms, monkeypatch):
    def crash(path, content):
        raise KeyboardInterrupt

    monkeypatch.setattr("vfl.session.party_folder.write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.save(tables["bank"], terms, WEIGHTS)
    with pytest.raises(RunFolderError, match="missing"):
        folder.weights()


def test_damaged_weights(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    (folder.path / "weights.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(RunFolderError, match="damaged"):
        folder.weights()
