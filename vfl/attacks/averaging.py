"""Averaging: a row's cuts of several epochs or queries hold less noise together than one does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from vfl.attacks.evidence import Sent
from vfl.attacks.features import through
from vfl.attacks.threat import Grant
from vfl.attacks.view import Seen, View, groups_of
from vfl.attacks.wrapper import Wrapper
from vfl.errors import UserError
from vfl.options import require_choice, require_range

Over = Literal["epochs", "queries", "snapshots"]
_NEEDS = {
    "epochs": frozenset({Grant.EPOCHS}),
    "queries": frozenset({Grant.QUERIES}),
    "snapshots": frozenset({Grant.INPUTS, Grant.SNAPSHOTS}),
}


class Averaging(Wrapper):
    """Hands the mean of each row's cuts to another attack that reads the cut.

    Independent noise on n cuts of a row is left with 1/sqrt(n) of its deviation. Whoever receives
    cuts gains by it: a label party that looks for a feature party's columns. The feature party that
    added the noise itself averages what its bottoms of several epochs make of a row, so that what
    one of them learned by heart late is weighed down by the others.

    Args:
        of: the other attack, by name or as a spec of one option, such as `inversion:steps=200`.
        over: "epochs" of the training; "queries" that are repeated in other company, for the same
            rows asked in the same step have the same noise; "snapshots" of one's own bottom.
        last: the means of so many last ones, in which a bottom hardly moves any more; 0 takes all
            of them.

    Raises:
        SpecError: no such attack.
        BadOptionError: an option out of range, or an attack that reads no cut.
    """

    def __init__(self, of: str = "kmeans", over: Over = "epochs", last: int = 0) -> None:
        require_choice("over", over, get_args(Over))
        require_range("last", last, 0)
        super().__init__(of, _NEEDS[over])
        self.over = over
        self.last = last

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        groups = {name: getattr(view, name) for name in groups_of(self.inner.needs)}
        means = {name: self._means(view, seen) for name, seen in groups.items()}
        return self.inner.run(view.with_cuts(means), draw)

    def _means(self, view: View, seen: Seen) -> Tensor:
        if self.over == "snapshots":
            bottoms = view.snapshots[-self.last :]
            return torch.stack([through(one(), seen.inputs).flatten(1) for one in bottoms]).mean(0)
        return mean_cuts(seen.sent, seen.rows, self.last)


def mean_cuts(sent: Iterable[Sent], rows: int, last: int = 0) -> Tensor:
    """The mean of each row's cuts, axes (rows, width).

    Args:
        sent: the messages; they name rows 0..rows-1.
        rows: how many there are.
        last: of so many last epochs or queries; 0 takes all.

    Raises:
        UserError: a row has no cut in these.
    """
    messages = list(sent)
    newest = max((one.epoch for one in messages), default=0)
    chosen = [one for one in messages if last == 0 or one.epoch > newest - last]
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *(one.rows for one in chosen)])
    counts = positions.bincount(minlength=rows)
    if not bool((counts > 0).all()):
        raise UserError(
            "a row has no recorded cut",
            got=f"{int((counts == 0).sum())} of {rows} rows without one",
            fix="a larger 'last', or record more epochs",
        )
    cuts = torch.cat([one.cuts for one in chosen])
    return torch.zeros(rows, cuts.shape[1]).index_add_(0, positions, cuts) / counts[:, None]
