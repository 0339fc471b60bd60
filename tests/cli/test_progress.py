"""What a command shows of its progress: one line on a terminal, few lines elsewhere."""

import io
import json
import sys
from pathlib import Path

import pytest

from vfl.cli import output
from vfl.config.run_folder import PROGRESS
from vfl.core.storage import read_json
from vfl.session.progress import ProgressReport

NOW = ProgressReport("train", (), 1, 4, 10, 100, 5.0, 160.0, 18.0)
OVER = ProgressReport("train", (), 4, 4, 100, 100, 5.0, 160.0, 0.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def line(monkeypatch):
    fresh = output.ProgressLine()
    monkeypatch.setattr(output, "progress_line", fresh)
    return fresh


def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch, line):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    line.show(NOW)
    line.show(NOW)
    output.say("epoch 1")
    line.show(OVER)
    shown = screen.getvalue()
    assert shown.count("\n") == 1
    *rewritten, last = shown.split("\r\x1b[K")
    assert rewritten[1].startswith("train, epoch 1 of 4: 10 %, 5 steps/s")
    assert last == "epoch 1\n"


def test_elsewhere_a_line_comes_now_and_then(monkeypatch, capsys, line):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    for _ in range(200):
        line.show(NOW)
        now[0] += 1.0
    line.show(OVER)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4  # after 10 s, and every minute
    assert set(lines) == {output.progress_text(NOW)}


def test_progress_is_on_standard_error_alone_and_in_the_folder(well, monkeypatch, loans):
    monkeypatch.setattr(output, "_PLAIN_FIRST_S", 0.0)
    monkeypatch.setattr(output, "_PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr("vfl.session.progress._EVERY_S", 0.0)
    done = well("train", loans, "--json")
    figures = json.loads(done.out)
    told = [line for line in done.err.splitlines() if line.startswith("train, epoch")]
    assert len(told) > 3
    assert any("steps/s" in line and "left" in line for line in told)
    record = read_json(Path(figures["run"]) / PROGRESS)
    assert record["mode"] == "train"
    assert record["done"] == record["total"] > 0
