"""Potential energy: a loss by which rows of one class repel each other and form no cluster.

This file also contains layer normalisation of the cut, as a separate defense.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.errors import BadOptionError
from vfl.core.registry import MOST_WEIGHT, require_choice, require_range
from vfl.defenses.base import Cuts, Defense, LabelKind, Loss, require_classes

Distance = Literal["angular", "chordal"]

#: Cosines are limited to at most 1 minus this margin. A margin below 1e-7 would vanish in float32;
#: with a margin of 1e-4, no training had infinite values. Two rows with a larger cosine, such as
#: duplicates, do not repel each other.
MARGIN = 1e-4
#: Up to this number of rows, one matrix product compares all pairs of rows; separate products for
#: each class have a higher fixed cost.
_FEW_ROWS = 192
#: Lower limit of the norm by which a row is divided. A row with a smaller norm has no reliable
#: direction, and its gradient would grow with 1 / norm.
_LEAST_LENGTH = 1e-4


def potential_energy(cut: Tensor, labels: Tensor, distance: Distance = "angular") -> Tensor:
    """Return the mean of 1 / distance over all ordered pairs of different rows of one class.

    The angular distance of two normalised rows u and v is arccos(u.v); the chordal distance is
    sqrt(2 - 2 u.v). Thesis eq 4-22 sums over pairs; this function takes the mean over pairs, so
    that its weight does not depend on the batch size. With either distance, the energy is at most
    about 71; without any pair, it is 0. The gradient is always finite.

    Args:
        cut: cuts of the batch's rows, axes (rows, width).
        labels: class numbers 0..C-1, axes (rows,).
        distance: distance between rows: "angular" or "chordal".

    Returns:
        The energy, a scalar with an autograd graph to `cut`.

    >>> cut = torch.tensor([[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]])
    >>> round(potential_energy(cut, torch.tensor([0, 0, 1])).item(), 4)  # one right angle
    0.6366
    """
    if len(cut) < 2:
        return cut.sum() * 0
    squares = cut.square().sum(dim=1, keepdim=True)
    units = cut * squares.clamp_min(_LEAST_LENGTH**2).rsqrt()
    cosines = _pair_cosines(units, labels)
    if len(cosines) == 0:
        return cut.sum() * 0
    cosines = cosines.clamp(MARGIN - 1, 1 - MARGIN)
    if distance == "angular":
        return torch.arccos(cosines).reciprocal().mean()
    return (2 - 2 * cosines).rsqrt().mean()


def _pair_cosines(units: Tensor, labels: Tensor) -> Tensor:
    """Return dot products of all pairs of rows in one class, axes (pairs,).

    Other pairs get no gradient.
    """
    if len(units) <= _FEW_ROWS:
        return _from_all(units, labels)
    sizes = torch.bincount(labels)
    largest = int(sizes.max())
    if len(sizes) * largest**2 >= len(units) ** 2:  # most rows are of one class
        return _from_all(units, labels)
    filled = torch.arange(largest, device=units.device) < sizes[:, None]
    place = torch.zeros_like(filled, dtype=torch.long)
    place[filled] = labels.argsort()
    blocks = units.index_select(0, place.flatten()).view(*place.shape, -1)
    same = (filled[:, :, None] & filled[:, None, :]).triu_(1)
    return torch.bmm(blocks, blocks.transpose(1, 2)).masked_select(same)


def _from_all(units: Tensor, labels: Tensor) -> Tensor:
    same = torch.eq(labels[:, None], labels).triu_(1)
    return (units @ units.T).masked_select(same)


class Potential(Defense):
    """The label party adds alpha x the potential energy of each feature party's cut to its loss.

    Source: Thesis section 4.3, eq 4-22; the thesis tries weights from 0.25 to 32, which have the
    same meaning as `alpha`. With `norm`, each feature party's bottom ends with layer normalisation
    (without scale and shift), so that cuts lie on a sphere. The thesis requires this normalisation,
    although angles between rows do not depend on the rows' norms. Both parties run this defense
    from the same spec, starting with the first training step; the defense has no state. The defense
    states no guarantee: an attacker who whitens the cut, has unlabelled rows, or reads an earlier
    layer of the bottom can still find the classes.

    Args:
        alpha: weight of the potential energy in the label party's loss.
        distance: distance between rows: "angular" or "chordal".
        norm: whether the bottoms end with layer normalisation.
        layers: layer whose outputs repel each other; only "cut" is possible, because the label
            party has no access to the inner layers of a bottom.

    >>> cut, labels = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
    >>> round(Potential(alpha=4).loss({"bank": cut}, labels, cut, StepContext()).item(), 4)
    2.5465

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "both"

    def __init__(
        self,
        alpha: float = 4.0,
        distance: Distance = "angular",
        norm: bool = True,
        layers: str = "cut",
    ) -> None:
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        require_choice("distance", distance, get_args(Distance))
        if layers != "cut":
            raise BadOptionError(
                "labels and inner layers are at different parties",
                where="option 'layers'",
                got=layers,
                want="cut",
                fix="a user who owns both parts adds vfl.defenses.potential.potential_energy of an "
                "inner layer to the loss of a SplitModule (examples/inner_layers.py)",
            )
        self.alpha = alpha
        self.distance: Distance = distance
        self.norm = norm

    def prepare(self, kind: LabelKind) -> None:
        require_classes("potential", kind)

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return LayerNorm().wrap_bottom(bottom, width) if self.norm else bottom

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        energies = [potential_energy(cut, labels, self.distance) for cut in cuts.values()]
        return self.alpha * torch.stack(energies).sum()


class LayerNorm(Defense):
    """Normalises each row of a cut to mean 0 and variance 1; alone, it increases label leakage.

    Source: Ba et al. 2016, without the learned scale and shift. In a test on MNIST, an attacker
    with one known label per class fine-tuned a top. The fine-tuned top predicted 66 % of the labels
    correctly from plain cuts and 97 % from normalised cuts. Losses that need a bounded cut use this
    layer (`potential` contains it). Tables that compare defenses have a separate row for
    `layer_norm`, which shows its effect without such a loss. Only the feature party runs this
    defense; the defense has no state and no guarantee.

    >>> import torch
    >>> wrapped = LayerNorm().wrap_bottom(nn.Identity(), width=2)
    >>> [round(value, 3) for value in wrapped(torch.tensor([[1.0, 3.0]]))[0].tolist()]
    [-1.0, 1.0]
    """

    side = "feature"

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(bottom, nn.LayerNorm(width, elementwise_affine=False))
