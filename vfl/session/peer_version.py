"""Which vfl a peer runs: a message of another form most often comes from another version."""

from __future__ import annotations

from typing import Any

from vfl.errors import DisagreementError
from vfl.version import VERSION


def check_version(said: Any, peer: str) -> None:
    """Refuse a peer that says it runs another version.

    Args:
        said: what stands where its version belongs; anything but a short text says nothing.
        peer: who it is, for the message.

    Raises:
        DisagreementError: with both versions.
    """
    if isinstance(said, str) and len(said) <= 32 and said.isprintable() and said != VERSION:
        raise DisagreementError(
            f"{peer} runs another version of vfl",
            where="handshake",
            got=f"vfl {said} there",
            want=f"vfl {VERSION}, as here",
            fix=f"install one version at every party: pip install vfl=={VERSION}",
        )
