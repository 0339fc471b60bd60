"""Marked cells, ids and labels: whatever fails, no log, folder, reply or screen shows them.

Both apps run as Flower runs them, on real streams; what leaves them is logged as Flower logs it.
"""

import io
import json
import logging
import re
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from stand_in_flower import Envelope, Flower, reply_of

from vfl.core.errors import ConsentError, redacted_output
from vfl.session import SessionMessage

with warnings.catch_warnings():  # importing Flower uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.cli import main
    from vfl.clients import app as client
    from vfl.server import app as server
    from vfl.server import session as label_session

#: A cell's text and number, an id, a class; and how tensors and arrays print the number.
MARKS = ("Zq8cell", "918273", "9.1827", "Zq8id", "Zq8class")
#: A number begins with its digits: somewhere within the digits of another they stand by chance.
MARKED = re.compile(r"Zq8cell|Zq8id|Zq8class|(?<![\d.])(918273|9\.1827)")
ROWS = 60
EXPERIMENT = """\
[parties.bank]
width = 4
bottom = "mlp:hidden=4"
[label]
party = "lender"
top = "linear"
[train]
epochs = 1
batch_size = 20
[federation]
join_timeout_s = 5.0
"""
BOTTOM = """\
import threading
import warnings

from torch import nn


class Bottom(nn.Module):
    def __init__(self, shape, width):
        super().__init__()
        self.layer = nn.Linear(shape[0], width)

    def forward(self, rows):
        {line}
        return self.layer(rows)
"""


class Apps(Flower):
    """Plays the party's ClientApp and keeps its reply."""

    def __init__(self, file):
        super().__init__(["bank"])
        self.file, self.replies = file, []

    def pull_messages(self, identifiers):
        failed = [one for one in self.replies if one["failure"] != "{}"]
        return [reply_of(identifier, one) for identifier in identifiers for one in failed]

    def _play(self, asked, name, identifier):
        content = {"session": {"message": asked.model_dump_json()}}
        context = SimpleNamespace(
            node_id=1, run_config={}, node_config={"party-file": str(self.file)}
        )
        with redacted_output():
            self.replies.append(dict(client.play(content, context)))


@pytest.fixture
def parties(tmp_path):
    """Two tables full of marks, and the files around them; what a test changes goes in between."""
    draw = np.random.default_rng(0)
    ids = [f"Zq8id{row:03}" for row in range(ROWS)]
    bank = pd.DataFrame({"id": ids, "a": 918273.0 + draw.normal(size=ROWS), "b": 1.0})
    lender = pd.DataFrame({"id": ids, "paid": [f"Zq8class{row % 2}" for row in range(ROWS)]})
    for name, table, more in (("bank", bank, ""), ("lender", lender, 'label = "paid"\n')):
        (tmp_path / name).mkdir()
        table.to_csv(tmp_path / name / "data.csv", index=False)
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{more}'
        (tmp_path / name / "party.toml").write_text(text)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture
def played(parties, monkeypatch, capfd):
    """Everything a session left to read: screens, Flower's logs, replies and files."""
    monkeypatch.delenv("VFL_DEBUG", raising=False)
    monkeypatch.setattr("vfl.server.session._COLLECT_S", 0.0)
    monkeypatch.setattr("vfl.server.federation.Message", Envelope)

    def play(mode="train"):
        flower = Apps(parties / "bank" / "party.toml")
        config = {
            "mode": mode,
            "run": "run",
            "overrides": "[]",
            "resume": False,
            "label-file": str(parties / "lender" / "party.toml"),
            "party-files": "",
        }
        log = io.StringIO()
        logger = logging.Logger("flwr")
        logger.addHandler(logging.StreamHandler(log))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                with server.without_data(), redacted_output():
                    server.play(flower, parties, config)
        except Exception as error:
            logger.error("ServerApp raised an exception", exc_info=error)
            logger.error("details: %s", error)
        finally:
            for thread in flower.threads:
                thread.join(timeout=60)
        screen = capfd.readouterr()
        folder = parties / "lender" / "store" / "runs" / "run"
        texts = {str(file.name): file.read_text() for file in _texts_in(folder)}
        replies = json.dumps(flower.replies)
        return texts | {"out": screen.out, "err": screen.err, "log": log.getvalue(), "r": replies}

    return play


