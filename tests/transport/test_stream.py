"""One stream on a socket pair: pieces, deadlines, how it ends; without TLS it stays here."""

import random
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vfl.core.errors import LostPeerError, OversizedFrameError, UserError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, to_bytes
from vfl.transport import Admission, Hello, TcpHub, TcpLink, Timeouts, round_trip_s
from vfl.transport.stream import JOINED_BYTES, Stream, dial, require_loopback

#: Payloads around the bytes that are read at once, and much larger ones.
SIZES = [0, 1, 0, 4079, 4080, 4081, 4096, 0, 20_000, 3, 2, 100_000, 5]


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.mark.parametrize("size", [0, 1, JOINED_BYTES - 1, JOINED_BYTES, JOINED_BYTES + 1, 150_001])
def test_bytes_on_the_wire_are_the_frame(ends, size):
    frame = Frame(Kind.CUT, 3, bytes(range(251)) * (size // 251) + bytes(size % 251), 9)
    writer = threading.Thread(target=Stream(ends[0]).write, args=(frame, soon()))
    writer.start()
    assert ends[1].recv(HEADER_BYTES + size, socket.MSG_WAITALL) == to_bytes(frame)
    writer.join()


def test_a_deadline_inside_a_frame_loses_none_of_its_bytes(ends):
    raw = to_bytes(Frame(Kind.CUT, 3, b"payload"))
    stream = Stream(ends[0])
    for cut in range(1, len(raw)):
        ends[1].sendall(raw[cut - 1 : cut])
        with pytest.raises(TimeoutError):
            stream.read(soon(0.001))
    ends[1].sendall(raw[-1:])
    assert bytes(stream.read(soon()).payload) == b"payload"


def test_the_limit_may_change_between_frames(ends):
    stream = Stream(ends[0], limit_bytes=4)
    ends[1].sendall(to_bytes(Frame(Kind.CUT, 1, b"1234")))
    assert stream.read(soon()).step == 1
    stream.limit_bytes = 3
    ends[1].sendall(to_bytes(Frame(Kind.CUT, 2, b"1234")))
    with pytest.raises(OversizedFrameError):
        stream.read(soon())


def test_frames_that_arrive_together_come_out_one_by_one(ends):
    frames = [Frame(Kind.CUT, step, bytes([step]) * size) for step, size in enumerate(SIZES)]
    raw, stream, came = b"".join(map(to_bytes, frames)), Stream(ends[0]), []
    draw = random.Random(0)
    while len(came) < len(frames):
        if raw:
            sent = ends[1].send(raw[: draw.choice([1, 15, 17, 4095, 9000])])
            raw = raw[sent:]
        while (frame := stream.poll()) is not None:
            came.append(frame)
        if not raw and len(came) < len(frames):
            came.append(stream.read(soon()))
    assert came == frames
    assert stream.inbox_bytes == 0


def test_a_limit_holds_for_bytes_that_were_read_before_it(ends):
    stream = Stream(ends[0], limit_bytes=4)
    ends[1].sendall(2 * to_bytes(Frame(Kind.CUT, 1, b"1234")))
    stream.read(soon())
    stream.limit_bytes = 3
    with pytest.raises(OversizedFrameError):
        stream.read(soon())


def test_ending_wakes_a_reader(ends, pool):
    stream = Stream(ends[0])
    reader = pool.submit(stream.read, soon(10))
    time.sleep(0.05)
    stream.end()
    stream.end()
    with pytest.raises(ConnectionError):
        reader.result(60)
    with pytest.raises(ConnectionError):
        stream.write(Frame(Kind.CUT), soon())


def test_last_words_survive_the_close_although_bytes_lie_unread(pool):
    """Closing at once would reset the connection and drop what is still in its buffers."""
    with socket.socket() as listener, socket.socket() as reader:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listener.getsockname())
        stream = Stream(listener.accept()[0])
        reader.sendall(b"unread")
        frame = Frame(Kind.ERROR, 0, bytes(60_000))
        stream.write(frame, soon())
        ending = pool.submit(stream.end, 5.0)
        time.sleep(0.05)
        assert reader.recv(HEADER_BYTES + 60_000, socket.MSG_WAITALL) == to_bytes(frame)
        reader.close()
        ending.result(60)


def test_no_round_trip_without_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for nowhere in (address, "127.0.0.1:no-port", "127.0.0.1:99999"):
        with pytest.raises(LostPeerError, match="cannot be measured") as caught:
            round_trip_s(nowhere, timeout_s=0.5)
        assert caught.value.where == nowhere


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host):
    require_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "lender.example", "", "localhost.x"]
)
def test_elsewhere_nothing_opens_without_tls(host):
    with pytest.raises(UserError, match="without TLS"):
        TcpHub(host, 0, Admission("session", {}))
    with pytest.raises(UserError, match="without TLS"):
        TcpLink.connect(host, 9, Hello("session", "7", "t" * 43))


