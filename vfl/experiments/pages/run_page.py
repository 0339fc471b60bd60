"""The page of a run: summary numbers, curves, quality of predictions, traffic, and disclosures.

The folder needs only the file `run.json`, because a run may have been interrupted. The page leaves
out a chart without measured numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from vfl.core import products
from vfl.core.registry import named
from vfl.core.traffic import Traffic
from vfl.experiments.attack_tables import (
    best_without_model,
    over_draws,
    searches_table,
    sentences,
    shown,
    summary_table,
)
from vfl.experiments.glance import Card, of_run
from vfl.experiments.leaderboard import fitting_measure, label_measure
from vfl.experiments.loaded_run import Epoch, LoadedRun, finite
from vfl.experiments.pages.charts import Bar, Drawing, Series, bar_drawing, line_drawing
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.pages.stale import stale_section
from vfl.experiments.pages.thresholds import threshold_sections
from vfl.experiments.results import Record, attacks_on_run, fitting_quality, trained_records
from vfl.experiments.tables import (
    MEASURES,
    NOT_MEASURED,
    Table,
    byte_unit,
    bytes_text,
    date_text,
    list_text,
    number_text,
    percent_text,
    seconds_text,
    three_digits,
)
from vfl.experiments.value import gain_over_label, gains_over_alone

NOT_RECORDED = "not recorded"
#: Values that a feature party has besides its columns, as text, by name of the secure mode.
_SHARED = {
    "beaver": "shares of first layers, which no party has whole",
    "permuted": "shares of a network, which no party has whole",
}
_MODES = {
    "in-process": "All parties ran in one process and exchanged real frames.",
    "module": "A caller's module ran all parties in one process; they exchanged real frames.",
    "federated": "The parties trained in a Flower federation, each in its own process.",
    "simulation": "The parties ran on Flower's simulation engine.",
}
#: Display names of measures, by the measures' names in records, in the order of the table.
_MEASURES = {
    "accuracy": "Accuracy",
    "hit_rate": "Hit rate",
    "auc": "AUC",
    "f1": "F1",
    "log_loss": "Log loss",
    "uncalibrated_log_loss": "Log loss before calibration",
    "brier": "Brier score",
    "uncalibrated_brier": "Brier score before calibration",
    "rmse": "RMSE",
    "mae": "Mean absolute error",
    "r2": "R²",
}
_BARS = 5


def run_page(run: LoadedRun, missed_cost: float | None = None) -> Content:
    """Return the content of a run's page.

    Args:
        run: the run.
        missed_cost: cost of one missed positive, as a number of false alarms; this cost determines
            the threshold.

    Raises:
        RunFolderError: the run has another format, or one of its files is damaged.
    """
    everything = attacks_on_run(run)
    attacked = [one for one in everything if not one.stale]
    stale = [one for one in everything if one.stale]
    utility = _utility(run)
    measure = _SHOWN[utility.title]
    reached = run.figure(f"test_{measure}")
    beside = {} if reached is None else {str(run.config.get("seed", 0)): reached}
    top = of_run(
        utility,
        _sent(run),
        _promised(run),
        [*trained_records(run), *attacked] if attacked else [],
        gains_over_alone(run.path, measure, beside)
        or gain_over_label(run.folder, measure, reached),
        "" if (seconds := run.figure("seconds")) is None else seconds_text(seconds),
    )
    return Content(
        glance=top,
        count=run.head["mode"],
        sentence=_who_held_what(run),
        notes=[f"{len(stale)} figures of attacks are stale and listed separately"] if stale else [],
        sections=[
            *_sections(run, attacked, missed_cost),
            *([stale_section(stale)] if stale else []),
        ],
        weights=run.word("weights_sha256"),
    )


def gain_of(run: LoadedRun) -> str:
    """Return, as text, a run's gain over a model of its label party's columns; empty if unknown."""
    measure = _SHOWN[_utility(run).title]
    return gain_over_label(run.folder, measure, run.figure(f"test_{measure}"))


def _sections(
    run: LoadedRun, attacked: Sequence[Record], missed_cost: float | None
) -> Iterator[Section]:
    """Yield the page's sections; a section without content says that nothing was measured."""
    drawings = drawings_of(run)
    none = "Not measured, because the run contains no finished epoch."
    yield Section(title="Training", drawings=drawings, below="" if drawings else none)
    if (quality := _quality(run)) is not None:
        yield Section(title="Quality", tables=[quality], below=_OF_QUALITY, roomy=True)
    yield from threshold_sections(run, missed_cost)
    if (evaluations := _evaluations(run)) is not None:
        yield Section(
            title="Evaluations", tables=[evaluations], below=_evaluated_rows(run), roomy=True
        )
    last = run.evaluations[-1] if run.evaluations else {}
    for name, path in products.sections().items():
        if (figures := run.summary.get(name, last.get(name))) is not None:
            yield named(path)(figures, run.path)
    yield Section(title="Compression and defense", pairs=_methods(run, attacked))
    if (revealed := _revealed(run.summary.get("revealed"))) is not None:
        yield Section(title="What was revealed", tables=[revealed], below=_OF_REVEALED, roomy=True)
    if attacked:
        searches = searches_table(attacked)
        yield Section(
            title="Attacks",
            tables=[summary_table(attacked), *([] if searches is None else [searches])],
            pairs=list(sentences(attacked).items()),
            below=_OF_ATTACKS,
            roomy=True,
        )
    ledger = [_traffic_table(run.traffic, by, head) for by, head in _LEDGERS if run.traffic]
    below = _OF_TRAFFIC if ledger else "Not measured in this run."
    yield Section(title="Traffic", tables=ledger, below=below, roomy=True)
    machine = sorted((name, str(value)) for name, value in run.environment.items())
    below = "" if machine else "Not recorded in this run."
    yield Section(title="Environment", pairs=machine, below=below)


