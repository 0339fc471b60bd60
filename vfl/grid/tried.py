"""One attack on one case: its scores, who it was, and the pictures it made if it made any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vfl.attacks import Attack, Grant, ThreatModel, View
from vfl.attacks.case import Case, Score, attempt_all


@dataclass(frozen=True, eq=False)
class Tried:
    """What came of an attack.

    Attributes:
        scores: every measure of its goal, the headline first.
        threat: who the attacker was and what it held.
        true, found: pictures that it was after and those it made, axes (targets, channels, height,
            width); None of an attack that makes none.
    """

    scores: Sequence[Score]
    threat: ThreatModel
    true: Tensor | None = None
    found: Tensor | None = None


def tried(case: Case, attack: Attack, draw: torch.Generator) -> Tried:
    """Run an attack on exactly what it needs of a view, and score it.

    Raises:
        NotGrantedError: it needs more than the threat model grants; nothing is run.
    """
    kept = _Kept(attack)
    scores = attempt_all(case, kept, draw)
    if Grant.LEAKED_ATTRIBUTES in attack.needs:  # its accuracy is about no label
        scores = [replace(one, measure=f"attribute_{one.measure}") for one in scores]
    threat = case.view.only(attack.needs).threat
    if attack.goal != "inputs" or case.inputs is None or case.inputs.dim() != 4:
        return Tried(scores, threat)
    return Tried(scores, threat, case.inputs, kept.found)


class _Kept(Attack):
    """An attack whose guess is kept after it was scored."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self.goal, self.needs = attack.goal, attack.needs

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        self.found = self._attack.run(view, draw)
        return self.found
