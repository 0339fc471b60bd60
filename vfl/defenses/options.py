"""Checks of defense options that types alone do not make."""

from __future__ import annotations

import math

from vfl.errors import BadOptionError


def require_range(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse a number outside [least, most], NaN and infinity too.

    Raises:
        BadOptionError: with the range.
    """
    if least <= value <= most and value < math.inf:
        return
    want = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
    raise BadOptionError("out of range", where=f"option '{option}'", got=f"{value:g}", want=want)
