"""Information in frame lengths for an observer of the network, and the cost of hiding it.

    python -m benchmarks.lengths                        # scikit-learn's digits
    python -m benchmarks.lengths --data bank-marketing  # the table below VFL_DATA

Each codec trains a network with ``pad=no``; the same weights then answer queries with ``pad=no``
and with ``pad=query``. An observer of the network guesses the class of a query from its length
only, for queries of a single row and for queries of 16 rows of one class. The AUC is that of the
class for which the lengths differ most from those of all other classes. For training frames, an
observer infers which batches contain more rows of a class than the median batch; this AUC is for
the second half of the training.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from benchmarks import harness
from vfl import compression
from vfl.attacks.scoring import auc
from vfl.compression.coding.padding import agreed_size
from vfl.config import Experiment
from vfl.core.errors import MissingDataError
from vfl.core.frame import HEADER_BYTES, Frame, Kind
from vfl.core.seeds import use_one_thread
from vfl.datasets import PartyData, split_rows
from vfl.datasets.load import fit_inputs
from vfl.datasets.party import AlignedRows, Inputs
from vfl.datasets.sources.scikit_learn import read_digits
from vfl.session import rules
from vfl.session.schedule import Exchange
from vfl.training.local import LocalSession

SPECS = (
    "topk:k=6,values=4,packer=range",
    "quantise:values=4,packer=range",
    "relu:values=4",
    "relu:values=4,packer=bitmap",
    "relu:values=4,packer=enumerative",
    "l1:target=6",
    "rate",
)
WIDTH, BATCH, ROWS, ONE_CLASS, MIXED = 64, 64, 6000, 16, 256


@dataclass(frozen=True)
class Lengths:
    """Mean lengths of a codec's frames with one kind of padding, in bytes, and their leakage.

    Attributes:
        codec: spec of the codec, without its padding.
        pad: ``no``, ``query`` or ``sizes``. With ``sizes``, every frame is padded to one of a few
            agreed sizes, which ``pad=always`` does only for training frames; the benchmark computes
            these lengths from the lengths with ``no``.
        single_auc, single_bytes: AUC and mean bytes for queries of a single row.
        class_auc, class_bytes: AUC and mean bytes for queries of 16 rows of one class.
        mixed_bytes: mean bytes for queries of 256 rows.
        train_auc, train_bytes: AUC and mean bytes for the cuts of training batches of 64 rows.
    """

    codec: str
    pad: str
    single_auc: float
    single_bytes: float
    class_auc: float
    class_bytes: float
    mixed_bytes: float
    train_auc: float
    train_bytes: float


def digits() -> tuple[pd.DataFrame, np.ndarray]:
    """Load pictures of digits with 64 pixels; the classes are the ten digits."""
    pictures, labels = read_digits()
    return pd.DataFrame(pictures.reshape(len(pictures), -1)).rename(columns=str), labels


def bank_marketing() -> tuple[pd.DataFrame, np.ndarray]:
    """Load customers of a bank in random order; the class states whether a customer bought."""
    file = Path(os.environ.get("VFL_DATA", "")) / "bank-marketing" / "bank-full.csv.gz"
    if not file.is_file():
        raise MissingDataError("the table does not exist", got=str(file), fix="set VFL_DATA")
    table = pd.read_csv(file, sep=";").sample(ROWS, random_state=0, ignore_index=True)
    return table, (table.pop("y") == "yes").to_numpy().astype(np.int64)


DATA: Mapping[str, Callable[[], tuple[pd.DataFrame, np.ndarray]]] = {
    "digits": digits,
    "bank-marketing": bank_marketing,
}


def bench_lengths(
    data: Literal["digits", "bank-marketing"] = "digits",
    codec: Sequence[harness.Whole] = SPECS,
    epochs: int = 20,
) -> list[Lengths]:
    """Measure how much frame lengths disclose, and what hiding them costs.

    Args:
        data: name of the data set.
        codec: codecs to measure, without the option pad; may be repeated.
        epochs: epochs of each training.
    """
    use_one_thread()
    table, labels = DATA[data]()
    split = split_rows(len(table), 0, 0.1, 0.4)
    aligned = AlignedRows.of(len(table), split)
    inputs: dict[str, Inputs] = {"bank": fit_inputs(table, list(table.columns), split)}
    parties = aligned.parties(inputs, "lender", labels, tuple(range(int(labels.max()) + 1)))
    rows: list[Lengths] = []
    for spec in codec:
        harness.say(f"{data}, {spec}")
        rows += _of_codec(spec, parties, split.test, labels[split.test], epochs)
    return rows


class Sent:
    """Observer of a link that sees only the lengths of frames."""

    def __init__(self) -> None:
        self.frame_bytes: dict[Kind, list[int]] = defaultdict(list)

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Record a frame's length."""
        self.frame_bytes[frame.kind].append(frame.wire_bytes)


