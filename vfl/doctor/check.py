"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and how it stands.

    Attributes:
        name: what was looked at, in one or two words.
        state: OK; WARN, it may hurt later; FAIL, it will not work.
        found: what was found; names, counts and paths only.
        fix: what to do about it.
    """

    name: str
    state: State
    found: str
    fix: str = ""
