"""A recorded training as a case: what a feature party heard, or what the label party was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.attacks.case import Case, seeking
from vfl.attacks.columns_case import COLUMNS, Group, columns_case, draw_columns
from vfl.attacks.evidence import Evidence, Holdings, Sent
from vfl.attacks.leak import draw_leak
from vfl.attacks.recipes import top_recipe
from vfl.attacks.recorded import Frames, between, heard, last_cuts, last_sent, sent
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.trained_parts import TrainedParts, Weights
from vfl.attacks.view import View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.frame import Kind

#: What a feature party has while it trains.
TRAINING = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR, Grant.TOP_RECIPE, Grant.CUTS}
    | {Grant.EPOCHS, Grant.UNLABELLED}
)
#: What a label party has once the network is in use; and of the training, if it kept all of it.
RECEIVING = COLUMNS | {Grant.OUTPUTS, Grant.QUERIES}
RECALLING = COLUMNS | {Grant.EPOCHS}


def training_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    k: int,
    draw: torch.Generator,
) -> Case:
    """The labels of the training rows against what a feature party heard; see `seeking` too.

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
    none = torch.empty(0, dtype=torch.int64)
    known = draw_leak(label.labels[train], k, draw, classes) if k else none
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[known] = False
    targets, leaked = train[rest], train[known]
    exchanges = heard(frames, party, torch.cat([targets, leaked]))
    up = [Sent(one.step, one.epoch, one.rows, one.cuts()) for one in exchanges]
    first, second = _in_two(up, len(targets), len(leaked))
    seen = replace(first, inputs=own.inputs[targets])
    leak = replace(second, inputs=own.inputs[leaked], labels=label.labels[leaked])
    holdings = Holdings(
        targets=seen,
        leaked=leak if k else None,
        unlabelled=seen,
        heard=exchanges,
        prior=label.labels[train].bincount(minlength=classes) / len(train),
        new_top=top_recipe(experiment, classes),
    )
    threat = ThreatModel("feature party", "training", TRAINING if k else TRAINING - {Grant.LEAKED})
    return seeking(Case(View(threat, classes, holdings), label.labels[targets]))


def received_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
    again: Callable[[Tensor], Sequence[Sent]] | None = None,
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
        again: gives what is sent when some of the aligned rows are asked for time and again, as
            `Victim.asked_again` does; None where nobody asks twice.

    Raises:
        TooFewRowsError: fewer validation rows than leaks.
        DataError: some rows' cuts were not recorded.
    """
    split = data[experiment.label.party].split
    validation, targets = torch.from_numpy(split.validation), torch.from_numpy(split.test)
    leaked = draw_columns(validation, leaks, draw, "validation")[:leaks]
    queries = [(frame, values) for frame, values in frames if frame.kind is Kind.QUERY]
    cuts = last_cuts(queries, party, torch.cat([targets, leaked]))
    parts = TrainedParts(experiment, data, weights)
    first, second = Evidence(cuts=cuts[: len(targets)]), Evidence(cuts=cuts[len(targets) :])
    first = replace(first, outputs=parts.outputs(queries, targets))
    grants = RECEIVING
    if again is None:
        grants -= {Grant.QUERIES}
    else:
        first = replace(first, sent=lambda: again(targets))
        second = replace(second, sent=lambda: again(leaked))
    threat = ThreatModel("label party", "inference", grants)
    groups = Group(targets, first), Group(leaked, second)
    return columns_case(experiment, data, party, groups, parts, threat)


def recalled_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
) -> Case:
    """The training rows of a feature party against all that the label party was sent of them.

    The arguments are those of `received_case`; frames are those of the training, and the rows that
    leak are training rows.

    Raises:
        TooFewRowsError: fewer training rows than leaks.
        DataError: some rows' cuts were not recorded.
    """
    train = torch.from_numpy(data[experiment.label.party].split.train)
    order = draw_columns(train, leaks, draw, "training")
    trained = [(frame, values) for frame, values in frames if frame.phase == "train"]
    cuts = last_cuts(trained, party, order)
    second, first = _in_two(sent(trained, party, order), leaks, len(order) - leaks)
    groups = (
        Group(order[leaks:], replace(first, cuts=cuts[leaks:])),
        Group(order[:leaks], replace(second, cuts=cuts[:leaks])),
    )
    threat = ThreatModel("label party", "training", RECALLING)
    parts = TrainedParts(experiment, data, weights)
    return columns_case(experiment, data, party, groups, parts, threat)


def _in_two(messages: Sequence[Sent], first: int, second: int) -> tuple[Evidence, Evidence]:
    """All that was sent of the first rows, and of those that follow, and what was sent last."""
    cuts = last_sent(messages, first + second)

    def seen(start: int, stop: int) -> Evidence:
        last = None if cuts is None else cuts[start:stop]
        return Evidence(cuts=last, sent=lambda: between(messages, start, stop))

    return seen(0, first), seen(first, first + second)
