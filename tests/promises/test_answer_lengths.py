"""Somebody who sees the lengths of HTTP answers and nothing else tries to learn what they say."""

import json

import numpy as np
import pandas as pd
import torch
from promise import BrokenPromiseError
from served import Serving, predicted

from vfl.attacks.scoring import auc
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.serving.front import LeadSettings
from vfl.serving.local import serve
from vfl.training import run

ROWS = 400


def test_the_length_of_an_answer_does_not_say_the_class(tmp_path):
    """An observer of the network learns nothing of a prediction from its length."""
    draw = np.random.default_rng(0)
    classes = draw.integers(0, 2, ROWS)
    table = pd.DataFrame(draw.normal(size=(ROWS, 3)), columns=["age", "income", "debt"])
    table["age"] += 3 * classes
    table["loan"] = np.where(classes, "repaid", "defaulted")
    table.insert(0, "customer", [f"c{number:03}" for number in range(ROWS)])
    table.to_csv(tmp_path / "rows.csv", index=False)
    content = {
        "data": {"source": str(tmp_path / "rows.csv"), "id": "customer"},
        "parties": {"bank": {"width": 4, "columns": ["age", "income", "debt"]}},
        "label": {"party": "lender", "column": "loan"},
        "train": {"epochs": 8, "batch_size": 16},
    }
    run.train(Experiment.model_validate(content), tmp_path / "runs", "one")
    folder = tmp_path / "runs" / "one"
    run.predict(RunFolder.open(folder))
    serving = Serving(folder, lambda: serve(folder, LeadSettings(port=0)))
    try:
        serving.client.wait_ready()
        lengths, told = [], []
        for customer in predicted(folder):
            status, text = serving.client.ask("/predict", {"ids": [customer]})
            assert status == 200, text
            lengths.append(float(len(text)))
            told.append(json.loads(text)["predictions"][0]["prediction"] == "repaid")
    finally:
        serving.stop()
    area = auc(torch.tensor(lengths), torch.tensor(told))
    area = max(area, 1 - area)
    if area > 0.65:
        least, most = int(min(lengths)), int(max(lengths))
        raise BrokenPromiseError(
            f"answers of {least} to {most} bytes tell the predicted class, AUC {area:.3f}"
        )
