"""Contract tests for plug-in authors: subclass one, name your members, run pytest.

>>> from vfl.testing import CodecContract
>>> class TestMine(CodecContract):
...     specs = ["topk:k=3"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl.testing.adversary import AdversaryContract
    from vfl.testing.attack import AttackContract, GradientAttackContract, InputAttackContract
    from vfl.testing.codec import CodecContract
    from vfl.testing.defense import DefenseContract
    from vfl.testing.link import LinkContract

_HOMES = {
    "AdversaryContract": "vfl.testing.adversary",
    "AttackContract": "vfl.testing.attack",
    "CodecContract": "vfl.testing.codec",
    "DefenseContract": "vfl.testing.defense",
    "GradientAttackContract": "vfl.testing.attack",
    "InputAttackContract": "vfl.testing.attack",
    "LinkContract": "vfl.testing.link",
}

__all__ = [
    "AdversaryContract",
    "AttackContract",
    "CodecContract",
    "DefenseContract",
    "GradientAttackContract",
    "InputAttackContract",
    "LinkContract",
]


def __getattr__(name: str) -> Any:
    """Import a contract, and what it needs, when it is first named."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vfl.testing' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
