"""Counts by which the peers of a party notice that its store was put back from an earlier copy.

A store that goes back forgets what was spent, and would send other contents under a nonce that has
been used. Nothing in the store can show that; whoever has met the party since then can. So every
store keeps a count that only grows: it rises with each announcement and with each frame that is
sent. A party announces it when a session begins and when it ends, and each peer keeps the largest
count it knows of: the announced one, and one more for every frame that came since. A count that is
not above that is refused, before anything is sent, at whichever end notices.

What is on the disk is never below what a peer can know of: a block of frames is counted before the
first of them is sent. So a copy that was made during a session is noticed once that session has
ended, or has gone on for more than a block. A training that keeps a journal of what it sends
announces how far that goes, too: there one exchange is enough.

Each refused attempt moves the count of the store that went back, which would pass in the end. So a
peer also says what it knows of a party's count before the party announces one. Where that is more
than the store knows of, the store has no session with that peer until its party says that it was
put back. A peer that lies about what it has seen can end sessions with itself, and nothing more:
nobody changes a count because a peer says so.
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

#: Frames that are counted at once, before the first of them is sent.
BLOCK = 1 << 10
#: How far a count moves when its party says that a copy was put back: beyond all it has forgotten.
RESTORED = 1 << 32
MOST = 1 << 62
FOLDER = "witness"
#: The command by which a party says that its newest store is lost.
RESTORED_BY = "vfl sessions party.toml --restored"


class Announcement(Settings):
    """What a party says of the age of its store.

    Attributes:
        count: its count; larger than any that it has announced before.
        known: the largest count of the receiver's store that this party knows of.
        noted: exchanges of this training up to the last one in its journal; None without a journal.
        head: where its log of sessions stands, for the receiver to keep.
    """

    count: int = Field(gt=0, lt=MOST)
    known: int = Field(default=0, ge=0, lt=MOST)
    noted: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    head: Head = Head()

    @classmethod
    def parse(cls, content: Any, peer: str) -> Announcement:
        """Read what a peer announced.

        Raises:
            ProtocolError: it has another form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
            raise ProtocolError(f"party '{peer}' announces no count of its store") from None


class Counts(Settings):
    """What is on the disk.

    Attributes:
        count: the largest that the store has announced, or may have reached since.
        peers: the largest that each peer has, as far as this party knows.
        doubted: by whom more of this store has been met than it knew of, and how much.
        lost_epsilon, lost_statistics: what may have been spent and forgotten, by the party's own
            word.
    """

    count: int = Field(default=0, ge=0)
    peers: dict[str, int] = Field(default_factory=dict)
    doubted: dict[str, int] = Field(default_factory=dict)
    lost_epsilon: float = Field(default=0.0, ge=0)
    lost_statistics: int = Field(default=0, ge=0)


