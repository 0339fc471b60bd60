"""Tables of figures whose code or name is another's by now."""

import csv
import json
import os
import sys

import pytest
from promise import BrokenPromiseError

from vfl.cli import main
from vfl.core import registry
from vfl.core.errors import VFLError

CODEC = """
from vfl.compression import CODECS
from vfl.compression.topk import TopK

class Mine(TopK):
    def __init__(self):
        super().__init__(k={k})

CODECS.register("{name}", Mine)
"""
TINY = """
name = "tiny"
[data]
rows = 300
[parties.client]
width = 16
[label]
top = "linear"
[train]
epochs = 2
"""


@pytest.fixture
def vfl(monkeypatch, tmp_path, capsys):
    """Runs vfl as a new process would: without the plug-ins of the command before."""
    from vfl.compression import CODECS
    from vfl.experiments import cells

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(registry.PLUGINS, "")
    built_in = dict(CODECS._members)
    monkeypatch.setattr(CODECS, "_members", built_in)

    def run(*words):
        monkeypatch.setattr(CODECS, "_members", dict(built_in))
        sys.modules.pop("plugged", None)
        os.environ[registry.PLUGINS] = ""
        if hasattr(cells.code_of, "cache_clear"):
            cells.code_of.cache_clear()
        monkeypatch.setattr(sys, "argv", ["vfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr()

    yield run
    sys.modules.pop("plugged", None)


def write_codec(tmp_path, k, name="mine"):
    (tmp_path / "plugged.py").write_text(CODEC.format(k=k, name=name))
    os.utime(tmp_path / "plugged.py", (k, k))  # so that no compiled one of another k is taken


def compared(tmp_path, vfl):
    """A comparison with a plug-in's codec, which is edited afterwards."""
    (tmp_path / "tiny.toml").write_text(TINY)
    write_codec(tmp_path, k=8)
    words = ("compare", "tiny.toml", "--codec", "none", "--codec", "mine", "--seeds", "0")
    code, said = vfl(*words, "--plugin", "plugged.py")
    assert code == 0, said.err
    write_codec(tmp_path, k=1)
    return words, tmp_path / "runs" / "tiny"


def shown(folder):
    """What the tables of a comparison say of the codec as if it were so today, in percent."""
    content = json.loads((folder / "results.json").read_text())
    (line,) = [one for one in content["codecs"] if one["codec"] == "mine"]
    return None if line["accuracy"] is None else round(100 * line["accuracy"]["mean"], 1)


def test_a_codec_that_was_edited(vfl, tmp_path):
    """No table shows a figure of code that no longer exists as if it were current."""
    words, folder = compared(tmp_path, vfl)
    old = shown(folder)
    code, said = vfl(*words, "--only", "none", "--plugin", "plugged.py")
    assert code == 0, said.err
    unmarked = shown(folder)
    if unmarked is not None:
        code, said = vfl(*words, "--out", "anew", "--plugin", "plugged.py")
        assert code == 0, said.err
        raise BrokenPromiseError(
            f"the table says {unmarked} % of a codec that no longer exists, unmarked; "
            f"that of today reaches {shown(tmp_path / 'anew')} %"
        )
    stale = json.loads((folder / "results.json").read_text())["stale"]
    assert {one["codec"] for one in stale} == {"mine"}
    assert old in {round(100 * one["value"], 1) for one in stale if one["measure"] == "accuracy"}
    with (folder / "results.csv").open() as file:
        marked = {(line["codec"], bool(line["stale"])) for line in csv.DictReader(file)}
    assert marked == {("none", False), ("mine", True)}
    assert "Stale results, whose rows or code" in (folder / "report.html").read_text()
    assert "are stale" in (folder / "table.md").read_text()


def test_a_run_whose_code_was_edited_is_kept(vfl, tmp_path):
    """What was trained with code that no longer exists is put aside, never deleted."""
    words, folder = compared(tmp_path, vfl)
    (run,) = [path for path in (folder / "cells").iterdir() if path.name.startswith("mine")]
    weights = json.loads((run / "summary.json").read_text())["weights_sha256"]
    code, said = vfl(*words, "--plugin", "plugged.py")
    assert code == 0, said.err
    kept = [json.loads(path.read_text())["weights_sha256"] for path in folder.rglob("summary.json")]
    if weights not in kept:
        raise BrokenPromiseError("a finished training of 300 rows was deleted without a word")
    assert "1 earlier training" in said.out


def test_a_plug_in_with_the_name_of_a_built_in(vfl, tmp_path):
    """A plug-in cannot take the name of a part of vfl."""
    from vfl.compression import CODECS, make

    (tmp_path / "tiny.toml").write_text(TINY)
    write_codec(tmp_path, k=1, name="relu")
    code, said = vfl("train", "tiny.toml", "-s", "codec=relu", "--plugin", "plugged.py", "--json")
    if code == 0:
        raise BrokenPromiseError(
            f"a run of vfl's codec 'relu' was one of {type(make('relu')).__module__}.py, "
            f"which sends 1 of 16 values: {json.loads(said.out)['wire_ratio']:.0%} of dense float32"
        )
    assert "V106" in said.err
    assert type(make("relu")).__module__.startswith("vfl.")
    with pytest.raises(VFLError, match="two members"):
        CODECS.register("topk", type(make("none")))
