"""Attacks on trees: held to the contract, to the frames of a session, and run by a grid."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from attack_grids import played

from vfl.attacks import Evidence, Grant, Holdings, RecordedExchange, ThreatModel, View
from vfl.attacks.cases import draw_leak
from vfl.attacks.scoring import Case, attempt
from vfl.config import Experiment, GridSettings
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, ExposedCutError, UserError
from vfl.core.frame import Kind
from vfl.core.products import members_of
from vfl.core.registry import parse
from vfl.core.seeds import generator
from vfl.experiments.attack_grid import attack_finished_run, grid_cells
from vfl.experiments.checks import grid_mistakes
from vfl.experiments.pages import build_report
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scenarios import (
    INFERENCE_TIME,
    RECORDED_QUERIES,
    RECORDED_TRAINING,
    TRAINING_TIME,
)
from vfl.testing import AttackContract, InputAttackContract
from vfl.training.run import load_data, session_of, train
from vfl.trees.attacks.bins import Bins
from vfl.trees.attacks.cases import AskedSplits, SeenNodes, SentBins, TreesCases, paths
from vfl.trees.attacks.columns import Ranks, standardised
from vfl.trees.attacks.nodes import Nodes
from vfl.trees.attacks.splits import Splits
from vfl.trees.attacks.sums import Sums
from vfl.trees.grow import Layout, Split, Tree
from vfl.trees.histograms import goes_left
from vfl.trees.shared import SeenSums, SharedFeatureEnd

ROWS = 900


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A table whose label follows from two of the bank's columns; the rest is noise."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({f"a{place}": draw.normal(size=ROWS) for place in range(9)})
    frame["city"] = draw.choice(["ulm", "bonn", "jena"], ROWS, p=[0.6, 0.3, 0.1])
    frame["age"] = draw.normal(size=ROWS)
    score = 2 * frame.a0 - 2 * frame.a1 + draw.normal(size=ROWS)
    frame.loc[draw.random(ROWS) < 0.2, "a8"] = np.nan
    frame["paid"] = np.where(score > 0, "yes", "no")
    path = tmp_path_factory.mktemp("data") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def experiment(source, model="trees:max_depth=3,max_bin=16", **more):
    own = [f"a{place}" for place in range(9)]
    content = {
        "model": model,
        "data": {"source": str(source), "validation": 0.1, "test": 0.4},
        "parties": {"bank": {"columns": [*own, "city"]}, "shop": {"columns": ["age"]}},
        "label": {"party": "shop", "column": "paid"},
        "train": {"epochs": 5},
    }
    return Experiment.model_validate(content | more)


GRID = {
    "attacks": ["splits", "logistic", "kmeans", "bins", "own_columns", "inversion:steps=50",
                "averaging:of=inversion:steps=50", "attribute", "membership"],
    "baselines": ["scratch", "raw", "pca"],
    "models": ["trees:max_depth=3,max_bin=16,epsilon=1"],
    "leaks": [5],
    "draws": 1,
    "seeds": [0],
    "measure": "auc",
    "known_columns": 60,
    "pictures": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def grid(tmp_path_factory, source):
    return played(tmp_path_factory.mktemp("grid") / "whole", experiment(source, grid=GRID))


# --- a party's cells as numbers ------------------------------------------------------------------


def test_ranks_give_the_cells_back(source):
    draw = np.random.default_rng(1)
    cells = np.stack(
        [draw.normal(size=500), draw.integers(0, 3, 500), draw.choice([1e30, -2], 500)]
    )
    cells = cells.T.astype(np.float32)
    cells[draw.random(cells.shape) < 0.1] = np.nan
    ranks = Ranks(cells, (0, 3, 0), np.arange(300))
    numbers = ranks.numbers(cells)
    assert numbers.isfinite().all()
    assert numbers.min() >= 0
    assert numbers.max() <= 1
    np.testing.assert_array_equal(ranks.cells(numbers), cells)


def test_standardised_cells_are_those_of_a_network():
    cells = np.float32([[1, 0], [3, 2], [np.nan, np.nan], [100, 1]])
    found = standardised(cells, (0, 3), np.arange(3))
    want = [[-1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [98, 0, 1, 0]]
    np.testing.assert_allclose(found, np.float32(want))


# --- the contract --------------------------------------------------------------------------------


class TestSplits(AttackContract):
    """Two of many columns tell the class, or none; splits were asked on those."""

    specs = ("splits", "splits:decay=0", "splits:strength=0.1")
    classes, rows, width, leaks, wins = 2, 400, 40, 4, 0.8

    def case(self, leaking, grants):
        draw = generator(0, "splits", int(leaking))
        labels = torch.arange(self.rows) % 2
        inputs = torch.randn(self.rows, self.width, generator=draw)
        inputs[:, 0] += 3.0 * leaking * labels
        inputs[:, 1] -= 3.0 * leaking * labels
        columns = [0, 1, 0, 1, 0, 1]

        def sides(some):
            return (some[:, columns] < torch.tensor([1.5, -1.5, 0.5, -2, 2, -1])).float()

        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        holdings = Holdings(
            targets=Evidence(inputs[rest]),
            leaked=Evidence(inputs[leaked], labels=labels[leaked]),
            told=AskedSplits(columns, sides),
        )
        return Case(
            View(ThreatModel("feature party", "inference", grants), 2, holdings), labels[rest]
        )

    def test_without_splits_it_reads_its_columns_and_finds_less(self):
        case = self.case(True, Splits.needs)
        blind = case.view.instead(told=AskedSplits((), lambda rows: rows))
        alone = attempt(Case(blind, case.labels), Splits(), generator(0))
        assert alone.value < attempt(case, Splits(), generator(0)).value


class TestBins(InputAttackContract):
    """An ordered column and a category, sent as bins; or the bins of other rows."""

    specs = ("bins", "bins:rows=false", "bins:prior=3")
    epsilon = None

    def case(self, leaking, grants):
        draw = np.random.default_rng(int(leaking))
        value = draw.normal(size=self.rows) ** 3
        city = draw.choice(3, self.rows, p=[0.6, 0.3, 0.1])
        edges = np.quantile(value, np.linspace(0, 1, 17)[1:-1])
        bins = np.stack([np.searchsorted(edges, value), city], axis=1).astype(np.uint8)
        cells = np.stack([value, city], axis=1).astype(np.float32)
        inputs = standardised(cells, (0, 3), np.arange(self.rows))
        if not leaking:
            bins = bins[draw.permutation(self.rows)]
        known, rest = slice(self.leaks), slice(self.leaks, None)
        own = 0.3 * torch.from_numpy(draw.normal(size=(self.rows, 3))).float()
        own += inputs[:, :3] if leaking else 0
        layout = Layout((16, 3), (False, True))
        holdings = Holdings(
            targets=Evidence(own[rest]),
            leaked=Evidence(inputs[known]),
            told=SentBins(layout, bins[rest], bins[known], self.epsilon, own[known]),
        )
        labels = torch.zeros(self.rows - self.leaks, dtype=torch.int64)
        threat = ThreatModel("label party", "training", grants)
        return Case(View(threat, self.classes, holdings), labels, inputs[rest])

    def require_guess(self, score):
        assert score.value >= 0.9 * score.guess, "it beats its guess"


class TestSums(InputAttackContract):
    """Columns whose bins are told by sums over small nodes; or the sums of other rows."""

    specs = ("sums", "sums:nodes=300,rows=false", "sums:noise=0.001")

    def case(self, leaking, grants):
        draw = np.random.default_rng(int(leaking))
        values = draw.normal(size=(self.rows, 2))
        edges = np.quantile(values, np.linspace(0, 1, 9)[1:-1])
        bins = np.searchsorted(edges, values)
        inputs = standardised(values.astype(np.float32), (0, 0), np.arange(self.rows))
        summed = bins if leaking else bins[draw.permutation(self.rows)]
        nodes = []
        for size in (self.rows, *[12] * 400):
            rows = np.sort(draw.choice(self.rows, size, replace=False))
            gradients = np.stack([draw.normal(size=size), draw.random(size)], axis=1)
            gradients[:, 1] = 0.25 if size == self.rows else gradients[:, 1]
            sums = np.zeros((2, 9, 2))
            for column in range(2):
                np.add.at(sums[column], summed[rows, column], gradients)
            nodes.append(SeenSums(rows, gradients, sums))
        known, rest = np.arange(self.leaks), np.arange(self.leaks, self.rows)
        told = SeenNodes(Layout((8, 8), (False, False)), nodes, self.rows, rest, known, None)
        labels = torch.zeros(len(rest), dtype=torch.int64)
        holdings = Holdings(
            targets=Evidence(labels=labels), leaked=Evidence(inputs[: self.leaks]), told=told
        )
        threat = ThreatModel("label party", "training", grants)
        return Case(View(threat, self.classes, holdings), labels, inputs[self.leaks :])

    def require_guess(self, score):
        assert score.value >= 0.9 * score.guess, "it beats its guess"


def test_sums_tell_columns_as_bins_do_unless_bins_are_randomised(source):
    """On shares a grid's attacker solves for what nobody sent; of bins sent it reads those."""
    scores = {}
    for more in ("", ",protect=shared", ",protect=shared,epsilon=0.5"):
        made = experiment(source, f"trees:max_depth=4,max_bin=8{more}", train={"epochs": 30})
        cases = TreesCases(made, load_data(made), GridSettings(known_columns=60))
        score = attempt(cases.case(RECORDED_TRAINING, 0, generator(0)), Sums(), generator(0))
        scores[more] = score.value / score.guess
    plain, summed, noisy = scores.values()
    assert plain < summed < 0.6 < noisy, scores


