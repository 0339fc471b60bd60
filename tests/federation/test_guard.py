"""The guards before Flower's APIs: every route of the SuperLink and SuperNode that really run."""

import asyncio
import os
import re
import ssl
import subprocess
import time
import warnings
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from vfl.core.storage import read_json
from vfl.federation import programs
from vfl.federation.guard import (
    CONTROL_ROUTES,
    FLEET_BODY_BYTES,
    FLEET_ROUTES,
    RUNTIME_ROUTES,
    SECRET_HEADER,
    Bell,
    local_guard,
    network_guard,
)

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from fastapi.routing import iter_route_contexts
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from flwr.superlink.main import create_app as superlink_app
    from flwr.supernode.main import create_app as supernode_app

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "security.md"
REFUSED = {403, 413}
NOBODY = 65534


# --- the guards alone ----------------------------------------------------------------------------


class Application:
    """Answers 200 and remembers what reached it."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def scope_of(path, headers=(), method="POST", raw=None):
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode() if raw is None else raw,
        "headers": [(name.encode(), value) for name, value in headers],
        "client": ("127.0.0.1", 4711),
    }


def ask(guard, path, *, method="POST", headers=(), pieces=(b"",), raw=None):
    """The status of an answer, and how many pieces of the body were read for it."""
    pending, sent = list(pieces), []

    async def receive():
        piece = pending.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pending)}

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope_of(path, headers, method, raw), receive, send))
    return sent[0]["status"], len(pieces) - len(pending)


OWNER, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
PUBLIC = OWNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
PULL = "/v1/fleet/pull-messages"


def signed(key=OWNER, public=PUBLIC, age_s=0.0, by=None):
    """Headers as a SuperNode sends them."""
    context = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat().encode()
    signature = key.sign(context, ec.ECDSA(SHA256())) if by is None else by
    return [
        ("flwr-public-key", b64encode(public)),
        ("flwr-timestamp", context),
        ("flwr-signature", b64encode(signature)),
    ]


@pytest.fixture
def network():
    application = Application()

    async def is_registered(key):
        return key == PUBLIC

    return application, network_guard(application, is_registered, lambda path, body: body != b"bad")


@pytest.mark.parametrize("path", sorted(FLEET_ROUTES))
def test_a_registered_key_reaches_fleet(network, path):
    application, guard = network
    assert ask(guard, path, headers=signed(), pieces=[b"o", b"k"]) == (200, 2)
    assert application.bodies == [b"ok"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/pull-messages/",
        "/v1/fleet//pull-messages",
        "/v1/fleet/../control/start-run",
        "//v1/fleet/pull-messages",
        "/V1/fleet/pull-messages",
        "/v1/fleet/pull-messages\0",
        "/health",
        "/",
        "",
    ],
)
def test_any_other_path_is_refused_unread(network, path):
    application, guard = network
    assert ask(guard, path, headers=signed()) == (403, 0)
    assert application.bodies == []


@pytest.mark.parametrize("raw", [b"/v1/fleet/pull%2Dmessages", b"/v1/fleet/pull-messages%00", b""])
def test_a_path_that_had_to_be_decoded_is_refused(network, raw):
    assert ask(network[1], PULL, headers=signed(), raw=raw) == (403, 0)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "post"])
def test_another_method_is_refused(network, method):
    assert ask(network[1], PULL, headers=signed(), method=method) == (403, 0)


SHOP = OTHER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    "made",
    [
        lambda: [],
        lambda: signed(public=b""),
        lambda: signed(key=OTHER, public=SHOP),
        lambda: [("flwr-public-key", b"not base64"), *signed()[1:]],
        lambda: [*signed(), signed()[0]],
        lambda: [*signed(key=OTHER, public=SHOP), ("x-forwarded-for", b"127.0.0.1")],
        lambda: signed()[:1],  # a public key alone, as everybody may know it
        lambda: signed()[:2],
        lambda: signed(by=b""),
        lambda: signed(by=b"not a signature"),
        lambda: signed(key=OTHER),
        lambda: [*signed()[:1], *signed(age_s=1)[1:2], *signed()[2:]],  # another time's signature
        lambda: signed(age_s=400),
        lambda: signed(age_s=-60),
        lambda: [*signed()[:1], ("flwr-timestamp", b"\xff"), *signed()[2:]],
        lambda: [*signed()[:1], ("flwr-timestamp", b"2026-01-01T00:00:00"), *signed()[2:]],
    ],
)
def test_whoever_does_not_sign_with_a_registered_key_has_no_body_read(network, made):
    application, guard = network
    assert ask(guard, PULL, headers=made(), pieces=[b"x" * 100]) == (403, 0)
    assert application.bodies == []


def test_a_part_of_a_body_reaches_nobody(network):
    application, guard = network
    events = [
        {"type": "http.request", "body": b"o", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return events.pop(0)

    async def send(message):
        raise AssertionError("nobody is there to answer")

    asyncio.run(guard(scope_of(PULL, signed()), receive, send))
    assert application.bodies == []


def test_slow_bodies_of_one_caller_end_and_are_few(network, monkeypatch):
    monkeypatch.setattr("vfl.federation.guard.BODY_TIMEOUT_S", 0.2)
    _, guard = network
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message.get("status"))

    async def many():
        calls = (guard(scope_of(PULL, signed()), receive, send) for _ in range(12))
        await asyncio.wait_for(asyncio.gather(*calls), 60)

    asyncio.run(many())
    assert sorted(status for status in sent if status) == [408] * 8 + [429] * 4
    assert ask(guard, PULL, headers=signed(), pieces=[b"ok"]) == (200, 1)


def test_a_body_is_bounded_however_it_is_sent(network):
    application, guard = network
    announced = ("content-length", str(FLEET_BODY_BYTES + 1).encode())
    assert ask(guard, PULL, headers=[*signed(), announced]) == (413, 0)
    piece = b"x" * (FLEET_BODY_BYTES // 4)
    assert ask(guard, PULL, headers=signed(), pieces=[piece] * 100) == (413, 5)
    lied = ("content-length", b"3")
    assert ask(guard, PULL, headers=[*signed(), lied], pieces=[piece] * 100) == (413, 5)
    assert application.bodies == []
    assert ask(guard, PULL, headers=signed(), pieces=[piece] * 4) == (200, 4)


def test_a_body_that_says_too_much_is_refused(network):
    application, guard = network
    assert ask(guard, PULL, headers=signed(), pieces=[b"bad"]) == (403, 1)
    assert application.bodies == []


@pytest.mark.parametrize(
    "shown", [[], [b""], [b"guess"], [b"secre"], [b"secret "], [b"secret"] * 2]
)
def test_a_local_guard_wants_its_secret_once(shown):
    guard = local_guard(Application(), RUNTIME_ROUTES, "secret")
    headers = [(SECRET_HEADER, value) for value in shown]
    assert ask(guard, "/v1/runtime/acquire-task", headers=headers) == (403, 0)
    right = [(SECRET_HEADER, b"secret")]
    assert ask(guard, "/v1/runtime/acquire-task", headers=right) == (200, 1)
    assert ask(guard, "/v1/control/start-run", headers=right) == (403, 0)


def test_a_web_socket_is_closed(network):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(network[1]({"type": "websocket", "path": PULL}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


# --- questions for work ---------------------------------------------------------------------------

ACQUIRE, START = "/v1/runtime/acquire-task", "/v1/control/start-run"
#: Longer than anything that is not held takes.
HOLD_S = 60.0


class Held:
    """A local guard with a bell; each question says what became of it and how long it took."""

    def __init__(self):
        self.bell = Bell()
        self.application = Application()
        routes = CONTROL_ROUTES | RUNTIME_ROUTES
        self.guard = local_guard(self.application, routes, "secret", bell=self.bell)

    async def ask(self, path, hangs_up_after=None):
        began, sent = time.monotonic(), []
        events = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            if events:
                return events.pop(0)
            await asyncio.sleep(60 if hangs_up_after is None else hangs_up_after)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message.get("status"))

        await self.guard(scope_of(path, [(SECRET_HEADER, b"secret")]), receive, send)
        return sent[:1], time.monotonic() - began


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr("vfl.federation.guard.HOLD_S", HOLD_S)
    return Held()


def test_a_question_for_work_is_held_until_there_may_be_some(held):
    async def play():
        first = await held.ask(ACQUIRE)
        waiting = asyncio.create_task(held.ask(ACQUIRE))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        return first, await held.ask(START), await waiting

    for answer, seconds in asyncio.run(play()):
        assert answer == [200]
        assert seconds < HOLD_S


def test_a_question_that_is_held_in_vain_is_answered(held, monkeypatch):
    monkeypatch.setattr("vfl.federation.guard.HOLD_S", 0.2)

    async def play():
        await held.ask(ACQUIRE)
        return await held.ask(ACQUIRE)

    answer, seconds = asyncio.run(play())
    assert answer == [200]
    assert seconds >= 0.2


def test_a_question_is_not_held_when_work_came_since_the_last_one(held):
    async def play():
        await held.ask(ACQUIRE)
        await held.ask(START)
        return await held.ask(ACQUIRE)

    assert asyncio.run(play())[1] < HOLD_S


def test_whoever_hung_up_meanwhile_is_handed_no_work(held):
    async def play():
        await held.ask(ACQUIRE)
        return await held.ask(ACQUIRE, hangs_up_after=0.1)

    answer, seconds = asyncio.run(play())
    assert answer == []
    assert seconds < HOLD_S
    assert len(held.application.bodies) == 1


def test_another_thread_may_ring(held):
    async def play():
        await held.ask(ACQUIRE)
        waiting = asyncio.create_task(held.ask(ACQUIRE))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(held.bell.ring)
        return await waiting

    assert asyncio.run(play())[1] < HOLD_S
    held.bell.ring()  # nobody is there any more


def test_without_a_bell_nothing_is_held(network):
    _, guard = network
    assert [ask(guard, PULL, headers=signed()) for _ in range(2)] == [(200, 1)] * 2


# --- a real SuperLink and SuperNode -------------------------------------------------------------


class Running:
    """A SuperLink with two registered parties, and the SuperNode of one of them.

    The other's key is the attacker's, who may end that party's own node.
    """

    def __init__(self, folder, label, superlink):
        self.folder, self.label, self.superlink = folder, label, superlink
        self.ids = {
            name: int(entry["node"])
            for name, entry in read_json(label.state / "nodes.json").items()
        }
        key = load_ssh_private_key((folder / "left" / "node.key").read_bytes(), None)
        self.key, self.public = key, public_key_to_bytes(key.public_key())
        self.apis = {
            "network": (f"https://{label.experiment().federation.superlink}", label.certificates),
            "SuperLink": self._local(label.state),
            "SuperNode": self._local(folder / "right" / "store" / "flower"),
        }
        # Each request has a connection of its own, as those of different callers do.
        alone = httpx.Limits(max_keepalive_connections=0)
        self.clients = {
            name: httpx.Client(
                verify=ssl.create_default_context(cafile=certificates / "ca.pem"),
                timeout=120,
                limits=alone,
                base_url=url,
            )
            for name, (url, certificates) in self.apis.items()
        }

    @staticmethod
    def _local(state):
        api = programs.local_api(state)
        return f"https://{api.address}", api.folder

    def secret(self, service):
        state = self.label.state if service == "SuperLink" else self.apis[service][1].parent
        return {SECRET_HEADER: programs.local_api(state).secret}

    def signed(self):
        """Headers of a SuperNode's request, by the key of party left."""
        time = now().isoformat()
        signature = sign_message(self.key, time.encode())
        return {
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": time,
            "flwr-signature": b64encode(signature).decode(),
        }

    def post(self, api, path, headers, content=b"", method="POST"):
        everything = {"content-type": "application/protobuf"} | headers
        return self.clients[api].request(method, path, headers=everything, content=content)


