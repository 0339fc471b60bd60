"""The doctor on real files, certificates and ports; nothing but the loopback is contacted."""

import datetime
import http.server
import socket
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from aged import made_ago
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from vfl.config import Experiment, PartyFile
from vfl.core.errors import ConfigError
from vfl.federation import doctor
from vfl.federation.doctor import Check, examine
from vfl.federation.project import write_project
from vfl.transport import StreamRouter
from vfl.transport.certificates import session_certificate


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def project(tmp_path, port):
    """A project of one feature party, with a table for everybody."""
    address = f"127.0.0.1:{port}"
    experiment = Experiment.model_validate(
        {
            "parties": {"bank": {}},
            "federation": {"superlink": address, "stream_port": free_port()},
        }
    )
    own = {"source": "data.csv", "id": "id"}
    parties = {
        name: PartyFile.model_validate({"party": name, "data": own, "node": {"superlink": address}})
        for name in ("bank", "label")
    }
    label = write_project(tmp_path / "project", experiment, parties, "127.0.0.1")
    for name in ("bank", "label"):
        (tmp_path / "project" / name / "data.csv").write_text("id,a\n1,2\n")
    return label


@contextmanager
def serving(label, port, clock_s=0.0, names=None):
    """An HTTPS server with a project's certificate, whose clock may be wrong."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.end_headers()

        def date_time_string(self, timestamp=None):
            told = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=clock_s)
            return told.strftime("%a, %d %b %Y %H:%M:%S GMT")

        def log_message(self, *arguments):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = label.certificates
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    server.handle_error = lambda request, address: None  # a plain connection is no handshake
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def found(checks):
    return {check.name: check for check in checks}


def states(checks):
    return {name: check.state for name, check in found(checks).items()}


def party_of(label):
    return label.path.parent / "bank" / "party.toml"


def test_a_new_project_is_well_but_for_a_superlink(project):
    label, bank = states(examine(project.path.parent)), found(examine(party_of(project)))
    assert set(label.values()) == {"OK"}
    assert {"certificate", "signature", "server key", "key of bank", "stream port"} <= set(label)
    failed = [name for name, check in bank.items() if check.state == "FAIL"]
    assert failed == ["superlink"]
    assert "Connection refused" in bank["superlink"].found
    assert bank["clock"].found.startswith("not measured")


@pytest.mark.parametrize(
    ("clock_s", "state", "word"),
    [
        (0, "OK", " s "),
        (100, "WARN", "behind"),
        (-4, "WARN", "ahead"),
        (-20, "FAIL", "ahead"),
        (900, "FAIL", "900 s"),
    ],
)
def test_the_superlink_answers_and_tells_its_time(project, port, clock_s, state, word):
    with serving(project, port, clock_s):
        bank = found(examine(party_of(project)))
        label = found(examine(project.path))
    assert bank["superlink"].state == "OK"
    assert " ms, TLS" in bank["superlink"].found
    assert bank["clock"].state == label["clock"].state == state
    assert label["superlink port"].found == f"this project's SuperLink listens on {port}"
    if clock_s != 900:
        assert word in bank["clock"].found
    else:
        assert 895 <= int(bank["clock"].found.split()[0]) <= 900


def test_a_superlink_of_another_authority_is_not_trusted(project, port):
    certificate = session_certificate(["127.0.0.1"])
    (party_of(project).parent / "ca.pem").write_bytes(certificate.ca_pem)
    with serving(project, port):
        bank = found(examine(party_of(project)))
    assert bank["superlink"].state == "FAIL"
    assert "verify failed" in bank["superlink"].found or "issuer" in bank["superlink"].found
    assert bank["clock"].state == "WARN"


def test_ports_that_others_use(project, port):
    stream = project.experiment().federation.stream_port
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", stream)):
        label = found(examine(project.path))
    assert label["superlink port"].state == "FAIL"
    assert label["stream port"].state == "FAIL"


def test_the_stream_port_of_our_own_superlink_is_well(project):
    stream = project.experiment().federation.stream_port
    router = StreamRouter("127.0.0.1", stream, project.streams)
    try:
        assert found(examine(project.path))["stream port"].state == "OK"
    finally:
        router.close()


def certificate_at(folder, hosts=("127.0.0.1",), days=90):
    path = folder / "server.pem"
    path.write_bytes(session_certificate(list(hosts), days).cert_pem)
    return path


@pytest.mark.parametrize(
    ("days", "hosts", "state", "told"),
    [
        (90, ["127.0.0.1"], "OK", "valid until"),
        (1, ["127.0.0.1"], "OK", "valid until"),
        (0, ["127.0.0.1"], "FAIL", "expired"),
        (90, ["127.0.0.1", "lender.example"], "FAIL", "not for lender.example"),
    ],
)
def test_certificates(tmp_path, days, hosts, state, told):
    check = doctor.certificate("certificate", certificate_at(tmp_path, days=days), hosts)
    assert (check.state, told in check.found) == (state, True)
    assert bool(check.fix) is (state != "OK")


def test_a_certificate_of_which_little_is_left(tmp_path):
    path = made_ago(87, lambda: certificate_at(tmp_path, days=90))
    check = doctor.certificate("certificate", path)
    assert (check.state, "ends soon" in check.found) == ("WARN", True)
    assert "vfl up renews" in check.fix


def test_certificates_that_are_none(tmp_path):
    (tmp_path / "text.pem").write_text("hello")
    assert doctor.certificate("ca", tmp_path / "text.pem").state == "FAIL"
    assert doctor.certificate("ca", tmp_path / "absent.pem").state == "FAIL"
    assert doctor.signed_by(tmp_path / "absent.pem", tmp_path / "absent.pem").state == "FAIL"


def test_a_certificate_of_another_authority(project):
    other = session_certificate(["127.0.0.1"])
    (project.certificates / "ca.pem").write_bytes(other.ca_pem)
    assert found(examine(project.path))["signature"].state == "FAIL"


def test_files_that_others_can_read(project):
    party = party_of(project)
    (party.parent / "node.key").chmod(0o644)
    store = party.parent / "store"
    store.mkdir()
    (store / "secret").write_bytes(bytes(32))
    (store / "secret").chmod(0o640)
    bank = found(examine(party))
    for name in ("node key", "secret"):
        assert bank[name].state == "FAIL"
        assert bank[name].fix.startswith("chmod 600 ")


def test_keys_of_another_form(project):
    party, public = party_of(project), project.keys / "bank.pub"
    key = ed25519.Ed25519PrivateKey.generate()
    openssh = serialization.PrivateFormat.OpenSSH
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (party.parent / "node.key").write_bytes(key.private_bytes(pem, openssh, none))
    assert found(examine(party))["node key"].state == "FAIL"
    public.write_text("ssh-rsa nonsense")
    assert found(examine(project.path))["key of bank"].state == "FAIL"
    public.unlink()
    assert "there is no" in found(examine(project.path))["key of bank"].found


def test_a_table_that_is_not_there(project):
    (party_of(project).parent / "data.csv").unlink()
    assert found(examine(party_of(project)))["data"].state == "FAIL"


def test_versions_that_are_not_the_wanted_ones(monkeypatch):
    wanted = ["numpy>=9999", "absent-package>=1", "beartype>=9999; extra == 'dev'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    checks = found(doctor.versions())
    assert checks["numpy"].state == checks["absent-package"].state == "FAIL"
    assert checks["numpy"].fix == "pip install 'numpy>=9999'"
    assert "beartype" not in checks


@pytest.mark.parametrize(
    ("bounds", "state"), [(">=1,<9999", "OK"), (">=1,<2", "WARN"), (">=9998,<9999", "FAIL")]
)
def test_a_version_above_the_tested_ones_is_a_warning(monkeypatch, bounds, state):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [f"numpy{bounds}"])
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.0.0")
    assert found(doctor.versions())["numpy"].state == state


@pytest.mark.parametrize(("free", "state"), [(10**7, "FAIL"), (10**8, "WARN"), (10**10, "OK")])
def test_room_on_the_disk(tmp_path, monkeypatch, free, state):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert doctor.room(tmp_path / "not" / "made").state == state


def test_a_file_with_mistakes_is_told_as_ever(project):
    party_of(project).write_text(tomli_w.dumps({"party": "bank"}))
    with pytest.raises(ConfigError):
        list(examine(party_of(project)))


def test_nothing_is_changed(project):
    def contents():
        return {path: path.stat().st_mtime_ns for path in Path(project.path.parent).rglob("*")}

    before = contents()
    assert all(isinstance(check, Check) for check in examine(party_of(project)))
    assert all(isinstance(check, Check) for check in examine(project.path))
    assert contents() == before
