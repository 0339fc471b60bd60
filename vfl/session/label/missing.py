"""Rows that a feature party lacks: the label party uses a learned vector in place of their cuts.

The feature party sends cuts (cut-layer activations) of the rows that it has, and receives the
gradients of these cuts; if it has no row of an exchange, or only one row of a training batch, it
sends nothing. Both parties know from the aligned ids which rows are missing, so no message names
these rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from vfl.core.traffic import Ledger
from vfl.session import EarlyStopping, Exchange
from vfl.session.exchange import CutAggregator, LabelEnd
from vfl.session.schedule import own_rows


class MissingCuts(nn.Module):
    """One learned vector per feature party, in place of cuts of rows that the party lacks.

    The vectors start at 0 and are trained together with the top model. If no row is missing, the
    vectors have no effect.

    Args:
        widths: widths of the cuts, by feature party.

    >>> missing = MissingCuts({"shop": 2})
    >>> with torch.no_grad():
    ...     missing.vectors["shop"] += 7
    >>> missing.filled("shop", torch.tensor([[1.0, 2.0]]), torch.tensor([1]), rows=2).tolist()
    [[7.0, 7.0], [1.0, 2.0]]
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__()
        made = {name: nn.Parameter(torch.zeros(width)) for name, width in widths.items()}
        self.vectors = nn.ParameterDict(made)

    def filled(self, party: str, cut: Tensor | None, at: Tensor, rows: int) -> Tensor:
        """Extend a party's cut to all rows of a batch; the result has the axes (rows, width).

        Args:
            party: name of the party.
            cut: cut of those rows of the batch that the party has, axes (the party's rows, width);
                None if the party has no row of the batch.
            at: positions of the party's rows in the batch, int64, ascending.
            rows: number of rows of the batch.
        """
        if cut is not None and len(cut) == rows:
            return cut
        vectors: Tensor = self.vectors[party].expand(rows, -1)
        return vectors if cut is None else vectors.index_copy(0, at.to(cut.device), cut)


class PartialCuts(CutAggregator):
    """Receives each party's cuts of its rows; for other rows, uses the party's vector.

    Args:
        ends, ledger, stopping: see `CutAggregator`.
        held: for each feature party, a mask of the aligned rows that the party has, bool, axes
            (aligned rows,).
        missing: the learned vectors of all feature parties.
    """

    def __init__(
        self,
        ends: Mapping[str, LabelEnd],
        ledger: Ledger,
        stopping: EarlyStopping,
        held: Mapping[str, np.ndarray],
        missing: MissingCuts,
    ) -> None:
        super().__init__(ends, ledger, stopping)
        self._held, self._missing = held, missing

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        found, rows = dict[str, Tensor](), len(exchange.rows)
        for name, end in self.ends.items():
            at, cut = own_rows(exchange, self._held[name]), None
            if name in self.without:
                at = at[:0]
            elif len(at):
                cut = self._one(name, end, exchange, exchange.rows[at])
            elif not exchange.trains:  # the party waits for the answer to every query
                self._confirm(end, exchange)
            found[name] = self._missing.filled(name, cut, torch.from_numpy(at), rows)
        return found

    def send_gradients(self, exchange: Exchange, labels: Tensor) -> None:
        for name, end in self.ends.items():
            at = own_rows(exchange, self._held[name])
            if len(at):
                end.send_gradient(labels[torch.from_numpy(at)])
            if exchange.last or not len(at):
                end.drained()
