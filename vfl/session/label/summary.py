"""Results of a session at the label party: metrics, list of disclosed values, predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pandas.api.types import is_numeric_dtype
from torch import Tensor

from vfl import compression
from vfl.core.storage import write_text
from vfl.core.text import formula_free
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData
from vfl.session import Terms, secure_mode
from vfl.session.label.party import AnyLabelParty
from vfl.session.label.task import Progress
from vfl.session.secure_mode import EVALUATE, TRAIN, Revealed

#: Separator between the texts in one cell of the table `predictions.csv`.
SEPARATOR = "; "


def summarise(
    party: AnyLabelParty, weights_sha256: str, run: str, terms: Terms | None = None
) -> dict[str, Any]:
    """Summarise a finished training or evaluation: metrics, bytes, speed and disclosed values.

    `formula_ratio` is the compression ratio of the codec by the formula in its publication.
    `wire_ratio` is the number of bytes of all training frames, headers included, divided by the
    bytes of uncompressed float32 cuts and gradients; `wire_ratio_up` and `wire_ratio_down` refer to
    one direction.

    Args:
        party: the label party.
        weights_sha256: digest of the trained weights of all parties.
        run: path of the run's folder.
        terms: terms of the whole session; None takes `party.terms`, which differ from these if
            there is a middle party.
    """
    terms, ledger, progress = terms or party.terms, party.ledger, party.progress
    links = [(terms.codec, terms.parties[name].width) for name in terms.feature_parties]
    if terms.middle is not None:
        links.append((terms.middle.codec, terms.middle.width))
    dense_bytes = 4 * progress.train_rows * sum(width for _, width in links)
    mode = secure_mode.make(terms.secure)
    if mode.reads_cells:  # no party sends cuts
        dense_bytes, links = 0, []
    speed = progress.train_steps / progress.train_seconds if progress.train_seconds else None
    return _figures_of(party, terms) | {
        "guess": guess_of(party.data),
        "steps": progress.train_steps,
        "steps_per_second": None if speed is None else round(speed, 1),
        "seconds": round(progress.train_seconds, 3),
        "codec": terms.codec,
        "defense": terms.defense,
        **traffic_figures(ledger, links, dense_bytes),
        "secure": terms.secure,
        "trust": secure_mode.promise(terms),
        "privacy": [one.as_dict() for one in party.privacy()],
        "revealed": [asdict(one) for one in revealed(terms, progress) + party.revealed()],
        "weights_sha256": weights_sha256,
        "run": run,
    }


def _figures_of(party: AnyLabelParty, terms: Terms) -> dict[str, Any]:
    """Return the model's metrics, and further values that only some sessions have."""
    last = party.history[-1] if party.history else {}
    figures = {key: value for key, value in last.items() if key.startswith(("test_", "new_"))}
    tested = party.data.split.test
    if (unseen := party.data.unseen) is not None:
        new, left_out = int(unseen[tested].sum()), len(unseen) - len(tested)
        figures["rows"] = {"test": len(tested) - new, "new": new, "left_out": left_out}
    if (complete := party.data.complete) is not None:
        known = int(complete[tested].sum())
        figures |= {"test_complete_rows": known, "test_missing_rows": len(tested) - known}
    figures["epochs"] = len(party.history)
    if "best_epoch" in last:
        figures["best_epoch"] = last["best_epoch"]
    further: dict[str, Any] = {
        "traffic": party.traffic() or None,
        "keeps": secure_mode.make(terms.secure).keeps,
    }
    if terms.mode == "evaluate":
        further["importance"] = party.importance()
    figures |= {name: value for name, value in further.items() if value is not None}
    if terms.mode == "train":
        figures |= party.figures()
        if doubted := [*training_doubts(party.history), *party.doubts]:
            figures["warnings"] = doubted
    return figures


def traffic_figures(
    ledger: Ledger, links: Sequence[tuple[str, int]], dense_bytes: int
) -> dict[str, Any]:
    """Return each party's bytes, and the ratios of sizes that `summarise` explains.

    Args:
        ledger: ledger of the traffic.
        links: codec and width of each link on which cuts are sent; empty if no cuts are sent.
        dense_bytes: bytes of all training cuts in one direction as uncompressed float32; 0 if no
            cuts are sent.
    """
    sent = {"up": 0, "down": 0}
    for row in ledger.rows():
        if row.phase == "train":
            sent[row.direction] += row.wire_bytes
    ratios = [compression.make(codec).formula_ratio(width) * width for codec, width in links]
    return {
        "bytes_up": ledger.bytes_by_party("up"),
        "bytes_down": ledger.bytes_by_party("down"),
        "formula_ratio": sum(ratios) / sum(width for _, width in links) if links else None,
        "wire_ratio": sum(sent.values()) / (2 * dense_bytes) if dense_bytes else None,
        "wire_ratio_up": sent["up"] / dense_bytes if dense_bytes else None,
        "wire_ratio_down": sent["down"] / dense_bytes if dense_bytes else None,
    }


def guess_of(data: PartyData) -> dict[str, float]:
    """Return the metrics of a constant prediction for the test rows.

    Returns:
        For a classification, the number of classes, `accuracy` (the fraction of test rows that have
        their most frequent class) and `auc`. For a regression, `rmse` of a constant prediction: the
        mean label of the training rows. The result is empty without labels or test rows, and for a
        regression also without training rows.
    """
    if data.labels is None or not len(data.split.test):
        return {}
    rows = data.split.test
    if data.unseen is not None and not data.unseen[rows].all():
        rows = rows[~data.unseen[rows]]
    tested = data.labels[torch.from_numpy(rows)]
    if data.classes is not None:
        largest = int(tested.bincount().max()) / len(tested)
        return {"classes": len(data.classes), "accuracy": largest, "auc": 0.5}
    if not len(data.split.train):
        return {}
    mean = data.labels[torch.from_numpy(data.split.train)].double().mean()
    return {"rmse": float((tested.double() - mean).square().mean().sqrt())}


