"""Purification of cuts at the label party: repairs a cut that does not fit other parties' cuts.

A feature party with a backdoor can send, for a row of one class, a cut that looks like a cut of
another class. Then the other parties' cuts of this row do not fit this cut. During training, both
defenses of this file (`VFLIP`, `CoPur`) learn how the parties' cuts fit together. In training, cuts
reach the top unchanged; both defenses repair cuts only in predictions.
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
#: Largest number of steps in the search for a code. More steps would amplify rounding errors, until
#: a row's result depended on the other rows of its batch.
_MOST_STEPS = 100
_RATE = 0.05
_SPAN = 0.99
#: Constant added inside the square root of each party's distance; it makes the distance
#: differentiable at 0, so that the search converges.
_SMOOTH = 1e-2


class JudgingTop(nn.Module):
    """A top that checks, in a merged cut, each party's part separately.

    Args:
        top: the original top, which reads merged cuts of axes (rows, width).
        width: width of the merged cut, the concatenation of the parties' cuts.
        parties: number of parties.

    Attributes:
        rows_judged: number of predicted rows whose cuts the defense has checked.
        flags: for each party, the number of predicted rows in which the defense flagged the party's
            cut, axes (parties,).
    """

    def __init__(self, top: nn.Module, width: int, parties: int) -> None:
        super().__init__()
        self.top = top
        self.parties = parties
        self.scale = nn.BatchNorm1d(width, affine=False)
        self.rows_judged, self.flags = 0, torch.zeros(parties, dtype=torch.int64)

    def standardised(self, cut: Tensor) -> Tensor:
        """Standardise a merged cut by its units' running mean and variance, axes (rows, width)."""
        mean, deviation = self.moments()
        return (cut - mean) / deviation

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the running mean and standard deviation of each unit, axes (width,)."""
        norm = self.scale
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.running_mean, (norm.running_var + norm.eps).sqrt()

    def blocks(self, values: Tensor) -> Tensor:
        """Split values of axes (rows, width) by party, to axes (rows, parties, units)."""
        return values.reshape(len(values), self.parties, -1)

    def count(self, flagged: Tensor) -> None:
        """Add the flags of predicted rows, axes (rows, parties), to the counters."""
        self.rows_judged += len(flagged)
        self.flags += flagged.sum(dim=0).cpu()


class PurifyingTop(JudgingTop):
    """A top that passes merged cuts through `purify` in predictions, but not in training.

    Args:
        top, width, parties: see `JudgingTop`.
    """

    def __init__(self, top: nn.Module, width: int, parties: int) -> None:
        super().__init__(top, width, parties)
        self.learning: Tensor | None = None

    def forward(self, cut: Tensor) -> Tensor:
        """Return outputs, axes (rows, outputs); in training, store the loss as `learning`."""
        if self.training:
            if len(cut) > 1:
                self.learning = self.learn(self.scale(cut.detach()))
            outputs: Tensor = self.top(cut)
            return outputs
        purified: Tensor = self.top(self.purified(cut))
        return purified

    def purified(self, cut: Tensor) -> Tensor:
        """Return the repaired cuts that the top reads in a prediction, axes (rows, width)."""
        mean, deviation = self.moments()
        written, changed = self.purify((cut - mean) / deviation)
        return torch.where(changed, written * deviation + mean, cut)

    @abstractmethod
    def learn(self, cut: Tensor) -> Tensor:
        """Return the loss of the defense's networks for a standardised cut without a graph."""

    @abstractmethod
    def purify(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Return repaired cuts (standardised), and a mask of the values to take from them.

        The cuts and the mask have axes (rows, width).
        """


class OfParties(Defense):
    """Base class of defenses that compare the parties' cuts with each other.

    The merged cut must be a concatenation of the parties' cuts with equal widths. If the label
    party has columns, it counts as one of these parties.

    Attributes:
        least: smallest number of parties with which the defense works.
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
    """Base class of `VFLIP` and `CoPur`.

    Args:
        hidden: hidden units of the network that learns how the parties' cuts fit together.
        weight: weight of this network's loss, relative to the task loss.
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
        """Return the defense's top, which contains `top` and the defense's networks."""

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
        hidden: hidden units of the autoencoder.
        deviations: number of standard deviations above the mean error; an error above it is a vote
            against the predicted party.
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
        """Predict each party's cut from every single other party's cut, and return the errors.

        Returns:
            Euclidean distances between predicted and received cuts, axes (rows, predicted party,
            party whose cut is given).
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
        """Return which parties' cuts do not fit the others, as bools, axes (rows, parties)."""
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
        """Update the running means of the errors and of the squared errors."""
        means, squares = self.get_buffer("means"), self.get_buffer("squares")
        batches = self.get_buffer("batches")
        batches += 1
        share = max(1 - _SPAN, 1 / float(batches))
        means.lerp_(errors.mean(dim=0), share)
        squares.lerp_(errors.square().mean(dim=0), share)


def flagged_share(model: nn.Module, party: int) -> float | None:
    """Return the share of checked predicted rows in which a party's cut was flagged.

    Args:
        model: model that may contain the top of a defense that flags cuts.
        party: the party's position, from 0, in the order in which cuts are merged.

    Returns:
        The share; None if the model has no such defense, or has predicted no rows.
    """
    judges = (one for one in model.modules() if isinstance(one, JudgingTop) and one.rows_judged)
    return next((int(one.flags[party]) / one.rows_judged for one in judges), None)


class VFLIP(Purification):
    """The label party checks each cut against the other parties' cuts, and repairs rejected cuts.

    In training, a masked autoencoder learns to predict one party's cut from all other parties'
    cuts, or from the cut of one other party. In predictions, the autoencoder predicts each party's
    cut from each single other party's cut. If this prediction's error exceeds its mean in training
    by more than `deviations` standard deviations, the party whose cut was given votes against the
    party whose cut was predicted. If more than half of the other parties vote against a party, this
    party is rejected in the row. Then the autoencoder predicts the row's whole merged cut from the
    parties that were not rejected. Rows without rejected parties stay unchanged, and so do rows in
    which all parties were rejected. The defense needs three parties: with only two parties, each
    would vote against the other.

    Source: Cho et al. 2024, "VFLIP: a backdoor defense for vertical federated learning via
    identification and purification" (ESORICS), sections on the masked autoencoder ("N-1 to 1" and
    "1 to 1"), identification and purification. In vfl, the autoencoder trains together with the
    task's network; in the paper, it trains afterwards.

    Args:
        deviations: number of standard deviations by which an error must exceed the mean error to
            count as a vote (the paper's rho).
        hidden: hidden units of the autoencoder.
        weight: weight of the autoencoder's loss, relative to the task loss.

    >>> defense = VFLIP()
    >>> defense.merged([2, 2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=6).eval()
    >>> top(torch.zeros(2, 6)).shape
    torch.Size([2, 6])

    Raises:
        BadOptionError: an option is out of range.
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
        hidden: hidden units of the encoder and of the decoder.
        code: width of a code.
        steps: number of steps in the search for a code.
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
        """Search for the nearest code, in double precision as the search amplifies rounding."""
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
        """Return the gradient, with respect to the code, of the sum of the parties' distances."""
        with torch.enable_grad():
            leaf = code.detach().requires_grad_()
            differences = self.blocks(_double(self.decoder, leaf) - cut.detach())
            distances = (differences.square().sum(dim=2) + _SMOOTH).sqrt()
            (slope,) = torch.autograd.grad(distances.sum(), leaf)
        return slope


def _double(network: nn.Module, values: Tensor) -> Tensor:
    """Return a network's outputs in double precision, without gradients for its weights."""
    weights = {name: weight.detach().double() for name, weight in network.named_parameters()}
    outputs: Tensor = functional_call(network, weights, (values,))
    return outputs


class CoPur(Purification):
    """The top reads, for each received merged cut, the nearest cut that a decoder can produce.

    An autoencoder learns the distribution of merged cuts in training. In predictions, a search
    finds the code whose decoded cut is nearest to the received cuts. The search minimises the sum
    of the parties' distances and not of squared distances. So the cuts of a few parties may be far
    from the decoded cut (block sparsity). The top reads the decoded cut of every row, so the
    autoencoder's error costs accuracy.

    Source: Liu, Xie, Koyejo, Li 2022, "CoPur: certifiably robust collaborative inference via
    feature purification" (NeurIPS): the l2,1 decomposition with a nonlinear manifold. This class
    leaves out the paper's constraint that the code explains its part of the cut exactly. The top
    trains on unchanged cuts; the class computes no robustness certificate.

    Args:
        code: width of a code (the autoencoder's hidden representation).
        steps: number of Adam steps in the search for a code; at most 100.
        hidden: hidden units of the encoder and of the decoder.
        weight: weight of the autoencoder's loss relative to the task's loss.

    >>> defense = CoPur()
    >>> defense.merged([2, 2, 2])
    >>> top = defense.wrap_top(nn.Identity(), width=6).eval()
    >>> top(torch.zeros(2, 6)).shape
    torch.Size([2, 6])

    Raises:
        BadOptionError: an option is out of range.
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
