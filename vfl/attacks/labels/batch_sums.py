"""Infers labels from gradients that a defense averages over groups of rows, by linear equations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from vfl.attacks.base import scale_by
from vfl.attacks.labels.gradient_mixture import nearness
from vfl.attacks.labels.gradients import GradientAttack, components_of
from vfl.attacks.labels.orientation import by_shares, is_upward, ridge
from vfl.attacks.transcript import RecordedExchange, Transcript, at_scale
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range

_MOST = 512  # with more columns, their principal components are used
_LEAST = 1e-6  # smallest share of a class
_LEAST_PENALTY = 1e-3
_CERTAIN = 3.0  # an estimate of at least this many standard deviations counts as significant


class BatchSums(GradientAttack):
    """Treats each sent gradient as a mean over several rows, and solves for each row's gradient.

    A defense may send, for each row, the mean gradient of the row's group or of its whole batch.
    Rows that receive equal gradients form a group; the groups differ between epochs. Each group
    gives one linear equation: its gradient is the mean of the true gradients of its rows. The
    attack models a row's true gradient as a linear function of its columns plus a residual of this
    row. The attack fits the function by ridge regression of group gradients on group means of the
    columns, as in learning from label proportions (Quadrianto et al. 2009). Generalised
    cross-validation chooses the penalty (Golub, Heath and Wahba 1979). Penalised least squares then
    gives each row's residual. Before these steps, the attack divides gradients by the root mean
    square of their batch, and subtracts their mean in each epoch. For K classes, the attack
    projects the gradients on K - 1 directions: those with the largest covariance between groups
    that share rows. Leaked rows show which projected values belong to which class. With two
    classes, the direction of the mean of the first gradients also shows this
    (`orientation.by_shares`).

    Args:
        epochs: number of epochs to read, from the first one; 0 reads all.
        penalty: weight of the squared residuals; the equation of a group with one row has weight 1;
            0 estimates the weight from the gradients.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.INPUTS, Grant.PRIOR})
    fewest = 0

    def __init__(self, epochs: int = 0, penalty: float = 0.0) -> None:
        require_range("penalty", penalty, 0)
        super().__init__(epochs)
        self.penalty = penalty

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        rows, labels = view.targets.rows, view.leaked.labels
        inputs = torch.cat([view.targets.inputs, view.leaked.inputs]).flatten(1).float()
        if inputs.shape[1] > _MOST:
            inputs = components_of(inputs, _MOST)
        columns = scale_by("standard", inputs)(inputs).double()
        seen = self.transcript(view)
        equations = Equations.of(seen, view.classes - 1, columns)
        prior = view.prior.double().clamp_min(_LEAST).log()
        if equations is None:  # all gradients are 0
            return prior.expand(rows, -1).float()
        explained = columns @ equations.slopes(columns)
        own = equations.own(explained, self.penalty or equations.penalty(explained))
        found = explained + own
        found = (found - found.mean(0)) / found.std(0).clamp_min(1e-12)
        known = one_hot(labels, view.classes).double()
        if view.classes > 2:
            return (nearness(normalize(found, dim=1), known, rounds=10)[:rows] + prior).float()
        drift = by_shares(seen, at_scale, equations.axes[:, 0], float(view.prior[1]))
        scores = nearness(found, known, rounds=0)
        rises = bool(found[:, 0] @ (scores[:, 1] - scores[:, 0]) > 0)
        if rises != is_upward([found[:, 0]], labels, drift):
            scores = scores.flip(1)
        return (scores[:rows] + prior).float()


