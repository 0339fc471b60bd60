"""Ordinary torch code on tensors at workers, and what their owners decide."""

import gc
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from vfl import tensors
from vfl.core.errors import ConsentError, UnknownNameError, UserError
from vfl.tensors.base import OPERATIONS

X = torch.tensor([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])


def test_operations_happen_at_the_worker(any_workers):
    alice, bob, _ = any_workers
    x = tensors.send(X, alice)
    found = torch.sigmoid((x @ x.T - 1)[0]) * 2 + functional.relu(x).sum()
    assert torch.equal(found.get(), torch.sigmoid((X @ X.T - 1)[0]) * 2 + X.relu().sum())
    assert torch.equal((x == x[0]).get(), X[0] == X)
    assert torch.equal((x != 3.0).get(), X != 3.0)
    assert "2x3 at alice" in repr(x)
    moved = x.move(bob)
    assert torch.equal((moved + moved).get(), 2 * X)
    with pytest.raises(UserError, match="different workers"):
        x + moved
    with pytest.raises(UserError, match="not at the worker"):
        x + X


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_module_learns_at_the_worker_what_it_learns_here(any_workers, optimizer):
    def train(model, x, y):
        rule = optimizer(model.parameters(), lr=0.1)
        for _ in range(5):
            rule.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            rule.step()
        return model

    alice = any_workers[0]
    y = torch.tensor([[1.0], [-1.0]])
    plain = train(network(), X, y)
    model = train(tensors.send(network(), alice), tensors.send(X, alice), tensors.send(y, alice))
    for one, other in zip(tensors.get(model).parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_the_owner_decides_who_gets_a_tensor_and_what_comes_of_it(workers):
    alice, bob, carol = workers
    x = alice.load(X)
    weight = tensors.send(torch.ones(3), alice).requires_grad_()
    public = tensors.send(torch.zeros(2, 3), alice)
    seen = public.view(6)
    (x @ weight).sum().backward()
    public.add_(x)
    shared = tensors.fix_precision(x).share(alice, bob, dealer=carol)
    for hidden in (x, x.T, x @ weight, weight.grad, public, seen, public * 2, shared, shared + 1):
        with pytest.raises(ConsentError, match="alice does not let me"):
            hidden.get()
    with pytest.raises(ConsentError, match="alice does not let bob"):
        x.move(bob)
    assert torch.equal(weight.get(), torch.ones(3))
    total = x.sum()
    alice.allow(total)
    assert total.get() == X.sum()
    found = shared.sum()
    alice.allow(found)
    with pytest.raises(ConsentError, match="bob does not let me"):
        found.get()
    bob.allow(found)
    assert found.get().float_precision() == X.sum()


def test_what_is_loaded_elsewhere_stays_there(any_workers):
    alice, bob, carol = any_workers
    if not alice.remote:
        for worker in any_workers:
            worker.load(X, tag="rows")
    x = tensors.find(alice, "rows")
    assert x.shape == X.shape
    for hidden in (x, x * 2, x.sum(), tensors.fix_precision(x).share(alice, bob, dealer=carol)):
        with pytest.raises(ConsentError, match="does not let me"):
            hidden.get()
    with pytest.raises(ConsentError, match="alice does not let bob"):
        x.move(bob)
    with pytest.raises(UnknownNameError, match="rows"):
        tensors.find(bob, "row")
    del x
    assert tensors.find(alice, "rows").shape == X.shape


def test_nothing_owned_gets_into_memory_that_others_read(workers):
    alice = workers[0]
    hidden, public = alice.load(X[0, 0]), tensors.send(torch.zeros(()), alice)
    index = alice.load(torch.tensor([1]))
    for call in [
        lambda: torch.zeros(()).add_(hidden),
        lambda: torch.add(hidden, 1, out=public),
        lambda: torch.add(hidden, 1, out=torch.zeros(())),
        lambda: functional.relu(public, inplace=True).add_(hidden),
    ]:
        with pytest.raises(UserError, match="does not support"):
            call()
    assert public.get() == 0
    with pytest.raises(ConsentError):
        tensors.send(X, alice)[index].get()
    number, shape = alice.run("functional.relu", [public, True], {})
    tensors.PointerTensor(alice, number, shape).add_(hidden)
    with pytest.raises(ConsentError):
        public.get()


@pytest.mark.filterwarnings("ignore")
def test_no_operation_gives_the_memory_of_an_operand_unless_it_is_a_view():
    (alice,) = tensors.virtual("alice")
    x = alice.load(torch.rand(2, 2))
    for name in OPERATIONS:
        for more in [(), (x,), (1,), (0,), (True,), (0, 1), (x, x), ([],), (torch.float32,)]:
            try:
                found = alice.run(name, [x, *more], {})[0]
            except UserError:
                continue
            held = alice.held_at(found)
            if held.value.untyped_storage().data_ptr() == alice.held(x).value.data_ptr():
                assert held.rule is alice.held(x).rule, (name, more)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, one: one[x > 0.5],
        lambda x, one: one[(x > 0.5).long()],
        lambda x, one: x[x > 0.5],
        lambda x, one: torch.where(x > 0.5),
        lambda x, one: one.expand((x * 9).long()[0]),
        lambda x, one: functional.cross_entropy(one[None] * x, (x > 0.5).long()).backward(),
        lambda x, one: functional.nll_loss(one[None] * x, (x > 0.5).long()).backward(),
        lambda x, one: functional.binary_cross_entropy(x + 0.5, one.detach()).backward(),
        lambda x, one: torch.div((one + 1).long(), (x > 0.5).long(), rounding_mode="floor"),
        lambda x, one: (one + 1).long().div_((x > 0.5).long(), rounding_mode="floor"),
    ],
)
def test_nothing_tells_of_hidden_values(workers, ask):
    """Neither axes, nor whether there is a result, a gradient or an error."""
    seen = []
    for value in (0.25, 0.75):
        alice = workers[0]
        x = alice.load(torch.tensor([value]))
        one = tensors.send(torch.ones(1), alice).requires_grad_()
        try:
            found = ask(x, one)
        except UserError as error:
            seen.append(str(error))
        else:
            seen.append((found is None or (found.shape, found.dtype), one.grad is None))
    assert seen[0] == seen[1]


