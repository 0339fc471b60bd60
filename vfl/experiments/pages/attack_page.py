"""The page of a grid of attacks: leaderboard, charts of defenses, pictures, victims.

Charts show quality of predictions against success of attacks, advantage by number of leaked labels,
angles between cuts, and t-SNE maps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from markupsafe import Markup

from vfl.config import GridSettings
from vfl.config.grid import LabelMeasure
from vfl.core.storage import read_json
from vfl.experiments.attack_tables import (
    access_table,
    board_table,
    boards_by_access,
    measure_words,
    others_table,
    outside_table,
    over_draws,
    searches_table,
    sentences,
    standings_table,
)
from vfl.experiments.cells import HONEST, PICTURES, Cell, grid_settings_of
from vfl.experiments.glance import of_grid
from vfl.experiments.leaderboard import (
    GUESS,
    LeaderboardEntry,
    Utility,
    by_attack,
    fitting_measure,
    in_measure,
    label_measure,
    leaderboard,
    leaked,
    mean_of,
)
from vfl.experiments.pages.charts import (
    STYLES,
    Area,
    Drawing,
    Point,
    Series,
    ends_of,
    line_drawing,
    map_drawing,
    scatter_drawing,
)
from vfl.experiments.pages.sections import Content, Section, Strip
from vfl.experiments.pictures import kept_pictures
from vfl.experiments.results import TEST, TRAINING, LoadedGrid, Record, grouped
from vfl.experiments.scores import OF_CELL, read_scores
from vfl.experiments.tables import (
    MEASURES,
    Table,
    bytes_text,
    list_text,
    percent_text,
    seconds_text,
)
from vfl.experiments.value import gains_over_alone

_ANGLE_TICKS = [(0.0, "0"), (math.pi / 4, "π/4"), (math.pi / 2, "π/2"), (3 * math.pi / 4, "3π/4"),
                (math.pi, "π")]  # fmt: skip


def style_of(number: int) -> int:
    """Return the number of a defense's chart style (colour), from its rank on the leaderboard."""
    return 1 + number % STYLES


def tradeoffs(
    entries: Sequence[LeaderboardEntry], rows: Sequence[Record], measure: LabelMeasure
) -> Iterator[Drawing]:
    """Yield charts of quality against the worst attack at each k, and each attack at a middle k."""
    leaks = [one.k for one in entries[0].standings]
    for place, k in enumerate(leaks):
        title = f"The worst attack at k = {k}" if k else "The worst attack"
        values = {one.defense: one.standings[place].value.mean for one in entries}
        yield _tradeoff(title, entries, values, place, measure)
    middle = len(leaks) // 2
    allowed = leaked(rows, leaks[middle])
    found = {defense: by_attack(own) for (defense,), own in grouped(allowed, "training").items()}
    for attack in dict.fromkeys(row.attacker for row in allowed):
        values = {defense: mean_of(own[attack]) for defense, own in found.items() if attack in own}
        title = f"{attack} at k = {leaks[middle]}"
        yield _tradeoff(title, entries, values, middle, measure)


def _tradeoff(
    title: str,
    entries: Sequence[LeaderboardEntry],
    values: Mapping[str, float],
    place: int,
    measure: LabelMeasure,
) -> Drawing:
    """Return one chart; it shades an area if the verdict about a defense is "protected"."""
    points, ends = [], []
    for number, one in enumerate(entries, 1):
        if one.defense in values:
            x, y = 100 * one.utility.mean, 100 * values[one.defense]
            ends.append(f"{one.defense} {x:.1f} and {y:.1f}")
            points.append(Point(str(number), x, y, style_of(number), ends[-1]))
    standing = entries[0].standings[place]
    baseline, guess = 100 * standing.baseline_value.mean, 100 * standing.guess.mean
    safe = [one for one in entries if one.standings[place].verdict == "protected"]
    worst = min((100 * one.utility.mean for one in safe), default=0.0)
    lines = [(baseline, "best without the model")]
    if standing.baseline != GUESS:
        lines.append((guess, "guess"))
    good = entries[0].judged_by
    words = f"{MEASURES[measure]} of attacks, percent"
    return scatter_drawing(
        title,
        words + ("; shaded: attacks reach no more than without the model" if safe else ""),
        f"{MEASURES[good]} of the model and {words}: {'; '.join(ends)}.",
        points,
        f"{MEASURES[good]} of the model on test rows, percent",
        area=Area(worst, baseline) if safe else None,
        lines=lines,
    )


