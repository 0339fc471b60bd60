"""Checks of codec options that a constructor called from Python would otherwise not get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vfl.errors import BadOptionError, nearest

Scale = Literal["batch", "row"]


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


def require_packable(packer: str, values: str) -> None:
    """Refuse values that an adaptive packer has no counts for.

    Raises:
        BadOptionError: the range packer with values of 16 or 32 bits.
    """
    if packer == "range" and values in ("fp32", "bf16"):
        raise BadOptionError(
            "the range packer counts how often each code occurs",
            where="option 'values'",
            got=values,
            want="1 to 8 bits",
            fix="values=8",
        )
