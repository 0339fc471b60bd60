"""The contract of a network on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from vfl.bench.network.wan import Wan

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int


class Network:
    """Parties on this machine and the lines between them; a context manager.

    As it stands it is the loopback as it is: no delay, nothing counted.

    Args:
        parties: their names, each once.
        wan: what every party's line does.
    """

    kind = "loopback"

    def __init__(self, parties: Sequence[str], wan: Wan | None = None) -> None:
        assert len(set(parties)) == len(parties), "every party has a name of its own"
        self.parties = tuple(parties)
        self.wan = wan or Wan()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, party: str) -> list[str]:
        """What a command line begins with that is to run at a party."""
        return []

    def host(self, party: str) -> str:
        """The address a party listens at."""
        return LOOPBACK

    def reach(self, source: str, target: str, port: int) -> Address:
        """Where a party finds a port that another one listens at."""
        return Address(self.host(target), port)

    def bytes_sent(self) -> dict[str, int]:
        """What each party has sent so far; empty where nothing counts it."""
        return {}

    def close(self) -> None:
        """End the network; whoever still uses it loses its connections."""
