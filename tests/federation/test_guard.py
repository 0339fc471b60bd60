"""The guards before Flower's APIs, alone; test_deployment.py asks those that really run."""

import asyncio
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
)

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
        "/v1/fleet//pull-messages",
        "/v1/fleet/../control/start-run",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages\0",
        "/health",
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


@pytest.mark.parametrize("method", ["GET", "HEAD", "post"])
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


def test_only_the_owner_of_a_key_that_was_taken_back_hears_that_it_was():
    application = Application()

    async def is_shops(key):
        return key == SHOP

    async def nobody(key):
        return False

    guard = network_guard(application, nobody, lambda path, body: True, was_registered=is_shops)
    assert ask(guard, PULL, headers=signed(OTHER, SHOP)) == (410, 0)
    assert ask(guard, PULL, headers=signed(OWNER, SHOP)) == (403, 0)
    assert ask(guard, PULL, headers=signed()) == (403, 0)
    assert ask(guard, "/v1/fleet/register-node", headers=signed(OTHER, SHOP)) == (403, 0)
    assert application.bodies == []


def test_without_a_bell_nothing_is_held(network):
    _, guard = network
    assert [ask(guard, PULL, headers=signed()) for _ in range(2)] == [(200, 1)] * 2


@pytest.mark.parametrize(("silent_s", "forgotten"), [(2.0, []), (3.5, [PUBLIC])])
def test_a_supernode_that_was_killed_may_come_again_and_a_second_one_may_not(silent_s, forgotten):
    application, now, gone = Application(), [100.0], []

    async def arrives(key):
        gone.append(key)

    async def is_registered(key):
        return key == PUBLIC

    guard = network_guard(application, is_registered, lambda path, body: True, arrives=arrives)
    guard._clock = lambda: now[0]
    activate = "/v1/fleet/activate-node"
    assert ask(guard, activate, headers=signed())[0] == 200
    assert gone.pop() == PUBLIC  # nobody has called since the start
    assert ask(guard, PULL, headers=signed())[0] == 200
    assert ask(guard, activate, headers=signed(OTHER, by=b"none"))[0] == 403
    now[0] += silent_s
    assert ask(guard, activate, headers=signed())[0] == 200
    assert gone == forgotten