_OF_QUALITY = (
    "Measured over all rows of the split at once: validation rows after the last epoch, test rows "
    "with the final weights; every row has the same weight."
)
_OF_REVEALED = (
    "Plaintext values that parties learned in addition to the agreed settings. Values: number of "
    "values over all occurrences. Masked values are left out, because a party that does not "
    "collude learns nothing from them."
)
_OF_ATTACKS = (
    "Means over draws of leaked rows; k is the number of leaked rows of each class. From scratch: "
    "a network trained only on the leaked rows. Best baseline: the better of this network and the "
    "same attack on bottom models that were trained without labels. An attack's gain over the best "
    "baseline is due to this run."
)
_OF_TRAFFIC = (
    "Up: cuts and opened masked values that parties send to the label party. Down: gradients, "
    "answers and relayed messages. Bytes on the wire are payloads and a header of 16 bytes per "
    "frame; TLS records are not included. Waiting is the time that the label party waited for "
    "these frames."
)
_LEDGERS = (("party", "Party"), ("phase", "Phase, all parties"))


def _evaluations(run: LoadedRun) -> Table | None:
    """Return one line per group of rows that an evaluation scored; None without such rows."""
    if not run.evaluations:
        return None
    groups = []
    for number, one in enumerate(run.evaluations, 1):
        rows, when = one.get("rows") or {}, date_text(str(one.get("evaluated", "")))
        about = f"{number}, {when}" if when else str(number)
        if beside := one.get("beside"):
            of = f"rows that none of {list_text(tuple(map(str, beside)))} learned from"
            groups.append((about, of, one.get("common_rows"), "test", one))
        elif rows:
            left_out = f"; {rows.get('left_out', 0):,} that it learned from are left out"
            groups.append((about, "its test rows" + left_out, rows.get("test"), "test", one))
            groups.append((about, "new rows", rows.get("new"), "new", one))
        else:
            groups.append((about, "its test rows", run.rows.get("test"), "test", one))
    groups = [group for group in groups if group[2] != 0]
    known = [finite(dict(one)) for *_, one in groups]
    shown = [name for name in _MEASURES if any({f"test_{name}", f"new_{name}"} & set(one)
                                               for one in known)]  # fmt: skip
    lines = [
        [about, of, NOT_RECORDED if count is None else f"{count:,}"]
        + [score(name, figures.get(f"{part}_{name}")) for name in shown]
        for (about, of, count, part, _), figures in zip(groups, known, strict=True)
    ]
    head = ["evaluation", "of", "rows", *(_MEASURES[name] for name in shown)]
    return Table(head, lines, words=2)


