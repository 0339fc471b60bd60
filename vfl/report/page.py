"""A run as the words and numbers of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl.grid.attack_rows import Row
from vfl.grid.attack_run import sentences, summary_table
from vfl.grid.leaderboard import OF_LABELS
from vfl.report.figures import figures_of
from vfl.report.parts import Drawing, Table
from vfl.report.records import Run, Summary, last_of
from vfl.report.scores import Score, scores
from vfl.report.tables import Line, party_lines, phase_lines
from vfl.report.units import (
    NOT_MEASURED,
    bytes_text,
    date_text,
    list_text,
    number_text,
    percent_text,
    seconds_text,
    three_digits,
)

_NOT_RECORDED = "not recorded"
_SHARED = "beaver"
_MODES = {
    "in-process": "All parties ran in one process, over real frames.",
    "federated": "They trained over a Flower federation, each in a process of its own.",
    "simulation": "They ran on Flower's simulation engine.",
}


@dataclass(frozen=True, slots=True)
class Card:
    """One of the three numbers at the top."""

    label: str
    value: str
    note: str

    @property
    def measured(self) -> bool:
        """Whether there is a number to show."""
        return self.value != NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Page:
    """Everything the template prints."""

    name: str
    meta: str
    cards: tuple[Card, ...]
    sentence: str
    figures: Sequence[Drawing]
    scores: Sequence[Score]
    parties: Sequence[Line]
    phases: Sequence[Line]
    methods: Sequence[tuple[str, str]]
    revealed: Table | None
    attacks: Table | None
    attackers: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str]]
    command: str
    weights: str
    config_text: str


def page_of(run: Run, attacked: Sequence[Row] = ()) -> Page:
    """The page of a run.

    Args:
        run: its records.
        attacked: what attacks on it reached.
    """
    meta = (date_text(run.created), run.mode, f"vfl {run.version}" if run.version else "")
    return Page(
        name=run.name,
        meta=" · ".join(filter(None, meta)),
        cards=(_score_card(run), _bytes_card(run), _speed_card(run)),
        sentence=_who_held_what(run),
        figures=figures_of(run),
        scores=scores(run.epochs),
        parties=party_lines(run.traffic),
        phases=phase_lines(run.traffic),
        methods=_methods(run, attacked),
        revealed=_revealed(run.summary),
        attacks=Table(*summary_table(attacked), words=1) if attacked else None,
        attackers=list(sentences(attacked).items()),
        environment=sorted(run.environment.items()),
        command=run.command,
        weights=run.summary.weights_sha256 or "",
        config_text=run.config_text.strip(),
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _score_card(run: Run) -> Card:
    accuracy = _first(run.summary.test_accuracy, last_of(run.epochs, "test_accuracy"))
    rmse = _first(run.summary.test_rmse, last_of(run.epochs, "test_rmse"))
    if accuracy is None and (
        rmse is not None or last_of(run.epochs, "validation_rmse") is not None
    ):
        return Card("Test RMSE", number_text(rmse), _regression_note(run))
    validation = last_of(run.epochs, "validation_accuracy")
    note = "" if validation is None else f"validation {percent_text(validation)}"
    return Card("Test accuracy", percent_text(accuracy), note)


def _regression_note(run: Run) -> str:
    if run.summary.test_r2 is not None:
        return f"R² {run.summary.test_r2:.3f}"
    validation = last_of(run.epochs, "validation_rmse")
    return "" if validation is None else f"validation {number_text(validation)}"


def _bytes_card(run: Run) -> Card:
    total = _total_bytes(run)
    note = "" if total is None else _size_note(run.summary.wire_ratio)
    return Card("On the wire", bytes_text(total), note)


def _total_bytes(run: Run) -> float | None:
    """Of the summary, else of the ledger, else of the last epoch."""
    if run.summary.bytes_up or run.summary.bytes_down:
        return sum(run.summary.bytes_up.values()) + sum(run.summary.bytes_down.values())
    if run.traffic:
        return sum(row.wire_bytes for row in run.traffic)
    return last_of(run.epochs, "total_bytes")


def _size_note(wire_ratio: float | None) -> str:
    """How the bytes compare with dense float32; frame headers may make them more."""
    if wire_ratio is None or wire_ratio <= 0:
        return f"against dense float32: {NOT_MEASURED}"
    if wire_ratio < 0.95:
        return f"{three_digits(1 / wire_ratio)} times smaller than dense float32"
    if wire_ratio <= 1.05:
        return "as large as dense float32"
    return f"{three_digits(wire_ratio)} times the size of dense float32"


def _speed_card(run: Run) -> Card:
    rate = run.summary.steps_per_second
    count = len(run.epochs)
    epochs = f"{count} {'epoch' if count == 1 else 'epochs'}" if count else ""
    time = "" if run.summary.seconds is None else f"in {seconds_text(run.summary.seconds)}"
    return Card("Steps per second", number_text(rate), " ".join(filter(None, (epochs, time))))


def _who_held_what(run: Run) -> str:
    features = tuple(party for party in run.parties if party != run.label_party)
    owner = run.label_party or "the label party"
    own = " together with columns of its own" if run.label_party in run.parties else ""
    model, models = "a bottom model", "their bottom models"
    if (run.summary.secure or "").startswith(_SHARED):
        model = models = "shares of first layers that nobody has whole"
    if len(features) == 1:
        holders = f"{features[0]} held its own columns and {model}"
    elif features:
        holders = f"{list_text(features)} each held their own columns and {model}"
    else:
        holders = f"The feature parties held their columns and {models}"
    labels = f"{owner} held the labels and the top model{own}"
    return f"{holders}; {labels}. {_MODES.get(run.mode, '')}".strip()


def _methods(run: Run, attacked: Sequence[Row]) -> list[tuple[str, str]]:
    summary = run.summary
    return [
        ("Codec", summary.codec or _NOT_RECORDED),
        ("Size by formula", _ratio_text(summary.formula_ratio)),
        ("Size on the wire", _ratio_text(summary.wire_ratio)),
        ("Defense", summary.defense or _NOT_RECORDED),
        ("Secure", _secure(run)),
        ("Privacy", _privacy(attacked)),
    ]


def _secure(run: Run) -> str:
    """The mode and whom it trusts with what; one machine protects nobody from its owner."""
    secure, trust = run.summary.secure, run.summary.trust
    told = ": ".join(filter(None, (secure, trust))) or _NOT_RECORDED
    if secure in (None, "none") or run.mode == "federated":
        return told
    return f"{told}; here all parties ran in one place, where it protects nobody"


def _revealed(summary: Summary) -> Table | None:
    head = ("Who learned", "what", "of", "phase", "times", "values")
    return Table(head, summary.revealed, words=4) if summary.revealed else None


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
