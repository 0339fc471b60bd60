"""The tests every attack on gradients passes; a plug-in author subclasses the contract."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vfl.attacks import Evidence, Grant, Heard, Holdings, Sent, ThreatModel, View
from vfl.attacks.base import rarest
from vfl.attacks.case import Case
from vfl.attacks.leak import draw_leak
from vfl.models import make_top
from vfl.seeds import generator, scoped
from vfl.testing.attack import AttackContract


class GradientAttackContract(AttackContract):
    """`AttackContract` on a training that a feature party listened to.

    Where nothing leaks, the label party trained on the labels of other rows.

    Attributes:
        top: spec of the label party's top.
        positive: share of class 1 among two classes; None has `classes` of equal shares.
        epochs, batch_rows: how long it was trained, and on how many rows at once.
    """

    leaks: ClassVar[int] = 1
    top: ClassVar[str] = "linear"
    positive: ClassVar[float | None] = None
    epochs: ClassVar[int] = 2
    batch_rows: ClassVar[int] = 30

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        draw = generator(0, "gradients", int(leaking))
        labels = self._labels(draw)
        means = 2 * torch.eye(self.classes, self.width)[labels]
        inputs = means + torch.randn(self.rows, self.width, generator=draw)
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        order = torch.cat([torch.nonzero(rest)[:, 0], leaked])
        trained = labels if leaking else labels[torch.randperm(self.rows, generator=draw)]
        prior = labels.bincount(minlength=self.classes) / self.rows
        holdings = Holdings(
            targets=Evidence(inputs[rest]),
            leaked=Evidence(inputs[leaked], labels=labels[leaked]),
            heard=self._train(inputs[order], trained[order], draw),
            prior=prior,
            new_top=lambda width: make_top(self.top).build(width, self.classes),
        )
        threat = ThreatModel("feature party", "training", grants)
        view = View(threat, self.classes, holdings)
        return Case(view, labels[rest], positive=labels[rest] == rarest(prior))

    def _labels(self, draw: torch.Generator) -> Tensor:
        if self.positive is None:
            return torch.arange(self.rows) % self.classes
        return (torch.rand(self.rows, generator=draw) < self.positive).long()

    def _train(self, inputs: Tensor, labels: Tensor, draw: torch.Generator) -> list[Heard]:
        """Trains bottom and top by gradient descent; what the bottom's owner heard."""
        with scoped(2):
            bottom = nn.Linear(self.width, self.width)
            top = make_top(self.top).build(self.width, self.classes)
        optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.5)
        heard: list[Heard] = []
        for epoch in range(1, self.epochs + 1):
            order = torch.randperm(self.rows, generator=draw)
            for rows in torch.split(order, self.batch_rows):
                cuts: Tensor = bottom(inputs[rows])
                cuts.retain_grad()
                optimizer.zero_grad()
                cross_entropy(top(cuts), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                assert cuts.grad is not None
                up = Sent(len(heard), epoch, rows, cuts.detach())
                heard.append(Heard.of(up, cuts.grad))
        return heard
