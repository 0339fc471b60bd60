"""Arithmetic on shares: ring elements, one-time pads, protocols over links they are handed.

The protocols stand on one engine of shares (`engine`). Chapter 5 of the thesis of split learning
(2025), corrected: two parties hold shares, a third deals randomness and evaluates functions on
permuted values. Chapter 6, where a third deals ahead only, is `vfl.llm`'s. No sockets live here and
no models. Users call `private`, or set a secure mode of `vfl.mpc.secure` in an experiment.
docs/mpc.md says who learns what.
"""

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
