"""A hidden attribute of rows, read from their cuts by any composed attack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.view import Evidence, Grant, GrantedRows, Holdings, View
from vfl.core.errors import BadOptionError

#: Holdings that this attack passes to the attack on labels.
_INSTEAD = frozenset({Grant.LEAKED, Grant.UNLABELLED})
_READS = frozenset({Grant.CUTS, Grant.INPUTS})


class Attribute(Attack):
    """Infers an attribute that is not the label from cuts, given a few rows with known attribute.

    The classes of its case are the attribute's values. Any attack on labels can infer these values
    from the leaked rows: `attribute:of=adaptive:at=cut/candidates=20` searches compositions. Its
    target rows are the unlabelled rows. The task does not need the attribute, but cuts reveal it.
    With ``of=logistic:at=inputs`` the attack guesses from the label party's own columns.

    Source: Song and Shmatikov 2020, "Overlearning reveals sensitive attributes".

    Args:
        of: the attack on labels, a spec with / for the commas.

    Raises:
        SpecError: the attack does not exist.
        BadOptionError: the attack needs more than cuts, columns and leaked rows.
    """

    def __init__(self, of: str = "mlp:steps=200/learning_rate=0.01/batch=0") -> None:
        from vfl.attacks import make  # which lists this attack

        self.inner = make(of.replace("/", ","))
        if self.inner.goal != "labels" or not self.inner.needs <= _READS | _INSTEAD:
            raise BadOptionError(
                "an attacker of an attribute holds cuts, own columns and a few leaked rows only",
                where="option 'of'",
                got=of,
                want="an attack on labels that reads cut or inputs, such as logistic",
            )
        self.needs = self.inner.needs - _INSTEAD | {Grant.LEAKED_ATTRIBUTES}

    def last_report(self) -> dict[str, Any] | None:
        return self.inner.last_report()

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        read = self.inner.needs & _READS

        def held(seen: GrantedRows, labels: Tensor | None = None) -> Evidence:
            inputs = seen.inputs if Grant.INPUTS in read else None
            return Evidence(inputs, seen.cuts if Grant.CUTS in read else None, labels)

        targets = held(view.targets)
        holdings = Holdings(targets, held(view.leaked, view.leaked.labels), targets)
        threat = replace(view.threat, grants=self.inner.needs, colluding=())
        return self.inner.run(View(threat, view.classes, holdings), draw)
