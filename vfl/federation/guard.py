"""What stands before Flower's HTTP application: an allow-list of routes, a limit of bytes, a key.

Flower's SuperLink serves three APIs on one port: Fleet for SuperNodes, Control for the command line
and Runtime for the processes it starts. Only Fleet asks who calls. So vfl sets two
guards before the application, each with a listening socket of its own:

- the network's (`network_guard`) has the routes of Fleet that a registered SuperNode needs, for
  keys that are registered;
- the machine's own (`local_guard`), on the loopback, has Control and Runtime, for callers that show
  the secret of this start. A SuperNode's local API has such a guard too.

No decision looks at the address of the caller, so a proxy in front, a forwarded-for header or an
IPv4 address in the form of IPv6 change nothing. Refusals come before the body is read. How long and
how many connections wait before their caller is known is for `vfl.transport.front`.

Flower's programs ask for work every few seconds, and a session would wait for that in several
places. So a guard holds such a question until there may be work, see `Bell`.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from vfl.federation.upstream import KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER
from vfl.transport.front import welcome
from vfl.transport.http import (
    LargeBodyError,
    Receive,
    Scope,
    Send,
    announces_at_most,
    read_body,
    replayed,
)

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Whether a SuperNode with this public key (PEM) is registered.
IsRegistered = Callable[[bytes], Awaitable[bool]]
#: Whether a body that was read in full may reach the application; path and body.
Acceptable = Callable[[str, bytes], bool]

#: Carries the secret of this start to a local guard.
SECRET_HEADER = "vfl-local-secret"
#: How old a signature may be, and how far a clock may be ahead; Flower's own limits.
_SIGNED_WITHIN_S = (-5.0, 305.0)

_FLEET = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
_CONTROL = (
    "list-nodes",
    "list-runs",
    "register-node",
    "start-run",
    "stop-run",
    "stream-logs",
    "unregister-node",
)
_RUNTIME = (
    "acquire-task",
    "confirm-message-received",
    "get-nodes",
    "pull-messages",
    "pull-object",
    "pull-task-input",
    "push-logs",
    "push-messages",
    "push-object",
    "push-task-output",
    "send-task-heartbeat",
)
#: What a registered SuperNode may call.
FLEET_ROUTES = frozenset(f"/v1/fleet/{name}" for name in _FLEET)
#: What `vfl` calls, and what the processes of a run call.
CONTROL_ROUTES = frozenset(f"/v1/control/{name}" for name in _CONTROL)
RUNTIME_ROUTES = frozenset(f"/v1/runtime/{name}" for name in _RUNTIME)

#: A reply of a party is a few kilobytes: its report, or why it failed.
FLEET_BODY_BYTES = 1024 * 1024
#: An app bundle has at most 10 MB, an object of a message 5.
LOCAL_BODY_BYTES = 16 * 1024 * 1024
#: Time for a whole body, and how many of one party are read at once; a SuperNode sends two.
BODY_TIMEOUT_S = 30.0
FLEET_BODIES_AT_ONCE = 8
#: Questions for work, and requests that may bring some.
_ASKING = {"/v1/runtime/acquire-task", "/v1/fleet/pull-messages"}
_BRINGING = {"/v1/control/start-run", "/v1/runtime/push-messages", "/v1/runtime/push-object"}
#: How long a question is held, and how long what comes in pieces may still be coming.
HOLD_S = 2.0
_PIECES_S = 0.03
#: A SuperNode asks again at once, so one that was silent for longer is gone.
SILENT_S = HOLD_S + 1.0
_ARRIVING = "/v1/fleet/activate-node"
#: Told of the key of a SuperNode that comes after it was gone, before the application is.
Arrives = Callable[[bytes], Awaitable[None]]
#: Who calls, as far as the headers prove it; None for whoever may not pass. It raises
#: `FormerCallerError` for who might once.
Caller = Callable[[Scope], Awaitable[bytes | None]]


class FormerCallerError(Exception):
    """The key of a SuperNode that was registered, and is not any more."""


class Bell:
    """Rings when there may be work; one for all guards of a service.

    Whoever asks is held until it rings, `HOLD_S` at most, and not at all if it has rung since the
    same caller asked last.
    """

    def __init__(self) -> None:
        self._rings = 0
        self._heard: dict[object, int] = {}
        self._ringing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ring(self) -> None:
        """Let everybody ask who waits; from any thread."""
        self._rings += 1
        if self._loop:
            with suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ringing.set()
        self._ringing = asyncio.Event()

    async def wait(self, caller: object, receive: Receive) -> bool:
        """Hold a question; whether its caller is still there."""
        self._loop = asyncio.get_running_loop()
        gone = False
        if self._heard.get(caller) == self._rings:
            hung_up = asyncio.ensure_future(receive())
            rung = asyncio.ensure_future(self._ringing.wait())
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait([hung_up, rung], timeout=HOLD_S, return_when=first)
            gone = hung_up.done()
            for waiting in (hung_up, rung):
                waiting.cancel()
            if rung.done() and not gone:
                await asyncio.sleep(_PIECES_S)
        self._heard[caller] = self._rings
        return not gone


class Guard:
    """Lets requests to some routes through to an application, with bodies of a limited size.

    Args:
        application: what answers.
        routes: exact paths; each takes POST and nothing else.
        limit_bytes: most bytes of a body, however it is sent.
        caller: who calls.
        acceptable: whether the body says what its sender may say.
        bodies_at_once: of one caller.
        bell: what questions for work are held for; without one they go through at once.
        arrives: see `Arrives`.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        application: Application,
        routes: frozenset[str],
        limit_bytes: int,
        caller: Caller,
        acceptable: Acceptable,
        bodies_at_once: float = math.inf,
        bell: Bell | None = None,
        arrives: Arrives | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrives, self._clock = arrives, clock
        self._called: dict[bytes, float] = {}
        self._application = application
        self._routes = routes
        self._limit_bytes = limit_bytes
        self._caller = caller
        self._acceptable = acceptable
        self._bodies_at_once = bodies_at_once
        self._reading: Counter[bytes] = Counter()
        self._bell = bell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection's event scope, as ASGI wants."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":  # a web socket; none of the routes is one
            return await send({"type": "websocket.close", "code": 1008})
        try:
            caller = await self._caller(scope) if self._has_route(scope) else None
        except FormerCallerError:
            return await _refuse(send, 410)
        if caller is None:
            # Not 401: a SuperNode takes that for an order to end without a word.
            return await _refuse(send, 403)
        welcome(scope)
        if not announces_at_most(scope, self._limit_bytes):
            return await _refuse(send, 413)
        if self._reading[caller] >= self._bodies_at_once:
            return await _refuse(send, 429)
        self._reading[caller] += 1
        try:
            body = await read_body(receive, self._limit_bytes, BODY_TIMEOUT_S)
        except LargeBodyError:
            return await _refuse(send, 413)
        except TimeoutError:
            return await _refuse(send, 408)
        finally:
            self._reading -= Counter((caller,))
        if body is None:  # the caller hung up; a part of a request is none
            return None
        if not self._acceptable(scope["path"], body):
            return await _refuse(send, 403)
        path, bell = scope["path"], self._bell
        silent_s = self._clock() - self._called.get(caller, -math.inf)
        if self._arrives and path == _ARRIVING and silent_s > SILENT_S:
            await self._arrives(caller)
        self._called[caller] = self._clock()
        if bell and path in _ASKING and not await bell.wait((caller, path), receive):
            return None  # whoever hung up must be handed no work
        self._called[caller] = self._clock()
        await self._application(scope, replayed(body, receive), send)
        if bell and path in _BRINGING:
            bell.ring()
        return None

    def _has_route(self, scope: Scope) -> bool:
        # The raw path, too: a path that needed decoding is none of ours, whatever it decodes to.
        plain = scope["path"].encode() == scope.get("raw_path", scope["path"].encode())
        return plain and scope["path"] in self._routes and scope["method"] == "POST"