def _evaluated_rows(run: LoadedRun) -> str:
    parts = [f"{run.rows[part]:,} {words}" for part, words in _PARTS.items() if part in run.rows]
    of = f" The run trained, validated and tested on {', '.join(parts)} rows." if parts else ""
    return f"vfl evaluate adds a line and keeps earlier ones.{of}"


_PARTS = {"train": "training", "validation": "validation", "test": "test"}


def _revealed(found: Any) -> Table | None:
    """Return a table of the disclosures in a run's summary: which party learned what, from whom."""
    names = ("observer", "what", "of", "phase", "times", "values")
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    cells = [[one.get(name, "") for name in names] for one in listed]
    lines = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line]
             for line in cells]  # fmt: skip
    head = ("Who learned", "what", "of", "phase", "times", "values")
    return Table(head, lines, words=4) if lines else None


def score(measure: str, value: float | None) -> str:
    """Return the value of a metric as text; empty if it was not measured."""
    if value is None:
        return ""
    return percent_text(value) if measure in ("accuracy", "hit_rate") else number_text(value)


def _quality(run: LoadedRun) -> Table | None:
    """Return a table with the last value of every measure, on validation rows and on test rows."""
    lines = [
        [name, *(score(one, run.last(f"{part}_{one}")) for part in ("validation", "test"))]
        for one, name in _MEASURES.items()
    ]
    for party, own in run.tasks.items():
        figures = finite(own)
        lines += [
            [f"{name}, {party}", "", number_text(figures.get(f"test_{measure}"))]
            for measure, name in _MEASURES.items()
            if f"test_{measure}" in figures
        ]
    lines = [line for line in lines if line[1] or line[2]]
    return Table(["Measure", "Validation rows", "Test rows"], lines) if lines else None


def _traffic_table(traffic: Sequence[Traffic], by: str, heading: str) -> Table:
    """Return sums of the ledger's bytes by a column's values and by direction, upward first."""
    groups: dict[tuple[str, str], list[Traffic]] = {}
    for row in traffic:
        groups.setdefault((getattr(row, by), row.direction), []).append(row)
    names = list(dict.fromkeys(name for name, _ in groups))
    lines = []
    for way in sorted(groups, key=lambda way: (names.index(way[0]), way[1] != "up")):
        rows = groups[way]
        frames, wire_bytes = sum(row.frames for row in rows), sum(row.wire_bytes for row in rows)
        seconds = sum(row.seconds for row in rows)
        lines.append(
            [
                *(*way, f"{frames:,}", bytes_text(sum(row.payload_bytes for row in rows))),
                bytes_text(wire_bytes),
                bytes_text(wire_bytes / frames) if frames else "",
                seconds_text(seconds) if seconds else "",
            ]
        )
    head = [heading, "Direction", "Frames", "Payload", "On the wire", "Per frame", "Waiting"]
    return Table(head, lines, words=2)


def drawings_of(run: LoadedRun) -> list[Drawing]:
    """Draw loss and score by epoch, score by bytes, and bytes by party, where measured."""
    epochs, drawings = run.epochs, []
    if lines := _series(epochs, "loss", "epoch"):
        words = "mean over rows, lower is better"
        drawings.append(line_drawing("Loss by epoch", words, lines, "epoch", whole_x=True))
    title, measure, factor = "RMSE", "rmse", 1.0
    words = "root mean squared error, lower is better"
    if _series(epochs, "accuracy", "epoch"):
        title, measure, factor = "Accuracy", "accuracy", 100.0
        words = "percent of rows, higher is better"
    if lines := _series(epochs, measure, "epoch", factor):
        drawings.append(line_drawing(f"{title} by epoch", words, lines, "epoch", whole_x=True))
    spent = [(one["epoch"], one["epsilon"]) for one in epochs if "epsilon" in one]
    if spent:
        words = "epsilon of one record against a party that has the models; lower is more private"
        lines = [Series("spent", spent, 1)]
        drawings.append(line_drawing("Epsilon by epoch", words, lines, "epoch", whole_x=True))
    largest = max((epoch.get("sent", 0) for epoch in epochs), default=0)
    divisor, unit = byte_unit(largest)
    lines = _series(epochs, measure, "sent", factor, divisor)
    if lines and largest:
        label = f"{unit} on the wire, both directions"
        drawings.append(line_drawing(f"{title} by bytes", words, lines, label, x_from=0.0))
    return drawings + _bytes_by_party(run.traffic)


