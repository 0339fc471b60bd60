"""Attacks on the gradients of a whole training: noise averages out, and sums are equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score

from vfl.attacks import Evidence, Grant, Holdings, RecordedExchange, ThreatModel, View, make
from vfl.attacks.labels.batch_sums import Equations, grouped
from vfl.attacks.labels.gradient_mixture import densities
from vfl.attacks.labels.gradients import guess_rates
from vfl.attacks.labels.orientation import by_shares, is_upward
from vfl.attacks.scoring import Case, attempt_all
from vfl.attacks.transcript import SentCuts, Transcript
from vfl.core.seeds import generator

ROWS, WIDTH, COLUMNS, BATCH = 1200, 6, 5, 60
SHARE = 0.2  # of class 1


def training(
    epochs=8,
    noise=0.0,
    law="normal",
    group=1,
    columns=1.0,
    share=SHARE,
    start=SHARE,
    leaked=10,
    seed=3,
    flip=0.0,
):
    """A training whose gradients are residuals along one direction, behind a defense.

    Args:
        noise: deviation, beside residuals of about .4.
        law: law of the noise.
        group: rows whose mean each of them is sent, in a batch; 0 is the batch.
        columns: distance of the classes in the columns, in deviations.
        share: share of class 1.
        start: probability of class 1 of the untrained network; it learns the share.
        leaked: leaked rows of each class.
        flip: share of labels that are swapped before the training.
    """
    draw = generator(seed, "training")
    labels = (torch.rand(ROWS, generator=draw) < share).long()
    inputs = torch.randn(ROWS, COLUMNS, generator=draw)
    inputs[:, 0] += columns * labels
    taught = labels.float()
    if flip:
        taught = (taught - (torch.rand(ROWS, generator=draw) < flip).float()).abs()
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=draw), dim=0)
    exchanges = []
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(ROWS, generator=draw).split(BATCH):
            believed = share + (start - share) * 0.9 ** len(exchanges)
            sent = (believed - taught[rows])[:, None] * direction
            drawn = torch.randn(sent.shape, generator=draw)
            if law == "laplace":
                drawn = torch.distributions.Laplace(0, 1).icdf(
                    torch.rand(sent.shape, generator=draw)
                )
            sent = sent + noise * drawn
            size = group or len(rows)
            sent = sent.view(-1, size, WIDTH).mean(1).repeat_interleave(size, 0)
            up = SentCuts(len(exchanges), epoch, rows, torch.zeros_like(sent))
            exchanges.append(RecordedExchange.of(up, sent))
    known = torch.cat([torch.nonzero(labels == code)[:leaked, 0] for code in (0, 1)])
    rest = torch.ones(ROWS, dtype=torch.bool)
    rest[known] = False
    order = torch.empty(ROWS, dtype=torch.int64)
    order[torch.cat([torch.nonzero(rest)[:, 0], known])] = torch.arange(ROWS)
    exchanges = [
        RecordedExchange(one.step, one.epoch, order[one.rows], one.cuts, one.gradients)
        for one in exchanges
    ]
    holdings = Holdings(
        targets=Evidence(inputs[rest]),
        leaked=Evidence(inputs[known], labels=labels[known]),
        exchanges=exchanges,
        prior=torch.tensor([1 - share, share]),
    )
    holdings = replace(holdings, unlabelled=holdings.targets)
    grants = frozenset({Grant.GRADIENTS, Grant.LEAKED, Grant.INPUTS, Grant.PRIOR})
    grants |= {Grant.UNLABELLED}
    view = View(ThreatModel("feature party", "training", grants), 2, holdings)
    return Case(view, labels[rest], positive=labels[rest] == 1)


def posterior(column, distance, share):
    """Chance of class 1 of two normal laws."""
    return ((share / (1 - share)) * (distance * column - distance**2 / 2).exp()).log().sigmoid()


def area(case, spec):
    scores = attempt_all(case, make(spec), generator(0))
    return next(one.value for one in scores if one.measure == "auc")


def test_noise_that_is_drawn_anew_averages_out_over_the_epochs():
    case = training(noise=0.6)
    one, all_of_them = (area(case, f"gradient_mixture:epochs={n},steps=0") for n in (1, 0))
    assert max(one, area(case, "gradient_direction")) < 0.93
    # Two normal laws at a distance of 1, each of deviation .6 / sqrt(8): an AUC above .999 at best.
    assert all_of_them > 0.98


def misread(spec, **options):
    """Trainings with one leaked row a class of which an attack takes class 0 for class 1."""
    return sum(
        area(training(noise=2.0, columns=0.3, leaked=1, seed=seed, **options), spec) < 0.5
        for seed in range(12)
    )


@pytest.mark.parametrize("spec", ["gradient_mixture:steps=0", "batch_sums"])
def test_first_gradients_say_which_class_is_rare(spec):
    by_leaked_rows_alone = misread(spec)
    assert by_leaked_rows_alone >= 1
    assert misread(spec, start=0.5) < by_leaked_rows_alone


def test_the_principal_direction_turns_that_of_a_single_leaked_row():
    assert misread("gradient_direction:epochs=8") == 0


def test_equal_shares_leave_the_classes_to_leaked_rows():
    """Their first gradients drift to a side as well, and this side says nothing."""
    axis = torch.nn.functional.normalize(torch.ones(WIDTH), dim=0)
    drifting = [
        RecordedExchange(step, 1, torch.arange(50), lambda: None, 0.1 + torch.randn(50, WIDTH))
        for step in range(10)
    ]
    seen = Transcript(50, drifting)
    found = {share: by_shares(seen, lambda one: one.gradients, axis, share) for share in (0.1, 0.5)}
    assert found[0.1] < -3  # the mean lies on the side of class 0
    assert found[0.5] == 0.0
    turned = by_shares(seen, lambda one: one.gradients, -axis, 0.1)
    assert turned == pytest.approx(-found[0.1])
    scores, labels = torch.tensor([0.0, 3.0, -3.0, -1.0, 1.0]), torch.tensor([0, 1])
    assert is_upward([scores], labels, found[0.5])
    assert not is_upward([scores], labels, found[0.1])


@pytest.mark.parametrize(("flip", "room"), [(0.1, 0.02), (0.27, 0.03), (0.38, 0.1)])
def test_randomised_labels_and_own_columns_count_by_how_many_labels_are_right(flip, room):
    """As well as by the law of the columns, which the attacker does not know."""
    case = training(columns=1.5, flip=flip, leaked=2)
    known = posterior(case.view.targets.inputs[:, 0], 1.5, SHARE).logit()
    sides = case.view.transcript.mean(lambda one: one.gradients)[: len(known), 0]
    taught = (sides > 0).float()
    taught = taught if (taught == case.labels).float().mean() > 0.5 else 1 - taught
    best = roc_auc_score(case.labels, known + (2 * taught - 1) * np.log((1 - flip) / flip))
    assert area(case, "gradient_teacher:epochs=8,steps=100") > best - room


def test_clusters_of_like_sizes_are_wrong_about_the_frequent_class_only():
    guesses = torch.arange(1000) < 400  # 100 rows of the rare class, and 300 of the other
    leaked, truth = torch.tensor([1] * 10 + [1] * 4 + [0] * 6), torch.tensor([1] * 10 + [0] * 10)
    (_, false), (_, hit) = guess_rates(guesses, leaked, truth, torch.tensor([0.9, 0.1])).tolist()
    assert hit > 0.8  # one rate for both classes would be .63
    assert 0.1 * hit + 0.9 * false == pytest.approx(0.4)


def test_a_student_on_own_columns_adds_what_they_tell():
    case = training(noise=2.0, columns=1.5)
    alone, both = (area(case, f"gradient_mixture:steps={steps}") for steps in (0, 200))
    assert both > alone + 0.02


def test_heavy_tails_are_found_without_a_label():
    """Student's law has the higher likelihood of Laplace noise, the normal one of normal noise."""
    for law, tail in (("laplace", 4.0), ("normal", None)):
        draw = np.random.default_rng(0)
        noise = draw.laplace(size=(4000, 1)) if law == "laplace" else draw.normal(size=(4000, 1))
        shares = torch.ones(4000, 1).double()
        found = {one: densities(torch.from_numpy(noise), shares, one).mean() for one in (None, 4.0)}
        assert max(found, key=found.get) == tail


