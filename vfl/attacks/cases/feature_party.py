"""Cases of a feature party that infers labels, at inference or from a recorded training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.attacks.base import OwnBottom, before_last
from vfl.attacks.cases.recorded import Frames, in_two, recorded_exchanges
from vfl.attacks.cases.rows import (
    bottom_recipe,
    codes_of,
    draw_leak,
    inputs_of,
    labels_of,
    prior_of,
    top_recipe,
)
from vfl.attacks.scoring import Case, seeking
from vfl.attacks.transcript import SentCuts
from vfl.attacks.view import (
    Evidence,
    Grant,
    Holdings,
    Maker,
    ThreatModel,
    TopMaker,
    TrainedBy,
    View,
)
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.config.validate import check_one_label_party
from vfl.core.errors import UserError
from vfl.core.frame import Link
from vfl.core.seeds import Secret, scoped
from vfl.datasets import PartyData
from vfl.session import PartyFolder, Terms
from vfl.session.exchange import CutTerms, FeatureEnd, Own
from vfl.session.schedule import queries
from vfl.session.secure_mode import shared_bottom_error, shares_weights
from vfl.transport.link import local_pair

Part = Literal["train", "validation", "test"]
#: Grants that a feature party can have at inference; an attack receives those that it needs.
INFERENCE = frozenset(
    {Grant.INPUTS, Grant.BOTTOM, Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED}
    | {Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Parts of the data split from which a case's groups of rows come, and who trained the network.

    Attributes:
        targets: part of the split (such as "test") whose rows are attacked.
        leaks: part of the split from which leaked labels are drawn.
        unlabelled: part of the split from which unlabelled rows come; by default, the targets
            themselves.
        trained_by: "owner" or "split": who trained the network, see `ThreatModel`.
    """

    targets: Part = "test"
    leaks: Part = "train"
    unlabelled: Part = "test"
    trained_by: TrainedBy = "split"


