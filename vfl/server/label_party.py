"""The label party: it merges the cuts, runs the top, and sends each party its gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vfl.compression import Moment
from vfl.datasets import PartyData
from vfl.defenses import Defense
from vfl.defenses.none import Undefended
from vfl.exchange import Adversary, Compute, LabelHalf, MaskedHalves
from vfl.exchange.adversary import HONEST
from vfl.exchange.draws import Draws
from vfl.exchange.guards import check_finite, check_shape
from vfl.exchange.optimizers import OptimizerFactory, drop_gradients
from vfl.exchange.state import Stateful, gather, restore
from vfl.ledger import Ledger
from vfl.seeds import Secret
from vfl.server.progress import EpochRecord, Progress
from vfl.server.reception import SUM, Reception
from vfl.server.task import Task
from vfl.server.weights import batch_weights, training_weights
from vfl.session import Checkpoints, Course, Exchange, Terms
from vfl.storage import weights_digest


def _nothing(_: Any) -> None:
    return None


class LabelParty:
    """Plays the label party through the exchanges of a session.

    Args:
        data: labels, and the party's own columns if it has any.
        terms: what was agreed.
        top: the top model, already wrapped by the defense.
        own_bottom: the bottom of its own columns; None without any.
        halves: its half of the exchange with every feature party, by name.
        defense: the label party's instance.
        task: what is learned.
        secret: the label party's own.
        optimizer: builds the optimiser of everything the label party owns.
        ledger: where traffic is counted, for the epoch records.
        on_epoch: told one record an epoch.
        checkpoints: where it saves while it trains; None saves nothing.
        adversary: tampering on this side; honest by default.
        compute: where the models run.
        class_weight: "none" or "balanced"; see `vfl.server.weights`.
        joint: takes the feature parties' cuts as one sum; None sees each.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        top: nn.Module,
        own_bottom: nn.Module | None,
        halves: Mapping[str, LabelHalf],
        defense: Defense,
        task: Task,
        secret: Secret,
        optimizer: OptimizerFactory | None,
        ledger: Ledger,
        on_epoch: Callable[[EpochRecord], None] = _nothing,
        checkpoints: Checkpoints | None = None,
        adversary: Adversary = HONEST,
        compute: Compute | None = None,
        class_weight: str = "none",
        joint: MaskedHalves | None = None,
    ) -> None:
        self.data = data
        self.terms = terms
        self.halves = halves
        self.ledger = ledger
        self.outputs: list[Tensor] = []
        self.model = nn.ModuleDict({"top": top})
        if own_bottom is not None:
            self.model["bottom"] = own_bottom
        for name, half in halves.items():
            if half.adapter is not None:
                self.model[f"codec-{name}"] = half.adapter
        self._compute = compute or Compute()
        self._task = self.model["task"] = task
        self.model.to(self._compute.device)
        self._defense = defense
        self.progress = Progress(self._task, ledger, on_epoch)
        self._secret = secret
        always = not isinstance(defense, Undefended)
        self._draws = Draws(secret, "rng", top, always=always)
        self._own_draws = Draws(secret, "own", own_bottom or nn.Identity(), always=always)
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        self._optimizer = None
        if optimizer is not None and self._trainable:
            self._optimizer = adversary.optimizer(optimizer(self._trainable))
        self._adversary = adversary
        self._checkpoints = checkpoints
        self.course = Course(terms.train, self.weights, self.load_weights)
        self.reception = Reception(halves, joint, ledger, self.course)
        self._labels, self._row_weights = data.labels, None
        if data.labels is not None and terms.mode == "train":
            train = torch.from_numpy(data.split.train)
            self._places = torch.full((len(data.labels),), -1)
            self._places[train] = torch.arange(len(train))
            self._labels = data.labels.clone()
            self._labels[train] = defense.labels(data.labels[train], secret)
            # Of the labels as trained: true ones would tell what a defense hides.
            weights = training_weights(self._labels, train, data.row_weights, class_weight)
            self._task.fit(self._labels[train], None if weights is None else weights[train])
            self._row_weights = weights

    @property
    def history(self) -> list[EpochRecord]:
        """One record an epoch."""
        return self.progress.history

    def run(
        self,
        schedule: Iterable[Exchange],
        before: Callable[[Exchange], None] = _nothing,
        after: Callable[[Exchange], None] = _nothing,
        between: Callable[[Exchange], None] = _nothing,
    ) -> None:
        """Go through a session; `course.follow` makes its schedule one that may stop early.

        Where all parties are in one process, `before` and `after` frame each exchange, and
        `between` lets them answer what was relayed to them.
        """
        for epoch, exchanges in groupby(schedule, key=lambda exchange: exchange.epoch):
            started = time.perf_counter()
            for exchange in exchanges:
                if self._checkpoints is not None and self._checkpoints.due(exchange.step):
                    self._checkpoints.save(exchange.step, self.training_state())
                before(exchange)
                self.reception.relay(exchange)
                between(exchange)
                self.step(exchange)
                after(exchange)
                if exchange.last and exchange.trains:
                    self.progress.train_seconds += time.perf_counter() - started
            best = self.course.best_epoch
            more = {"best_epoch": best} if best else {}
            self.progress.end_epoch(epoch, time.perf_counter() - started, more)

    def step(self, exchange: Exchange) -> None:
        """One exchange with every party."""
        if exchange.trains:
            self._train(exchange)
        else:
            self._evaluate(exchange)

    def weights(self) -> dict[str, Tensor]:
        """The label party's own weights and states; they never leave it."""
        state = gather(self.model, self._stateful())
        return {name: value.cpu() for name, value in state.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restore what `weights` gave."""
        restore(self.model, self._stateful(), weights)

    def weights_digest(self) -> str:
        """SHA-256 of the label party's own weights."""
        return weights_digest(self.weights())

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly: weights, optimiser, and what was counted."""
        return {
            "state": self.weights(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else {},
            "progress": self.progress.state(),
            "course": self.course.state(),
            "gradients": {name: half.sent_state() for name, half in self.halves.items()},
            "adversary": self._adversary.training_state(),
        }

    def resume(self, step: int) -> None:
        """Go back to the state before exchange `step`; 0 is where a new party starts.

        Raises:
            RunFolderError: the checkpoint is missing, damaged or of another experiment.
        """
        if self._checkpoints is not None and step > 0:
            self.load_training_state(self._checkpoints.load(step))

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `training_state` gave."""
        self.load_weights(saved["state"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved["optimizer"])
        self.course.restore(saved["course"])
        self._adversary.load_training_state(saved.get("adversary", {}))
        for name, half in self.halves.items():
            half.send_again(saved["gradients"][name])
        self.progress.restore(saved["progress"])  # which has counted what was just sent again

    def _stateful(self) -> dict[str, Stateful]:
        codecs = {f"codec-{name}": half.codec for name, half in self.halves.items()}
        return {"defense": self._defense, **codecs}

    def _train(self, exchange: Exchange) -> None:
        moment = Moment(exchange.step, training=True, secret=self._secret)
        counts = self._defense.counts(self._places[exchange.rows], exchange.epoch)
        inputs, labels = self._defense.batch(*self._rows(exchange), moment)
        assert labels is not None, "training needs labels"
        labels = self._adversary.labels(labels, moment)
        weights = batch_weights(self._row_weights, exchange.rows, counts, self._compute.device)
        if inputs is not None:
            inputs = self._adversary.batch(inputs, moment)
        self._set_training(True)
        cuts = self._cuts(exchange, inputs)
        truth = labels.to(self._compute.device)
        with self._draws.at(exchange.step):
            outputs = self._top(cuts)
            logits = self._defense.logits(outputs, moment)
            targets = self._defense.targets(truth, logits.shape[1], moment)
            loss = self._task(logits, targets, weights)
            sent = {name: cut for name, cut in cuts.items() if name in self.halves}
            extra = self._defense.loss(sent, truth, logits, moment)
        total = loss if extra is None else loss + extra
        check_finite(total, "loss", self.data.name, exchange.step)
        drop_gradients(self._trainable)
        total.backward()
        # Gradients leave before our own step, so that the parties work while we do.
        for half in self.halves.values():
            half.send_gradient(labels)
            if exchange.last:
                half.drained()
        if self._optimizer is not None:
            self._optimizer.step()
        self.progress.trained(len(exchange.rows))
        # Figures are of outputs as a prediction gives them, whatever the loss is taken of.
        shown = self._defense.logits(outputs.detach(), Moment(exchange.step))
        if counts is not None and weights is not None:
            kept = counts.to(truth.device)
            shown, truth, weights = shown[kept], truth[kept], weights[kept]
        self.progress.meter("train").add(shown, truth, float(loss.detach()), weights)

    @torch.no_grad()
    def _evaluate(self, exchange: Exchange) -> None:
        inputs, labels = self._rows(exchange)
        self._set_training(False)
        cuts = self._cuts(exchange, inputs)
        self.progress.asked(len(exchange.rows))
        outputs = self._defense.logits(self._top(cuts), Moment(exchange.step))
        if exchange.phase == "predict" or labels is None:
            self.outputs.append(self._task.answers(outputs).cpu())
        else:
            truth = labels.to(self._compute.device)
            loss = float(self._task(outputs, truth))
            self.progress.meter(exchange.phase).add(outputs, truth, loss)
        if self.course.judges(exchange):
            figures = self.progress.meter(exchange.phase).figures()
            told = self.course.judge(figures["validation_loss"], exchange)
            for half in self.halves.values():
                half.confirm(exchange.step, told)

    def _rows(self, exchange: Exchange) -> tuple[Tensor | None, Tensor | None]:
        rows = torch.from_numpy(exchange.rows)
        inputs = None if self.data.inputs is None else self.data.inputs.index_select(0, rows)
        source = self._labels if exchange.trains else self.data.labels
        return inputs, None if source is None else source.index_select(0, rows)

    def _cuts(self, exchange: Exchange, inputs: Tensor | None) -> dict[str, Tensor]:
        """Every party's cut in merge order; ours is computed while the others travel."""
        own: dict[str, Tensor] = {}
        if "bottom" in self.model and inputs is not None:
            with self._own_draws.at(exchange.step), self._compute.forward():
                cut = self.model["bottom"](inputs.to(self._compute.device)).float()
            own[self.data.name] = cut
            check_shape(cut, len(inputs), self.terms.parties[self.data.name].width, self.data.name)
        found = own | self.reception.cuts(exchange)
        cuts = {name: found[name] for name in [*self.terms.parties, SUM] if name in found}
        if self._checkpoints is not None and self._checkpoints.due(exchange.step):
            self._checkpoints.commit(exchange.step)
        return cuts

    def _top(self, cuts: Mapping[str, Tensor]) -> Tensor:
        parts, concat = list(cuts.values()), self.terms.merge == "concat"
        merged = torch.cat(parts, dim=1) if concat else sum(parts[1:], start=parts[0])
        with self._compute.forward():
            logits: Tensor = self.model["top"](merged)
        return logits.float()

    def _set_training(self, training: bool) -> None:
        if self.model.training is not training:
            self.model.train(training)
