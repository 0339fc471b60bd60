"""The contract of an active attack: a party that tampers while the victim trains.

The victim is trained against it (`LocalSession(adversaries={party: adversary})`); a passive attack
then runs on what came of it, or the adversary itself where it is an `Attack` too.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vfl.attacks.threat import Grant, Who
from vfl.attacks.view import View
from vfl.exchange import Adversary


class ActiveAdversary(Adversary):
    """An adversary by name; hyper-parameters are the constructor's arguments.

    Attributes:
        who: the kind of party that can play it.
        holds: every grant it uses before the first step.
    """

    who: ClassVar[Who]
    holds: ClassVar[frozenset[Grant]] = frozenset()

    def begin(self, view: View, draw: torch.Generator) -> None:
        """Told what it holds, before the first step.

        Args:
            view: of the party that plays it.
            draw: everything random comes from here, during the training too.

        Raises:
            NotGrantedError: it reached for what it does not name in `holds`.
        """
