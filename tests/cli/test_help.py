"""`vfl --help` and the help of every command: what it says and what it loads."""

import subprocess
import sys

import pytest
import typer

from vfl.cli import app
from vfl.core.version import VERSION

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(well, name):
    done = well(name, "--help")
    assert f"vfl {name}" in done.out
    assert COMMANDS[name].help
    first_line = (
        COMMANDS[name].help.strip().splitlines()[0].replace("`", "")
    )  # it is marked otherwise
    assert first_line.split(":")[0] in " ".join(done.out.split())


def test_every_option_is_explained_and_every_argument_named():
    parameters = [
        (f"{command.name} {parameter.name}", getattr(parameter, "help", None) or parameter.metavar)
        for command in COMMANDS.values()
        for parameter in command.params
    ]
    assert len(parameters) > 20
    assert [name for name, explained in parameters if not explained] == []


@pytest.mark.parametrize("words", [("train",), ("party", "accept"), ("explain",)])
def test_help_explains_arguments(well, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "120")
    done = well(*words, "--help")
    explained = {
        "train": "An experiment file, or a project",
        "party": "File that vfl join wrote",
        "explain": "Code, such as V104",
    }
    assert explained[words[0]] in done.out


def test_the_version(vfl):
    done = vfl("--version")
    assert (done.code, done.out) == (0, f"vfl {VERSION}\n")


def test_a_shell_completes_commands(well, monkeypatch):
    monkeypatch.setenv("_VFL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "vfl pred")
    monkeypatch.setenv("COMP_CWORD", "1")
    done = well()
    assert "predict" in done.out
    assert "superlink" not in done.out


def test_help_loads_nothing_heavy():
    script = (
        "import sys\nsys.argv = ['vfl', '--help']\nfrom vfl.cli import main\n"
        "try: main()\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stderr.split())
    assert "vfl.cli" in loaded
    assert not loaded & {"torch", "flwr", "pandas", "sklearn", "numpy", "pydantic"}
