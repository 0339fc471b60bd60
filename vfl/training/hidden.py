"""Statistics over the common rows of two tables; no party learns which rows are common.

The label party learns only the number of common rows, and sums of products of inputs over the
common rows (`vfl.mpc.three_party.intersection`). From these sums the label party computes linear
regressions of the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vfl.config import Experiment, read_party_file
from vfl.config.party_file import Consent
from vfl.config.validate import is_file_of_party, of_own_sources, refuse
from vfl.core.errors import ConfigError
from vfl.datasets import Split
from vfl.datasets.alignment.ids import check_unique, normalise, read_ids
from vfl.datasets.encode import encode_labels
from vfl.datasets.files import column_names, read_table
from vfl.datasets.load import Label, fit_inputs, own_columns
from vfl.datasets.table import OwnTable, id_columns
from vfl.mpc.rules import P0, P1, Rules
from vfl.mpc.three_party.intersection import intersect, moments
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.trio import Trio
from vfl.training.run import own_tables

#: Smallest number of common rows per input; with few common rows, the sums could disclose values of
#: single rows.
ROWS_AN_INPUT = 10
_WAIT_S = 600.0
_RCOND = 1e-6


@dataclass(frozen=True)
class HiddenStatistics:
    """Statistics that the label party learns, and the results that it computes from them.

    Attributes:
        common: number of rows that both parties have; the feature party learns this number as well.
        inputs: number of each party's inputs that the regression uses.
        left_out: number of each party's inputs that were left out, because too few of the party's
            rows have a value other than the most frequent one.
        explained: share of the label's variance that a linear regression explains (R2), adjusted
            for the number of inputs and averaged over classes; the key is the party whose inputs
            the regression uses, or "both".
        payload_bytes: number of bytes that were sent, by sender and receiver.
    """

    common: int
    inputs: dict[str, int]
    left_out: dict[str, int]
    explained: dict[str, float]
    payload_bytes: dict[str, int]


@dataclass(frozen=True)
class _Brought:
    """A party's ids and standardised inputs, axes (rows, inputs); labels are the last inputs."""

    keys: list[bytes]
    inputs: Tensor
    labels: int
    left_out: int


def hidden_statistics(experiment: Experiment, pad: int) -> HiddenStatistics:
    """Compute regressions of the label over hidden common rows; all parties run in this process.

    Args:
        experiment: experiment with a label party and one feature party, which have separate files.
        pad: number of rows to which both tables are padded, so that their sizes stay hidden.

    Raises:
        ConfigError: the experiment has other parties.
        ConsentError: too few rows are common: fewer than a party accepts, or too few for the number
            of inputs.
        UserError: see `vfl.datasets`; the error contains only counts.
    """
    refuse(of_own_sources(experiment))
    tables, label = own_tables(experiment), experiment.label.party
    others = [party for party in tables if party != label]
    if len(others) != 1 or label not in tables:
        raise ConfigError(
            "hidden statistics need a label party and one feature party with separate files",
            got=", ".join(tables) or "one table",
            fix="one experiment for each feature party",
        )
    (feature,) = others
    least = min_common(experiment, feature)
    brought = [_read(experiment, party, tables[party], least) for party in (label, feature)]
    widths = [each.inputs.shape[1] for each in brought]
    least = max(least, ROWS_AN_INPUT * (1 + sum(widths)))

    def program(party: Party) -> Tensor | None:
        role = party.role
        keys = brought[role].keys if role in (P0, P1) else None
        columns = brought[P1].inputs if role == P1 else None
        hidden = intersect(party, pad, widths[P1], keys, columns)
        own = brought[P0].inputs if role == P0 else None
        return moments(party, hidden, own, widths[P0], least)

    with Trio(Rules(), {"pad": pad, "inputs": widths}, _WAIT_S) as trio:
        sums = trio.run(program)[P0]
        traffic = trio.traffic()
    assert sums is not None, "P0 learns the sums"
    sent = {f"{each.sender} to {each.receiver}": 0 for each in traffic}
    for each in traffic:
        sent[f"{each.sender} to {each.receiver}"] += each.wire_bytes
    labels = brought[P0].labels
    of_label = list(range(1, 1 + widths[P0] - labels))
    of_feature = list(range(1 + widths[P0], 1 + sum(widths)))
    targets = list(range(1 + widths[P0] - labels, 1 + widths[P0]))
    return HiddenStatistics(
        common=round(float(sums[0, 0])),
        inputs={label: len(of_label), feature: len(of_feature)},
        left_out={label: brought[P0].left_out, feature: brought[P1].left_out},
        explained={
            label: explained(sums.numpy(), of_label, targets),
            feature: explained(sums.numpy(), of_feature, targets),
            "both": explained(sums.numpy(), [*of_label, *of_feature], targets),
        },
        payload_bytes=sent,
    )


