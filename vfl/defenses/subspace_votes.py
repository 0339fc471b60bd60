"""A filter of poisoned rows: views of a party's cut vote on whether it fits the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vfl.core.registry import require_range
from vfl.defenses.purification import JudgingTop, OfParties

_MOST_VIEWS = 255
_MOST_ROWS = 2**16
_MOST_DEVIATIONS = 1000
#: The fewest rows with an answer from which others with that answer are judged.
_LEAST_ROWS = 32
#: Median absolute deviation of a normal distribution, in standard deviations.
_OF_MEDIAN = 1.4826


class VotingTop(JudgingTop):
    """The top of `SubspaceVotes`.

    Args:
        top, width, parties: see `JudgingTop`.
        views: number of random subspaces.
        rows: number of latest training rows to compare with.
        deviations: robust deviations above the median distance from which a view votes.
    """

    def __init__(
        self, top: nn.Module, width: int, parties: int, views: int, rows: int, deviations: float
    ) -> None:
        super().__init__(top, width, parties)
        self.deviations = deviations
        units = width // parties
        bases = [nn.init.orthogonal_(torch.empty(units, max(1, units // 2))) for _ in range(views)]
        self.register_buffer("views", torch.stack(bases))
        for name in ("seen", "known"):  # the latest rows, and those that others are compared with
            self.register_buffer(name, torch.zeros(rows, width))
            self.register_buffer(f"answers_of_{name}", torch.full((rows,), -1))
        self.register_buffer("count_seen", torch.zeros((), dtype=torch.int64))
        self._limits: dict[tuple[int, torch.device], tuple[Tensor, Tensor] | None] = {}

    def forward(self, cut: Tensor) -> Tensor:
        """Outputs of axes (rows, outputs); flagged rows of a training batch teach nothing."""
        outputs: Tensor = self.top(cut)
        if not self.training:
            return self._answered(cut, outputs)
        if len(cut) < 2:
            return outputs
        self.scale(cut.detach())  # which updates mean and variance
        values, answers = self.standardised(cut.detach()), _answers(outputs)
        flagged = self.flagged(values, answers).any(1)
        self._remember(values, answers)
        return torch.where(flagged[:, None], outputs.detach(), outputs)

    def flagged(self, values: Tensor, answers: Tensor) -> Tensor:
        """Return a mask of cuts that do not fit an answer, bool, axes (rows, parties).

        Args:
            values: standardised cuts, axes (rows, width).
            answers: class of each row, axes (rows,).
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
        """Return the centre of an answer's cuts, and the largest distance that is no vote.

        Axes (parties, views, units of a view), and (parties, views); None for too few rows.
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
        """Projections of each party's cut, axes (rows, parties, views, units of a view)."""
        return torch.einsum("rpu,vuk->rpvk", self.blocks(values), self.get_buffer("views"))

    def _remember(self, values: Tensor, answers: Tensor) -> None:
        """Put rows in the place of the oldest ones; compare with all of them twice a round."""
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
        """Outputs with the mean cut of a flagged party in the place of its own."""
        flagged = self.flagged(self.standardised(cut), _answers(outputs))
        self.count(flagged)
        some = flagged.any(1) & ~flagged.all(1)
        if not some.any():
            return outputs
        mean = self.moments()[0].expand_as(cut)
        written = torch.where(flagged[..., None], self.blocks(mean), self.blocks(cut)).flatten(1)
        return torch.where(some[:, None], self.top(written), outputs)


def _answers(outputs: Tensor) -> Tensor:
    """The class of each row, of a single output by its sign; axes (rows,)."""
    single = outputs.shape[1] == 1
    return (outputs[:, 0] > 0).long() if single else outputs.argmax(1)


class SubspaceVotes(OfParties):
    """A party's cut is judged by the cuts of rows with the same answer, in random subspaces.

    Each view projects the party's standardised cut on a random subspace of half its units. It votes
    against a cut that is far from the median of the latest training rows with the same answer:
    `deviations` robust deviations above their median distance. These rows are taken anew when half
    of them have changed. Where more than half of the views vote against a party, a training row
    teaches nothing, and a prediction reads the mean cut in that party's place. Rows are judged from
    the 32nd row of an answer on; rows in which all parties are flagged are answered as they came.

    After the abstract of SecureSplit (Dou et al. 2026, "SecureSplit: mitigating backdoor attacks in
    split learning", arXiv 2601.14054): a transformation of dimensions that sets poisoned rows
    apart, and a filter with a threshold that adapts and a majority of votes. The paper's text could
    not be read. A summary of it names UMAP as the transformation; UMAP places the rows of a batch
    together, and a prediction here must not depend on other rows. Ours are: random subspaces,
    medians and deviations, what the votes are about, and what replaces a cut.

    Args:
        views: number of random subspaces, which vote.
        rows: number of latest training rows to compare with.
        deviations: robust deviations above the median distance from which a view votes.

    >>> defense = SubspaceVotes()
    >>> defense.merged([2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=4).eval()
    >>> top(torch.zeros(2, 4)).shape
    torch.Size([2, 4])

    Raises:
        BadOptionError: an option out of range.
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
