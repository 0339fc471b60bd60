"""Ordinary torch code on shares gives what it gives on floats, to the precision."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from vfl import tensors
from vfl.core.errors import BadOptionError, LostPeerError, RingRangeError, UserError

X = torch.tensor([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])
Y = torch.tensor([[0.5, 4.0, -1.0], [2.5, -3.0, 1.0]])
IMAGES = torch.arange(2 * 2 * 5 * 5).reshape(2, 2, 5, 5).remainder(7).sub(3).div(2)
FILTERS = torch.arange(3 * 2 * 2 * 2).reshape(3, 2, 2, 2).remainder(5).sub(2).div(4)

CASES = {
    "add": lambda x, y: x + y,
    "a number less": lambda x, y: 1.5 - x,
    "broadcast": lambda x, y: x - y[0],
    "mul": lambda x, y: x * y,
    "scaled": lambda x, y: x * 0.3 + 2 * y - y / 4,
    "matmul": lambda x, y: x @ y.T,
    "vector": lambda x, y: x @ y[0],
    "pow": lambda x, y: x**3 + y**2,
    "slice": lambda x, y: x[1, ::2] + y[:, :2].flatten()[:2],
    "mean": lambda x, y: (x * y).mean(),
    "sum": lambda x, y: x.sum(0) + y.sum(1, keepdim=True),
    "relu": lambda x, y: functional.relu(x) * y,
    "linear": lambda x, y: functional.linear(x, y, y[:, 0]),
    "reshape": lambda x, y: x.reshape(3, 2) @ y.permute(1, 0).t().view(2, 3),
    "mse": lambda x, y: functional.mse_loss(x, y),
    "stack": lambda x, y: torch.stack([x, y], 1) * x.unsqueeze(1),
}


def test_shares_at_workers_of_every_kind(any_shared):
    x, y = any_shared(X), any_shared(Y).requires_grad_()
    assert torch.allclose(x.get().float_precision(), X, atol=1e-4)
    found = (functional.relu(x @ y.T) * 0.5).mean()
    want = Y.clone().requires_grad_()
    value = (functional.relu(X @ want.T) * 0.5).mean()
    assert torch.allclose(found.get().float_precision(), value, atol=1e-3)
    found.backward()
    value.backward()
    assert torch.allclose(y.grad.get().float_precision(), want.grad, atol=1e-3)
    assert torch.equal((x < y).get().float_precision(), (X < Y).float())


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_floats(shared, case):
    plain = [X.clone().requires_grad_(), Y.clone().requires_grad_()]
    hidden = [shared(each) for each in plain]
    want, found = CASES[case](*plain), CASES[case](*hidden)
    assert found.shape == want.shape
    assert torch.allclose(found.get().float_precision(), want, atol=1e-3)
    (want * want).sum().backward()
    (found * found).sum().backward()
    for one, other in zip(hidden, plain, strict=True):
        if other.grad is not None:
            assert torch.allclose(one.grad.get().float_precision(), other.grad, atol=1e-2)


def test_comparisons(shared):
    x, y = shared(X), shared(Y)
    for found, want in [
        (x < y, X < Y), (x > y, X > Y), (x >= 1.5, X >= 1.5), (x <= X, X <= X), (x < 0, X < 0),
        (x == y, X == Y), (x != y, X != Y), (x == X, X == X), (x[0] == 0.5, X[0] == 0.5),
    ]:  # fmt: skip
        assert torch.equal(found.get().float_precision(), want.float())


def test_sigmoid_is_close_everywhere(shared):
    values = torch.linspace(-40, 40, 801).requires_grad_()
    hidden = shared(values)
    found = torch.sigmoid(hidden)
    want = torch.sigmoid(values)
    assert (found.get().float_precision() - want).abs().max() < 0.012
    found.sum().backward()
    want.sum().backward()
    assert (hidden.grad.get().float_precision() - values.grad).abs().max() < 0.02


def test_convolution_and_pooling(shared):
    def network(x, w):
        found = functional.conv2d(x, w, w[:, 0, 0, 0], stride=1, padding=(1, 0))
        return functional.avg_pool2d(found, 2)

    plain = [IMAGES.clone().requires_grad_(), FILTERS.clone().requires_grad_()]
    hidden = [shared(each) for each in plain]
    want, found = network(*plain), network(*hidden)
    assert torch.allclose(found.get().float_precision(), want, atol=1e-3)
    want.square().mean().backward()
    found.square().mean().backward()
    for one, other in zip(hidden, plain, strict=True):
        assert torch.allclose(one.grad.get().float_precision(), other.grad, atol=1e-3)


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_a_module_learns_on_shares_what_it_learns_on_floats(workers, shared, rule):
    alice, bob, carol = workers
    torch.manual_seed(0)
    rows, targets = torch.randn(24, 5), torch.randn(24, 1)

    def network():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1))

    def train(model, x, y):
        options = {"momentum": 0.9} if rule == "momentum" else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **options)
        for _ in range(6):
            optimizer.zero_grad()
            loss = nn.MSELoss()(model(x), y)
            loss.backward()
            optimizer.step()
        return model

    plain = train(network(), rows, targets)
    model = train(tensors.share(network(), alice, bob, dealer=carol), shared(rows), shared(targets))
    found = [each.get().float_precision() for each in model.parameters()]
    for one, other in zip(found, plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=5e-3)


def test_three_holders_and_a_share_alone_tells_nothing(workers):
    alice, bob, carol = workers
    (dealer,) = tensors.virtual("dealer")
    x = tensors.fix_precision(X).share(alice, bob, carol, dealer=dealer)
    assert torch.equal((x * 2).get().float_precision(), 2 * X)
    parts = [each.location.held(each).value.share for each in x.pointers()[:-1]]
    assert all(int(part.abs().max()) > 2**50 for part in parts)
    again = tensors.fix_precision(X).share(alice, bob, carol, dealer=dealer)
    assert not torch.equal(
        again.pointers()[0].location.held(again.pointers()[0]).value.share, parts[0]
    )


def test_shares_go_with_the_tensor(workers, shared):
    x = shared(X)
    y = x * x
    assert [len(worker) for worker in workers] == [2, 2, 2]
    del x, y
    assert [len(worker) for worker in workers] == [0, 0, 0]


def test_what_is_not_supported_says_so(workers, shared):
    x, (alice, bob, carol) = shared(X), workers
    for call in [
        lambda: torch.lgamma(x),
        lambda: x**0.5,
        lambda: x[x > 0],
        lambda: bool(x),
        lambda: x @ x,
        lambda: x * x[:, :2],
        lambda: x + tensors.send(X, alice),
        lambda: x.float_precision(),
        lambda: x.backward(),
        lambda: x + tensors.fix_precision(X).share(bob, alice, dealer=carol),
    ]:
        with pytest.raises(UserError):
            call()
    assert torch.equal((x * x).get().float_precision(), X * X)  # the session goes on
    with pytest.raises(BadOptionError):
        tensors.fix_precision(X).share(alice, bob, dealer=bob)
    with pytest.raises(RingRangeError) as caught:
        shared(torch.tensor([123456789.0]) * 2**20)
    assert "123456789" not in str(caught.value)


def test_a_holder_that_stopped(workers, shared):
    x = shared(X)
    workers[1].stop()
    for call in (lambda: x * x, lambda: x + 1, lambda: x.get()):
        with pytest.raises(LostPeerError, match="bob has stopped"):
            call()


def test_a_forgotten_session_never_waits_for_its_threads(monkeypatch):
    """The garbage collector may run where a thread is about to start: waiting there never ends."""
    waited = []
    real = ThreadPoolExecutor.shutdown

    def shutdown(self, wait=True, **options):
        waited.append(wait)
        real(self, wait, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    workers = tensors.virtual("alice", "bob", "carol")
    alice, bob, carol = workers
    x = tensors.fix_precision(torch.tensor([1.0, -2.0])).share(alice, bob, dealer=carol, mac=True)
    assert torch.relu(x).get().float_precision().tolist() == [1, 0]
    for worker in workers:
        worker.stop()
    del x, workers, worker, alice, bob, carol
    gc.collect()
    assert waited
    assert not any(waited)
