import pytest
from elsewhere import Elsewhere

from vfl import tensors

KINDS = ["virtual", "socket", "tls"]


@pytest.fixture(scope="session", params=KINDS)
def everywhere(request, tmp_path_factory):
    """Workers of every kind; of processes for the whole run."""
    if request.param == "virtual":
        yield None
        return
    folder = tmp_path_factory.mktemp(request.param)
    elsewhere = Elsewhere(folder, tls=request.param == "tls")
    yield elsewhere.workers
    codes, said = elsewhere.close()
    assert codes == [0, 0, 0], said


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
