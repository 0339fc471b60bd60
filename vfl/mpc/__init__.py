"""Arithmetic on shares: ring elements, one-time pads, protocols over links they are handed.

Chapter 5 of the thesis of split learning (2025), corrected: two parties hold shares, a third deals
randomness and evaluates functions on permuted values. No sockets and no models live here; `private`
and ``secure = "permuted"`` are the doors of the users. docs/mpc.md says who learns what.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl.mpc.network import Layer, Network
    from vfl.mpc.party import Party
    from vfl.mpc.private_module import PrivateModule, private
    from vfl.mpc.rules import Rules
    from vfl.mpc.stream import PadStream
    from vfl.mpc.trio import Trio, make_party

__all__ = [
    "Layer",
    "Network",
    "PadStream",
    "Party",
    "PrivateModule",
    "Rules",
    "Trio",
    "make_party",
    "private",
]

_HOMES = {
    "Layer": "vfl.mpc.network",
    "Network": "vfl.mpc.network",
    "PadStream": "vfl.mpc.stream",
    "Party": "vfl.mpc.party",
    "PrivateModule": "vfl.mpc.private_module",
    "Rules": "vfl.mpc.rules",
    "Trio": "vfl.mpc.trio",
    "make_party": "vfl.mpc.trio",
    "private": "vfl.mpc.private_module",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for alone: a secure sum needs neither networks nor their parties."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vfl.mpc' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
