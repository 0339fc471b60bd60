"""The label party of a network that nobody holds: it is disclosed the outputs, and judges them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import ExposedCutError
from vfl.core.frame import Frame, Kind, Link
from vfl.core.ledger import Ledger
from vfl.core.storage import weights_digest
from vfl.datasets import PartyData
from vfl.server.label_party import Objective
from vfl.server.task import EpochRecord, Progress, Regression, Task, make_task
from vfl.session import Checkpoints, EarlyStopping, Exchange, PartyReport, Terms, secure
from vfl.session.exchange import Own
from vfl.session.secure import (
    EVALUATE,
    SETUP,
    TRAIN,
    Layers,
    OwnRows,
    Revealed,
    WholeNetwork,
    require_honest,
)

_TASK, _SHARE = "task.", "share."


class WholeNetworkLabel:
    """Plays the label party through a session.

    Args:
        data: labels, and the party's own columns if it has any.
        terms: what was agreed.
        network: its end.
        task: what is learned, fitted to the labels of a training.
        ledger: where the links count.
        checkpoints: where it saves while it trains; None saves nothing.
        weights: what `weights` gave after the training; None trains.
        on_epoch: told one record an epoch.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        network: WholeNetwork,
        task: Task,
        ledger: Ledger,
        checkpoints: Checkpoints | None,
        weights: Mapping[str, Tensor] | None,
        on_epoch: Callable[[EpochRecord], None],
    ) -> None:
        self.data = data
        self.terms = terms
        self.network = network
        self.ledger = ledger
        self.outputs: list[Tensor] = []
        self.reports: list[PartyReport] = []
        self.progress = Progress(task, ledger, on_epoch)
        self.stopping = EarlyStopping(terms.train, network.weights, network.load_weights)
        self._task = task
        self._checkpoints = checkpoints
        self._shares: dict[str, Tensor] | None = None
        if weights is not None:
            task.load_state_dict(_without(weights, _TASK))
            self._shares = _without(weights, _SHARE)

    @property
    def history(self) -> list[EpochRecord]:
        """One record an epoch."""
        return self.progress.history

    def play(
        self,
        start: int,
        through: Callable[[Iterable[Exchange]], Iterator[Exchange]] = iter,
    ) -> None:
        """Go through a session from exchange `start` on; see `WholeNetworkParty.play`."""
        self.ledger.phase = SETUP
        state = None
        if start and self._checkpoints is not None:
            state = self._checkpoints.load(start)
            self.stopping.restore(state["stopping"])
        self.network.begin(self._shares, None if state is None else state["network"])
        if state is not None:
            self.progress.restore(state["progress"])
        schedule = self.stopping.follow(self.terms.schedule(self.network.split, start))
        for epoch, exchanges in groupby(through(schedule), key=lambda exchange: exchange.epoch):
            started = time.perf_counter()
            for exchange in exchanges:
                self._step(exchange)
                if exchange.last and exchange.trains:
                    self.progress.train_seconds += time.perf_counter() - started
            best = self.stopping.best_epoch
            more = {"best_epoch": best} if best else {}
            self.progress.end_epoch(epoch, time.perf_counter() - started, more)
        frames = self.network.end(Frame(Kind.DONE))
        self.reports = [
            PartyReport.of(frame, name)
            for frame, name in zip(frames, self.terms.peers, strict=True)
        ]

    def weights(self) -> dict[str, Tensor]:
        """The label party's own shares, if it holds any, and what it learned of the labels."""
        shares = {f"{_SHARE}{name}": share for name, share in self.network.weights().items()}
        return shares | {f"{_TASK}{name}": one for name, one in self._task.state_dict().items()}

    def weights_digest(self) -> str:
        """SHA-256 of `weights`."""
        return weights_digest(self.weights())

    def revealed(self) -> list[Revealed]:
        """What the label party learned: kinds and sizes."""
        return self.network.revealed()

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on: shares, and what was counted."""
        return {
            "network": self.network.training_state(),
            "stopping": self.stopping.state(),
            "progress": self.progress.state(),
        }

    def _step(self, exchange: Exchange) -> None:
        due = self._checkpoints is not None and self._checkpoints.due(exchange.step)
        if due and self._checkpoints is not None:
            self._checkpoints.save(exchange.step, self.training_state())
        self.ledger.phase = TRAIN if exchange.trains else EVALUATE
        if exchange.trains:
            self.network.train(exchange)
            self.progress.trained(len(exchange.rows))
        else:
            self._evaluate(exchange)
        # Only now: the last frame of an exchange needs both others to have begun, hence saved.
        if due and self._checkpoints is not None:
            self._checkpoints.commit(exchange.step)

    def _evaluate(self, exchange: Exchange) -> None:
        found = self.network.outputs(exchange)
        assert found is not None, "the label party is disclosed the outputs"
        outputs = found.float()
        self.progress.asked(len(exchange.rows))
        if exchange.phase == "predict" or self.data.labels is None:
            self.outputs.append(self._task.answers(outputs))
        else:
            rows = getattr(self.data.split, exchange.phase)[exchange.rows]
            truth = self.data.labels[torch.from_numpy(rows)]
            loss = float(self._task(outputs, truth))
            self.progress.meter(exchange.phase).add(outputs, truth, loss)
        if self.stopping.judges(exchange):
            figures = self.progress.meter(exchange.phase).figures()
            verdict = self.stopping.judge(figures["validation_loss"], exchange)
            self.network.tell(verdict, exchange.step)


def task_and_rows(data: PartyData, terms: Terms, objective: Objective) -> tuple[Task, OwnRows]:
    """What the label party learns, and what it brings.

    Raises:
        ExposedCutError: rows or classes weigh differently, which would take a fraction of shares.
    """
    weighted = {
        "label.class_weight": objective.class_weight != "none",
        "row weights": data.row_weights is not None,
    }
    if wrong := [name for name, given in weighted.items() if given]:
        raise ExposedCutError(
            "every row weighs the same where nobody sees a gradient",
            got=wrong[0],
            want="label.class_weight = 'none', and no weights of rows",
        )
    task = make_task(objective.task, objective.outputs, objective.hits)
    labels = data.labels
    if labels is not None and terms.mode == "train":
        train = torch.from_numpy(data.split.train)
        task.fit(labels[train])
        if isinstance(task, Regression):
            labels = (labels - task.center) / task.scale
    inputs = data.inputs if data.name in terms.parties else None
    classes = objective.outputs if objective.task == "classification" else 0
    return task, OwnRows(data.split, inputs, labels, classes, objective.top)


def _without(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries of a prefix, named without it."""
    size = len(prefix)
    return {name[size:]: value for name, value in weights.items() if name.startswith(prefix)}


