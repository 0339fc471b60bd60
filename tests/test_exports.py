"""Names others rely on: what `__all__` lists exists, and the stable names are where we said."""

import importlib
from pathlib import Path

import pytest
from torch import nn

import vfl

PACKAGE = Path(vfl.__file__).parent


def listing_modules():
    """Names of the modules whose source says what they export."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "\n__all__ = " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__")


MODULES = [importlib.import_module(name) for name in listing_modules()]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_listed_name_exists(module):
    assert sorted(set(module.__all__)) == sorted(module.__all__), "a name is listed twice"
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


def test_the_stable_names():
    assert issubclass(vfl.SplitModule, nn.Module)
    assert {"fit", "predict", "score"} <= set(dir(vfl.VFLClassifier))
    with pytest.raises(vfl.VFLError, match="V003"):
        vfl.train("no_such_file.toml")
    from vfl import compression, defenses

    assert isinstance(compression.make("topk:k=3"), compression.Codec)
    assert isinstance(defenses.make("none"), defenses.Defense)
    assert vfl.__version__ == importlib.import_module("vfl.core.version").VERSION


@pytest.mark.parametrize("module", ["vfl", "vfl.testing"])
def test_a_name_that_does_not_exist(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
        _ = importlib.import_module(module).Nothing
