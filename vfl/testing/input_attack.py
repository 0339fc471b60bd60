"""The tests every attack on inputs passes; a plug-in author subclasses the contract."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.case import Case
from vfl.attacks.features import through
from vfl.attacks.fit import fit
from vfl.seeds import generator, scoped
from vfl.testing.attack import AttackContract


class InputAttackContract(AttackContract):
    """`AttackContract` on the cuts that a label party received of one feature party.

    Where nothing leaks, cuts and predictions are those of other rows.

    Attributes:
        joint: whether the label party has two columns of its own, which its top reads as well.
        wins: share of the mean row's squared error that is left, at most.
        leaks: rows whose columns leaked.
    """

    joint: ClassVar[bool] = False
    wins: ClassVar[float] = 0.5
    classes: ClassVar[int] = 4
    width: ClassVar[int] = 4
    leaks: ClassVar[int] = 150

    def recipe(self) -> nn.Module:
        """An untrained bottom of the architecture in use."""
        return nn.Sequential(nn.Flatten(), nn.Linear(self.width, 2 * self.width), nn.Tanh())

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        draw = generator(0, "inputs", int(leaking))
        inputs, labels = self._rows(draw)
        own = inputs.flatten(1)[:, :2] + 0.1 * torch.randn(self.rows, 2, generator=draw)
        with scoped(3):
            bottom, own_bottom = self.recipe(), nn.Linear(2, 2)
            cuts = through(bottom, inputs)
            merged = torch.cat([cuts, through(own_bottom, own)], 1) if self.joint else cuts
            top = nn.Linear(merged.shape[1], self.classes)
        fit(top, merged, labels, 200, 0.05, draw)
        outputs = through(top, merged)
        order = torch.arange(self.rows)
        if not leaking:
            order = torch.randperm(self.rows, generator=draw)
            own = own[torch.randperm(self.rows, generator=draw)]
        known, rest = slice(self.leaks), slice(self.leaks, None)
        cuts, outputs = cuts[order], outputs[order]
        holdings = Holdings(
            targets=Evidence(own[rest], cuts[rest], labels[rest], outputs[rest]),
            leaked=Evidence(inputs[known], cuts[known], labels[known]),
            prior=labels.bincount() / self.rows,
            bottom=lambda: copy.deepcopy(own_bottom),
            new_bottom=self.recipe,
            top=lambda: copy.deepcopy(top),
            merge="victim-own" if self.joint else None,
            others_bottom=lambda: copy.deepcopy(bottom),
            shape=tuple(inputs.shape[1:]),
        )
        view = View(ThreatModel("label party", "inference", grants), self.classes, holdings)
        return Case(view, labels[rest], inputs[rest])

    def _rows(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Columns that lie around one place for each class."""
        labels = torch.randint(self.classes, (self.rows,), generator=draw)
        inputs = 1.5 * torch.eye(self.classes, self.width)[labels]
        return inputs + 0.5 * torch.randn(self.rows, self.width, generator=draw), labels

    def test_it_wins_where_it_must(self, spec: str) -> None:
        score = self._attempt(make(spec), leaking=True)
        assert score.value <= self.wins * score.guess, f"{score.value:.3f} of {score.guess:.3f}"

    def test_it_stays_at_its_guess_where_nothing_leaks(self, spec: str) -> None:
        score = self._attempt(make(spec), leaking=False)
        assert score.value >= 0.9 * score.guess
