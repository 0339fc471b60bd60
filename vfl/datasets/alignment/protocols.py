"""Private set intersection of N parties: which of my rows has everybody, and in which order.

A role of a protocol is a generator: it yields what it sends and what it waits for, and knows no
network. `play` runs all roles in one process; a session runs one of them over its stream. What a
role gives back are positions of the party's own rows, in an order that is the same at all parties.

All parties follow the protocol, or the label party does not: then it can put ids into its set that
it has no rows for. So no protocol tells the label party anything before every other party has seen
how many ids are common and has accepted that. It is not told the number that was refused.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np

from vfl.core.errors import BadOptionError, ConsentError, ProtocolError, VFLError
from vfl.core.frame import Payload
from vfl.core.registry import Registry, require_range
from vfl.datasets.alignment import ristretto
from vfl.datasets.table import spaced

HELPER = "helper"
TAG_BYTES = KEY_BYTES = 16
_INDEX = np.dtype("<u4")
_MOST_IDS = 2**28
YES, NO = b"\x01", b"\x00"
_LIMITS = struct.Struct("<II")  # the fewest and the most ids of others that a party accepts


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another role."""

    to: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message of at most so many bytes."""

    sender: str
    most_bytes: int


#: Yields messages, is sent the payloads it waits for, and returns int64 positions.
Role = Generator[Send | Receive, bytes, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one party accepts.

    Attributes:
        min_ids, max_ids: of every other party's set, padding included.
        min_common: ids that all have; fewer are told to nobody but this party's own log.
    """

    min_ids: int = 1
    max_ids: int = _MOST_IDS
    min_common: int = 1


