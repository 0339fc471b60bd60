"""Unix sockets in a user's own folder, by which the processes of a party find each other."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vfl.core.storage import PRIVATE_FILE, private_folder

_BACKLOG = 16


def listen_in(folder: Path, name: str, backlog: int = _BACKLOG) -> socket.socket:
    """Open a listening socket in a folder, in place of the socket file of an earlier process."""
    private_folder(folder)
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder, name) as address:
        Path(address).unlink(missing_ok=True)
        listener.bind(address)
        Path(address).chmod(PRIVATE_FILE)
    listener.listen(backlog)
    return listener


@contextmanager
def connected_to(folder: Path, name: str, timeout_s: float) -> Iterator[socket.socket | None]:
    """Yield a connection to a listener in a folder, or None if this user runs no listener there.

    Args:
        folder: folder of one user, which other users cannot enter.
        name: name of the socket file in the folder.
        timeout_s: time limit in seconds of the connection and of every later operation; with 0, no
            operation waits.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            with _address(folder, name) as address:
                connection.connect(address)
            ours = is_ours(connection)
        except OSError:
            ours = False
        yield connection if ours else None


def is_ours(connection: socket.socket) -> bool:
    """Return whether this user runs the peer; outside Linux, the folder's mode ensures this."""
    if sys.platform != "linux":
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


@contextmanager
def _address(folder: Path, name: str) -> Iterator[str]:
    """Yield a socket file's path; on Linux, a short path through the open folder."""
    if sys.platform != "linux":
        yield str(folder / name)
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        with suppress(OSError):
            os.close(opened)
