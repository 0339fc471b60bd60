"""A data set of your own in one file: two rings of points with noise.

This file registers the data set in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.sources"]
    rings = "outside_source:Rings"

The package tests the data set with `vfl.testing`:

    class TestMine(SourceContract):
        specs = ["rings", "rings:noise=0.2"]

An experiment can then use the data set by `source = "rings:noise=0.2"` under [data].
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from vfl.core.registry import require_range
from vfl.core.seeds import derive
from vfl.datasets import SOURCES, Dealing, load_bundled
from vfl.datasets.sources import Bundled, DataSource, Request

ROWS = 1000


class Rings(DataSource):
    """Points on an inner and an outer ring: 1,000 rows of two columns; the ring is the class.

    Args:
        noise: standard deviation of the noise that is added to each column.
    """

    def __init__(self, noise: float = 0.1) -> None:
        require_range("noise", noise, 0, 10)
        self._noise = noise

    def read(self, asked: Request) -> Bundled:
        draw = np.random.default_rng(derive(asked.seed, "rings"))
        labels, angle = draw.integers(0, 2, ROWS), draw.uniform(0, 2 * np.pi, ROWS)
        points = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (1 + labels)[:, None]
        points += self._noise * draw.standard_normal(points.shape)
        return Bundled(
            cells=pd.DataFrame(points[: asked.limit], columns=["east", "north"]),
            labels=labels[: asked.limit],
            classes=("inner", "outer"),
        )


SOURCES.register("rings", Rings)

if __name__ == "__main__":
    data = load_bundled("rings:noise=0.2", ["east", "north"], "lender", Dealing(0))
    for name, own in data.items():
        columns = "labels" if own.inputs is None else f"{own.inputs.shape[1]} column"
        print(f"{name:<6} {own.rows} rows, {columns}")
