"""Ports of this machine that nobody listens on."""

import socket
from contextlib import ExitStack


def free_ports(count):
    with ExitStack() as held:
        found = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
    return found
