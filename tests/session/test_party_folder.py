import pandas as pd
import pytest
import torch
from sealed import reseal_json, reseal_weights

from vfl.core import storage
from vfl.core.errors import RunFolderError
from vfl.core.storage import read_json, weights_digest
from vfl.datasets import load_table
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
    reseal_json(folder.path / "party.json", lambda record: record.update(format=7))
    for read in (folder.weights, folder.classes):
        with pytest.raises(RunFolderError, match="another format"):
            read()


def test_a_run_that_a_party_has_not_trained(folder):
    for read in (folder.weights, folder.encoder, folder.classes):
        with pytest.raises(RunFolderError, match="missing"):
            read()


def test_a_crash_before_the_record_leaves_no_run(folder, tables, terms, monkeypatch):
    real = storage.write_sealed_json

    def crash(path, content, seal):
        if path.name == "party.json":
            raise KeyboardInterrupt
        real(path, content, seal)

    monkeypatch.setattr("vfl.session.party_folder.write_sealed_json", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.save(tables["bank"], terms, WEIGHTS)
    with pytest.raises(RunFolderError, match="missing"):
        folder.weights()


def test_damaged_weights(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    (folder.path / "weights.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(RunFolderError, match="not as it was written"):
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
            with pytest.raises(RunFolderError, match="belongs to something else"):
                folders["bank"].encoder() if file == "encoder.json" else folders["bank"].weights()
            path.write_bytes(whole)


def test_weights_of_another_end_of_the_same_run_are_refused(folder, tables, terms):
    folder.save(tables["bank"], terms, WEIGHTS)
    reseal_weights(folder.path / "weights.safetensors", lambda state: state.popitem())
    with pytest.raises(RunFolderError, match="not those the training ended with"):
        folder.weights()