#: A test AUC below the first number counts as no better than a constant prediction. A training
#: counts as divergent if its loss has grown by more than the second number, which is a factor. A
#: cross-entropy above the third number (in nats) also counts as divergent; a random guess among a
#: thousand classes has a cross-entropy of 7 nats.
_GUESS, _GREW, _SURPRISE = 0.55, 1.5, 10.0


def training_doubts(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return warnings about a training whose loss grew, or whose model is no better than a guess.

    >>> training_doubts([{"train_loss": 0.7}, {"train_loss": 9.1}])
    ['the training loss grew from 0.7 to 9.1: divide train.learning_rate by 10']
    """
    if not history:
        return []
    first, last = history[0].get("train_loss"), history[-1].get("train_loss")
    lower = "divide train.learning_rate by 10"
    if first and last and last > _GREW * first > 0:
        return [f"the training loss grew from {first:.3g} to {last:.3g}: {lower}"]
    if "train_accuracy" in history[-1] and last and last > _SURPRISE:
        return [f"a training loss of {last:.3g} is far above that of a guess: {lower}"]
    auc = history[-1].get("test_auc")
    if auc is None or auc >= _GUESS:
        return []
    return [
        f"test AUC {auc:.2f} is no better than a guess: train longer, try another "
        "train.learning_rate, or check with vfl value whether the columns predict the "
        "label at all"
    ]


def test_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the test metrics, for the label party's run card."""
    return {name: value for name, value in summary.items() if name.startswith("test_")}


def revealed(terms: Terms, progress: Progress) -> list[Revealed]:
    """List the values that the session's exchanges disclosed: the leakage ledger.

    The list contains only kinds and numbers of values, which follow from the terms and the numbers
    of exchanges and rows. It omits the handshake, digests, and sizes and times of messages.
    """
    mode = secure_mode.make(terms.secure)
    phases = (
        (TRAIN, progress.train_steps, progress.train_rows),
        (EVALUATE, progress.asked_steps, progress.asked_rows),
    )
    found = list(mode.revealed(terms, [phase for phase in phases if phase[1]]))
    epochs = len(progress.history)
    if terms.mode == "train" and (terms.train.patience or terms.train.keep == "best"):
        what = "whether an epoch is the best or the last"
        found += [
            Revealed(name, what, terms.label_party, EVALUATE, epochs, epochs)
            for name in [*terms.feature_parties, *([terms.middle.party] if terms.middle else [])]
        ]
    return found


def prediction_table(
    data: PartyData,
    outputs: Tensor,
    classes: Sequence[str | int] | None,
    uncalibrated: Tensor | None = None,
) -> pd.DataFrame:
    """Make a table with one row per predicted row.

    The first column is the label party's id or the position.

    Args:
        data: the label party's rows, whose ids name the rows.
        outputs: outputs of the model, axes (rows, classes), or (rows, 1) for a regression.
        classes: names of the classes; None for a regression.
        uncalibrated: outputs before calibration; if given, the table gets additional columns with
            the probabilities from these outputs.

    Returns:
        If some of the rows may have been used in the training, the table has a column `trained`,
        which states how the run used each row; see `PartyData.trained`.
    """
    rows = data.split.test
    table = pd.DataFrame({"id": rows if data.ids is None else data.ids[rows]})
    if classes is None:
        table["prediction"] = outputs[:, 0].numpy()
    else:
        probabilities = torch.softmax(outputs, dim=1)
        table["prediction"] = [classes[index] for index in probabilities.argmax(dim=1).tolist()]
        for index, name in enumerate(classes):
            table[f"probability_{name}"] = probabilities[:, index].numpy()
        before = () if uncalibrated is None else torch.softmax(uncalibrated, dim=1).T
        for name, own in zip(classes if len(before) else (), before, strict=True):
            table[f"uncalibrated_{name}"] = own.numpy()
    if data.trained is not None:
        table["trained"] = data.trained[rows]
    return table


def write_predictions(
    path: Path,
    data: PartyData,
    outputs: Sequence[Tensor],
    classes: Sequence[str | int] | None,
    remarks: Sequence[Mapping[str, Any]] = (),
    uncalibrated: Sequence[Tensor] = (),
) -> None:
    """Write the prediction table atomically to a CSV file that only its owner can read.

    Each kind of remark (additional result of a row) has a column; several remarks of one kind on a
    row share a cell, divided by a separator. If a spreadsheet program would take a text, such as an
    id or a class name, for a formula, an apostrophe is put before it.
    """
    before = torch.cat(list(uncalibrated)) if uncalibrated else None
    table = prediction_table(data, torch.cat(list(outputs)), classes, before)
    for name in remarks[0] if remarks else ():
        found = [one[name] for one in remarks]
        if isinstance(found[0], list):
            found = [formula_free(SEPARATOR.join(one)) for one in found]
        table[name] = found
    for name in ("id", "prediction"):
        if not is_numeric_dtype(table[name]):
            table[name] = [formula_free(x) if isinstance(x, str) else x for x in table[name]]
    table.columns = [formula_free(name) for name in table.columns]
    write_text(path, table.to_csv(index=False))
