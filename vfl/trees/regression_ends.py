"""The parties' implementations of a regression: its training, and later queries.

In a training, all parties connect as in `vfl.mpc.secure.ends` and then exchange these messages:

    holder of columns                    helper                label party
      opens its columns under a mask     draws masks           opens columns, labels under a mask;
                                                               X^T y, and X^T X if linear;
      coefficients of its columns  <-------------------------  of every step;
      part of the margins  ---------->   means, weights  --->  X^T m, X^T w X;
      coefficients, standard errors  <-----------------------  of the fit.

After the training, each party answers a query for some rows with its part of each row's margin
(linear predictor).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import DataError, ExposedCutError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.secure.ends import Place, read_description
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import EVALUATE, TRAIN, OwnRows
from vfl.session.terms import Terms
from vfl.trees.cells import (
    LABEL_PARTY,
    FeatureCellsEnd,
    LabelCellsEnd,
    RowCounts,
    categories_of,
    cells_of,
    positions_of,
    row_counts,
)
from vfl.trees.newton import Binomial, Family, Fit, Sums, family, fit, outcome_of, stepwise
from vfl.trees.summing_end import (
    Columns,
    SummingEnd,
    SummingFacts,
    require_own_rows,
)
from vfl.trees.sums import Asked, Masked, coarse_bits, fine_bits

if TYPE_CHECKING:
    from vfl.trees.regression import Regression

PARTS = "parts of margins"
#: Statistics of a fit that exist for each column, in the order in which they are sent.
KEPT = ("coefficient", "standard_error", "p_value", "lower", "upper")


@dataclass(frozen=True)
class Design:
    """Conversion of a party's cells to the columns of a regression.

    A cell is one value of the party's table. A column of numbers becomes one column of the
    regression. A column of c categories becomes c - 1 indicator columns, one for each category
    except the first; a column of one category becomes a constant column, which `fit` refuses. All
    columns are standardised by the mean and standard deviation of the training rows.

    Attributes:
        categories: number of categories of each column of the party's table; 0 for a column of
            numbers.
        means, scales: mean and standard deviation of each column of the regression, float64.
    """

    categories: tuple[int, ...]
    means: np.ndarray
    scales: np.ndarray

    @classmethod
    def fit(cls, cells: np.ndarray, categories: tuple[int, ...]) -> Design:
        """Learn means and standard deviations from the training rows.

        Args:
            cells: cells from `CellEncoder`, axes (rows, columns).
            categories: see `Design`.

        Raises:
            DataError: a cell is missing or infinite, or a column has only one value.
        """
        lost = ~np.isfinite(cells)
        if lost.any():
            raise DataError(
                "a regression allows no missing or infinite cells in training rows",
                got=f"{int(lost.sum())} such cells in {int(lost.any(axis=0).sum())} columns",
                want="a finite number or a category in every cell",
                fix="fill in these cells, remove the rows, or use model = 'trees'",
            )
        columns = expanded(cells, categories)
        scales = columns.std(axis=0)
        if (alike := np.flatnonzero(scales <= 1e-12 * np.abs(columns).max(axis=0))).size:
            raise DataError(
                "a column has one value in all training rows",
                got=f"{len(alike)} of {columns.shape[1]} columns, the first is number {alike[0]}",
                want="different values",
                fix="remove it",
            )
        return cls(categories, columns.mean(axis=0), scales)

    def columns(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells to standardised columns of the regression, float64, axes (rows, columns).

        A missing cell is replaced by its column's mean.

        Args:
            cells: cells, as for `fit`.
        """
        found = (expanded(cells, self.categories) - self.means) / self.scales
        return np.where(np.isfinite(found), found, 0.0)

    def names(self, columns: Sequence[str]) -> list[str]:
        """Return the names of the regression's columns, given the names of the party's columns."""
        found = []
        for name, count in zip(columns, self.categories, strict=True):
            found += [f"{name}={code}" for code in range(1, count)] if count else [name]
        return found


