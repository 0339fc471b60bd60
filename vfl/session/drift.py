"""Drift: compares the rows that a service queries with the training rows, bin by bin.

The edges of bins are quantiles of a party's own columns, so they are stored only in the party's own
folder. About drift, the metrics of a service contain only names of columns, stability indices,
numbers of bins, and numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.datasets import PartyData
from vfl.datasets.encode import TableEncoder

_DECILES = 9
_BINS = 2 * _DECILES + 1
_MOST_INPUTS = 512
_WAITING = 1024  # number of collected rows at which they are counted
_SAMPLE_ROWS = 1 << 17  # bins of more training rows use a sample of at least this many
#: A column with a larger population stability index counts as drifted (Siddiqi 2006).
DRIFTED = 0.25
#: Least number of queried rows for a report: fewer rows say little about the population, but a
#: report would disclose much about each row.
FEWEST_ROWS = 100


class Bins:
    """For each column, the numbers of rows between and on the deciles of the training rows.

    Each decile has a bin for the rows that are equal to it, because many rows may share one value,
    such as a category; each range between two deciles has a further bin.

    Args:
        names: names of the columns.
        edges: the nine deciles of each column over the training rows, float32, axes (columns, 9),
            ascending.
        expected: number of training rows in each bin, int64, axes (columns, 19).
    """

    def __init__(self, names: list[str], edges: Tensor, expected: Tensor) -> None:
        self.names, self._edges, self._expected = names, edges, expected
        self.counts = torch.zeros_like(expected)

    @classmethod
    def of(cls, values: Tensor, names: list[str]) -> Bins:
        """Make the bins from the training rows' values, axes (rows, columns)."""
        shares = torch.linspace(0, 1, _DECILES + 2, dtype=torch.float64)[1:-1]
        ordered = values.double().sort(dim=0).values
        edges = ordered[(shares * (len(ordered) - 1)).round().long()].T.float().contiguous()
        made = cls(names, edges, torch.zeros(len(names), _BINS, dtype=torch.int64))
        made._expected = made._counted(values)
        return made

    def add(self, values: Tensor) -> None:
        """Add rows to the counts of the bins; `values` has the axes (rows, columns)."""
        self.counts += self._counted(values.detach().cpu())

    @property
    def rows(self) -> int:
        """Number of rows that `add` has counted."""
        return int(self.counts[0].sum()) if len(self.counts) else 0

    def stability(self) -> Tensor:
        """Return the population stability index of each column, axes (columns,).

        The index is 0 if no row was added.
        """
        return torch.stack(
            [
                population_stability_index(expected, counted)
                for expected, counted in zip(self._expected, self.counts, strict=True)
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return the bins, without the counts of `add`, as a record for the party's own file."""
        edges, expected = self._edges.tolist(), self._expected.tolist()
        return {"names": self.names, "edges": edges, "expected": expected}

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> Bins:
        """Make bins without counts from a record that `record` returned."""
        edges = torch.tensor(record["edges"], dtype=torch.float32)
        return cls(list(record["names"]), edges, torch.tensor(record["expected"]))

    def _counted(self, values: Tensor) -> Tensor:
        columns = values.float().T.contiguous()
        below = torch.searchsorted(self._edges, columns)
        places = below + torch.searchsorted(self._edges, columns, right=True)
        counts = torch.zeros(len(self.names), _BINS, dtype=torch.int64)
        return counts.scatter_add_(1, places, torch.ones_like(places))


def population_stability_index(expected: Tensor, counted: Tensor) -> Tensor:
    """Return the sum over bins of (a - e) ln(a / e).

    Here, a and e are a bin's fractions of the rows in `counted` and `expected`. The index is the
    symmetric divergence of Jeffreys 1946; its name comes from credit scoring (Siddiqi 2006: below
    0.1 the population is regarded as stable, above 0.25 as changed). Half a row is added to each
    bin that has rows in at least one of the two populations, so that no fraction is 0.

    Args:
        expected: number of training rows in each bin, axes (bins,).
        counted: number of rows in each bin that are compared with the training rows, axes (bins,).

    >>> round(float(population_stability_index(torch.tensor([50, 50]), torch.tensor([80, 20]))), 3)
    0.406
    """
    if not int(counted.sum()):
        return torch.zeros((), dtype=torch.float64)
    used = (expected + counted) > 0
    e, a = expected[used] + 0.5, counted[used] + 0.5
    e, a = e.double() / e.sum(), a.double() / a.sum()
    return ((a - e) * (a / e).log()).sum()


class Drift:
    """Drift counters of one party: for its inputs, and at the label party for the scores.

    Queried rows are first collected and later counted together, because counting a single row would
    take as long as answering the query.

    Args:
        inputs: bins of the party's inputs; None if the party has no table.
        scores: bins of the model's scores; None at a feature party.
    """

    def __init__(self, inputs: Bins | None, scores: Bins | None) -> None:
        self.inputs, self.scores = inputs, scores
        self._waiting = list[tuple[Tensor | None, np.ndarray | None, Tensor | None]]()
        self._waiting_rows = 0

    @classmethod
    def of(cls, data: PartyData, answers: Tensor | None = None) -> Drift:
        """Make bins from the inputs of the training rows, and from the model's scores in `answers`.

        Args:
            data: the party's data; its training rows define the bins of the inputs.
            answers: outputs of the final model for the test rows, axes (rows, outputs); the bins of
                the scores are made from these outputs. Outputs for training rows would be
                misleading, because the model fits these rows better than any future row.
        """
        inputs, own, train = None, data.inputs, data.split.train
        if (held := data.held.get(data.name)) is not None:
            train = train[held[train]]
        train = train[:: max(1, len(train) // _SAMPLE_ROWS)]
        if own is not None and own.ndim == 2 and own.shape[1] <= _MOST_INPUTS and len(train):
            inputs = Bins.of(own.index_select(0, torch.from_numpy(train)), _names(data))
        scores = None
        if answers is not None and len(answers):
            scores = Bins.of(scores_of(answers, data.classes is not None), ["score"])
        return cls(inputs, scores)

    def add(
        self,
        inputs: Tensor | None,
        answers: Tensor | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Collect queried rows, which are counted later.

        Args:
            inputs: inputs of these rows, axes (rows, width); or the inputs of the whole table, if
                `rows` is given.
            answers: the model's outputs for these rows, axes (rows, outputs).
            rows: indices of the queried rows in `inputs`; None means all rows of `inputs`.
        """
        if self.inputs is None and self.scores is None:
            return
        self._waiting.append((inputs, rows, answers))
        asked = rows if rows is not None else answers if inputs is None else inputs
        self._waiting_rows += 0 if asked is None else len(asked)
        if self._waiting_rows >= _WAITING:
            self.count()

    def count(self) -> None:
        """Add the collected rows to the counts of the bins."""
        waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        if self.inputs is not None:
            asked = [
                own if rows is None else own.index_select(0, torch.from_numpy(rows))
                for own, rows, _ in waiting
                if own is not None
            ]
            if asked:
                self.inputs.add(torch.cat(asked))
        if self.scores is not None:
            answered = [answers for *_, answers in waiting if answers is not None]
            if answered:
                answers = torch.cat(answered)
                self.scores.add(scores_of(answers, answers.shape[1] > 1))

    def drifted(self) -> int:
        """Number of the party's inputs that have drifted; 0 until enough rows have been queried."""
        self.count()
        if self.inputs is None or self.inputs.rows < FEWEST_ROWS:
            return 0
        return int((self.inputs.stability() > DRIFTED).sum())

    def record(self) -> dict[str, Any]:
        """Return the bins, without counts of queried rows, as a record for the party's own file."""
        parts = {"inputs": self.inputs, "scores": self.scores}
        return {name: None if bins is None else bins.record() for name, bins in parts.items()}

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> Drift:
        """Make counters that are 0, with the bins of a record that `record` returned."""
        inputs, scores = record["inputs"], record["scores"]
        return cls(
            None if inputs is None else Bins.restored(inputs),
            None if scores is None else Bins.restored(scores),
        )

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return each column's stability index and rows per bin, if enough rows were queried.

        The summary contains no edges of bins and no values of rows.
        """
        self.count()
        found = {}
        for bins in (self.inputs, self.scores):
            if bins is not None and bins.rows >= FEWEST_ROWS:
                for name, index, counts in zip(
                    bins.names, bins.stability().tolist(), bins.counts.tolist(), strict=True
                ):
                    found[name] = {"population_stability_index": index, "rows": counts}
        return found


def scores_of(answers: Tensor, classifies: bool) -> Tensor:
    """Return one score for each row, axes (rows, 1).

    The score is the prediction of a regression, the probability of the second class if there are
    two, or the largest probability if there are more classes.
    """
    if not classifies:
        return answers[:, :1].float()
    shares = torch.softmax(answers.float(), dim=1)
    return shares[:, 1:2] if answers.shape[1] == 2 else shares.amax(dim=1, keepdim=True)


def _names(data: PartyData) -> list[str]:
    """Return a name for each input: its column's name, with a number if the column has several."""
    assert data.inputs is not None, "asked above"
    width = data.inputs.shape[1]
    found = data.encoder.labels if isinstance(data.encoder, TableEncoder) else []
    # If one network reads the columns of all parties, the names in one party's encoder do not
    # suffice for all inputs.
    return found if len(found) == width else [f"input {number}" for number in range(width)]
