"""One party's part of a session that aligns rows: its protocol role, its messages, its consent.

The label party sends its requests to the other parties in turn. Each frame, in either direction,
carries a piece of a protocol message, or is empty. Messages between two feature parties also go
through the label party, but encrypted: otherwise the label party would see its own ids and a
feature party's ids encrypted under one key, and could compare these ids without the feature party's
consent.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vfl.config import PartyFile, memory_bytes
from vfl.core.errors import ConfigError, ConsentError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.datasets.alignment.gaps import Found, FoundRole, role_of
from vfl.datasets.alignment.ids import OwnIds
from vfl.datasets.alignment.positions import Agreed, Alignment, last_version
from vfl.datasets.alignment.protocols import (
    PROTOCOLS,
    Bounds,
    Message,
    Own,
    Receive,
    Send,
    too_many_ids,
)
from vfl.datasets.alignment.reused import Keys
from vfl.datasets.on_disk import DiskBytes, OnDisk, scratch
from vfl.datasets.table import spaced
from vfl.session.consent import PIECE_LIMIT_BYTES
from vfl.session.store.party_folder import own_ledger, table_format
from vfl.session.terms import AlignTerms
from vfl.transport.pairs import OFFER_BYTES

_PIECE, _LAST, _DONE, _BUSY = 1, 2, 4, 8
_HEAD_BYTES = 2
#: While a party computes, it sends a frame at this interval, in seconds, which shows that it still
#: runs; a party that sends none has died or hangs.
PATIENCE_S = 1.0


class Post:
    """The messages on one connection, which are sent in pieces.

    Long messages are buffered in files.

    Args:
        parties: all parties, in an order that is the same at every party.
        most_bytes: size limit of one message in bytes.
        place: folder for the buffered messages.

    Attributes:
        done: whether the party at the other end of the connection has its result.
        busy: whether the party at the other end of the connection still computes, and will send
            more messages.
    """

    def __init__(self, parties: Sequence[str], most_bytes: int, place: OnDisk) -> None:
        self.done = self.busy = False
        self._parties, self._most, self._place = list(parties), most_bytes, place
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._coming: DiskBytes | None = None
        self._count = self._sent = 0

    def put(self, party: str, payload: Message) -> None:
        """Queue a message, with the name of its final receiver or of its original sender."""
        self._outgoing.append((self._parties.index(party), payload))

    @property
    def waiting(self) -> bool:
        """Return whether a piece of a message is waiting to be sent."""
        return bool(self._outgoing)

    def add(self, messages: Sequence[Send]) -> None:
        """Queue several messages; each message names its receiver."""
        for sent in messages:
            self.put(sent.to, sent.payload)

    def frame(self, *, done: bool = False, busy: bool = False) -> Frame:
        """Return a frame with the next piece; if none waits, with the flags `done` and `busy`."""
        self._count += 1
        if self.waiting:
            return Frame(Kind.PROTOCOL, self._count, self._piece())
        flags = (_DONE if done else 0) | (_BUSY if busy else 0)
        return Frame(Kind.PROTOCOL, self._count, bytes([flags, 0]))

    def _piece(self) -> bytes:
        index, payload = self._outgoing[0]
        start, stop = self._sent, self._sent + PIECE_LIMIT_BYTES - _HEAD_BYTES
        last = stop >= len(payload)
        self._sent = 0 if last else stop
        if last:
            self._outgoing.popleft()
        return bytes([_PIECE | (_LAST if last else 0), index]) + payload[start:stop]

    def take(self, frame: Frame) -> tuple[str, Message] | None:
        """Return the message that this frame completes, with the party's name.

        The result is None if the frame completes no message.

        Raises:
            ProtocolError: the frame is no piece of an alignment message, or the whole message
                becomes too long.
        """
        head = bytes(frame.payload[:_HEAD_BYTES])
        if frame.kind is not Kind.PROTOCOL or len(head) < _HEAD_BYTES:
            raise ProtocolError("an unexpected message", got=frame.kind.name, want="PROTOCOL")
        flags, index = head
        self.done, self.busy = self.done or bool(flags & _DONE), bool(flags & _BUSY)
        if not flags & _PIECE:
            return None
        piece = bytes(frame.payload[_HEAD_BYTES:])
        size = len(piece) + (0 if self._coming is None else len(self._coming))
        if size > self._most or index >= len(self._parties):
            raise ProtocolError(
                "an alignment message is too long, or names an unknown party",
                got=f"{size} bytes",
                want=f"at most {self._most} bytes",
            )
        party, coming = self._parties[index], self._coming
        if coming is None and flags & _LAST:
            return party, piece
        self._coming = coming = coming or DiskBytes(self._place)
        coming.write(piece)
        if not flags & _LAST:
            return None
        self._coming = None
        return party, coming


class Player:
    """Runs a party's role in the protocol until the role needs a message that has not arrived.

    Attributes:
        found: result of the protocol; None until the role has finished.
    """

    def __init__(self, role: FoundRole) -> None:
        self.found: Found | None = None
        self._role, self._inbox = role, dict[str, deque[Message]]()
        self._waits: Send | Receive | None = None
        self._thread: threading.Thread | None = None
        self._outcome: list[Send] | BaseException = []

    def give(self, sender: str, payload: Message) -> None:
        """Pass a received message to the protocol."""
        self._inbox.setdefault(sender, deque()).append(payload)

    def advance_within(self, seconds: float) -> list[Send] | None:
        """Run `advance` in a thread.

        Return None if `advance` has not ended after this many seconds.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="vfl-align", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        self._thread = None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _work(self) -> None:
        try:
            self._outcome = self.advance()
        except BaseException as problem:
            self._outcome = problem

    def advance(self) -> list[Send]:
        """Run the role until it needs a message that has not arrived; return the messages to send.

        Raises:
            ConsentError, ProtocolError: see `vfl.datasets.alignment.protocols`.
        """
        sent: list[Send] = []
        step = self._waits
        try:
            while self.found is None:
                if step is None:
                    step = next(self._role)
                elif isinstance(step, Send):
                    sent.append(step)
                    step = next(self._role)
                elif box := self._inbox.get(step.sender):
                    payload = box.popleft()
                    if len(payload) > step.most_bytes:
                        raise ProtocolError(
                            f"'{step.sender}' sent a longer message than this protocol role accepts"
                        )
                    step = self._role.send(payload)
                else:
                    break
        except StopIteration as end:
            self.found = end.value
        self._waits = step
        return sent


