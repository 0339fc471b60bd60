"""The link inside one process, and what observers are told."""

import pytest

from vfl.core.errors import DataError, PeerFailedError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.testing.link import LinkContract
from vfl.transport import Observed, local_pair


class TestLocalLink(LinkContract):
    @pytest.fixture
    def pair(self):
        return local_pair()


class TestObservedLink(LinkContract):
    @pytest.fixture
    def pair(self):
        label, feature = local_pair()
        seen = []
        return (
            Observed(label, "bank", "label", [lambda *told: seen.append(told)]),
            Observed(feature, "bank", "feature", []),
        )


def test_receiving_from_a_party_that_did_not_send_is_a_mistake_of_the_program():
    label, _ = local_pair()
    with pytest.raises(ProtocolError, match="nothing to receive"):
        label.receive()


def test_a_failure_reaches_the_other_end():
    label, feature = local_pair()
    Observed(feature, "bank", "feature", []).fail(DataError("a table is empty", fix="fill it"))
    with pytest.raises(PeerFailedError, match="V200: a table is empty") as caught:
        label.receive()
    assert caught.value.fix == "fill it"


def test_observers_are_told_party_direction_and_frame_after_each_transfer():
    told = []

    def observer(party, direction, frame):
        told.append((party, direction, frame.step))

    ends = local_pair()
    label = Observed(ends[0], "bank", "label", [observer])
    feature = Observed(ends[1], "bank", "feature", [observer, observer])
    feature.send(Frame(Kind.CUT, 1))
    label.receive()
    label.send(Frame(Kind.GRAD, 2))
    feature.receive()
    up, down = ("bank", "up", 1), ("bank", "down", 2)
    assert told == [up, up, up, down, down, down]
