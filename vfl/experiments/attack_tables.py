"""Tables of attack results: the leaderboard, tables by leaked labels and by access, and others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from vfl.config.grid import LabelMeasure
from vfl.experiments.leaderboard import (
    LeaderboardEntry,
    Standing,
    by_attack,
    fitting_measure,
    highest,
    in_measure,
    label_measure,
    leaderboard,
    leaked,
    utility_of,
)
from vfl.experiments.results import LOWER_IS_BETTER, Record, grouped
from vfl.experiments.statistics import Estimate, advantage, estimate, over_victims
from vfl.experiments.tables import MEASURES, Table, estimate_text


def measure_words(measure: LabelMeasure, asked: str) -> str:
    """Return a sentence on the measure by which attacks on labels are ranked, with the reason."""
    if asked != "auto":
        return f"Attacks on labels are ranked by {MEASURES[measure]}, as the experiment says"
    if measure == "r2":
        return "Attacks on labels are ranked by R², the share of the labels' variance they explain"
    if measure == "accuracy":
        return "Attacks on labels are ranked by accuracy: no class is much larger than the others"
    return (
        f"Attacks on labels are ranked by {MEASURES[measure]}: there are two classes, or one class "
        "is large, so always guessing the largest class is often right without any evidence"
    )


def board_table(entries: Sequence[LeaderboardEntry], margin: float) -> Table:
    """Return the leaderboard: a line per defense, ordered from best to worst protection."""
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
    """Return one line per defense and k, with its worst attack and the best baseline."""
    head = [
        "defense", "k", "verdict", "worst attack", "reaches", "guess", "best without the model",
        "it reaches", "above that", "over scratch", "labels are (test against a margin)",
    ]  # fmt: skip
    lines = [
        [
            *(entry.defense, str(one.k), one.verdict, one.attack, estimate_text(one.value)),
            *(estimate_text(one.guess), one.baseline, estimate_text(one.baseline_value)),
            *(estimate_text(one.advantage, "+"), estimate_text(one.over_scratch, "+")),
            one.judged.sentence,
        ]
        for entry in entries
        for one in entry.standings
    ]
    return Table(head, lines, words=4)


def boards_by_access(
    records: Sequence[Record], margin: float, measure: LabelMeasure
) -> dict[str, list[LeaderboardEntry]]:
    """Return one leaderboard per kind of attacker, those with least access first."""
    near = [name for name in ACCESS if any(one.access == name for one in records)]
    return {
        ACCESS[name]: leaderboard(_within(records, near[: place + 1]), margin, measure)
        for place, name in enumerate(near)
    }


def access_table(records: Sequence[Record], margin: float, measure: LabelMeasure) -> Table | None:
    """Return one line per defense, with the worst attack by each kind of attacker.

    The result is None if all attackers have the same access.
    """
    boards = boards_by_access(records, margin, measure)
    if len(boards) < 2:
        return None
    found = {words: {one.defense: one.worst for one in board} for words, board in boards.items()}
    defenses = dict.fromkeys(one.defense for board in boards.values() for one in board)
    lines = [
        [defense, *(_reached(worst.get(defense)) for worst in found.values())]
        for defense in defenses
    ]
    return Table(["defense", *boards], lines)


def _within(records: Sequence[Record], near: Sequence[str]) -> list[Record]:
    """Return the records of attackers that have at most the given access to the model."""
    return [one for one in records if one.evaluator != "attack" or one.access in near]


#: Description of attackers by their access to the model; each level includes the access of all
#: earlier levels.
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


def others_table(records: Sequence[Record]) -> Table | None:
    """Return a table of the results that have no label measure; None if there are none."""
    others = (one for one in records if one.evaluator == "attack" and label_measure(one) is None)
    groups = grouped(others, "training", "adversary", "subject", "k", "measure")
    head = [
        "defense", "adversary", "attack", "k", "measure", "reaches", "guess", "test accuracy",
    ]  # fmt: skip
    lines = []
    for (defense, adversary, attack, k, measure), own in groups.items():
        values = {(one.repeat, one.draw): one.value for one in own}
        guesses = {(one.repeat, one.draw): one.guess for one in own if one.guess is not None}
        accuracy = utility_of(records, "accuracy", defense, adversary)
        lines.append(
            [
                *(defense, adversary, attack, str(k), measure.replace("_", " ")),
                *map(_plain, map(over_victims, (values, guesses))),
                _plain(estimate(list(accuracy.values()))),
            ]
        )
    return Table(head, lines, words=2) if lines else None


def _plain(found: Estimate | None) -> str:
    if found is None:
        return ""
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:.3g}{half}"


#: Measures whose values are not shares between 0 and 1.
NO_SHARES = ("mse", "psnr", "ssim", "mae")


def summary_table(rows: Sequence[Record], asked: LabelMeasure | Literal["auto"] = "auto") -> Table:
    """Return one line per attack and number of leaked labels, with means over draws of leaked rows.

    An attack on labels has one line, with the requested measure; any other attack has a line for
    each of its measures.
    """
    head = [
        "attack",
        "k",
        "draws",
        "measure",
        "reaches",
        "from scratch",
        "best without the model",
        "guess",
    ]
    measure = fitting_measure(rows, asked)
    chosen = in_measure(rows, measure)
    if measure == "r2":  # the table also shows the mean absolute error, in the labels' unit
        chosen += [row for row in rows if label_measure(row) == "mae"]
    lines = [
        [
            attack,
            str(k) if k else "",
            str(len(own)),
            measure.replace("_", " "),
            shown([row.value for row in own], measure),
            shown([row.baselines["scratch"] for row in own if "scratch" in row.baselines], measure),
            shown(best_without_model(own), measure),
            shown([row.guess for row in own if row.guess is not None], measure),
        ]
        for (attack, k, measure), own in grouped(chosen, "subject", "k", "measure").items()
    ]
    return Table(head, lines)


def over_draws(rows: Iterable[Record]) -> list[list[Record]]:
    """Group records that differ only in the draw of leaked rows, one group per measure."""
    return list(grouped(rows, "cell", "attacker", "k", "measure").values())


def means_over_draws(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return, for each record, the mean over draws of leaked rows, and the number of draws."""
    found: dict[int, dict[str, Any]] = {}
    for own in over_draws(rows):
        mean = statistics.fmean(row.value for row in own)
        found |= {id(row): {"mean": mean, "draws": len(own)} for row in own}
    return [found[id(row)] for row in rows]


