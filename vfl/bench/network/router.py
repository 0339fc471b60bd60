"""A router in user space: packets wait for their sender's bandwidth and for the delay.

The kernel shapes bandwidth, but not every kernel delays. A thread reads what each site's device
sends and writes it to the receiver's device when it arrives. Queues have no bound, so no packet is
lost; the senders' TCP windows bound them.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence

from vfl.bench.network.egress import Egress
from vfl.bench.network.wan import Wan

#: Read from one device before the others get a turn.
_PACKETS = 64
_PACKET_BYTES = 65536
_LAST_ADDRESS_BYTE = 19
_Queue = deque[tuple[float, int, bytes]]


class Router:
    """A star of devices; addresses end in 1, 2, 3, in the order of the devices.

    Args:
        devices: file descriptors of TUN devices, which do not block.
        wan: what each device's line does.
    """

    def __init__(self, devices: Sequence[int], wan: Wan) -> None:
        self._devices = list(devices)
        self._egress = [Egress(wan) for _ in devices]
        # One queue a sender: with one delay for all, what was sent first arrives first.
        self._queues: list[_Queue] = [deque() for _ in devices]
        self._awaken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; what was on its way is lost."""
        os.close(self._waker)
        self._thread.join()
        os.close(self._awaken)

    def _run(self) -> None:
        watched = [*self._devices, self._awaken]
        while True:
            # `select` waits to the microsecond, `poll` to the millisecond.
            readable, _, _ = select.select(watched, [], [], self._deliver())
            if self._awaken in readable:
                return
            for index, device in enumerate(self._devices):
                if device in readable:
                    self._collect(index)

    def _collect(self, index: int) -> None:
        """Send packets of one device on their way."""
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
        """Write what has arrived; seconds until more does, or None."""
        now = time.monotonic()
        for queue in self._queues:
            while queue and queue[0][0] <= now:
                _, target, packet = queue.popleft()
                with contextlib.suppress(OSError):  # its site is going down
                    os.write(self._devices[target], packet)
        arrivals = [queue[0][0] for queue in self._queues if queue]
        return max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
