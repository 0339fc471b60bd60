"""Bottoms near their principal components: what they compute, and what training moves."""

import pytest
import torch
from torch import nn

from vfl.attacks.base import learned_part
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator, scoped
from vfl.defenses import make

SECRET = Secret.of_simulation(0, "bank")
INPUTS = torch.randn(200, 10, generator=generator(0, "inputs"))


def bottom_of(spec, width=3):
    """The bottom as the feature party would have it before the first step."""
    defense = make(spec)
    with scoped(7):
        bottom = defense.wrap_bottom(nn.Sequential(nn.Flatten(), nn.Linear(10, width)), width)
    defense.fit(bottom, INPUTS, SECRET)
    return bottom


def test_a_cut_is_its_components_and_a_share_of_what_is_learned():
    components = bottom_of("label_free:features=0")(INPUTS)
    bottom = bottom_of("anchored:rate=0.25")
    expected = components + 0.25 * learned_part(bottom)(INPUTS)
    torch.testing.assert_close(bottom(INPUTS), expected)


def test_a_step_moves_the_learned_part_alone():
    bottom = bottom_of("anchored:rate=0.25")
    before = {name: value.clone() for name, value in bottom.state_dict().items()}
    steps = torch.optim.Adam(bottom.parameters(), lr=0.1)
    bottom(INPUTS).square().mean().backward()
    steps.step()
    moved = [
        name for name, value in bottom.state_dict().items() if not torch.equal(before[name], value)
    ]
    assert moved == ["learned.1.weight", "learned.1.bias"]


def test_components_are_fitted_under_other_wraps():
    plain, wrapped = bottom_of("anchored:rate=0"), bottom_of("anchored:rate=0+layer_norm")
    expected = nn.functional.layer_norm(plain(INPUTS), [3])
    torch.testing.assert_close(wrapped(INPUTS), expected)
    assert learned_part(wrapped) is not wrapped


def test_another_bottom_is_learned_as_a_whole():
    bottom = nn.Linear(2, 2)
    assert learned_part(bottom) is bottom


@pytest.mark.parametrize("spec", ["anchored+label_free", "label_free+anchored"])
def test_one_bottom_is_not_two_things(spec):
    with pytest.raises(SpecError, match="label-free"):
        make(spec)