def _of_codec(
    spec: str, parties: Mapping[str, PartyData], test: np.ndarray, labels: np.ndarray, epochs: int
) -> list[Lengths]:
    groups = [test[labels == one] for one in np.unique(labels)]
    queries = {
        "single": list(test[:, None]),
        "class": [part for own in groups for part in _whole(own, ONE_CLASS)],
        "mixed": _whole(test, MIXED),
    }
    truth = {"single": labels}
    truth["class"] = np.repeat(np.unique(labels), [len(own) // ONE_CLASS for own in groups])
    open_run = _experiment(f"{spec}{',' if ':' in spec else ':'}pad=no", epochs)
    sent = Sent()
    trained = LocalSession(open_run, parties, outputs=len(groups), observers=[sent]).run()
    weights = {name: kept["state"] for name, kept in trained.training_states().items()}

    def asked(experiment: Experiment) -> dict[str, np.ndarray]:
        return {
            name: _frame_bytes(experiment, parties, len(groups), weights, each)
            for name, each in queries.items()
        }

    codec = compression.make(open_run.codec)

    def filled(frame_bytes: int, rows: int) -> int:
        limit_bytes = codec.payload_limit(rows, WIDTH)
        return HEADER_BYTES + agreed_size(frame_bytes - HEADER_BYTES, limit_bytes)

    of_training = {"train": np.array(sent.frame_bytes[Kind.CUT])}
    schedule = rules.schedule(trained.terms, trained.label.data.split, 0)
    all_labels = parties["lender"].labels
    assert all_labels is not None
    batches = [all_labels[each.rows].numpy() for each in schedule if each.trains]
    found = {"no": asked(open_run), "query": asked(_experiment(spec, epochs))}
    found = {pad: lengths | of_training for pad, lengths in found.items()}
    rows = {name: len(each[0]) for name, each in queries.items()} | {"train": BATCH}
    found["sizes"] = {
        name: np.array([filled(each, rows[name]) for each in lengths])
        for name, lengths in found["no"].items()
    }
    return [
        Lengths(
            codec=spec,
            pad=pad,
            single_auc=_best_auc(lengths["single"], truth["single"]),
            single_bytes=float(lengths["single"].mean()),
            class_auc=_best_auc(lengths["class"], truth["class"]),
            class_bytes=float(lengths["class"].mean()),
            mixed_bytes=float(lengths["mixed"].mean()),
            train_auc=_batch_auc(lengths["train"], batches, len(groups)),
            train_bytes=float(lengths["train"].mean()),
        )
        for pad, lengths in found.items()
    ]


def _experiment(codec: str, epochs: int) -> Experiment:
    return Experiment.model_validate(
        {
            "codec": codec,
            "parties": {"bank": {"width": WIDTH}},
            "label": {"party": "lender"},
            "train": {"epochs": epochs, "batch_size": BATCH},
        }
    )


def _frame_bytes(
    experiment: Experiment,
    parties: Mapping[str, PartyData],
    classes: int,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    groups: Sequence[np.ndarray],
) -> np.ndarray:
    """Return the length in bytes of the query frame for each group of rows."""
    sent = Sent()
    unlabelled = {name: replace(own, labels=None) for name, own in parties.items()}
    session = LocalSession(
        experiment, unlabelled, mode="predict", outputs=classes, weights=weights,
        observers=[sent],
    )  # fmt: skip
    session.go_on(
        None, (Exchange(step, "predict", 0, rows, last=False) for step, rows in enumerate(groups))
    )
    return np.array(sent.frame_bytes[Kind.QUERY])


def _whole(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Split rows into groups of equal size; the remaining rows are left out."""
    return list(rows[: len(rows) // size * size].reshape(-1, size))


def _best_auc(lengths: np.ndarray, labels: np.ndarray) -> float:
    scores = torch.from_numpy(lengths.astype(np.float64))
    areas = [auc(scores, torch.from_numpy(labels == one)) for one in np.unique(labels)]
    return max(max(area, 1 - area) for area in areas)


def _batch_auc(lengths: np.ndarray, batches: Sequence[np.ndarray], classes: int) -> float:
    """Return the AUC of inferring batches with many rows of a class from their frames' lengths.

    Only full batches in the second half of the training count.
    """
    late = [at for at in range(len(batches) // 2, len(batches)) if len(batches[at]) == BATCH]
    areas = [0.5]
    for one in range(classes):
        counts = np.array([np.count_nonzero(batches[at] == one) for at in late])
        many = counts > np.median(counts)
        if many.any():
            scores = torch.from_numpy(lengths[late].astype(np.float64))
            areas.append(auc(scores, torch.from_numpy(many)))
    return max(max(area, 1 - area) for area in areas)


def _seen(area: str, size: str) -> Callable[[Lengths], str]:
    def cell(row: Lengths) -> str:
        told = f"AUC {getattr(row, area):.3f}" if area else ""
        return f"{told:<9}{getattr(row, size):>6.0f} B"

    return cell


TABLE = harness.table(
    ("codec", "<34", "codec"),
    ("pad", "<6", "pad"),
    ("one row", ">18", _seen("single_auc", "single_bytes")),
    (f"{ONE_CLASS} of one class", ">18", _seen("class_auc", "class_bytes")),
    (f"{MIXED} rows", ">18", _seen("", "mixed_bytes")),
    (f"training, {BATCH}", ">18", _seen("train_auc", "train_bytes")),
)


main = harness.command(bench_lengths, TABLE)


if __name__ == "__main__":
    main()
