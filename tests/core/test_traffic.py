import csv
import io

from vfl.core.frame import HEADER_BYTES, Frame, Kind
from vfl.core.traffic import Ledger

TRAFFIC = [
    ("bank", "up", Frame(Kind.CUT, 0, b"x" * 100)),
    ("bank", "down", Frame(Kind.GRAD, 0, b"x" * 40)),
    ("bank", "up", Frame(Kind.CUT, 1, b"x" * 60)),
    ("bank", "up", Frame(Kind.QUERY, 2, b"x" * 8)),
    ("bank", "down", Frame(Kind.ACK, 2)),
    ("shop", "up", Frame(Kind.CUT, 0, b"x" * 5)),
    ("shop", "up", Frame(Kind.DONE, payload=b"bye")),
]


def counted():
    ledger = Ledger()
    for party, direction, frame in TRAFFIC:
        ledger(party, direction, frame)
    return ledger


def test_every_frame_is_counted_in_its_phase():
    rows = [
        (row.party, row.direction, row.phase, row.frames, row.payload_bytes, row.wire_bytes)
        for row in counted().rows()
    ]
    assert rows == [
        ("bank", "down", "evaluate", 1, 0, 16),
        ("bank", "down", "train", 1, 40, 56),
        ("bank", "up", "evaluate", 1, 8, 24),
        ("bank", "up", "train", 2, 160, 192),
        ("shop", "up", "control", 1, 3, 19),
        ("shop", "up", "train", 1, 5, 21),
    ]


def test_totals_are_sums_over_the_frames_without_greetings():
    ledger = counted()
    up = [f for _, way, f in TRAFFIC if way == "up" and f.kind is not Kind.DONE]
    assert ledger.total_bytes("up") == sum(len(f.payload) + HEADER_BYTES for f in up)
    assert ledger.bytes_by_party("up") == {"bank": 216, "shop": 21}
    assert ledger.bytes_by_party("down") == {"bank": 72}
    assert ledger.payload_bytes("train") == 205
    assert Ledger().total_bytes("up") == Ledger().payload_bytes("train") == 0


def test_waiting_is_added_up():
    ledger = counted()
    ledger.waited("bank", "train", 0.25)
    ledger.waited("bank", "train", 0.5)
    (row,) = [row for row in ledger.rows() if row.seconds]
    assert (row.party, row.direction, row.phase, row.seconds) == ("bank", "up", "train", 0.75)


def test_the_table_in_text():
    ledger = counted()
    ledger.waited("shop", "train", 1 / 3)
    rows = list(csv.DictReader(io.StringIO(ledger.to_csv())))
    assert len(rows) == 6
    assert rows[-1] == {
        "party": "shop",
        "direction": "up",
        "phase": "train",
        "frames": "1",
        "payload_bytes": "5",
        "wire_bytes": "21",
        "seconds": "0.333333",
    }
