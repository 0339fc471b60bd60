"""`vfl superlink` and `vfl supernode` as commands; tests/federation runs the real processes."""

from pathlib import Path

import pytest

from vfl import deployment
from vfl.errors import LostPeerError


class Standing:
    """A service that is interrupted as soon as somebody waits for it."""

    log = Path("service.log")

    def __init__(self):
        self.stopped = 0

    def wait(self):
        raise KeyboardInterrupt

    def stop(self):
        self.stopped += 1


@pytest.fixture
def service(vfl, monkeypatch):
    assert vfl("init", "project", "--party", "bank").code == 0
    standing = Standing()
    monkeypatch.setattr(deployment, "start_superlink", lambda label: standing)
    monkeypatch.setattr(deployment, "start_supernode", lambda party, file: standing)
    monkeypatch.setattr(deployment, "register_nodes", lambda label: ["bank"])
    return standing


def test_the_superlink_tells_its_address_and_ends_with_the_command(vfl, service):
    done = vfl("superlink", "project")
    assert (done.code, done.out) == (130, "")
    assert "127.0.0.1:8000" in done.err
    assert "new keys: bank" in done.err
    assert "service.log" in done.err
    assert service.stopped == 1


def test_the_superlink_ends_when_keys_cannot_be_registered(vfl, service, monkeypatch):
    def refuse(label):
        raise LostPeerError("flwr supernode failed")

    monkeypatch.setattr(deployment, "register_nodes", refuse)
    assert vfl("superlink", "project").code == 3
    assert service.stopped == 1


def test_the_supernode_tells_whose_it_is_and_ends_with_the_command(vfl, service):
    done = vfl("supernode", "project/bank/party.toml")
    assert (done.code, done.out) == (130, "")
    assert "party bank" in done.err
    assert "127.0.0.1:8000" in done.err
    assert service.stopped == 1
