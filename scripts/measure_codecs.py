"""Train a small split network with several codecs and seeds, and print the number of sent bits.

    python scripts/measure_codecs.py digit_pairs --codec l1:target=6 --codec topk:k=6 --seeds 5

The program prints one line of JSON for each training. The line has the accuracy, and the number of
cut values above zero per row, both on the test rows. For the second half of the training, the line
has the bits per row that were sent in each direction. If a codec sends an integer code for each
value, the line also has the entropy of these codes; for the codec `rate`, it has the number of bits
that the codec's model expects.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.compression.packed import DenseCodec
from vfl.compression.rate import Units
from vfl.config import Experiment
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret, scoped
from vfl.datasets import PartyData, Split
from vfl.datasets.sources import read_bundled
from vfl.session import Adversary, FeatureEnd, rules
from vfl.training.local import LocalSession

WIDTH = 128
Parts = tuple[np.ndarray, np.ndarray, tuple[int, int, int]]


def digit_pairs() -> Parts:
    """Return rows with noisy pictures of two of scikit-learn's digits.

    No digit picture is in more than one of the sets for training, validation and test. The pairs of
    digit values form 100 classes.
    """
    digits, draw = read_bundled("digits"), np.random.default_rng(0)
    order, inputs, labels = draw.permutation(digits.rows), [], []
    sizes = (12_000, 3_000, 3_000)
    for own, rows in zip(np.split(order, [1200, 1500]), sizes, strict=True):
        left, right = draw.choice(own, rows), draw.choice(own, rows)
        pairs = [digits.cells[each].reshape(rows, 64) / 16 for each in (left, right)]
        inputs.append(np.concatenate(pairs, axis=1) + draw.normal(0, 0.25, (rows, 128)))
        labels.append(10 * digits.labels[left] + digits.labels[right])
    return np.concatenate(inputs), np.concatenate(labels), sizes


def fm20() -> Parts:
    """Return MNIST and Fashion-MNIST together as 20 classes, reduced to 14 x 14 pixels."""
    inputs, labels = [], []
    for first, name in enumerate(("mnist", "fashion_mnist")):
        found = read_bundled(name)
        taken = np.concatenate([np.arange(9_000), 60_000 + np.arange(3_000)])
        inputs.append(_halved(found.cells[taken]))
        labels.append(10 * first + found.labels[taken])
    return _mixed(inputs, labels, [7_500, 9_000])


def cifar() -> Parts:
    """Return CIFAR-10, reduced to 16 x 16 pixels."""
    found = read_bundled("cifar10", limit=24_000)
    cuts = [found.rows * 5 // 8, found.rows * 3 // 4]
    return _mixed([_halved(found.cells)], [found.labels], cuts)


def _halved(pictures: np.ndarray) -> np.ndarray:
    """Return pictures with half the height and width, with values from 0 to 1, as flat rows."""
    rows, channels, height, width = pictures.shape
    blocks = pictures.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return blocks.mean(axis=(3, 5)).reshape(rows, -1) / 255


def _mixed(inputs: list[np.ndarray], labels: list[np.ndarray], cuts: list[int]) -> Parts:
    """Divide rows into training, validation and test rows: at two positions (`cuts`)."""
    parts = zip(*(np.split(np.arange(len(own)), cuts) for own in inputs), strict=True)
    taken = [list(part) for part in parts]
    rows = [np.concatenate([x[i] for x, i in zip(inputs, part, strict=True)]) for part in taken]
    codes = [np.concatenate([y[i] for y, i in zip(labels, part, strict=True)]) for part in taken]
    sizes = (len(rows[0]), len(rows[1]), len(rows[2]))
    whole = np.concatenate(rows)
    whole = (whole - whole[: sizes[0]].mean(axis=0)) / (whole[: sizes[0]].std() + 1e-6)
    return whole, np.concatenate(codes), sizes


TASKS = {"digit_pairs": digit_pairs, "fm20": fm20, "cifar": cifar}


def parties(task: str) -> dict[str, PartyData]:
    """Return one party that has all columns, and one party that has the labels."""
    inputs, labels, sizes = TASKS[task]()
    ends = np.cumsum(sizes)
    split = Split(*np.split(np.arange(ends[-1]), ends[:-1]))
    classes = tuple(range(int(labels.max()) + 1))
    rows = torch.from_numpy(inputs.astype(np.float32))
    codes = torch.from_numpy(labels.astype(np.int64))
    return {
        "client": PartyData("client", rows, None, None, split, bytes(32)),
        "label": PartyData("label", None, codes, classes, split, bytes(32)),
    }


def bottom(inputs: int, codec: str, batch_norm: bool) -> nn.Module:
    """Build a bottom model with 192 and 128 units; for a sign codec it ends without ReLU."""
    norms = [nn.BatchNorm1d(192), nn.BatchNorm1d(WIDTH)] if batch_norm else [nn.Identity()] * 2
    first = [nn.Linear(inputs, 192), norms[0], nn.ReLU(), nn.Dropout(0.2)]
    last = [nn.Linear(192, WIDTH), norms[1]]
    return nn.Sequential(*first, *last, *([] if codec.startswith("sign") else [nn.ReLU()]))


class Watch(Adversary):
    """An honest party that counts sent bytes in the training's second half and in the test."""

    def __init__(self) -> None:
        self.session: LocalSession | None = None
        self.after = self.test = 0
        self.rows: dict[str, int] = defaultdict(int)
        self.above = 0
        self.codes: list[np.ndarray] = []
        self.model_bits: list[float] = []
        self.wire_bytes: dict[str, int] = defaultdict(int)

    def follow(self, session: LocalSession) -> None:
        """Find the steps at which the training's second half and the test begin in a session."""
        self.session = session
        schedule = list(rules.schedule(session.terms, session.label.data.split, 0))
        trained = [exchange.step for exchange in schedule if exchange.trains]
        self.after = trained[len(trained) // 2]
        self.test = next(each.step for each in schedule if each.phase == "test")

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        """See `Adversary.cut`."""
        assert self.session is not None
        if context.step >= self.test:
            self.rows["test"] += len(cut)
            self.above += int((cut > 0).sum())
        elif context.training and context.step >= self.after:
            self.rows["training"] += len(cut)
            self._count_codes(cut, self.session.clients[0].end)
        return cut

    def _count_codes(self, cut: Tensor, half: FeatureEnd) -> None:
        if not isinstance(half.codec, DenseCodec) or half.codec._code.bits > 8:
            return
        codes = half.codec._code.encode(cut.numpy(), 1).codes
        self.codes.append(codes.astype(np.uint8))
        with torch.no_grad():
            for model in half.model.children():
                if isinstance(model, Units):
                    self.model_bits.append(float(model.bits(torch.from_numpy(codes))))

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Count the bytes of a frame."""
        if frame.kind in (Kind.CUT, Kind.GRAD) and frame.step >= self.after:
            self.wire_bytes[direction] += frame.wire_bytes

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield each result with its name."""
        rows = self.rows["training"]
        for direction, total_bytes in self.wire_bytes.items():
            yield f"bits_{direction}", 8 * total_bytes / rows
        if self.codes:
            codes = np.concatenate(self.codes)
            yield "entropy_pooled", codes.shape[1] * entropy(codes)
            yield "entropy_by_unit", sum(entropy(unit) for unit in codes.T)
        if self.model_bits:
            yield "model_bits", float(np.mean(self.model_bits))


def entropy(codes: np.ndarray) -> float:
    """Return the entropy in bits per code, from the codes' frequencies."""
    shares = np.bincount(codes.reshape(-1)) / codes.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def measure(
    data: dict[str, PartyData],
    codec: str,
    seed: int,
    epochs: int = 15,
    batch_size: int = 128,
    batch_norm: bool = True,
) -> dict[str, Any]:
    """Train once, and return the results that this module's docstring lists."""
    train = {"epochs": epochs, "batch_size": batch_size}
    client = {"client": {"width": WIDTH}}
    experiment = Experiment.model_validate(
        {
            "seed": seed,
            "codec": codec,
            "parties": client,
            "label": {"top": "linear"},
            "train": train,
        }
    )
    watch = Watch()
    inputs, classes = data["client"].inputs, data["label"].classes
    assert inputs is not None
    assert classes is not None
    with scoped(Secret.of_simulation(seed, "client").number("init")):
        model = bottom(inputs.shape[1], codec, batch_norm)
    session = LocalSession(
        experiment, data, outputs=len(classes), bottoms={"client": model},
        adversaries={"client": watch}, observers=[watch],
    )  # fmt: skip
    watch.follow(session)
    started = time.perf_counter()
    record = session.run().label.history[-1]
    found = {
        "accuracy": 100 * record["test_accuracy"],
        "above_zero": watch.above / watch.rows["test"],
        **dict(watch.figures()),
        "seconds": time.perf_counter() - started,
    }
    return {"codec": codec, "seed": seed, **{name: round(each, 3) for name, each in found.items()}}


def main() -> None:
    """Read the command line, and run the requested trainings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--codec", action="append", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--no-batch-norm", action="store_true")
    asked = parser.parse_args()
    data = parties(asked.task)
    for codec in asked.codec:
        for seed in range(asked.seeds):
            found = measure(
                data, codec, seed, asked.epochs, asked.batch_size, not asked.no_batch_norm
            )
            print(json.dumps({"task": asked.task, **found}), flush=True)


if __name__ == "__main__":
    main()
