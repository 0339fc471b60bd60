"""Workers in other processes: the pool to which they connect, and a worker's request loop.

The leader (the process that sends requests) listens on a port, and each worker connects with its
ticket. Leader and workers use the frames, the handshake and the TLS of `vfl.transport`. A request
consists of a name in `requests.REQUESTS` and plain data (see `wire`); the answer is data, or an
error record with the error's class. Messages between two workers in a computation on shares pass
through the leader. Messages that pass through the leader are encrypted with keys that the two
workers agree on, so the leader cannot read them. The leader also forwards the workers' public keys.
Workers that know the fingerprints of each other's keys detect false public keys.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vfl.core.errors import (
    AuthenticationError,
    LostPeerError,
    PeerFailedError,
    ProtocolError,
    UserError,
    VFLError,
    read_record,
)
from vfl.core.frame import Frame, Kind, from_bytes, to_bytes
from vfl.core.registry import require
from vfl.mpc.many.authenticated import AuthenticatedMember
from vfl.mpc.many.members import Member
from vfl.session.store.witness import Witness
from vfl.tensors.budgets import BudgetLedger
from vfl.tensors.pointers import ME, PointerTensor, Ref, require_at
from vfl.tensors.requests import REQUESTS
from vfl.tensors.shares import PointerSession, Session
from vfl.tensors.wire import packed, unpacked
from vfl.tensors.workers import Worker
from vfl.transport import (
    Admission,
    Credential,
    Hello,
    HubLink,
    PolledLink,
    TcpHub,
    TcpLink,
    Timeouts,
    receive_any,
    session_certificate,
)
from vfl.transport.pairs import Direction

_WINDOW = 64
_ROLE_BYTES = 4  # prefix of a nonce
#: Longest time in seconds until a worker answers, and longest time without a request of the leader.
_STEP_S, _IDLE_S = 600.0, 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Data with which a worker connects to its leader.

    The leader accepts any process with the ticket as this worker.

    Attributes:
        host, port: address and port on which the leader listens.
        session: identifier of the pool's session.
        name: name of the worker for whom the ticket is.
        token: secret token that proves the right to connect as this worker.
        ca: certificate authority for the leader's TLS, in PEM format; empty without TLS, which is
            possible only on one machine.
    """

    host: str
    port: int
    session: str
    name: str
    token: str = field(repr=False)
    ca: str = field(default="", repr=False)

    def write(self, path: Path) -> None:
        """Write the ticket to a file that only its owner can read."""
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Ticket:
        """Read a ticket from a file.

        Raises:
            UserError: the file does not contain a ticket.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(
                "this is not a worker's ticket",
                where=str(path),
                fix="use the file that Pool.write_tickets made for this worker",
            ) from None


class PoolLink(PolledLink, Protocol):
    """The methods that a pool uses of its link to a worker."""


class Pool:
    """The leader's connections to workers in other processes; a pool is a context manager.

    Args:
        names: names of the workers.
        host, port: address and port to listen on; port 0 takes any free port.
        tls: whether to use TLS, with a certificate that the pool makes; without TLS, all workers
            must run on this machine.
        rejoin_window_s: number of seconds within which a broken connection may be restored.
        store: folder in which the leader records the largest counter that it has seen of every
            worker's store (`vfl worker --store`). A smaller counter later shows that a worker's
            store was restored from an old copy; without this folder, the leader does not detect
            this.

    Attributes:
        tickets: each worker's ticket, by the worker's name.

    >>> with Pool("alice", "bob") as pool:
    ...     sorted(pool.tickets), pool.tickets["bob"].host
    (['alice', 'bob'], '127.0.0.1')
    """

    def __init__(
        self,
        *names: str,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
        rejoin_window_s: float = 8.0,
        store: Path | None = None,
    ) -> None:
        require("names", len(names), "different names", len(set(names)) == len(names) > 0)
        session = secrets.token_hex(16)
        tokens = {name: secrets.token_urlsafe(32) for name in names}
        certificate = session_certificate([host]) if tls else None
        self._admission = Admission(session, {n: Credential(n, t) for n, t in tokens.items()})
        waits = Timeouts(step_s=_STEP_S, idle_s=_IDLE_S, rejoin_window_s=rejoin_window_s)
        self._hub = TcpHub(host, port, self._admission, certificate, waits, _WINDOW)
        ca = certificate.ca_pem.decode() if certificate else ""
        self.tickets = {
            name: Ticket(host, self._hub.port, session, name, token, ca)
            for name, token in tokens.items()
        }
        self._links: dict[str, PoolLink] = {}
        self._workers = {name: RemoteWorker(self, name) for name in names}
        self._of_session: dict[str, Sequence[RemoteWorker]] = {}
        self._browser: Any = None
        self._witness = (
            None if store is None else Witness(store, "whoever leads", BudgetLedger.restored_by)
        )

    def write_tickets(self, folder: Path) -> None:
        """Write a ticket file for each worker: NAME.ticket."""
        for name, ticket in self.tickets.items():
            ticket.write(Path(folder) / f"{name}.ticket")

    def page(self, name: str) -> str:
        """Return the web address of a page that acts as this worker in a local browser."""
        from vfl.tensors.browser import Pages

        if self._browser is None:
            self._browser = Pages()
        address, self._links[name] = self._browser.add(name)
        return str(address)

    def wait(self, timeout_s: float = 60.0) -> list[RemoteWorker]:
        """Wait until all workers have connected, and return them.

        Raises:
            MissingPartyError: a worker did not connect in time; the error names it.
            RolledBackError: the store of a worker was restored from an old copy.
        """
        if self._browser is not None:
            self._browser.wait(timeout_s)
        others = [name for name in self._workers if name not in self._links]
        self._hub.wait_all(others, timeout_s)
        self._links |= {name: self._hub.link(name) for name in others}
        self._compare()
        return list(self._workers.values())

    def ask(self, what: str, asked: Sequence[tuple[RemoteWorker, Sequence[Any]]]) -> list[Any]:
        """Send requests to several workers at the same time; return the answer of each worker.

        Raises:
            LostPeerError: a worker has disconnected.
            VFLError: a worker failed; if several workers failed, the pool raises the error that
                caused the other errors.
        """
        for worker, _ in asked:
            worker.require_alive()
        # pack all requests before the first one is sent
        requests = [worker.message(what, args) for worker, args in asked]
        for (worker, _), request in zip(asked, requests, strict=True):
            self._send(worker.name, request)
        waiting = {worker.name for worker, _ in asked}
        answers: dict[str, Any] = {}
        errors: list[VFLError] = []
        while waiting:
            name, message = self._next(waiting, errors)
            if message is None:
                waiting.discard(name)
            elif "relay" in message:
                self._relay(name, message)
                continue
            elif "error" in message:
                waiting.discard(name)
                errors.append(_error_of(message["error"], name))
            else:
                waiting.discard(name)
                answers[name] = message["answer"]
                continue
            for other in waiting:  # these workers may be waiting for a message of the failed worker
                self._send(other, {"drop": errors[-1].what})
        if errors:
            raise min(errors, key=_rank)
        return [answers[worker.name] for worker, _ in asked]

    def _compare(self) -> None:
        """Compare the counters of the workers' stores with recorded counters; record the new ones.

        Workers in browser pages have no stores, so they are left out.
        """
        if self._witness is None:
            return
        here = [
            worker
            for name, worker in self._workers.items()
            if isinstance(self._links.get(name), HubLink) and worker.lost is None
        ]
        known = self._witness.read().peers
        asked = [(worker, (known.get(worker.name, 0),)) for worker in here]
        for worker, count in zip(here, self.ask("age", asked), strict=True):
            if count or worker.name in known:
                self._witness.admit(worker.name, count)

    def close(self) -> None:
        """Notify every worker that the pool has ended, and stop listening."""
        with suppress(VFLError):  # a worker that has already disconnected sends no reply
            self._compare()
        for name, worker in self._workers.items():
            if name in self._links and worker.lost is None:
                self._send(name, {"end": True})
                worker.lost = LostPeerError("the pool was closed", where=name)
        if self._browser is not None:
            self._browser.close()
        self._hub.close()

    def begin_session(self, holders: Sequence[Any], dealer: Any, mac: bool) -> Session:
        """See `Worker.begin_session`; all workers of the session must belong to this pool."""
        everybody = (*holders, dealer)
        if any(worker.pool is not self for worker in everybody):
            raise UserError(
                "these workers belong to different pools", fix="use workers of one pool"
            )
        name = secrets.token_hex(16)
        keys = self.ask("public_key", [(worker, ()) for worker in everybody])
        peers = [[worker.name, key] for worker, key in zip(everybody, keys, strict=True)]
        self._of_session[name] = everybody
        self.ask(
            "sit",
            [(each, (name, role, len(holders), mac, peers)) for role, each in enumerate(everybody)],
        )
        return PointerSession(holders, dealer, mac, self.ask, name)

    def _next(
        self, waiting: set[str], errors: list[VFLError]
    ) -> tuple[str, Mapping[str, Any] | None]:
        """Return the next message of a worker, or None if the worker is lost."""
        links = {name: self._links[name] for name in waiting}
        try:
            name, frame = receive_any(links)
            return name, unpacked(frame.payload)
        except VFLError as error:
            name = self._ended(links)
            self._lose(name, error)
            errors.append(self._workers[name].lost or error)
            return name, None

    def _ended(self, links: Mapping[str, PoolLink]) -> str:
        for name, link in links.items():
            try:
                link.poll()
            except VFLError:
                return name
        return next(iter(links))

    def _lose(self, name: str, error: VFLError) -> None:
        loss = LostPeerError(
            f"{name} has disconnected",
            got=error.what,
            fix="read the output of its process; start it again in a new pool",
        )
        self._workers[name].lost = loss
        self._links[name].close()

    def _send(self, name: str, message: Mapping[str, Any] | bytes) -> None:
        payload = message if isinstance(message, bytes) else packed(message)
        try:
            self._links[name].send(Frame(Kind.PROTOCOL, 0, payload))
        except VFLError as error:
            self._lose(name, error)

    def _relay(self, name: str, message: Mapping[str, Any]) -> None:
        session = self._of_session.get(message["relay"], ())
        roles = [worker.name for worker in session]
        to = message["to"]
        if name not in roles or not 0 <= to < len(roles):
            return  # sender and receiver do not take part in the same computation
        self._send(
            roles[to],
            {"relay": message["relay"], "from": roles.index(name), "frame": message["frame"]},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RemoteWorker:
    """A worker in another process; it takes the same requests as a `Worker` of this process.

    Args:
        pool: pool to which the worker is connected.
        name: the worker's name in error messages and rules of readers.

    Attributes:
        lost: the error with which the worker disconnected; None while it is connected.
    """

    remote = True

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool, self.name = pool, name
        self.sessions: dict[Any, Any] = {}
        self.lost: LostPeerError | None = None
        self._forgotten: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<worker {self.name}, elsewhere{', lost' if self.lost else ''}>"

    def __len__(self) -> int:
        return int(self.count())

    def __getattr__(self, what: str) -> Callable[..., Any]:
        if what not in REQUESTS:
            raise AttributeError(what)
        return partial(self._ask, what)

    def require_alive(self) -> None:
        """See `Worker.require_alive`."""
        if self.lost is not None:
            raise self.lost

    def begin_session(self, holders: Sequence[Any], dealer: Any, mac: bool) -> Session:
        """See `Pool.begin_session`."""
        return self.pool.begin_session(holders, dealer, mac)

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete these tensors at the worker together with the next request to it.

        The method is safe at any time.
        """
        self._forgotten.extend(numbers)

    def message(self, what: str, args: Sequence[Any]) -> bytes:
        """Encode a request as bytes."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        grad = torch.is_grad_enabled()
        return packed(
            {"ask": what, "args": list(args), "forget": forgotten, "grad": grad}, self._ref
        )

    def _ask(self, what: str, *args: Any) -> Any:
        return self.pool.ask(what, [(self, args)])[0]

    def _ref(self, value: Any) -> int | None:
        if not isinstance(value, PointerTensor):
            return None
        require_at(value, self)
        return value.number


def serve(worker: Worker, ticket: Ticket) -> None:
    """Act as a worker of the leader that made the ticket, until the leader ends the session.

    Args:
        worker: worker object, with the tables that its owner has loaded.
        ticket: the ticket of this worker.

    Raises:
        LostPeerError: the leader has disconnected.
        AuthenticationError: the leader does not accept the ticket.
    """
    hello = Hello(ticket.session, ticket.name, ticket.token)
    link = TcpLink.connect(
        ticket.host, ticket.port, hello, ticket.ca.encode() or None,
        Timeouts(step_s=_STEP_S, idle_s=_IDLE_S), _WINDOW, "whoever leads",
    )  # fmt: skip
    try:
        _WorkerEnd(worker, link).serve()
    finally:
        worker.stop()
        link.close()


class _WorkerEnd:
    """A worker's end of its connection to the leader: it receives and answers requests.

    Args:
        worker: worker object that executes the requests.
        link: link to the leader.
    """

    def __init__(self, worker: Worker, link: TcpLink) -> None:
        self._worker, self._link = worker, link
        worker.join = self._join_session
        self._relayed: dict[tuple[str, int], deque[bytes]] = defaultdict(deque)

    def serve(self) -> None:
        """Answer requests until the leader has ended the session."""
        while True:
            message = self._next()
            if "end" in message:
                return
            if "ask" in message:
                self.send(self._answer(message))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the leader."""
        self._link.send(Frame(Kind.PROTOCOL, 0, packed(message)))

    def relayed(self, session: str, role: int) -> bytes:
        """Return the next message that another worker sent through the leader in a computation.

        Raises:
            PeerFailedError: another worker failed in the computation.
        """
        waiting = self._relayed[session, role]
        while not waiting:
            message = self._next()
            if "drop" in message:
                raise PeerFailedError(
                    "another worker stopped with an error", got=str(message["drop"])
                )
            if "relay" not in message:
                raise ProtocolError("a request arrived in the middle of a computation")
        return waiting.popleft()

    def _next(self) -> Mapping[str, Any]:
        message = unpacked(self._link.receive().payload, Ref)
        if not isinstance(message, dict):
            raise ProtocolError("a message has an unknown form", want="a table")
        if "relay" in message:
            frame = bytes(message["frame"])
            self._relayed[str(message["relay"]), int(message["from"])].append(frame)
        return message

    def _answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        what, args = message.get("ask"), message.get("args")
        try:
            self._worker.forget(message.get("forget", ()))
            if what not in REQUESTS or not isinstance(args, list):
                raise UserError("a worker has no request of this name", where=self._worker.name)
            # The connection, and not the request, determines who the requester is.
            if what == "read":
                args = [args[0], ME]
            with torch.set_grad_enabled(bool(message.get("grad", True))):
                return {"answer": getattr(self._worker, what)(*args)}
        except VFLError as error:
            return {"error": {key: text for key, text in error.record().items() if text}}
        except Exception as error:  # the text of the error may contain values of tensors
            problem = ProtocolError(
                "a worker could not execute the request",
                where=f"{what} at {self._worker.name}",
                got=type(error).__name__,
            )
            return {"error": {key: text for key, text in problem.record().items() if text}}

    def _join_session(
        self, session: str, role: int, holders: int, mac: bool, peers: Sequence[Sequence[Any]]
    ) -> None:
        """Join a computation on shares, and derive a key for each pair of workers.

        Each key is valid only for this computation and the roles of the two workers in it.
        Otherwise, a second computation of the same name or with other roles would encrypt other
        messages under the same key and nonce.
        """
        keys = self._worker.keys
        if session in self._worker.members:
            raise ProtocolError("this worker is in that computation already")
        for other, (name, key) in enumerate(peers):
            if other != role:
                keys.require_of(name, key)
        about = "\n".join([session, *(name for name, _ in peers)])
        links = {
            other: _Sealed(self, session, role, other, keys.agreed(key, about))
            for other, (_, key) in enumerate(peers)
            if other != role
        }
        kind = AuthenticatedMember if mac else Member
        member = kind(role, links, holders)
        member.agree({}, session)
        self._worker.members[session] = member


