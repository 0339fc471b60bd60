"""The results of a comparison as a table for people, a CSV file and a JSON value."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from vfl.config import CompareSettings
from vfl.grid.groups import Group
from vfl.grid.interval import Estimate
from vfl.grid.results import LOWER_IS_BETTER, Measured, Result
from vfl.ledger import size

_CURVES = ("usage", "epochs", "reached")
_SCALARS = [one.name for one in fields(Measured) if one.name not in _CURVES]
_ABOUT = ("name", "variant", "method", "codec", "level", "repeat")
#: Measures that are shares of the rows, so percent.
_SHARES = frozenset({"accuracy", "hit_rate", "f1", "auc"})

Column = tuple[str, Callable[[Group], str]]


def columns(settings: CompareSettings, groups: Sequence[Group]) -> list[Column]:
    """The columns that these lines need, each with how to write its cell."""
    measure = settings.measure
    found: list[Column] = [("codec", lambda group: group.codec)]
    if any(group.variant for group in groups):
        found.insert(0, ("variant", lambda group: group.variant))
    if any(group.level for group in groups):
        found.append(("level", lambda group: f"{group.level} %" if group.level else ""))
    found += [
        ("formula", _percent(lambda one: one.formula_ratio)),
        ("forward", _percent(lambda one: one.forward_ratio)),
        ("backward", _percent(lambda one: one.backward_ratio)),
        ("test frames", _percent(lambda one: one.frame_ratio)),
        ("bound", _percent(lambda one: one.bound_ratio)),
        (measure.replace("_", " "), lambda group: score_text(group.score, measure)),
        (f"less {settings.reference}", lambda group: _difference(group.difference, measure)),
        *(_reached(position, least, measure) for position, least in enumerate(settings.accuracy)),
        ("encode ms", _number(lambda one: one.encode_ms)),
        ("decode ms", _number(lambda one: one.decode_ms)),
        ("values", _number(lambda one: one.nonzeros)),
        ("dead units", _number(lambda one: one.dead_units)),
        ("trained", lambda group: f"{len(group.trained)} of {len(group.results)}"),
    ]
    return found


def markdown(settings: CompareSettings, groups: Sequence[Group]) -> str:
    """The table in Markdown, columns aligned; a cell without a figure is empty."""
    chosen = columns(settings, groups)
    lines = [[name for name, _ in chosen]]
    lines += [[write(group) for _, write in chosen] for group in groups]
    widths = [max(len(line[place]) for line in lines) for place in range(len(chosen))]
    text = [_line([cell.ljust(w) for cell, w in zip(line, widths, strict=True)]) for line in lines]
    text.insert(1, _line(["-" * width for width in widths]))
    return "\n".join(text) + "\n"


def score_text(found: Estimate | None, measure: str, sign: str = "") -> str:
    """A measure with its interval, shares in percent.

    >>> score_text(Estimate(0.7213, 0.0131, 3), "accuracy")
    '72.1 ± 1.3 %'
    """
    if found is None:
        return ""
    if measure in _SHARES:
        half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
        return f"{100 * found.mean:{sign}.1f}{half} %"
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:{sign}.4g}{half}"


def to_csv(results: Sequence[Result], settings: CompareSettings) -> str:
    """One line a cell; figures of a cell that is not whole are empty."""
    text = io.StringIO()
    rows = [_flat(one, settings) for one in results]
    writer = csv.DictWriter(text, _names(settings), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
    return [*_ABOUT, f"test_{settings.measure}", *_SCALARS[1:], "gap", *reached, "failure"]


def _flat(one: Result, settings: CompareSettings) -> dict[str, Any]:
    row = {key: getattr(one, key) for key in _ABOUT} | {"failure": one.failure}
    known = one.measured
    if known is None:
        return row
    row[f"test_{settings.measure}"] = known.score
    row |= {name: getattr(known, name) for name in _SCALARS[1:]} | {"gap": known.gap}
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


def _difference(found: Estimate | None, measure: str) -> str:
    return score_text(found, measure, sign="+")


def _reached(position: int, least: float, measure: str) -> Column:
    def write(group: Group) -> str:
        count, there = group.reached(position)
        if count is None:
            return "never" if group.trained else ""
        return size(count) + ("" if there == len(group.trained) else f" ({there})")

    bound = "<=" if measure in LOWER_IS_BETTER else ">="
    return f"bytes to {bound} {least:g}", write


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
