"""Clipped sums beside a loop over rows, noise of a secret, and models that are refused."""

import numpy as np
import pytest
import torch
from torch import nn

from vfl.core.errors import BadOptionError, PrivacyError
from vfl.core.seeds import Secret, scoped
from vfl.models import BOTTOMS, make_bottom
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import save_decoder
from vfl.privacy.dpsgd import PrivateHalf, RowClipper
from vfl.privacy.premise import prove

#: Every built-in bottom by its name; rows that fit it, and whether norms need no loop over rows.
SHAPES = {
    "mlp": ("mlp:hidden=16-8,last=relu", (6,), 4, True),
    "cnn": ("cnn:channels=3-4", (1, 8, 8), 5, True),
    "vit": ("vit:patch=4,tokens=8,layers=1,heads=2", (1, 8, 8), 3, False),
    "gru4rec": ("gru4rec:items=9,embedding=4", (5,), 3, False),
    "textcnn": ("textcnn:words=10,embedding=4", (7,), 6, True),
    "decoder_front": ("decoder_front:words=10,tokens=8,layers=2,heads=2,front=1", (5,), 40, False),
    "decoder_middle": (
        "decoder_middle:words=10,tokens=8,layers=2,heads=2,front=1",
        (40,),
        8,
        False,
    ),
    "pretrained": ("pretrained:name=small", (5,), 3, True),
    "periodic": ("periodic:hidden=8", (4,), 3, False),
    "identity": ("identity", (4,), 4, True),
}
OVER_THE_BATCH = {"resnet20": (1, 8, 8), "efficientnet_b0": (3, 32, 32)}
ROWS = 7


@pytest.fixture(autouse=True)
def small_model(tmp_path, monkeypatch):
    """A model under the name 'small', of ten tokens."""
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    with scoped(0):
        save_decoder(tmp_path / "small", Decoder(DecoderShape(vocabulary=10, width=8, heads=2)))


def rows_for(spec, shape):
    draw = torch.Generator().manual_seed(3)
    if spec.startswith(("gru4rec", "textcnn", "decoder_front", "pretrained")):
        return torch.randint(0, 9, (ROWS, *shape), generator=draw).float()
    return torch.randn(ROWS, *shape, generator=draw)


def by_loop(model, rows, grad, norm, by="half"):
    """Every row through the model by itself, its gradient clipped, then summed: in numpy."""
    layers = [list(part.parameters(recurse=False)) for part in model.modules()]
    layers = [layer for layer in layers if layer]
    if by == "layer":
        norm = norm / np.sqrt(len(layers))
    totals = [np.zeros(tuple(weight.shape)) for weight in model.parameters()]
    norms = []
    for row, of_row in zip(rows, grad, strict=True):
        model.zero_grad()
        model(row[None]).backward(of_row[None])
        found = [
            np.zeros(tuple(w.shape)) if w.grad is None else w.grad.double().numpy()
            for w in model.parameters()
        ]
        place = {id(weight): at for at, weight in enumerate(model.parameters())}
        groups = [[place[id(w)] for w in layer] for layer in layers]
        for group in groups if by == "layer" else [sorted({at for one in groups for at in one})]:
            size = np.sqrt(sum((found[at] ** 2).sum() for at in group))
            norms.append(size)
            for at in group:
                totals[at] += found[at] * (min(1, norm / size) if size else 1)
    return totals, norms


def of_clipper(model, rows, grad, norm, by="half"):
    clipper = RowClipper(model, norm, by)
    prove(clipper, model, [rows.shape[1:]], "the model")
    with clipper.recording() as calls:
        output = model(rows)
    has_rule = clipper.follows_rules(calls, len(output))
    return clipper.sums(output, grad, list(model.parameters()), calls), has_rule


