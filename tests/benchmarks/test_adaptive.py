"""The adaptive attacker beside the heavy pack, on one small victim."""

from benchmarks.adaptive import Compared, table


def test_a_line_a_victim_and_who_was_ahead():
    rows = [
        Compared("potential, seed 0", 5, "kmeans", 80.0, 90.0, 10.0, 4.0, 3.0, 20, "logistic"),
        Compared("dcor, seed 0", 5, "svm", 94.0, 93.0, -1.0, 4.0, 4.5, 30, "svm"),
    ]
    text = table(rows)
    assert "ahead on 1 of 2, above its budget on 1" in text
    assert "+10.0" in text
