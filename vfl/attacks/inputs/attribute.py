"""Inference of a hidden attribute of rows from their cuts, by any label-inference attack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.view import Evidence, Grant, GrantedRows, Holdings, View
from vfl.core.errors import BadOptionError

#: Grants that this attack passes on to the attack on labels.
_INSTEAD = frozenset({Grant.LEAKED, Grant.UNLABELLED})
_READS = frozenset({Grant.CUTS, Grant.INPUTS})


class Attribute(Attack):
    """Infers from cuts an attribute that is not the label, given a few rows with this attribute.

    In the attack's case, the attribute's values replace the classes. Any label-inference attack
    that reads cuts or inputs can then infer these values from the leaked rows. For example,
    `attribute:of=adaptive:at=cut/candidates=20` compares several attacks. The target rows also are
    the unlabelled rows. The task of the network does not need the attribute, but cuts may disclose
    it. With ``of=logistic:at=inputs``, the attack infers the attribute from the label party's own
    columns; no scenario of a grid grants these, so a user builds this case in Python.

    Source: Song and Shmatikov 2020, "Overlearning reveals sensitive attributes".

    Args:
        of: spec of the label-inference attack, with / in place of commas.

    Raises:
        SpecError: the label-inference attack does not exist.
        BadOptionError: the attack does not guess classes, or it needs grants other than cuts,
            columns, leaked rows and unlabelled rows.
    """

    def __init__(self, of: str = "mlp:steps=200/learning_rate=0.01/batch=0") -> None:
        from vfl.attacks import make  # imported here, because `vfl.attacks` imports this module

        self.inner = make(of.replace("/", ","))
        if self.inner.goal != "labels" or not self.inner.needs <= _READS | _INSTEAD:
            raise BadOptionError(
                "an attacker that infers an attribute has only cuts, its columns and leaked rows",
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
