from __future__ import annotations

import pytest
from flwr.supercore.task_identity import TaskIdentity
from horizontal_party import CLASSES, PRIVATE

from vfl.horizontal.settings import HorizontalSettings


@pytest.fixture
def within_a_run(monkeypatch):
    """Messages of Flower name the run whose process makes them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def asked():
    more = {"clients": 1, "sampled": 1, "classes": CLASSES, "clip": "fixed"}
    return HorizontalSettings(**PRIVATE | more)
