"""Attack the values that P2 receives in real private logistic regressions and small networks.

    python scripts/attack_permuted.py --epochs 30

The program prints one line of JSON for each attack and each mode, with the attack's score and the
score of guessing. The rows come from scikit-learn's breast cancer table. `--seed` determines the
rows, the initial weights and the order of rows. Keys are new at every start of the program, and so
are permutations and dummies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vfl.attacks import permuted
from vfl.attacks.scoring import auc
from vfl.core.seeds import permutation, use_one_thread
from vfl.datasets.sources import read_bundled
from vfl.mpc import Layer, Rules
from vfl.mpc.rules import MODES

BATCH_ROWS = 64
LEARNING_RATE = 0.5
ALONE = 100  # number of rows that P2 evaluates in a request of one row
HIDDEN = 128
Row = dict[str, Any]


def main() -> None:
    """Print a line of JSON for each attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    use_one_thread()
    for mode in MODES:
        draw = torch.Generator().manual_seed(arguments.seed)
        inputs, labels = table(draw)
        for row in of_training(mode, inputs, labels, arguments.epochs, draw):
            print(json.dumps({"mode": mode, **row}), flush=True)
        for row in of_known_weights(mode, inputs, draw):
            print(json.dumps({"mode": mode, **row}), flush=True)


