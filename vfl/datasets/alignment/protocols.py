"""Private set intersection of N parties: finds each party's common rows, and their order.

A party's role in a protocol is a generator. The generator yields messages to send, and requests to
wait for a message; the role itself does not use the network. `play` runs all roles in one process;
a session runs one role over its connection. A role returns the positions of the party's common
rows, in an order that is the same at all parties. The roles make, send and compare sets of ids in
blocks, and store them in unnamed files.

The threat model assumes that all parties follow the protocol, with one exception: the label party
may add ids to its set for which it has no rows. Therefore a protocol discloses nothing about the
common ids to the label party until every other party has received their number and has accepted it.
If a party refuses, the label party does not learn the number. It may learn the sizes of sets before
that.
"""

from __future__ import annotations

import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TypeVar

import numpy as np

from vfl.core.errors import BadOptionError, ConsentError, ProtocolError, VFLError
from vfl.core.registry import Registry, require_range
from vfl.datasets.alignment import ristretto
from vfl.datasets.alignment.reused import NAME_BYTES, STATE, Keys, Known, chosen
from vfl.datasets.alignment.tags import (
    BLOCK_TAGS,
    KEY_BYTES,
    TAG_BYTES,
    as_tags,
    ascend,
    common_rows,
    sorted_tags,
    tag_blocks,
    tags_of,
)
from vfl.datasets.on_disk import DiskBytes, DiskColumn, OnDisk, gathered, scratch, shuffled
from vfl.datasets.table import spaced

HELPER = "helper"
_INDEX = np.dtype("<u4")
_MOST_IDS = 2**28
YES, NO = b"\x01", b"\x00"
# Accepted sizes of another party's set: the smallest and the largest.
_LIMITS = struct.Struct("<II")


#: Content of a message; large content is in a file and is read in parts.
Message = bytes | DiskBytes


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another role."""

    to: str
    payload: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """A request to wait for a message of limited size."""

    sender: str
    most_bytes: int


#: A role: a generator that yields messages and requests, receives the requested payloads, and
#: returns the positions of common rows (int64).
Role = Generator[Send | Receive, Message, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that one party sets for the protocol.

    Attributes:
        min_ids, max_ids: smallest and largest accepted size of every other party's set, padding
            included.
        max_asked: a second upper limit of the size of another party's set, derived from this
            party's number of ids and from earlier alignments; a larger set could contain all
            possible ids.
        min_common: smallest accepted number of common ids; a smaller number appears only in this
            party's own log.
    """

    min_ids: int = 1
    max_ids: int = _MOST_IDS
    min_common: int = 1
    max_asked: int = _MOST_IDS


def _counts_nothing(owner: str, ids: int) -> None:
    """Count nothing; this is the default of `Own.count` if no file of a party sets limits."""


@dataclass(frozen=True, slots=True)
class Own:
    """One party's inputs to a protocol.

    Attributes:
        party: name of the party.
        ids: normalised ids without repetition.
        bounds: limits of the party.
        place: where the party stores sets, and the memory limit for its work on them.
        count: function that records the size of another party's set, given the name of that party
            and the size. The role calls this function before it sends anything that depends on the
            set; the function raises ConsentError if the total is too large.
        keys: function that returns the stored keys of alignments with another party; None if
            nothing is stored.
    """

    party: str
    ids: Sequence[bytes] = field(repr=False)
    bounds: Bounds = Bounds()
    place: OnDisk = field(default_factory=scratch, repr=False)
    count: Callable[[str, int], None] = field(default=_counts_nothing, repr=False)
    keys: Callable[[str], Keys] | None = field(default=None, repr=False)

    def blocks(self) -> Iterator[Sequence[bytes]]:
        """Yield the party's ids in their order, in blocks."""
        for start in range(0, len(self.ids), BLOCK_TAGS):
            yield self.ids[start : start + BLOCK_TAGS]

    def admit(self, owner: str, ids: int) -> None:
        """Check the size of another party's set; earlier messages must not depend on the set.

        Raises:
            ConsentError: the set is smaller or larger than this party accepts.
        """
        if ids < self.bounds.min_ids:
            raise too_few_ids(self, owner, ids)
        if ids > (most := min(self.bounds.max_ids, self.bounds.max_asked)):
            raise too_many_ids(self.party, f"{spaced(ids)} ids of '{owner}'", most)
        self.count(owner, ids)


