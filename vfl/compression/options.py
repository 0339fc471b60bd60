"""Checks of codec options that a constructor called from Python would otherwise not get."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.errors import BadOptionError, nearest


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
