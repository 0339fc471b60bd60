"""No defense."""

from __future__ import annotations

from vfl.defenses.base import Defense


class Undefended(Defense):
    """Every hook does nothing; the baseline each defense is compared with."""
