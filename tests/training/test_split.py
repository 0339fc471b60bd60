"""SplitModule: one torch module whose cut is real frames."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

from vfl import SplitModule, split
from vfl.core.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    SpecError,
    VFLError,
    WidthError,
)
from vfl.defenses import DEFENSES, Defense


def parts(seed=0):
    torch.manual_seed(seed)
    bottoms = {name: nn.Linear(width, 6) for name, width in {"bank": 3, "shop": 5}.items()}
    return bottoms, nn.Sequential(nn.ReLU(), nn.Linear(12, 2)), {"bank": 6, "shop": 6}


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return {
        "bank": torch.randn(rows, 3, generator=generator),
        "shop": torch.randn(rows, 5, generator=generator),
    }


def test_without_a_codec_it_is_the_plain_network():
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths)
    plain = top(torch.cat([bottoms["bank"](batch()["bank"]), bottoms["shop"](batch()["shop"])], 1))
    assert torch.equal(model(batch()), plain)
    weights = list(model.parameters())
    expected = torch.autograd.grad(plain.square().sum(), weights)
    model(batch()).square().sum().backward()
    for weight, gradient in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, gradient)


def test_evaluation_is_not_random_and_leaves_the_step():
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths, codec="randtopk:k=2,alpha=0.9").eval()
    assert torch.equal(model(batch()), model(batch()))
    assert model.step == 0
    model.train()
    assert not torch.equal(model(batch()), model(batch()))
    assert model.step == 2


class Heavy(Defense):
    """Adds one per row to the loss and doubles gradients."""

    def loss(self, cuts, labels, logits, context):
        return logits.sum() * 0 + len(labels)

    def gradient(self, grad, labels, context):
        return 2 * grad


def test_a_defense_sees_labels_when_it_is_given_them(monkeypatch):
    monkeypatch.setitem(DEFENSES._members, "heavy", Heavy)
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths, defense="heavy")
    labels = torch.zeros(8, dtype=torch.long)
    outputs, extra = model(batch(), labels), model.extra_loss()
    assert extra.item() == 8.0
    assert model.extra_loss().item() == 0.0
    (outputs.sum() + extra).backward()
    doubled = bottoms["bank"].weight.grad.clone()
    bottoms["bank"].weight.grad = None
    SplitModule(bottoms, top, widths)(batch()).sum().backward()
    torch.testing.assert_close(doubled, 2 * bottoms["bank"].weight.grad)


def test_the_noise_of_two_parties_does_not_cancel():
    """Two parties of equal models and rows, whose gradients differ by their noise alone."""
    bottoms = {name: nn.Linear(3, 4) for name in ("bank", "shop")}
    bottoms["shop"].load_state_dict(bottoms["bank"].state_dict())
    defense = "gradient_noise:norm=inf,sigma=1"
    model = SplitModule(
        bottoms, nn.Linear(4, 2), {"bank": 4, "shop": 4}, merge="sum", defense=defense
    )
    rows = torch.ones(5, 3)
    model({"bank": rows, "shop": rows}, torch.zeros(5).long()).sum().backward()
    assert not torch.isclose(bottoms["bank"].weight.grad, bottoms["shop"].weight.grad).any()


def test_what_does_not_fit_is_refused():
    bottoms, top, widths = parts()
    with pytest.raises(DataError, match="one bottom and one width"):
        SplitModule(bottoms, top, {"bank": 6})
    with pytest.raises(DataError, match="takes widths by party"):
        SplitModule(bottoms, top, [6, 6])
    with pytest.raises(DataError, match=r"on meta\n.*device"):
        SplitModule(bottoms, top, widths)({k: v.to("meta") for k, v in batch().items()})
    with pytest.raises(SpecError, match="equal widths"):
        SplitModule(bottoms, top, {"bank": 6, "shop": 5}, merge="sum")
    with pytest.raises(ConfigError, match="the label party's own columns"):
        SplitModule({"label": nn.Linear(3, 6)}, top, {"label": 6})
    with pytest.raises(WidthError, match="whose shape differs"):
        SplitModule(bottoms, top, {"bank": 5, "shop": 6})(batch())
    broken = batch()
    broken["shop"][0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="party 'shop'"):
        SplitModule(bottoms, top, widths)(broken)


def joined(bottom, width=4, **settings):
    return SplitModule({"bank": bottom}, nn.Linear(4, 2), {"bank": width}, **settings)


SHARED = nn.Linear(3, 4)
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
EMBEDDING = nn.Sequential(nn.Embedding(10, 4), nn.Flatten())


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: joined(nn.Linear(3, 4))({"bank": torch.ones(2, 5)}), "bank.*inputs.*(2, 5)"),
        (lambda: joined(nn.Linear(3, 4))({"bank": torch.ones(2, 3).long()}), "bank.*int64"),
        (lambda: joined(nn.Linear(3, 4))({"bank": [1.0, 2.0]}), "bank.*inputs"),
        (
            lambda: joined(EMBEDDING)({"bank": torch.tensor([[77]])}),
            "index for which it has no entry",
        ),
        (lambda: joined(nn.LSTM(3, 4))({"bank": torch.ones(2, 3)}), "gives no tensor"),
        (lambda: joined(nn.Linear(3, 5), 5)({"bank": torch.ones(2, 3)}), "the top does not take"),
        (lambda: joined("mlp"), "bottom that is a module"),
        (
            lambda: SplitModule(
                {"bank": SHARED, "shop": SHARED}, nn.Linear(8, 2), {"bank": 4, "shop": 4}
            ),
            "two parties use the same weights.*'bank'.*'shop'",
        ),
        (lambda: joined(nn.Linear(3, 4), "4"), "width that is a whole number"),
        (lambda: joined(NORMED).train()({"bank": torch.ones(1, 3)}), "single row.*drop_last"),
        (lambda: pickle.dumps(joined(nn.Linear(3, 4))), "state_dict"),
        (
            lambda: split(nn.Sequential(nn.LazyLinear(4), nn.Flatten()), "0", torch.ones(2, 3)),
            "no weights before.*run the model",
        ),
        (
            lambda: split(NORMED, "0", torch.ones(2, 3))(input=torch.ones(2, 3), row=1),
            "'row'.*input",
        ),
        (lambda: split(NORMED, "0", torch.ones(2, 3), defense="layer_norm"), "SplitModule"),
        (lambda: split("net", "0", torch.ones(2, 3)), "cut at layers"),
        (lambda: split(NORMED, "0", torch.ones(2, 5)), r"does not take these inputs.*\(2, 5\)"),
        (lambda: split(nn.Linear(3, 2), 1, torch.ones(2, 3)), "cut at layers"),
    ],
)
def test_mistakes_are_coded_and_show_no_value(run, words):
    with pytest.raises(VFLError) as caught:
        run()
    assert re.search(words, str(caught.value), re.DOTALL)
    assert "77" not in str(caught.value)
    assert caught.value.__cause__ is None or not isinstance(caught.value.__cause__, IndexError)


def test_every_party_has_the_same_rows():
    bottoms, top, widths = parts()
    model, uneven = SplitModule(bottoms, top, widths), batch() | {"shop": batch(5)["shop"]}
    with pytest.raises(DataError, match="the same rows") as caught:
        model(uneven)
    assert "bank: 8 rows, shop: 5 rows" in str(caught.value)
    with pytest.raises(DataError, match="the same rows"):
        model(batch(), torch.zeros(7).long())


def test_a_state_of_another_module_is_refused():
    bottoms, top, widths = parts()
    with pytest.raises(DataError, match="another module"):
        joined(nn.Linear(3, 4)).load_state_dict(SplitModule(bottoms, top, widths).state_dict())


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_module_trains_the_same():
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    for one in (model, compiled):
        one(batch()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