def _texts_in(folder):
    """The run folder but for what belongs to one party alone."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "parties" not in file.relative_to(folder).parts:
            yield file


def clean(told):
    found = {name: mark[0] for name, text in told.items() if (mark := MARKED.search(text))}
    assert found == {}, {name: told[name] for name in found}


def test_a_session_that_goes_well_shows_nothing(parties, played):
    told = played()
    clean(told)
    assert "summary.json" in told


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("raise ValueError(f'odd rows {rows}')", "ValueError"),
        ("raise ValueError('from') from KeyError(str(rows))", "ValueError"),
        ("raise OSError(28, str(rows), str(rows))", "OSError"),
        ("raise type('Told', (Exception,), {})(rows)", "Told"),
        ("warnings.warn(f'odd rows {rows}')", "UserWarning"),
        ("one = threading.Thread(target=int, args=(str(rows),)); one.start(); one.join()", "Value"),
    ],
    ids=["text", "cause", "file name", "own class", "warning", "thread"],
)
def test_a_bottom_that_fails_on_its_rows(parties, played, monkeypatch, line, shown):
    monkeypatch.syspath_prepend(parties / "bank")
    monkeypatch.delitem(sys.modules, "marked_bottom", raising=False)
    (parties / "bank" / "marked_bottom.py").write_text(BOTTOM.format(line=line))
    file = parties / "bank" / "party.toml"
    file.write_text('bottom = "marked_bottom:Bottom"\n' + file.read_text())
    told = played()
    clean(told)
    assert shown in told["out"] + told["err"]


def edit(file, change):
    file.write_text(change(file.read_text()))


TABLES = {
    "a text among numbers": ("bank", lambda text: text.replace(",918273", ",Zq8cell", 1)),
    "a line too long": ("bank", lambda text: text.replace(",1.0", ",Zq8cell,918273,1.0,3", 1)),
    "a repeated id": ("bank", lambda text: text.replace("Zq8id001", "Zq8id000")),
    "an infinite cell": ("bank", lambda text: text.replace(",1.0", ",inf", 1)),
    "a missing label": ("lender", lambda text: text.replace("Zq8class1", "", 1)),
    "a broken header": ("lender", lambda text: text.replace("id,paid", "Zq8id,Zq8class", 1)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_cannot_be_used(parties, played, name):
    party, change = TABLES[name]
    edit(parties / party / "data.csv", change)
    clean(played())


FAILURES = {
    "a bug": ValueError("Zq8cell 918273"),
    "torch": RuntimeError(str(torch.tensor([918273.0]))),
    "a number too many": OverflowError("918273"),
    "a file's name": FileNotFoundError(2, "Zq8cell", "Zq8id"),
}


def _raise(error):
    def fail(*arguments, **options):
        cell, row = "Zq8cell", "Zq8id"  # a traceback shows no local values
        try:
            raise KeyError(cell, row)
        except KeyError:
            raise error  # noqa: B904

    return fail


PLACES = {
    "take_part": (client, "take_part"),
    "LabelParty": (label_session, "LabelParty"),
    "own_data": (label_session, "own_data"),
    "_conclude": (label_session, "_conclude"),
    "read_experiment": (server, "read_experiment"),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [(where, "a bug") for where in PLACES] + [("take_part", name) for name in list(FAILURES)[1:]],
)
def test_an_error_nobody_foresaw(parties, played, monkeypatch, where, name):
    monkeypatch.setattr(*PLACES[where], _raise(FAILURES[name]))
    told = played()
    clean(told)
    assert type(FAILURES[name]).__name__ in told["out"]


def test_an_error_of_ours_leaves_without_what_led_to_it(played, monkeypatch):
    monkeypatch.setattr(label_session, "LabelParty", _raise(ConsentError("told", got="x")))
    told = played()
    clean(told)
    assert "error[V403]: told" in told["log"]


def test_the_texts_come_back_where_they_are_asked_for(parties, played, monkeypatch):
    monkeypatch.setattr(client, "take_part", _raise(ValueError("Zq8cell")))

    def asked():
        monkeypatch.setenv("VFL_DEBUG", "1")
        return {}

    monkeypatch.setattr(client, "_say", lambda line: asked())
    assert "Zq8cell" in played()["out"]


def test_a_message_that_is_refused_does_not_show_its_token():
    with pytest.raises(ValidationError) as caught:
        SessionMessage.model_validate({"token": "Zq8cell" * 9, "session": "Zq8id"})
    assert not MARKED.search(str(caught.value))


def test_a_command_shows_no_text_of_a_warning_or_a_bug(monkeypatch, capsys):
    def run(prog_name):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(MARKS[0], stacklevel=1)
        thread = threading.Thread(target=int, args=(MARKS[3],))
        thread.start()
        thread.join()
        raise ValueError(MARKS[4])

    monkeypatch.delenv("VFL_DEBUG", raising=False)
    monkeypatch.setattr("vfl.cli.commands.app", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        main()
    screen = capsys.readouterr()
    clean({"out": screen.out, "err": screen.err})
    assert screen.err.count("vfl: ValueError;") == 2
    assert "UserWarning" in screen.err


def test_unfamiliar_cells_are_counted_at_their_own_party_alone(parties, played):
    assert "summary.json" in played()
    rows = (parties / "bank" / "data.csv").read_text()
    (parties / "bank" / "new.csv").write_text(rows.replace(",1.0", ",", 1))
    edit(parties / "bank" / "party.toml", lambda text: f'{text}predict = "new.csv"\n')
    told = played("predict")
    assert "predictions.csv" in told
    mine = parties / "bank" / "store" / "runs" / "run" / "parties" / "bank" / "predicted.json"
    found = json.loads(mine.read_text())
    trained = found.pop("trained")
    assert 0 < trained < ROWS
    assert found == {"rows": ROWS, "unfamiliar": {"b": {"new_missing": 1}}}
    theirs = parties / "lender" / "store" / "runs" / "run" / "parties"
    assert json.loads((theirs / "lender" / "predicted.json").read_text())["unfamiliar"] == {}
    assert not (theirs / "bank" / "predicted.json").exists()
    assert "new_missing" not in told["log"] + told["r"]


def test_no_file_of_ours_prints_a_traceback_by_itself():
    """Whoever needs one calls `redacted_traceback`, which leaves the text out."""
    package = Path(client.__file__).parents[1]
    printing = ("print_exc", "format_exc", "print_exception", "format_exception", "exc_info=")
    files = [path for path in package.rglob("*.py") if any(x in path.read_text() for x in printing)]
    assert files == [package / "core" / "errors.py"]
