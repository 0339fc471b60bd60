"""The label party of a whole network, which learns the outputs and evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from vfl import defenses
from vfl.core.errors import ExposedCutError
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets import PartyData, Split
from vfl.defenses import Defense
from vfl.privacy import PrivacyStatement
from vfl.session import EarlyStopping, Exchange, PartyReport, Terms, rules, secure_mode
from vfl.session.exchange import SUM, CutAggregator, Own
from vfl.session.label.party import AnyLabelParty, Records, label_defense
from vfl.session.label.task import Objective, Regression, Task, training_weights
from vfl.session.secure_mode import (
    EVALUATE,
    SETUP,
    TRAIN,
    AskingNetwork,
    Layers,
    OwnRows,
    ServedEnd,
    require_honest,
)
from vfl.session.whole_network import NetworkParty

_TASK, _SHARE = "task.", "share."
#: Number of training rows whose loss is computed at one time.
_MEASURED_ROWS = 1 << 14


class WholeNetworkLabel(NetworkParty, AnyLabelParty):
    """Runs the label party of a whole network (see `WholeNetwork`) through a session.

    Args:
        data: the label party's labels (not needed for predictions) and columns, with rows in the
            order that all parties use.
        terms: terms of the session.
        attempt: identifier of the session, and number of its restarts.
        streams: network streams to the other parties, by name.
        receive_any: function that returns the next frame that any party sent, and the name of this
            party.
        own: private state of the party.
        objective: learning objective.
        weights: the party's stored part of the trained model, for an evaluation or prediction.
        records: object that receives metrics and progress.
        agreed: see `OwnRows`.

    Raises:
        SpecError: the secure mode does not support a setting, or the top model cannot be computed
            on shares.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        own: Own,
        objective: Objective,
        *,
        weights: Mapping[str, Tensor] | None = None,
        records: Records | None = None,
        agreed: Callable[[Mapping[str, Layers]], object] = lambda layers: None,
    ) -> None:
        mode = secure_mode.make(terms.secure)
        mode.refuse(terms)
        require_honest(data.name, own, None)
        self._defense = label_defense(data, terms, objective)
        task, rows = task_and_rows(data, terms, objective, own, agreed, self._defense)
        self.network = mode.middle_network(terms, attempt, streams, receive_any, rows)
        stopping = EarlyStopping(terms.train, self.network.weights, self.network.load_weights)
        super().__init__(data, terms, own, task, records, stopping)
        # in a whole network, parties send no cuts
        self.aggregator = CutAggregator({}, self.ledger, stopping)
        self.reports: list[PartyReport] = []
        self._shares: dict[str, Tensor] | None = None
        if terms.mode != "train":
            task.load_state_dict(_without(weights or {}, _TASK))
            self._shares = _without(weights or {}, _SHARE)

    def play(
        self,
        start: int,
        through: Callable[[Iterable[Exchange]], Iterator[Exchange]] = iter,
    ) -> None:
        """Run a session, beginning with the exchange of number `start`.

        See `WholeNetworkParty.play`.
        """
        self.ledger.phase = SETUP
        state = self._begin(start, self._shares)
        if state is not None:
            self.progress.restore(state["progress"])
        self._go_through(through(self._schedule(start)), self._step)
        frames = self.network.end(Frame(Kind.DONE))
        self.reports = [
            PartyReport.of(frame, name)
            for frame, name in zip(frames, rules.peers(self.terms), strict=True)
        ]

    # Methods that a service calls; see `vfl.session.label.asking.Asking`.

    @property
    def ends(self) -> Mapping[str, ServedEnd]:
        """Streams to the other parties."""
        return self._asking.ends

    @property
    def _asking(self) -> AskingNetwork:
        return cast(AskingNetwork, self.network)

    def begin(self) -> None:
        """Prepare the network for queries of a service."""
        self.network.begin(self._shares)

    def query(self, exchange: Exchange, inputs: Tensor | None) -> dict[str, Tensor]:
        """Compute the outputs of queried rows with the other parties, axes (rows, outputs)."""
        return {SUM: self._asking.answered(exchange, inputs, self.aggregator.without).float()}

    def outputs_of(self, cuts: Mapping[str, Tensor], step: int) -> Tensor:
        """Return the outputs that the last call of `query` computed."""
        return cuts[SUM]

    @property
    def remark_bytes(self) -> int:
        return self.network.remark_bytes

    def remarks(self) -> Sequence[Mapping[str, Any]]:
        return self.network.remarks()

    def contributions(self, row: int) -> Mapping[str, Tensor]:
        """Return each party's Shapley value for each output, for a row of the last query."""
        return self._asking.contributions(row)

    @property
    def split(self) -> Split:
        """Split of all parties' rows; known once a session has begun."""
        return self.network.split

    def weights(self) -> dict[str, Tensor]:
        """Return the label party's part of the model, if any, and the state of its task."""
        shares = {f"{_SHARE}{name}": share for name, share in self.network.weights().items()}
        return shares | {f"{_TASK}{name}": one for name, one in self._task.state_dict().items()}

    def importance(self) -> Mapping[str, Any] | None:
        return self.network.importance()

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return (*self._defense.privacy(), *super().privacy())

    def training_state(self) -> dict[str, Any]:
        return super().training_state() | {"progress": self.progress.state()}

    def _step(self, exchange: Exchange) -> None:
        kept = self._save(exchange)
        self.ledger.phase = TRAIN if exchange.trains else EVALUATE
        if exchange.trains:
            outputs = self.network.train(exchange)
            self.progress.trained(len(exchange.rows))
            if outputs is not None:
                self._measure(outputs, exchange)
        else:
            outputs = self.network.outputs(exchange)
            assert outputs is not None, "the label party learns the outputs"
            asked = self._aligned(exchange)
            truth = None if self.data.labels is None else self._labels_of(asked)
            if (verdict := self._note(outputs.float(), truth, asked)) is not None:
                self.network.send_verdict(verdict, exchange.step)
        # The checkpoint is committed only here: the last frame of an exchange shows that the other
        # parties have started the exchange, and therefore that they have saved their checkpoints.
        if kept is not None:
            kept.commit(exchange.step)

    def _aligned(self, exchange: Exchange) -> Exchange:
        """Return the same exchange, whose rows are now positions among the aligned rows."""
        phase = "test" if exchange.phase == "predict" else exchange.phase
        return replace(exchange, rows=getattr(self.data.split, phase)[exchange.rows])

    def _labels_of(self, exchange: Exchange) -> Tensor:
        assert self.data.labels is not None, "this is called only if there are labels"
        return self.data.labels[torch.from_numpy(exchange.rows)]

    def _measure(self, outputs: Tensor, exchange: Exchange) -> None:
        """Measure loss and metrics of a step's training rows, in blocks of rows."""
        for start in range(0, len(outputs), _MEASURED_ROWS):
            rows = slice(start, start + _MEASURED_ROWS)
            own = outputs[rows].float()
            truth = self._labels_of(self._aligned(replace(exchange, rows=exchange.rows[rows])))
            self.progress.meter("train").add(own, truth, float(self._task(own, truth)))