class Witness:
    """A store's own count and those of its peers; any number of processes may use it at once.

    Args:
        folder: of the store's sessions.
        party: whose store it is.
        restored: the command by which a party says that its newest store is lost.
    """

    def __init__(self, folder: Path, party: str, restored: str = RESTORED_BY) -> None:
        self._folder, self._party, self._command = folder / FOLDER, party, restored
        self._path = self._folder / "counts.json"
        self._seal = Seal("counts of sessions", party, "all")

    def read(self) -> Counts:
        """What is on the disk; a store of an earlier vfl begins at 0.

        Raises:
            RunFolderError: it is damaged.
        """
        if not self._path.exists():
            return Counts()
        try:
            return Counts.model_validate(read_sealed_json(self._path, self._seal)["counts"])
        except (KeyError, ValidationError):
            raise damaged(self._path) from None

    def announce(self) -> int:
        """A count above all that came before; the block that follows it is reserved."""
        return self._change(lambda now: {"count": now.count + 1 + BLOCK}).count - BLOCK

    def require(self, known: int, peer: str) -> None:
        """Refuse to go on where a peer has met more of this store than the store knows of.

        Raises:
            RolledBackError: it says that it has, now or earlier.
        """
        now = self.read()
        if now.count < known:
            self._change(lambda now: {"doubted": {**now.doubted, peer: known}})
        elif peer not in now.doubted:
            return
        met = max(known, now.doubted.get(peer, 0))
        raise self._went_back(self._party, now.count, met, peer)

    def reserve(self, count: int) -> None:
        """Have a count on the disk before a peer can know of it."""
        self._change(lambda now: {"count": max(now.count, count)})

    def admit(self, peer: str, count: int) -> None:
        """Keep what a peer announces.

        Raises:
            RolledBackError: it has announced as much before, or has sent what it does not count.
        """

        def change(now: Counts) -> dict[str, Any]:
            if count <= (known := now.peers.get(peer, 0)):
                raise self._went_back(peer, count, known, f"party '{self._party}'")
            return {"peers": {**now.peers, peer: count}}

        self._change(change)

    def keep(self, counts: Mapping[str, int]) -> None:
        """Keep the counts that peers have reached; none of them becomes smaller."""

        def change(now: Counts) -> dict[str, Any]:
            larger = {peer: max(one, now.peers.get(peer, 0)) for peer, one in counts.items()}
            return {"peers": now.peers | larger}

        if counts:
            self._change(change)

    def renamed(self, old: str, new: str) -> None:
        """Keep under another name what a peer's count is known to be."""

        def change(now: Counts) -> dict[str, Any]:
            kept = {name: dict(getattr(now, name)) for name in ("peers", "doubted")}
            return {
                name: {new if peer == old else peer: count for peer, count in counts.items()}
                for name, counts in kept.items()
            }

        self._change(change)

    def restored(self, lost_epsilon: float, lost_statistics: int = 0) -> None:
        """Move the count beyond all that was forgotten: the store was put back, and is to be used.

        Args:
            lost_epsilon: what may have been spent since the copy was made.
            lost_statistics: likewise.
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
            f"the store of party '{party}' was put back from an earlier copy",
            where=f"count of party '{party}'",
            got=f"{count}, which it announces",
            want=f"more than {known}, which {witness} has met",
            fix=f"put the newest store back at party '{party}'; if it is lost, {self._command} "
            "there says so, and docs/backups.md what that costs",
        )


class Standing:
    """The counts of one session: this party's frames as they are sent, its peers' as they come.

    Args:
        witness: of the store.
        party: whose end this is.
        run: the name of the session.
        noted: gives what the party's journal holds; see `Announcement`.
        received: exchanges of this training that came from each peer in earlier sessions.
        label_party: who is at the other end of a stream to a feature party.
        head: gives where the party's log stands.

    Attributes:
        received: exchanges that came from each peer, as far as is known.
        heads: where the logs of the peers that were met stand, as they announced it.
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
        # Announcements may come from the thread that admits parties; only one thread sends.
        self._sent = self._base = self._reserved = 0
        self._counts: dict[str, int] = {}
        self.received: dict[str, int] = dict(received or {})

    def announce(self, peer: str = "") -> Announcement:
        """What this party says to a peer now, and what it knows of it if it is named."""
        count = self._witness.announce()
        self._base, self._reserved = count - self._sent, count + BLOCK
        known, head = self.known_of(peer), self._head()
        return Announcement(count=count, noted=self._noted(), known=known, head=head)

    def known_of(self, peer: str) -> int:
        """The largest count of a peer's store that this one knows of."""
        return self._witness.read().peers.get(peer, 0)

    def require(self, known: int, peer: str) -> None:
        """Refuse a session with a peer that has met more of this store than it knows of.

        Raises:
            RolledBackError: this party's own store went back.
        """
        self._witness.require(known, f"party '{peer}'")

    def answer(self) -> Announcement:
        """What this party says to a peer that comes.

        It is taken from this session's block, so that a full disk keeps nobody away, unless another
        session of the store has announced more since.
        """
        last = self._witness.read().count == self._reserved
        if not last or self._base + self._sent + 1 >= self._reserved:
            return self.announce()
        self._base += 1
        count = self._base + self._sent
        return Announcement(count=count, noted=self._noted(), head=self._head())

    def admit(self, peer: str, announced: Announcement) -> None:
        """Go on with a peer whose store has not gone back.

        Raises:
            RolledBackError: it has.
        """
        self.admit_count(peer, announced.count)
        came = self.received.get(peer, 0)
        if announced.noted is not None and announced.noted < came:
            raise RolledBackError(
                f"party '{peer}' has forgotten what it sent in the training '{self._run}'",
                where=f"journal of party '{peer}'",
                got=f"exchanges up to {announced.noted}",
                want=f"up to {came}, which came from it",
                fix="train under another name; this one would show two contents under one nonce",
            )
        self._counts[peer], self.heads[peer] = announced.count, announced.head

    def admit_count(self, peer: str, count: int) -> None:
        """The same of a peer with no stream to this party, which signed its count alone."""
        with suppress(StorageError):  # it was compared; a full disk ends no session
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
        """Take the counts that peers announce at the end of a session."""
        for peer, count in counts.items():
            self._counts[peer] = max(count, self._counts.get(peer, 0))

    def write(self) -> None:
        """Have on the disk what came from peers so far."""
        with suppress(StorageError):  # once there is room, all of it is written
            self._witness.keep(self._counts)
