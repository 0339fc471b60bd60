"""A case: what an attacker sees, and the truth that only the scoring sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.score import accuracy, auc, matched_accuracy, mean_squared_error
from vfl.attacks.view import View


@dataclass(frozen=True, eq=False)
class Case:
    """One victim under one threat model.

    Attributes:
        view: what the attacker holds.
        labels: classes of the targets, int64, axes (targets,).
        inputs: what a reconstruction is compared with, axes (targets, ...).
        positive: which targets are looked for, axes (targets,), for attacks that score.
    """

    view: View
    labels: Tensor | None = None
    inputs: Tensor | None = None
    positive: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """What a guess was worth, and what guessing without any evidence is worth.

    Attributes:
        measure: "accuracy", "matched_accuracy", "auc" or "mse".
        value: of the attack.
        guess: of the best constant guess; for clusters, of one that falls together.
    """

    measure: str
    value: float
    guess: float


def attempt(case: Case, attack: Attack, draw: torch.Generator) -> Score:
    """Run an attack on exactly what it needs of a view, and score it.

    Raises:
        NotGrantedError: it needs more than the threat model grants; nothing is run.
    """
    found = attack.run(case.view.only(attack.needs), draw)
    if attack.goal == "labels":
        assert case.labels is not None
        return Score("accuracy", accuracy(found, case.labels), _largest_share(case.labels))
    if attack.goal == "clusters":
        assert case.labels is not None
        value = matched_accuracy(found, case.labels)
        return Score("matched_accuracy", value, _largest_share(case.labels))
    if attack.goal == "scores":
        assert case.positive is not None
        return Score("auc", auc(found, case.positive), 0.5)
    assert case.inputs is not None
    mean = case.inputs.mean(0, keepdim=True).expand_as(case.inputs)
    value = mean_squared_error(found, case.inputs)
    return Score("mse", value, mean_squared_error(mean, case.inputs))


def _largest_share(labels: Tensor) -> float:
    return float(labels.bincount().max()) / len(labels)
