"""Commands and environments of Flower's processes; tests/federation starts the real ones."""

import contextlib
import json
import os
import stat
import sys
import threading
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.core.errors import (
    AuthenticationError,
    LostPeerError,
    MissingDataError,
    PeerFailedError,
    UserError,
)
from vfl.federation import deployment
from vfl.federation.deployment import supernode_command
from vfl.federation.processes import Service
from vfl.federation.programs import LocalApi, flower_environment
from vfl.federation.project import write_project
from vfl.transport import renew_node_key, session_certificate
from vfl.transport.stream import listen


@pytest.fixture
def project(tmp_path):
    experiment = Experiment.model_validate(
        {
            "parties": {"bank": {}},
            "federation": {"superlink": "lender.example:8123", "bind_host": "0.0.0.0"},
        }
    )
    node = {"superlink": "lender.example:8123", "api_port": 9111}
    parties = {
        name: PartyFile.model_validate(
            {"party": name, "data": {"source": "rows.csv", "id": "id"}, "node": node}
        )
        for name in ("bank", "label")
    }
    return tmp_path / "project", write_project(
        tmp_path / "project", experiment, parties, "x.example"
    )


def test_a_service_sweeps_what_killed_writes_left_and_closes_its_folders(project, monkeypatch):
    """The services themselves fail to start here; the sweep comes before."""
    folder, label = project
    party = read_party_file(folder / "bank" / "party.toml")
    locations = [label.certificates, label.keys, label.app, label.state / "local"]
    locations += [folder / side / "store" / "sessions" for side in ("bank", "label")]
    left = [place / ".x.json.ab12cd_e" for place in locations]
    left += [label.state / ".nodes.json.ab12cd_e", folder / "bank" / ".node.key.ab12cd_e"]
    kept = [folder / "bank" / ".mine.json.ab12cd_e", folder / ".gitignore.abcdefgh"]
    for path in [*left, *kept]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    for path in [*locations, folder / "bank" / "store"]:
        path.chmod(0o755)

    def no_start(*_, **__):
        raise LostPeerError("not today")

    monkeypatch.setattr(deployment, "Service", no_start)
    monkeypatch.setattr(deployment, "check_server", no_start)
    for start in (
        lambda: deployment.start_superlink(label),
        lambda: deployment.start_supernode(party, folder / "bank" / "party.toml"),
    ):
        with pytest.raises(LostPeerError, match="not today"):
            start()
    assert [path for path in left if path.exists()] == []
    assert all(path.exists() for path in kept)
    closed = [*locations, folder / "bank" / "store"]
    closed.remove(label.state / "local")  # made anew at the start
    assert {stat.S_IMODE(path.stat().st_mode) for path in closed} == {0o700}


