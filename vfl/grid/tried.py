"""One attack on one case: its scores, who it was, and the pictures it made if it made any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vfl.attacks import Attack, Grant, ThreatModel
from vfl.attacks.case import Case, Score, guess_of, scores_of


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
        NonFiniteError: its guess is none.
    """
    found = guess_of(case, attack, draw)
    scores = scores_of(case, attack.goal, found)
    if Grant.LEAKED_ATTRIBUTES in attack.needs:  # its accuracy is about no label
        scores = [replace(one, measure=f"attribute_{one.measure}") for one in scores]
    threat = case.view.only(attack.needs).threat
    if attack.goal != "inputs" or case.inputs is None or case.inputs.dim() != 4:
        return Tried(scores, threat)
    return Tried(scores, threat, case.inputs, found)
