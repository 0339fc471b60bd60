"""Draw the curves of docs/results/language_models.md as SVG, from the results of invert.py.

python examples/language/draw.py docs/results/inversion.csv docs
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

from vfl.experiments.pages.charts import Series, line_drawing, standalone

NAMES = {"text_inversion": "optimisation", "token_search": "search", "token_network": "network"}


def named(spec: str) -> str:
    """Return an attack's name for the legend of a chart."""
    name, _, options = spec.partition(":")
    form = "refined" if "candidates" in options else NAMES[name]
    return f"{form}, prior" if "prior" in options else form


def main() -> None:
    """Write the drawings as SVG files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with arguments.file.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def draw(sweep: str, title: str, label: str, x_of: Callable[[dict[str, str]], float]) -> None:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in (one for one in rows if one["sweep"] == sweep):
            kind = row["texts"] if sweep == "depth" else f"cut behind {row['front']}"
            point = x_of(row), 100 * float(row["accuracy"])
            found.setdefault(f"{named(row['attack'])}, {kind}", []).append(point)
        lines = [
            Series(name, sorted(points), 1 + place % 8)
            for place, (name, points) in enumerate(found.items())
        ]
        drawing = line_drawing(title, "words read, percent", lines, label)
        (arguments.folder / f"inversion_{sweep}.svg").write_text(
            standalone(drawing), encoding="utf-8"
        )

    draw("depth", "Words read by depth", "blocks below the cut", lambda row: float(row["front"]))
    draw("noise", "Words read under noise", "deviation of the noise",
         lambda row: float(row["defense"].rpartition("=")[2]))  # fmt: skip


if __name__ == "__main__":
    main()
