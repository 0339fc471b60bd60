"""Purification of cuts at the label party: replaces cuts that do not fit the other parties' cuts.

For a row of one class, a feature party with a backdoor sends a cut that represents another class.
The other parties' cuts contradict it. Besides the task, both members learn how the parties' cuts
fit together, and use this at inference only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import Cuts, Defense, Loss

_MOST_HIDDEN = 65536
_MOST_DEVIATIONS = 1000
#: More search steps amplify rounding, and a row would depend on others of its batch.
_MOST_STEPS = 100
_RATE = 0.05
_SPAN = 0.99
#: Rounds off the norm of a party's difference, so that a search settles.
_SMOOTH = 1e-2


class JudgingTop(nn.Module):
    """A top that looks at each party's part of the merged cut.

    Args:
        top: reads merged cuts of axes (rows, width).
        width: width of the merged cut, the concatenation of the parties' cuts.
        parties: number of parties.

    Attributes:
        rows_judged: rows of predictions in which parties were judged.
        flags: rows of predictions in which each party was flagged, axes (parties,).
    """

    def __init__(self, top: nn.Module, width: int, parties: int) -> None:
        super().__init__()
        self.top = top
        self.parties = parties
        self.scale = nn.BatchNorm1d(width, affine=False)
        self.rows_judged, self.flags = 0, torch.zeros(parties, dtype=torch.int64)

    def standardised(self, cut: Tensor) -> Tensor:
        """Cuts standardised by the running mean and variance, axes (rows, width)."""
        mean, deviation = self.moments()
        return (cut - mean) / deviation

    def moments(self) -> tuple[Tensor, Tensor]:
        """The running mean and deviation of each unit, axes (width,)."""
        norm = self.scale
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.running_mean, (norm.running_var + norm.eps).sqrt()

    def blocks(self, values: Tensor) -> Tensor:
        """Values of axes (rows, width) by party, axes (rows, parties, units)."""
        return values.reshape(len(values), self.parties, -1)

    def count(self, flagged: Tensor) -> None:
        """Count the flags of predictions, axes (rows, parties)."""
        self.rows_judged += len(flagged)
        self.flags += flagged.sum(dim=0).cpu()


class PurifyingTop(JudgingTop):
    """A top that first passes merged cuts through `purify`, in evaluation mode.

    Args:
        top, width, parties: see `JudgingTop`.
    """

    def __init__(self, top: nn.Module, width: int, parties: int) -> None:
        super().__init__(top, width, parties)
        self.learning: Tensor | None = None

    def forward(self, cut: Tensor) -> Tensor:
        """Return outputs of axes (rows, outputs); in training, store the loss in `learning`."""
        if self.training:
            if len(cut) > 1:
                self.learning = self.learn(self.scale(cut.detach()))
            outputs: Tensor = self.top(cut)
            return outputs
        purified: Tensor = self.top(self.purified(cut))
        return purified

    def purified(self, cut: Tensor) -> Tensor:
        """The cuts that the top reads instead, axes (rows, width)."""
        mean, deviation = self.moments()
        written, changed = self.purify((cut - mean) / deviation)
        return torch.where(changed, written * deviation + mean, cut)

    @abstractmethod
    def learn(self, cut: Tensor) -> Tensor:
        """Return the loss of the defense's networks on a standardised batch, without a graph."""

    @abstractmethod
    def purify(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Repaired cuts, standardised, and whether each replaces the received value.

        Both have axes (rows, width).
        """


class OfParties(Defense):
    """Base of defenses that compare the parties' cuts in the merged one.

    Parties are the concatenated cuts in the merged one, of equal width; the label party counts too
    if it has columns.

    Attributes:
        least: smallest number of parties for which it works.
    """

    side = "label"
    label_free = True

    least: ClassVar[int] = 2

    def __init__(self) -> None:
        self.parties = 0

    def merged(self, widths: Sequence[int]) -> None:
        if len(widths) < self.least or len(set(widths)) > 1:
            raise SpecError(
                f"{type(self).__name__} compares the parties' cuts, which must be concatenated",
                where="defense",
                got=f"a merged cut of widths {', '.join(map(str, widths))}",
                want=f"at least {self.least} cuts of one width, and merge = 'concat'",
            )
        self.parties = len(widths)


class Purification(OfParties):
    """Base of the defenses in this file.

    Args:
        hidden: units of the network that learns how cuts go together.
        weight: weight of its loss, beside the task's.
    """

    def __init__(self, hidden: int, weight: float) -> None:
        super().__init__()
        require_range("hidden", hidden, 1, _MOST_HIDDEN)
        require_range("weight", weight, 0, MOST_WEIGHT)
        self.hidden = hidden
        self.weight = weight
        self._top: PurifyingTop | None = None

    @abstractmethod
    def build(self, top: nn.Module, width: int) -> PurifyingTop:
        """The top with the networks of this member."""

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        assert self.parties, "`merged` comes first"
        self._top = self.build(top, width)
        return self._top

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        if self._top is None or self._top.learning is None:
            return None
        learning, self._top.learning = self._top.learning, None
        return self.weight * learning


class MaskedTop(PurifyingTop):
    """The top of `VFLIP`.

    Args:
        top, width, parties: see `PurifyingTop`.
        hidden: units of the autoencoder.
        deviations: number of deviations above the mean from which an error counts as a vote.
    """

    def __init__(
        self, top: nn.Module, width: int, parties: int, hidden: int, deviations: float
    ) -> None:
        super().__init__(top, width, parties)
        self.network = _perceptron(width, hidden, width)
        self.deviations = deviations
        self.register_buffer("means", torch.zeros(parties, parties))
        self.register_buffer("squares", torch.ones(parties, parties))
        self.register_buffer("batches", torch.zeros(()))

    def learn(self, cut: Tensor) -> Tensor:
        self._count(self.errors(cut).detach())
        rows, one = self.blocks(cut), torch.randint(self.parties, (len(cut),))
        other = (one + torch.randint(1, self.parties, (len(cut),))) % self.parties
        at = torch.arange(self.parties)
        alone, all_but = at == other[:, None], at != one[:, None]
        few = torch.rand(len(cut), 1) < 0.5
        shown = torch.where(few, alone, all_but).to(cut.device)
        written = self.blocks(self.network((rows * shown[..., None]).flatten(1)))
        chosen = torch.arange(len(cut))
        return mse_loss(written[chosen, one], rows[chosen, one])

    def errors(self, cut: Tensor) -> Tensor:
        """Return distances of each party's cut from its prediction by each other party's cut.

        Returns:
            Axes (rows, party that is judged, party that is shown).
        """
        rows, found = self.blocks(cut), []
        with torch.no_grad():
            for shown in range(self.parties):
                alone = torch.zeros_like(rows)
                alone[:, shown] = rows[:, shown]
                written = self.blocks(self.network(alone.flatten(1)))
                found.append((written - rows).norm(dim=2))
        return torch.stack(found, dim=2)

    def flagged(self, cut: Tensor) -> Tensor:
        """Return a mask of cuts that do not fit, bool, axes (rows, parties); `cut` standardised."""
        means, squares = self.get_buffer("means"), self.get_buffer("squares")
        spread = (squares - means.square()).clamp(min=1e-12).sqrt()
        votes = (self.errors(cut) - means) / spread > self.deviations
        votes &= ~torch.eye(self.parties, dtype=torch.bool, device=cut.device)
        return votes.sum(dim=2) > (self.parties - 1) / 2

    def purify(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        flagged = self.flagged(cut)
        self.count(flagged)
        some = flagged.any(dim=1) & ~flagged.all(dim=1)
        written = self.network((self.blocks(cut) * ~flagged[..., None]).flatten(1))
        return written, some[:, None].expand_as(cut)

    def _count(self, errors: Tensor) -> None:
        """Running means of errors and of their squares."""
        means, squares = self.get_buffer("means"), self.get_buffer("squares")
        batches = self.get_buffer("batches")
        batches += 1
        share = max(1 - _SPAN, 1 / float(batches))
        means.lerp_(errors.mean(dim=0), share)
        squares.lerp_(errors.square().mean(dim=0), share)


def flagged_share(model: nn.Module, party: int) -> float | None:
    """Return the share of the rows of all predictions in which a party's cut was flagged.

    Args:
        model: model with the top of a defense that judges parties.
        party: the party's position in merge order, from 0.

    Returns:
        None if no defense judges parties, or nothing was predicted.
    """
    judges = (one for one in model.modules() if isinstance(one, JudgingTop) and one.rows_judged)
    return next((int(one.flags[party]) / one.rows_judged for one in judges), None)


class VFLIP(Purification):
    """Each other party's cut judges a cut; if a majority rejects it, the label party replaces it.

    In training, a masked autoencoder learns to predict one party's cut from all others or from one
    other. At inference each party's cut is predicted from each other party's cut alone; an error of
    more than `deviations` above the mean in training is a vote against the party. If more than half
    of the others vote against a party, the autoencoder replaces the whole merged cut by a
    prediction from the remaining parties. Other rows, and rows without any party left, are read as
    they came. It needs three parties: With only two parties, each would vote against the other.

    Source: Cho et al. 2024, "VFLIP: a backdoor defense for vertical federated learning via
    identification and purification" (ESORICS), sections on the masked autoencoder ("N-1 to 1" and
    "1 to 1"), identification and purification. The autoencoder trains together with the task, not
    afterwards.

    Args:
        deviations: above the mean error at which a cut is voted against (the paper's rho).
        hidden: units of the autoencoder.
        weight: weight of its loss, beside the task's.

    >>> defense = VFLIP()
    >>> defense.merged([2, 2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=6).eval()
    >>> top(torch.zeros(2, 6)).shape
    torch.Size([2, 6])
    """

    least = 3

    def __init__(
        self,
        deviations: float = 2.0,
        hidden: int = 128,
        weight: float = 1.0,
    ) -> None:
        super().__init__(hidden, weight)
        require_range("deviations", deviations, 0, _MOST_DEVIATIONS)
        self.deviations = deviations

    def build(self, top: nn.Module, width: int) -> PurifyingTop:
        return MaskedTop(top, width, self.parties, self.hidden, self.deviations)


class ManifoldTop(PurifyingTop):
    """The top of `CoPur`.

    Args:
        top, width, parties: see `PurifyingTop`.
        hidden: units of encoder and decoder.
        code: numbers of a code.
        steps: steps of the search for a code.
    """

    def __init__(
        self, top: nn.Module, width: int, parties: int, hidden: int, code: int, steps: int
    ) -> None:
        super().__init__(top, width, parties)
        self.encoder = _perceptron(width, hidden, code)
        self.decoder = _perceptron(code, hidden, width)
        self.steps = steps

    def learn(self, cut: Tensor) -> Tensor:
        written: Tensor = self.decoder(self.encoder(cut))
        return mse_loss(written, cut)

    def purify(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Search in double precision, because a search amplifies rounding errors."""
        there = cut.double()
        code = _double(self.encoder, there)
        first, second = torch.zeros_like(code), torch.zeros_like(code)
        for step in range(1, self.steps + 1):
            slope = self._slope(code, there)
            first = 0.9 * first + 0.1 * slope
            second = 0.999 * second + 0.001 * slope.square()
            size = (second / (1 - 0.999**step)).sqrt() + 1e-8
            rate = _RATE * (1 - step / (self.steps + 1))
            code = code - rate * first / (1 - 0.9**step) / size
        return _double(self.decoder, code).float(), torch.ones_like(cut, dtype=torch.bool)

    def _slope(self, code: Tensor, cut: Tensor) -> Tensor:
        """Gradient of the sum, over parties, of distances between the decoded code and the cut."""
        with torch.enable_grad():
            leaf = code.detach().requires_grad_()
            differences = self.blocks(_double(self.decoder, leaf) - cut.detach())
            distances = (differences.square().sum(dim=2) + _SMOOTH).sqrt()
            (slope,) = torch.autograd.grad(distances.sum(), leaf)
        return slope


def _double(network: nn.Module, values: Tensor) -> Tensor:
    """Return a network's outputs in double precision; its weights get no gradient."""
    weights = {name: weight.detach().double() for name, weight in network.named_parameters()}
    outputs: Tensor = functional_call(network, weights, (values,))
    return outputs


class CoPur(Purification):
    """The top reads the nearest merged cut that parties could have sent together.

    An autoencoder learns the distribution of merged cuts. At inference a search finds the code
    whose decoded cut has the least sum, over parties, of distances to the cuts that came: cut is
    nearest; a sum of norms instead of squares allows a few parties to be far off (block sparsity).
    Every row is read as decoded, so the autoencoder's own error costs accuracy.

    Source: Liu, Xie, Koyejo, Li 2022, "CoPur: certifiably robust collaborative inference via
    feature purification" (NeurIPS): the l2,1 decomposition with a nonlinear manifold, without its
    constraint that the code's part is exact. The top is trained on unchanged cuts; no certificate
    is computed.

    Args:
        code: numbers of a code.
        steps: Adam steps of the search for a code; at most 100.
        hidden: units of encoder and decoder.
        weight: weight of the autoencoder's loss relative to the task's loss.

    >>> defense = CoPur()
    >>> defense.merged([2, 2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=6).eval()
    >>> top(torch.zeros(2, 6)).shape
    torch.Size([2, 6])
    """

    def __init__(
        self,
        code: int = 8,
        steps: int = 100,
        hidden: int = 128,
        weight: float = 1.0,
    ) -> None:
        super().__init__(hidden, weight)
        require_range("code", code, 1, _MOST_HIDDEN)
        require_range("steps", steps, 0, _MOST_STEPS)
        self.code = code
        self.steps = steps

    def build(self, top: nn.Module, width: int) -> PurifyingTop:
        return ManifoldTop(top, width, self.parties, self.hidden, self.code, self.steps)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers: list[Any] = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, outputs))
