"""The case of an outsider that infers, from predictions, which rows were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl import models
from vfl.attacks.cases.rows import (
    bottom_recipe,
    classes_of,
    inputs_of,
    prior_of,
    top_recipe,
    untrained_merger,
)
from vfl.attacks.scoring import Case
from vfl.attacks.view import Evidence, Grant, Holdings, ThreatModel, View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.session import Terms

#: Grants of an outsider that has complete rows with labels and queries the model with them.
QUERYING = frozenset(
    {Grant.INPUTS, Grant.LABELS, Grant.OUTPUTS, Grant.LEAKED_INPUTS, Grant.PRIOR}
    | {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, eq=False)
class Queried:
    """Groups of rows in a membership attack, as int64 positions among the aligned rows.

    Attributes:
        members: training rows.
        others: non-members: the same number of rows on which the network was not trained.
        own: further labelled rows that the attacker has, on which it trains its own networks.
    """

    members: Tensor
    others: Tensor
    own: Tensor

    @property
    def targets(self) -> Tensor:
        """Return the rows for the attacker's queries: first members, then non-members."""
        return torch.cat([self.members, self.others])


def queried_case(
    experiment: Experiment, data: Mapping[str, PartyData], rows: Queried, outputs: Tensor
) -> Case:
    """Return the case of an outsider that infers which of its complete rows were trained on.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        rows: the members, the non-members, and the attacker's own rows.
        outputs: the network's outputs for `rows.targets`, axes (targets, classes).

    Raises:
        UserError: the labels are numeric, not classes.
    """
    label = data[experiment.label.party]
    labels, classes = classes_of(label)
    terms = Terms.of(experiment, "predict", experiment.name)
    inputs = [inputs_of(data[name]) for name in terms.parties]
    joint = torch.cat([columns.flatten(1) for columns in inputs], 1)
    shapes = [tuple(columns.shape[1:]) for columns in inputs]
    recipes = [
        bottom_recipe(experiment, name, shape)
        for name, shape in zip(terms.parties, shapes, strict=True)
    ]

    holdings = Holdings(
        targets=Evidence(joint[rows.targets], None, labels[rows.targets], outputs),
        leaked=Evidence(joint[rows.own], labels=labels[rows.own]),
        prior=prior_of(label),
        new_bottom=lambda: models.JointBottom(
            [one() for one in recipes], shapes, untrained_merger(terms)
        ),
        new_top=top_recipe(experiment, classes),
    )
    view = View(ThreatModel("outsider", "inference", QUERYING), classes, holdings)
    member = torch.arange(len(rows.targets)) < len(rows.members)
    return Case(view, labels[rows.targets], positive=member)
