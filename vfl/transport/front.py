"""Front: the rules of a listener for connections whose client has not authenticated yet.

In this module, a connection that has not presented a valid credential yet is a *stranger*.
Strangers should cost little, and must not keep other clients out:

- A listener admits a limited number of strangers. If one more connects, the listener closes the
  oldest connection of the source with the most strangers, so a flood only displaces its own
  connections. Clients with a credential stay connected.
- All listeners of a process share a budget of file descriptors, below the limit of the process
  (`ulimit -n`). When the budget is used up, a stranger's connection is closed, or, if there is no
  stranger, an idle connection with a credential.
- A stranger has limited time and limited bytes for its whole first request head.
- A source may open a limited number of connections per second, because each costs a handshake; a
  connection with a credential is not counted.
- A source has a token bucket for requests without a credential. The debt of a bucket is limited: a
  client that shares an address with a client that failed a thousand times waits at most one second
  after the failures stop.

A source is an IPv4 address, or the /64 of an IPv6 address. `TcpHub` serves strangers in threads,
and `vfl.transport.http` serves them on an event loop; both follow these rules through a `Front`.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

#: Key under which a request's ASGI scope holds its connection, see `vfl.transport.http`.
CONNECTION = "vfl.connection"
#: Least number of file descriptors reserved for the rest of the process; a quarter of the limit if
#: that is more.
_RESERVED = 64
_UNLIMITED = 1 << 20


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits for unauthenticated clients of one listener.

    Attributes:
        strangers: largest number of simultaneous connections without a credential.
        head_s: time from the connection to the end of its first request head, including TLS; a
            later head has this time from its first byte on.
        head_bytes: largest size of a request head in bytes; TLS has its own limits.
        connections_per_second: number of new connections that a source may open per second.
        connections_burst: largest number of connections that a source may open at once after a
            pause.
        per_second: number of actions per second that a source may perform without a credential.
        burst: largest number of actions that a source may perform at once after a pause.
        failure_cost: number of tokens that a wrong credential costs in addition.
        longest_wait_s: longest time in seconds until a source in debt may act again.
        sources: number of sources that the limiter remembers; it first forgets the source that was
            seen longest ago.
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
    """Token buckets, one for each key; safe to use from several threads.

    Args:
        per_second: tokens that a bucket gains per second.
        burst: largest number of tokens in a bucket.
        longest_wait_s: longest time in seconds until a bucket in debt has a token again.
        keys: number of keys that the limiter remembers; it first forgets the key that was seen
            longest ago.
        clock: clock in seconds that never goes back.
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
        """Take tokens from a bucket; the balance may become negative, down to a limit."""
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
    """One connection that a front has admitted.

    Args:
        front: front of the connection.
        source: source (address or network) under which the connection is counted.
        end: function that closes the connection from any thread. The front calls it at most once,
            and not after `leave`.

    Attributes:
        known: whether the connection presented a credential.
        idle: whether the connection has no request in progress.
    """

    __slots__ = ("end", "front", "idle", "known", "source")

    def __init__(self, front: Front, source: str, end: Callable[[], None]) -> None:
        self.front, self.source, self.end = front, source, end
        self.known = self.idle = False

    def welcome(self) -> None:
        """Mark the connection as known after a valid credential, so that no stranger evicts it."""
        if not self.known:
            self.known = True
            self.front.uncount(self.source)
            _HELD.welcome(self)

    def leave(self) -> None:
        """Remove a connection that has ended from the budget; a second call has no effect."""
        _HELD.leave(self)


class Front:
    """The rules of one listener; safe to use from several threads.

    Args:
        limits: limits for strangers.
        trusted: addresses of trusted proxies, whose connections do not count as strangers.
        clock: clock in seconds that never goes back.

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
        """Admit a new connection, and return it as a `Visitor`.

        The method returns None if the source opens too many connections, or if no connection can be
        closed to make room.
        """
        visitor = Visitor(self, source_of(address), end)
        visitor.known = visitor.source in self._trusted
        if not visitor.known and not self._connections.allow(visitor.source):
            return None
        return visitor if _HELD.enter(visitor) else None

    def uncount(self, source: str) -> None:
        """Give a source its token back, because the connection has a valid credential."""
        self._connections.charge(source, -1)

    def allow(self, address: str) -> bool:
        """Take a token of a source; return whether it may act once more without a credential."""
        return self._strangers.allow(source_of(address))

    def failed(self, address: str) -> None:
        """Charge a source for a wrong or malformed credential."""
        self._strangers.charge(source_of(address), self.limits.failure_cost)

    def make_room(self) -> None:
        """Close one connection, because the process has no file descriptor left."""
        _HELD.make_room(self)


class _Held:
    """All connections of this process's fronts: strangers and known ones, oldest first."""

    def __init__(self) -> None:
        self._strangers: dict[Visitor, None] = {}
        self._known: dict[Visitor, None] = {}
        self._lock = threading.Lock()

    def enter(self, visitor: Visitor) -> bool:
        """Add a connection; return False if the budget is used up and no other can be closed."""
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
        """Move a stranger's connection to the known connections, unless it was just evicted."""
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
        """Close one connection, preferably of a stranger at this front."""
        with self._lock:
            evicted = self._least(self._strangers_of(front))
        if evicted is not None:
            evicted.end()

    def _strangers_of(self, front: Front) -> list[Visitor]:
        return [each for each in self._strangers if each.front is front]

    def _least(self, own: list[Visitor]) -> Visitor | None:
        """Choose a connection to close: a stranger's at any front, else an idle known one."""
        some = own or list(self._strangers) or [each for each in self._known if each.idle]
        return self._evict(some) if some else None

    def _evict(self, some: list[Visitor]) -> Visitor:
        """Close the oldest connection of the source with the most connections among these."""
        ((crowd, _),) = Counter(each.source for each in some).most_common(1)
        evicted = next(each for each in some if each.source == crowd)
        self._strangers.pop(evicted, None)
        self._known.pop(evicted, None)
        return evicted


_HELD = _Held()


def budget() -> int:
    """Return the most connections that all fronts of this process may hold together."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = _UNLIMITED
    return max(1, limit - max(_RESERVED, limit // 4))


def welcome(scope: Mapping[str, Any]) -> None:
    """Mark a request's connection as known, after it presented a valid credential."""
    if connection := scope.get("state", {}).get(CONNECTION):
        connection.welcome()


@lru_cache(1024)
def source_of(address: str) -> str:
    """Return the source that an address is counted under: an IPv4 address, or an IPv6 /64.

    >>> source_of("10.0.0.7"), source_of("::ffff:10.0.0.7"), source_of("2001:db8::7")
    ('10.0.0.7', '10.0.0.7', '2001:db8::/64')
    """
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:  # the client has a file path or a name instead of an IP address
        return address
    if not isinstance(known, IPv6Address):
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ip_network((int(known), 64), strict=False))


def whole_number(text: bytes, most: int) -> int | None:
    """Parse a decimal integer; return None for other text, or for a number above `most`.

    >>> whole_number(b"12", 100), whole_number(b"0012", 100), whole_number(b"101", 100)
    (12, 12, None)
    >>> [whole_number(text, 100) for text in (b"", b"+1", b" 1", b"1e1", b"0x1", b"1_0")]
    [None, None, None, None, None, None]
    """
    if not text.isdigit() or len(text.lstrip(b"0")) > len(str(most)):
        return None
    number = int(text.lstrip(b"0") or b"0")
    return number if number <= most else None
