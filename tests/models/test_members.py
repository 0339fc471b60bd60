"""Each model against a closed form, a formula written out, or a published count."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vfl.core import seeds
from vfl.core.errors import SpecError, WidthError
from vfl.core.storage import Seal, load_weights, save_weights
from vfl.models import make_bottom
from vfl.models.pictures import Residual


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeds.generator(0, "draws"))


def test_mlp_computes_its_formula():
    module = make_bottom("mlp:hidden=6,activation=tanh,last=relu").build((2, 2), 3)
    first, second = (layer for layer in module if isinstance(layer, nn.Linear))
    rows = draws(5, 2, 2)
    hidden = torch.tanh(rows.reshape(5, 4) @ first.weight.T + first.bias)
    torch.testing.assert_close(module(rows), (hidden @ second.weight.T + second.bias).clamp(min=0))


def test_a_cut_that_is_normalised_before_its_relu():
    """in -> 192, norm, ReLU, dropout -> 128, norm, ReLU, no column can fall silent."""
    spec = "mlp:hidden=192,batch_norm=true,dropout=0.2,last=batch_norm_relu"
    module = make_bottom(spec).build((1, 4, 4), 128)
    kinds = [type(layer).__name__ for layer in module]
    hidden = ["Linear", "BatchNorm1d", "ReLU", "Dropout"]
    assert kinds == ["Flatten", *hidden, "Linear", "BatchNorm1d", "ReLU"]
    plain = make_bottom("mlp:hidden=none,last=batch_norm_relu").build((4,), 3)
    rows = draws(6, 4)
    sums = rows @ plain[1].weight.T + plain[1].bias
    spread = (sums.var(dim=0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(plain(rows), ((sums - sums.mean(dim=0)) / spread).clamp(min=0))


def test_cnn_computes_its_formula():
    module = make_bottom("cnn:channels=2-3").build((1, 6, 2), 4)
    wide, small = (layer for layer in module if isinstance(layer, nn.Conv2d))
    rows = draws(3, 1, 6, 2)
    once = F.max_pool2d(F.relu(F.conv2d(rows, wide.weight, wide.bias, padding=2)), (2, 2))
    twice = F.max_pool2d(F.relu(F.conv2d(once, small.weight, small.bias, padding=1)), (2, 1))
    expected = twice.reshape(3, 3) @ module[-1].weight.T + module[-1].bias
    torch.testing.assert_close(module(rows), expected)


def test_resnet20_has_the_published_size():
    """Table 6 of He et al. 2016 says 0.27M; option B shortcuts would add 2,752 to these."""
    module = make_bottom("resnet20").build((3, 32, 32), 10)
    assert count(module) == 269_722
    assert sum(isinstance(layer, nn.Conv2d) for layer in module.modules()) == 19


def test_shortcut_drops_pixels_and_adds_zero_channels():
    block = Residual(2, 6).eval()
    for parameter in block.path.parameters():
        nn.init.zeros_(parameter)  # F(x) = 0 leaves relu(shortcut)
    pictures = draws(1, 2, 5, 4)
    expected = torch.zeros(1, 6, 3, 2)
    for row in range(3):
        for column in range(2):
            for channel in range(2):
                value = pictures[0, channel, 2 * row, 2 * column].clamp(min=0)
                expected[0, 2 + channel, row, column] = value
    torch.testing.assert_close(block(pictures), expected)


def test_resnet20_convolutions_start_with_the_variance_of_he():
    with seeds.scoped(0):
        module = make_bottom("resnet20").build((3, 32, 32), 10)
    last = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)][-1]
    assert last.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_oriented_gradients_against_a_loop():
    """Dalal and Triggs 2005: linear bins over half a turn, cells of pixels, blocks of length 1."""
    rows, cell, bins = draws(2, 1, 6, 9), 3, 4
    found = make_bottom(f"hog:cell={cell},orientations={bins}").build((1, 6, 9), 32)(rows)
    for row, features in zip(rows[:, 0], found, strict=True):
        cells = torch.zeros(bins, 2, 3)
        for y in range(6):
            for x in range(9):
                across = row[y, x + 1] - row[y, x - 1] if 0 < x < 8 else torch.tensor(0.0)
                down = row[y + 1, x] - row[y - 1, x] if 0 < y < 5 else torch.tensor(0.0)
                turn = math.atan2(down, across) / math.pi * bins % bins
                low, more = int(turn) % bins, turn - int(turn)
                length = math.hypot(across, down) / cell**2
                cells[low, y // cell, x // cell] += (1 - more) * length
                cells[(low + 1) % bins, y // cell, x // cell] += more * length
        blocks = [cells[:, :, x : x + 2].flatten() for x in range(2)]
        wanted = torch.stack([block / block.norm() for block in blocks], 1).flatten()
        torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-5)


def test_identity_passes_the_row_on():
    rows = draws(3, 2, 2)
    assert torch.equal(make_bottom("identity").build((2, 2), 4)(rows), rows.reshape(3, 4))
    with pytest.raises(WidthError, match="set width to 4"):
        make_bottom("identity").build((2, 2), 5)


@pytest.mark.parametrize("spec", ["cnn", "resnet20"])
@pytest.mark.parametrize("shape", [(10,), (8, 8), (1, 0, 8)])
def test_convolutions_refuse_rows_that_are_no_pictures(spec, shape):
    with pytest.raises(SpecError, match="takes pictures"):
        make_bottom(spec).build(shape, 4)


def test_the_convolutions_of_the_thesis():
    spec = "cnn:activation=leaky_relu,pad=first,last=leaky_relu"
    module = make_bottom(spec).build((1, 28, 28), 128)
    assert count(module) == 32 * 26 + 64 * (9 * 32 + 1) + 128 * (2304 + 1)
    cut = module(draws(2, 1, 28, 28))
    assert (cut < 0).any()
    assert not any(isinstance(layer, nn.ReLU) for layer in module)
    with pytest.raises(SpecError, match="larger picture"):
        make_bottom("cnn:pad=first").build((1, 4, 4), 8)


@pytest.mark.parametrize("spec", ["cnn", "resnet20"])
def test_pictures_give_the_same_bits_after_weights_were_stored(spec, tmp_path):
    """Convolutions sum in the order of their layout, which a stored file does not keep."""
    module, other = (make_bottom(spec).build((3, 8, 8), 4).eval() for _ in range(2))
    filters = [layer.weight for layer in other.modules() if isinstance(layer, nn.Conv2d)]
    seal = Seal("weights", "bank", "loans")
    save_weights(tmp_path / "weights", module.state_dict(), seal)
    other.load_state_dict(load_weights(tmp_path / "weights", seal))
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in filters)
    pictures = draws(5, 3, 8, 8)
    assert torch.equal(module(pictures), other(pictures))
