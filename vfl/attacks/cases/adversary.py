"""The view of an active adversary before the first training step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vfl.attacks.active.base import ActiveAdversary
from vfl.attacks.cases.rows import (
    bottom_recipe,
    classes_of,
    draw_leak,
    inputs_of,
    prior_of,
    top_recipe,
)
from vfl.attacks.view import Evidence, Grant, Holdings, ThreatModel, View
from vfl.config import Experiment
from vfl.core.errors import TooFewRowsError
from vfl.datasets import PartyData

_HOLDS = {
    "feature party": frozenset(
        {Grant.INPUTS, Grant.LEAKED, Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
    ),
    "label party": frozenset(
        {Grant.LABELS, Grant.LEAKED_INPUTS, Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
    ),
}


_LEAKS = frozenset({Grant.LEAKED, Grant.LEAKED_INPUTS})


def begin(
    adversary: ActiveAdversary,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    known: int,
    draw: torch.Generator,
) -> None:
    """Give an adversary its view before the first training step; see `held`.

    Raises:
        NotGrantedError: no party of the adversary's kind has all the values that it needs.
    """
    view = held(adversary, experiment, data, party, known, draw)
    adversary.begin(view.only(adversary.holds), draw)


def held(
    adversary: ActiveAdversary,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    known: int,
    draw: torch.Generator,
) -> View:
    """Return the view that an adversary has before the first training step.

    As a feature party, it has the labels of some training rows. As a label party, it has the
    victim's columns of the validation rows, which stand for public rows of the same kind.

    Args:
        adversary: the adversary.
        experiment: experiment of the training.
        data: every party's aligned rows.
        party: the feature party that is the adversary, or is attacked by it.
        known: number of training rows of each class whose labels a feature party has; at most the
            number of training rows of the rarest class.
        draw: generator from which these rows are drawn.

    Raises:
        UserError: the labels are numeric, not classes.
        TooFewRowsError: the adversary needs leaked rows, and would have none.
    """
    label, inputs = data[experiment.label.party], inputs_of(data[party])
    (labels, classes), train = classes_of(label), torch.from_numpy(label.split.train)
    if adversary.who == "feature party":
        rarest_count = int(labels[train].bincount(minlength=classes).min())
        rows = train[draw_leak(labels[train], min(known, rarest_count), draw)]
    else:
        rows = torch.from_numpy(label.split.validation)
    if adversary.holds & _LEAKS and not len(rows):
        raise TooFewRowsError(
            f"a {adversary.who} would know no rows before the training",
            want="training rows of every class, or data.validation > 0 for a label party",
        )
    own = inputs[train] if adversary.who == "feature party" else None
    shape = tuple(inputs.shape[1:])
    holdings = Holdings(
        targets=Evidence(own, labels=labels[train]),
        leaked=Evidence(inputs[rows], labels=labels[rows]),
        prior=prior_of(label),
        new_bottom=bottom_recipe(experiment, party, shape),
        new_top=top_recipe(experiment, classes),
        shape=shape,
    )
    grants = _HOLDS[adversary.who]
    threat = ThreatModel(adversary.who, "training", grants, behaviour="malicious")
    return View(threat, classes, holdings)
