"""Guards (request filters) of Flower's HTTP server: routes, size limits, authentication.

Flower's SuperLink serves three APIs at one port: Fleet for SuperNodes, Control for the command
line, and Runtime for the processes that the SuperLink starts. Of these, Control does not
authenticate its callers. vfl therefore puts two guards in front of the application, each with its
own listening socket:

- the network's guard (`network_guard`) allows the routes of Fleet that a registered SuperNode
  needs, for callers with registered keys;
- the machine's own guard (`local_guard`), which listens only on this machine, allows Control and
  Runtime, for callers that send the secret which the service made at its start. The local API of a
  SuperNode has a local guard, too.

No decision depends on the network address of the caller; so a proxy in front of the guard, a
forwarded-for header or an IPv4 address in IPv6 form cannot change a decision. A guard reads a
request's body only after it has authenticated the caller. `vfl.transport.front` limits how many
connections may wait without an authenticated caller, and for how long.

Flower's programs pause between two requests for work, and each pause would delay a session. A guard
therefore delays its response to a request for work until there may be work; see `Bell`.
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
from vfl.transport.http import Receive, RefusedBodyError, Scope, Send, read_body, replayed

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Function that takes a public key (PEM), and returns whether a SuperNode with this key is
#: registered.
IsRegistered = Callable[[bytes], Awaitable[bool]]
#: Function that takes a route's path and a whole request body, and returns whether the body may
#: reach the application.
Acceptable = Callable[[str, bytes], bool]

#: Name of the header for the secret that a service makes at its start; a local guard requires this
#: header.
SECRET_HEADER = "vfl-local-secret"
#: Smallest and largest accepted age of a signature in seconds, as in Flower; a negative age means
#: that the signer's clock is ahead.
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
#: Routes of the Fleet API that a registered SuperNode may call.
FLEET_ROUTES = frozenset(f"/v1/fleet/{name}" for name in _FLEET)
#: Routes that the command `vfl` calls, and routes that the processes of a run call.
CONTROL_ROUTES = frozenset(f"/v1/control/{name}" for name in _CONTROL)
RUNTIME_ROUTES = frozenset(f"/v1/runtime/{name}" for name in _RUNTIME)

#: Size limit in bytes of a request body from a SuperNode; a reply has a few kilobytes: a party's
#: report, or the reason why the party failed.
FLEET_BODY_BYTES = 1024 * 1024
#: Size limit in bytes of a request body on the local port; an app bundle has at most 10 MB, and one
#: object of a message at most 5 MB.
LOCAL_BODY_BYTES = 16 * 1024 * 1024
#: Seconds within which a request body must arrive, and largest number of bodies that one SuperNode
#: may send at the same time; a SuperNode sends two.
BODY_TIMEOUT_S = 30.0
FLEET_BODIES_AT_ONCE = 8
#: Routes of requests for work, and routes of requests after which there may be new work.
_ASKING = {"/v1/runtime/acquire-task", "/v1/fleet/pull-messages"}
_BRINGING = {"/v1/control/start-run", "/v1/runtime/push-messages", "/v1/runtime/push-object"}
#: Longest delay in seconds of a response to a request for work; and seconds after the bell for the
#: remaining parts of a message.
HOLD_S = 2.0
_PIECES_S = 0.03
#: A running SuperNode asks for work again immediately, so a SuperNode that sent no request for more
#: than this many seconds has died.
SILENT_S = HOLD_S + 1.0
_ARRIVING = "/v1/fleet/activate-node"
#: Function that is called with the key of a SuperNode that connects, if the SuperNode has sent no
#: request for `SILENT_S` seconds, before the SuperNode's request reaches the application.
Arrives = Callable[[bytes], Awaitable[None]]
#: Function that authenticates a caller by the request's headers only, and returns the caller's key,
#: or None if the caller may not pass. If the caller's key was registered earlier and then
#: withdrawn, the function raises `FormerCallerError`.
Caller = Callable[[Scope], Awaitable[bytes | None]]


class FormerCallerError(Exception):
    """Error: the key of a SuperNode was registered earlier, and then withdrawn."""


class Bell:
    """Announces to waiting requests that there may be new work.

    All guards of a service share one bell. A request for work waits until the bell rings, at most
    `HOLD_S` seconds; if the bell has rung since the caller's last request, it does not wait.
    """

    def __init__(self) -> None:
        self._rings = 0
        self._heard: dict[object, int] = {}
        self._ringing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ring(self) -> None:
        """Let all waiting requests for work continue; any thread may call this method."""
        self._rings += 1
        if self._loop:
            with suppress(RuntimeError):  # the server has already ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ringing.set()
        self._ringing = asyncio.Event()

    async def wait(self, caller: object, receive: Receive) -> bool:
        """Delay a request, see `Bell`; return whether its caller is still connected."""
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
    """Passes requests on allowed routes to an application, and limits the size of request bodies.

    Args:
        application: the ASGI application to which allowed requests are passed.
        routes: exact paths of the allowed routes; only the method POST is allowed.
        limit_bytes: largest size of a request body in bytes, with any transfer encoding.
        caller: function that authenticates the sender of a request; see `Caller`.
        acceptable: function that returns whether a request body may reach the application; see
            `Acceptable`.
        bodies_at_once: number of bodies that one caller may send at the same time.
        bell: object that announces new work, for which responses to requests for work are delayed;
            None delays no response.
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
        """Handle an HTTP request, a web socket, or the server's start and end (ASGI)."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":  # a web socket, for which there is no route
            return await send({"type": "websocket.close", "code": 1008})
        try:
            caller = await self._caller(scope) if self._has_route(scope) else None
        except FormerCallerError:
            return await _refuse(send, 410)
        if caller is None:
            # The status is not 401, because a SuperNode that receives 401 ends without printing a
            # reason.
            return await _refuse(send, 403)
        welcome(scope)
        if self._reading[caller] >= self._bodies_at_once:
            return await _refuse(send, 429)
        self._reading[caller] += 1
        try:
            body = await read_body(scope, receive, self._limit_bytes, BODY_TIMEOUT_S)
        except RefusedBodyError as refusal:
            return await _refuse(send, refusal.status)
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
        # The raw path must be equal to the path, because no allowed route contains encoded
        # characters.
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
    """Make the guard of the network port, which lets registered SuperNodes call the Fleet API.

    A caller signs the present time with its private key, and sends the signature in the headers.
    The guard therefore reads no request body of an unknown client, or of a client that knows only
    the public key of a party.

    Args:
        application: Flower's application.
        is_registered: function that returns whether a SuperNode with a given public key is
            registered.
        acceptable: function that returns whether a request body may reach the application.
        bell: see `Guard`.
        arrives: see `Guard`.
        was_registered: function that returns whether a key which is not registered now was
            registered earlier. A SuperNode with such a key then receives the status 410 Gone, and
            stops trying; without this function, it receives 403, like an unknown SuperNode.
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
    """Return whether a key's owner signed this text, and whether the text is a recent time."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii"))
        public = load_pem_public_key(key)
        # Flower registers no keys of other types
        assert isinstance(public, ec.EllipticCurvePublicKey)
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
    """Make a guard for this machine's callers, which must send the secret that the service made.

    Args:
        application: Flower's application.
        routes: exact paths.
        secret: required value of the header `SECRET_HEADER`; other users of this machine do not
            know the value.
        acceptable: function that returns whether a request body may reach the application.
        bell: see `Guard`.
    """

    async def caller(scope: Scope) -> bytes | None:
        shown = _header(scope, SECRET_HEADER)
        return b"owner" if hmac.compare_digest(shown, secret.encode()) else None

    return Guard(application, routes, LOCAL_BODY_BYTES, caller, acceptable, bell=bell)


def _header(scope: Scope, name: str) -> bytes:
    """Return the value of a header that occurs exactly once; otherwise return an empty string."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return bytes(values[0]) if len(values) == 1 else b""


async def _refuse(send: Send, status: int) -> None:
    """Send only a status and close the connection, whose request body was not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
