"""What a party's process says when it stops: causes by name, and no text that may hold data."""

import io
import json
import os
import sys

import pytest

from vfl.core.errors import LostPeerError, ProtocolError, VFLError, redacted_traceback
from vfl.mpc import Rules
from vfl.triple import worker
from vfl.triple.messages import Job
from vfl.triple.plan import Terms

SECRET = "customer 4711 owes 12.5"


class Links:
    """Nobody is there; remembers what the others would be told."""

    def __init__(self, *arguments):
        self.told = []

    def connect(self, invitations):
        return {}

    def fail(self, error):
        self.told.append(error)

    def close(self):
        pass


def job_of(experiment):
    asked = experiment()
    terms = Terms.of(asked, Rules("fast"))
    return Job(role=2, experiment=asked, terms=terms, timeout_s=5, join_s=5)


def stopping(monkeypatch, problem):
    """A program that stops so."""

    def stop(*arguments):
        raise problem

    monkeypatch.setattr(worker, "play", stop)


@pytest.mark.parametrize(
    ("problem", "told"),
    [(ValueError(SECRET), ProtocolError), (LostPeerError("P1 is gone"), LostPeerError)],
)
def test_others_are_told_of_any_end_without_its_text(monkeypatch, experiment, problem, told):
    stopping(monkeypatch, problem)
    links = Links()
    with pytest.raises(type(problem)):
        worker.work(job_of(experiment), links, dict, print)
    (heard,) = links.told
    assert type(heard) is told
    assert SECRET not in str(heard)


@pytest.mark.parametrize(
    ("problem", "code", "exit_code", "what"),
    [
        (ValueError(SECRET), "V000", 1, "this is a bug of vfl: ValueError"),
        (FileNotFoundError(2, "No such file", "rows.csv"), "V001", 2, "No such file"),
        (VFLError("gone"), "V000", 1, "gone"),
    ],
)
def test_the_last_line_names_the_cause(
    monkeypatch, capfd, experiment, problem, code, exit_code, what
):
    stopping(monkeypatch, problem)
    monkeypatch.setattr(worker, "Links", Links)
    monkeypatch.setattr(worker, "_reach", lambda *arguments: {})
    monkeypatch.setattr(sys, "stdin", io.StringIO(job_of(experiment).model_dump_json() + "\n"))
    out = os.dup(1)  # `main` sends what libraries print elsewhere
    try:
        assert worker.main() == exit_code
    finally:
        os.dup2(out, 1)
        os.close(out)
    written = capfd.readouterr()
    error = json.loads(written.out.splitlines()[-1])["error"]
    assert (error["code"], error["what"]) == (code, what)
    assert SECRET not in written.out + written.err


def test_the_text_is_shown_to_who_asks_for_it(monkeypatch):
    monkeypatch.delenv("VFL_DEBUG", raising=False)
    assert SECRET not in redacted_traceback(ValueError(SECRET))
    monkeypatch.setenv("VFL_DEBUG", "1")
    assert SECRET in redacted_traceback(ValueError(SECRET))
