"""Wrappers: attacks that change the evidence and pass it to another attack, of any goal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vfl.attacks import make
from vfl.attacks.base import Attack, through
from vfl.attacks.transcript import SentCuts, Transcript
from vfl.attacks.view import Evidence, Grant, GrantedRows, View, groups_of
from vfl.core.errors import BadOptionError, UserError
from vfl.core.registry import require_choice, require_range
from vfl.models import JointBottom, make_merger


class Wrapper(Attack):
    """An attack that changes the evidence, passes it to another attack, and returns its guess.

    Attributes:
        inner: the other attack, which makes the guess.

    Args:
        of: name of the other attack, or its spec with at most one option, because a comma would end
            the spec.
        uses: grants that the wrapper needs besides the grants of the other attack.
        cuts: whether the wrapper changes cuts, so that the other attack must read cuts.

    Raises:
        SpecError: the other attack does not exist.
        BadOptionError: the other attack reads no cut, but the wrapper changes cuts.
    """

    def __init__(self, of: str, uses: Iterable[Grant], cuts: bool = True) -> None:
        self.inner = make(of)
        if cuts and Grant.CUTS not in self.inner.needs:
            raise BadOptionError(
                "this wrapper changes cuts, but the attack does not use cuts",
                where="option 'of'",
                got=of,
                want="an attack that reads the cut",
            )
        self.goal = self.inner.goal
        self.needs = self.inner.needs | frozenset(uses)

    def check(self, classes: int, width: int) -> None:
        self.inner.check(classes, width)

    def last_report(self) -> dict[str, Any] | None:
        return self.inner.last_report()


Over = Literal["epochs", "queries", "snapshots"]
_NEEDS = {
    "epochs": frozenset({Grant.EPOCHS}),
    "queries": frozenset({Grant.QUERIES}),
    "snapshots": frozenset({Grant.INPUTS, Grant.SNAPSHOTS}),
}


class Averaging(Wrapper):
    """Averages the recorded cuts of each row, and passes the mean cuts to another attack.

    If the noise is independent in each cut, the mean of n cuts has noise of 1/sqrt(n) of the
    standard deviation. Averaging helps a label party that reconstructs a feature party's columns
    from noisy cuts. A feature party adds the noise itself, so it need not remove noise. With
    "snapshots", it averages the outputs of its own bottom from several epochs. The mean of the
    outputs contains less of the details that a single late bottom has memorised.

    Args:
        of: the other attack: a name, or a spec with one option, such as `inversion:steps=200`.
        over: the values to average. "epochs": a row's cuts from the epochs of the training.
            "queries": a row's cuts from repeated queries, each in a batch with other rows, because
            a repeated batch in the same step gets the same noise. "snapshots": outputs for the row
            of the attacker's bottom after each epoch.
        last: number of epochs, queries or snapshots to average, up to the last one; during the last
            epochs a bottom hardly changes. 0 averages all.

    Raises:
        SpecError: the other attack does not exist.
        BadOptionError: an option is out of range, or the other attack reads no cut.
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

    def _means(self, view: View, seen: GrantedRows) -> Tensor:
        if self.over == "snapshots":
            bottoms = view.snapshots[-self.last :]
            return torch.stack([through(one(), seen.inputs).flatten(1) for one in bottoms]).mean(0)
        return mean_cuts(seen.transcript, self.last)


def mean_cuts(transcript: Transcript[SentCuts], last: int = 0) -> Tensor:
    """Return the mean of each row's cuts, axes (rows, width).

    Args:
        transcript: transcript of the rows' messages.
        last: number of epochs or queries to read, up to the last one; 0 reads all.

    Raises:
        UserError: a row has no recorded cut.
    """
    chosen = transcript.last(last)
    if not bool(chosen.times.all()):
        raise UserError(
            "a row has no recorded cut",
            got=f"{int((chosen.times == 0).sum())} of {chosen.rows} rows without one",
            fix="a larger 'last', or record more epochs",
        )
    return chosen.mean(lambda one: one.cuts)


class Pooled(Wrapper):
    """Joins colluding feature parties' data about each row, and passes them to another attack.

    The wrapper concatenates the parties' columns, their cuts, and the outputs of their bottoms. So
    the other attack combines what all these columns show about the labels, as the network does.

    Args:
        of: the other attack: a name, or a spec with one option.

    Raises:
        SpecError: the other attack does not exist.
    """

    def __init__(self, of: str = "logistic") -> None:
        super().__init__(of, {Grant.PARTNERS}, cuts=False)

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        views = [view, *view.partners]
        groups = {
            name: self._together([getattr(one, name) for one in views], name == "leaked")
            for name in groups_of(self.inner.needs)
        }

        concat = make_merger("concat").build([])

        def joint(bottoms: list[nn.Module]) -> JointBottom:
            shapes = [tuple(one.targets.inputs.shape[1:]) for one in views]
            return JointBottom(bottoms, shapes, concat)

        together = view.instead(
            bottom=lambda: joint([one.bottom() for one in views]),
            new_bottom=lambda: joint([one.new_bottom() for one in views]),
            **groups,
        )
        return self.inner.run(together, draw)

    def _together(self, seen: Sequence[GrantedRows], leaked: bool) -> Evidence:
        """Return the parties' joint evidence about rows, as far as the attack needs it."""
        asked = self.inner.needs
        inputs = [one.inputs.flatten(1) for one in seen] if Grant.INPUTS in asked else []
        cuts = [one.cuts for one in seen] if Grant.CUTS in asked else []
        return Evidence(
            torch.cat(inputs, 1) if inputs else None,
            torch.cat(cuts, 1) if cuts else None,
            seen[0].labels if leaked else None,
        )


class Subtraction(Wrapper):
    """Subtracts the partners' cuts from the sum of all cuts; passes the difference to an attack.

    A secure sum discloses the sum of all cuts to the label party. If all feature parties except one
    collude with the label party, the label party thereby computes the cut of the remaining party
    exactly. If fewer parties collude, the label party computes the sum of the remaining parties'
    cuts.

    Args:
        of: the other attack: a name, or a spec with one option.

    Raises:
        SpecError: the other attack does not exist.
        BadOptionError: the other attack reads no cut.
    """

    def __init__(self, of: str = "inversion") -> None:
        super().__init__(of, {Grant.PARTNERS})

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        left = {}
        for name in groups_of(self.inner.needs):
            theirs = [getattr(one, name).cuts for one in view.partners]
            left[name] = getattr(view, name).cuts - torch.stack(theirs).sum(0)
        return self.inner.run(view.with_cuts(left), draw)
