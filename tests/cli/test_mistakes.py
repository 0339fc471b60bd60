"""What goes wrong, its exit code, and that no message holds a cell, an id or a Python traceback."""

import shutil

import numpy as np
import pandas as pd
import pytest

from vfl.core.errors import LostPeerError, MissingPartyError, PeerError
from vfl.experiments import plan
from vfl.training import federated, run

SECRET = "Zq8sentinel"
NUMBER = "918273645"


def mistake(done):
    """What a user's mistake printed."""
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error[V")
    assert done.err.splitlines()[-1] == f"  more  vfl explain {done.err[6:10]}"
    assert "Traceback" not in done.err
    return done.err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("codec=topkk:k=3", "did you mean 'topk'?"),
        ("codec=topk:k=17", "k <= 16"),
        ("train.epoch=3", "did you mean 'epochs'?"),
        ("epochs", "an override is key.path=value"),
        ("data.source=breastcancer", "did you mean 'breast_cancer'?"),
        ("data.source=absent.csv", "a table needs 'label.column'"),
        ("data.test=0.0001", "no row is left for test"),
        ("parties.radiology.columns=['a']", "is for tables"),
        ("data.bins=8", "'data.bins' is for tables"),
    ],
)
def test_an_experiment_that_cannot_run(vfl, tmp_path, breast_cancer, setting, told):
    command = "check" if setting.startswith("parties") else "train"
    assert told in mistake(vfl(command, breast_cancer, "-s", setting))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("parties.bank.columns=['incomes']", "did you mean 'income'?"),
        ("data.source=absent.csv", "there is no such table"),
        ("label.task=regression", "paid"),
    ],
)
def test_tables_that_do_not_fit(vfl, tmp_path, loans, setting, told):
    command = "check" if setting.startswith("parties") else "train"
    assert told in mistake(vfl(command, loans, "-s", setting))
    assert not (tmp_path / "runs").exists()


def test_a_tables_mistake_names_file_and_line(vfl, loans):
    loans.write_text(loans.read_text().replace('["debt"]', '["debts"]'))
    assert "  where loans.toml:15: parties.shop.columns\n" in mistake(vfl("check", loans))


PARTY_FILES = """data.source = "lender.toml"
[parties.bank]
source = "bank.toml"
[parties.shop]
source = "shop.toml"
[parties.lender]
source = "lender.toml"
[label]
party = "lender"
column = "paid"
"""


@pytest.mark.parametrize("model", ["tree", "trees:max_depth=400"])
def test_a_model_of_the_command_line_is_not_called_a_secure_mode(vfl, breast_cancer, model):
    told = mistake(vfl("check", breast_cancer, "-s", "secure=none", "-s", f"model={model}"))
    assert ": model" in told
    assert "secure" not in told


def test_a_column_that_a_party_file_names_is_sought_there(vfl, loans, tmp_path):
    own = tmp_path / "bank.toml"
    text = 'party = "bank"\n[data]\nsource = "loans.csv"\nid = "customer"\ncolumns = ["incomes"]\n'
    own.write_text(text)
    shop = tmp_path / "shop.toml"
    shop.write_text(text.replace("bank", "shop").replace("incomes", "debt"))
    lender = text.replace("bank", "lender").replace("incomes", "town") + 'label = "paid"\n'
    (tmp_path / "lender.toml").write_text(lender)
    trial = tmp_path / "trial.toml"
    trial.write_text(PARTY_FILES)
    told = mistake(vfl("check", trial))
    assert "  where trial.toml:3: parties.bank.source\n" in told
    assert "did you mean 'income'?" in told


def test_a_partys_own_mistake_names_its_own_file_and_line(vfl, tmp_path, table):
    path = tmp_path / "party.toml"
    path.write_text('party = "bank"\n[data]\nsource = "loans.csv"\nid = "custome"\n')
    told = mistake(vfl("check", path))
    assert "  where party.toml:4: data.id\n" in told
    assert "did you mean 'customer'?" in told


@pytest.mark.parametrize("setting", ["train.epoch=3", "codec=topk:k=33", "label.top=mlpp"])
def test_a_project_is_checked_before_it_is_submitted(vfl, bank_project, monkeypatch, setting):
    monkeypatch.setattr(federated, "run_session", lambda *arguments, **options: 1 / 0)
    mistake(vfl("train", "project", "-s", setting))


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (("--device", "cuda"), "each party's own file has this setting"),
        (("--runs", "here"), "each party's own file names its store"),
        (("--download",), "a party's own table is not downloaded"),
    ],
)
def test_a_projects_parties_decide_what_an_experiment_file_is_told(vfl, bank_project, option, why):
    done = vfl("train", "project", *option)
    assert done.code == 2
    assert f"{option[0]}: {why}" in " ".join(done.err.split())


def test_only_a_project_is_simulated_and_only_with_every_folder(vfl, bank_project, breast_cancer):
    done = vfl("train", breast_cancer, "--engine", "simulation")
    assert done.code == 2
    assert "--engine: only a project has an engine" in done.err
    shutil.rmtree(bank_project / "bank")
    told = mistake(vfl("train", "project", "--engine", "simulation"))
    assert "the file of one party is not on this machine" in told
    assert f"  where {bank_project / 'bank' / 'party.toml'}\n" in told


