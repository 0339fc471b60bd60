"""Keep a service running over night: start it again when it ends by itself, with patience."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from vfl.errors import LostPeerError
from vfl.service import Service

#: Flower counts a SuperNode that was killed as online for a minute and refuses its key meanwhile.
PATIENCE_S = 300.0
_LONGEST_PAUSE_S = 15.0


def supervise(
    start: Callable[[], Service],
    follow: Callable[[Service], None],
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
    first_pause_s: float = 1.0,
) -> None:
    """Start a service and follow it; when it ends, start it again. Returns never.

    Args:
        start: gives the running service.
        follow: returns once the service has ended by itself; Ctrl-C goes through.
        say: told in one line why the service is started again, and when.
        patience_s: how long starting may fail in a row.
        first_pause_s: before the second attempt; each pause is twice the one before, up to 15 s.

    Raises:
        LostPeerError: starting has failed for so long.
        VFLError: what waiting does not mend, such as a certificate that is not trusted.
    """
    deadline, pause_s = monotonic() + patience_s, first_pause_s
    while True:
        try:
            service = start()
        except LostPeerError as problem:
            if monotonic() + pause_s > deadline:
                raise
            why = f"{problem.what} ({problem.got})"
        else:
            try:
                follow(service)
            finally:
                service.stop()
            why = f"{service.name} ended (exit {service.wait()})"
            deadline, pause_s = monotonic() + patience_s, first_pause_s
        say(f"{why}; starting it again in {pause_s:g} s")
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
