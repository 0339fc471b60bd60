"""Mixup and passports: the loss of mixtures, and layers that only their owner can repeat."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator, scoped
from vfl.defenses import LabelKind, make
from vfl.defenses.mixup import mixture
from vfl.defenses.passport import PassportLayer
from vfl.models.losses import CrossEntropy, Focal

INPUTS = torch.randn(6, 3, generator=generator(0, "inputs"))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def context(party="bank", step=4):
    return StepContext(step, training=True, secret=Secret.of_simulation(0, party))


class TestMixup:
    def test_every_party_mixes_the_same_rows_alike(self):
        defense = make("mixup:alpha=1")
        pairs, share = mixture(4, 6, 1.0, 0)
        mixed, labels = defense.batch(INPUTS, None, context("bank"))
        expected = share * INPUTS.numpy() + (1 - share) * INPUTS.numpy()[pairs]
        np.testing.assert_allclose(mixed.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert labels is None
        assert torch.equal(mixed, make("mixup:alpha=1").batch(INPUTS, None, context("shop"))[0])
        assert not torch.equal(mixed, defense.batch(INPUTS, None, context(step=5))[0])
        other = make("mixup:alpha=1,seed=1").batch(INPUTS, None, context())[0]
        assert not torch.equal(mixed, other)

    def test_the_loss_is_that_of_mixed_labels(self):
        logits = torch.randn(6, 3, generator=generator(0, "logits"))
        pairs, share = mixture(4, 6, 1.0, 0)
        targets = share * one_hot(LABELS) + (1 - share) * one_hot(LABELS[pairs])
        extra = make("mixup:alpha=1").loss({}, LABELS, logits, context("lender"))
        total = cross_entropy(logits, LABELS) + extra
        torch.testing.assert_close(total, cross_entropy(logits, targets))

    def test_shares_follow_the_beta_law(self):
        shares = [mixture(step, 2, 0.4, 0)[1] for step in range(500)]
        assert kstest(shares, "beta", args=(0.4, 0.4)).pvalue > 0.01

    @pytest.mark.parametrize(
        "kind",
        [
            LabelKind(None),
            LabelKind(3, weighted=True),
            LabelKind(3, loss=Focal()),
            LabelKind(3, loss=CrossEntropy(smoothing=0.1)),
        ],
    )
    def test_losses_that_are_not_linear_in_labels_alike_are_refused(self, kind):
        with pytest.raises(SpecError):
            make("mixup").prepare(kind)

    @pytest.mark.parametrize("spec", ["mixup+confusion", "confusion+mixup"])
    def test_targets_that_are_no_labels_are_refused(self, spec):
        with pytest.raises(SpecError, match="Confusion trains on other targets"):
            make(spec)


class TestPassport:
    def layer(self, key=0, **options):
        with scoped(key):
            return PassportLayer(5, **({"count": 3, "reach": 2.0, "sigma": 0.1} | options))

    def test_the_layer_by_hand(self):
        layer = self.layer().eval()
        weight = layer.linear.weight.detach().numpy()

        def through(passports):
            values = passports.numpy() @ weight.T
            first, _, second = layer.autoencoder
            values = values @ first.weight.detach().numpy().T + first.bias.detach().numpy()
            values = np.where(values > 0, values, 0.01 * values)
            values = values @ second.weight.detach().numpy().T + second.bias.detach().numpy()
            return values.mean(0)

        rows = torch.randn(4, 5, generator=generator(0, "rows"))
        scale, shift = through(layer.scale_passports), through(layer.shift_passports)
        expected = scale * (rows.numpy() @ weight.T) + shift
        np.testing.assert_allclose(layer(rows).detach().numpy(), expected, rtol=1e-4, atol=1e-5)

    def test_passports_lie_between_minus_reach_and_zero_and_differ_by_owner(self):
        first, second = self.layer(0), self.layer(1)
        assert ((first.scale_passports <= 0) & (first.scale_passports >= -2)).all()
        assert not torch.isclose(first.scale_passports, second.scale_passports).any()
        assert not torch.isclose(first.scale_passports, first.shift_passports).any()

    def test_every_bottom_and_the_top_have_one(self):
        defense = make("passport")
        bottom, top = defense.wrap_bottom(nn.Identity(), 5), defense.wrap_top(nn.Identity(), 8)
        widths = [part.linear.out_features for part in (bottom[1], top[0])]
        assert widths == [5, 8]
        assert all(weights.requires_grad for weights in bottom.parameters())
        assert "1.scale_passports" in bottom.state_dict()
