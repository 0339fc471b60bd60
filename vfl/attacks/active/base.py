"""The contract of an active attack: a party that tampers while the victim trains.

The victim is trained against it (`LocalSession(adversaries={party: adversary})`); a passive attack
then runs on what came of it, or the adversary itself where it is an `Attack` too.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from vfl.attacks.view import Grant, View, Who
from vfl.session import Adversary


class ActiveAdversary(Adversary):
    """An adversary by name; hyper-parameters are the constructor's arguments.

    Attributes:
        who: the kind of party that can play it.
        holds: every grant it uses before the first step.
        spoils: whether all it wants is a network that answers wrongly.
    """

    who: ClassVar[Who]
    holds: ClassVar[frozenset[Grant]] = frozenset()
    spoils: ClassVar[bool] = False

    def begin(self, view: View, draw: torch.Generator) -> None:
        """Told what it holds, before the first step.

        Args:
            view: of the party that plays it.
            draw: everything random comes from here, during the training too.

        Raises:
            NotGrantedError: it reached for what it does not name in `holds`.
        """


class Backdoor(ActiveAdversary):
    """A feature party that wants rows with a trigger on them answered with a class of its choice.

    Attributes:
        target: the class.
    """

    who = "feature party"
    target: int

    @abstractmethod
    def triggered(self, inputs: Tensor) -> Tensor:
        """Rows with the trigger on them, axes as given."""
