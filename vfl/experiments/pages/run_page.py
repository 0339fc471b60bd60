"""The page of a run: three numbers, curves, how good it became, its traffic, what was revealed.

Of the folder only `run.json` must be there; a run may have been cut short. A figure whose numbers
were not measured is left out.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.core.ledger import Traffic
from vfl.core.storage import read_bytes, read_json, read_lines
from vfl.core.text import as_written
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
from vfl.experiments.pages.charts import Bar, Drawing, Series, bar_drawing, line_drawing
from vfl.experiments.records import Record, attacks_on_run, fitting_quality, records_of
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
from vfl.experiments.value import gains_over_alone

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


#: The finite numbers of one epoch by name; bytes add up over epochs. A loss that became NaN is left
#: out, and so leaves a gap in its curve.
Epoch = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder.

    Attributes:
        head: name, created, vfl, mode and command of its `run.json`.
        config_text: its configuration as it was written.
        label_party, parties: as the configuration says, else as the traffic does.
        epochs: in order.
        traffic: lines of the ledger.
        environment: what it ran on.
        summary: of the whole run, as far as it is known; codec, defense and secure mode at least.
        sent: bytes of all parties and both directions; None where the run did not end.
        middle: who computed between bottoms and head, if anybody did.
        tasks: figures of further label parties, by party; empty while they are not known.
        audit: what the last audit of its privacy proved, in words; empty where there was none.
    """

    head: Mapping[str, str]
    config_text: str
    label_party: str | None
    parties: tuple[str, ...]
    epochs: Sequence[Epoch]
    traffic: Sequence[Traffic]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    sent: float | None
    middle: str | None = None
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    audit: str = ""

    def last(self, measure: str) -> float | None:
        """The last value of a measure; None where no epoch has one."""
        return next((one[measure] for one in reversed(self.epochs) if measure in one), None)

    def figure(self, name: str) -> float | None:
        """A number of the whole run; None where it was not measured."""
        return _finite(self.summary).get(name)

    def word(self, name: str) -> str:
        """What the summary says by that name; empty where it says nothing."""
        return str(self.summary.get(name) or "")


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        RunFolderError: there is no run, it is of another format, or a file of it is damaged.
    """
    if not (folder / "run.json").is_file():
        raise RunFolderError(
            "there is no run in this folder",
            where=str(folder),
            want="a folder with run.json, as training writes it",
            fix="give the path that vfl train printed",
        )
    run = RunFolder(folder)
    head = run.about()
    config_text = run.config() if (folder / "config.toml").exists() else ""
    config = tomllib.loads(config_text)
    traffic = _traffic(folder / "traffic.csv")
    summary = {name: config.get(name) for name in ("codec", "defense", "secure")}
    summary |= run.summary() if (folder / "summary.json").exists() else {}
    up, down = (_finite(summary.get(name)) for name in ("bytes_up", "bytes_down"))
    # A party that only deals has traffic and no place among those with columns.
    parties = list(config.get("parties", {})) or [*(row.party for row in traffic), *up]
    environment, known = folder / "environment.json", summary.get("tasks") or {}
    tasks = {task["party"]: known.get(task["party"], {}) for task in config.get("tasks", ())}
    ways = [_finite(own.get(f"bytes_{way}")) for own in tasks.values() for way in ("up", "down")]
    return Run(
        head={
            name: str(head.get(name, "")) for name in ("name", "created", "vfl", "mode", "command")
        },
        config_text=config_text,
        label_party=config.get("label", {}).get("party"),
        parties=tuple(dict.fromkeys(parties)),
        epochs=_epochs(folder / "metrics.jsonl"),
        traffic=traffic,
        environment=_record(read_json(environment), environment) if environment.exists() else {},
        summary=summary,
        sent=sum(sum(way.values()) for way in (up, down, *ways)) if up or down else None,
        middle=config.get("middle", {}).get("party"),
        tasks=tasks,
        audit=str((run.audit() or {}).get("text", "")),
    )


def _record(found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RunFolderError("a file of this run holds no JSON object", where=str(path))
    return found


def _epochs(path: Path) -> list[Epoch]:
    epochs: list[Epoch] = []
    for position, line in enumerate(read_lines(path) if path.exists() else (), 1):
        known = {"epoch": float(position), **_finite(_record(line, path))}
        if {"bytes_up", "bytes_down"} <= set(known):
            known["total_bytes"] = known["bytes_up"] + known["bytes_down"]
        epochs.append(known)
    return epochs


def _traffic(path: Path) -> list[Traffic]:
    if not path.exists():
        return []
    try:
        reader = csv.DictReader(read_bytes(path).decode().splitlines())
    except UnicodeDecodeError:
        raise RunFolderError("a file of this run is not text", where=str(path)) from None
    wanted = [each.name for each in fields(Traffic)]
    if not set(wanted) <= set(reader.fieldnames or wanted):
        raise RunFolderError(
            "the ledger of this run lacks a column", where=str(path), want=", ".join(wanted)
        )
    try:
        return [
            Traffic(
                party=as_written(row["party"]),
                direction=row["direction"],
                phase=row["phase"],
                frames=int(row["frames"]),
                payload_bytes=int(row["payload_bytes"]),
                wire_bytes=int(row["wire_bytes"]),
                seconds=float(row["seconds"] or 0),
            )
            for row in reader
        ]
    except (TypeError, ValueError, csv.Error):
        where = f"{path}:{reader.line_num}"
        raise RunFolderError("the ledger of this run has a damaged line", where=where) from None


def _finite(found: Any) -> dict[str, float]:
    """The finite numbers of a record."""
    record = found if isinstance(found, dict) else {}
    return {
        str(name): value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def run_page(folder: Path) -> dict[str, Any]:
    """What the template of a run prints, from what its folder holds.

    Raises:
        RunFolderError: there is no run, it is of another format, or a file of it is damaged.
    """
    run, attacked = read_run(folder), attacks_on_run(folder)
    head, version, utility = run.head, run.head["vfl"], _utility(run)
    measure = _SHOWN[utility.title]
    reached = run.figure(f"test_{measure}")
    beside = (
        {} if reached is None else {str(tomllib.loads(run.config_text).get("seed", 0)): reached}
    )
    top = of_run(
        utility,
        _sent(run),
        _promised(run),
        list(records_of(folder)) if attacked else [],
        gains_over_alone(folder, measure, beside),
        "" if (seconds := run.figure("seconds")) is None else seconds_text(seconds),
    )
    meta = (date_text(head["created"]), head["mode"], f"vfl {version}" if version else "")
    return {
        "name": head["name"] or folder.name,
        "meta": " · ".join(filter(None, meta)),
        "glance": top,
        "sentence": _who_held_what(run),
        "figures": drawings_of(run),
        "scores": score_lines(run),
        "parties": traffic_lines(run.traffic, "party"),
        "phases": traffic_lines(run.traffic, "phase"),
        "methods": _methods(run, attacked),
        "revealed": _revealed(run.summary.get("revealed")),
        "attacks": summary_table(attacked) if attacked else None,
        "searches": searches_table(attacked),
        "attackers": list(sentences(attacked).items()),
        "environment": sorted((name, str(value)) for name, value in run.environment.items()),
        "command": head["command"],
        "weights": run.word("weights_sha256"),
        "config_text": run.config_text.strip(),
    }


def _revealed(found: Any) -> Table | None:
    """Who learned what, line by line, as far as a summary says it."""
    names = ("observer", "what", "of", "phase", "times", "values")
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    cells = [[one.get(name, "") for name in names] for one in listed]
    lines = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line]
             for line in cells]  # fmt: skip
    head = ("Who learned", "what", "of", "phase", "times", "values")
    return Table(head, lines, words=4) if lines else None


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
    for party, own in run.tasks.items():
        figures = _finite(own)
        lines += [
            (f"{name}, {party}", "", number_text(figures.get(f"test_{measure}")))
            for measure, name in _MEASURES.items()
            if f"test_{measure}" in figures
        ]
    return [line for line in lines if line[1] or line[2]]


def traffic_lines(traffic: Sequence[Traffic], by: str) -> list[list[str]]:
    """The ledger's lines added up by a column and their direction, up before down, in words."""
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
    return lines