def test_nothing_of_flower_calls_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("KEPT", "yes")
    environment = flower_environment(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["FLWR_HOME"] == str(tmp_path)
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    assert environment["KEPT"] == "yes"
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"


def test_a_supernode_is_told_its_key_its_authority_and_its_own_file(project):
    folder, _ = project
    file = folder / "bank" / "party.toml"
    program, *arguments = supernode_command(read_party_file(file), file)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert program == "flower-supernode"
    assert options == {
        "--superlink": "lender.example:8123",
        "--root-certificates": str(folder / "bank" / "ca.pem"),
        "--auth-supernode-private-key": str(folder / "bank" / "node.key"),
        "--host": "127.0.0.1",
        "--port": "9111",
        "--node-config": f'party-file="{file}"',
    }


def test_a_path_with_a_quote_stays_one_value(project, tmp_path):
    folder, _ = project
    odd = tmp_path / 'the "old" bank'
    (folder / "bank").rename(odd)
    command = supernode_command(read_party_file(odd / "party.toml"), odd / "party.toml")
    name, _, value = command[-1].partition("=")
    assert name == "party-file"
    assert json.loads(value) == str(odd / "party.toml")


@pytest.mark.parametrize("missing", ["ca.pem", "node.key"])
def test_a_supernode_lacks_a_file(project, missing):
    folder, _ = project
    file = folder / "bank" / "party.toml"
    (folder / "bank" / missing).unlink()
    with pytest.raises(MissingDataError, match="party 'bank' lacks a file") as caught:
        supernode_command(read_party_file(file), file)
    assert caught.value.where == str(folder / "bank" / missing)


class Recorded(Service):
    """Keeps the command instead of running it."""

    commands: ClassVar[list] = []

    def __init__(self, name, command, environment, log):
        self.commands.append((list(command), dict(environment)))

    def wait_for(self, marker, timeout_s=60.0, refusal=None):
        pass


@pytest.fixture
def commands(monkeypatch, project):
    _, label = project
    LocalApi.begin(label.state / "local").listens_on(9999)
    monkeypatch.setattr(deployment, "Service", Recorded)
    monkeypatch.setattr(Recorded, "commands", [])
    return Recorded.commands


def test_a_superlink_has_tls_authentication_and_a_database(project, commands):
    _, label = project
    deployment.start_superlink(label)
    ((command, environment),) = commands
    assert command[0] == "flower-superlink"
    assert environment["VFL_NETWORK_ADDRESS"] == "0.0.0.0:8123"
    assert "--enable-supernode-auth" in command
    assert "--disable-runtime-dependency-installation" in command
    assert "--insecure" not in command
    for option, path in [
        ("--ssl-ca-certfile", label.certificates / "ca.pem"),
        ("--ssl-certfile", label.certificates / "server.pem"),
        ("--ssl-keyfile", label.certificates / "server.key"),
        ("--database", label.state / "superlink.db"),
    ]:
        assert command[command.index(option) + 1] == str(path)
    assert environment["VFL_PARTY_FILE"] == str(label.party_file)
    assert environment["FLWR_HOME"] == str(label.state)
    connection = tomllib.loads((label.state / "config.toml").read_text())["superlink"]["vfl"]
    assert connection["address"] == "127.0.0.1:9999"  # Flower's command line never leaves here
    assert connection["root-certificates"] == str(label.state / "local" / "ca.pem")


def test_a_simulation_faces_no_network(project, commands):
    _, label = project
    deployment.start_superlink(label, simulation=True)
    ((command, environment),) = commands
    assert {"--insecure", "--simulation"} <= set(command)
    assert environment["VFL_NETWORK_ADDRESS"] == ""


def test_no_port_of_flower_opens_without_a_guard(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    assert not [name for name in flower_environment(tmp_path) if name.startswith("FLWR_INTERNAL")]


def test_nothing_is_told_to_a_superlink_that_does_not_run(project):
    _, label = project
    with pytest.raises(LostPeerError, match="does not run here") as caught:
        deployment.submit(label, "train", "one")
    assert "vfl superlink" in caught.value.fix


def test_a_process_that_took_the_port_is_not_shown_the_secret(project):
    """It cannot have the certificate that the SuperLink made at its start."""
    _, label = project
    other = session_certificate(["127.0.0.1"]).context()
    with listen("127.0.0.1", 0) as listener:
        LocalApi.begin(label.state / "local").listens_on(listener.getsockname()[1])
        thread = threading.Thread(target=_accept_one, args=(listener, other))
        thread.start()
        with pytest.raises(AuthenticationError, match="the SuperLink is not accepted"):
            deployment.submit(label, "train", "one")
        thread.join()


def _accept_one(listener, context):
    connection, _ = listener.accept()
    with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
        pass


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """Puts a program in the place of `flwr`; its arguments are kept in a file."""
    monkeypatch.setattr(deployment, "_check_superlink", lambda folder: None)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def put(script):
        path = programs / "flwr"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        path.chmod(0o755)

    return put


UNAVAILABLE = '{"success": false, "error-message": "Using SuperLink: vfl\\n\\nnot available"}'
BOX = "╭─ Error ─╮\n│ not available │\n╰─────────╯"


@pytest.mark.parametrize(
    "script", [f"cat <<'E'\n{UNAVAILABLE}\nE", f"cat >&2 <<'E'\n{BOX}\nE\nexit 1"]
)
def test_a_command_of_flower_that_fails(project, flwr, script):
    """It may say so in JSON with exit code 0, or in a box with another."""
    _, label = project
    flwr(script)
    with pytest.raises(PeerFailedError, match="flwr run failed") as caught:
        deployment.submit(label, "train", "one")
    assert caught.value.got == "not available"
    assert caught.value.exit_code == 3
    assert "vfl superlink" in caught.value.fix


def test_a_command_of_flower_that_fails_without_a_word(project, flwr):
    _, label = project
    flwr("exit 7")
    with pytest.raises(PeerFailedError) as caught:
        deployment.submit(label, "train", "one")
    assert caught.value.got == "exit 7"


def test_keys_are_registered_under_their_names(project, flwr, tmp_path):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "1"}'""")
    assert deployment.register_nodes(label) == ["bank"]
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:3] == ["supernode", "register", str(label.keys / "bank.pub")]
    assert asked[asked.index("--name") + 1] == "bank"


