"""A product through a pointer, and a small regressor at a worker and on shares, beside torch.

The regressor is 13-32-1 on Boston Housing (506 rows); where no folder of data sets is, 10-32-1 on
the diabetes rows of scikit-learn. All workers are in this process, so its seconds are those of all
of them.
"""

from __future__ import annotations

import gzip
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor
from torch.nn import functional

from benchmarks import harness
from vfl import tensors
from vfl.config.toml import Settings
from vfl.core.seeds import generator, use_one_thread
from vfl.datasets.sources import data_folder

STEPS, SIZES = 200, ((64, 128, 64), (256, 256, 256))
_BATCH, _RATE = 32, 0.05


class TensorRow(Settings):
    """One thing that was measured.

    Attributes:
        what: a product by its sizes, or a step of the regressor by its activation.
        where: "plain", "pointer" or "shares".
        ms: median of a product or a step.
        ratio: to the plain one.
        mse: on test rows, in squared units of the labels; 0 for a product.
    """

    what: str
    where: str
    ms: float
    ratio: float
    mse: float


def housing() -> tuple[Tensor, Tensor, float]:
    """Standardised inputs and labels in a fixed order, and the variance of these."""
    path = data_folder(None) / "boston-housing" / "housing.data.gz"
    if path.is_file():
        with gzip.open(path, "rt") as file:
            table = torch.from_numpy(np.loadtxt(file)).float()
        inputs, labels = table[:, :-1], table[:, -1:]
    else:
        found = load_diabetes()
        inputs = torch.from_numpy(found.data).float()
        labels = torch.from_numpy(found.target).float()[:, None]
    order = torch.randperm(len(labels), generator=generator(0, "benchmark rows"))
    inputs, labels = inputs[order], labels[order]
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    deviation = float(labels.std())
    return inputs, (labels - labels.mean()) / deviation, deviation**2


class _Regressor(torch.nn.Module):
    def __init__(self, columns: int, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(columns, 32), torch.nn.Linear(32, 1)
        self.activation: Callable[[Any], Any] = {"relu": torch.relu, "square": torch.square}[
            activation
        ]

    def forward(self, inputs: Any) -> Any:
        return self.last(self.activation(self.first(inputs)))


def bench_tensors(
    activations: Sequence[str] = ("relu", "square"),
    *,
    steps: int = STEPS,
    say: Callable[[str], None] = harness.silent,
) -> list[TensorRow]:
    """Products through a pointer, and training of the regressor.

    Args:
        activations: of the regressor.
        steps: of a training.
        say: told a line about each.
    """
    use_one_thread()
    alice, bob, carol = tensors.virtual("alice", "bob", "carol")
    rows = []
    for size in SIZES:
        say(f"product {size}")
        left, right = torch.rand(size[0], size[1]), torch.rand(size[1], size[2])
        far = tensors.send(left, alice), tensors.send(right, alice)
        taken = [_times(partial(torch.matmul, *pair), 10 * steps) for pair in ((left, right), far)]
        what = "product " + "x".join(map(str, size))
        rows += _rows(what, ("plain", "pointer"), taken, (0.0, 0.0))
    inputs, labels, variance = housing()
    known = len(labels) * 4 // 5
    for activation in activations:
        places: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
            "plain": (lambda each: each, lambda each: each),
            "pointer": (lambda each: tensors.send(each, alice), tensors.get),
            "shares": (
                lambda each: (
                    tensors.share(each, alice, bob, dealer=carol)
                    if isinstance(each, torch.nn.Module)
                    else tensors.fix_precision(each).share(alice, bob, dealer=carol)
                ),
                tensors.get,
            ),
        }
        taken, errors = [], []
        for where, (there, back) in places.items():
            say(f"{activation}, {where}")
            model = there(_Regressor(inputs.shape[1], activation))
            taken.append(_train(model, there(inputs[:known]), there(labels[:known]), steps))
            with torch.no_grad():
                guess = back(model)(inputs[known:])
                errors.append(float(functional.mse_loss(guess, labels[known:])) * variance)
        rows += _rows(f"step, {activation}", tuple(places), taken, errors)
    return rows


def _train(model: Any, inputs: Any, labels: Any, steps: int) -> float:
    rule = torch.optim.SGD(model.parameters(), lr=_RATE)
    batches = len(labels) // _BATCH
    taken = []
    for step in range(steps):
        at = step % batches * _BATCH
        rows, truth = inputs[at : at + _BATCH], labels[at : at + _BATCH]
        began = time.perf_counter()
        rule.zero_grad()
        loss: Any = functional.mse_loss(model(rows), truth)
        loss.backward()
        rule.step()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _times(work: Callable[[], object], count: int) -> float:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _rows(
    what: str, places: Sequence[str], taken: Sequence[float], errors: Sequence[float]
) -> list[TensorRow]:
    return [
        TensorRow(what=what, where=where, ms=each * 1e3, ratio=each / taken[0], mse=error)
        for where, each, error in zip(places, taken, errors, strict=True)
    ]


def format_tensors(rows: Sequence[TensorRow]) -> str:
    """One line a row."""
    head = f"{'what':<22}{'where':<9}{'ms':>10}{'ratio':>8}{'mse':>10}"
    lines = [
        f"{row.what:<22}{row.where:<9}{row.ms:>10.4f}{row.ratio:>8.2f}{row.mse:>10.2f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """The command line."""
    options = harness.parser("tensors", "Tensors at workers and shares, beside torch.")
    options.add_argument("--activation", default="relu,square", help="%(default)s")
    options.add_argument("--steps", type=int, default=STEPS, help="of a training; %(default)s")

    def measure(asked: Namespace) -> list[TensorRow]:
        return bench_tensors(asked.activation.split(","), steps=asked.steps, say=harness.say)

    harness.run(options, measure, format_tensors)


if __name__ == "__main__":
    main()
