"""The results of a comparison as a table for people, a CSV file and a JSON value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from vfl.config import CompareSettings
from vfl.grid.groups import Group
from vfl.grid.interval import Estimate
from vfl.grid.results import LOWER_IS_BETTER, SHARES, Measured, Result
from vfl.ledger import size
from vfl.text import csv_text

_NO_NUMBERS = ("usage", "epochs", "reached")
_SCALARS = [one.name for one in fields(Measured) if one.name not in _NO_NUMBERS]
_ABOUT = ("name", "variant", "method", "codec", "level", "repeat")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: its heading.
        write: the cell of a line; empty where nothing is known.
    """

    name: str
    write: Callable[[Group], str]


def tables(settings: CompareSettings, groups: Sequence[Group]) -> tuple[list[Column], list[Column]]:
    """The columns that these lines need: how good at how many bytes, and what it takes to send."""
    measure = settings.measure
    about = [Column("codec", lambda group: group.codec)]
    if any(group.variant for group in groups):
        about.insert(0, Column("variant", lambda group: group.variant))
    if any(group.level for group in groups):
        about.append(Column("level", lambda group: f"{group.level} %" if group.level else ""))
    word = measure.replace("_", " ")
    scores = [Column(word, lambda group: score_text(group.score, measure))]
    if any(group.reference for group in groups):
        less = f"less {settings.reference}" + (", points" if measure in SHARES else "")
        scores.append(Column(less, lambda group: score_text(group.difference, measure, "+")))
    quality = [
        Column("formula", _percent(lambda one: one.formula_ratio)),
        Column("forward", _percent(lambda one: one.forward_ratio)),
        Column("backward", _percent(lambda one: one.backward_ratio)),
        *scores,
        *(_reached(position, least, measure) for position, least in enumerate(settings.accuracy)),
        Column("repeats", lambda group: f"{len(group.trained)} of {len(group.results)}"),
    ]
    work = [
        Column("test frames", _percent(lambda one: one.frame_ratio)),
        Column("bound", _percent(lambda one: one.bound_ratio)),
        Column("encode ms", _number(lambda one: one.encode_ms)),
        Column("decode ms", _number(lambda one: one.decode_ms)),
        Column("values a row", _number(lambda one: one.nonzeros)),
        Column("units", _number(lambda one: one.units)),
        Column("never sent", _number(lambda one: one.never_sent)),
        Column("dead", _number(lambda one: one.dead_units)),
    ]
    return about + quality, about + work


def markdown(columns: Sequence[Column], groups: Sequence[Group]) -> str:
    """A table in Markdown, columns aligned."""
    lines = [[column.name for column in columns]]
    lines += [[column.write(group) for column in columns] for group in groups]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    text = [_line([cell.ljust(w) for cell, w in zip(line, widths, strict=True)]) for line in lines]
    text.insert(1, _line(["-" * width for width in widths]))
    return "\n".join(text) + "\n"


def score_text(found: Estimate | None, measure: str, sign: str = "") -> str:
    """A measure with its interval, shares in percent; with a sign it is a difference, in points.

    >>> score_text(Estimate(0.7213, 0.0131, 3), "accuracy")
    '72.1 ± 1.3 %'
    """
    if found is None:
        return ""
    if measure in SHARES:
        half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
        return f"{100 * found.mean:{sign}.1f}{half}{'' if sign else ' %'}"
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:{sign}.4g}{half}"


def to_csv(results: Sequence[Result], settings: CompareSettings) -> str:
    """One line a cell; figures of a cell that is not whole are empty."""
    return csv_text(_names(settings), [_flat(one, settings) for one in results])


def to_json(
    results: Sequence[Result], groups: Sequence[Group], settings: CompareSettings
) -> dict[str, Any]:
    """Every line of the table and every cell, with all figures."""
    return {
        "measure": settings.measure,
        "reference": settings.reference,
        "codecs": [_line_record(group, settings) for group in groups],
        "cells": [asdict(one) for one in results],
    }


def _line_record(group: Group, settings: CompareSettings) -> dict[str, Any]:
    about = {key: getattr(group, key) for key in ("variant", "method", "codec", "level")}
    figures = {name: group.mean(_figure(name)) for name in _SCALARS if name != "score"}
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


def _figure(name: str) -> Callable[[Measured], float | None]:
    return lambda one: getattr(one, name)


def _names(settings: CompareSettings) -> list[str]:
    reached = [f"bytes_to_{least:g}" for least in settings.accuracy]
    return [*_ABOUT, f"test_{settings.measure}", *_SCALARS[1:], *reached, "failure"]


def _flat(one: Result, settings: CompareSettings) -> dict[str, Any]:
    row = {key: getattr(one, key) for key in _ABOUT} | {"failure": one.failure}
    known = one.measured
    if known is None:
        return row
    row[f"test_{settings.measure}"] = known.score
    row |= {name: getattr(known, name) for name in _SCALARS[1:]}
    reached = zip(settings.accuracy, known.reached, strict=True)
    return row | {f"bytes_to_{least:g}": count for least, count in reached}


def _percent(figure: Callable[[Measured], float | None]) -> Callable[[Group], str]:
    def write(group: Group) -> str:
        mean = group.mean(figure)
        return "" if mean is None else f"{100 * mean:.2f} %"

    return write


def _number(figure: Callable[[Measured], float | None]) -> Callable[[Group], str]:
    def write(group: Group) -> str:
        mean = group.mean(figure)
        return "" if mean is None else f"{mean:.3g}"

    return write


def _reached(position: int, least: float, measure: str) -> Column:
    def write(group: Group) -> str:
        count, there = group.reached(position)
        if count is None:
            return "never" if group.trained else ""
        return size(count) + ("" if there == len(group.trained) else f" ({there})")

    bound = "<=" if measure in LOWER_IS_BETTER else ">="
    return Column(f"bytes to {bound} {least:g}", write)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def unfinished(results: Sequence[Result]) -> Iterator[str]:
    """What a reader of the table must know about cells that are not in it."""
    failed = sum(one.failure is not None for one in results)
    missing = sum(one.measured is None for one in results) - failed
    if failed:
        yield f"{failed} of {len(results)} cells failed and are left out"
    if missing:
        yield f"{missing} of {len(results)} cells are not trained yet"
