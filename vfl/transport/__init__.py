"""Links between parties: within one process, or over TLS connections that reconnect.

Only this package opens the streams between parties. The code of a protocol names no class of this
package; it receives an object with the interface `Link`.
"""

from vfl.transport.certificates import (
    ServerCertificate,
    check_not_expired,
    expiry_warning,
    fingerprint,
    node_key_pair,
    public_half,
    public_key_bytes,
    public_key_lines,
    renew_node_key,
    renew_server,
    renew_when_due,
    replace_authority,
    session_certificate,
    write_trial_certificates,
)
from vfl.transport.front import Front, FrontLimits, RateLimiter
from vfl.transport.handshake import Hello, Welcome
from vfl.transport.hub import Admission, Credential, OnAttach, TcpHub
from vfl.transport.link import (
    WINDOW_FRAMES,
    LinkLimits,
    LocalLink,
    Observed,
    ObservedPoll,
    PolledLink,
    Timeouts,
    TransportLink,
    local_pair,
)
from vfl.transport.probe import check_server, round_trip_s
from vfl.transport.reliable import HubLink, TcpLink, receive_any, wait_briefly
from vfl.transport.router import StreamRouter, route_of, routed_listener

__all__ = [
    "WINDOW_FRAMES",
    "Admission",
    "Credential",
    "Front",
    "FrontLimits",
    "Hello",
    "HubLink",
    "LinkLimits",
    "LocalLink",
    "Observed",
    "ObservedPoll",
    "OnAttach",
    "PolledLink",
    "RateLimiter",
    "ServerCertificate",
    "StreamRouter",
    "TcpHub",
    "TcpLink",
    "Timeouts",
    "TransportLink",
    "Welcome",
    "check_not_expired",
    "check_server",
    "expiry_warning",
    "fingerprint",
    "local_pair",
    "node_key_pair",
    "public_half",
    "public_key_bytes",
    "public_key_lines",
    "receive_any",
    "renew_node_key",
    "renew_server",
    "renew_when_due",
    "replace_authority",
    "round_trip_s",
    "route_of",
    "routed_listener",
    "session_certificate",
    "wait_briefly",
    "write_trial_certificates",
]
