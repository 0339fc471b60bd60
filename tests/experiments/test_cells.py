"""Digests of code: what changes them, and what leaves them as they are."""

import importlib
import sys
import types

import pytest

from vfl.config import Experiment
from vfl.core import registry
from vfl.experiments import cells as identity


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Writes files beside each other and digests modules of them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def of(module, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()
        return identity.code_of(module)

    yield of
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_plug_in_of_one_file_stands_on_files_beside_it(digest):
    files = {"mine.py": "import torch\nfrom beside import x", "beside.py": "x = 1", "alone.py": ""}
    first = digest("mine", files)
    assert digest("mine", {"alone.py": "changed = 1"}) == first
    assert digest("mine", {"beside.py": "x = 2"}) != first


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ('"""Other words,\n# here."""\nx = 1\n\n\ndef f():\n    return """\n# a"""\n', True),
        ('# A comment.\nx = 1\n\ndef f():\n    """Doc."""\n    return """\n# a"""\n', True),
        ('x = 2\n\ndef f():\n    return """\n# a"""\n', False),
        ('x = 1\n\ndef f():\n    return """\n# b"""\n', False),
        ('"""Words."""; x = 2\n\ndef f():\n    return """\n# a"""\n', False),
    ],
)
def test_words_about_the_code_are_no_other_code(digest, changed, same):
    first = digest("mine", {"mine.py": 'x = 1\n\ndef f():\n    return """\n# a"""\n'})
    assert (digest("mine", {"mine.py": changed}) == first) is same


def test_a_plug_in_of_a_package_stands_on_its_package(digest):
    files = {"pack/__init__.py": "", "pack/mine.py": "from .deep import x\nimport pack.more"}
    first = digest("pack.mine", files | {"pack/deep.py": "x = 1", "pack/more.py": ""})
    assert digest("pack.mine", {"pack/deep.py": "x = 2"}) != first
    assert digest("pack.mine", {"pack/deep.py": "x = 1"}) == first
    assert digest("pack.mine", {"pack/more.py": "y = 1"}) != first


def test_a_script_that_runs_has_a_source(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("x = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(identity, "_LOADED", {})
    first = identity.code_of("__main__")
    script.write_text("x = 2")
    assert identity.code_of("__main__") == first  # what runs is the script as it was loaded
    monkeypatch.setattr(identity, "_LOADED", {})
    assert identity.code_of("__main__") != first


def test_plug_ins_are_adversaries_defense_codec_and_models(monkeypatch):
    seen = []
    monkeypatch.setattr(identity, "code_of", lambda *modules: seen.extend(modules) or "")
    identity.plug_ins_of(
        Experiment(
            defense="layer_norm+dcor",
            codec="topk:k=3",
            parties={"bank": {"bottom": "mlp"}, "shop": {"bottom": "identity"}},
        ),
        ["noisy_labels"],
    )
    named = sorted({made.__module__.removeprefix("vfl.") for made in seen})
    assert named == [
        "attacks.active.noisy_labels",
        "compression.topk",
        "defenses.dcor",
        "defenses.potential",
        "models.mlp",
    ]


OTHERS = """
import torch
from vfl.datasets.augment import AUGMENTATIONS, Flip
from vfl.datasets.sources import SOURCES
from vfl.datasets.sources.scikit_learn import Digits
from vfl.models.losses import LOSSES, Focal
from vfl.models.mergers import Mean
from vfl.models import MERGERS
from vfl.models.optimizers import OPTIMIZERS, SCHEDULES
from vfl.session.secure_mode import SECURE, SecureMode

NUMBER = {number}
for family, name, base in (
    (MERGERS, "merge", Mean), (LOSSES, "loss", Focal), (SOURCES, "source", Digits),
    (OPTIMIZERS, "optimizer", torch.optim.SGD), (AUGMENTATIONS, "augment", Flip),
    (SCHEDULES, "schedule", torch.optim.lr_scheduler.StepLR), (SECURE, "secure", SecureMode),
):
    family.register("own_" + name, type("Own", (base,), {{"__module__": __name__}}))
"""


@pytest.fixture
def others(tmp_path, monkeypatch):
    """Loads a plug-in file of the families besides codecs, defenses and models; then removes it."""
    monkeypatch.setenv(registry.PLUGINS, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "others_of_mine.py"

    def load(number):
        file.write_text(OTHERS.format(number=number))
        registry.load_plugin(file)

    yield load
    for family in registry._REGISTRIES:
        family.replace(family.registered_by(file.stem), {})
    del sys.modules[file.stem]


@pytest.mark.parametrize(
    "setting",
    [
        {"merge": "own_merge"},
        {"label": {"loss": "own_loss"}},
        {"train": {"optimizer": "own_optimizer"}},
        {"train": {"schedule": "own_schedule:step_size=2"}},
        {"data": {"source": "digits+own_source"}},
        {"parties": {"bank": {"augment": "crop+own_augment"}}},
        {"secure": "own_secure"},
        {},
    ],
)
def test_a_changed_plug_in_of_every_family_is_other_code(others, setting):
    content = Experiment.model_validate({"parties": {"bank": {}}} | setting)
    others(1)
    first = identity.plug_ins_of(content)
    others(2)
    assert (identity.plug_ins_of(content) == first) is (setting == {})


CELL = """
from vfl.compression.topk import TopK

LEAST = {least}

def chosen(k):
    return max(LEAST, {k})

class Mine(TopK):
    def __init__(self, k: int = {default}) -> None:
        super().__init__(k=chosen(k))
"""


@pytest.fixture
def notebook(monkeypatch):
    """Runs a cell of a notebook, whose classes have no source file; digests the class it makes."""
    module = types.ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(file="<cell 1>", lines="", least=1, k="k", default=3):
        cell = lines + CELL.format(least=least, k=k, default=default)
        exec(compile(cell, file, "exec"), vars(module))
        return identity.code_of(module.Mine)

    return run


@pytest.mark.parametrize("changed", [{"k": "k + 1"}, {"default": 4}, {"least": 2}])
def test_a_class_of_a_notebook_is_another_once_its_cell_is_edited(notebook, changed):
    first = notebook()
    assert notebook(**changed) != first
    assert notebook() == first
