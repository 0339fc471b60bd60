"""A network of Linux namespaces and a user-space router, which delays real packets."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from ipaddress import ip_interface
from pathlib import Path

from benchmarks.emulation.base import Egress, Network, Wan
from vfl.core.errors import UserError

DEVICE = "wan0"
_TUN = "/dev/net/tun"
_TOOLS = ("ip", "nsenter", "setpriv")
#: Constants of linux/sched.h and linux/if_tun.h.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
#: Packet size of Ethernet, and length of the queue for packets that arrive before they are read.
_SET_UP = f"""
link set lo up
addr add {{address}}/24 dev {DEVICE}
link set {DEVICE} addrgenmode none mtu 1500 txqueuelen 10000
link set {DEVICE} up
"""
#: Congestion control, set to Linux's default. If a system uses BBR by default, the small earlier
#: traffic limits a protocol that waits for answers, so that each answer takes almost one more round
#: trip. Such a time would describe the machine, not the network link. A kernel without cubic keeps
#: its own default.
_CONTROL = f"route change {{network}} dev {DEVICE} src {{address}} scope link congctl cubic"
#: Setting that determines whether an idle connection begins with slow start again. In a new
#: namespace, this setting has Linux's default value, whatever its value on this machine is.
_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_ADDRESS = "10.77.0.{}"
#: Number of packets that are read from one device before the next device is read.
_PACKETS = 64
_PACKET_BYTES = 65536
_LAST_ADDRESS_BYTE = 19
_Queue = deque[tuple[float, int, bytes]]


class TunNetwork(Network):
    """Network with a namespace and an address for each party, and a router between the namespaces.

    TCP's slow start, windows, headers and acknowledgements are those of a real network. To start a
    process at a party, put `command` in front of the process's command line; the process listens at
    `host`. The counted bytes are those of packets at the party's interface. The router is a thread
    of this process, so this process should be idle during a measurement.

    Raises:
        UserError: the process lacks rights, or the system does not support such a network.
    """

    kind = "tun"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        super().__init__(parties, wan)
        self._addresses = {
            party: _ADDRESS.format(number) for number, party in enumerate(parties, start=1)
        }
        self._sites: dict[str, Namespace] = {}
        with ExitStack() as made:
            for party, address in self._addresses.items():
                self._sites[party] = made.enter_context(closing(Namespace(address)))
            router = Router([site.device for site in self._sites.values()], wan)
            made.enter_context(closing(router))  # end the router first, because it uses the devices
            self._made = made.pop_all()

    def command(self, party: str) -> list[str]:
        return self._sites[party].command()

    def host(self, party: str) -> str:
        return self._addresses[party]

    def bytes_sent(self) -> dict[str, int]:
        return {party: site.bytes_sent() for party, site in self._sites.items()}

    def close(self) -> None:
        self._made.close()


class Namespace:
    """A network namespace with a loopback interface and a TUN device; it has no name.

    A namespace without a name exists as long as a process runs in it or a file descriptor refers to
    it. So no cleanup is needed, however the process that made the namespace ends.

    Args:
        address: address of the device, in a network with a 24-bit prefix.

    Attributes:
        device: file descriptor for reading and writing the packets of the device.

    Raises:
        UserError: this process lacks rights, or the system does not support it; see `why_not`.
    """

    def __init__(self, address: str) -> None:
        reason = _missing()
        if reason:
            raise _refusal(reason)
        # The namespace is made in a separate thread, which ends at once, because entering a
        # namespace changes the thread.
        with ThreadPoolExecutor(1) as thread:
            self._file, self.device = thread.submit(_make, address).result()

    def command(self) -> list[str]:
        """Return the prefix with which a command line runs in this namespace.

        The started process is killed when the thread that started it ends, so that it does not
        outlive the network.
        """
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._file}", "--"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "--"]

    def bytes_sent(self) -> int:
        """Number of bytes of the packets that the device has sent, headers included."""
        line = [*self.command(), "ip", "-stats", "-json", "link", "show", DEVICE]
        told = subprocess.run(line, capture_output=True, check=True, text=True)
        return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Close the device; the namespace ends with the last process in it."""
        for file in (self.device, self._file):
            with contextlib.suppress(OSError):
                os.close(file)
        self.device = self._file = -1