class Protocol(ABC):
    """Base class of protocols that find the common rows.

    Args:
        pad: number of ids to which every party pads its set with random ids, which never match; 0
            means no padding.

    Attributes:
        helper: whether a further party without ids, called `HELPER`, takes part.
        refused: reason why sessions cannot use the protocol; empty if they can.
        id_bytes: largest number of bytes per id in a message.
        reuse: whether the parties store their keys for their next alignment.
    """

    helper = reuse = False
    refused = ""
    id_bytes = ristretto.POINT_BYTES

    def __init__(self, pad: int = 0) -> None:
        require_range("pad", pad, 0, _MOST_IDS)
        self.pad = pad

    def dummies(self, own: Own) -> int:
        """Return the number of random ids that a party adds to its own ids."""
        if self.pad and len(own.ids) > self.pad:
            raise BadOptionError(
                f"party '{own.party}' has more ids than the padding hides",
                where="option 'pad'",
                got=spaced(self.pad),
                want="a padding of at least the largest number of ids of any party",
            )
        return max(0, self.pad - len(own.ids))

    @abstractmethod
    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        """Run the role of a party with ids.

        Args:
            own: the party's inputs.
            parties: all parties with ids, in an order that they agree on; at least two.
            label_party: the party that receives the result after all other parties have received
                it.
        """

    def helping(
        self, parties: Sequence[str], label_party: str, place: OnDisk | None = None
    ) -> Role:
        """Run the role of the helper, if the protocol needs one.

        The helper stores sets in `place`, or in TMPDIR.
        """
        raise NotImplementedError


