"""Who sends how much to whom, and when: shapes of traffic that a network can be tried with."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from vfl.bench.network import LinkModel, Wan

PARTIES = ("P0", "P1", "P2")


class Send(NamedTuple):
    """One message."""

    source: str
    target: str
    size: int


#: Rounds: a party begins one when it has everything that the round before had for it.
Pattern = tuple[tuple[Send, ...], ...]

_P0, _P1, _P2 = PARTIES
#: A cut of 128 rows and width 500 in float32.
_CUT = 4 * 128 * 500
PATTERNS: dict[str, Pattern] = {
    "there and back, 1 byte": ((Send(_P0, _P1, 1),), (Send(_P1, _P0, 1),)),
    "one way, 256 kB": ((Send(_P0, _P2, _CUT),),),
    "both ways at once, 256 kB": ((Send(_P0, _P1, _CUT), Send(_P1, _P0, _CUT)),),
    "two to one, 256 kB each": ((Send(_P0, _P2, _CUT), Send(_P1, _P2, _CUT)),),
    "one to two, 256 kB each": ((Send(_P2, _P0, _CUT), Send(_P2, _P1, _CUT)),),
    "three hops, 64 kB each": (
        (Send(_P0, _P1, _CUT // 4),),
        (Send(_P1, _P2, _CUT // 4),),
        (Send(_P2, _P0, _CUT // 4),),
    ),
    "one way, 8 MB": ((Send(_P0, _P1, 8_000_000),),),
}


def most_bytes(pattern: Pattern) -> int:
    """What the party sends that sends most."""
    sent = Counter[str]()
    for each in (send for step in pattern for send in step):
        sent[each.source] += each.size
    return max(sent.values())


def modelled_s(pattern: Pattern, wan: Wan) -> float:
    """Seconds the pattern takes on the parties' own clocks."""
    model = LinkModel(PARTIES, wan)
    for step in pattern:
        sent = [(send.target, model.send(send.source, send.size)) for send in step]
        for target, arriving in sent:
            model.receive(target, arriving)
    return model.seconds
