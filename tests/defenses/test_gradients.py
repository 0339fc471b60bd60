"""TPSL, averaging and sparsification against closed forms and loops."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch.nn.functional import cross_entropy

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator
from vfl.defenses import LabelKind, make
from vfl.models.losses import CrossEntropy, Focal

LENDER, OTHER = (Secret.of_simulation(0, name) for name in ("lender", "other"))
GRAD = torch.randn(10, 7, generator=generator(0, "grad"))
LABELS = torch.arange(10) % 3


def context(secret=LENDER, step=2):
    return StepContext(step, training=True, secret=secret)


class TestTpsl:
    def noise_in(self, classes, epsilon=2.0, rows=4000, at=None):
        """What the gradient of the logits is more than that of the mean loss, times the rows."""
        labels = torch.arange(rows) % classes
        logits = torch.randn(rows, classes, generator=generator(0, "logits")).requires_grad_()
        defense = make(f"tpsl:epsilon={epsilon}")
        plain = cross_entropy(logits, labels)
        assert defense.loss({}, labels, logits, at or context()) is None
        plain.backward()
        exact = (logits.detach().softmax(1) - torch.eye(classes)[labels]) / rows
        return ((logits.grad - exact) * rows).double().numpy()

    def test_two_classes_get_noise_along_the_line_that_divides_them(self):
        noise = self.noise_in(2)
        np.testing.assert_allclose(noise.sum(1), 0, atol=1e-6)
        assert kstest(2.0 * noise[:, 0], "laplace").pvalue > 0.01  # scale 1 / epsilon

    def test_more_classes_get_noise_in_each_logit(self):
        noise = self.noise_in(4)
        assert kstest(2.0 * noise.ravel() / 2, "laplace").pvalue > 0.01  # scale 2 / epsilon
        assert abs(np.corrcoef(noise.T)[0, 1]) < 0.05

    def test_it_is_the_label_partys(self):
        assert np.array_equal(self.noise_in(2), self.noise_in(2))
        assert not np.allclose(self.noise_in(2), self.noise_in(2, at=context(OTHER)))
        assert not np.allclose(self.noise_in(2), self.noise_in(2, at=context(step=3)))

    def test_its_promise_is_of_an_epoch(self):
        (promise,) = make("tpsl:epsilon=0.5").privacy()
        assert (promise.epsilon, promise.unit, promise.per) == (0.5, "label", "epoch")
        assert ": epsilon 0.5 for one label in one epoch (" in str(promise)

    def test_what_it_has_no_meaning_for(self):
        with pytest.raises(SpecError, match="the labels of a regression"):
            make("tpsl").prepare(LabelKind(None))
        with pytest.raises(SpecError, match="every row to weigh the same"):
            make("tpsl").prepare(LabelKind(2, weighted=True))
        with pytest.raises(SpecError, match="the gradient of the cross-entropy"):
            make("tpsl").prepare(LabelKind(2, loss=Focal()))
        with pytest.raises(SpecError, match="one gradient of a row in an epoch"):
            make("tpsl").prepare(LabelKind(2, local_steps=2))
        make("tpsl").prepare(LabelKind(2, loss=CrossEntropy(smoothing=0.1)))


class TestAveraging:
    def test_groups_have_their_mean(self):
        sent = make("gradient_averaging:rows=3").gradient(GRAD, LABELS, context())
        groups = {}
        for row, value in enumerate(sent.tolist()):
            groups.setdefault(tuple(value), []).append(row)
        assert sorted(map(len, groups.values())) == [3, 3, 4]  # 10 rows in groups of 3 and more
        for mean, rows in groups.items():
            np.testing.assert_allclose(mean, GRAD.numpy()[rows].mean(0), rtol=1e-5, atol=1e-6)

    def test_groups_change_with_step_and_secret_and_know_no_label(self):
        def groups(at, labels=LABELS):
            return make("gradient_averaging").gradient(GRAD, labels, at)

        assert torch.equal(groups(context()), groups(context(), LABELS.flip(0)))
        assert not torch.equal(groups(context()), groups(context(OTHER)))
        assert not torch.equal(groups(context()), groups(context(step=3)))

    @pytest.mark.parametrize("rows", [1, 10, 11])
    def test_groups_as_small_and_as_large_as_they_get(self, rows):
        sent = make(f"gradient_averaging:rows={rows}").gradient(GRAD, LABELS, context())
        torch.testing.assert_close(sent, GRAD if rows == 1 else GRAD.mean(0).expand(10, 7))


@pytest.mark.parametrize(("share", "most"), [(0.01, 1), (0.3, 3), (0.5, 4), (1.0, 7)])
def test_sparsification_against_a_sort(share, most):
    sent = make(f"gradient_sparsification:share={share}").gradient(GRAD, LABELS, context()).numpy()
    for row, before in zip(sent, GRAD.numpy(), strict=True):
        kept = np.argsort(-np.abs(before))[:most]
        expected = np.zeros_like(before)
        expected[kept] = before[kept]
        assert np.array_equal(row, expected)
