"""Networks between organisations, emulated on one machine.

Three members: `tun` delays packets (root, /dev/net/tun), `proxy` delays bytes of TCP connections
(anywhere), and `model` computes what a line would take, exactly; docs/results/wan.md has all three.
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
    """The member that a name means here: `auto` is `tun` where that works, else `proxy`.

    Raises:
        BadOptionError: no such member.
    """
    require_choice("network", kind, KINDS)
    if kind == "auto":
        return "proxy" if why_not() else "tun"
    return kind


def available(say: Callable[[str], None] = lambda line: None) -> list[str]:
    """The members that can be had here; why one cannot is said."""
    reason = why_not()
    if reason:
        say(f"no tun here: {reason}")
    return ["proxy", "model"] if reason else ["tun", "proxy", "model"]


def open_network(parties: Sequence[str], wan: Wan | None, kind: str = "auto") -> Network:
    """A network for processes; end it with `close` or a `with` block.

    >>> with open_network(["bank", "lender"], Wan.parse("80mbps,40ms"), "proxy") as network:
    ...     network.kind, network.bytes_sent()
    ('proxy', {'bank': 0, 'lender': 0})

    Args:
        parties: who is in it.
        wan: what every party's line does; None is the loopback as it is.
        kind: "auto", "tun" or "proxy"; what is computed has no processes (`LinkModel`).

    Raises:
        BadOptionError: no such network.
        UserError: `tun` cannot be had here.
    """
    if wan is None:
        return Network(parties)
    require_choice("network", kind, KINDS[:-1])
    return (TunNetwork if choose(kind) == "tun" else ProxyNetwork)(parties, wan)
