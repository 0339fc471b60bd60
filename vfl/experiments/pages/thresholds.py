"""Sections of a run of two classes: thresholds, lift, and whether probabilities hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.pages.charts import Drawing, Series, line_drawing
from vfl.experiments.pages.sections import Section
from vfl.experiments.tables import Table, number_text, percent_text
from vfl.experiments.thresholds import (
    FLAGGED,
    Confusion,
    average_precision,
    bands,
    best_f1_threshold,
    brier,
    calibrated,
    calibration_error,
    cheapest_threshold,
    confusion_at,
    confusions,
    flagging,
    log_loss,
)

if TYPE_CHECKING:
    from vfl.session.label.scored import Scored

_WEIGHTED = (
    "The classes were weighted in the loss (label.class_weight), so probabilities are too high for "
    "the rare class: do not read them as shares. label.calibration = 'platt' or 'isotonic' mends "
    "them by the validation rows; else choose a threshold."
)
_OF_THRESHOLDS = (
    "Test rows. Positive is the second class in sorted order. The thresholds that are chosen are "
    "chosen on validation rows; those of a share flag so many of the test rows."
)
_OF_BANDS = (
    "Test rows in bands of equal size, the most probable first. Lift: positives in the band beside "
    "those in as many rows taken at random. Expected: the mean probability; observed: the share of "
    "positives."
)
_OF_KS = "the largest distance of both classes' distributions (Kolmogorov and Smirnov)"
#: Of a curve; more would not be seen.
_POINTS = 200
#: Fewer positive validation rows than this fit no curve worth showing.
_FEW_POSITIVES = 20


def threshold_lines(run: LoadedRun, missed_cost: float | None = None) -> list[tuple[str, str]]:
    """What a screen shows of a run of two classes: a name and a sentence each."""
    tested = run.scored.get("test")
    if tested is None:
        return []
    rate = tested.positives / tested.rows
    guess = f"of a guess {rate:.4f}, the share of positives"
    lines = [("average precision", f"{average_precision(tested):.4f}, {guess}")]
    for how, one in _chosen(run, missed_cost):
        found = f"finds {one.recall:.1%} of positives"
        if one.precision is not None:
            found += f"; {one.precision:.1%} of what it flags are"
        lines.append((f"at {one.threshold:.3g}", f"{found} ({how})"))
    off = f"off by {100 * calibration_error(tested):.1f} points, on average"
    if (before := run.scored.get("uncalibrated")) is not None:
        off += f"; before calibration {100 * calibration_error(before):.1f}"
    lines.append(("calibration", off))
    return lines + ([("look at", _WEIGHTED)] if _is_weighted(run) else [])


def threshold_sections(run: LoadedRun, missed_cost: float | None = None) -> Iterator[Section]:
    """Tables and curves of the test rows; nothing of a run without two classes."""
    tested = run.scored.get("test")
    if tested is None:
        return
    rate = tested.positives / tested.rows
    yield Section(
        title="Thresholds",
        drawings=[_precision_recall(tested)],
        tables=[_threshold_table(run, tested, missed_cost)],
        pairs=[
            ("Average precision", number_text(average_precision(tested))),
            ("That of a guess", f"{number_text(rate)}, the share of positives"),
            ("Gini", f"{number_text(tested.gini())}, 2 AUC - 1"),
            ("KS", f"{number_text(tested.kolmogorov_smirnov())}, {_OF_KS}"),
        ],
        below=_OF_THRESHOLDS,
        roomy=True,
    )
    yield Section(
        title="Lift and calibration",
        drawings=[_reliability(tested, run.scored.get("uncalibrated"))],
        tables=[_bands_table(tested)],
        pairs=list(_calibration(run, tested)),
        below=" ".join([_OF_BANDS, *([_WEIGHTED] if _is_weighted(run) else [])]),
        roomy=True,
    )


def _is_weighted(run: LoadedRun) -> bool:
    """Whether class weights changed probabilities that nothing has mended."""
    label = run.config.get("label", {})
    weighted: bool = label.get("class_weight", "none") != "none"
    return weighted and "uncalibrated" not in run.scored


def _chosen(run: LoadedRun, missed_cost: float | None) -> list[tuple[str, Confusion]]:
    """Thresholds that somebody would take, and how they were chosen."""
    tested, validation = run.scored["test"], run.scored.get("validation")
    found = [("the likelier class", confusion_at(tested, 0.5))]
    if validation is not None:
        best = best_f1_threshold(validation)
        found.append(("best F1 of validation rows", confusion_at(tested, best)))
    if validation is not None and missed_cost is not None:
        least = cheapest_threshold(validation, missed_cost)
        how = f"a missed one costs {missed_cost:g} false alarms"
        found.append((how, confusion_at(tested, least)))
    return found


def _threshold_table(run: LoadedRun, tested: Scored, missed_cost: float | None) -> Table:
    lines = _chosen(run, missed_cost)
    lines += [
        (f"{percent_text(share)} of rows", confusion_at(tested, flagging(tested, share)))
        for share in FLAGGED
    ]
    rows = [
        [
            how,
            number_text(one.threshold),
            percent_text(one.flagged),
            "" if one.precision is None else percent_text(one.precision),
            percent_text(one.recall),
            *(
                f"{count:,}"
                for count in (
                    one.true_positives,
                    one.false_positives,
                    one.false_negatives,
                    one.true_negatives,
                )
            ),
        ]
        for how, one in lines
    ]
    head = ["Chosen by", "Threshold", "Flagged", "Precision", "Recall"]
    head += ["True positives", "False positives", "False negatives", "True negatives"]
    return Table(head, rows)


def _bands_table(tested: Scored) -> Table:
    rate = tested.positives / tested.rows
    rows = [
        [
            str(number),
            f"{one.rows:,}",
            f"{one.positives:,}",
            percent_text(one.expected),
            percent_text(one.positives / one.rows),
            f"{one.positives / one.rows / rate:.2f}",
            percent_text(one.captured),
        ]
        for number, one in enumerate(bands(tested), 1)
    ]
    head = ["Band", "Rows", "Positives", "Expected", "Observed", "Lift", "Captured so far"]
    return Table(head, rows)


def _calibration(run: LoadedRun, tested: Scored) -> Iterator[tuple[str, str]]:
    """How far probabilities are off: before and after a calibration, or as one would mend them."""
    if (before := run.scored.get("uncalibrated")) is not None:
        how = run.config["label"]["calibration"]
        yield "Before calibration", _reliability_text(before)
        yield f"After it ({how}, as answered)", _reliability_text(tested)
        return
    yield "As answered", _reliability_text(tested)
    validation = run.scored.get("validation")
    if validation is None or validation.positives < _FEW_POSITIVES:
        return
    for how, name in (("isotonic", "Isotonic regression"), ("platt", "Platt scaling")):
        mended = calibrated(validation, tested.values, how)
        order = mended.argsort(kind="stable")
        better = replace(tested, values=mended[order], counts=tested.counts[order])
        fitted = f"fitted on {validation.rows:,} validation rows (label.calibration = '{how}')"
        yield f"{name} would give", f"{_reliability_text(better)}; {fitted}"


def _reliability_text(scored: Scored) -> str:
    off = f"{100 * calibration_error(scored):.1f} points"
    loss, score = number_text(log_loss(scored)), number_text(brier(scored))
    return f"{off} off on average, log loss {loss}, Brier score {score}"


def _precision_recall(tested: Scored) -> Drawing:
    every = confusions(tested)
    points: Sequence[tuple[float, float]] = [
        (100 * one.recall, 100 * one.precision)
        for one in every[:: max(1, len(every) // _POINTS)]
        if one.precision is not None and one.true_positives
    ]
    rate = 100 * tested.positives / tested.rows
    lines = [Series("model", points, 1), Series("guess", [(0.0, rate), (100.0, rate)], 3)]
    caption = "percent of flagged rows that are positive"
    label = "percent of positives that are flagged"
    return line_drawing("Precision by recall", caption, lines, label, x_from=0.0)


def _reliability(tested: Scored, before: Scored | None = None) -> Drawing:
    found, *earlier = [
        [(100 * one.expected, 100 * one.positives / one.rows) for one in bands(scored)][::-1]
        for scored in (tested, before)
        if scored is not None
    ]
    last = max(max(pair) for points in (found, *earlier) for pair in points)
    lines = [Series("observed", found, 1), Series("if they hold", [(0.0, 0.0), (last, last)], 3)]
    lines += [Series("before calibration", points, 2) for points in earlier]
    caption = "percent of positives in a band of rows"
    return line_drawing("Calibration", caption, lines, "mean probability, percent", x_from=0.0)
