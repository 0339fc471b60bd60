"""Cost of a product through a pointer, and of small networks at workers, with noise and on shares.

Each time is shown beside the time of torch in the same run.

The experiments are those of Ryffel et al. (2018): a regressor with widths 13-32-1 on Boston Housing
(506 rows), and a classifier with widths 8-32-1 on Pima Indians Diabetes (768 rows). Without a
folder of data sets, both use rows of scikit-learn. All workers are in this process. Times are the
CPU time of this process, so they are the sum over all workers and do not include other work on the
machine.
"""

from __future__ import annotations

import gzip
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor
from torch.nn import functional

from benchmarks import harness
from vfl import tensors
from vfl.config.toml import Settings
from vfl.core.seeds import generator, use_one_thread
from vfl.datasets.sources.files import data_folder
from vfl.privacy.accountants import noise_for

STEPS, SIZES = 200, ((64, 128, 64), (256, 256, 256))
#: Epsilon that the paper uses, at delta 1e-5.
EPSILON = 0.5
_BATCH, _RATE = 32, 0.05


class TensorRow(Settings):
    """One measurement.

    Attributes:
        what: a product with its sizes, or a step of a network with its data and activation.
        where: "plain" (torch without vfl), "pointer" (a tensor at a worker), "noise" (private
            training at workers), "shares", or "mac" (shares with MACs).
        ms: median time of a product or a step.
        ratio: time divided by the time of the same work in plain torch.
        error: error on the test rows. For housing, it is the mean squared error in squared units of
            the labels; for diabetes, the fraction of wrongly classified rows; 0 for a product.
        epsilon: epsilon of a training with noise; otherwise 0.
    """

    what: str
    where: str
    ms: float
    ratio: float
    error: float
    epsilon: float = 0.0


def housing() -> tuple[Tensor, Tensor, float]:
    """Return standardised inputs and labels in a fixed order, and the variance of the labels."""
    path = data_folder(None) / "boston-housing" / "housing.data.gz"
    if path.is_file():
        with gzip.open(path, "rt") as file:
            table = torch.from_numpy(np.loadtxt(file)).float()
        inputs, labels = table[:, :-1], table[:, -1:]
    else:
        found = load_diabetes()
        inputs = torch.from_numpy(found.data).float()
        labels = torch.from_numpy(found.target).float()[:, None]
    return _in_order(inputs, labels)


def diabetes() -> tuple[Tensor, Tensor, float]:
    """Return `housing`'s three values for Pima patients; labels are -1 and 1, not scaled."""
    path = data_folder(None) / "pima-diabetes" / "pima-indians-diabetes.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt") as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",")).float()
        inputs, labels = table[:, :-1], table[:, -1:]
    else:
        found = load_breast_cancer()
        inputs = torch.from_numpy(found.data).float()[:, :8]
        labels = torch.from_numpy(found.target).float()[:, None]
    inputs, _, _ = _in_order(inputs, labels)
    order = torch.randperm(len(labels), generator=generator(0, "benchmark rows"))
    return inputs, 2 * labels[order] - 1, 1.0


