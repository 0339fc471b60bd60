"""Predictions as a case: what whoever may ask for them finds out about rows of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vfl import models
from vfl.attacks.case import Case
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import Evidence, Holdings, View
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

    def new_bottom() -> nn.Module:
        bottoms = [
            models.make_bottom(asked.bottom).build(shape, asked.width)
            for asked, shape in zip(terms.parties.values(), shapes, strict=True)
        ]
        return JointBottom(bottoms, shapes, summed=terms.merge == "sum")

    train = label.labels[torch.from_numpy(label.split.train)]
    holdings = Holdings(
        targets=Evidence(joint[rows.targets], None, label.labels[rows.targets], outputs),
        leaked=Evidence(joint[rows.own], labels=label.labels[rows.own]) if len(rows.own) else None,
        prior=train.bincount(minlength=classes) / len(train),
        new_bottom=new_bottom,
        new_top=lambda width: models.make_top(experiment.label.top).build(width, classes),
    )
    view = View(ThreatModel("outsider", "inference", QUERYING), classes, holdings)
    member = torch.arange(len(rows.targets)) < len(rows.members)
    return Case(view, label.labels[rows.targets], positive=member)


class JointBottom(nn.Module):
    """All parties' bottoms as one, from whole rows to what the top is given.

    Args:
        bottoms: in the order in which their columns stand in a row.
        shapes: axes of a row of each.
        summed: whether the top is given their sum.
    """

    def __init__(
        self, bottoms: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], summed: bool
    ) -> None:
        super().__init__()
        self.bottoms, self.shapes, self.summed = nn.ModuleList(bottoms), shapes, summed

    def forward(self, rows: Tensor) -> Tensor:
        """What the top is given, axes (rows, width), of rows with axes (rows, columns)."""
        parts = torch.split(rows, [math.prod(shape) for shape in self.shapes], 1)
        cuts = [
            bottom(part.reshape(-1, *shape))
            for bottom, part, shape in zip(self.bottoms, parts, self.shapes, strict=True)
        ]
        return torch.stack(cuts).sum(0) if self.summed else torch.cat(cuts, 1)


def _columns(data: PartyData) -> Tensor:
    assert data.inputs is not None
    return data.inputs
