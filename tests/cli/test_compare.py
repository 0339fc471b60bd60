"""`vfl compare` from the command line."""

import json
import shlex

import pytest

TINY = """\
name = "tiny"

[data]
rows = 300

[parties.client]
width = 16
bottom = "mlp:hidden=16,last=relu"

[label]
top = "linear"

[train]
epochs = 2
"""
OPTIONS = ("--codec", "none", "--codec", "topk:k=?", "--level", "20", "--seeds", "0,1")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_an_ordinary_experiment_with_options(vfl, well, file, tmp_path):
    plan = well("compare", file, *OPTIONS, "--dry-run")
    assert [line.split()[2:] for line in plan.out.splitlines()[1:3]] == [
        ["none", "seed=0"],
        ["topk:k=2", "at", "20", "%", "seed=0"],
    ]
    some = well("compare", file, *OPTIONS, "--dry-run", "--only", "seed=0")
    assert some.out == "".join(plan.out.splitlines(keepends=True)[:3])
    assert not (tmp_path / "runs").exists()

    part = well("compare", file, *OPTIONS, "--only", "seed=0")
    assert "2 of 4 cells are not trained yet" in part.out

    whole = well("compare", file, *OPTIONS, "--json")
    assert "4 of 4, 100%  topk:k=2 at 20 % seed=1" in whole.err
    assert "none seed=0" not in whole.err
    content = json.loads(whole.out)
    assert [line["repeats"] for line in content["codecs"]] == [2, 2]
    command = json.loads((tmp_path / "runs/tiny/grid.json").read_text())["command"]
    again = vfl(*shlex.split(command)[1:], "--dry-run")
    assert again.out == plan.out
    page = (tmp_path / "runs/tiny/report.html").read_text()
    assert "Accuracy by bytes, at 20 %" in page
    assert '<th scope="row">topk:k=2</th>' in page
    assert page.count("<script") == 1  # it sorts tables
    (tmp_path / "runs/tiny/report.html").unlink()
    well("report", tmp_path / "runs/tiny")
    assert (tmp_path / "runs/tiny/report.html").read_text() == page
    assert content == json.loads((tmp_path / "runs/tiny/results.json").read_text()) | {
        "report": "runs/tiny/report.html",
        "sentence": content["sentence"],
    }
    assert content["sentence"] in page


def test_the_other_commands_do_not_look_at_the_table(well, file):
    file.write_text(TINY + '[compare]\ncodecs = ["topk:k=?"]\nlevels = [20]\nseeds = [0, 1]\n')
    well("train", file, "-s", "train.epochs=1")
    done = well("check", file)
    assert "codec                    none" in done.out
    assert "compared                 topk:k=2" in done.out
    assert "trainings                2" in done.out


def test_check_tells_what_cannot_be_compared(refused, file):
    file.write_text(TINY + '[compare]\ncodecs = ["rate:bits=?"]\nlevels = [20]\n')
    for command in ("check", "compare"):
        done = refused(command, file)
        assert "where tiny.toml:16: compare.codecs" in done.err
        assert "depends on the data" in done.err


def test_a_failed_cell_is_told_at_the_end(refused, file):
    changes = ("optimizer=sgd", "learning_rate=1e6", "weight_decay=1000")
    wild = [word for change in changes for word in ("-s", f"train.{change}")]
    done = refused("compare", file, "--codec", "none", "--seeds", "0", *wild)
    assert "1 of 1 cells failed and are left out" in done.out
    told, *more = done.err.splitlines()[-6:]
    assert told.startswith("failed: none seed=0: ")
    assert [line.split()[0] for line in more] == ["where", "got", "want", "try", "more"]


def test_nothing_to_compare_is_told(refused, file):
    done = refused("compare", file)
    assert "no setting says which codecs are compared" in done.err
