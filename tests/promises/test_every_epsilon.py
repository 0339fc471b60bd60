"""A stated epsilon holds for low bits, rare draws and rounding too."""

from __future__ import annotations

import math

import numpy as np
import torch
from promise import BrokenPromiseError
from torch import nn
from torch.nn.functional import cross_entropy

from vfl.compression import StepContext
from vfl.core.seeds import Secret
from vfl.defenses import make
from vfl.tensors.private import Plan, described

#: Of the sums below, in clip norms: draws of 1,000 numbers are longer once in e^100.
LONGEST_NOISE = 0.5


def released(layers: list[nn.Module], loss: str, rows, labels, weights):
    """The sum of clipped gradients that leaves a worker, in units of the clip norm."""
    request = {"layers": described(nn.Sequential(*layers)), "clip": 1.0, "noise": 0.01}
    plan = Plan(request | {"rate": 1.0, "loss": loss})
    found = plan.gradients(rows, labels, weights)
    return torch.cat([one.double().reshape(-1) for one in found]) * len(rows)


def test_no_rounding_decides_the_gradients_of_other_rows():
    """A row more at a worker moves the gradients that leave it by one clip norm at most."""
    draw = torch.Generator().manual_seed(0)
    rows, first = torch.randn(70, 7, generator=draw), torch.randn(1, 7, generator=draw)
    rows -= (rows @ first.T) / (first @ first.T) * first  # 0, but for rounding
    layers = [nn.Linear(7, 1, bias=False), nn.Linear(1, 1)]
    weights, labels = [first, torch.tensor([[1e12]]), torch.zeros(1)], torch.full((70, 1), 0.5)
    whole = released(layers, "bce", rows, labels, weights)
    most = 0.0
    for row in range(0, 70, 5):
        kept = torch.arange(70) != row
        others = released(layers, "bce", rows[kept], labels[kept], weights)
        most = max(most, float((whole - others).norm()))
    if most > 1 + LONGEST_NOISE:
        raise BrokenPromiseError(f"a row more moves the sum by {most:.1f} clip norms, 1 is stated")


def test_the_logits_of_two_classes_tell_no_label_by_their_sum():
    """The gradient of a row's logits is as likely under either label as the epsilon says."""
    rows, epsilon = 200_000, 0.1
    shares = []
    for label in (0, 1):
        logits = torch.tensor([[-3.0, 3.7]]).repeat(rows, 1).requires_grad_()
        labels, context = torch.full((rows,), label), StepContext(label, True, Secret(bytes(32)))
        extra = make(f"tpsl:epsilon={epsilon}").loss({}, labels, logits, context)
        loss = cross_entropy(logits, labels)
        (loss if extra is None else loss + extra).backward()
        shares.append(float((logits.grad.double().sum(1) != 0).double().mean()))
    least, most = sorted(shares)
    risk = 2 / math.sqrt(rows)  # of each share, 4 deviations
    if most - risk > math.exp(epsilon) * (least + risk):
        raise BrokenPromiseError(
            f"logits sum to another number than 0 in {shares[0]:.3f} and {shares[1]:.3f} of the"
            f" rows by label: epsilon is at least {math.log(most / least):.3f}, {epsilon} is stated"
        )


def test_rare_draws_tell_no_sum():
    """Noise of every size is as fine as its grid, so that a large draw tells nothing."""
    tail = [int(2**64 - 2**20 + one * 2**11) for one in range(3)]  # 8 deviations, 30 scales
    for law in ("normal", "laplace"):
        words = np.array([[one, spare] for one in tail for spare in (0, 1)], "<u8").tobytes()

        class Chosen(Secret):
            def stream(self, count, *purpose, words=words):
                return words

        draws = np.unique(getattr(Chosen(bytes(32)), law)((6,)))
        gap, grid = float(np.diff(draws).min()), 2.0**-24
        if gap > grid:
            raise BrokenPromiseError(
                f"large draws of the {law} law are {gap / grid:.0f} grid steps apart:"
                " one of them shows which of two sums is below it"
            )
