"""Self-supervised learning of a bottom from its owner's rows, by one of five objectives.

`LabelFree` bottoms learn in this way and are then frozen. `Pretrained` bottoms afterwards learn
from labels; `FewRounds` bottoms afterwards learn from a bounded number of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import (
    affine_grid,
    binary_cross_entropy_with_logits,
    cross_entropy,
    grid_sample,
    mse_loss,
    normalize,
    relu,
)

from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import Secret
from vfl.defenses.base import FIT_ROWS, MOST_EPOCHS, Defense
from vfl.models.optimizers import descend

Learned = Literal["autoencoder", "scarf", "simclr", "vicreg", "vime"]

_HEAD_WIDTH = 256
_HEAD_COPIES = 5  # weights, gradients, Adam's two averages, one temporary copy

#: Temperature of SimCLR's softmax.
_TEMPERATURE = 0.5
#: Weights of VICReg's three loss terms (Bardes et al. 2022, section 4.2), and the constant added to
#: a variance before its square root.
_INVARIANCE, _VARIANCE, _COVARIANCE = 25.0, 25.0, 1.0
_LEAST_VARIANCE = 1e-4
#: Weight of the reconstruction loss, relative to the loss of detecting replaced values (Yoon et al.
#: 2020, equation 4).
_REBUILDING = 2.0

#: Largest random changes of a picture: rotation in radians, relative change of size, shift relative
#: to half of the picture's side length, relative change of contrast.
_TURN, _STRETCH, _SHIFT, _CONTRAST = math.pi / 12, 0.2, 0.2, 0.4

#: Function whose arguments are a batch of rows, a model (the encoder and then a perceptron) and a
#: device; it returns the loss.
_Loss = Callable[[Tensor, nn.Module, torch.device], Tensor]


def learn(
    kind: Learned,
    encoder: nn.Module,
    inputs: Tensor,
    draw: torch.Generator,
    epochs: int = 10,
    mask: float = 0.3,
) -> None:
    """Train, without labels, those weights of an encoder that are trainable.

    Kind "autoencoder" reconstructs rows in which some values were set to 0 (Vincent et al. 2008).
    Kind "scarf" trains outputs that identify, for each row, its corrupted copy among the corrupted
    copies of the batch's rows. Corruption replaces each value of a row, with probability `mask`, by
    the value of the same column in another row (Bahri et al. 2022, algorithm 1, with a temperature
    of 1). Kind "simclr" makes two changed copies (views) of each row; its outputs identify, for
    each view, the other view of the same row (Chen et al. 2020, equation 1, with a temperature of
    0.5). Kind "vicreg" makes the outputs for the two views of a row similar, while every output
    must vary over rows and different outputs must be uncorrelated (Bardes et al. 2022, equation 6).
    Kind "vime" predicts which values of a row were replaced by other rows' values, and the original
    values (Yoon et al. 2020, equations 4 to 6).

    `augmented` makes the view of a picture; a view of any other row is a corrupted copy, as for
    "scarf".

    Args:
        kind: the objective.
        encoder: module with outputs of axes (rows, width), on the device on which it is trained.
        inputs: inputs of the rows, axes (rows, ...); inputs with four axes are pictures, axes
            (rows, channels, height, width).
        draw: generator from which the order of rows, the masks and the views are drawn. Dropout and
            the perceptron's initial weights use torch's global generator instead.
        epochs: number of epochs over all rows.
        mask: share of a row's values to hide or replace; in views of pictures, the largest share of
            the area that `augmented` erases.
    """
    columns = inputs[0].numel()
    if kind == "autoencoder":
        _descend(encoder, columns, inputs, draw, epochs, FIT_ROWS, _rebuilding(draw, mask))
        return
    if kind == "vime":
        loss = _estimating(inputs, draw, mask)
        _descend(encoder, 2 * columns, inputs, draw, epochs, FIT_ROWS, loss)
        return
    made: dict[str, _Loss] = {
        "scarf": _recognising(inputs, draw, mask),
        "simclr": _comparing(inputs, draw, mask, contrast),
        "vicreg": _comparing(inputs, draw, mask, vicreg_loss),
    }
    _descend(encoder, _HEAD_WIDTH, inputs, draw, epochs, FIT_ROWS // 2, made[kind])


class LearnsFirst(Defense):
    """Base class of defenses whose whole bottom first learns without labels.

    Args:
        kind: label-free objective; see `learn`.
        epochs: number of epochs over the party's rows before the first step.
        mask: share of a row's values to hide or replace, 0 to 0.9.
        unaligned: whether the bottom also learns from the party's unaligned rows.

    Attributes:
        purpose: name of the random numbers that are drawn from the feature party's secret.

    Raises:
        BadOptionError: an option is out of range.
    """

    once = True
    purpose: ClassVar[str]

    def __init__(self, kind: Learned, epochs: int, mask: float, unaligned: bool) -> None:
        require_choice("kind", kind, get_args(Learned))
        require_range("epochs", epochs, 1, MOST_EPOCHS)
        require_range("mask", mask, 0, 0.9)
        self.kind = kind
        self.mask = mask
        self.unaligned = unaligned
        self.fit_epochs = epochs

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return learning_bytes(self.kind, columns, width)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        draw = torch.Generator().manual_seed(secret.number(self.purpose))
        learn(self.kind, bottom, inputs, draw, self.fit_epochs, self.mask)


def train_autoencoder(
    encoder: nn.Module, inputs: Tensor, draw: torch.Generator, epochs: int = 10, mask: float = 0.3
) -> nn.Module:
    """Train an encoder to reconstruct masked inputs; return it frozen, in evaluation mode.

    The arguments are those of `learn`.
    """
    learn("autoencoder", encoder.requires_grad_(True), inputs, draw, epochs, mask)
    return encoder.requires_grad_(False).eval()


def learning_bytes(kind: Learned, columns: int, width: int) -> int:
    """Return the bytes of the perceptron that the training adds, and of the training's batches."""
    outputs = max(2 * columns if kind == "vime" else columns, _HEAD_WIDTH)
    head = _HEAD_WIDTH * (width + 1 + outputs) + outputs
    return 4 * (_HEAD_COPIES * head + FIT_ROWS * (8 * columns + 4 * _HEAD_WIDTH))


