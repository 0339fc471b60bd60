"""Links between parties: in one process, or over TLS sockets that survive cuts.

The only room with sockets. A protocol never names one of these classes; it is handed a `Link`.
"""

from vfl.transport.admission import Credential, OnAttach
from vfl.transport.base import WINDOW_FRAMES, LinkLimits, Timeouts, TransportLink
from vfl.transport.certificates import (
    ServerCertificate,
    TrialFiles,
    check_not_expired,
    public_key_bytes,
    session_certificate,
    write_trial_certificates,
)
from vfl.transport.client import TcpLink
from vfl.transport.hub import TcpHub
from vfl.transport.hub_link import HubLink
from vfl.transport.knocks import KnockLimits
from vfl.transport.local import LocalLink, local_pair
from vfl.transport.messages import Hello, Welcome
from vfl.transport.observed import Observed
from vfl.transport.probe import check_server
from vfl.transport.renewal import (
    expiry_warning,
    renew_node_key,
    renew_server,
    replace_authority,
)
from vfl.transport.sockets import round_trip_s

__all__ = [
    "WINDOW_FRAMES",
    "Credential",
    "Hello",
    "HubLink",
    "KnockLimits",
    "LinkLimits",
    "LocalLink",
    "Observed",
    "OnAttach",
    "ServerCertificate",
    "TcpHub",
    "TcpLink",
    "Timeouts",
    "TransportLink",
    "TrialFiles",
    "Welcome",
    "check_not_expired",
    "check_server",
    "expiry_warning",
    "local_pair",
    "public_key_bytes",
    "renew_node_key",
    "renew_server",
    "replace_authority",
    "round_trip_s",
    "session_certificate",
    "write_trial_certificates",
]
