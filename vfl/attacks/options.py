"""Checks of attack options that types alone do not make."""

from __future__ import annotations

import math

from vfl.errors import BadOptionError


def require_range(option: str, given: float, least: float, most: float = math.inf) -> None:
    """Refuse a number outside [least, most], and what is no number.

    Raises:
        BadOptionError: with the range.
    """
    if not least <= given <= most or math.isinf(given):
        want = f"at least {least:g}" + ("" if math.isinf(most) else f" and at most {most:g}")
        raise BadOptionError("out of range", where=f"option '{option}'", got=f"{given}", want=want)
