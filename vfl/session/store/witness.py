"""Counters that show a party's peers when its store was restored from an earlier copy.

A store that was restored from a copy has lost its latest records of privacy spending, and would
send new contents under a nonce that it has already used. The store itself cannot show that it was
restored, but the other parties (peers) of later sessions can notice the restore. Every store
therefore has a counter, which increases with each announcement of the counter and with each frame
that the party sends. A party announces its counter at the beginning and the end of a session. Each
peer stores the largest value that it knows: the announced value, plus one for every frame received
since. If a peer receives an announced counter that is not larger than the stored value, the peer
refuses the session before any cut or gradient is sent.

The value on disk is never smaller than the value that a peer can know, because the party counts
sent frames in blocks: the counter on disk increases by a whole block before the block's first frame
is sent. Peers notice the later use of a copy that was made during a session, if the session ended
after the copy, or sent more frames than a block. In a training with a journal of sent messages, a
party also announces the length of the journal; peers then notice the copy if one more exchange
followed.

Each session that peers refuse increases the counter of the restored store, so the counter would
become large enough after many attempts. Before a party announces its counter, each peer therefore
reports the largest counter of this party that it knows. If the reported value is larger than the
store's own counter, the party refuses sessions with this peer until the party declares that it
restored the store. A peer that reports a false value can only end its own sessions with the party,
because a report never changes the party's counter.
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

#: Number of frames by which the counter on disk increases before the first frame of a block is
#: sent.
BLOCK = 1 << 10
#: Increase of the counter after a declared restore; it is larger than any number of frames that the
#: copy can lack.
RESTORED = 1 << 32
MOST = 1 << 62
FOLDER = "witness"
#: Command line with which a party declares that the newest state of its store is lost.
RESTORED_BY = "vfl sessions party.toml --restored"


class Announcement(Settings):
    """Message that shows a peer whether the sender's store was restored from an earlier copy.

    Attributes:
        count: counter of the sender's store; it is larger than in any earlier announcement.
        known: the largest counter of the receiver's store that the sender knows.
        noted: number of exchanges of this training up to and including the last one in the sender's
            journal; None without a journal.
        head: head of the sender's session log, which the receiver stores in its own log.
    """

    count: int = Field(gt=0, lt=MOST)
    known: int = Field(default=0, ge=0, lt=MOST)
    noted: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    head: Head = Head()

    @classmethod
    def parse(cls, content: Any, peer: str) -> Announcement:
        """Parse the announcement of a peer.

        Raises:
            ProtocolError: the message has an unknown form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
            raise ProtocolError(f"party '{peer}' did not send the counter of its store") from None


class Counts(Settings):
    """Counters on disk: the counter of this party's store, and the last known counter of each peer.

    Attributes:
        count: the largest value that the party has announced, or may have reached by sending
            frames.
        peers: the largest known value of each peer's counter, by peer.
        doubted: for each peer that reported a larger counter of this store than the counter on
            disk, the reported value.
        lost_epsilon, lost_statistics: epsilon and number of statistics that may have been spent
            without a record, as the party declared after a restore.
    """

    count: int = Field(default=0, ge=0)
    peers: dict[str, int] = Field(default_factory=dict)
    doubted: dict[str, int] = Field(default_factory=dict)
    lost_epsilon: float = Field(default=0.0, ge=0)
    lost_statistics: int = Field(default=0, ge=0)


