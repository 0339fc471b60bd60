"""The trace: a party's recording of the frames of one training, and functions that read a trace.

Recording is disabled by default. A trace stores frames as the bytes that were sent, after
compression and defense, and the row numbers of each frame; a party's trace contains only frames
that the party received or sent, and snapshots of its own weights.
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
