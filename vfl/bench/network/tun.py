"""A network of namespaces and a router in user space: packets are delayed, as on a real line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from vfl.bench.network.base import Network
from vfl.bench.network.namespace import Namespace
from vfl.bench.network.router import Router
from vfl.bench.network.wan import Wan

_ADDRESS = "10.77.0.{}"


class TunNetwork(Network):
    """A network namespace for each party, with an address of its own, and a router between them.

    TCP's ramp-up, windows, headers and acknowledgements are those of a real line. A process of a
    party is started with `command` in front and listens at `host`. What is counted are the bytes
    of packets at the party's interface. The router is a thread here: leave this process idle
    while something is measured.

    Raises:
        UserError: no rights, or a system that cannot.
    """

    kind = "tun"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        super().__init__(parties, wan)
        self._addresses = {
            party: _ADDRESS.format(number) for number, party in enumerate(parties, start=1)
        }
        self._sites: dict[str, Namespace] = {}
        with ExitStack() as made:
            for party, address in self._addresses.items():
                self._sites[party] = made.enter_context(closing(Namespace(address)))
            router = Router([site.device for site in self._sites.values()], wan)
            made.enter_context(closing(router))  # ends first: it uses the devices
            self._made = made.pop_all()

    def command(self, party: str) -> list[str]:
        return self._sites[party].command()

    def host(self, party: str) -> str:
        return self._addresses[party]

    def bytes_sent(self) -> dict[str, int]:
        return {party: site.bytes_sent() for party, site in self._sites.items()}

    def close(self) -> None:
        self._made.close()
