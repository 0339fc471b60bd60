"""Shares belong to one party and one training, and are refused anywhere else."""

import json
import shutil

import pytest
import torch
from sealed import reseal_json, reseal_weights

from vfl.core.errors import DisagreementError, RunFolderError
from vfl.triple import infer_private, train_private


@pytest.fixture
def trained(tmp_path, experiment):
    """Folders of two trainings of one experiment."""
    for name in ("one", "two"):
        train_private(experiment(rows=100, epochs=1), tmp_path / name, processes=False)
    return tmp_path / "one", tmp_path / "two"


def test_parts_of_two_trainings_do_not_add_up(trained):
    one, two = trained
    shutil.rmtree(one / "P1")
    shutil.copytree(two / "P1", one / "P1")
    with pytest.raises(DisagreementError, match="another training's network") as caught:
        infer_private(one, processes=False)
    trainings = {
        json.loads((each / "mpc.json").read_text())["plan"]["training"] for each in trained
    }
    assert {caught.value.got.split()[1], caught.value.want.split()[1].rstrip(",")} == {
        training[:12] for training in trainings
    }


@pytest.mark.net
def test_processes_find_that_out_too(trained):
    one, two = trained
    shutil.rmtree(one / "P0")
    shutil.copytree(two / "P0", one / "P0")
    with pytest.raises(DisagreementError) as caught:
        infer_private(one)
    assert caught.value.code == "V402"


def test_a_share_of_another_training_in_a_party_s_folder(trained):
    one, two = trained
    shutil.copy(two / "P1" / "share.safetensors", one / "P1" / "share.safetensors")
    with pytest.raises(RunFolderError, match="belongs to something else") as caught:
        infer_private(one, processes=False)
    assert caught.value.where.endswith("share.safetensors")


def test_the_other_holder_s_share(trained):
    one, _ = trained
    shutil.copy(one / "P0" / "share.safetensors", one / "P1" / "share.safetensors")
    with pytest.raises(RunFolderError, match="belongs to something else"):
        infer_private(one, processes=False)


@pytest.mark.parametrize("lost", ["0.weight", "0.bias"])
def test_a_share_that_lacks_something_is_not_taken_for_zeros(trained, lost):
    path = trained[0] / "P0" / "share.safetensors"
    reseal_weights(path, lambda state: state.pop(lost))
    with pytest.raises(RunFolderError, match="not of the network") as caught:
        infer_private(trained[0], processes=False)
    assert (caught.value.where, caught.value.got) == (lost, "nothing")


def test_a_share_of_another_shape(trained):
    path = trained[0] / "P0" / "share.safetensors"
    other = {"0.weight": torch.zeros(7, 1, dtype=torch.int64)}
    reseal_weights(path, lambda state: state.update(other))
    with pytest.raises(RunFolderError, match="not of the network"):
        infer_private(trained[0], processes=False)


@pytest.mark.parametrize("file", ["mpc.json", "P0/party.json", "P2/party.json"])
def test_records_of_another_format(trained, file):
    path = trained[0] / file
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"format": 7, "vfl": "9.1.0"}))
    with pytest.raises(RunFolderError, match="another format"):
        infer_private(trained[0], processes=False)


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("mpc.json", {"experiment": {}}, "no card"),
        ("P0/party.json", {"plan": None}, "no plan"),
        ("P0/party.json", {"party": "P1"}, "belongs to something else"),
    ],
)
def test_records_that_are_something_else(trained, file, change, told):
    path = trained[0] / file
    if "sha256" in json.loads(path.read_text()):
        reseal_json(path, lambda record: record.update(change))
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunFolderError, match=told):
        infer_private(trained[0], processes=False)


def test_a_party_s_part_that_is_not_there(trained):
    shutil.rmtree(trained[0] / "P1")
    with pytest.raises(RunFolderError, match="network of P1"):
        infer_private(trained[0], processes=False)
