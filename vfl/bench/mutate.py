"""Damage for frames: bits flipped, ends cut off, bytes added, bodies replaced; all of it seeded.

Draws are made for a block of cases at once, so a case is the same wherever a run starts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from vfl.frame import HEADER_BYTES
from vfl.seeds import derive

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
    places: np.ndarray
    amount: np.ndarray
    noise_at: np.ndarray
    noise: bytes


def mutated_frames(
    frames: Sequence[bytes], seed: int, start: int, cases: int
) -> Iterator[tuple[int, int, bytearray]]:
    """Damaged copies of frames.

    Args:
        frames: whole frames, each with its header; at most 64 KiB long.
        seed: of every draw.
        start: number of the first case.
        cases: how many cases.

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
        places=rng.random((BLOCK_CASES, MOST_FLIPS)),
        amount=rng.random(BLOCK_CASES),
        noise_at=rng.integers(NOISE_BYTES, size=BLOCK_CASES),
        noise=rng.bytes(2 * NOISE_BYTES),
    )


def _damaged(frame: bytes, draws: _Draws, place: int) -> bytearray:
    raw = bytearray(frame)
    damage, amount = draws.damage[place], float(draws.amount[place])
    noise_at = int(draws.noise_at[place])
    if damage == Damage.FLIP:
        for share in draws.places[place, : draws.flips[place]].tolist():
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
