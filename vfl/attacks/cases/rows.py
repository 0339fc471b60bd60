"""Leaked rows, labels and untrained models that cases of every attacker use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl import models
from vfl.attacks.view import Maker, TopMaker
from vfl.config import Experiment
from vfl.core.errors import TooFewRowsError, UserError
from vfl.core.seeds import scoped
from vfl.datasets import PartyData
from vfl.session import Terms


def draw_leak(labels: Tensor, k: int, draw: torch.Generator, classes: int | None = None) -> Tensor:
    """Draw k rows of each class; return positions, sorted by class, int64, axes (classes * k,).

    From the same generator state, a larger k first selects the rows that a smaller k selects, and
    then further rows. So, along a curve over k, leaked rows are added and never replaced.

    Args:
        labels: class numbers 0..C-1 of the rows that may leak, int64, axes (rows,).
        k: number of rows to draw from each class.
        draw: generator from which the rows are drawn.
        classes: number of classes; None takes the highest class number among these rows plus 1, and
            so misses higher classes without a row.

    Raises:
        TooFewRowsError: a class has fewer than k rows.

    >>> labels = torch.tensor([0, 1, 0, 1, 0])
    >>> draw_leak(labels, 2, torch.Generator().manual_seed(0)).shape
    torch.Size([4])
    """
    if classes is None:
        classes = 1 + int(labels.max()) if len(labels) else 1
    order = torch.randperm(len(labels), generator=draw)
    shuffled = labels[order]
    chosen = []
    for code in range(classes):
        found = order[shuffled == code][:k]
        if len(found) < k:
            raise TooFewRowsError(
                f"{k} labels of each class should leak, but a class has fewer rows",
                got=f"{len(found)} rows",
                fix="a smaller k, or more rows",
            )
        chosen.append(found)
    return torch.cat(chosen)


def draw_columns(rows: Tensor, leaks: int, draw: torch.Generator, part: str) -> Tensor:
    """Return the rows in random order; the first `leaks` of them are the leaked rows.

    Args:
        rows: positions among the aligned rows, int64.
        leaks: number of leaked rows.
        draw: generator from which the order is drawn.
        part: name of the part of the split with these rows, for the error text.

    Raises:
        TooFewRowsError: there are fewer rows than `leaks`.
    """
    if leaks > len(rows):
        raise TooFewRowsError(
            f"columns of {leaks} rows should leak", got=f"{len(rows)} {part} rows"
        )
    return rows[torch.randperm(len(rows), generator=draw)]


def labels_of(label: PartyData) -> tuple[Tensor, int]:
    """Return all rows' labels, axes (rows,), and the number of classes (1 for numeric labels)."""
    assert label.labels is not None, "a label party has some"
    return label.labels, 1 if label.classes is None else len(label.classes)


def codes_of(labels: Tensor, classes: int) -> Tensor:
    """Return class numbers for drawing leaked rows; for numeric labels, all numbers are equal."""
    return labels if classes > 1 else torch.zeros(len(labels), dtype=torch.int64)


def classes_of(label: PartyData) -> tuple[Tensor, int]:
    """Return the classes of all rows, int64, axes (rows,), and the number of classes.

    Raises:
        UserError: the labels are numeric, not classes.
    """
    if label.classes is None or label.labels is None:
        raise UserError("a regression has no classes to infer", where="label.task")
    return label.labels, len(label.classes)


def inputs_of(data: PartyData) -> Tensor:
    """Return the inputs of all rows of a party that has columns, axes (rows, ...)."""
    assert data.inputs is not None
    return data.inputs


def prior_of(label: PartyData) -> Tensor | None:
    """Return each class's share of the training rows, axes (classes,); None for numeric labels."""
    labels, classes = labels_of(label)
    if classes == 1:
        return None
    train = labels[torch.from_numpy(label.split.train)]
    return train.bincount(minlength=classes) / len(train)


def top_recipe(experiment: Experiment, classes: int) -> TopMaker:
    """Return a function that makes untrained tops, as in the experiment, for given cut widths."""
    return lambda width: models.make_top(experiment.label.top).build(width, classes)


def bottom_recipe(experiment: Experiment, party: str, shape: tuple[int, ...]) -> Maker:
    """Return a function that makes untrained bottoms as a party's, for rows of the given axes."""
    asked = experiment.parties[party]
    return lambda: models.make_bottom(asked.bottom).build(shape, asked.width)


def untrained_merger(terms: Terms) -> nn.Module:
    """Return a network's merger before training."""
    with scoped(0):
        return models.make_merger(terms.merge).build(terms.widths)
