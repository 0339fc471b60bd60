"""`vfl new`: a package that passes its own tests and whose member every command can name."""

import os
import subprocess
import sys
import tomllib

import pytest

from vfl.attacks import ATTACKS
from vfl.core.registry import PLUGINS
from vfl.experiments.outside import load_attackers

KINDS = ["codec", "defense", "attack"]
PLACEHOLDERS = {"NAME", "CLASS", "KIND", "FAMILY", "CONTRACT", "COMMAND", "VERSION"}
PLACEHOLDERS |= {"STORED", "TODAY"}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


#: Runs the tests of packages in folders, each in a child of one process that has imported what the
#: contracts and torch's first tensor without content import.
RUN = """
import os, sys
import pytest, torch, vfl.testing.attack, vfl.testing.codec, vfl.testing.defense
torch.empty(1, device="meta") + 1
ended = {}
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        os._exit(pytest.main(["-p", "no:cacheprovider"]))
    ended[folder] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(any(ended.values()) and str(ended))
"""


def test_packages_keep_the_contract_and_name_their_members(well, tmp_path):
    for kind in KINDS:
        well("new", kind, f"own_{kind}")
    folders = {kind: tmp_path / f"own_{kind}" for kind in KINDS}
    python = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_ADDOPTS": ""}
    python |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a second of imports each
    command = [sys.executable, "-c", RUN, *folders.values()]
    done = subprocess.run(command, env=python, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == len(KINDS)
    for kind, folder in folders.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert list(project["entry-points"]) == [f"vfl.{kind}s"]
        written = [
            file for file in folder.rglob("*.*") if file.suffix in (".py", ".toml", ".md", ".yml")
        ]
        left = {word for file in written for word in file.read_text().split()}
        assert not left & {
            "NAME",
            "CLASS",
            "KIND",
            "FAMILY",
            "CONTRACT",
            "COMMAND",
            "VERSION",
            "STORED",
            "TODAY",
        }


def test_an_attack_can_be_added_to_a_leaderboard(well, tmp_path, monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", dict(ATTACKS._members))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    well("new", "attack", "own_reader")
    (one,) = load_attackers(tmp_path / "own_reader" / "own_reader.py")
    assert (one.spec, one.author) == ("own_reader", "your name")
    assert "--add-attack own_reader.py" in (tmp_path / "own_reader" / "README.md").read_text()
    sys.modules.pop("own_reader")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_study_runs(well, kind):
    name = f"own_{kind}"  # a module that no other test imported
    study = "compare" if kind == "codec" else "grid"
    well("new", kind, name)
    plugin = f"--plugin={name}/{name}.py"
    made = well(study, plugin, f"{name}/{study}.toml", "-s", f"{study}.seeds=[0]")
    assert name in made.out
    well("submit", plugin, f"runs/{name}", "--out", "submission", "--author", "A. Name")


def test_the_readme_loads_the_member_in_each_command_that_needs_it(well, tmp_path):
    for kind in KINDS:
        well("new", kind, f"own_{kind}")
        readme = (tmp_path / f"own_{kind}" / "README.md").read_text().splitlines()
        named = [line for line in readme if f"runs/own_{kind} " in line]
        assert len(named) == 1
        assert f"--plugin own_{kind}.py" in named[0]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("codec", "Mine"), "V003"),
        (("codec", "topk"), "V106"),
        (("attack", "json"), "V106"),
        (("defense", "there"), "V003"),
    ],
)
def test_names_that_cannot_be_are_refused(vfl, tmp_path, words, code):
    (tmp_path / "there").mkdir()
    done = vfl("new", *words)
    assert done.code == 2
    assert code in done.err
    assert not (tmp_path / words[1] / "README.md").exists()
