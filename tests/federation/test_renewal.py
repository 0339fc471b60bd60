"""A SuperLink whose certificate was renewed, and a party whose key was replaced."""

import shutil
from contextlib import ExitStack

import pytest

from vfl.config import read_party_file
from vfl.core.errors import AuthenticationError
from vfl.federation import deployment
from vfl.training import demo
from vfl.transport import renew_node_key, renew_server, replace_authority

pytestmark = pytest.mark.net


@pytest.fixture
def project(tmp_path):
    return tmp_path, demo.write_demo(tmp_path / "project")


@pytest.fixture
def services():
    with ExitStack() as stack:
        yield stack


def start_left(folder, services):
    file = folder / "left" / "party.toml"
    node = deployment.start_supernode(read_party_file(file), file)
    services.callback(node.stop)
    return node


def test_renewals_on_a_real_superlink(project, services):
    tmp_path, label = project
    folder = tmp_path / "project"
    left, right = folder / "left", folder / "right"

    def start_superlink():
        superlink = deployment.start_superlink(label)
        services.callback(superlink.stop)
        return superlink

    superlink = start_superlink()
    assert deployment.register_nodes(label) == ["left", "right"]
    superlink.stop()

    # The first step of a new authority: the parties' ca.pem holds both, the server's is the old.
    replace_authority(label.certificates)
    shutil.copy(label.certificates / "ca.pem", left / "ca.pem")
    superlink = start_superlink()
    start_left(folder, services).stop()
    superlink.stop()

    # The second: the server's is of the new one. A party that did not follow is refused.
    renew_server(label.certificates)
    shutil.copy(left / "node.key", tmp_path / "old.key")
    renew_node_key(left / "node.key", tmp_path / "left.pub")
    label.accept_key("left", (tmp_path / "left.pub").read_bytes())
    start_superlink()
    assert deployment.register_nodes(label) == ["left"]  # which unregisters the old key
    start_left(folder, services).stop()
    shutil.copy(tmp_path / "old.key", left / "node.key")
    with pytest.raises(AuthenticationError, match="withdrawn the key"):
        start_left(folder, services)
    file = right / "party.toml"
    with pytest.raises(AuthenticationError, match="is not accepted"):
        deployment.start_supernode(read_party_file(file), file)
