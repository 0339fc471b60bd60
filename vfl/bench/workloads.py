"""What is measured: a network cut between two parties, a batch size, a width, and the aims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vfl.config import Experiment
from vfl.config.experiment import LabelSettings, PartySettings, TrainSettings

Path = Literal["monolith", "inprocess", "tcp", "tls", "model"]
PATHS: tuple[Path, ...] = ("monolith", "inprocess", "tcp", "tls")
#: Where lines are computed, no stream is needed.
MODEL_PATHS: tuple[Path, ...] = ("monolith", "inprocess", "model")
FEATURE_PARTIES = ("left", "right")
LABEL_PARTY = "label"
#: Batches in the fixed data; the order is drawn anew each time they have all been used.
EPOCH_STEPS = 20


@dataclass(frozen=True, slots=True)
class Workload:
    """One network and how it is trained, the same on every path.

    Attributes:
        model: "cnn" or "mlp", as the rows of a benchmark name it.
        batch_rows: rows of a step.
        width: width of each feature party's cut.
        shape: one row at a feature party, without the rows axis.
        bottom, top: models, as specs.
        outputs: classes.
        steps: timed steps of one repeat; about one second of work.
        aims: the most CPU time a path should need, in that of the monolith.
        merge: "concat" or "sum".
    """

    model: str
    batch_rows: int
    width: int
    shape: tuple[int, ...]
    bottom: str
    top: str
    outputs: int
    steps: int
    aims: Mapping[str, float] = field(default_factory=dict)
    merge: Literal["concat", "sum"] = "concat"

    @property
    def rows(self) -> int:
        """Rows of the fixed data."""
        return EPOCH_STEPS * self.batch_rows

    @property
    def merged_width(self) -> int:
        """Width of what the top gets."""
        return self.width * (len(FEATURE_PARTIES) if self.merge == "concat" else 1)

    def experiment(self, seed: int, total_steps: int) -> Experiment:
        """The experiment that trains at least so many steps; SGD with momentum."""
        party = PartySettings(width=self.width, bottom=self.bottom)
        return Experiment(
            name="bench",
            seed=seed,
            merge=self.merge,
            parties=dict.fromkeys(FEATURE_PARTIES, party),
            label=LabelSettings(party=LABEL_PARTY, top=self.top),
            train=TrainSettings(
                epochs=-(-total_steps // EPOCH_STEPS),
                batch_rows=self.batch_rows,
                optimizer="sgd",
                learning_rate=0.05,
                momentum=0.9,
            ),
        )


def _mlp(batch_rows: int, width: int, steps: int, **aims: float) -> Workload:
    """Bottoms 10-128-128-width, top 2*width-64-2."""
    return Workload(
        model="mlp",
        batch_rows=batch_rows,
        width=width,
        shape=(10,),
        bottom="mlp:hidden=128-128",
        top="mlp:hidden=64",
        outputs=2,
        steps=steps,
        aims=aims,
    )


WORKLOADS: dict[str, Workload] = {
    "mlp_small": _mlp(batch_rows=64, width=128, steps=500, tls=2.2),
    "mlp": _mlp(batch_rows=256, width=1280, steps=60, inprocess=1.15),
    "cnn": Workload(
        model="cnn",
        batch_rows=64,
        width=128,
        shape=(1, 28, 14),
        bottom="cnn",
        top="mlp:hidden=64",
        outputs=10,
        steps=60,
        aims={"inprocess": 1.05, "tls": 1.35},
    ),
}

#: One linear layer of 500 of 1000 columns at each party: what a secure sum adds shows most there.
SUMMED = Workload(
    model="linear",
    batch_rows=128,
    width=500,
    shape=(500,),
    bottom="mlp:hidden=none",
    top="mlp:hidden=64",
    outputs=2,
    steps=100,
    merge="sum",
)
KNOWN: dict[str, Workload] = WORKLOADS | {"summed": SUMMED}
