"""EXACT: guesses the class whose computed gradient is nearest to the recorded one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vfl.attacks.base import Attack
from vfl.attacks.labels.gradients import require_messages
from vfl.attacks.transcript import RecordedExchange
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range


class EXACT(Attack):
    """Computes a row's gradient for every class; the class nearest to the received gradient wins.

    For a row's recorded cut h and each class c, the attack computes the gradient with respect to h
    of the cross-entropy between top(h) and c. The score of class c is minus the distance between
    this gradient and the received gradient. The result is an upper bound, because no real feature
    party has the label party's top. The top has its final weights, so the attack reads only the
    last epochs. The attacker must be the only party that feeds the top.

    Source: Qiu, Leontiadis, Melis, Sablayrolles, Stock 2024, "Evaluating privacy leakage in split
    learning" (arXiv 2305.12997; earlier title "EXACT: extensive attack for split learning"). The
    paper also tries values of the label party's private columns; this class tries only labels.

    Args:
        epochs: number of epochs to read, up to the last one; the attack averages a class's
            distances over them.

    >>> EXACT(epochs=2).goal
    'labels'

    Raises:
        BadOptionError: the number of epochs is below 1.
    """

    needs = frozenset({Grant.GRADIENTS, Grant.EPOCHS, Grant.OTHERS_TOP})

    def __init__(self, epochs: int = 1) -> None:
        require_range("epochs", epochs, 1)
        self.epochs = epochs

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        seen = require_messages(view.transcript.last(self.epochs))
        top = view.others_top().eval()

        def nearness(one: RecordedExchange) -> Tensor:
            received = one.gradients * len(one.rows)  # the recorded loss is a mean over the batch
            candidates = gradients_of_classes(top, one.cuts(), view.classes)
            distance: Tensor = (candidates - received[:, None]).norm(dim=2)
            return -distance

        return seen.mean(nearness)[: view.targets.rows]


def gradients_of_classes(top: nn.Module, cuts: Tensor, classes: int) -> Tensor:
    """Return the gradients of each row's cross-entropy with every class, with respect to its cut.

    Args:
        top: function from cuts to logits, in evaluation mode.
        cuts: the recorded cuts, axes (rows, width).
        classes: number of classes.

    Returns:
        Gradients, axes (rows, classes, width).
    """
    found = []
    for code in range(classes):
        leaf = cuts.detach().clone().requires_grad_()
        truth = torch.full((len(cuts),), code)
        loss = cross_entropy(top(leaf), truth, reduction="sum")
        found.append(torch.autograd.grad(loss, leaf)[0])
    return torch.stack(found, 1)
