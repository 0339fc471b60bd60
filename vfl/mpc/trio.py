"""The three parties as threads of one process: for tests, for measurements and for `private`.

One process that plays all three protects nobody; what is real are the messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vfl.errors import LostPeerError, PeerFailedError, ProtocolError, VFLError
from vfl.mpc.leakage import Leak
from vfl.mpc.memory import triangle
from vfl.mpc.party import Party
from vfl.mpc.roles import make_party
from vfl.mpc.rules import NAMES, Rules
from vfl.mpc.traffic import Traffic, traffic

_Result = TypeVar("_Result")


class Trio:
    """A context manager; the three threads end with it.

    Args:
        rules: the same for all.
        terms: what the parties compare before they begin.
        timeout_s: how long a party waits for a message.
        agreed: False for a program that begins with `Party.agree` of its own.

    Attributes:
        parties: P0, P1 and P2.
    """

    def __init__(
        self,
        rules: Rules,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        *,
        agreed: bool = True,
    ) -> None:
        self._ended = False
        self._links, self._depths = triangle(timeout_s)
        self.parties = [make_party(role, self._links[role], rules) for role in range(3)]
        self._pool = ThreadPoolExecutor(3, thread_name_prefix="vfl-mpc")
        if agreed:
            session = secrets.token_hex(16)
            self.run(lambda party: party.agree(terms or {}, session))

    def run(self, program: Callable[[Party], _Result]) -> list[_Result]:
        """Follow a program at all three parties; what it gave each.

        Raises:
            VFLError: what went wrong first; the session has then ended.
        """
        if self._ended:
            raise LostPeerError("this session has ended", fix="begin a new one; its keys are new")
        futures = [self._pool.submit(self._one, program, party) for party in self.parties]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.close()
            raise min(errors, key=_rank)
        return [future.result() for future in futures]

    def hops(self) -> int:
        """Messages that had to follow one another since the last call."""
        deepest = max(depth.hops for depth in self._depths)
        for depth in self._depths:
            depth.hops = 0
        return deepest

    def traffic(self) -> list[Traffic]:
        """What was sent since the session began."""
        return [each for party in self.parties for each in traffic(party)]

    def leaks(self) -> list[Leak]:
        """What the parties saw since the session began."""
        return [leak for party in self.parties for leak in party.leakage.leaks()]

    def close(self) -> None:
        """End the session; closing twice is harmless."""
        self._ended = True
        for links in self._links:
            for link in links.values():
                link.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Trio:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _one(self, program: Callable[[Party], _Result], party: Party) -> _Result:
        try:
            return program(party)
        except Exception as problem:
            told = problem if isinstance(problem, VFLError) else broke_off(problem, party.role)
            for link in self._links[party.role].values():
                link.fail(told)
            raise


def broke_off(problem: Exception, role: int) -> VFLError:
    """What others are told of an unexpected error: not its text, which may hold data."""
    return ProtocolError("a party broke off", where=NAMES[role], got=type(problem).__name__)


def _rank(error: BaseException) -> int:
    """The cause before its consequences at the other parties."""
    if isinstance(error, PeerFailedError):
        return 2
    return 3 if isinstance(error, LostPeerError) else 1
