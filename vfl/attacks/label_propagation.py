"""Label propagation: a few labels spread over the graph of nearest rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import cg
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.graph import neighbour_graph
from vfl.attacks.scaling import Scaler, scale_by
from vfl.attacks.threat import Grant
from vfl.attacks.view import Seen, View
from vfl.options import require_choice, require_range


class LabelPropagation(EmbeddingAttack):
    """Spreads the leaked labels over a graph of leaked, unlabelled and target rows.

    It needs no classifier, only that neighbours share a class: with ``at=inputs`` it is the
    strongest reference without the bottom.

    Source: Zhou et al. 2004 (local and global consistency), its closed form.

    Args:
        neighbours: of each row in the graph.
        spread: how much a row believes its neighbours, 0 to below 1 (alpha).
        scaler: see `scale_by`; fitted on the unlabelled rows.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(
        self,
        neighbours: int = 10,
        spread: float = 0.99,
        scaler: Scaler = "none",
        at: Layer = "cut",
    ) -> None:
        require_range("neighbours", neighbours, 1)
        require_range("spread", spread, 0, 0.9999)
        super().__init__(at)
        require_choice("scaler", scaler, get_args(Scaler))
        self.neighbours = neighbours
        self.spread = spread
        self.scaler: Scaler = scaler

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        read = self.reader(view)
        known, further, targets = map(read, (view.leaked, view.unlabelled, view.targets))
        groups = [known, targets] if torch.equal(further, targets) else [known, further, targets]
        labels, classes = view.leaked.labels, view.classes
        found = propagate(torch.cat(groups), labels, classes, self.neighbours, self.spread)
        return found[-len(targets) :]

    def reader(self, view: View) -> Callable[[Seen], Tensor]:
        """What tells the features of a group of rows among which neighbours are looked for."""
        scale = scale_by(self.scaler, self.rows(view, view.unlabelled))
        return lambda seen: scale(self.rows(view, seen))


def propagate(rows: Tensor, labels: Tensor, classes: int, neighbours: int, spread: float) -> Tensor:
    """(I - spread S)^-1 Y over the graph S of all rows; float32, axes (rows, classes).

    Args:
        rows: axes (rows, features); those with a known label first.
        labels: of the first rows, int64.
        classes: how many there are.
        neighbours: of each row in the graph.
        spread: 0 to below 1.
    """
    graph = neighbour_graph(rows, neighbours, len(labels))
    system = sparse.eye_array(len(rows)) - spread * graph
    start = np.zeros((len(rows), classes))
    start[: len(labels)] = one_hot(labels, classes).numpy()
    found = [cg(system, column, rtol=1e-6, maxiter=500)[0] for column in start.T]
    return torch.from_numpy(np.stack(found, axis=1)).float()