def _in_order(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
    order = torch.randperm(len(labels), generator=generator(0, "benchmark rows"))
    inputs, labels = inputs[order], labels[order]
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    deviation = float(labels.std())
    return inputs, (labels - labels.mean()) / deviation, deviation**2


DATA: dict[str, Callable[[], tuple[Tensor, Tensor, float]]] = {
    "housing": housing,
    "diabetes": diabetes,
}


class Square(torch.nn.Module):
    """The activation x^2, which needs no comparison on shares."""

    def forward(self, inputs: Any) -> Any:
        """Square each element."""
        return torch.square(inputs)


def network(columns: int, activation: str) -> torch.nn.Sequential:
    """Build a network with widths columns-32-1; every call returns the same weights."""
    torch.manual_seed(0)
    kind = {"relu": torch.nn.ReLU, "square": Square, "sigmoid": torch.nn.Sigmoid}[activation]
    return torch.nn.Sequential(torch.nn.Linear(columns, 32), kind(), torch.nn.Linear(32, 1))


def bench_tensors(
    activation: Sequence[str] = ("relu", "square"),
    *,
    data: Sequence[str] = ("housing", "diabetes"),
    steps: int = STEPS,
    epsilon: float = EPSILON,
) -> list[TensorRow]:
    """Measure products and trainings with tensors at workers, with shares, and in plain torch.

    Args:
        activation: activations of the networks; training with noise needs activations that workers
            know.
        data: data sets among housing and diabetes.
        steps: number of steps of a training.
        epsilon: epsilon of a training with noise, at delta 1e-5.
    """
    use_one_thread()
    alice, bob, carol = tensors.virtual("alice", "bob", "carol")
    rows = []
    for size in SIZES:
        harness.say(f"product {size}")
        left, right = torch.rand(size[0], size[1]), torch.rand(size[1], size[2])
        far = tensors.send(left, alice), tensors.send(right, alice)
        taken = [_times(partial(torch.matmul, *pair), 10 * steps) for pair in ((left, right), far)]
        what = "product " + "x".join(map(str, size))
        rows += _rows(what, ("plain", "pointer"), taken, (0.0, 0.0))

    def shared(each: Any, mac: bool) -> Any:
        if isinstance(each, torch.nn.Module):
            return tensors.share(each, alice, bob, dealer=carol, mac=mac)
        return tensors.fix_precision(each).share(alice, bob, dealer=carol, mac=mac)

    places: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "plain": (lambda each: each, lambda each: each),
        "pointer": (lambda each: tensors.send(each, alice), tensors.get),
        "shares": (partial(shared, mac=False), tensors.get),
        "mac": (partial(shared, mac=True), tensors.get),
    }
    for name, kind in itertools.product(data, activation):
        inputs, labels, variance = DATA[name]()
        known = len(labels) * 4 // 5

        truth = labels[known:]
        error = partial(_error, inputs=inputs[known:], truth=truth, variance=variance)
        taken, errors, said = [], [], []
        for where, (there, back) in places.items():
            harness.say(f"{name}, {kind}, {where}")
            model = there(network(inputs.shape[1], kind))
            taken.append(_train(model, there(inputs[:known]), there(labels[:known]), steps))
            errors.append(error(back(model)))
            said.append(0.0)
        if kind != "square":
            harness.say(f"{name}, {kind}, noise")
            model = network(inputs.shape[1], kind)
            tables = tensors.send(inputs[:known], alice), tensors.send(labels[:known], alice)
            ms, spent = _train_with_noise(model, *tables, steps, epsilon)
            taken, errors, said = [*taken, ms], [*errors, error(model)], [*said, spent]
        whole = [*places, "noise"][: len(taken)]
        rows += _rows(f"step, {name}, {kind}", whole, taken, errors, said)
    return rows


def _error(model: Any, inputs: Tensor, truth: Tensor, variance: float) -> float:
    """Return the error that `TensorRow.error` describes. Class labels are -1 and 1."""
    with torch.no_grad():
        guess = model(inputs)
    if bool((truth.abs() == 1).all()):
        return float(((guess > 0) != (truth > 0)).float().mean())
    return float(functional.mse_loss(guess, truth)) * variance


def _train(model: Any, inputs: Any, labels: Any, steps: int) -> float:
    rule = torch.optim.SGD(model.parameters(), lr=_RATE)
    batches = len(labels) // _BATCH
    taken = []
    for step in range(steps):
        at = step % batches * _BATCH
        rows, truth = inputs[at : at + _BATCH], labels[at : at + _BATCH]
        began = time.process_time()
        rule.zero_grad()
        loss: Any = functional.mse_loss(model(rows), truth)
        loss.backward()
        rule.step()
        taken.append(time.process_time() - began)
    return median(taken)


def _train_with_noise(
    model: torch.nn.Module, inputs: Any, labels: Any, steps: int, epsilon: float
) -> tuple[float, float]:
    """Return the median time of a step, including the drawing of its rows, and its epsilon."""
    noise = noise_for(epsilon, 1e-5, steps, _BATCH / len(inputs))
    training = tensors.PrivateTraining(
        model, [inputs], [labels], clip=1.0, noise=noise, batch_size=_BATCH
    )
    rule = torch.optim.SGD(model.parameters(), lr=_RATE)
    taken = []
    for _ in range(steps):
        began = time.process_time()
        training.step()
        rule.step()
        taken.append(time.process_time() - began)
    return median(taken), training.statement(1e-5).epsilon or 0.0


def _times(work: Callable[[], object], count: int) -> float:
    return median(harness.timed(work) for _ in range(count))


def _rows(
    what: str,
    places: Sequence[str],
    taken: Sequence[float],
    errors: Sequence[float],
    epsilons: Sequence[float] = (0.0, 0.0),
) -> list[TensorRow]:
    return [
        TensorRow(
            what=what, where=where, ms=each * 1e3, ratio=each / taken[0], error=error, epsilon=spent
        )
        for where, each, error, spent in zip(places, taken, errors, epsilons, strict=True)
    ]


TABLE = harness.table(
    ("what", "<26", "what"),
    ("where", "<9", "where"),
    ("ms", ">10.4f", "ms"),
    ("ratio", ">8.2f", "ratio"),
    ("error", ">10.4g", "error"),
    ("epsilon", ">9.3g", "epsilon"),
)


main = harness.command(bench_tensors, TABLE)


if __name__ == "__main__":
    main()
