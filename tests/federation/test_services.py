"""Commands and environments of Flower's processes; tests/federation starts the real ones."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.core.errors import (
    AuthenticationError,
    LostPeerError,
    MissingDataError,
    PeerFailedError,
    UserError,
)
from vfl.core.processes import PIPE, Process, Service
from vfl.core.storage import locked
from vfl.federation import deployment
from vfl.federation.bundle import check_bundle
from vfl.federation.deployment import supernode_command
from vfl.federation.programs import STARTER_VARIABLE, LocalApi, flower_environment
from vfl.federation.project import ONE_MACHINE, write_project
from vfl.transport import public_key_bytes, renew_node_key, session_certificate
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
        tmp_path / "project", experiment, parties, ONE_MACHINE
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


def test_a_session_ends_with_the_command_that_was_killed_and_not_with_its_own_parent():
    """Else it answers requests beside the session of the command that is started next."""
    follows = "import time; from vfl.federation import programs; programs._end_with_starter(); "
    follows += "print('follows', flush=True); time.sleep(60)"
    with subprocess.Popen(["sleep", "60"]) as starter:
        environment = os.environ | {STARTER_VARIABLE: str(starter.pid)}
        session = Process("a session", [sys.executable, "-c", follows], environment, stdout=PIPE)
        try:
            assert session.receive() == "follows"
            starter.kill()
            # Nobody has waited for the command, so its process id is still there.
            assert session.ends_within(5.0)
        finally:
            session.stop()
    assert session.exit_code == -signal.SIGTERM


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
        deployment.start_supernode(read_party_file(file), file)
    assert caught.value.where == str(folder / "bank" / missing)


def test_a_program_without_tls_at_the_port_of_a_supernode_is_not_the_supernode(project):
    folder, _ = project
    party = read_party_file(folder / "bank" / "party.toml")
    api = LocalApi.begin(party.store_path / "flower" / "local")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            caller, _ = listener.accept()
            with caller:
                caller.recv(1)
                caller.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        api.listens_on(listener.getsockname()[1])
        assert not deployment.supernode_runs(party)
        thread.join()


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
    assert environment["VFL_STANDING_WORKER"] == "flwr-serverapp"


def test_a_simulation_faces_no_network(project, commands):
    _, label = project
    deployment.start_superlink(label, simulation=True)
    ((command, environment),) = commands
    assert {"--insecure", "--simulation"} <= set(command)
    assert environment["VFL_NETWORK_ADDRESS"] == ""
    assert environment["VFL_STANDING_WORKER"] == ""


def test_no_port_of_flower_opens_without_a_guard(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    assert not [name for name in flower_environment(tmp_path) if name.startswith("FLWR_INTERNAL")]


def test_a_host_of_another_machine_is_refused_with_its_setting(tmp_path):
    federation = {"superlink": "lender.invalid:8123"}
    experiment = Experiment.model_validate({"parties": {"bank": {}}, "federation": federation})
    parties = {
        name: PartyFile.model_validate({"party": name, "data": {"source": "rows.csv", "id": "id"}})
        for name in ("bank", "label")
    }
    label = write_project(tmp_path / "project", experiment, parties, ONE_MACHINE)
    with pytest.raises(UserError, match="cannot listen") as caught:
        deployment.start_superlink(label)
    assert caught.value.where == f"{label.app / 'experiment.toml'}: lender.invalid"
    assert 'bind_host = "0.0.0.0"' in caught.value.fix


def test_nothing_is_told_to_a_superlink_that_does_not_run(project):
    _, label = project
    with pytest.raises(LostPeerError, match="is not running here") as caught:
        deployment.submit(label, "train", "one")
    assert "vfl up" in caught.value.fix


@pytest.fixture
def late(project, monkeypatch):
    """A SuperLink that answers only after some looks, each after the step of its number."""
    _, label = project

    def wait(patience_s, steps, looks):
        said, left = [], iter(steps)

        def check(folder):
            next(left, lambda: None)()
            looks.append(folder)
            if len(looks) < 9:
                raise LostPeerError("not yet")

        monkeypatch.setattr(deployment, "_check_superlink", check)
        deployment.wait_for_superlink(label, patience_s, said.append)
        return said

    monkeypatch.setattr(deployment, "_LOOK_S", 0.0)
    return label, wait


def test_a_superlink_that_is_not_started_yet_is_waited_for(late):
    label, wait = late
    said, then = wait(60.0, (), looks := [])
    assert len(looks) == 9
    assert then == "the SuperLink is up"
    assert said == f"waiting up to 60 s for the SuperLink, which vfl up {label.path} starts"
    with pytest.raises(LostPeerError, match="not yet"):
        wait(0.0, (), [])


def test_a_superlink_is_waited_for_as_long_as_a_command_is_starting_it(late):
    """On a slow machine its own start takes longer than users wait who have forgotten it."""
    label, wait = late
    with locked(label.state):
        said, _ = wait(0.0, (), looks := [])
        assert len(looks) == 9
        assert said.startswith("the SuperLink is starting, see ")
    starting = locked(label.state)
    starting.__enter__()
    ends = (lambda: None, lambda: None, lambda: starting.__exit__(None, None, None))
    with pytest.raises(LostPeerError, match="not yet"):  # without a SuperLink
        wait(0.0, ends, looks := [])
    assert len(looks) == 4


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


class StandInControl:
    """Answers as a SuperLink's Control API would, and keeps what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def __getattr__(self, what):
        def call(request):
            self.asked.append((what, request))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return call

    def close(self):
        self.asked.append(("close", None))

    def calls(self):
        return [what for what, _ in self.asked if what != "close"]


