"""A look at a TLS server before something that explains less tries to use it."""

from __future__ import annotations

import socket
import ssl

from vfl.errors import AuthenticationError, LostPeerError

_PATIENCE_S = 5.0


def check_server(name: str, address: str, ca_pem: str) -> None:
    """Connect, make the TLS handshake, and close.

    Args:
        name: what messages call it.
        address: host:port.
        ca_pem: the authority that must have signed its certificate.

    Raises:
        LostPeerError: nobody answers there.
        AuthenticationError: its certificate has expired, is for another host, or is not signed
            by this authority.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cadata=ca_pem)
        with (
            socket.create_connection((host, int(port)), _PATIENCE_S) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as problem:
        raise AuthenticationError(
            f"the certificate of {name} is not accepted",
            where=address,
            got=problem.verify_message,
            want="one that is valid today, for this host, signed by the authority in ca.pem",
            fix="see that the clocks agree, or renew it and start the SuperLink again",
        ) from None
    except ssl.SSLError as problem:
        raise AuthenticationError(
            f"{name} and this party found no TLS they share", where=address, got=problem.reason
        ) from None
    except OSError as problem:
        raise LostPeerError(
            f"{name} cannot be reached",
            where=address,
            got=problem.strerror or type(problem).__name__,
            fix="see that it runs, and that this host may connect to it",
        ) from None
