"""Networks between organisations, emulated on one machine.

Three members: `tun` delays packets (root, /dev/net/tun), `proxy` delays bytes of TCP connections
(anywhere), and `model` computes a line's times exactly; docs/results/wan.md compares all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.emulation.base import LOOPBACK, Address, LinkModel, Network, Wan
from benchmarks.emulation.proxy import ProxyNetwork, TcpProxy
from benchmarks.emulation.tun import TunNetwork, why_not
from vfl.core.registry import require_choice

KINDS = ("auto", "tun", "proxy", "model")

__all__ = [
    "KINDS",
    "LOOPBACK",
    "Address",
    "LinkModel",
    "Network",
    "ProxyNetwork",
    "TcpProxy",
    "TunNetwork",
    "Wan",
    "available",
    "choose",
    "open_network",
    "why_not",
]


def choose(kind: str) -> str:
    """Return the member for a name on this machine; `auto` means `tun` if it works, else `proxy`.

    Raises:
        BadOptionError: the member is unknown.
    """
    require_choice("network", kind, KINDS)
    if kind == "auto":
        return "proxy" if why_not() else "tun"
    return kind


def available(say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Return the members available here; report why others are not."""
    reason = why_not()
    if reason:
        say(f"no tun here: {reason}")
    return ["proxy", "model"] if reason else ["tun", "proxy", "model"]


def open_network(parties: Sequence[str], wan: Wan | None, kind: str = "auto") -> Network:
    """Open a network for processes; end it with `close` or a `with` block.

    >>> with open_network(["bank", "lender"], Wan.parse("80mbps,40ms"), "proxy") as network:
    ...     network.kind, network.bytes_sent()
    ('proxy', {'bank': 0, 'lender': 0})

    Args:
        parties: names of its parties.
        wan: every party's line; None is the plain loopback.
        kind: "auto", "tun" or "proxy"; a computed network has no processes (`LinkModel`).

    Raises:
        BadOptionError: the network is unknown.
        UserError: `tun` is not available here.
    """
    if wan is None:
        return Network(parties)
    require_choice("network", kind, KINDS[:-1])
    return (TunNetwork if choose(kind) == "tun" else ProxyNetwork)(parties, wan)