def expanded(cells: np.ndarray, categories: Sequence[int]) -> np.ndarray:
    """Return columns of numbers unchanged; return indicators of all categories but the first.

    The only category of a column has an indicator, too.

    >>> expanded(np.array([[2.5, 0], [1.5, 2]]), [0, 3])
    array([[2.5, 0. , 0. ],
           [1.5, 0. , 1. ]])
    """
    parts = []
    for column, count in enumerate(categories):
        own = cells[:, column, None].astype(np.float64)
        if count:
            own = np.where(np.isnan(own), np.nan, own == np.arange(min(1, count - 1), count))
        parts.append(own)
    return np.concatenate(parts, axis=1) if parts else np.empty((len(cells), 0))


def width_of(categories: Sequence[int]) -> int:
    """Return the number of columns that `expanded` returns.

    >>> width_of([0, 3, 0])
    4
    """
    return sum(max(1, count - 1) for count in categories)


class OwnFacts(Settings):
    """A party's description of its data: number of rows in each split, and number of columns."""

    rows: RowCounts
    columns: Columns


class Facts(SummingFacts):
    """Facts that all parties need beyond the terms that they agreed on for the session.

    Attributes:
        family: distribution family of the labels.
    """

    family: Literal["gaussian", "binomial", "poisson"]


