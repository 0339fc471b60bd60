"""`vfl --help` and the help of every command: what it says and what it costs."""

import resource
import subprocess
import sys

import pytest
import typer

from vfl.cli import app
from vfl.config.grid import PACKS
from vfl.core.version import VERSION

COMMANDS = {
    *("demo", "init", "check", "train", "evaluate", "predict", "renew", "report", "runs", "list"),
    *(
        "up",
        "superlink",
        "supernode",
        "party-rank",
        "party-worker",
        "compress",
        "compare",
        "explain",
        "doctor",
        "grid-worker",
    ),
    *("grid", "attack", "sessions", "align", "value", "export", "serve", "status"),
    "privacy",
    "llm",
    "horizontal",
    "worker",
}
PANELS = {"Start", "Train and predict", "Compare and attack", "Run a party", "Look up"}
MOST_SECONDS = 0.6
PAIRS = 6


def test_every_command_is_there():
    group = typer.main.get_command(app)
    assert set(group.commands) == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(vfl, name):
    done = vfl(name, "--help")
    assert done.code == 0
    assert f"vfl {name}" in done.out
    command = typer.main.get_command(app).commands[name]
    assert command.help
    first_line = command.help.strip().splitlines()[0].replace("`", "")  # it is marked otherwise
    assert first_line.split(":")[0] in " ".join(done.out.split())


def test_every_option_is_explained_and_every_argument_named():
    group = typer.main.get_command(app)
    parameters = [
        (f"{command.name} {parameter.name}", getattr(parameter, "help", None) or parameter.metavar)
        for command in group.commands.values()
        for parameter in command.params
    ]
    assert len(parameters) > 20
    assert [name for name, explained in parameters if not explained] == []


@pytest.mark.parametrize("command", ["attack", "grid"])
def test_packs_of_attacks_are_named_and_can_be_listed(vfl, command):
    words = vfl(command, "--help").out.split()
    assert {*PACKS, "list", "packs"} <= {word.strip(",;.") for word in words}


def test_commands_are_grouped_by_what_a_user_does():
    group = typer.main.get_command(app)
    shown = [command for command in group.commands.values() if not command.hidden]
    assert {command.rich_help_panel for command in shown} == PANELS


def test_the_version(vfl):
    done = vfl("--version")
    assert (done.code, done.out) == (0, f"vfl {VERSION}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(vfl, monkeypatch, shell):
    monkeypatch.setenv("_VFL_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "vfl pred")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "vfl pred")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    done = vfl()
    assert done.code == 0
    assert "predict" in done.out
    assert "superlink" not in done.out


def test_without_a_command_the_help_is_shown(vfl):
    done = vfl()
    assert done.code == 2
    assert "Usage: vfl" in done.out + done.err


def test_an_unknown_command_is_the_users_mistake(vfl):
    done = vfl("trian")
    assert done.code == 2
    assert "trian" in done.err


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


def cost(*arguments):
    """CPU seconds of one Python process; wall time would measure what else runs here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_comes_at_once():
    """Neighbours in time are compared, and one good pair will do: others use this machine too."""
    cost("-m", "vfl", "--help")  # compiles what was never imported before
    assert any(
        cost("-m", "vfl", "--help") - cost("-c", "pass") <= MOST_SECONDS for _ in range(PAIRS)
    )
