"""The link inside one process, and what observers are told."""

import threading

import pytest

from vfl.core.errors import DataError, LostPeerError, PeerFailedError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.testing.link import LinkContract
from vfl.transport import Observed, local_pair
from vfl.transport.link import Depth


class TestLocalLink(LinkContract):
    @pytest.fixture
    def pair(self):
        return local_pair()


class TestLocalLinkOfThreads(LinkContract):
    @pytest.fixture
    def pair(self):
        return local_pair(("label", "bank"), timeout_s=2.0)


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


def test_an_end_with_a_thread_of_its_own_waits_until_it_is_too_long():
    label, bank = local_pair(("label", "bank"), timeout_s=0.2)
    with pytest.raises(LostPeerError, match="bank sent nothing in time"):
        label.receive()
    label, bank = local_pair(("label", "bank"), timeout_s=60.0)
    later = threading.Timer(0.2, bank.send, [Frame(Kind.CUT, 5)])
    later.start()
    assert label.receive().step == 5
    threading.Timer(0.2, bank.fail, [DataError("a table is empty")]).start()
    with pytest.raises(PeerFailedError, match="bank stopped with V200: a table is empty"):
        label.receive()
    for end in (label, label, bank):
        with pytest.raises(LostPeerError, match="closed"):
            end.receive()


def test_messages_in_a_row_are_counted_by_party():
    depths = tuple(Depth() for _ in range(3))
    to_two, from_one = local_pair(depths=(depths[0], depths[1]))
    to_three, from_two = local_pair(depths=(depths[1], depths[2]))
    for _ in range(2):  # side by side
        to_two.send(Frame(Kind.CUT))
    from_one.receive(), from_one.receive()
    to_three.send(Frame(Kind.CUT))
    from_two.receive()
    assert [depth.hops for depth in depths] == [0, 1, 2]


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
