"""What attacks reached: rows, their means, tables and files of a grid, and of a single run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from vfl.config import GridSettings
from vfl.config.grid import LabelMeasure
from vfl.config.run_folder import RunFolder
from vfl.core.storage import write_text
from vfl.core.text import csv_text
from vfl.experiments.cells import HONEST, GridFolder, failure_of, grid_settings_of
from vfl.experiments.leaderboard import (
    LeaderboardEntry,
    Standing,
    fitting_measure,
    in_measure,
    label_measure,
    leaderboard,
)
from vfl.experiments.scores import (
    BASELINES,
    OF_CELL,
    OF_RUN,
    TRAINED,
    Row,
    ScoreRecord,
    baselines_of,
    read_scores,
    setting_text,
)
from vfl.experiments.statistics import Estimate, advantage, over_victims
from vfl.experiments.tables import MEASURES, Table, estimate_text, left_out, write_tables


def read_rows(folder: GridFolder) -> list[Row]:
    """Every row of the cells that are whole, in the order of the settings.

    What a cell holds of earlier settings is left out, and so is a cell that failed since.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    asked = {*settings.attack_specs, *settings.trainings}
    setting = setting_text(settings)

    def is_wanted(one: ScoreRecord) -> bool:
        leak = one.k in (0, *settings.leaks) and one.draw < settings.draws
        return one.attack in asked and leak

    free: dict[int, list[ScoreRecord]] = {}
    found: dict[str, list[Row]] = {spec: [] for spec in settings.victims}
    for cell in folder.cells():
        path, seed = folder.cells_path / cell.name, cell.experiment.seed
        scores = [] if failure_of(path) else read_scores(path / OF_CELL, setting)
        if cell.victim == BASELINES:
            free[seed] = scores
        elif scores:
            mine = [one for one in scores if is_wanted(one)]
            ended = (path / "summary.json").exists()
            summary = RunFolder(path).summary() if ended else {}
            found[cell.victim] += rows_of(
                mine, free[seed], settings.baselines, cell.experiment.seed, cell.victim,
                cell.adversary, summary,
            )  # fmt: skip
    return [row for rows in found.values() for row in rows]


def rows_of(
    scores: Sequence[ScoreRecord],
    free: Sequence[ScoreRecord],
    baselines: Sequence[str],
    seed: int,
    defense: str,
    adversary: str,
    summary: Mapping[str, Any],
) -> list[Row]:
    """The rows of one victim, one for each measure.

    Args:
        scores: on its bottom.
        free: without it, on the same leaked rows.
        baselines: names of those that count.
        seed: of the victim, as all that follows; see `Row`.
        defense: its spec.
        adversary: that it was trained against.
        summary: of its training; empty if a party stopped it.
    """
    known = {(one.job, measure): value for one in free for measure, value, _ in one.measured}
    found = []
    for one in scores:
        beside = {} if one.of_training else baselines_of(one.job, baselines)
        for measure, value, guess in one.measured:
            own = {
                name: known[job, measure] for name, job in beside.items() if (job, measure) in known
            }
            found.append(
                Row(
                    defense=defense,
                    attack=one.attack,
                    adversary=adversary,
                    k=one.k,
                    seed=seed,
                    draw=one.draw,
                    measure=measure,
                    value=value,
                    scratch=own.get("scratch"),
                    guess=guess,
                    test_accuracy=summary.get("test_accuracy"),
                    test_auc=summary.get("test_auc"),
                    baselines=own,
                    threat=one.threat,
                    seconds=one.seconds,
                    access=one.access,
                )
            )
    return found


_SCRATCH = "scratch"


def means_csv(rows: Sequence[Row]) -> str:
    """The means of a grid's rows in their order; shares, not percent.

    Half widths are those of 95 % intervals over victims, empty where there is one. `over_scratch`
    is thesis equation (4-2), victim by victim; `baseline_...` is the same attack on a label-free
    bottom, or what the leaked rows are worth from scratch.
    """
    groups = _by_kind(rows)
    names = list(dict.fromkeys(f"baseline_{name}" for row in rows for name in row.baselines))
    head = [
        "defense", "adversary", "attack", "k", "measure", "mean", "half_width", "victims",
        "guess", "test_accuracy", "test_auc", "over_scratch", "over_scratch_half_width", *names,
    ]  # fmt: skip
    means = [dict(zip(head[:5], kind, strict=True)) | _means(own) for kind, own in groups.items()]
    return csv_text(head, means)


def _by_kind(rows: Sequence[Row]) -> dict[tuple[str, str, str, int, str], list[Row]]:
    """Rows that differ in their victim and draw alone."""
    groups: dict[tuple[str, str, str, int, str], list[Row]] = {}
    for row in rows:
        kind = row.defense, row.adversary, row.attack, row.k, row.measure
        groups.setdefault(kind, []).append(row)
    return groups


