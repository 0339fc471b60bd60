"""`python -m benchmarks.regression`: parties together fit what one place fits."""

from benchmarks.regression import TABLE, bench_regression


def test_a_regression_of_three_parties_stands_beside_one_place():
    rows = bench_regression(2000, columns=6, families=("linear", "logistic"))
    linear, logistic = rows
    assert max(one.coefficient_error for one in rows) < 1e-6
    assert max(one.error_error for one in rows) < 1e-5
    assert linear.helper_bytes < 5000, "masks follow from keys"
    assert logistic.helper_bytes > 3 * 2000 * 9 * 8, "a ring element a cell and step"
    assert len(TABLE(rows).splitlines()) == 3