def test_a_partys_new_key_takes_the_place_of_the_old_one(project, flwr, tmp_path):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    deployment.register_nodes(label)
    assert deployment.register_nodes(label) == ["bank"]  # this SuperLink knows no key twice
    assert "unregister" not in (tmp_path / "asked").read_text()
    renew_node_key(tmp_path / "node.key", label.keys / "bank.pub")
    assert deployment.register_nodes(label) == ["bank"]
    asked = [line.split()[1:3] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked[2:] == [["unregister", "17"], ["register", str(label.keys / "bank.pub")]]


def test_an_old_key_that_cannot_be_taken_back_is_told(project, flwr):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    deployment.register_nodes(label)
    renew_node_key(label.path / "node.key", label.keys / "bank.pub")
    flwr(f"cat <<'E'\n{UNAVAILABLE}\nE")
    with pytest.raises(PeerFailedError):
        deployment.register_nodes(label)


def test_a_new_superlink_knows_nobody(project, flwr, commands):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    deployment.register_nodes(label)
    deployment.start_superlink(label)
    assert not (label.state / "nodes.json").exists()


def test_a_superlink_that_starts_again_knows_its_keys(project, flwr):
    _, label = project
    known = '{"success": false, "error-message": "[code: 23] Public key already in use."}'
    flwr(f"echo '{known}'")
    assert deployment.register_nodes(label) == []


@pytest.mark.parametrize(
    "name", ["node-x", "Bank", "label", "bank shop", "\x1b[2J", ".hidden", "-x"]
)
def test_a_key_under_no_partys_name_is_not_registered(project, flwr, tmp_path, name):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    renew_node_key(tmp_path / "node.key", label.keys / f"{name}.pub")
    with pytest.raises(UserError, match="one key a party") as caught:
        deployment.register_nodes(label)
    assert caught.value.want == "bank.pub"
    assert "\x1b" not in str(caught.value)
    assert not (tmp_path / "asked").exists()


def test_one_key_under_two_names_and_no_key_are_told_together(project, flwr, tmp_path):
    _, label = project
    text = (label.app / "experiment.toml").read_text()
    text = text.replace("[parties.bank]", "[parties.shop]\nwidth = 16\n\n[parties.bank]")
    (label.app / "experiment.toml").write_text(text)
    key = (label.keys / "bank.pub").read_text().split()
    (label.keys / "shop.pub").write_text(f"{key[0]} {key[1]} another comment\n")
    (label.keys / "third.pub").write_text("no key")
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    with pytest.raises(UserError) as caught:
        deployment.register_nodes(label)
    for told in (
        "shop.pub: this is the key of bank",
        "third.pub: no party with a node has this name",
        "third.pub: this is no public key of a SuperNode",
    ):
        assert told in caught.value.what
    assert not (tmp_path / "asked").exists()


def test_a_party_without_a_key_file_loses_its_registration(project, flwr, tmp_path):
    _, label = project
    flwr("""echo '{"success": true, "node-id": "17"}'""")
    deployment.register_nodes(label)
    (label.keys / "bank.pub").unlink()
    assert deployment.register_nodes(label) == []
    asked = [line.split()[1:3] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked[1:] == [["unregister", "17"]]
