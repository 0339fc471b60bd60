"""The front of every listener: who may hold a connection before anybody has proved who they are.

A connection that has shown no credential yet is a *stranger's*. Strangers shall cost little, and
keep nobody out:

- a listener has so many places for strangers. One more ends the oldest stranger of the source that
  has most of them, so a crowd makes room at its own cost, and whoever has shown a credential stays;
- all listeners of a process share a budget of descriptors, below the limit of the process (`ulimit
  -n`). Where it is spent, a stranger makes room, or else a known connection that waits for nothing;
- a stranger has so long for a whole head, its first byte included, and so many bytes;
- a source may make so many connections a second, each of which costs a handshake; one that shows a
  credential is not counted;
- a source has a token bucket for what comes without a credential. Debt is bounded: whoever shares
  an address with somebody who failed a thousand times waits a second at most once that has stopped.

A source is an IPv4 address, or the /64 of an IPv6 address. `TcpHub` serves strangers by threads,
`vfl.transport.http` on an event loop; both keep these rules by a `Front`.
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

#: Where the scope of a request has its connection, see `vfl.transport.http`.
CONNECTION = "vfl.connection"
#: Descriptors that listeners leave to the rest of the process: a quarter of the limit, or more.
_RESERVED = 64
_UNLIMITED = 1 << 20


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What strangers may do at one listener.

    Attributes:
        strangers: connections without a credential at once.
        head_s: from the connection to the end of its first head, TLS included; of a later head
            from its first byte.
        head_bytes: of a head; TLS has limits of its own.
        connections_per_second: new ones of a source.
        connections_burst: most of those that a quiet source saves up.
        per_second: what a source may do without a credential, a second.
        burst: most of that which a quiet source saves up.
        failure_cost: what a wrong credential takes besides.
        longest_wait_s: how long a source in deepest debt waits.
        sources: how many are remembered; the one unseen for longest is forgotten.
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
    """Token buckets by key; safe to use from several threads.

    Args:
        per_second: tokens a second.
        burst: most tokens a quiet key saves up.
        longest_wait_s: how long a key in deepest debt waits for its next token.
        keys: how many are remembered; the one unseen for longest is forgotten.
        clock: seconds that only grow.
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
        """Take a token; False if there is none."""
        with self._lock:
            bucket = self._filled(key)
            if bucket.tokens < 1:
                return False
            bucket.tokens -= 1
            return True

    def charge(self, key: str, tokens: float) -> None:
        """Take tokens, into debt if need be."""
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
    """One connection at a front.

    Args:
        front: that it came to.
        source: whom it is counted for.
        end: closes it, from any thread; called once at most, and not after `leave`.

    Attributes:
        known: whether it has shown a credential.
        idle: whether nothing is under way on it.
    """

    __slots__ = ("end", "front", "idle", "known", "source")

    def __init__(self, front: Front, source: str, end: Callable[[], None]) -> None:
        self.front, self.source, self.end = front, source, end
        self.known = self.idle = False

    def welcome(self) -> None:
        """It has shown a credential: from now on it makes room for no stranger."""
        if not self.known:
            self.known = True
            self.front.uncount(self.source)
            _HELD.welcome(self)

    def leave(self) -> None:
        """It has ended; leaving twice is harmless."""
        _HELD.leave(self)


class Front:
    """The rules of one listener; safe to use from several threads.

    Args:
        limits: what strangers may do.
        trusted: addresses of proxies, whose connections are no stranger's.
        clock: seconds that only grow.

    Attributes:
        limits: the same.
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
        """Whether a proxy has this address."""
        return bool(self._trusted) and source_of(address) in self._trusted

    def enter(self, address: str, end: Callable[[], None]) -> Visitor | None:
        """A connection has come; None if its source makes too many, or there is no room for it."""
        visitor = Visitor(self, source_of(address), end)
        visitor.known = visitor.source in self._trusted
        if not visitor.known and not self._connections.allow(visitor.source):
            return None
        return visitor if _HELD.enter(visitor) else None

    def uncount(self, source: str) -> None:
        """A connection of this source was no stranger's."""
        self._connections.charge(source, -1)

    def allow(self, address: str) -> bool:
        """Whether a source may do one more thing without a credential; takes its token."""
        return self._strangers.allow(source_of(address))

    def failed(self, address: str) -> None:
        """A credential from here was wrong, or what came was none."""
        self._strangers.charge(source_of(address), self.limits.failure_cost)

    def make_room(self) -> None:
        """End one connection: the process has no descriptor left."""
        _HELD.make_room(self)


class _Held:
    """All connections of the fronts of this process, each kind oldest first."""

    def __init__(self) -> None:
        self._strangers: dict[Visitor, None] = {}
        self._known: dict[Visitor, None] = {}
        self._lock = threading.Lock()

    def enter(self, visitor: Visitor) -> bool:
        """Hold one more; False if nothing can make room for it."""
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
        """A stranger has become known, unless it has made room just before."""
        with self._lock:
            if visitor in self._strangers:
                del self._strangers[visitor]
                self._known[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """Hold one less."""
        with self._lock:
            self._strangers.pop(visitor, None)
            self._known.pop(visitor, None)

    def make_room(self, front: Front) -> None:
        """End one, of this front if it has strangers."""
        with self._lock:
            evicted = self._least(self._strangers_of(front))
        if evicted is not None:
            evicted.end()

    def _strangers_of(self, front: Front) -> list[Visitor]:
        return [each for each in self._strangers if each.front is front]

    def _least(self, own: list[Visitor]) -> Visitor | None:
        """Who makes room: a stranger here or elsewhere, else whoever waits for nothing."""
        some = own or list(self._strangers) or [each for each in self._known if each.idle]
        return self._evict(some) if some else None

    def _evict(self, some: list[Visitor]) -> Visitor:
        """The oldest connection of the source that has most of these."""
        ((crowd, _),) = Counter(each.source for each in some).most_common(1)
        evicted = next(each for each in some if each.source == crowd)
        self._strangers.pop(evicted, None)
        self._known.pop(evicted, None)
        return evicted


_HELD = _Held()


def budget() -> int:
    """Connections that all fronts of this process may hold, by its limit of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = _UNLIMITED
    return max(1, limit - max(_RESERVED, limit // 4))


def welcome(scope: Mapping[str, Any]) -> None:
    """A request, by its scope, has shown a good credential: its connection is no stranger's."""
    if connection := scope.get("state", {}).get(CONNECTION):
        connection.welcome()


@lru_cache(1024)
def source_of(address: str) -> str:
    """Who is counted as one: an IPv4 address, or the /64 that one IPv6 host can choose from.

    >>> source_of("10.0.0.7"), source_of("::ffff:10.0.0.7"), source_of("2001:db8::7")
    ('10.0.0.7', '10.0.0.7', '2001:db8::/64')
    """
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:  # a path, or a name
        return address
    if not isinstance(known, IPv6Address):
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ip_network((int(known), 64), strict=False))


def whole_number(text: bytes, most: int) -> int | None:
    """A count in decimal digits, all of them read; None for any other text, and beyond `most`.

    >>> whole_number(b"12", 100), whole_number(b"0012", 100), whole_number(b"101", 100)
    (12, 12, None)
    >>> [whole_number(text, 100) for text in (b"", b"+1", b" 1", b"1e1", b"0x1", b"1_0")]
    [None, None, None, None, None, None]
    """
    if not text.isdigit() or len(text.lstrip(b"0")) > len(str(most)):
        return None
    number = int(text.lstrip(b"0") or b"0")
    return number if number <= most else None
