"""Intersection of two parties' rows; no party learns which rows, or how many, are common.

The protocol is circuit-based private set intersection (Pinkas et al. 2019) with a third party as
helper. P0 and P1 have ids, and P2 has no ids. P0 puts each id into one of many bins, by cuckoo
hashing with three hash functions. P1 draws a target value for each bin, and builds a table that
maps each of its ids to the targets of all bins in which the id may be. P2 receives the table and
answers P0's queries, so that P0 gets only one query per bin. P0 then has one value per bin, and P1
has one target per bin; the id in P0's bin is common to both if value and target are equal. 63 AND
gates on shared bits test for equality, with bit triples that P2 deals (Goldreich et al. 1987;
Beaver 1991).

The results are shares of a weight for each bin (1 if P0's id in the bin is common, else 0), and
shares of P1's columns of that id's row. The function `moments` uses these results.

Disclosure by `intersect`: each party learns only the padded size of the sets. P0 receives uniformly
distributed values for common ids and for all other ids: each target is used once, and all other
answers are masked with a key that P0 lacks. P2 receives keyed hashes, and a table that is uniformly
distributed under masks of a key that P2 lacks. With probability 2^-64 per bin, an id is taken for
common although it is not. A party that colludes with P2 can test whether the other party has
certain ids, as in `vfl.datasets.alignment.protocols`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import BadOptionError, ConsentError
from vfl.datasets.table import spaced
from vfl.mpc.ring import ELEMENT_BYTES, inner
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import SharedTensor
from vfl.mpc.three_party.party import Party, shape_only

#: Fraction bits of P1's columns; with this number, sums of products over 2^28 standardised rows fit
#: into the ring.
BITS = 16
_FUNCTIONS = 3
_TAG_WORDS = 2
_KEY_BYTES = 32
_LEAST_BINS, _LEAST_SEGMENT = 128, 32
_MOST_MOVES, _DRAWS = 500, 64
_DIGEST_WORDS = 8
_WORD = np.dtype("<u8")


@dataclass(frozen=True)
class HiddenRows:
    """One party's part of the result of a secret intersection, with one row per bin.

    Attributes:
        rows: at P0, the index of P0's row in each bin, or -1 for an empty bin; None at other
            parties.
        weight: shared integers, axes (bins, 1): 1 if the row in the bin is common, else 0.
        columns: shared columns of P1, axes (bins, columns): P1's values of a common row, random
            values otherwise.
    """

    rows: np.ndarray | None = field(repr=False)
    weight: SharedTensor
    columns: SharedTensor


def bins_for(pad: int) -> int:
    """Return the number of bins of cuckoo hashing for two sets of `pad` ids.

    >>> bins_for(1000)
    1398
    """
    return -(-127 * pad // 100) + _LEAST_BINS


def intersect(
    party: Party,
    pad: int,
    columns: int = 0,
    ids: Sequence[bytes] | None = None,
    values: Tensor | None = None,
) -> HiddenRows:
    """Return shares of two results: which of P0's rows are common, and P1's columns in these rows.

    Args:
        party: this party, which has agreed on keys with the others. Only the two parties of a link
            may be able to read it: P0 must not read P1's messages to P2, and P2 must not read the
            messages between P0 and P1.
        pad: number of ids to which both sets are padded, so that their sizes stay secret.
        columns: number of P1's columns that are shared.
        ids: normalised ids of P0's or P1's rows, without repetition; None at P2.
        values: P1's standardised columns, axes (ids, columns), at P1; None elsewhere.

    Raises:
        BadOptionError: a party has more ids than `pad`, cuckoo hashing finds no arrangement, or P1
            can build no table.
    """
    if ids is not None and len(ids) > pad:
        raise BadOptionError(
            "a party has more ids than the padded size",
            got=spaced(pad),
            want="a pad of at least the largest number of ids",
        )
    number, width, bins = party.next_number(), 1 + columns, bins_for(pad)
    rows: np.ndarray | None = None
    if party.role == P0:
        assert ids is not None, "P0 has ids"
        rows, found = _ask(party, number, ids, bins, width)
    elif party.role == P1:
        assert ids is not None, "P1 has ids"
        found = _program(party, number, ids, pad, bins, values)
    else:
        _look_up(party, number, pad, bins, width)
        found = np.zeros((bins, width), _WORD)
    equal = _all_ones(party, ~found[:, 0] if party.role == P0 else found[:, 0])
    weight = _whole(party, np.unpackbits(equal, count=bins))
    if party.role == P2:
        return HiddenRows(None, weight, shape_only((bins, columns), BITS))
    share = torch.from_numpy(found[:, 1:].astype(np.int64))
    return HiddenRows(rows, weight, SharedTensor(share, BITS))


def moments(
    party: Party, hidden: HiddenRows, own: Tensor | None, columns: int, min_common: int = 1
) -> Tensor | None:
    """Return sums over the common rows.

    The sums are those of the products of any two columns, the constant 1 being the first column. P1
    learns the number of common rows, and accepts or refuses it; if P1 accepts, P0 learns the sums.

    Args:
        party: the party that returned `hidden`.
        hidden: see `intersect`.
        own: P0's standardised columns, axes (rows, columns), at P0; None elsewhere.
        columns: number of P0's columns.
        min_common: smallest number of common rows that P1 accepts.

    Returns:
        At P0, float64 of axes (1 + all columns, 1 + all columns), in the order: the constant 1,
        P0's columns, P1's columns. The first element is thus the number of common rows. None
        elsewhere.

    Raises:
        ConsentError: at P1, there are too few common rows; the error states no number, because
            other parties receive it.
    """
    where, bins = "rows that two parties share", hidden.weight.shape[0]
    placed = None
    if own is not None:
        assert hidden.rows is not None, "only P0 knows the content of its bins"
        taken = torch.from_numpy(hidden.rows >= 0)
        placed = torch.zeros(bins, 1 + columns, dtype=torch.float64)
        placed[taken, 0] = 1.0
        placed[taken, 1:] = own.double()[torch.from_numpy(hidden.rows)[taken]]
    count = party.reveal(hidden.weight.row_sum(), "how many rows are common", P1)
    if count is not None and int(count) < min_common:
        raise ConsentError(
            "a party does not consent to statistics of so few common rows",
            want=f"at least {spaced(min_common)}",
            fix="compare how both parties write their ids; the limit is min_common in the party's"
            " own [consent]",
        )
    mine = party.share(P0, (bins, 1 + columns), placed, where, bits=BITS).alone()
    together, weight = party.open(mine.beside(hidden.columns), hidden.weight)
    weighted, _ = party.multiply(together, weight, torch.mul, where=where)
    (weighted,) = party.open(weighted)
    sums, _ = party.multiply(together, weighted, inner, where=where)
    return party.reveal(sums, where, P0)


def _ask(
    party: Party, number: int, ids: Sequence[bytes], bins: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """At P0, return the row in each bin, and the value that P2 looked up for this row."""
    for _ in range(_DRAWS):
        key = secrets.token_bytes(_KEY_BYTES)
        places, tags, masks = _hashed(ids, key, bins, width)
        if (placed := _placed(places, bins)) is not None:
            break
    else:
        raise BadOptionError(
            "cuckoo hashing fails", fix="list each id only once, or use a larger pad"
        )
    party.channels[P1].send_bytes(key, number, "online")
    asked = np.frombuffer(os.urandom(bins * _TAG_WORDS * 8), _WORD).reshape(bins, -1).copy()
    rows, functions = placed
    taken = rows >= 0
    asked[taken] = tags[rows[taken], functions[taken]]
    party.channels[P2].send_bytes(asked.tobytes(), number, "online")
    payload = party.channels[P2].receive_bytes(number, bins * width * ELEMENT_BYTES)
    found = np.frombuffer(payload, _WORD).reshape(bins, width).copy()
    found[taken] ^= masks[rows[taken], functions[taken]]
    return rows, found


def _program(
    party: Party,
    number: int,
    ids: Sequence[bytes],
    pad: int,
    bins: int,
    values: Tensor | None,
) -> np.ndarray:
    """At P1, send P2 a table that maps each id to the targets of the id's bins.

    The result is the list of P1's targets, and P1's shares of the columns.
    """
    key = bytes(party.channels[P0].receive_bytes(number, _KEY_BYTES))
    own = np.zeros((len(ids), 0)) if values is None else values.double().numpy()
    columns = np.rint(own * 2.0**BITS).astype(np.int64).astype(_WORD)
    width = 1 + columns.shape[1]
    places, tags, masks = _hashed(ids, key, bins, width)
    targets = np.frombuffer(os.urandom(bins * width * 8), _WORD).reshape(bins, width)
    wanted = targets[places]
    wanted[..., 1:] = columns[:, None] - wanted[..., 1:]
    wanted ^= masks
    dummies = _FUNCTIONS * (pad - len(ids))
    drawn = np.frombuffer(os.urandom(dummies * (_TAG_WORDS + width) * 8), _WORD)
    drawn = drawn.reshape(dummies, _TAG_WORDS + width)
    tags = np.concatenate([tags.reshape(-1, _TAG_WORDS), drawn[:, :_TAG_WORDS]])
    wanted = np.concatenate([wanted.reshape(-1, width), drawn[:, _TAG_WORDS:]])
    for _ in range(_DRAWS):
        seed = secrets.token_bytes(_KEY_BYTES)
        slots, pads = _slots(tags, seed, pad, width)
        table = _table(slots, wanted ^ pads, _FUNCTIONS * _segment(pad))
        if table is not None:
            break
    else:
        raise BadOptionError(
            "P1 can build no table for these ids", fix="list each id only once, or use a larger pad"
        )
    party.channels[P2].send_bytes(seed + table.tobytes(), number, "online")
    return targets


def _look_up(party: Party, number: int, pad: int, bins: int, width: int) -> None:
    """At P2, look up the table's value for each of P0's tags.

    P2 removes the table's own mask, which follows from the seed that P1 sent with the table.
    """
    size = _FUNCTIONS * _segment(pad)
    payload = party.channels[P1].receive_bytes(number, _KEY_BYTES + size * width * ELEMENT_BYTES)
    table = np.frombuffer(payload[_KEY_BYTES:], _WORD).reshape(size, width)
    asked = party.channels[P0].receive_bytes(number, bins * _TAG_WORDS * 8)
    tags = np.frombuffer(asked, _WORD).reshape(bins, _TAG_WORDS)
    slots, pads = _slots(tags, bytes(payload[:_KEY_BYTES]), pad, width)
    found = np.bitwise_xor.reduce(table[slots], axis=1) ^ pads
    party.channels[P0].send_bytes(found.tobytes(), number, "online")


def _hashed(
    ids: Sequence[bytes], key: bytes, bins: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bin, the tag and the mask of the value, for each id and hash function.

    The axes are (ids, functions), (ids, functions, 2) and (ids, functions, width).
    """
    each = 1 + _TAG_WORDS + width
    words = _keyed(ids, key, _FUNCTIONS * each).reshape(len(ids), _FUNCTIONS, each)
    bin_of = (words[..., 0] % np.uint64(bins)).astype(np.int64)
    return bin_of, words[..., 1 : 1 + _TAG_WORDS], words[..., 1 + _TAG_WORDS :]


