"""Every path on a graphics card: the same training as on the processor, within rounding.

Without a card all of it is skipped. What a card rounds otherwise grows with every step, so that
trainings are short; payload sizes and whatever a codec decides by whole numbers are equal.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from killing import Killed, Killer

from vfl.config import Experiment, read_experiment
from vfl.config.run_folder import RunFolder
from vfl.datasets import Dealing, load_bundled
from vfl.mpc import ring
from vfl.training.local import LocalSession
from vfl.training.run import evaluate, predict, train

CARD = os.environ.get("VFL_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    CARD == "cuda" and not torch.cuda.is_available(), reason="no graphics card here"
)

EXAMPLES = Path(__file__).parents[1] / "examples"
PARTIES, WIDTH = ("left", "right"), 8
CODECS = (
    "none",
    "topk:k=3",
    "topk:k=3,values=4,packer=range,grad=4",
    "randtopk:k=3,values=8",
    "quantise:values=4",
    "quantise:values=3,packer=range,grad=bf16",
    "l1:values=8",
    "relu",
    "sign",
    "size:k=4",
    "size:k=4,kind=mask",
    "rate",
)
DEFENSES = (
    "layer_norm",
    "potential",
    "dcor",
    "nopeek",
    "probe",
    "bottleneck",
    "confusion",
    "label_free:kind=random",
    "label_free:kind=autoencoder,epochs=2",
    "label_free:kind=scarf,epochs=1",
    "label_free:features=4",
    "anchored",
    "pretrained:epochs=1",
    "label_dp:epsilon=1",
    "label_dp_two_stage:epochs=1",
    "gradient_noise",
    "tpsl:epsilon=0.1",
    "clipped_noise",
    "mixup:alpha=1",
    "gradient_averaging",
    "gradient_sparsification:share=0.1",
    "passport:count=2",
    "split_guard:start=0,checks=100",
)


@pytest.fixture(scope="module")
def digits():
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300), flatten=True)


def experiment_of(**changes):
    content = {
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in PARTIES},
        "train": {"epochs": 2, "batch_size": 30},
    }
    return Experiment.model_validate(content | changes)


def both(settings, data, outputs=10, session=LocalSession, **options):
    """The session on the card and on the processor."""
    return [
        session(settings, data, outputs=outputs, device=device, **options).run()
        for device in (CARD, "cpu")
    ]


def assert_alike(there, here, rel=2e-3, sizes=True):
    for record, other in zip(there.label.history, here.label.history, strict=True):
        assert record["train_loss"] == pytest.approx(other["train_loss"], rel=rel)
    if sizes:
        for way in ("up", "down"):
            assert there.ledger.total_bytes(way) == here.ledger.total_bytes(way)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_codecs(digits, codec, in_flight):
    settings = experiment_of(
        codec=codec, train={"epochs": 2, "batch_size": 30, "in_flight": in_flight}
    )
    learns = "range" in codec or codec in ("l1:values=8", "relu")
    assert_alike(*both(settings, digits), rel=1e-2, sizes=not learns)


@pytest.mark.parametrize("defense", DEFENSES)
def test_defenses(digits, defense):
    # Noise is drawn on the device, from the same secret by another generator.
    settings = experiment_of(defense=defense)
    there, here = both(settings, digits)
    drawn = defense.partition(":")[0] in {"label_free", "anchored", "pretrained", "bottleneck"}
    assert_alike(there, here, rel=0.5 if drawn else 1e-2)


@pytest.mark.parametrize("merge", ["concat", "sum"])
@pytest.mark.parametrize("top", ["linear", "mlp:hidden=12"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_tops_and_merges(digits, merge, top, optimizer):
    settings = experiment_of(
        merge=merge,
        label={"top": top},
        train={"epochs": 2, "batch_size": 30, "optimizer": optimizer, "learning_rate": 0.01},
    )
    assert_alike(*both(settings, digits))


def test_mixed_precision(digits):
    settings = experiment_of(train={"epochs": 2, "batch_size": 30, "precision": "bfloat16"})
    assert_alike(*both(settings, digits), rel=5e-2)


def test_a_secure_sum(digits):
    assert_alike(*both(experiment_of(secure="sum", merge="sum"), digits))


def test_shared_layers(digits, monkeypatch):
    monkeypatch.setattr(ring, "_LEAST_TERMS_OF_CARD", 1)
    settings = experiment_of(
        secure="beaver",
        merge="sum",
        parties={name: {"width": 32, "bottom": "mlp:hidden=none"} for name in PARTIES},
        train={"epochs": 2, "batch_size": 50, "optimizer": "sgd", "momentum": 0.0},
    )
    assert_alike(*both(settings, digits))


def test_a_network_that_nobody_holds(tmp_path, monkeypatch):
    """Ring elements are whole numbers; only where a share is cut off is left to fresh draws."""
    monkeypatch.setattr(ring, "_LEAST_TERMS_OF_CARD", 1)
    settings = read_experiment(EXAMPLES / "network_on_shares.toml")
    found = [train(settings, tmp_path, name, device=on) for name, on in (("a", CARD), ("b", "cpu"))]
    assert found[0]["test_log_loss"] == pytest.approx(found[1]["test_log_loss"], rel=1e-3)


@pytest.mark.parametrize("axes", [(64, 64, 64), (128, 1000, 500), (300, 2000, 33)])
def test_products_in_the_ring_are_exact_on_a_card(axes):
    rows, inner, columns = axes
    draw = torch.Generator().manual_seed(0)
    left = torch.randint(-(2**63), 2**63 - 1, (rows, inner), generator=draw)
    right = torch.randint(-(2**63), 2**63 - 1, (inner, columns), generator=draw)
    there = ring.limb_matmul(left.to(CARD), right.to(CARD))
    assert torch.equal(there.cpu(), left @ right)


@pytest.mark.parametrize("dp", [{"noise": 0.5}, {"noise": 0.5, "quantile": 0.5}])
def test_differential_privacy(digits, dp):
    settings = experiment_of(dp=dp | {"clip": 1.0})
    assert_alike(*both(settings, digits), rel=5e-2)


def test_branches(digits):
    parties = {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in PARTIES}
    parties["left"]["branches"] = 3
    assert_alike(*both(experiment_of(parties=parties, dp={"noise": 0.5}), digits), rel=5e-2)


@pytest.mark.parametrize("merge", ["concat", "sum"])
def test_a_middle_party(digits, merge):
    settings = experiment_of(
        merge=merge, middle={"party": "compute", "width": 12, "model": "mlp:hidden=20,last=relu"}
    )
    assert_alike(*both(settings, digits, session=LocalSession))


def write_table(path, rows=240):
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(rows, 6)).astype(np.float32)
    frame = pd.DataFrame(columns, columns=[f"x{number}" for number in range(6)])
    frame["kind"] = np.where(columns[:, 0] + columns[:, 3] > 0, "a", "b")
    frame["cost"] = columns[:, 1] - columns[:, 4]
    frame.insert(0, "key", range(rows))
    frame.to_csv(path, index=False)


RUNS = {
    "own columns": {
        "label": {"column": "kind", "party": "bank", "class_weight": "balanced"},
        "parties": {
            "bank": {"width": 5, "columns": ["x[0-2]"], "bottom": "mlp:hidden=8"},
            "shop": {"width": 5, "columns": ["x[3-5]"], "bottom": "mlp:hidden=8"},
        },
    },
    "target": {"label": {"column": "cost", "party": "clinic", "task": "regression"}},
    "tasks": {
        "label": {"column": "kind", "party": "clinic"},
        "tasks": [{"party": "insurer", "column": "cost", "task": "regression", "weight": 0.5}],
    },
    "early stopping": {
        "label": {"column": "kind", "party": "clinic"},
        "train": {"epochs": 4, "batch_size": 32, "keep": "best", "patience": 1},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_trained_evaluated_and_predicted(tmp_path, name):
    """Weights trained on a card are files like any other: both devices evaluate them alike."""
    write_table(tmp_path / "table.csv")
    content = {
        "name": "run",
        "data": {"source": str(tmp_path / "table.csv"), "id": "key", "validation": 0.1},
        "parties": {
            "bank": {"width": 5, "columns": ["x[0-2]"], "bottom": "mlp:hidden=8"},
            "shop": {"width": 5, "columns": ["x[3-5]"], "bottom": "mlp:hidden=8"},
        },
        "train": {"epochs": 2, "batch_size": 32},
    }
    settings = Experiment.model_validate(content | RUNS[name])
    there = train(settings, tmp_path, "there", device=CARD)
    here = train(settings, tmp_path, "here", device="cpu")
    loss = [key for key in here if "loss" in key]
    assert loss
    for key in loss:
        assert there[key] == pytest.approx(here[key], rel=1e-2)
    folder = tmp_path / "there"
    found = []
    for device in (CARD, "cpu"):
        evaluate(RunFolder.open(folder), device=device)
        found.append(RunFolder(folder).evaluation())
        predict(RunFolder.open(folder), device=device)
    for key in loss:
        assert found[0].get(key) == pytest.approx(found[1].get(key), rel=1e-4)


def stopped_on_the_card(settings, data, folder):
    """A training that ended after two epochs; checkpoints hold tensors of the processor."""
    steps = 2 * -(-len(data["label"].split.train) // 30)
    stop = Killer(steps + 1)
    with pytest.raises(Killed):
        LocalSession(
            settings, data, outputs=10, device=CARD, checkpoints=folder, observers=[stop]
        ).run()


@pytest.mark.parametrize("device", [CARD, "cpu"])
def test_a_run_that_was_stopped_on_a_card_goes_on(tmp_path, digits, device):
    """Bit by bit on the same device; on the processor within rounding."""
    settings = experiment_of(train={"epochs": 4, "batch_size": 30, "checkpoint_every": 5})
    stopped_on_the_card(settings, digits, tmp_path)
    whole, resumed = (
        LocalSession(settings, digits, outputs=10, device=device, checkpoints=folder).run()
        for folder in (None, tmp_path)
    )
    if device == CARD:
        assert resumed.weights_digest() == whole.weights_digest()
    losses = [one.label.history[-1]["train_loss"] for one in (resumed, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
