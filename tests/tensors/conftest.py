import pytest

from vfl import tensors


@pytest.fixture
def workers():
    """alice, bob and carol."""
    made = tensors.virtual("alice", "bob", "carol")
    yield made
    for worker in made:
        worker.stop()


@pytest.fixture
def shared(workers):
    """Shares at alice and bob; carol deals."""
    alice, bob, carol = workers
    return lambda values: tensors.fix_precision(values).share(alice, bob, dealer=carol)
