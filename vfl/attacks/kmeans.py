"""k-means: clusters of the target rows, without a single label."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.fit import key_of
from vfl.attacks.view import View
from vfl.options import require_range


class KMeans(EmbeddingAttack):
    """Clusters the targets into as many clusters as there are classes.

    Source: thesis section 4.4.2; scored by the best matching of clusters and classes (eq 4-26).

    Args:
        starts: independent starts, of which the tightest clustering is kept.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "clusters"

    def __init__(self, starts: int = 10, at: Layer = "cut") -> None:
        require_range("starts", starts, 1)
        super().__init__(at)
        self.starts = starts

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        from sklearn.cluster import KMeans as Clustering

        rows = self.rows(view, view.targets).numpy()
        state = key_of(draw) % 2**32
        model = Clustering(view.classes, n_init=self.starts, random_state=state)
        return torch.from_numpy(model.fit_predict(rows)).long()
