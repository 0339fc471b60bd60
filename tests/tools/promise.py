"""What the tests of `tests/promises` raise; each repeats an attack that once succeeded."""

from __future__ import annotations

import re
from contextlib import contextmanager

from vfl.core.errors import VFLError


class BrokenPromiseError(AssertionError):
    """An attack succeeded. The message says what the attacker learned or did, in figures."""


@contextmanager
def refused(learned, match=""):
    """The attack inside ends with an error of vfl that says `match`; else `learned` is raised."""
    try:
        yield
    except VFLError as refusal:
        if not re.search(match, str(refusal)):
            raise
    else:
        raise BrokenPromiseError(learned)