def _series(
    epochs: Sequence[Epoch], measure: str, x: str, factor: float = 1, divisor: float = 1
) -> list[Series]:
    """Return a measure's curves on training, validation and test rows, one style each."""
    found = []
    for style, part in enumerate(("train", "validation", "test"), 1):
        name = f"{part}_{measure}"
        points = [
            (epoch[x] / divisor, factor * epoch[name])
            for epoch in epochs
            if x in epoch and name in epoch
        ]
        if points:
            found.append(Series(part, points, style))
    return found


def _bytes_by_party(traffic: Sequence[Traffic]) -> list[Drawing]:
    totals = {row.party: {"up": 0, "down": 0} for row in traffic}
    for row in traffic:
        if row.direction in totals[row.party]:
            totals[row.party][row.direction] += row.wire_bytes
    if not totals:
        return []
    largest = sorted(totals.items(), key=lambda one: -sum(one[1].values()))
    bars = [
        Bar(
            party,
            (sent["up"], sent["down"]),
            f"{bytes_text(sent['up'])} up, {bytes_text(sent['down'])} down",
        )
        for party, sent in largest[:_BARS]
    ]
    caption = "strong: up, to the label party; pale: down, back from it"
    if len(totals) > _BARS:
        caption = f"the {_BARS} largest of {len(totals)}; {caption}"
    return [bar_drawing("Bytes by party", caption, bars)]


#: Title of the summary card for the quality of a run's predictions, and name of the metric on this
#: card.
_SHOWN = {"Test RMSE": "rmse", "Test AUC": "auc", "Test accuracy": "accuracy"}


def _utility(run: LoadedRun) -> Card:
    """Return the summary card with the model's score and the guess's, in a fitting measure."""
    guess = finite(run.summary.get("guess"))
    accuracy, rmse = (
        run.last(name) if run.figure(name) is None else run.figure(name)
        for name in ("test_accuracy", "test_rmse")
    )
    error, validation = run.last("validation_rmse"), run.last("validation_accuracy")
    if accuracy is None and (rmse is not None or error is not None):
        r2 = run.figure("test_r2")
        note = f"R² {r2:.3f}" if r2 is not None else ""
        note = note or ("" if error is None else f"validation {number_text(error)}")
        beside = f"always the mean: {number_text(guess['rmse'])}" if "rmse" in guess else ""
        return Card("Test RMSE", number_text(rmse), ", ".join(filter(None, (note, beside))))
    note = "" if validation is None else f"validation {percent_text(validation)}"
    beside = f"guess {percent_text(guess['accuracy'])}" if "accuracy" in guess else ""
    area = run.figure("test_auc")
    if area is not None and fitting_quality(guess) == "auc":
        note = f"accuracy {percent_text(accuracy)}"
        return Card("Test AUC", percent_text(area), ", ".join(filter(None, (note, beside))))
    return Card("Test accuracy", percent_text(accuracy), ", ".join(filter(None, (note, beside))))


def _sent(run: LoadedRun) -> Card:
    """Return the summary card of sent bytes, from the run's summary, ledger or last epoch."""
    total = run.sent
    if total is None:
        sent = [row.wire_bytes for row in run.traffic]
        total = sum(sent) if sent else run.last("sent")
    seconds = run.figure("seconds")
    time = "" if seconds is None else f"in {seconds_text(seconds)}"
    cuts = total is not None and not run.summary.get("keeps")  # models without cuts send no frames
    size = _size_note(run.figure("wire_ratio")) if cuts else ""
    return Card("On the wire", bytes_text(total), ", ".join(filter(None, (size, time))))


def _size_note(wire_ratio: float | None) -> str:
    """Return, as text, the sent bytes relative to dense float32, with frame headers."""
    if wire_ratio is None or wire_ratio <= 0:
        return f"against dense float32: {NOT_MEASURED}"
    if wire_ratio < 0.95:
        return f"{three_digits(1 / wire_ratio)} times smaller than dense float32"
    if wire_ratio <= 1.05:
        return "as large as dense float32"
    return f"{three_digits(wire_ratio)} times the size of dense float32"