def task_and_rows(
    data: PartyData,
    terms: Terms,
    objective: Objective,
    own: Own,
    agreed: Callable[[Mapping[str, Layers]], object],
    defense: Defense,
) -> tuple[Task, OwnRows]:
    """Return the label party's task and inputs, with the labels that the defense has changed.

    Raises:
        ExposedCutError: see `_check_objective`.
    """
    reads_cells = secure_mode.make(terms.secure).reads_cells
    _check_objective(data, objective, reads_cells)
    task = objective.make_task()
    labels, weights = data.labels, None
    if labels is not None and terms.mode == "train":
        train = torch.from_numpy(data.split.train)
        if defenses.uses(defense, "labels"):
            labels = labels.clone()
            labels[train] = defense.labels(labels[train], own.secret)
        if reads_cells:
            weights = training_weights(labels, train, data.row_weights, objective.class_weight)
        else:
            task.fit(labels[train])
            if isinstance(task, Regression):
                labels = (labels - task.center) / task.scale
    inputs = data.inputs if data.name in terms.parties else None
    classes = objective.outputs if objective.task == "classification" else 0
    return task, OwnRows(
        own.secret,
        agreed,
        split=data.split,
        inputs=inputs,
        labels=labels,
        weights=weights,
        classes=classes,
        top=objective.top,
        device=own.device,
        names=data.classes or (),
        columns=data.columns,
        categories=data.categories,
        committed=own.committed(),
        held=data.held,
    )


def _check_objective(data: PartyData, objective: Objective, reads_cells: bool) -> None:
    """Raise an error for row weights or a loss function that the protocol does not support.

    Raises:
        ExposedCutError: rows or classes have weights, which would require fractions in shares; or
            the experiment names a loss function.
    """
    weighted = {
        "label.class_weight": objective.class_weight != "none",
        "row weights": data.row_weights is not None,
    }
    if not reads_cells and (wrong := [name for name, given in weighted.items() if given]):
        raise ExposedCutError(
            "this mode needs equal weights of all rows, because no party sees a gradient",
            got=wrong[0],
            want="label.class_weight = 'none', and no weights of rows",
        )
    if objective.loss is not None:
        raise ExposedCutError(
            "this secure mode has a fixed loss function",
            got=f"label.loss = '{objective.loss}'",
            want="label.loss left out",
        )


def _without(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries whose names begin with a prefix, under their names without the prefix."""
    size = len(prefix)
    return {name[size:]: value for name, value in weights.items() if name.startswith(prefix)}