def build_whole_label(
    data: PartyData,
    terms: Terms,
    attempt: tuple[str, int],
    streams: Mapping[str, Link],
    receive_any: Callable[[], tuple[str, Frame]],
    own: Own,
    objective: Objective,
    *,
    weights: Mapping[str, Tensor] | None = None,
    ledger: Ledger | None = None,
    on_epoch: Callable[[EpochRecord], None] = lambda record: None,
    agreed: Callable[[Mapping[str, Layers]], None] = lambda layers: None,
) -> WholeNetworkLabel:
    """The label party of a network that nobody holds, ready for a session.

    Args:
        data: labels (none needed to predict) and own columns, aligned with everybody's rows.
        terms: the session's terms.
        attempt: name of the session, and how often it was begun anew.
        streams: to the two others, by name.
        receive_any: the next frame of whoever sends first.
        own: what is its own.
        objective: what is learned.
        weights: what was kept of the training, for evaluation and prediction.
        ledger: where the links count.
        on_epoch: told one record an epoch.
        agreed: see `SecureMode.outer_network`.

    Raises:
        SpecError: a setting that has no place here, or a top that cannot be computed on shares.
    """
    mode = secure.make(terms.secure)
    mode.refuse(terms)
    require_honest(data.name, own, None)
    task, rows = task_and_rows(data, terms, objective)
    network = mode.middle_network(terms, *attempt, streams, receive_any, rows, own.secret, agreed)
    kept = None if terms.mode == "train" else dict(weights or {})
    counted = ledger or Ledger()
    return WholeNetworkLabel(data, terms, network, task, counted, own.checkpoints, kept, on_epoch)