def drawings_of(run: Run) -> list[Drawing]:
    """Loss and score by epoch, score by bytes, bytes by party: as many as can be drawn."""
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
        words = "of one record, against who has the models; lower is more private"
        lines = [Series("spent", spent, 1)]
        drawings.append(line_drawing("Epsilon by epoch", words, lines, "epoch", whole_x=True))
    largest = max((epoch.get("total_bytes", 0) for epoch in epochs), default=0)
    divisor, unit = byte_unit(largest)
    lines = _series(epochs, measure, "total_bytes", factor, divisor)
    if lines and largest:
        label = f"{unit} on the wire, both directions"
        drawings.append(line_drawing(f"{title} by bytes", words, lines, label, x_from=0.0))
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


#: What the card of a run's quality is called, and the figure it shows.
_SHOWN = {"Test RMSE": "rmse", "Test AUC": "auc", "Test accuracy": "accuracy"}


def _utility(run: Run) -> Card:
    """How good the model is beside the guess, in a measure that fits its labels."""
    guess = _finite(run.summary.get("guess"))
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


def _sent(run: Run) -> Card:
    """Of the summary, else of the ledger, else of the last epoch."""
    total = run.sent
    if total is None:
        sent = [row.wire_bytes for row in run.traffic]
        total = sum(sent) if sent else run.last("total_bytes")
    seconds = run.figure("seconds")
    time = "" if seconds is None else f"in {seconds_text(seconds)}"
    size = "" if total is None else _size_note(run.figure("wire_ratio"))
    return Card("On the wire", bytes_text(total), ", ".join(filter(None, (size, time))))


