"""The page of a run: three numbers, curves, how good it became, its traffic, what was revealed.

A figure whose numbers were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.core.ledger import Traffic
from vfl.experiments.attack_results import read_run_rows, sentences, summary_table
from vfl.experiments.leaderboard import OF_LABELS
from vfl.experiments.pages.charts import (
    Bar,
    Drawing,
    Series,
    bar_chart,
    line_chart,
)
from vfl.experiments.pages.run_records import Epoch, Run, read_run
from vfl.experiments.scores import Row
from vfl.experiments.tables import (
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

_NOT_RECORDED = "not recorded"
#: What a feature party holds beside its columns, by the secure mode's name.
_SHARED = {
    "beaver": "shares of first layers that nobody has whole",
    "permuted": "shares of a network that nobody has whole",
}
_MODES = {
    "in-process": "All parties ran in one process, over real frames.",
    "federated": "They trained over a Flower federation, each in a process of its own.",
    "simulation": "They ran on Flower's simulation engine.",
}
#: Measures by their names in the records, in the order of the table.
_MEASURES = {
    "accuracy": "Accuracy",
    "hit_rate": "Hit rate",
    "auc": "AUC",
    "f1": "F1",
    "log_loss": "Log loss",
    "rmse": "RMSE",
    "mae": "Mean absolute error",
    "r2": "R²",
}
_BARS = 5


@dataclass(frozen=True, slots=True)
class Headline:
    """One of the three numbers at the top."""

    label: str
    value: str
    note: str

    @property
    def measured(self) -> bool:
        """Whether there is a number to show."""
        return self.value != NOT_MEASURED


def run_page(folder: Path) -> dict[str, Any]:
    """What the template of a run prints, from what its folder holds.

    Raises:
        RunFolderError: there is no run, it is of another format, or a file of it is damaged.
    """
    run, attacked = read_run(folder), read_run_rows(folder)
    meta = (date_text(run.created), run.mode, f"vfl {run.version}" if run.version else "")
    head = ("Who learned", "what", "of", "phase", "times", "values")
    return {
        "name": run.name,
        "meta": " · ".join(filter(None, meta)),
        "cards": (_score_card(run), _bytes_card(run), _speed_card(run)),
        "sentence": _who_held_what(run),
        "figures": drawings_of(run),
        "scores": score_lines(run),
        "parties": traffic_lines(run.traffic, lambda row: (row.party, row.direction)),
        "phases": traffic_lines(run.traffic, lambda row: (row.phase, row.direction)),
        "methods": _methods(run, attacked),
        "revealed": Table(head, run.revealed, words=4) if run.revealed else None,
        "attacks": summary_table(attacked) if attacked else None,
        "attackers": list(sentences(attacked).items()),
        "environment": sorted(run.environment.items()),
        "command": run.command,
        "weights": run.words.get("weights_sha256", ""),
        "config_text": run.config_text.strip(),
    }


def score_lines(run: Run) -> list[tuple[str, str, str]]:
    """The last value of every measure, of validation and of test rows, as far as measured."""

    def text(part: str, measure: str) -> str:
        value = run.last(f"{part}_{measure}")
        if value is None:
            return ""
        return percent_text(value) if measure in ("accuracy", "hit_rate") else number_text(value)

    lines = [
        (name, text("validation", measure), text("test", measure))
        for measure, name in _MEASURES.items()
    ]
    return [line for line in lines if line[1] or line[2]]


def traffic_lines(
    traffic: Sequence[Traffic], key: Callable[[Traffic], tuple[str, str]]
) -> list[list[str]]:
    """The ledger's lines added up by a name and their direction, up before down, in words."""
    groups: dict[tuple[str, str], list[Traffic]] = {}
    for row in traffic:
        groups.setdefault(key(row), []).append(row)
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
    return lines


def drawings_of(run: Run) -> list[Drawing]:
    """Loss and score by epoch, score by bytes, bytes by party: as many as can be drawn."""
    epochs, drawings = run.epochs, []
    if lines := _series(epochs, "loss", "epoch"):
        words = _described(lines, "loss")
        chart = line_chart("loss", "Loss by epoch", words, lines, "epoch", whole_x=True)
        drawings.append(Drawing("Loss", "mean over rows, lower is better", chart))
    title, caption, measure, factor = (
        "RMSE",
        "root mean squared error, lower is better",
        "rmse",
        1.0,
    )
    if _series(epochs, "accuracy", "epoch"):
        title, caption, measure, factor = (
            "Accuracy", "percent of rows, higher is better", "accuracy", 100.0
        )  # fmt: skip
    if lines := _series(epochs, measure, "epoch", factor):
        words = _described(lines, title)
        chart = line_chart("score", f"{title} by epoch", words, lines, "epoch", whole_x=True)
        drawings.append(Drawing(title, caption, chart))
    largest = max((epoch.get("total_bytes", 0) for epoch in epochs), default=0)
    divisor, unit = byte_unit(largest)
    lines = _series(epochs, measure, "total_bytes", factor, divisor)
    if lines and largest:
        label, words = f"{unit} on the wire, both directions", _described(lines, title)
        chart = line_chart("price", f"{title} by bytes", words, lines, label, x_from=0.0)
        drawings.append(Drawing(f"{title} by bytes", caption, chart))
    return drawings + _bytes_by_party(run.traffic)


