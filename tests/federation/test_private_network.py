"""A network that nobody holds on a real deployment: two holders of shares and a helper, TLS, keys.

Masks are drawn anew in every session and truncation depends on them, so that two trainings agree
to a few units of the fixed point, not to the bit.
"""

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from vfl.config.run_folder import RunFolder
from vfl.core.storage import read_json, read_lines
from vfl.session import secure_mode
from vfl.training import federated
from vfl.training.demo import run_in_process

pytestmark = pytest.mark.net

SECURE = "permuted:mode=fast"
HOLDERS = ("left", "right")
SETTINGS = (
    f"secure={SECURE}", "merge=concat", "data.validation=0", "label.top=mlp:hidden=16",
    *(f"parties.{name}.bottom=identity" for name in HOLDERS), "train.epochs=2",
    "train.batch_size=128", "train.optimizer=sgd", "train.momentum=0", "train.weight_decay=0",
    "train.learning_rate=0.5",
)  # fmt: skip


def opened(folders):
    """The weights that two holders have shares of."""
    left, right = (load_file(folder / "weights.safetensors") for folder in folders)
    assert all(share.dtype == torch.int64 for share in left.values())
    bits = secure_mode.make(SECURE).rules.bits
    return {name: (left[name] + right[name]).double() / 2**bits for name in left}


def test_a_private_network_computes_what_one_process_computes(deployed):
    folder, label = deployed
    path = federated.run_session(label, "train", "private", overrides=SETTINGS)
    summary = RunFolder.open(path).summary()
    alone = run_in_process(folder, label, lambda record: None, SETTINGS)
    same = read_json(alone / "summary.json")
    assert summary["test_accuracy"] == pytest.approx(same["test_accuracy"], abs=0.003)
    assert summary["test_accuracy"] > 0.85
    assert summary["test_loss"] == pytest.approx(same["test_loss"], rel=1e-3)
    assert len(list(read_lines(path / "metrics.jsonl"))) == 2
    learned = [
        {(one["what"], one["phase"], one["times"]) for one in figures["revealed"]
         if one["observer"] == "label"}
        for figures in (summary, same)
    ]  # fmt: skip
    assert learned[0] == learned[1]

    stores = [folder / name / "store" / "runs" / path.name / "parties" / name for name in HOLDERS]
    disclosed = read_json(stores[1] / "disclosed-train.json")["disclosed"]
    assert any("indices near the turning point" in one["what"] for one in disclosed)
    found, wanted = opened(stores), opened([alone / "parties" / name for name in HOLDERS])
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, weights in wanted.items():
        error = float((found[name] - weights).abs().max())
        assert error < 1e-3 * max(1.0, float(weights.abs().max())), name
    kept = load_file(path / "parties" / "label" / "weights.safetensors")
    assert kept == {}, "the label party holds no share"

    federated.run_session(label, "evaluate", "private")
    again = RunFolder.open(path).evaluation()
    assert again["test_accuracy"] == pytest.approx(summary["test_accuracy"], abs=0.003)
    federated.run_session(label, "predict", "private")
    table = pd.read_csv(path / "predictions.csv", dtype={"id": str}).set_index("id")
    truth = pd.read_parquet(folder / "label" / "digits.parquet").set_index("id")["digit"]
    assert len(table) == len(truth)
    assert (table["prediction"] == truth.sort_index()).mean() > 0.85
