"""The mistakes newcomers make, in one table: each message names the cause and the cure."""

import json
import os
import re
import socket

import numpy as np
import pandas as pd
import pytest

from vfl import VFLClassifier, VFLRegressor
from vfl.cli import training
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import LostPeerError, UserError
from vfl.core.processes import Service
from vfl.core.traffic import Ledger
from vfl.federation import programs
from vfl.transport.stream import listen

ROWS = 120


@pytest.fixture
def rows(table):
    return table.head(ROWS).reset_index(drop=True)


def digits_of(count, form):
    return [form.format(number) for number in range(count)]


def cells(column):
    return lambda table: table.assign(income=column)


#: What is wrong with the table, and what `vfl check` says of it: cause and cure.
DOUBTED = {
    "a question mark among numbers": (
        cells([*digits_of(ROWS - 60, "{}.5"), *["?"] * 60]),
        ["'income' of bank is read as categories", "are numbers", 'missing = ["?"]'],
    ),
    "a decimal comma": (
        cells([f"{number % 7},5" for number in range(ROWS)]),
        ["'income' of bank is read as categories", "decimal comma", 'decimal = ","'],
    ),
    "a date as text": (
        cells([f"2024-0{number % 9 + 1}-11" for number in range(ROWS)]),
        ["'income' of bank is read as categories", "dates", 'dates = { income = "%Y-%m-%d" }'],
    ),
    "six rows": (
        lambda table: table.iloc[:6].assign(paid=["yes", "no"] * 3),
        ["1 test and 4 training rows", "chance", "add rows"],
    ),
    "a feature that is the label": (
        lambda table: table.assign(income=(table["paid"] == "yes") * 2.5),
        ["'income' of bank alone is nearly the label", "leave it out of 'columns'"],
    ),
    "columns of nobody": (
        lambda table: table.assign(spare=range(len(table)), other=range(len(table))),
        ["no party is given 'spare', 'other'", "add them to some 'columns'"],
    ),
}


@pytest.mark.parametrize("case", DOUBTED)
def test_what_is_pointed_out(well, tmp_path, loans, rows, case):
    change, told = DOUBTED[case]
    change(rows).to_csv(tmp_path / "loans.csv", index=False)
    done = well("check", loans)
    lines = [line for line in done.out.splitlines() if line.startswith("look at")]
    assert any(all(words in line for words in told) for line in lines), done.out
    assert "read the lines above" in done.out


def test_a_clean_table_is_not_pointed_at(vfl, loans):
    assert "look at" not in vfl("check", loans).out