def advantages(entries: Sequence[LeaderboardEntry]) -> Iterator[Drawing]:
    """Yield charts of the worst attack's advantage over the best baseline, by leaked labels."""
    lines = []
    for number, entry in enumerate(entries, 1):
        above = ((float(x), one.advantage) for x, one in enumerate(entry.standings))
        lines.append(Series.of(f"{number} {entry.defense}", above, style_of(number), 100))
    words = "percentage points of the worst attack above the best baseline, 95 % intervals"
    yield from _by_leaks("Advantage by leaked labels", words, lines, entries[0])


def attack_advantages(
    rows: Sequence[Record], entries: Sequence[LeaderboardEntry]
) -> Iterator[Drawing]:
    """Yield a chart per defense: each attack's advantage over the best baseline, by k."""
    attacked = {defense: own for (defense,), own in grouped(rows, "training").items()}
    for entry in entries:
        own = attacked[entry.defense]
        points: dict[str, list[tuple[float, float]]] = {}
        for x, one in enumerate(entry.standings):
            best = one.baseline_value.mean
            for attack, values in by_attack(leaked(own, one.k)).items():
                points.setdefault(attack, []).append((float(x), 100 * (mean_of(values) - best)))
        lines = [
            Series(attack, found, style_of(order))
            for order, (attack, found) in enumerate(points.items())
        ]
        words = "percentage points of each attack above the best baseline"
        yield from _by_leaks(entry.defense, words, lines, entry)


def _by_leaks(
    title: str, words: str, lines: Sequence[Series], entry: LeaderboardEntry
) -> Iterator[Drawing]:
    """Draw lines over the numbers of leaked labels, at most `STYLES` lines in each chart."""
    ticks = [(float(x), str(one.k)) for x, one in enumerate(entry.standings)]
    label = "leaked labels of each class"
    for start in range(0, len(lines), STYLES):
        part = lines[start : start + STYLES]
        yield line_drawing(title, words, part, label, ends_of(part, ".1f"), x_ticks=ticks)


def pictures(drawn: Mapping[str, Mapping[str, Any]]) -> Iterator[Drawing]:
    """Yield charts of angles between cuts, and t-SNE maps, for each defense."""
    for defense, cut in drawn.items():
        bins = len(cut["same"])
        lines = [
            Series(
                word,
                [(math.pi * (x + 0.5) / bins, 100 * share) for x, share in enumerate(cut[name])],
                style,
            )
            for name, word, style in (("same", "same class", 2), ("different", "two classes", 1))
        ]
        means = (cut["same_mean"], cut["different_mean"])
        words = "percent of pairs of test rows; mean angle of their cuts " + " and ".join(
            "none" if mean is None else f"{mean:.2f}" for mean in means
        )
        yield line_drawing(
            f"Angles, {defense}", f"{words} rad", lines, "angle, rad", f"{words} rad.",
            x_ticks=_ANGLE_TICKS,
        )  # fmt: skip
        if cut["map"]:
            points = [
                Point("", x, y, 1 + label % STYLES)
                for (x, y), label in zip(cut["map"], cut["labels"], strict=True)
            ]
            shared = (
                "" if max(cut["labels"]) < STYLES else f"; classes from {STYLES} on share colours"
            )
            words = f"{len(points)} test cuts, one colour per class{shared}"
            yield map_drawing(f"t-SNE, {defense}", words, points)


