"""The means of a grid against the statistics they are made of."""

import csv
import io

import pytest
from made_records import attacked

from vfl.experiments.results import means_csv


def row(seed, draw, value, scratch=None, *, training="none", k=5):
    baselines = {} if scratch is None else {"scratch": scratch, "raw": 0.25}
    return attacked(training, "logistic", k, seed, value, draw=draw, baselines=baselines)


def read(rows):
    return list(csv.DictReader(io.StringIO(means_csv(rows))))


def test_draws_are_averaged_before_victims():
    rows = [row(0, 0, 0.5, 0.4), row(0, 1, 0.7, 0.4), row(1, 0, 0.9, 0.5)]
    (found,) = read(rows)
    assert (found["mean"], found["repeats"]) == ("0.7500", "2")
    # Victims 0.6 and 0.9: deviation 0.2121 by the root of 2, times Student's 12.706.
    assert float(found["half_width"]) == pytest.approx(12.706 * 0.15, abs=1e-3)
    assert found["over_scratch"] == "0.3000"  # 0.2 and 0.4
    assert (found["baseline_scratch"], found["baseline_raw"]) == ("0.4500", "0.2500")


def test_one_line_for_each_attack_defense_k_and_measure_in_order():
    rows = [row(0, 0, 0.5), row(0, 0, 0.5, k=10), row(0, 0, 0.5, training="layer_norm")]
    assert [(one["training"], one["k"]) for one in read(rows)] == [
        ("none", "5"), ("none", "10"), ("layer_norm", "5"),
    ]  # fmt: skip


def test_a_single_victim_has_no_interval_and_no_baseline_no_column():
    (found,) = read([row(0, 0, 0.5)])
    assert (found["mean"], found["half_width"]) == ("0.5000", "")
    assert "baseline_raw" not in found


def test_a_seed_without_baselines_is_left_out_of_theirs():
    (found,) = read([row(0, 0, 0.5), row(1, 0, 0.9, 0.5), row(2, 0, 0.7, 0.4)])
    assert (found["mean"], found["over_scratch"]) == ("0.7000", "0.3500")
    assert found["baseline_scratch"] == "0.4500"


def test_no_rows_give_a_head_alone():
    assert means_csv([]).startswith("training,adversary,evaluator,subject,k,measure,mean,")
