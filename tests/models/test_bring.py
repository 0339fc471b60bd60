"""A user's own model by its path, and every way to get the path wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vfl.core.errors import SpecError, UnknownNameError
from vfl.models import bring, bring_top

USER_FILE = """
from torch import nn


class Shallow(nn.Module):
    def __init__(self, shape, width):
        super().__init__()
        self.layer = nn.Linear(shape[0], width)

    def forward(self, rows):
        return self.layer(rows).tanh()


def head(width, outputs):
    return nn.Linear(width, outputs, bias=False)


def list_of_layers(shape, width):
    return [nn.Linear(shape[0], width)]


ready_made = nn.Linear(3, 2)
number = 7
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_model.py").write_text(USER_FILE)
    (tmp_path / "users_broken.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_class_makes_a_bottom_and_a_function_makes_a_top():
    bottom = bring("users_model:Shallow").build((3,), 2)
    top = bring_top("users_model:head").build(2, 5)
    assert isinstance(bottom, nn.Module)
    assert top(bottom(torch.ones(4, 3))).shape == (4, 5)


@pytest.mark.parametrize("path", ["", "users_model", "users_model:", ":head", "../x:y", "a b:c"])
def test_a_malformed_path_is_refused(path):
    with pytest.raises(SpecError, match=r"package\.module:name"):
        bring(path)


@pytest.mark.parametrize("path", ["nobody_has_this:Model", "nobody_has_this.inner:Model"])
def test_a_missing_module_says_how_to_make_it_found(path):
    with pytest.raises(SpecError, match="PYTHONPATH"):
        bring(path)


def test_what_a_users_module_fails_to_import_is_told_by_python_itself():
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        bring("users_broken:Model")


def test_a_missing_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'Shallow'"):
        bring("users_model:Shalow")


@pytest.mark.parametrize("name", ["ready_made", "number"])
def test_only_what_builds_a_module_is_taken(name):
    with pytest.raises(SpecError, match="class or a function"):
        bring(f"users_model:{name}")


def test_what_is_built_must_be_a_module():
    with pytest.raises(SpecError, match="type list"):
        bring("users_model:list_of_layers").build((3,), 2)