def strips(grid: LoadedGrid, cells: Collection[str]) -> Iterator[Strip]:
    """Yield a strip of images for each attack on images and each victim with stored images.

    Args:
        grid: grid whose folder contains the victims.
        cells: names of the cells whose images are shown.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    for cell in grid.cells:
        path = grid.path_of(cell)
        for one in read_scores(path / OF_CELL) if cell.name in cells else ():
            if (drawn := kept_pictures(path, one.key)) is None:
                continue
            against = "" if cell.adversary in (HONEST, one.attack) else f" against {cell.adversary}"
            words = ", ".join(f"{name} {value:.3g}, mean picture {guess:.3g}"
                              for name, value, guess in one.measured)  # fmt: skip
            lines = [("true", drawn["true"]), ("found", drawn["found"])]
            lines.append(("mean", drawn["mean"] * len(drawn["true"])))
            yield Strip(f"{one.attack}, {cell.victim}{against}", words, lines)


def attack_page(grid: LoadedGrid) -> Content:
    """Return the content of the page of a grid of attacks.

    Raises:
        RunFolderError: a file of the grid is damaged.
    """
    experiment, records = grid.experiment, grid.current
    settings = grid_settings_of(experiment)
    measure = fitting_measure(records, settings.measure)
    attacks = [one for one in records if one.evaluator == "attack"]
    labels = [one for one in attacks if label_measure(one) == measure]
    entries = leaderboard(records, settings.margin, measure)
    margin, title = settings.margin, "Leaderboard, by the worst attack on each defense"
    tables: dict[str, Table | None] = {
        "access": access_table(records, margin, measure) if entries else None,
        "outside": outside_table(records, margin, measure) if entries else None,
        "searches": searches_table(records),
        "others": others_table(records),
    }
    sections = [
        Section(title=title, below="Not measured, because no victim has been attacked yet.")
    ]
    if entries:
        boards = boards_by_access(records, margin, measure)
        leading = {"board": board_table(entries, margin), "standings": standings_table(entries)}
        tables = {**leading, **tables}
        sections = list(_of_labels(entries, boards, labels, settings, measure, tables))
    elif tables["searches"]:
        sections.append(_searched(tables))
    if tables["others"]:
        sections.append(Section(title="Other goals", tables=[tables["others"]]))
    cells = {one.cell for one in records}
    if drawn := drawings_of_cuts(grid, cells):
        sections.append(Section(title="What the cut looks like", drawings=drawn))
    if settings.draws_rows(experiment.is_table) and (found := list(strips(grid, cells))):
        sections.append(Section(title="Reconstructed pictures", strips=found, below=_OF_PICTURES))
    attackers = list(sentences(attacks).items())
    judge = entries[0].judged_by if entries else "accuracy"
    sections += [
        Section(title="Attacker, and its knowledge", pairs=attackers),
        Section(title="Victims", tables=[_victims(grid, records, labels, judge)]),
    ]
    words = [measure_words(measure, settings.measure)] if labels else []
    return Content(
        of_grid(records, settings, partial(gains_over_alone, grid.path)),
        f"{len(in_measure(records, measure))} attacks",
        _sentence(settings),
        [*grid.unfinished, *words],
        sections,
        [one for one in tables.values() if one is not None],
        {
            "measure": measure,
            "leaderboard": [asdict(entry) for entry in entries],
            "rows": [one.as_json() for one in attacks],
        },
    )


def _of_labels(
    entries: Sequence[LeaderboardEntry],
    boards: Mapping[str, Sequence[LeaderboardEntry]],
    labels: Sequence[Record],
    settings: GridSettings,
    measure: LabelMeasure,
    tables: Mapping[str, Table | None],
) -> Iterator[Section]:
    """Yield the section of the leaderboard, and the sections that explain it."""
    places = {one.defense: place for place, one in enumerate(entries, 1)}
    choices = [("everybody who attacked", _board(entries, places, settings))]
    choices += [(words, _board(one, places, settings)) for words, one in boards.items() if one]
    yield Section(
        title="Leaderboard, by the worst attack on each defense",
        choices=choices if len(boards) > 1 else (),
        tables=() if len(boards) > 1 else [choices[0][1]],
        below=_OF_BOARD.format(settings.margin),
    )
    if access := tables["access"]:
        yield Section(title="By the attacker's knowledge", tables=[access], below=_OF_ACCESS)
    if outside := tables["outside"]:
        yield Section(title="Attacks from outside", tables=[outside], below=_OF_OUTSIDE)
    if tables["searches"]:
        yield _searched(tables)
    yield Section(
        title="Utility against attacks",
        drawings=list(tradeoffs(entries, labels, measure)),
        below="The number of a defense is its rank on the leaderboard. An area is shaded only if a "
        "defense is shown to protect: attacks there reach no more than without the model.",
    )
    yield Section(
        title="Each defense at each number of leaked labels",
        standings=entries,
        below=_OF_STANDINGS,
        folded=tables["standings"],
    )
    yield Section(
        title="Advantage by leaked labels",
        drawings=[*advantages(entries), *attack_advantages(labels, entries)],
    )


def _searched(tables: Mapping[str, Table | None]) -> Section:
    title = "What adaptive attackers tried"
    found = tables["searches"]
    return Section(title=title, tables=[found] if found else [], below=_OF_SEARCHES)


_OF_BOARD = (
    "Worst attack: the attack and number of leaked labels with the largest advantage over the "
    "guess and the best baseline without the model. If some attack is shown to leak, only such "
    "attacks are considered. After ±: half of a 95 % interval (Student's t) over the victims, "
    "after averaging each victim's draws. Costs at most {} points: one-sided test at 5 %. "
    "Protected: every attack's interval ends at or below the best baseline, adjusted over k "
    "(Holm) and over defenses (Benjamini and Hochberg), and some attack leaks on the undefended "
    "model."
)
_OF_ACCESS = (
    "Percentage points of the worst attack above the best baseline without the model. From left "
    "to right, each attacker has all the evidence of the attackers before, and more: the cuts in "
    "messages; then a bottom model and its columns; then the gradients of the training; then the "
    "ability to tamper with the training."
)
_OF_OUTSIDE = (
    "Attacks from outside that were added to this grid, compared with the grid's own worst attack "
    "on the same victims. Each verdict is given without and with the added attack."
)
_OF_SEARCHES = (
    "Means over victims and draws. The attacker holds out some of its leaked labels, compares "
    "combinations of views, scalers and classifiers on these labels, and lets the best "
    "combinations vote. With one label of each class it cannot hold out any. results.json lists "
    "all combinations."
)
_OF_STANDINGS = Markup(
    "Percentage points of the worst attack above the best baseline. "
    '<span class="leaks">Leaks</span>: some '
    "attack is above the baseline, adjusted for the attacks that may be the worst, and over "
    "defenses and k. <span "
    'class="protected">Protected</span>: every interval ends at or below the best baseline, '
    "adjusted in the same way. <span "
    'class="undecided">Undecided</span>: more victims would decide. <span '
    'class="inconclusive">Inconclusive</span>: no attack succeeds here or on the undefended model. '
    "Baselines use the same leaked rows without the victim: a network that is trained on these "
    "rows from scratch, and the same attacks on bottom models that were trained without labels."
)
_OF_PICTURES = (
    "The first test rows of each defense's first victim, their reconstructions by the attack, and "
    "the mean of all test rows, which is the best guess without evidence. All pictures of a strip "
    "have the same grey scale. The rows are shown because the data set is public, or because the "
    "experiment sets reconstructions = true."
)


def _board(
    entries: Sequence[LeaderboardEntry], places: Mapping[str, int], settings: GridSettings
) -> Table:
    """Return a leaderboard table in which each defense has its number in the charts."""
    board = board_table(entries, settings.margin)
    lines = [[f"{places[line[0]]} {line[0]}", *line[1:]] for line in board.rows]
    return replace(board, rows=lines)


def drawings_of_cuts(grid: LoadedGrid, cells: Collection[str]) -> list[Drawing]:
    """Draw angles and t-SNE maps of cuts, for each defense's first victim with stored pictures."""
    first, found = grid_settings_of(grid.experiment).seeds[0], {}
    for cell in grid.cells:
        path = grid.path_of(cell) / PICTURES
        if cell.experiment.seed == first and cell.name in cells and path.exists():
            found[_victim(cell)] = read_json(path)
    return list(pictures(found))


