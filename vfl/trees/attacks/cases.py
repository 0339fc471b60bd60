"""Attackers' knowledge after a training of boosted trees, expressed as cuts and gradients.

For attacks, a party's part of the forest is its bottom model: it maps the party's cells to left or
right at each split on the party's columns. For a queried row, the cut-layer activation is this list
of left or right. For a training row, the cut-layer activation is the list of the bins of its cells.
A training row's gradient is the path of tree nodes that the row takes, if the mode discloses nodes
to feature parties. All this knowledge follows from the trained model, the rows, and secrets that
the simulated parties derive from the experiment's seed, so no recording is needed; a replay of the
training gives the sums over bins. The test `tests/trees/test_attacks.py` compares this knowledge
with the frames that a session sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vfl.attacks import (
    Evidence,
    Grant,
    Holdings,
    RecordedExchange,
    SentCuts,
    ThreatModel,
    View,
)
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
    TRAINING_TIME,
    Cases,
    Scenario,
    setting_of,
)
from vfl.session import secure_mode
from vfl.training.run import session_of
from vfl.training.whole_network import WholeNetworkSession
from vfl.trees.attacks.columns import Ranks, categories_of, standardised
from vfl.trees.bins import Binning, fit_bins, randomised
from vfl.trees.boosting import Forest, owned, splits_of, splits_of_state
from vfl.trees.cells import spans_of, within
from vfl.trees.grow import Layout, Split, Tree
from vfl.trees.histograms import goes_left
from vfl.trees.mode import Trees
from vfl.trees.shared import SeenSums, SharedLabelEnd


class Sides(nn.Module):
    """A party's part of the forest as a bottom model, which outputs whether rows go left at splits.

    Args:
        ranks: encoding that maps the values of the party's columns to input numbers, and back.
        binning: the party's rule that maps its cells to bins.
        splits: splits on the party's columns, in the order in which the label party asks for them.
    """

    def __init__(self, ranks: Ranks, binning: Binning, splits: list[Split]) -> None:
        super().__init__()
        self._ranks, self._binning, self.splits = ranks, binning, splits

    def forward(self, inputs: Tensor) -> Tensor:
        """Return, for each row and split, 1 if the row goes left, otherwise 0; axes (rows, splits).

        The type of the numbers is float32. If there are no splits, each row has a single zero.
        """
        return self.of_cells(self._ranks.cells(inputs))

    def of_cells(self, cells: np.ndarray) -> Tensor:
        """Return the same as `forward`, for cells before encoding, axes (rows, columns)."""
        if not self.splits:
            return torch.zeros(len(cells), 1)
        bins, layout = self._binning.bins(cells), self._binning.layout
        return torch.from_numpy(goes_left(self.splits, bins, layout)).float()


@dataclass(frozen=True, eq=False)
class AskedSplits:
    """The splits on a feature party's columns, in the order in which the party received them.

    Attributes:
        columns: number of the column of each split.
        sides: function that maps inputs of rows to 1 (left) or 0 (right) at each split, as `Sides`
            does.
    """

    columns: Sequence[int]
    sides: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SentBins:
    """The bins that a feature party sent to the label party.

    Attributes:
        layout: number of bins of each column, and whether the bins have an order.
        targets, leaked: bin numbers of the target rows, and of the leaked rows, axes (rows,
            columns); a missing cell has the bin number `layout.width - 1`.
        epsilon: epsilon of the randomised response that changed the bins; None means that the bins
            are exact.
        own_of_leaked: the label party's own columns for the leaked rows, if it has any columns.
    """

    layout: Layout
    targets: np.ndarray
    leaked: np.ndarray
    epsilon: float | None
    own_of_leaked: Tensor | None = None


def paths(tree: Tree, left: np.ndarray, levels: int) -> list[np.ndarray]:
    """Return, for each level below the root, which node each row reaches, one-hot encoded.

    Args:
        tree: the tree.
        left: for each row and split, whether the row goes left, bool, axes (rows, splits).
        levels: number of levels below the root.

    Returns:
        One array per level, bool, axes (rows, 2), (rows, 4), ...; a row that reached a leaf on an
        earlier level is all False.
    """
    children = np.array(tree.children)
    asked = np.cumsum([split is not None for split in tree.splits]) - 1
    rows, found = np.arange(len(left)), list[np.ndarray]()
    node, place, inside = np.zeros_like(rows), np.zeros_like(rows), np.ones(len(left), bool)
    for level in range(1, levels + 1):
        inside &= children[node, 0] >= 0
        goes = inside & (left[rows, asked[node]] if left.shape[1] else inside)
        place = 2 * place + ~goes
        node = np.where(inside, children[node, np.where(goes, 0, 1)], node)
        found.append((place[:, None] == np.arange(1 << level)) & inside[:, None])
    return found


def _mode_of(experiment: Experiment) -> Trees:
    mode = secure_mode.make(experiment.secure)
    assert isinstance(mode, Trees), "cases of trees"
    return mode


@dataclass(frozen=True, eq=False)
class SeenNodes:
    """The gradient sums over one party's columns that the label party received for each tree node.

    Attributes:
        layout: number and order of each column's bins.
        nodes: sums of each node that the label party requested, starting with the root of the first
            tree.
        training: number of training rows.
        targets, leaked: positions of the target rows and of the leaked rows among the training
            rows.
        epsilon: epsilon of the randomised response that changed the bins; None means that the bins
            are exact.
        own_of_leaked: the label party's own columns for the leaked rows, if it has any columns.
    """

    layout: Layout
    nodes: Sequence[SeenSums]
    training: int
    targets: np.ndarray
    leaked: np.ndarray
    epsilon: float | None
    own_of_leaked: Tensor | None = None


_OF_LABEL_PARTY = frozenset({Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS})
_OF_ATTRIBUTE = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})
_OF_SUMS = frozenset({Grant.LABELS, Grant.LEAKED_INPUTS, Grant.PROTOCOL})
_IN_TRAINING = frozenset({Grant.EPOCHS, Grant.PROTOCOL})
_TOLD_NODES = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.UNLABELLED, Grant.PRIOR}
    | {Grant.TOP_RECIPE, Grant.PROTOCOL}
)
#: Number of tree levels below the root whose nodes an attack receives.
_LEVELS = 3


class TreesCases(Cases):
    """Attack cases for a training run of boosted trees; see `Cases` for the arguments."""

    replays: ClassVar[bool] = True

    @classmethod
    def held(cls, scenario: Scenario, experiment: Experiment) -> frozenset[Grant]:
        mode = _mode_of(experiment)
        own = {Grant.INPUTS} if experiment.label.party in experiment.parties else set()
        found = {
            INFERENCE_TIME: INFERENCE | {Grant.PROTOCOL},
            COLLUSION: INFERENCE | {Grant.PARTNERS},
            RECORDED_QUERIES: _OF_LABEL_PARTY | own,
            QUERIES_ATTRIBUTE: _OF_ATTRIBUTE,
            PREDICTIONS: PREDICTIONS.grants,
        }
        if not mode.needs_keys:  # protect = "order": the label party has the bins of training rows
            found[RECORDED_TRAINING] = _OF_LABEL_PARTY | _IN_TRAINING | own
            found[TRAINING_ATTRIBUTE] = _OF_ATTRIBUTE | {Grant.EPOCHS}
        else:
            found[RECORDED_TRAINING] = _OF_SUMS | own
        if mode.needs_keys and mode.nodes == "known":
            found[TRAINING_TIME] = _TOLD_NODES
        return found.get(scenario, frozenset())

    def _begin(self) -> None:
        self._mode = _mode_of(self.experiment)
        self._numbers: dict[str, tuple[Ranks, Tensor]] = {}
        self._nodes: list[SeenSums] | None = None

    def case(self, scenario: Scenario, k: int, draw: torch.Generator) -> Case:
        if scenario == PREDICTIONS:
            return self._queried(draw)
        if scenario == TRAINING_TIME:
            return seeking(self._of_told_nodes(k, draw))
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

    # Cases in which a feature party attacks: it has its own columns, its part of the trees, and a
    # few labels.

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

    def _of_told_nodes(self, k: int, draw: torch.Generator) -> Case:
        """Build a label-inference case for a feature party that knows every training row's node."""
        label, inputs = self.data[self.experiment.label.party], self._encoded(self.party)[1]
        (labels, classes), train = labels_of(label), torch.from_numpy(label.split.train)
        leaks = torch.zeros(len(train), dtype=torch.bool)
        if k:
            leaks[draw_leak(codes_of(labels[train], classes), k, draw, classes)] = True
        order = torch.cat([train[~leaks], train[leaks]])
        targets, leaked = order[: len(train) - int(leaks.sum())], train[leaks]
        nodes, bottom = self._nodes_of(order), self._sides(self.party)
        everybody = torch.arange(len(order))
        absent = {Grant.LEAKED: not k, Grant.PRIOR: classes == 1}
        grants = _TOLD_NODES - {one for one, gone in absent.items() if gone}
        seen = Evidence(inputs[targets])
        holdings = Holdings(
            targets=seen,
            leaked=Evidence(inputs[leaked], labels=labels[leaked]) if k else None,
            unlabelled=seen,
            exchanges=[
                RecordedExchange(number, number, everybody, lambda: inputs[order], one)
                for number, one in enumerate(nodes, 1)
            ],
            prior=None if classes == 1 else labels[train].bincount(minlength=classes) / len(train),
            new_top=top_recipe(self.experiment, classes),
            told=AskedSplits([one.column for one in bottom.splits], bottom),
        )
        threat = ThreatModel("feature party", "training", grants)
        return Case(View(threat, classes, holdings), labels[targets])

    def _nodes_of(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield rows' nodes in each round's trees, one-hot for each level; axes (rows, nodes)."""
        label = self.experiment.label.party
        forest = Forest.of_state(within("share.", self._weights(label)))
        depth = self._mode.boosting((), 0).growth.max_depth
        # the label party requests no sums for nodes on the last level
        levels = min(_LEVELS, depth - 1) if depth else _LEVELS
        answers, asked = self._answers(forest.splits, rows.numpy()), 0
        for trees in forest.rounds:
            found = []
            for tree in trees:
                count = len(splits_of([tree]))
                found += paths(tree, answers[:, asked : asked + count], levels)
                asked += count
            yield torch.from_numpy(np.concatenate(found, axis=1)).float()

    def _answers(self, splits: Sequence[Split], rows: np.ndarray) -> np.ndarray:
        """Return whether rows go left at splits on all parties' columns, axes (rows, splits)."""
        answers = np.empty((len(rows), len(splits)), bool)
        for name, span in self._spans().items():
            bins, layout = self._shown(name)
            own = dict(owned(splits, span))
            answers[:, [*own]] = goes_left([*own.values()], bins[rows], layout)
        return answers

    def _spans(self) -> dict[str, slice]:
        """Return each party's part of all columns, which begin with the label party's columns."""
        label, names = self.experiment.label.party, self.experiment.feature_parties
        names = [*([label] if label in self.experiment.parties else []), *names]
        return spans_of({name: len(self._binning(name).layout.bins) for name in names})

    # Cases in which the label party attacks: it has the bins of the training rows, the directions
    # of queried rows at splits, and a few known rows of the victim.

    def _of_label_party(self, in_training: bool, draw: torch.Generator) -> Case:
        label = self.data[self.experiment.label.party]
        (labels, classes), truth = labels_of(label), self._truth()
        rows = torch.from_numpy(label.split.train if in_training else label.split.test)
        leaks = min(self.settings.known_columns, len(rows) // 2)
        order = draw_columns(rows, leaks, draw, "training" if in_training else "test")
        known, targets = order[:leaks], order[leaks:]
        summed = in_training and self._mode.needs_keys
        sent = self._sent_bins if in_training else self.cuts
        own = None if label.inputs is None else self._encoded(label.name)[1]

        def seen(some: Tensor, inputs: Tensor | None) -> Evidence:
            if summed:
                return Evidence(inputs, None, labels[some])
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
        if summed:
            holdings = replace(holdings, told=self._sums(targets, known, own))
        elif in_training:
            bins, layout = self._shown(self.party)
            of_targets, of_known = bins[targets.numpy()], bins[known.numpy()]
            of_own = None if own is None else own[known]
            told = SentBins(layout, of_targets, of_known, self._mode.epsilon, of_own)
            holdings = replace(holdings, told=told)
        return Case(View(threat, classes, holdings), labels[targets], truth[targets])

    def _sums(self, targets: Tensor, known: Tensor, own: Tensor | None) -> SeenNodes:
        """Replay the training; return, for each node, the sums that the label party received."""
        if self._nodes is None:
            session, seen = session_of(self.experiment, self.data, "train"), list[SeenSums]()
            assert isinstance(session, WholeNetworkSession), (
                "a session of trees is a whole-network session"
            )
            network = session.label.network
            assert isinstance(network, SharedLabelEnd), "it trains on shares"
            network.watch = seen.append
            session.run()
            self._nodes = seen
        columns = self._spans()[self.party]
        train = self.data[self.experiment.label.party].split.train
        place = np.empty(len(self._cells(self.party)), np.int64)
        place[train] = np.arange(len(train))
        return SeenNodes(
            self._binning(self.party).layout,
            [replace(one, sums=one.sums[columns]) for one in self._nodes],
            len(train),
            place[targets.numpy()],
            place[known.numpy()],
            self._mode.epsilon,
            None if own is None else own[known],
        )

    def _sent_bins(self, rows: Tensor) -> Tensor:
        """Return the bins of chosen training rows, encoded like cells by `standardised`."""
        bins, layout = self._shown(self.party)
        cells = np.where(bins == layout.width - 1, np.nan, bins).astype(np.float32)
        train = self.data[self.party].split.train
        return standardised(cells, categories_of(layout), train)[rows]

    def _shown(self, name: str) -> tuple[np.ndarray, Layout]:
        """Return a party's bins of all rows; rows sent to others have randomised response."""
        own, split = self._binning(name), self.data[name].split
        bins = own.bins(self._cells(name))
        if self._mode.epsilon is not None and name != self.experiment.label.party:
            sent = np.concatenate([split.train, split.validation])
            secret = Secret.of_simulation(self.experiment.seed, name)
            bins[sent] = randomised(bins[sent], own.layout, self._mode.epsilon, secret)
        return bins, own.layout

    # Data, encoding, binning and splits of each party.

    def _cells(self, name: str) -> np.ndarray:
        inputs = self.data[name].inputs
        assert inputs is not None, "the party has columns"
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
        weights = self._weights(name)
        if name == self.experiment.label.party:
            weights = within("share.own.", weights)
        return Binning.of_state(weights, self._categories(name))

    def _sides(self, name: str) -> Sides:
        splits = [] if self.folder is None else splits_of_state(self._weights(name))
        return Sides(self._encoded(name)[0], self._binning(name), splits)
