"""Distance correlation and neighbours of the values that P2 sees while a private network trains.

    python scripts/measure_permuted.py --data FOLDER --steps 300
    python scripts/measure_permuted.py --data FOLDER --pictures neighbours.png

The program repeats figures 5.4 and 5.5 of the thesis (2025): a network 784-128-10 with sigmoid
learns MNIST with 128 rows per step. It prints one line of JSON for each checkpoint. Besides the
measures of the thesis, the program reports measures on sorted values, because a permutation hides
only the order of values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl.attacks import permuted
from vfl.attacks.scoring import auc
from vfl.core.seeds import use_one_thread
from vfl.datasets.sources import read_bundled
from vfl.mpc import Layer, Rules

BATCH_ROWS, PROBED_ROWS, ALONE, SAME = 128, 1024, 400, 16
LEARNING_RATE = 1.0
NEIGHBOURS = 5


def main() -> None:
    """Train a private network, and measure the leakage of the values that P2 sees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST")
    parser.add_argument("--mode", choices=("thesis", "fast"), default="thesis")
    parser.add_argument("--function", default="sigmoid")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=75)
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    use_one_thread()
    inputs, classes = digits(arguments.data, arguments.steps * BATCH_ROWS + PROBED_ROWS)
    probes = inputs[:PROBED_ROWS], classes[:PROBED_ROWS]
    layers = [Layer(784, 128, arguments.function), Layer(128, 10, "sigmoid")]
    weights = permuted.drawn_weights(layers, torch.Generator().manual_seed(0))
    with permuted.Victim(layers, weights, Rules(arguments.mode)) as victim:
        for step in range(arguments.steps + 1):
            if step % arguments.every == 0:
                found = look(victim, *probes)
                print(json.dumps({"step": step, "mode": arguments.mode, **found}), flush=True)
            if step < arguments.steps:
                rows = slice(*(PROBED_ROWS + BATCH_ROWS * at for at in (step, step + 1)))
                targets = torch.nn.functional.one_hot(classes[rows], 10).double()
                victim.train_step(inputs[rows], targets, "cross_entropy", LEARNING_RATE)
        if arguments.pictures:
            draw_neighbours(victim, *probes, arguments.pictures)


def digits(folder: Path, rows: int) -> tuple[Tensor, Tensor]:
    """Return pixels between 0 and 1, axes (rows, pixels), and the classes of the digits."""
    data = read_bundled("mnist", folder, limit=rows)
    pixels = torch.tensor(data.cells[:rows]).double().flatten(1) / 255  # type: ignore[index]
    return permuted.on_grid(pixels), torch.tensor(data.labels[:rows])


def views(victim: permuted.Victim, inputs: Tensor, alone_rows: int = ALONE) -> dict[str, Tensor]:
    """Return some rows of the first hidden layer, true and as P2 sees them; axes (rows, 128) each.

    "permuted" are the values that P2 sees for a batch of 128 rows; row i of the result has the
    values that P2 receives in place of row i. "alone" are the values that P2 sees for a row that is
    evaluated alone; "alone, sorted" are the same values in ascending order.
    """
    raw = permuted.plain_sums(victim.layers, victim.weights(), inputs)[0]
    batches = [victim.infer(batch)[1][0] for batch in inputs.split(BATCH_ROWS)]
    alone = torch.stack([victim.infer(row)[1][0] for row in inputs[:alone_rows].split(1)])
    together = torch.cat([batch.reshape(-1, raw.shape[1]) for batch in batches])
    ordered = (alone if victim.rules.mode == "thesis" else alone.abs()).sort(1).values
    return {"raw": raw, "permuted": together, "alone": alone, "alone, sorted": ordered}


def look(
    victim: permuted.Victim, inputs: Tensor, classes: Tensor, alone_rows: int = ALONE
) -> dict[str, Any]:
    """Return all measurements for one checkpoint of the training."""
    outputs, _ = victim.infer(inputs)
    found: dict[str, Any] = {"accuracy": share(outputs.argmax(1) == classes)}
    for name, seen in views(victim, inputs, alone_rows).items():
        rows = len(seen)
        found[f"correlation, {name}"] = round(permuted.correlation(seen, inputs[:rows]), 3)
        same = permuted.same_class(seen, classes[:rows], NEIGHBOURS)
        found[f"same class, {name}"] = round(same, 3)
    found["same class, guess"] = round(float((classes.bincount() / len(classes)).square().sum()), 3)
    return found | of_one_class(victim, inputs, classes) | of_known_weights(victim, inputs)


def of_one_class(victim: permuted.Victim, inputs: Tensor, classes: Tensor) -> dict[str, Any]:
    """Measure the thesis' harder case: all rows of a batch have the same class."""
    groups = [
        (digit, group)
        for digit in range(10)
        for group in inputs[classes == digit].split(SAME)
        if len(group) == SAME
    ]
    seen = torch.stack([victim.infer(group)[1][0] for _, group in groups])
    ordered = (seen if victim.rules.mode == "thesis" else seen.abs()).sort(1).values
    kinds = torch.tensor([digit for digit, _ in groups])
    return {
        f"same class, {SAME} rows of one class": round(permuted.same_class(seen, kinds, 1), 3),
        f"same class, {SAME} of one class, sorted": round(
            permuted.same_class(ordered, kinds, 1), 3
        ),
    }


def of_known_weights(victim: permuted.Victim, inputs: Tensor) -> dict[str, Any]:
    """Find out which rows a batch contains, as a P2 that knows the first layer's weights can."""
    seen = victim.infer(inputs[:BATCH_ROWS])[1][0]
    sums = permuted.plain_sums(victim.layers, victim.weights(), inputs)[0]
    if victim.rules.mode == "fast":
        seen, sums = seen.abs(), sums.abs()
    shares = permuted.found_shares(seen, sums)
    inside = torch.arange(len(inputs)) < BATCH_ROWS
    return {"known weights: rows in a batch (AUC)": round(auc(shares, inside), 3)}


def draw_neighbours(victim: permuted.Victim, inputs: Tensor, classes: Tensor, path: Path) -> None:
    """Draw a test picture of each digit, and its nearest neighbour in each kind of values."""
    from PIL import Image

    found = views(victim, inputs[:ALONE])
    chosen = [int((classes == digit).nonzero()[0]) for digit in range(10)]
    pictures = 1 - inputs[:ALONE].reshape(-1, 28, 28)
    gap = torch.full((10 * 28, 8), 0.6).double()
    strips = [torch.cat([pictures[at] for at in chosen])]
    for name in ("raw", "permuted", "alone", "alone, sorted"):
        near = permuted.nearest(found[name], NEIGHBOURS)
        columns = [torch.cat([pictures[near[at, k]] for at in chosen]) for k in range(NEIGHBOURS)]
        strips += [gap, *columns]
    canvas = (255 * torch.cat(strips, 1)).to(torch.uint8).numpy()
    Image.fromarray(canvas).save(path, optimize=True)


def share(hits: Tensor) -> float:
    """Return the fraction of correct entries, rounded to four decimals."""
    return round(float(hits.double().mean()), 4)


if __name__ == "__main__":
    main()
