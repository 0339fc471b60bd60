"""Front: the rules that limit a listener's connections before clients authenticate.

In this module, a *stranger* is a connection whose client has not presented a valid credential yet.
Strangers should need few resources, and must not prevent other clients from connecting:

- A listener admits a limited number of strangers. If one more stranger connects, the listener
  closes the oldest connection of the source that has most of the strangers. A source that floods
  the listener therefore displaces only its own connections. Authenticated clients stay connected.
- All listeners of a process share a budget of file descriptors, below the limit of the process
  (`ulimit -n`). When the budget is used up, a stranger is closed, or, if there is no stranger, an
  authenticated connection without a request in progress.
- A stranger must send its whole first request head in a limited time and with limited bytes.
- A source may open a limited number of connections per second, because each connection costs a
  handshake; connections that present a valid credential are not counted.
- A source has a token bucket for requests without a valid credential. The number of tokens cannot
  become very negative: if a client has failed a thousand times, other clients with the same address
  wait at most one second after the failures stop.

A source is an IPv4 address, or the /64 network of an IPv6 address. `TcpHub` handles connections in
threads, and `vfl.transport.http` on an event loop; both apply these rules through a `Front`.
"""

from __future__ import annotations

import errno
import resource
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, ip_network
from typing import Any

from vfl.core.address import parse_ip

#: Key in the ASGI scope of a request under which its connection is stored; see
#: `vfl.transport.http`.
CONNECTION = "vfl.connection"
#: Errors of `accept` that say that no file descriptor, or no memory for one, is free.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Least number of file descriptors that are reserved for the rest of the process; a quarter of the
#: process's limit if this is more.
_RESERVED = 64
_UNLIMITED = 1 << 20


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits of one listener for clients that have not authenticated yet.

    Attributes:
        strangers: largest number of simultaneous connections whose clients have not presented a
            valid credential.
        head_s: seconds from the beginning of a connection, including TLS, until its first request
            head must be complete; for a later head, the time begins with the head's first byte.
        head_bytes: largest size of a request head in bytes; TLS has its own limits.
        connections_per_second: number of new connections per second that a source may open.
        connections_burst: largest number of connections that a source may open at once after it has
            opened none for some time.
        per_second: number of requests per second that a source may send without a valid credential.
        burst: largest number of such requests that a source may send at once after it has sent none
            for some time.
        failure_cost: number of additional tokens that a request with a wrong credential costs.
        longest_wait_s: longest time in seconds until a source that has no tokens left may send a
            request again.
        sources: number of sources that the limiter remembers; if there are more, it forgets the
            source whose last request is the oldest.
    """

    strangers: int = 256
    head_s: float = 5.0
    head_bytes: int = 16 * 1024
    connections_per_second: float = 200.0
    connections_burst: float = 400.0
    per_second: float = 200.0
    burst: float = 200.0
    failure_cost: float = 3.0
    longest_wait_s: float = 1.0
    sources: int = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RateLimiter:
    """Rate limiter with one token bucket for each key; several threads may use it at once.

    Args:
        per_second: number of tokens that a bucket gains per second.
        burst: largest number of tokens in a bucket.
        longest_wait_s: longest time in seconds until a bucket with a negative number of tokens has
            a token again.
        keys: number of keys that the limiter remembers; if there are more, it forgets the key whose
            last use is the oldest.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        per_second: float,
        burst: float,
        longest_wait_s: float = 1.0,
        keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._deepest = 1 - longest_wait_s * per_second
        self._keys = keys
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def allow(self, key: str) -> bool:
        """Take a token from the key's bucket; return False if the bucket is empty."""
        with self._lock:
            bucket = self._filled(key)
            if bucket.tokens < 1:
                return False
            bucket.tokens -= 1
            return True

    def charge(self, key: str, tokens: float) -> None:
        """Take tokens from the key's bucket.

        The number of tokens may become negative, down to a limit.
        """
        with self._lock:
            bucket = self._filled(key)
            bucket.tokens = max(bucket.tokens - tokens, self._deepest)

    def __len__(self) -> int:
        return len(self._buckets)

    def _filled(self, key: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._burst, now)
            if len(self._buckets) > self._keys:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        gained = (now - bucket.filled_at) * self._per_second
        bucket.tokens, bucket.filled_at = min(self._burst, bucket.tokens + gained), now
        return bucket


class Visitor:
    """One connection that a front has admitted, whether its client is authenticated or not.

    Args:
        front: the front that admitted the connection.
        source: source (IP address or network) to which the connection is counted.
        end: function that closes the connection; any thread may call it. The front calls this
            function at most once, and only for a connection that it chose before `leave`.

    Attributes:
        known: whether the client has presented a valid credential.
        idle: whether no request is in progress on the connection.
    """

    __slots__ = ("end", "front", "idle", "known", "source")

    def __init__(self, front: Front, source: str, end: Callable[[], None]) -> None:
        self.front, self.source, self.end = front, source, end
        self.known = self.idle = False

    def welcome(self) -> None:
        """Record that the client has presented a valid credential.

        The connection is then no stranger any more.
        """
        if not self.known:
            self.known = True
            self.front.uncount(self.source)
            _HELD.welcome(self)

    def leave(self) -> None:
        """Remove a connection that has ended from the counts; a second call has no effect."""
        _HELD.leave(self)


