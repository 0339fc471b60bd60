"""Unix sockets in a user's own folder, through which a party's processes connect."""

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
    """Open a listening socket in a folder; it replaces the socket file of an earlier process."""
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
    """Yield a connection to a listening socket in a folder.

    Yield None if no process of this user listens there.

    Args:
        folder: folder that only its owner can enter.
        name: name of the socket file in the folder.
        timeout_s: time limit in seconds for the connection, and for every later operation; with 0,
            no operation waits.
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
    """Return whether the other process belongs to this user; only Linux can check this."""
    if sys.platform != "linux":
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


@contextmanager
def _address(folder: Path, name: str) -> Iterator[str]:
    """Yield the path of a socket file.

    On Linux, this is a short path through the open folder, because the length of such paths is
    limited.
    """
    if sys.platform != "linux":
        yield str(folder / name)
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        with suppress(OSError):
            os.close(opened)
