"""The tutorial's walk over two hosts, from an installed wheel to an answer: no file is edited.

Each host is a folder and a shell of its own; what is sent is copied. The addresses are of the
loopback, where the page has names.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from vfl.transport import fingerprint

pytestmark = pytest.mark.net

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TABLES, *COMMANDS = [
    found[2]
    for found in BLOCK.finditer(PAGE)
    if found[1] == "python" or found.start() > PAGE.index("## On two machines")
]
ADDRESS = "127.0.0.2"
MOST_COMMANDS = 8


@pytest.fixture
def hosts(tmp_path):
    """Runs lines of bash at a host, and ends at the end what still runs there."""
    for port in (8000, 8001, 8080, 9094):
        for address in (ADDRESS, "127.0.0.1"):
            with socket.socket() as probe:
                if probe.connect_ex((address, port)) == 0:
                    pytest.skip(f"something listens on port {port}")
    standing = []

    def at(name, lines):
        where = {
            "cwd": tmp_path / name,
            "text": True,
            "env": os.environ | {"PYTHONUNBUFFERED": "1"},
        }
        if lines.rstrip().endswith("&"):  # it is itself what is interrupted at the end
            alone = f"exec {lines.rstrip().removesuffix('&')}"
            standing.append(
                subprocess.Popen(["bash", "-c", alone], start_new_session=True, **where)
            )
            return "", ""
        done = subprocess.run(
            ["bash", "-e", "-c", lines], capture_output=True, timeout=300, check=False, **where
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    yield at
    for process in reversed(standing):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(log):
    return log.read_text() if log.exists() else ""


def until(what, timeout_s=60.0):
    """Wait for something to be there, and give it."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_two_hosts_from_two_tables_to_an_answer(hosts, tmp_path, monkeypatch, capsys):
    init, join, up_clinic, up_laboratory, use = [
        text.replace("clinic.example", ADDRESS) for text in COMMANDS
    ]
    own = [line for text in COMMANDS for line in text.splitlines() if line.startswith("vfl ")]
    installations = 2
    assert len(own) + installations <= MOST_COMMANDS
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.py").write_text(TABLES)
    runpy.run_path(str(tmp_path / "tables.py"))
    for name in ("clinic", "laboratory"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.csv").rename(tmp_path / name / f"{name}.csv")
    clinic, laboratory = tmp_path / "clinic", tmp_path / "laboratory"
    started = time.monotonic()

    hosts("clinic", init)
    assert [path.name for path in clinic.rglob("*.key")].count("node.key") == 0
    (clinic / "project" / "laboratory").rename(laboratory / "laboratory")
    out, _ = hosts("laboratory", join)
    sent = laboratory / "laboratory" / "laboratory.pub"
    shown = fingerprint(sent.read_bytes())
    assert f"fingerprint      {shown}" in out
    status = f"{sys.executable} -m vfl status"
    assert "vfl party accept laboratory.pub" in hosts("clinic", f"{status} project || true")[0]

    (clinic / sent.name).write_bytes(sent.read_bytes())
    (read_out,) = re.findall(r'="([0-9a-f ]{39})"', up_clinic)
    hosts("clinic", up_clinic.replace(read_out, shown))
    until(lambda: "the SuperLink listens on" in said(clinic / "clinic.log"))
    assert "the key of laboratory is registered" in said(clinic / "clinic.log")
    hosts("laboratory", up_laboratory)
    until(lambda: "is connected" in said(laboratory / "laboratory.log"))
    assert "vfl align" in hosts("clinic", f"{status} project")[0]

    train, serve = use.strip().splitlines()
    hosts("clinic", train)
    hosts("clinic", serve)
    (token,) = until(lambda: [*(clinic / "project/label/store/runs").glob("*/serve.token")])
    until(lambda: "http://" in said(clinic / "serve.log"))
    patient = (clinic / "clinic.csv").read_text().splitlines()[-1].partition(";")[0]
    hosts("clinic", "curl --silent --retry 60 --retry-delay 1 http://127.0.0.1:8080/ready")
    ask = f"""curl --silent -H "Authorization: Bearer {token.read_text().strip()}" \
        -H "Content-Type: application/json" -d '{{"ids": ["{patient}"]}}' \
        http://127.0.0.1:8080/predict"""
    (answer,) = json.loads(hosts("clinic", ask)[0])["predictions"]
    assert answer["prediction"] in ("benign", "malignant")
    with capsys.disabled():
        print(f"\ntwo hosts, tables to an answer: {time.monotonic() - started:.0f} s")
    summary = json.loads((token.parent / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
    found = tomllib.loads((laboratory / "laboratory" / "party.toml").read_text())["data"]
    assert found["id_type"] == "number"
    other = {path for path in clinic.rglob("*") if path.is_file()}
    keys = [path.read_bytes() for path in (laboratory / "laboratory").glob("*.key")]
    assert len(keys) == 2
    assert not [path for path in other if path.read_bytes() in keys]
