"""The tests every attack passes; a plug-in author subclasses `AttackContract`.

    class TestMine(AttackContract):
        specs = ["mine:steps=50"]

pytest then runs each test below for each spec.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from vfl.attacks import Attack, Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.case import Case, Score, attempt
from vfl.attacks.features import before_last, through
from vfl.attacks.leak import draw_leak
from vfl.attacks.threat import IN_TRAINING
from vfl.errors import NotGrantedError
from vfl.seeds import generator, scoped
from vfl.testing.evidence import contents, differing, global_states, states_after, without_the_rest


class AttackContract:
    """What holds for every attack: it wins where it must, and stays at its guess elsewhere.

    The two cases are of a feature party in the inference phase. An attack that needs others
    overrides `case`.

    Attributes:
        specs: the attacks under test, at least one.
        wins: what it reaches at least where classes lie far apart.
        rows, classes, width: sizes of the two cases.
        leaks: leaked labels of each class.
    """

    specs: ClassVar[Sequence[str]] = ()
    wins: ClassVar[float] = 0.9
    rows: ClassVar[int] = 300
    classes: ClassVar[int] = 3
    width: ClassVar[int] = 8
    leaks: ClassVar[int] = 5

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each spec."""
        if not self.specs:
            raise ValueError(f"{type(self).__name__}.specs names no attack to test")
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        """A victim whose classes lie far apart, or one whose rows say nothing of their labels.

        Args:
            leaking: which of the two.
            grants: what the attacker holds.
        """
        draw = generator(0, "contract", int(leaking))
        labels = torch.arange(self.rows) % self.classes
        means = 6 * torch.eye(self.classes, self.width)[labels] if leaking else 0
        inputs = means + torch.randn(self.rows, self.width, generator=draw)
        bottom = _bottom(self.width)
        cuts = through(bottom, inputs)
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        kept = cache(lambda: before_last(copy.deepcopy(bottom), inputs[rest]))
        holdings = Holdings(
            targets=Evidence(inputs[rest], cuts[rest], before=kept),
            leaked=Evidence(inputs[leaked], cuts[leaked], labels[leaked]),
            unlabelled=Evidence(inputs[rest], cuts[rest], before=kept),
            prior=torch.full((self.classes,), 1 / self.classes),
            bottom=lambda: copy.deepcopy(bottom),
            new_bottom=lambda: nn.Sequential(nn.Linear(self.width, 9), nn.ReLU(), nn.Linear(9, 6)),
            new_top=lambda width: nn.Linear(width, self.classes),
        )
        threat = ThreatModel("feature party", "inference", grants)
        return Case(View(threat, self.classes, holdings), labels[rest])

    def test_it_wins_where_it_must(self, spec: str) -> None:
        score = self._attempt(make(spec), leaking=True)
        assert score.value >= self.wins, f"{score.measure} {score.value:.3f}"

    def test_it_stays_at_its_guess_where_nothing_leaks(self, spec: str) -> None:
        score = self._attempt(make(spec), leaking=False)
        deviation = (score.guess * (1 - score.guess) / self.rows) ** 0.5
        # Even random clusters match better than by chance, for the best matching is taken.
        margin = 6 if score.measure == "matched_accuracy" else 4
        assert score.value <= score.guess + margin * deviation

    def test_the_same_draw_gives_the_same_guess(self, spec: str) -> None:
        first, second = (self._run(make(spec)) for _ in range(2))
        assert torch.equal(first, second), "not repeatable"

    def test_its_guess_has_the_form_of_its_goal(self, spec: str) -> None:
        attack = make(spec)
        found, case = self._run(attack), self.case(True, attack.needs)
        assert case.labels is not None
        inputs = None if case.inputs is None else case.inputs.shape
        require_form(found, attack, len(case.labels), self.classes, inputs)

    def test_every_grant_it_names_is_used(self, spec: str) -> None:
        attack = make(spec)
        for grant in attack.needs:
            less = self.case(True, attack.needs - {grant})
            with pytest.raises(NotGrantedError):
                attack.run(less.view, generator(0, "draw"))

    def test_it_reaches_for_nothing_else(self, spec: str) -> None:
        attack = make(spec)
        case = self.case(True, frozenset(Grant) - IN_TRAINING | attack.needs)
        found = attack.run(without_the_rest(case.view.only(attack.needs)), generator(0, "draw"))
        assert torch.equal(found, self._run(make(spec))), (
            "what it was not granted changes its guess"
        )

    def test_global_random_state_and_the_evidence_are_left_alone(self, spec: str) -> None:
        attack = make(spec)
        view = self.case(True, attack.needs).view
        states, evidence = states_after(lambda: self._run(make(spec))), contents(view)
        attack.run(view, generator(0, "draw"))
        moved = differing(states, global_states())
        assert not moved, f"a global generator moved: {moved}"
        changed = differing(evidence, contents(view))
        assert not changed, f"the evidence was changed in place: {changed}"

    def _run(self, attack: Attack) -> Tensor:
        return attack.run(self.case(True, attack.needs).view, generator(0, "draw"))

    def _attempt(self, attack: Attack, leaking: bool) -> Score:
        return attempt(self.case(leaking, attack.needs), attack, generator(0, "draw"))


def require_form(
    found: Tensor, attack: Attack, rows: int, classes: int, inputs: torch.Size | None
) -> None:
    """Hold a guess about so many rows to the goal of its attack; see `Attack.goal`."""
    wanted = {"labels": (rows, classes), "clusters": (rows,), "scores": (rows,)}
    assert found.shape == wanted.get(attack.goal, inputs), "a guess of another shape"
    assert found.dtype == (torch.int64 if attack.goal == "clusters" else torch.float32)
    assert torch.isfinite(found).all(), "a guess is not finite"


def _bottom(width: int) -> nn.Module:
    """A trained bottom stands in: two turns, which lose nothing."""
    with scoped(1):
        layers = [nn.Linear(width, width), nn.Linear(width, width)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)
