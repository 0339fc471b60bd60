"""`vfl renew`, and the warnings of the commands that use a certificate."""

import re

import pytest
from aged import made_ago

from vfl.cli.federation import _renew_when_due
from vfl.core.errors import AuthenticationError, LostPeerError
from vfl.federation import deployment
from vfl.federation.project import LabelFolder
from vfl.transport import renew_server, replace_authority
from vfl.transport.certificates import days_left, ends_soon


@pytest.fixture
def label(bank_project):
    return LabelFolder.find(bank_project)


def aged_server(label):
    """A certificate of 90 days, 85 of which are over."""
    made_ago(85, lambda: renew_server(label.certificates, days=90))


def test_a_certificate_is_renewed(vfl, label):
    renew_server(label.certificates, days=3)
    done = vfl("renew", "project")
    assert (done.code, done.out) == (0, "")
    assert "is valid for 89 days; vfl up uses it" in done.err
    assert days_left(label.certificates / "server.pem") == 89


@pytest.mark.parametrize("name", ["server.pem", "ca.pem", "ca.key"])
def test_a_missing_file_is_named_with_its_source(refused, label, name):
    (label.certificates / name).unlink()
    done = refused("renew", "project")
    assert "a certificate or key is missing" in done.err
    assert f"certificates/{name}" in done.err
    assert re.search(rf"try   (restore|copy) {name}", done.err)


def test_a_new_authority_is_announced_before_it_is_used(well, label):
    done = well("renew", "project/label", "--authority")
    assert "send it to every party" in done.err
    assert (label.certificates / "ca.pem").read_text().count("BEGIN CERTIFICATE") == 2
    well("renew", "project")
    assert (label.certificates / "ca.pem").read_text().count("BEGIN CERTIFICATE") == 1


def test_a_partys_key_is_replaced(well, refused, label, tmp_path):
    before = (tmp_path / "project/bank/node.key").read_bytes()
    done = well("renew", "project/bank/party.toml")
    assert (tmp_path / "project/bank/node.key").read_bytes() != before
    assert (tmp_path / "project/bank/bank.pub").exists()
    assert "send bank.pub to the label party" in done.err
    refused("renew", "project/bank/party.toml", "--authority")


def test_a_partys_identity_is_replaced(well, refused, label, tmp_path):
    bank = tmp_path / "project/bank"
    before = (bank / "identity.key").read_bytes(), (bank / "node.key").read_bytes()
    done = well("renew", "project/bank/party.toml", "--identity")
    assert (bank / "identity.key").read_bytes() != before[0]
    assert (bank / "node.key").read_bytes() == before[1]
    assert (bank / "identity.key").stat().st_mode & 0o777 == 0o600
    assert "\nssh-ed25519 " in (bank / "bank.pub").read_text()
    assert "each runs: vfl party accept bank.pub FOLDER" in done.err
    refused("renew", "project", "--identity")


@pytest.mark.usefixtures("without_worker")
@pytest.mark.parametrize("command", [("up", "project"), ("train", "project")])
def test_a_certificate_that_ends_soon_is_spoken_of_at_the_label_party(
    vfl, label, monkeypatch, command
):
    def stop(*arguments, **options):
        raise LostPeerError("stopped here")

    monkeypatch.setattr(deployment, "start_superlink", stop)
    monkeypatch.setattr(deployment, "wait_for_superlink", stop)
    assert "warning" not in vfl(*command).err
    aged_server(label)
    ca_key = label.certificates / "ca.key"
    ca_key.rename(ca_key.with_name("elsewhere"))
    assert "server.pem expires in 4 days; vfl up renews it if ca.key" in vfl(*command).err


@pytest.mark.usefixtures("without_worker")
def test_a_party_is_told_that_the_authority_ends(vfl, label, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise AuthenticationError("stopped here")  # what starting again does not mend

    monkeypatch.setattr(deployment, "start_supernode", stop)
    assert "warning" not in vfl("up", "project/bank/party.toml").err
    aged_server(label)
    short = (label.certificates / "server.pem").read_bytes()
    (tmp_path / "project/bank/ca.pem").write_bytes(short)
    done = vfl("up", "project/bank/party.toml")
    assert "ca.pem expires in 4 days; ask the label party" in done.err


def test_vfl_up_renews_what_ends_and_no_more(label, capsys):
    server = label.certificates / "server.pem"
    _renew_when_due(label)
    assert days_left(server) == 89
    aged_server(label)
    replace_authority(label.certificates)  # not every party may have it yet
    _renew_when_due(label)
    assert days_left(server) == 4
    renew_server(label.certificates, days=90)
    aged_server(label)
    text = (label.app / "experiment.toml").read_text()
    text = text.replace("certificate_days = 90.0", "certificate_days = 1")
    (label.app / "experiment.toml").write_text(text)
    _renew_when_due(label)
    assert days_left(server) == 0
    assert not ends_soon(server)
    assert "renewed the certificate" in capsys.readouterr().err
