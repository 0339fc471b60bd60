"""The page of a grid of attacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vfl.config import GridSettings
from vfl.grid.attack_rows import Row, read_rows
from vfl.grid.attack_run import sentences
from vfl.grid.attack_table import Table as Lines
from vfl.grid.attack_table import (
    board_table,
    missing,
    others_table,
    standings_table,
    with_baseline,
    without_baseline,
)
from vfl.grid.cells import CONFIG, HONEST, PICTURES, Cell, GridFolder, grid_settings_of
from vfl.grid.leaderboard import OF_LABELS, Place, leaderboard
from vfl.report.attack_curves import advantages, attack_advantages, numbered, pictures, tradeoffs
from vfl.report.glance import Glance, glance
from vfl.report.parts import Drawing, Strip, Table
from vfl.report.strips import strips
from vfl.report.units import bytes_text, date_text, list_text, percent_text, seconds_text
from vfl.storage import read_json


@dataclass(frozen=True, slots=True)
class AttackPage:
    """Everything the template prints."""

    name: str
    meta: str
    sentence: str
    notes: Sequence[str]
    board: Table | None
    glance: Glance
    standings: Table | None
    others: Table | None
    tradeoffs: Sequence[Drawing]
    advantages: Sequence[Drawing]
    pictures: Sequence[Drawing]
    reconstructed: Sequence[Strip]
    attackers: Sequence[tuple[str, str]]
    victims: Table
    margin: float
    command: str
    config_text: str


def attack_page(folder: GridFolder) -> AttackPage:
    """The page of a grid of attacks, from what its cells hold.

    Raises:
        RunFolderError: a file of it is damaged.
    """
    experiment = folder.experiment()
    settings = grid_settings_of(experiment)
    rows = read_rows(folder)
    places = leaderboard(rows, settings.margin)
    others = without_baseline(rows)
    labels = with_baseline(rows)
    meta = (
        date_text(folder.words("created")),
        f"{len(rows)} attacks",
        f"vfl {folder.words('vfl')}",
    )
    return AttackPage(
        name=experiment.name,
        meta=" · ".join(meta),
        sentence=_sentence(settings),
        notes=missing(folder),
        board=_board(places, settings) if places else None,
        glance=glance(places),
        standings=_table(standings_table(places), 4) if places else None,
        others=_table(others_table(others), 2) if others else None,
        tradeoffs=list(tradeoffs(places, labels, settings.margin)) if places else [],
        advantages=[*advantages(places), *attack_advantages(labels, places)] if places else [],
        pictures=list(pictures(_drawn(folder, settings))),
        reconstructed=list(strips(folder)) if settings.draws_rows(experiment.is_table) else [],
        attackers=list(sentences(rows).items()),
        victims=_victims(folder, rows),
        margin=settings.margin,
        command=folder.words("command"),
        config_text=(folder.path / CONFIG).read_text(encoding="utf-8").strip(),
    )


def _board(places: Sequence[Place], settings: GridSettings) -> Table:
    """The leaderboard with the number that each defense has in the drawings."""
    head, lines = board_table(places, settings.margin)
    numbers = numbered(places)
    for place, line in zip(places, lines, strict=True):
        line[0] = f"{numbers[place.defense]} {place.defense}"
    return _table((head, lines), 1)


def _table(content: Lines, words: int) -> Table:
    head, lines = content
    return Table(head, lines, words)


def _drawn(folder: GridFolder, settings: GridSettings) -> dict[str, dict[str, Any]]:
    """Pictures of each defense's first victim, as far as they were drawn."""
    found = {}
    for cell in folder.cells():
        path = folder.cells_path / cell.name / PICTURES
        if cell.experiment.seed == settings.seeds[0] and path.exists():
            found[_victim(cell)] = read_json(path)
    return found


def _victim(cell: Cell) -> str:
    """What a cell's victim is called among the others of its seed."""
    against = "" if cell.adversary == HONEST else f" against {cell.adversary}"
    return f"{cell.called}{against}"


def _victims(folder: GridFolder, rows: Iterable[Row]) -> Table:
    """One line a victim: what it cost and what was got out of it."""
    head = ["defense", "seed", "accuracy", "on the wire", "trained in", "worst attack", "reached"]
    mine: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        mine.setdefault((row.defense, row.adversary, row.seed), []).append(row)
    lines = []
    for cell in folder.cells():
        own = mine.get((cell.called, cell.adversary, cell.experiment.seed), [])
        summary = folder.cells_path / cell.name / "summary.json"
        if own and summary.exists():
            lines.append([_victim(cell), *_card(cell, read_json(summary), own)])
    return Table(head, lines, 1)


def _card(cell: Cell, summary: Mapping[str, Any], rows: Iterable[Row]) -> list[str]:
    """The rest of a victim's line; no worst attack where none was after its labels."""
    sent = sum(summary["bytes_up"].values()) + sum(summary["bytes_down"].values())
    labels = [row for row in rows if row.measure in OF_LABELS]
    worst = max(labels, key=lambda row: row.value, default=None)
    return [
        str(cell.experiment.seed),
        percent_text(summary["test_accuracy"]),
        bytes_text(sent),
        seconds_text(summary["seconds"]),
        "" if worst is None else f"{worst.attack}, k = {worst.k}",
        "" if worst is None else percent_text(worst.value),
    ]


def _counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _sentence(settings: GridSettings) -> str:
    leaks = list_text(tuple(str(k) for k in settings.leaks), shown=8)
    trained = {
        "owner": "One owner trained both halves and handed the bottom out.",
        "split": "Each feature party trained its own bottom.",
    }
    active = len(settings.trainings) - 1
    against = f", honestly and against {_counted(active, 'adversary', 'adversaries')}"
    return (
        f"{_counted(len(settings.victims), 'defense')}, each trained on "
        f"{_counted(len(settings.seeds), 'seed')}{against if active else ''}; "
        f"{settings.draws} draws of {leaks} leaked labels of each class for every victim, the same "
        f"for all defenses. {trained[settings.trained_by]}"
    )
