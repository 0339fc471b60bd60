"""Generalised linear models with statistical inference, computed only from sums over rows.

A model has margins X b, for columns X and coefficients b, and a mean mu for each margin (McCullagh
and Nelder 1989, section 2.2); column 0 of X is the constant 1. For the canonical links of this
module, Newton's method is the same as Fisher scoring. Newton's method needs only X^T mu, X^T W X
and one further number, at coefficients that it chooses; W is the diagonal matrix of the rows'
weights. The fit is the same whether these sums are computed from all columns in one place or on
additive shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import stats
from scipy.linalg import eigh
from scipy.special import expit, gammaln, xlogy

from vfl.core.errors import DataError, TooFewRowsError
from vfl.core.registry import require_choice, require_range

FAMILIES = ("gaussian", "binomial", "poisson")
Name = Literal["gaussian", "binomial", "poisson"]

#: Newton's method stops after a step whose length, in standard errors, is below this number.
_CLOSE = 1e-7
#: Smallest accepted eigenvalue of a correlation matrix; it keeps variance inflation below 10^8.
_LEAST_EIGENVALUE = 1e-8
#: If the information on a coefficient falls below this share of its value in the first step, the
#: coefficient grows without limit.
_SEPARATED = 1e-6
MOST_HALVINGS, _MOST_SWEEPS = 30, 1000


class Family:
    """A distribution of labels with its canonical link: `Gaussian`, `Binomial` or `Poisson`.

    The log-likelihood of a row with margin m and label y is y m - b(m) + c(y), divided by the
    dispersion.
    """

    name: Name
    #: Whether the dispersion is estimated, so that test statistics have Student's t distribution.
    dispersed = False

    def mean(self, margins: np.ndarray) -> np.ndarray:
        """Return b'(m), the expected label of each row."""
        raise NotImplementedError

    def variance(self, margins: np.ndarray) -> np.ndarray:
        """Return b''(m), the weight of each row in X^T W X."""
        raise NotImplementedError

    def normaliser(self, margins: np.ndarray) -> np.ndarray:
        """Return b(m) of each row, the term of its log-likelihood without the label."""
        raise NotImplementedError

    def margin(self, mean: float) -> float:
        """Return the margin for which the expected label is `mean` (the link function)."""
        raise NotImplementedError

    def saturated(self, labels: np.ndarray) -> np.ndarray:
        """Return each row's maximum of y m - b(m) over m, where the mean equals the label."""
        raise NotImplementedError

    def constant(self, labels: np.ndarray) -> np.ndarray:
        """Return c(y) of each row for a dispersion of 1."""
        return np.zeros(len(labels))

    def check(self, labels: np.ndarray) -> None:
        """Raise an error if the labels do not fit the distribution.

        Raises:
            DataError: the labels do not fit the distribution; the error states which labels would.
        """


class Gaussian(Family):
    """Numeric labels, normally distributed around the margin with an estimated variance."""

    name: Name = "gaussian"
    dispersed = True

    def mean(self, margins: np.ndarray) -> np.ndarray:
        return margins

    def variance(self, margins: np.ndarray) -> np.ndarray:
        return np.ones_like(margins)

    def normaliser(self, margins: np.ndarray) -> np.ndarray:
        return margins**2 / 2

    def margin(self, mean: float) -> float:
        return mean

    def saturated(self, labels: np.ndarray) -> np.ndarray:
        return labels**2 / 2


