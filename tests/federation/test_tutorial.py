"""The commands of the tutorial, in order, on a real federation: two tables to an answer."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.net

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS = (8000, 8001, 8080, 9094)  # those of the page
MOST_COMMANDS, MOST_SECONDS = 6, 180


@pytest.fixture
def shell(tmp_path):
    """Runs bash in an empty folder, and ends what it started."""
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"something listens on port {port}")
    process = subprocess.Popen(
        ["bash", "-e"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    yield process
    for sent in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        time.sleep(8 if sent == signal.SIGINT else 0)
    with process:  # closes what it was read from, if it was not read to its end
        pass


def test_two_tables_to_an_answered_request(shell, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page, _, _ = PAGE.read_text(encoding="utf-8").partition("## On two machines")
    found = BLOCK.findall(page)
    (tables,) = [body for kind, body in found if kind == "python"]
    commands, request = [body for kind, body in found if kind == "bash"]
    (tmp_path / "tables.py").write_text(tables)
    runpy.run_path(str(tmp_path / "tables.py"))
    assert 0 < len(commands.strip().splitlines()) <= MOST_COMMANDS

    before = time.monotonic()
    # Interactive shells alone let background processes hear an interrupt.
    script = f"set -m\n{commands}\n{request}\nkill -INT $(jobs -p)\nwait\n"
    out, log = shell.communicate(script, timeout=2 * MOST_SECONDS)
    seconds = time.monotonic() - before
    (run,) = (tmp_path / "project" / "label" / "store" / "runs").glob("*/serve.token")
    _, _, answered = out.rpartition('{"ready":true}')
    (answer,) = json.loads(answered)["predictions"]
    assert answer["prediction"] in ("benign", "malignant")
    with capsys.disabled():
        print(f"\ntables to an answer: {seconds:.0f} s")
    assert seconds < MOST_SECONDS

    patients = pd.read_csv(tmp_path / "clinic.csv", sep=";", dtype=str)["Patient"]
    told = out + log + "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert not [one for one in patients[:-1] if one in told]
    summary = json.loads((run.parent / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
