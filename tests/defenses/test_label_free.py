"""Bottoms that never learn a label: what they compute, and that no label reaches them."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator, scoped
from vfl.defenses import make

SECRET = Secret.of_simulation(0, "bank")
KINDS = ["random", "pca", "autoencoder", "scarf", "simclr", "vicreg", "vime"]


def inputs_of(rows=300, columns=10):
    """Rows that three hidden numbers explain."""
    draw = generator(rows, "inputs")
    hidden = torch.randn(rows, 3, generator=draw) * torch.tensor([3.0, 2.0, 1.0])
    noise = torch.randn(rows, columns, generator=draw)
    return hidden @ torch.randn(3, columns, generator=draw) + 0.1 * noise + 5


def bottom_of(spec, inputs, width=3, secret=SECRET):
    """The bottom as the feature party would have it before the first step."""
    defense = make(spec)
    with scoped(7):
        layers = nn.Sequential(nn.Flatten(), nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        bottom = defense.wrap_bottom(nn.Sequential(*layers, nn.Linear(16, width)), width)
        defense.fit(bottom, inputs, secret)
    return bottom


def test_components_are_those_of_scikit_learn():
    inputs = inputs_of()
    found = bottom_of("label_free:kind=pca,features=0", inputs)(inputs).double().numpy()
    expected = PCA(3).fit_transform(inputs.double().numpy())
    expected /= np.sqrt(expected.var(0).mean())
    np.testing.assert_allclose(np.abs(found), np.abs(expected), rtol=1e-3, atol=1e-3)


def test_random_features_come_before_the_components():
    inputs = inputs_of(rows=5000)  # more than one block
    bottom = bottom_of("label_free:features=64", inputs, width=8)
    weights, center = bottom.model.weights.double(), inputs.double().mean(0)
    features = torch.relu((inputs.double() - center) @ weights).numpy()
    expected = PCA(8, svd_solver="full").fit_transform(features)
    expected /= np.sqrt(expected.var(0).mean())
    np.testing.assert_allclose(
        np.abs(bottom(inputs).double().numpy()), np.abs(expected), rtol=2e-2, atol=2e-3
    )
    assert float(weights.var()) == pytest.approx(2 / 10, rel=0.3)


def test_a_cut_wider_than_its_inputs_ends_in_zeros():
    cut = bottom_of("label_free:features=0", inputs_of(), width=12)(inputs_of())
    assert (cut[:, 10:] == 0).all()
    assert (cut[:, :10].std(0) > 0).all()


def test_equal_rows_have_no_components():
    bottom = bottom_of("label_free:features=0", torch.ones(20, 10))
    assert torch.equal(bottom(torch.ones(2, 10)), torch.zeros(2, 3))


def test_an_autoencoder_keeps_what_rebuilds_the_rows():
    """Of one number a row, a linear reader rebuilds more than of an untrained bottom's."""
    inputs = inputs_of(600)
    unread = {}
    for spec in ("label_free:kind=random", "label_free:kind=autoencoder,epochs=30,mask=0.1"):
        cut = bottom_of(spec, inputs, width=1)(inputs).double().numpy()
        cut = np.c_[cut, np.ones(len(cut))]
        rebuilt = cut @ np.linalg.lstsq(cut, inputs.double().numpy(), rcond=None)[0]
        unread[spec] = ((inputs.numpy() - rebuilt) ** 2).mean() / inputs.var(0).mean().item()
    random, trained = unread.values()
    assert trained < 0.6 * random


def corrupted(inputs, share=0.5):
    """Each value with a chance of `share` another row's, by a loop."""
    draw, found = np.random.default_rng(0), inputs.clone()
    for row in range(len(inputs)):
        for column in range(inputs.shape[1]):
            if draw.random() < share:
                found[row, column] = inputs[draw.integers(len(inputs)), column]
    return found


@pytest.mark.parametrize(
    "spec", ["label_free:kind=scarf,epochs=40,mask=0.5", "pretrained:epochs=40,mask=0.5"]
)
def test_scarf_knows_a_corrupted_row_again(spec):
    """Of 100 new rows, fewer are more like the corrupted row than the one it was made of."""
    inputs = inputs_of(700)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    new, places = inputs[600:], {}
    for one in ("label_free:kind=random", spec):
        bottom = bottom_of(one, inputs[:600], width=8).eval()
        with torch.no_grad():
            whole, seen = bottom(new), bottom(corrupted(new))
        alike = nn.functional.cosine_similarity(whole[:, None], seen[None], dim=2)
        places[one] = float((alike > alike.diagonal()[:, None]).sum(1).double().mean())
    random, trained = places.values()
    assert trained < 0.8 * random


def test_a_pretrained_bottom_goes_on_learning():
    bottom = bottom_of("pretrained:epochs=1", inputs_of())
    assert all(weights.requires_grad for weights in bottom.parameters())
    assert all(part.training for part in bottom.modules())
    frozen = nn.Sequential(nn.Linear(10, 4).requires_grad_(False), nn.Linear(4, 3))
    before = frozen[0].weight.clone()
    make("pretrained:epochs=1").fit(frozen, inputs_of(), SECRET)
    assert torch.equal(frozen[0].weight, before)  # what does not learn does not learn here either
    assert not frozen[0].weight.requires_grad


@pytest.mark.parametrize("other", ["label_free", "anchored"])
def test_a_bottom_is_made_in_one_way(other):
    for spec in (f"pretrained+{other}", f"{other}+pretrained"):
        with pytest.raises(SpecError, match="trains the whole bottom"):
            make(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_it_stays_as_it_is(kind):
    inputs = inputs_of()
    bottom = bottom_of(f"label_free:kind={kind},epochs=1,features=32", inputs)
    before = {name: value.clone() for name, value in bottom.state_dict().items()}
    cuts = [bottom.train(mode)(inputs) for mode in (True, True, False)]
    assert torch.equal(cuts[0], cuts[1])
    assert torch.equal(cuts[0], cuts[2])
    assert not cuts[0].requires_grad
    assert not any(weights.requires_grad for weights in bottom.parameters())
    assert all(torch.equal(value, before[name]) for name, value in bottom.state_dict().items())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_it_follows_from_the_partys_secret(kind):
    inputs = inputs_of()
    spec = f"label_free:kind={kind},epochs=1,features=32"
    other = Secret.of_simulation(1, "bank")
    cuts = [bottom_of(spec, inputs, secret=secret)(inputs) for secret in (SECRET, SECRET, other)]
    assert torch.equal(cuts[0], cuts[1])
    assert not torch.allclose(cuts[0], cuts[2])


def test_a_few_rows_are_enough():
    for rows in (2, 129):
        for kind in KINDS:
            spec = f"label_free:kind={kind},epochs=1,features=32"
            assert torch.isfinite(bottom_of(spec, inputs_of(rows))(inputs_of())).all()


def test_gradients_tell_nothing():
    grad = torch.ones(4, 3)
    assert not make("label_free").gradient(grad, torch.arange(4), StepContext()).any()


@pytest.mark.parametrize(
    "other", ["potential", "dcor", "probe", "tpsl", "nopeek", "split_guard", "gradient_noise"]
)
def test_what_works_through_gradients_is_refused_beside_it(other):
    for spec in (f"label_free+{other}", f"{other}+label_free"):
        with pytest.raises(SpecError, match="works through gradients"):
            make(spec)


def test_what_is_about_rows_labels_or_the_top_goes_with_it():
    for other in ("layer_norm", "clipped_noise", "label_dp:flip=0.1", "mixup", "bottleneck"):
        assert len(make(f"label_free+{other}").members) == 2
