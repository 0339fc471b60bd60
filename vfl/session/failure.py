"""What a party says of its own failure: everything in its own log, to others only what they may."""

from __future__ import annotations

from vfl.errors import (
    ConfigError,
    DataError,
    MisalignedError,
    PeerFailedError,
    RunFolderError,
    StorageError,
    VFLError,
)


def for_others(error: VFLError, party: str) -> VFLError:
    """What the others may know of an error here: of our own files only that they failed."""
    if isinstance(error, StorageError):
        return StorageError(f"party '{party}' cannot write its own files", got=error.got)
    if isinstance(error, MisalignedError):  # about several parties, and counts only
        return error
    if isinstance(error, DataError | RunFolderError | ConfigError):
        return type(error)(f"party '{party}' cannot use its own files; its own log says why")
    return error


def unexpected(bug: BaseException, party: str) -> VFLError:
    """An error nobody foresaw, without its text, which may quote a cell; or an order to end."""
    if not isinstance(bug, Exception):
        return PeerFailedError(f"party '{party}' was told to end")
    return PeerFailedError(
        f"party '{party}' failed unexpectedly",
        got=type(bug).__name__,
        fix="its own log has the traceback",
    )