class Front:
    """The limits of one listener; several threads may use the object at once.

    Args:
        limits: limits for connections whose clients have not authenticated yet.
        trusted: addresses of trusted proxies, whose connections count as authenticated.
        clock: monotonic clock in seconds.

    Attributes:
        limits: the argument.
    """

    def __init__(
        self,
        limits: FrontLimits | None = None,
        trusted: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits = limits or FrontLimits()
        self._trusted = frozenset(source_of(address) for address in trusted)
        self._strangers = RateLimiter(
            limits.per_second, limits.burst, limits.longest_wait_s, limits.sources, clock
        )
        self._connections = RateLimiter(
            limits.connections_per_second,
            limits.connections_burst,
            keys=limits.sources,
            clock=clock,
        )

    def trusts(self, address: str) -> bool:
        """Return whether a trusted proxy has this address."""
        return bool(self._trusted) and source_of(address) in self._trusted

    def enter(self, address: str, end: Callable[[], None]) -> Visitor | None:
        """Admit a new connection, and return a `Visitor` that represents it.

        The method returns None if the source opens connections too fast, or if no other connection
        can be closed in exchange.
        """
        visitor = Visitor(self, source_of(address), end)
        visitor.known = visitor.source in self._trusted
        if not visitor.known and not self._connections.allow(visitor.source):
            return None
        return visitor if _HELD.enter(visitor) else None

    def uncount(self, source: str) -> None:
        """Return a token to a source, whose connection presented a valid credential."""
        self._connections.charge(source, -1)

    def allow(self, address: str) -> bool:
        """Take a token of a source.

        Return whether the source may send a request without a credential.
        """
        return self._strangers.allow(source_of(address))

    def failed(self, address: str) -> None:
        """Take tokens of a source, because it has sent a wrong or malformed credential."""
        self._strangers.charge(source_of(address), self.limits.failure_cost)

    def make_room(self, error: OSError) -> None:
        """Close one connection of this process if `accept` failed because no descriptor was free.

        After another error, such as a connection that its client has already aborted, all
        connections stay.
        """
        if error.errno in _NO_ROOM:
            _HELD.make_room(self)


class _Held:
    """All connections of this process's fronts, unauthenticated and authenticated."""

    def __init__(self) -> None:
        self._strangers: dict[Visitor, None] = {}
        self._known: dict[Visitor, None] = {}
        self._lock = threading.Lock()

    def enter(self, visitor: Visitor) -> bool:
        """Add a connection, and close another one if necessary.

        Return False if a connection must be closed and no connection can be.
        """
        evicted = None
        with self._lock:
            own = self._strangers_of(visitor.front)
            if not visitor.known and len(own) >= visitor.front.limits.strangers:
                evicted = self._evict(own)
            elif len(self._strangers) + len(self._known) >= budget():
                evicted = self._least(own)
                if evicted is None:
                    return False
            (self._known if visitor.known else self._strangers)[visitor] = None
        if evicted is not None:
            evicted.end()
        return True

    def welcome(self, visitor: Visitor) -> None:
        """Move a connection to the authenticated ones, unless it was closed meanwhile."""
        with self._lock:
            if visitor in self._strangers:
                del self._strangers[visitor]
                self._known[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """Remove a connection."""
        with self._lock:
            self._strangers.pop(visitor, None)
            self._known.pop(visitor, None)

    def make_room(self, front: Front) -> None:
        """Close one connection, preferably an unauthenticated one at this front (listener)."""
        with self._lock:
            evicted = self._least(self._strangers_of(front))
        if evicted is not None:
            evicted.end()

    def _strangers_of(self, front: Front) -> list[Visitor]:
        return [each for each in self._strangers if each.front is front]

    def _least(self, own: list[Visitor]) -> Visitor | None:
        """Choose a connection to close: unauthenticated, or else authenticated and idle."""
        some = own or list(self._strangers) or [each for each in self._known if each.idle]
        return self._evict(some) if some else None

    def _evict(self, some: list[Visitor]) -> Visitor:
        """Close the oldest connection of the source that has most of these connections."""
        ((crowd, _),) = Counter(each.source for each in some).most_common(1)
        evicted = next(each for each in some if each.source == crowd)
        self._strangers.pop(evicted, None)
        self._known.pop(evicted, None)
        return evicted


_HELD = _Held()


def budget() -> int:
    """Return the most connections that all fronts of this process together may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = _UNLIMITED
    return max(1, limit - max(_RESERVED, limit // 4))


def welcome(scope: Mapping[str, Any]) -> None:
    """Record that the connection of a request has presented a valid credential."""
    if connection := scope.get("state", {}).get(CONNECTION):
        connection.welcome()


@lru_cache(1024)
def source_of(address: str) -> str:
    """Return the source to which an address is counted: an IPv4 address, or an IPv6 /64.

    >>> source_of("10.0.0.7"), source_of("::ffff:10.0.0.7"), source_of("2001:db8::7")
    ('10.0.0.7', '10.0.0.7', '2001:db8::/64')
    """
    known = parse_ip(address)
    if known is None:  # the client's address is a file path or a name, not an IP address
        return address
    if isinstance(known, IPv4Address):
        return str(known)
    return str(ip_network((int(known), 64), strict=False))


def whole_number(text: bytes, most: int) -> int | None:
    """Parse a decimal integer; return None for any other text, and for a number above `most`.

    >>> whole_number(b"12", 100), whole_number(b"0012", 100), whole_number(b"101", 100)
    (12, 12, None)
    >>> [whole_number(text, 100) for text in (b"", b"+1", b" 1", b"1e1", b"0x1", b"1_0")]
    [None, None, None, None, None, None]
    """
    if not text.isdigit() or len(text.lstrip(b"0")) > len(str(most)):
        return None
    number = int(text.lstrip(b"0") or b"0")
    return number if number <= most else None
