"""Every operation on shares gives what torch gives on floats, and its gradient, to its bound."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vfl import tensors
from vfl.core.errors import UserError
from vfl.mpc.many.members import LocalMembers

X = torch.tensor([[1.5, -2.25, 0.5, 3.25], [-0.75, 3.0, 2.0, -4.5], [0.125, -1.5, 7.5, 0.25]])
Y = torch.tensor([[0.5, 4.0, -1.0, 2.5], [2.5, -3.0, 1.0, -0.5], [-2.0, 0.75, 1.25, 6.0]])
ABOVE = torch.tensor([[0.01, 0.25, 1.0, 3.5], [10.0, 100.0, 1000.0, 20000.0], [0.7, 2, 5, 50]])
SMALL = torch.linspace(-6, 3, 12).reshape(3, 4)
WIDE = torch.linspace(-40, 40, 60).reshape(3, 20)
IMAGES = torch.arange(2 * 2 * 6 * 6).reshape(2, 2, 6, 6).remainder(7).sub(3).div(2)
IMAGES = IMAGES + torch.arange(2 * 2 * 6 * 6).reshape(2, 2, 6, 6) / 64
FILTERS = torch.arange(4 * 2 * 3 * 2).reshape(4, 2, 3, 2).remainder(5).sub(2).div(4)
PLACES = torch.tensor([[0, 2, 2, 1], [1, 1, 0, 2]])
LABELS = torch.tensor([2, 0, 3])
TRUTH = torch.tensor([[True, False, True, False]]).expand(3, 4)

#: Operation, its operands, bound of the error of values, and of gradients (None: it has none).
CASES = {
    "exp": (torch.exp, [SMALL], 6e-3, 3e-3),
    "exp far below": (torch.exp, [WIDE.clamp(max=1) * 2], 2e-3, 1e-3),
    "log": (torch.log, [ABOVE], 1e-3, 2e-3),
    "sqrt": (torch.sqrt, [ABOVE], 5e-4, 2e-3),
    "rsqrt": (torch.rsqrt, [ABOVE[:, 1:]], 2e-4, 2e-3),
    "reciprocal": (torch.reciprocal, [torch.cat([ABOVE[:, 1:], -ABOVE[:, 1:]])], 2e-4, 2e-3),
    "division": (lambda x, y: x / y, [X, Y], 3e-4, 2e-3),
    "division of a number": (lambda y: 3 / y, [Y], 3e-4, 2e-3),
    "division by one column": (lambda x, y: x / y[:, :1], [X, Y], 3e-4, 2e-3),
    "sigmoid": (torch.sigmoid, [WIDE / 2], 1e-4, 1e-3),
    "tanh": (torch.tanh, [WIDE / 4], 2e-4, 1e-3),
    "erf": (torch.erf, [WIDE / 8], 2e-4, 2e-3),
    "gelu": (functional.gelu, [WIDE / 5], 5e-4, 3e-3),
    "gelu by tanh": (lambda x: functional.gelu(x, approximate="tanh"), [X], 2e-3, 5e-3),
    "silu": (functional.silu, [X], 5e-4, 2e-3),
    "softmax": (lambda x: torch.softmax(x, 1), [X * 3], 2e-4, 1e-3),
    "softmax of columns": (lambda x: functional.softmax(x, dim=0), [X], 2e-4, 1e-3),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), [X * 3], 3e-4, 2e-3),
    "abs": (torch.abs, [X], 1e-4, 1e-3),
    "sign": (torch.sign, [X], 0, None),
    "clamp": (lambda x: x.clamp(-1, 2.25), [X], 1e-4, 1e-3),
    "clamp below": (lambda x: torch.clamp(x, min=0.375), [X], 1e-4, 1e-3),
    "leaky relu": (lambda x: functional.leaky_relu(x, 0.1), [X], 1e-4, 1e-3),
    "max": (lambda x: x.max(1).values, [X], 1e-4, 1e-3),
    "max of all": (torch.max, [X], 1e-4, 1e-3),
    "max of two": (torch.max, [X, Y], 1e-4, 1e-3),
    "min": (lambda x: x.min(0, keepdim=True)[0], [X], 1e-4, 1e-3),
    "minimum": (torch.minimum, [X, Y], 1e-4, 1e-3),
    "amax": (lambda x: x.amax(-1), [X], 1e-4, 1e-3),
    "amin of two axes": (lambda x: x.amin((0, 1)), [X], 1e-4, 1e-3),
    "argmax": (lambda x: x.argmax(1), [X], 0, None),
    "argmin": (lambda x: x.argmin(0), [X], 0, None),
    "place of max": (lambda x: x.max(1).indices, [X], 0, None),
    "where": (lambda x, y: torch.where(x < y, x, y * 2), [X, Y], 1e-4, 1e-3),
    "where of public": (lambda x, y: torch.where(TRUTH, x, y), [X, Y], 1e-4, 1e-3),
    "masked_fill": (lambda x: x.masked_fill(TRUTH, 7.0), [X], 1e-4, 1e-3),
    "cat": (lambda x, y: torch.cat([x, y * 2, x], 1), [X, Y], 1e-4, 1e-3),
    "stack": (lambda x, y: torch.stack([x, y], -1), [X, Y], 1e-4, 1e-3),
    "gather": (lambda x: x.gather(0, PLACES), [X], 1e-4, 1e-3),
    "index_select": (lambda x: x.index_select(1, LABELS), [X], 1e-4, 1e-3),
    "list index": (lambda x: x[[2, 0, 0]] + x[:, [1]], [X], 1e-4, 1e-3),
    "tensor index": (lambda x: x[torch.arange(3), LABELS], [X], 1e-4, 1e-3),
    "boolean index": (lambda x: x[torch.tensor([True, False, True])], [X], 1e-4, 1e-3),
    "boolean places": (lambda x: x[TRUTH], [X], 1e-4, 1e-3),
    "pad": (lambda x: functional.pad(x, (1, 0, 0, 2)), [X], 1e-4, 1e-3),
    "pad with a value": (lambda x: functional.pad(x, (1, 1), value=1.5), [X], 1e-4, 1e-3),
    "flip": (lambda x: x.flip(1).roll(1, 0), [X], 1e-4, 1e-3),
    "batched matmul": (
        lambda x, y: torch.bmm(x, y.transpose(1, 2)), [IMAGES[:, 0], IMAGES[:, 1]], 1e-3, 1e-2
    ),
    "broadcast matmul": (lambda x, y: x @ y[0, 0], [IMAGES, IMAGES * 0.5], 1e-3, 2e-2),
    "batch by matrix": (lambda x, y: x @ y, [IMAGES, IMAGES[0, 0]], 1e-3, 2e-2),
    "conv2d": (
        lambda x, w: functional.conv2d(x, w, w[:, 0, 0, 0], stride=(2, 1), padding=(1, 2)),
        [IMAGES, FILTERS], 1e-3, 1e-2,
    ),
    "conv2d with dilation": (
        lambda x, w: functional.conv2d(x, w, dilation=2), [IMAGES, FILTERS], 1e-3, 1e-2
    ),
    "conv2d of groups": (
        lambda x, w: functional.conv2d(x, w[:, :1], groups=2), [IMAGES, FILTERS], 1e-3, 1e-2
    ),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 2, 1), [IMAGES], 1e-4, 1e-3),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), [IMAGES], 1e-4, 1e-3),
    "max_pool2d padded": (lambda x: functional.max_pool2d(x, 3, 2, 1), [IMAGES], 1e-4, 1e-3),
    "adaptive_avg_pool2d": (
        lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), [IMAGES], 1e-4, 1e-3
    ),
    "layer_norm": (
        lambda x, y: functional.layer_norm(x, (4,), y[0], y[1]), [X, Y], 2e-3, 1e-2
    ),
    "batch_norm": (
        lambda x, y: functional.batch_norm(x, None, None, y[0], y[1], training=True),
        [X, Y], 2e-3, 1e-2,
    ),
    "var": (lambda x: x.var(1), [X], 1e-3, 1e-3),
    "mse_loss": (functional.mse_loss, [X, Y], 1e-3, 1e-3),
    "l1_loss": (functional.l1_loss, [X, Y], 1e-3, 1e-3),
    "cross_entropy": (lambda x: functional.cross_entropy(x, LABELS), [X], 1e-3, 1e-3),
    "cross_entropy of rows": (
        lambda x: functional.cross_entropy(x, functional.one_hot(LABELS, 4).float()), [X], 1e-3,
        1e-3,
    ),
    "nll_loss": (lambda x: functional.nll_loss(x, LABELS, reduction="sum"), [X], 1e-3, 1e-3),
    "bce with logits": (
        lambda x: functional.binary_cross_entropy_with_logits(x, TRUTH.float()), [X], 1e-3, 1e-3
    ),
    "bce": (
        lambda x: functional.binary_cross_entropy(x, TRUTH.float()), [X.sigmoid()], 1e-3, 5e-3
    ),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y, value=-0.1), [X, Y], 1e-3, 1e-2),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), [X, Y], 1e-3, 1e-3),
}  # fmt: skip


def compared(case, shared):
    """Errors of the value and of the gradients of its weighted sum."""
    operation, operands, _, slope = CASES[case]
    plain = [each.clone().requires_grad_(slope is not None) for each in operands]
    hidden = [shared(each) for each in plain]
    want, found = operation(*plain), operation(*hidden)
    assert found.shape == want.shape
    value = (found.get().float_precision() - want).abs().max().item()
    if slope is None:
        return value, 0.0
    weights = torch.linspace(-1, 1, want.numel()).reshape(want.shape) if want.dim() else 1.0
    (want * weights).sum().backward()
    (found * weights).sum().backward()
    apart = [
        (one.grad.get().float_precision() - other.grad).abs() / (1 + other.grad.abs())
        for one, other in zip(hidden, plain, strict=True)
    ]
    return value, max(each.max().item() for each in apart)


def test_a_gradient_passes_the_bounds_of_clamp(shared):
    """As in torch before 2.14, which lets none pass; in between both agree, see `CASES`."""
    x = shared(torch.tensor([-1.5, -1.0, 0.5, 2.0, 2.5])).requires_grad_()
    x.clamp(-1, 2).sum().backward()
    assert torch.allclose(
        x.grad.get().float_precision(), torch.tensor([0.0, 1, 1, 1, 0]), atol=1e-3
    )


def test_the_same_at_workers_of_every_kind(any_shared):
    x, y = any_shared(X[:2, :2]), any_shared(Y[:2, :2]).requires_grad_()
    plain = Y[:2, :2].clone().requires_grad_()
    found, want = torch.softmax(x / y, 1), torch.softmax(X[:2, :2] / plain, 1)
    assert torch.allclose(found.get().float_precision(), want, atol=1e-3)
    found[:, 0].sum().backward()
    want[:, 0].sum().backward()
    assert torch.allclose(y.grad.get().float_precision(), plain.grad, atol=5e-3)
    images, filters = any_shared(IMAGES[:1, :, :4, :4]), any_shared(FILTERS[:1])
    found = functional.max_pool2d(functional.conv2d(images, filters), (2, 1))
    want = functional.max_pool2d(functional.conv2d(IMAGES[:1, :, :4, :4], FILTERS[:1]), (2, 1))
    assert torch.allclose(found.get().float_precision(), want, atol=1e-3)


def test_only_so_many_bits_of_a_product_are_revealed(shared):
    """All bits of a product of two numbers are their factors, if those are few."""
    x = shared(torch.tensor([[1.0000153]]))  # 65537 / 65536
    assert (x * x).get().child.elements.item() in (65537, 65538, 65539)


def test_public_operands_are_not_shared(shared):
    x = shared(X)
    with pytest.raises(UserError):
        x[x > 0]
    with pytest.raises(UserError):
        x.gather(0, x)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (functional.cross_entropy, {"ignore_index": 2}),
        (functional.cross_entropy, {"label_smoothing": 0.1}),
        (functional.nll_loss, {"ignore_index": 2}),
        (functional.nll_loss, {"weight": torch.ones(4)}),
        (functional.nll_loss, {"size_average": False}),
        (functional.cross_entropy, {"reduce": False}),
        (functional.mse_loss, {"weight": torch.ones(3, 4)}),
        (functional.mse_loss, {"size_average": False}),
        (functional.l1_loss, {"reduce": False}),
        (functional.binary_cross_entropy, {"weight": torch.ones(4)}),
        (functional.binary_cross_entropy_with_logits, {"pos_weight": torch.ones(4)}),
    ],
)
def test_options_of_losses_that_are_not_computed_are_refused(shared, loss, options):
    of_classes = loss in (functional.cross_entropy, functional.nll_loss)
    target = LABELS if of_classes else (X > 0).float()
    with pytest.raises(UserError, match="with"):
        loss(shared(X), target, **options)


@pytest.mark.parametrize(
    "operation",
    [torch.sum, torch.mean, functional.softmax, functional.log_softmax, torch.zeros_like],
)
def test_another_type_of_the_result_is_refused(shared, operation):
    options = {"dim": 1} if "softmax" in operation.__name__ else {}
    with pytest.raises(UserError, match="with dtype"):
        operation(shared(X), dtype=torch.int64, **options)
    operation(shared(X), dtype=None, **options)


#: Operations that replace the values of their first operand.
IN_PLACE = {
    "relu": lambda x, y: functional.relu(x, inplace=True),
    "silu": lambda x, y: functional.silu(x, inplace=True),
    "leaky_relu": lambda x, y: functional.leaky_relu(x, 0.1, inplace=True),
    "hardtanh": lambda x, y: functional.hardtanh(x, -2, 1, inplace=True),
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y[0]),
    "zero_": lambda x, y: x.zero_(),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_operations_in_place_change_the_tensor_and_its_gradient(shared, case):
    found = []
    for made in (shared, torch.clone):
        x, y = made(X).requires_grad_(), made(Y).requires_grad_()
        inner = x * 3 + y
        assert IN_PLACE[case](inner, y) is inner
        ((inner * torch.linspace(-1, 1, 12).reshape(3, 4)).sum() + x.sum() + y.sum()).backward()
        found.append([inner, x.grad, y.grad])
    for hidden, plain in zip(*found, strict=True):
        values = hidden.get().float_precision()
        assert torch.allclose(values, plain.detach(), atol=2e-2, rtol=2e-3)


def test_changes_in_place_that_would_falsify_a_gradient_are_refused(shared):
    x = shared(X).requires_grad_()
    with pytest.raises(UserError, match="leaf"):
        x.mul_(2)
    inner = x * 3
    squares = (inner * inner).sum()
    functional.relu(inner, inplace=True)
    with pytest.raises(UserError, match="changed in place"):
        squares.backward()
    with pytest.raises(UserError, match="3x4 to 2x3x4"):
        inner.add_(torch.ones(2, 3, 4))


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_within_their_bounds(shared, case):
    _, _, most, slope = CASES[case]
    value, gradient = compared(case, shared)
    assert value <= most
    assert gradient <= (slope or 0)


def trained(module, rule, x, y, loss):
    optimizer = rule(module.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
    return module


RULES = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "adam": lambda each: torch.optim.Adam(each, lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("labels", ["public", "shared", "rows"])
def test_a_network_of_images_learns_what_it_learns_on_floats(workers, shared, rule, labels):
    def network():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(12, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3),
        )  # fmt: skip

    alice, bob, carol = workers
    # In all steps of these, maxima and signs are clear beside the shares' rounding.
    torch.manual_seed(142 if rule == "sgd" else 0)
    images, classes = torch.randn(8, 2, 6, 6), torch.arange(8) % 3
    truth = functional.one_hot(classes, 3).float() if labels == "rows" else classes
    hidden = truth if labels == "public" else shared(truth)
    loss = functional.cross_entropy
    plain = trained(network(), RULES[rule], images, truth, loss)
    module = tensors.share(network(), alice, bob, dealer=carol)
    found = tensors.get(trained(module, RULES[rule], shared(images), hidden, loss))
    for name, one in plain.state_dict().items():
        apart = (found.state_dict()[name].float() - one.float()).abs()
        # Adam takes whole steps of gradients that are all rounding.
        assert apart.max() < (5e-3 if rule == "sgd" else 0.02), name
        assert apart.mean() < 2e-3, name


def test_adam_moves_weights_by_small_gradients(workers, shared):
    alice, bob, carol = workers
    slopes = torch.tensor([4e-3, -8e-3, 0.02, -0.3, 5.0])
    plain = [torch.zeros(5).requires_grad_()]
    hidden = [tensors.fix_precision(torch.zeros(5).requires_grad_())]
    hidden[0] = hidden[0].share(alice, bob, dealer=carol)
    rules = [torch.optim.Adam(each, lr=0.1) for each in (plain, hidden)]
    for _ in range(5):
        for (weights,), rule in zip((plain, hidden), rules, strict=True):
            rule.zero_grad()
            (weights * slopes).sum().backward()
            rule.step()
    assert torch.allclose(hidden[0].get().float_precision(), plain[0], rtol=0.05)


#: Rounds, and payload bytes an element that both holders together send: at most those of CrypTen
#: 0.4.1 by its own counters, which are the first pair.
COSTS = {
    "mul": ((1, 32), lambda x, y: x * y),
    "square": ((1, 16), lambda x, y: x**2),
    "lt": ((8, 432), lambda x, y: x < y),
    "eq": ((7, 208), lambda x, y: x == y),
    "relu": ((9, 464), lambda x, y: torch.relu(x)),
    "where": ((10, 496), lambda x, y: torch.where(x > 0, x, y)),
    "exp": ((8, 128), lambda x, y: torch.exp(x)),
    "log": ((32, 736), lambda x, y: torch.log(y)),
    "reciprocal": ((38, 1104), lambda x, y: torch.reciprocal(y)),
    "div": ((39, 1136), lambda x, y: x / y),
    "sqrt": ((18, 400), lambda x, y: torch.sqrt(y)),
    "rsqrt": ((17, 368), lambda x, y: torch.rsqrt(y)),
    "sigmoid": ((23, 752), lambda x, y: torch.sigmoid(x)),
    "erf": ((34, 752), lambda x, y: torch.erf(x)),
    "max": ((57, 1452), lambda x, y: x.reshape(-1, 10).amax(1)),
    "argmax": ((57, 1452), lambda x, y: x.reshape(-1, 10).argmax(1)),
    "softmax": ((94, 1659), lambda x, y: torch.softmax(x.reshape(-1, 10), 1)),
    "max_pool2d": ((46, 1420), lambda x, y: functional.max_pool2d(x.reshape(1, 8, 10, 10), 2)),
    "avg_pool2d": ((0, 0), lambda x, y: functional.avg_pool2d(x.reshape(1, 8, 10, 10), 2)),
    "matmul": ((1, 32), lambda x, y: x.reshape(-1, 10) @ y.reshape(10, -1)),
}
#: Of a frame's header; CrypTen counts none.
HEADER_BYTES = 16


@pytest.fixture(scope="module")
def members():
    with LocalMembers(2) as made:
        yield made


@pytest.mark.parametrize("name", COSTS)
def test_a_program_of_parties_sends_no_more_than_crypten(members, name):
    count, ((rounds, element_bytes), operation) = 800, COSTS[name]
    x, y = torch.linspace(-4, 4, count), torch.linspace(0.1, 9, count)

    def shared(member):
        party = tensors.Party(member)
        own = (x, y) if member.role == 0 else (None, None)
        return [party.share(0, (count,), each) for each in own]

    def sent():
        rows = [each for each in members.traffic() if each.sender != "P2"]
        return sum(each.wire_bytes - each.frames * HEADER_BYTES for each in rows)

    operands = members.run(shared)
    before = sent()
    members.hops()
    found = members.run(lambda member: operation(*operands[member.role]))
    assert members.hops() <= rounds
    assert sent() - before <= element_bytes * count
    values = members.run(lambda member: found[member.role].get().float_precision())
    assert torch.equal(values[0], values[1])
    assert torch.allclose(values[0], operation(x, y).float(), atol=0.05 if name == "exp" else 5e-3)


def test_a_quotient_that_is_multiplied_hides_the_element(members):
    """What a holder learns is uniform, whatever the elements are; and no product is off."""
    x = torch.tensor([3.0, -2.5, 0.0, 9.0]).repeat(500)

    def program(member):
        party = tensors.Party(member)
        shared = party.share(0, (2000,), x if member.role == 0 else None)
        whole = (shared * shared).divided()
        seen = None if member.deals else whole.child.parts.opened.turn.float().mean().item()
        product = (whole * shared[::1]) * (whole * 0.5) - whole * whole
        return seen, product.get().float_precision()

    (seen, found), *_ = members.run(program)
    assert 0.4 < seen < 0.6
    assert torch.allclose(found, x**5 / 2 - x**4, rtol=2e-3, atol=0.2)
