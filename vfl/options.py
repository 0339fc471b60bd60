"""Checks of a plug-in's options that a constructor called from Python would otherwise not get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vfl.errors import BadOptionError, nearest

#: A week: no wait is meant to be longer, and a socket refuses numbers that are far larger.
_MOST_SECONDS = 7 * 24 * 3600.0


def require(option: str, given: object, want: str, holds: bool) -> None:
    """Refuse an option's value unless `holds`; for what the two below do not say.

    Raises:
        BadOptionError: with what would be accepted.
    """
    if not holds:
        raise BadOptionError("out of range", where=f"option '{option}'", got=str(given), want=want)


def require_choice(option: str, given: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of the choices.

    Raises:
        BadOptionError: with the choices and the nearest of them.
    """
    if given not in choices:
        raise BadOptionError(
            "no such choice",
            where=f"option '{option}'",
            got=str(given),
            want=", ".join(choices),
            fix=nearest(str(given), choices),
        )


def require_range(option: str, given: float, least: float, most: float = math.inf) -> None:
    """Refuse a number outside [least, most], NaN and infinity too.

    Raises:
        BadOptionError: with the range.
    """
    want = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
    require(option, f"{given:g}", want, least <= given <= most and given < math.inf)


def require_seconds(option: str, given: float) -> None:
    """Refuse a wait that is none, or longer than a week; NaN and infinity too.

    Raises:
        BadOptionError: with the range.
    """
    require_range(option, given, 0.001, _MOST_SECONDS)