@pytest.fixture
def control(monkeypatch):
    """Puts such a stand-in in the place of Flower's client; it is closed after each question."""
    stand_in = StandInControl(SimpleNamespace(node_id=17, run_id=1))
    monkeypatch.setattr(deployment, "_check_superlink", lambda folder: None)
    monkeypatch.setattr(deployment.programs, "control_client", lambda state: stand_in)
    yield stand_in
    assert len(stand_in.calls()) == stand_in.asked.count(("close", None))


def refused(status, text):
    answer = httpx.Response(status, text=text)
    request = httpx.Request("POST", "https://127.0.0.1/")
    return httpx.HTTPStatusError(f"status {status}", request=request, response=answer)


@pytest.mark.parametrize(
    ("problem", "got"),
    [
        (refused(400, '{"code": 5, "detail": "not \\u001b available"}'), "not ? available"),
        (refused(500, "<html>"), "status 500"),
        (httpx.ReadTimeout("timed out"), "timed out"),
    ],
)
def test_a_superlink_that_refuses_is_told_in_its_words(project, control, problem, got):
    _, label = project
    control.answer = problem
    with pytest.raises(PeerFailedError, match="the SuperLink refuses StartRun") as caught:
        deployment.submit(label, "train", "one")
    assert caught.value.got == got
    assert caught.value.exit_code == 3
    assert "vfl up" in caught.value.fix


def test_a_run_is_submitted_with_the_bundle_and_what_it_is_for(project, control):
    _, label = project
    assert deployment.submit(label, "train", "one", ["codec=none"], {"resume": True}) == 1
    ((what, request), _) = control.asked
    assert what == "StartRun"
    config = request.override_config
    asked = {name: getattr(config[name], config[name].WhichOneof("scalar")) for name in config}
    assert asked == {"mode": "train", "run": "one", "overrides": '["codec=none"]', "resume": True}
    check_bundle(request.fab.content, ["vfl"])
    assert request.fab.hash_str == hashlib.sha256(request.fab.content).hexdigest()
    assert not request.HasField("override_federation_config")


def test_keys_are_registered_under_their_names(project, control):
    _, label = project
    assert deployment.register_nodes(label) == ["bank"]
    ((what, request), _) = control.asked
    assert (what, request.name) == ("RegisterNode", "bank")
    assert request.public_key == public_key_bytes((label.keys / "bank.pub").read_bytes())


def test_a_partys_new_key_takes_the_place_of_the_old_one(project, control, tmp_path):
    _, label = project
    deployment.register_nodes(label)
    assert deployment.register_nodes(label) == ["bank"]  # this SuperLink knows no key twice
    assert "UnregisterNode" not in control.calls()
    renew_node_key(tmp_path / "node.key", label.keys / "bank.pub")
    assert deployment.register_nodes(label) == []  # nobody has compared it: the old one counts
    assert deployment.waiting_keys(label) == ["bank"]
    label.accept_key("bank", (label.keys / "bank.pub").read_bytes())
    assert deployment.waiting_keys(label) == []
    assert deployment.register_nodes(label) == ["bank"]
    assert control.calls()[2:] == ["UnregisterNode", "RegisterNode"]
    assert control.asked[4][1].node_id == 17


def test_a_superlink_that_starts_again_knows_its_keys(project, control):
    _, label = project
    control.answer = refused(409, '{"code": 23, "detail": "Public key already in use."}')
    assert deployment.register_nodes(label) == []


@pytest.mark.parametrize("name", ["node-x", "Bank", "label", "\x1b[2J", ".hidden"])
def test_a_key_under_no_partys_name_is_not_registered(project, control, tmp_path, name):
    _, label = project
    renew_node_key(tmp_path / "node.key", label.keys / f"{name}.pub")
    with pytest.raises(UserError, match="one key for each party") as caught:
        deployment.register_nodes(label)
    assert caught.value.want == "bank.pub"
    assert "\x1b" not in str(caught.value)
    assert control.asked == []


def test_one_key_under_two_names_and_no_key_are_told_together(project, control):
    _, label = project
    text = (label.app / "experiment.toml").read_text()
    text = text.replace("[parties.bank]", "[parties.shop]\nwidth = 16\n\n[parties.bank]")
    (label.app / "experiment.toml").write_text(text)
    key = (label.keys / "bank.pub").read_text().split()
    (label.keys / "shop.pub").write_text(f"{key[0]} {key[1]} another comment\n")
    (label.keys / "third.pub").write_text("no key")
    with pytest.raises(UserError) as caught:
        deployment.register_nodes(label)
    for told in (
        "shop.pub: this is the key of bank",
        "third.pub: no party with a node has this name",
        "third.pub: this is no public key of a SuperNode",
    ):
        assert told in caught.value.what
    assert control.asked == []


def test_a_party_without_a_key_file_loses_its_registration(project, control):
    _, label = project
    deployment.register_nodes(label)
    (label.keys / "bank.pub").unlink()
    assert deployment.register_nodes(label) == []
    assert control.calls()[1:] == ["UnregisterNode"]


def test_a_run_has_a_state_and_a_log(project, control):
    _, label = project
    running = SimpleNamespace(status="running", sub_status="")
    control.answer = SimpleNamespace(run_dict={7: SimpleNamespace(status=running)})
    assert deployment.run_state(label, 7) == "running"
    ended = SimpleNamespace(status="finished", sub_status="failed")
    control.answer = SimpleNamespace(run_dict={7: SimpleNamespace(status=ended)})
    assert deployment.run_state(label, 7) == "finished:failed"
    control.answer = iter([SimpleNamespace(log_output="one\n"), None])
    assert deployment.run_log(label, 7) == "one\n"