@pytest.mark.parametrize(("group", "least"), [(4, 0.98), (20, 0.85), (0, 0.7)])
def test_means_over_groups_are_equations_of_their_rows(group, least):
    assert area(training(group=group), "batch_sums") > least


def test_columns_of_a_colluding_party_are_equations_too():
    """The partner has the only column that tells classes apart."""
    case = training(group=0)
    view, split = case.view, [case.view.targets.inputs, case.view.leaked.inputs]
    partner = View(
        ThreatModel("feature party", "training", frozenset({Grant.INPUTS, Grant.LEAKED})),
        2,
        Holdings(*(Evidence(inputs[:, :1]) for inputs in split)),
    )
    own = [Evidence(inputs[:, 1:]) for inputs in split]
    grants = view.threat.grants | {Grant.PARTNERS}
    threat = ThreatModel("feature party", "training", grants, colluding=("shop",))
    joint = View(threat, 2, view._holdings).instead(
        targets=own[0], leaked=replace(own[1], labels=view.leaked.labels), partners=[partner]
    )
    together = replace(case, view=joint)
    alone, both = (area(together, spec) for spec in ("batch_sums", "pooled:of=batch_sums"))
    assert both > alone + 0.05


@pytest.mark.parametrize(
    ("defended", "chosen"), [({"noise": 1.0}, "gradient_mixture"), ({"group": 20}, "batch_sums")]
)
def test_an_adaptive_attacker_finds_what_a_defense_left_open(defended, chosen):
    attack = make("adaptive:at=accumulated+inputs,candidates=12")
    case = training(**defended)
    scores = attempt_all(case, attack, generator(0))
    found = next(one.value for one in scores if one.measure == "auc")
    report = attack.last_report()
    assert any(spec.startswith(chosen) for spec in report["chosen"])
    assert all(one["folds"] for one in report["compositions"])
    tried = {one["spec"].partition(":")[0] for one in report["compositions"]}
    assert tried > {"gradient_mixture", "gradient_teacher", "batch_sums"}
    assert found > area(case, "label_propagation:at=inputs") + 0.1
    assert found > area(case, chosen) - 0.07


