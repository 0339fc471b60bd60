"""Strangers at the door: how often a source address may knock, so that a flood costs little.

Every address has a bucket of tokens that fills steadily. A connection takes one token, a greeting
that fails takes a few more. Without a token a connection is closed before a byte of it is read;
a party that meets this tries again by itself. Debt is bounded, so whoever shares an address with
somebody who knocked in vain a thousand times waits a second at most once that has stopped.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network


@dataclass(frozen=True, slots=True)
class KnockLimits:
    """What one source address may do.

    Attributes:
        per_second: tokens a second.
        burst: most tokens a quiet address saves up.
        failure_cost: tokens a failed greeting takes besides the one of its connection.
        longest_wait_s: how long an address in deepest debt waits for its next token.
        addresses: how many addresses are remembered; the one unseen for longest is forgotten.
    """

    per_second: float = 200.0
    burst: float = 200.0
    failure_cost: float = 3.0
    longest_wait_s: float = 1.0
    addresses: int = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class Knocks:
    """The buckets of a hub; safe to use from several threads.

    Args:
        limits: of one address.
        clock: seconds that only grow.
    """

    def __init__(
        self, limits: KnockLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or KnockLimits()
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def allow(self, address: str) -> bool:
        """Whether a connection from here is looked at; takes its token."""
        with self._lock:
            bucket = self._filled(address)
            if bucket.tokens < 1:
                return False
            bucket.tokens -= 1
            return True

    def failed(self, address: str) -> None:
        """A greeting from here was none, or showed wrong credentials."""
        limits = self._limits
        with self._lock:
            bucket = self._filled(address)
            deepest = 1 - limits.longest_wait_s * limits.per_second
            bucket.tokens = max(bucket.tokens - limits.failure_cost, deepest)

    def __len__(self) -> int:
        return len(self._buckets)

    def _filled(self, address: str) -> _Bucket:
        now, limits = self._clock(), self._limits
        source = _source(address)
        bucket = self._buckets.setdefault(source, _Bucket(limits.burst, now))
        self._buckets.move_to_end(source)
        if len(self._buckets) > limits.addresses:
            self._buckets.popitem(last=False)
        gained = (now - bucket.filled_at) * limits.per_second
        bucket.tokens, bucket.filled_at = min(limits.burst, bucket.tokens + gained), now
        return bucket


def _source(address: str) -> str:
    """Who is counted as one: an IPv4 address, or the /64 that one IPv6 host can choose from."""
    known = ip_address(address)
    if not isinstance(known, IPv6Address):
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ip_network((int(known), 64), strict=False))
