"""The search for compositions: what it may see, what it may cost, and what it finds."""

import json
from itertools import islice

import pytest
import torch
from sklearn.metrics import roc_auc_score

from vfl.attacks import ATTACKS, Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.labels.adaptive import calibrated, compositions, ordered, stratified_folds
from vfl.attacks.scoring import Case, attempt
from vfl.attacks.view import IN_TRAINING
from vfl.core.seeds import generator

CLASSES, ROWS = 4, 900


def case(leaked=20):
    """Classes stand where the cut varies least; inputs say little of them."""
    draw = generator(0, "adaptive")
    labels = torch.arange(ROWS) % CLASSES
    inputs = 0.8 * torch.eye(CLASSES, 6)[labels] + torch.randn(ROWS, 6, generator=draw)
    cuts = (
        torch.cat(
            [
                100 * torch.randn(ROWS, 8, generator=draw),
                5 * torch.eye(CLASSES)[labels] + torch.randn(ROWS, CLASSES, generator=draw),
            ],
            1,
        )
        @ torch.linalg.qr(torch.randn(12, 12, generator=draw))[0]
    )
    rest = Evidence(inputs[leaked:], cuts[leaked:])
    threat = ThreatModel("feature party", "inference", frozenset(Grant) - IN_TRAINING)
    held = Holdings(
        targets=rest,
        leaked=Evidence(inputs[:leaked], cuts[:leaked], labels[:leaked]),
        unlabelled=rest,
    )
    return Case(View(threat, CLASSES, held), labels[leaked:])


@pytest.fixture(scope="module")
def searched():
    """A search of 30 compositions, inside another attack, and how right its guess is."""
    attack = ATTACKS.make("attribute:of=adaptive:candidates=30").inner
    assert attack.last_report() is None
    return attack, attempt(case(), attack, generator(0)).value


def test_it_finds_the_scaling_that_a_defense_asks_for(searched):
    attack, found = searched
    plain = attempt(case(), ATTACKS.make("logistic:scaler=cosine"), generator(0)).value
    assert found > 0.95 > plain + 0.2
    assert any(scaler in attack.report.best[0] for scaler in ("whiten", "shrink", "zca"))


def test_the_report_tells_what_was_tried_the_best_first(searched):
    report = searched[0].report
    assert len({one.spec for one in report.trials}) == len(report.trials) == 30
    assert report.best == [one.spec for one in report.trials[:9]]
    # 30, then a third of them, then the nine that vote.
    assert sorted(one.folds for one in report.trials) == [1] * 20 + [2] + [3] * 9
    assert all(len(one.right) == 20 for one in report.trials if one.folds == 3)


def test_what_is_stored_of_a_search_is_what_it_did(searched):
    attack, _ = searched
    stored, trials = json.loads(json.dumps(attack.last_report())), attack.report.trials
    assert stored["chosen"] == attack.report.best
    assert stored["budget_s"] is None
    assert [one["spec"] for one in stored["compositions"]] == [one.spec for one in trials]
    for one, trial in zip(stored["compositions"], trials, strict=True):
        assert one["held_out"] == pytest.approx(sum(trial.right) / len(trial.right), abs=1e-4)
    assert sum(one["seconds"] for one in stored["compositions"]) <= stored["seconds"]


def test_one_label_a_class_leaves_nothing_to_hold_back():
    attack = ATTACKS.make("adaptive:candidates=8")
    found = attempt(case(leaked=CLASSES), attack, generator(0)).value
    assert all(not one.right for one in attack.report.trials)
    assert {one["held_out"] for one in attack.last_report()["compositions"]} == {None}
    agreements = [one.agreement for one in attack.report.trials]
    assert agreements == sorted(agreements, reverse=True)
    assert found > 0.3


def test_every_leaked_row_is_held_back_once():
    labels = torch.tensor([0] * 7 + [2] * 4)
    folds = stratified_folds(labels, 3, generator(0))
    assert torch.stack(folds).sum(0).tolist() == [1] * 11
    assert all(set(labels[~fold].tolist()) == {0, 2} for fold in folds)
    assert stratified_folds(torch.tensor([0, 0, 1]), 2, generator(0)) == []


def test_where_classes_are_uneven_the_order_of_held_out_rows_counts():
    draw = generator(0)
    scores, labels = torch.randn(90, 3, generator=draw), torch.arange(90) % 9 // 3 % 2
    areas = {code: roc_auc_score(labels == code, scores[:, code]) for code in (0, 1)}
    found = ordered(scores, labels)
    assert {c: found[labels == c].mean().item() for c in areas} == pytest.approx(areas)
    same = ordered(torch.ones(90, 3), labels)  # who always names one class
    assert same.tolist() == [0.5] * 90


def test_each_composition_is_given_once_and_can_be_made():
    specs = [
        spec
        for spec, _ in zip(compositions(["cut", "inputs"], generator(0)), range(300), strict=False)
    ]
    assert len(set(specs)) == 300
    attacks = [ATTACKS.make(spec) for spec in specs]
    assert all(
        one.needs <= {Grant.CUTS, Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED} for one in attacks
    )
    alone = [
        spec for spec, _ in zip(compositions(["inputs"], generator(0)), range(100), strict=False)
    ]
    assert all(Grant.CUTS not in ATTACKS.make(spec).needs for spec in alone)


def test_a_short_search_for_many_rows_still_tries_what_often_won():
    usual, many = (
        list(islice(compositions(["cut", "inputs"], generator(0), many), count))
        for many, count in ((False, 7), (True, 14))
    )
    assert set(usual) < set(many)


def test_shares_are_as_sure_as_guesses_were_right():
    scores = torch.randn(200, 5, generator=generator(0))
    for share in (0.4, 0.7, 0.95):
        found = calibrated(scores, share)
        assert found.max(1).values.mean().item() == pytest.approx(share, abs=1e-3)
        assert torch.equal(found.argmax(1), scores.argmax(1))
