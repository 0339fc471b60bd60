"""The front of every listener: its rules for connections before a client has authenticated.

A connection without a valid credential so far is a *stranger's*. Strangers should cost little, and
must not keep other clients out:

- a listener has a limited number of places for strangers. One more ends the oldest stranger of the
  source with the most strangers, so a flood only displaces itself; clients with a credential stay;
- all listeners of a process share a budget of descriptors, below the limit of the process (`ulimit
  -n`). When it is used up, a stranger is closed, or else a known connection that is idle;
- a stranger has limited time for its whole first head, including the first byte, and limited bytes;
- a source may open a limited number of connections a second, because each costs a handshake; a
  connection with a credential is not counted;
- a source has a token bucket for requests without a credential. Debt is limited: if a client shares
  an address with one that failed a thousand times, it waits one second at most after the failures
  stop.

A source is an IPv4 address, or the /64 of an IPv6 address. `TcpHub` serves strangers in threads,
`vfl.transport.http` on an event loop; both follow these rules through a `Front`.
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

#: Key of the connection in the scope of a request, see `vfl.transport.http`.
CONNECTION = "vfl.connection"
#: Descriptors reserved for the rest of the process: a quarter of the limit, or more.
_RESERVED = 64
_UNLIMITED = 1 << 20


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits on unauthenticated callers at one listener.

    Attributes:
        strangers: simultaneous connections without a credential.
        head_s: time from the connection to the end of its first head, including TLS; for a later
            head, from its first byte.
        head_bytes: size of a head; TLS has its own limits.
        connections_per_second: new connections of a source, a second.
        connections_burst: most connections that a quiet source accumulates.
        per_second: actions of a source without a credential, a second.
        burst: most actions that a quiet source accumulates.
        failure_cost: additional cost of a wrong credential.
        longest_wait_s: longest wait of a source in debt.
        sources: number of remembered sources; the one seen longest ago is forgotten first.
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
        burst: most tokens that a quiet key accumulates.
        longest_wait_s: longest wait of a key in debt for its next token.
        keys: number of remembered keys; the one seen longest ago is forgotten first.
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
        """Take a token; returns False if there is none."""
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
    """One connection at a front.

    Args:
        front: front of the connection.
        source: source whose connections are counted together.
        end: function that closes the connection from any thread; called at most once, and not after
            `leave`.

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
        """Remove the ended connection from the budget; a second call has no effect."""
        _HELD.leave(self)


class Front:
    """The rules of one listener; safe to use from several threads.

    Args:
        limits: limits of strangers.
        trusted: addresses of proxies, whose connections do not count as strangers.
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
        """Return whether a proxy has this address."""
        return bool(self._trusted) and source_of(address) in self._trusted

    def enter(self, address: str, end: Callable[[], None]) -> Visitor | None:
        """Admit a new connection.

        The method returns None if its source opens too many connections, or if no place is free.
        """
        visitor = Visitor(self, source_of(address), end)
        visitor.known = visitor.source in self._trusted
        if not visitor.known and not self._connections.allow(visitor.source):
            return None
        return visitor if _HELD.enter(visitor) else None

    def uncount(self, source: str) -> None:
        """Return the token of a connection that is not a stranger's."""
        self._connections.charge(source, -1)

    def allow(self, address: str) -> bool:
        """Take a token; return whether the source may act once more without a credential."""
        return self._strangers.allow(source_of(address))

    def failed(self, address: str) -> None:
        """Charge a source for a wrong or malformed credential."""
        self._strangers.charge(source_of(address), self.limits.failure_cost)

    def make_room(self) -> None:
        """Close one connection, because the process has no file descriptor left."""
        _HELD.make_room(self)


class _Held:
    """All connections of the fronts of this process, each kind oldest first."""

    def __init__(self) -> None:
        self._strangers: dict[Visitor, None] = {}
        self._known: dict[Visitor, None] = {}
        self._lock = threading.Lock()

    def enter(self, visitor: Visitor) -> bool:
        """Add a connection; return False if no other one can be closed for it."""
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
        """Move a stranger's connection to the known ones, unless it was just evicted."""
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
        """Choose a stranger's connection to evict, here or elsewhere, or else an idle one."""
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
    """Most connections of all fronts of this process, from its limit of descriptors."""
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
    """Return the source of an address: IPv4 itself, or the /64 of an IPv6 host.

    >>> source_of("10.0.0.7"), source_of("::ffff:10.0.0.7"), source_of("2001:db8::7")
    ('10.0.0.7', '10.0.0.7', '2001:db8::/64')
    """
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:  # a file path or a name
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
