"""Other tops on label-free bottoms: what counts as ahead, and once from end to end."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, ttest_1samp

from benchmarks import frontier, frozen_tops
from benchmarks.frontier_tops import NETWORK, TopRow, ahead_of, gains_of

BEST, OTHER = "label_free", "label_free:features=0"


def top_rows(defense, top, values):
    return [TopRow("mnist", defense, seed, top, one) for seed, one in enumerate(values)]


def test_gains_are_over_the_network_on_the_best_bottom():
    """p-values as SciPy computes them; a victim without a network beside it does not count."""
    network, svm = [0.90, 0.91, 0.89, 0.92, 0.90], [0.95, 0.95, 0.95, 0.96, 0.96, 0.5]
    near = [0.91, 0.92, 0.91, 0.93, 0.92]
    given = [
        *top_rows(BEST, NETWORK, network), *top_rows(OTHER, NETWORK, [0.1] * 5),
        *top_rows(BEST, "logistic", near), *top_rows(OTHER, "svm", svm),
    ]  # fmt: skip
    gains = gains_of(given, {"mnist": BEST})
    apart = {"logistic": np.subtract(near, network), "svm": np.subtract(svm[:5], network)}
    assert {top: one.mean for (_, _, top), one in gains.items()} == pytest.approx(
        {top: values.mean() for top, values in apart.items()}
    )
    p = [ttest_1samp(values, 0.01, alternative="greater").pvalue for values in apart.values()]
    shown = [top for top, ok in zip(apart, false_discovery_control(p) <= 0.05, strict=True) if ok]
    assert [top for _, _, top in ahead_of(gains)] == shown == ["svm"]


TINY = """
name = "tiny"
data = { source = "digits", rows = 400, split = "shuffled" }
label.top = "mlp:hidden=16"
train = { epochs = 2, learning_rate = 0.02 }
[parties.client]
width = 8
bottom = "mlp:hidden=8"
[grid]
measure = "accuracy"
defenses = ["none", "label_free:features=0"]
"""


def test_from_a_task_to_its_rows_and_on_where_it_was(monkeypatch, tmp_path):
    (tmp_path / "mnist.toml").write_text(TINY)
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    page, tops = tmp_path / "frontier.md", ["network", "normalised", "logistic", "svm"]

    def run(**more):
        return frozen_tops.bench_tops(
            "mnist", 1, bottoms=["label_free:features=0"], out=tmp_path / "runs", page=page, **more
        )

    first = run(tops=tops[:2])
    assert [one.top for one in first] == tops[:2]
    whole = run(tops=[*tops, "semi_supervised"])
    assert [one.top for one in whole] == [*tops, "semi_supervised"]
    assert [round(one.utility, 4) for one in whole[:2]] == [round(o.utility, 4) for o in first]
    assert min(one.utility for one in whole[2:]) > 0.6
