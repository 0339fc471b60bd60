"""Networks between organisations, emulated on one machine.

There are three emulations. `tun` delays packets (it needs root and /dev/net/tun), and `proxy`
delays the bytes of TCP connections and runs anywhere. `model` computes the exact times of a network
link without any delay. docs/results/wan.md compares the three.
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
    """Return the emulation for a name; `auto` means `tun` if it works here, and otherwise `proxy`.

    Raises:
        BadOptionError: no emulation has this name.
    """
    require_choice("network", kind, KINDS)
    if kind == "auto":
        return "proxy" if why_not() else "tun"
    return kind


def available(say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Return the emulations that work here; report for each other emulation why it fails."""
    reason = why_not()
    if reason:
        say(f"no tun here: {reason}")
    return ["proxy", "model"] if reason else ["tun", "proxy", "model"]


def open_network(parties: Sequence[str], wan: Wan | None, kind: str = "auto") -> Network:
    """Open an emulated network for processes; end it with `close` or a `with` block.

    >>> with open_network(["bank", "lender"], Wan.parse("80mbps,40ms"), "proxy") as network:
    ...     network.kind, network.bytes_sent()
    ('proxy', {'bank': 0, 'lender': 0})

    Args:
        parties: names of the network's parties.
        wan: network link of every party; None is the plain loopback interface.
        kind: "tun" delays packets, "proxy" delays the bytes of TCP connections, and "auto" takes
            `tun` if it works here; a computed network (`LinkModel`) cannot be opened for processes.

    Raises:
        BadOptionError: no emulation has this name.
        UserError: `tun` is not available on this machine.
    """
    if wan is None:
        return Network(parties)
    require_choice("network", kind, KINDS[:-1])
    return (TunNetwork if choose(kind) == "tun" else ProxyNetwork)(parties, wan)