class OwnAlignment:
    """One party's part in an alignment: its ids, its consent, and the alignment that it stores.

    Args:
        party: the party's own configuration file.
        terms: the agreed terms.

    Attributes:
        place: folder for ids and messages; the memory for them is limited by the party's file.

    Raises:
        ConsentError: the party's own configuration file allows no further alignment within 24
            hours.
        ConfigError: the protocol is available only in an experiment that runs in one process.
        DataError: see `OwnIds.read`; the error contains counts only.
    """

    def __init__(self, party: PartyFile, terms: AlignTerms) -> None:
        protocol = PROTOCOLS.make(terms.protocol)
        if protocol.refused:
            raise ConfigError(
                f"alignment '{terms.protocol}' {protocol.refused}",
                fix="choose -s align.protocol=ecdh; only an experiment in one process can use "
                "this protocol",
            )
        self.party, self.terms = party, terms
        self.folder = party.alignment_path(terms.alignment, of_predicted=terms.table == "predict")
        own, where = party.table, f"party '{party.party}'"
        source = party.predict_path if terms.table == "predict" else party.source_path
        form = table_format(own)
        if terms.table == "predict":
            form = replace(form, query=own.predict_query or own.query)
        memory = own.memory
        self.place = (
            scratch(party.store_path)
            if memory is None
            else OnDisk(party.store_path, memory_bytes(memory))
        )
        self.ids = OwnIds.read(source, own.id, form, where, terms.rules, self.place)
        self._begin()
        consent = party.consent
        self._most_asked = math.floor(consent.max_id_ratio * len(self.ids.keys))
        bounds = Bounds(consent.min_ids, consent.max_rows, consent.min_common, self._most_asked)
        self._keys: dict[str, Keys] = {}
        brought = Own(
            party.party, self.ids.keys, bounds, self.place, self._count_ids, self._kept_keys
        )
        rows = terms.missing_rows
        role = role_of(protocol, brought, terms.everybody, terms.label_party, rows)
        self.player = Player(role)
        self.most_bytes = protocol.id_bytes * consent.max_rows + OFFER_BYTES

    def advance(self, say: Callable[[str], None]) -> list[Send] | None:
        """Run the role for a short time.

        Return messages to send, or None while the role still computes.

        Args:
            say: function that writes to the party's own log; if the party refuses, only this log
                receives the counts.

        Raises:
            ConsentError: the party's limits do not allow the request; the error has no count,
                because every other party receives the error.
        """
        try:
            return self.player.advance_within(PATIENCE_S)
        except ConsentError as error:
            say(f"refused: {error.what}; {error.got}; wanted {error.want}; {error.fix}")
            raise refused() from None

    @contextmanager
    def staged(self, session: str) -> Iterator[Alignment]:
        """Yield the result; store it as the alignment's next version if the block raises no error.

        If a party cannot write the result, or does not receive it, all parties discard the result.
        If a connection breaks while the label party confirms the end, some parties may store a
        version that other parties lack; later sessions refuse this version.

        Args:
            session: identifier of this attempt, the same at every party.
        """
        terms, found = self.terms, self.player.found
        assert found is not None, "the role has ended"
        agreed = Agreed(
            terms.alignment, terms.everybody, terms.rules, terms.protocol, terms.missing_rows
        )
        version = last_version(self.folder) + 1
        made = Alignment.of(self.party.party, agreed, version, session, self.ids, found)
        made.stage(self.folder)
        keys = {self._path_of(peer): kept for peer, kept in self._keys.items()}
        try:
            for path, kept in keys.items():
                kept.stage(path, self.party.party)
            yield made
            for path in keys:
                Keys.commit(path)
            made.commit(self.folder)
        finally:
            for path in keys:
                Keys.discard(path)
            made.discard(self.folder)

    def _kept_keys(self, peer: str) -> Keys:
        """Return the keys that earlier alignments with this party and equal terms stored."""
        terms = self.terms.digest("run", "version")
        self._keys[peer] = Keys.kept(self._path_of(peer), terms, self.place)
        return self._keys[peer]

    def _path_of(self, peer: str) -> Path:
        return self.folder / f"{peer}.reused"

    def _begin(self) -> None:
        """Record on disk that an alignment begins, before any message is sent.

        Raises:
            ConsentError: with this alignment, the number of alignments would exceed the daily
                limit.
        """
        with own_ledger(self.party).day() as day:
            if day.alignments >= self.party.consent.max_alignments:
                raise ConsentError(
                    f"party '{self.party.party}' does not consent to another alignment within 24 "
                    "hours",
                    got=f"{day.alignments} alignments in the last 24 hours",
                    want=f"at most {self.party.consent.max_alignments} alignments in 24 hours",
                    fix="raise max_alignments in [consent] of that party's own file",
                )
            day.begin()

    def _count_ids(self, owner: str, ids: int) -> None:
        """Record on disk how many ids another party queries; the caller answers only afterwards.

        Raises:
            ConsentError: with this query, the other parties' queries of the last 24 hours would
                exceed this party's limit of ids.
        """
        with own_ledger(self.party).day() as day:
            if (total := day.ids + ids) > self._most_asked:
                got = f"{spaced(ids)} ids of '{owner}', {spaced(total)} within 24 hours"
                raise too_many_ids(self.party.party, got, self._most_asked)
            day.ask(ids)


def refused() -> ConsentError:
    """Return the error that other parties receive when one party refuses.

    The error contains no count, because a count could disclose the size of the intersection.
    """
    return ConsentError(
        "a party does not consent to this alignment",
        fix="see that party's own log; check that both parties write their ids in the same way",
    )
