"""Tags of ids, processed in blocks, so that a set of tags may be larger than memory.

A tag has 16 bytes that look random. So the first bits of the tags divide all sets into buckets of
about equal size, which are compared in memory one after another.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import numpy as np

from vfl.core.errors import ProtocolError
from vfl.core.frame import Payload
from vfl.datasets.on_disk import Buckets, DiskBytes, DiskColumn, OnDisk, bucket_count

TAG_BYTES = KEY_BYTES = 16
#: Number of tags or points in a block.
BLOCK_TAGS = 1 << 15
_RECORD = np.dtype([("row", "<i8"), ("tag", "u1", TAG_BYTES)])
_UNEVEN = 4096


def tags_of(ids: Sequence[bytes], key: bytes) -> np.ndarray:
    """Return the keyed BLAKE2b hash of each id, 16 bytes, as uint8 of axes (ids, 16)."""
    blake, size = hashlib.blake2b, TAG_BYTES
    return as_tags(b"".join([blake(each, digest_size=size, key=key).digest() for each in ids]))


def as_tags(payload: Payload) -> np.ndarray:
    """Return concatenated tags as uint8 of axes (tags, 16)."""
    return np.frombuffer(payload, np.uint8).reshape(-1, TAG_BYTES)


def tag_blocks(payload: bytes | DiskBytes, skip: int = 0) -> Iterator[np.ndarray]:
    """Yield the tags of a message in blocks; the tags begin after the first `skip` bytes."""
    size = BLOCK_TAGS * TAG_BYTES
    for start in range(skip, len(payload), size):
        yield as_tags(payload[start : start + size])


def common_rows(
    sets: Sequence[Iterable[np.ndarray]], sizes: Sequence[int], place: OnDisk
) -> list[DiskColumn]:
    """Return the rows of each set whose tags all sets have, in ascending order of tags; int64.

    Args:
        sets: for each set, blocks of tags without repetition, uint8, axes (tags, 16). Two tags are
            equal only if all 16 bytes are equal.
        sizes: number of tags in each set.
        place: place on disk for the intermediate files of the comparison.

    Raises:
        ProtocolError: a set contains a tag twice, or far more tags with the same first bits than
            random tags would.
    """
    count = bucket_count(place, sum(sizes) * _RECORD.itemsize)
    buckets = [_by_first_bits(tags, place, count) for tags in sets]
    for own, size in zip(buckets, sizes, strict=True):
        if own.sizes.max() > _most_by_chance(size, count):  # such a bucket could fill the memory
            raise ProtocolError("a set has far more tags with one prefix than chance gives")
    found = [DiskColumn(place, np.int64) for _ in sets]
    for number in range(count):
        if not all(own.sizes[number] for own in buckets):
            continue
        parts = [own.whole(number) for own in buckets]
        rows = _common_rows([part["tag"] for part in parts])
        for column, part, common in zip(found, parts, rows, strict=True):
            column.write(part["row"][common])
    for own in buckets:
        own.close()
    return found


def sorted_tags(
    tags: Iterable[np.ndarray], size: int, place: OnDisk
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tags in ascending order, with the row of each tag, in blocks; see `common_rows`."""
    buckets = _by_first_bits(tags, place, bucket_count(place, size * _RECORD.itemsize))
    for number in range(buckets.count):
        part = buckets.whole(number)
        order = _order(*_halves(part["tag"]))
        yield part["tag"][order], part["row"][order]
    buckets.close()