class TestOwnColumns(TestBins):
    specs, wins = ("own_columns",), 0.7


class TestNodes(AttackContract):
    """In each round, rows of a class often come to the same of four nodes; or to any."""

    specs = ("nodes", "nodes:decay=0.1", "nodes:strength=10")
    classes, rows, leaks, wins = 2, 400, 4, 0.85

    def case(self, leaking, grants):
        draw = generator(0, "nodes", int(leaking))
        labels = torch.arange(self.rows) % 2
        inputs = torch.randn(self.rows, 3, generator=draw)
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        order = torch.cat([torch.nonzero(rest)[:, 0], leaked])
        exchanges = []
        for epoch in range(1, 9):
            node = torch.randint(4, (self.rows,), generator=draw)
            told = leaking & (torch.rand(self.rows, generator=draw) < 0.6)
            node = torch.where(told, 2 * labels + node % 2, node)[order]
            gradients = (node[:, None] == torch.arange(4)).float()
            rows = torch.arange(self.rows)
            exchanges.append(RecordedExchange(epoch, epoch, rows, lambda: inputs, gradients))
        holdings = Holdings(
            targets=Evidence(inputs[rest]),
            leaked=Evidence(inputs[leaked], labels=labels[leaked]),
            exchanges=exchanges,
            told=AskedSplits([0, 1], lambda some: (some[:, :2] > 0).float()),
        )
        threat = ThreatModel("feature party", "training", grants)
        return Case(View(threat, 2, holdings), labels[rest])


