"""What could keep a party from working: looked at, never changed; ``vfl doctor`` prints it."""

from __future__ import annotations

from vfl.doctor.check import Check, State
from vfl.doctor.examine import examine

__all__ = ["Check", "State", "examine"]
