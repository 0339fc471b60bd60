"""Counters by which a party's peers notice that its store was restored from an earlier copy.

A store restored from a copy lacks its latest spending, and would send other contents under a nonce
that is already in use. The store itself cannot show that it was restored, but peers of later
sessions can notice it. Every store therefore has a counter, which increases with each announcement
and each sent frame. A party announces its counter at the beginning and the end of a session. Each
peer stores the largest value that it knows: the announced value, plus one for every frame received
since. If a peer receives an announced counter that has not increased, the peer refuses the session
before it sends any message.

The value on disk is never smaller than the value that a peer can know, because frames are counted
in blocks: a block is counted on disk before its first frame is sent. If a copy was made during a
session and is used later, peers therefore notice this if the session ended after the copy, or sent
more than a block. In a training with a journal of sent messages, a party also announces the
journal's length; peers then notice the copy after one more exchange.

Each refused attempt increases the counter of the restored store, so that peers would accept the
counter in the end. Before a party announces its counter, each peer therefore reports the largest
counter of this party that it knows. If the reported value is larger than the store's own counter,
the store refuses sessions with this peer until its party declares the restore. A peer with a false
report can only end its own sessions with the party, because a report never changes the party's
counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from vfl.config.experiment import MAX_STEPS
from vfl.config.toml import Settings
from vfl.core.errors import ProtocolError, RolledBackError, StorageError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import Seal, damaged, locked, read_sealed_json, write_sealed_json
from vfl.session.store.session_log import Head

#: Number of frames that are counted on disk together, before the first of them is sent.
BLOCK = 1 << 10
#: Increase of the counter after a declared restore; it is larger than any count that can have been
#: lost.
RESTORED = 1 << 32
MOST = 1 << 62
FOLDER = "witness"
#: Command with which a party declares that its newest store is lost.
RESTORED_BY = "vfl sessions party.toml --restored"


class Announcement(Settings):
    """Message that shows a peer how old a party's store is.

    Attributes:
        count: counter of the store; it is larger than in any earlier announcement.
        known: the largest counter of the receiver's store that this party knows.
        noted: number of exchanges of this training, up to the last one in the party's journal; None
            without a journal.
        head: head of the party's session log, which the receiver stores in its own log.
    """

    count: int = Field(gt=0, lt=MOST)
    known: int = Field(default=0, ge=0, lt=MOST)
    noted: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    head: Head = Head()

    @classmethod
    def parse(cls, content: Any, peer: str) -> Announcement:
        """Read the announcement of a peer.

        Raises:
            ProtocolError: the message has an unknown form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
            raise ProtocolError(f"party '{peer}' announces no counter of its store") from None


class Counts(Settings):
    """Counters on disk: the counter of this store, and the known counters of its peers.

    Attributes:
        count: largest value that the store has announced, or may have reached by sending frames.
        peers: the largest known value of each peer's counter.
        doubted: for each peer that reports a larger counter of this store than the store itself
            has, the reported value.
        lost_epsilon, lost_statistics: epsilon and number of statistics that the party declared as
            possibly spent but forgotten.
    """

    count: int = Field(default=0, ge=0)
    peers: dict[str, int] = Field(default_factory=dict)
    doubted: dict[str, int] = Field(default_factory=dict)
    lost_epsilon: float = Field(default=0.0, ge=0)
    lost_statistics: int = Field(default=0, ge=0)