def _means(rows: Sequence[Row]) -> dict[str, str | int]:
    values = {(row.seed, row.draw): row.value for row in rows}
    mean, half_width = _figures(over_victims(values))
    found: dict[str, str | int] = {
        "mean": mean,
        "half_width": half_width,
        "victims": len({row.seed for row in rows}),
        "guess": _figures(_over(rows, "guess"))[0],
        "test_accuracy": _figures(_over(rows, "test_accuracy"))[0],
        "test_auc": _figures(_over(rows, "test_auc"))[0],
    }
    # A seed whose baselines failed has none.
    for name in dict.fromkeys(name for row in rows for name in row.baselines):
        beside = [row for row in rows if name in row.baselines]
        baseline = {(row.seed, row.draw): row.baselines[name] for row in beside}
        found[f"baseline_{name}"], _ = _figures(over_victims(baseline))
        if name == _SCRATCH:
            over = _figures(advantage(values, baseline))
            found["over_scratch"], found["over_scratch_half_width"] = over
    return found


def _over(rows: Sequence[Row], name: str) -> Estimate | None:
    """A column over the victims of which it is known."""
    values = {(row.seed, row.draw): getattr(row, name) for row in rows}
    return over_victims({key: value for key, value in values.items() if value is not None})


def _figures(found: Estimate | None) -> tuple[str, str]:
    """Mean and half width with four digits."""
    if found is None:
        return "", ""
    return f"{found.mean:.4f}", "" if found.half_width is None else f"{found.half_width:.4f}"


