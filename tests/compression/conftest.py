import pytest

from vfl.core import compiled


@pytest.fixture
def both(monkeypatch):
    """What a call gives in numpy, and what it gives with compiled loops."""

    def run(call):
        results = []
        for loops in (False, True):
            monkeypatch.setattr(compiled, "COMPILED", loops)
            results.append(call())
        return results

    return run
