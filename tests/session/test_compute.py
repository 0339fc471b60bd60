"""A party's device and precision: its own business, invisible on the wire."""

import pytest
import torch
from torch import nn

from vfl.config import Experiment
from vfl.core.errors import UserError
from vfl.datasets import Dealing, load_bundled
from vfl.session import Compute
from vfl.training.local import LocalSession

PARTIES = ("left", "right")


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300))


def session(data, **options):
    settings = Experiment.model_validate(
        {
            "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in PARTIES},
            "train": {"epochs": 2, "batch_size": 30, **options.pop("train", {})},
            **options.pop("settings", {}),
        }
    )
    return LocalSession(settings, data, outputs=10, **options)


@pytest.mark.parametrize("device", ["cuda:99", "warp"])
def test_a_device_that_is_not_here(data, device):
    with pytest.raises(UserError, match=f"cannot use the device '{device}'"):
        session(data, device=device)


def test_mixed_precision_is_off_unless_asked_for():
    """A product in bfloat16 is kept to 8 significant bits."""
    layer, inputs = nn.Linear(40, 3), torch.rand(5, 40)
    exact = layer(inputs)
    with Compute().forward():
        assert torch.equal(layer(inputs), exact)
    with Compute(precision="bfloat16").forward():
        mixed = layer(inputs)
    assert mixed.dtype is torch.bfloat16
    assert 0 < (mixed.float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("in_flight", [1, 3])
def test_in_mixed_precision_cuts_and_weights_are_float32(data, in_flight):
    kinds = set()

    def watch(party, direction, frame):
        if frame.kind.name == "CUT":
            values = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32)
            kinds.add(bool(torch.equal(values, values.bfloat16().float())))

    train = {"precision": "bfloat16", "in_flight": in_flight}
    mixed = session(data, train=train, observers=[watch]).run()
    exact = session(data, train={"in_flight": in_flight}).run()
    assert kinds == {True}  # float32 payloads whose values bfloat16 can hold
    weights = mixed.weights()
    assert {value.dtype for own in weights.values() for value in own.values()} == {torch.float32}
    losses = [each.label.history[-1]["train_loss"] for each in (mixed, exact)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.slow  # compiling takes tens of seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch in torch
def test_compiled_models_train_the_same_network_with_the_same_dropout(data):
    settings = {
        "parties": {n: {"width": 8, "bottom": "mlp:hidden=16,dropout=0.2"} for n in PARTIES}
    }
    whole, compiled = (
        session(data, train={"compile": on}, settings=settings).run() for on in (False, True)
    )
    for record, other in zip(whole.label.history, compiled.label.history, strict=True):
        assert other["train_loss"] == pytest.approx(record["train_loss"], rel=1e-5)
        assert other["validation_loss"] == pytest.approx(record["validation_loss"], rel=1e-5)
    weights = whole.weights(), compiled.weights()
    assert all(
        torch.allclose(value, weights[1][party][name], atol=1e-5)
        for party, own in weights[0].items()
        for name, value in own.items()
    )


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="C\\+\\+ compiler"):
        Compute(compiled=True)


@pytest.mark.parametrize(
    "wrong", [{"train": {"in_flight": 2}}, {"dp": {"noise": 1.0}}], ids=["in flight", "dp"]
)
def test_what_compiled_models_do_not_go_with_is_said_before_training(wrong):
    wrong = {**wrong, "train": {"compile": True, **wrong.get("train", {})}}
    with pytest.raises(ValueError, match=r"train\.compile"):
        Experiment.model_validate({"parties": {"left": {"width": 8}}, **wrong})