def test_every_attack_of_trees_is_under_contract():
    contracts = (TestSplits, TestNodes, TestBins, TestSums, TestOwnColumns)
    specs = [spec for contract in contracts for spec in contract.specs]
    own = {name for name, path in members_of("vfl.attacks").items() if "vfl.trees." in path}
    assert {parse(spec)[0] for spec in specs} == own


def test_randomised_bins_tell_less_the_smaller_epsilon_is(source):
    reached = []
    for epsilon in (None, 4, 1):
        model = "trees:max_bin=16" + ("" if epsilon is None else f",epsilon={epsilon}")
        made = experiment(source, model)
        cases = TreesCases(made, load_data(made), GridSettings(known_columns=60))
        case = cases.case(RECORDED_TRAINING, 0, generator(0))
        reached.append(attempt(case, Bins(), generator(0)))
    assert reached[0].value < 0.3 * reached[0].guess
    assert reached[0].value < reached[1].value < reached[2].value < 1.05 * reached[2].guess


# --- what travelled ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["trees:max_bin=16", "trees:max_bin=16,epsilon=1"])
def test_what_attackers_hold_is_what_crossed(source, tmp_path, model):
    """Bins, splits and sides of an attacker's view are those of the frames of the training."""
    made = experiment(source, model)
    data, seen = load_data(made), []
    options = {"observers": [lambda *crossed: seen.append(crossed)]}
    session_of(made, data, "train", **options).run()
    frames = [(way, bytes(frame.payload)) for party, way, frame in seen
              if party == "bank" and frame.kind is Kind.PROTOCOL]  # fmt: skip
    up = [payload for way, payload in frames if way == "up"]
    asked = [one for way, payload in frames if way == "down" and payload
             for one in json.loads(payload)]  # fmt: skip

    train(made, tmp_path, "run")
    cases = TreesCases(made, data, GridSettings(known_columns=60), RunFolder(tmp_path / "run"))
    split = data["bank"].split
    bins, layout = cases._shown("bank")
    sent = np.concatenate([split.train, split.validation])
    assert up[1] == bins[sent].astype(np.uint8).tobytes("F")

    told = cases.case(INFERENCE_TIME, 5, generator(0)).view.told
    assert told.columns == [column for column, _, _ in asked]
    sides = cases.cuts(torch.from_numpy(split.test)).numpy()
    assert up[2] == np.packbits(sides.astype(bool), axis=1).tobytes()

    view = cases.case(RECORDED_TRAINING, 0, generator(0)).view
    assert len(view.told.targets) + len(view.told.leaked) == len(split.train)
    view = cases.case(RECORDED_QUERIES, 0, generator(0)).view
    own, splits = cases._binning("bank"), cases._sides("bank").splits
    cells = data["bank"].inputs.numpy()
    want = goes_left(splits, own.bins(cells), layout)
    assert view.targets.cuts.shape[1] == want.shape[1]


