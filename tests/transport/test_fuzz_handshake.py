"""Damaged greetings at a real hub, and damaged frames behind the WELCOME of a bounded stream."""

import contextlib
import gc
import json
import random
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from mutate import mutated_frames, mutated_json, repair

from vfl.core.errors import VFLError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, to_bytes
from vfl.transport import Admission, Credential, Front, FrontLimits, Hello, TcpHub, Timeouts
from vfl.transport.handshake import Welcome, in_session
from vfl.transport.link import LinkLimits
from vfl.transport.stream import Stream

CASES = [300, pytest.param(100_000, marks=pytest.mark.slow)]
MOST_GROWN = 64 * 1024 * 1024
UP = {Kind.CUT: 4096, Kind.QUERY: 2048, Kind.DONE: 1024, Kind.ERROR: 65536}
LIMITS = LinkLimits(up=UP, down={Kind.GRAD: 4096, Kind.ACK: 1, Kind.DONE: 0, Kind.ERROR: 65536})
#: As many connections as one machine can make.
UNBOUNDED = FrontLimits(strangers=64, per_second=1e6, burst=1e6, longest_wait_s=1e-3)


def rss_bytes():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


@pytest.fixture
def crashes(monkeypatch):
    """What threads of the hub raised besides errors of vfl's own."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(repr(told.exc_value)))
    return seen


@pytest.mark.parametrize("cases", CASES)
def test_greetings(cases, crashes):
    hello = json.loads(bytes(Hello("session", "7", "t" * 43, {"rows": 3}).frame().payload))
    greeting = to_bytes(Frame(Kind.HELLO, payload=json.dumps(hello).encode()))
    timeouts = Timeouts(handshake_s=0.2, step_s=1, rejoin_window_s=0.2)
    credentials = {"bank": Credential("7", "t" * 43)}
    hub = TcpHub(
        "127.0.0.1", 0, Admission("session", credentials, limits=lambda party: LIMITS),
        timeouts=timeouts, front=Front(UNBOUNDED),
    )  # fmt: skip
    frames = mutated_frames([greeting], 0, 0, cases)
    before, most = 0, 0
    try:
        for case, _, damaged in frames:
            if case % 2:
                payload = mutated_json(hello, 3, case).encode(errors="replace")
                raw = bytearray(to_bytes(Frame(Kind.HELLO, payload=payload)))
            else:
                raw = damaged
            knock(hub.port, raw)
            if case == 100:
                gc.collect()
                before = rss_bytes()
            if case % 200 == 0:
                most = max(most, rss_bytes())
        wait_for_handshakes(hub)
        assert crashes == []
        assert hub._acceptor.is_alive()
        assert max(most, rss_bytes()) - before < MOST_GROWN
    finally:
        hub.close()


def knock(port, raw):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        # Gone at once when closed, so that a hundred thousand do not use up the ports.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):  # refused before everything was sent
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


def wait_for_handshakes(hub):
    deadline = time.monotonic() + 10
    while hub._greeting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not hub._greeting


@pytest.mark.parametrize("cases", CASES)
def test_frames_behind_the_welcome(cases):
    valid = [to_bytes(Frame(kind, 3, b"x" * min(most, 400))) for kind, most in UP.items()]
    valid += [to_bytes(Welcome(3).frame()), to_bytes(Hello("s", "7", "t").frame())]
    failed, refused, before, most = [], 0, 0, 0
    for case, _, raw in mutated_frames(valid, 1, 0, cases):
        draw = random.Random(case)
        if draw.random() < 0.3 and len(raw) >= HEADER_BYTES:
            size = draw.choice((0, 1, 4096, 4097, 65536, 65537, 2**20, 2**29, 2**31, 2**32 - 1))
            if size <= 65537:
                raw += bytes(max(0, size - len(raw) + HEADER_BYTES))
                repair(raw)
            raw[:4] = size.to_bytes(4, "little")
        problem = read_one(raw)
        refused += problem == "refused"
        if problem not in ("", "refused"):
            failed.append((case, problem))
        if case == 100:
            gc.collect()
            before = rss_bytes()
        if case % 500 == 0:
            most = max(most, rss_bytes())
    assert failed == [], failed[:5]
    assert refused > cases / 3
    assert max(most, rss_bytes()) - before < MOST_GROWN


def read_one(raw):
    ours, theirs = socket.socketpair()
    stream = Stream(ours, LIMITS.up)
    stream.inbox_limit_bytes = LIMITS.inbox_bytes(4)
    try:
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        frame = in_session(stream.read(time.monotonic() + 5), "bank")
        assert len(frame.payload) <= LIMITS.up[frame.kind]
    except (VFLError, ConnectionError):
        return "refused"
    except Exception as bug:  # any other is what fuzzing looks for
        return f"{type(bug).__name__}: {bug}"[:300]
    finally:
        stream.end()
        theirs.close()
    return ""
