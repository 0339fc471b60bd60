"""Private set intersection of N parties: which of my rows has everybody, and in which order.

A role of a protocol is a generator: it yields what it sends and what it waits for, and knows no
network. `play` runs all roles in one process; a session runs one of them over its stream. What a
role gives back are positions of the party's own rows, in an order that is the same at all parties.
Sets are made, sent and compared in blocks, and lie in files without a name meanwhile.

All parties follow the protocol, or the label party does not: then it can put ids into its set that
it has no rows for. So no protocol tells the label party anything before every other party has seen
how many ids are common and has accepted that. It is not told the number that was refused.
"""

from __future__ import annotations

import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from vfl.core.errors import BadOptionError, ConsentError, ProtocolError, VFLError
from vfl.core.registry import Registry, require_range
from vfl.datasets.alignment import ristretto
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
_LIMITS = struct.Struct("<II")  # the fewest and the most ids of others that a party accepts


#: A message: whatever may be large is in a file, and read in parts.
Message = bytes | DiskBytes


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another role."""

    to: str
    payload: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message of at most so many bytes."""

    sender: str
    most_bytes: int


#: Yields messages, is sent the payloads it waits for, and returns int64 positions.
Role = Generator[Send | Receive, Message, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one party accepts.

    Attributes:
        min_ids, max_ids: of every other party's set, padding included.
        max_asked: of every other party's set as well, by what this party has ids itself and was
            asked about before; a larger one could be a dictionary.
        min_common: ids that all have; fewer are told to nobody but this party's own log.
    """

    min_ids: int = 1
    max_ids: int = _MOST_IDS
    min_common: int = 1
    max_asked: int = _MOST_IDS


def _counts_nothing(owner: str, ids: int) -> None:
    """For roles that no party's file bounds."""


@dataclass(frozen=True, slots=True)
class Own:
    """What one party brings.

    Attributes:
        party: its name.
        ids: normalised, each once.
        bounds: what it accepts.
        place: where sets lie, and how much memory working on them takes.
        count: told each other party's name and how many ids its set has, before anything that
            depends on the set is sent; raises ConsentError where that is too much in all.
    """

    party: str
    ids: Sequence[bytes] = field(repr=False)
    bounds: Bounds = Bounds()
    place: OnDisk = field(default_factory=scratch, repr=False)
    count: Callable[[str, int], None] = field(default=_counts_nothing, repr=False)

    def blocks(self) -> Iterator[Sequence[bytes]]:
        """The ids in their order, some at a time."""
        for start in range(0, len(self.ids), BLOCK_TAGS):
            yield self.ids[start : start + BLOCK_TAGS]

    def admit(self, owner: str, ids: int) -> None:
        """Accept another party's set by its size; nothing that depends on it was sent before.

        Raises:
            ConsentError: it is smaller or larger than this party accepts.
        """
        if ids < self.bounds.min_ids:
            raise too_few_ids(self, owner, ids)
        if ids > (most := min(self.bounds.max_ids, self.bounds.max_asked)):
            raise too_many_ids(self.party, f"{spaced(ids)} ids of '{owner}'", most)
        self.count(owner, ids)


class Protocol(ABC):
    """One way to find the common rows.

    Args:
        pad: ids that every set seems to have, where it is not 0: those beyond a party's own are
            random and never common.

    Attributes:
        helper: whether a party without ids of its own, `HELPER`, takes part.
        refused: why a session cannot have it; empty where it can.
        id_bytes: of a message, at most, for each id.
    """

    helper = False
    refused = ""
    id_bytes = ristretto.POINT_BYTES

    def __init__(self, pad: int = 0) -> None:
        require_range("pad", pad, 0, _MOST_IDS)
        self.pad = pad

    def dummies(self, own: Own) -> int:
        """How many random ones a party adds to its own ids."""
        if self.pad and len(own.ids) > self.pad:
            raise BadOptionError(
                f"party '{own.party}' has more ids than the padding hides",
                where="option 'pad'",
                got=spaced(self.pad),
                want="more than any party has ids",
            )
        return max(0, self.pad - len(own.ids))

    @abstractmethod
    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        """The role of a party with ids.

        Args:
            own: what it brings.
            parties: everybody with ids, in an order all agree on; at least two.
            label_party: which of them hears the result last.
        """

    def helping(
        self, parties: Sequence[str], label_party: str, place: OnDisk | None = None
    ) -> Role:
        """The role of the helper, where there is one; sets lie in `place`, or else in TMPDIR."""
        raise NotImplementedError


class ServerAided(Protocol):
    """Keyed hashes, compared by a helper that has no key (Kamara et al. 2014, section 4.1).

    The label party draws a key of 16 bytes and sends it to the other parties; the helper must not
    read that message, nor a party another party's tags. A tag is the keyed BLAKE2b of an id (RFC
    7693), 16 bytes; a party sends its tags in ascending order, which is a random order of its rows.
    The helper answers with one bit a tag. Common rows stand in the order of their tags.

    Learned: the helper, how many tags each party sends, and how many each group of parties shares;
    with `pad`, of the former only that they are no more than that. The others, the common ids. A
    helper that works together with a party can test any id.

    Bytes of a party of n ids: 16 n + n / 8 + 11 with the helper, and the key of 16. Messages: N - 1
    keys, and with the helper N sets, N answers, N votes and N endings.
    """

    helper = True
    refused = "needs a helper that no project has"

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
        sent.write(_LIMITS.pack(bounds.min_ids, self.pad or most))  # which is of its own size
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
                raise ProtocolError("the helper calls a random tag common")
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
        """Compare, answer the label party last, and see that all accept."""
        sets, limits, place = list[Message](), [], place or scratch()
        for each in parties:
            payload = yield Receive(each, _LIMITS.size + TAG_BYTES * _MOST_IDS)
            if len(payload) < _LIMITS.size or (len(payload) - _LIMITS.size) % TAG_BYTES:
                raise other_size(each)
            limits.append(_LIMITS.unpack(payload[: _LIMITS.size]))
            if not ascend(tag_blocks(payload, _LIMITS.size)):
                raise ProtocolError(f"the tags of '{each}' are not in order, or one stands twice")
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

    Every id is hashed to a point, and every point is multiplied with the secret scalar of each
    party in turn; equal ids end at equal points. A set goes round through all other parties and
    ends at the first one that is not the label party, which compares 16 bytes of each point and
    tells everybody the positions, the label party last. Owners send their points shuffled. No party
    may read what two others send each other: it could compare sets that are under the same scalars.

    Learned: the party that compares, how many ids each party's set has and how many each group of
    parties shares, which of its own are among them included; with two parties that is the common
    ids. Sizes are known to who multiplies; with `pad` only that they are no more than that. The
    others learn the common ids. Nobody can test an id alone (decisional Diffie-Hellman).

    Bytes of two parties with n ids each: 32 n + 16 n one way and 32 n the other, and 4 a common id.
    Messages: N - 1 for each set, one more for the comparing party's, and N - 1 answers, votes and
    endings. Multiplications: N for each id.
    """

    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        judge = next(party for party in parties if party != label_party)
        scalar, me, count = ristretto.fresh_scalar(), own.party, len(own.ids)
        mine, order = DiskBytes(own.place), DiskColumn(own.place, np.int64)
        total = count + self.dummies(own)
        for rows, points in shuffled(own.place, total, self._points(own, scalar), os.urandom):
            mine.write(points.tobytes())
            order.write(rows)
        sizes = {me: total}
        routes = {owner: _route(owner, parties, judge) for owner in parties}
        yield Send(routes[me][1], mine)
        finals: dict[str, Message] = {}
        for hop in range(1, len(parties)):
            for owner in (owner for owner, route in routes.items() if route[hop] == me):
                most = ristretto.POINT_BYTES * _MOST_IDS  # a session bounds what it takes
                payload = yield Receive(routes[owner][hop - 1], most)
                sizes[owner] = len(payload) // ristretto.POINT_BYTES
                own.admit(owner, sizes[owner])
                last = hop + 1 == len(parties)
                moved = _multiplied(payload, scalar, owner, own.place, short=last)
                if not last:
                    yield Send(routes[owner][hop + 1], moved)
                elif owner == judge:
                    yield Send(judge, moved)
                else:
                    finals[owner] = moved
        if me != judge:
            answer = yield Receive(judge, 1 + _INDEX.itemsize * sizes[me])
            if answer[:1] == NO and len(answer) == 1:
                raise refused_by_others()
            if answer[:1] != YES or (len(answer) - 1) % _INDEX.itemsize:
                raise other_size(judge)
            found = _positions_of(answer, own.place)
            positions = _own_rows(own, order, found, f"'{judge}' calls rows common")
            yield from _vote(own, len(positions), judge)
            return positions
        payload = yield Receive(routes[me][-1], TAG_BYTES * sizes[me])
        finals[me] = payload
        if len(payload) != TAG_BYTES * sizes[me]:
            raise other_size(routes[me][-1])
        tags = [tag_blocks(each) for each in finals.values()]
        each_rows = common_rows(tags, [sizes[owner] for owner in finals], own.place)
        rows_of = dict(zip(finals, each_rows, strict=True))
        answers = {
            party: _as_indices(found, own.place) for party, found in rows_of.items() if party != me
        }
        accepted = len(rows_of[me]) >= own.bounds.min_common
        yield from _decide(answers, parties, label_party, accepted)
        if not accepted:
            raise too_few_common(own, len(rows_of[me]))
        return _own_rows(own, order, rows_of[me], "points are called common")

    def _points(self, own: Own, scalar: bytes) -> Iterator[np.ndarray]:
        for ids in own.blocks():
            yield _as_points(ristretto.multiply(ristretto.points_of(ids), scalar))
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
    """What roles sent: payload bytes and messages by (sender, receiver)."""

    payload_bytes: Mapping[tuple[str, str], int]
    messages: Mapping[tuple[str, str], int]

    def of(self, party: str) -> int:
        """Payload bytes that a role sent and received."""
        return sum(count for pair, count in self.payload_bytes.items() if party in pair)


def play(
    spec: str,
    owns: Sequence[Own],
    label_party: str,
    observe: Callable[[str, str, Message], None] = lambda sender, to, payload: None,
) -> tuple[dict[str, np.ndarray], Traffic]:
    """Every role of a protocol in this process.

    >>> owns = [Own("bank", [b"1", b"2", b"3"]), Own("label", [b"3", b"9", b"1"])]
    >>> rows, _ = play("server_aided", owns, "label")
    >>> sorted(zip(rows["bank"].tolist(), rows["label"].tolist()))
    [(0, 2), (2, 0)]

    Args:
        spec: such as ``ecdh:pad=1000``.
        owns: what each party brings, in an order all agree on.
        label_party: one of them.
        observe: told sender, receiver and payload of every message.

    Returns:
        int64 positions of each party's rows in the common order, by party; and what was sent.

    Raises:
        ConsentError: a party accepts none so small; the first that says so is heard.
        ProtocolError: a message of another form.
        SpecError: no such protocol.
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
    """What roles that are played in this process come to, by party, and what was sent.

    Raises:
        VFLError: what ended a role first.
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
    """So many in all, not too many at a time."""
    for start in range(0, count, BLOCK_TAGS):
        yield min(BLOCK_TAGS, count - start)


def _as_points(points: bytes) -> np.ndarray:
    return np.frombuffer(points, np.uint8).reshape(-1, ristretto.POINT_BYTES)


def _multiplied(
    payload: Message, scalar: bytes, owner: str, place: OnDisk, *, short: bool
) -> DiskBytes:
    """A set's points times a scalar; in short 16 bytes of each that hold no fixed bit.

    Raises:
        ProtocolError: see `ristretto.multiply`.
    """
    found, size = DiskBytes(place), BLOCK_TAGS * ristretto.POINT_BYTES
    for start in range(0, len(payload), size):
        points = ristretto.multiply(payload[start : start + size], scalar, f"'{owner}'")
        found.write(_as_points(points)[:, 8 : 8 + TAG_BYTES].tobytes() if short else points)
    return found


def _as_indices(rows: DiskColumn, place: OnDisk) -> DiskBytes:
    """An answer that names rows of a set."""
    found = DiskBytes(place)
    found.write(YES)
    for start in range(0, len(rows), BLOCK_TAGS):
        found.write(rows[start : start + BLOCK_TAGS].astype(_INDEX).tobytes())
    return found


def _positions_of(answer: Message, place: OnDisk) -> DiskColumn:
    """The rows that an answer names."""
    found, size = DiskColumn(place, np.int64), BLOCK_TAGS * _INDEX.itemsize
    for start in range(1, len(answer), size):
        found.write(np.frombuffer(answer[start : start + size], _INDEX).astype(np.int64))
    return found


def _own_rows(own: Own, order: DiskColumn, found: DiskColumn, wrong: str) -> np.ndarray:
    """The party's rows at some positions of its shuffled set.

    Raises:
        ProtocolError: a position beyond the set, one that stands twice, or one of no row.
    """
    fits = all(
        found[start : start + BLOCK_TAGS].max() < len(order)
        for start in range(0, len(found), BLOCK_TAGS)
    )
    rows, twice = gathered(own.place, order, found) if fits else (None, False)
    if rows is None or twice or rows.most() >= len(own.ids):
        raise ProtocolError(f"{wrong} that are not there")
    return rows.read(own.place.share(16))


def _as_bits(rows: DiskColumn, count: int, place: OnDisk) -> DiskBytes:
    """An answer with one bit for each of so many tags, whose common rows ascend."""
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
    """Who multiplies a set, its owner first; the party that compares last, unless it is its own."""
    start = parties.index(owner)
    others = [*parties[start + 1 :], *parties[:start]]
    between = [party for party in others if party != judge]
    return [owner, *between, *([] if owner == judge else [judge])]


def _vote(own: Own, common: int, judge: str) -> Generator[Send | Receive, Message, None]:
    """Accept a result or refuse it, and hear whether all accepted."""
    accepted = common >= own.bounds.min_common
    yield Send(judge, YES if accepted else NO)
    if not accepted:
        raise too_few_common(own, common)
    if (yield Receive(judge, 1)) != YES:
        raise refused_by_others()


def _decide(
    answers: Mapping[str, Message], parties: Sequence[str], label_party: str, accepted: bool = True
) -> Generator[Send | Receive, Message, None]:
    """Answer each party in turn, the label party last and only if all others accepted."""
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
    """Fewer common ids than a party accepts, for its own log alone."""
    return ConsentError(
        f"party '{own.party}' does not consent to so small an intersection",
        got=f"{spaced(common)} ids in common, of {spaced(len(own.ids))} of its own",
        want=f"at least {spaced(own.bounds.min_common)}",
        fix="vfl align FILE --preview counts what rules gain; min_common in its own [consent]",
    )


def too_few_ids(own: Own, owner: str, count: int) -> ConsentError:
    """A set of another party that is smaller than a party accepts."""
    return ConsentError(
        f"party '{own.party}' does not consent to an intersection with so small a set",
        got=f"{spaced(count)} ids of '{owner}'",
        want=f"at least {spaced(own.bounds.min_ids)}",
        fix="a larger table there, or a smaller min_ids in the [consent] of this party's own file",
    )


def too_many_ids(party: str, got: str, most: int) -> ConsentError:
    """Sets that are larger than a party accepts, for what it has itself."""
    return ConsentError(
        f"party '{party}' does not consent to an intersection with so large a set",
        got=got,
        want=f"at most {spaced(most)}",
        fix="a smaller set or padding; max_id_ratio or max_rows in the [consent] of its own file",
    )


def refused_by_others() -> ConsentError:
    """What a party says that hears of a refusal, and of no count."""
    return ConsentError(
        "another party does not consent to an alignment with so few ids, or so few in common",
        fix="its own log has the counts; compare how both write their ids",
    )


def other_size(sender: str) -> ProtocolError:
    """A message that is not of the protocol's form."""
    return ProtocolError(f"an alignment message of another form from '{sender}'")
