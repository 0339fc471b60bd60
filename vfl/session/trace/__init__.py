"""The trace: what a party records of its own side of a training, and how it is read back.

It is off unless asked for. Frames are kept as the bytes that travelled, compressed and perturbed,
with the rows they are about; a party's trace holds nothing the party did not see.
"""

from __future__ import annotations

from vfl.session.trace.recorder import (
    TRACE,
    Recorder,
    own_recorders,
    recorders_of,
    recording,
    trace_of_masked_cuts,
)
from vfl.session.trace.replay import Recording, Snapshot, read, training_cuts
from vfl.session.trace.store import (
    EVALUATION,
    TRAINING,
    Recorded,
    Replayed,
    Trace,
    check_room,
    expected_bytes,
)

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
