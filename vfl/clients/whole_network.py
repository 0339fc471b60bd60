"""A party of a whole network: a party with columns, or the dealer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from vfl.core.errors import DataError
from vfl.core.frame import Link
from vfl.datasets import PartyData
from vfl.session import EarlyStopping, Exchange, PartyReport, Terms, secure_mode
from vfl.session.exchange import Own
from vfl.session.secure_mode import AnsweringNetwork, Layers, OwnRows, require_honest
from vfl.session.whole_network import NetworkParty


class WholeNetworkParty(NetworkParty):
    """Runs a party of a whole network (see `WholeNetwork`) in a session.

    Args:
        party: name of the party.
        data: aligned rows of the party; None for a dealer.
        terms: terms of the session.
        keys: the party's object for key agreement.
        stream: network stream to the label party.
        own: private state of the party.
        bottom: bottom model that the party's own file names; a whole network refuses such a model.
        weights: the party's stored part of the trained model, for evaluation and prediction.
        agreed, spend: see `OwnRows`.

    Raises:
        DataError: the party has no columns.
        ExposedCutError: the secure mode does not support a setting.
    """

    def __init__(
        self,
        party: str,
        data: PartyData | None,
        terms: Terms,
        keys: Any,
        stream: Link,
        own: Own,
        *,
        bottom: object = None,
        weights: Mapping[str, Tensor] | None = None,
        agreed: Callable[[Mapping[str, Layers]], object] = lambda layers: None,
        spend: Callable[[int], object] = lambda count: None,
    ) -> None:
        mode = secure_mode.make(terms.secure)
        mode.refuse(terms)
        require_honest(party, own, bottom)
        if data is not None and data.inputs is None:
            raise DataError(f"party '{party}' has no columns, so it has no inputs for the model")
        rows = OwnRows(own.secret, agreed, committed=own.committed(), device=own.device)
        if data is not None:
            rows = replace(
                rows,
                spend=spend,
                split=data.split,
                inputs=data.inputs,
                labels=data.labels,
                names=data.classes or (),
                columns=data.columns,
                categories=data.categories,
            )
        self.inputs = rows.inputs
        self.terms = terms
        self.network = mode.outer_network(party, terms, keys, stream, rows)
        self.checkpoints = own.checkpoints
        self.stopping = EarlyStopping(terms.train, self.network.weights, self.network.load_weights)
        self._weights = None if terms.mode == "train" else dict(weights or {})

    @property
    def name(self) -> str:
        return self.network.party

    def play(
        self,
        start: int,
        through: Callable[[Iterable[Exchange]], Iterator[Exchange]] = iter,
        keep: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        count: Callable[[], int] = lambda: 0,
    ) -> PartyReport:
        """Run a session from the exchange with number `start` on; return the party's report.

        Args:
            start: number of the first exchange; if it is not 0, a training resumes from its
                checkpoint.
            through: function that wraps the schedule; it receives and yields every exchange.
            keep: callback that is called before the party's report, when all other work is done.
            check: callback that is called after every exchange; it raises an error if the party
                must not continue.
            count: function that returns the counter of the party's store, which the report
                contains.

        Raises:
            VFLError: the error that ended the session.
        """
        started = time.perf_counter()
        self._begin(start, self._weights)
        for exchange in through(self._schedule(start)):
            self._save(exchange)
            if exchange.trains:
                self.network.train(exchange)
            else:
                self.network.outputs(exchange)
            check()
            if self.stopping.judges(exchange):
                self.stopping.obey(self.network.receive_verdict(), exchange)
        report = PartyReport(
            party=self.name,
            weights_sha256=self.weights_digest(),
            seconds=time.perf_counter() - started,
            count=count(),
        )
        keep()
        self.network.end(report.frame())
        return report

    # Methods that a service calls; see `vfl.clients.serving.Answering`.

    @property
    def end(self) -> AnsweringNetwork:
        """Return the party's part of the network, which answers queries."""
        return cast(AnsweringNetwork, self.network)

    def get_ready(self) -> None:
        """Prepare the network for queries."""
        self.network.begin(self._weights)

    def begin(self, exchange: Exchange) -> None:
        """Answer the query of an exchange's rows."""
        self.end.answer_rows(exchange)

    def answer(self, exchange: Exchange) -> None:
        """Do nothing, because no further message follows."""

    def weights(self) -> dict[str, Tensor]:
        return self.network.weights()