@pytest.mark.parametrize("command", ["check", "train"])
def test_files_that_are_not_there(vfl, tmp_path, command):
    assert "this file does not exist" in mistake(vfl(command, "absent.toml"))
    (tmp_path / "empty").mkdir()
    assert "this is not a project" in mistake(vfl(command, "empty"))


def test_a_folder_that_cannot_be_written(vfl, tmp_path, breast_cancer):
    (tmp_path / "taken").write_text("a file")
    told = mistake(vfl("train", breast_cancer, "--runs", "taken", "-s", "train.epochs=1"))
    assert "taken" in told
    assert "Not a directory" in told
    assert "not empty" in mistake(vfl("init", ".", "--party", "bank"))
    assert "name too long" in mistake(vfl("check", "long" * 100 + ".toml"))


@pytest.mark.parametrize(
    "error",
    [
        MissingPartyError("no SuperNode of bank is online", fix="start it"),
        LostPeerError("party 'bank' went away"),
        PeerError("party 'bank' refused", got="width 300", want="width <= 256"),
    ],
)
def test_another_party_is_exit_code_3(vfl, bank_project, tmp_path, monkeypatch, error):

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(federated, "run_session", fail)
    done = vfl("train", "project", "--json")
    assert done.code == 3
    assert done.out == ""
    assert done.err.endswith(f"{error}\n")


def test_an_interruption_leaves_the_federations_run_alone_and_says_so(
    vfl, bank_project, monkeypatch
):

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(federated, "run_session", interrupt)
    done = vfl("train", "project")
    assert done.code == 130
    assert "continues the run in " in done.err
    assert "project/label/store/runs/" in done.err


def test_an_interruption_is_exit_code_130(vfl, breast_cancer, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupt)
    done = vfl("train", breast_cancer)
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err
    assert f"vfl train {breast_cancer} --resume runs/" in done.err


def test_a_bug_of_ours_is_exit_code_1_and_quotes_no_cell(vfl, breast_cancer, monkeypatch):
    def misbehave(*arguments, **options):
        cell = SECRET
        raise ValueError(f"could not convert {cell!r}")

    monkeypatch.setattr(plan, "of_experiment", misbehave)
    done = vfl("check", breast_cancer)
    assert done.code == 1
    assert "a bug of vfl" in done.err
    assert "ValueError" in done.err
    assert "misbehave" in done.err
    assert SECRET not in done.err + done.out


def leaks(text):
    return SECRET in text or NUMBER in text


def rows(count=60):
    draw = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "customer": [f"{SECRET}{number:02d}" for number in range(count)],
            "income": draw.normal(size=count),
            "debt": [f"{NUMBER}.{number}" for number in range(count)],
            "town": draw.choice([f"{SECRET}a", f"{SECRET}b"], count),
            "paid": draw.choice([f"{SECRET}yes", f"{SECRET}no"], count),
        }
    )


FAILURES = {
    "an id twice": lambda table: table.assign(customer=f"{SECRET}00"),
    "no id": lambda table: table.assign(customer=[None, *table["customer"][1:]]),
    "one class": lambda table: table.assign(paid=f"{SECRET}yes"),
    "no label": lambda table: table.assign(paid=[None, *table["paid"][1:]]),
    "infinite": lambda table: table.assign(income=[float("inf"), *table["income"][1:]]),
    "too many words": lambda table: table.assign(town=[f"{SECRET}{n}" for n in range(len(table))]),
    "few rows": lambda table: table.head(2),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_no_cell_and_no_id_of_a_failing_run_is_shown(refused, tmp_path, loans, failure):
    table = FAILURES[failure](rows(400 if failure == "too many words" else 60))
    table.to_csv(tmp_path / "loans.csv", index=False)
    for command in ("check", "train"):
        done = refused(command, loans, "-s", "train.epochs=1")
        assert not leaks(done.out + done.err)
        if failure == "infinite":
            assert "  where party 'bank'\n" in done.err


def test_no_cell_and_no_id_is_shown_when_all_goes_well(vfl, tmp_path, loans):
    rows().to_csv(tmp_path / "loans.csv", index=False)
    said = []
    for command in ("check", "train"):
        said.append(vfl(command, loans, "-s", "train.epochs=1"))
    (folder,) = (tmp_path / "runs").iterdir()
    for command in ("evaluate", "predict", "report"):
        said.append(vfl(command, folder))
    assert [done.code for done in said] == [0] * 5
    assert not any(leaks(done.out + done.err) for done in said)
    assert not leaks((folder / "report.html").read_text())
    owned = ("predictions.csv", "encoder.json", "party.json")  # ids, categories, classes
    told = [path for path in folder.rglob("*") if path.is_file() and path.name not in owned]
    assert [path.name for path in told if leaks(path.read_text(errors="replace"))] == []
