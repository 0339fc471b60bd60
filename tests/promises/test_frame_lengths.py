"""Somebody who sees the lengths of frames and nothing else tries to learn labels from them."""

import os
from functools import lru_cache

import numpy as np
import pytest
import torch
from promise import BrokenPromiseError

from vfl.attacks.scoring import auc
from vfl.config import Experiment
from vfl.core.frame import Kind
from vfl.datasets import split_rows
from vfl.datasets.party import AlignedRows, Inputs
from vfl.session.schedule import Exchange
from vfl.training.local import LocalSession

CODECS = (
    "topk:k=6,values=4,packer=range",
    "quantise:values=4,packer=range",
    "relu:values=4",
    "relu:values=4,packer=bitmap",
    "relu:values=4,packer=enumerative",
    "l1:target=6",
    "rate",
)
#: Twice the deviation of the area under the curve where lengths say nothing of 600 rows.
CHANCE = 0.5 + 0.05


@lru_cache
def made():
    """1,500 made customers; class 1 has more in six of sixteen columns."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 1500)
    cells = draw.normal(size=(1500, 16)) * 0.6 + labels[:, None] * (np.arange(16) < 6)
    return cells.astype(np.float32), labels


@lru_cache
def bank():
    """Customers of a bank, numbers and codes of words made standard; class 1 bought."""
    from tables import table

    data = table("bank-marketing", 0)
    taken = np.random.default_rng(0).permutation(len(data["lender"].labels))[:4000]
    return data["bank"].inputs.numpy()[taken], data["lender"].labels.numpy()[taken]


@lru_cache
def trained(codec, rows):
    """A training by the rows that a function gives, and its weights."""
    cells, labels = rows()
    split = split_rows(len(cells), 0, 0.0, 0.4)
    parties = AlignedRows.of(len(cells), split).parties(
        {"bank": Inputs(cells)}, "lender", labels, (0, 1)
    )
    experiment = Experiment.model_validate(
        {
            "codec": codec,
            "parties": {"bank": {"width": 64}},
            "label": {"party": "lender"},
            "train": {"epochs": 6, "batch_size": 64},
        }
    )
    states = LocalSession(experiment, parties, outputs=2).run().training_states()
    return experiment, parties, {name: kept["state"] for name, kept in states.items()}


def lengths(codec, rows, ways):
    """Ask about each group of rows of each way; the bytes of each query, and the groups' labels."""
    experiment, parties, weights = trained(codec, rows)
    labels, seen = rows()[1], []

    def observe(party, direction, frame):
        if frame.kind is Kind.QUERY:
            seen.append(frame.wire_bytes)

    session = LocalSession(
        experiment, parties, mode="predict", outputs=2, weights=weights, observers=[observe]
    )
    test = parties["lender"].split.test
    groups = [group for way in ways(test, labels) for group in way]
    asked = (Exchange(step, "predict", 0, rows, last=False) for step, rows in enumerate(groups))
    session.go_on(None, asked)
    truth = torch.tensor([bool(labels[group[0]]) for group in groups])
    return torch.tensor(seen, dtype=torch.float64), truth


def single_rows(test, labels):
    return ([row] for row in test[:, None])


def of_one_class(test, labels):
    """Every sixteen rows of one class."""
    for one in (0, 1):
        own = test[labels[test] == one]
        yield own[: len(own) // 16 * 16].reshape(-1, 16)


def require_nothing_learned(codec, rows, ways, what):
    seen, truth = lengths(codec, rows, ways)
    area = auc(seen, truth)
    area = max(area, 1 - area)
    if area > CHANCE:
        raise BrokenPromiseError(
            f"{codec}: {int(seen.min())} to {int(seen.max())} bytes of {what} tell the label, "
            f"AUC {area:.3f}"
        )


@pytest.mark.parametrize("codec", CODECS)
def test_the_length_of_a_single_row_says_nothing_of_its_label(codec):
    """An observer of the network learns nothing of a row from the length of its query."""
    require_nothing_learned(codec, made, single_rows, "single rows")


@pytest.mark.parametrize("codec", CODECS)
def test_the_length_of_rows_of_one_class_does_not_say_which(codec):
    """An observer of the network learns nothing of sixteen rows from the length of their query."""
    require_nothing_learned(codec, made, of_one_class, "16 rows of one class")


@pytest.mark.skipif("VFL_DATA" not in os.environ, reason="a table below VFL_DATA")
@pytest.mark.parametrize("codec", ["quantise:values=4,packer=range", "relu:values=4"])
def test_the_length_of_a_customer_of_a_bank_says_nothing_of_the_label(codec):
    """What holds for made rows holds for real ones."""
    require_nothing_learned(codec, bank, single_rows, "single customers")
