"""The curves and bars of a run; a figure whose numbers were not measured is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vfl.report.axes import Point
from vfl.report.bars import Bar, bar_chart
from vfl.report.charts import Series, line_chart
from vfl.report.parts import Drawing
from vfl.report.records import Epoch, Run
from vfl.report.tables import PartyTotal, party_totals
from vfl.report.units import byte_unit, bytes_text

_BARS = 5
_PARTS = ("train", "validation", "test")


def figures_of(run: Run) -> list[Drawing]:
    """Loss and score by epoch, score by bytes, bytes by party: as many as can be drawn."""
    found = [
        _loss(run.epochs),
        _score_by_epoch(run.epochs),
        _score_by_bytes(run.epochs),
        _bytes_by_party(party_totals(run.traffic)),
    ]
    return [figure for figure in found if figure is not None]


def _series(
    epochs: Sequence[Epoch], measure: str, x: Callable[[Epoch], float | None], factor: float = 1
) -> list[Series]:
    """`measure` of training, validation and test, each in its own style, as far as measured."""
    found = []
    for style, part in enumerate(_PARTS, 1):
        points: list[Point] = []
        for epoch in epochs:
            place, value = x(epoch), getattr(epoch, f"{part}_{measure}")
            if place is not None and value is not None:
                points.append((place, factor * value))
        if points:
            found.append(Series(part, points, style))
    return found


def _loss(epochs: Sequence[Epoch]) -> Drawing | None:
    lines = _series(epochs, "loss", lambda epoch: epoch.epoch)
    if not lines:
        return None
    drawing = line_chart(
        "loss", "Loss by epoch", _described(lines, "loss"), lines, "epoch", whole_x=True
    )
    return Drawing("Loss", "mean over rows, lower is better", drawing)


def _score(epochs: Sequence[Epoch], x: Callable[[Epoch], float | None]) -> list[Series]:
    return _series(epochs, "accuracy", x, 100) or _series(epochs, "rmse", x)


def _score_words(epochs: Sequence[Epoch]) -> tuple[str, str]:
    if _series(epochs, "accuracy", lambda epoch: epoch.epoch):
        return "Accuracy", "percent of rows, higher is better"
    return "RMSE", "root mean squared error, lower is better"


def _score_by_epoch(epochs: Sequence[Epoch]) -> Drawing | None:
    lines = _score(epochs, lambda epoch: epoch.epoch)
    if not lines:
        return None
    title, caption = _score_words(epochs)
    words = _described(lines, title)
    drawing = line_chart("score", f"{title} by epoch", words, lines, "epoch", whole_x=True)
    return Drawing(title, caption, drawing)


def _score_by_bytes(epochs: Sequence[Epoch]) -> Drawing | None:
    largest = max((epoch.total_bytes or 0 for epoch in epochs), default=0)
    divisor, unit = byte_unit(largest)

    def sent(epoch: Epoch) -> float | None:
        return None if epoch.total_bytes is None else epoch.total_bytes / divisor

    lines = _score(epochs, sent)
    if not lines or not largest:
        return None
    title, caption = _score_words(epochs)
    label, words = f"{unit} on the wire, both directions", _described(lines, title)
    drawing = line_chart("price", f"{title} by bytes", words, lines, label, x_from=0.0)
    return Drawing(f"{title} by bytes", caption, drawing)


def _described(lines: Sequence[Series], measure: str) -> str:
    ends = (f"{each.name} ends at {each.points[-1][1]:.4g}" for each in lines)
    return f"{measure}: {', '.join(ends)}."


def _bytes_by_party(totals: Sequence[PartyTotal]) -> Drawing | None:
    if not totals:
        return None
    largest = sorted(totals, key=lambda total: -(total.up_bytes + total.down_bytes))
    bars = [
        Bar(
            total.party,
            (total.up_bytes, total.down_bytes),
            f"{bytes_text(total.up_bytes)} up, {bytes_text(total.down_bytes)} down",
        )
        for total in largest[:_BARS]
    ]
    caption = "strong: up, to the label party; pale: down, back from it"
    if len(totals) > _BARS:
        caption = f"the {_BARS} largest of {len(totals)}; {caption}"
    words = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return Drawing("Bytes by party", caption, bar_chart("bytes", "Bytes by party", words, bars))
