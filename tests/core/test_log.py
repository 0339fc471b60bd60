"""Lines of the log as JSON objects: the same words as people read, and no others."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.cli.output import say
from vfl.core.errors import LostPeerError
from vfl.core.text import log_entries, logged

LOST = LostPeerError("bank is gone", where="step 7", got="a closed stream", fix="start it again")


@pytest.fixture
def in_json(monkeypatch):
    monkeypatch.setenv("VFL_LOG", "json")


def test_an_error_has_its_code_and_its_facts(in_json):
    told = json.loads(logged(str(LOST)))
    moment = datetime.fromisoformat(told.pop("time"))
    assert abs(moment - datetime.now(UTC)) < timedelta(minutes=1)
    assert told == {
        "level": "error",
        "message": "bank is gone",
        "code": "V405",
        "where": "step 7",
        "got": "a closed stream",
        "try": "start it again",
    }


def test_levels(in_json, capsys):
    say("vfl: party bank is here")
    say("warning: the certificate ca.pem expires in 3 days; renew it")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"]) == ("info", "party bank is here")
    assert second["level"] == "warning"


def test_without_the_variable_words_stand_as_they_are(capsys):
    say(str(LOST))
    assert capsys.readouterr().err == f"{LOST}\n"


@given(st.lists(st.text(st.characters(exclude_characters="\n\r"), max_size=20), max_size=6))
def test_entries_are_lines_and_no_line_is_lost(lines):
    assert "\n".join(log_entries(lines)).split("\n") == ("\n".join(lines)).split("\n")


def test_lines_of_a_service_become_entries():
    lines = ["vfl: begins", *str(LOST).split("\n"), "vfl: ends"]
    assert log_entries(lines) == ["vfl: begins", str(LOST), "vfl: ends"]


def test_a_command_says_everything_as_objects(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "vfl", "check", "absent.toml"],
        cwd=tmp_path,
        env={**os.environ, "VFL_LOG": "json"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    (told,) = map(json.loads, done.stderr.splitlines())
    assert (told["level"], told["code"]) == ("error", "V003")