def network_guard(
    application: Application,
    is_registered: IsRegistered,
    acceptable: Acceptable,
    bell: Bell | None = None,
    arrives: Arrives | None = None,
    was_registered: IsRegistered | None = None,
) -> Guard:
    """The guard that other machines meet: Fleet, for registered SuperNodes.

    A caller signs the time with its key, in the headers, so that nobody else has a body read:
    neither a stranger nor whoever knows the public key of a party.

    Args:
        application: Flower's.
        is_registered: whether a SuperNode with a public key is registered.
        acceptable: whether the body of a request may reach the application.
        bell: see `Guard`.
        arrives: see `Guard`.
        was_registered: whether one that is not was so before. Its SuperNode is answered 410 Gone,
            and need not try again; without this it is answered as a stranger, 403.
    """

    async def caller(scope: Scope) -> bytes | None:
        try:
            key = b64decode(_header(scope, KEY_HEADER), validate=True)
            signature = b64decode(_header(scope, SIGNATURE_HEADER), validate=True)
        except ValueError:
            return None
        former = not await is_registered(key)
        if former and not (was_registered and await was_registered(key)):
            return None
        signed = _header(scope, TIME_HEADER)
        if not await asyncio.to_thread(_is_signed, key, signed, signature):
            return None
        if former:
            raise FormerCallerError
        return key

    limits = FLEET_ROUTES, FLEET_BODY_BYTES
    return Guard(application, *limits, caller, acceptable, FLEET_BODIES_AT_ONCE, bell, arrives)


def _is_signed(key: bytes, signed: bytes, signature: bytes) -> bool:
    """Whether a text is a time of these minutes, signed by the owner of a key (PEM)."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii"))
        public = load_pem_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)  # Flower registers no other
        public.verify(signature, signed, ec.ECDSA(SHA256()))
    except (ValueError, TypeError, InvalidSignature):
        return False
    earliest, latest = _SIGNED_WITHIN_S
    return earliest < age.total_seconds() < latest


def local_guard(
    application: Application,
    routes: frozenset[str],
    secret: str,
    acceptable: Acceptable = lambda path, body: True,
    bell: Bell | None = None,
) -> Guard:
    """A guard on the loopback, for whoever knows the secret of this start.

    Args:
        application: Flower's.
        routes: exact paths.
        secret: what the header must hold; other users of the machine do not know it.
        acceptable: whether the body of a request may reach the application.
        bell: see `Guard`.
    """

    async def caller(scope: Scope) -> bytes | None:
        shown = _header(scope, SECRET_HEADER)
        return b"owner" if hmac.compare_digest(shown, secret.encode()) else None

    return Guard(application, routes, LOCAL_BODY_BYTES, caller, acceptable, bell=bell)


def _header(scope: Scope, name: str) -> bytes:
    """The value of a header that is there exactly once; nothing otherwise."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return bytes(values[0]) if len(values) == 1 else b""


async def _refuse(send: Send, status: int) -> None:
    """Answer without a word, and let the connection end: its body was not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