def test_groups_are_rows_of_one_gradient():
    draw = generator(0, "groups")
    gradients = torch.randn(3, WIDTH, generator=draw)[torch.tensor([2, 0, 2, 1, 0, 2])]
    group, first, sizes = grouped(gradients)
    assert [len({*group[[0, 2, 5]].tolist()}), len({*group.tolist()})] == [1, 3]
    assert first[group].tolist() == [0, 1, 0, 3, 1, 0]
    assert sizes[group].tolist() == [3, 2, 3, 1, 2, 3]


def test_the_regression_of_groups_is_that_of_scikit_learn():
    case = training(group=20)
    seen = case.view.transcript
    inputs = torch.cat([case.view.targets.inputs, case.view.leaked.inputs]).double()
    inputs = inputs - inputs.mean(0)
    equations = Equations.of(seen, 1, inputs)
    found = equations.slopes(inputs)[:, 0].numpy()
    means, wanted = equations.groups @ inputs.numpy(), equations.values[:, 0].numpy()
    weights = equations.sizes.numpy()
    near = [
        np.abs(Ridge(penalty, fit_intercept=False).fit(means, wanted, weights).coef_ - found).max()
        for penalty in 10.0 ** (np.arange(-2, 13) / 2)
    ]
    assert min(near) < 1e-6


def test_noise_that_hides_the_principal_component_hides_no_direction_of_the_rows():
    """Rows of eight epochs vary together along the classes' direction, noise along another."""
    case = training(noise=0.4, columns=1.5)
    draw = generator(0, "loud")
    loud = [
        replace(
            one,
            gradients=one.gradients + torch.eye(WIDTH)[0] * torch.randn(BATCH, 1, generator=draw),
        )
        for one in case.view.exchanges
    ]
    noisy = replace(case, view=case.view.instead(exchanges=loud))
    assert area(noisy, "batch_sums") > 0.95
    means = torch.cat([one.gradients for one in loud])
    assert abs(torch.linalg.eigh(means.T @ means)[1][0, -1]) > 0.9


def test_rows_own_numbers_are_least_squares():
    pairs = [([0, 1, 2, 3, 4, 5], [1.0, -1.0, 3.0]), ([0, 2, 1, 4, 3, 5], [2.0, 0.5, -4.0])]
    sent = [torch.tensor(values).repeat_interleave(2)[:, None] for _, values in pairs]
    exchanges = [
        RecordedExchange(epoch, epoch, torch.tensor(rows), lambda: None, sent[epoch])
        for epoch, (rows, _) in enumerate(pairs)
    ]
    seen = Transcript(6, exchanges)
    equations = Equations.of(seen, 1, torch.arange(6).double()[:, None] - 2.5)
    found = equations.own(torch.zeros(6, 1).double(), 0.5)[:, 0].numpy()
    matrix, weights = equations.groups.toarray(), np.diag(equations.sizes.numpy())
    system = matrix.T @ weights @ matrix + 0.5 * np.eye(6)
    exact = np.linalg.solve(system, matrix.T @ weights @ equations.values[:, 0].numpy())
    assert np.allclose(found, exact, atol=1e-3)


@pytest.mark.parametrize("spec", ["gradient_mixture:steps=20", "batch_sums"])
def test_without_any_gradient_an_answer_is_finite(spec):
    case = training(epochs=1)
    still = [
        RecordedExchange(one.step, one.epoch, one.rows, one.cuts, torch.zeros_like(one.gradients))
        for one in case.view.exchanges
    ]
    silent = Case(case.view.instead(exchanges=still), case.labels, positive=case.positive)
    assert torch.isfinite(make(spec).run(silent.view, generator(0))).all()