def why_not() -> str | None:
    """Return why this machine cannot make a namespace, or None if it can."""
    try:
        Namespace("10.77.0.1").close()
    except UserError as refusal:
        return refusal.got
    return None


def _missing() -> str | None:
    if os.geteuid():
        return "not root"
    if not os.path.exists(_TUN):
        return f"no {_TUN}"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"no command {', '.join(absent)}" if absent else None


def _make(address: str) -> tuple[int, int]:
    """Return a new namespace and its device as file descriptors.

    The calling thread stays in the namespace.
    """
    libc, after_idle = ctypes.CDLL(None, use_errno=True), _AFTER_IDLE.read_bytes()
    if libc.unshare(_CLONE_NEWNET):
        raise _refusal(f"no network namespaces ({os.strerror(ctypes.get_errno())})")
    file = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    device = -1
    try:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        wanted = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, wanted)
        steps = _SET_UP.format(address=address)
        subprocess.run(["ip", "-batch", "-"], input=steps.encode(), capture_output=True, check=True)
        _AFTER_IDLE.write_bytes(after_idle)  # sets the value in the new namespace
        network = ip_interface(f"{address}/24").network
        control = _CONTROL.format(network=network, address=address)
        subprocess.run(["ip", *control.split()], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError) as problem:
        os.close(file)
        if device >= 0:
            os.close(device)
        raise _refusal(f"no TUN device ({type(problem).__name__})") from None
    return file, device


def _refusal(reason: str) -> UserError:
    return UserError(
        "packets cannot be delayed on this machine",
        where="network 'tun'",
        got=reason,
        want=f"root, network namespaces, {_TUN}, and the commands {' and '.join(_TOOLS)}",
        fix="--network proxy delays bytes instead, without any rights",
    )


class Router:
    """Router between devices: a packet waits for its sender's bandwidth and for the delay.

    Linux can limit bandwidth itself, but not every kernel can delay packets. A thread reads the
    packets that each party's device sends, and writes each packet to the receiver's device when it
    should arrive. The queues have no limit, so no packet is lost; the senders' TCP windows limit
    the queues. The last number of the devices' addresses is 1, 2, 3, in the order of `devices`.

    Args:
        devices: file descriptors of TUN devices, in non-blocking mode.
        wan: network link of each device.
    """

    def __init__(self, devices: Sequence[int], wan: Wan) -> None:
        self._devices = list(devices)
        self._egress = [Egress(wan) for _ in devices]
        # One queue for each sender: with the same delay for all, packets arrive in the order of
        # their departure.
        self._queues: list[_Queue] = [deque() for _ in devices]
        self._awaken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the router; packets in transit are lost."""
        os.close(self._waker)
        self._thread.join()
        os.close(self._awaken)

    def _run(self) -> None:
        watched = [*self._devices, self._awaken]
        while True:
            # `select` is accurate to a microsecond, `poll` to a millisecond.
            readable, _, _ = select.select(watched, [], [], self._deliver())
            if self._awaken in readable:
                return
            for index, device in enumerate(self._devices):
                if device in readable:
                    self._collect(index)

    def _collect(self, index: int) -> None:
        """Read the packets that one device sends, and schedule their arrival."""
        egress, queue, device = self._egress[index], self._queues[index], self._devices[index]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PACKETS):
                packet = os.read(device, _PACKET_BYTES)
                if packet[0] >> 4 != 4:
                    continue
                target = packet[_LAST_ADDRESS_BYTE] - 1
                if 0 <= target < len(self._devices):
                    arrival = egress.arrival(time.monotonic(), len(packet))
                    queue.append((arrival, target, packet))

    def _deliver(self) -> float | None:
        """Write all packets that are due; return the seconds until the next packet, or None."""
        now = time.monotonic()
        for queue in self._queues:
            while queue and queue[0][0] <= now:
                _, target, packet = queue.popleft()
                with contextlib.suppress(OSError):  # the device's namespace is ending
                    os.write(self._devices[target], packet)
        arrivals = [queue[0][0] for queue in self._queues if queue]
        return max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
