"""A network of TCP proxies on the loopback: needs no rights, and delays bytes but no packets."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.bench.network.base import LOOPBACK, Address, Network
from vfl.bench.network.egress import Egress
from vfl.bench.network.tcp_proxy import TcpProxy
from vfl.bench.network.wan import Wan


class ProxyNetwork(Network):
    """A proxy for each pair of parties and port, so that bytes are the sender's own.

    Connections open without delay and TCP's own ramp-up is that of the loopback. What is counted
    are the bytes of the connections, without headers of packets.
    """

    kind = "proxy"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        super().__init__(parties, wan)
        self._egress = {party: Egress(wan) for party in parties}
        self._proxies: dict[tuple[str, str, int], TcpProxy] = {}

    def reach(self, source: str, target: str, port: int) -> Address:
        key = (source, target, port)
        if key not in self._proxies:
            there, back = self._egress[source], self._egress[target]
            self._proxies[key] = TcpProxy(Address(LOOPBACK, port), self.wan, there, back)
        return Address(LOOPBACK, self._proxies[key].port)

    def bytes_sent(self) -> dict[str, int]:
        return {party: egress.sent_bytes for party, egress in self._egress.items()}

    def close(self) -> None:
        while self._proxies:
            self._proxies.popitem()[1].close()