@dataclass(frozen=True)
class Part:
    """One party's part of a fitted regression: its columns and their coefficients.

    Attributes:
        design: conversion of the party's cells to the regression's columns; None at a label party
            without columns.
        labels: whether this party is the label party, whose first column is the intercept.
        found: for each statistic named in KEPT, one number per column of this party, float64; NaN
            if the fit did not compute the statistic.
    """

    design: Design | None
    labels: bool
    found: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], rows: OwnRows, labels: bool) -> Part:
        """Restore a part from the result of `state_dict`; `rows` are the rows of the same party."""
        design = None
        if rows.inputs is not None:
            means, scales = (state[name].numpy() for name in ("means", "scales"))
            design = Design(categories_of(rows), means, scales)
        return cls(design, labels, {name: state[name].numpy() for name in KEPT})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the part as tensors, from which `of_state` restores it."""
        state = {name: torch.from_numpy(values) for name, values in self.found.items()}
        if self.design is not None:
            state["means"] = torch.from_numpy(self.design.means)
            state["scales"] = torch.from_numpy(self.design.scales)
        return state

    def inputs(self, cells: np.ndarray | None, rows: int) -> np.ndarray:
        """Return the party's standardised columns; the label party's first column is ones."""
        parts = [np.ones((rows, 1))] if self.labels else []
        if self.design is not None:
            assert cells is not None, "a party with columns has cells"
            parts.append(self.design.columns(cells))
        return np.concatenate(parts, axis=1)

    def margins(self, cells: np.ndarray | None, rows: int) -> np.ndarray:
        """Return this party's part of the margin of each row, float64, axes (rows,)."""
        found: np.ndarray = self.inputs(cells, rows) @ self.found["coefficient"]
        return found

    def table(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return statistics of each of this party's columns, in the unit of the column's values."""
        if self.design is None:
            return []
        scales, own = self.design.scales, slice(int(self.labels), None)
        per_unit = {
            name: values[own] if name == "p_value" else values[own] / scales
            for name, values in self.found.items()
        }
        return [
            {"column": name} | {what: _number(values[at]) for what, values in per_unit.items()}
            for at, name in enumerate(self.design.names(columns))
        ]


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def outputs_of(family: Family, margins: np.ndarray) -> Tensor:
    """Return logits of both classes, axes (rows, 2), or expected labels, axes (rows, 1)."""
    column = margins[:, None]
    if isinstance(family, Binomial):
        return torch.from_numpy(np.concatenate([np.zeros_like(column), column], axis=1))
    return torch.from_numpy(family.mean(column))


class TrainingEnd(SummingEnd[Facts]):
    """The implementation of a party in a regression's training: with columns, or as the helper.

    Args:
        mode, party, terms, rows, place: see `NetworkEnd`.
    """

    _mode: Regression

    def __init__(
        self, mode: Regression, party: str, terms: Terms, rows: OwnRows, place: Place
    ) -> None:
        super().__init__(mode, party, terms, rows, place)
        self._helps = party == mode.helper
        self._labels = party == terms.label_party
        self._own_family = mode.family_of(rows.classes) if self._labels else None
        self._part: Part | None = None
        self._result: Result | None = None

    # Start of a training; `NetworkEnd` describes these methods.

    def announced(self) -> bytes | None:
        if self._helps:
            return None
        return self._own_facts().model_dump_json().encode()

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        read = [read_description(OwnFacts, raw, f"party '{name}'") for name, raw in told.items()]
        assert self._own_family is not None, "only the label party makes the facts"
        columns = tuple(one.columns for one in read)
        return Facts(rows=read[-1].rows, columns=columns, family=self._own_family.name)

    def _check(self, facts: Facts) -> None:
        if not self._helps:
            own = self._own_facts()
            said = facts.rows, facts.columns[self._role]
            require_own_rows((own.rows, own.columns), said)

    def _beside_bytes(self, facts: Facts) -> int:
        return ELEMENT_BYTES * max(facts.rows)

    def _own_facts(self) -> OwnFacts:
        columns = int(self._labels)
        if self._rows.inputs is not None:
            columns += width_of(categories_of(self._rows))
        return OwnFacts(rows=row_counts(self._rows), columns=columns)

    # The training.

    def train(self, exchange: Exchange) -> None:
        own = None
        if not self._helps:
            cells = cells_of(self._rows, positions_of(self._rows, "train"))
            design = None if cells is None else Design.fit(cells, categories_of(self._rows))
            self._part = Part(design, self._labels)
            own = self._part.inputs(cells, self._facts.rows[0])
        if self._labels:
            assert own is not None, "a holder has columns"
            self._lead(own)
        else:
            self._follow(own)
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> Tensor | None:
        player, role = self._begun, self._label_role
        number, count = player.next_number(), len(exchange.rows)
        found = None
        if not self._helps:
            assert self._part is not None, "a training has begun"
            positions = positions_of(self._rows, exchange.phase)[exchange.rows]
            part = self._part.margins(cells_of(self._rows, positions), count)
            if self._labels:
                for other in player.others:
                    raw = player.channels[other].receive_bytes(number, ELEMENT_BYTES * count)
                    part = part + np.frombuffer(raw, "<f8")
                player.leakage.count(PARTS, f"{exchange.phase} rows", count, count)
                found = outputs_of(self._family, part)
            else:
                player.channels[role].send_bytes(part.astype("<f8").tobytes(), number, "online")
        self._note(EVALUATE)
        return found

    def weights(self) -> dict[str, Tensor]:
        if self._part is None or not self._part.found:
            return {}
        more = {} if self._result is None else self._result.state_dict()
        return self._part.state_dict() | more

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        if weights:
            self._part = Part.of_state(weights, self._rows, self._labels)
        if weights and self._labels:
            self._result = Result.of_state(weights)

    def figures(self) -> dict[str, Any]:
        if self._part is None:
            return {}
        found: dict[str, Any] = {"own_columns": self._part.table(self._rows.columns)}
        if self._result is not None:
            own = [one["column"] for one in found["own_columns"]]
            found |= {"family": self._family.name} | self._result.figures(self._roles[:-1], own)
        return {"regression": found}

    @property
    def _family(self) -> Family:
        return family(self._facts.family)

    def _opened(self, own: np.ndarray | None) -> tuple[Masked, Masked | None]:
        """Open all columns under masks; for sums that depend on margins, also with fewer bits."""
        player, values = self._begun, None if own is None else torch.from_numpy(own)
        fine = player.open_columns(values, fine_bits(player.rows))
        if self._family.dispersed:
            return fine, None
        return fine, player.open_columns(values, coarse_bits(player.rows))

    def _follow(self, own: np.ndarray | None) -> None:
        """At a party without labels: help to compute the sums that the label party requests."""
        player, part = self._begun, self._part
        fine, coarse = self._opened(own)
        if coarse is None:
            player.gram(fine)
        player.label_products(fine, None)
        most = self._mode.most_sums(sum(self._facts.columns))
        size = 0 if own is None else len(KEPT) * ELEMENT_BYTES * own.shape[1]
        last = Asked(player, self._family, fine, coarse, own).follow(most, size)
        if own is not None and part is not None:
            if len(last) != size:
                raise ProtocolError(
                    "the message has coefficients for a different number of columns",
                    where=LABEL_PARTY,
                )
            found = np.frombuffer(last, "<f8").reshape(len(KEPT), -1)
            self._part = Part(part.design, False, dict(zip(KEPT, found.copy(), strict=True)))

    def _lead(self, own: np.ndarray) -> None:
        """At the label party: fit the regression, and send each party its columns' results."""
        player, mode, of, labels = self._begun, self._mode, self._family, self._own_labels()
        fine, coarse = self._opened(own)
        gram = player.gram(fine) if coarse is None else None
        products = player.label_products(fine, torch.from_numpy(labels))
        assert products is not None, "the label party learns these sums"
        ends = np.cumsum(self._facts.columns)
        # The fit puts the intercept first; among the columns of all parties, it is the label
        # party's first column.
        first, columns = int(ends[-2]), int(ends[-1])
        order = np.r_[first, np.arange(first), np.arange(first + 1, columns)]
        asked = Asked(player, of, fine, coarse, own)

        def apart(of_all: np.ndarray) -> list[np.ndarray]:
            """Split numbers, which are in the fit's order, into one array per party."""
            there = np.empty_like(of_all)
            there[order] = of_all
            return np.split(there, ends[:-1])

        def sums(b: np.ndarray) -> Sums:
            if gram is not None:
                whole = gram.numpy()[np.ix_(order, order)]
                return Sums(whole @ b, whole, float(b @ whole @ b / 2))
            found = asked.at(apart(b))
            here = np.ix_(order, order)
            return Sums(found.means[order], found.curvature[here], found.normaliser)

        outcome = outcome_of(of, products.numpy()[order], labels)
        if mode.selection is not None:
            found = stepwise(of, outcome, sums, mode.selection, mode.max_steps)
        else:
            found = fit(of, outcome, sums, penalty=mode.penalty, most_steps=mode.max_steps)
        lower, upper = found.intervals().T
        kept = found.coefficients, found.standard_errors, found.p_values, lower, upper
        everybody = [apart(one) for one in kept]
        asked.end(
            {
                role: np.stack([one[role] for one in everybody]).astype("<f8").tobytes()
                for role in player.others
            }
        )
        assert self._part is not None, "a training has begun"
        mine = {name: one[-1].copy() for name, one in zip(KEPT, everybody, strict=True)}
        self._part = Part(self._part.design, True, mine)
        table = np.stack([np.concatenate(one) for one in everybody])
        self._result = Result(self._facts.columns, table, Summary.of(found))

    def _own_labels(self) -> np.ndarray:
        rows = self._rows
        assert rows.labels is not None, "a training has labels"
        if rows.weights is not None:
            raise ExposedCutError(
                "all rows must have weight 1 if means of rows are shares",
                got="weights of rows or classes",
                want="label.class_weight = 'none', and no weights of rows",
            )
        labels = rows.labels[torch.from_numpy(positions_of(rows, "train"))]
        return labels.double().reshape(-1).numpy()


class Summary(NamedTuple):
    """Statistics of the whole regression."""

    rows: float
    parameters: float
    steps: float
    log_likelihood: float
    deviance: float
    null_deviance: float
    explained: float
    aic: float
    bic: float

    @classmethod
    def of(cls, found: Fit) -> Summary:
        """Return the statistics of a fitted regression."""
        return cls(
            found.outcome.rows,
            *(float(getattr(found, name)) for name in cls._fields[1:]),
        )


@dataclass(frozen=True)
class Result:
    """The label party's record of a fit, besides the part with its own columns.

    Attributes:
        columns: number of columns of each party that has columns; the label party comes last.
        table: for each statistic named in KEPT, one number per standardised column of all parties,
            axes (statistics, columns).
        summary: statistics of the whole fit.
    """

    columns: tuple[int, ...]
    table: np.ndarray
    summary: Summary

    def state_dict(self) -> dict[str, Tensor]:
        """Return the result as tensors, from which `of_state` restores it."""
        return {
            "column_counts": torch.tensor(self.columns, dtype=torch.int64),
            "table": torch.from_numpy(self.table),
            "summary": torch.tensor(self.summary, dtype=torch.float64),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Result:
        """Restore a result from the result of `state_dict`."""
        counts = tuple(state["column_counts"].tolist())
        return cls(counts, state["table"].numpy(), Summary(*state["summary"].tolist()))

    def figures(self, parties: Sequence[str], own: Sequence[str]) -> dict[str, Any]:
        """Return statistics for a run's summary; coefficients refer to standardised columns.

        Columns of other parties are numbered from 1, and have no names.

        Args:
            parties: the parties with columns, the label party last.
            own: names of the label party's columns.
        """
        whose: list[tuple[str, str | int]] = [
            (party, 1 + at)
            for party, count in zip(parties[:-1], self.columns[:-1], strict=True)
            for at in range(count)
        ]
        whose += [(parties[-1], name) for name in ("intercept", *own)]
        rows = [
            {"party": party, "column": column}
            | {name: _number(value) for name, value in zip(KEPT, values, strict=True)}
            for (party, column), values in zip(whose, self.table.T, strict=True)
        ]
        return {**self.summary._asdict(), "columns": rows}


class FeatureEnd(FeatureCellsEnd):
    """A feature party's implementation for evaluations, predictions and services.

    Args:
        mode, party, terms, rows, link: see `FeatureCellsEnd`.
    """

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        assert weights is not None, "a finished training has stored the weights"
        self.load_weights(weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._part = Part.of_state(weights, self._rows, False)

    def train(self, exchange: Exchange) -> None:
        raise AssertionError("trainings use TrainingEnd, not this class")

    def answer_rows(self, exchange: Exchange) -> None:
        """Send this party's part of the margin of each row in an exchange."""
        asked = self._asked_for(exchange)
        part = self._part.margins(cells_of(self._rows, asked), len(asked))
        self.link.send(Frame(Kind.PROTOCOL, exchange.step, part.astype("<f8").tobytes()))

    def weights(self) -> dict[str, Tensor]:
        return self._part.state_dict()


class LabelEnd(LabelCellsEnd):
    """The label party's implementation for evaluations, predictions and services.

    Args:
        mode, terms, rows, links: see `LabelCellsEnd`.
    """

    _mode: Regression

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        assert weights is not None, "a finished training has stored the weights"
        self.load_weights(weights)
        self._parts: dict[str, np.ndarray] = {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._part = Part.of_state(weights, self._rows, True)
        self._result = Result.of_state(weights)

    def train(self, exchange: Exchange) -> None:
        raise AssertionError("trainings use TrainingEnd, not this class")

    def outputs(self, exchange: Exchange) -> Tensor:
        self._ask_all(exchange.step)
        return self.answered(exchange, None)

    def answered(
        self, exchange: Exchange, inputs: Tensor | None, without: Collection[str] = ()
    ) -> Tensor:
        """Return the outputs of an exchange's rows, from the answers of all other parties.

        For an absent party, its part is 0, which is the part's mean over the training rows.
        """
        rows = len(exchange.rows)
        cells = None if inputs is None else inputs.flatten(1).numpy()
        if cells is None:
            cells = cells_of(self._rows, self._asked_for(exchange))
        self._parts = {self.party: self._part.margins(cells, rows)}
        for name in self.ends:
            if name in without:
                self._parts[name] = np.zeros(rows)
                continue
            raw = self._next(name, exchange.step)
            if len(raw) != ELEMENT_BYTES * rows:
                raise ProtocolError(
                    "the message has a wrong number of answers",
                    where=f"the message of party '{name}'",
                    got=f"{len(raw)} bytes",
                    want=f"{ELEMENT_BYTES * rows} bytes, one number per row",
                )
            self._parts[name] = np.frombuffer(raw, "<f8")
            if not np.isfinite(self._parts[name]).all():
                raise ProtocolError(
                    "a party's part of a margin is not a finite number",
                    where=f"the message of party '{name}'",
                )
            self._note(PARTS, name, EVALUATE, rows)
        return outputs_of(self._family, sum(self._parts.values(), np.zeros(rows)))

    def contributions(self, row: int) -> dict[str, Tensor]:
        """Return each party's part of a row's margin: its Shapley value relative to the mean."""
        one = isinstance(self._family, Binomial)
        found = {}
        for name, part in self._parts.items():
            own = part[row] - (self._part.found["coefficient"][0] if name == self.party else 0.0)
            found[name] = torch.tensor([0.0, own] if one else [own])
        return found

    def weights(self) -> dict[str, Tensor]:
        return self._part.state_dict() | self._result.state_dict()

    @property
    def _family(self) -> Family:
        return self._mode.family_of(self._rows.classes)
