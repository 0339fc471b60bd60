"""One line for each attack on each defense at each k: means over victims with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.grid.attack_rows import Row
from vfl.grid.interval import Estimate, estimate
from vfl.grid.statistics import advantage, over_victims
from vfl.text import csv_text

_SCRATCH = "scratch"


def means_csv(rows: Sequence[Row]) -> str:
    """The means of a grid's rows in their order; shares, not percent.

    Half widths are those of 95 % intervals over victims, empty where there is one. `over_scratch`
    is thesis equation (4-2), victim by victim; `baseline_...` is the same attack on a label-free
    bottom, or what the leaked rows are worth from scratch.
    """
    groups: dict[tuple[str, str, str, int, str], list[Row]] = {}
    for row in rows:
        kind = row.defense, row.adversary, row.attack, row.k, row.measure
        groups.setdefault(kind, []).append(row)
    names = list(dict.fromkeys(f"baseline_{name}" for row in rows for name in row.baselines))
    head = [
        "defense", "adversary", "attack", "k", "measure", "mean", "half_width", "victims",
        "guess", "test_accuracy", "over_scratch", "over_scratch_half_width", *names,
    ]  # fmt: skip
    means = [dict(zip(head[:5], kind, strict=True)) | _means(own) for kind, own in groups.items()]
    return csv_text(head, means)


def _means(rows: Sequence[Row]) -> dict[str, str | int]:
    values = {(row.seed, row.draw): row.value for row in rows}
    mean, half_width = _figures(over_victims(values))
    guess, _ = _figures(over_victims({(row.seed, row.draw): row.guess for row in rows}))
    accuracies = {row.seed: row.test_accuracy for row in rows if row.test_accuracy is not None}
    found: dict[str, str | int] = {
        "mean": mean,
        "half_width": half_width,
        "victims": len({row.seed for row in rows}),
        "guess": guess,
        "test_accuracy": _figures(estimate(list(accuracies.values())))[0],
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


def _figures(found: Estimate | None) -> tuple[str, str]:
    """Mean and half width with four digits."""
    if found is None:
        return "", ""
    return f"{found.mean:.4f}", "" if found.half_width is None else f"{found.half_width:.4f}"
