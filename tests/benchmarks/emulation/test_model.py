"""The model against times that were worked out by hand: 8 Mbps is a byte a microsecond."""

from functools import partial

import pytest

from benchmarks.emulation import LinkModel, Wan
from vfl.core.frame import HEADER_BYTES, Frame, Kind
from vfl.mpc.in_process import Star
from vfl.transport import local_pair

PARTIES = ("P0", "P1", "P2")
BODY = bytes(10_000 - HEADER_BYTES)  # with its header 10 ms


@pytest.fixture
def model():
    return LinkModel(PARTIES, Wan(mbps=8, round_trip_ms=100))


def test_what_one_party_sends_shares_its_line_and_what_two_send_does_not(model):
    for target in ("P1", "P2"):
        model.receive(target, model.send("P0", 100_000))
    assert (model.now("P1"), model.now("P2")) == pytest.approx((0.15, 0.25))
    other = LinkModel(PARTIES, model.wan)
    for source in ("P0", "P1"):
        other.receive("P2", other.send(source, 100_000))
    assert other.now("P2") == pytest.approx(0.15)
    assert other.hops == 1


def test_three_hops_meet_the_limit_formula(model):
    chain = [("P0", "P1"), ("P1", "P2"), ("P2", "P0")]
    for source, target in chain:
        model.receive(target, model.send(source, 500))
    assert model.hops == 3
    assert model.seconds == pytest.approx(model.wan.limit_s(3 * 500, hops=3))
    assert model.seconds >= model.wan.limit_s(max(model.bytes_sent().values()), model.hops)


def test_links_carry_the_frames_and_the_time(model):
    bank, lender = model.between("P0", "P2", local_pair())
    bank.send(Frame(Kind.CUT, 7, BODY))
    frame = lender.receive()
    assert (frame.kind, frame.step, bytes(frame.payload)) == (Kind.CUT, 7, BODY)
    assert model.now("P2") == pytest.approx(0.06)
    lender.send(Frame(Kind.GRAD, 7, BODY))
    assert bank.receive().kind is Kind.GRAD
    assert model.now("P0") == pytest.approx(0.12)
    assert model.bytes_sent() == {"P0": 10_000, "P1": 0, "P2": 10_000}


def test_pipelining_hides_the_delay_until_the_line_is_full(model):
    """Depth 4 of 10 ms frames: four exchanges go through a cycle of 120 ms, 10 ms apart."""
    bank, lender = model.between("P0", "P2", local_pair())
    for _ in range(4):
        bank.send(Frame(Kind.CUT, 0, BODY))
    for _ in range(40):
        lender.receive()
        lender.send(Frame(Kind.GRAD, 0, BODY))
        bank.receive()
        bank.send(Frame(Kind.CUT, 0, BODY))
    assert model.now("P0") == pytest.approx(10 * 0.12 + 0.03)


def test_streams_of_threads_keep_the_clocks_of_who_is_in_the_middle_and_of_all_others(model):
    streams = model.star("P0", Star(PARTIES, "P0"))

    def middle():
        for name in ("P1", "P2"):
            streams.inner[name].send(Frame(Kind.QUERY, 0, BODY))
        return {streams.receive_any()[0] for _ in range(2)}

    def answer(name):
        streams.outer[name].send(streams.outer[name].receive())

    programs = {"P0": middle, **{name: partial(answer, name) for name in ("P1", "P2")}}
    streams.play(programs)
    assert model.now("P0") == pytest.approx(0.02 + 0.05 + 0.01 + 0.05), "its line carries both"
    assert model.hops == 2
