"""A site of its own on this machine: a network namespace without a name, and its one device.

A namespace without a name lives as long as a process in it or a file descriptor for it. So there
is nothing to remove, whatever ends the process that made it, and nothing to leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_interface
from pathlib import Path

from vfl.core.errors import UserError

DEVICE = "wan0"
_TUN = "/dev/net/tun"
_TOOLS = ("ip", "nsenter", "setpriv")
#: From linux/sched.h and linux/if_tun.h.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
#: Ethernet's packets; a queue that holds what a sender hands over before it is read.
_SET_UP = f"""
link set lo up
addr add {{address}}/24 dev {DEVICE}
link set {DEVICE} addrgenmode none mtu 1500 txqueuelen 10000
link set {DEVICE} up
"""
#: Linux's own default. Where a system defaults to BBR, a protocol that waits for answers is paced
#: by what little it sent before, and takes almost a round trip more for each: a figure of the
#: machine, not of the line. A kernel that has no cubic keeps what it has.
_CONTROL = f"route change {{network}} dev {DEVICE} src {{address}} scope link congctl cubic"
#: Whether a connection that was silent for a moment begins slowly again. In a new namespace that is
#: Linux's own default too, whatever this machine was told.
_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


class Namespace:
    """A network namespace with the loopback and a TUN device.

    Args:
        address: of the device, in a network of 24 bits.

    Attributes:
        device: file descriptor that reads and writes the packets of the device.

    Raises:
        UserError: this process may not, or the system cannot; see `why_not`.
    """

    def __init__(self, address: str) -> None:
        reason = _missing()
        if reason:
            raise _refusal(reason)
        # A thread of its own: entering a namespace concerns a thread, and this one ends at once.
        with ThreadPoolExecutor(1) as thread:
            self._file, self.device = thread.submit(_make, address).result()

    def command(self) -> list[str]:
        """What a command line begins with that is to run here; it runs as the same process.

        It is killed when the thread that started it ends, so that it does not outlive the network.
        """
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._file}", "--"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "--"]

    def bytes_sent(self) -> int:
        """Bytes of packets that the device has sent, headers included."""
        line = [*self.command(), "ip", "-stats", "-json", "link", "show", DEVICE]
        told = subprocess.run(line, capture_output=True, check=True, text=True)
        return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Let go; the namespace ends with the last process in it."""
        for file in (self.device, self._file):
            with contextlib.suppress(OSError):
                os.close(file)
        self.device = self._file = -1


def why_not() -> str | None:
    """Why no namespace can be made here; None where one can."""
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
    """A fresh namespace and its device as file descriptors; the calling thread stays in it."""
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
        _AFTER_IDLE.write_bytes(after_idle)  # of this namespace now
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
