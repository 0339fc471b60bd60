"""Every data set by name keeps the contract, on small files in its published layout."""

from __future__ import annotations

import pytest
from set_files import write_every_set

from vfl.core.errors import MissingDataError
from vfl.datasets import SOURCES
from vfl.datasets.sources import read_bundled
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("mnist", "pass --download"),
        ("fashion_mnist", "pass --download"),
        ("cifar10", "'cifar-10-batches-bin'"),
        ("cifar100", "'cifar-100-binary'"),
        ("tiny_imagenet", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
        ("review_polarity", "Pang and Lee"),
        ("dbpedia", "'DBPedia Classes'"),
        ("yoochoose", "RecSys Challenge 2015"),
        ("yoochoose_filtered", "RecSys Challenge 2015"),
    ],
)
def test_missing_files_are_told_with_the_cure(tmp_path, source, said):
    with pytest.raises(MissingDataError) as caught:
        read_bundled(source, tmp_path)
    assert said in str(caught.value)
    assert "VFL_DATA" in str(caught.value)