def write_attack_results(folder: GridFolder) -> tuple[str, list[dict[str, Any]]]:
    """Write `means.csv`, `results.json` and `table.md` from what the cells hold.

    Returns:
        The tables in Markdown with what they leave out, and every row as a JSON value.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    rows = read_rows(folder)
    measure = fitting_measure(rows, settings.measure)
    entries = leaderboard(rows, settings.margin, measure)
    tables = []
    if entries:
        tables = [board_table(entries, settings.margin), standings_table(entries)]
        if (access := access_table(rows, settings.margin, measure)) is not None:
            tables.append(access)
    if others := [row for row in rows if label_measure(row) is None]:
        tables.append(others_table(others))
    records = [asdict(row) | {"no_model": row.no_model} for row in rows]
    content = {"measure": measure, "leaderboard": [asdict(entry) for entry in entries]}
    below = [*missing(folder), *([measure_words(measure, settings.measure)] if entries else [])]
    table, _ = write_tables(folder.path, content | {"rows": records}, tables, below)
    write_text(folder.path / "means.csv", means_csv(rows))
    return table, records


def measure_words(measure: LabelMeasure, asked: str) -> str:
    """By what attacks on labels are ranked, and why."""
    if asked != "auto":
        return f"Attacks on labels are ranked by {MEASURES[measure]}, as the experiment says"
    if measure == "accuracy":
        return "Attacks on labels are ranked by accuracy: no class is much larger than the others"
    return (
        f"Attacks on labels are ranked by {MEASURES[measure]}: there are two classes or one is "
        "large, and whoever always names that one is right often without knowing anything"
    )


def board_table(entries: Sequence[LeaderboardEntry], margin: float) -> Table:
    """One line a defense, the best protected first."""
    good = MEASURES[entries[0].judged_by]
    head = [
        "defense", "protected at k", f"test {good}",
        "less none", f"costs at most {margin:g} points", "worst attack", "at k", "reaches",
        "guess", "best without the model", "above that",
    ]  # fmt: skip
    lines = []
    for entry in entries:
        worst = entry.worst
        safe = [str(one.k) for one in entry.standings if one.verdict == "protected"]
        lines.append(
            [
                entry.defense,
                ", ".join(safe) or "nowhere",
                estimate_text(entry.utility),
                estimate_text(entry.difference, "+"),
                entry.affordable or "",
                worst.attack,
                str(worst.k),
                estimate_text(worst.value),
                estimate_text(worst.guess),
                estimate_text(worst.baseline_value),
                estimate_text(worst.advantage, "+"),
            ]
        )
    return Table(head, lines)


def standings_table(entries: Sequence[LeaderboardEntry]) -> Table:
    """One line a defense and k: the worst attack beside the best baseline."""
    head = [
        "defense", "k", "verdict", "worst attack", "reaches", "guess", "best without the model",
        "it reaches", "above that", "over scratch",
    ]  # fmt: skip
    lines = [
        [
            *(entry.defense, str(one.k), one.verdict, one.attack, estimate_text(one.value)),
            *(estimate_text(one.guess), one.baseline, estimate_text(one.baseline_value)),
            *(estimate_text(one.advantage, "+"), estimate_text(one.over_scratch, "+")),
        ]
        for entry in entries
        for one in entry.standings
    ]
    return Table(head, lines, words=4)


def access_table(rows: Sequence[Row], margin: float, measure: LabelMeasure) -> Table | None:
    """One line a defense, one column an attacker: the worst of all that it can run.

    None where all attackers stand equally near.
    """
    near = [name for name in ACCESS if any(row.access == name for row in rows)]
    boards = {
        name: leaderboard([row for row in rows if row.access in near[: place + 1]], margin, measure)
        for place, name in enumerate(near)
    }
    if len(near) < 2:
        return None
    found = {name: {one.defense: one.worst for one in entries} for name, entries in boards.items()}
    defenses = dict.fromkeys(one.defense for entries in boards.values() for one in entries)
    lines = [
        [defense, *(_reached(found[name].get(defense)) for name in near)] for defense in defenses
    ]
    return Table(["defense", *(ACCESS[name] for name in near)], lines)


#: Attackers by how near to the model they stand, in words; each has what those before it have.
ACCESS = {
    "cut": "cuts alone",
    "bottom": "with a bottom",
    "gradients": "and gradients",
    "active": "and tampering",
}


def _reached(one: Standing | None) -> str:
    if one is None:
        return ""
    leaked = f", k = {one.k}" if one.k else ""
    return f"{estimate_text(one.advantage, '+', '')}, {one.verdict} ({one.attack}{leaked})"


def others_table(rows: Sequence[Row]) -> Table:
    """Attacks whose measure is no accuracy: what they reach beside their guess."""
    head = [
        "defense", "adversary", "attack", "k", "measure", "reaches", "guess", "test accuracy",
    ]  # fmt: skip
    lines = [
        [
            *(defense, adversary, attack, str(k), measure.replace("_", " ")),
            *(_plain(_over(own, name)) for name in ("value", "guess", "test_accuracy")),
        ]
        for (defense, adversary, attack, k, measure), own in _by_kind(rows).items()
    ]
    return Table(head, lines, words=2)


def missing(folder: GridFolder) -> list[str]:
    """What a reader of the table must know about cells that are not in it."""
    paths = {cell.name: folder.cells_path / cell.name for cell in folder.cells()}
    going = [path for path in paths.values() if failure_of(path) is None]
    left = sum(not (path / OF_CELL).exists() for path in going)
    return left_out(len(paths), len(paths) - len(going), left, "done")


def _plain(found: Estimate | None) -> str:
    if found is None:
        return ""
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:.3g}{half}"


#: Measures that are no share of anything.
NO_SHARES = ("mse", "psnr", "ssim")


def read_run_rows(path: Path, baselines: Sequence[str] = GridSettings().baselines) -> list[Row]:
    """The scores that are kept of a run, as rows; none if it was never attacked.

    Args:
        path: of the run.
        baselines: those that count, as far as they are there.

    Raises:
        RunFolderError: a file is damaged.
    """
    scores = read_scores(path / OF_RUN)
    if not scores:
        return []
    experiment, summary = RunFolder(path).experiment(), RunFolder(path).summary()
    own = [one for one in scores if one.bottom == TRAINED]
    free = [one for one in scores if one.bottom != TRAINED]
    return rows_of(
        own, free, baselines, experiment.seed, experiment.defense, HONEST, summary
    )  # fmt: skip


def summary_table(rows: Sequence[Row], asked: LabelMeasure | Literal["auto"] = "auto") -> Table:
    """One line an attack and number of leaked labels: means over the draws.

    Of attacks on labels the measure that is asked for, of others every measure.
    """
    head = ["attack", "k", "measure", "reaches", "from scratch", "best without the model", "guess"]
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in in_measure(rows, fitting_measure(rows, asked)):
        groups.setdefault((row.attack, row.k, row.measure), []).append(row)
    lines = [
        [
            attack,
            str(k) if k else "",
            measure.replace("_", " "),
            shown([row.value for row in own], measure),
            shown([row.scratch for row in own if row.scratch is not None], measure),
            shown(_best(own), measure),
            shown([row.guess for row in own], measure),
        ]
        for (attack, k, measure), own in groups.items()
    ]
    return Table(head, lines)


def shown(values: Sequence[float], measure: str) -> str:
    """The mean of some values, a share in percent; empty without any.

    >>> shown([0.5, 0.7], "accuracy"), shown([0.123456], "mse"), shown([], "auc")
    ('60.0 %', '0.1235', '')
    """
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.4g}" if measure in NO_SHARES else f"{100 * mean:.1f} %"


def sentences(rows: Sequence[Row]) -> dict[str, str]:
    """Who the attacker was and what it held, by attack."""
    return {row.attacker: row.threat for row in rows}


def _best(rows: Sequence[Row]) -> list[float]:
    """The values of the baseline with the highest mean."""
    names = {name for row in rows for name in row.baselines}
    each = [[row.baselines[name] for row in rows if name in row.baselines] for name in names]
    return max(each, key=statistics.fmean, default=[])