class Victim:
    """A trained feature party that answers queries, and the labels that it must not learn.

    The attacker's untrained networks have the architectures in the experiment, without the layers
    that a defense adds; its trained bottom has these layers.

    Args:
        experiment: experiment of the training.
        data: aligned rows of every party; the label party's labels are the true values.
        party: the feature party that attacks, or that answers the label party's queries.
        weights: trained weights of this party.
        secret: secret of this party, from which the noise on queries is drawn. None derives a
            simulated secret from the seed of the experiment.

    Raises:
        UserError: the experiment has no such feature party.
        ConfigError: the experiment has several label parties, or a middle party.
        ExposedCutError: in this training, parties share the weights of the first layers, so no
            party has a bottom.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        party: str,
        weights: Mapping[str, Tensor],
        secret: Secret | None = None,
    ) -> None:
        check_one_label_party(experiment, "an attack on a run")
        label = data[experiment.label.party]
        if party not in experiment.feature_parties or data[party].inputs is None:
            known = ", ".join(experiment.feature_parties)
            raise UserError("no feature party has that name", got=party, want=known)
        self.labels, self.classes = labels_of(label)
        if shares_weights(experiment):
            raise shared_bottom_error(party)
        self.name, self._experiment, self._split = party, experiment, data[party].split
        self._inputs, self._prior = inputs_of(data[party]), prior_of(label)
        self._terms = Terms.of(experiment, "predict", experiment.name)
        self._secret = secret or Secret.of_simulation(experiment.seed, party)
        self._shape = tuple(self._inputs.shape[1:])
        self._half, self._own, self._there = self._trained(weights)
        self._evidence: dict[Part, Evidence] = {}

    @classmethod
    def of_run(cls, folder: RunFolder, data: Mapping[str, PartyData], party: str) -> Victim:
        """Return the party with its trained weights from a run folder.

        Args:
            folder: the run folder.
            data: each party's rows, as `vfl.training.run.load_data` returns them for the
                experiment.
            party: the feature party that attacks.

        Raises:
            RunFolderError: the run folder has no weights of this party; in a federation, only the
                party itself has its weights.
        """
        weights = PartyFolder(folder.party(party)).weights()
        return cls(folder.experiment(), data, party, weights)

    def case(
        self,
        k: int,
        draw: torch.Generator,
        setting: Setting | None = None,
        *,
        snapshots: Sequence[Mapping[str, Tensor]] = (),
        partners: Sequence[Victim] = (),
    ) -> Case:
        """Return the case of an attacker that has k leaked labels of each class.

        Args:
            k: number of leaked labels per class; with 0, the view grants no leaked labels.
            draw: generator from which the leaked rows are drawn.
            setting: parts of the split for targets, leaked rows and unlabelled rows.
            snapshots: the party's weights after each epoch, if the run stored them.
            partners: feature parties that share their data about the same rows with the attacker.

        Raises:
            TooFewRowsError: a class has fewer than k rows that may leak.
            UserError: leaked rows and targets come from the same part of the split.
        """
        setting, leak = setting or Setting(), draw.clone_state()
        if setting.leaks == setting.targets:
            raise UserError(
                "rows that the attacker already knows cannot be attacked", got=setting.leaks
            )
        grants = _with_leaks(INFERENCE, k, self.classes)
        grants |= {Grant.SNAPSHOTS} if snapshots else set()
        grants |= {Grant.PARTNERS} if partners else set()
        names, makers = tuple(one.name for one in partners), self._makers()
        threat = ThreatModel(
            "feature party", "inference", grants, "semi-honest", names, setting.trained_by
        )
        holdings = Holdings(
            targets=self._part(setting.targets),
            leaked=self._leak(k, draw, setting.leaks) if k else None,
            unlabelled=self._part(setting.unlabelled),
            prior=self._prior,
            bottom=makers.bottom,
            new_bottom=makers.new_bottom,
            new_top=makers.new_top,
            snapshots=[partial(self._own_bottom, weights) for weights in snapshots],
            partners=[one.case(k, leak.clone_state(), setting).view for one in partners],
        )
        targets = self._rows(setting.targets)
        return Case(View(threat, self.classes, holdings), self.labels[targets])

    def cuts(self, rows: Tensor) -> Tensor:
        """Return the cuts that the label party receives for these rows, axes (rows, width)."""
        codec = compression.make(self._terms.codec)
        codec.load_state_dict(self._half.codec.state_dict())
        found = []
        for step, part in enumerate(queries(rows.numpy())):
            self._half.send_query(self._inputs[torch.from_numpy(part)], step)
            payload = self._there.receive().payload
            width = self._half.wire_width
            found.append(codec.decode(payload, len(part), width, StepContext(step)).cut)
        return torch.cat(found)

    def asked_again(self, rows: Tensor, times: int, draw: torch.Generator) -> list[SentCuts]:
        """Return the cuts that the label party receives if queries are repeated in new row orders.

        Args:
            rows: positions among the aligned rows, int64; `SentCuts.rows` contains indices into
                this tensor.
            times: number of times that each row is queried.
            draw: generator from which the row orders are drawn.
        """
        found = []
        for time in range(1, times + 1):
            order = torch.randperm(len(rows), generator=draw)
            found.append(SentCuts(time, time, order, self.cuts(rows[order])))
        return found

    def _makers(self) -> Holdings:
        """Return holdings that contain only the functions that make models."""
        return Holdings(
            bottom=self._own_bottom,
            new_bottom=bottom_recipe(self._experiment, self.name, self._shape),
            new_top=top_recipe(self._experiment, self.classes),
        )

    def _leak(self, k: int, draw: torch.Generator, part: Part) -> Evidence:
        rows = self._rows(part)
        codes = codes_of(self.labels[rows], self.classes)
        leaked = rows[draw_leak(codes, k, draw, self.classes)]
        return Evidence(self._inputs[leaked], self.cuts(leaked), self.labels[leaked])

    def _part(self, part: Part) -> Evidence:
        """Return evidence about a part of the split, without labels; cached after one call."""
        if part not in self._evidence:
            rows = self._rows(part)
            inputs = self._inputs[rows]
            kept = cache(lambda: before_last(self._own_bottom(), inputs))
            self._evidence[part] = Evidence(inputs, self.cuts(rows), before=kept)
        return self._evidence[part]

    def _trained(self, weights: Mapping[str, Tensor]) -> tuple[FeatureEnd, OwnBottom, Link]:
        here, there = local_pair()
        terms, name = self._terms, self.name
        with scoped(self._secret.number("init")):
            width = terms.parties[name].width
            core = models.make_bottom(terms.parties[name].bottom).build(self._shape, width)
            codec, defense = compression.make(terms.codec), defenses.make(terms.defense)
            agreed = CutTerms(name, width, codec, defense)
            half = FeatureEnd(agreed, core, Own(self._secret), there)
        half.load_state_dict(weights)
        return half, OwnBottom(half.model.values(), core), here

    def _own_bottom(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a copy of the bottom, trained or of a snapshot, with defense and codec layers."""
        return copy.deepcopy(self._own) if weights is None else self._trained(weights)[1]

    def _rows(self, part: Part) -> Tensor:
        return torch.from_numpy(getattr(self._split, part))