class Binomial(Family):
    """Labels 0 and 1; the margin is the log odds of label 1."""

    name: Name = "binomial"

    def mean(self, margins: np.ndarray) -> np.ndarray:
        found: np.ndarray = expit(margins)
        return found

    def variance(self, margins: np.ndarray) -> np.ndarray:
        found: np.ndarray = expit(margins) * expit(-margins)
        return found

    def normaliser(self, margins: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.logaddexp(0, margins)
        return found

    def margin(self, mean: float) -> float:
        return float(np.log(mean) - np.log1p(-mean))

    def saturated(self, labels: np.ndarray) -> np.ndarray:
        return np.zeros(len(labels))

    def check(self, labels: np.ndarray) -> None:
        if not np.isin(labels, (0, 1)).all() or len(np.unique(labels)) < 2:
            raise DataError(
                "a logistic regression needs two classes",
                where="labels",
                got=f"{len(np.unique(labels))} different labels",
                want="rows of class 0 and rows of class 1",
            )


class Poisson(Family):
    """Counts as labels; the margin is the logarithm of the expected count."""

    name: Name = "poisson"

    def mean(self, margins: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            found: np.ndarray = np.exp(margins)
        return found

    variance = normaliser = mean

    def margin(self, mean: float) -> float:
        return float(np.log(mean))

    def saturated(self, labels: np.ndarray) -> np.ndarray:
        found: np.ndarray = xlogy(labels, labels) - labels
        return found

    def constant(self, labels: np.ndarray) -> np.ndarray:
        found: np.ndarray = -gammaln(labels + 1)
        return found

    def check(self, labels: np.ndarray) -> None:
        if (labels < 0).any() or (labels != np.floor(labels)).any() or not labels.any():
            raise DataError(
                "a Poisson regression needs counts",
                where="labels",
                want="whole numbers from 0 on, not all 0",
            )


_FAMILIES: dict[str, Family] = {
    "gaussian": Gaussian(),
    "binomial": Binomial(),
    "poisson": Poisson(),
}


def family(name: str) -> Family:
    """Return the family with this name.

    Raises:
        BadOptionError: no family has this name.
    """
    require_choice("family", name, FAMILIES)
    return _FAMILIES[name]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Statistics of the labels that a fit needs.

    Attributes:
        rows: number of rows; with weights, the sum of the row weights.
        products: X^T y, axes (columns,).
        saturated, constant: sums over the rows of `Family.saturated` and of `Family.constant`.
    """

    rows: float
    products: np.ndarray
    saturated: float
    constant: float


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the rows that a fit needs, at given coefficients.

    Attributes:
        means: X^T mu, axes (columns,).
        curvature: X^T W X, axes (columns, columns).
        normaliser: sum of b(m) over rows.
    """

    means: np.ndarray
    curvature: np.ndarray
    normaliser: float


@dataclass(frozen=True, slots=True)
class Penalty:
    """Elastic-net penalty relative to the log-likelihood per row; the intercept has no penalty.

    The fit minimises -l(b) / rows + l1 |b|_1 + l2 |b|^2 / 2, for the log-likelihood l (Friedman,
    Hastie and Tibshirani 2010).
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        require_range("l1", self.l1, 0, 1e9)
        require_range("l2", self.l2, 0, 1e9)

    def __bool__(self) -> bool:
        return self.l1 > 0 or self.l2 > 0


@dataclass(frozen=True)
class Fit:
    """A fitted generalised linear model.

    Attributes:
        family: distribution of the labels.
        coefficients: coefficient of each column, axes (columns,), the intercept first; 0 for a
            column that is not in the model.
        active: for each column, whether it is in the model.
        outcome, sums: statistics of the labels, and sums over the rows at these coefficients.
        steps: number of steps that Newton's method took.
        penalty: penalty that the fit used. Standard errors exist only for a fit without a penalty.
    """

    family: Family
    coefficients: np.ndarray
    active: np.ndarray
    outcome: Outcome
    sums: Sums
    steps: int
    penalty: Penalty = Penalty()

    @cached_property
    def gain(self) -> float:
        """Sum over the rows of y m - b(m)."""
        return float(self.coefficients @ self.outcome.products - self.sums.normaliser)

    @property
    def parameters(self) -> int:
        """Number of columns in the model, including the intercept."""
        return int(self.active.sum())

    @property
    def residual_rows(self) -> float:
        """Residual degrees of freedom: rows minus columns in the model."""
        return self.outcome.rows - self.parameters

    @cached_property
    def deviance(self) -> float:
        """Twice the difference of log-likelihoods of the saturated model and this model.

        For the Gaussian family, it is the sum of squared residuals.
        """
        return max(0.0, 2 * (self.outcome.saturated - self.gain))

    @cached_property
    def null_deviance(self) -> float:
        """Deviance of the model that has only an intercept."""
        outcome = self.outcome
        margin = self.family.margin(float(outcome.products[0]) / outcome.rows)
        normaliser = outcome.rows * float(self.family.normaliser(np.array([margin]))[0])
        return 2 * float(outcome.saturated - margin * outcome.products[0] + normaliser)

    @property
    def explained(self) -> float:
        """Share of the null deviance that the model explains; R^2 for the Gaussian family."""
        return float(1 - self.deviance / self.null_deviance) if self.null_deviance else 0.0

    @property
    def dispersion(self) -> float:
        """Estimated variance of the residuals for the Gaussian family; 1 for other families."""
        return self.deviance / self.residual_rows if self.family.dispersed else 1.0

    @property
    def log_likelihood(self) -> float:
        """Log-likelihood; for the Gaussian family, at the variance that maximises it."""
        rows = self.outcome.rows
        if self.family.dispersed:
            with np.errstate(divide="ignore"):
                return float(-rows / 2 * (np.log(2 * np.pi * self.deviance / rows) + 1))
        return self.gain + self.outcome.constant

    @property
    def aic(self) -> float:
        """Akaike's information criterion; an estimated variance does not count as a parameter."""
        return 2 * self.parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's (Bayesian) information criterion; see `aic` for the number of parameters."""
        return float(np.log(self.outcome.rows)) * self.parameters - 2 * self.log_likelihood

    @cached_property
    def covariance(self) -> np.ndarray:
        """Covariance of the coefficients, axes (columns, columns).

        Entries of columns that are not in the model are NaN; after a fit with a penalty, all are.
        """
        found = np.full(self.sums.curvature.shape, np.nan)
        if not self.penalty:
            inside = np.ix_(self.active, self.active)
            found[inside] = self.dispersion * np.linalg.inv(self.sums.curvature[inside])
        return found

    @property
    def standard_errors(self) -> np.ndarray:
        """Standard error of each coefficient, axes (columns,)."""
        found: np.ndarray = np.sqrt(np.diag(self.covariance))
        return found

    @property
    def statistics(self) -> np.ndarray:
        """Return each coefficient over its standard error (Wald 1943): t if Gaussian, else z."""
        found: np.ndarray = self.coefficients / self.standard_errors
        return found

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided p-value of each coefficient."""
        found: np.ndarray = 2 * self._distribution.sf(np.abs(self.statistics))
        return found

    def intervals(self, level: float = 0.95) -> np.ndarray:
        """Return confidence intervals, axes (columns, 2)."""
        reach = self._distribution.ppf(0.5 + level / 2) * self.standard_errors
        return np.stack([self.coefficients - reach, self.coefficients + reach], axis=1)

    def entry_p_values(self) -> np.ndarray:
        """Return p-values of the score test for adding each column outside the model (Rao 1948).

        The axes are (columns,); the entries of columns in the model are NaN. For the Gaussian
        family, this p-value equals that of the exact t test of the coefficient in the model with
        the added column.
        """
        inside, outside = np.flatnonzero(self.active), np.flatnonzero(~self.active)
        curvature = self.sums.curvature
        beside = curvature[np.ix_(inside, outside)]
        explained = np.linalg.solve(curvature[np.ix_(inside, inside)], beside)
        left = np.diag(curvature)[outside] - (beside * explained).sum(0)
        score = (self.outcome.products - self.sums.means)[outside]
        collinear = left <= _LEAST_EIGENVALUE * np.diag(curvature)[outside]
        score_squared = score**2 / np.where(collinear, np.inf, left)
        found = np.full(len(self.active), np.nan)
        if self.family.dispersed:
            rows = self.residual_rows - 1
            variance = (self.deviance - score_squared) / rows
            found[outside] = 2 * stats.t(rows).sf(np.sqrt(score_squared / variance))
        else:
            found[outside] = stats.chi2(1).sf(score_squared)
        return found

    @property
    def _distribution(self) -> stats.rv_continuous:
        return stats.t(self.residual_rows) if self.family.dispersed else stats.norm


def local_sums(
    family: Family, inputs: np.ndarray, weights: np.ndarray | None = None
) -> Callable[[np.ndarray], Sums]:
    """Return a function that computes `Sums` at given coefficients from the columns of all rows.

    Args:
        family: distribution of the labels.
        inputs: columns of the model, axes (rows, columns); column 0 is the constant 1.
        weights: weight of each row; a row of weight w counts as w equal rows.
    """
    counted = np.ones(len(inputs)) if weights is None else weights

    def sums(coefficients: np.ndarray) -> Sums:
        margins = inputs @ coefficients
        weighted = inputs * (counted * family.variance(margins))[:, None]
        return Sums(
            inputs.T @ (counted * family.mean(margins)),
            inputs.T @ weighted,
            float(counted @ family.normaliser(margins)),
        )

    return sums


def outcome_of(
    family: Family, products: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Outcome:
    """Compute the statistics of the labels that a fit needs.

    Args:
        family: distribution of the labels.
        products: X^T y, where each row counts as often as its weight.
        labels: axes (rows,).
        weights: weight of each row; a row of weight w counts as w equal rows.

    Raises:
        DataError: the labels do not fit the family.
    """
    family.check(labels)
    counted = np.ones(len(labels)) if weights is None else weights
    return Outcome(
        float(counted.sum()),
        products,
        float(counted @ family.saturated(labels)),
        float(counted @ family.constant(labels)),
    )


def fit(
    family: Family,
    outcome: Outcome,
    sums: Callable[[np.ndarray], Sums],
    *,
    penalty: Penalty = Penalty(),
    active: np.ndarray | None = None,
    start: np.ndarray | None = None,
    most_steps: int = 50,
) -> Fit:
    """Fit a model by Newton's method; a step that would increase the loss is halved.

    With an L1 penalty, each step minimises the quadratic approximation by coordinate descent (Lee,
    Sun and Saunders 2014).

    Args:
        family: distribution of the labels.
        outcome: statistics of the labels.
        sums: function that returns sums over the rows at given coefficients.
        penalty: penalty on the coefficients.
        active: for each column, whether it is in the model; by default, all columns are. The
            intercept is always in the model.
        start: initial coefficients; by default, those of the model that has only an intercept.
        most_steps: largest number of steps of Newton's method.

    Raises:
        TooFewRowsError: the number of rows is not larger than the number of columns.
        DataError: columns are collinear or separate the labels, so that no maximum-likelihood
            coefficients exist.

    >>> inputs = np.array([[1, 0], [1, 1], [1, 2], [1, 3]], float)
    >>> labels = np.array([1.0, 3.0, 4.0, 8.0])
    >>> model = Gaussian()
    >>> found = fit(model, outcome_of(model, inputs.T @ labels, labels), local_sums(model, inputs))
    >>> found.coefficients.round(2).tolist(), found.standard_errors.round(2).tolist()
    ([0.7, 2.2], [0.79, 0.42])
    """
    columns = len(outcome.products)
    inside = np.ones(columns, bool) if active is None else active.copy()
    inside[0] = True
    if outcome.rows <= inside.sum():
        raise TooFewRowsError(
            "a regression needs more rows than columns",
            got=f"{outcome.rows:g} rows, {int(inside.sum())} columns with the intercept",
            want="more rows than columns",
        )
    solver = _Solver(outcome, penalty, inside)
    b = np.zeros(columns) if start is None else np.where(inside, start, 0.0)
    if start is None:
        b[0] = family.margin(float(outcome.products[0]) / outcome.rows)
    found = sums(b)
    first = found.curvature
    _refuse_collinear(first, inside, penalty)
    for number in range(1, most_steps + 1):
        step = solver.step(b, found)
        if _in_standard_errors(step, found.curvature) <= _CLOSE:
            after = _predicted(found, step)
            return Fit(family, b + step, inside, outcome, after, number, penalty)
        b, found = solver.search(b, found, step, sums)
        if not penalty:
            _refuse_separated(found.curvature, first, inside)
    raise _no_maximum(f"{most_steps} steps without convergence")


@dataclass(frozen=True, slots=True)
class _Solver:
    """Steps of Newton's method for the coefficients of the columns in the model."""

    outcome: Outcome
    penalty: Penalty
    inside: np.ndarray

    def loss(self, b: np.ndarray, sums: Sums) -> float:
        """Return the loss that the fit minimises, multiplied by the number of rows."""
        rows, slopes = self.outcome.rows, b[1:]
        penalised = self.penalty.l1 * np.abs(slopes).sum() + self.penalty.l2 / 2 * slopes @ slopes
        return float(sums.normaliser - b @ self.outcome.products + rows * penalised)

    def step(self, b: np.ndarray, sums: Sums) -> np.ndarray:
        """Return the step from b to the minimum of the quadratic approximation at b."""
        rows, inside, place = self.outcome.rows, self.inside, np.flatnonzero(self.inside)
        l2 = np.full(len(place), rows * self.penalty.l2)
        l2[0] = 0
        curvature = sums.curvature[np.ix_(inside, inside)] + np.diag(l2)
        slope = (sums.means - self.outcome.products)[inside] + l2 * b[inside]
        step = np.zeros(len(b))
        try:
            if self.penalty.l1:
                step[inside] = self._sparse(b[inside], slope, curvature)
            else:
                step[inside] = -np.linalg.solve(curvature, slope)
        except np.linalg.LinAlgError:
            raise _no_maximum("a singular matrix of second derivatives") from None
        return step

    def search(
        self, b: np.ndarray, sums: Sums, step: np.ndarray, at: Callable[[np.ndarray], Sums]
    ) -> tuple[np.ndarray, Sums]:
        """Halve the step until the loss no longer increases; return coefficients and sums there."""
        before = self.loss(b, sums)
        rounding = 1e-9 * (1 + abs(before))
        for _ in range(MOST_HALVINGS):
            found = at(b + step)
            if np.isfinite(found.normaliser) and self.loss(b + step, found) <= before + rounding:
                return b + step, found
            step = step / 2
        raise _no_maximum("no step that increases the likelihood of the labels")

    def _sparse(self, b: np.ndarray, slope: np.ndarray, curvature: np.ndarray) -> np.ndarray:
        """Return the d that minimises s d + d H d / 2 + l1 |b + d|, by coordinate descent."""
        threshold, step = self.outcome.rows * self.penalty.l1, np.zeros(len(b))
        model = slope.copy()  # derivative of the quadratic part at the current d (`step`)
        for _ in range(_MOST_SWEEPS):
            largest = 0.0
            for place, own in enumerate(np.diag(curvature)):
                goal = b[place] + step[place] - model[place] / own
                if place:
                    goal = np.sign(goal) * max(0.0, abs(goal) - threshold / own)
                move = goal - b[place] - step[place]
                step[place] += move
                model += curvature[place] * move
                largest = max(largest, abs(move) * np.sqrt(own))
            if largest <= _CLOSE / 10:
                break
        return step


def _predicted(sums: Sums, step: np.ndarray) -> Sums:
    """Predict the sums after a very short step, assuming that second derivatives do not change."""
    bent = sums.curvature @ step
    normaliser = float(sums.normaliser + step @ sums.means + step @ bent / 2)
    return Sums(sums.means + bent, sums.curvature, normaliser)


def _in_standard_errors(step: np.ndarray, curvature: np.ndarray) -> float:
    """Return the length of a step, in standard errors along its direction."""
    return float(np.sqrt(max(0.0, step @ curvature @ step)))


def _refuse_collinear(curvature: np.ndarray, inside: np.ndarray, penalty: Penalty) -> None:
    places = np.flatnonzero(inside)
    scale = np.sqrt(np.diag(curvature)[places])
    if (scale == 0).any():
        raise DataError(
            "a column is 0 in every row",
            got=f"columns {_listed(places[scale == 0])}",
            fix="remove it",
        )
    if penalty.l2:
        return
    values, vectors = eigh(curvature[np.ix_(places, places)] / np.outer(scale, scale))
    if values[0] < _LEAST_EIGENVALUE:
        share = np.abs(vectors[:, 0])
        raise DataError(
            "columns are collinear: each follows from the others, so coefficients are not unique",
            got=f"columns {_listed(places[share > share.max() / 10])} (0 is the intercept)",
            want="columns, none of which is a weighted sum of other columns",
            fix="remove one of them, or set l2=0.001",
        )


def _refuse_separated(curvature: np.ndarray, first: np.ndarray, inside: np.ndarray) -> None:
    """Raise an error if, in some direction of the coefficients, nearly all information is lost."""
    here = np.ix_(inside, inside)
    if eigh(curvature[here], first[here], eigvals_only=True)[0] < _SEPARATED:
        raise _no_maximum("a step after which rows have no information on a coefficient")


def _no_maximum(got: str) -> DataError:
    return DataError(
        "no maximum-likelihood coefficients exist: some grow without limit, for example because a "
        "weighted sum of columns separates the labels",
        got=got,
        want="labels that no weighted sum of columns separates",
        fix="l2=0.001, fewer columns, or more rows",
    )


def _listed(places: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(map(str, list(places)[:8]))
    return shown if len(places) <= 8 else f"{shown} and {len(places) - 8} more"


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule for adding and removing columns one at a time (stepwise selection).

    Attributes:
        by: criterion: "p" adds the column with the smallest p-value of the score test, if this
            p-value is below `enter`. "p" also removes the column with the largest p-value of Wald's
            test, if this p-value is above `leave`. "aic" and "bic" consider the same columns, and
            add or remove a column if the information criterion decreases.
        enter, leave: p-values.
    """

    by: Literal["p", "aic", "bic"] = "p"
    enter: float = 0.05
    leave: float = 0.05

    def __post_init__(self) -> None:
        require_choice("by", self.by, ("p", "aic", "bic"))
        require_range("enter", self.enter, 0, 1)
        require_range("leave", self.leave, self.enter, 1)

    def changed(self, before: Fit, by_p: bool, after: Callable[[], Fit]) -> Fit | None:
        """Return the fit with one column added or removed if the rule does so, otherwise None.

        Args:
            before: the fit without the change.
            by_p: whether the criterion "p" makes the change.
            after: function that fits the model with the change.
        """
        if self.by == "p":
            return after() if by_p else None
        found = after()
        return found if getattr(found, self.by) < getattr(before, self.by) else None


def stepwise(
    family: Family,
    outcome: Outcome,
    sums: Callable[[np.ndarray], Sums],
    selection: Selection = Selection(),
    most_steps: int = 50,
) -> Fit:
    """Select columns step by step, starting with only the intercept (Efroymson 1960).

    Args:
        family: distribution of the labels.
        outcome: see `fit`.
        sums: see `fit`.
        selection: rule that decides which columns to add and to remove.
        most_steps: see `fit`.

    Raises:
        TooFewRowsError, DataError: see `fit`.
    """
    columns = len(outcome.products)

    def fitted(active: np.ndarray, start: np.ndarray | None) -> Fit:
        return fit(family, outcome, sums, active=active, start=start, most_steps=most_steps)

    def changed(now: Fit, place: int) -> Callable[[], Fit]:
        active = now.active.copy()
        active[place] ^= True
        return lambda: fitted(active, now.coefficients)

    found, seen = fitted(np.arange(columns) == 0, None), set[bytes]()
    while found.active.tobytes() not in seen and not found.active.all():
        seen.add(found.active.tobytes())
        entering = np.where(np.isnan(p := found.entry_p_values()), np.inf, p)
        place = int(entering.argmin())
        enters = bool(entering[place] < selection.enter)
        taken = selection.changed(found, enters, changed(found, place))
        if taken is None:
            break
        found = _without_weak(taken, selection, changed)
    return found


def _without_weak(
    found: Fit, selection: Selection, changed: Callable[[Fit, int], Callable[[], Fit]]
) -> Fit:
    while found.parameters > 1:
        leaving = np.where(found.active, found.p_values, -np.inf)
        leaving[0] = -np.inf
        place = int(leaving.argmax())
        leaves = bool(leaving[place] > selection.leave)
        left = selection.changed(found, leaves, changed(found, place))
        if left is None:
            break
        found = left
    return found
