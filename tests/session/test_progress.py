"""How far a session is, against a count of its schedule and a clock that the test moves."""

import numpy as np
import pytest

from vfl.config import Experiment
from vfl.datasets import Split
from vfl.session import rules
from vfl.session.progress import AlignmentProgress, SessionProgress, WaitingFor, exchanges_of
from vfl.session.terms import Terms

TRAIN, VALIDATION, TEST = 90, 1100, 2500
DP = {"delta": 1e-3, "clip": 1.0}


def split():
    rows = np.arange(TRAIN + VALIDATION + TEST)
    return Split(*np.split(rows, [TRAIN, TRAIN + VALIDATION]))


def terms(mode="train", dp=None):
    content = {
        "data": {"validation": 0.2, "test": 0.2},
        "parties": {"bank": {"width": 2}},
        "label": {"party": "lender"},
        "train": {"epochs": 3, "batch_size": 8},
    }
    agreed = Terms.of(Experiment.model_validate(content), mode, "one")
    return Terms.model_validate(agreed.model_dump() | {"dp": dp})


class Clock:
    """A step takes as long as the test says."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def watched(exchanges, seconds, agreed=None):
    """Everything that is told while each exchange takes so many seconds."""
    clock, told = Clock(), []
    progress = SessionProgress(agreed or terms(), split(), told.append, clock)
    passed = []
    for exchange in progress.through(exchanges):
        passed.append(exchange)
        clock.now += seconds
    assert passed == exchanges
    return told


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("dp", [None, DP | {"noise": 1.0}, DP | {"epsilon": 2.0, "noise": 2.0}])
def test_the_total_is_that_of_the_schedule(mode, dp):
    agreed = terms(mode, dp)
    assert exchanges_of(agreed, split()) == len(list(rules.schedule(agreed, split())))


def test_the_epochs_are_those_that_the_privacy_budget_allows():
    agreed = terms(dp=DP | {"epsilon": 0.6, "noise": 2.0})
    exchanges = list(rules.schedule(agreed, split()))
    last = watched(exchanges, seconds=0.5, agreed=agreed)[-1]
    assert last.epochs == exchanges[-1].epoch < agreed.train.epochs


def test_rates_and_time_left_follow_from_the_clock():
    exchanges = list(rules.schedule(terms(), split()))
    told = watched(exchanges, seconds=0.5)
    middle = told[10]
    assert middle.done == 20
    assert middle.total == len(exchanges)
    assert middle.epoch == exchanges[20].epoch
    assert middle.epochs == 3
    assert middle.per_second == pytest.approx(2.0)
    counted = sum(len(one.rows) for one in exchanges[2:20])
    assert middle.rows_per_second == pytest.approx(counted / 9.0)
    assert middle.left_s == pytest.approx((len(exchanges) - 20) * 0.5)


def test_a_report_a_second_at_most_and_one_at_the_end():
    exchanges = list(rules.schedule(terms(), split()))
    told = watched(exchanges, seconds=0.01)
    assert len(told) == 2 + int(0.01 * (len(exchanges) - 1))
    assert [report.is_over for report in told] == [False] * (len(told) - 1) + [True]
    assert told[0].left_s is None
    assert told[-1].share == 1.0


def test_a_resumed_training_begins_where_it_was():
    exchanges = list(rules.schedule(terms(), split(), 20))
    first, second = watched(exchanges, seconds=2.0)[:2]
    assert (first.done, second.done) == (20, 21)
    assert second.per_second == pytest.approx(0.5)


def test_who_is_waited_for_is_told_once():
    told = []
    waits = WaitingFor("train", told.append)
    for parties in (["bank", "shop"], ["bank", "shop"], ["shop"], [], ["shop"]):
        waits(parties)
    assert [one.waits_for for one in told] == [("bank", "shop"), ("shop",), ("shop",)]
    assert told[0].share is None


def test_an_alignment_counts_bytes_and_has_no_total():
    clock, told = Clock(), []
    progress = AlignmentProgress(told.append, clock)
    for _ in range(10):
        clock.now += 0.25
        progress.add(100)
    assert [report.done for report in told] == [100, 500, 900]
    assert told[-1].per_second == pytest.approx(400.0)
    assert {report.share for report in told} == {None}
