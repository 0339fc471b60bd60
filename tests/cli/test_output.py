import pytest

from vfl.cli import output

SUMMARY = {
    "test_accuracy": 0.987654,
    "test_log_loss": 0.00012345,
    "bytes_up": {"bank": 1_500, "shop": 999},
    "bytes_down": {"bank": 2_000_000, "shop": 3},
    "steps_per_second": 12.5,
    "wire_ratio": 0.1234,
    "codec": "topk:k=3",
    "run": "runs/one",
}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_500_000, "1.50 MB"),
        (2_000_000_000, "2.00 GB"),
        (5_000_000_000_000, "5000.00 GB"),
    ],
)
def test_sizes(count, text):
    assert output.size(count) == text


def test_totals_stand_beside_each_party():
    figures = output.machine(SUMMARY)
    assert (figures["bytes_up"], figures["bytes_down"]) == (2_499, 2_000_003)
    assert figures["bytes_by_party"] == {
        "bank": {"up": 1_500, "down": 2_000_000},
        "shop": {"up": 999, "down": 3},
    }
    assert figures["run"] == "runs/one"
    assert SUMMARY["bytes_up"] == {"bank": 1_500, "shop": 999}


def test_what_people_see(capsys):
    output.show(SUMMARY)
    assert capsys.readouterr().out.splitlines() == [
        "test accuracy    0.9877",
        "test log loss    0.0001234",
        "bank             1.50 kB up, 2.00 MB down",
        "shop             999 B up, 3 B down",
        "bytes            12.34% of dense float32 (codec topk:k=3)",
        "steps a second   12.5",
        "run              runs/one",
    ]


def test_a_secure_mode_is_shown_with_whom_it_trusts(capsys):
    output.show(SUMMARY | {"secure": "sum", "trust": "lender learns the sum alone"})
    assert "secure           sum: lender learns the sum alone" in capsys.readouterr().out


def test_an_epoch_is_a_line_of_progress(capsys):
    record = {"epoch": 3, "steps": 12, "train_loss": 0.25, "validation_accuracy": 0.5}
    record |= {"validation_auc": 0.75, "validation_log_loss": 0.5}
    output.say_epoch(record | {"bytes_up": 600, "bytes_down": 400, "seconds": 1.26})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "epoch   3  train loss 0.2500  validation accuracy 0.5000  1.00 kB  1.3 s\n"
