"""What an attack is worth beside the same attack on bottoms that never saw a label.

An attack that reaches no more than its baselines took nothing from the trained bottom: it is the
leaked labels, the unlabelled rows and the inputs that did it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack
from vfl.attacks.case import Case, attempt
from vfl.attacks.features import through
from vfl.attacks.fit import key_of
from vfl.attacks.scratch import Scratch
from vfl.attacks.threat import Grant
from vfl.attacks.view import Evidence, Seen
from vfl.options import require_choice
from vfl.seeds import scoped

Kind = Literal["raw", "pca", "random"]
_HIDDEN = 1024  # random features


@dataclass(frozen=True, slots=True)
class Comparison:
    """An attack's value beside what it takes without the trained bottom.

    Attributes:
        measure: see `Score`.
        value: of the attack.
        guess: of the best constant guess.
        baselines: the same attack on the label-free bottoms "raw", "pca" and "random"; where it
            finds labels also "scratch" and "scratch, unlabelled".
    """

    measure: str
    value: float
    guess: float
    baselines: Mapping[str, float]

    @property
    def advantage(self) -> float:
        """What the trained bottom is worth to the attacker; perfect protection is 0 or less."""
        return self.value - max(self.baselines.values())


@dataclass(frozen=True, eq=False)
class Baselines:
    """What every attack on one case is compared with, made once.

    Attributes:
        case: the attacked one.
        free: the same rows and leaks behind each label-free bottom.
        scratch: what training from scratch on them reaches; empty where nothing leaks.
    """

    case: Case
    free: Mapping[str, Case]
    scratch: Mapping[str, float]

    @classmethod
    def of(cls, case: Case, width: int, draw: torch.Generator) -> Baselines:
        """The baselines of a case.

        Args:
            case: grants inputs, unlabelled rows and architectures.
            width: of the label-free cuts; that of the victim's cut for a fair comparison.
            draw: each baseline starts from the same state of it.

        Raises:
            NotGrantedError: the case has not what a baseline needs.
        """
        free = {kind: label_free(case, kind, width, _same(draw)) for kind in get_args(Kind)}
        attacks = {"scratch": Scratch(), "scratch, unlabelled": Scratch(unlabelled=True)}
        if Grant.LEAKED not in case.view.threat.grants:
            attacks = {}
        scratch = {name: attempt(case, one, _same(draw)).value for name, one in attacks.items()}
        return cls(case, free, scratch)

    def compare(self, attack: Attack, draw: torch.Generator) -> Comparison:
        """An attack of labels or clusters beside its baselines; all start from the same draw."""
        found = {kind: attempt(one, attack, _same(draw)).value for kind, one in self.free.items()}
        if attack.goal == "labels":
            found |= self.scratch
        score = attempt(self.case, attack, _same(draw))
        return Comparison(score.measure, score.value, score.guess, found)


def averaged(comparisons: Iterable[Comparison]) -> Comparison:
    """The means over leak draws of one attack; the best baseline is chosen after averaging."""
    found = list(comparisons)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(found)

    baselines = {name: mean(one.baselines[name] for one in found) for name in found[0].baselines}
    value, guess = mean(one.value for one in found), mean(one.guess for one in found)
    return Comparison(found[0].measure, value, guess, baselines)


def label_free(case: Case, kind: Kind, width: int, draw: torch.Generator) -> Case:
    """The same rows, leaks and targets behind a bottom that never saw a label.

    Args:
        case: grants inputs and unlabelled rows.
        kind: "raw": the inputs themselves; "pca": their first principal components, by the
            unlabelled rows; "random": the components of random features of them.
        width: columns of the cut; "raw" has as many as the inputs.
        draw: random features come from here.

    Raises:
        BadOptionError: no such kind.
        NotGrantedError: the case has no inputs or unlabelled rows.
    """
    return behind(case, label_free_bottom(kind, case.view.unlabelled.inputs, width, draw))


def behind(case: Case, bottom: nn.Module) -> Case:
    """The same rows, leaks and targets behind another bottom, which the attacker then holds."""
    view = case.view

    def seen(rows: Seen, labels: Tensor | None = None) -> Evidence:
        return Evidence(rows.inputs, through(bottom, rows.inputs), labels)

    groups = {"targets": seen(view.targets), "unlabelled": seen(view.unlabelled)}
    if Grant.LEAKED in view.threat.grants:
        groups["leaked"] = seen(view.leaked, view.leaked.labels)
    return replace(case, view=view.instead(bottom=lambda: copy.deepcopy(bottom), **groups))


def label_free_bottom(kind: Kind, inputs: Tensor, width: int, draw: torch.Generator) -> nn.Module:
    """A bottom fitted on inputs without labels; see `label_free`."""
    require_choice("kind", kind, get_args(Kind))
    layers: list[nn.Module] = [nn.Flatten()]
    if kind == "random":
        with scoped(key_of(draw)):
            layers += [nn.Linear(inputs[0].numel(), _HIDDEN), nn.ReLU()]
    if kind != "raw":
        layers.append(_components(through(nn.Sequential(*layers), inputs), width))
    return nn.Sequential(*layers)


def _components(rows: Tensor, width: int) -> nn.Linear:
    """A layer that gives the first principal components of rows, of variance 1 on average."""
    centred = (rows - rows.mean(0)).double()
    variance, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
    kept = min(width, len(variance))
    weight = directions.flip(1)[:, :kept].T / variance.flip(0)[:kept].mean().sqrt()
    layer = nn.Linear(rows.shape[1], kept)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ rows.mean(0).double())
    return layer


def _same(draw: torch.Generator) -> torch.Generator:
    """A generator in the same state: what is compared draws alike."""
    return draw.clone_state()
