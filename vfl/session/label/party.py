"""The label party: it receives cuts, runs the top model, and returns the cuts' gradients.

cuts -> merge -> top model -> loss -> gradient of each party's cut

The class `AnyLabelParty` contains the steps that are common to all kinds of label parties, and
`LabelParty` is the label party with a top model. `vfl.session.label.task` defines loss and metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vfl import defenses, models
from vfl.compression import StepContext
from vfl.core.errors import DataError, PrivacyError, SpecError
from vfl.core.frame import Link
from vfl.core.seeds import scoped
from vfl.core.torch_internals import Compute
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData, Split
from vfl.defenses import Defense, LabelKind
from vfl.defenses.base import Chain, Undefended, uses
from vfl.models.losses import make_loss, weighted_mean
from vfl.models.optimizers import Optimization
from vfl.privacy import PrivacyStatement
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import require_rows_apart
from vfl.privacy.row_gradients import Call
from vfl.session import EarlyStopping, Exchange, Terms, rules, secure_mode
from vfl.session.dp_plan import PrivacyPlan, RowsAtBranches, refuse_beside_dp
from vfl.session.exchange import (
    SUM,
    CutReceiver,
    CutTerms,
    LabelEnd,
    Own,
    Stateful,
    TrainedParty,
    check_finite,
    check_shape,
    refuse_augment,
)
from vfl.session.label.missing import MissingCuts, PartialCuts
from vfl.session.label.task import (
    EpochRecord,
    Objective,
    Progress,
    Task,
    batch_weights,
    training_weights,
)
from vfl.session.passes import Draws, LocalSteps, drop_gradients, filled, set_training
from vfl.session.ranks import group
from vfl.session.secure_mode import Revealed
from vfl.session.threads import step_of


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Records:
    """Objects that receive the costs and results of a session.

    Attributes:
        ledger: ledger of the bytes and times on the links.
        on_epoch: function that is called with one record after each epoch.
    """

    ledger: Ledger = field(default_factory=Ledger)
    on_epoch: Callable[[EpochRecord], None] = _nothing


class AnyLabelParty(TrainedParty):
    """Base class of every label party: it counts exchanges, computes metrics and selects weights.

    Args:
        data: the labels, and the inputs from the party's own columns if there are any.
        terms: the agreed terms.
        own: the party's private state: its secret, adversary, device and checkpoints.
        task: the learning task.
        records: objects that receive metrics and progress.
        stopping: object that selects the best weights and decides when the training stops.

    Attributes:
        outputs: calibrated outputs of a prediction, one tensor for each batch.
        uncalibrated: outputs of a prediction before calibration, one tensor for each batch; empty
            without calibration.
        remarked: the model's remarks (additional results) on the predicted rows; see
            `WholeNetwork.remarks`.
        tested: calibrated answers for the test rows, one tensor for each batch.
        progress: counters of this session.
        doubts: warnings about the calibration of the party's predictions.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        own: Own,
        task: Task,
        records: Records | None,
        stopping: EarlyStopping,
    ) -> None:
        records = records or Records()
        self.data = data
        self.terms = terms
        self.ledger = records.ledger
        self.outputs: list[Tensor] = []
        self.uncalibrated: list[Tensor] = []
        self.remarked: list[Mapping[str, Any]] = []
        self.tested: list[Tensor] = []
        self.doubts: list[str] = []
        self._is_calibrated = False
        self.progress = Progress(task, records.ledger, records.on_epoch)
        self.stopping = stopping
        self._task = task
        self._complete = data.complete
        self.checkpoints = own.checkpoints
        self._ranks, self._augmented = own.ranks, own.augmented

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def remark_bytes(self) -> int:
        """See `WholeNetwork.remark_bytes`."""
        return 0

    def remarks(self) -> Sequence[Mapping[str, Any]]:
        """See `WholeNetwork.remarks`."""
        return ()

    def answers(self, outputs: Tensor) -> Tensor:
        """Convert outputs to logits of classes, or to numbers in the unit of the labels."""
        return self._task.answers(outputs).cpu()

    def calibrated(self, answers: Tensor) -> Tensor:
        """Return the logarithms of calibrated probabilities.

        Without calibration, return the argument unchanged.
        """
        return self._task.calibrated(answers)

    @property
    def split(self) -> Split:
        """Split of the session's rows into training, validation and test rows."""
        return self.data.split

    @property
    def history(self) -> list[EpochRecord]:
        """One record of metrics for each epoch."""
        return self.progress.history

    def revealed(self) -> list[Revealed]:
        """Return kinds and numbers of further values that the party has learned."""
        return []

    def traffic(self) -> list[dict[str, Any]]:
        """Return bytes sent, by receiver and phase; empty if the ledger counts them."""
        return []

    def column_values(self) -> np.ndarray | None:
        """Return Shapley values of the party's own columns; see `WholeNetwork.column_values`."""
        return None

    def importance(self) -> Mapping[str, Any] | None:
        """Return the importance of parties and columns in an evaluation.

        The result is None if the importance is not computed.
        """
        return None

    def figures(self) -> dict[str, Any]:
        """Return further metrics about the trained model itself, by name."""
        return {}

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return privacy statements for the owners of the rows and the labels in this session."""
        return ()

    def _go_through(self, schedule: Iterable[Exchange], step: Callable[[Exchange], None]) -> None:
        for _ in self._one_by_one(schedule, step):
            pass

    def _one_by_one(
        self, schedule: Iterable[Exchange], step: Callable[[Exchange], None]
    ) -> Iterator[Exchange]:
        """Run the exchanges of a session one by one, and make the record of each epoch."""
        for epoch, exchanges in groupby(schedule, key=lambda exchange: exchange.epoch):
            started = time.perf_counter()
            for exchange in exchanges:
                step(exchange)
                if exchange.last and exchange.trains:
                    self.progress.train_seconds += time.perf_counter() - started
                yield exchange
            self._ranks.merge(self.ledger, rules.peers(self.terms))
            best = self.stopping.best_epoch
            more = self._spent() | ({"best_epoch": best} if best else {})
            seconds = time.perf_counter() - started
            self.progress.end_epoch(epoch, seconds, more, stays=self._stays(epoch))
        if self.terms.mode == "train" and self.history:
            self._calibrate(self.history[-1]["epoch"])

    def _stays(self, epoch: int) -> bool:
        """Return whether the weights at the end of this epoch are the final weights so far."""
        return self.terms.train.keep != "best" or self.stopping.best_epoch == epoch

    def _calibrate(self, epoch: int) -> None:
        """Fit the calibration curves, once, to the validation rows with the final weights."""
        calibration = self._task.calibration
        if calibration is None or self._is_calibrated:
            return
        self._is_calibrated = True
        meter = self.progress.judged(stays=self._stays(epoch))
        if meter is None:
            self.doubts.append("probabilities are not calibrated: there is no validation row")
            return
        calibration.fit(torch.cat(meter.evidence), torch.cat(meter.labels))
        self.doubts += calibration.doubts

    def _spent(self) -> dict[str, float]:
        """Return the epsilon that the training has spent so far, by name; empty without [dp]."""
        return {}

    def _note(self, outputs: Tensor, labels: Tensor | None, exchange: Exchange) -> bytes | None:
        """Store the outputs of queried rows, or add them to the metrics.

        After the last validation query of an epoch, the method returns the decision of early
        stopping, if the settings require one; otherwise None.
        """
        self.progress.asked(len(exchange.rows))
        if self.terms.mode == "train" and exchange.phase == "test":
            self._calibrate(exchange.epoch)
        answers = self.answers(outputs)
        if exchange.phase == "predict" or labels is None:
            self.outputs.append(self._task.calibrated(answers))
            self.uncalibrated += [] if self._task.calibration is None else [answers]
            self.remarked += self.remarks()
        else:
            if exchange.phase == "test" and self.data.unseen is not None:
                new = self.data.unseen[exchange.rows]
                self._note_apart(outputs, labels, {"test": ~new, "new": new})
            else:
                loss = float(self._task(outputs, labels))
                self.progress.meter(exchange.phase).add(outputs, labels, loss)
            if exchange.phase == "test":
                self.tested.append(self._task.calibrated(answers))
            if exchange.phase == "test" and self._complete is not None:
                complete = self._complete[exchange.rows]
                apart = {"test_complete": complete, "test_missing": ~complete}
                self._note_apart(outputs, labels, apart)
        if not self.stopping.judges(exchange):
            return None
        return self.stopping.judge(self.progress.meter(exchange.phase).figures(), exchange)

    def _note_apart(
        self, outputs: Tensor, labels: Tensor, groups: Mapping[str, np.ndarray]
    ) -> None:
        """Add groups of the queried rows to separate meters.

        `groups` maps a meter's name to a mask of rows.
        """
        for phase, rows in groups.items():
            if rows.any():
                at = torch.from_numpy(np.flatnonzero(rows)).to(labels.device)
                own, truth = outputs[at], labels[at]
                self.progress.meter(phase).add(own, truth, float(self._task(own, truth)))


class Beside(Protocol):
    """Interface of another party that runs in the same process as the label party."""

    def begin(self, exchange: Exchange) -> None:
        """Send the messages with which an exchange begins."""

    def answer(self, exchange: Exchange) -> None:
        """Answer the messages of other parties."""

    def finish(self, exchange: Exchange) -> None:
        """Receive the messages with which an exchange ends."""


class LabelParty(CutReceiver, AnyLabelParty):
    """Runs the label party through the exchanges of a session.

    Args:
        data: labels (not needed for a prediction) and inputs from the label party's own columns,
            aligned with the rows of all parties.
        terms: the session's terms.
        links: links to each feature party, and to a third party if one deals shares.
        own: the party's private state; the initial weights of the top model are derived from its
            secret.
        objective: the learning objective.
        weights: trained weights, for an evaluation or prediction; None for a training.
        records: objects that receive metrics and progress.

    Raises:
        SpecError: a plug-in does not fit the terms, or the defense is not defined for this kind of
            label.
        ExposedCutError: the secure mode would not hide the cuts of single parties.
        PrivacyError: the guarantee of [dp] does not hold with these settings.
        ConfigError: the inputs cannot be augmented in this session.
        DataError: the terms list columns of the label party, but it has none; or the weights of
            rows are not valid.

    Attributes:
        next_step: number of the next exchange.
    """

    next_step = 0

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        links: Mapping[str, Link],
        own: Own,
        objective: Objective,
        *,
        weights: Mapping[str, Tensor] | None = None,
        records: Records | None = None,
    ) -> None:
        mode, self._secret, self._adversary = (
            secure_mode.make(terms.secure),
            own.secret,
            own.adversary,
        )
        self._defense = defense = label_defense(data, terms, objective)
        mode.refuse(terms)
        refuse_augment(terms, own)
        with scoped(own.secret.number("init")):
            top = _own_top(terms, objective, defense)
            bottom = _own_bottom(data, terms, objective.bottom)
            self.ends = _ends(terms, mode, defense, own, links)
            merger = models.make_merger(terms.merge).build(terms.widths)
        task = objective.make_task()
        stopping = EarlyStopping(terms.train, self._state, self.load_weights)
        super().__init__(data, terms, own, task, records, stopping)
        missing = self._take_models(top, bottom, merger, own)
        self._optimizer, self._steps = None, Optimization(terms.train)
        self._local = LocalSteps(terms.train.local_steps, terms.train.local_angle)
        if terms.mode == "train" and self._trainable:
            build = self._steps.clipped(own.ranks.together(self._steps.build))
            self._optimizer = own.adversary.optimizer(build(self._trainable))
        self._at_branches = RowsAtBranches(terms, data.split.train, data.name)
        self._plan = PrivacyPlan.of(terms, len(data.split.train))
        self.private = self._private_half(objective)
        self.aggregator = (
            mode.aggregator(terms, self.ends, links, self.ledger, stopping)
            if missing is None
            else PartialCuts(self.ends, self.ledger, stopping, data.held, missing)
        )
        self._labels = data.labels
        self._row_weights: Tensor | None = None
        self._positions: Tensor | None = None
        if data.labels is not None and terms.mode == "train":
            self._take_labels(data.labels, objective)
        if weights is not None:
            self.load_weights(weights)

    def _take_models(
        self, top: nn.Module, bottom: nn.Module | None, merger: nn.Module, own: Own
    ) -> MissingCuts | None:
        """Combine the models of this party in one module on the party's device.

        Return the learned vectors for rows that parties lack; None if parties may lack no rows.
        """
        terms, defense = self.terms, self._defense
        self.model = nn.ModuleDict({"top": top})
        if bottom is not None:
            self.model["bottom"] = bottom
        for name, end in self.ends.items():
            if end.adapter is not None:
                self.model[f"codec-{name}"] = end.adapter
        self.model["merger"] = merger
        group.fit(self.model, own.ranks)
        self.model["task"] = self._task
        missing = None
        if self.data.held:
            _refuse_whole_cuts(defense)
            missing = MissingCuts({name: terms.parties[name].width for name in self.ends})
            self.model["missing"] = missing
        self._compute = Compute(own.device, terms.train.precision, terms.train.compile)
        self._compute.take(self.model)
        always = not isinstance(defense, Undefended)
        self._draws = Draws(own.secret, "rng", top, always=always)
        self._own_draws = Draws(own.secret, "own", bottom or nn.Identity(), always=always)
        self._trainable = [w for w in self.model.parameters() if w.requires_grad]
        return missing

    def _private_half(self, objective: Objective) -> PrivateHalf | None:
        """Build the DP-SGD object for the weights that this party trains.

        The result is None without [dp] or without such weights. With [dp], and if the defense
        requires it, the model's output for one row must not depend on other rows.
        """
        data, terms = self.data, self.terms
        shapes = [
            (one.width,) if data.inputs is None or name != data.name else data.inputs.shape[1:]
            for name, one in terms.parties.items()
        ]
        if "top" in self._defense.separate_rows:
            sent = [
                (self.ends[name].wire_width,) if name in self.ends else shape
                for name, shape in zip(terms.parties, shapes, strict=True)
            ]
            require_rows_apart(self.model, self._through_adapters, sent, "the top")
        if self._plan is None or self._optimizer is None:
            return None
        self._refuse_beside_dp(objective)
        law = (terms, data.name, self.model, self._through_model, shapes)
        return self._plan.half(*law, self._secret, self._at_branches.branches)

    def _take_labels(self, labels: Tensor, objective: Objective) -> None:
        """Prepare the labels for the training, and fit the task's state to them.

        All labels are copied into memory only if the task, the defense or balanced class weights
        need all of them: a large table's labels may need too much memory.
        """
        train = torch.from_numpy(self.data.split.train)
        if defenses.uses(self._defense, "counts"):
            self._positions = torch.full((len(labels),), -1)
            self._positions[train] = torch.arange(len(train))
        if defenses.uses(self._defense, "labels"):
            self._labels = labels = labels.clone()
            labels[train] = self._defense.labels(labels[train], self._secret)
        # Weights are computed from the labels that the defense returned: weights from the true
        # labels would disclose what the defense hides.
        weights = training_weights(labels, train, self.data.row_weights, objective.class_weight)
        if self._task.fits:
            self._task.fit(labels[train], None if weights is None else weights[train])
        if self._plan is not None and weights is not None:
            raise PrivacyError(
                "[dp] bounds the contribution of a row, and rows or classes with other "
                "weights exceed it",
                where="label.class_weight",
                want="'none', and no weights of rows",
            )
        self._row_weights = weights

    def run(self, schedule: Iterable[Exchange], others: Sequence[Beside] = ()) -> None:
        """Run all exchanges of a session; early stopping may shorten the schedule.

        Args:
            schedule: exchanges of the session.
            others: other parties in the same process, in the order in which they send their cuts.
        """
        for _ in self.steps(schedule, others):
            pass

    def steps(
        self, schedule: Iterable[Exchange], others: Sequence[Beside] = ()
    ) -> Iterator[Exchange]:
        """Run the exchanges of a session one by one; yield each exchange when it is completed."""

        def step(exchange: Exchange) -> None:
            if exchange.saves:
                self._ranks.merge(self.ledger, rules.peers(self.terms))
            if self.checkpoints is not None and exchange.saves:
                self.checkpoints.save(exchange.step, self.training_state())
            for other in others:
                other.begin(exchange)
            self.aggregator.relay(exchange)
            for other in others:
                other.answer(exchange)
            (self._train if exchange.trains else self._evaluate)(exchange)
            for other in reversed(others):
                other.finish(exchange)
            self.next_step = exchange.step + 1

        return self._one_by_one(schedule, step)

    def _own_states(self) -> Mapping[str, Stateful]:
        return {"defense": self._defense}

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        if self._plan is None:
            return self._defense.privacy()
        trained = self.terms.mode == "train"
        steps = self.progress.train_steps if trained else self._plan.steps
        return (*self._defense.privacy(), self._plan.statement(steps))

    def _spent(self) -> dict[str, float]:
        if self._plan is None:
            return {}
        return {"epsilon": self._plan.epsilon(self.progress.train_steps)}

    def training_state(self) -> dict[str, Any]:
        """Return the state for an exact resume: weights, optimiser, counters, gradients."""
        return {
            "state": self._state(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else {},
            "progress": self.progress.state(),
            "course": self.stopping.state(),
            "gradients": {name: end.sent_state() for name, end in self.ends.items()},
            "adversary": self._adversary.training_state(),
            "clips": self.private.state() if self.private else [],
        }

    def resume(self, step: int) -> None:
        """Return to the state before the exchange `step`; with 0, keep the initial state.

        Raises:
            RunFolderError: the checkpoint is missing or damaged, or belongs to other terms.
        """
        if self.checkpoints is not None and step > 0:
            self.load_training_state(self.checkpoints.load(step))
        if not self._ranks.alone:
            self.load_training_state(self._ranks.spread(self.training_state()))
            if self._ranks.rank > 0:
                self.ledger.restore([])  # rank 0 counts the messages before the checkpoint

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `training_state` returned."""
        self.load_weights(saved["state"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved["optimizer"])
        self.stopping.restore(saved["course"])
        if self.private is not None:
            self.private.restore(saved.get("clips", ()))
        self._adversary.load_training_state(saved.get("adversary", {}))
        for name, end in self.ends.items():
            end.send_again(saved["gradients"][name])
        self.progress.restore(saved["progress"])  # includes the messages that were sent again

    def _train(self, whole: Exchange) -> None:
        exchange = whole if self._ranks.alone else self._ranks.share(whole)
        if self._steps.changes:
            self._steps.begin(exchange.epoch, exchange.trained)
        context = StepContext(exchange.step, training=True, secret=self._secret)
        counts = None
        if self._positions is not None:
            counts = self._defense.counts(self._positions[exchange.rows], exchange.epoch)
        inputs, labels = self._rows(exchange)
        if inputs is not None:
            inputs = self._augmented(inputs, exchange.step)
        inputs, labels = self._defense.batch(inputs, labels, context)
        assert labels is not None, "training needs labels"
        labels = self._adversary.labels(labels, context)
        weights = batch_weights(self._row_weights, exchange.rows, counts, self._compute.device)
        if inputs is not None:
            inputs = self._adversary.batch(inputs, context)
        set_training(self.model, True)
        rows = len(exchange.rows)
        with nullcontext([]) if self.private is None else self.private.recording() as calls:
            cuts = self._cuts(exchange, inputs)
            truth = labels.to(self._compute.device)
            with self._draws.at(exchange.step):
                outputs = self._top(cuts)
                logits = self._defense.logits(outputs, context)
                targets = self._defense.targets(truth, logits.shape[1], context)
                # The mean over no rows is undefined, so for an empty batch the loss is 0 and the
                # gradients are empty.
                loss = self._task(logits, targets, weights) if rows else logits.sum()
                sent = {name: cut for name, cut in cuts.items() if name in self.ends}
                extra = self._defense.loss(sent, truth, logits, context)
        if not self._ranks.alone:
            loss = loss * self._part(exchange, whole)
        total = self._whole_loss(loss, extra, exchange)
        if self.private is None:
            total.backward()  # type: ignore[no-untyped-call]
        else:
            # The received cuts of the other parties, or the sum of these cuts.
            leaves = [cut for cut in cuts.values() if cut.is_leaf and cut.requires_grad]
            self._at_branches.expect(exchange.step, exchange.rows)
            self._give_private_gradients(total, outputs, leaves, calls, exchange.step)
        # The gradients are sent before this party's optimiser step, so that the other parties can
        # compute meanwhile.
        self.aggregator.send_gradients(exchange, labels)
        if self._optimizer is not None:
            self._optimizer.step()
            if rows:
                self._go_on(exchange, whole, inputs, truth, weights, cuts)
        self.progress.trained(len(whole.rows))
        # Metrics use the outputs that a prediction would return, even if the loss uses other
        # values.
        shown = self._defense.logits(outputs.detach(), StepContext(exchange.step))
        if counts is not None and weights is not None:
            kept = counts.to(truth.device)
            shown, truth, weights = shown[kept], truth[kept], weights[kept]
        measured = float(loss.detach())
        if not self._ranks.alone:
            shown, measured = self._ranks.whole(shown, measured, len(whole.rows))
            _, known = self._rows(whole)
            assert known is not None, "training needs labels"
            truth = known.to(shown.device)
            weights = batch_weights(self._row_weights, whole.rows, None, self._compute.device)
        self.progress.meter("train").add(shown, truth, measured, weights)

    def _go_on(
        self,
        exchange: Exchange,
        whole: Exchange,
        inputs: Tensor | None,
        truth: Tensor,
        weights: Tensor | None,
        sent: Mapping[str, Tensor],
    ) -> None:
        """Run the additional local steps of an exchange, which use the cuts already received.

        Args:
            exchange: the exchange, with the rows of this rank only.
            whole: the same exchange with the rows of all ranks.
            inputs: inputs of the label party's own columns; None without columns.
            truth: labels that the training uses.
            weights: weights of the rows in the loss; None if all weights are equal.
            sent: cuts that the exchange received; their gradients have been computed.
        """
        assert self._optimizer is not None, "only in a training"
        context = StepContext(exchange.step, training=True, secret=self._secret)
        for turn in self._local.turns:
            cuts = self._last_cuts(exchange, inputs, sent, turn)
            with self._draws.at(exchange.step, turn):
                logits = self._defense.logits(self._top(cuts), context)
                targets = self._defense.targets(truth, logits.shape[1], context)
                loss = self._task(logits, targets, weights)
                turned = self._turned(loss, cuts, sent)
                if turned is not None:
                    usual = torch.ones_like(turned) if weights is None else weights
                    # otherwise a few rows with weight would count like a whole batch
                    share = weighted_mean(turned, usual)
                    loss = share * self._task(logits, targets, turned * usual)
                named = {name: cut for name, cut in cuts.items() if name in self.ends}
                extra = self._defense.loss(named, truth, logits, context)
            if not self._ranks.alone:
                loss = loss * self._part(exchange, whole)
            total = self._whole_loss(loss, extra, exchange)
            total.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def _whole_loss(self, loss: Tensor, extra: Tensor | None, exchange: Exchange) -> Tensor:
        """Add the defense's loss to the task's loss; delete the gradients of the previous step."""
        total = loss if extra is None else loss + extra
        check_finite(total, "loss", self.data.name, exchange.step)
        drop_gradients(self._trainable)
        return total

    def _last_cuts(
        self, exchange: Exchange, inputs: Tensor | None, sent: Mapping[str, Tensor], turn: int
    ) -> dict[str, Tensor]:
        """Return the received cuts, and this party's own cut with its present weights."""
        cuts = {}
        for name, cut in sent.items():
            if name in self.ends:
                cuts[name] = self.ends[name].last_cut()
            elif name == self.data.name and inputs is not None:
                with self._own_draws.at(exchange.step, turn), self._compute.forward():
                    own = inputs.to(self._compute.device)
                    cuts[name] = self._compute.run(self.model, "bottom", own).float()
            else:  # the sum of the cuts of several parties
                cuts[name] = cut.detach().requires_grad_()
        return cuts

    def _turned(
        self, loss: Tensor, cuts: Mapping[str, Tensor], sent: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return each row's weight from the angle between its present and its earlier cut gradient.

        Return None if all rows have equal weights.
        """
        if not self._local.angle:
            return None
        leaves = {name: cut for name, cut in cuts.items() if cut.is_leaf and cut.requires_grad}
        now = torch.autograd.grad(loss, [*leaves.values()], retain_graph=True)
        then = [sent[name].grad for name in leaves]
        assert all(one is not None for one in then), "the exchange has left gradients"
        joined = torch.cat([one for one in then if one is not None], 1)
        return self._local.weights(torch.cat([*now], 1), joined)

    def _part(self, share: Exchange, whole: Exchange) -> float:
        """Return the fraction (0 to 1) of the batch's total weight that this rank's rows have."""
        if self._row_weights is None:
            return len(share.rows) / len(whole.rows)
        own, all_of_them = (float(self._row_weights[one.rows].sum()) for one in (share, whole))
        return own / all_of_them if all_of_them else 0.0

    def _give_private_gradients(
        self, total: Tensor, outputs: Tensor, cuts: list[Tensor], calls: list[Call], step: int
    ) -> None:
        """Compute exact gradients of cuts, and private gradients of this party's weights.

        DP-SGD clips the private gradients and adds noise to them.
        """
        assert self.private is not None, "only with a plan"
        (of_outputs,) = torch.autograd.grad(total, [outputs], retain_graph=True)
        torch.autograd.backward([outputs], [of_outputs], inputs=cuts, retain_graph=True)
        self.private.give_gradients(outputs, of_outputs * len(outputs), calls, step)

    def _refuse_beside_dp(self, objective: Objective) -> None:
        refuse_beside_dp(self.terms)
        if self.terms.dp is not None and not self.terms.dp.label_trains:
            raise PrivacyError(
                "the terms count no weights of the label party, but it has some",
                where="label.top",
                got=f"{sum(weight.numel() for weight in self._trainable)} weights",
                want="top 'identity' and no columns, or terms that count them",
            )
        if objective.task == "regression":
            raise PrivacyError(
                "[dp] is for classification: the scale of a regression follows from its labels",
                where="label.task",
            )

    @torch.no_grad()
    def _evaluate(self, whole: Exchange) -> None:
        exchange = self._ranks.share(whole)
        inputs, _ = self._rows(exchange)
        outputs = self.outputs_of(self.query(exchange, inputs), exchange.step)
        outputs, _ = self._ranks.whole(outputs, 0.0, len(whole.rows))
        _, labels = self._rows(whole)
        truth = None if labels is None else labels.to(self._compute.device)
        if (verdict := self._note(outputs, truth, whole)) is not None:
            for end in self.ends.values():
                end.confirm(exchange.step, verdict)

    @torch.no_grad()
    def query(self, exchange: Exchange, inputs: Tensor | None) -> dict[str, Tensor]:
        """Return the queried rows' cuts by party, or the sum of the feature parties' cuts.

        Each of them has the axes (rows, width).

        Args:
            exchange: the queried rows.
            inputs: the label party's inputs of these rows; None without own columns.
        """
        set_training(self.model, False)
        return self._cuts(exchange, inputs)

    @torch.no_grad()
    def outputs_of(self, cuts: Mapping[str, Tensor], step: int) -> Tensor:
        """Run the top model on the cuts of queried rows.

        Return its outputs, axes (rows, outputs).
        """
        rows = len(next(iter(cuts.values())))
        outputs = self._through_top(filled(self.merged(cuts)))[:rows]
        return self._defense.logits(outputs, StepContext(step))

    def contributions(self, row: int) -> None:
        """Return None: contributions are computed from the cuts.

        See `ServingParty.contributions`.
        """

    def _rows(self, exchange: Exchange) -> tuple[Tensor | None, Tensor | None]:
        rows = torch.from_numpy(exchange.rows)
        inputs = None if self.data.inputs is None else self.data.inputs.index_select(0, rows)
        source = self._labels if exchange.trains else self.data.labels
        return inputs, None if source is None else source.index_select(0, rows)

    def _cuts(self, exchange: Exchange, inputs: Tensor | None) -> dict[str, Tensor]:
        """Return every party's cut in merge order.

        The label party computes its own cut before it waits for the other parties' cuts.
        """
        own: dict[str, Tensor] = {}
        if "bottom" in self.model and inputs is not None:
            with self._own_draws.at(exchange.step), self._compute.forward():
                whole = inputs if exchange.trains else filled(inputs)
                if len(whole):
                    whole = whole.to(self._compute.device)
                    cut = self._compute.run(self.model, "bottom", whole).float()
                    cut = cut[: len(inputs)]
                else:
                    width = self.terms.parties[self.data.name].width
                    cut = torch.zeros(0, width, device=self._compute.device)
            own[self.data.name] = cut
            check_shape(cut, len(inputs), self.terms.parties[self.data.name].width, self.data.name)
        found = own | self.aggregator.cuts(exchange)
        cuts = {name: found[name] for name in [*self.terms.parties, SUM] if name in found}
        if self.checkpoints is not None and exchange.saves:
            self.checkpoints.commit(exchange.step)
        return cuts

    def _through_model(self, *parts: Tensor) -> Tensor:
        """Compute outputs from the other parties' cuts and the label party's own inputs."""
        cuts = dict(zip(self.terms.parties, parts, strict=True))
        if "bottom" in self.model:
            cuts[self.data.name] = self.model["bottom"](cuts[self.data.name])
        return self._top(cuts)

    def _through_adapters(self, *parts: Tensor) -> Tensor:
        """Compute outputs from decoded cuts, which pass through the codecs' trained modules first.

        Gradients pass through these modules before a defense changes them.
        """
        adapted = []
        for name, part in zip(self.terms.parties, parts, strict=True):
            adapter = self.ends[name].adapter if name in self.ends else None
            adapted.append(part if adapter is None else adapter(part))
        return self._through_model(*adapted)

    def _top(self, cuts: Mapping[str, Tensor]) -> Tensor:
        return self._through_top(self.merged(cuts))

    def merged(self, cuts: Mapping[str, Tensor]) -> Tensor:
        """Merge cuts, given in merge order, into the input of the top model; axes (rows, width)."""
        merged: Tensor = self.model["merger"](*cuts.values())
        return merged

    def _through_top(self, merged: Tensor) -> Tensor:
        with self._compute.forward():
            logits = self._compute.run(self.model, "top", merged)
        return logits.float()


def label_defense(data: PartyData, terms: Terms, objective: Objective) -> Defense:
    """Make the label party's defense object, prepared for the kind of labels."""
    classes = objective.outputs if objective.task == "classification" else None
    weighted = objective.class_weight != "none" or data.row_weights is not None
    calibrated = objective.calibration != "none" and terms.mode == "train"
    loss = None if objective.loss is None else make_loss(objective.loss, objective.task)
    train = terms.train
    kind = LabelKind(
        classes, weighted, train.epochs, calibrated, loss, train.local_steps, classes is None
    )
    defense = defenses.make(terms.defense)
    try:
        defense.prepare(kind)
    except SpecError as error:
        error.where = error.where or "defense"
        raise
    return defense


def _refuse_whole_cuts(defense: Defense) -> None:
    """If some parties lack rows, refuse a defense that needs every party's cut of every row.

    Raises:
        SpecError: the defense does not support missing rows; the error names the defense.
    """
    members = defense.members if isinstance(defense, Chain) else (defense,)
    for member in members:
        mixes = uses(member, "batch") and not member.rows_apart
        if mixes or (uses(member, "loss") and member.reads_cuts):
            raise SpecError(
                f"{type(member).__name__} needs every party's cut of every row, and a "
                "learned vector replaces some",
                where="defense",
                fix="data.missing_rows = 'intersection', or another defense",
            )


def top_step(terms: Terms, objective: Objective) -> Callable[[], None]:
    """Return a function that runs one step of a copy of the top model, for `use_threads`."""
    width, top = terms.merged_width, objective.top

    def build() -> nn.Module:
        if isinstance(top, nn.Module):
            return deepcopy(top)
        return models.make_top(top).build(width, objective.outputs)

    return step_of(build, terms.train.batch_size, (width,))


def _own_top(terms: Terms, objective: Objective, defense: Defense) -> nn.Module:
    top = objective.top
    if not isinstance(top, nn.Module):
        top = models.make_top(top).build(terms.merged_width, objective.outputs)
    defense.merged(terms.merged_blocks)
    return defense.wrap_top(top, terms.merged_width)


def _ends(
    terms: Terms,
    mode: secure_mode.SecureMode,
    defense: Defense,
    own: Own,
    links: Mapping[str, Link],
) -> dict[str, LabelEnd]:
    """Make the label party's endpoints of the exchanges, one per feature party, in merge order."""
    ends = {}
    for name in terms.feature_parties:
        width, codec = terms.parties[name].width, mode.label_codec(name, terms, own.secret)
        agreed = CutTerms(name, width, codec, defense, terms.train.in_flight)
        ends[name] = LabelEnd(agreed, own, links[name])
    return ends


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
    if given is not None:
        return given
    recipe = models.make_bottom(asked.bottom)
    models.require_tokens(recipe, shape, asked.width, data.tokens)
    return recipe.build(shape, asked.width)
