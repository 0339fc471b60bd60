"""A party's way onto the stream that a session message names, and off it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vfl.errors import VFLError
from vfl.session import Introduction, SessionMessage, for_others, unexpected
from vfl.transport import Hello, LinkLimits, TcpLink, Timeouts


@contextmanager
def attached(
    message: SessionMessage, introduction: Introduction, limits: LinkLimits
) -> Iterator[TcpLink]:
    """The party's end of the stream, introduced; what goes wrong meanwhile is told to the others.

    Args:
        message: what Flower brought.
        introduction: what the party says of itself.
        limits: what frames may carry.

    Raises:
        LostPeerError: nobody is there.
        PeerFailedError: the label party does not let this party in, and says why.
    """
    hello = Hello(message.session, message.node, message.token, introduction.model_dump())
    link = TcpLink.connect(
        message.host,
        message.port,
        hello,
        message.ca_pem.encode(),
        Timeouts(idle_s=message.idle_timeout_s, rejoin_window_s=message.rejoin_window_s),
        message.terms.window_frames,
        limits=limits,
    )
    try:
        yield link
    except VFLError as error:
        link.fail(for_others(error, introduction.party))
        raise
    except Exception as bug:
        link.fail(unexpected(bug, introduction.party))
        raise
    finally:
        link.close()