@pytest.fixture(scope="module")
def running(services):
    made = Running(*services)
    yield made
    for client in made.clients.values():
        client.close()


def routes_of(application):
    """Method and path of everything an application answers."""
    found = set()
    for context in iter_route_contexts(application.routes):
        for method in context.methods or {"GET"}:
            found.add((method, context.path))
    return sorted(found)


def rows_of_the_table():
    """(service, path) to what the document says of the three who ask."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        match = re.match(r"\| (SuperLink|SuperNode) `(/\S*)` ([^|]+)\| (.*) \|$", line)
        if match:
            service, prefix, names, answers = match.groups()
            for name in names.split(", "):
                rows[service, prefix + name.strip()] = answers.split(" | ")
    return rows


ROWS = rows_of_the_table()
OFFERED = [("SuperLink", *route) for route in routes_of(superlink_app())]
OFFERED += [("SuperNode", *route) for route in routes_of(supernode_app())]


def test_the_table_has_a_row_for_every_route_and_no_other():
    assert len(OFFERED) > 80
    assert {(service, path) for service, _, path in OFFERED} == set(ROWS)
    assert {answer for answers in ROWS.values() for answer in answers} == {
        "refused",
        "answered",
        "answered for its own node, refused for another's",
    }


def request_of(path, node_id, public_key):
    """A request that is right in form, from a node."""
    kind = PROTOBUF_REQUEST_TYPES.get(("POST", path))
    if kind is None:
        return b"{}"
    fields = kind.DESCRIPTOR.fields_by_name
    request = kind()
    if "node" in fields:
        request.node.CopyFrom(Node(node_id=node_id))
    elif "node_id" in fields:
        request.node_id = node_id
    if "public_key" in fields:
        request.public_key = public_key
    return request.SerializeToString()


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_a_stranger_is_refused_everywhere(running, service, method, path):
    assert ROWS[service, path][0] == "refused"
    apis = [service, *(["network"] if service == "SuperLink" else [])]
    for api in apis:
        content = request_of(path, 1, b"")
        for headers in (
            {},
            {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "host": "127.0.0.1"},
            {"authorization": "Bearer guess", SECRET_HEADER: "guess"},
        ):
            answer = running.post(api, path, headers, content, method)
            assert answer.status_code in REFUSED
            assert answer.content == b""


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_a_party_speaks_for_its_own_node_only(running, service, method, path):
    said = ROWS[service, path][1]
    api = "network" if service == "SuperLink" else service
    own = request_of(path, running.ids["left"], running.public)
    other = request_of(path, running.ids["right"], b"another key")
    foreign = running.post(api, path, running.signed(), other, method)
    mine = running.post(api, path, running.signed(), own, method)
    if said == "refused":
        assert {mine.status_code, foreign.status_code} <= REFUSED
    else:
        assert foreign.status_code == 401  # by Flower, which compares node and key
        assert mine.status_code != 401
        assert not (mine.status_code in REFUSED and mine.content == b"")  # Flower's have words


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_the_owners_programs_get_what_they_use(running, service, method, path):
    answer = running.post(service, path, running.secret(service), b"\xff", method)
    refused = ROWS[service, path][2] == "refused"
    # Bytes that are no message: Flower's own error shows that they reached it, and do nothing.
    assert (answer.status_code in REFUSED) is refused
    if refused:
        return
    assert answer.status_code in (400, 401, 415, 422, 500)


def test_a_reply_in_another_partys_name_is_refused(running):
    metadata = Metadata(src_node_id=running.ids["right"], dst_node_id=1, run_id=1)
    request = PushMessagesRequest(
        node=Node(node_id=running.ids["left"]), messages_list=[Message(metadata=metadata)]
    )
    path = "/v1/fleet/push-messages"
    forged = running.post("network", path, running.signed(), request.SerializeToString())
    assert (forged.status_code, forged.content) == (403, b"")


def memory_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def test_a_large_body_is_not_kept(running):
    """64 MiB from a stranger and from a party; the process stays as small as it was."""
    pid = running.superlink._process.pid
    before = memory_of(pid)

    def pieces():
        for _ in range(64):
            yield bytes(1024 * 1024)

    for path in (PULL, "/v1/control/start-run", "/nowhere"):
        public_alone = dict(list(running.signed().items())[:1])
        for headers in ({}, public_alone, running.signed()):
            try:
                answer = running.post("network", path, headers, pieces())
            except (httpx.WriteError, httpx.ReadError):
                continue  # the guard had closed before all of it was sent
            assert answer.status_code in REFUSED
    assert memory_of(pid) - before < 32 * 1024 * 1024


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_reads_nothing_that_opens_a_port(running):
    folders = [running.label.state, running.folder / "right" / "store" / "flower"]
    for state in folders:
        files = [path for path in state.rglob("*") if path.is_file()]
        assert {"secret", "superexec", "server.key"} <= {path.name for path in files}
        for path in files:
            done = subprocess.run(["cat", path], user=NOBODY, group=NOBODY, capture_output=True)
            assert (done.returncode, done.stdout) == (1, b""), path


def test_no_key_is_registered_without_a_name(running):
    headers = running.secret("SuperLink")
    for request in (RegisterNodeRequest(), RegisterNodeRequest(public_key=PUBLIC)):
        body = request.SerializeToString()
        answer = running.post("SuperLink", "/v1/control/register-node", headers, body)
        assert answer.status_code == 403


def test_another_start_has_other_secrets(running, tmp_path):
    first = programs.LocalApi.begin(tmp_path / "local")
    before = first.secret, first.superexec_secret.read_bytes(), first.ca.read_bytes()
    again = programs.LocalApi.begin(tmp_path / "local")
    after = again.secret, again.superexec_secret.read_bytes(), again.ca.read_bytes()
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists children")
def test_what_runs_the_work_is_in_a_session_of_its_own(running):
    """Beside a caller's busy processes, Ray's workers would wait for minutes otherwise."""
    pid = running.superlink._process.pid
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    assert children
    assert [os.getsid(int(child)) for child in children] == [int(child) for child in children]