# --- objectives -----------------------------------------------------------------------------------


def _rebuilding(draw: torch.Generator, mask: float) -> _Loss:
    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        seen = whole * (torch.rand(whole.shape, generator=draw) >= mask)
        return mse_loss(model(seen.to(device)), whole.flatten(1).to(device))

    return loss


def _recognising(inputs: Tensor, draw: torch.Generator, mask: float) -> _Loss:
    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        both = torch.cat([whole, corrupted(whole, inputs, draw, mask)]).to(device)
        one, other = normalize(model(both)).chunk(2)
        return cross_entropy(one @ other.T, torch.arange(len(one), device=device))

    return loss


def _estimating(inputs: Tensor, draw: torch.Generator, mask: float) -> _Loss:
    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        seen, true = corrupted(whole, inputs, draw, mask).to(device), whole.flatten(1).to(device)
        replaced, rebuilt = model(seen).chunk(2, dim=1)
        # A replaced value counts as unchanged if the new value is equal to the old one.
        differs = (seen.flatten(1) != true).float()
        found = binary_cross_entropy_with_logits(replaced, differs)
        return found + _REBUILDING * mse_loss(rebuilt, true)

    return loss


def _comparing(
    inputs: Tensor,
    draw: torch.Generator,
    mask: float,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> _Loss:
    def view(whole: Tensor) -> Tensor:
        if whole.dim() == 4:
            return augmented(whole, draw, mask)
        return corrupted(whole, inputs, draw, mask)

    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        one, other = model(torch.cat([view(whole), view(whole)]).to(device)).chunk(2)
        return compare(one, other)

    return loss


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """Return the NT-Xent loss of two views of the same rows, axes (rows, width) each.

    >>> views = torch.eye(2)
    >>> round(float(contrast(views, views)), 4)  # ln(1 + 2 exp(-1 / 0.5))
    0.2395
    """
    views = normalize(torch.cat([one, other]))
    alike = (views @ views.T / _TEMPERATURE).fill_diagonal_(-math.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(one))
    return cross_entropy(alike, partners)


def vicreg_loss(one: Tensor, other: Tensor) -> Tensor:
    """Return the VICReg loss of two views of the same rows, axes (rows, width) each.

    >>> round(float(vicreg_loss(torch.zeros(2, 3), torch.zeros(2, 3))), 2)  # 25 * 2 * (1 - 0.01)
    49.5
    """
    loss = _INVARIANCE * mse_loss(one, other)
    for view in (one, other):
        centred = view - view.mean(0)
        covariance = centred.T @ centred / max(1, len(view) - 1)
        spread = (covariance.diagonal() + _LEAST_VARIANCE).sqrt()
        apart = covariance.square().sum() - covariance.diagonal().square().sum()
        loss = loss + _VARIANCE * relu(1 - spread).mean() + _COVARIANCE * apart / view.shape[1]
    return loss


# --- views ----------------------------------------------------------------------------------------


def corrupted(whole: Tensor, inputs: Tensor, draw: torch.Generator, mask: float) -> Tensor:
    """Return rows in which other rows' values, with probability `mask`, replace each value.

    Args:
        whole: rows to corrupt, axes (rows, ...).
        inputs: rows from which the replacing values come, of the same column; axes (more rows,
            ...).
        draw: generator that decides which values are replaced, and from which rows values are
            taken.
        mask: probability of replacing a value.
    """
    columns, flat = inputs.flatten(1), whole.flatten(1)
    others = columns.gather(0, torch.randint(len(columns), flat.shape, generator=draw))
    return torch.where(torch.rand(flat.shape, generator=draw) < mask, others, flat).reshape(
        whole.shape
    )


def augmented(pictures: Tensor, draw: torch.Generator, erased: float) -> Tensor:
    """Return pictures that are rotated, scaled, shifted, changed in contrast and partly erased.

    The function never mirrors a picture, because mirroring changes the meaning of a digit, or of
    the half of a picture that one party has. Erased pixels, and pixels that come from outside of
    the picture, get the value of the picture's darkest pixel. The erased area is a rectangle.

    Args:
        pictures: pictures to change, axes (rows, channels, height, width).
        draw: generator from which all random changes are drawn.
        erased: largest share of a picture's area to erase.
    """
    rows, _, height, width = pictures.shape

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=draw)

    turn = uniform(-_TURN, _TURN)
    across, down = uniform(1 - _STRETCH, 1 + _STRETCH), uniform(1 - _STRETCH, 1 + _STRETCH)
    # In these coordinates, width and height are both 2, for any number of pixels. So the rotation
    # must correct for pictures whose width and height differ.
    first = [across * turn.cos(), -across * turn.sin() * height / width, uniform(-_SHIFT, _SHIFT)]
    second = [down * turn.sin() * width / height, down * turn.cos(), uniform(-_SHIFT, _SHIFT)]
    motion = torch.stack([torch.stack(first, 1), torch.stack(second, 1)], 1)
    darkest = pictures.amin((1, 2, 3), keepdim=True)
    grid = affine_grid(motion, list(pictures.shape), align_corners=False)
    moved = grid_sample(pictures - darkest, grid, align_corners=False)
    moved = moved * uniform(1 - _CONTRAST, 1 + _CONTRAST)[:, None, None, None]
    inside = [_within(uniform(0, 1), uniform(0, erased**0.5), pixels) for pixels in (height, width)]
    hole = inside[0][:, :, None] & inside[1][:, None, :]
    return moved.masked_fill(hole[:, None], 0) + darkest


