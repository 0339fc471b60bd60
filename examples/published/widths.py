"""Bytes by hidden width: figure 5.3 (thesis, 2025), in the thesis' protocol and in fast mode.

    python examples/published/widths.py

The program measures one training step of a network 1000-h-1 on 64 rows; times over network links of
80 Mbit/s and 40 ms are computed.
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.emulation import Wan
from benchmarks.mpc_party import modelled, rules_of
from benchmarks.mpc_workloads import Workload
from vfl.core.seeds import use_one_thread

OUT = Path("docs/results/published_widths.csv")
WIDTHS = (8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    """Write the file of results."""
    use_one_thread()
    line = Wan.parse("80mbps,40ms")
    with OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["width", "form", "seconds", "hops", "mib_online", "mib_offline"])
        for width in WIDTHS:
            each = Workload(f"1000-{width}-1", 64, (1000, width, 1), training=True)
            for form in ("thesis", "fast"):
                it = modelled(each, rules_of(each, form), line, ahead=False)
                sent = (it.bytes_online / 2**20, it.bytes_offline / 2**20)
                figures = (f"{it.seconds:.4f}", it.hops, *(f"{part:.4f}" for part in sent))
                writer.writerow([width, form, *figures])


if __name__ == "__main__":
    main()
