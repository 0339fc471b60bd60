"""The contract of an active attack: a party that tampers while the victim trains.

The victim is trained with it (`LocalSession(adversaries={party: adversary})`); afterwards a passive
attack runs on the result, or the adversary itself if it is an `Attack` too.
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
        who: kind of party that can use this adversary.
        holds: every grant that the adversary uses before the first step.
        spoils: whether the adversary's only goal is a network with wrong answers.
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
            NotGrantedError: the adversary used knowledge that its `holds` does not declare.
        """


class Backdoor(ActiveAdversary):
    """A feature party that wants rows with its trigger to be predicted as a class of its choice.

    A member puts the trigger on inputs (`triggered`), or on the bottom's outputs (`triggered_cut`).

    Attributes:
        target: the class.
        learns: whether training finds the trigger; a finished training then lets the party put it
            on any row.
    """

    who = "feature party"
    learns: ClassVar[bool] = False
    target: int

    def triggered(self, inputs: Tensor) -> Tensor:
        """Return rows with the trigger added; the axes do not change."""
        return inputs

    def triggered_cut(self, cut: Tensor) -> Tensor:
        """Return cuts with the trigger added; axes (rows, width)."""
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
    """Return rows whose last columns, or lower right corner for pictures, are set to one value.

    Args:
        inputs: axes (rows, columns), or (rows, channels, height, width).
        columns: number of columns, or side of the corner in pixels.
        value: value of these columns or pixels.

    >>> stamped(torch.zeros(1, 3), 1, 9.0).tolist()
    [[0.0, 0.0, 9.0]]
    """
    marked = inputs.clone()
    if inputs.dim() == 4:
        marked[:, :, -columns:, -columns:] = value
    else:
        marked[:, -columns:] = value
    return marked
