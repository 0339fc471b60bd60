"""A case: what an attacker sees, and the truth that only the scoring sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vfl.attacks.base import Attack, Goal, rarest
from vfl.attacks.pictures import peak_ratio, structural_similarity
from vfl.attacks.score import accuracy, auc, matched_accuracy, mean_squared_error, rate_at
from vfl.attacks.view import View
from vfl.errors import NonFiniteError


@dataclass(frozen=True, eq=False)
class Case:
    """One victim under one threat model.

    Attributes:
        view: what the attacker holds.
        labels: classes of the targets, int64, axes (targets,).
        inputs: what a reconstruction is compared with, axes (targets, ...).
        positive: which targets are looked for, axes (targets,), for attacks that score; see
            `seeking`.
    """

    view: View
    labels: Tensor | None = None
    inputs: Tensor | None = None
    positive: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """What a guess was worth, and what guessing without any evidence is worth.

    Attributes:
        measure: "accuracy", "matched_accuracy", "auc" or "mse"; besides them "tpr_at_1_fpr", "psnr"
            (in decibels) and "ssim".
        value: of the attack.
        guess: of the best constant guess; for clusters, of one that falls together.
    """

    measure: str
    value: float
    guess: float


def seeking(case: Case) -> Case:
    """The same case with the rarer of two classes as what is looked for, by the training's shares.

    Raises:
        NotGrantedError: the view does not say how frequent each class is.
    """
    assert case.labels is not None
    return replace(case, positive=case.labels == rarest(case.view.prior))


def attempt(case: Case, attack: Attack, draw: torch.Generator) -> Score:
    """Run an attack on exactly what it needs of a view, and score it.

    Raises:
        NotGrantedError: it needs more than the threat model grants; nothing is run.
        NonFiniteError: its guess is none.
    """
    return attempt_all(case, attack, draw)[0]


def attempt_all(case: Case, attack: Attack, draw: torch.Generator) -> list[Score]:
    """As `attempt`, with every measure of the attack's goal; that of `attempt` first.

    Raises:
        NotGrantedError: it needs more than the threat model grants; nothing is run.
        NonFiniteError: its guess is none.
    """
    return scores_of(case, attack.goal, guess_of(case, attack, draw))


def guess_of(case: Case, attack: Attack, draw: torch.Generator) -> Tensor:
    """What an attack makes of exactly what it needs of a view.

    Raises:
        NotGrantedError: it needs more than the threat model grants; nothing is run.
        NonFiniteError: NaN or Inf, which would count as some class and read as protection.
    """
    found = attack.run(case.view.only(attack.needs), draw)
    if not torch.isfinite(found).all():
        name = type(attack).__name__
        raise NonFiniteError(
            f"the guess of the attack {name} holds NaN or Inf",
            got=f"{int((~torch.isfinite(found)).sum())} of {found.numel()} values",
            want="finite numbers",
            fix="lower its rate, look for huge cuts, or leak rows of every class",
        )
    return found


def scores_of(case: Case, goal: Goal, found: Tensor) -> list[Score]:
    """What a guess is worth, by every measure of its goal."""
    if goal == "labels":
        assert case.labels is not None
        return [Score("accuracy", accuracy(found, case.labels), _largest_share(case.labels))]
    if goal == "clusters":
        assert case.labels is not None
        value = matched_accuracy(found, case.labels)
        return [Score("matched_accuracy", value, _largest_share(case.labels))]
    if goal == "scores":
        assert case.positive is not None
        sure = rate_at(found, case.positive)
        return [Score("auc", auc(found, case.positive), 0.5), Score("tpr_at_1_fpr", sure, 0.01)]
    assert case.inputs is not None
    return _reconstruction(found, case.inputs)


def _reconstruction(found: Tensor, inputs: Tensor) -> list[Score]:
    """Against the mean row; of pictures, more than the squared error."""
    mean = inputs.mean(0, keepdim=True).expand_as(inputs)
    measures: dict[str, Callable[[Tensor, Tensor], float]] = {"mse": mean_squared_error}
    if inputs.dim() == 4:
        measures |= {"psnr": peak_ratio, "ssim": structural_similarity}
    return [
        Score(name, measure(found, inputs), measure(mean, inputs))
        for name, measure in measures.items()
    ]


def _largest_share(labels: Tensor) -> float:
    return float(labels.bincount().max()) / len(labels)
