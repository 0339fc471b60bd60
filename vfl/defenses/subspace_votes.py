"""A filter of poisoned rows: random projections vote on whether a cut fits the predicted class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vfl.core.registry import require_range
from vfl.defenses.purification import JudgingTop, OfParties

_MOST_VIEWS = 255
_MOST_ROWS = 2**16
_MOST_DEVIATIONS = 1000
#: A row is checked only if at least this number of training rows with the same answer (predicted
#: class) is known.
_LEAST_ROWS = 32
#: Factor from a median absolute deviation to the standard deviation of a normal distribution.
_OF_MEDIAN = 1.4826


class VotingTop(JudgingTop):
    """The top of `SubspaceVotes`.

    Args:
        top, width, parties: see `JudgingTop`.
        views: number of random subspaces (views), on which cuts are projected.
        rows: number of latest training rows whose cuts a cut is compared with.
        deviations: a view votes against a cut whose distance exceeds the median distance by more
            than this number of robust standard deviations.
    """

    def __init__(
        self, top: nn.Module, width: int, parties: int, views: int, rows: int, deviations: float
    ) -> None:
        super().__init__(top, width, parties)
        self.deviations = deviations
        units = width // parties
        bases = [nn.init.orthogonal_(torch.empty(units, max(1, units // 2))) for _ in range(views)]
        self.register_buffer("views", torch.stack(bases))
        for name in ("seen", "known"):  # latest rows, and rows that cuts are compared with
            self.register_buffer(name, torch.zeros(rows, width))
            self.register_buffer(f"answers_of_{name}", torch.full((rows,), -1))
        self.register_buffer("count_seen", torch.zeros((), dtype=torch.int64))
        self._limits: dict[tuple[int, torch.device], tuple[Tensor, Tensor] | None] = {}

    def forward(self, cut: Tensor) -> Tensor:
        """Return outputs, axes (rows, outputs); flagged rows in training get no gradient."""
        outputs: Tensor = self.top(cut)
        if not self.training:
            return self._answered(cut, outputs)
        if len(cut) < 2:
            return outputs
        self.scale(cut.detach())  # updates the running mean and variance of the cuts
        values, answers = self.standardised(cut.detach()), _answers(outputs)
        flagged = self.flagged(values, answers).any(1)
        self._remember(values, answers)
        return torch.where(flagged[:, None], outputs.detach(), outputs)

    def flagged(self, values: Tensor, answers: Tensor) -> Tensor:
        """Return which parties' cuts do not fit a row's answer, as bools, axes (rows, parties).

        Args:
            values: standardised cuts, axes (rows, width).
            answers: predicted class of each row, axes (rows,).
        """
        found = torch.zeros(len(values), self.parties, dtype=torch.bool, device=values.device)
        for answer in torch.unique(answers).tolist():
            key = answer, values.device
            if key not in self._limits:
                self._limits[key] = self._limit(answer)
            if (limit := self._limits[key]) is None:
                continue
            (centre, most), mine = limit, answers == answer
            votes = ((self._viewed(values[mine]) - centre).norm(dim=3) > most).sum(2)
            found[mine] = votes > len(self.get_buffer("views")) / 2
        return found

    def _limit(self, answer: int) -> tuple[Tensor, Tensor] | None:
        """Return the median cut of an answer's rows, and the largest distance without a vote.

        The median cut has axes (parties, views, units of a view), the distance (parties, views).
        The result is None if too few rows have this answer.
        """
        usual = self.get_buffer("known")[self.get_buffer("answers_of_known") == answer]
        if len(usual) < _LEAST_ROWS:
            return None
        known = self._viewed(usual)
        centre = known.median(0).values
        away = (known - centre).norm(dim=3)
        middle = away.median(0).values
        spread = _OF_MEDIAN * (away - middle).abs().median(0).values
        return centre, middle + self.deviations * spread

    def _viewed(self, values: Tensor) -> Tensor:
        """Project each party's cut on all views; axes (rows, parties, views, units of a view)."""
        return torch.einsum("rpu,vuk->rpvk", self.blocks(values), self.get_buffer("views"))

    def _remember(self, values: Tensor, answers: Tensor) -> None:
        """Store rows over the oldest ones; copy them for comparison when half have changed."""
        seen, count = self.get_buffer("seen"), self.get_buffer("count_seen")
        places = (count + torch.arange(len(values), device=count.device)) % len(seen)
        seen[places] = values
        self.get_buffer("answers_of_seen")[places] = answers
        before, half = int(count), len(seen) // 2
        count += len(values)
        if before // half < int(count) // half:
            for name in ("", "answers_of_"):
                self.get_buffer(f"{name}known").copy_(self.get_buffer(f"{name}seen"))
            self._limits.clear()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self._limits.clear()

    def _answered(self, cut: Tensor, outputs: Tensor) -> Tensor:
        """Return outputs for cuts in which the mean cut replaces each flagged party's cut."""
        flagged = self.flagged(self.standardised(cut), _answers(outputs))
        self.count(flagged)
        some = flagged.any(1) & ~flagged.all(1)
        if not some.any():
            return outputs
        mean = self.moments()[0].expand_as(cut)
        written = torch.where(flagged[..., None], self.blocks(mean), self.blocks(cut)).flatten(1)
        return torch.where(some[:, None], self.top(written), outputs)


