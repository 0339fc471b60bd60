"""Every data set by name keeps the contract, on small files in its published layout."""

from __future__ import annotations

import pytest
from set_files import write_every_set

from vfl.datasets import SOURCES
from vfl.testing import SourceContract


@pytest.fixture(scope="module")
def every_set(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    write_every_set(root)
    return root


class TestEveryDataSet(SourceContract):
    specs = (*sorted(SOURCES.own), "mnist+fashion_mnist")

    @pytest.fixture(autouse=True)
    def _files(self, every_set):
        self.root = every_set