def test_what_does_not_fit_is_shared_without_a_word_where_it_is_hidden(any_workers):
    alice, bob, carol = any_workers
    if not alice.remote:
        alice.load(X, tag="rows")
    for value in (1.0, 1e12, float("nan")):
        x = tensors.find(alice, "rows") * 0 + value
        assert tensors.fix_precision(x).share(alice, bob, dealer=carol).shape == X.shape
    with pytest.raises(UserError, match="does not fit"):
        tensors.fix_precision(tensors.send(X * 1e12, alice)).share(alice, bob, dealer=carol)


def test_gradients_get_into_no_memory_that_others_read(workers):
    alice = workers[0]
    hidden = alice.load(X[0])
    seen = tensors.send(torch.zeros(3), alice)
    weight = tensors.send(torch.zeros(3), alice).requires_grad_()
    (weight * 1.0).sum().backward()
    first = weight.grad
    loss = (weight * hidden).sum()
    del weight  # nobody holds it, and so nobody gets its gradient
    with pytest.raises(UserError, match="cannot compute gradients"):
        loss.backward()
    assert torch.equal(first.get(), torch.ones(3))
    weight = tensors.send(torch.zeros(3), alice).requires_grad_()
    same = weight.float()
    weight.grad = seen
    (weight * hidden).sum().backward()
    assert torch.equal(seen.get(), torch.zeros(3))
    assert same.grad is None
    with pytest.raises(ConsentError):
        weight.grad.get()


def test_gradients_that_break_off_half_way_are_hidden_too(any_workers):
    """torch reaches `weight` before the error; its gradient is the hidden table."""
    alice = any_workers[0]
    if not alice.remote:
        alice.load(X, tag="rows")
    hidden = tensors.find(alice, "rows")
    weight, other = (
        tensors.send(torch.ones(each), alice).requires_grad_() for each in (hidden.shape, (3,))
    )
    early = other.exp()
    early.add_(1.0)  # what the gradient of exp needs is gone
    loss = early.sum() + (weight * hidden).sum()
    with pytest.raises(UserError, match="cannot compute gradients"):
        loss.backward()
    assert weight.grad is not None
    with pytest.raises(ConsentError):
        weight.grad.get()


