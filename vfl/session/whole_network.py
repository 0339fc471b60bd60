"""One party's part of a whole network in a session: checkpoints, and what the party can report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from vfl.privacy import PrivacyStatement
from vfl.session import rules
from vfl.session.exchange import TrainedParty
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.secure_mode import Revealed, WholeNetwork
from vfl.session.store.checkpoint import Checkpoints
from vfl.session.terms import Terms


class NetworkParty(TrainedParty):
    """Base class of the parties of a whole network (see `WholeNetwork`), the label party included.

    Attributes:
        terms: terms of the session.
        network: the party's part of the network.
        checkpoints: the party's checkpoints of a training; None saves no checkpoints.
        stopping: the party's part in early stopping.
    """

    terms: Terms
    network: WholeNetwork
    checkpoints: Checkpoints | None
    stopping: EarlyStopping

    def training_state(self) -> dict[str, Any]:
        """Return the state from which an interrupted training resumes."""
        return {"network": self.network.training_state(), "stopping": self.stopping.state()}

    def column_values(self) -> np.ndarray | None:
        """Return Shapley values of this party's columns; see `WholeNetwork.column_values`."""
        return self.network.column_values()

    def figures(self) -> dict[str, Any]:
        """Return metrics of this party's part of the trained model."""
        return self.network.figures()

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the privacy statements about the training, for the owners of its rows."""
        return self.network.privacy()

    def revealed(self) -> list[Revealed]:
        """Return the kinds and the numbers of values that this party has learned."""
        return self.network.revealed()

    def traffic(self) -> list[dict[str, Any]]:
        """Return the bytes that this party has sent; see `WholeNetwork.traffic`."""
        return self.network.traffic()

    def _begin(self, start: int, weights: Mapping[str, Tensor] | None) -> Mapping[str, Any] | None:
        """Begin a session with these weights, or resume the training from a checkpoint.

        Args:
            start: number of the first exchange.
            weights: weights of an earlier training; None trains new weights.

        Returns:
            The state that the checkpoint contains; None without a checkpoint.
        """
        state = None
        if start and self.checkpoints is not None:
            state = self.checkpoints.load(start)
            self.stopping.restore(state["stopping"])
        self.network.begin(weights, None if state is None else state["network"])
        return state

    def _schedule(self, start: int) -> Iterator[Exchange]:
        """Yield the exchanges of the session from `start` on; early stopping may end them."""
        return self.stopping.follow(rules.schedule(self.terms, self.network.split, start))

    def _save(self, exchange: Exchange) -> Checkpoints | None:
        """Save a checkpoint if one is due before this exchange; return where it was saved.

        If the exchange `reveals` values, wait until all parties have saved their checkpoints.
        """
        reveals = self.network.reveals(exchange)
        kept = self.checkpoints if exchange.saves or reveals else None
        if kept is not None:
            kept.save(exchange.step, self.training_state())
        if reveals:
            self.network.everybody_saved(
                partial(kept.commit, exchange.step) if kept is not None else lambda: None
            )
        return kept
