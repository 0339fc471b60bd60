"""`write_project`: who gets which file, and what no file says."""

import os
import stat
import tomllib

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from vfl.config import Experiment, PartyFile, read_experiment, read_party_file
from vfl.core.errors import RunFolderError, UserError
from vfl.core.version import VERSION
from vfl.federation.project import ONE_MACHINE, LabelFolder, write_project
from vfl.training import demo

FEATURES = ["bank", "shop"]
EXPERIMENT = Experiment.model_validate(
    {
        "name": "loans",
        "codec": "topk:k=3",
        "parties": {name: {"width": 8} for name in FEATURES},
        "label": {"party": "lender"},
        "federation": {"superlink": "lender.example:8000", "stream_host": "stream.example"},
    }
)


def party_file(name):
    data = {"source": f"/private/of/{name}.csv", "id": "customer"}
    label = {"label": "paid"} if name == "lender" else {}
    return PartyFile.model_validate({"party": name, "data": data | label})


def written(folder, host):
    parties = {name: party_file(name) for name in [*FEATURES, "lender"]}
    return folder, write_project(folder, EXPERIMENT, parties, host)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return written(tmp_path_factory.mktemp("project") / "loans", ONE_MACHINE)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_demo_is_for_its_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        demo.write_demo(tmp_path / "demo")
    finally:
        os.umask(before)
    for path in [tmp_path / "demo", *(tmp_path / "demo").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_every_owner_has_a_folder(project):
    folder, label = project
    assert {entry.name for entry in folder.iterdir()} == {"README.md", "label", *FEATURES}
    for name in FEATURES:
        (other,) = [other for other in FEATURES if other != name]
        assert files(folder / name) == {
            *("party.toml", "ca.pem", "node.key"),
            *("identity.key", f"peers/{other}.pub"),
        }
    assert files(label.path) == {
        *("party.toml", "app/experiment.toml", "app/pyproject.toml", "app/vfl_app.py"),
        *("certificates/ca.pem", "certificates/ca.key"),
        *("certificates/server.pem", "certificates/server.key"),
        *("keys/bank.pub", "keys/shop.pub", "keys/accepted.json"),
        *("identity.key", "identity.pub"),
    }


def test_a_project_for_several_hosts_has_no_key_of_another_party(tmp_path):
    folder, label = written(tmp_path / "loans", "lender.example")
    for name in FEATURES:
        assert files(folder / name) == {"party.toml", "ca.pem", "README.md"}
    assert files(label.keys) == set()
    own = [path for path in folder.rglob("*") if path.is_file()]
    private = [path.name for path in own if b"PRIVATE KEY" in path.read_bytes()]
    assert sorted(private) == ["ca.key", "identity.key", "server.key"]
    for name in FEATURES:
        assert f"vfl join {name} --table TABLE" in (folder / "README.md").read_text()
        assert "bank.pub" in (folder / "bank" / "README.md").read_text()


def test_the_bundle_names_no_path_and_no_column_of_anybody(project):
    _, label = project
    text = "".join(path.read_text() for path in label.app.iterdir())
    for private in ("/private", ".csv", "customer", "paid", "node.key", "store"):
        assert private not in text
    assert str(label.path) not in text


def test_the_bundle_reads_back_as_the_experiment(project):
    _, label = project
    assert label.experiment() == EXPERIMENT
    assert set(tomllib.loads((label.app / "experiment.toml").read_text())["data"]) == {
        "validation",
        "test",
        "id_rules",
        "missing_rows",
    }
    app = tomllib.loads((label.app / "pyproject.toml").read_text())
    assert app["project"]["name"] == "loans"
    assert app["project"]["version"] == VERSION
    assert app["project"]["dependencies"] == []  # or Flower would fetch what is named
    assert app["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "vfl_app:server",
        "clientapp": "vfl_app:client",
    }


def test_a_private_key_is_its_owners_alone(project):
    folder, label = project
    keys = [path for path in folder.rglob("*.key")]
    assert len(keys) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    everything = [path for path in folder.rglob("*") if path.is_file()]
    private = [path for path in everything if b"PRIVATE KEY" in path.read_bytes()]
    assert sorted(private) == sorted(keys)
    for name in FEATURES:
        assert public_half(folder / name / "node.key") == registered(label.keys / f"{name}.pub")
    assert registered(label.keys / "bank.pub") != registered(label.keys / "shop.pub")


def public_half(path):
    key = load_ssh_private_key(path.read_bytes(), None)
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def registered(path):
    key = load_ssh_public_key(path.read_bytes())
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_a_partys_own_file_reads_back(project):
    folder, label = project
    for name in FEATURES:
        path = folder / name / "party.toml"
        assert read_party_file(path).model_dump() == party_file(name).model_dump()
        assert path.read_text().startswith(f"# Private settings of party '{name}'")
    assert read_party_file(label.party_file).data == party_file("lender").data
    assert "[consent]" not in label.party_file.read_text()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        write_project(tmp_path, EXPERIMENT, {}, "127.0.0.1")
    assert files(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("name", ["label", "ca", "server"])
def test_names_that_already_name_something_else(tmp_path, name):
    experiment = Experiment.model_validate({"parties": {name: {}}, "label": {"party": "lender"}})
    parties = {each: party_file(each) for each in (name, "lender")}
    with pytest.raises(UserError, match="name"):
        write_project(tmp_path / "new", experiment, parties, "127.0.0.1")
    assert not list(tmp_path.rglob("*.toml"))


def test_finding_the_label_folder(project, tmp_path):
    folder, label = project
    assert LabelFolder.find(folder).path == LabelFolder.find(label.path).path == label.path
    with pytest.raises(RunFolderError, match="not a project") as caught:
        LabelFolder.find(tmp_path)
    assert caught.value.fix == "vfl init PROJECT writes such a folder"
    assert read_experiment(label.app / "experiment.toml").feature_parties == FEATURES
