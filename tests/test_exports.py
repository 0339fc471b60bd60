"""Names others rely on: what `__all__` lists exists, and the stable names are where we said."""

import importlib
import pkgutil

import pytest
from torch import nn

import vfl


def public_modules():
    """Every importable module of the package that lists its names."""
    found = [vfl]
    for info in pkgutil.walk_packages(vfl.__path__, "vfl."):
        if info.name.split(".")[1] not in ("__main__", "templates"):
            found.append(importlib.import_module(info.name))
    return [module for module in found if hasattr(module, "__all__")]


MODULES = public_modules()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_listed_name_exists(module):
    assert sorted(set(module.__all__)) == sorted(module.__all__), "listed twice or out of order"
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


def test_rooms_list_their_names():
    listed = {module.__name__ for module in MODULES}
    rooms = ["clients", "compression", "config", "datasets", "defenses", "exchange", "models"]
    rooms += ["server", "session", "testing", "transport"]
    assert {"vfl", *(f"vfl.{room}" for room in rooms)} <= listed


def test_the_stable_names():
    assert issubclass(vfl.SplitModule, nn.Module)
    assert {"fit", "predict", "score"} <= set(dir(vfl.VFLClassifier))
    from vfl import compression, defenses

    assert isinstance(compression.make("topk:k=3"), compression.Codec)
    assert isinstance(defenses.make("none"), defenses.Defense)
    assert vfl.__version__ == importlib.import_module("vfl.version").VERSION


@pytest.mark.parametrize("module", ["vfl", "vfl.testing"])
def test_a_name_that_does_not_exist(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
        _ = importlib.import_module(module).Nothing
