"""Predictions as a case: what whoever may ask for them finds out about rows of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.attacks.case import Case
from vfl.attacks.evidence import Evidence, Holdings
from vfl.attacks.joint import JointBottom
from vfl.attacks.recipes import bottom_recipe, top_recipe
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.session import Terms

#: What an outsider has who holds whole rows with their labels and asks for predictions of them.
QUERYING = frozenset(
    {Grant.INPUTS, Grant.LABELS, Grant.OUTPUTS, Grant.LEAKED_INPUTS, Grant.PRIOR}
    | {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, eq=False)
class Queried:
    """Rows of a query, int64 positions among the aligned rows.

    Attributes:
        members: training rows.
        others: as many that nothing was trained on.
        own: rows with labels that the attacker has besides, for networks of its own.
    """

    members: Tensor
    others: Tensor
    own: Tensor

    @property
    def targets(self) -> Tensor:
        """The rows that are asked about, members first."""
        return torch.cat([self.members, self.others])


def queried_case(
    experiment: Experiment, data: Mapping[str, PartyData], rows: Queried, outputs: Tensor
) -> Case:
    """Which of these rows the network was trained on, for an outsider that holds them whole.

    Args:
        experiment: what was trained.
        data: every party's aligned rows.
        rows: who is asked about.
        outputs: what the network answered for `rows.targets`, axes (targets, classes).
    """
    label = data[experiment.label.party]
    assert label.labels is not None
    assert label.classes is not None
    terms, classes = Terms.of(experiment, "predict", experiment.name), len(label.classes)
    inputs = [_columns(data[name]) for name in terms.parties]
    joint = torch.cat([columns.flatten(1) for columns in inputs], 1)
    shapes = [tuple(columns.shape[1:]) for columns in inputs]
    recipes = [
        bottom_recipe(experiment, name, shape)
        for name, shape in zip(terms.parties, shapes, strict=True)
    ]

    train = label.labels[torch.from_numpy(label.split.train)]
    holdings = Holdings(
        targets=Evidence(joint[rows.targets], None, label.labels[rows.targets], outputs),
        leaked=Evidence(joint[rows.own], labels=label.labels[rows.own]),
        prior=train.bincount(minlength=classes) / len(train),
        new_bottom=lambda: JointBottom([one() for one in recipes], shapes, terms.merge == "sum"),
        new_top=top_recipe(experiment, classes),
    )
    view = View(ThreatModel("outsider", "inference", QUERYING), classes, holdings)
    member = torch.arange(len(rows.targets)) < len(rows.members)
    return Case(view, label.labels[rows.targets], positive=member)


def _columns(data: PartyData) -> Tensor:
    assert data.inputs is not None
    return data.inputs