#: Files and settings that are refused: what is written, and the words of the message.
REFUSED = {
    "an empty file": (b"", ["this file is empty", "write the table again"]),
    "a binary file": (
        bytes(range(128, 192)) + b"\0\xff" * 500,
        ["this file is not a CSV file", "binary data", "export the table"],
    ),
    "a German file": (
        b"customer;income;debt;town;paid\n" + b"1;2,5;3,5;Ulm;no\n2;2,75;3,5;Ulm;yes\n" * 9,
        ['separator = ";", decimal = ","', "in [data]"],
    ),
    "no label": (
        b"customer,income,debt,town,paid\n" + b"".join(b"%d,1,2,a,\n" % n for n in range(30)),
        ["the label column 'paid' has missing cells", "30 of 30", "leave these rows out"],
    ),
    "too many texts that are numbers": (
        b"customer,income,debt,town,paid\n"
        + b"".join(b'%d,"%d,5",2,a,%d\n' % (n, n, n % 2) for n in range(300)),
        ["too many categories", "decimal comma", 'decimal = ","'],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(refused, tmp_path, loans, case):
    content, told = REFUSED[case]
    (tmp_path / "loans.csv").write_bytes(content)
    done = refused("check", loans)
    assert all(words in done.err for words in told), done.err


def test_the_cure_for_a_german_file_cures(vfl, well, tmp_path, loans, rows):
    rows.to_csv(tmp_path / "loans.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    done = vfl("check", loans)
    (told,) = re.findall(r"seems to be written with (.*): set that", done.err)
    cure = [word for setting in told.split(", ") for word in ("-s", f"data.{setting}")]
    well("check", loans, *cure)


def test_dates_are_read_as_an_experiment_says(vfl, tmp_path, loans, rows):
    DOUBTED["a date as text"][0](rows).to_csv(tmp_path / "loans.csv", index=False)
    done = vfl("check", loans, "-s", 'data.dates={ income = "%Y-%m-%d" }')
    assert "look at" not in done.out
    assert "bank 8" in done.out  # five of a date, three of the towns


def test_a_learning_rate_that_diverges(vfl, loans):
    done = vfl("train", loans, "-s", "train.learning_rate=30", "-s", "train.epochs=2")
    assert "divide train.learning_rate by 10" in done.out
    with pytest.raises(UserError, match=r"holds NaN or Inf(.|\n)*lower the learning rate"):
        VFLRegressor(learning_rate=1e6, optimizer="sgd").fit(np.eye(9), np.arange(9.0))


def test_an_answer_that_is_a_guess(vfl, tmp_path, loans):
    draw = np.random.default_rng(5)
    frame = pd.read_csv(tmp_path / "loans.csv")
    frame.assign(paid=draw.choice(["yes", "no"], len(frame))).to_csv(
        tmp_path / "loans.csv", index=False
    )
    done = vfl("train", loans, "-s", "train.epochs=1", "-s", "seed=1")
    assert "is no better than a guess: train longer" in done.out


def test_parties_that_are_a_list(vfl, loans):
    done = vfl("check", loans, "-s", 'parties=["bank", "shop"]')
    assert "parties = a list: want a table, [parties.NAME]" in done.err
    with pytest.raises(UserError, match=r"got   a list\n.*columns by party(.|\n)*parties=\{"):
        VFLClassifier(["bank", "shop"]).fit(np.zeros((4, 2)), [0, 1, 0, 1])


@pytest.mark.parametrize("attack", ["logistic", "gradient_norm"])
def test_an_attack_on_a_federations_run(refused, tmp_path, attack):
    """Nor is anybody told to record a training first, which would be refused here as well."""
    experiment = Experiment.model_validate({"parties": {"bank": {}, "shop": {}}})
    folder = RunFolder.create(tmp_path / "run", experiment, "federated", "vfl train project")
    folder.finish({"run": "run", "weights_sha256": "0" * 64}, Ledger())
    done = refused("attack", "run", "--attack", attack)
    assert "in a federation, each party keeps its files" in done.err
    assert "that has a source for each of [parties]" in done.err


def test_a_partys_own_file_is_no_experiment(well, refused, loans):
    well("init", "--from", "loans.csv", "--label", "paid")
    done = refused("train", "party.toml")
    assert "one party's own file" in done.err
    assert "vfl init PROJECT --from A=TABLE" in done.err
    assert "no setting is called" not in done.err


@pytest.mark.parametrize("estimator", [VFLClassifier(), VFLRegressor()], ids=["class", "number"])
def test_labels_that_are_missing_and_one_feature(estimator):
    with pytest.raises(ValueError, match="Input y contains NaN"):
        estimator.fit(np.zeros((3, 2)), pd.Series([1.0, None, 0.0]))
    with pytest.raises(ValueError, match=r"1 feature\(s\) are too few(.|\n)*parties=1"):
        estimator.fit(np.arange(6.0).reshape(6, 1), [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_no_matter_of_the_port(host):
    with pytest.raises(UserError, match="cannot listen") as refused:
        listen(host, 0)
    assert "an address of this machine" in str(refused.value.fix)


def test_a_port_in_use_is_named_by_whoever_wanted_it(tmp_path):
    """The stream says so itself; a service started for another command passes its words on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError) as refused:
            listen("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in str(refused.value)
        assert "Address already in use" in str(refused.value)
        assert "choose another port" in str(refused.value)
    said = f"cat <<'end'\nnoise\n{refused.value}\nend\nexit 2"
    service = Service("the SuperLink", ["sh", "-c", said], {}, tmp_path / "superlink.log")
    with pytest.raises(LostPeerError) as passed_on:
        service.wait_for("it listens")
    service.stop()
    assert passed_on.value.where == f"127.0.0.1:{port}"
    assert "Address already in use" in str(passed_on.value.got)
    assert "choose another port" in str(passed_on.value.fix)


def test_a_supernodes_port_in_use_is_named_with_its_setting(monkeypatch, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv(programs.LOCAL_API_VARIABLE, str(tmp_path / "local"))
        monkeypatch.setenv(programs.STARTER_VARIABLE, str(os.getppid()))
        monkeypatch.setattr("sys.argv", ["flower-supernode", "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            programs.supernode()
    assert ended.value.code == 2
    said = capsys.readouterr().out
    assert "cannot listen for this SuperNode's own programs" in said
    assert f"127.0.0.1:{port}" in said
    assert "Address already in use" in said
    assert "another node.api_port in party.toml" in said


def test_a_prediction_of_training_rows_says_so(vfl, monkeypatch, tmp_path):
    experiment = Experiment.model_validate({"parties": {"bank": {}}})
    folder = RunFolder.create(tmp_path / "run", experiment, "in-process", "vfl train")
    part = folder.party("label")
    part.mkdir(parents=True)
    counts = {"rows": 3, "trained": 2, "unfamiliar": {}}
    (part / "predicted.json").write_text(json.dumps(counts))
    monkeypatch.setattr(training, "ask", lambda *arguments: folder.path)
    said = vfl("predict", "run").out
    assert "2 of them were training rows, marked in the column 'trained'" in said
    assert "name a table of new rows as data.predict in each party.toml" in said
    assert json.loads(vfl("predict", "run", "--json").out)["trained"] == 2


def test_parties_that_are_named_twice(refused, tmp_path):
    done = refused("init", "new", "--party", "bank", "--party", "bank")
    assert "party 'bank' is named twice" in done.err
    assert "rename the other party" in done.err
    assert not (tmp_path / "new").exists()


def test_ids_with_a_decimal_point(well, refused, tmp_path, rows):
    label = rows.assign(customer=range(ROWS))[["customer", "debt", "paid"]]
    label.to_csv(tmp_path / "lender.csv", index=False)
    own = rows.assign(customer=np.arange(ROWS, dtype=float))[["customer", "income"]]
    own.to_csv(tmp_path / "bank.csv", index=False)
    path = tmp_path / "two.toml"
    path.write_text(
        '[data]\nsource = "lender.csv"\nid = "customer"\n[parties.bank]\nsource = "bank.csv"\n'
        '[label]\nparty = "lender"\ncolumn = "paid"\n'
    )
    done = refused("check", path)
    assert "'bank': whole numbers with a decimal point, 'lender': whole numbers" in done.err
    assert 'id_type = "number" reads 007, 7 and 7.0 as the same' in done.err
    well("check", path, "-s", "data.id_type=number")


def test_a_classifiers_missing_texts():
    with pytest.raises(UserError, match=r"1 of 3 labels are missing(.|\n)*leave these rows out"):
        VFLClassifier().fit(np.zeros((3, 2)), np.array(["a", None, "b"], dtype=object))
