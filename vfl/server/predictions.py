"""Predictions as a table at the label party: its own ids, the answer, the probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from pandas.api.types import is_numeric_dtype
from torch import Tensor

from vfl.datasets import PartyData
from vfl.storage import write_text
from vfl.text import formula_free


def prediction_table(
    data: PartyData, outputs: Tensor, classes: Sequence[str | int] | None
) -> pd.DataFrame:
    """One row a predicted row, named by the party's own ids, or by its position without ids.

    Args:
        data: the label party's rows, whose ids name the rows.
        outputs: axes (rows, classes), or (rows, 1) for a regression.
        classes: what the outputs stand for; None for a regression.
    """
    rows = data.split.test
    table = pd.DataFrame({"id": rows if data.ids is None else data.ids[rows]})
    if classes is None:
        table["prediction"] = outputs[:, 0].numpy()
        return table
    probabilities = torch.softmax(outputs, dim=1)
    table["prediction"] = [classes[index] for index in probabilities.argmax(dim=1).tolist()]
    for index, name in enumerate(classes):
        table[f"probability_{name}"] = probabilities[:, index].numpy()
    return table


def write_predictions(
    path: Path, data: PartyData, outputs: Sequence[Tensor], classes: Sequence[str | int] | None
) -> None:
    """Write the table as CSV, atomically, for its owner alone.

    Ids and names of classes that a spreadsheet would take for a formula get an apostrophe.
    """
    table = prediction_table(data, torch.cat(list(outputs)), classes)
    for name in ("id", "prediction"):
        if not is_numeric_dtype(table[name]):
            table[name] = [formula_free(x) if isinstance(x, str) else x for x in table[name]]
    table.columns = [formula_free(name) for name in table.columns]
    write_text(path, table.to_csv(index=False))
