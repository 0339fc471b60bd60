"""Sections about test rows: thresholds, lift, predictions, residuals, calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

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
    from vfl.session.label.scored import Guessed, Residuals, Scored

_WEIGHTED = (
    "The loss weighted the classes (label.class_weight), so predicted probabilities are too high "
    "for the rare class; do not read them as shares. label.calibration = 'platt' or 'isotonic' "
    "corrects them on the validation rows; without it, choose a threshold."
)
_OF_THRESHOLDS = (
    "Measured on test rows. The positive class is the second class in sorted order. The thresholds "
    "by F1 and by cost come from validation rows; the threshold of a share flags at least this "
    "share of the test rows."
)
_OF_BANDS = (
    "Test rows in bands of equal size, the most probable band first. Lift: positives in the band "
    "over the positives in a random sample of the same size. Expected: the mean predicted "
    "probability. Observed: the share of positives."
)
_OF_KS = "the largest distance of both classes' distributions (Kolmogorov and Smirnov)"
_OF_CLASSES = (
    "Measured on test rows; classes are numbered in sorted order. Precision: share of correct rows "
    "among the rows predicted to be of the class. Recall: share of correct rows among the rows of "
    "the class. F1: harmonic mean of precision and recall. Macro: the mean over classes, all with "
    "the same weight."
)
_OF_CONFUSION = (
    "One line per true class, one column per predicted class; rows on the diagonal are correct."
)
_OF_PAIRS = "Most frequent wrong predictions; the whole table is in scored.json."
_OF_SURE = (
    "Test rows in bands of equal size, the most confident predictions first. Expected: the mean "
    "probability of the predicted class. Observed: the share of correct predictions (Guo et al. "
    "2017)."
)
_OF_RESIDUALS = (
    "Test rows in ten bands of equal size, the lowest predictions first. A residual is the label "
    "minus the prediction. The mean residual of a band is its mean label minus its mean "
    "prediction."
)
#: Largest number of classes for which a page has a full confusion table; with more classes, a page
#: lists this many wrong predictions.
_WHOLE, _PAIRS = 12, 15
#: Largest number of points of a curve; more points would not be visible.
_POINTS = 200
#: With fewer positive validation rows than this number, a fitted calibration curve is not reliable.
_FEW_POSITIVES = 20


def threshold_lines(run: LoadedRun, missed_cost: float | None = None) -> list[tuple[str, str]]:
    """Return lines for the terminal about a classification run: a name and a sentence each."""
    if (guessed := run.guessed.get("test")) is not None:
        return list(_class_lines(run, guessed))
    tested = run.scored.get("test")
    if tested is None:
        return []
    rate = tested.positives / tested.rows
    guess = f"(guessing has {rate:.4f}, the share of positives)"
    lines = [("average precision", f"{average_precision(tested):.4f} {guess}")]
    for how, one in _chosen(run, missed_cost):
        found = f"recall {one.recall:.1%}"
        if one.precision is not None:
            found += f", precision {one.precision:.1%}"
        lines.append((f"threshold {one.threshold:.3g}", f"{found} ({how})"))
    off = f"{100 * calibration_error(tested):.1f} points between predicted and observed shares"
    if (before := run.scored.get("uncalibrated")) is not None:
        off += f"; before calibration {100 * calibration_error(before):.1f}"
    lines.append(("calibration error", off))
    return lines + ([("look at", _WEIGHTED)] if _is_weighted(run) else [])


def threshold_sections(run: LoadedRun, missed_cost: float | None = None) -> Iterator[Section]:
    """Yield tables and curves about the test rows, if the run stored counts of these rows."""
    yield from _class_sections(run)
    if (residuals := run.residuals.get("test")) is not None:
        yield Section(
            title="Residuals", tables=[_residual_table(residuals)], below=_OF_RESIDUALS, roomy=True
        )
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
            ("Average precision of guessing", f"{number_text(rate)}, the share of positives"),
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


def _class_lines(run: LoadedRun, tested: Guessed) -> Iterator[tuple[str, str]]:
    """Yield lines for the terminal about a run of more than two classes."""
    recall = tested.recall()
    worst = int(np.nanargmin(recall))
    rows = int(tested.counts[worst].sum())
    yield "macro recall", f"{np.nanmean(recall):.4f}, the mean over {len(recall)} classes"
    yield (
        "least recall",
        f"{recall[worst]:.1%} of {rows} rows of class {worst + 1}, in sorted order",
    )
    off = f"{100 * calibration_error(tested.sure):.1f} points between confidence and accuracy"
    if (before := run.guessed.get("uncalibrated")) is not None:
        off += f"; before calibration {100 * calibration_error(before.sure):.1f}"
    yield "calibration error", off
    if _is_weighted(run):
        yield "look at", _WEIGHTED


def _class_sections(run: LoadedRun) -> Iterator[Section]:
    """Yield sections about predictions of more than two classes, and about their confidence."""
    tested = run.guessed.get("test")
    if tested is None:
        return
    few = len(tested.counts) <= _WHOLE
    yield Section(
        title="Classes",
        tables=[_class_table(tested), _confusion_table(tested) if few else _pairs_table(tested)],
        below=f"{_OF_CLASSES} {_OF_CONFUSION if few else _OF_PAIRS}",
        roomy=True,
    )
    before, sure = run.guessed.get("uncalibrated"), tested.sure
    pairs = [("As answered", _sure_text(run, sure))]
    if before is not None:
        pairs.insert(0, ("Before calibration", _sure_text(run, before.sure, "uncalibrated_")))
    yield Section(
        title="Calibration",
        drawings=[_reliability(sure, None if before is None else before.sure)],
        tables=[_bands_table(sure, "Right")],
        pairs=pairs,
        below=" ".join([_OF_SURE, *([_WEIGHTED] if _is_weighted(run) else [])]),
        roomy=True,
    )


def _sure_text(run: LoadedRun, sure: Scored, which: str = "") -> str:
    told = [f"{100 * calibration_error(sure):.1f} points off on average"]
    for name, words in (("log_loss", "log loss"), ("brier", "Brier score")):
        if (value := run.figure(f"test_{which}{name}")) is not None:
            told.append(f"{words} {number_text(value)}")
    return ", ".join(told)


def _class_table(tested: Guessed) -> Table:
    each = tested.precision(), tested.recall(), tested.f1()
    rows = tested.counts.sum(axis=1)
    lines = [
        [str(number), f"{count:,}", percent_text(count / rows.sum()), *map(_share_text, shares)]
        for number, (count, shares) in enumerate(
            zip(rows.tolist(), np.transpose(each).tolist(), strict=True), 1
        )
    ]
    lines.append(
        ["macro", f"{rows.sum():,}", "", *(_share_text(float(np.nanmean(one))) for one in each)]
    )
    return Table(["Class", "Rows", "Share", "Precision", "Recall", "F1"], lines)


def _share_text(share: float) -> str:
    return "" if np.isnan(share) else percent_text(share)


def _confusion_table(tested: Guessed) -> Table:
    numbers = [str(number) for number in range(1, len(tested.counts) + 1)]
    lines = [
        [number, *(f"{count:,}" for count in own)]
        for number, own in zip(numbers, tested.counts.tolist(), strict=True)
    ]
    return Table(["Class", *(f"as {number}" for number in numbers)], lines)


def _pairs_table(tested: Guessed) -> Table:
    wrong = tested.counts.copy()
    np.fill_diagonal(wrong, 0)
    most = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    pairs = zip(*np.unravel_index(most, wrong.shape), strict=True)
    lines = [
        [str(one + 1), str(other + 1), f"{wrong[one, other]:,}",
         percent_text(wrong[one, other] / tested.counts[one].sum())]
        for one, other in pairs if wrong[one, other]
    ]  # fmt: skip
    return Table(["Class", "Taken for", "Rows", "Share of the class"], lines)


def _residual_table(tested: Residuals) -> Table:
    lines = [
        [str(number), f"{int(rows):,}", *map(number_text, [guess, truth, truth - guess, *errors])]
        for number, (rows, guess, truth, *errors) in enumerate(tested.bands.tolist(), 1)
    ]
    head = ["Band", "Rows", "Mean answer", "Mean label", "Mean residual", "Mean absolute", "RMSE"]
    return Table(head, lines)


def _is_weighted(run: LoadedRun) -> bool:
    """Return whether class weights changed the probabilities and no calibration corrected them."""
    label = run.config.get("label", {})
    weighted: bool = label.get("class_weight", "none") != "none"
    return weighted and not {"uncalibrated"} & {*run.scored, *run.guessed}


def _chosen(run: LoadedRun, missed_cost: float | None) -> list[tuple[str, Confusion]]:
    """Return confusion counts at chosen thresholds, each with the rule of its choice."""
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


def _bands_table(tested: Scored, positives: str = "Positives") -> Table:
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
    head = ["Band", "Rows", positives, "Expected", "Observed", "Lift", "Captured so far"]
    return Table(head, rows)


def _calibration(run: LoadedRun, tested: Scored) -> Iterator[tuple[str, str]]:
    """Yield errors of probabilities before and after calibration, or of a possible one."""
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
