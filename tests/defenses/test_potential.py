"""The potential energy against a double loop in float64, and wherever it could break."""

import math

import pytest
import torch
from torch import nn

from vfl.compression import StepContext
from vfl.core.errors import BadOptionError
from vfl.core.seeds import generator
from vfl.defenses import make
from vfl.defenses.potential import MARGIN, potential_energy

DISTANCES = ["angular", "chordal"]
#: rows, classes, width: one product, class blocks, many classes, and classes of one row.
SIZES = [(2, 1, 3), (40, 3, 8), (128, 10, 32), (260, 10, 24), (320, 100, 128), (12, 12, 4)]


def rows_of(rows, classes, width, dtype=torch.float32):
    draw = generator(rows, "potential")
    cut = torch.randn(rows, width, generator=draw, dtype=dtype) * 3
    return cut, torch.randint(classes, (rows,), generator=draw)


def double_loop(cut, labels, distance):
    """Thesis eq 4-22 as a mean, over ordered pairs, in float64."""
    rows = cut.double().tolist()
    energies = []
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            if i == j or labels[i] != labels[j]:
                continue
            cosine = sum(a * b for a, b in zip(one, other, strict=True))
            cosine /= math.hypot(*one) * math.hypot(*other)
            cosine = min(max(cosine, MARGIN - 1), 1 - MARGIN)
            away = math.acos(cosine) if distance == "angular" else math.sqrt(2 - 2 * cosine)
            energies.append(1 / away)
    return sum(energies) / len(energies) if energies else 0.0


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_double_loop(size, distance):
    cut, labels = rows_of(*size)
    expected = double_loop(cut, labels.tolist(), distance)
    assert potential_energy(cut, labels, distance).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("distance", DISTANCES)
def test_small_angles_too(distance):
    """Rows on an arc, 0.1 apart: float32 cosines near 1 are the least exact."""
    angles = torch.arange(20, dtype=torch.float64) * 0.1
    cut = torch.stack([angles.cos(), angles.sin()], dim=1).float()
    labels = torch.zeros(20, dtype=torch.long)
    expected = double_loop(cut, labels.tolist(), distance)
    assert potential_energy(cut, labels, distance).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("rows", [20, 200])
def test_the_gradient_is_that_of_the_energy(rows, distance):
    cut, labels = rows_of(rows, rows // 4, 2, torch.float64)
    cut.requires_grad_()
    assert torch.autograd.gradcheck(lambda h: potential_energy(h, labels, distance), cut)


ODD = {
    "duplicates": torch.ones(6, 4),
    "antipodes": torch.ones(6, 4) * torch.tensor([1.0, -1, 1, -1, 1, -1])[:, None],
    "nearly the same": torch.ones(6, 4) + 1e-4 * torch.arange(24.0).view(6, 4),
    "zeros": torch.zeros(6, 4),
    "tiny": torch.randn(6, 4, generator=generator(0, "tiny")) * 1e-6,
    "huge": torch.randn(6, 4, generator=generator(0, "huge")) * 1e15,
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("copies", [1, 50], ids=["few rows", "class blocks"])
@pytest.mark.parametrize("case", ODD)
def test_odd_rows_have_finite_gradients(case, copies, distance):
    cut = ODD[case].repeat(copies, 1).requires_grad_()
    labels = torch.arange(len(cut)) % 3
    energy = potential_energy(cut, labels, distance)
    energy.backward()
    assert 0 <= energy.item() <= 1 / math.acos(1 - MARGIN) * 1.001
    assert torch.isfinite(cut.grad).all()


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_without_a_pair_there_is_no_energy_and_still_a_graph(rows):
    cut = torch.randn(rows, 4, generator=generator(0, "alone")).requires_grad_()
    energy = potential_energy(cut, torch.arange(rows))
    energy.backward()
    assert energy.item() == 0
    assert torch.equal(cut.grad, torch.zeros_like(cut))


def test_every_partys_cut_gets_the_whole_weight():
    cut, labels = rows_of(20, 3, 5)
    defense = make("potential:alpha=3,distance=chordal")
    alone = defense.loss({"bank": cut}, labels, cut, StepContext())
    both = defense.loss({"bank": cut, "shop": cut}, labels, cut, StepContext())
    assert alone.item() == pytest.approx(3 * potential_energy(cut, labels, "chordal").item())
    assert both.item() == pytest.approx(2 * alone.item())


def test_layer_normalisation_comes_along_unless_it_is_refused():
    cut = torch.randn(7, 6, generator=generator(0, "norm")) * 4 + 2
    normed = make("potential").wrap_bottom(nn.Identity(), 6)(cut)
    torch.testing.assert_close(normed, make("layer_norm").wrap_bottom(nn.Identity(), 6)(cut))
    assert make("potential:norm=no").wrap_bottom(nn.Identity(), 6)(cut) is cut


def test_what_it_refuses():
    with pytest.raises(BadOptionError, match="no such choice"):
        make("potential:distance=euclid")
    with pytest.raises(BadOptionError, match="labels and inner layers are at different parties"):
        make("potential:layers=all")
