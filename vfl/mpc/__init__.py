"""Arithmetic on secret shares: ring elements, one-time pads, and protocols over the caller's links.

The package vfl.mpc opens no network socket: callers pass links. Users call `private`, or set a
secure mode in an experiment file. docs/mpc.md states what each party learns.

    engine, numbers, shares  one engine of shares: opening, product, truncation, of a number system
    ring, stream, channel    reals as ring elements; one-time pads; messages and their accounts
    rules, permuted          what parties agree on; functions on permuted values
    in_process               parties as threads of one process
    three_party/             two holders and a third party that also evaluates functions
    many/                    2 to 8 holders; shares with MACs
    secure_dpsgd             DP-SGD on shares, a program of `many`
    secure/                  secure modes of a session: sum, beaver, permuted, pea

`vfl.llm` contains the protocol of chapter 6 of the split-learning thesis, in which the third party
only deals random numbers in advance.
"""

from vfl.mpc.rules import Rules
from vfl.mpc.stream import PadStream
from vfl.mpc.three_party.network import Layer, Network
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.private_module import PrivateModule, private
from vfl.mpc.three_party.trio import Trio, make_party

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
