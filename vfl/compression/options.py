"""Options that several codecs share."""

from __future__ import annotations

from typing import Literal

from vfl.errors import BadOptionError

Scale = Literal["batch", "row"]


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
