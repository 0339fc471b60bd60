"""What each of the three parties does in a private training, and in an inference after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vfl.core.seeds import Secret
from vfl.datasets import PartyData
from vfl.mpc import Party, three_party
from vfl.mpc.party import traffic
from vfl.mpc.private_module import batches
from vfl.mpc.three_party import ThreePartyNetwork
from vfl.server.quality import classification_quality, regression_quality
from vfl.triple.meeting import meet
from vfl.triple.plan import Part, Plan, Terms


@dataclass(slots=True)
class Outcome:
    """What one party can tell afterwards.

    Attributes:
        plan: what was agreed on, as plain values.
        history: figures of the test rows after the last epoch, or after every one if the terms say
            so, at the owner of the labels.
        shares: this holder's share of the weights; empty at the helper.
        traffic, leaks: as plain values; see `vfl.mpc.channel` and `vfl.mpc.channel`.
        seconds: from the first share to the last figure.
        outputs: of new rows, logits or numbers of axes (rows, outputs), at the owner of the labels.
        predictions: where they were written.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    shares: dict[str, Tensor] = field(default_factory=dict)
    traffic: list[dict[str, Any]] = field(default_factory=list)
    leaks: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    outputs: Tensor | None = None
    predictions: str = ""


def play(
    party: Party,
    terms: Terms,
    data: PartyData | None,
    shares: Mapping[str, Tensor],
    tell: Callable[[dict[str, float]], None] = lambda figures: None,
) -> tuple[Plan, Outcome]:
    """Meet the two others and follow what was agreed on; see `meet` and `follow`.

    Args:
        party: without keys yet.
        terms: what this party was started with.
        data: its own rows, if it has any.
        shares: its share of a network that was trained before; empty for a new one.
        tell: told every epoch and the figures there are, at the owner of the labels.
    """
    plan = meet(party, terms, data)
    return plan, follow(party, plan, Part.of(data, plan, party.role), shares, tell)


def follow(
    party: Party,
    plan: Plan,
    part: Part,
    shares: Mapping[str, Tensor],
    tell: Callable[[dict[str, float]], None] = lambda figures: None,
) -> Outcome:
    """Follow a plan at one party.

    Args:
        party: with keys agreed.
        plan: the same at all three.
        part: this party's own rows.
        shares: its share of a network that was trained before; empty for a new one.
        tell: told every epoch and the figures there are, at the owner of the labels.

    Raises:
        PeerError: another party did not follow.
        RingRangeError: a value is too large; it is named by layer.
    """
    outcome, started = Outcome(plan.model_dump(mode="json")), time.monotonic()
    network = ThreePartyNetwork(party, plan.layers, plan.columns, plan.label_role)
    if plan.task == "train":
        _train(plan, part, network, outcome, tell)
    else:
        network.load_weights(shares)
        if plan.task == "predict":
            network.share_rows("predict", plan.test_rows, part.test, "new rows")
            every = torch.arange(plan.test_rows)
            outcome.outputs = network.outputs("predict", every, "outputs of new rows")
        else:
            network.share_rows("test", plan.test_rows, part.test, "test inputs")
            _judge(plan, part, network, outcome)
    outcome.shares = network.weights()
    outcome.seconds = time.monotonic() - started
    outcome.traffic = [_plain(row) for row in traffic(party)]
    outcome.leaks = [_plain(leak) for leak in party.leakage.leaks()]
    return outcome


def first_weights(plan: Plan, holder: int) -> dict[str, Tensor]:
    """A holder's half of the first weights, by default from a secret that is kept nowhere."""
    secret = Secret.fresh()
    if plan.weights_seed is not None:
        secret = Secret.of_simulation(plan.weights_seed, f"first weights of P{holder}")
    return three_party.first_weights(plan.layers, secret)


def _train(
    plan: Plan,
    part: Part,
    network: ThreePartyNetwork,
    outcome: Outcome,
    tell: Callable[[dict[str, float]], None],
) -> None:
    role = network.party.role
    network.share_weights(first_weights(plan, role) if network.holds_shares else None)
    network.share_rows("train", plan.train_rows, part.train, "training inputs")
    network.share_rows("test", plan.test_rows, part.test, "test inputs")
    network.share_targets(plan.train_rows, part.train_targets)
    for epoch in range(plan.epochs):
        for index in batches(plan.train_rows, plan.batch_rows, 1, plan.seed + epoch):
            network.train_step(index, plan.learning_rate)
        figures: dict[str, float] = {}
        # Outputs of many epochs are as many equations for the test rows' columns.
        if plan.test_every_epoch or epoch == plan.epochs - 1:
            figures = _judge(plan, part, network, outcome)
        if role == plan.label_role:
            tell({"epoch": epoch + 1, **figures})


def _judge(
    plan: Plan, part: Part, network: ThreePartyNetwork, outcome: Outcome
) -> dict[str, float]:
    """Figures of the test rows, whose outputs the owner of the labels receives; {} elsewhere."""
    if not plan.test_rows:
        return {}
    outputs = network.outputs("test", torch.arange(plan.test_rows), "test outputs")
    if outputs is None:
        return {}
    assert part.test_labels is not None, "the owner has the labels"
    quality = classification_quality if plan.classes else regression_quality
    figures = quality(outputs, part.test_labels)
    outcome.history.append(figures)
    return figures


def _plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