@pytest.mark.parametrize("beside", [True, False])
def test_a_write_that_waits_for_room_reads_other_streams_too(beside):
    """Three ends in a circle: A writes to B, who reads only once C, whom A reads, took a frame."""
    (a, b), (c, d) = ([Stream(end) for end in socket.socketpair()] for _ in range(2))
    large = Frame(Kind.PROTOCOL, 1, bytes(8 << 20))
    deadline = time.monotonic() + (60 if beside else 0.5)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(a.write, large, deadline, [c] if beside else [])
        if beside:
            d.write(large, deadline)
            assert b.read(deadline).wire_bytes == c.read(deadline).wire_bytes == large.wire_bytes
            written.result()
        else:
            with pytest.raises(TimeoutError):
                d.write(large, deadline)
            with pytest.raises(TimeoutError):
                written.result()
    for stream in (a, b, c, d):
        stream.end()


def test_a_stream_that_broke_does_not_keep_another_from_writing():
    (a, b), (c, d) = ([Stream(end) for end in socket.socketpair()] for _ in range(2))
    d.end()
    large = Frame(Kind.PROTOCOL, 1, bytes(8 << 20))
    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(a.write, large, deadline, [c])
        assert b.read(deadline).wire_bytes == large.wire_bytes
        written.result()
    with pytest.raises(ConnectionError):
        c.read(deadline)
    for stream in (a, b, c):
        stream.end()


def test_who_calls_a_port_where_nobody_listens_does_not_meet_itself(monkeypatch):
    """As Linux lets a caller that it gave the very port that is called."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: own)
        with pytest.raises(ConnectionRefusedError):
            dial("127.0.0.1", own.getsockname()[1], None, Timeouts())


@pytest.fixture
def connection():
    """Both ends of a TCP connection; a reader's stream is at the first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here = listener.accept()[0]
    yield Stream(here), there
    here.close()
    there.close()


def test_a_long_frame_in_small_pieces_wakes_its_reader_rarely(connection, pool, monkeypatch):
    stream, there = connection
    frame, waits, wait = Frame(Kind.CUT, 1, bytes(range(256)) * 4096), [], stream._wait
    monkeypatch.setattr(stream, "_wait", lambda *given: waits.append(given) or wait(*given))
    reading = pool.submit(stream.read, soon())
    raw, size = to_bytes(frame), 16 * 1024
    for start in range(0, len(raw), size):
        there.sendall(raw[start : start + size])
        time.sleep(0.001)
    assert reading.result(60).payload == frame.payload
    assert len(waits) < len(raw) // size // 3


def test_a_peer_that_goes_inside_a_long_frame_is_noticed_at_once(connection, pool):
    stream, there = connection
    reading = pool.submit(stream.read, soon())
    there.sendall(to_bytes(Frame(Kind.CUT, 1, bytes(1 << 20)))[:100_000])
    there.close()
    with pytest.raises(ConnectionError):
        reading.result(10)


def test_after_a_long_frame_and_a_missed_deadline_one_byte_wakes_who_waits(connection, pool):
    stream, there = connection
    raw = to_bytes(Frame(Kind.CUT, 1, bytes(1 << 20)))
    there.sendall(raw[:100_000])
    with pytest.raises(TimeoutError):
        stream.read(time.monotonic() + 0.2)
    there.sendall(raw[100_000:100_001])
    assert select.select([stream], [], [], 10)[0] == [stream]
    reading = pool.submit(stream.read, soon())
    there.sendall(raw[100_001:])
    assert len(reading.result(60).payload) == 1 << 20
    there.sendall(to_bytes(Frame(Kind.CUT, 2, b"")))
    assert select.select([stream], [], [], 10)[0] == [stream]
