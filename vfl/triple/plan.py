"""What all three parties know of a private training, and what each alone has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vfl.config import Experiment
from vfl.config.toml import Settings
from vfl.datasets import PartyData
from vfl.errors import ConfigError
from vfl.mpc import Layer, Rules

Task = Literal["train", "infer"]


class Plan(Settings):
    """Public: the parties compare it before the first share is made.

    Attributes:
        mode, bits, magnitude_bits: see `vfl.mpc.Rules`.
        widths: of the network, inputs and outputs included.
        columns: how many of the inputs are P0's and P1's.
        label_role: who has the labels.
        train_rows, test_rows: how many rows of each kind.
        classes: how many the labels have; 0 for a regression.
        epochs, batch_rows, learning_rate, seed: of the training; the seed is of the rows' order.
        weights_seed: makes first weights anybody can repeat; None, the rule, draws them secretly.
    """

    task: Task
    mode: Literal["thesis", "fast"]
    bits: int
    magnitude_bits: int
    widths: tuple[int, ...]
    columns: tuple[int, int]
    label_role: int
    train_rows: int
    test_rows: int
    classes: int
    epochs: int
    batch_rows: int
    learning_rate: float
    seed: int
    weights_seed: int | None = None

    @property
    def rules(self) -> Rules:
        """The protocol's rules."""
        return Rules(self.mode, self.bits, self.magnitude_bits)

    @property
    def loss(self) -> Literal["cross_entropy", "squared"]:
        """Sigmoid and cross entropy for classes, squared error for numbers."""
        return "cross_entropy" if self.classes else "squared"

    @property
    def layers(self) -> list[Layer]:
        """ReLU inside; at the end a sigmoid for classes."""
        pairs = list(zip(self.widths, self.widths[1:], strict=False))
        inner = [Layer(inputs, outputs, "relu") for inputs, outputs in pairs[:-1]]
        return [*inner, Layer(*pairs[-1], "sigmoid" if self.classes else "")]


@dataclass(frozen=True, slots=True)
class Part:
    """What one party has.

    Attributes:
        train, test: its columns, float64 of axes (rows, columns); None for a party without.
        train_targets: axes (rows, outputs), at the owner of the labels.
        test_labels: codes or numbers, at the owner of the labels.
    """

    train: Tensor | None
    test: Tensor | None
    train_targets: Tensor | None
    test_labels: Tensor | None

    @classmethod
    def of(cls, data: PartyData, plan: Plan, role: int) -> Part:
        """The rows of an aligned party."""
        train, test = (torch.from_numpy(rows) for rows in (data.split.train, data.split.test))
        inputs = None if data.inputs is None else data.inputs.double().flatten(1)
        owns = role == plan.label_role and data.labels is not None
        labels = data.labels if owns else None
        return cls(
            None if inputs is None else inputs[train],
            None if inputs is None else inputs[test],
            None if labels is None else targets_of(labels[train], plan.classes),
            None if labels is None else labels[test],
        )


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """What the outputs should be: one number of two classes, one a class of more."""
    if classes > 2:
        return torch.nn.functional.one_hot(labels, classes).double()
    return labels.double()[:, None]


def seats(experiment: Experiment) -> list[str]:
    """The parties that play P0, P1 and P2; P2 is the label party, or nobody of the experiment.

    Raises:
        ConfigError: not exactly two parties have columns.
    """
    holders = list(experiment.parties)
    if len(holders) != 2:
        raise ConfigError(
            "shares are held by two parties",
            where="parties",
            got=f"{len(holders)} with columns",
            want="2",
            fix="give the columns of the others to one of two, or train with vfl train",
        )
    third = experiment.label.party
    return [*holders, third if third not in holders else "helper"]
