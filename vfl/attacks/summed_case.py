"""Columns under a secure sum as a case: a label party learns sums, and some parties collude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.attacks.case import Case
from vfl.attacks.columns_case import COLUMNS, Group, columns_case, draw_columns
from vfl.attacks.evidence import Evidence, Holdings
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.trained_parts import TrainedParts, Weights
from vfl.attacks.victim import Victim
from vfl.attacks.view import View
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import UserError
from vfl.exchange.exposure import ring_of
from vfl.mpc.masked_sum import Ring

#: What a label party holds together with some of those whose cuts it learns the sum of.
SUMMING = COLUMNS | {Grant.PARTNERS}
_PARTNER = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})


def summed_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    partners: Sequence[str],
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
) -> Case:
    """The test rows of a feature party against the sums of the cuts, and partners' own ones.

    Args:
        experiment: what was trained, with ``secure = "sum"``.
        data: every party's aligned rows.
        party: the feature party that is attacked.
        partners: feature parties that tell the label party what they sent; none, and it is alone.
        leaks: rows whose columns leaked, of the validation rows.
        draw: which rows leak.
        weights: everybody's trained weights, as `LocalSession.weights` gives them.

    Raises:
        UserError: the label party sees each cut anyway.
        TooFewRowsError: fewer validation rows than leaks.
    """
    ring = ring_of(experiment)
    if ring is None:
        raise UserError(
            "there is no sum to take a partner's cut off: the label party sees every cut",
            where="secure",
            got=experiment.secure,
            want="sum",
        )
    split = data[experiment.label.party].split
    validation, targets = torch.from_numpy(split.validation), torch.from_numpy(split.test)
    groups = targets, draw_columns(validation, leaks, draw, "validation")[:leaks]
    words = {
        name: [_words(ring, Victim(experiment, data, name, weights[name]), rows) for rows in groups]
        for name in experiment.feature_parties
    }
    width = experiment.parties[party].width

    def learned(group: int, *names: str) -> Evidence:
        """What the sum of these parties' cuts of a group comes out as."""
        masked = [words[name][group] for name in names]
        return Evidence(cuts=ring.decode(masked, len(groups[group]), width))

    grants = SUMMING if partners else COLUMNS
    threat = ThreatModel("label party", "inference", grants, colluding=tuple(partners))
    everybody = experiment.feature_parties
    first, second = (Group(rows, learned(of, *everybody)) for of, rows in enumerate(groups))
    parts = TrainedParts(experiment, data, weights)
    case = columns_case(experiment, data, party, (first, second), parts, threat)
    partner = ThreatModel("feature party", "inference", _PARTNER)
    held = [Holdings(learned(0, name), learned(1, name)) for name in partners]
    views = [View(partner, case.view.classes, one) for one in held]
    return replace(case, view=case.view.instead(partners=views))


def _words(ring: Ring, victim: Victim, rows: Tensor) -> bytes:
    """A party's cuts as it puts them into the sum, before the masks that cancel out."""
    return ring.encode(victim.cuts(rows), victim.name, 0).tobytes()
