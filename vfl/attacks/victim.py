"""A finished training as a case: what its feature party holds and sends when queries come."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.attacks.case import Case
from vfl.attacks.evidence import Evidence, Holdings, Maker, Sent
from vfl.attacks.features import before_last
from vfl.attacks.leak import draw_leak
from vfl.attacks.own_bottom import OwnBottom
from vfl.attacks.recipes import bottom_recipe, top_recipe
from vfl.attacks.threat import Grant, ThreatModel, TrainedBy
from vfl.attacks.view import View
from vfl.compression import Moment
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import UserError
from vfl.exchange import FeatureHalf
from vfl.exchange.exposure import shares_weights
from vfl.exchange.shared_exposure import nobodys_bottom
from vfl.link import Link
from vfl.run_folder import RunFolder
from vfl.seeds import Secret, scoped
from vfl.session import PartyFolder, Terms
from vfl.session.schedule import queries
from vfl.transport.local import local_pair

Part = Literal["train", "validation", "test"]
#: What a feature party has once the network is in use; an attack is given what it needs of it.
INFERENCE = frozenset(
    {
        Grant.INPUTS,
        Grant.BOTTOM,
        Grant.CUTS,
        Grant.LEAKED,
        Grant.UNLABELLED,
        Grant.PRIOR,
        Grant.BOTTOM_RECIPE,
        Grant.TOP_RECIPE,
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Which rows play which part, by the run's own split, and who trained.

    Attributes:
        targets: the rows that are attacked.
        leaks: where leaked labels are drawn from.
        unlabelled: further rows; the targets themselves unless told otherwise.
        trained_by: see `ThreatModel`.
    """

    targets: Part = "test"
    leaks: Part = "train"
    unlabelled: Part = "test"
    trained_by: TrainedBy = "split"


def classes_of(label: PartyData) -> tuple[Tensor, int]:
    """The labels of all rows, int64, axes (rows,), and how many classes there are.

    Raises:
        UserError: labels are numbers.
    """
    if label.classes is None or label.labels is None:
        raise UserError("a regression has no classes to infer", where="label.task")
    return label.labels, len(label.classes)


