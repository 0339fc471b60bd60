"""A process of ``vfl bench memory``: loads one party's data as a session does, and tells its peak.

Started as ``python -m vfl.bench.memory_worker`` with a party file as JSON on standard input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from vfl.config import Experiment, PartyFile
from vfl.config.toml import Settings
from vfl.session import Terms
from vfl.session.party_folder import own_data

BATCHES = 100
BATCH_ROWS = 256


class Peak(Settings):
    """What was measured.

    Attributes:
        peak_bytes: the most resident memory, less what there was after the imports.
        load_s: seconds until the data were there.
    """

    peak_bytes: int
    load_s: float


def measure(party: PartyFile) -> Peak:
    """Load a party's data and take batches of them."""
    terms = Terms.of(Experiment.model_validate({"parties": {party.party: {}}}), "train", "memory")
    before = _resident_bytes("VmRSS")
    began = time.perf_counter()
    data = own_data(party, terms, "classification")
    load_s = time.perf_counter() - began
    assert data.inputs is not None, "the party has columns"
    for batch in range(BATCHES):
        rows = data.split.train[batch * BATCH_ROWS : (batch + 1) * BATCH_ROWS]
        data.inputs.index_select(0, torch.from_numpy(rows))
    return Peak(peak_bytes=_resident_bytes("VmHWM") - before, load_s=load_s)


def _resident_bytes(field: str) -> int:
    """This process's own figure; `getrusage` would start from that of whoever started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"Linux tells {field}")


def main() -> None:
    """Measure once."""
    torch.set_num_threads(1)
    print(measure(PartyFile.model_validate_json(sys.stdin.read())).model_dump_json())


if __name__ == "__main__":
    main()
