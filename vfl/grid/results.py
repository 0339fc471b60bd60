"""What the cells of a grid say: one record a cell, read from its run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.config import CompareSettings
from vfl.grid.cells import CODEC, Cell, GridFolder, failure_of, is_done, settings_of
from vfl.storage import read_json, read_lines

#: Measures of which less is better.
LOWER_IS_BETTER = frozenset({"loss", "log_loss", "rmse", "mae"})
#: Measures that are shares of the rows, or read like one, so told in percent.
SHARES = frozenset({"accuracy", "hit_rate", "auc", "f1"})


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a cell.

    Attributes:
        epoch: from 1.
        score: of the validation rows.
        train_loss: mean over the training rows, with the draws of training.
        total_bytes: both directions since the start.
    """

    epoch: int
    score: float | None
    train_loss: float | None
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A trained cell; ratios are to dense float32.

    Attributes:
        score: of the test rows.
        train_score: of the training rows, without the draws of training.
        train_loss, test_loss: of the epoch whose weights were kept, with its draws; of the test.
        formula_ratio: as the literature prints it, forward.
        forward_ratio, backward_ratio: of the frames of the training, headers included.
        frame_ratio, bound_ratio: of frames of the test rows, and the least they could take.
        encode_ms, decode_ms: of the frame of one training batch, all parties.
        nonzeros: values a row that arrive as something other than zero.
        units, never_sent, dead_units: all; those that arrive of no test row; those of them that
            are zero in every test row.
        usage: test rows in which each unit arrives, the parties one after another.
        test_rows: how many.
        reached: bytes until each accuracy asked for; None where it never was.
        total_bytes, seconds: of the whole training.
        epochs: what happened in each.
    """

    score: float | None
    train_score: float | None
    train_loss: float | None
    test_loss: float | None
    formula_ratio: float
    forward_ratio: float
    backward_ratio: float
    frame_ratio: float
    bound_ratio: float | None
    encode_ms: float
    decode_ms: float
    nonzeros: float
    units: int
    never_sent: int
    dead_units: int
    usage: tuple[int, ...]
    test_rows: int
    reached: tuple[int | None, ...]
    total_bytes: int
    seconds: float
    epochs: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One cell of a comparison.

    Attributes:
        name: of its folder.
        variant, method, codec, level, repeat: as `vfl.grid.compare` says them.
        measured: None while it is not whole.
        failure: why it ended badly.
    """

    name: str
    variant: str
    method: str
    codec: str
    level: str
    repeat: str
    measured: Measured | None
    failure: str | None


def read_results(folder: GridFolder) -> list[Result]:
    """Every cell of a comparison, trained or not.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = settings_of(folder.experiment())
    return [_result(cell, folder.cells_path / cell.name, settings) for cell in folder.cells()]


def _result(cell: Cell, path: Path, settings: CompareSettings) -> Result:
    failure = failure_of(path)
    return Result(
        cell.name,
        **{key: cell.about[key] for key in ("variant", "method", "codec", "level", "repeat")},
        measured=_measured(path, settings) if is_done(path) else None,
        failure=failure["what"] if failure else None,
    )


def _measured(path: Path, settings: CompareSettings) -> Measured:
    summary, records = read_json(path / "summary.json"), list(read_lines(path / "metrics.jsonl"))
    record = read_json(path / CODEC)
    parties: list[Mapping[str, Any]] = list(record["parties"].values())
    epochs = tuple(_epoch(record, settings.measure) for record in records)
    usage = tuple(count for party in parties for count in party["usage"])
    kept = records[summary.get("best_epoch", len(records)) - 1]
    measure = settings.measure
    dense_bytes = _sum(parties, "dense_bytes")
    return Measured(
        score=_number(summary.get(f"test_{measure}")),
        train_score=_number(record["train"].get(measure)),
        train_loss=_number(kept.get("train_loss")),
        test_loss=_number(summary.get("test_loss")),
        formula_ratio=summary["formula_ratio"],
        forward_ratio=summary["wire_ratio_up"],
        backward_ratio=summary["wire_ratio_down"],
        frame_ratio=_sum(parties, "wire_bytes") / dense_bytes,
        bound_ratio=_bound(parties, dense_bytes),
        encode_ms=_sum(parties, "encode_ms"),
        decode_ms=_sum(parties, "decode_ms"),
        nonzeros=_sum(parties, "nonzeros"),
        units=len(usage),
        never_sent=usage.count(0),
        dead_units=int(_sum(parties, "dead_units")),
        usage=usage,
        test_rows=parties[0]["rows"],
        reached=tuple(_reached(epochs, least, measure) for least in settings.accuracy),
        total_bytes=epochs[-1].total_bytes,
        seconds=summary["seconds"],
        epochs=epochs,
    )


def _epoch(record: Mapping[str, Any], measure: str) -> Epoch:
    return Epoch(
        epoch=record["epoch"],
        score=_number(record.get(f"validation_{measure}")),
        train_loss=_number(record.get("train_loss")),
        total_bytes=record["bytes_up"] + record["bytes_down"],
    )


def _reached(epochs: Sequence[Epoch], wanted: float, measure: str) -> int | None:
    """Bytes until an epoch's validation rows were as good as wanted."""
    sign = -1 if measure in LOWER_IS_BETTER else 1
    good = (
        epoch.total_bytes
        for epoch in epochs
        if epoch.score is not None and sign * epoch.score >= sign * wanted
    )
    return next(good, None)


def _sum(parties: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(party[key] for party in parties))


def _bound(parties: Sequence[Mapping[str, Any]], dense_bytes: float) -> float | None:
    """None where a codec does not tell."""
    if any(party["entropy_bound_bytes"] is None for party in parties):
        return None
    return _sum(parties, "entropy_bound_bytes") / dense_bytes


def _number(found: Any) -> float | None:
    """A finite number, or None."""
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
