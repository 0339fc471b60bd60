"""P2 deals while it waits for questions, and P1 keeps what comes before its turn."""

import threading

import pytest
import torch

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.mpc import channel as channels
from vfl.mpc.channel import Channel
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.three_party.fast import dealt_slices


def numbers_sent(party, to):
    """The operations of the frames a party sends from now on, in order."""
    link, numbers = party.channels[to].link, []
    send = link.send

    def listen(frame):
        numbers.append(frame.step)
        send(frame)

    link.send = listen
    return numbers


class Waiting:
    """A link that cannot be asked without waiting."""

    def __init__(self, link):
        self.send, self.receive, self.close = link.send, link.receive, link.close


@pytest.mark.parametrize("pipelined", [True, False])
def test_p2_deals_for_later_operations_before_it_answers(setting, chain, monkeypatch, pipelined):
    inputs, targets = torch.randn(8, 6, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)
    three = setting("fast", chain(6, 4, 1), inputs, targets)
    dealer, first = three.trio.parties[P2], three.trio.parties[P0]
    if not pipelined:
        dealer.channels[P0].link = Waiting(dealer.channels[P0].link)
    numbers = numbers_sent(dealer, P1)
    dealt_all = threading.Event()
    ask, share = first._ask, dealer._send_product

    def wait_then_ask(*question):
        assert dealt_all.wait(10) or not pipelined
        ask(*question)

    dealt = []

    def count(product):
        share(product)
        dealt.append(product.number)
        if len(dealt) == 6:  # two layers forward, a gradient and its slope, two updates
            dealt_all.set()

    if pipelined:
        monkeypatch.setattr(first, "_ask", wait_then_ask)
    monkeypatch.setattr(dealer, "_send_product", count)
    three.train_step("cross_entropy", 0.5)
    assert sorted(dealt) == dealt
    assert len(dealt) == 6
    assert (numbers == sorted(numbers)) == (not pipelined)
    plain = {name: value.clone().requires_grad_() for name, value in three.plain.values.items()}
    three.plain.values = plain
    loss = torch.nn.functional.binary_cross_entropy(three.plain(inputs), targets)
    for (name, value), gradient in zip(
        plain.items(), torch.autograd.grad(loss, list(plain.values())), strict=True
    ):
        wanted = (value - 0.5 * gradient).detach()
        assert float((three.weights()[name] - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (500, 1000), (3, 2**16), (2**17, 1), (70_000,)])
def test_slices_are_all_rows_once_and_no_larger_than_a_row_or_2_15(shape):
    slices = dealt_slices(shape)
    assert [row for rows in slices for row in range(rows.start, rows.stop)] == [*range(shape[0])]
    width = shape[1] if len(shape) > 1 else 1
    assert all((rows.stop - rows.start) * width <= max(2**15, width) for rows in slices)


class Script:
    """A link that says what it was given."""

    def __init__(self, *frames):
        self.frames = list(frames)

    def receive(self):
        return self.frames.pop(0)


def frame(number, size=8):
    return Frame(Kind.PROTOCOL, number, bytearray(size))


def dealers(*frames):
    made = Channel(Script(*frames), "P2")
    made.keeps_early = True
    return made


def test_what_comes_before_its_turn_is_kept_for_it():
    channel = dealers(frame(9), frame(9, 16), frame(7), frame(8))
    for number, size in ((7, 8), (8, 8), (9, 8), (9, 16)):
        assert len(channel.receive_bytes(number, size)) == size


@pytest.mark.parametrize("number", [0, 4])
def test_what_nobody_waits_for_is_refused(number):
    with pytest.raises(ProtocolError, match="unexpected message"):
        dealers(frame(number), frame(5)).receive_bytes(5, 8)


def test_slopes_that_are_still_owed_come_behind_their_turn():
    channel = dealers(frame(4), frame(5))
    channel.owed.add(4)
    assert len(channel.receive_bytes(5, 8)) == len(channel.receive_bytes(4, 8)) == 8


def test_a_later_operation_of_another_size_is_refused_when_its_turn_comes():
    channel = dealers(frame(6, 16), frame(5))
    channel.receive_bytes(5, 8)
    with pytest.raises(ProtocolError, match="another size"):
        channel.receive_bytes(6, 8)


def test_no_more_is_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(channels, "_EARLY_BYTES", 64)
    with pytest.raises(ProtocolError, match="unexpected message"):
        dealers(*[frame(number) for number in range(6, 20)]).receive_bytes(5, 8)


def test_other_channels_keep_their_order():
    with pytest.raises(ProtocolError, match="unexpected message"):
        Channel(Script(frame(6), frame(5)), "P0").receive_bytes(5, 8)