def count_repeated(blocks: Iterable[Sequence[bytes]], size: int, place: OnDisk) -> int:
    """Count the ids, given in blocks, that are equal to an earlier id.

    Two ids count as equal if their tags under a fresh random key are equal. Different ids have
    equal tags with probability 2^-128.
    """
    key, repeated = secrets.token_bytes(KEY_BYTES), 0
    count = bucket_count(place, size * _RECORD.itemsize)
    buckets = _by_first_bits((tags_of(each, key) for each in blocks), place, count)
    for number in range(count):
        # If half of the rows have the same id, its bucket may not fit into memory; so only distinct
        # tags are kept.
        uneven = buckets.sizes[number] > _most_by_chance(size, count)
        pieces = buckets.read(number) if uneven else [buckets.whole(number)]
        distinct = reduce(_distinct, (each["tag"] for each in pieces), as_tags(b""))
        repeated += int(buckets.sizes[number]) - len(distinct)
    buckets.close()
    return repeated


def _distinct(tags: np.ndarray, more: np.ndarray) -> np.ndarray:
    tags = np.concatenate([tags, more])
    high, low = _halves(tags)
    order = _order(high, low)
    high, low = high[order], low[order]
    first = np.ones(len(tags), dtype=bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    distinct: np.ndarray = tags[order[first]]
    return distinct


def ascend(blocks: Iterable[np.ndarray]) -> bool:
    """Return whether tags, given in blocks, are strictly ascending."""
    before = np.empty((0, TAG_BYTES), np.uint8)
    for tags in blocks:
        high, low = _halves(np.concatenate([before, tags]))
        rises = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
        if not rises.all():
            return False
        before = tags[-1:]
    return True


def _by_first_bits(tags: Iterable[np.ndarray], place: OnDisk, count: int) -> Buckets:
    """Sort tags and their rows into buckets by their first bits; there are 2^k buckets."""
    buckets, start = Buckets(place, _RECORD, count), 0
    for block in tags:
        records = np.empty(len(block), _RECORD)
        records["row"], records["tag"] = np.arange(start, start + len(block)), block
        first = np.ascontiguousarray(block[:, :4]).view(">u4")[:, 0].astype(np.int64)
        buckets.add(first * count >> 32, records)
        start += len(block)
    return buckets


def _most_by_chance(size: int, count: int) -> int:
    """Return an upper limit of a bucket's size for tags that look random."""
    return 2 * size // count + _UNEVEN


def _common_rows(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    halves = [_halves(tags) for tags in sets]
    orders = [_order(high, low) for high, low in halves]
    ordered = [(high[o], low[o]) for (high, low), o in zip(halves, orders, strict=True)]
    if any((high[1:] == high[:-1]).any() for high, _ in ordered):
        return _common_by_bytes(sets)
    high, _ = reduce(_both, ordered)
    return [
        order[np.searchsorted(own, high)] if len(high) else np.empty(0, dtype=np.int64)
        for order, (own, _) in zip(orders, ordered, strict=True)
    ]


def _both(
    left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tags common to two sets, ascending, each tag as two numbers of 8 bytes."""
    (high, low), (theirs, more) = left, right
    if not len(theirs):
        return theirs, more
    found = np.minimum(np.searchsorted(theirs, high), len(theirs) - 1)
    same = (theirs[found] == high) & (more[found] == low)
    return high[same], low[same]


def _common_by_bytes(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the common rows if two tags of a set share 8 bytes (3 in 10^8 sets of 10^6 tags)."""
    rows = [{bytes(tag): row for row, tag in enumerate(tags)} for tags in sets]
    if any(len(own) < len(tags) for own, tags in zip(rows, sets, strict=True)):
        raise ProtocolError("a set has one of its ids twice")
    common = sorted(set(rows[0]).intersection(*rows[1:]))
    return [np.array([own[tag] for tag in common], dtype=np.int64) for own in rows]


def _halves(tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last 8 bytes of each tag as numbers, which sort like the bytes."""
    words = np.ascontiguousarray(tags).view(">u8").astype(np.uint64)
    return words[:, 0], words[:, 1]


def _order(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the indices that sort tags by their bytes."""
    order = np.argsort(high, kind="stable")
    ordered = high[order]
    return np.lexsort((low, high)) if (ordered[1:] == ordered[:-1]).any() else order
