import json

import pytest

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.session import PartyReport

REPORT = PartyReport(party="bank", weights_sha256="ab" * 32, seconds=1.5)


def test_a_report_comes_back():
    frame = REPORT.frame()
    assert frame.kind is Kind.DONE
    assert PartyReport.of(frame, "bank") == REPORT


def test_another_kind_of_frame():
    with pytest.raises(ProtocolError, match="unexpected message from party 'bank'") as caught:
        PartyReport.of(Frame(Kind.CUT, payload=REPORT.frame().payload), "bank")
    assert (caught.value.got, caught.value.want) == ("CUT", "DONE")


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_sha256": "AB" * 32},
        {"weights_sha256": [0.5, 0.25]},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"party": "x" * 33},
        {"weights": [1.0]},
    ],
)
def test_reports_of_another_form(changes):
    content = json.loads(REPORT.model_dump_json()) | changes
    frame = Frame(Kind.DONE, payload=json.dumps(content).encode())
    with pytest.raises(ProtocolError, match="the report of party 'bank' has an unknown form"):
        PartyReport.of(frame, "bank")


@pytest.mark.parametrize("payload", [b"", b"\xff\xfe", b"{}", b"[]"])
def test_bytes_that_are_no_report(payload):
    with pytest.raises(ProtocolError, match="unknown form"):
        PartyReport.of(Frame(Kind.DONE, payload=payload), "bank")


def test_a_party_reports_for_itself_only():
    with pytest.raises(ProtocolError, match="party 'shop' sent a report under another"):
        PartyReport.of(REPORT.frame(), "shop")
