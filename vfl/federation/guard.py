"""What stands before Flower's HTTP application: an allow-list of routes, a limit of bytes, a key.

Flower's SuperLink serves three APIs on one port: Fleet for SuperNodes, Control for the command line
and Runtime for the processes it starts. Only Fleet asks who calls. So vfl gives the application two
doors, each a listening socket of its own:

- the network's (`NetworkDoor`) has the routes of Fleet that a registered SuperNode needs, for keys
  that are registered;
- the machine's own (`LocalDoor`), on the loopback, has Control and Runtime, for callers that show
  the secret of this start. A SuperNode's local API is such a door too.

No decision looks at the address of the caller, so a proxy in front, a forwarded-for header or an
IPv4 address in the form of IPv6 change nothing. Refusals come before the body is read.
"""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Whether a SuperNode with this public key (PEM) is registered.
IsRegistered = Callable[[bytes], Awaitable[bool]]
#: Whether a body that was read in full may reach the application; path and body.
Acceptable = Callable[[str, bytes], bool]

#: Carries the secret of this start to a local door.
SECRET_HEADER = "vfl-local-secret"
#: Where a SuperNode puts its public key, in base64.
_KEY_HEADER = "flwr-public-key"

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
#: What `flwr` calls for vfl, and what the processes of a run call.
CONTROL_ROUTES = frozenset(f"/v1/control/{name}" for name in _CONTROL)
RUNTIME_ROUTES = frozenset(f"/v1/runtime/{name}" for name in _RUNTIME)

#: A reply of a party is a few kilobytes: its report, or why it failed.
FLEET_BODY_BYTES = 1024 * 1024
#: An app bundle has at most 10 MB, an object of a message 5.
LOCAL_BODY_BYTES = 16 * 1024 * 1024


class _Door:
    """Lets requests to some routes through to an application, with bodies of a limited size.

    Args:
        application: what answers.
        routes: exact paths; each takes POST and nothing else.
        limit_bytes: most bytes of a body, however it is sent.
    """

    def __init__(self, application: Application, routes: frozenset[str], limit_bytes: int) -> None:
        self._application = application
        self._routes = routes
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection's event scope, as ASGI wants."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":  # a web socket; none of the routes is one
            return await send({"type": "websocket.close", "code": 1008})
        status = await self._refusal(scope)
        if status is None and _announced_bytes(scope) > self._limit_bytes:
            status = 413
        if status is not None:
            return await _refuse(send, status)
        body = await self._body(receive)
        if body is None:
            return await _refuse(send, 413)
        if not self._acceptable(scope["path"], body):
            return await _refuse(send, 403)
        await self._application(scope, _replayed(body, receive), send)

    async def _refusal(self, scope: Scope) -> int | None:
        """The status of a refusal; None lets the request through."""
        # The raw path, too: a path that needed decoding is none of ours, whatever it decodes to.
        plain = scope["path"].encode() == scope.get("raw_path", scope["path"].encode())
        if not plain or scope["path"] not in self._routes or scope["method"] != "POST":
            return 403
        # Not 401: a SuperNode takes that for an order to end without a word.
        return None if await self._knows(scope) else 403

    async def _knows(self, scope: Scope) -> bool:
        """Whether the caller may use this door."""
        raise NotImplementedError

    def _acceptable(self, path: str, body: bytes) -> bool:
        """Whether the body says what its sender may say."""
        return True

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None as soon as it is larger than the limit."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return bytes(body)  # nobody is left to answer; the application finds out
            body += message.get("body", b"")
            if len(body) > self._limit_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


class NetworkDoor(_Door):
    """The door that other machines see: Fleet, for registered SuperNodes.

    Flower checks the signature of a request behind this door; a key that nobody registered does
    not get that far, so a stranger cannot make it read a body.

    Args:
        application: Flower's.
        is_registered: whether a SuperNode with a public key is registered.
        acceptable: whether the body of a request may reach the application.
    """

    def __init__(
        self, application: Application, is_registered: IsRegistered, acceptable: Acceptable
    ) -> None:
        super().__init__(application, FLEET_ROUTES, FLEET_BODY_BYTES)
        self._is_registered = is_registered
        self._is_acceptable = acceptable

    async def _knows(self, scope: Scope) -> bool:
        try:
            key = b64decode(_header(scope, _KEY_HEADER), validate=True)
        except ValueError:
            return False
        return await self._is_registered(key)

    def _acceptable(self, path: str, body: bytes) -> bool:
        return self._is_acceptable(path, body)


class LocalDoor(_Door):
    """A door on the loopback for whoever knows the secret of this start.

    Args:
        application: Flower's.
        routes: exact paths.
        secret: what the header must hold; other users of the machine do not know it.
    """

    def __init__(self, application: Application, routes: frozenset[str], secret: str) -> None:
        super().__init__(application, routes, LOCAL_BODY_BYTES)
        self._secret = secret.encode()

    async def _knows(self, scope: Scope) -> bool:
        return hmac.compare_digest(_header(scope, SECRET_HEADER), self._secret)


def _header(scope: Scope, name: str) -> bytes:
    """The value of a header that is there exactly once; nothing otherwise."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return bytes(values[0]) if len(values) == 1 else b""


def _announced_bytes(scope: Scope) -> int:
    """The length the request announces; 0 where it announces none, as in chunks."""
    announced = _header(scope, "content-length")
    return int(announced) if announced.isdigit() and len(announced) < 20 else 0


async def _refuse(send: Send, status: int) -> None:
    """Answer without a word, and let the connection end: its body was not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then what comes after it."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Mapping[str, Any]:
        return pending.pop() if pending else await receive()

    return receive_again
