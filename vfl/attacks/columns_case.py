"""A feature party's columns as a case, for a label party that was sent cuts of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vfl.attacks.case import Case
from vfl.attacks.evidence import Evidence, Holdings, Merge
from vfl.attacks.recipes import bottom_recipe
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.trained_parts import TrainedParts
from vfl.attacks.view import View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError
from vfl.session import Terms

#: What a label party holds besides cuts, and the victim's bottom as a bound.
COLUMNS = frozenset(
    {Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE}
    | {Grant.TOP, Grant.OTHERS_BOTTOM}
)
#: What it has besides if it has columns of its own.
OWN_COLUMNS = frozenset({Grant.INPUTS, Grant.BOTTOM})


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of a case.

    Attributes:
        rows: positions among the aligned rows, int64.
        known: what the label party was sent of them.
    """

    rows: Tensor
    known: Evidence


def columns_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    groups: tuple[Group, Group],
    parts: TrainedParts,
    threat: ThreatModel,
) -> Case:
    """The columns of some rows against what a label party holds.

    Args:
        experiment: what was trained.
        data: every party's aligned rows.
        party: the feature party that is attacked.
        groups: the rows that are attacked, and those whose columns leaked.
        parts: of the trained network.
        threat: its grants; those of a label party's own columns are added where it has some.
    """
    label, victim, (targets, leaked) = data[experiment.label.party], data[party], groups
    assert label.labels is not None
    assert label.classes is not None
    assert victim.inputs is not None
    truth, shape = label.labels[targets.rows], tuple(victim.inputs.shape[1:])
    own = None if label.inputs is None else label.inputs[targets.rows]
    holdings = Holdings(
        targets=replace(targets.known, inputs=own, labels=truth),
        leaked=replace(
            leaked.known, inputs=victim.inputs[leaked.rows], labels=label.labels[leaked.rows]
        ),
        bottom=None if own is None else lambda: parts.bottom(label.name),
        new_bottom=bottom_recipe(experiment, party, shape),
        top=parts.top,
        merge=None if own is None else _merge(experiment, party),
        others_bottom=lambda: parts.bottom(party),
        shape=shape,
    )
    if own is not None:
        threat = replace(threat, grants=threat.grants | OWN_COLUMNS)
    view = View(threat, len(label.classes), holdings)
    return Case(view, truth, victim.inputs[targets.rows])


def _merge(experiment: Experiment, party: str) -> Merge:
    """How a party's cuts meet those of a label party with columns: in the order of the parties."""
    terms = Terms.of(experiment, "predict", experiment.name)
    if terms.merge == "sum":
        return "sum"
    order = list(terms.parties)
    first = order.index(party) < order.index(terms.label_party)
    return "victim-own" if first else "own-victim"


def draw_columns(rows: Tensor, leaks: int, draw: torch.Generator, part: str) -> Tensor:
    """The rows in another order, those that leak first.

    Args:
        rows: positions among the aligned rows, int64.
        leaks: how many leak.
        draw: which.
        part: what rows they are, for the message.

    Raises:
        TooFewRowsError: fewer rows than leaks.
    """
    if leaks > len(rows):
        raise TooFewRowsError(
            f"{leaks} rows of columns are to leak", got=f"{len(rows)} {part} rows"
        )
    return rows[torch.randperm(len(rows), generator=draw)]
