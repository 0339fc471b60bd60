"""What all three parties know of a private training, and what each alone has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vfl.config import Experiment
from vfl.config.experiment import PartyName
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError, ConfigError
from vfl.core.registry import require_range
from vfl.core.version import VERSION
from vfl.datasets import PartyData
from vfl.mpc import Layer, Rules
from vfl.mpc.rules import P2, Mode
from vfl.mpc.three_party import require_frames, targets_of

Task = Literal["train", "infer", "predict"]
_HEX = r"^[0-9a-f]{64}$"
_COUNT = Field(default=0, ge=0, lt=2**40)


class Terms(Settings):
    """Public, and given to each party at its start; they compare them before anything else.

    Attributes:
        mode, bits, magnitude_bits, delta_bits, least_permuted, flips: see `vfl.mpc.Rules`.
        parties: who plays P0, P1 and P2.
        label_role: who has the labels.
        regression: whether they are numbers.
        hidden: widths of hidden layers.
        epochs, batch_rows, learning_rate, seed: of the training; the seed is of the rows' order.
        test_every_epoch: whether the label party is told the test rows' outputs after every epoch;
            else once, at the end.
        weights_seed: makes first weights anybody can repeat; None, the rule, draws them secretly.
        training: which training's network is asked; empty for a new one.
    """

    task: Task
    mode: Mode
    bits: int
    magnitude_bits: int
    delta_bits: int
    least_permuted: int
    flips: bool
    parties: tuple[PartyName, PartyName, PartyName]
    label_role: int
    regression: bool
    hidden: tuple[int, ...]
    epochs: int
    batch_rows: int
    learning_rate: float
    seed: int
    test_every_epoch: bool = False
    weights_seed: int | None = None
    training: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        rules: Rules,
        hidden: Sequence[int] = (),
        learning_rate: float = 0.5,
        weights_seed: int | None = None,
        *,
        test_every_epoch: bool = False,
    ) -> Terms:
        """The terms of a new training.

        Raises:
            ConfigError: not exactly two parties have columns.
            BadOptionError: a learning rate that is none.
        """
        require_range("learning_rate", learning_rate, 1e-9, 100)
        parties = seats(experiment)
        fixed: dict[str, Any] = rules.record()
        return cls(
            task="train",
            **fixed,
            parties=parties,
            label_role=parties.index(experiment.label.party),
            regression=experiment.label.task == "regression",
            hidden=tuple(hidden),
            epochs=experiment.train.epochs,
            batch_rows=experiment.train.batch_rows,
            learning_rate=learning_rate,
            seed=experiment.seed,
            test_every_epoch=test_every_epoch,
            weights_seed=weights_seed,
        )

    @property
    def rules(self) -> Rules:
        """The protocol's rules."""
        return Rules(
            self.mode,
            self.bits,
            self.magnitude_bits,
            self.delta_bits,
            self.least_permuted,
            self.flips,
        )


def helps(terms: Terms, role: int) -> bool:
    """Whether this party has neither columns nor labels."""
    return role == P2 and terms.label_role != P2


class Facts(Settings):
    """What a party tells the two others of itself.

    Attributes:
        version: of vfl.
        nonce: 32 random bytes, so that no two sessions have one name.
        terms: what it was started with.
        columns: of its inputs.
        rows, train_rows, test_rows: of its table; 0 without one.
        classes: at the owner of the labels; 0 for numbers, and elsewhere.
    """

    version: str = Field(default=VERSION, max_length=32)
    nonce: str = Field(pattern=_HEX)
    terms: Terms
    columns: int = _COUNT
    rows: int = _COUNT
    train_rows: int = _COUNT
    test_rows: int = _COUNT
    classes: int = _COUNT

    @classmethod
    def of(cls, terms: Terms, data: PartyData | None, nonce: str) -> Facts:
        """Those of a party that has this data, or none."""
        if data is None:
            return cls(nonce=nonce, terms=terms)
        return cls(
            nonce=nonce,
            terms=terms,
            columns=0 if data.inputs is None else data.inputs.shape[1:].numel(),
            rows=data.rows,
            train_rows=len(data.split.train),
            test_rows=len(data.split.test),
            classes=len(data.classes or ()),
        )


class Plan(Terms):
    """Terms, and what followed from the parties' facts; the same at all three.

    Attributes:
        columns: how many of the inputs are P0's and P1's.
        train_rows, test_rows: how many rows of each kind.
        classes: how many the labels have; 0 for a regression.
    """

    columns: tuple[int, int]
    train_rows: int
    test_rows: int
    classes: int

    @classmethod
    def of_facts(cls, facts: Sequence[Facts]) -> Plan:
        """What P0, P1 and P2 do, who have the same terms.

        Raises:
            BadOptionError: a batch has more rows than there are.
            ProtocolError: a party says that it has so much that no frame could carry the weights.
        """
        terms, label = facts[0].terms, facts[facts[0].terms.label_role]
        if terms.task == "train" and terms.batch_rows > label.train_rows:
            raise BadOptionError(
                "a batch has more rows than there are",
                where="train.batch_rows",
                got=str(terms.batch_rows),
                want=f"at most {label.train_rows}",
            )
        plan = cls(
            **terms.model_dump(),
            columns=(facts[0].columns, facts[1].columns),
            train_rows=label.train_rows,
            test_rows=label.test_rows,
            classes=label.classes,
        )
        require_frames(plan.layers, plan.columns, plan.classes, plan.label_role)
        named = plan.session(facts)
        return plan if plan.training else plan.model_copy(update={"training": named})

    def session(self, facts: Sequence[Facts]) -> str:
        """A name that no other session of these parties has."""
        nonces = "".join(each.nonce for each in facts)
        return hashlib.sha256((nonces + self.model_dump_json()).encode()).hexdigest()

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the network, inputs and outputs included."""
        return (sum(self.columns), *self.hidden, self.classes if self.classes > 2 else 1)

    @property
    def loss(self) -> Literal["cross_entropy", "squared"]:
        """Sigmoid and cross entropy for classes, squared error for numbers."""
        return "cross_entropy" if self.classes else "squared"

    @property
    def layers(self) -> list[Layer]:
        """ReLU inside; at the end a sigmoid for classes."""
        pairs = list(pairwise(self.widths))
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

    train: Tensor | None = None
    test: Tensor | None = None
    train_targets: Tensor | None = None
    test_labels: Tensor | None = None

    @classmethod
    def of(cls, data: PartyData | None, plan: Plan, role: int) -> Part:
        """The rows of an aligned party; nothing of a helper, which has none."""
        if data is None:
            return cls()
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


def seats(experiment: Experiment) -> tuple[str, str, str]:
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
    if third in holders:
        third = next(name for name in ("helper", "third", "nobody") if name not in holders)
    return (holders[0], holders[1], third)
