"""What attackers of a run of trees hold, in the words in which attacks ask for it.

A half of trees is a bottom: it maps a party's cells to the sides of all splits on its columns, and
those are the cut of a row that is asked about. In a training the cut is the bins of the cells. All
of it follows from the trained halves, the rows, and secrets that a grid's parties draw from its
seed, so nothing is recorded; `tests/trees/test_attacks.py` holds it to the frames of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vfl.attacks import Evidence, Grant, Holdings, SentCuts, ThreatModel, View
from vfl.attacks.cases import (
    INFERENCE,
    Part,
    attribute_case,
    bottom_recipe,
    codes_of,
    draw_columns,
    draw_leak,
    labels_of,
    top_recipe,
)
from vfl.attacks.scoring import Case, seeking
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.datasets import PartyData
from vfl.experiments.scenarios import (
    COLLUSION,
    INFERENCE_TIME,
    PREDICTIONS,
    QUERIES_ATTRIBUTE,
    RECORDED_QUERIES,
    RECORDED_TRAINING,
    TRAINING_ATTRIBUTE,
    Cases,
    Scenario,
    setting_of,
)
from vfl.session import secure_mode
from vfl.trees.attacks.columns import Ranks, categories_of, standardised
from vfl.trees.bins import Binning, fit_bins, randomised
from vfl.trees.boosting import splits_of_state
from vfl.trees.grow import Layout, Split
from vfl.trees.histograms import goes_left
from vfl.trees.mode import Trees


class Sides(nn.Module):
    """A party's half of trees as a bottom: on which side of each split a row lies.

    Args:
        ranks: which numbers the party's cells are.
        binning: how the party puts its cells into bins.
        splits: on its columns, in the order in which they were asked.
    """

    def __init__(self, ranks: Ranks, binning: Binning, splits: list[Split]) -> None:
        super().__init__()
        self._ranks, self._binning, self.splits = ranks, binning, splits

    def forward(self, inputs: Tensor) -> Tensor:
        """1 where a row goes left, else 0; float32, axes (rows, splits), or one zero a row."""
        return self.of_cells(self._ranks.cells(inputs))

    def of_cells(self, cells: np.ndarray) -> Tensor:
        """The same of cells, axes (rows, columns)."""
        if not self.splits:
            return torch.zeros(len(cells), 1)
        bins, layout = self._binning.bins(cells), self._binning.layout
        return torch.from_numpy(goes_left(self.splits, bins, layout)).float()


@dataclass(frozen=True, eq=False)
class AskedSplits:
    """The splits on a feature party's columns, in the order in which it was told of them.

    Attributes:
        columns: of each split.
        sides: gives the sides of rows, as `Sides` does, from their inputs.
    """

    columns: Sequence[int]
    sides: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SentBins:
    """The bins that a party sent, as the label party has them.

    Attributes:
        layout: how many bins each column has, and whether they have an order.
        targets, leaked: numbers of bins of these rows, axes (rows, columns); a missing cell has the
            last number of the widest column.
        epsilon: of the randomised response that they went through; None of none.
        own_of_leaked: the label party's own columns of the leaked rows, if it has any.
    """

    layout: Layout
    targets: np.ndarray
    leaked: np.ndarray
    epsilon: float | None
    own_of_leaked: Tensor | None = None


_OF_LABEL_PARTY = frozenset({Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS})
_OF_ATTRIBUTE = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})
_OF_BINS = (RECORDED_TRAINING, TRAINING_ATTRIBUTE)
_IN_TRAINING = frozenset({Grant.EPOCHS, Grant.PROTOCOL})


class TreesCases(Cases):
    """The cases of a run of trees; see `Cases` for its arguments."""

    replays: ClassVar[bool] = True

    @classmethod
    def held(cls, scenario: Scenario, experiment: Experiment) -> frozenset[Grant]:
        own_columns = experiment.label.party in experiment.parties
        own = frozenset({Grant.INPUTS}) if own_columns else frozenset[Grant]()
        if secure_mode.make(experiment.secure).needs_keys and scenario in _OF_BINS:
            return frozenset()  # nobody sends the label party a bin
        return {
            INFERENCE_TIME: INFERENCE | {Grant.PROTOCOL},
            COLLUSION: INFERENCE | {Grant.PARTNERS},
            RECORDED_QUERIES: _OF_LABEL_PARTY | own,
            RECORDED_TRAINING: _OF_LABEL_PARTY | _IN_TRAINING | own,
            QUERIES_ATTRIBUTE: _OF_ATTRIBUTE,
            TRAINING_ATTRIBUTE: _OF_ATTRIBUTE | {Grant.EPOCHS},
            PREDICTIONS: PREDICTIONS.grants,
        }.get(scenario, frozenset())

    def _begin(self) -> None:
        mode = secure_mode.make(self.experiment.secure)
        assert isinstance(mode, Trees), "cases of trees"
        self._mode = mode
        self._numbers: dict[str, tuple[Ranks, Tensor]] = {}

    def case(self, scenario: Scenario, k: int, draw: torch.Generator) -> Case:
        if scenario == PREDICTIONS:
            return self._queried(draw)
        if scenario in (INFERENCE_TIME, COLLUSION):
            others = [name for name in self.experiment.feature_parties if name != self.party]
            partners = others if scenario == COLLUSION else []
            return seeking(self._of_feature_party(self.party, k, draw, partners))
        in_training = scenario in (RECORDED_TRAINING, TRAINING_ATTRIBUTE)
        columns = self._of_label_party(in_training, draw)
        if not scenario.attribute:
            return columns
        train = torch.from_numpy(self.data[self.party].split.train)
        return attribute_case(columns, self._truth()[train], self.settings.attribute)

    def cuts(self, rows: Tensor) -> Tensor:
        return self._sides(self.party).of_cells(self._cells(self.party)[rows.numpy()])

    def shown(self) -> Mapping[str, PartyData]:
        return {
            name: own if own.inputs is None else replace(own, inputs=self._encoded(name)[1])
            for name, own in self.data.items()
        }

    # A feature party: its own columns, its half of the trees, a few labels.

    def _of_feature_party(
        self, name: str, k: int, draw: torch.Generator, partners: list[str]
    ) -> Case:
        setting, leak = setting_of(self.settings), draw.clone_state()
        label = self.data[self.experiment.label.party]
        labels, classes = labels_of(label)
        inputs, bottom = self._encoded(name)[1], self._sides(name)

        def rows_of(part: Part) -> Tensor:
            return torch.from_numpy(getattr(label.split, part))

        def seen(rows: Tensor, known: Tensor | None = None) -> Evidence:
            return Evidence(inputs[rows], bottom(inputs[rows]), known)

        absent = {Grant.LEAKED: not k, Grant.PRIOR: classes == 1, Grant.PARTNERS: not partners}
        grants = INFERENCE | {Grant.PARTNERS, Grant.PROTOCOL}
        grants -= {one for one, gone in absent.items() if gone}
        threat = ThreatModel("feature party", "inference", grants, colluding=tuple(partners))
        may_leak, leaked = rows_of(setting.leaks), None
        if k:
            codes = codes_of(labels[may_leak], classes)
            chosen = may_leak[draw_leak(codes, k, draw, classes)]
            leaked = seen(chosen, labels[chosen])
        train = labels[rows_of("train")]
        shape = tuple(inputs.shape[1:])
        holdings = Holdings(
            targets=seen(rows_of(setting.targets)),
            leaked=leaked,
            unlabelled=seen(rows_of(setting.unlabelled)),
            prior=None if classes == 1 else train.bincount(minlength=classes) / len(train),
            bottom=lambda: bottom,
            new_bottom=bottom_recipe(self.experiment, name, shape),
            new_top=top_recipe(self.experiment, classes),
            partners=[
                self._of_feature_party(one, k, leak.clone_state(), []).view for one in partners
            ],
            told=AskedSplits([one.column for one in bottom.splits], bottom),
        )
        return Case(View(threat, classes, holdings), labels[rows_of(setting.targets)])

    # The label party: bins of the training, sides of what it asked for, a few rows of the victim.

    def _of_label_party(self, in_training: bool, draw: torch.Generator) -> Case:
        label = self.data[self.experiment.label.party]
        (labels, classes), truth = labels_of(label), self._truth()
        rows = torch.from_numpy(label.split.train if in_training else label.split.test)
        leaks = min(self.settings.known_columns, len(rows) // 2)
        order = draw_columns(rows, leaks, draw, "training" if in_training else "test")
        known, targets = order[:leaks], order[leaks:]
        sent = self._sent_bins if in_training else self.cuts
        own = None if label.inputs is None else self._encoded(label.name)[1]

        def seen(some: Tensor, inputs: Tensor | None) -> Evidence:
            cuts = sent(some)
            once = SentCuts(0, 1, torch.arange(len(some)), cuts)
            return Evidence(inputs, cuts, labels[some], sent=lambda: [once])

        scenario = RECORDED_TRAINING if in_training else RECORDED_QUERIES
        grants = self.held(scenario, self.experiment)
        threat = ThreatModel("label party", "training" if in_training else "inference", grants)
        holdings = Holdings(
            targets=seen(targets, None if own is None else own[targets]),
            leaked=seen(known, truth[known]),
            shape=tuple(truth.shape[1:]),
        )
        if in_training:
            bins, layout = self._travelled()
            of_targets, of_known = bins[targets.numpy()], bins[known.numpy()]
            of_own = None if own is None else own[known]
            told = SentBins(layout, of_targets, of_known, self._mode.epsilon, of_own)
            holdings = replace(holdings, told=told)
        return Case(View(threat, classes, holdings), labels[targets], truth[targets])

    def _sent_bins(self, rows: Tensor) -> Tensor:
        """The bins of some training rows, as `standardised` writes cells."""
        bins, layout = self._travelled()
        cells = np.where(bins == layout.width - 1, np.nan, bins).astype(np.float32)
        train = self.data[self.party].split.train
        return standardised(cells, categories_of(layout), train)[rows]

    def _travelled(self) -> tuple[np.ndarray, Layout]:
        """The bins of all aligned rows; those of training and validation rows as they were sent."""
        own, split = self._binning(self.party), self.data[self.party].split
        bins = own.bins(self._cells(self.party))
        if self._mode.epsilon is not None:
            sent = np.concatenate([split.train, split.validation])
            secret = Secret.of_simulation(self.experiment.seed, self.party)
            bins[sent] = randomised(bins[sent], own.layout, self._mode.epsilon, secret)
        return bins, own.layout

    # A party's own.

    def _cells(self, name: str) -> np.ndarray:
        inputs = self.data[name].inputs
        assert inputs is not None, "asked of a party with columns"
        cells: np.ndarray = inputs.flatten(1).numpy()
        return cells

    def _categories(self, name: str) -> tuple[int, ...]:
        return self.data[name].categories or (0,) * self._cells(name).shape[1]

    def _encoded(self, name: str) -> tuple[Ranks, Tensor]:
        if name not in self._numbers:
            cells = self._cells(name)
            ranks = Ranks(cells, self._categories(name), self.data[name].split.train)
            self._numbers[name] = ranks, ranks.numbers(cells)
        return self._numbers[name]

    def _truth(self) -> Tensor:
        name = self.party
        return standardised(self._cells(name), self._categories(name), self.data[name].split.train)

    def _binning(self, name: str) -> Binning:
        if self.folder is None:
            train = self._cells(name)[self.data[name].split.train]
            return fit_bins(train, self._categories(name), self._mode.max_bin)
        return Binning.of_state(self._weights(name), self._categories(name))

    def _sides(self, name: str) -> Sides:
        splits = [] if self.folder is None else splits_of_state(self._weights(name))
        return Sides(self._encoded(name)[0], self._binning(name), splits)
