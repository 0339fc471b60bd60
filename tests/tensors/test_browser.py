"""Two pages of a real browser hold shares and compute on them; a process deals."""

import subprocess
import sys

import pytest
import torch
from browser import BROWSER, Browser
from torch.nn import functional

from vfl import tensors
from vfl.core.errors import ConsentError, LostPeerError, MissingPartyError, UserError
from vfl.core.frame import Frame, Kind
from vfl.tensors.browser import PageLink

pytest.importorskip("fastapi")
X = torch.tensor([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])
Y = torch.tensor([[0.5, 4.0, -1.0], [2.5, -3.0, 1.0]])


@pytest.fixture
def pages(tmp_path):
    """alice and bob are tabs, carol a process; and the tabs."""
    if BROWSER is None:
        pytest.skip("no browser")
    with tensors.Pool("alice", "bob", "carol") as pool:
        pool.write_tickets(tmp_path)
        command = [sys.executable, "-m", "vfl", "worker", str(tmp_path / "carol.ticket")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        tabs = [Browser(tmp_path / name) for name in ("alice", "bob")]
        try:
            for name, tab in zip(("alice", "bob"), tabs, strict=True):
                tab.call("Page.navigate", url=pool.page(name))
            yield pool.wait(60), tabs
        finally:
            for tab in tabs:
                tab.close()
    assert process.wait(30) == 0


def products(x, y):
    """Products of quotients, which a division has opened already, and of moved quotients."""
    q, r = x * y, x * 0.5
    moved = q.reshape(3, 2) * r.reshape(3, 2), q[0] * r, q.t() * y.t(), q.t() @ r
    return [q * q, q * r, q * x, y * q, *moved]


def test_pages_compute_on_shares_what_torch_does(pages):
    (alice, bob, carol), tabs = pages

    def shared(values):
        return tensors.fix_precision(values).share(alice, bob, dealer=carol)

    for found, want in zip(products(shared(X), shared(Y)), products(X, Y), strict=True):
        assert torch.allclose(found.get().float_precision(), want, atol=1e-3)
    x, y = shared(X), shared(Y).requires_grad_()
    found = functional.linear(x, y, y[:, 0]) * 0.5 - 1.5
    loss = (found * found).mean() + (x * y).sum(0)[1] + x[1, 2]
    plain = Y.clone().requires_grad_()
    want = functional.linear(X, plain, plain[:, 0]) * 0.5 - 1.5
    value = (want * want).mean() + (X * plain).sum(0)[1] + X[1, 2]
    assert torch.allclose(loss.get().float_precision(), value, atol=1e-3)
    loss.backward()
    value.backward()
    assert torch.allclose(y.grad.get().float_precision(), plain.grad, atol=1e-3)
    assert int(tabs[0].value("document.getElementById('steps').textContent")) > 20
    assert len(alice) > 2
    del found, loss
    y.grad = None
    del x, y
    assert len(alice) == 0
    # A share of what is shared, as the page has it, is no value.
    z = shared(X)
    share = tabs[0].value("String([...held.values()][0].value.data[0])")
    assert abs(int(share)) > 2**50
    assert torch.equal(z.get().float_precision(), X)


def test_what_a_page_does_not_do(pages):
    (alice, bob, carol), tabs = pages
    far = tensors.send(X, alice)
    assert torch.equal(far.get(), X)
    with pytest.raises(UserError, match="a page does"):
        far + 1
    shared = tensors.fix_precision(X).share(alice, bob, dealer=carol)
    with pytest.raises(UserError, match="does not do this"):
        _ = shared < 0
    with pytest.raises(UserError, match="without MACs"):
        tensors.fix_precision(X).share(alice, bob, dealer=carol, mac=True)
    hidden = tensors.PointerTensor(alice, *alice.store(X, []))
    with pytest.raises(ConsentError):
        hidden.get()
    tabs[1].call("Page.navigate", url="about:blank")

    def ask_often():  # the browser closes the old page's connection a little later
        for _ in range(100):
            tensors.fix_precision(X).share(alice, bob, dealer=carol).get()

    with pytest.raises(LostPeerError, match="bob has disconnected"):
        ask_often()


def test_a_page_that_nobody_opens():
    with tensors.Pool("alice") as pool:
        pool.page("alice")
        with pytest.raises(MissingPartyError, match="page of worker alice"):
            pool.wait(0.1)


def test_a_tab_that_closes_while_it_is_told_something_is_lost():
    """A server that writes to it may raise an error of its own."""

    def closed(raw):
        raise RuntimeError("the handler is closed")

    link = PageLink("alice")
    link.attach(closed)
    with pytest.raises(LostPeerError, match="was closed"):
        link.send(Frame(Kind.PROTOCOL, 0, b""))
    with pytest.raises(LostPeerError, match="was closed"):
        link.poll()