@pytest.mark.parametrize("noise", ["", ",epsilon=2"])
def test_nodes_are_those_that_a_feature_party_was_told(source, tmp_path, monkeypatch, noise):
    """Rows share the last node that both parties know of, in each tree."""
    model = "trees:protect=shared,helper=notary,max_depth=3,max_bin=16"
    made, told = experiment(source, model + noise), []
    answer, rounds = SharedFeatureEnd._send_sums, iter(range(10**6))

    def listening(self, asked, step):
        answer(self, asked, step)
        told.append((step, next(rounds), self._nodes[: self._training].copy()))

    monkeypatch.setattr(SharedFeatureEnd, "_send_sums", listening)
    train(made, tmp_path, "run")
    last = {step: nodes for step, _, nodes in sorted(told, key=lambda one: one[:2])}
    data = load_data(made)
    cases = TreesCases(made, data, GridSettings(), RunFolder(tmp_path / "run"))
    found = list(cases._nodes_of(torch.from_numpy(data["bank"].split.train)))
    assert len(found) == len(last) == 5
    for nodes, one in zip(last.values(), found, strict=True):
        paths, codes = np.unique(one.numpy(), axis=0), np.unique(nodes)
        pairs = np.unique(np.column_stack([nodes, one.numpy()]), axis=0)
        assert len(pairs) == len(paths) == len(codes) > 1
    case = cases.case(TRAINING_TIME, 5, generator(0))
    assert noise or attempt(case, Nodes(), generator(0)).value > 0.75


def test_a_tree_has_a_path_for_each_row():
    tree = Tree([Split(0, range(1), False), None, Split(0, range(2), False), None, None],
                [(1, 2), (-1, -1), (3, 4), (-1, -1), (-1, -1)], [], [], [])  # fmt: skip
    left = np.array([[True, True], [False, True], [False, False]])
    first, second = paths(tree, left, 2)
    assert first.tolist() == [[True, False], [False, True], [False, True]]
    assert second.tolist() == [[False] * 4, [False, False, True, False], [False] * 3 + [True]]


# --- a grid --------------------------------------------------------------------------------------


