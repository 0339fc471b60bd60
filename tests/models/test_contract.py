"""What every bottom and top by name must do, whatever it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vfl.core import seeds
from vfl.core.errors import BadOptionError
from vfl.models import BOTTOMS, TOPS, make_bottom, make_top
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import save_decoder

CELL_CASES = [
    ("mlp", (10,), 7),
    ("mlp:hidden=none", (10,), 7),
    ("mlp:hidden=8-8-8,batch_norm=true,dropout=0.5,last=relu", (1, 8, 4), 7),
    ("mlp:hidden=8,batch_norm=true,last=batch_norm_relu", (10,), 7),
    ("mlp:activation=gelu", (1,), 1),
    ("cnn", (1, 14, 28), 16),
    ("cnn:channels=4-8", (3, 28, 28), 16),
    ("cnn:channels=4-8", (1, 8, 4), 16),
    ("cnn:channels=4-8", (1, 3, 1), 16),
    ("cnn:channels=4-8,kernels=5-5,hidden=12-6", (3, 32, 32), 10),
    ("resnet20", (3, 16, 16), 10),
    ("resnet20", (1, 8, 4), 64),
    ("efficientnet_b0", (3, 32, 32), 16),
    ("vit:patch=4,tokens=16,layers=1,heads=2", (3, 8, 8), 16),
    ("vit:patch=2,tokens=8,layers=2,heads=2,dropout=0.2", (1, 4, 4), 5),
    ("identity", (2, 3), 6),
    ("hog", (1, 8, 8), 36),
    ("hog:cell=3,orientations=4", (3, 9, 4), 16),
    ("decoder_middle:words=31,tokens=4,layers=2,heads=2,front=1", (20,), 4),
    ("periodic", (10,), 7),
    ("periodic:first=2,frequencies=3,size=5,sigma=0.5,hidden=8,dropout=0.2", (10,), 7),
]
#: Bottoms of whole numbers, whose inputs have no gradient.
NUMBER_CASES = [
    ("gru4rec:items=30", (9,), 6),
    ("gru4rec:items=30,embedding=5,dropout=0.2", (2,), 4),
    ("textcnn:words=31", (9,), 6),
    ("decoder_front:words=31,tokens=4,layers=2,heads=2,front=1", (9,), 36),
    ("textcnn:words=31,embedding=5,dropout=0.2", (2,), 3),
    ("pretrained:name=small,layer=1", (9,), 6),
    ("pretrained:name=small,pool=tokens", (3,), 7),
]
BOTTOM_CASES = [*CELL_CASES, *NUMBER_CASES]
TOP_CASES = [
    ("mlp", 12, 10),
    ("mlp:hidden=none", 12, 1),
    ("mlp:hidden=16-8,activation=tanh,batch_norm=yes,dropout=0.1", 12, 3),
    ("linear", 12, 2),
    ("identity", 3, 3),
    ("decoder:words=31,tokens=4,layers=2,heads=2,front=1", 20, 3),
]


@pytest.fixture(autouse=True)
def small_model(tmp_path, monkeypatch):
    """A model under the name 'small', of 31 tokens."""
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    with seeds.scoped(0):
        save_decoder(tmp_path / "small", Decoder(DecoderShape(vocabulary=31, width=8, heads=2)))


def built_bottom(spec: str, shape: tuple[int, ...], width: int, key: int = 0) -> nn.Module:
    with seeds.scoped(key):
        return make_bottom(spec).build(shape, width)


def built_top(spec: str, width: int, outputs: int, key: int = 0) -> nn.Module:
    with seeds.scoped(key):
        return make_top(spec).build(width, outputs)


def inputs_of(rows: int, shape: tuple[int, ...], spec: str = "") -> torch.Tensor:
    draw = seeds.generator(0, "inputs")
    if spec in [case[0] for case in NUMBER_CASES]:
        return torch.randint(0, 31, (rows, *shape), generator=draw).float()
    return torch.randn(rows, *shape, generator=draw)


def test_every_registered_name_is_under_test():
    assert {spec.partition(":")[0] for spec, _, _ in BOTTOM_CASES} == set(BOTTOMS.names())
    assert {spec.partition(":")[0] for spec, _, _ in TOP_CASES} == set(TOPS.names())


@pytest.mark.parametrize(("spec", "shape", "width"), BOTTOM_CASES)
@pytest.mark.parametrize("rows", [2, 5])
def test_bottom_gives_rows_by_width(spec, shape, width, rows):
    cut = built_bottom(spec, shape, width)(inputs_of(rows, shape, spec))
    assert cut.shape == (rows, width)
    assert cut.dtype == torch.float32


@pytest.mark.parametrize(("spec", "width", "outputs"), TOP_CASES)
def test_top_gives_rows_by_outputs(spec, width, outputs):
    assert built_top(spec, width, outputs)(inputs_of(5, (width,))).shape == (5, outputs)


@pytest.mark.parametrize(("spec", "shape", "width"), BOTTOM_CASES)
def test_gradient_reaches_inputs_and_every_parameter_of_a_bottom(spec, shape, width):
    module = built_bottom(spec, shape, width)
    rows = inputs_of(16, shape, spec).requires_grad_()
    with seeds.scoped(1):  # dropout draws
        module(rows).square().sum().backward()
    if (spec, shape, width) in CELL_CASES:
        assert rows.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() > 0 for p in weights_before_a_norm(module))


@pytest.mark.parametrize(("spec", "width", "outputs"), TOP_CASES)
def test_gradient_reaches_the_cut_and_every_parameter_of_a_top(spec, width, outputs):
    module = built_top(spec, width, outputs)
    cut = inputs_of(16, (width,)).requires_grad_()
    with seeds.scoped(1):
        module(cut).square().sum().backward()
    assert cut.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() > 0 for p in weights_before_a_norm(module))


def weights_before_a_norm(module: nn.Module) -> list[nn.Parameter]:
    """Weights only: a bias that a batch norm follows has, rightly, no gradient."""
    return [p for name, p in module.named_parameters() if "weight" in name]


@pytest.mark.parametrize(("spec", "shape", "width"), BOTTOM_CASES)
def test_same_key_same_weights_and_the_global_generator_is_left_alone(spec, shape, width):
    before = torch.random.get_rng_state()
    one, two = built_bottom(spec, shape, width, key=3), built_bottom(spec, shape, width, key=3)
    assert torch.equal(before, torch.random.get_rng_state())
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("spec", "shape", "width"), BOTTOM_CASES)
def test_a_prediction_does_not_depend_on_who_shares_its_batch(spec, shape, width):
    module = built_bottom(spec, shape, width).eval()
    rows = inputs_of(4, shape, spec)
    with torch.no_grad():
        torch.testing.assert_close(module(rows)[:1], module(rows[:1]), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no graphics card here")
@pytest.mark.parametrize(("spec", "shape", "width"), BOTTOM_CASES)
def test_a_card_gives_the_same_cut_and_gradients(spec, shape, width, monkeypatch):
    inputs, found = inputs_of(6, shape, spec), []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as `Compute` has it
    draws = "dropout" in spec or spec == "efficientnet_b0"
    for device in ("cuda", "cpu"):
        bottom = built_bottom(spec, shape, width).train(not draws).to(device)
        cut = bottom(inputs.to(device).requires_grad_(spec == "identity"))
        if not draws:
            cut.square().sum().backward()
        grads = [weight.grad.cpu() for weight in bottom.parameters() if weight.grad is not None]
        found.append([cut.detach().cpu(), *grads])
    largest = max(float(one.abs().max()) for one in found[1])  # some gradients are zero but for it
    for there, here in zip(*found, strict=True):
        assert torch.allclose(there, here, rtol=1e-3, atol=1e-3 * largest)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"mlp:hidden={hidden}" for hidden in ("64-", "0", "-5", "a")),
        *(f"mlp:dropout={dropout}" for dropout in ("1", "-0.1", "nan")),
        *("mlp:last=tanh", "mlp:batch_norm=maybe", "cnn:channels=32", "cnn:channels=1-2-3"),
        *("resnet20:widen=0", "resnet20:widen=1.5", "gru4rec", "gru4rec:items=0"),
        *("gru4rec:items=9,embedding=0", "gru4rec:items=9,dropout=1", "textcnn:words=0"),
        *("textcnn:embedding=-1", "vit:tokens=10,heads=3", "vit:patch=0", "vit:layers=0"),
        *("vit:dropout=1", "periodic:first=-1", "periodic:sigma=0", "periodic:frequencies=0"),
        "periodic:size=5000",
    ],
)
def test_options_out_of_range_are_refused(spec):
    with pytest.raises(BadOptionError):
        make_bottom(spec)
