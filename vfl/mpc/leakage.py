"""What each party learned beyond its own inputs, counted while the protocol runs.

Sizes only: no value, no index and no order is kept.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Leak:
    """One kind of thing that one party saw at one place.

    Attributes:
        observer: P0, P1 or P2.
        what: "permuted values", "indices near the turning point", "result" or "digest of row ids".
        where: the layer, or whose ids.
        times: how often.
        elements: how many real values, all times together; of index lists, the indices revealed.
        of: the values among which those indices lie; for permuted values, real ones and dummies.
    """

    observer: str
    what: str
    where: str
    times: int = 0
    elements: int = 0
    of: int = 0


class LeakageLedger:
    """Adds up what one party saw."""

    def __init__(self, observer: str) -> None:
        self._observer = observer
        self._leaks: dict[tuple[str, str], Leak] = {}

    def count(self, what: str, where: str, elements: int, of: int) -> None:
        """One more observation."""
        key = (what, where)
        leak = self._leaks.setdefault(key, Leak(self._observer, what, where))
        leak.times += 1
        leak.elements += elements
        leak.of += of

    def leaks(self) -> list[Leak]:
        """All of them, in the order in which they first happened."""
        return list(self._leaks.values())
