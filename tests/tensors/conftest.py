import pytest
from elsewhere import Connected

from vfl import tensors


@pytest.fixture(scope="session", params=["virtual", "tls"])
def everywhere(request):
    """Workers of every kind; connected ones for the whole run."""
    if request.param == "virtual":
        yield None
        return
    connected = Connected(tls=True)
    yield connected.workers
    connected.close()


@pytest.fixture
def any_workers(everywhere):
    """alice, bob and carol, of every kind."""
    yield from [everywhere] if everywhere else made_here()


@pytest.fixture
def workers():
    """alice, bob and carol of this process."""
    yield from made_here()


def made_here():
    made = tensors.virtual("alice", "bob", "carol")
    yield made
    for worker in made:
        worker.stop()


@pytest.fixture
def shared(workers):
    """Shares at alice and bob; carol deals."""
    alice, bob, carol = workers
    return lambda values: tensors.fix_precision(values).share(alice, bob, dealer=carol)


@pytest.fixture(params=[False, True], ids=["plain", "mac"])
def any_shared(any_workers, request):
    """Likewise at workers of every kind, without and with MACs."""
    alice, bob, carol = any_workers
    return lambda values: tensors.fix_precision(values).share(
        alice, bob, dealer=carol, mac=request.param
    )
