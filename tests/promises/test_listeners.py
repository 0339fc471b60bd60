"""Strangers who only connect shut no listener; a client of `vfl serve` learns what it may."""

import http.client
import json
import os
import resource
import socket
import ssl
import time
from base64 import b64encode
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from subprocess import DEVNULL, PIPE

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from forked import Fork
from promise import BrokenPromiseError
from pydantic import ValidationError
from served import CONTENT, Serving, predicted

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import LostPeerError
from vfl.serving.front import LeadSettings
from vfl.serving.local import serve
from vfl.training import run

DESCRIPTORS = 512
#: What each server writes: its port, and what an honest caller shows.
SERVE = """
from vfl.serving.front import HttpFront, LeadSettings
front = HttpFront("bank", LeadSettings(port=0), folder)
say(front.port, (folder / "serve.token").read_text().strip())
"""
SUPERLINK = """
import asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives import serialization as form
from vfl.federation.guard import network_guard
from vfl.federation.programs import _server
from vfl.transport import session_certificate
from vfl.transport.stream import listen

owner = ec.generate_private_key(ec.SECP384R1())
plain = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
async def registered(key):
    return True
async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
made = session_certificate(["127.0.0.1"])
(folder / "cert.pem").write_bytes(made.cert_pem)
(folder / "key.pem").write_bytes(made.key_pem)
listener = listen("127.0.0.1", 0)
guard = network_guard(application, registered, lambda path, body: True)
files = folder / "cert.pem", folder / "key.pem"
server = _server(guard, {"log_config": None}, *files, lifespan="off")
say(listener.getsockname()[1], owner.private_bytes(*plain).decode())
asyncio.run(server.serve(sockets=[listener]))
"""
PAGES = """
from vfl.tensors.browser import Pages
address, _ = Pages().add("ann")
host, _, path = address.removeprefix("http://").partition("/")
say(int(host.rpartition(":")[2]), path)
"""
HUB = """
from vfl.transport import Admission, Credential, TcpHub, Timeouts
admission = Admission("s", {"ann": Credential("ann", "t" * 40)})
hub = TcpHub("127.0.0.1", 0, admission, timeouts=Timeouts(handshake_s=600.0))
say(hub.port, "t" * 40)
"""
BEGIN = """
import json, resource, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
def say(port, secret):
    print(json.dumps([port, secret]), flush=True)
"""
#: Strangers may be silent for ten minutes: what ends them is that somebody else needs the room.
PATIENT = """
from vfl.transport.front import FrontLimits
most, _, *rest = FrontLimits.__init__.__defaults__
FrontLimits.__init__.__defaults__ = most, 600.0, *rest
"""
#: A bound for what never comes.
PATIENCE_S = 60.0
END = "\nsys.stdin.read()\nimport os\nos._exit(0)\n"


def ask_serve(port, token):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status == 200


def ask_superlink(port, pem):
    key, now = load_pem_private_key(pem.encode(), None), datetime.now(UTC).isoformat().encode()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(now, ec.ECDSA(SHA256()))
    headers = {
        "flwr-public-key": b64encode(public).decode(),
        "flwr-timestamp": now.decode(),
        "flwr-signature": b64encode(signature).decode(),
    }
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    https = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    with closing(https) as connection:
        connection.request("POST", "/v1/fleet/pull-messages", b"", headers)
        return connection.getresponse().status == 200


def ask_page(port, token):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", f"/{token}")
        return connection.getresponse().status == 200


def ask_hub(port, token):
    from vfl.transport import Hello, TcpLink, Timeouts

    patient = Timeouts(PATIENCE_S, PATIENCE_S, rejoin_window_s=PATIENCE_S)
    hello = Hello("s", "ann", token, key="0" * 64)
    with suppress(LostPeerError):
        TcpLink.connect("127.0.0.1", port, hello, timeouts=patient).close()
        return True
    return False


