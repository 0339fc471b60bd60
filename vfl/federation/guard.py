"""Guards around Flower's HTTP application: allowed routes, size limits, authentication.

Flower's SuperLink serves three APIs on one port: Fleet for SuperNodes, Control for the command
line, and Runtime for the processes that the SuperLink starts. Only Fleet authenticates its callers.
vfl therefore puts two guards in front of the application, each with its own listening socket:

- the network's guard (`network_guard`) allows the routes of Fleet that a registered SuperNode
  needs, for registered keys;
- the machine's own guard (`local_guard`), on the loopback, allows Control and Runtime, for callers
  that send the secret made at the service's start. A SuperNode's local API has such a guard too.

No decision depends on the address of the caller, so neither a proxy in front, a forwarded-for
header nor an IPv4 address in IPv6 form changes a decision. A guard refuses a request before it
reads the request's body. `vfl.transport.front` limits how many connections wait without an
authenticated caller, and how long.

Flower's programs ask for work every few seconds, which would delay a session several times. A guard
therefore answers a request for work only when there may be work; see `Bell`.
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
#: Function that takes a public key (PEM), and returns whether a SuperNode with this key is
#: registered.
IsRegistered = Callable[[bytes], Awaitable[bool]]
#: Function that takes a path and a whole body, and returns whether the body may reach the
#: application.
Acceptable = Callable[[str, bytes], bool]

#: Header for the secret that a service makes at its start; a local guard requires this header.
SECRET_HEADER = "vfl-local-secret"
#: Least and largest accepted age of a signature in seconds, as in Flower; a negative age means that
#: the signer's clock is fast.
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
#: Routes that a registered SuperNode may call.
FLEET_ROUTES = frozenset(f"/v1/fleet/{name}" for name in _FLEET)
#: Routes that the command `vfl` calls, and routes that the processes of a run call.
CONTROL_ROUTES = frozenset(f"/v1/control/{name}" for name in _CONTROL)
RUNTIME_ROUTES = frozenset(f"/v1/runtime/{name}" for name in _RUNTIME)

#: Size limit of a body from a SuperNode; a reply has a few kilobytes: a party's report, or the
#: reason of its failure.
FLEET_BODY_BYTES = 1024 * 1024
#: Size limit of a body on the local port; an app bundle has at most 10 MB, an object of a message
#: has at most 5 MB.
LOCAL_BODY_BYTES = 16 * 1024 * 1024
#: Time limit for one request body, and limit of the bodies that one SuperNode sends at the same
#: time; a SuperNode sends two.
BODY_TIMEOUT_S = 30.0
FLEET_BODIES_AT_ONCE = 8
#: Routes for requests for work, and routes whose requests may bring new work.
_ASKING = {"/v1/runtime/acquire-task", "/v1/fleet/pull-messages"}
_BRINGING = {"/v1/control/start-run", "/v1/runtime/push-messages", "/v1/runtime/push-object"}
#: Longest time that a request for work is held, and extra time after the bell for the remaining
#: parts of a message, in seconds.
HOLD_S = 2.0
_PIECES_S = 0.03
#: A running SuperNode asks for work again immediately, so a SuperNode that is silent for longer has
#: died.
SILENT_S = HOLD_S + 1.0
_ARRIVING = "/v1/fleet/activate-node"
#: Function that receives the key of a SuperNode that connects again, before its request reaches the
#: application.
Arrives = Callable[[bytes], Awaitable[None]]
#: Function that authenticates a caller by the headers only, and returns None if the caller may not
#: pass. The function raises `FormerCallerError` for a caller whose key was registered earlier.
Caller = Callable[[Scope], Awaitable[bytes | None]]


class FormerCallerError(Exception):
    """Error raised when the key of a SuperNode was registered earlier, but was withdrawn."""


class Bell:
    """Signals that new work may exist; all guards of a service share one bell.

    A caller waits until the bell rings, at most `HOLD_S`; if the bell has rung since the caller's
    last request, the caller does not wait.
    """

    def __init__(self) -> None:
        self._rings = 0
        self._heard: dict[object, int] = {}
        self._ringing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ring(self) -> None:
        """Let all waiting requests continue; any thread may call this."""
        self._rings += 1
        if self._loop:
            with suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ringing.set()
        self._ringing = asyncio.Event()

    async def wait(self, caller: object, receive: Receive) -> bool:
        """Hold a request until the bell rings; return whether its caller is still connected."""
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
    """Passes requests for allowed routes to an application, and limits the size of their bodies.

    Args:
        application: application behind the guard.
        routes: exact paths of the allowed routes; only POST is allowed.
        limit_bytes: largest size of a body in bytes, whatever its transfer encoding.
        caller: function that authenticates the sender of a request; see `Caller`.
        acceptable: function that returns whether a body may reach the application; see
            `Acceptable`.
        bodies_at_once: number of bodies that one caller may send at the same time.
        bell: signal of new work, until which requests for work are held; with None they are
            answered at once.
        arrives: see `Arrives`.
        clock: monotonic clock in seconds.
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
        """Handle a request, a web socket, or the start and end of the server (ASGI)."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":  # a web socket, which no route accepts
            return await send({"type": "websocket.close", "code": 1008})
        try:
            caller = await self._caller(scope) if self._has_route(scope) else None
        except FormerCallerError:
            return await _refuse(send, 410)
        if caller is None:
            # The status is not 401, because a SuperNode that receives 401 ends without any message.
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
        if body is None:  # the caller disconnected before the request was complete
            return None
        if not self._acceptable(scope["path"], body):
            return await _refuse(send, 403)
        path, bell = scope["path"], self._bell
        silent_s = self._clock() - self._called.get(caller, -math.inf)
        if self._arrives and path == _ARRIVING and silent_s > SILENT_S:
            await self._arrives(caller)
        self._called[caller] = self._clock()
        if bell and path in _ASKING and not await bell.wait((caller, path), receive):
            return None  # a disconnected caller must not receive work
        self._called[caller] = self._clock()
        await self._application(scope, replayed(body, receive), send)
        if bell and path in _BRINGING:
            bell.ring()
        return None

    def _has_route(self, scope: Scope) -> bool:
        # The raw path must match too; a path with encoded characters is refused, because no allowed
        # route has any.
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
    """Make the guard of the network port, which lets registered SuperNodes use Fleet.

    A caller signs the present time with its key, and sends the signature in the headers. The guard
    therefore reads no body from a stranger, nor from a client that only knows a party's public key.

    Args:
        application: Flower's application.
        is_registered: function that returns whether a SuperNode with a given public key is
            registered.
        acceptable: function that returns whether the body of a request may reach the application.
        bell: see `Guard`.
        arrives: see `Guard`.
        was_registered: function that returns whether a key that is not registered was registered
            earlier. A SuperNode with such a key then receives the status 410 Gone, and need not try
            again; without this function, it receives 403, like an unknown SuperNode.
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
    """Return whether a text is a current time stamp that the owner of a public key (PEM) signed."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii"))
        public = load_pem_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)  # Flower registers no other keys
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
    """Make a guard on the loopback, for callers that send the secret made at the service's start.

    Args:
        application: Flower's application.
        routes: exact paths.
        secret: required value of the header `SECRET_HEADER`, which other users of the machine do
            not know.
        acceptable: function that returns whether the body of a request may reach the application.
        bell: see `Guard`.
    """

    async def caller(scope: Scope) -> bytes | None:
        shown = _header(scope, SECRET_HEADER)
        return b"owner" if hmac.compare_digest(shown, secret.encode()) else None

    return Guard(application, routes, LOCAL_BODY_BYTES, caller, acceptable, bell=bell)


def _header(scope: Scope, name: str) -> bytes:
    """Return the value of a header that occurs exactly once; otherwise return an empty text."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return bytes(values[0]) if len(values) == 1 else b""


async def _refuse(send: Send, status: int) -> None:
    """Send only a status, and close the connection, because the request's body was not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
