"""Noise that states an epsilon covers every row, whoever chose weights, labels and terms."""

from __future__ import annotations

import numpy as np
import torch
from promise import BrokenPromiseError
from torch import nn

from vfl import tensors
from vfl.compression import StepContext
from vfl.core.errors import VFLError
from vfl.core.seeds import Secret
from vfl.defenses import make
from vfl.privacy.dpsgd import RowClipper
from vfl.tensors.private import Plan, described

ROWS, COLUMNS = 120, 6
HIDDEN = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def worker_with_rows():
    (alice,) = tensors.virtual("alice")
    rows = alice.load(HIDDEN.clone(), tag="x")
    alice.grant("x", epsilon=1.0)
    return alice, rows


def correlation(found):
    return abs(float(np.corrcoef(found.reshape(-1).numpy(), HIDDEN.reshape(-1).numpy())[0, 1]))


def test_tiny_weights_and_huge_labels_read_no_row_at_a_worker():
    """A worker's gradients hide each of its rows, whatever weights and labels the leader takes."""
    alice, rows = worker_with_rows()
    first = nn.Linear(COLUMNS, COLUMNS, bias=False)
    last = nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        first.weight.copy_(5e-24 * torch.eye(COLUMNS))  # squares of activations underflow
        last.weight.zero_()
    labels = tensors.send(1e19 * ROWS / 2 * torch.eye(ROWS), alice)  # a gradient of 1e19 a row
    training = tensors.PrivateTraining(
        nn.Sequential(first, last), [rows], [labels], clip=1e-6, noise=6.0, batch_size=ROWS
    )
    training.step()
    read = correlation(last.weight.grad)
    if read > 0.5:
        epsilon = training.statement(1e-5).epsilon
        raise BrokenPromiseError(
            f"read {ROWS} hidden rows with correlation {read:.3f} at a stated epsilon {epsilon:.3f}"
        )


def test_weights_of_other_shapes_thin_no_noise_at_a_worker():
    """Noise of the stated deviation is in every sum, whatever shapes the weights have."""
    many = 250_000
    layers = described(nn.Sequential(nn.Linear(1, many, bias=False)))
    plan = Plan({"layers": layers, "clip": 1.0, "noise": 6.0, "rate": 1.0, "loss": "mse"})
    try:
        (found,) = plan.gradients(torch.ones(9, 1), torch.zeros(9, 1), [torch.ones(1, 1)])
    except (VFLError, ValueError):
        return
    raise BrokenPromiseError(
        f"one sum came {found.numel()} times, each with noise of its own:"
        f" {6 / found.numel() ** 0.5:.3f} x clip is left where 6 x clip is promised"
    )


def test_a_norm_that_underflows_leaves_no_cut_without_noise():
    """Clipped noise hides each cut, whatever norm the terms name and however small cuts are."""
    cuts = 1e-29 * torch.randn(398, 4, generator=torch.Generator().manual_seed(2))
    context = StepContext(0, training=True, secret=Secret(bytes(32)))
    try:
        sent = make("clipped_noise:norm=1e-37,sigma=4").embedding(cuts, context)
    except VFLError:
        return
    same = int((sent - cuts).abs().max(1).values.lt(1e-3 * cuts.abs().amax(1)).sum())
    if same:
        raise BrokenPromiseError(f"{same} of {len(cuts)} cuts left without noise, at epsilon 1.993")


def test_a_tiny_clip_norm_bounds_a_row():
    """A row moves a clipped sum by at most the clip norm."""
    for clip in (1e-30, 1e-18):
        model = nn.Linear(COLUMNS, 4)
        try:
            clipper = RowClipper(model, clip)
        except VFLError:
            continue
        grad = 1e-23 * torch.ones(1, 4)
        with clipper.recording() as calls:
            output = model(HIDDEN[:1])
        sums, *_ = clipper.sums(output, grad, list(model.parameters()), calls)
        moved = float(torch.cat([one.double().reshape(-1) for one in sums]).norm())
        if moved > 1.001 * clip:
            raise BrokenPromiseError(f"a row contributes {moved / clip:.2g} x clip, clip {clip:g}")


def test_low_bits_of_noisy_cuts_tell_nothing():
    """The digits of a noisy cut are as likely for any row as its epsilon says."""
    width, trials = 4096, 40
    defense = make("clipped_noise:norm=1,sigma=4")
    # A float32 sum with 2^-6 has no digit below 2^-30.
    zero, other = torch.zeros(trials, width), torch.full((trials, width), 2.0**-6)
    sent = [
        defense.embedding(rows, StepContext(step, training=True, secret=Secret(bytes(32))))
        for step, rows in enumerate((zero, other))
    ]
    fine = [(one.double() * 2.0**30 % 1 != 0).any(1).double().mean() for one in sent]
    advantage = abs(float(fine[0] - fine[1]))
    epsilon = defense.privacy()[0].epsilon
    most = float(np.expm1(epsilon) / (np.exp(epsilon) + 1))
    if advantage > max(most, 0.5):
        raise BrokenPromiseError(
            f"low bits tell two rows apart with advantage {advantage:.2f}; epsilon {epsilon:.2f}"
            f" allows {most:.2f}"
        )
