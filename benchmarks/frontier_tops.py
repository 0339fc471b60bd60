"""Result rows of `benchmarks.frozen_tops`, and their table on the page of the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.studies import over, points_text
from vfl.experiments.statistics import FALSE_CLAIMS, Estimate, chance_above, claims
from vfl.experiments.tables import Table

#: File with the result rows of all tasks, beside the page of the frontier.
FILE = "frontier_tops.csv"
#: Percentage points that a top model must gain to be shown as better.
AHEAD = 0.01
#: Name of the experiment's own top model.
NETWORK = "network"
#: Key of a result: task, bottom and top.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class TopRow:
    """Result of one top model on one label-free bottom.

    Attributes:
        task, defense, seed: task, label-free defense that trained the bottom, and seed.
        top: name of the top model, one of `benchmarks.frozen_tops.NAMES`.
        utility: accuracy or AUC on the test rows.
    """

    task: str
    defense: str
    seed: int
    top: str
    utility: float


def _key(row: TopRow) -> Key:
    return row.task, row.defense, row.top


def gains_of(rows: Sequence[TopRow], best: Mapping[str, str]) -> dict[Key, Estimate]:
    """Return the gain of each top on each bottom over the experiment's own top on the best bottom.

    Args:
        rows: result rows of any tasks.
        best: the best label-free bottom of each task.
    """
    value = {(one.task, one.defense, one.top, one.seed): one.utility for one in rows}
    found: dict[Key, list[float]] = {}
    for (task, defense, top, seed), utility in value.items():
        reference = value.get((task, best[task], NETWORK, seed))
        if top != NETWORK and reference is not None:
            found.setdefault((task, defense, top), []).append(utility - reference)
    return {key: over(values) for key, values in found.items()}


def ahead_of(gains: Mapping[Key, Estimate]) -> list[Key]:
    """Return the tops that are shown to gain more than `AHEAD`, corrected for their number."""
    chances = claims({key: chance_above(gain, AHEAD) for key, gain in gains.items()})
    return [key for key, chance in chances.items() if chance <= FALSE_CLAIMS]


def table_of(rows: Sequence[TopRow], best: Mapping[str, str]) -> str:
    """Return sentences on the trained tops and shown gains, and each task's best top."""
    gains = gains_of(rows, best)
    if not gains:
        return "No top has a network beside it."
    head = ["task", "bottom", "top", "victims", "test utility", "gain"]
    lines = []
    for task in dict.fromkeys(task for task, _, _ in gains):
        key = max((key for key in gains if key[0] == task), key=lambda one: gains[one].mean)
        beside = {one.seed for one in rows if _key(one) == (task, best[task], NETWORK)}
        reached = over(one.utility for one in rows if _key(one) == key and one.seed in beside)
        lines.append(
            [
                *(task, f"`{key[1]}`", key[2], str(gains[key].count)),
                *(points_text(reached), points_text(gains[key], "+")),
            ]
        )
    shown = [f"{top} on `{defense}` ({task})" for task, defense, top in ahead_of(gains)]
    tried = ", ".join(dict.fromkeys(top for _, _, top in gains))
    said = f"{len(gains)} tries of {tried}; ahead by more than {100 * AHEAD:g} point: "
    return f"{said}{', '.join(shown) or 'none'}.\n\n{Table(head, lines).markdown()}"
