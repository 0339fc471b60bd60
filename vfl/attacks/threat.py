"""Threat models: who attacks, when, how, and exactly what it holds.

A grant that no party of that kind has in a real deployment makes the threat model counterfactual;
results under it bound what could happen, and reports say so beside every figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from vfl.errors import UserError

Who = Literal["feature party", "label party", "outsider"]
Phase = Literal["training", "inference"]
Behaviour = Literal["semi-honest", "malicious"]
TrainedBy = Literal["owner", "split"]


class Grant(StrEnum):
    """One thing an attacker may hold; the value is how a report names it."""

    INPUTS = "its own columns"
    BOTTOM = "its own bottom"
    CUTS = "the cuts that travelled"
    GRADIENTS = "the gradients that travelled"
    SNAPSHOTS = "its own bottom after every epoch"
    EPOCHS = "the cuts of every epoch"
    QUERIES = "the cuts of queries it repeats"
    LEAKED = "a few leaked labels"
    UNLABELLED = "further rows without labels"
    PRIOR = "how frequent each class is"
    BOTTOM_RECIPE = "the architecture of the bottom"
    TOP_RECIPE = "the architecture of the top"
    LABELS = "its own labels"
    TOP = "its own top"
    OUTPUTS = "the predictions"
    LEAKED_INPUTS = "a few leaked rows of the victim's columns"
    LEAKED_ATTRIBUTES = "a hidden attribute of a few rows"
    OTHERS_BOTTOM = "the victim's bottom"
    PARTNERS = "what its partners hold"


#: What travels in the training phase only.
IN_TRAINING = frozenset({Grant.GRADIENTS, Grant.EPOCHS})
#: What is public, and what anybody has who colludes.
_PUBLIC = {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE, Grant.PRIOR, Grant.PARTNERS}
_BOTH = {Grant.CUTS, Grant.GRADIENTS, Grant.SNAPSHOTS, Grant.OUTPUTS, Grant.EPOCHS, Grant.QUERIES}
#: What a party of each kind can have without breaking into another's machine.
OBTAINABLE: dict[str, frozenset[Grant]] = {
    "feature party": frozenset(
        {Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED, Grant.UNLABELLED, *_BOTH, *_PUBLIC}
    ),
    "label party": frozenset(
        {
            Grant.LABELS,
            Grant.TOP,
            Grant.INPUTS,
            Grant.BOTTOM,
            Grant.LEAKED_INPUTS,
            Grant.LEAKED_ATTRIBUTES,
            *_BOTH,
            *_PUBLIC,
        }
    ),
    # Whoever asks for predictions holds the rows it asks about, and others of their kind.
    "outsider": frozenset(
        {Grant.INPUTS, Grant.OUTPUTS, Grant.LABELS, Grant.LEAKED_INPUTS, *_PUBLIC}
    ),
}


@dataclass(frozen=True, slots=True)
class ThreatModel:
    """Who attacks and what it is granted; nothing that is not listed can be reached.

    Attributes:
        who: the attacking party's kind.
        phase: when it listens; in the inference phase nothing of the training was recorded.
        grants: what it holds.
        behaviour: "malicious" tampers on its own side while the victim trains.
        colluding: names of parties whose holdings it has too; empty when alone.
        trained_by: "owner": one owner trained both halves and handed the bottom out (thesis 4.1);
            "split": the feature party trained its own bottom.

    Raises:
        UserError: grants that contradict the phase or the partners.
    """

    who: Who
    phase: Phase
    grants: frozenset[Grant]
    behaviour: Behaviour = "semi-honest"
    colluding: tuple[str, ...] = ()
    trained_by: TrainedBy = "split"

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"no such {name}", want=", ".join(get_args(kind)))
        if self.phase == "inference" and (early := self.grants & IN_TRAINING):
            raise UserError(f"{_listed(sorted(early))}: in the training phase only", where="grants")
        if self.colluding and Grant.PARTNERS not in self.grants:
            raise UserError("whose partners give it nothing does not collude", where="colluding")
        if self.trained_by == "owner" and self.phase == "training":
            raise UserError("where the owner trained alone, nobody saw a training phase")

    @property
    def counterfactual(self) -> frozenset[Grant]:
        """The grants that no party of this kind would have."""
        return self.grants - OBTAINABLE[self.who]

    def sentence(self) -> str:
        """Who the attacker was and what it held, in one sentence."""
        alone = f"together with {' and '.join(self.colluding)}" if self.colluding else "alone"
        held = [str(grant) for grant in Grant if grant in self.grants - self.counterfactual]
        beyond = [str(grant) for grant in Grant if grant in self.counterfactual]
        text = f"A {self.behaviour} {self.who}, {alone}, in the {self.phase} phase, holding "
        text += _listed(held) if held else "nothing"
        if beyond:
            text += f", and counterfactually {_listed(beyond)}"
        if self.trained_by == "owner":
            text += "; the owner trained both halves"
        return text + "."


_CHOICES = {"who": Who, "phase": Phase, "behaviour": Behaviour, "trained_by": TrainedBy}


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