def _who_held_what(run: LoadedRun) -> str:
    features = tuple(party for party in run.parties if party != run.label_party)
    owner = run.label_party or "the label party"
    own = ", columns of its own" if run.label_party in run.parties else ""
    model, models = "a bottom model", "their bottom models"
    mode = run.word("secure").partition(":")[0]
    keeps = run.summary.get("keeps")
    if mode in _SHARED:
        model = models = _SHARED[mode]
    elif keeps is not None:
        model = models = keeps[0]
    if len(features) == 1:
        holders = f"{features[0]} held its own columns and {model}"
    elif features:
        holders = f"{list_text(features)} each held their own columns and {model}"
    else:
        holders = f"The feature parties held their columns and {models}"
    top = f" and {keeps[1]}" if keeps else "" if mode == "permuted" else " and the top model"
    if middle := run.config.get("middle", {}).get("party"):
        top = f" and the head; {middle} held the middle model and no data"
    labels = f"{owner} held the labels{own}{top}"
    if run.tasks:
        labels = f"{list_text((owner, *run.tasks))} each held labels and a top model of their own"
    return f"{holders}; {labels}. {_MODES.get(run.head['mode'], '')}".strip()


def _methods(run: LoadedRun, attacked: Sequence[Record]) -> list[tuple[str, str]]:
    return [
        ("Rows read from", _sources(run)),
        ("Epochs", str(len(run.epochs) or NOT_MEASURED)),
        ("Steps per second", number_text(run.figure("steps_per_second"))),
        ("Codec", run.word("codec") or NOT_RECORDED),
        ("Size by formula", _ratio_text(run.figure("formula_ratio"))),
        ("Size on the wire", _ratio_text(run.figure("wire_ratio"))),
        ("Defense", run.word("defense") or NOT_RECORDED),
        ("Secure", _secure(run)),
        ("Privacy", _privacy(attacked)),
        ("Promises", _promises(run)),
        *([("Privacy audit", run.audit)] if run.audit else []),
    ]


def _sources(run: LoadedRun) -> str:
    """Return the tables' names; in a federation, parties do not disclose their names."""
    if run.head["mode"] in ("federated", "simulation"):
        return "each party has its own table, which never leaves the party"
    found = run.summary.get("sources")
    listed = found.items() if isinstance(found, dict) else ()
    return "; ".join(f"{party}: {source}" for party, source in listed) or NOT_RECORDED


def _secure(run: LoadedRun) -> str:
    """Return, as text, the secure mode with the assumptions under which it protects."""
    secure = run.word("secure")
    words = ": ".join(filter(None, (secure, run.word("trust")))) or NOT_RECORDED
    if secure in ("", "none") or run.head["mode"] == "federated":
        return words
    return f"{words}; here all parties ran in one process, which protects no one"


def _promises(run: LoadedRun) -> str:
    if not isinstance(run.summary.get("privacy"), list):
        return NOT_RECORDED
    return _promised(run) or "nothing is promised"


def _promised(run: LoadedRun) -> str:
    """Return each privacy guarantee separately, as different units do not add up."""
    stated = run.summary.get("privacy")
    listed = stated if isinstance(stated, list) else []
    texts = [str(one.get("text", "")) for one in listed if isinstance(one, dict)]
    return ". ".join(filter(None, texts))


def _privacy(attacked: Sequence[Record]) -> str:
    """Return a text on the strongest label attack, with the guess and the model-free baseline."""
    measure = fitting_measure(attacked, "auto")
    labels = [row for row in attacked if label_measure(row) == measure]
    if not labels:
        return "not measured in this run: no attack was scored"
    worst = max(over_draws(labels), key=lambda own: fmean(row.value for row in own))
    attack, k, draws = worst[0].attacker, worst[0].k, len(worst)
    leaked = f"{k} leaked labels of each class" if k else "no leaked label"
    over = f" (mean of {draws} draws)" if draws > 1 else ""
    free = best_without_model(worst)
    beside = f", {shown(free, measure)} without the model" if free else ""
    guess = shown([row.guess for row in worst if row.guess is not None], measure)
    return (
        f"{attack} infers labels with {MEASURES[measure]} "
        f"{shown([row.value for row in worst], measure)}{over} from {leaked}; "
        f"the guess has {guess}{beside}"
    )


def _ratio_text(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{percent_text(ratio)} of dense float32"
