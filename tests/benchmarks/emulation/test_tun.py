"""Namespaces and the router between them; with the rights they need, or not at all."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.emulation import TunNetwork, Wan, open_network, why_not
from vfl.core.errors import UserError

REASON = why_not()
needs_tun = pytest.mark.skipif(REASON is not None, reason=f"no tun network here: {REASON}")
ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
end, _ = listener.accept()
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := end.recv(65536):
    end.sendall(data)
"""
TRIPS = """
import socket, sys, time
end = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(10):
    began = time.perf_counter()
    end.sendall(b"x")
    end.recv(1)
    print(time.perf_counter() - began)
end.sendall(bytes(100_000))
left = 100_000
while left:
    left -= len(end.recv(65536))
"""


def script(text, *arguments):
    return [sys.executable, "-S", "-c", text, *map(str, arguments)]


def namespaces():
    """Network namespaces with a process in them."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:  # it has ended meanwhile
            continue
    return found


def gone(pid):
    """Whether a process has ended, or does so soon."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@needs_tun
def test_round_trips_take_their_time_and_bytes_are_counted():
    with TunNetwork(["bank", "shop", "lender"], Wan(mbps=80, round_trip_ms=20)) as network:
        at, near = network.command("lender"), network.command("bank")
        with subprocess.Popen(
            [*at, *script(ECHO, network.host("lender"))], stdout=subprocess.PIPE, text=True
        ) as echo:
            port = int(echo.stdout.readline())
            address = network.reach("bank", "lender", port)
            trips = subprocess.run(
                [*near, *script(TRIPS, *address)], capture_output=True, text=True, check=True
            )
        seconds = [float(line) for line in trips.stdout.split()]
        assert min(seconds) >= 0.020
        sent = network.bytes_sent()
    assert sent["shop"] == 0
    for party in ("bank", "lender"):  # headers, acknowledgements and what was sent twice
        assert 100_010 < sent[party] < 125_000


@needs_tun
def test_each_party_has_a_network_of_its_own_and_nothing_is_left():
    with TunNetwork(["bank", "lender"], Wan(round_trip_ms=1)) as network:
        seen = [
            subprocess.check_output(
                [*network.command(party), "readlink", "/proc/self/ns/net"], text=True
            ).strip()
            for party in network.parties
        ]
        own = os.readlink("/proc/self/ns/net")
        assert len({*seen, own}) == 3
        assert os.readlink("/proc/thread-self/ns/net") == own
        files = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == files - 6  # two a party, and a pipe
    assert not namespaces() & set(seen)


HOLDER = """
import os, subprocess, sys, time
from benchmarks.emulation import TunNetwork, Wan
with TunNetwork(["bank", "lender"], Wan(round_trip_ms=1)) as network:
    sleeper = subprocess.Popen([*network.command("bank"), "sleep", "600"])
    while "sleep" not in open(f"/proc/{sleeper.pid}/comm").read():
        time.sleep(0.01)
    print(sleeper.pid, os.readlink(f"/proc/{sleeper.pid}/ns/net"), flush=True)
    if sys.argv[1] == "error":
        raise SystemExit(1)
    time.sleep(600)
"""


@needs_tun
@pytest.mark.parametrize("end", ["error", "SIGKILL"])
def test_however_its_owner_ends_parties_and_namespaces_end_too(end):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, end],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        sleeper, own = holder.stdout.readline().split()
        assert own in namespaces()
        if end != "error":
            holder.send_signal(signal.Signals[end])
        assert holder.wait(60) != 0
    assert gone(sleeper)
    assert own not in namespaces()


def test_without_rights_it_is_refused_with_the_reason_and_auto_takes_proxies(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "not root"
    with pytest.raises(UserError) as refusal:
        open_network(["bank"], Wan(), "tun")
    assert refusal.value.got == "not root"
    assert "proxy" in refusal.value.fix
    with open_network(["bank"], Wan(), "auto") as network:
        assert network.kind == "proxy"


def test_no_sockets_are_opened_without_a_line():
    with open_network(["bank", "lender"], None, "tun") as network:
        assert (network.kind, network.command("bank"), network.bytes_sent()) == ("loopback", [], {})
        assert network.reach("bank", "lender", 80) == ("127.0.0.1", 80)


def test_proxies_count_each_sender_and_share_its_line():
    """What one party sends to two others goes one after the other; what two send does not."""
    wan = Wan(mbps=16, round_trip_ms=10)  # 2 bytes a microsecond
    with open_network(["bank", "shop", "lender"], wan, "proxy") as network:
        ends = {}
        for source, target in (("bank", "shop"), ("bank", "lender")):
            with socket.create_server((network.host(target), 0)) as listener:
                address = network.reach(source, target, listener.getsockname()[1])
                assert network.reach(source, target, listener.getsockname()[1]) == address
                near = socket.create_connection(address)
                ends[target] = near, listener.accept()[0]
        began = time.perf_counter()
        for near, _ in ends.values():
            near.sendall(bytes(60_000))
        for _, far in ends.values():
            left = 60_000
            while left:
                left -= len(far.recv(left))
        assert time.perf_counter() - began >= 0.065
        ends["lender"][1].sendall(bytes(1000))
        assert ends["lender"][0].recv(1000)
        assert network.bytes_sent() == {"bank": 120_000, "shop": 0, "lender": 1000}
        for end in (end for pair in ends.values() for end in pair):
            end.close()
