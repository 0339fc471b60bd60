"""What the cells of a comparison say: a record a cell, their means, tables, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from vfl.config import CompareSettings
from vfl.config.run_folder import RunFolder
from vfl.core.ledger import size
from vfl.core.storage import read_json, read_lines
from vfl.experiments.cells import CODEC, GridFolder, failure_of, is_done, settings_of
from vfl.experiments.statistics import Estimate, estimate, paired_difference
from vfl.experiments.tables import SHARES, Table, estimate_text, left_out, write_tables

#: Measures of which less is better.
LOWER_IS_BETTER = frozenset({"loss", "log_loss", "rmse", "mae"})


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
        variant, method, codec, level, repeat: as `vfl.experiments.comparison` says them.
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


#: Names of the figures of a cell, and of what it is about, as columns.
_SCALARS = [one.name for one in fields(Measured) if one.name not in ("usage", "epochs", "reached")]
_ABOUT = ("name", "variant", "method", "codec", "level", "repeat")


def read_results(folder: GridFolder) -> list[Result]:
    """Every cell of a comparison, trained or not.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = settings_of(folder.experiment())
    results = []
    for cell in folder.cells():
        path = folder.cells_path / cell.name
        failure, about = failure_of(path), {key: cell.about[key] for key in _ABOUT[1:]}
        measured = _measured(path, settings) if is_done(path) else None
        what = failure["what"] if failure else None
        results.append(Result(cell.name, **about, measured=measured, failure=what))
    return results


def _measured(path: Path, settings: CompareSettings) -> Measured:
    summary, records = RunFolder(path).summary(), list(read_lines(path / "metrics.jsonl"))
    record = read_json(path / CODEC)
    parties: list[Mapping[str, Any]] = list(record["parties"].values())
    epochs = tuple(
        Epoch(
            epoch=one["epoch"],
            score=_number(one.get(f"validation_{settings.measure}")),
            train_loss=_number(one.get("train_loss")),
            total_bytes=one["bytes_up"] + one["bytes_down"],
        )
        for one in records
    )
    usage = tuple(count for party in parties for count in party["usage"])
    chosen = records[summary.get("best_epoch", len(records)) - 1]
    measure = settings.measure
    dense_bytes = _sum(parties, "dense_bytes")
    stated = all(party["entropy_bound_bytes"] is not None for party in parties)
    bound = _sum(parties, "entropy_bound_bytes") if stated else None  # where all codecs state it
    return Measured(
        score=_number(summary.get(f"test_{measure}")),
        train_score=_number(record["train"].get(measure)),
        train_loss=_number(chosen.get("train_loss")),
        test_loss=_number(summary.get("test_loss")),
        formula_ratio=summary["formula_ratio"],
        forward_ratio=summary["wire_ratio_up"],
        backward_ratio=summary["wire_ratio_down"],
        frame_ratio=_sum(parties, "wire_bytes") / dense_bytes,
        bound_ratio=bound / dense_bytes if bound is not None else None,
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


def _number(found: Any) -> float | None:
    """A finite number, or None."""
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


#: A figure of a cell; None where it was not measured.
Figure = Callable[[Measured], float | None]


@dataclass(frozen=True)
class Group:
    """One codec under one variant at one level.

    Attributes:
        variant, method, codec, level: as `vfl.experiments.comparison` says them.
        results: its cells, whole or not.
        reference: the cells it is set against; empty where there are none, or it is them.
    """

    variant: str
    method: str
    codec: str
    level: str
    results: tuple[Result, ...]
    reference: tuple[Result, ...] = ()

    @property
    def trained(self) -> list[Measured]:
        """What is known of the cells that are whole."""
        return [one.measured for one in self.results if one.measured is not None]

    @property
    def score(self) -> Estimate | None:
        """The measure on test rows, over repeats."""
        return estimate(list(_scores(self.results).values()))

    @property
    def difference(self) -> Estimate | None:
        """Of the score to the reference's, repeat by repeat; None for the reference itself."""
        return paired_difference(_scores(self.results), _scores(self.reference))

    def over(self, figure: Figure) -> Estimate | None:
        """A figure over the repeats that have it."""
        found = [value for one in self.trained if (value := figure(one)) is not None]
        return estimate(found)

    def mean(self, figure: Figure) -> float | None:
        """The mean of a figure over the repeats that have it."""
        found = self.over(figure)
        return None if found is None else found.mean

    def reached(self, position: int) -> tuple[float | None, int]:
        """Mean bytes until the accuracy at a position of the list, and how many repeats got there.

        The mean is over those repeats alone, so it means little if some did not get there.
        """
        found = [one.reached[position] for one in self.trained]
        there = [count for count in found if count is not None]
        return (sum(there) / len(there) if there else None), len(there)


def grouped(results: Sequence[Result], reference: str) -> list[Group]:
    """The lines of a table, in the order of the cells.

    Args:
        results: of all cells.
        reference: the method all others are set against, at their own level where both have one.
    """
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.variant, one.method, one.codec, one.level), []).append(one)
    found = [Group(*key, results=tuple(cells)) for key, cells in groups.items()]
    return [replace(one, reference=_beside(one, found, reference)) for one in found]