def _within(centre: Tensor, length: Tensor, pixels: int) -> Tensor:
    """Mark the pixels, along one axis, at most length / 2 from the centre; axes (rows, pixels)."""
    at = (torch.arange(pixels) + 0.5) / pixels
    return (at - centre[:, None]).abs() < length[:, None] / 2


# --- the training ---------------------------------------------------------------------------------


def _descend(
    encoder: nn.Module,
    outputs: int,
    inputs: Tensor,
    draw: torch.Generator,
    epochs: int,
    batch_size: int,
    loss: _Loss,
) -> None:
    """Train an encoder with a perceptron behind it, and then discard the perceptron."""
    device = next((weights.device for weights in encoder.parameters()), inputs.device)
    with torch.no_grad():
        width = encoder.eval()(inputs[:1].to(device)).shape[1]
    encoder.train()
    head = [nn.Linear(width, _HEAD_WIDTH), nn.ReLU(), nn.Linear(_HEAD_WIDTH, outputs)]
    model = nn.Sequential(encoder, nn.Sequential(*head).to(device))
    steps = optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=draw)
        for start in range(0, max(len(order) - 1, 1), batch_size):  # skips a last batch of one row
            whole = inputs.index_select(0, order[start : start + batch_size])
            descend(steps, loss(whole, model, device))
