"""Without TLS a stream stays on its own machine."""

import pytest

from vfl.errors import UserError
from vfl.transport import Hello, TcpHub, TcpLink
from vfl.transport.sockets import require_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host):
    require_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "lender.example", "", "localhost.x"]
)
def test_elsewhere_nothing_opens_without_tls(host):
    with pytest.raises(UserError, match="without TLS"):
        TcpHub(host, 0, "session", {})
    with pytest.raises(UserError, match="without TLS"):
        TcpLink.connect(host, 9, Hello("session", "7", "t" * 43))
