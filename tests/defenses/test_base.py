import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError, UnknownNameError
from vfl.core.seeds import Secret, generator
from vfl.defenses import DEFENSES, Chain, Defense, PrivacyStatement, make, parts, uses

CONTEXT = StepContext(2, training=True, secret=Secret.of_simulation(0, "bank"))
SECRET = Secret.of_simulation(0, "lender")


class Affine(Defense):
    """Every hook computes scale * x + 1, so that the order of two of them shows."""

    def __init__(self, scale):
        self.scale = scale
        self.kept = torch.tensor(float(scale))

    def _of(self, value):
        return self.scale * value + 1

    def labels(self, labels, secret):
        return self._of(labels)

    def wrap_bottom(self, bottom, width):
        return nn.Sequential(bottom, nn.Softshrink(self.scale))

    def wrap_top(self, top, width):
        return nn.Sequential(top, nn.Softshrink(self.scale))

    def batch(self, inputs, labels, context):
        return self._of(inputs), labels

    def embedding(self, cut, context):
        return self._of(cut)

    def logits(self, logits, context):
        return self._of(logits)

    def received(self, cut, grad, context):
        return self._of(grad)

    def gradient(self, grad, labels, context):
        return self._of(grad)

    def targets(self, targets, classes, context):
        return self._of(targets)

    def fit(self, bottom, inputs, secret):
        bottom.lambd = self._of(bottom.lambd)

    def local_loss(self, cut, inputs, context):
        return self.scale * cut.sum()

    def loss(self, cuts, labels, logits, context):
        return self.scale * logits.sum()

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


class TestChain:
    chain = Chain([Affine(2), Defense(), Affine(3)])
    ones = torch.ones(2)

    def test_values_go_through_in_the_order_given(self):
        """First 2 * 1 + 1 = 3, then 3 * 3 + 1 = 10; the other way round gives 9."""
        chain, ones = self.chain, self.ones
        results = [
            chain.labels(ones, SECRET),
            chain.batch(ones, None, CONTEXT)[0],
            chain.embedding(ones, CONTEXT),
            chain.logits(ones, CONTEXT),
            chain.gradient(ones, ones, CONTEXT),
            chain.targets(ones, 2, CONTEXT),
            chain.received(ones, ones, CONTEXT),
        ]
        assert [result.tolist() for result in results] == [[10, 10]] * 7
        bottom = nn.Softshrink(1)
        chain.fit(bottom, ones, SECRET)
        assert bottom.lambd == 10
        assert Chain([Affine(3), Affine(2)]).embedding(ones, CONTEXT).tolist() == [9, 9]

    @pytest.mark.parametrize("wrap", ["wrap_bottom", "wrap_top"])
    def test_the_first_wraps_innermost(self, wrap):
        wrapped = getattr(self.chain, wrap)(nn.Identity(), 2)
        assert [wrapped[0][1].lambd, wrapped[1].lambd] == [2, 3]

    def test_losses_are_added(self):
        assert self.chain.local_loss(self.ones, self.ones, CONTEXT) == 2 * (2 + 3)
        assert self.chain.loss({}, self.ones, self.ones, CONTEXT) == 2 * (2 + 3)
        assert Chain([Defense(), Defense()]).loss({}, self.ones, self.ones, CONTEXT) is None

    def test_each_of_more_than_ten_members_has_its_own_state(self):
        chain = Chain([Affine(scale) for scale in range(1, 13)])
        other = Chain([Affine(0) for _ in range(12)])
        other.load_state_dict(chain.state_dict())
        assert [int(member.kept) for member in other.members] == list(range(1, 13))


def test_what_a_defense_uses_is_what_it_overrides():
    assert uses(make("label_free"), "fit")
    assert uses(make("none+label_free"), "fit")
    assert not uses(make("none+layer_norm"), "fit")


def test_a_spec_of_several_is_a_chain():
    chain = make("layer_norm+none")
    assert [type(member).__name__ for member in chain.members] == ["LayerNorm", "Undefended"]
    assert not isinstance(make("none"), Chain)
    with pytest.raises(UnknownNameError, match="no defense is called 'layernorm'") as caught:
        make("none+layernorm")
    assert caught.value.fix == "did you mean 'layer_norm'?"


