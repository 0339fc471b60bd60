"""A feature party: its inputs, its bottom model, and its loop over the exchanges of a session."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl import defenses, models
from vfl.core.errors import DataError
from vfl.core.frame import Link
from vfl.core.seeds import scoped
from vfl.datasets import PartyData
from vfl.models.optimizers import Optimization
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import Forward, require_rows_apart
from vfl.session import EarlyStopping, Exchange, Terms, secure_mode
from vfl.session.dp_plan import PrivacyPlan, RowsAtBranches, refuse_beside_dp
from vfl.session.exchange import CutTerms, FeatureEnd, Own, TrainedParty, lasting, refuse_augment
from vfl.session.passes import LocalSteps
from vfl.session.schedule import QUERY_ROWS, own_rows
from vfl.session.secure_mode import FeatureRound
from vfl.session.threads import step_of


class FeatureParty(TrainedParty):
    """Runs one feature party through the exchanges of a session.

    Args:
        data: aligned rows of the party.
        terms: terms of the session.
        link: network link to the label party.
        own: private state of the party; the initial weights of the bottom model are derived from
            its secret.
        bottom: model or spec that replaces the bottom model in the terms.
        weights: weights with which the session begins: trained weights, or those of an earlier run
            with `train.warm_start`; None draws new weights.

    Raises:
        DataError: the party has no columns.
        UserError: the device does not exist on this machine.
        SpecError: the codec, the defense or the bottom model cannot be built, or does not fit the
            terms.
        ExposedCutError: the secure mode would not protect this party's cut.
        PrivacyError: the guarantee of [dp] does not hold with these settings.
        ConfigError: the inputs cannot be augmented in this session.

    Attributes:
        inputs: inputs of all aligned rows; float32, axes (rows, ...); NaN for rows that this party
            lacks.
        end: this party's endpoint of the exchanges, with its bottom model and its optimiser.
        stopping: this party's part in early stopping, with the best weights so far.
    """

    def __init__(
        self,
        data: PartyData,
        terms: Terms,
        link: Link,
        own: Own,
        *,
        bottom: str | nn.Module | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        name, asked, mode = data.name, terms.parties[data.name], secure_mode.make(terms.secure)
        self._train = data.split.train if terms.mode == "train" else None
        self._steps = Optimization(terms.train)
        self._at_branches = RowsAtBranches(terms, data.split.train, name)
        if data.inputs is None:
            raise DataError(f"party '{name}' has no columns, so it has no inputs to train on")
        self.inputs, shape = data.inputs, tuple(data.inputs.shape[1:])
        with scoped(own.secret.number("init")):
            if not isinstance(bottom, nn.Module):
                recipe = models.make_bottom(asked.bottom) if bottom is None else own_bottom(bottom)
                models.require_tokens(recipe, shape, asked.width, data.tokens)
                bottom = recipe.build(shape, asked.width)
            mode.refuse(terms)
            refuse_augment(terms, own)
            end = mode.feature_round(name, bottom, math.prod(shape), terms, own, link)
            if end is None:
                codec, defense = mode.feature_codec(name, terms), defenses.make(terms.defense)
                agreed = CutTerms(
                    name,
                    asked.width,
                    codec,
                    defense,
                    in_flight=terms.train.in_flight,
                    precision=terms.train.precision,
                    compiled=terms.train.compile,
                    weights=(1.0, *(task.weight for task in terms.tasks.values())),
                    local=LocalSteps(terms.train.local_steps, terms.train.local_angle),
                )
                private = self._private(name, terms, own, shape)
                build = self._steps.clipped(own.ranks.together(self._steps.build))
                end = FeatureEnd(
                    agreed, bottom, own, link, build if terms.mode == "train" else None, private
                )
                if "bottom" in defense.separate_rows:
                    whose = f"the bottom model of party '{name}'"
                    require_rows_apart(end.model, end.through_model, [shape], whose)
        self.end: FeatureRound = end
        if weights is not None:
            self.end.load_state_dict(weights)
        self.checkpoints, self._ranks = own.checkpoints, own.ranks
        self.stopping = EarlyStopping(terms.train, self.end.state_dict, self.end.load_state_dict)
        self._held = data.held.get(data.name)
        self._unaligned = data.unaligned if defenses.make(terms.defense).unaligned else None

    def _private(
        self, name: str, terms: Terms, own: Own, shape: tuple[int, ...]
    ) -> Callable[[nn.Module, Forward], PrivateHalf] | None:
        """Return a function that builds the DP-SGD object for this party's bottom model.

        The result is None if the terms have no [dp].
        """
        plan = None if self._train is None else PrivacyPlan.of(terms, len(self._train))
        if plan is None:
            return None
        refuse_beside_dp(terms)
        branches = self._at_branches.branches
        return lambda model, forward: plan.half(
            terms, name, model, forward, [shape], own.secret, branches
        )

    @property
    def name(self) -> str:
        return self.end.party

    def begin(self, exchange: Exchange) -> None:
        """Save a checkpoint if one is due; then send this party's cut for the exchange."""
        if self.checkpoints is not None and exchange.saves:
            self.checkpoints.save(exchange.step, self.training_state())
        if exchange.trains and self._steps.changes:
            self._steps.begin(exchange.epoch, exchange.trained)
        inputs, rows = self._rows(exchange)
        if self._held is not None and not len(inputs):
            return  # the party sends nothing in this exchange, which the label party knows
        if exchange.trains:
            self.end.send_cut(inputs, exchange.step, rows)
        else:
            self.end.send_query(inputs, exchange.step)

    def answer(self, exchange: Exchange) -> None:
        """Answer messages of other feature parties, if the secure mode has such messages."""
        self.end.answer(exchange.step)

    def finish(self, exchange: Exchange) -> None:
        """Receive the gradient of a cut, or in a query the confirmation of its receipt.

        With m cuts in flight, this gradient belongs to the cut that was sent m - 1 steps earlier.

        Cut t is therefore always sent right after the gradient of cut t - m was applied, with any
        delay of the network. At the end of an epoch's training, and in a training exchange for
        which the party has sent no cut, the method receives the gradients of all cuts in flight.
        """
        if exchange.trains:
            sent = self._held is None or len(own_rows(exchange, self._held))
            leave = 0 if exchange.last or not sent else self.end.in_flight - 1
            while self.end.awaiting > leave:
                self.end.take_gradient()
        else:
            self.stopping.obey(self.end.take_receipt(exchange.step), exchange)

    def resume(self, step: int, before: Iterable[Exchange]) -> None:
        """Return to the state before the exchange `step`; with 0, keep the initial state.

        Args:
            step: next exchange.
            before: exchanges whose gradients may not have arrived when the checkpoint was saved.

        Raises:
            RunFolderError: see `Checkpoints.load`.
        """
        if step == 0:
            self.start()
        elif self.checkpoints is not None:
            self.load_training_state(self.checkpoints.load(step), before)
        if not self._ranks.alone:
            self.load_training_state(self._ranks.spread(self.training_state()))

    def start(self) -> None:
        """Prepare the training; called once, before the first step."""
        if self._train is not None:
            train = self._train if self._held is None else self._train[self._held[self._train]]
            self.end.fit(lambda: self._fitted(torch.from_numpy(train)))

    def _fitted(self, rows: Tensor) -> Tensor:
        """Return inputs of training rows, for defenses that are fitted before training."""
        known = self.inputs.index_select(0, rows)
        return known if self._unaligned is None else torch.cat([known, self._unaligned])

    def training_state(self) -> dict[str, Any]:
        """Return the state from which a training resumes with exactly the same results."""
        return self.end.training_state() | {"course": self.stopping.state()}

    def load_training_state(
        self, saved: Mapping[str, Any], before: Iterable[Exchange] = ()
    ) -> None:
        """Restore a state of `training_state`.

        When the state was saved, the gradients of the exchanges `before` had not arrived yet.
        """
        rows = {exchange.step: exchange for exchange in before}
        self.end.load_training_state(saved, lambda step: self._rows(rows[step]))
        self.stopping.restore(saved["course"])

    def run(self, schedule: Iterable[Exchange]) -> None:
        """Run the exchanges of a session; early stopping may shorten the schedule."""
        for exchange in schedule:
            self.begin(exchange)
            self.answer(exchange)
            self.finish(exchange)

    def cut(self, rows: Tensor) -> Tensor:
        """Return the cuts of rows as a query would encode them, axes (rows, width); sends nothing.

        Args:
            rows: positions of the rows among the aligned rows, int64.
        """
        parts = torch.split(rows, QUERY_ROWS)
        return torch.cat([self.end.query_cut(self.inputs.index_select(0, one)) for one in parts])

    def weights(self) -> dict[str, Tensor]:
        codecs = {"codec": self.end.codec} if isinstance(self.end, FeatureEnd) else {}
        return lasting(self.end.state_dict(), codecs)

    def _rows(self, exchange: Exchange) -> tuple[Tensor, np.ndarray]:
        """Return an exchange's inputs, and the positions of its rows among the aligned rows."""
        rows = exchange.rows if self._ranks.alone else self._ranks.share(exchange).rows
        if exchange.trains and self._at_branches.branches is not None:
            self._at_branches.expect(exchange.step, rows)
        if self._held is not None:
            rows = rows[own_rows(exchange, self._held)]
        return self.inputs.index_select(0, torch.from_numpy(rows)), rows


def bottom_step(data: PartyData, terms: Terms, bottom: str | None) -> Callable[[], None]:
    """Return a function that runs one step of a copy of the bottom model, for `use_threads`.

    Args:
        data: aligned rows of the party.
        terms: terms of the session.
        bottom: spec of the party's own bottom model; None uses the bottom model in the terms.
    """
    asked = terms.parties[data.name]
    assert data.inputs is not None, "a party with a bottom model has columns"
    shape = tuple(data.inputs.shape[1:])

    def build() -> nn.Module:
        recipe = models.make_bottom(asked.bottom) if bottom is None else own_bottom(bottom)
        return recipe.build(shape, asked.width)

    return step_of(build, terms.train.batch_size, shape)


def own_bottom(text: str) -> models.Bottom:
    """Build the bottom model that a party's own file names: a spec, or ``package.module:Class``.

    Only the party's own file may name code to import; the terms, which another party chooses, may
    not.
    """
    is_path = ":" in text and "=" not in text
    return models.bring(text) if is_path else models.make_bottom(text)