def test_a_grid_attacks_trees_beside_baselines_and_guesses(grid):
    rows = {(row.training, row.subject, row.measure): row for row in LoadedGrid(grid).attacks}
    plain, noisy = "none", GRID["models"][0]
    splits = rows[plain, "splits", "auc"]
    assert splits.value > 0.8
    assert splits.baselines["scratch"] < splits.value
    assert splits.baselines["raw"] < splits.value
    assert splits.guess == 0.5
    assert "messages of the model's own protocol" in splits.threat
    read = rows[plain, "bins", "mse"]
    assert read.threat.startswith("A semi-honest label party, alone, in the training phase")
    assert read.value < 0.3 * read.guess < rows[noisy, "bins", "mse"].value
    assert rows[plain, "own_columns", "mse"].value > 0.8 * read.guess
    assert rows[plain, "inversion:steps=50", "mse"].value < read.guess
    assert (plain, "membership", "membership_auc") in rows
    assert (plain, "attribute", "attribute_auc") in rows
    page = build_report(grid.path).read_text()
    assert "splits" in page
    assert "epsilon=1" in page


def test_a_finished_run_is_attacked_by_itself(source, tmp_path):
    train(experiment(source), tmp_path, "run")
    folder = RunFolder(tmp_path / "run")
    asked = GridSettings(attacks=("splits", "bins"), leaks=(5,), draws=1, baselines=("raw",),
                         measure="auc")  # fmt: skip
    found = attack_finished_run(folder, asked)
    assert {row.subject for row in found} == {"splits", "bins"}
    with pytest.raises(UserError, match="gradient_norm needs the gradients that travelled"):
        attack_finished_run(folder, asked.model_copy(update={"attacks": ("gradient_norm",)}))


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"attacks": ["gradient_norm"]}, UserError, "gradients that travelled"),
        ({"attacks": ["nodes"]}, UserError, "gradients that travelled"),
        ({"models": ["trees:protect=shared"]}, UserError, "bins needs the cuts that travelled"),
        ({"attacks": ["averaging:over=snapshots"]}, UserError, "after every epoch"),
        ({"attacks": ["white_box_inversion"]}, UserError, "the victim's bottom"),
        ({"adversaries": ["fsha"]}, UserError, "this model has neither"),
        ({"models": ["network"]}, UserError, "models of a grid must be of the kind"),
        ({"record": ["training"]}, UserError, "its weights determine the frames"),
        ({"attacks": ["pooled"]}, UserError, "a second feature party"),
    ],
)
def test_what_trees_have_no_part_in_is_refused_before_training(source, changes, kind, told):
    with pytest.raises(kind, match=told):
        grid_cells(experiment(source, grid=GRID | changes))


def test_a_defense_of_cuts_is_refused_with_its_place(source):
    made = experiment(source, grid=GRID | {"defenses": ["dcor"]})
    (setting, mistake), *more = grid_mistakes(made, made.grid, load_data(made))
    assert setting == ("grid", "defenses")
    assert isinstance(mistake, ExposedCutError)
    assert not more


SHARED = "trees:max_depth=3,max_bin=16,protect=shared"


@pytest.mark.parametrize("model", [SHARED, "trees:max_depth=3"])
def test_bins_that_nobody_sends_are_not_attacked(source, model):
    more = {"attacks": ["bins", "splits"], "models": [] if model == SHARED else [SHARED]}
    made = experiment(source, model, grid=GRID | more)
    with pytest.raises(UserError, match=r"bins needs .* which no attacker of this model has"):
        grid_cells(made)


def test_a_network_is_not_attacked_by_what_trees_tell(source):
    made = experiment(source, grid=GRID | {"attacks": ["splits"], "models": []})
    made = made.model_copy(update={"secure": "none"})
    with pytest.raises((UserError, ConfigError), match="messages of the model's own protocol"):
        grid_cells(made)


def test_the_protocol_is_a_grant_of_its_own():
    view = TestSplits().case(True, frozenset({Grant.INPUTS, Grant.LEAKED})).view
    with pytest.raises(UserError, match="protocol"):
        _ = view.told
