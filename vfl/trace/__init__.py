"""The trace: what a party records of its own side of a training, and how it is read back.

It is off unless asked for. Frames are kept as the bytes that travelled, compressed and perturbed,
with the rows they are about; a party's trace holds nothing the party did not see.
"""

from __future__ import annotations

from vfl.trace.chunk import Replayed
from vfl.trace.cuts import training_cuts
from vfl.trace.memory import EVALUATION, TRAINING, Recorded, Trace
from vfl.trace.recorder import (
    TRACE,
    Recorder,
    own_recorders,
    recorders_of,
    recording,
    trace_of_masked_cuts,
)
from vfl.trace.replay import Recording, Snapshot, read
from vfl.trace.size import check_room, expected_bytes

__all__ = [
    "EVALUATION",
    "TRACE",
    "TRAINING",
    "Recorded",
    "Recorder",
    "Recording",
    "Replayed",
    "Snapshot",
    "Trace",
    "check_room",
    "expected_bytes",
    "own_recorders",
    "read",
    "recorders_of",
    "recording",
    "trace_of_masked_cuts",
    "training_cuts",
]
