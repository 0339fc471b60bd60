"""What the page owns up to: exact outputs tell exact inner products, and these fix columns.

The label party follows the protocol. It knows G as whole numbers and the outputs of the same rows
before and after a step as words of the ring, so it solves for inner products without any error. The
rows are whole numbers; a reduced basis of the lattice they span is that of the columns.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from shared_layers import LABEL, SECURE, TRAIN, experiment

from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.mpc.secure.shared_layer import INPUT_BITS, encode_gradient, encode_inputs
from vfl.session import Exchange
from vfl.training.local import LocalSession

COLUMNS, BATCH, ROWS = 4, 5, 10


def orthogonal(products):
    """Mu and squared lengths of Gram and Schmidt, from exact inner products (Cohen 2.6.3)."""
    count = len(products)
    mu = [[Fraction(0)] * count for _ in range(count)]
    lengths = [Fraction(0)] * count
    for i in range(count):
        left = [Fraction(0)] * (i + 1)
        for j in range(i + 1):
            left[j] = products[i][j] - sum(mu[j][k] * left[k] for k in range(j))
            if j < i:
                mu[i][j] = left[j] / lengths[j] if lengths[j] else Fraction(0)
        lengths[i] = left[i]
    return mu, lengths


def reduced(gram):
    """A reduced basis of what some vectors span, as whole multiples of them (LLL 1982; MLLL)."""
    basis = []
    for new in np.eye(len(gram), dtype=object):
        basis.append(new)
        at = 1
        while at < len(basis):
            mu, lengths = orthogonal([[a @ gram @ b for b in basis] for a in basis])
            for j in reversed(range(at)):
                times = round(mu[at][j])
                basis[at] = basis[at] - times * basis[j]
                mu[at] = [a - times * (b if k < j else int(k == j))
                          for k, (a, b) in enumerate(zip(mu[at], mu[j], strict=True))]  # fmt: skip
            if basis[at] @ gram @ basis[at] == 0:
                basis.pop(at)
            elif lengths[at] < (Fraction(3, 4) - mu[at][at - 1] ** 2) * lengths[at - 1]:
                basis[at - 1], basis[at] = basis[at], basis[at - 1]
                at = max(1, at - 1)
            else:
                at += 1
    return basis


class Words:
    """A ring that notes the sum of what is sent, as the label party could.

    Args:
        ring: the wrapped ring.
        cut: number of low bits of every word that were not sent.
    """

    def __init__(self, ring, cut):
        self.ring, self.sums = ring, []
        self.check, self.cut = ring.check, np.uint64(cut)

    def decode(self, payloads, rows, width):
        words = (np.frombuffer(payload, "<u8") for payload in payloads)
        total = sum(one >> self.cut << self.cut for one in words)
        self.sums.append(total.view("<i8").reshape(rows, width))
        return self.ring.decode(payloads, rows, width)


def heard(data, secure, cut=0):
    """Outputs of some rows before, between and after two steps on them; both gradients."""
    names = [name for name in data if data[name].inputs is not None]
    one = LocalSession(experiment(secure, names), data, outputs=10)
    joint = one.label.aggregator
    joint._ring = words = Words(joint._ring, cut)
    codec, gradients = one.label.ends[names[0]].codec, []
    encode = codec.encode_grad

    def noting(grad, saved, context):
        gradients.append(encode_gradient(grad, TRAIN["learning_rate"], names[0]).numpy())
        return encode(grad, saved, context)

    codec.encode_grad = noting
    asked = np.arange(ROWS)
    rows = (asked, asked[:BATCH], asked, asked[BATCH:], asked)
    phases = ("validation", "train") * 2 + ("validation",)
    one.go_on(
        None,
        [Exchange(step, phase, 1, own, True)
         for step, (phase, own) in enumerate(zip(phases, rows, strict=True))],
    )  # fmt: skip
    return words.sums[::2], gradients


@pytest.mark.parametrize(("secure", "parties"), [(SECURE, ["bank"]), ("beaver", ["bank", "shop"])])
def test_exact_outputs_fix_columns_up_to_order_and_sign(secure, parties):
    data, draw = load_bundled("digits", parties, LABEL, Dealing(0, limit=300)), generator(1, "rows")
    share = COLUMNS // len(parties)
    for name in parties:  # any numbers will do
        data[name] = replace(data[name], inputs=torch.rand(300, share, generator=draw) * 2 - 1)
    outputs, gradients = heard(data, secure)
    products = []
    for before, after, gradient in zip(outputs, outputs[1:], gradients, strict=False):
        moved = before - after  # modulo 2^64, which nothing here comes near
        solved = np.linalg.lstsq(gradient.T.astype(float), moved.T.astype(float), rcond=None)[0]
        exact = np.rint(solved).astype(np.int64).T
        assert np.array_equal(exact @ gradient, moved), "exact, in whole numbers"
        products.append(exact)
    gram = np.concatenate(products, 1).astype(object)
    basis = reduced(gram)
    found = np.array([gram @ one // (one @ gram @ one) for one in basis], dtype=object)
    true = [encode_inputs(data[name].inputs[:ROWS], name).numpy() for name in parties]
    columns = {tuple(np.abs(one)) for one in np.concatenate(true, 1).T}
    hit = {tuple(np.abs(one)) for one in found} & columns
    assert len(hit) >= COLUMNS, "every column but that of ones, which stands as 1"


@pytest.mark.parametrize(("steps", "kept"), [(2**13, False), (16, True), (1, True)])
def test_cutting_low_bits_off_hides_no_products_of_coarse_columns(steps, kept):
    """Without the lower half of each word only fine columns' products stay inexact: one rounds."""
    parties, draw = ["bank", "shop"], generator(1, "rows")
    data = load_bundled("digits", parties, LABEL, Dealing(0, limit=300))
    for name in parties:
        drawn = torch.rand(300, COLUMNS // 2, generator=draw) * 2 - 1
        data[name] = replace(data[name], inputs=torch.round(drawn * steps) / steps)
    outputs, gradients = heard(data, "beaver", cut=32)
    true = [encode_inputs(data[name].inputs[:ROWS], name).numpy() for name in parties]
    rows = np.concatenate(true, 1).astype(object)
    grain = (2**INPUT_BITS // steps) ** 2
    moved = (outputs[0] - outputs[1]).astype(float)
    solved = np.linalg.lstsq(gradients[0].T.astype(float), moved.T, rcond=None)[0].T
    exact = np.rint(solved / grain) * grain == (rows @ rows[:BATCH].T).astype(float)
    assert exact.all() if kept else exact.mean() < 0.1
