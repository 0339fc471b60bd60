"""The means of a grid against the statistics they are made of."""

import csv
import io

import pytest

from vfl.experiments.attack_results import means_csv
from vfl.experiments.scores import Row


def row(seed, draw, value, scratch=None, **more):
    baselines = {} if scratch is None else {"scratch": scratch, "raw": 0.25}
    about = {"defense": "none", "attack": "logistic", "k": 5, "measure": "accuracy"} | more
    return Row(
        **about, adversary="none", seed=seed, draw=draw, value=value, scratch=scratch, guess=0.1,
        test_accuracy=0.9, baselines=baselines, threat="somebody", seconds=1.0,
    )  # fmt: skip


def read(rows):
    return list(csv.DictReader(io.StringIO(means_csv(rows))))


def test_draws_are_averaged_before_victims():
    rows = [row(0, 0, 0.5, 0.4), row(0, 1, 0.7, 0.4), row(1, 0, 0.9, 0.5)]
    (found,) = read(rows)
    assert (found["mean"], found["victims"]) == ("0.7500", "2")
    # Victims 0.6 and 0.9: deviation 0.2121 by the root of 2, times Student's 12.706.
    assert float(found["half_width"]) == pytest.approx(12.706 * 0.15, abs=1e-3)
    assert found["over_scratch"] == "0.3000"  # 0.2 and 0.4
    assert found["test_accuracy"] == "0.9000"
    assert (found["baseline_scratch"], found["baseline_raw"]) == ("0.4500", "0.2500")


def test_one_line_for_each_attack_defense_k_and_measure_in_order():
    rows = [row(0, 0, 0.5), row(0, 0, 0.5, k=10), row(0, 0, 0.5, defense="layer_norm")]
    assert [(one["defense"], one["k"]) for one in read(rows)] == [
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
    assert means_csv([]).startswith("defense,adversary,attack,k,")
