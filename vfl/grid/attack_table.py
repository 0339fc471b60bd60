"""A grid of attacks as tables for people and as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vfl.grid.attack_rows import Row, read_rows, to_csv
from vfl.grid.cells import GridFolder, failure_of, grid_settings_of
from vfl.grid.interval import Estimate
from vfl.grid.leaderboard import Place, Standing, is_ranked, leaderboard
from vfl.grid.means import means_csv
from vfl.grid.scores_file import OF_CELL
from vfl.grid.statistics import over_victims
from vfl.storage import stamp, write_json, write_text

Table = tuple[Sequence[str], list[list[str]]]


def write_attack_results(folder: GridFolder) -> tuple[str, list[dict[str, Any]]]:
    """Write `results.csv`, `means.csv`, `results.json` and `table.md` from what the cells hold.

    Returns:
        The tables in Markdown with what they leave out, and every row as a JSON value.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    rows = read_rows(folder)
    places = leaderboard(rows, settings.margin)
    parts = [markdown(one) for one in tables(rows, places, settings.margin)]
    table = "\n".join([*parts, *(f"{line}\n" for line in missing(folder))])
    records = [asdict(row) for row in rows]
    board = [asdict(place) for place in places]
    write_text(folder.path / "results.csv", to_csv(rows))
    write_text(folder.path / "means.csv", means_csv(rows))
    write_json(folder.path / "results.json", stamp() | {"leaderboard": board, "rows": records})
    write_text(folder.path / "table.md", table)
    return table, records


def tables(rows: Sequence[Row], places: Sequence[Place], margin: float) -> list[Table]:
    """The leaderboard, each defense at each k, and attacks on something else than labels."""
    found = [board_table(places, margin), standings_table(places)] if places else []
    others = without_baseline(rows)
    return found + ([others_table(others)] if others else [])


def without_baseline(rows: Sequence[Row]) -> list[Row]:
    """Rows that no worst case is taken over: other goals, and what only a training tells."""
    return [row for row in rows if not is_ranked(row)]


def with_baseline(rows: Sequence[Row]) -> list[Row]:
    """Rows that a worst case is taken over."""
    return [row for row in rows if is_ranked(row)]


def board_table(places: Sequence[Place], margin: float) -> Table:
    """One line a defense, the best protected first."""
    head = [
        "defense", "protected at k", "test accuracy", "less none", f"within {margin:g} points",
        "worst attack", "at k", "reaches", "above the best baseline",
    ]  # fmt: skip
    lines = []
    for place in places:
        worst = place.worst
        safe = [str(one.k) for one in place.standings if one.verdict == "protected"]
        lines.append(
            [
                place.defense,
                ", ".join(safe) or "nowhere",
                percent(place.accuracy),
                percent(place.difference, "+"),
                "" if place.equal is None else "yes" if place.equal else "no",
                worst.attack,
                str(worst.k),
                percent(worst.value),
                percent(worst.advantage, "+"),
            ]
        )
    return head, lines


def standings_table(places: Sequence[Place]) -> Table:
    """One line a defense and k: the worst attack beside the best baseline."""
    head = [
        "defense", "k", "verdict", "worst attack", "reaches", "best baseline", "it reaches",
        "advantage", "over scratch",
    ]  # fmt: skip
    return head, [_standing(place, one) for place in places for one in place.standings]


def others_table(rows: Sequence[Row]) -> Table:
    """Attacks whose measure is no accuracy: what they reach beside their guess."""
    head = [
        "defense", "adversary", "attack", "k", "measure", "reaches", "guess", "test accuracy",
    ]  # fmt: skip
    groups: dict[tuple[str, str, str, int, str], list[Row]] = {}
    for row in rows:
        kind = row.defense, row.adversary, row.attack, row.k, row.measure
        groups.setdefault(kind, []).append(row)
    return head, [
        [
            *(defense, adversary, attack, str(k), measure.replace("_", " ")),
            *(_plain(own, name) for name in ("value", "guess", "test_accuracy")),
        ]
        for (defense, adversary, attack, k, measure), own in groups.items()
    ]


def percent(found: Estimate | None, sign: str = "") -> str:
    """A share with its interval in percent.

    >>> percent(Estimate(0.7213, 0.0131, 3)), percent(Estimate(0.5, None, 1), "+")
    ('72.1 ± 1.3 %', '+50.0 %')
    """
    if found is None:
        return ""
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:{sign}.1f}{half} %"


def missing(folder: GridFolder) -> list[str]:
    """What a reader of the table must know about cells that are not in it."""
    paths = {cell.name: folder.cells_path / cell.name for cell in folder.cells()}
    going = [path for path in paths.values() if failure_of(path) is None]
    failed = len(paths) - len(going)
    found = [f"{failed} of {len(paths)} cells failed and are left out"] if failed else []
    if left := sum(not (path / OF_CELL).exists() for path in going):
        found.append(f"{left} of {len(paths)} cells are not done yet")
    return found


def _standing(place: Place, one: Standing) -> list[str]:
    return [
        place.defense,
        str(one.k),
        one.verdict,
        one.attack,
        percent(one.value),
        one.baseline,
        percent(one.baseline_value),
        percent(one.advantage, "+"),
        percent(one.over_scratch, "+"),
    ]


def _plain(rows: Sequence[Row], name: str) -> str:
    values = {(row.seed, row.draw): getattr(row, name) for row in rows}
    found = over_victims({key: value for key, value in values.items() if value is not None})
    if found is None:
        return ""
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:.3g}{half}"


def markdown(table: Table) -> str:
    """A table in Markdown, columns aligned."""
    head, lines = table
    texts = [list(head), *lines]
    widths = [max(len(line[place]) for line in texts) for place in range(len(head))]
    padded = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in texts]
    padded.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)
