"""The contract of an active attack: a party that tampers while the victim trains.

The victim is trained against it (`LocalSession(adversaries={party: adversary})`); a passive attack
then runs on what came of it, or the adversary itself where it is an `Attack` too.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vfl.attacks.view import Grant, View, Who
from vfl.compression import StepContext
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
        """Receive the adversary's knowledge before the first step.

        Args:
            view: view of the party that plays the adversary.
            draw: source of all randomness, during the training too.

        Raises:
            NotGrantedError: the adversary read a grant that `holds` does not name.
        """


class Backdoor(ActiveAdversary):
    """A feature party that wants rows with a trigger on them answered with a class of its choice.

    A member puts the trigger on inputs (`triggered`), or on what the bottom makes of them
    (`triggered_cut`).

    Attributes:
        target: the class.
        learns: its trigger is found while the victim trains, so a finished training is what it
            needs to put it anywhere.
    """

    who = "feature party"
    learns: ClassVar[bool] = False
    target: int

    def triggered(self, inputs: Tensor) -> Tensor:
        """Rows with the trigger on them, axes as given."""
        return inputs

    def triggered_cut(self, cut: Tensor) -> Tensor:
        """Cuts with the trigger on them; axes (rows, width)."""
        return cut


class Triggering(Adversary):
    """The party of a backdoor while the network is in use: its cuts bear the trigger.

    Args:
        backdoor: the backdoor of this trigger.
    """

    def __init__(self, backdoor: Backdoor) -> None:
        self._backdoor = backdoor

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        return self._backdoor.triggered_cut(cut)


def stamped(inputs: Tensor, columns: int, value: float) -> Tensor:
    """Rows whose last columns, or whose lower right corner if they are pictures, hold a value.

    Args:
        inputs: axes (rows, columns), or (rows, channels, height, width).
        columns: number of columns, or side of the corner in pixels.
        value: value that fills them.

    >>> stamped(torch.zeros(1, 3), 1, 9.0).tolist()
    [[0.0, 0.0, 9.0]]
    """
    marked = inputs.clone()
    if inputs.dim() == 4:
        marked[:, :, -columns:, -columns:] = value
    else:
        marked[:, -columns:] = value
    return marked