class Witness:
    """A store's own counter and the counters of its peers.

    Several processes may use a store at once.

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
        """Read the counters from disk; the store of an earlier vfl version begins at 0.

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
        """Increase this store's counter above all earlier values, and reserve a block of frames."""
        return self._change(lambda now: {"count": now.count + 1 + BLOCK}).count - BLOCK

    def require(self, known: int, peer: str) -> None:
        """Raise an error if a peer knows a larger counter of this store than the one on disk.

        Raises:
            RolledBackError: this peer reports a larger counter than the counter on disk, or
                reported one earlier.
        """
        now = self.read()
        if now.count < known:
            self._change(lambda now: {"doubted": {**now.doubted, peer: known}})
        elif peer not in now.doubted:
            return
        met = max(known, now.doubted.get(peer, 0))
        want = f"at least {met}, which {peer} knows"
        if now.count >= met:  # the counter has increased since the peer reported its number
            want = f"a declared loss, because {peer} knew {met} when the counter was smaller"
        raise self._went_back(self._party, f"{now.count} on disk", want)

    def reserve(self, count: int) -> None:
        """Write a larger counter to disk before any peer can learn the new value."""
        self._change(lambda now: {"count": max(now.count, count)})

    def admit(self, peer: str, count: int) -> None:
        """Store the counter that a peer has announced; the counter must have increased.

        Raises:
            RolledBackError: the announced counter is not larger than the known counter of the peer,
                which includes the frames received from it.
        """

        def change(now: Counts) -> dict[str, Any]:
            if count <= (known := now.peers.get(peer, 0)):
                want = f"more than {known}, which party '{self._party}' knows"
                raise self._went_back(peer, f"{count}, as the party announced", want)
            return {"peers": {**now.peers, peer: count}}

        self._change(change)

    def keep(self, counts: Mapping[str, int]) -> None:
        """Store the counters that peers have reached.

        The method never decreases a stored counter.
        """

        def change(now: Counts) -> dict[str, Any]:
            larger = {peer: max(one, now.peers.get(peer, 0)) for peer, one in counts.items()}
            return {"peers": now.peers | larger}

        if counts:
            self._change(change)

    def renamed(self, old: str, new: str) -> None:
        """Move the stored counter of a renamed peer to the peer's new name."""

        def change(now: Counts) -> dict[str, Any]:
            kept = {name: dict(getattr(now, name)) for name in ("peers", "doubted")}
            return {
                name: {new if peer == old else peer: count for peer, count in counts.items()}
                for name, counts in kept.items()
            }

        self._change(change)

    def restored(self, lost_epsilon: float, lost_statistics: int = 0) -> None:
        """After a declared restore, increase the counter beyond all values that peers can know.

        Args:
            lost_epsilon: epsilon that this party may have spent after the copy was made.
            lost_statistics: number of statistics that this party may have disclosed after the copy
                was made.
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

    def _went_back(self, party: str, got: str, want: str) -> RolledBackError:
        return RolledBackError(
            f"the store of party '{party}' was restored from an earlier copy",
            where=f"store counter of party '{party}'",
            got=got,
            want=want,
            fix=f"restore the newest store at party '{party}'; if it is lost, that party declares "
            f"the loss by {self._command}; docs/backups.md explains the consequences",
        )


class Standing:
    """Counters during one session, which increase with frames sent and frames received.

    Args:
        witness: the counters of the store on disk.
        party: this party.
        run: name of the session's run.
        noted: function that returns the number of exchanges that the party's journal covers; see
            `Announcement.noted`.
        received: for each peer, the number of exchanges of this training that the peer sent in
            earlier sessions.
        label_party: name of the label party, to which a feature party's only stream leads.
        head: function that returns the head of the party's log.

    Attributes:
        received: for each peer, the number of exchanges of this training that the peer has sent, as
            far as this party knows.
        heads: heads of the peers' session logs, as the peers announced them.
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
        # The thread that admits parties may announce counters at the same time, but only one thread
        # sends frames.
        self._sent = self._base = self._reserved = 0
        self._counts: dict[str, int] = {}
        self.received: dict[str, int] = dict(received or {})

    def announce(self, peer: str = "") -> Announcement:
        """Return an announcement to a peer: this store's counter, and the peer's last known."""
        count = self._witness.announce()
        self._base, self._reserved = count - self._sent, count + BLOCK
        known, head = self.known_of(peer), self._head()
        return Announcement(count=count, noted=self._noted(), known=known, head=head)

    def known_of(self, peer: str) -> int:
        """Return the largest counter of a peer's store that this party knows."""
        return self._witness.read().peers.get(peer, 0)

    def require(self, known: int, peer: str) -> None:
        """Refuse a session if the peer knows a larger counter of this store than it has.

        Such a peer shows that this party's store was restored from an older copy.

        Raises:
            RolledBackError: this party's own store was restored from an older copy.
        """
        self._witness.require(known, f"party '{peer}'")

    def answer(self) -> Announcement:
        """Return this party's announcement to a peer that has just connected.

        The announced counter is taken from the block that this session has already reserved on
        disk, so a full disk does not prevent the answer. If another session of the same store has
        announced a larger counter since, the method reserves a new block on disk.
        """
        last = self._witness.read().count == self._reserved
        if not last or self._base + self._sent + 1 >= self._reserved:
            return self.announce()
        self._base += 1
        count = self._base + self._sent
        return Announcement(count=count, noted=self._noted(), head=self._head())

    def admit(self, peer: str, announced: Announcement) -> None:
        """Check that a peer's store was not restored from an old copy; store its counter.

        Raises:
            RolledBackError: the peer's store was restored from an older copy.
        """
        self.admit_count(peer, announced.count)
        came = self.received.get(peer, 0)
        if announced.noted is not None and announced.noted < came:
            raise RolledBackError(
                f"party '{peer}' has lost part of its journal of messages in the training "
                f"'{self._run}'",
                where=f"journal of party '{peer}'",
                got=f"a journal up to exchange {announced.noted}",
                want=f"a journal up to exchange {came}, which the party has sent",
                fix="train under another name; this training could send two different messages "
                "under one nonce",
            )
        self._counts[peer], self.heads[peer] = announced.count, announced.head

    def admit_count(self, peer: str, count: int) -> None:
        """Check and store the counter of a peer without a direct stream.

        The peer signed this counter.

        Raises:
            RolledBackError: the peer's store was restored from an older copy.
        """
        # the counter was compared with the one on disk, so a full disk need not end the session
        with suppress(StorageError):
            self._witness.admit(peer, count)

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Count a sent or received frame; see `vfl.core.frame.Observer`."""
        if direction == self._sending:
            self._sent += 1
            if self._reserved and self._base + self._sent >= self._reserved:
                self._reserved = self._base + self._sent + BLOCK
                self._witness.reserve(self._reserved)
            return
        peer = party if self._leads else self._label_party
        if peer in self._counts:
            self._counts[peer] += 1
            if frame.kind in (Kind.CUT, Kind.GRAD) and not frame.peer:
                self.received[peer] = max(frame.step + 1, self.received.get(peer, 0))

    def conclude(self, counts: Mapping[str, int]) -> None:
        """Store the counters that peers announced at the session's end."""
        for peer, count in counts.items():
            self._counts[peer] = max(count, self._counts.get(peer, 0))

    def write(self) -> None:
        """Write all known counters of peers to disk."""
        with suppress(StorageError):  # if the disk is full, a later call writes all counters
            self._witness.keep(self._counts)
