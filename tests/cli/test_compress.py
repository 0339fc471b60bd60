"""`vfl compress`: lists for machines, a table for people, mistakes, and a trace end to end."""

import csv
import json

import numpy as np
import pytest

FIGURES = {
    *("codec", "untrained", "rows", "width", "batch_size", "wire_bytes", "dense_bytes"),
    *("formula_ratio", "wire_ratio", "entropy_bound_bytes", "relative_error"),
    *("encode_ms", "decode_ms"),
}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "cut.npy"
    np.save(path, np.random.default_rng(0).normal(size=(300, 128)))
    return path


def test_a_list_for_machines_in_the_order_asked(well, saved):
    specs = ["topk:k=3,values=8", "none", "size:k=2"]
    done = well(
        "compress", saved, "--json", *(word for spec in specs for word in ("--codec", spec))
    )
    rows = json.loads(done.out)
    assert [row["codec"] for row in rows] == specs
    assert all(set(row) == FIGURES for row in rows)
    frames = [16 + 4 + 256 * 43 // 8, 16 + 4 + -(-44 * 43 // 8)]
    assert rows[0]["wire_bytes"] == sum(frames)
    assert rows[0]["wire_ratio"] == sum(frames) / (4 * 300 * 128)
    assert [row["relative_error"] for row in rows[1:]] == [0, None]
    assert done.err.splitlines() == [f"measuring {spec}" for spec in specs]


def test_a_table_for_people(vfl, saved):
    done = vfl("compress", saved, "--batch-size", 100)
    about, head, *lines, _ = done.out.splitlines()
    assert about == "300 rows of 128, 153.60 kB as float32, in 3 frames"
    assert head.split()[0] == "codec"
    assert [line.split()[0] for line in lines[:3]] == ["none", "topk:k=3", "topk:k=3,values=8"]
    assert len(lines) == 10


def test_all_wrong_specs_are_told_before_anything_is_measured(vfl, saved):
    wrong = ["topkk:k=3", "topk:k=200", "quantise:vals=4", "none"]
    done = vfl("compress", saved, *(word for spec in wrong for word in ("--codec", spec)))
    assert (done.code, done.out) == (2, "")
    assert "3 problems" in done.err
    assert "--codec topkk:k=3: no codec is called 'topkk'; did you mean 'topk'?" in done.err
    assert "--codec topk:k=200: top-k keeps 200 values" in done.err
    assert "did you mean 'values'?" in done.err
    assert "measuring" not in done.err
    alone = vfl("compress", saved, "--codec", "topkk:k=3")
    assert "error[V101]" in alone.err
    assert "  where --codec topkk:k=3\n" in alone.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cuts.npy",), "did you mean 'cut.npy'?"),
        (("cut.npy", "--batch-size", "0"), "0 is not in the range"),
        (("cut.npy", "--party", "bank"), "--party is for a trace"),
        (("cut.npy", "--array", "a"), "leave --array out"),
        ((".", "--array", "a"), "--array is for an .npz file"),
        ((".",), "this folder contains no trace"),
    ],
)
def test_mistakes(vfl, saved, arguments, told):
    done = vfl("compress", *arguments)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_a_trace_gives_what_the_training_counted(vfl, refused, loans, tmp_path):
    codec = "topk:k=2,values=8,packer=range"  # which adapts to what it has packed
    settings = ("-s", f"codec={codec}", "-s", "trace.phases=train", "-s", "train.batch_size=35")
    run = tmp_path / json.loads(vfl("train", loans, "--json", *settings).out)["run"]
    with (run / "traffic.csv").open() as file:
        (counted,) = (
            int(row["wire_bytes"])
            for row in csv.DictReader(file)
            if (row["party"], row["direction"], row["phase"]) == ("bank", "up", "train")
        )
    own, label = run / "parties" / "bank", run / "parties" / "lender" / "trace"
    for arguments in ((own,), (own / "trace",), (label, "--party", "bank")):
        done = vfl("compress", *arguments, "--codec", codec, "--json")
        (row,) = json.loads(done.out)
        assert row["wire_bytes"] == counted
        assert (row["batch_size"], row["width"]) == (35, 4)
        assert "include this codec's error" in done.err
    done = refused("compress", label, "--codec", codec)
    assert "bank, shop" in done.err
