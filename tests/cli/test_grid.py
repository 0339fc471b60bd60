"""`vfl grid` and `vfl attack` from the command line."""

import json
import shlex
import shutil

import pytest

from vfl.config import read_experiment
from vfl.experiments import attack_runner
from vfl.experiments.pages import build_report
from vfl.training.run import train

TINY = """\
name = "tiny"
data.rows = 400
train.epochs = 2
label.top = "linear"

[parties.client]
width = 8
bottom = "mlp:hidden=16"
"""
OPTIONS = (
    "--defense", "layer_norm", "--attack", "kmeans:starts=1", "--attack", "fine_tuning:steps=9",
    "--leaks", "1,2", "--draws", "1", "--seeds", "0", "-s", "grid.baselines=scratch",
    "-s", "grid.pictures=0",
)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_an_ordinary_experiment_with_options(vfl, well, file, tmp_path, monkeypatch):
    plan = vfl("grid", file, *OPTIONS, "--dry-run")
    assert plan.out.splitlines() == ["baselines seed=0", "none seed=0", "layer_norm seed=0"]
    assert not (tmp_path / "runs").exists()

    done = well("grid", file, *OPTIONS, "--json")
    assert "3 of 3, 100%  layer_norm seed=0" in done.err
    assert "left" in done.err
    rows = json.loads(done.out)["rows"]
    assert len(rows) == 6 * 4  # measures
    wanted = {"training", "subject", "k", "value", "baselines", "guess", "no_model"}
    assert all(wanted <= set(row) for row in rows)

    command = json.loads((tmp_path / "runs/tiny/grid.json").read_text())["command"]
    monkeypatch.setattr(attack_runner, "run_attack", None)
    again = well(*shlex.split(command)[1:])
    assert "| layer_norm " in again.out
    assert "| none " in again.out
    page = (tmp_path / "runs/tiny/report.html").read_text()
    assert "Leaderboard" in page
    assert page.count("<script") == 1  # it sorts tables
    (tmp_path / "runs/tiny/report.html").unlink()
    well("report", tmp_path / "runs/tiny")
    assert (tmp_path / "runs/tiny/report.html").read_text() == page


@pytest.mark.parametrize("defenses", ["[]", '["layer_norm"]'])
def test_codecs_without_a_defense(vfl, file, defenses):
    """The codecs of a file that lists defenses can be attacked alone."""
    file.write_text(f"{TINY}[grid]\ndefenses = {defenses}\nseeds = [0]\n")
    words = ("--codec", "quantise:values=2", "-s", "grid.defenses=[]", "--dry-run")
    plan = vfl("grid", file, *words)
    assert (plan.code, plan.out.splitlines()) == (
        0, ["baselines seed=0", "none seed=0", "quantise:values=2 seed=0"],
    )  # fmt: skip


def test_the_quick_profile(vfl, well, refused):
    plan = well("grid", "quick", "--dry-run")
    assert plan.out.splitlines()[:3] == ["baselines seed=0", "none seed=0", "layer_norm seed=0"]
    refused("grid", "slow", "--dry-run")
    assert "grid.draws" in vfl("grid", "quick", "--draws", "0", "--dry-run").err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TINY)
    train(read_experiment(folder / "tiny.toml"), folder, "tiny")
    build_report(folder / "tiny")
    return folder / "tiny"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "tiny")
    return tmp_path / "runs" / "tiny"


def test_one_run_is_attacked(vfl, well, run, monkeypatch):
    assert "no attack was scored" in (run / "report.html").read_text()
    words = ("attack", run, "--attack", "kmeans:starts=1", "--leaks", "1", "--draws", "1",
             "-s", "baselines=raw")  # fmt: skip
    done = well(*words, "--attack", "fine_tuning:steps=9")
    assert "| fine_tuning:steps=9 | 1 | 1     | accuracy" in done.out
    sentence = "A semi-honest feature party, alone, in the inference phase, holding the cuts"
    assert sentence in done.out
    page = (run / "report.html").read_text()
    assert sentence in page
    assert "no attack was scored" not in page

    monkeypatch.setattr(attack_runner, "run_attack", None)
    again = vfl(*words, "--json")
    row, *others = json.loads(again.out)
    assert [one["measure"] for one in others] == [
        "matched_balanced_accuracy", "matched_auc", "matched_average_precision",
    ]  # fmt: skip
    assert (row["subject"], row["k"], row["measure"]) == ("kmeans:starts=1", 0, "matched_accuracy")
    assert row["baselines"]["scratch"] == row["baselines"]["raw"]
    assert "fine_tuning:steps=9" in (run / "report.html").read_text()  # of the call before


def test_what_cannot_be_attacked(vfl, refused, run):
    assert (
        "no attack is called 'fine_tunning'" in vfl("attack", run, "--attack", "fine_tunning").err
    )
    assert "no feature party has that name" in vfl("attack", run, "--party", "label").err
    wrong = refused("attack", run, "--leaks", "one")
    assert "a list of whole numbers" in wrong.err
    assert "no setting is called 'leak_from'" in vfl("attack", run, "-s", "leak_from=test").err
    (run / "summary.json").unlink()
    assert "this run has not ended" in vfl("attack", run).err


def test_check_says_what_would_be_attacked(well, refused, file):
    table = '[grid]\ndefenses = ["layer_norm"]\nattacks = ["thesis"]\nseeds = [0, 1]\n'
    table += "leaks = [1, 2, 5, 10, 20]\n"
    file.write_text(TINY + table)
    done = well("check", file)
    assert "attacked                 none layer_norm" in done.out
    assert "victims                  4" in done.out
    assert "attacks each             26" in done.out  # five leaks, five draws, and k-means

    file.write_text(TINY + '[grid]\ndefenses = ["layer_nrom"]\nattacks = ["kmean"]\nleaks = [0]\n')
    for command in ("check", "grid"):
        done = refused(command, file)
        assert "3 problems in tiny.toml" in done.err
        assert "tiny.toml:10: grid.defenses: layer_nrom: no defense is called" in done.err
        assert "tiny.toml:11: grid.attacks: kmean: no attack is called" in done.err
        assert "tiny.toml:12: grid.leaks" in done.err


def test_parties_that_tamper_are_listed_and_counted(vfl, file):
    words = ("--adversary", "noisy_labels", "--adversary", "malicious_optimizer", "--seeds", "0")
    plan = vfl("grid", file, *words, "--dry-run")
    assert plan.out.splitlines() == [
        "baselines seed=0", "none seed=0", "none against noisy_labels seed=0",
        "none against malicious_optimizer seed=0",
    ]  # fmt: skip
    file.write_text(TINY + '[grid]\nadversaries = ["noisy_labels"]\nseeds = [0]\nleaks = [1]\n')
    done = vfl("check", file)
    assert "adversaries              noisy_labels" in done.out
    assert "victims                  2" in done.out


def test_nothing_to_attack(refused, file):
    done = refused("grid", file)
    assert "a table [grid] with defenses and attacks" in done.err