class Victim:
    """A trained feature party that answers queries, and the labels it is not to find out.

    The architectures it knows are the experiment's, without what a defense adds to them.

    Args:
        experiment: what was trained.
        data: every party's aligned rows; the label party's labels are the truth.
        party: the feature party that attacks.
        weights: its trained weights.
        secret: its own; noise on queries comes from here. None takes a stand-in of the seed.

    Raises:
        UserError: no such feature party, or the task has no classes.
        ExposedCutError: first layers are shared, so it has no bottom.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        party: str,
        weights: Mapping[str, Tensor],
        secret: Secret | None = None,
    ) -> None:
        label = data[experiment.label.party]
        if party not in experiment.feature_parties or data[party].inputs is None:
            known = ", ".join(experiment.feature_parties)
            raise UserError("no feature party has that name", got=party, want=known)
        self.labels, self.classes = classes_of(label)
        if shares_weights(experiment):
            raise nobodys_bottom(party)
        self._experiment, self._data = experiment, data[party]
        self._terms = Terms.of(experiment, "predict", experiment.name)
        self._secret = secret or Secret.of_simulation(experiment.seed, party)
        self._half, self._own, self._there = self._trained(weights)
        self._evidence: dict[Part, Evidence] = {}

    @classmethod
    def of_run(cls, folder: RunFolder, data: Mapping[str, PartyData], party: str) -> Victim:
        """The party as `vfl train` left it in a run folder.

        Args:
            folder: the run.
            data: every party's rows, as `vfl.run.load_data` gives them for its experiment.
            party: the feature party that attacks.

        Raises:
            RunFolderError: its weights are not there; a federation leaves them with the party.
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
        """The case of k leaked labels of each class.

        Args:
            k: 0 leaks nothing, and the view grants no leaked labels then.
            draw: which rows leak.
            setting: which rows play which part.
            snapshots: its weights after every epoch, if it kept them.
            partners: feature parties that hand it what they hold of the same rows.

        Raises:
            TooFewRowsError: a class has fewer rows to leak.
            UserError: rows would leak that are attacked.
        """
        setting = setting or Setting()
        if setting.leaks == setting.targets:
            raise UserError("rows that leak cannot be attacked as well", got=setting.leaks)
        grants = INFERENCE if k else INFERENCE - {Grant.LEAKED}
        grants |= {Grant.SNAPSHOTS} if snapshots else set()
        grants |= {Grant.PARTNERS} if partners else set()
        threat = ThreatModel(
            "feature party",
            "inference",
            grants,
            colluding=tuple(one.name for one in partners),
            trained_by=setting.trained_by,
        )
        others = [one.case(k, draw.clone_state(), setting).view for one in partners]
        holdings = replace(
            self._holdings(k, draw, setting),
            snapshots=[self._maker(weights) for weights in snapshots],
            partners=others,
        )
        targets = self._rows(setting.targets)
        return Case(View(threat, self.classes, holdings), self.labels[targets])

    def cuts(self, rows: Tensor) -> Tensor:
        """What the label party gets when it asks for these rows, axes (rows, width)."""
        codec = compression.make(self._terms.codec)
        codec.load_state_dict(self._half.codec.state_dict())
        found = []
        for step, part in enumerate(queries(rows.numpy())):
            self._half.send_query(self._inputs(torch.from_numpy(part)), step)
            payload = self._there.receive().payload
            width = self._half.wire_width
            found.append(codec.decode(payload, len(part), width, Moment(step)).cut)
        return torch.cat(found)

    def asked_again(self, rows: Tensor, times: int, draw: torch.Generator) -> list[Sent]:
        """What the label party gets when it asks for these rows so often, each time in a new order.

        Args:
            rows: positions among the aligned rows, int64; `Sent.rows` counts in their order.
            times: how often.
            draw: the orders.
        """
        found = []
        for time in range(1, times + 1):
            order = torch.randperm(len(rows), generator=draw)
            found.append(Sent(time, time, order, self.cuts(rows[order])))
        return found

    def _holdings(self, k: int, draw: torch.Generator, setting: Setting) -> Holdings:
        train = self.labels[self._rows("train")]
        return Holdings(
            targets=self._part(setting.targets),
            leaked=self._leak(k, draw, setting.leaks) if k else None,
            unlabelled=self._part(setting.unlabelled),
            prior=train.bincount(minlength=self.classes) / len(train),
            bottom=self._bottom,
            new_bottom=bottom_recipe(self._experiment, self.name, self._shape),
            new_top=top_recipe(self._experiment, self.classes),
        )

    def _leak(self, k: int, draw: torch.Generator, part: Part) -> Evidence:
        rows = self._rows(part)
        leaked = rows[draw_leak(self.labels[rows], k, draw, self.classes)]
        return Evidence(self._inputs(leaked), self.cuts(leaked), self.labels[leaked])

    def _part(self, part: Part) -> Evidence:
        """A part of the split without labels; the network runs once for all cases."""
        if part not in self._evidence:
            rows = self._rows(part)
            inputs = self._inputs(rows)
            kept = cache(lambda: before_last(self._bottom(), inputs))
            self._evidence[part] = Evidence(inputs, self.cuts(rows), before=kept)
        return self._evidence[part]

    def _trained(self, weights: Mapping[str, Tensor]) -> tuple[FeatureHalf, OwnBottom, Link]:
        here, there = local_pair()
        terms, name = self._terms, self._data.name
        with scoped(self._secret.number("init")):
            width = terms.parties[name].width
            core = models.make_bottom(terms.parties[name].bottom).build(self._shape, width)
            half = FeatureHalf(
                name,
                core,
                width,
                compression.make(terms.codec),
                defenses.make(terms.defense),
                there,
                self._secret,
            )
        half.load_state_dict(weights)
        return half, OwnBottom(half.model.values(), core), here

    def _bottom(self) -> nn.Module:
        """A copy of the bottom with what defense and codec put around it."""
        return copy.deepcopy(self._own)

    def _maker(self, weights: Mapping[str, Tensor]) -> Maker:
        """Makes its bottom with other weights of its own."""
        return lambda: self._trained(weights)[1]

    @property
    def name(self) -> str:
        """The party."""
        return self._data.name

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._inputs(torch.zeros(1, dtype=torch.int64)).shape[1:])

    def _inputs(self, rows: Tensor) -> Tensor:
        assert self._data.inputs is not None
        return self._data.inputs.index_select(0, rows)

    def _rows(self, part: Part) -> Tensor:
        return torch.from_numpy(getattr(self._data.split, part))
