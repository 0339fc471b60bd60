"""Frequency of each unit of a cut among a row's top k values: figure 3.8 (thesis, 2025), eq 3-21.

    vfl compare examples/thesis/fm20.toml --seeds 0,1,2 --out runs/batch_norm \\
        -s compare.variants={} --codec topk:k=3 --codec randtopk:k=3,alpha=0.05 \\
        --codec randtopk:k=3,alpha=0.1 --codec randtopk:k=3,alpha=0.2 \\
        --codec randtopk:k=3,alpha=0.3

    vfl compare examples/thesis/fm20.toml --seeds 0,1 --out runs/no_batch_norm \\
        -s compare.variants={} -s parties.client.bottom=mlp:hidden=192,dropout=0.2,last=relu \\
        --codec topk:k=3 --codec randtopk:k=3,alpha=0.1
    python examples/published/usage.py runs/batch_norm runs/no_batch_norm

The program writes one line for each training: quantiles of C_i over the units, as fractions of the
test rows.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np

OUT = Path("docs/results/published_usage.csv")
QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three_quarters": 0.75, "most": 1.0}


def main() -> None:
    """Read the runs of the comparisons, and write the file of quantiles."""
    lines = []
    for file in (it for folder in sys.argv[1:] for it in sorted(Path(folder).rglob("codec.json"))):
        counts = json.loads(file.read_text())["parties"]["client"]["usage"]
        # Top-k keeps k units in each row, so the fractions of all units add up to k.
        shares = 3 * np.array(counts) / sum(counts)
        name, _, seed = file.parent.name.rpartition("-")[0].rpartition("-seed")
        variant = next(Path(folder).name for folder in sys.argv[1:] if folder in str(file))
        found = [f"{float(np.quantile(shares, at)):.5f}" for at in QUANTILES.values()]
        never = int((shares == 0).sum())
        lines.append([variant, name.replace("_", ":", 1), seed, len(counts), never, *found])
    with OUT.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["variant", "codec", "seed", "units", "never", *QUANTILES])
        writer.writerows(lines)


if __name__ == "__main__":
    main()
