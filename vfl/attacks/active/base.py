"""The contract of active attacks: a party that tampers with its part while the victim trains.

The victim trains together with the adversary, which `LocalSession(adversaries={party: adversary})`
puts in the place of a party. After the training, an attack guesses from the result: the adversary
itself if it is also an `Attack`, otherwise a passive attack.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vfl.attacks.view import Grant, View, Who
from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.session import Adversary

#: Limit of a trigger's value, which keeps the network's numbers finite.
_FARTHEST = 1e6
#: Largest number of epochs in which an adversary does not tamper.
MOST_WARMUP = 1000


class ActiveAdversary(Adversary):
    """Base class of active adversaries; the constructor's arguments are its hyper-parameters.

    Attributes:
        who: kind of party (label or feature party) that the adversary plays.
        holds: all grants whose knowledge the adversary uses before the first training step.
        spoils: whether the adversary's only goal is a network with wrong predictions.
    """

    who: ClassVar[Who]
    holds: ClassVar[frozenset[Grant]] = frozenset()
    spoils: ClassVar[bool] = False

    def begin(self, view: View, draw: torch.Generator) -> None:
        """Receive a view of the adversary's knowledge; called once, before the first training step.

        Args:
            view: view of the party whose role the adversary plays.
            draw: generator from which the adversary draws all random numbers, also during the
                training.

        Raises:
            NotGrantedError: the adversary used knowledge that `holds` does not declare.
        """


class Backdoor(ActiveAdversary):
    """A feature party whose goal is that rows with its trigger are predicted as its target class.

    A subclass puts the trigger either on inputs (`triggered`) or on the bottom's outputs
    (`triggered_cut`).

    Attributes:
        target: the class.
        learns: whether the adversary learns the trigger during the training. Whether it learns the
            trigger or not, the party can put the trigger on any row after the training.
    """

    who = "feature party"
    learns: ClassVar[bool] = False
    target: int

    def triggered(self, inputs: Tensor) -> Tensor:
        """Return the input rows with the trigger added, in the same axes."""
        return inputs

    def triggered_cut(self, cut: Tensor) -> Tensor:
        """Return the cuts with the trigger added, axes (rows, width)."""
        return cut


class InputBackdoor(Backdoor):
    """A backdoor that replaces inputs in training; its trigger sets some columns to one value.

    Args:
        target: the class as which the adversary wants triggered rows to be predicted.
        share: share of the rows at which the subclass aims that the adversary replaces.
        columns: number of columns that the trigger fills, counted back from the last column. For
            pictures, the side length in pixels of the square that it fills in one corner.
        value: value of the trigger, in the units of the bottom's inputs.

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, target: int, share: float, columns: int, value: float) -> None:
        require_range("target", target, 0)
        require_range("columns", columns, 1)
        require_range("value", value, -_FARTHEST, _FARTHEST)
        require_range("share", share, 0, 1)
        self.target = target
        self.share = share
        self.columns = columns
        self.value = value

    def triggered(self, inputs: Tensor) -> Tensor:
        return stamped(inputs, self.columns, self.value)


class Triggering(Adversary):
    """A backdoor's party in predictions: puts the trigger on every cut that it sends.

    Args:
        backdoor: the backdoor that defines the trigger.
    """

    def __init__(self, backdoor: Backdoor) -> None:
        self._backdoor = backdoor

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        return self._backdoor.triggered_cut(cut)


def stamped(inputs: Tensor, columns: int, value: float) -> Tensor:
    """Return rows with one value in the last columns, or in the lower right corner of pictures.

    Args:
        inputs: inputs of the rows, axes (rows, columns), or (rows, channels, height, width) for
            pictures.
        columns: number of columns; for pictures, side length of the square corner in pixels.
        value: value to which these columns or pixels are set.

    >>> stamped(torch.zeros(1, 3), 1, 9.0).tolist()
    [[0.0, 0.0, 9.0]]
    """
    marked = inputs.clone()
    if inputs.dim() == 4:
        marked[:, :, -columns:, -columns:] = value
    else:
        marked[:, -columns:] = value
    return marked
