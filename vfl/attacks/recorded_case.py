"""A recorded training as a case: what a feature party heard, or what the label party was sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vfl import models
from vfl.attacks.case import Case
from vfl.attacks.leak import draw_leak
from vfl.attacks.recorded import Frames, heard, last_cuts
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.trained_parts import TrainedParts, Weights
from vfl.attacks.view import Evidence, Holdings, View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError
from vfl.frame import Kind

#: What a feature party has while it trains.
TRAINING = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR, Grant.TOP_RECIPE, Grant.CUTS}
)
#: What a label party has once the network is in use, and the victim's bottom as a bound.
RECEIVING = frozenset(
    {Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE, Grant.OUTPUTS}
    | {Grant.TOP, Grant.OTHERS_BOTTOM}
)
#: What it has besides if it has columns of its own.
OWN_COLUMNS = frozenset({Grant.INPUTS, Grant.BOTTOM})


def training_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    k: int,
    draw: torch.Generator,
) -> Case:
    """The labels of the training rows against what a feature party heard; class 1 is looked for.

    Args:
        experiment: what was trained.
        data: every party's aligned rows; the label party's labels are the truth.
        frames: of the training; see `vfl.attacks.recorded`.
        party: the feature party that attacks.
        k: leaked training labels of each class; 0 leaks nothing.
        draw: which rows leak.

    Raises:
        TooFewRowsError: a class has fewer rows to leak.
    """
    label, own = data[experiment.label.party], data[party]
    assert label.labels is not None
    assert label.classes is not None
    assert own.inputs is not None
    classes, train = len(label.classes), torch.from_numpy(label.split.train)
    known = draw_leak(label.labels[train], k, draw) if k else torch.empty(0, dtype=torch.int64)
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[known] = False
    targets, leaked = train[rest], train[known]
    holdings = Holdings(
        targets=Evidence(own.inputs[targets]),
        leaked=Evidence(own.inputs[leaked], labels=label.labels[leaked]) if k else None,
        heard=heard(frames, party, torch.cat([targets, leaked])),
        prior=label.labels[train].bincount(minlength=classes) / len(train),
        new_top=lambda width: models.make_top(experiment.label.top).build(width, classes),
    )
    threat = ThreatModel("feature party", "training", TRAINING if k else TRAINING - {Grant.LEAKED})
    truth = label.labels[targets]
    return Case(View(threat, classes, holdings), truth, positive=truth == 1)


def received_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
) -> Case:
    """The test rows of a feature party against what the label party was sent of them.

    Leaked rows are validation rows, whose cuts of the last epoch come from the weights that made
    the test rows' cuts too (unless the training kept weights of an earlier epoch).

    Args:
        experiment: what was trained.
        data: every party's aligned rows.
        frames: of the training's validation and test; see `vfl.attacks.recorded`.
        party: the feature party that is attacked.
        leaks: rows whose columns leaked, of the validation rows.
        draw: which rows leak.
        weights: everybody's trained weights, as `LocalSession.weights` gives them.

    Raises:
        TooFewRowsError: fewer validation rows than leaks.
        DataError: some rows' cuts were not recorded.
    """
    label, victim = data[experiment.label.party], data[party]
    assert label.labels is not None
    assert label.classes is not None
    assert victim.inputs is not None
    targets, validation = (
        torch.from_numpy(rows) for rows in (label.split.test, label.split.validation)
    )
    if leaks > len(validation):
        raise TooFewRowsError(
            f"{leaks} rows of columns are to leak", got=f"{len(validation)} validation rows"
        )
    leaked = validation[torch.randperm(len(validation), generator=draw)[:leaks]]
    queries = [(frame, values) for frame, values in frames if frame.kind is Kind.QUERY]
    cuts = last_cuts(queries, party, torch.cat([targets, leaked]))
    parts = TrainedParts(experiment, data, weights)
    own = None if label.inputs is None else label.inputs[targets]
    shape, asked = tuple(victim.inputs.shape[1:]), experiment.parties[party]
    holdings = Holdings(
        targets=Evidence(
            own, cuts[: len(targets)], label.labels[targets], parts.outputs(queries, targets)
        ),
        leaked=Evidence(victim.inputs[leaked], cuts[len(targets) :], label.labels[leaked]),
        bottom=None if own is None else lambda: parts.bottom(label.name),
        new_bottom=lambda: models.make_bottom(asked.bottom).build(shape, asked.width),
        top=parts.top,
        others_bottom=lambda: parts.bottom(party),
        shape=shape,
    )
    grants = RECEIVING if own is None else RECEIVING | OWN_COLUMNS
    threat = ThreatModel("label party", "inference", grants)
    return Case(
        View(threat, len(label.classes), holdings), label.labels[targets], victim.inputs[targets]
    )