def _series(
    epochs: Sequence[Epoch], measure: str, x: str, factor: float = 1, divisor: float = 1
) -> list[Series]:
    """`measure` of training, validation and test, each in its own style, as far as measured."""
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


def _described(lines: Sequence[Series], measure: str) -> str:
    ends = (f"{each.name} ends at {each.points[-1][1]:.4g}" for each in lines)
    return f"{measure}: {', '.join(ends)}."


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
    words = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    chart = bar_chart("bytes", "Bytes by party", words, bars)
    return [Drawing("Bytes by party", caption, chart)]


def _score_card(run: Run) -> Headline:
    accuracy = run.figures.get("test_accuracy", run.last("test_accuracy"))
    rmse = run.figures.get("test_rmse", run.last("test_rmse"))
    if accuracy is None and (rmse is not None or run.last("validation_rmse") is not None):
        return Headline("Test RMSE", number_text(rmse), _regression_note(run))
    validation = run.last("validation_accuracy")
    note = "" if validation is None else f"validation {percent_text(validation)}"
    return Headline("Test accuracy", percent_text(accuracy), note)


def _regression_note(run: Run) -> str:
    if "test_r2" in run.figures:
        return f"R² {run.figures['test_r2']:.3f}"
    validation = run.last("validation_rmse")
    return "" if validation is None else f"validation {number_text(validation)}"


def _bytes_card(run: Run) -> Headline:
    total = _total_bytes(run)
    note = "" if total is None else _size_note(run.figures.get("wire_ratio"))
    return Headline("On the wire", bytes_text(total), note)


def _total_bytes(run: Run) -> float | None:
    """Of the summary, else of the ledger, else of the last epoch."""
    if run.sent is not None:
        return run.sent
    if run.traffic:
        return sum(row.wire_bytes for row in run.traffic)
    return run.last("total_bytes")


def _size_note(wire_ratio: float | None) -> str:
    """How the bytes compare with dense float32; frame headers may make them more."""
    if wire_ratio is None or wire_ratio <= 0:
        return f"against dense float32: {NOT_MEASURED}"
    if wire_ratio < 0.95:
        return f"{three_digits(1 / wire_ratio)} times smaller than dense float32"
    if wire_ratio <= 1.05:
        return "as large as dense float32"
    return f"{three_digits(wire_ratio)} times the size of dense float32"


def _speed_card(run: Run) -> Headline:
    count = len(run.epochs)
    epochs = f"{count} {'epoch' if count == 1 else 'epochs'}" if count else ""
    seconds = run.figures.get("seconds")
    time = "" if seconds is None else f"in {seconds_text(seconds)}"
    speed = number_text(run.figures.get("steps_per_second"))
    return Headline("Steps per second", speed, " ".join(filter(None, (epochs, time))))


def _who_held_what(run: Run) -> str:
    features = tuple(party for party in run.parties if party != run.label_party)
    owner = run.label_party or "the label party"
    own = " together with columns of its own" if run.label_party in run.parties else ""
    model, models = "a bottom model", "their bottom models"
    mode = run.words.get("secure", "").partition(":")[0]
    if mode in _SHARED:
        model = models = _SHARED[mode]
    if len(features) == 1:
        holders = f"{features[0]} held its own columns and {model}"
    elif features:
        holders = f"{list_text(features)} each held their own columns and {model}"
    else:
        holders = f"The feature parties held their columns and {models}"
    top = "" if mode == "permuted" else " and the top model"
    labels = f"{owner} held the labels{top}{own}"
    return f"{holders}; {labels}. {_MODES.get(run.mode, '')}".strip()


def _methods(run: Run, attacked: Sequence[Row]) -> list[tuple[str, str]]:
    return [
        ("Codec", run.words.get("codec", _NOT_RECORDED)),
        ("Size by formula", _ratio_text(run.figures.get("formula_ratio"))),
        ("Size on the wire", _ratio_text(run.figures.get("wire_ratio"))),
        ("Defense", run.words.get("defense", _NOT_RECORDED)),
        ("Secure", _secure(run)),
        ("Privacy", _privacy(attacked)),
    ]


def _secure(run: Run) -> str:
    """The mode and whom it trusts with what; one machine protects nobody from its owner."""
    secure, trust = run.words.get("secure"), run.words.get("trust")
    words = ": ".join(filter(None, (secure, trust))) or _NOT_RECORDED
    if secure in (None, "none") or run.mode == "federated":
        return words
    return f"{words}; here all parties ran in one place, where it protects nobody"


def _privacy(attacked: Sequence[Row]) -> str:
    """The attack on labels that reached most, beside what it needs no run for."""
    labels = [row for row in attacked if row.measure in OF_LABELS]
    if not labels:
        return "not measured in this run: no attack was scored"
    worst = max(labels, key=lambda row: row.value)
    leaked = f"{worst.k} leaked labels of each class" if worst.k else "no leaked label"
    return f"{worst.attack} reaches {percent_text(worst.value)} of the labels with {leaked}"


def _ratio_text(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{percent_text(ratio)} of dense float32"
