"""The label party: it takes the cuts, runs the top, and sends each party its gradient.

cuts -> merge -> top -> loss -> each party's gradient
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vfl import defenses, models
from vfl.compression import StepContext
from vfl.config import LabelSettings
from vfl.core.errors import DataError, SpecError
from vfl.core.frame import Link
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret, scoped
from vfl.core.storage import weights_digest
from vfl.datasets import PartyData
from vfl.defenses import Defense, LabelKind
from vfl.defenses.base import Undefended
from vfl.server.task import (
    EpochRecord,
    Progress,
    Task,
    batch_weights,
    make_task,
    training_weights,
)
from vfl.session import EarlyStopping, Exchange, Terms, secure
from vfl.session.exchange import (
    SUM,
    Compute,
    CutTerms,
    Draws,
    LabelEnd,
    Own,
    Stateful,
    check_finite,
    check_shape,
    drop_gradients,
    gather,
    optimizer_factory,
    restore,
)
from vfl.session.secure import SecureMode


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class LabelModel:
    """What the label party trains, and how.

    Attributes:
        top: the top model, already wrapped by the defense.
        own_bottom: the bottom of its own columns; None without any.
        defense: the label party's instance.
        task: what is learned.
        class_weight: "none" or "balanced"; see `training_weights`.
    """

    top: nn.Module
    own_bottom: nn.Module | None
    defense: Defense
    task: Task
    class_weight: str = "none"


@dataclass(frozen=True, slots=True)
class Objective:
    """What a session is to learn, as the experiment's [label] says it.

    Attributes:
        top: a spec, or a module from the merged width to `outputs`.
        task: "classification" or "regression".
        outputs: number of classes, or 1.
        class_weight: "none" or "balanced".
        hits: a hit rate at so many classes is measured; 0 measures none.
    """

    top: str | nn.Module
    task: str
    outputs: int
    class_weight: str = "none"
    hits: int = 0

    @classmethod
    def of(cls, label: LabelSettings, outputs: int, top: nn.Module | None = None) -> Objective:
        """What the settings name, with another top if one is given."""
        return cls(top or label.top, label.task, outputs, label.class_weight, label.hits)


class LabelParty:
    """Plays the label party through the exchanges of a session.

    Args:
        data: labels, and the party's own columns if it has any.
        terms: what was agreed.
        model: what the label party trains.
        own: its secret, its adversary and its device.
        halves: its end of a round with every feature party, by name.
        links: every stream, that to a third party included.
        ledger: where traffic is counted, for the epoch records.
        on_epoch: told one record an epoch.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        model: LabelModel,
        own: Own,
        ends: Mapping[str, LabelEnd],
        links: Mapping[str, Link],
        ledger: Ledger,
        on_epoch: Callable[[EpochRecord], None] = _nothing,
    ) -> None:
        self.data = data
        self.terms = terms
        self.ends = ends
        self.ledger = ledger
        self.outputs: list[Tensor] = []
        self.model = nn.ModuleDict({"top": model.top})
        if model.own_bottom is not None:
            self.model["bottom"] = model.own_bottom
        for name, end in ends.items():
            if end.adapter is not None:
                self.model[f"codec-{name}"] = end.adapter
        self._compute = Compute(own.device, terms.train.precision)
        self._task = self.model["task"] = model.task
        self.model.to(self._compute.device)
        self._defense = defense = model.defense
        self.progress = Progress(self._task, ledger, on_epoch)
        self._secret = own.secret
        always = not isinstance(defense, Undefended)
        self._draws = Draws(own.secret, "rng", model.top, always=always)
        bottom = model.own_bottom or nn.Identity()
        self._own_draws = Draws(own.secret, "own", bottom, always=always)
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        self._optimizer = None
        if terms.mode == "train" and self._trainable:
            build = optimizer_factory(terms.train)
            self._optimizer = own.adversary.optimizer(build(self._trainable))
        self._adversary = own.adversary
        self._checkpoints = own.checkpoints
        self.stopping = EarlyStopping(terms.train, self.weights, self.load_weights)
        mode = secure.make(terms.secure)
        self.aggregator = mode.aggregator(terms, ends, links, ledger, self.stopping)
        self._labels, self._row_weights = data.labels, None
        if data.labels is not None and terms.mode == "train":
            train = torch.from_numpy(data.split.train)
            self._positions = torch.full((len(data.labels),), -1)
            self._positions[train] = torch.arange(len(train))
            self._labels = data.labels.clone()
            self._labels[train] = defense.labels(data.labels[train], own.secret)
            # Of the labels as trained: true ones would tell what a defense hides.
            weights = training_weights(self._labels, train, data.row_weights, model.class_weight)
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
        """Go through a session; `stopping.follow` makes its schedule one that may stop early.

        Where all parties are in one process, `before` and `after` frame each exchange, and
        `between` lets them answer what was relayed to them.
        """
        for epoch, exchanges in groupby(schedule, key=lambda exchange: exchange.epoch):
            started = time.perf_counter()
            for exchange in exchanges:
                if self._checkpoints is not None and self._checkpoints.due(exchange.step):
                    self._checkpoints.save(exchange.step, self.training_state())
                before(exchange)
                self.aggregator.relay(exchange)
                between(exchange)
                self.step(exchange)
                after(exchange)
                if exchange.last and exchange.trains:
                    self.progress.train_seconds += time.perf_counter() - started
            best = self.stopping.best_epoch
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
            "course": self.stopping.state(),
            "gradients": {name: end.sent_state() for name, end in self.ends.items()},
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
        self.stopping.restore(saved["course"])
        self._adversary.load_training_state(saved.get("adversary", {}))
        for name, end in self.ends.items():
            end.send_again(saved["gradients"][name])
        self.progress.restore(saved["progress"])  # which has counted what was just sent again

    def _stateful(self) -> dict[str, Stateful]:
        codecs = {f"codec-{name}": end.codec for name, end in self.ends.items()}
        return {"defense": self._defense, **codecs}

    def _train(self, exchange: Exchange) -> None:
        context = StepContext(exchange.step, training=True, secret=self._secret)
        counts = self._defense.counts(self._positions[exchange.rows], exchange.epoch)
        inputs, labels = self._defense.batch(*self._rows(exchange), context)
        assert labels is not None, "training needs labels"
        labels = self._adversary.labels(labels, context)
        weights = batch_weights(self._row_weights, exchange.rows, counts, self._compute.device)
        if inputs is not None:
            inputs = self._adversary.batch(inputs, context)
        self._set_training(True)
        cuts = self._cuts(exchange, inputs)
        truth = labels.to(self._compute.device)
        with self._draws.at(exchange.step):
            outputs = self._top(cuts)
            logits = self._defense.logits(outputs, context)
            targets = self._defense.targets(truth, logits.shape[1], context)
            loss = self._task(logits, targets, weights)
            sent = {name: cut for name, cut in cuts.items() if name in self.ends}
            extra = self._defense.loss(sent, truth, logits, context)
        total = loss if extra is None else loss + extra
        check_finite(total, "loss", self.data.name, exchange.step)
        drop_gradients(self._trainable)
        total.backward()
        # Gradients leave before our own step, so that the parties work while we do.
        for end in self.ends.values():
            end.send_gradient(labels)
            if exchange.last:
                end.drained()
        if self._optimizer is not None:
            self._optimizer.step()
        self.progress.trained(len(exchange.rows))
        # Figures are of outputs as a prediction gives them, whatever the loss is taken of.
        shown = self._defense.logits(outputs.detach(), StepContext(exchange.step))
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
        outputs = self._defense.logits(self._top(cuts), StepContext(exchange.step))
        if exchange.phase == "predict" or labels is None:
            self.outputs.append(self._task.answers(outputs).cpu())
        else:
            truth = labels.to(self._compute.device)
            loss = float(self._task(outputs, truth))
            self.progress.meter(exchange.phase).add(outputs, truth, loss)
        if self.stopping.judges(exchange):
            figures = self.progress.meter(exchange.phase).figures()
            verdict = self.stopping.judge(figures["validation_loss"], exchange)
            for end in self.ends.values():
                end.confirm(exchange.step, verdict)

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
        found = own | self.aggregator.cuts(exchange)
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