def test_layer_norm_against_numpy():
    wrapped = make("layer_norm").wrap_bottom(nn.Identity(), width=16)
    cut = torch.randn(5, 16, generator=generator(0, "test")) * 3 + 1
    values = cut.numpy().astype(np.float64)
    centred = values - values.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(wrapped(cut).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert list(wrapped.parameters()) == []


class Promising(Defense):
    def __init__(self, what):
        self.what = what

    def privacy(self):
        return (PrivacyStatement(protects=self.what, against="anybody"),)


def test_a_chain_promises_what_its_members_promise():
    chain = Chain([Promising("labels"), Defense(), Promising("inputs")])
    assert [promise.protects for promise in chain.privacy()] == ["labels", "inputs"]


def test_the_sign_of_a_number_joins_nothing():
    assert parts("none+layer_norm") == ["none", "layer_norm"]
    assert parts("noise:sigma=1e+2+none") == ["noise:sigma=1e+2", "none"]


class Peeking(Defense):
    """Looks at labels to shape gradients."""

    side = "label"

    def gradient(self, grad, labels, context):
        return grad * labels[:, None]


class LabelLoss(Defense):
    def loss(self, cuts, labels, logits, context):
        return logits.sum()


@pytest.fixture
def strangers(monkeypatch):
    monkeypatch.setitem(DEFENSES._members, "peeking", Peeking)
    monkeypatch.setitem(DEFENSES._members, "label_loss", LabelLoss)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ("mixup+gradient_noise", "Mixup, which looks at labels in 'loss'"),
        ("gradient_noise+label_loss", "LabelLoss, which looks at labels in 'loss'"),
        ("gradient_noise+peeking", "Peeking, which looks at labels in 'gradient'"),
        ("gradient_averaging+gradient_noise", "GradientAveraging, which may mix rows"),
        ("tpsl+peeking", "Peeking, which looks at labels in 'gradient'"),
        ("tpsl+marvell", "Marvell, which looks at labels in 'gradient'"),
        ("label_loss+tpsl", "LabelLoss, which looks at labels in 'loss'"),
        ("clipped_noise+mixup", "Mixup, which may mix rows in 'batch'"),
    ],
)
def test_company_in_which_an_epsilon_is_untrue(strangers, spec, where):
    with pytest.raises(SpecError, match="does not hold beside") as caught:
        make(spec)
    assert where in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    "spec",
    [
        "gradient_noise+gradient_averaging",
        "gradient_noise+max_norm",
        "gradient_sparsification+gradient_noise",
        "label_dp:epsilon=1+peeking+label_loss",
        "tpsl+gradient_noise+gradient_sparsification",
        "gradient_noise:norm=inf+label_loss",
        "clipped_noise:norm=inf+mixup",
        "passport+layer_norm+clipped_noise+split_guard:share=0.1",
    ],
)
def test_company_that_changes_nothing(strangers, spec):
    parted = [promise for part in parts(spec) for promise in make(part).privacy()]
    assert list(make(spec).privacy()) == parted


@pytest.mark.parametrize("name", ["clipped_noise", "gradient_noise", "tpsl", "max_norm", "mixup"])
def test_the_same_draws_are_not_made_twice(name):
    with pytest.raises(SpecError, match="occurs twice in a chain"):
        make(f"{name}+layer_norm+{name}")


@pytest.mark.parametrize(
    ("name", "wrap"), [("clipped_noise", "wrap_bottom"), ("gradient_noise", "wrap_top")]
)
def test_a_model_that_mixes_rows_has_no_epsilon_a_row(name, wrap):
    mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(SpecError, match="the model normalises over the batch"):
        getattr(make(name), wrap)(mixing, 4)
    unbounded = make(f"{name}:norm=inf")
    assert getattr(unbounded, wrap)(mixing, 4) is mixing
    plain = nn.Linear(4, 4)
    assert getattr(make(name), wrap)(plain, 4) is plain
