"""The further ranks of a party: processes that rank 0 starts beside itself, and their orders.

Rank 0 is the process that has the session. It starts each further rank with `vfl party-rank`, whose
standard input brings one line of JSON, its order: which rank it is, where the ranks meet, the
party's own file, and what gets it onto a stream of its own, token included. What a rank says back
are lines of JSON on its standard output. A rank ends when its standard input closes, which the end
of rank 0 does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self

from vfl.core.errors import (
    ConfigError,
    DisagreementError,
    LostPeerError,
    LostRankError,
    VFLError,
    read_record,
    redacted_traceback,
)
from vfl.core.frame import Frame
from vfl.core.processes import Worker
from vfl.core.text import printable_lines
from vfl.datasets import PartyData
from vfl.session.handshake import unexpected
from vfl.session.ranks.group import ALONE, Ranks, lost

COMMAND = (sys.executable, "-P", "-m", "vfl", "party-rank")
#: How long rank 0 looks for the rank that ended, and lets the others end by themselves.
_GRACE_S = 10.0
#: How long a rank has to end once asked to; one that waits for another does not notice.
_TOLD_S = 2.0
_TICK_S = 0.05


class Polled(Protocol):
    """A stream that may say why its other end has stopped."""

    def poll(self) -> Frame | None:
        """The next frame if it is there; what the other end stopped with is raised."""


class FurtherRanks:
    """The further ranks of one party in one session; a context manager.

    Leaving it with a `LostRankError` finds out which rank was lost, and why. What another party
    said, or a stream that is gone, explains it first.

    Args:
        party: whose ranks they are.
        size: how many there are, this process included.
        patience_s: how long a rank may take to be ready, and to answer once the training goes.

    Attributes:
        streams: asked first why a rank was lost, for another party may have said so.
    """

    def __init__(self, party: str, size: int, patience_s: float) -> None:
        self.party, self.size = party, size
        self.streams: Sequence[Polled] = ()
        self._patience_s = patience_s

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are here."""
        raise NotImplementedError

    @property
    def further(self) -> range:
        """The ranks that are processes of their own."""
        return range(1, self.size)

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """Give a rank its order.

        Args:
            rank: from 1.
            order: what `play_rank` is to do; JSON values only.
        """
        raise NotImplementedError

    def receive(self, rank: int) -> Mapping[str, Any]:
        """The next thing a rank says.

        Raises:
            LostRankError: it ended, or was silent for too long.
        """
        raise NotImplementedError

    def join_group(self, data: PartyData) -> Ranks:
        """The group of all ranks, once each further one is ready for it.

        Args:
            data: the party's rows, which every rank must have.
        """
        raise NotImplementedError

    def agree(self, weights_sha256: str) -> None:
        """Compare what all ranks have trained.

        Raises:
            DisagreementError: a rank has other weights.
        """
        for rank in self.further:
            if self.receive(rank).get("weights") != weights_sha256:
                raise DisagreementError(
                    f"rank {rank} of party '{self.party}' has other weights than rank 0",
                    want="the same sums of gradients at every rank",
                    fix="run every rank on the same kind of processor or card",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if isinstance(error, LostRankError):
                for stream in self.streams:
                    while stream.poll() is not None:
                        pass
                self._find_lost()
        finally:
            self._end(error)

    def _find_lost(self) -> None:
        """Raise the error of the rank that ended, if it is not yet known."""
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """Let go of all ranks; after an error at once."""
        raise NotImplementedError


class RankProcesses(FurtherRanks):
    """Those that are processes beside rank 0; of one rank nothing.

    Args:
        party, size, patience_s: see `FurtherRanks`.
        device: where rank 0's models run.
    """

    def __init__(self, party: str, size: int, patience_s: float, device: str = "cpu") -> None:
        super().__init__(party, size, patience_s)
        self._device = device
        self._processes: dict[int, Worker] = {}
        self._replies: dict[int, queue.Queue[Mapping[str, Any] | None]] = {}
        self._failed: dict[int, VFLError] = {}
        # Only this user can read it; torch's other store would listen at a port.
        self._meeting = TemporaryDirectory(prefix="vfl-ranks-") if size > 1 else None

    @property
    def one_machine(self) -> bool:
        """See `FurtherRanks`."""
        return True

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """See `FurtherRanks`; starts the process."""
        process = Worker(f"rank {rank}", COMMAND, os.environ)
        self._processes[rank], self._replies[rank] = process, queue.Queue()
        reader = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        reader.start()
        group = {"party": self.party, "rank": rank, "size": self.size, "place": self._place}
        order = {**order, "group": {**group, "patience_s": self._patience_s}}
        process.send(json.dumps(order))

    def receive(self, rank: int) -> Mapping[str, Any]:
        """See `FurtherRanks`."""
        try:
            reply = self._replies[rank].get(timeout=self._patience_s)
        except queue.Empty:
            raise lost(self.party, rank, f"silent for {self._patience_s:g} s") from None
        if reply is None:
            self._replies[rank].put(None)
            raise self._cause(rank)
        return reply

    def join_group(self, data: PartyData) -> Ranks:
        """See `FurtherRanks`; they read the same files."""
        if self.size == 1:
            return ALONE
        for rank in self.further:
            self.receive(rank)
        store = store_at(self._place, self.size, self._patience_s)
        return Ranks.join_group(self.party, 0, self.size, store, self._patience_s, self._device)

    @property
    def _place(self) -> str:
        """The file by which the ranks find each other."""
        assert self._meeting is not None, "there are several"
        return str(Path(self._meeting.name) / "store")

    def _find_lost(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            for rank, process in self._processes.items():
                if not process.alive:
                    raise self._cause(rank) from None
            time.sleep(_TICK_S)

    def _cause(self, rank: int) -> VFLError:
        """The error of a rank that has ended; that of a party it has lost is that of any stream."""
        code = self._processes[rank].wait()
        while self._replies[rank].get() is not None:  # its last messages have all been read by then
            pass
        self._replies[rank].put(None)
        if (failure := self._failed.get(rank)) is not None:
            known = failure.code, failure.what, failure.where, failure.fix
            return ended(self.party, rank, *known)
        return lost(self.party, rank, f"signal {-code}" if code < 0 else f"exit {code}")

    def _listen(self, rank: int) -> None:
        """Take in what a rank says, until it ends."""
        with suppress(LostPeerError):
            while True:
                reply = json.loads(self._processes[rank].receive())
                if failure := reply.get("failure"):
                    texts = read_record(failure, f"rank {rank}", printable_lines)
                    found = VFLError(
                        texts.pop("what"), **{k: texts[k] for k in texts if k != "code"}
                    )
                    found.code = texts["code"]  # type: ignore[misc]
                    self._failed[rank] = found
                else:
                    self._replies[rank].put(reply)
        self._replies[rank].put(None)

    def _end(self, error: BaseException | None) -> None:
        # By themselves where everything went well. They keep nothing.
        deadline = time.monotonic() + (_GRACE_S if error is None else _TOLD_S)
        if error is not None:
            for process in self._processes.values():
                process.ask_to_end()
        for process in self._processes.values():
            process.ends_within(deadline - time.monotonic())
            process.stop(0.0)
        if self._meeting is not None:
            self._meeting.cleanup()


class Order:
    """What a further rank is to do, and how it answers.

    Args:
        content: as rank 0 wrote it.
        rank: which one it is.
        local_rank: which of those on its machine.
        party_file: the party's own file at this machine.
        reply: carries an answer back.
        join_group: says that this rank is ready, and forms the group with the others; given the
            device of its models and its rows.

    Attributes:
        rank, local_rank, party_file, reply, join_group: the same.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        rank: int,
        local_rank: int,
        party_file: Path,
        reply: Callable[[Mapping[str, Any]], None],
        join_group: Callable[[str, PartyData], Ranks],
    ) -> None:
        self._content, self.rank, self.local_rank = content, rank, local_rank
        self.party_file, self.reply, self.join_group = party_file, reply, join_group

    def __getitem__(self, name: str) -> Any:
        return self._content[name]


def ended(
    party: str, rank: int, code: str, what: str, where: str | None, fix: str | None
) -> VFLError:
    """The error of a rank that has said why; that of a party it has lost is that of any stream."""
    if code == LostPeerError.code:
        return LostPeerError(f"{what}; rank {rank} of '{party}' noticed")
    found = lost(party, rank, f"{code}: {what}")
    found.where, found.fix = where, fix
    return found


@contextmanager
def ordered() -> Iterator[Order]:
    """The order of this process, which is a further rank; errors are reported to rank 0.

    Raises:
        ConfigError: nobody gave one.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes where rank 0's errors go

    def reply(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    line = sys.stdin.buffer.readline()
    if not line:
        raise ConfigError("a further rank is started by the party's first one")
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    content = json.loads(line)
    group = content["group"]
    party, rank, size = str(group["party"]), int(group["rank"]), int(group["size"])

    def join_group(device: str, data: PartyData) -> Ranks:
        patience_s = float(group["patience_s"])
        store = store_at(str(group["place"]), size, patience_s)
        reply({"ready": True})
        return Ranks.join_group(party, rank, size, store, patience_s, device)

    order = Order(content, rank, rank, Path(content["party_file"]), reply, join_group)
    try:
        yield order
    except VFLError as error:
        reply({"failure": error.record()})
        raise
    except Exception as bug:
        print(redacted_traceback(bug), file=sys.stderr)
        reply({"failure": unexpected(bug, f"rank {order.rank}").record()})
        raise SystemExit(1) from None


def _end_with_rank_0() -> None:
    """Rank 0 keeps our standard input open for as long as it lives."""
    while os.read(0, 1):  # past Python's buffer, whose lock an exit would wait for
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def store_at(place: str, size: int, patience_s: float) -> Any:
    """Torch's key-value store in a file, by which the ranks of a party find each other."""
    from torch import distributed

    stores: Any = distributed
    store = stores.FileStore(place, size)
    store.set_timeout(timedelta(seconds=patience_s))
    return store


def device_of(device: str, rank: int) -> str:
    """The card of a rank: "cuda" is one card a rank, in order.

    >>> device_of("cpu", 1), device_of("cuda:3", 1)
    ('cpu', 'cuda:3')
    """
    return f"cuda:{rank}" if device == "cuda" else device