def _segment(pad: int) -> int:
    """Return a third of the table's slots.

    The table has 1.3 slots per tag, more than the 1.23 that the construction needs.
    """
    return -(-13 * pad // 10) + _LEAST_SEGMENT


def _slots(tags: np.ndarray, seed: bytes, pad: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return three slots for each tag, one in each third of the table, and its value's mask."""
    segment = _segment(pad)
    raw = np.ascontiguousarray(tags).tobytes()
    size = _TAG_WORDS * 8
    words = _keyed(
        [raw[start : start + size] for start in range(0, len(raw), size)], seed, 3 + width
    )
    inside = (words[:, :3] % np.uint64(segment)).astype(np.int64)
    return inside + segment * np.arange(3), words[:, 3:]


def _keyed(items: Sequence[bytes], key: bytes, words: int) -> np.ndarray:
    """Hash each item by keyed BLAKE2b (RFC 7693); the result is uint64, axes (items, words)."""
    blake, blocks = hashlib.blake2b, []
    for start in range(0, words, _DIGEST_WORDS):
        size, person = 8 * min(_DIGEST_WORDS, words - start), start.to_bytes(4, "little")
        raw = b"".join(
            [blake(each, digest_size=size, key=key, person=person).digest() for each in items]
        )
        blocks.append(np.frombuffer(raw, _WORD).reshape(len(items), size // 8))
    return np.concatenate(blocks, axis=1)


def _placed(places: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Put each id into one of its bins, by cuckoo hashing (Pagh and Rodler 2004) with random walks.

    Returns:
        The result is the row in each bin (-1 for an empty bin), and the hash function that put the
        row there; it is None if an id found no bin.
    """
    rows, functions, choices = [-1] * bins, [0] * bins, places.tolist()
    for first in range(len(choices)):
        row = first
        for _ in range(_MOST_MOVES):
            free = [which for which, place in enumerate(choices[row]) if rows[place] < 0]
            which = free[0] if free else secrets.randbelow(_FUNCTIONS)
            place = choices[row][which]
            row, rows[place], functions[place] = rows[place], row, which
            if row < 0:
                break
        else:
            return None
    return np.array(rows), np.array(functions)


def _table(slots: np.ndarray, values: np.ndarray, size: int) -> np.ndarray | None:
    """Fill a table so that the XOR of each key's three slots is the key's value; None on failure.

    Keys with a slot that no other key has are removed in rounds; the slots are then filled in
    reverse order of removal (Molloy 2005; Garimella et al. 2021, section 4).
    """
    keys = np.arange(len(slots))
    count = np.bincount(slots.ravel(), minlength=size)
    owner = np.zeros(size, dtype=np.int64)  # XOR of the numbers of the keys that are left in a slot
    for each in slots.T:
        np.bitwise_xor.at(owner, each, keys)
    rounds = []
    while len(single := np.flatnonzero(count == 1)):
        taken, first = np.unique(owner[single], return_index=True)
        rounds.append((taken, single[first]))
        for each in slots[taken].T:
            np.subtract.at(count, each, 1)
            np.bitwise_xor.at(owner, each, taken)
    if count.any():
        return None
    width = values.shape[1]
    table = np.frombuffer(os.urandom(size * width * 8), _WORD).reshape(size, width).copy()
    for taken, free in reversed(rounds):
        table[free] ^= np.bitwise_xor.reduce(table[slots[taken]], axis=1) ^ values[taken]
    return table


def _all_ones(party: Party, shares: np.ndarray) -> np.ndarray:
    """Test whether all 64 bits of each shared word are 1.

    The result consists of shared bits, packed into bytes.
    """
    words = np.ascontiguousarray(shares).view(np.uint8).reshape(len(shares), 8)
    for half in (4, 2, 1):
        words = _and(party, words[:, :half], words[:, half:])
    planes = np.packbits(np.unpackbits(words, axis=1).T, axis=1)
    for half in (4, 2, 1):
        planes = _and(party, planes[:half], planes[half:])
    equal: np.ndarray = planes[0]
    return equal


def _and(party: Party, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compute a bitwise AND on shared bits (Beaver 1991); uint8 of any axes, zeros at P2."""
    number, size = party.next_number(), left.size
    if party.role == P2:
        (a, b, c), (more_a, more_b, _) = (_triple(party, peer, size, number) for peer in (P0, P1))
        dealt = ((a ^ more_a) & (b ^ more_b)) ^ c
        party.channels[P1].send_bytes(dealt.tobytes(), number, "offline")
        return left
    first, other = party.role == P0, party.channels[P1 - party.role]
    a, b, c = _triple(party, P2, size, number)
    if not first:
        c = np.frombuffer(party.channels[P2].receive_bytes(number, size), np.uint8)
    own = np.stack([left.reshape(-1) ^ a, right.reshape(-1) ^ b])
    other.send_bytes(own.tobytes(), number, "online")
    theirs = np.frombuffer(other.receive_bytes(number, own.size), np.uint8)
    d, e = own ^ theirs.reshape(own.shape)
    found: np.ndarray = c ^ (d & b) ^ (e & a) ^ ((d & e) if first else np.uint8(0))
    return found.reshape(left.shape)


def _triple(party: Party, peer: int, size: int, number: int) -> np.ndarray:
    """Draw three random bit vectors that party `peer` can draw too; uint8, axes (3, size)."""
    words = party.pads[peer].elements64(-(-3 * size // 8), "and", number)
    bits: np.ndarray = words.view(np.uint8)[: 3 * size]
    return bits.reshape(3, size)


def _whole(party: Party, bits: np.ndarray) -> SharedTensor:
    """Convert bits that are shared by XOR to integers that are shared by addition."""
    shape, where = (len(bits), 1), "shared bits"
    own = torch.from_numpy(bits.astype(np.float64))[:, None]
    halves = [
        party.share(holder, shape, own if party.role == holder else None, where, bits=0).alone()
        for holder in (P0, P1)
    ]
    left, right = party.open(*halves)
    product, _ = party.multiply(left, right, torch.mul, where=where)
    return SharedTensor(halves[0].share + halves[1].share - 2 * product.share, 0)