def _with_leaks(grants: frozenset[Grant], k: int, classes: int) -> frozenset[Grant]:
    """Return the grants, without leaked labels or class shares if the case does not have them."""
    absent = {Grant.LEAKED: not k, Grant.PRIOR: classes == 1}
    return grants - {grant for grant, is_absent in absent.items() if is_absent}


#: Grants that a feature party can have during the training. No real feature party has the label
#: party's top; results with this grant are upper bounds.
TRAINING = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR, Grant.TOP_RECIPE, Grant.CUTS}
    | {Grant.EPOCHS, Grant.UNLABELLED, Grant.OTHERS_TOP}
)
_COLUMNS_OF_PARTNER = ThreatModel(
    "feature party", "training", frozenset({Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED})
)


def training_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    k: int,
    draw: torch.Generator,
    new_top: TopMaker | None = None,
    partners: Sequence[str] = (),
    others_top: Maker | None = None,
) -> Case:
    """Return the attack case of a feature party that infers labels of training rows; see `seeking`.

    Args:
        experiment: experiment of the training.
        data: aligned rows of every party; the label party's labels are the true values.
        frames: frames of the training; see `decoded`.
        party: the feature party that attacks.
        k: number of leaked training labels per class; 0 leaks no label.
        draw: generator that draws the leaked rows.
        new_top: function that returns an untrained top for cuts of a given width; None uses a top
            as in the experiment.
        partners: feature parties that share their columns of the same rows with the attacker.
        others_top: function that returns a copy of the label party's trained top; None does not
            grant the top.

    Raises:
        TooFewRowsError: a class has fewer than k training rows.
    """
    label, inputs = data[experiment.label.party], inputs_of(data[party])
    (labels, classes), train = labels_of(label), torch.from_numpy(label.split.train)
    none = torch.empty(0, dtype=torch.int64)
    known = draw_leak(codes_of(labels[train], classes), k, draw, classes) if k else none
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[known] = False
    targets, leaked = train[rest], train[known]
    exchanges = recorded_exchanges(frames, party, torch.cat([targets, leaked]))
    up = [SentCuts(one.step, one.epoch, one.rows, one.cuts()) for one in exchanges]
    first, second = in_two(up, len(targets), len(leaked))
    seen = replace(first, inputs=inputs[targets])
    leak = replace(second, inputs=inputs[leaked], labels=labels[leaked])
    holdings = Holdings(
        targets=seen,
        leaked=leak if k else None,
        unlabelled=seen,
        exchanges=exchanges,
        prior=prior_of(label),
        new_top=new_top or top_recipe(experiment, classes),
        others_top=others_top,
        partners=[
            View(_COLUMNS_OF_PARTNER, classes, Holdings(asked, Evidence(of[leaked]), asked))
            for of in (inputs_of(data[name]) for name in partners)
            for asked in [Evidence(of[targets])]
        ],
    )
    grants = _with_leaks(TRAINING, k, classes)
    grants -= {Grant.OTHERS_TOP} if others_top is None else set()
    grants |= {Grant.PARTNERS} if partners else set()
    threat = ThreatModel("feature party", "training", grants, colluding=tuple(partners))
    return seeking(Case(View(threat, classes, holdings), labels[targets]))
