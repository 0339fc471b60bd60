"""Row noise against its laws: clipping, deviations, and epsilons by numerical integration."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import kstest, norm

from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import PrivacyError, SpecError
from vfl.core.seeds import Secret, generator
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import LabelKind, make
from vfl.defenses.noise import RowNoise, gaussian_epsilon
from vfl.training.local import LocalSession

BANK, SHOP = (Secret.of_simulation(0, name) for name in ("bank", "shop"))
ROWS = torch.randn(64, 8, generator=generator(0, "rows")) * 3
LABELS = torch.arange(64) % 2


def delta_of(epsilon, sigma, sensitivity):
    """How far the densities of two shifted normal laws exceed e^epsilon times each other."""

    def excess(at):
        near, far = norm.pdf(at, 0, sigma), norm.pdf(at, sensitivity, sigma)
        return max(0.0, near - np.exp(epsilon) * far)

    where = sensitivity / 2 - epsilon * sigma**2 / sensitivity  # to its left the excess is positive
    return quad(excess, where - 40 * sigma, where, epsabs=1e-14, limit=500)[0]


@pytest.mark.parametrize("sigma", [0.7, 2.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_epsilon_of_gaussian_noise_by_integration(sigma, delta):
    epsilon = gaussian_epsilon(sigma, 2.0, delta)
    assert delta_of(epsilon, sigma, 2.0) == pytest.approx(delta, rel=1e-4)


def test_epsilons_at_the_ends():
    assert gaussian_epsilon(1e6, 1.0, 1e-5) == 0.0  # two laws 4e-7 apart in all
    assert gaussian_epsilon(0.01, 2.0, 1e-5) > 20_000  # s^2 / 2 of s = 200, and finite
    assert RowNoise(1.0, 0.0, "gaussian", 1e-5).epsilon is None
    assert RowNoise(float("inf"), 1.0, "laplace", 1e-5).epsilon is None
    assert RowNoise(3.0, 0.5, "laplace", 1e-5).epsilon == 4.0  # 2 C over 0.5 C


@pytest.mark.parametrize(("law", "order"), [("gaussian", 2), ("laplace", 1)])
def test_rows_are_clipped_in_the_norm_of_their_law(law, order):
    clipped = RowNoise(5.0, 1.0, law, 1e-5).clip(ROWS).numpy()
    before = np.linalg.norm(ROWS.numpy(), order, axis=1)
    after = np.linalg.norm(clipped, order, axis=1)
    assert (before > 5).any()
    assert (before < 5).any() or law == "laplace"
    np.testing.assert_allclose(after, np.minimum(before, 5), rtol=1e-5)
    np.testing.assert_allclose(clipped * before[:, None], ROWS.numpy() * after[:, None], rtol=1e-4)


def test_rows_of_zeros_and_no_rows_at_all():
    noise = RowNoise(1.0, 0.0, "gaussian", 1e-5)
    zeros = torch.zeros(2, 3, requires_grad=True)
    noise.clip(zeros).sum().backward()
    assert torch.isfinite(zeros.grad).all()
    assert noise.noised(torch.zeros(0, 3), BANK, "none").shape == (0, 3)


@pytest.mark.parametrize(("law", "name"), [("gaussian", "norm"), ("laplace", "laplace")])
def test_what_is_added_has_the_law_and_the_scale(law, name):
    rows = torch.zeros(4000, 5)
    found = RowNoise(2.0, 0.5, law, 1e-5).noised(rows, BANK, "law", unit=0.1).double().numpy()
    assert kstest(found.ravel() / (2.0 * 0.5 * 0.1), name).pvalue > 0.01


class TestGradientNoise:
    def test_it_clips_the_gradient_of_a_rows_own_loss(self):
        grad = ROWS / len(ROWS)  # what a mean loss sends
        sent = make("gradient_noise:norm=2,sigma=0").gradient(grad, LABELS, context(BANK))
        sizes = np.linalg.norm(len(ROWS) * sent.numpy(), axis=1)
        np.testing.assert_allclose(sizes, np.minimum(ROWS.norm(dim=1).numpy(), 2), rtol=1e-5)

    def test_its_noise_is_the_label_partys(self):
        assert_secret_noise(
            lambda at: make("gradient_noise:sigma=1").gradient(ROWS, LABELS, at),
        )

    def test_a_step_that_is_repeated_with_another_gradient_draws_anew(self):
        """A party that comes back with another cut must not see the difference without noise."""
        defense, other = make("gradient_noise:norm=inf,sigma=1"), ROWS.clone()
        other[0] += 1
        first = defense.gradient(ROWS, LABELS, context(BANK)) - ROWS
        second = defense.gradient(other, LABELS, context(BANK)) - other
        agreement = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(agreement) < 4 / np.sqrt(ROWS.numel())

    def test_its_promise(self):
        (promise,) = make("gradient_noise:norm=0.1,sigma=4,delta=1e-6").privacy()
        assert delta_of(promise.epsilon, 0.4, 0.2) == pytest.approx(1e-6, rel=1e-4)
        assert (promise.delta, promise.protects) == (1e-6, "labels")
        (none,) = make("gradient_noise:norm=inf,sigma=4").privacy()
        assert none.epsilon is None

    def test_weights_of_rows_are_refused(self):
        with pytest.raises(SpecError, match="every row to weigh the same"):
            make("gradient_noise").prepare(LabelKind(2, weighted=True))
        make("gradient_noise:norm=inf").prepare(LabelKind(2, weighted=True))

    def test_numbers_whose_scale_follows_from_all_labels_are_refused(self):
        with pytest.raises(SpecError, match="follow from all labels"):
            make("gradient_noise").prepare(LabelKind(None, scaled=True))
        make("gradient_noise:norm=inf").prepare(LabelKind(None, scaled=True))
        make("gradient_noise").prepare(LabelKind(None))  # a caller's own loop scales no labels


class TestClippedNoise:
    def test_its_noise_is_the_feature_partys(self):
        assert_secret_noise(lambda at: make("clipped_noise:sigma=1").embedding(ROWS, at))

    def test_its_promise(self):
        (promise,) = make("clipped_noise:norm=7,sigma=2").privacy()
        assert promise.epsilon == gaussian_epsilon(2.0, 2.0, 1e-5)
        assert (promise.protects, promise.unit, promise.per) == ("inputs", "record", "exchange")
        assert "in training" in make("clipped_noise:queries=false").privacy()[0].against
        assert make("clipped_noise:norm=inf").privacy()[0].epsilon is None

    def test_queries_that_repeat_give_nothing_to_average(self):
        defense = make("clipped_noise:norm=1,sigma=1")
        answer = defense.embedding(ROWS, query(step=3))
        assert torch.equal(answer, defense.embedding(ROWS.clone(), query(step=3)))
        assert answer.sub(clip(ROWS)).std() == pytest.approx(1.0, abs=0.1)

    @pytest.mark.parametrize("other", ["step", "rows", "secret", "phase"])
    def test_noise_is_never_used_for_other_rows(self, other):
        """Otherwise the difference of two answers would be that of the cuts."""
        defense = make("clipped_noise:norm=1,sigma=1")
        rows = torch.cat([ROWS[:-1], -ROWS[-1:]]) if other == "rows" else ROWS
        contexts = {"step": query(4), "secret": query(3, SHOP), "phase": context(BANK, 3)}
        first = defense.embedding(ROWS, query(3)) - clip(ROWS)
        second = defense.embedding(rows, contexts.get(other, query(3))) - clip(rows)
        agreement = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(agreement) < 4 / np.sqrt(ROWS.numel())

    def test_without_queries_cuts_are_only_clipped(self):
        found = make("clipped_noise:norm=1,sigma=1,queries=false").embedding(ROWS, query(3))
        assert torch.equal(found, clip(ROWS))


def clip(rows):
    return RowNoise(1.0, 1.0, "gaussian", 1e-5).clip(rows)


def context(secret, step=2):
    return StepContext(step, training=True, secret=secret)


def query(step, secret=BANK):
    return StepContext(step, training=False, secret=secret)


def assert_secret_noise(noised):
    """The same secret and step repeat it; another secret or step draws anew."""
    assert torch.equal(noised(context(BANK)), noised(context(BANK)))
    assert not torch.isclose(noised(context(BANK)), noised(context(SHOP))).any()
    assert not torch.isclose(noised(context(BANK)), noised(context(BANK, 3))).any()


@pytest.mark.parametrize("changed", [{"sigma": 2.0}, {"norm": 2.0}, {"law": "laplace"}])
def test_one_secret_gives_no_noise_twice_at_another_scale(changed):
    """Were it the same noise at two scales, twice one sum less the other would be the rows."""
    options = {"norm": math.inf, "sigma": 1.0, "law": "gaussian", "delta": 1e-5}
    rows, secret = torch.randn(5, 4), Secret.fresh()
    one = RowNoise(**options).noised(rows, secret, "x") - rows
    noise = RowNoise(**(options | changed))
    other = noise.noised(rows, secret, "x") - noise.clip(rows)
    ratio = (other / one).flatten()
    assert float(ratio.std()) > 0.1
    again = RowNoise(**options).noised(rows, secret, "x") - rows
    assert torch.equal(again, one)  # a resume repeats what was sent


def test_noise_on_logits_is_for_these_logits_alone():
    secret, labels = Secret.fresh(), torch.tensor([0, 1, 2])
    defense = make("tpsl:epsilon=1.0")
    context = StepContext(7, training=True, secret=secret)

    def noise(logits):
        logits = logits.clone().requires_grad_()
        defense.loss({}, labels, logits, context)
        (logits * 0).sum().backward()
        return logits.grad

    logits = torch.randn(3, 4)
    assert torch.equal(noise(logits), noise(logits))
    assert not torch.equal(noise(logits), noise(logits + 1e-3))


def test_a_decoder_that_mixes_rows_is_refused_beside_noise_on_gradients():
    """Its batch norm spreads one label over the gradients of all rows before the noise is added."""
    data = load_bundled("digits", ["one", "two"], "two", Dealing(5, limit=60))

    def session_of(codec, defense="gradient_noise"):
        experiment = Experiment.model_validate(
            {
                "parties": {"one": {"width": 8}, "two": {"width": 8}},
                "label": {"party": "two"},
                "codec": codec,
                "defense": defense,
            }
        )
        return LocalSession(experiment, data, outputs=10)

    with pytest.raises(PrivacyError, match="depends on the other rows") as refused:
        session_of("bottlenet:k=4")
    assert "codec-one" in refused.value.where
    session_of("size:k=4")
    session_of("bottlenet:k=4", "gradient_noise:norm=inf")