def close(total, totals):
    expected = np.concatenate([one.reshape(-1) for one in totals])
    np.testing.assert_allclose(total.detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_every_bottom_is_tried_here():
    without_weights = {"hog"}
    assert {*SHAPES, *OVER_THE_BATCH, *without_weights} == set(BOTTOMS.names())


@pytest.mark.parametrize("by", ["half", "layer"])
@pytest.mark.parametrize("norm", [0.02, 1e6])
@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"identity"}))
def test_sums_are_those_of_a_loop_over_rows(name, norm, by):
    spec, shape, width, quick = SHAPES[name]
    torch.manual_seed(0)
    model = make_bottom(spec).build(shape, width)
    rows, grad = rows_for(spec, shape), torch.randn(ROWS, width)
    totals, norms = by_loop(model, rows, grad, norm, by)
    assert norm == 1e6 or min(norms) > 0.02 or by == "layer", "every row is clipped, or none"
    (sums, before), has_rule = of_clipper(model, rows, grad, norm, by)
    assert has_rule is quick
    close(sums, totals)
    np.testing.assert_allclose(sorted(before.flatten()), sorted(norms), rtol=1e-3, atol=1e-6)


TWICE = nn.Linear(3, 3)
#: What `test_premise.py` does not draw; the shape of rows, and whether every layer has a rule.
MORE = {
    "strided": (nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, dilation=2, padding=1, bias=False),
                              nn.Flatten(), nn.Linear(36, 3)), (2, 9, 7), True),
    "in place": (nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (3,),
                 False),
    "twice": (nn.Sequential(TWICE, nn.Tanh(), TWICE), (3,), False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_sums_are_those_of_opacus():
    """Its ghost norms, from the same gradient of the output."""
    opacus = pytest.importorskip("opacus.grad_sample")
    torch.manual_seed(0)
    model = make_bottom("mlp:hidden=16-8").build((6,), 4)
    rows, grad = torch.randn(ROWS, 6), torch.randn(ROWS, 4)
    (sums, norms), _ = of_clipper(model, rows, grad, 0.5)
    theirs = opacus.GradSampleModuleFastGradientClipping(
        model, batch_first=True, loss_reduction="sum", max_grad_norm=0.5, use_ghost_clipping=True
    )
    output = theirs(rows)
    output.backward(grad, retain_graph=True)
    factors = theirs.get_clipping_coef()
    np.testing.assert_allclose(norms[0], theirs.get_norm_sample(), rtol=1e-4)
    theirs.disable_hooks()
    model.zero_grad()
    output.backward(grad * factors[:, None])
    close(sums, [weight.grad.numpy() for weight in model.parameters()])


@pytest.mark.parametrize("name", sorted(MORE))
def test_layers_of_ones_own(name):
    torch.manual_seed(0)
    model, shape, ruled = MORE[name]
    rows, grad = torch.randn(ROWS, *shape), torch.randn(ROWS, 3)
    totals, _ = by_loop(model, rows, grad, 0.3)
    (sums, _), has_rule = of_clipper(model, rows, grad, 0.3)
    assert has_rule is ruled
    close(sums, totals)


@pytest.mark.parametrize("name", sorted(OVER_THE_BATCH))
def test_a_model_that_looks_at_the_batch_is_refused_with_what_to_use(name):
    model = make_bottom(name).build(OVER_THE_BATCH[name], 8)
    with pytest.raises(PrivacyError, match="BatchNorm2d") as caught:
        RowClipper(model, 1.0)
    assert "GroupNorm" in caught.value.fix


def half(norm=1.0, noise=2.0, secret=b"1", batch_size=4.0, party="bank"):
    torch.manual_seed(0)
    model = nn.Linear(200, 50)
    own = Secret(secret * 32)
    return model, PrivateHalf(
        model, norm=norm, noise=noise, batch_size=batch_size, secret=own, party=party
    )


def stepped(step=0, rows=5, scale=1.0, **options):
    model, private = half(**options)
    inputs = torch.linspace(-1, 1, rows * 200).reshape(rows, 200)
    with private.recording() as calls:
        output = model(inputs)
    private.give_gradients(output, scale * torch.ones(rows, 50), calls, step)
    return torch.cat([weight.grad.reshape(-1) for weight in model.parameters()])


def test_noise_has_the_deviation_that_was_asked_for():
    quiet, loud = stepped(noise=1e-9), stepped(noise=2.0, norm=3.0)
    assert quiet.norm() <= 5 * 1.0 / 4
    draws = loud.double() - stepped(noise=1e-9, norm=3.0).double()
    assert float(draws.std()) == pytest.approx(2.0 * 3.0 / 4, rel=0.03)
    assert abs(float(draws.mean())) < 4 * 1.5 / np.sqrt(len(draws))


def test_a_clip_norm_converges_to_the_quantile_of_row_norms():
    """Norms of rows are spread evenly; with noise the norm ends within 10 % of each quantile."""
    for start, quantile in ((0.01, 0.5), (50.0, 0.5), (1.0, 0.8)):
        model = nn.Linear(1, 1, bias=False)
        own = Secret(b"3" * 32)
        half = PrivateHalf(
            model, norm=start, noise=1.0, batch_size=500, secret=own, party="bank",
            quantile=quantile,
        )  # fmt: skip
        half.clipper.trusts_rules = True  # row by row it takes two minutes
        sizes = torch.linspace(0.02, 4.0, 500)[:, None]
        ends = []
        for step in range(200):
            with half.recording() as calls:
                output = model(sizes)
            half.give_gradients(output, torch.ones(500, 1), calls, step)
            ends.append(half.clipper.norms.item())
        assert np.mean(ends[-50:]) == pytest.approx(4 * quantile, rel=0.1)


def test_counts_of_a_quantile_are_paid_for_by_the_noise():
    """1/s^2 of the sums and of the counts, in their sensitivities, make that of the whole."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    half = PrivateHalf(
        model, norm=1.0, noise=2.0, batch_size=4.0, secret=Secret(bytes(32)), party="bank",
        by="layer", quantile=0.5,
    )  # fmt: skip
    groups = len(half.clipper.norms)
    of_sums = half._noise / np.sqrt(groups)  # each has its own norm as a unit
    of_counts = (half._counts_noise / 2) / (np.sqrt(groups) / 2)
    assert of_sums**-2 + of_counts**-2 == pytest.approx(2.0**-2)


def logs_of_norms(*, rows: int, batch_size: float, noise: float, steps: int) -> np.ndarray:
    """Steps of the logarithm of a clip norm that follows the median."""
    model = nn.Linear(2, 1, bias=False)
    half = PrivateHalf(
        model, norm=1.0, noise=noise, batch_size=batch_size, secret=Secret(b"4" * 32),
        party="bank", quantile=0.5,
    )  # fmt: skip
    norms = [1.0]
    for step in range(steps):
        with half.recording() as calls:
            output = model(torch.ones(rows, 2))
        half.give_gradients(output, torch.ones(rows, 1), calls, step)
        norms.append(half.clipper.norms.item())
    return np.diff(np.log(norms))


def test_the_counts_of_a_quantile_are_moved_by_the_noise_they_are_said_to_have():
    """Without rows a norm moves by noise alone: exp(0.2 (q - 0.5 - n / batch)), n of s groups/2."""
    counts = logs_of_norms(rows=0, batch_size=50.0, noise=2.0, steps=600) / -0.2 * 50
    # A count of one group moves by a half.
    assert counts.std() == pytest.approx(10 * 2.0 / 2, rel=0.12)
    assert abs(counts.mean()) < 4 * 10 / np.sqrt(600)


def test_noise_alone_never_moves_a_clip_norm_by_a_large_factor():
    """The share is between -1 and 2, so a step moves the norm by exp(0.2 * 1.5) at most."""
    moved = logs_of_norms(rows=1, batch_size=1.0, noise=1000.0, steps=20)
    assert np.abs(moved).max() == pytest.approx(0.2 * 1.5)


def test_an_empty_batch_gets_noise_alone():
    empty = stepped(rows=0)
    assert float(empty.std()) == pytest.approx(2.0 / 4, rel=0.03)


def test_noise_repeats_with_the_step_and_never_on_something_else():
    one = stepped()
    assert torch.equal(one, stepped())
    quiet = stepped(noise=1e-9)
    for other in ({"step": 1}, {"secret": b"2"}, {"party": "shop"}, {"scale": 1e-3}):
        draws = stepped(**other) - stepped(noise=1e-9, **other)
        assert abs(float(torch.corrcoef(torch.stack([one - quiet, draws]))[0, 1])) < 0.05


@pytest.mark.parametrize("wrong", [{"norm": 0.0}, {"norm": float("inf")}, {"noise": 0.0}], ids=str)
def test_numbers_that_protect_nothing(wrong):
    with pytest.raises(BadOptionError):
        half(**wrong)