def build_label_party(
    data: PartyData,
    terms: Terms,
    links: Mapping[str, Link],
    own: Own,
    objective: Objective,
    *,
    own_bottom: nn.Module | None = None,
    weights: Mapping[str, Tensor] | None = None,
    ledger: Ledger | None = None,
    on_epoch: Callable[[EpochRecord], None] = _nothing,
) -> LabelParty:
    """A label party ready for a session.

    Args:
        data: labels (none needed to predict) and own columns, aligned with everybody's rows.
        terms: the session's terms.
        links: the stream to each feature party, and to a third party that deals.
        own: what is its own; the first weights of the top follow from the secret.
        objective: what is learned.
        own_bottom: a module for the own columns instead of the one the terms name.
        weights: trained weights, for evaluation and prediction.
        ledger: where the links count.
        on_epoch: told one record an epoch.

    Raises:
        SpecError: a plug-in does not fit, or the defense means nothing for such labels.
        ExposedCutError: a secure sum would hide nothing.
    """
    task, outputs = objective.task, objective.outputs
    weighted = objective.class_weight != "none" or data.row_weights is not None
    kind = LabelKind(outputs if task == "classification" else None, weighted, terms.train.epochs)
    defense, mode = _defense(terms, kind), secure.make(terms.secure)
    mode.refuse(terms)
    with scoped(own.secret.number("init")):
        top = objective.top
        if not isinstance(top, nn.Module):
            top = models.make_top(top).build(terms.merged_width, outputs)
        top = defense.wrap_top(top, terms.merged_width)
        bottom = _own_bottom(data, terms, own_bottom)
        ends = {
            name: LabelEnd(_cut_terms(name, terms, mode, defense, own.secret), own, links[name])
            for name in terms.feature_parties
        }
    learned = make_task(task, outputs, objective.hits)
    model = LabelModel(top, bottom, defense, learned, objective.class_weight)
    party = LabelParty(data, terms, model, own, ends, links, ledger or Ledger(), on_epoch)
    if weights is not None:
        party.load_weights(weights)
    return party


def _cut_terms(
    party: str, terms: Terms, mode: SecureMode, defense: Defense, secret: Secret
) -> CutTerms:
    """What the label party knows of a feature party's cuts, with a codec for that party alone."""
    width, in_flight = terms.parties[party].width, terms.train.in_flight
    return CutTerms(party, width, mode.label_codec(party, terms, secret), defense, in_flight)


def _defense(terms: Terms, kind: LabelKind) -> Defense:
    """The label party's instance, told what its labels are."""
    defense = defenses.make(terms.defense)
    try:
        defense.prepare(kind)
    except SpecError as error:
        error.where = error.where or "defense"
        raise
    return defense


def _own_bottom(data: PartyData, terms: Terms, given: nn.Module | None) -> nn.Module | None:
    if data.name not in terms.parties:
        return None
    if data.inputs is None:
        raise DataError(
            f"the label party '{data.name}' is listed with columns but has none",
            fix="remove it from [parties], or give it columns",
        )
    asked = terms.parties[data.name]
    shape = tuple(data.inputs.shape[1:])
    return given or models.make_bottom(asked.bottom).build(shape, asked.width)