class Witness:
    """A store's own counter and the counters of its peers; several processes may use them at once.

    Args:
        folder: folder of the store's sessions.
        party: party that owns the store.
        restored: command with which a party declares that its newest store is lost.
    """

    def __init__(self, folder: Path, party: str, restored: str = RESTORED_BY) -> None:
        self._folder, self._party, self._command = folder / FOLDER, party, restored
        self._path = self._folder / "counts.json"
        self._seal = Seal("counts of sessions", party, "all")

    def read(self) -> Counts:
        """Read the counters from disk; a store of an earlier vfl begins at 0.

        Raises:
            RunFolderError: the file is damaged.
        """
        if not self._path.exists():
            return Counts()
        try:
            return Counts.model_validate(read_sealed_json(self._path, self._seal)["counts"])
        except (KeyError, ValidationError):
            raise damaged(self._path) from None

    def announce(self) -> int:
        """Increase the counter above all earlier values, and reserve the next block of frames."""
        return self._change(lambda now: {"count": now.count + 1 + BLOCK}).count - BLOCK

    def require(self, known: int, peer: str) -> None:
        """Refuse to continue if a peer knows a larger counter of this store than the store itself.

        Raises:
            RolledBackError: a peer reports a larger counter, now or earlier.
        """
        now = self.read()
        if now.count < known:
            self._change(lambda now: {"doubted": {**now.doubted, peer: known}})
        elif peer not in now.doubted:
            return
        met = max(known, now.doubted.get(peer, 0))
        raise self._went_back(self._party, now.count, met, peer)

    def reserve(self, count: int) -> None:
        """Write a larger counter to disk before any peer can know the value."""
        self._change(lambda now: {"count": max(now.count, count)})

    def admit(self, peer: str, count: int) -> None:
        """Store the counter that a peer has announced.

        Raises:
            RolledBackError: the peer announced this value before, or has sent more frames since
                than this value counts.
        """

        def change(now: Counts) -> dict[str, Any]:
            if count <= (known := now.peers.get(peer, 0)):
                raise self._went_back(peer, count, known, f"party '{self._party}'")
            return {"peers": {**now.peers, peer: count}}

        self._change(change)

    def keep(self, counts: Mapping[str, int]) -> None:
        """Store the counters that peers have reached; a stored counter never decreases."""

        def change(now: Counts) -> dict[str, Any]:
            larger = {peer: max(one, now.peers.get(peer, 0)) for peer, one in counts.items()}
            return {"peers": now.peers | larger}

        if counts:
            self._change(change)

    def renamed(self, old: str, new: str) -> None:
        """Move the known counter of a peer to the peer's new name."""

        def change(now: Counts) -> dict[str, Any]:
            kept = {name: dict(getattr(now, name)) for name in ("peers", "doubted")}
            return {
                name: {new if peer == old else peer: count for peer, count in counts.items()}
                for name, counts in kept.items()
            }

        self._change(change)

    def restored(self, lost_epsilon: float, lost_statistics: int = 0) -> None:
        """Increase the counter beyond all forgotten values, because the store was restored.

        Args:
            lost_epsilon: epsilon that may have been spent since the copy was made.
            lost_statistics: statistics that may have been disclosed since the copy was made.
        """
        self._change(
            lambda now: {
                "count": now.count + RESTORED,
                "doubted": {},
                "lost_epsilon": now.lost_epsilon + lost_epsilon,
                "lost_statistics": now.lost_statistics + lost_statistics,
            }
        )

    def _change(self, change: Callable[[Counts], dict[str, Any]]) -> Counts:
        with locked(self._folder, math.inf):
            before = self.read()
            after = before.model_copy(update=change(before))
            if after != before:
                record = {"counts": after.model_dump(mode="json")}
                write_sealed_json(self._path, record, self._seal)
        return after

    def _went_back(self, party: str, count: int, known: int, witness: str) -> RolledBackError:
        return RolledBackError(
            f"the store of party '{party}' was restored from an earlier copy",
            where=f"count of party '{party}'",
            got=f"{count}, which it announces",
            want=f"more than {known}, which {witness} has seen",
            fix=f"restore the newest store at party '{party}'; if it is lost, declare it by "
            f"{self._command} there; docs/backups.md explains what that costs",
        )


