"""What hands its evidence, changed, to another attack."""

from __future__ import annotations

from collections.abc import Iterable

from vfl.attacks import make
from vfl.attacks.base import Attack
from vfl.attacks.threat import Grant
from vfl.errors import BadOptionError


class Wrapper(Attack):
    """An attack that changes what another one is given, and gives that one's guess.

    Attributes:
        inner: the other attack, whose code a guess follows from as well.

    Args:
        of: its name, or a spec of one option; a comma would end it.
        uses: grants that are needed besides its own.
        cuts: whether it has to read the cut.

    Raises:
        SpecError: no such attack.
        BadOptionError: it reads no cut.
    """

    def __init__(self, of: str, uses: Iterable[Grant], cuts: bool = True) -> None:
        self.inner = make(of)
        if cuts and Grant.CUTS not in self.inner.needs:
            raise BadOptionError(
                "its cuts would be changed, and it reads none",
                where="option 'of'",
                got=of,
                want="an attack that reads the cut",
            )
        self.goal = self.inner.goal
        self.needs = self.inner.needs | frozenset(uses)

    def check(self, classes: int, width: int) -> None:
        self.inner.check(classes, width)
