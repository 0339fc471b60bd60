"""What the tests of `tests/promises` raise; each repeats an attack that once succeeded."""

from __future__ import annotations


class BrokenPromiseError(AssertionError):
    """An attack succeeded. The message says what the attacker learned or did, in figures."""
