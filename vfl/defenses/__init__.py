"""Defenses: what is done to labels, models, cuts and gradients so that they tell less.

Several are joined with ``+``: ``make("layer_norm+none")``.

To add a defense: one file with a subclass of `Defense`, one line below (or, from another package,
an entry point in the group ``vfl.defenses``), and the contract tests of `vfl.testing`.
"""

from __future__ import annotations

from vfl.defenses.base import Chain, Defense, PrivacyStatement, Side, uses
from vfl.errors import SpecError
from vfl.registry import Registry, parse, parts

DEFENSES: Registry[Defense] = Registry(
    kind="defense",
    contract=Defense,
    members={
        "none": "vfl.defenses.none:Undefended",
        "layer_norm": "vfl.defenses.layer_norm:LayerNorm",
        "potential": "vfl.defenses.potential:Potential",
        "dcor": "vfl.defenses.dcor:LabelCorrelation",
        "nopeek": "vfl.defenses.nopeek:NoPeek",
        "probe": "vfl.defenses.probe:Probe",
        "bottleneck": "vfl.defenses.bottleneck:Bottleneck",
        "confusion": "vfl.defenses.confusion:Confusion",
        "label_free": "vfl.defenses.label_free:LabelFree",
    },
    group="vfl.defenses",
)


def make(spec: str, task: str | None = None) -> Defense:
    """The defense a spec names; ``a+b`` applies a, then b.

    Args:
        spec: one or several.
        task: what the labels are for; None does not ask.

    Raises:
        SpecError: an unknown name or option, with the nearest known one, or a defense that has
            nothing to do in this task.
    """
    members = [_member(part, task) for part in parts(spec)]
    return members[0] if len(members) == 1 else Chain(members)


def _member(spec: str, task: str | None) -> Defense:
    member = DEFENSES.make(spec)
    if task is not None and task not in member.tasks:
        raise SpecError(
            f"the defense '{parse(spec)[0]}' does not serve a {task}", want=", ".join(member.tasks)
        )
    return member


__all__ = ["DEFENSES", "Chain", "Defense", "PrivacyStatement", "Side", "make", "parts", "uses"]