def _answers(outputs: Tensor) -> Tensor:
    """Return each row's predicted class, axes (rows,); the sign decides for a single output."""
    single = outputs.shape[1] == 1
    return (outputs[:, 0] > 0).long() if single else outputs.argmax(1)


class SubspaceVotes(OfParties):
    """Compares a party's cut with the cuts of rows that have the same answer (predicted class).

    A view is a random subspace, half as wide as a party's cut. The class projects the party's
    standardised cut on each view. A view compares the projected cut with the median cut of the
    latest training rows that have the same answer. A view votes against the cut if its distance
    from the median exceeds the rows' median distance by more than `deviations` robust standard
    deviations. When half of the latest training rows have changed, the medians are computed again.
    A party is flagged in a row if more than half of the views vote against it. A flagged training
    row gets no gradient. In a prediction, the top reads the mean cut in place of the flagged
    party's cut. Rows with an answer are checked only if the medians come from at least 32 training
    rows with the same answer. If all parties of a row are flagged, the top reads the row unchanged.

    The design follows the abstract of SecureSplit (Dou et al. 2026, "SecureSplit: mitigating
    backdoor attacks in split learning", arXiv 2601.14054). The abstract describes a transformation
    of the cut's dimensions that separates poisoned rows, and a filter with an adaptive threshold
    and majority votes. We could not read the paper's full text. A summary of the paper names UMAP
    as the transformation. UMAP embeds the rows of a batch jointly, but here a prediction must not
    depend on other rows. So these parts are our own: random subspaces, medians and deviations, the
    question that the views vote on, and the cut that replaces a flagged cut.

    Args:
        views: number of random subspaces (views); each has one vote.
        rows: number of latest training rows whose cuts a cut is compared with.
        deviations: a view votes against a cut whose distance exceeds the median distance by more
            than this number of robust standard deviations.

    >>> defense = SubspaceVotes()
    >>> defense.merged([2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=4).eval()
    >>> top(torch.zeros(2, 4)).shape
    torch.Size([2, 4])

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, views: int = 9, rows: int = 1024, deviations: float = 4.0) -> None:
        super().__init__()
        require_range("views", views, 1, _MOST_VIEWS)
        require_range("rows", rows, _LEAST_ROWS, _MOST_ROWS)
        require_range("deviations", deviations, 0, _MOST_DEVIATIONS)
        self.views = views
        self.rows = rows
        self.deviations = deviations

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        assert self.parties, "`merged` comes first"
        return VotingTop(top, width, self.parties, self.views, self.rows, self.deviations)
