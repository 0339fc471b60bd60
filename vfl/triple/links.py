"""Direct TLS links between each two of the three parties.

The link of P0 and P1 never passes P2, which deals their masks and could otherwise read what they
open.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from vfl.core.errors import LostPeerError, VFLError
from vfl.mpc.rules import NAMES
from vfl.transport import Hello, TcpHub, TcpLink, Timeouts, TransportLink
from vfl.triple.door import LISTENS, Door, Invitation


class Links:
    """One party's two links, and the hub it listens with; closed as one.

    Args:
        role: the party's.
        timeout_s: how long it waits for another.
        join_s: how long it waits for the others to come.
    """

    def __init__(self, role: int, timeout_s: float, join_s: float) -> None:
        self._role = role
        self._join_s = join_s
        self._hub: TcpHub | None = None
        self._links: dict[int, TransportLink] = {}
        self._timeouts = Timeouts(
            step_s=timeout_s, idle_s=timeout_s, rejoin_window_s=min(timeout_s, 8.0)
        )

    def listen(self, door: Door, host: str, port: int) -> int:
        """Open this party's door at an address of this machine; the port really listened on.

        Raises:
            UserError: the address cannot be listened on.
        """
        self._hub = TcpHub(
            host,
            port,
            door.session,
            door.credentials,
            certificate=door.certificate,
            timeouts=self._timeouts,
        )
        return self._hub.port

    def connect(self, invitations: Mapping[int, Invitation]) -> dict[int, TransportLink]:
        """Links to the two others, by role.

        Raises:
            LostPeerError, MissingPartyError: one of them did not come.
            AuthenticationError: somebody else did.
        """
        deadline = time.monotonic() + self._join_s
        for role, invitation in sorted(invitations.items()):
            self._links[role] = self._call(invitation, deadline)
        if self._hub is not None:
            callers = LISTENS[self._role]
            left_s = max(0.0, deadline - time.monotonic())
            self._hub.wait_all([NAMES[caller] for caller in callers], left_s)
            self._links |= {caller: self._hub.link(NAMES[caller]) for caller in callers}
        return self._links

    def fail(self, error: VFLError) -> None:
        """Tell everybody who is there why this party stops."""
        for link in self._links.values():
            link.fail(error)
        if self._hub is not None:
            self._hub.fail(error)

    def close(self) -> None:
        """Close links and door."""
        for link in self._links.values():
            link.close()
        if self._hub is not None:
            self._hub.close()

    def _call(self, invitation: Invitation, deadline: float) -> TcpLink:
        """Call until somebody is there; who waits for us may be about to begin."""
        hello = Hello(invitation.session, NAMES[self._role], invitation.token)
        while True:
            try:
                return TcpLink.connect(
                    invitation.host,
                    invitation.port,
                    hello,
                    invitation.ca_pem.encode(),
                    self._timeouts,
                    peer=NAMES[invitation.listener],
                )
            except LostPeerError:
                if time.monotonic() >= deadline:
                    raise
