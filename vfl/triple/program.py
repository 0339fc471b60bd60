"""What each of the three parties does in a private training, and in an inference after it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vfl.datasets import PartyData
from vfl.errors import RunFolderError
from vfl.mpc import Network, Party
from vfl.mpc.layers import Weights
from vfl.mpc.network import share_targets
from vfl.mpc.private_module import batches
from vfl.mpc.ring import WORD_BYTES
from vfl.mpc.shares import Shared, blank, stacked
from vfl.mpc.traffic import traffic
from vfl.seeds import Secret
from vfl.server.quality import classification_quality, regression_quality
from vfl.triple.meeting import meet
from vfl.triple.plan import Part, Plan, Terms

_HOLDERS = (0, 1)
#: Of rows in one frame, which has a limit of its own (`vfl.frame.LIMIT_BYTES`).
BLOCK_BYTES = 1 << 26
#: Nearer to 0 or 1 than a shared value can tell.
_LEAST = 2.0**-23


@dataclass(slots=True)
class Outcome:
    """What one party can tell afterwards.

    Attributes:
        plan: what was agreed on, as plain values.
        history: figures of the test rows after the last epoch, or after every one if the terms say
            so, at the owner of the labels.
        shares: this holder's share of the weights; empty at the helper.
        traffic, leaks: as plain values; see `vfl.mpc.traffic` and `vfl.mpc.leakage`.
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
    if plan.task == "train":
        network = _fresh(party, plan)
        _train(party, plan, part, network, outcome, tell)
    else:
        network = _kept(party, plan, shares)
        if plan.task == "predict":
            rows = _columns(party, plan, part.test, plan.test_rows, "new rows")
            outcome.outputs = _asked(party, plan, network, rows, "outputs of new rows")
        else:
            test = _columns(party, plan, part.test, plan.test_rows, "test inputs")
            _judge(party, plan, part, network, test, outcome)
    if party.role in _HOLDERS:
        for index, each in enumerate(network.weights):
            outcome.shares[f"{index}.weight"] = each.weight.words
            if each.bias is not None:
                outcome.shares[f"{index}.bias"] = each.bias.words
    outcome.seconds = time.monotonic() - started
    outcome.traffic = [_plain(row) for row in traffic(party)]
    outcome.leaks = [_plain(leak) for leak in party.leakage.leaks()]
    return outcome


def first_weights(plan: Plan, holder: int) -> dict[str, Tensor]:
    """A holder's half of the first weights, by default from a secret that is kept nowhere.

    The sum of both is normal, of the usual scale: He et al. 2015, eq 10, before ReLU; Glorot and
    Bengio 2010 at the end. Nobody knows it: weights that P2 knew would let it undo permutations,
    and a training ends near where it began.
    """
    secret = Secret.fresh()
    if plan.weights_seed is not None:
        secret = Secret.of_simulation(plan.weights_seed, f"first weights of P{holder}")
    found = {}
    for index, layer in enumerate(plan.layers):
        gain = 2.0 if layer.function == "relu" else 1.0
        shape = (layer.inputs, layer.outputs)
        draw = torch.from_numpy(secret.normal(shape, "weight", index))
        found[f"{index}.weight"] = draw * (gain / layer.inputs / len(_HOLDERS)) ** 0.5
        found[f"{index}.bias"] = torch.zeros(layer.outputs, dtype=torch.float64)
    return found


def _train(
    party: Party,
    plan: Plan,
    part: Part,
    network: Network,
    outcome: Outcome,
    tell: Callable[[dict[str, float]], None],
) -> None:
    rows = _columns(party, plan, part.train, plan.train_rows, "training inputs")
    test = _columns(party, plan, part.test, plan.test_rows, "test inputs")
    labels = _targets(party, plan, part.train_targets)
    for epoch in range(plan.epochs):
        order = batches(rows, labels, plan.batch_rows, 1, plan.seed + epoch)
        for inputs, targets in order:
            network.train_step(party, inputs, targets, plan.loss, plan.learning_rate)
        figures: dict[str, float] = {}
        # Outputs of many epochs are as many equations for the test rows' columns.
        if plan.test_every_epoch or epoch == plan.epochs - 1:
            figures = _judge(party, plan, part, network, test, outcome)
        if party.role == plan.label_role:
            tell({"epoch": epoch + 1, **figures})