class Standing:
    """Counters of one session: of the frames that this party sends and receives.

    Args:
        witness: witness of the store.
        party: this party.
        run: name of the session.
        noted: function that returns the length of the party's journal; see `Announcement`.
        received: for each peer, the number of exchanges of this training that it sent in earlier
            sessions.
        label_party: name of the label party, to which a feature party's stream leads.
        head: function that returns the head of the party's log.

    Attributes:
        received: for each peer, the number of exchanges that it has sent, as far as this party
            knows.
        heads: heads of the peers' logs, as they announced them.
    """

    def __init__(
        self,
        witness: Witness,
        party: str,
        run: str,
        label_party: str,
        noted: Callable[[], int | None] = lambda: None,
        received: Mapping[str, int] | None = None,
        head: Callable[[], Head] = Head,
    ) -> None:
        self._witness, self._run, self._noted, self._head = witness, run, noted, head
        self.heads: dict[str, Head] = {}
        self._leads, self._label_party = party == label_party, label_party
        self._sending = "down" if self._leads else "up"
        # The thread that admits parties may also announce, but only one thread sends.
        self._sent = self._base = self._reserved = 0
        self._counts: dict[str, int] = {}
        self.received: dict[str, int] = dict(received or {})

    def announce(self, peer: str = "") -> Announcement:
        """Announce this store's counter to a peer, and the known counter of the peer's store."""
        count = self._witness.announce()
        self._base, self._reserved = count - self._sent, count + BLOCK
        known, head = self.known_of(peer), self._head()
        return Announcement(count=count, noted=self._noted(), known=known, head=head)

    def known_of(self, peer: str) -> int:
        """Return the largest counter of a peer's store that this party knows."""
        return self._witness.read().peers.get(peer, 0)

    def require(self, known: int, peer: str) -> None:
        """Refuse a session with a peer that knows a larger counter of this store than its own.

        A counter larger than the store's own counter shows that the store was restored from an
        older copy.

        Raises:
            RolledBackError: this party's own store was restored from an older copy.
        """
        self._witness.require(known, f"party '{peer}'")

    def answer(self) -> Announcement:
        """Return this party's announcement to a peer that attaches.

        The announced counter is from the block that this session has reserved, so a full disk does
        not prevent the answer. If another session of the store has announced a larger counter
        since, the method reserves a new block on disk.
        """
        last = self._witness.read().count == self._reserved
        if not last or self._base + self._sent + 1 >= self._reserved:
            return self.announce()
        self._base += 1
        count = self._base + self._sent
        return Announcement(count=count, noted=self._noted(), head=self._head())

    def admit(self, peer: str, announced: Announcement) -> None:
        """Check that a peer's store was not restored from an older copy, and store its counter.

        Raises:
            RolledBackError: the peer's store was restored from an older copy.
        """
        self.admit_count(peer, announced.count)
        came = self.received.get(peer, 0)
        if announced.noted is not None and announced.noted < came:
            raise RolledBackError(
                f"party '{peer}' has lost the record of its messages in the training '{self._run}'",
                where=f"journal of party '{peer}'",
                got=f"exchanges up to {announced.noted}",
                want=f"up to {came}, which it sent",
                fix="train under another name; this training would send two contents under "
                "one nonce",
            )
        self._counts[peer], self.heads[peer] = announced.count, announced.head

    def admit_count(self, peer: str, count: int) -> None:
        """Admit a peer without a stream to this party; the peer has signed only its counter."""
        with suppress(StorageError):  # the count was compared, so a full disk ends no session
            self._witness.admit(peer, count)

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Count a frame; see `vfl.core.frame.Observer`."""
        if direction == self._sending:
            self._sent += 1
            if self._reserved and self._base + self._sent >= self._reserved:
                self._reserved = self._base + self._sent + BLOCK
                self._witness.reserve(self._reserved)
            return
        peer = party if self._leads else self._label_party
        if peer in self._counts:
            self._counts[peer] += 1
            if frame.kind in (Kind.CUT, Kind.GRAD) and not frame.branch:
                self.received[peer] = max(frame.step + 1, self.received.get(peer, 0))

    def conclude(self, counts: Mapping[str, int]) -> None:
        """Store the counters that peers announced at the end of a session."""
        for peer, count in counts.items():
            self._counts[peer] = max(count, self._counts.get(peer, 0))

    def write(self) -> None:
        """Write the known counters of peers to disk."""
        with suppress(StorageError):  # a later call writes all of them when there is room again
            self._witness.keep(self._counts)