@contextmanager
def served(program, folder):
    """A server in a process that may have 512 descriptors: its port, and its caller's secret."""
    words = ["-c", BEGIN + program + END, str(folder), str(DESCRIPTORS)]
    process = Fork(words, os.environ, [PIPE, PIPE, DEVNULL])
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def descriptors():
    """Room for the attacker's own connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def gets_in(ask, port, secret):
    """Whether an honest caller is answered, within a few attempts."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            if ask(port, secret):
                return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("program", "ask", "silent"),
    [
        (SERVE, ask_serve, 560),
        (SUPERLINK, ask_superlink, 750),
        (PAGES, ask_page, 560),
        (HUB, ask_hub, 560),
    ],
    ids=["serve", "superlink", "pages", "hub"],
)
def test_silent_connections_shut_no_listener(program, ask, silent, tmp_path, descriptors):
    """Whoever opens connections and says nothing keeps no client out."""
    with served(PATIENT + program, tmp_path) as (port, secret), ExitStack() as held:
        assert gets_in(ask, port, secret)
        opened = 0
        for _ in range(silent):
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 0.2)
                held.enter_context(connection)
                opened += 1
        if not gets_in(ask, port, secret):
            raise BrokenPromiseError(f"{opened} silent connections shut it for who is known")


def test_a_source_makes_so_many_connections_a_second(tmp_path):
    """Whoever connects again and again is not served each time; a client with a token is."""
    with served(SERVE, tmp_path) as (port, token):
        begun, answered = time.monotonic(), 0
        for _ in range(900):
            made = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            with suppress(OSError), made:
                made.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                answered += made.recv(4) == b"HTTP"
        lasted_s = time.monotonic() - begun
        assert gets_in(ask_serve, port, token)
        clients = sum(ask_serve(port, token) for _ in range(450))
    if answered > 400 + 200 * (lasted_s + 1):
        raise BrokenPromiseError(f"{answered} of 900 connections were served in {lasted_s:.1f} s")
    assert clients == 450


def test_a_connection_that_sends_no_whole_head_is_ended(tmp_path):
    """A connection has seconds for its first byte and for a whole head."""
    begun, still = {"silent": b"", "half a head": b"GET /health HTTP/1.1\r\nx-"}, []
    with served(SERVE, tmp_path) as (port, _), ExitStack() as held:
        made = {each: socket.create_connection(("127.0.0.1", port), PATIENCE_S) for each in begun}
        for each, connection in made.items():
            held.enter_context(connection).sendall(begun[each])
        deadline = time.monotonic() + PATIENCE_S
        for each, connection in made.items():
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                assert connection.recv(100) == b""
            except TimeoutError:
                still.append(each)
    if still:
        raise BrokenPromiseError(f"still open after a minute: {', '.join(still)}")


def test_requests_without_a_token_take_nothing_from_a_client(tmp_path):
    """Whoever has no token spends no client's requests."""
    program = SERVE.replace("port=0", "port=0, max_requests_per_second=5.0")
    with served(program, tmp_path) as (port, token):
        for _ in range(30):
            ask_serve(port, "wrong" * 8)
        answered = sum(ask_serve(port, token) for _ in range(5))
    if answered < 5:
        raise BrokenPromiseError(f"a client got {answered} answers of 5 after a stranger's 30")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    torch.set_num_threads(1)
    content = {k: v for k, v in CONTENT.items() if k != "federation"}
    content |= {"data": {"source": "breast_cancer"}, "label": {"top": "mlp:hidden=8"}}
    folder = tmp_path_factory.mktemp("store") / "runs"
    run.train(Experiment.model_validate(content), folder, "run")
    run.predict(RunFolder.open(folder / "run"))
    return folder / "run"


def settings(**wanted):
    """Settings of the service; its defaults where it has none of these."""
    try:
        return LeadSettings(port=0, **wanted)
    except ValidationError:
        return LeadSettings(port=0)


@contextmanager
def client_of(folder, options):
    serving = Serving(folder, lambda: serve(folder, options))
    try:
        serving.client.wait_ready()
        yield serving.client
    finally:
        serving.stop()


def test_a_client_learns_rounded_probabilities(trained_run):
    """By default a client learns three decimals of a probability."""
    with client_of(trained_run, settings()) as client:
        _, told = client.predict(*list(predicted(trained_run))[:20])
    digits = [
        len(str(share).partition(".")[2])
        for row in told["predictions"]
        for share in row["probabilities"]
    ]
    if max(digits) > 3:
        raise BrokenPromiseError(f"{sum(digits) / len(digits):.0f} decimals of each probability")


def test_a_client_is_answered_so_many_rows_a_day(trained_run):
    """A token has a budget of rows, which a restart of the service does not give back."""
    ids, answered = list(predicted(trained_run))[:50], 0
    for _ in range(2):
        with client_of(trained_run, settings(max_rows_per_day=120)) as client:
            answered += sum(len(ids) * (client.predict(*ids)[0] == 200) for _ in range(4))
    if answered > 120:
        raise BrokenPromiseError(f"{answered} rows of a budget of 120")