def _judge(
    party: Party,
    plan: Plan,
    part: Part,
    network: Network,
    test: Shared,
    outcome: Outcome,
) -> dict[str, float]:
    """Figures of the test rows, whose outputs the owner of the labels receives; {} elsewhere."""
    outputs = _asked(party, plan, network, test, "test outputs") if plan.test_rows else None
    if outputs is None:
        return {}
    assert part.test_labels is not None, "the owner has the labels"
    quality = classification_quality if plan.classes else regression_quality
    figures = quality(outputs, part.test_labels)
    outcome.history.append(figures)
    return figures


def _asked(party: Party, plan: Plan, network: Network, rows: Shared, where: str) -> Tensor | None:
    """Logits or numbers of some rows, at the owner of the labels; None elsewhere."""
    found = []
    # A frame carries the widest layer's values, and may carry their slopes beside them.
    for start, end in _blocks(plan.test_rows, 2 * max(plan.widths)):
        outputs = network.infer(party, rows.rows(torch.arange(start, end)))
        found.append(party.reveal(outputs, plan.label_role, where))
    if found[0] is None:
        return None
    told = torch.cat([each for each in found if each is not None])
    network.check_outputs(party.rules, told)
    return _logits(told) if plan.classes else told


def _logits(outputs: Tensor) -> Tensor:
    kept = outputs.clamp(_LEAST, 1 - _LEAST)
    logits = torch.log(kept / (1 - kept))
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def _columns(party: Party, plan: Plan, own: Tensor | None, rows: int, where: str) -> Shared:
    """Both holders' columns side by side, opened once for all the steps to come."""
    blocks = []
    for start, end in _blocks(rows, plan.widths[0]):
        left, right = (
            party.share_bounded(
                holder,
                (end - start, plan.columns[holder]),
                own[start:end] if own is not None and party.role == holder else None,
                f"{where} of P{holder}",
                "the columns",
            )
            for holder in _HOLDERS
        )
        blocks += party.open(left.beside(right), phase="setup")
    return stacked(blocks)


def _targets(party: Party, plan: Plan, own: Tensor | None) -> Shared:
    width = plan.widths[-1]
    return stacked(
        [
            share_targets(
                party,
                plan.label_role,
                (end - start, width),
                None if own is None else own[start:end],
            )
            for start, end in _blocks(plan.train_rows, width)
        ]
    )


def _blocks(rows: int, width: int) -> Iterable[tuple[int, int]]:
    """Runs of rows, of one size within a row, whose words fit a frame; as few as that takes."""
    count = max(1, min(rows, math.ceil(rows * width * WORD_BYTES / BLOCK_BYTES)))
    return pairwise(rows * block // count for block in range(count + 1))


def _fresh(party: Party, plan: Plan) -> Network:
    halves = [
        Network.share(
            party,
            plan.layers,
            holder,
            first_weights(plan, holder) if party.role == holder else None,
        )
        for holder in _HOLDERS
    ]
    return halves[0].plus(halves[1])


def _kept(party: Party, plan: Plan, shares: Mapping[str, Tensor]) -> Network:
    """A network whose shares were kept; of P2, who has none, the shapes."""

    def one(name: str, *shape: int) -> Shared:
        words = shares.get(name) if party.role in _HOLDERS else blank(shape)
        if words is None or words.shape != shape or words.dtype != torch.int64:
            raise RunFolderError(
                "this share is not of the network that the parties' tables ask for",
                where=name,
                got="nothing" if words is None else f"{tuple(words.shape)} of {words.dtype}",
                want=f"{shape} of torch.int64",
                fix="ask with the columns and labels that it was trained with",
            )
        return Shared(words, party.rules.bits)

    weights = [
        Weights(
            one(f"{index}.weight", layer.inputs, layer.outputs),
            one(f"{index}.bias", layer.outputs),
        )
        for index, layer in enumerate(plan.layers)
    ]
    return Network(plan.layers, weights)


def _plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
