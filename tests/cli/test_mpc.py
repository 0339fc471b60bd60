"""`vfl mpc`: train and infer for people and for machines, and mistakes."""

import json
import stat

import pytest

from vfl.core.errors import LostPeerError
from vfl.triple import run


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_train_and_infer_for_machines(vfl, loans, mode):
    words = ("--in-process", "--json")
    done = vfl("mpc", "train", loans, "--mode", mode, "--hidden", "4", "--out", "run", *words)
    assert done.code == 0, done.err
    card = json.loads(done.out)
    assert card["mode"] == mode
    assert card["parties"] == {"P0": "bank", "P1": "shop", "P2": "lender"}
    assert {"test_accuracy", "bytes_online", "leakage", "run"} <= set(card)
    assert len(done.err.splitlines()) == 3
    again = vfl("mpc", "infer", "run", *words)
    assert json.loads(again.out)["test_accuracy"] == card["test_accuracy"]


@pytest.mark.parametrize(("words", "reveals"), [((), 1), (("--test-every-epoch",), 3)])
def test_epochs_are_told_with_the_figures_that_were_revealed(vfl, loans, words, reveals):
    done = vfl("mpc", "train", loans, "--in-process", "--json", "--out", "run", *words)
    lines = done.err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1", "epoch 2", "epoch 3"]
    assert sum("accuracy" in line for line in lines) == reveals
    assert "accuracy" in lines[-1]
    assert len(json.loads(done.out)["history"]) == reveals


def test_what_people_read(vfl, loans):
    done = vfl("mpc", "train", loans, "--in-process", "--out", "run")
    lines = done.out.splitlines()
    assert lines[2].split(maxsplit=1) == ["P2", "lender (deals, sees permuted sums, the labels)"]
    assert any(line.startswith("P2 saw") and "layer 0" in line for line in lines)
    assert lines[-1].split() == ["run", "run"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mode", "quick"], "V103"),
        (["--hidden", "4,x"], "--hidden"),
        (["--learning-rate", "-1"], "V103"),
        (["-s", "train.batch_rows=5000"], "V103"),
        (["--least-permuted", "0"], "V103"),
        (["--bits", "28", "--magnitude-bits", "8"], "V103"),
    ],
)
def test_mistakes(vfl, loans, words, told):
    done = vfl("mpc", "train", loans, "--in-process", "--out", "run", *words)
    assert done.code == 2
    assert told in done.err
    assert not (loans.parent / "run").exists()


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e9"])
@pytest.mark.parametrize("option", ["timeout-s", "join-s"])
@pytest.mark.parametrize(
    "words",
    [("train", "loans.toml"), ("infer", "run"), ("party", "loans.toml", "--as", "P1")],
)
def test_a_wait_that_is_none_is_refused(vfl, loans, words, option, seconds):
    loans.rename(loans.with_name("loans.toml"))
    done = vfl("mpc", *words, f"--{option}={seconds}")
    assert done.code == 2
    assert "V103" in done.err
    assert f"option '{option.replace('-', '_')}'" in done.err
    assert "bug" not in done.err


def test_a_folder_that_is_no_private_run(vfl, tmp_path):
    done = vfl("mpc", "infer", tmp_path)
    assert done.code == 2
    assert "V007" in done.err


@pytest.mark.parametrize(("words", "join_s"), [((), 120.0), (("--join-s", "7"), 7.0)])
def test_how_long_tables_may_take_to_load(vfl, loans, monkeypatch, words, join_s):
    asked = []

    def crew(jobs):
        asked.extend(job.join_s for job in jobs)
        raise LostPeerError("nobody came")

    vfl("mpc", "train", loans, "--in-process", "--out", "kept")
    monkeypatch.setattr(run, "Crew", crew)
    vfl("mpc", "train", loans, "--out", "run", *words)
    vfl("mpc", "infer", "kept", *words)
    assert asked == [join_s] * 6


def test_rules_from_the_command_line(vfl, loans):
    words = ("--flips", "--least-permuted", "64", "--bits", "20", "--delta-bits", "12")
    more = ("--mode", "thesis", "--magnitude-bits", "9", "--in-process", "--json")
    done = vfl("mpc", "train", loans, *words, *more, "--out", "run")
    plan = json.loads(done.out)["plan"]
    rules = {"mode": "thesis", "bits": 20, "magnitude_bits": 9, "delta_bits": 12}
    assert plan | rules | {"least_permuted": 64, "flips": True} == plan
    asked = json.loads(vfl("mpc", "infer", "run", *more[-2:]).out)["plan"]
    assert asked | {"task": "train"} == plan
    plan = json.loads(vfl("mpc", "train", loans, "--no-flips", *more[-2:], "--out", "two").out)[
        "plan"
    ]
    assert (plan["mode"], plan["flips"], plan["least_permuted"]) == ("fast", False, 32)


def test_a_folder_that_is_there_already(vfl, loans, tmp_path):
    (tmp_path / "run").mkdir()
    done = vfl("mpc", "train", loans, "--in-process", "--out", "run")
    assert done.code == 2
    assert "V007" in done.err
    assert "--out" in done.err.partition("try")[2]
    assert not list((tmp_path / "run").iterdir())


def test_invitations(vfl, loans, tmp_path):
    done = vfl("mpc", "invite", "door", "--as", "P2", "--address", "lender.example:7000")
    names = ["door.json", "P2-for-P0.json", "P2-for-P1.json"]
    assert done.out.split() == [f"door/{name}" for name in names]
    files = [tmp_path / "door" / name for name in names]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    door, first, second = (json.loads(path.read_text()) for path in files)
    assert (first["host"], first["port"], first["caller"]) == ("lender.example", 7000, 0)
    assert first["token"] != second["token"]
    assert "key_pem" not in first
    assert first["ca_pem"] == door["ca_pem"]
    again = vfl("mpc", "invite", "door", "--as", "P2", "--address", "lender.example:7000")
    assert again.code == 2
    assert "never overwritten" in again.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--as", "P0"), "no way to P2"),
        (("--as", "bank", "--invitation", "P2-for-P0.json"), "has no door"),
        (("--as", "P1", "--invitation", "P2-for-P0.json"), "for another party"),
        (("--as", "P2", "--door", "P2-for-P0.json"), "no door"),
        (("--as", "bunk"), "bank"),
        (("--as", "P0", "--invitation", "gone.json"), "no invitation here"),
        (("--as", "P2", "--listen", "7000"), "HOST:PORT"),
    ],
)
def test_a_party_without_its_files(vfl, loans, tmp_path, words, told):
    vfl("mpc", "invite", ".", "--as", "P2", "--address", "127.0.0.1:7000")
    done = vfl("mpc", "party", loans, *words)
    assert done.code == 2
    assert told in done.err
    assert json.loads((tmp_path / "P2-for-P0.json").read_text())["token"] not in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "rows",
    [("new.csv", "more.csv"), ("bank=a.csv", "bank=b.csv"), ("bank=a.csv", "b.csv"), ("bank=",)],
)
def test_tables_of_new_rows_that_cannot_be_told_apart(vfl, rows):
    done = vfl("mpc", "predict", "run", *(word for each in rows for word in ("--rows", each)))
    assert done.code == 2
    assert "--rows" in done.err


def test_new_rows_of_one_table(vfl, loans):
    vfl("mpc", "train", loans, "--in-process", "--out", "run")
    done = vfl("mpc", "predict", "run", "--rows", "loans.csv", "--in-process")
    assert done.code == 0, done.err
    assert "200 rows in run/P2/predictions.csv" in done.out
