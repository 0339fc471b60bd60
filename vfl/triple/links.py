"""Direct TLS links between each two of the three parties.

P2 listens for P0 and P1, and P0 for P1. The link of P0 and P1 never passes P2, which deals their
masks and could otherwise read what they open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vfl.mpc.rules import NAMES
from vfl.transport import (
    Credential,
    Hello,
    TcpHub,
    TcpLink,
    Timeouts,
    TransportLink,
    session_certificate,
)
from vfl.triple.messages import Door, Job

#: Whom each role listens for.
LISTENS = {0: (1,), 1: (), 2: (0, 1)}
_HOST = "127.0.0.1"
_JOIN_S = 60.0


class Links:
    """One party's two links, and the hub it listens with; closed as one.

    Args:
        job: the party's.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._hub: TcpHub | None = None
        self._links: dict[int, TransportLink] = {}
        wait = job.timeout_s
        self._timeouts = Timeouts(step_s=wait, idle_s=wait, rejoin_window_s=min(wait, 8.0))

    def listen(self) -> Door | None:
        """Open this party's door, if it has one."""
        job, callers = self._job, LISTENS[self._job.role]
        if not callers:
            return None
        certificate = session_certificate([_HOST])
        credentials = {
            NAMES[caller]: Credential(NAMES[caller], job.tokens[_pair(job.role, caller)])
            for caller in callers
        }
        self._hub = TcpHub(
            _HOST, 0, job.session, credentials, certificate=certificate, timeouts=self._timeouts
        )
        return Door(port=self._hub.port, ca_pem=certificate.ca_pem.decode())

    def connect(self, doors: Mapping[int, Door]) -> dict[int, TransportLink]:
        """Links to the two others, by role.

        Raises:
            LostPeerError, MissingPartyError: one of them did not come.
            AuthenticationError: somebody else did.
        """
        job = self._job
        for role, door in sorted(doors.items()):
            hello = Hello(job.session, NAMES[job.role], job.tokens[_pair(job.role, role)])
            self._links[role] = TcpLink.connect(
                door.host, door.port, hello, door.ca_pem.encode(), self._timeouts
            )
        if self._hub is not None:
            callers = LISTENS[job.role]
            self._hub.wait_all([NAMES[caller] for caller in callers], _JOIN_S)
            self._links |= {caller: self._hub.link(NAMES[caller]) for caller in callers}
        return self._links

    def each(self, act: Callable[[TransportLink], None]) -> None:
        """Do something with every link, such as telling it why this party stops."""
        for link in self._links.values():
            act(link)

    def close(self) -> None:
        """Close links and door."""
        self.each(lambda link: link.close())
        if self._hub is not None:
            self._hub.close()


def _pair(one: int, other: int) -> str:
    return f"{min(one, other)}{max(one, other)}"
