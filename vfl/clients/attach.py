"""A party's way onto the stream that a session message names."""

from __future__ import annotations

from vfl.session import Introduction, SessionMessage
from vfl.transport import Hello, TcpLink, Timeouts


def attach(message: SessionMessage, introduction: Introduction) -> TcpLink:
    """The party's end of the stream, open and introduced.

    Args:
        message: what Flower brought.
        introduction: what the party says of itself.

    Raises:
        LostPeerError: nobody is there.
        PeerFailedError: the label party does not let this party in, and says why.
    """
    hello = Hello(message.session, message.node, message.token, introduction.model_dump())
    return TcpLink.connect(
        message.host,
        message.port,
        hello,
        message.ca_pem.encode() or None,
        Timeouts(idle_s=message.idle_timeout_s, rejoin_window_s=message.rejoin_window_s),
        message.terms.window_frames,
    )