def test_a_tensor_goes_with_its_last_pointer(any_workers):
    alice = any_workers[0]
    gc.collect()  # what errors of other tests still point to
    before = len(alice)
    x = tensors.send(X, alice)
    y = x + 1
    assert len(alice) == before + 2
    del x
    assert len(alice) == before + 1
    del y
    assert len(alice) == before


def test_nothing_but_operations_is_run(any_workers):
    alice = any_workers[0]
    x = tensors.send(X, alice)
    for call in [
        lambda: x.item(), lambda: x.numpy(), lambda: x.tolist(),
        lambda: torch.save(x, io.BytesIO()),
        lambda: alice.run("torch.load", ("x",), {}), lambda: alice.run("tensor.item", (x,), {}),
    ]:  # fmt: skip
        with pytest.raises(UserError):
            call()
    assert not {"torch.save", "torch.load", "tensor.item", "tensor.tolist"} & set(OPERATIONS)


def test_errors_tell_shapes_and_no_values(any_workers):
    x = tensors.send(X * 1234.5, any_workers[0])
    with pytest.raises(UserError, match="2x3, 2x3") as caught:
        x @ x
    assert caught.value.__suppress_context__ or not caught.value.__context__
    assert "1851" not in str(caught.value)


def test_hook_and_unhook(workers):
    alice, bob, carol = workers
    tensors.hook()
    try:
        assert torch.equal((X.send(alice) * 2).get(), 2 * X)
        shared = X.fix_precision().share(alice, bob, dealer=carol)
        assert torch.equal(shared.get().float_precision(), X)
        owned = alice.load(X, ["me"]).fix_precision().share(alice, bob, dealer=carol)
        assert torch.equal(owned.get().float_precision(), X)
        assert torch.equal(network().send(alice).get()[0].weight, network()[0].weight)
        given = torch.nn.Linear(3, 1).share(alice, bob, dealer=carol)
        found = given(X.fix_precision().share(alice, bob, dealer=carol)).get().float_precision()
        assert torch.allclose(found, given.get()(X), atol=1e-3)
    finally:
        tensors.unhook()
    assert not hasattr(X, "send")


def test_the_chain_takes_a_class_of_ones_own():
    calls = []

    class Counted(tensors.ChainTensor):
        """Counts operations, and does them on its child."""

        def __init__(self, child):
            self.link(child)
            self._shape = child.shape

        @classmethod
        def operate(cls, name, args, kwargs):
            calls.append(name)
            inner = [each.child if isinstance(each, Counted) else each for each in args]
            return cls(OPERATIONS[name](*inner, **kwargs))

    found = torch.relu(Counted(tensors.fix_precision(X)) * 2)
    assert torch.equal(found.child.float_precision(), 2 * X.relu())
    assert [call.rpartition(".")[2] for call in calls] == ["mul", "relu"]
    assert [type(each).__name__ for each in found.chain()] == [
        "Counted", "FixedPrecisionTensor", "Here"
    ]  # fmt: skip


def test_statistics_of_hidden_rows_do_not_pass_into_a_mean_that_others_read(workers):
    alice, *_ = workers
    rows, mean = alice.load(torch.rand(8, 3)), tensors.send(torch.zeros(3), alice)
    for call in (
        lambda: functional.batch_norm(rows, mean, mean, training=True),
        lambda: torch.batch_norm(rows, None, None, mean, mean, True, 0.1, 1e-5, False),
        lambda: alice.run("functional.batch_norm", [rows, mean, mean, None, None, 1], {}),
    ):
        with pytest.raises(UserError):
            call()
    assert torch.equal(mean.get(), torch.zeros(3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: functional.max_pool2d(x, 2),
        lambda x: functional.layer_norm(x, (4,)),
        lambda x: functional.batch_norm(x, x[0, :, 0, 0], x[1, :, 0, 0].abs()),
        lambda x: functional.pad(x, (1, 1)).flip(3).narrow(1, 0, 1),
        lambda x: functional.gelu(x).amax(1) / x.amin(1).rsqrt(),
    ],
)
def test_layers_run_at_a_worker(workers, operation):
    images = torch.rand(3, 2, 4, 4) + 0.1
    found = operation(tensors.send(images, workers[0])).get()
    assert torch.allclose(found, operation(images))