def table(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return standardised columns of the table, and labels 0 and 1, with rows in random order."""
    data = read_bundled("breast_cancer")
    cells, labels = torch.tensor(data.cells.to_numpy()).double(), torch.tensor(data.labels)
    order = torch.randperm(len(labels), generator=draw)
    return ((cells - cells.mean(0)) / cells.std(0))[order], labels[order].double()


def of_training(
    mode: str, inputs: Tensor, labels: Tensor, epochs: int, draw: torch.Generator
) -> Iterator[Row]:
    """Yield results of attacks on a logistic regression, during and after its training."""
    layers = [Layer(inputs.shape[1], 1, "sigmoid")]
    signed = mode == "thesis"
    guess = round(max(float(labels.mean()), 1 - float(labels.mean())), 4)
    batches, seen, hits, groups = [], [], [], inputs[:512].split(BATCH_ROWS)
    with permuted.Victim(layers, permuted.drawn_weights(layers, draw), rules(mode)) as victim:
        for epoch in range(epochs):
            before = [victim.infer(group)[1][0] for group in groups]
            old = [logits(victim, group) for group in groups]
            order = torch.from_numpy(permutation(0, len(inputs), "mpc", epoch))
            for rows in order.split(BATCH_ROWS)[: len(inputs) // BATCH_ROWS]:
                targets = labels[rows, None]
                batches.append(rows)
                (values, *_) = victim.train_step(
                    inputs[rows], targets, "cross_entropy", LEARNING_RATE
                )
                seen.append(values)
                hits.append(permuted.labels_by_place(values) == labels[rows].bool())
        yield {"attack": "labels by place", "share": mean(hits), "guess": guess}
        found = permuted.labels_from_sums(batches, seen, len(inputs)) > 0.5
        yield {
            "attack": f"labels from sums of {epochs} epochs' logits",
            "share": mean([found == labels.bool()]),
            "guess": guess,
            "model": mean([(logits(victim, inputs) > 0) == labels.bool()]),
        }
        after = [victim.infer(group)[1][0] for group in groups]
        new = [logits(victim, group) for group in groups]
        yield from links(before, after, old, new, signed)
        yield from alone(victim, inputs, labels, guess)


def links(
    before: list[Tensor], after: list[Tensor], old: list[Tensor], new: list[Tensor], signed: bool
) -> Iterator[Row]:
    """Link rows at the last epoch's start with rows at its end; true logits give the score."""
    hits = [
        permuted.matched_indices(first, start) == permuted.matched_indices(second, end)[order]
        for first, second, start, end in zip(before, after, old, new, strict=True)
        for order in [permuted.by_rank(first, second, signed)]
    ]
    yield {
        "attack": "rows of a batch linked across an epoch",
        "share": mean(hits),
        "guess": round(1 / BATCH_ROWS, 4),
    }
    found = permuted.recognised(before, after, signed)
    yield {
        "attack": "batches recognised across an epoch",
        "share": mean([found == torch.arange(len(before))]),
        "guess": round(1 / len(before), 4),
    }


def logits(victim: permuted.Victim, inputs: Tensor) -> Tensor:
    """Return the true logits of a regression, axes (rows,); only the scoring uses them."""
    return permuted.plain_sums(victim.layers, victim.weights(), inputs)[0][:, 0]


def alone(victim: permuted.Victim, inputs: Tensor, labels: Tensor, guess: float) -> Iterator[Row]:
    """Attack rows that are evaluated alone: with dummy values, twice, and without dummy values."""
    weights, layers = victim.weights(), victim.layers
    picked, labelled, twice, bare = [], [], [], []
    naked = Rules(victim.rules.mode, least_permuted=1)
    with permuted.Victim(layers, weights, naked) as open_victim:
        for row, label in zip(inputs[:ALONE].split(1), labels[:ALONE].bool(), strict=True):
            true = logits(victim, row)
            first, second = (victim.infer(row)[1][0] for _ in range(2))
            real = permuted.matched_indices(first, true) == 0
            place = permuted.stands_out(first)
            picked.append(real[place])
            labelled.append(permuted.labels_by_place(first[place]) == label)
            again = permuted.seen_twice(first, second)
            twice.append(torch.tensor([len(again) == 1 and bool(real[again].all())]))
            (lone,) = open_victim.infer(row)[1]
            bare.append(permuted.labels_by_place(lone) == label)
    share = round(1 / victim.rules.least_permuted, 4)
    yield {"attack": "one row: real value among dummies", "share": mean(picked), "guess": share}
    yield {"attack": "one row: label", "share": mean(labelled), "guess": guess}
    yield {"attack": "one row asked twice: real value", "share": mean(twice), "guess": share}
    yield {"attack": "one row without dummies: label", "share": mean(bare), "guess": guess}


def of_known_weights(mode: str, inputs: Tensor, draw: torch.Generator) -> Iterator[Row]:
    """Undo the permutation of the first layer's values, by its true or guessed weights."""
    layers = [Layer(inputs.shape[1], HIDDEN, "relu"), Layer(HIDDEN, 1, "sigmoid")]
    weights, rounded = permuted.drawn_weights(layers, draw), permuted.on_grid(inputs)
    inside = torch.arange(len(inputs)) < BATCH_ROWS
    with permuted.Victim(layers, weights, rules(mode)) as victim:
        known = victim.weights()
        seen = victim.infer(rounded[inside])[1][0]
        lone = [victim.infer(row)[1][0] for row in rounded[:ALONE].split(1)]
    for name, held in (("known", known), ("guessed", permuted.drawn_weights(layers, draw))):
        sums = permuted.plain_sums(layers, held, rounded)[0]
        shares = permuted.found_shares(seen, sums)
        yield {
            "attack": f"{name} weights: which of {len(inputs)} rows are in the batch (AUC)",
            "share": round(auc(shares, inside), 4),
            "guess": 0.5,
        }
        picks = [int(permuted.like_multisets(each, sums).argmin()) for each in lone]
        yield {
            "attack": f"{name} weights: which row was asked alone",
            "share": mean([torch.tensor(picks) == torch.arange(len(picks))]),
            "guess": round(1 / len(inputs), 4),
        }
        starts = torch.randn(50, inputs.shape[1], generator=draw, dtype=torch.float64)
        weight, bias = held["0.weight"], held["0.bias"]
        found = [permuted.solve_shuffled(each, weight, bias, starts) for each in lone[:20]]
        error = (torch.stack(found) - inputs[:20]).square().mean() / inputs[:20].square().mean()
        yield {
            "attack": f"{name} weights: columns without candidates (squared error / guess's)",
            "share": round(float(error), 4),
            "guess": 1.0,
        }


def rules(mode: str) -> Rules:
    """Return the rules of a mode of the protocol, with the defaults that users get."""
    return Rules("thesis" if mode == "thesis" else "fast")


def mean(parts: list[Tensor]) -> float:
    """Return the fraction of true entries, rounded to four decimals."""
    return round(float(torch.cat([each.flatten() for each in parts]).double().mean()), 4)


if __name__ == "__main__":
    main()
