"""The attack contract: from a view to a guess, and nothing else.

Hyper-parameters are the constructor's arguments, fixed in advance: what an attack tunes, it tunes
on what it holds. It never sees the truth; `vfl.attacks.score` compares afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.errors import UserError

Goal = Literal["labels", "clusters", "inputs", "scores"]


class Attack(ABC):
    """One attack.

    Attributes:
        goal: what `run` gives. "labels": a score for each class, axes (targets, classes), the
            largest being the guess. "clusters": int64 codes without a meaning, axes (targets,).
            "inputs": reconstructed columns, axes (targets, ...). "scores": one number a target,
            larger for what is looked for (a member, or the class that `rarest` names), axes
            (targets,).
        needs: every grant it uses; it is given a view of these and no more.
    """

    goal: Goal = "labels"
    needs: frozenset[Grant] = frozenset()

    def check(self, classes: int, width: int) -> None:
        """Refuse a task or a cut that it means nothing for, before anything is trained.

        Args:
            classes: how many the view is to have.
            width: of the cut that it is about, as it travels.

        Raises:
            UserError: with what it wants instead; `run` refuses the same.
        """

    @abstractmethod
    def run(self, view: View, draw: torch.Generator) -> Tensor:
        """The guess about `view.targets`, as `goal` says.

        Args:
            view: what the attacker holds.
            draw: everything random comes from here.

        Raises:
            NotGrantedError: it reached for what it does not name in `needs`.
        """


def rarest(prior: Tensor) -> int:
    """The class that attacks on labels with scores look for; of equally rare ones the last.

    Args:
        prior: share of each class among the training rows, axes (classes,).

    >>> rarest(torch.tensor([0.37, 0.63])), rarest(torch.tensor([0.5, 0.5]))
    (0, 1)
    """
    return len(prior) - 1 - int(prior.flip(0).argmin())


def require_two_classes(classes: int, instead: str) -> None:
    """Refuse a task that an attack for two classes says nothing about.

    Args:
        classes: how many there are.
        instead: specs of attacks for any number of classes.

    Raises:
        UserError: with the number of classes.
    """
    if classes != 2:
        raise UserError(
            "this attack tells two classes apart",
            got=f"{classes} classes",
            want="2 classes",
            fix=instead,
        )
