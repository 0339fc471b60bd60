"""Training over a slow link: what is trained between tests, what is reported, and the whole."""

import numpy as np
import pytest

from benchmarks import wan
from benchmarks.emulation import Wan
from benchmarks.wan import (
    TABLE,
    Mark,
    Setup,
    WanJob,
    bench_wan,
    modelled,
    short_epochs,
    wan_experiment,
)
from vfl.config import with_overrides
from vfl.datasets import Dealing, load_bundled
from vfl.session import Terms, rules

DIGITS = {"source": "digits", "batch_size": 50, "epochs": 2}
LINE = Wan(mbps=80, round_trip_ms=40)


@pytest.fixture(scope="module")
def exchanges():
    terms = Terms.of(wan_experiment(**DIGITS), "train", "wan")
    data = load_bundled(
        "digits", ("left", "right"), "label", Dealing(0, validation=0.0), flatten=True
    )["label"]
    return list(short_epochs(terms, data, tests=4)), terms, data


def test_every_epoch_trains_every_row_in_the_order_of_the_session(exchanges):
    found, terms, data = exchanges
    trained = [each.rows for each in found if each.trains]
    asked = [each.rows for each in rules.schedule(terms, data.split) if each.trains]
    assert len(trained) == len(asked)
    assert all(np.array_equal(*pair) for pair in zip(trained, asked, strict=True))
    assert [each.step for each in found] == list(range(len(found)))


def test_all_test_rows_follow_each_quarter(exchanges):
    found, _, data = exchanges
    parts = {each.epoch for each in found}
    assert parts == set(range(1, 9))
    for part in parts:
        own = [each for each in found if each.epoch == part]
        trained = [each for each in own if each.trains]
        tested = own[len(trained) :]
        assert [each.last for each in trained] == [False] * (len(trained) - 1) + [True]
        assert {each.phase for each in tested} == {"test"}
        assert np.array_equal(np.concatenate([each.rows for each in tested]), data.split.test)


class Scripted:
    """Trains in no time: depth 1 reaches the accuracy in 30 s, depth 5 in 10 s, 9 never."""

    def __init__(self):
        self.asked = []

    def __call__(self, job, wan, kind):
        depth = job.experiment.train.in_flight
        self.asked.append((depth, job.tests, wan, kind))
        seconds = {1: 10.0, 5: 10.0 / 3, 9: 1.0}[depth]
        best = 0.96 if depth == 9 else 0.975
        return [
            Mark(exchanges=100 * turn, seconds=seconds * turn, accuracy=accuracy, bytes=want)
            for turn, accuracy in enumerate((0.9, 0.95, best, 0.94), start=1)
            for want in [2_000_000 * turn // 3]
        ]


def test_rows_compare_with_the_first(monkeypatch):
    scripted = Scripted()
    monkeypatch.setattr(wan, "_train", scripted)
    one, five, nine = bench_wan([1, 5, 9], LINE, 0.97, **DIGITS, network="proxy")
    assert scripted.asked == [(depth, 4, LINE, "proxy") for depth in (1, 5, 9)]
    assert (one.exchanges, one.seconds, one.speedup) == (300, 30.0, None)
    assert one.exchanges_per_second == pytest.approx(10)
    assert (five.exchanges, five.seconds) == (300, 10.0)
    assert five.speedup == pytest.approx(3)
    assert (five.best_accuracy, five.final_accuracy) == (0.975, 0.94)
    assert five.accuracies == (0.9, 0.95, 0.975, 0.94)
    assert (nine.exchanges, nine.seconds, nine.speedup) == (None, None, None)
    lines = TABLE([one, five, nine]).splitlines()
    assert lines[2].split() == ["5", "1", "30.0", "300", "2.00", "10.0", "3.0", "0.9750", "0.9400"]
    assert lines[3].split() == ["9", "1", "100.0", "never", "-", "-", "-", "0.9600", "0.9400"]


def computed(in_flight, line=LINE):
    experiment = wan_experiment(**DIGITS | {"epochs": 1})
    experiment = with_overrides(experiment, [f"train.in_flight={in_flight}"])
    job = WanJob(party="label", experiment=experiment, tests=1, rows=400, wan=str(line))
    (mark,) = modelled(Setup(job)).marks
    return mark


def test_computed_lines_take_exactly_the_bytes_and_the_delay():
    """Two halves of 32 units, 50 rows: 6,416 bytes each way; the label party sends two of them."""
    mark = computed(in_flight=1)
    frame_s = (16 + 4 * 32 * 50) * 8 / 80e6
    last_s = (16 + 4 * 32 * (mark_rows(mark) % 50 or 50)) * 8 / 80e6
    steps = mark.exchanges
    # A step awaits its gradients: the second party's leaves behind the first one's.
    assert mark.seconds == pytest.approx((steps - 1) * (0.04 + 3 * frame_s) + 0.02 + last_s)
    assert computed(in_flight=1) == mark


def mark_rows(mark):
    data = load_bundled(
        "digits", ("left", "right"), "label", Dealing(0, validation=0.0, limit=400), flatten=True
    )
    rows = len(data["label"].split.train)
    assert mark.exchanges == -(-rows // 50)
    return rows


def test_computed_lines_show_what_cuts_in_flight_gain():
    """The last of seven cuts waits for the third gradient: one round trip and a half, not six."""
    one, four = computed(in_flight=1), computed(in_flight=4)
    assert one.exchanges == four.exchanges == 7
    assert one.seconds > 6.5 * 0.040
    assert 1.5 * 0.040 < four.seconds < 2 * 0.040


def test_local_steps_cost_no_byte_and_no_wait():
    """The line carries the same for one exchange, whatever parties do between two."""
    experiment = wan_experiment(**DIGITS | {"epochs": 1})
    found = []
    for steps in (1, 4):
        asked = with_overrides(experiment, [f"train.local_steps={steps}"])
        job = WanJob(party="label", experiment=asked, tests=1, rows=400, wan=str(LINE))
        found += modelled(Setup(job)).marks
    one, four = found
    frames = 2 * 2 * one.exchanges * 16
    assert one.bytes == four.bytes == frames + 2 * 2 * 4 * 32 * mark_rows(one)
    assert one.seconds == four.seconds
    assert one.accuracy != four.accuracy


@pytest.mark.net
def test_several_cuts_in_flight_hide_the_delay():
    line = Wan(mbps=80, round_trip_ms=30)
    one, four = bench_wan([1, 4], line, 0.5, **DIGITS, tests=2, network="proxy")
    assert one.exchanges_per_second < 1000 / 30  # no more than one a round trip
    assert four.speedup > 1.5
    assert four.exchanges_per_second > 1.5 * one.exchanges_per_second
    assert abs(one.final_accuracy - four.final_accuracy) < 0.1