def shown(values: Sequence[float], measure: str) -> str:
    """Return the mean of values as text, in percent for shares; empty if there are no values.

    >>> shown([0.5, 0.7], "accuracy"), shown([0.123456], "mse"), shown([], "auc")
    ('60.0 %', '0.1235', '')
    """
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.4g}" if measure in NO_SHARES else f"{100 * mean:.1f} %"


def sentences(rows: Sequence[Record]) -> dict[str, str]:
    """Return each attack's threat model as one sentence, by attack."""
    return {row.attacker: row.threat for row in rows}


def best_without_model(rows: Sequence[Record]) -> list[float]:
    """Return the values of the baseline without the model that has the best mean."""
    names = {name for row in rows for name in row.baselines}
    each = [[row.baselines[name] for row in rows if name in row.baselines] for name in names]
    best = min if rows[0].measure in LOWER_IS_BETTER else max
    return best(each, key=statistics.fmean, default=[])


def outside_table(rows: Sequence[Record], margin: float, measure: LabelMeasure) -> Table | None:
    """Return one line per defense, attack from a user's file and k, beside the worst attack.

    An outside attack comes from a user's file; the result is None if the grid has no outside
    attack.
    """
    labels = [row for row in rows if label_measure(row) == measure]
    own = [row for row in labels if not row.author]
    if len(own) == len(labels) or not own:
        return None
    others = [row for row in rows if row.evaluator != "attack"]
    boards = [
        {(entry.defense, one.k): one for entry in leaderboard(some, margin, measure)
         for one in entry.standings}
        for some in (others + own, others + labels)
    ]  # fmt: skip
    before, now = boards
    lines = []
    for (defense, k), standing in now.items():
        mine = leaked([row for row in labels if row.training == defense and row.author], k)
        beside = by_attack(leaked([row for row in own if row.training == defense], k))
        found = before.get((defense, k))
        for attack, values in by_attack(mine).items():
            row = next(one for one in mine if one.attacker == attack)
            worst = highest(beside) if beside else ""
            over = advantage(values, beside[worst]) if worst else None
            lines.append(
                [
                    *(row.subject, row.author, row.date, defense, str(k)),
                    *(estimate_text(over_victims(values)), worst, estimate_text(over, "+")),
                    *(found.verdict if found else "", standing.verdict),
                ]
            )
    head = [
        "attack from outside", "author", "date", "defense", "k", "reaches", "worst of the grid",
        "above that", "verdict without it", "with it",
    ]  # fmt: skip
    return Table(head, lines, words=4)


_CHOSEN = 3  # compositions
_OF_SEARCH = {"budget_s", "seconds", "chosen", "compositions"}


def searches_table(records: Sequence[Record]) -> Table | None:
    """Return one line per defense, searching attack and k: number of trials, cost and choice.

    The values are means over victims and draws of leaked rows; the result is None if no attack is a
    search over attacks.
    """
    searched = [one for one in records if one.report and set(one.report) >= _OF_SEARCH]
    head = [
        "defense", "attack", "k", "searches", "compositions", "processor time", "budget",
        "share of held-out labels that the best attack infers",
        "chosen most often, with the number of searches",
    ]  # fmt: skip
    lines = []
    for (defense, attack, k), own in grouped(searched, "training", "attacker", "k").items():
        found = [one.report for one in own if one.report is not None]
        best = [one["compositions"][0]["held_out"] for one in found]
        chosen = Counter(spec for one in found for spec in one["chosen"]).most_common(_CHOSEN)
        lines.append(
            [
                *(defense, attack, str(k), str(len(found))),
                f"{statistics.fmean(len(one['compositions']) for one in found):.4g}",
                _seconds([one["seconds"] for one in found]),
                _seconds([one["budget_s"] for one in found if one["budget_s"] is not None]),
                shown([one for one in best if one is not None], "accuracy"),
                "; ".join(f"{spec} ({count})" for spec, count in chosen),
            ]
        )
    return Table(head, lines, words=2) if lines else None


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g} s" if values else ""
