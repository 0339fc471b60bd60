"""What an adversary of either kind holds when a training begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vfl.attacks.active.base import ActiveAdversary
from vfl.attacks.evidence import Evidence, Holdings
from vfl.attacks.leak import draw_leak
from vfl.attacks.recipes import bottom_recipe, top_recipe
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError

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
    """Tell an adversary what it holds before the first step; see `held`.

    Raises:
        NotGrantedError: no party of its kind holds what it needs.
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
    """All that a party of an adversary's kind holds before the first step.

    A feature party knows the labels of some training rows; a label party knows the victim's columns
    of the validation rows, as if they were public rows of the same kind.

    Args:
        adversary: who asks.
        experiment: what is trained.
        data: every party's aligned rows.
        party: the feature party that plays it, or is its victim.
        known: training rows of each class whose labels a feature party knows; as many as there are
            in the rarest class, if there are fewer.
        draw: which rows those are.

    Raises:
        TooFewRowsError: it needs rows that it knows, and there are none.
    """
    label, victim = data[experiment.label.party], data[party]
    assert label.labels is not None
    assert label.classes is not None
    assert victim.inputs is not None
    train = torch.from_numpy(label.split.train)
    counts = label.labels[train].bincount(minlength=len(label.classes))
    if adversary.who == "feature party":
        rows = train[draw_leak(label.labels[train], min(known, int(counts.min())), draw)]
    else:
        rows = torch.from_numpy(label.split.validation)
    if adversary.holds & _LEAKS and not len(rows):
        raise TooFewRowsError(
            f"a {adversary.who} is to know some rows, and there are none for it",
            want="training rows of every class, or data.validation > 0 for a label party",
        )
    own = victim.inputs[train] if adversary.who == "feature party" else None
    classes, shape = len(label.classes), tuple(victim.inputs.shape[1:])
    holdings = Holdings(
        targets=Evidence(own, labels=label.labels[train]),
        leaked=Evidence(victim.inputs[rows], labels=label.labels[rows]),
        prior=counts / len(train),
        new_bottom=bottom_recipe(experiment, party, shape),
        new_top=top_recipe(experiment, classes),
        shape=shape,
    )
    grants = _HOLDS[adversary.who]
    threat = ThreatModel(adversary.who, "training", grants, behaviour="malicious")
    return View(threat, classes, holdings)
