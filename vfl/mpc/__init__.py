"""Arithmetic on shares: ring numbers, one-time pads, protocols over links they are handed.

No sockets and no models live here. `vfl.mpc.private` and `vfl mpc` are the doors of the users.
"""

from vfl.mpc.stream import PadStream

__all__ = ["PadStream"]