def explained(sums: np.ndarray, inputs: list[int], targets: list[int]) -> float:
    """Return the adjusted R2 of a least-squares fit with constant; the mean over several targets.

    Args:
        sums: sums of the products of each pair of columns, axes (columns, columns); column 0 is the
            constant 1.
        inputs: positions of the columns that explain the targets.
        targets: positions of the columns that the regression explains.

    >>> x = np.array([[1.0, 0, 1], [1, 1, 3], [1, 2, 5], [1, 3, 7]])
    >>> round(explained(x.T @ x, [1], [2]), 6)
    1.0
    """
    chosen, rows = [0, *inputs], sums[0, 0]
    square, cross = sums[np.ix_(chosen, chosen)], sums[np.ix_(chosen, targets)]
    weights = np.linalg.lstsq(square, cross, rcond=_RCOND)[0]
    total = sums[targets, targets] - sums[0, targets] ** 2 / rows
    left = sums[targets, targets] - (weights * cross).sum(0)
    adjusted = 1 - left / total * (rows - 1) / (rows - len(chosen))
    return float(adjusted.mean())


def min_common(experiment: Experiment, party: str) -> int:
    """Return the smallest number of common rows that a party file accepts, or else the default."""
    source = experiment.parties[party].source or ""
    consent = read_party_file(Path(source)).consent if is_file_of_party(source) else Consent()
    return consent.min_common


def _read(experiment: Experiment, party: str, own: OwnTable, least: int) -> _Brought:
    label, rules = experiment.label, experiment.data.id_rules
    where, column = f"party '{party}'", label.column or ""
    known = column_names(own.source, own.form, f"the table of {where}")
    columns: list[str] = []
    if party in experiment.parties:
        asked = experiment.parties[party].columns or own.columns or ("*",)
        setting = f"parties.{party}.columns"
        columns = own_columns(
            known, asked, party, [Label(label.party, column)], own.id_column, setting
        )
    ids = [each for each in id_columns(own.id_column, known) if each in known]
    kept = [*ids, *columns, *([column] if party == label.party else [])]
    table = read_table(own.source, own.form, ids, f"the table of {where}", kept)
    texts = read_ids(table, own.id_column, where)
    keys = normalise(texts, rules)
    check_unique(keys, lambda: [texts], where, rules)
    split = Split(train=np.arange(len(keys)))
    found = fit_inputs(table, columns, split, own.shape, own.form).array
    inputs = np.zeros((len(keys), 0)) if found is None else found.reshape(len(keys), -1)
    inputs, left_out = _common_enough(inputs, least)
    labels = 0
    if party == label.party:
        codes, classes = encode_labels(table[column], label.task)
        targets = codes[:, None] if classes is None else codes[:, None] == np.arange(len(classes))
        targets, _ = _common_enough(targets[:, -1:] if targets.shape[1] == 2 else targets, least)
        labels = targets.shape[1]
        if not labels:
            raise ConfigError(
                "no class of the label has enough rows",
                where="label.column",
                want=f"a class with at least {least} rows, and as many rows of other classes",
            )
        inputs = np.concatenate([inputs, targets], axis=1)
    return _Brought(keys, torch.from_numpy(inputs), labels, left_out)


def _common_enough(inputs: np.ndarray, least: int) -> tuple[np.ndarray, int]:
    """Standardise inputs, without nearly constant columns; also return the number of those.

    If few rows have another value than the rest in an input, sums of this input would disclose
    which of these rows are common.
    """
    inputs = inputs.astype(np.float64)
    alike = [np.unique(each, return_counts=True)[1].max(initial=0) for each in inputs.T]
    kept = np.array([len(inputs) - most >= least for most in alike], dtype=bool)
    chosen = inputs[:, kept]
    return (chosen - chosen.mean(0)) / chosen.std(0), int((~kept).sum())
