from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked import ForkingSubprocess


@pytest.fixture(scope="package", autouse=True)
def _quick_processes() -> Iterator[None]:
    """A process of a benchmark is a fork, unless its memory is measured."""
    with ForkingSubprocess("benchmarks.worker", apart=["memory", "train_on_disk"]).at_work():
        yield