@dataclass(frozen=True, slots=True)
class Own:
    """What one party brings.

    Attributes:
        party: its name.
        ids: normalised, each once.
        bounds: what it accepts.
    """

    party: str
    ids: Sequence[bytes] = field(repr=False)
    bounds: Bounds = Bounds()


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

    def helping(self, parties: Sequence[str], label_party: str) -> Role:
        """The role of the helper, where there is one."""
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
            key = yield Receive(label_party, KEY_BYTES)
            if len(key) != KEY_BYTES:
                raise other_size(label_party)
        tags = tags_of(own.ids, key)
        tags = np.concatenate([tags, _as_tags(os.urandom(TAG_BYTES * self.dummies(own)))])
        order, bounds = _order(*_halves(tags)), own.bounds
        limits = _LIMITS.pack(bounds.min_ids, bounds.max_ids)
        yield Send(HELPER, limits + tags[order].tobytes())
        size = -(-len(tags) // 8)
        answer = yield Receive(HELPER, 1 + size)
        if answer[:1] == YES and len(answer) == 1 + size:
            packed = np.frombuffer(answer, np.uint8, offset=1)
            positions: np.ndarray = order[np.unpackbits(packed, count=len(tags)).astype(bool)]
        elif answer == NO:
            raise refused_by_others()
        else:
            raise other_size(HELPER)
        if len(positions) and positions.max() >= len(own.ids):
            raise ProtocolError("the helper calls a random tag common")
        yield from _vote(own, len(positions), HELPER)
        return positions

    def helping(self, parties: Sequence[str], label_party: str) -> Role:
        """Compare, answer the label party last, and see that all accept."""
        sets, limits = [], []
        for each in parties:
            payload = yield Receive(each, _LIMITS.size + TAG_BYTES * _MOST_IDS)
            if len(payload) < _LIMITS.size:
                raise other_size(each)
            limits.append(_LIMITS.unpack_from(payload))
            tags = _as_tags(payload[_LIMITS.size :], each)
            if not _ascends(tags):
                raise ProtocolError(f"the tags of '{each}' are not in order, or one stands twice")
            sets.append(tags)
        sizes = list(map(len, sets))
        for index, (least, most) in enumerate(limits):
            others = sizes[:index] + sizes[index + 1 :]
            if min(others) < least or max(others) > most:
                for each in parties:
                    yield Send(each, NO)
                return np.empty(0, dtype=np.int64)
        answers = {}
        for each, tags, rows in zip(parties, sets, common_rows(sets), strict=True):
            bits = np.zeros(len(tags), dtype=bool)
            bits[rows] = True
            answers[each] = YES + np.packbits(bits).tobytes()
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
        shuffled = np.argsort(np.frombuffer(os.urandom(8 * count), "<u8"), kind="stable")
        points = ristretto.points_of([own.ids[row] for row in shuffled])
        points += ristretto.random_points(self.dummies(own))
        sizes = {me: len(points) // ristretto.POINT_BYTES}
        mine = ristretto.multiply(points, scalar)
        routes = {owner: _route(owner, parties, judge) for owner in parties}
        yield Send(routes[me][1], mine)
        finals: dict[str, np.ndarray] = {}
        for hop in range(1, len(parties)):
            for owner in (owner for owner, route in routes.items() if route[hop] == me):
                most = ristretto.POINT_BYTES * own.bounds.max_ids
                payload = yield Receive(routes[owner][hop - 1], most)
                sizes[owner] = len(payload) // ristretto.POINT_BYTES
                if sizes[owner] < own.bounds.min_ids:
                    raise too_few_ids(own, owner, sizes[owner])
                moved = ristretto.multiply(payload, scalar, f"'{owner}'")
                if hop + 1 < len(parties):
                    yield Send(routes[owner][hop + 1], moved)
                elif owner == judge:
                    yield Send(judge, _short(moved).tobytes())
                else:
                    finals[owner] = _short(moved)
        if me != judge:
            answer = yield Receive(judge, 1 + _INDEX.itemsize * sizes[me])
            if answer == NO:
                raise refused_by_others()
            if answer[:1] != YES or (len(answer) - 1) % _INDEX.itemsize:
                raise other_size(judge)
            found = np.frombuffer(answer, _INDEX, offset=1).astype(np.int64)
            if len(np.unique(found)) != len(found) or (len(found) and found.max() >= count):
                raise ProtocolError(f"'{judge}' calls rows common that are not there")
            yield from _vote(own, len(found), judge)
            positions: np.ndarray = shuffled[found]
            return positions
        payload = yield Receive(routes[me][-1], TAG_BYTES * sizes[me])
        finals[me] = _as_tags(payload, routes[me][-1])
        if len(finals[me]) != sizes[me]:
            raise other_size(routes[me][-1])
        rows = dict(zip(finals, common_rows(list(finals.values())), strict=True))
        answers = {
            party: YES + found.astype(_INDEX).tobytes()
            for party, found in rows.items()
            if party != me
        }
        accepted = len(rows[me]) >= own.bounds.min_common
        yield from _decide(answers, parties, label_party, accepted)
        if not accepted:
            raise too_few_common(own, len(rows[me]))
        if len(rows[me]) and rows[me].max() >= count:
            raise ProtocolError("a point that stands for no id is called common")
        positions = shuffled[rows[me]]
        return positions


class WholeProtocol(Protocol):
    """One of another system, which plays all parties at once and on this machine alone."""

    refused = "plays all parties in one process"

    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        raise NotImplementedError

    @abstractmethod
    def find(self, owns: Sequence[Own]) -> dict[str, np.ndarray]:
        """Int64 positions of each party's rows in the common order, by party."""


_ROOM = "vfl.datasets.alignment"
PROTOCOLS = Registry(
    "alignment",
    Protocol,  # type: ignore[type-abstract]
    {
        "ecdh": f"{_ROOM}.protocols:EcdhPsi",
        "openmined": f"{_ROOM}.openmined:OpenminedPsi",
        "server_aided": f"{_ROOM}.protocols:ServerAided",
        "spu": f"{_ROOM}.spu:Spu",
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
    observe: Callable[[str, str, bytes], None] = lambda sender, to, payload: None,
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
        int64 positions of each party's rows in the common order, by party; and what was sent, which
        is not counted of another system that plays all parties.

    Raises:
        ConsentError: a party accepts none so small; the first that says so is heard.
        ProtocolError: a message of another form.
        SpecError: no such protocol.
    """
    parties, protocol = [own.party for own in owns], PROTOCOLS.make(spec)
    if isinstance(protocol, WholeProtocol):
        rows = protocol.find(owns)
        for own in owns:
            if len(rows[own.party]) < own.bounds.min_common:
                raise too_few_common(own, len(rows[own.party]))
        return rows, Traffic({}, {})
    roles = {own.party: PROTOCOLS.make(spec).role(own, parties, label_party) for own in owns}
    if protocol.helper:
        roles[HELPER] = PROTOCOLS.make(spec).helping(parties, label_party)
    found, traffic = run_roles(roles, observe)
    found.pop(HELPER, None)
    return found, traffic


Result = TypeVar("Result")


def run_roles(
    roles: Mapping[str, Generator[Send | Receive, bytes, Result]],
    observe: Callable[[str, str, bytes], None] = lambda sender, to, payload: None,
) -> tuple[dict[str, Result], Traffic]:
    """What roles that are played in this process come to, by party, and what was sent.

    Raises:
        VFLError: what ended a role first.
    """
    boxes: dict[tuple[str, str], deque[bytes]] = {}
    sent, messages = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    found: dict[str, Result] = {}
    waiting: dict[str, Receive | None] = dict.fromkeys(roles)
    failed: VFLError | None = None
    moved = True
    while waiting and moved:
        moved = False
        for name in list(waiting):
            wanted, payload = waiting[name], b""
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


def tags_of(ids: Sequence[bytes], key: bytes) -> np.ndarray:
    """Keyed BLAKE2b of each id, cut to 16 bytes by its own parameter; uint8, axes (ids, 16)."""
    blake, size = hashlib.blake2b, TAG_BYTES
    return _as_tags(b"".join([blake(each, digest_size=size, key=key).digest() for each in ids]))


def common_rows(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rows of each set whose tags all sets have, in ascending order of the tags.

    Args:
        sets: uint8 tags, axes (rows, 16), of each set each tag once. All 16 bytes are compared.

    Raises:
        ProtocolError: a set has a tag twice.
    """
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
    """The common ones of two sets of tags, in ascending order, as their halves are."""
    (high, low), (theirs, more) = left, right
    if not len(theirs):
        return theirs, more
    found = np.minimum(np.searchsorted(theirs, high), len(theirs) - 1)
    same = (theirs[found] == high) & (more[found] == low)
    return high[same], low[same]


def _common_by_bytes(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same where two tags of a set begin with the same 8 bytes; one in 10^7 sets of 10^6."""
    rows = [{bytes(tag): row for row, tag in enumerate(tags)} for tags in sets]
    if any(len(own) < len(tags) for own, tags in zip(rows, sets, strict=True)):
        raise ProtocolError("a set has one of its ids twice")
    common = sorted(set(rows[0]).intersection(*rows[1:]))
    return [np.array([own[tag] for tag in common], dtype=np.int64) for own in rows]


def _halves(tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and last 8 bytes of each tag as numbers in the order of the bytes."""
    words = np.ascontiguousarray(tags).view(">u8").astype(np.uint64)
    return words[:, 0], words[:, 1]


def _order(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """What sorts tags by their bytes."""
    order = np.argsort(high, kind="stable")
    ordered = high[order]
    return np.lexsort((low, high)) if (ordered[1:] == ordered[:-1]).any() else order


def _ascends(tags: np.ndarray) -> bool:
    high, low = _halves(tags)
    return bool(((high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))).all())


def _as_tags(payload: Payload, sender: str = "this party") -> np.ndarray:
    if len(payload) % TAG_BYTES:
        raise other_size(sender)
    return np.frombuffer(payload, np.uint8).reshape(-1, TAG_BYTES)


def _short(points: bytes) -> np.ndarray:
    """16 bytes of each encoding that hold no fixed bit."""
    return np.frombuffer(points, np.uint8).reshape(-1, ristretto.POINT_BYTES)[:, 8 : 8 + TAG_BYTES]


def _route(owner: str, parties: Sequence[str], judge: str) -> list[str]:
    """Who multiplies a set, its owner first; the party that compares last, unless it is its own."""
    start = parties.index(owner)
    others = [*parties[start + 1 :], *parties[:start]]
    between = [party for party in others if party != judge]
    return [owner, *between, *([] if owner == judge else [judge])]


def _vote(own: Own, common: int, judge: str) -> Generator[Send | Receive, bytes, None]:
    """Accept a result or refuse it, and hear whether all accepted."""
    accepted = common >= own.bounds.min_common
    yield Send(judge, YES if accepted else NO)
    if not accepted:
        raise too_few_common(own, common)
    if (yield Receive(judge, 1)) != YES:
        raise refused_by_others()


def _decide(
    answers: Mapping[str, bytes], parties: Sequence[str], label_party: str, accepted: bool = True
) -> Generator[Send | Receive, bytes, None]:
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


def refused_by_others() -> ConsentError:
    """What a party says that hears of a refusal, and of no count."""
    return ConsentError(
        "another party does not consent to an alignment with so few ids, or so few in common",
        fix="its own log has the counts; compare how both write their ids",
    )


def other_size(sender: str) -> ProtocolError:
    """A message that is not of the protocol's form."""
    return ProtocolError(f"an alignment message of another form from '{sender}'")
