"""Averaging: a row's cuts of several epochs or queries hold less noise together than one does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vfl.attacks import make
from vfl.attacks.base import Attack
from vfl.attacks.threat import Grant
from vfl.attacks.view import Evidence, Heard, View
from vfl.errors import UserError
from vfl.options import require_range


class Averaging(Attack):
    """Hands the means of each target's recorded cuts to another attack that reads the cut.

    Independent noise on n cuts of a row is left with 1/sqrt(n) of its deviation. Whoever receives
    cuts gains by it: a label party that looks for a feature party's inputs. The feature party that
    added the noise itself reads its bottom without it (``at=bottom``).

    Args:
        of: the other attack's name, with its own defaults.
        last: the means of so many last epochs, in which a bottom hardly moves any more; 0 takes
            all of them.

    Raises:
        SpecError: no such attack.
        BadOptionError: an option out of range.
    """

    def __init__(self, of: str = "kmeans", last: int = 0) -> None:
        require_range("last", last, 0)
        self._attack = make(of)
        self.goal = self._attack.goal
        self.needs = self._attack.needs | {Grant.GRADIENTS, Grant.CUTS}
        self.last = last

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        cuts = mean_cuts(view.heard, view.targets.rows, self.last)
        return self._attack.run(view.instead(targets=Evidence(cuts=cuts)), draw)


def mean_cuts(heard: Iterable[Heard], rows: int, last: int = 0) -> Tensor:
    """The mean of each row's recorded cuts, axes (rows, width).

    Args:
        heard: the exchanges; they name rows 0..rows-1.
        rows: how many there are.
        last: of so many last epochs; 0 takes all.

    Raises:
        UserError: a row has no cut in these epochs.
    """
    exchanges = list(heard)
    newest = max((one.epoch for one in exchanges), default=0)
    chosen = [one for one in exchanges if last == 0 or one.epoch > newest - last]
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *(one.rows for one in chosen)])
    counts = positions.bincount(minlength=rows)
    if not bool((counts > 0).all()):
        raise UserError(
            "a target has no recorded cut",
            got=f"{int((counts == 0).sum())} of {rows} rows without one",
            fix="record more epochs, or attack the rows that were trained on",
        )
    cuts = torch.cat([one.cuts for one in chosen])
    return torch.zeros(rows, cuts.shape[1]).index_add_(0, positions, cuts) / counts[:, None]
