"""Bottoms of whole numbers against loops over rows, steps and filters."""

from __future__ import annotations

import pytest
import torch

from vfl.core import seeds
from vfl.core.errors import SpecError, WidthError
from vfl.models import make_bottom


def built(spec, steps, width):
    with seeds.scoped(0):
        return make_bottom(spec).build((steps,), width).eval()


def test_the_recurrent_network_computes_its_formula():
    """Cho et al. 2014, as torch writes it: r, z, n and h' = (1 - z) n + z h."""
    module = built("gru4rec:items=9,embedding=4", 3, 5)
    gru = module.gru
    state = torch.zeros(5)
    for item in (7, 2, 7):
        given = module.items.weight[item] @ gru.weight_ih_l0.T + gru.bias_ih_l0
        kept = state @ gru.weight_hh_l0.T + gru.bias_hh_l0
        reset, update = torch.sigmoid(given[:10] + kept[:10]).split(5)
        new = torch.tanh(given[10:] + reset * kept[10:])
        state = (1 - update) * new + update * state
    torch.testing.assert_close(module(torch.tensor([[7.0, 2.0, 7.0]]))[0], state)


def test_padding_changes_nothing_wherever_it_stands():
    module = built("gru4rec:items=9,embedding=4", 6, 5)
    rows = [[3, 8, 0, 0, 0, 0], [0, 0, 0, 0, 3, 8], [0, 3, 0, 0, 8, 0], [3, 8, 1, 1, 1, 1]]
    states = module(torch.tensor(rows).float())
    alone = module(torch.tensor([[3.0, 8.0]]))[0]
    for state in states[:3]:
        torch.testing.assert_close(state, alone)
    assert not torch.allclose(states[3], alone)


def test_a_row_of_padding_gives_zeros_and_no_gradient_that_is_not_finite():
    module = built("gru4rec:items=9,embedding=4", 3, 5)
    states = module(torch.tensor([[0.0, 0, 0], [4, 0, 0]]))
    assert not states[0].any()
    assert states[1].any()
    states.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
    assert not module(torch.zeros(2, 3)).any()


def test_filters_keep_their_largest_answer():
    module = built("textcnn:words=20,embedding=3", 9, 6)
    row = torch.tensor([4.0, 19, 1, 1, 7, 4, 0, 0, 0])
    vectors = module.words.weight[row.long()]
    want = []
    for kind, at_once in zip(module.filters, (3, 4, 5), strict=True):
        for weights, bias in zip(kind.weight, kind.bias, strict=True):
            answers = [
                (vectors[start : start + at_once].T * weights).sum() + bias
                for start in range(9 - at_once + 1)
            ]
            want.append(max(*answers, torch.tensor(0.0)))
    torch.testing.assert_close(module(row[None])[0], torch.stack(want))


def test_a_text_shorter_than_a_filter_is_padded():
    module = built("textcnn:words=20,embedding=3", 2, 3)
    short, padded = torch.tensor([[4.0, 19]]), torch.tensor([[4.0, 19, 0, 0, 0]])
    torch.testing.assert_close(module(short), module(padded))
    assert not module.words.weight[0].any()


@pytest.mark.parametrize("spec", ["gru4rec:items=9", "textcnn:words=10"])
@pytest.mark.parametrize("number", [10, -1, torch.nan, 123456789])
def test_a_number_beyond_the_option_is_refused_and_not_told(spec, number):
    module = built(spec, 3, 6)
    assert module(torch.tensor([[9.0, 1, 0]])).shape == (1, 6)
    with pytest.raises(SpecError, match="from 0 to 9") as caught:
        module(torch.tensor([[1.0, number, 0]]))
    told = str(caught.value)
    assert spec.partition("=")[0].partition(":")[2] in told
    assert not [text for text in ("123456", "1.2", "-1", "nan") if text in told.split("more")[0]]


def test_a_cut_that_three_kinds_of_filters_cannot_share():
    for width, fix in ((7, 6), (2, 3)):
        with pytest.raises(WidthError, match=f"set width to {fix}"):
            make_bottom("textcnn").build((9,), width)


@pytest.mark.parametrize("spec", ["gru4rec:items=9", "textcnn"])
def test_pictures_are_refused(spec):
    with pytest.raises(SpecError, match="takes rows of whole numbers"):
        make_bottom(spec).build((1, 8, 8), 6)