@dataclass(frozen=True, eq=False)
class Equations:
    """Linear equations: each one states a group's mean gradient over its rows.

    Attributes:
        groups: weight of each row in each group's mean, axes (groups, rows).
        sizes: number of rows in each group, float64, axes (groups,).
        values: mean gradient of each group, projected on `axes`, float64, axes (groups,
            dimensions).
        axes: the directions on which gradients are projected, float64, axes (width, dimensions).
    """

    groups: sparse.csr_array
    sizes: Tensor
    values: Tensor
    axes: Tensor

    @classmethod
    def of(
        cls, seen: Transcript[RecordedExchange], dimensions: int, columns: Tensor
    ) -> Equations | None:
        """Return the equations of a transcript; None if all gradients are 0.

        Args:
            seen: messages whose gradients are means over groups of rows.
            dimensions: number of directions on which the gradients are projected.
            columns: see `principal`.
        """
        named, members, values, sizes, epochs = [], [], [], [], []
        count = 0
        for one in seen.messages:
            if not bool(one.gradients.any()):
                continue
            of_row, first, size = grouped(one.gradients)
            members.append(of_row + count)
            named.append(one.rows)
            values.append(at_scale(one)[first].double())
            sizes.append(size.double())
            epochs.append(torch.full((len(size),), one.epoch))
            count += len(size)
        if not count:
            return None
        all_sizes, means, when = torch.cat(sizes), torch.cat(values), torch.cat(epochs)
        for epoch in sorted({one.epoch for one in seen.messages}):
            here = when == epoch  # false for every group if the epoch's gradients are all 0
            if not here.any():
                continue
            centre = all_sizes[here] @ means[here] / all_sizes[here].sum()
            means[here] -= centre
        places, rows = torch.cat(members), torch.cat(named)
        shares = (1 / all_sizes[places]).numpy()
        matrix = sparse.csr_array((shares, (places.numpy(), rows.numpy())), (count, seen.rows))
        whole = cls(matrix, all_sizes, means, torch.eye(means.shape[1]).double())
        return whole.along(whole.principal(dimensions, columns))

    @cached_property
    def shared(self) -> sparse.csr_array:
        """Return the weight of the rows that each pair of groups shares, axes (groups, groups).

        Two groups that both consist of the same single row have weight 1. The diagonal is set to 0.
        """
        weighed = sparse.diags_array(self.sizes.sqrt().numpy()) @ self.groups
        found = sparse.csr_array(weighed @ weighed.T)
        found.setdiag(0)
        return found

    def in_common(self, values: Tensor) -> tuple[Tensor, float]:
        """Estimate the covariance of single rows' values, from pairs of groups that share rows.

        Different groups have independent noise. So the covariance between two groups results only
        from the rows that both contain (Haseman and Elston 1972).

        Args:
            values: mean value of each group, axes (groups, dimensions).

        Returns:
            The covariance, axes (dimensions, dimensions), and the standard deviation of the
            estimate of a diagonal entry whose true value is 0.
        """
        weighed = (values * self.sizes.sqrt()[:, None]).numpy()
        size = max(float(self.shared.power(2).sum()), 1e-12)
        found = torch.from_numpy(weighed.T @ (self.shared @ weighed)) / size
        return found, np.sqrt(2 / size) * float(np.square(weighed).mean())

    def principal(self, count: int, columns: Tensor) -> Tensor:
        """Return the directions in which single rows' gradients vary most, axes (width, count).

        Principal components of the groups' values contain noise, which hides these directions; the
        covariance between groups with common rows contains no noise. If groups share too few rows
        for this estimate, the method uses the part of the values that the columns explain, and
        returns its principal components.

        Args:
            count: number of directions.
            columns: columns of the rows, float64, axes (rows, columns), each with mean 0.
        """
        own, error = self.in_common(self.values)
        variances, axes = torch.linalg.eigh(own)
        by_chance = np.sqrt(2 * len(own)) + _CERTAIN  # chance alone, largest of len(own) values
        if float(variances[-count:].min()) < by_chance * error:
            explained = columns @ self.slopes(columns)
            _, axes = torch.linalg.eigh(explained.T @ explained)
        found: Tensor = axes[:, -count:]
        return found

    def along(self, axes: Tensor) -> Equations:
        """Project the values on directions, and scale them to a standard deviation of 1 per row."""
        found = self.values @ axes
        spread = (found * self.sizes.sqrt()[:, None]).std(0).clamp_min(1e-12)
        return replace(self, values=found / spread, axes=self.axes @ axes)

    def slopes(self, columns: Tensor) -> Tensor:
        """Return slopes of a ridge regression of the groups' values on the groups' mean columns.

        Args:
            columns: columns of the rows, float64, axes (rows, columns), each with mean 0.

        Returns:
            Slopes, axes (columns, dimensions).
        """
        root = self.sizes.sqrt()[:, None]
        means = root * torch.from_numpy(self.groups @ columns.numpy())
        return ridge(means, root * self.values)

    def penalty(self, explained: Tensor) -> float:
        """Return a one-row group's noise variance, relative to the variance of residuals.

        If groups share too few rows to estimate the residuals' variance, the method uses an upper
        bound. This bound is at most half of the variance in a one-row group's equation.

        Args:
            explained: the part of each row's values that the columns explain, axes (rows,
                dimensions).
        """
        left = self.values - torch.from_numpy(self.groups @ explained.numpy())
        own, error = self.in_common(left)
        variance = float(own.diagonal().mean())
        whole = float((left.square() * self.sizes[:, None]).mean())
        if variance < _CERTAIN * error:
            variance = max(min(_CERTAIN * error, whole / 2), 1e-12)
        return max(whole / variance - 1, _LEAST_PENALTY)

    def own(self, explained: Tensor, penalty: float) -> Tensor:
        """Estimate each row's residual (the part that columns do not explain) by least squares.

        Args:
            explained: the part of each row's values that the columns explain, axes (rows,
                dimensions).
            penalty: weight of the squared residuals in the penalised least squares.
        """
        sizes, rows = self.sizes.numpy()[:, None], self.groups.shape[1]
        left = sizes * (self.values.numpy() - self.groups @ explained.numpy())
        wanted = self.groups.T @ left

        def product(numbers: np.ndarray) -> np.ndarray:
            over: np.ndarray = self.groups @ numbers.reshape(-1)
            found: np.ndarray = self.groups.T @ (sizes[:, 0] * over)
            return found + penalty * numbers.reshape(-1)

        system = LinearOperator((rows, rows), matvec=product, dtype=np.float64)
        found = [cg(system, column, rtol=1e-4, maxiter=200)[0] for column in wanted.T]
        return torch.from_numpy(np.stack(found, 1))


def grouped(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group the rows that have exactly equal gradients.

    >>> group, first, sizes = grouped(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> bool(group[0] == group[2]), sizes[group].tolist(), first[group].tolist()
    (True, [2, 1, 2], [0, 1, 0])

    Args:
        gradients: gradients of the rows, float32, axes (rows, width).

    Returns:
        The group number of each row, the position of the first row of each group, and each group's
        number of rows; int64.
    """
    bits = gradients.float().contiguous().view(torch.int32).long()
    factors = torch.randint(2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(0))
    digest = (bits * (2 * factors + 1)).sum(1)  # wraps around
    _, group, sizes = torch.unique(digest, return_inverse=True, return_counts=True)
    first = torch.full((len(sizes),), len(group), dtype=torch.int64)
    first.scatter_reduce_(0, group, torch.arange(len(group)), "amin")
    return group, first, sizes