def _beside(group: Group, groups: Sequence[Group], reference: str) -> tuple[Result, ...]:
    if group.method == reference:
        return ()
    beside = [one for one in groups if (one.method, one.variant) == (reference, group.variant)]
    if len(beside) == 1 and "" in (group.level, beside[0].level):
        return beside[0].results
    return next((one.results for one in beside if one.level == group.level), ())


def _scores(results: Sequence[Result]) -> dict[str, float]:
    return {
        one.repeat: one.measured.score
        for one in results
        if one.measured is not None and one.measured.score is not None
    }


#: Cells of a table by heading, a line each.
Columns = dict[str, list[str]]


def tables(settings: CompareSettings, groups: Sequence[Group]) -> tuple[Table, Table]:
    """What these lines need: how good at how many bytes, and what it takes to send."""
    measure, trained = settings.measure, [group.trained for group in groups]
    about: Columns = {"codec": [group.codec for group in groups]}
    if any(group.variant for group in groups):
        about = {"variant": [group.variant for group in groups], **about}
    if any(group.level for group in groups):
        about["level"] = [f"{group.level} %" if group.level else "" for group in groups]

    def percent(figure: Figure) -> list[str]:
        return _means(groups, figure, lambda mean: f"{100 * mean:.2f} %")

    def number(figure: Figure) -> list[str]:
        return _means(groups, figure, lambda mean: f"{mean:.3g}")

    quality: Columns = {
        "formula": percent(lambda one: one.formula_ratio),
        "forward": percent(lambda one: one.forward_ratio),
        "backward": percent(lambda one: one.backward_ratio),
        measure.replace("_", " "): [score_text(group.score, measure) for group in groups],
    }
    if any(group.reference for group in groups):
        less = f"less {settings.reference}" + (", points" if measure in SHARES else "")
        quality[less] = [score_text(group.difference, measure, "+") for group in groups]
    bound = "<=" if measure in LOWER_IS_BETTER else ">="
    for position, least in enumerate(settings.accuracy):
        reached = [_reached_text(group, position) for group in groups]
        quality[f"bytes to {bound} {least:g}"] = reached
    counts = zip(trained, groups, strict=True)
    quality["repeats"] = [f"{len(whole)} of {len(group.results)}" for whole, group in counts]
    work: Columns = {
        "test frames": percent(lambda one: one.frame_ratio),
        "bound": percent(lambda one: one.bound_ratio),
        "encode ms": number(lambda one: one.encode_ms),
        "decode ms": number(lambda one: one.decode_ms),
        "values a row": number(lambda one: one.nonzeros),
        "units": number(lambda one: one.units),
        "never sent": number(lambda one: one.never_sent),
        "dead": number(lambda one: one.dead_units),
    }
    return _table(about | quality), _table(about | work)


def _means(groups: Sequence[Group], figure: Figure, write: Callable[[float], str]) -> list[str]:
    means = [group.mean(figure) for group in groups]
    return ["" if mean is None else write(mean) for mean in means]


def _table(columns: Columns) -> Table:
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, words=1 + ("variant" in columns))


def _reached_text(group: Group, position: int) -> str:
    count, repeats = group.reached(position)
    if count is None:
        return "never" if group.trained else ""
    return size(count) + ("" if repeats == len(group.trained) else f" ({repeats})")


def score_text(found: Estimate | None, measure: str, sign: str = "") -> str:
    """A measure with its interval, shares in percent; with a sign it is a difference, in points.

    >>> score_text(Estimate(0.7213, 0.0131, 3), "accuracy")
    '72.1 ± 1.3 %'
    """
    if found is None:
        return ""
    if measure in SHARES:
        return estimate_text(found, sign, "" if sign else " %")
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:{sign}.4g}{half}"


def _line_record(group: Group, settings: CompareSettings) -> dict[str, Any]:
    about = {key: getattr(group, key) for key in ("variant", "method", "codec", "level")}
    figures = {name: group.mean(attrgetter(name)) for name in _SCALARS if name != "score"}
    reached = {
        f"{least:g}": dict(zip(("bytes", "repeats"), group.reached(position), strict=True))
        for position, least in enumerate(settings.accuracy)
    }
    score, less = group.score, group.difference
    return {
        **about,
        "repeats": len(group.trained),
        settings.measure: asdict(score) if score else None,
        "difference": asdict(less) if less else None,
        "bytes_to": reached,
        **figures,
    }


def unfinished(results: Sequence[Result]) -> list[str]:
    """What a reader of the table must know about cells that are not in it."""
    failed = sum(one.failure is not None for one in results)
    missing = sum(one.measured is None for one in results) - failed
    return left_out(len(results), failed, missing, "trained")


def write_results(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `results.json` and `table.md` from what the cells hold.

    Returns:
        The tables in Markdown with what they leave out, and the content of the JSON file.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    settings = settings_of(folder.experiment())
    results = read_results(folder)
    groups = grouped(results, settings.reference)
    content = {
        "measure": settings.measure,
        "reference": settings.reference,
        "codecs": [_line_record(group, settings) for group in groups],
        "cells": [asdict(one) for one in results],
    }
    below = [*folder.head("notes"), *unfinished(results)]
    shown = tables(settings, groups)
    return write_tables(folder.path, content, shown, below)