def _victim(cell: Cell) -> str:
    """Return the name of a cell's victim, which is unique among the victims of the same seed."""
    against = "" if cell.adversary == HONEST else f" against {cell.adversary}"
    return f"{cell.victim}{against}"


def _victims(
    grid: LoadedGrid, records: Sequence[Record], labels: Iterable[Record], judge: Utility
) -> Table:
    """Return a table with one line per victim: its quality, its traffic and its leakage."""
    head = [
        "defense",
        "seed",
        MEASURES[judge],
        "on the wire",
        "trained in",
        "worst attack",
        "reached",
    ]
    worst: dict[str, tuple[str, float]] = {}
    for draws in over_draws(labels):
        first, reached = draws[0], statistics.fmean(one.value for one in draws)
        if first.cell not in worst or reached > worst[first.cell][1]:
            worst[first.cell] = f"{first.attacker}, k = {first.k}", reached
    figures: dict[str, dict[tuple[str, str], float]] = {}
    for one in records:
        if one.subject in (TEST, TRAINING):
            figures.setdefault(one.cell, {})[one.subject, one.measure] = one.value
    lines = []
    for cell in grid.cells:
        if (own := figures.get(cell.name)) is None:
            continue
        found = worst.get(cell.name)  # missing if no attack inferred labels from this victim
        lines.append(
            [
                _victim(cell),
                str(cell.experiment.seed),
                percent_text(own.get((TEST, judge))),
                bytes_text(own[TRAINING, "bytes"]),
                seconds_text(own[TRAINING, "seconds"]),
                "" if found is None else found[0],
                "" if found is None else percent_text(found[1]),
            ]
        )
    return Table(head, lines)


def _counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _sentence(settings: GridSettings) -> str:
    leaks = list_text(tuple(str(k) for k in settings.leaks), shown=8)
    trained = {
        "owner": "One owner trained the whole model and then gave the bottom model away.",
        "split": "Each feature party trained its own bottom.",
    }
    active = len(settings.trainings) - 1
    against = f", without an adversary and against {_counted(active, 'adversary', 'adversaries')}"
    return (
        f"{_counted(len(settings.victims), 'defense')}, each trained on "
        f"{_counted(len(settings.seeds), 'seed')}{against if active else ''}; "
        f"{settings.draws} draws of {leaks} leaked labels of each class for every victim, the same "
        f"for all defenses. {trained[settings.trained_by]}"
    )
