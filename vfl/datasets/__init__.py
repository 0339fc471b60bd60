"""Data: tables and pictures become one `PartyData` per party, with aligned and encoded rows.

>>> data = load_bundled("digits", ["bank", "shop"], "lender", Dealing(seed=0))
>>> data["bank"]
PartyData(name='bank', rows=1797, inputs=(1797, 1, 8, 4), labels=False, classes=None, \
split=Split(train=1258, validation=180, test=359))
"""

from __future__ import annotations

from vfl.datasets.alignment.join import align, sort_by_id
from vfl.datasets.encode import TASKS, Encoder, TableEncoder, encode_labels, read_encoder
from vfl.datasets.files import read_table
from vfl.datasets.load import (
    Dealing,
    Label,
    load_bundled,
    load_for_prediction,
    load_own,
    load_parties,
    load_table,
)
from vfl.datasets.party import PartyData
from vfl.datasets.sources import SOURCES, SetFormat
from vfl.datasets.split import Fold, Split, split_fixed, split_fold, split_parts, split_rows
from vfl.datasets.table import OwnTable, TableFormat, pick_columns

__all__ = [
    "SOURCES",
    "TASKS",
    "Dealing",
    "Encoder",
    "Fold",
    "Label",
    "OwnTable",
    "PartyData",
    "SetFormat",
    "Split",
    "TableEncoder",
    "TableFormat",
    "align",
    "encode_labels",
    "load_bundled",
    "load_for_prediction",
    "load_own",
    "load_parties",
    "load_table",
    "pick_columns",
    "read_encoder",
    "read_table",
    "sort_by_id",
    "split_fixed",
    "split_fold",
    "split_parts",
    "split_rows",
]