class _Sealed:
    """An encrypted link to another worker through the leader, which cannot read messages."""

    def __init__(self, end: _WorkerEnd, session: str, role: int, other: int, key: bytes) -> None:
        self._end, self._session, self._other = end, session, other
        cipher = AESGCM(key)
        self._sealing, self._opening = (
            Direction(cipher, way.to_bytes(_ROLE_BYTES)) for way in (role, other)
        )

    def send(self, frame: Frame) -> None:
        """See `vfl.core.frame.Link`."""
        sealed = self._sealing.seal(to_bytes(frame))
        self._end.send({"relay": self._session, "to": self._other, "frame": sealed})

    def receive(self) -> Frame:
        """See `vfl.core.frame.Link`."""
        sealed = self._end.relayed(self._session, self._other)
        try:
            raw = self._opening.open(sealed)
        except InvalidTag:
            raise AuthenticationError("a message of another worker was changed") from None
        return from_bytes(raw)

    def close(self) -> None:
        """See `vfl.core.frame.Link`."""


def _error_of(record: object, name: str) -> VFLError:
    """Convert a worker's error record to an error of the class that the worker raised."""
    texts = read_record(record, name)
    kinds = {kind.code: kind for kind in _kinds(VFLError)}
    kind = kinds.get(texts.pop("code"), ProtocolError)
    return kind(texts.pop("what"), **texts)


def _kinds(kind: type[VFLError]) -> list[type[VFLError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _kinds(below))]


def _rank(error: VFLError) -> int:
    """Rank an error, so that a cause sorts before the errors that it caused at other workers."""
    if isinstance(error, LostPeerError):
        return 0
    return 2 if isinstance(error, PeerFailedError) else 1
