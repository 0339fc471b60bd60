"""A mixture of Gaussians: clusters of any ellipse, without a single label."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.fit import key_of
from vfl.attacks.view import View
from vfl.defenses.components import principal
from vfl.options import require_choice, require_range

Covariance = Literal["full", "tied", "diag", "spherical"]


class GaussianMixture(EmbeddingAttack):
    """Fits as many Gaussians as there are classes to the targets; each row joins the likeliest.

    Source: Dempster et al. 1977 (finite mixtures); scored as k-means is.

    Args:
        covariance: "tied": one for all; "full": each its own; "diag", "spherical": each its own,
            without correlations.
        starts: independent starts, of which the likeliest is kept.
        columns: rows of more columns are read by so many of their principal components; a step
            takes columns^2 for each row and class.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "clusters"

    def __init__(
        self,
        covariance: Covariance = "tied",
        starts: int = 5,
        columns: int = 64,
        at: Layer = "cut",
    ) -> None:
        require_choice("covariance", covariance, get_args(Covariance))
        require_range("starts", starts, 1)
        require_range("columns", columns, 1)
        super().__init__(at)
        self.covariance: Covariance = covariance
        self.starts = starts
        self.columns = columns

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture as Mixture

        rows = _strongest(self.rows(view, view.targets).double(), self.columns)
        spread = float(rows.var(0).mean().clamp_min(1e-12))
        model = Mixture(
            view.classes,
            covariance_type=self.covariance,
            n_init=self.starts,
            reg_covar=1e-3 * spread,  # flat directions and twins must not make a Gaussian a spike
            random_state=key_of(draw) % 2**32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the best of its steps is used
            return torch.from_numpy(model.fit_predict(rows.numpy())).long()


def _strongest(rows: Tensor, columns: int) -> Tensor:
    """The first principal components of rows that have more columns; float64."""
    if rows.shape[1] <= columns:
        return rows
    centred, _, directions = principal(rows)
    projected: Tensor = centred @ directions[:, :columns]
    return projected