class ServerAided(Protocol):
    """Keyed hashes of ids, compared by a helper without the key (Kamara et al. 2014, section 4.1).

    The label party draws a key of 16 bytes, and sends it to all other parties with ids. The helper
    must not be able to read this message, and no party may read the tags of another party. A tag is
    a keyed BLAKE2b hash of an id (RFC 7693) with 16 bytes. Each party sends its tags in ascending
    order, so they disclose nothing about the order of its rows. The helper answers with one bit for
    each tag. The common rows are sorted by their tags.

    Leakage: the helper learns the number of tags that each party sends, and the number of tags that
    each group of parties has in common. With `pad`, the helper learns only an upper bound of the
    first number. The parties learn their common ids. A helper that colludes with a party can test
    whether another party has a given id.

    Traffic of a party with n ids: 16 n + n / 8 + 11 bytes with the helper, and 16 bytes for the
    key. Messages of N parties: N - 1 keys, and with the helper N sets, N answers, N votes and N
    final messages.
    """

    helper = True
    refused = "needs a helper, which no project has"

    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        key = secrets.token_bytes(KEY_BYTES)
        if own.party == label_party:
            for each in parties:
                if each != label_party:
                    yield Send(each, key)
        else:
            key = bytes((yield Receive(label_party, KEY_BYTES)))
            if len(key) != KEY_BYTES:
                raise other_size(label_party)
        bounds, total = own.bounds, len(own.ids) + self.dummies(own)
        most = min(bounds.max_ids, bounds.max_asked)
        if self.pad > most:
            raise too_many_ids(own.party, f"sets padded to {spaced(self.pad)} ids", most)
        sent, rows = DiskBytes(own.place), DiskColumn(own.place, np.int64)
        # With padding, every set has this size.
        sent.write(_LIMITS.pack(bounds.min_ids, self.pad or most))
        for tags, order in sorted_tags(self._tags(own, key), total, own.place):
            sent.write(tags.tobytes())
            rows.write(order)
        yield Send(HELPER, sent)
        size = -(-total // 8)
        answer = yield Receive(HELPER, 1 + size)
        if answer[:1] == NO and len(answer) == 1:
            raise refused_by_others()
        if answer[:1] != YES or len(answer) != 1 + size:
            raise other_size(HELPER)
        positions = DiskColumn(own.place, np.int64)
        for start in range(0, total, BLOCK_TAGS):
            packed = answer[1 + start // 8 : 1 + (start + BLOCK_TAGS) // 8]
            own_rows = rows[start : start + BLOCK_TAGS]
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(own_rows))
            common = own_rows[bits.astype(bool)]
            if common.max(initial=-1) >= len(own.ids):
                raise ProtocolError("the helper marks a random tag as common")
            positions.write(common)
        yield from _vote(own, len(positions), HELPER)
        return positions.read(own.place.share(16))

    def _tags(self, own: Own, key: bytes) -> Iterator[np.ndarray]:
        for ids in own.blocks():
            yield tags_of(ids, key)
        for count in _counts(self.dummies(own)):
            yield as_tags(os.urandom(TAG_BYTES * count))

    def helping(
        self, parties: Sequence[str], label_party: str, place: OnDisk | None = None
    ) -> Role:
        """Run the helper: compare the sets, check that all accept, answer the label party last."""
        sets, limits, place = list[Message](), [], place or scratch()
        for each in parties:
            payload = yield Receive(each, _LIMITS.size + TAG_BYTES * _MOST_IDS)
            if len(payload) < _LIMITS.size or (len(payload) - _LIMITS.size) % TAG_BYTES:
                raise other_size(each)
            limits.append(_LIMITS.unpack(payload[: _LIMITS.size]))
            if not ascend(tag_blocks(payload, _LIMITS.size)):
                raise ProtocolError(f"the tags of '{each}' are not in order, or contain one twice")
            sets.append(payload)
        sizes = [(len(payload) - _LIMITS.size) // TAG_BYTES for payload in sets]
        for index, (least, most) in enumerate(limits):
            others = sizes[:index] + sizes[index + 1 :]
            if min(others) < least or max(others) > most:
                for each in parties:
                    yield Send(each, NO)
                return np.empty(0, dtype=np.int64)
        found = common_rows([tag_blocks(each, _LIMITS.size) for each in sets], sizes, place)
        answers = {
            each: _as_bits(rows, size, place)
            for each, rows, size in zip(parties, found, sizes, strict=True)
        }
        yield from _decide(answers, parties, label_party)
        return np.empty(0, dtype=np.int64)


class EcdhPsi(Protocol):
    """Diffie-Hellman on ristretto255 (Meadows 1986; Huberman et al. 1999, section 4).

    Every id is hashed to a point, and each party in turn multiplies every point by its secret
    scalar. Therefore equal ids become equal points in the end. Each set passes through all other
    parties. The first party in the list that is not the label party is the comparing party, which
    receives all sets last. The comparing party compares 16 bytes of each point. The comparing party
    sends all parties the positions of their common rows, the label party last. Each owner shuffles
    its points before sending them. No party may read the messages between two other parties,
    because this party could compare two sets that were multiplied by the same scalars.

    Leakage: the comparing party learns the size of each set, the number of ids that each group of
    parties has in common, and which of its own ids are among these. With two parties, the second
    and the third fact are just the common ids. Every party that multiplies a set learns the set's
    size, or with `pad` only an upper bound. The other parties learn the common ids. No party alone
    can test whether another party has a given id (decisional Diffie-Hellman assumption).

    With `reuse`, two parties store their scalars and points, and later send new ids only. Then the
    comparing party also learns which of the other party's ids occur again, and which of its own
    present or past ids were ever common. The other party learns how many of the comparing party's
    ids are new. The limits apply to all ids ever sent with these scalars. See `Keys`.

    Traffic of two parties with n ids each: 32 n + 16 n bytes in one direction, 32 n bytes in the
    other, and 4 bytes for each common id. With `reuse`, n is the number of new ids, and the other
    party also sends one bit for each earlier id. Messages of N parties: N - 1 for each set, one
    more for the comparing party's set, and N - 1 answers, votes and final messages; two more with
    `reuse`. Each id costs N multiplications.

    Args:
        pad: see `Protocol`.
        reuse: whether to store scalars and points for later alignments; only for two parties that
            can store them, and without `pad`.
    """

    def __init__(self, pad: int = 0, reuse: bool = False) -> None:
        super().__init__(pad)
        self.reuse = reuse
        if pad and reuse:
            raise BadOptionError(
                "padding hides sizes, and reused keys disclose how many ids are new",
                where="option 'reuse'",
                want="pad or reuse",
            )

    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        judge = next(party for party in parties if party != label_party)
        keys = (yield from self._kept(own, parties, judge)) if self.reuse else Keys(own.place)
        scalar, me, known = keys.scalar, own.party, keys.known(own.blocks(), len(own.ids))
        mine, order = DiskBytes(own.place), DiskColumn(own.place, np.int64)
        if me != judge:
            mine.write(known.bits)
        order.write(known.rows)
        total = len(own.ids) - len(known.rows) + self.dummies(own)
        points = self._points(own, keys, known)
        for at, sent in shuffled(own.place, total, points, os.urandom):
            mine.write(sent[:, : ristretto.POINT_BYTES].tobytes())
            keys.ids.write(sent[:, ristretto.POINT_BYTES :].tobytes())
            order.write(known.rows_of(at))
        sizes = {me: len(order)}
        routes = {owner: _route(owner, parties, judge) for owner in parties}
        yield Send(routes[me][1], mine)
        finals: dict[str, Iterable[np.ndarray]] = {}
        for hop in range(1, len(parties)):
            for owner in (owner for owner, route in routes.items() if route[hop] == me):
                most = ristretto.POINT_BYTES * _MOST_IDS  # a session sets a smaller limit
                payload = yield Receive(routes[owner][hop - 1], most)
                before = keys.count
                bits = payload[: -(-before // 8) if me == judge else 0]
                count = (len(payload) - len(bits)) // ristretto.POINT_BYTES
                own.admit(owner, before + count)
                last = hop + 1 == len(parties)
                moved = _multiplied(payload, scalar, owner, own.place, len(bits), short=last)
                if self.reuse:
                    keys.count += count
                if not last:
                    yield Send(routes[owner][hop + 1], moved)
                elif owner == judge:
                    yield Send(judge, moved)
                else:
                    recur = np.unpackbits(np.frombuffer(bits, np.uint8), count=before).astype(bool)
                    sizes[owner] = int(recur.sum()) + count
                    finals[owner] = chain(chosen(keys.theirs, recur), tag_blocks(moved))
                    if self.reuse:
                        keys.keep(keys.theirs, moved)
        if me != judge:
            return (yield from self._from_judge(own, judge, len(order), order))
        payload = yield Receive(routes[me][-1], TAG_BYTES * total)
        if len(payload) != TAG_BYTES * total:
            raise other_size(routes[me][-1])
        finals[me] = chain(chosen(keys.tags, known.present), tag_blocks(payload))
        if self.reuse:
            keys.keep(keys.tags, payload)
        sets, counts = list(finals.values()), [sizes[owner] for owner in finals]
        each_rows = common_rows(sets, counts, own.place)
        rows_of = dict(zip(finals, each_rows, strict=True))
        answers = {
            party: _as_indices(found, own.place) for party, found in rows_of.items() if party != me
        }
        accepted = len(rows_of[me]) >= own.bounds.min_common
        yield from _decide(answers, parties, label_party, accepted)
        if not accepted:
            raise too_few_common(own, len(rows_of[me]))
        return _own_rows(own, order, rows_of[me], "points are marked as common")

    def _from_judge(self, own: Own, judge: str, size: int, order: DiskColumn) -> Role:
        """Run the role of a party that does not compare: receive the common rows, and vote."""
        answer = yield Receive(judge, 1 + _INDEX.itemsize * size)
        if answer[:1] == NO and len(answer) == 1:
            raise refused_by_others()
        if answer[:1] != YES or (len(answer) - 1) % _INDEX.itemsize:
            raise other_size(judge)
        found = _positions_of(answer, own.place)
        positions = _own_rows(own, order, found, f"'{judge}' marks rows as common")
        yield from _vote(own, len(positions), judge)
        return positions

    def _kept(
        self, own: Own, parties: Sequence[str], judge: str
    ) -> Generator[Send | Receive, Message, Keys]:
        """Return the pair's stored keys, or fresh keys if the two parties' keys differ."""
        if own.keys is None or len(parties) > 2:
            raise BadOptionError(
                "only two parties of a federation can reuse keys",
                where="option 'reuse'",
                got=f"{len(parties)} parties" if own.keys else "parties without a store",
                want="a project of two parties, or data.missing_rows = 'token'",
            )
        (other,) = (party for party in parties if party != own.party)
        keys = own.keys(other)
        if own.party == judge:
            yield Send(other, keys.state())
            answer = bytes((yield Receive(other, 1 + NAME_BYTES)))
            if len(answer) != 1 + NAME_BYTES or answer[:1] not in (YES, NO):
                raise other_size(other)
            keys.begin(answer[1:], same=answer[:1] == YES)
            return keys
        same = keys.fits(bytes((yield Receive(judge, STATE.size))))
        keys.begin(os.urandom(NAME_BYTES), same=same)
        yield Send(judge, (YES if same else NO) + keys.name)
        return keys

    def _points(self, own: Own, keys: Keys, known: Known) -> Iterator[np.ndarray]:
        """Yield points of new ids, with tags if keys are reused; then random padding points."""
        for start in range(0, len(own.ids), BLOCK_TAGS):
            here, new = slice(start, start + BLOCK_TAGS), known.new
            if new is not None and not new[here].any():
                continue
            ids = own.ids[here]
            ids = ids if new is None else list(compress(ids, new[here].tolist()))
            points = _as_points(ristretto.multiply(ristretto.points_of(ids), keys.scalar))
            yield np.hstack([points, tags_of(ids, keys.key)]) if self.reuse else points
        for count in _counts(self.dummies(own)):
            yield _as_points(ristretto.random_points(count))


_ROOM = "vfl.datasets.alignment"
PROTOCOLS = Registry(
    "alignment",
    Protocol,  # type: ignore[type-abstract]
    {
        "ecdh": f"{_ROOM}.protocols:EcdhPsi",
        "server_aided": f"{_ROOM}.protocols:ServerAided",
    },
    "vfl.alignments",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes and numbers of messages between roles, by (sender, receiver)."""

    payload_bytes: Mapping[tuple[str, str], int]
    messages: Mapping[tuple[str, str], int]

    def of(self, party: str) -> int:
        """Return the payload bytes that a role sent and received."""
        return sum(count for pair, count in self.payload_bytes.items() if party in pair)


def play(
    spec: str,
    owns: Sequence[Own],
    label_party: str,
    observe: Callable[[str, str, Message], None] = lambda sender, to, payload: None,
) -> tuple[dict[str, np.ndarray], Traffic]:
    """Run all roles of a protocol in this process.

    >>> owns = [Own("bank", [b"1", b"2", b"3"]), Own("label", [b"3", b"9", b"1"])]
    >>> rows, _ = play("server_aided", owns, "label")
    >>> sorted(zip(rows["bank"].tolist(), rows["label"].tolist()))
    [(0, 2), (2, 0)]

    Args:
        spec: spec of the protocol, such as ``ecdh:pad=1000``.
        owns: each party's inputs, in an order that all parties agree on.
        label_party: the label party, one of the parties.
        observe: function that is called with sender, receiver and payload of every message.

    Returns:
        By party, the positions of its rows in the common order, int64; and the traffic.

    Raises:
        ConsentError: a party refused the size of a set or of the intersection; the error is that of
            the first party that refused.
        ProtocolError: a message does not have the protocol's form.
        SpecError: the protocol does not exist.
    """
    parties, protocol = [own.party for own in owns], PROTOCOLS.make(spec)
    roles = {own.party: PROTOCOLS.make(spec).role(own, parties, label_party) for own in owns}
    if protocol.helper:
        roles[HELPER] = PROTOCOLS.make(spec).helping(parties, label_party)
    found, traffic = run_roles(roles, observe)
    found.pop(HELPER, None)
    return found, traffic


Result = TypeVar("Result")


def run_roles(
    roles: Mapping[str, Generator[Send | Receive, Message, Result]],
    observe: Callable[[str, str, Message], None] = lambda sender, to, payload: None,
) -> tuple[dict[str, Result], Traffic]:
    """Run roles in this process; return their results by party, and the traffic.

    Raises:
        VFLError: a role failed; the error is that of the first role that failed.
    """
    boxes: dict[tuple[str, str], deque[Message]] = {}
    sent, messages = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    found: dict[str, Result] = {}
    waiting: dict[str, Receive | None] = dict.fromkeys(roles)
    failed: VFLError | None = None
    moved = True
    while waiting and moved:
        moved = False
        for name in list(waiting):
            wanted = waiting[name]
            payload: Message = b""
            if wanted is not None:
                box = boxes.get((wanted.sender, name))
                if not box:
                    continue
                payload = box.popleft()
                if len(payload) > wanted.most_bytes:
                    raise other_size(wanted.sender)
            moved = True
            try:
                step = next(roles[name]) if wanted is None else roles[name].send(payload)
                while isinstance(step, Send):
                    observe(name, step.to, step.payload)
                    sent[name, step.to] += len(step.payload)
                    messages[name, step.to] += 1
                    boxes.setdefault((name, step.to), deque()).append(step.payload)
                    step = next(roles[name])
                waiting[name] = step
            except StopIteration as end:
                found[name] = end.value
                del waiting[name]
            except VFLError as error:
                failed = failed or error
                del waiting[name]
    if failed is not None:
        raise failed
    return found, Traffic(dict(sent), dict(messages))


def _counts(count: int) -> Iterator[int]:
    """Split a count into smaller counts, each of at most one block."""
    for start in range(0, count, BLOCK_TAGS):
        yield min(BLOCK_TAGS, count - start)


def _as_points(points: bytes) -> np.ndarray:
    return np.frombuffer(points, np.uint8).reshape(-1, ristretto.POINT_BYTES)


def _multiplied(
    payload: Message, scalar: bytes, owner: str, place: OnDisk, skip: int, *, short: bool
) -> DiskBytes:
    """Multiply a set's points by a scalar; with `short`, keep only 16 bytes of each product.

    These 16 bytes contain no bits that are the same in all points.

    Before the points, the set contains `skip` other bytes.

    Raises:
        ProtocolError: see `ristretto.multiply`.
    """
    found, size = DiskBytes(place), BLOCK_TAGS * ristretto.POINT_BYTES
    for start in range(skip, len(payload), size):
        points = ristretto.multiply(payload[start : start + size], scalar, f"'{owner}'")
        found.write(_as_points(points)[:, 8 : 8 + TAG_BYTES].tobytes() if short else points)
    return found


def _as_indices(rows: DiskColumn, place: OnDisk) -> DiskBytes:
    """Encode positions in a party's set as the payload of an answer."""
    found = DiskBytes(place)
    found.write(YES)
    for start in range(0, len(rows), BLOCK_TAGS):
        found.write(rows[start : start + BLOCK_TAGS].astype(_INDEX).tobytes())
    return found


def _positions_of(answer: Message, place: OnDisk) -> DiskColumn:
    """Return the positions that an answer lists."""
    found, size = DiskColumn(place, np.int64), BLOCK_TAGS * _INDEX.itemsize
    for start in range(1, len(answer), size):
        found.write(np.frombuffer(answer[start : start + size], _INDEX).astype(np.int64))
    return found


def _own_rows(own: Own, order: DiskColumn, found: DiskColumn, wrong: str) -> np.ndarray:
    """Return the party's rows at some positions of its shuffled set.

    Raises:
        ProtocolError: a position is outside the set, is repeated, or belongs to a random id of the
            padding.
    """
    fits = all(
        found[start : start + BLOCK_TAGS].max() < len(order)
        for start in range(0, len(found), BLOCK_TAGS)
    )
    rows, twice = gathered(own.place, order, found) if fits else (None, False)
    if rows is None or twice or rows.most() >= len(own.ids):
        raise ProtocolError(f"{wrong} that do not exist")
    return rows.read(own.place.share(16))


def _as_bits(rows: DiskColumn, count: int, place: OnDisk) -> DiskBytes:
    """Make an answer with one bit for each tag; `rows` are the common rows, ascending."""
    found, at = DiskBytes(place), 0
    found.write(YES)
    for start in range(0, count, BLOCK_TAGS):
        bits = np.zeros(min(BLOCK_TAGS, count - start), dtype=bool)
        own = rows[at : at + BLOCK_TAGS] - start
        own = own[: np.searchsorted(own, len(bits))]
        bits[own] = True
        at += len(own)
        found.write(np.packbits(bits).tobytes())
    return found


def _route(owner: str, parties: Sequence[str], judge: str) -> list[str]:
    """Return a set's route: its owner first; the comparing party last unless it is the owner."""
    start = parties.index(owner)
    others = [*parties[start + 1 :], *parties[:start]]
    between = [party for party in others if party != judge]
    return [owner, *between, *([] if owner == judge else [judge])]


def _vote(own: Own, common: int, judge: str) -> Generator[Send | Receive, Message, None]:
    """Vote on an alignment by its number of common ids; receive whether all parties accepted."""
    accepted = common >= own.bounds.min_common
    yield Send(judge, YES if accepted else NO)
    if not accepted:
        raise too_few_common(own, common)
    if (yield Receive(judge, 1)) != YES:
        raise refused_by_others()


def _decide(
    answers: Mapping[str, Message], parties: Sequence[str], label_party: str, accepted: bool = True
) -> Generator[Send | Receive, Message, None]:
    """Send the parties their answers; to the label party last, and only if all others accept."""
    asked = []
    for each in sorted(answers, key=lambda party: (party == label_party, parties.index(party))):
        if each == label_party and not accepted:
            yield Send(each, NO)
            continue
        yield Send(each, answers[each])
        vote = yield Receive(each, 1)
        accepted = accepted and vote == YES
        if vote == YES:
            asked.append(each)
    for each in asked:
        yield Send(each, YES if accepted else NO)


def too_few_common(own: Own, common: int) -> ConsentError:
    """Make the error for too few common ids, which appears only in the party's own log."""
    return ConsentError(
        f"party '{own.party}' does not consent to so small an intersection",
        got=f"{spaced(common)} ids in common, of {spaced(len(own.ids))} of its own",
        want=f"at least {spaced(own.bounds.min_common)}",
        fix="compare id rules by vfl align FILE --preview, or lower min_common in the [consent] of "
        "this party's own file",
    )


def too_few_ids(own: Own, owner: str, count: int) -> ConsentError:
    """Make the error for another party's set that is smaller than a party accepts."""
    return ConsentError(
        f"party '{own.party}' does not consent to an intersection with so small a set",
        got=f"{spaced(count)} ids of '{owner}'",
        want=f"at least {spaced(own.bounds.min_ids)}",
        fix=f"a larger table at '{owner}', or a smaller min_ids in this party's own [consent]",
    )


def too_many_ids(party: str, got: str, most: int) -> ConsentError:
    """Make the error for sets that are larger than a party accepts."""
    return ConsentError(
        f"party '{party}' does not consent to an intersection with so large a set",
        got=got,
        want=f"at most {spaced(most)}",
        fix="a smaller set or padding, or a larger max_id_ratio or max_rows in this party's own "
        "[consent]",
    )


def refused_by_others() -> ConsentError:
    """Make the error of a party that receives a refusal without numbers."""
    return ConsentError(
        "another party does not consent to an alignment with so few ids, or so few in common",
        fix="see that party's own log for the counts; compare how both parties write their ids",
    )


def other_size(sender: str) -> ProtocolError:
    """Make the error for a message that does not have the protocol's form."""
    return ProtocolError(f"an alignment message from '{sender}' does not have the agreed form")
