"""CPU time that clipping and noise (DP-SGD) add to a step of split training.

Two feature parties, which each have half of every picture, and a label party train on handwritten
digits, in one process with one thread. Plain and private trainings take turns. The result rows show
the median over the turns, and the ratio within a turn, so that other work on the machine matters
little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import harness
from vfl.config import Experiment
from vfl.core.seeds import use_one_thread
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

BOTTOMS = ("mlp:hidden=128-64", "cnn:channels=16-32")
#: Kinds of training by name, with the [dp] settings of each.
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "private": {"noise": 1.0, "sampling": "shuffled"},
    "private, by layer": {"noise": 1.0, "sampling": "shuffled", "clip_by": "layer"},
    "private, quantile": {"noise": 1.0, "sampling": "shuffled", "quantile": 0.5},
}
ROWS, BATCH_ROWS, REPEATS = 1797, 256, 5


@dataclass(frozen=True, slots=True)
class PrivateRow:
    """Cost of a step with one kind of training.

    Attributes:
        bottom: spec of the bottom model of both feature parties.
        way: "plain", or the name of a private training.
        cpu_ms: CPU time in milliseconds of all parties together, median over the turns.
        cpu_ratio: CPU time divided by the plain step's CPU time in the same turn, median over the
            turns.
        steps: number of steps in a turn.
    """

    bottom: str
    way: str
    cpu_ms: float
    cpu_ratio: float
    steps: int


def bench_private(
    bottom: Sequence[harness.Whole] = BOTTOMS,
    *,
    repeats: int = REPEATS,
    rows: int = ROWS,
    epochs: int = 3,
) -> list[PrivateRow]:
    """Measure the CPU time that clipping and noise add to a step of split training.

    Args:
        bottom: specs of the bottom models to measure.
        repeats: number of turns.
        rows: number of pictures of digits.
        epochs: number of epochs in a turn.
    """
    use_one_thread()
    data = load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=rows))
    found: list[PrivateRow] = []
    for each in bottom:
        harness.say(f"{each}: {repeats} turns")
        turns = [
            {way: _turn(data, each, dp, epochs) for way, dp in WAYS.items()} for _ in range(repeats)
        ]
        for way in WAYS:
            ratio = median(turn[way][0] / turn["plain"][0] for turn in turns)
            cpu_ms = median(turn[way][0] for turn in turns)
            found.append(PrivateRow(each, way, cpu_ms, ratio, turns[0][way][1]))
    return found


TABLE = harness.table(
    ("bottom", "<22", "bottom"),
    ("way", "<22", "way"),
    ("CPU ms a step", ">14.2f", "cpu_ms"),
    ("of plain", ">10", lambda row: harness.times(row.cpu_ratio)),
)


def _turn(data: Any, bottom: str, dp: dict[str, Any] | None, epochs: int) -> tuple[float, int]:
    """Return CPU milliseconds per step, and the number of steps; evaluations are included."""
    settings = Experiment.model_validate(
        {
            "parties": {name: {"width": 32, "bottom": bottom} for name in ("left", "right")},
            "train": {"epochs": epochs, "batch_size": BATCH_ROWS},
            "dp": dp,
        }
    )
    session = LocalSession(settings, data, outputs=10)
    seconds = harness.timed(session.run)
    steps = session.label.progress.train_steps
    return 1000 * seconds / steps, steps


main = harness.command(bench_private, TABLE)


if __name__ == "__main__":
    main()
