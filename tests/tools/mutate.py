"""Damage for frames and for messages of JSON; all of it seeded.

A frame has bits flipped, its end cut off, bytes added or its body replaced. A message has fields
of another type or size, removed, added or nested, so that damage reaches what is behind the parser.

Draws are made for a block of cases at once, so a case is the same wherever a run starts.
"""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import derive

BLOCK_CASES = 4096
MOST_FLIPS = 4
MOST_ADDED_BYTES = 64
REPAIRED_SHARE = 0.8  # of the cases: their length and checksum are right, so decoders see them
NOISE_BYTES = 2**16

_CRC_AT = HEADER_BYTES - 4  # the checksum covers what stands before it and the payload


class Damage(IntEnum):
    """What happens to a frame."""

    FLIP = 0  # 1 to 4 bits anywhere
    TRUNCATE = 1  # any number of bytes is left, none included
    EXTEND = 2  # 1 to 64 random bytes at the end
    REPLACE = 3  # a random payload of the same length


SHARES = {Damage.FLIP: 0.5, Damage.TRUNCATE: 0.2, Damage.EXTEND: 0.15, Damage.REPLACE: 0.15}


@dataclass(frozen=True, slots=True)
class _Draws:
    """The draws of one block; every array has one row a case."""

    target: np.ndarray
    damage: np.ndarray
    repaired: np.ndarray
    flips: np.ndarray
    indices: np.ndarray
    amount: np.ndarray
    noise_at: np.ndarray
    noise: bytes


def mutated_frames(
    frames: Sequence[bytes], seed: int, start: int, cases: int
) -> Iterator[tuple[int, int, bytearray]]:
    """Damaged copies of frames.

    Args:
        frames: whole frames, each with its header; at most 64 KiB long.
        seed: seed of every draw.
        start: number of the first case.
        cases: number of cases.

    Yields:
        The case's number, the position of its frame in `frames`, and the damaged bytes.
    """
    draws: _Draws | None = None
    for case in range(start, start + cases):
        block, place = divmod(case, BLOCK_CASES)
        if draws is None or place == 0:
            draws = _draw(seed, block, len(frames))
        target = int(draws.target[place])
        raw = _damaged(frames[target], draws, place)
        if draws.repaired[place]:
            repair(raw)
        yield case, target, raw


def repair(raw: bytearray) -> None:
    """Make a frame's length and checksum right again, where it has a header at all."""
    if len(raw) < HEADER_BYTES:
        return
    struct.pack_into("<I", raw, 0, len(raw) - HEADER_BYTES)
    crc = zlib.crc32(raw[HEADER_BYTES:], zlib.crc32(raw[:_CRC_AT]))
    struct.pack_into("<I", raw, _CRC_AT, crc)


def _draw(seed: int, block: int, targets: int) -> _Draws:
    rng = np.random.default_rng(derive(seed, "fuzz", block))
    return _Draws(
        target=rng.integers(targets, size=BLOCK_CASES),
        damage=rng.choice(list(SHARES), size=BLOCK_CASES, p=list(SHARES.values())),
        repaired=rng.random(BLOCK_CASES) < REPAIRED_SHARE,
        flips=rng.integers(1, MOST_FLIPS + 1, size=BLOCK_CASES),
        indices=rng.random((BLOCK_CASES, MOST_FLIPS)),
        amount=rng.random(BLOCK_CASES),
        noise_at=rng.integers(NOISE_BYTES, size=BLOCK_CASES),
        noise=rng.bytes(2 * NOISE_BYTES),
    )


def _damaged(frame: bytes, draws: _Draws, place: int) -> bytearray:
    raw = bytearray(frame)
    damage, amount = draws.damage[place], float(draws.amount[place])
    noise_at = int(draws.noise_at[place])
    if damage == Damage.FLIP:
        for share in draws.indices[place, : draws.flips[place]].tolist():
            bit = int(share * 8 * len(raw))
            raw[bit // 8] ^= 1 << bit % 8
    elif damage == Damage.TRUNCATE:
        del raw[int(amount * len(raw)) :]
    elif damage == Damage.EXTEND:
        added = 1 + int(amount * MOST_ADDED_BYTES)
        raw += draws.noise[noise_at : noise_at + added]
    else:
        size = len(raw) - HEADER_BYTES
        raw[HEADER_BYTES:] = draws.noise[noise_at : noise_at + size]
    return raw


_DEEP = 3000  # levels of nesting, more than any parser follows
_LONG = "x" * 70_000
#: What a field may suddenly be.
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 65_537, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64,
    10**400, -(10**400), 0.0, -0.0, 1e-308, 5e-324, 0.5, 1e308, -1e308, "", "0", "none", "\x00",
    "\x1b[2J", "\u202e", "\ud800", "a\nb", "../x", "x" * 513, _LONG, "9" * 5000, [], {}, [[]],
    [1, 2], {"": ""}, {"a": {"b": 1}},
)  # fmt: skip
#: What a number inside a text may suddenly be.
_NUMBERS = ("0", "-1", "1", "7", "1000", "65537", str(2**31), str(2**63), "9" * 400, "1e308", "nan")


def mutated_json(record: Mapping[str, Any], seed: int, case: int) -> str:
    """A damaged copy of a message, as text.

    Args:
        record: a message that would be accepted.
        seed: seed of every draw.
        case: number of the case; with the seed it repeats the damage.
    """
    draw = random.Random(derive(seed, "fuzz", "json", case))
    content = json.loads(json.dumps(record))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _damage_field(content, draw)
    text = json.dumps(content)
    kind = draw.random()
    if kind < 0.05:
        nested = draw.choice(("[", '{"a":')) * _DEEP
        return text[:-1] + f', "deep": {nested}'
    if kind < 0.1:
        return text.replace(":", ":" + "9" * draw.choice((400, 5000, 30_000)), 1)
    if kind < 0.2:
        place = draw.randrange(len(text))
        return text[:place] + chr(draw.randrange(0x250)) + text[place + draw.randrange(4) :]
    return text[: draw.randrange(len(text))] if kind < 0.25 else text


def _damage_field(content: dict[str, Any], draw: random.Random) -> None:
    """Change, remove, add or rename one field of a table or of a table in it."""
    table = content
    while tables := [one for one in table.values() if isinstance(one, dict) and one]:
        if draw.random() < 0.3:
            break
        table = draw.choice(tables)
    if not table:
        return
    key, way = draw.choice(sorted(table)), draw.random()
    if way < 0.1:
        del table[key]
    elif way < 0.15:
        table[draw.choice((key + "x", "more", "", "\x1b", "x" * 100))] = draw.choice(_ODD)
    elif way < 0.5 and isinstance(table[key], str):
        table[key] = _damaged_text(table[key], draw)
    else:
        table[key] = draw.choice(_ODD)


def _damaged_text(text: str, draw: random.Random) -> str:
    numbers = list(re.finditer(r"[0-9]+", text))
    if numbers and draw.random() < 0.7:
        found = draw.choice(numbers)
        return text[: found.start()] + draw.choice(_NUMBERS) + text[found.end() :]
    place = draw.randrange(len(text) + 1)
    return (
        text[:place] + draw.choice(("", "=", ",", ":", "+", "-9", "\t", "\x7f")) + text[place + 1 :]
    )