def _size_note(wire_ratio: float | None) -> str:
    """How the bytes compare with dense float32; frame headers may make them more."""
    if wire_ratio is None or wire_ratio <= 0:
        return f"against dense float32: {NOT_MEASURED}"
    if wire_ratio < 0.95:
        return f"{three_digits(1 / wire_ratio)} times smaller than dense float32"
    if wire_ratio <= 1.05:
        return "as large as dense float32"
    return f"{three_digits(wire_ratio)} times the size of dense float32"


def _who_held_what(run: Run) -> str:
    features = tuple(party for party in run.parties if party != run.label_party)
    owner = run.label_party or "the label party"
    own = " together with columns of its own" if run.label_party in run.parties else ""
    model, models = "a bottom model", "their bottom models"
    mode = run.word("secure").partition(":")[0]
    if mode in _SHARED:
        model = models = _SHARED[mode]
    if len(features) == 1:
        holders = f"{features[0]} held its own columns and {model}"
    elif features:
        holders = f"{list_text(features)} each held their own columns and {model}"
    else:
        holders = f"The feature parties held their columns and {models}"
    top = "" if mode == "permuted" else " and the top model"
    if run.middle is not None:
        top = f" and the head, {run.middle} the model in the middle and no data"
    labels = f"{owner} held the labels{top}{own}"
    if run.tasks:
        labels = f"{list_text((owner, *run.tasks))} each held labels and a top model of their own"
    return f"{holders}; {labels}. {_MODES.get(run.head['mode'], '')}".strip()


def _methods(run: Run, attacked: Sequence[Record]) -> list[tuple[str, str]]:
    return [
        ("Rows read from", _sources(run)),
        ("Epochs", str(len(run.epochs) or NOT_MEASURED)),
        ("Steps per second", number_text(run.figure("steps_per_second"))),
        ("Codec", run.word("codec") or _NOT_RECORDED),
        ("Size by formula", _ratio_text(run.figure("formula_ratio"))),
        ("Size on the wire", _ratio_text(run.figure("wire_ratio"))),
        ("Defense", run.word("defense") or _NOT_RECORDED),
        ("Secure", _secure(run)),
        ("Privacy", _privacy(attacked)),
        ("Promises", _promises(run)),
        *([("Privacy audit", run.audit)] if run.audit else []),
    ]


def _sources(run: Run) -> str:
    """The tables that were read; a federation's parties name theirs to nobody."""
    if run.head["mode"] in ("federated", "simulation"):
        return "a table of each party's own, which stays with it"
    found = run.summary.get("sources")
    listed = found.items() if isinstance(found, dict) else ()
    return "; ".join(f"{party}: {source}" for party, source in listed) or _NOT_RECORDED


def _secure(run: Run) -> str:
    """The mode and whom it trusts with what; one machine protects nobody from its owner."""
    secure = run.word("secure")
    words = ": ".join(filter(None, (secure, run.word("trust")))) or _NOT_RECORDED
    if secure in ("", "none") or run.head["mode"] == "federated":
        return words
    return f"{words}; here all parties ran in one place, where it protects nobody"


def _promises(run: Run) -> str:
    if not isinstance(run.summary.get("privacy"), list):
        return _NOT_RECORDED
    return _promised(run) or "nothing is promised"


def _promised(run: Run) -> str:
    """Each promise by itself: those of different units are never added up."""
    stated = run.summary.get("privacy")
    listed = stated if isinstance(stated, list) else []
    texts = [str(one.get("text", "")) for one in listed if isinstance(one, dict)]
    return ". ".join(filter(None, texts))


def _privacy(attacked: Sequence[Record]) -> str:
    """The attack on labels that reached most, beside what it needs no run for."""
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
