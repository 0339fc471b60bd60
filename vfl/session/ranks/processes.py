"""Additional ranks of a party on the same machine: rank 0 starts them as processes.

Rank 0 is the process that runs the party's session. It starts each additional rank with `vfl
party-rank`, and sends the rank its order, one line of JSON, on standard input. The order has the
number of the rank, the path of the file through which the ranks find each other, and the party's
own file. It also has the address and token of a stream for the rank. The answers of the rank are
lines of JSON on its standard output. A rank ends when its standard input closes, which happens when
rank 0 ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from vfl.core.errors import (
    ConfigError,
    DisagreementError,
    LostPeerError,
    LostRankError,
    PeerFailedError,
    VFLError,
    read_record,
    redacted_traceback,
)
from vfl.core.frame import Frame
from vfl.core.processes import Worker, looks
from vfl.core.text import printable_lines
from vfl.datasets import PartyData
from vfl.session.handshake import unexpected
from vfl.session.ranks.group import ALONE, Ranks, lost
from vfl.transport import PolledLink, wait_briefly

COMMAND = (sys.executable, "-P", "-m", "vfl", "party-rank")
#: Time in which rank 0 searches for the rank that has ended, and waits for the other ranks to end
#: by themselves, in seconds.
_GRACE_S = 10.0
#: Time limit for a rank to end after rank 0 has asked it to, in seconds; a rank that waits for
#: another rank does not read this request.
_TOLD_S = 2.0
#: If another party has lost the connection to this party, time limit for this party to report that
#: one of its ranks was lost, in seconds. The next attempt of the session waits longer than this
#: limit for the process to end.
_MISSED_S = 5.0
_TICK_S = 0.05


class WatchedLink:
    """A link that checks, while it waits for a frame, whether ranks or other parties have ended.

    Args:
        link: link to another party, or to a rank of the same party.
        peer: name of the peer, for error messages.
        check: function that is called every 0.05 s while no frame arrives; if it raises an error,
            the wait ends.
    """

    def __init__(self, link: PolledLink, peer: str, check: Callable[[], None]) -> None:
        self._link, self._peer, self._check = link, peer, check
        self._next: Frame | None = None

    def look(self) -> None:
        """Read the next frame if it has arrived; `receive` returns it.

        Raises:
            LostPeerError, PeerFailedError, FrameError: see `HubLink.poll`.
        """
        if self._next is None:
            self._next = self._link.poll()

    def drain(self) -> None:
        """Discard every frame that has arrived; raise the error if the peer has reported one."""
        while self._link.poll() is not None:
            pass

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: no frame came in time, or the connection is lost for good.
            VFLError: any error of `look` or `check`.
        """
        deadline = time.monotonic() + self._link.patience_s
        while True:
            self.look()
            if self._next is not None:
                frame, self._next = self._next, None
                return frame
            self._check()
            if time.monotonic() >= deadline:
                raise self._lost(f"{self._peer} sent nothing for {self._link.patience_s:g} s")
            wait_briefly([self._link])

    def _lost(self, how: str) -> VFLError:
        return LostPeerError(how)

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        self._link.send(frame)

    def fail(self, error: VFLError) -> None:
        """Report an error of this party to the peer, then close."""
        self._link.fail(error)

    def close(self) -> None:
        """Release the link."""
        self._link.close()


class FurtherRanks:
    """The ranks of one party besides rank 0 in one session, as a context manager.

    Two other processes notice when a rank ends: the party's own rank 0, and the same rank of
    another party, to which the whole party seems lost. Rank 0 therefore checks its ranks while it
    waits for a party, and checks the parties while it waits for a rank. If the context ends with
    the error of a loss, rank 0 looks for the cause: an error that another party has reported comes
    first, and a party whose connection was lost has 5 s to report a lost rank.

    Args:
        party: party of the ranks.
        size: number of ranks, this process included.
        patience_s: seconds that a rank may take to start, and to answer during the training.
    """

    def __init__(self, party: str, size: int, patience_s: float) -> None:
        self.party, self.size = party, size
        self._streams: list[WatchedLink] = []
        self._patience_s = patience_s

    def watch(self, link: PolledLink, peer: str) -> WatchedLink:
        """Wrap rank 0's link to another party; each wait on it checks ranks and parties.

        Args:
            link: link to the watched party.
            peer: name of the watched party, for error messages.
        """
        self._streams.append(WatchedLink(link, peer, self.check))
        return self._streams[-1]

    def check(self) -> None:
        """Check every rank.

        Raises:
            LostRankError: a rank has ended.
            LostPeerError: a rank has ended because its stream to another party was lost.
        """
        raise NotImplementedError

    def check_parties(self) -> None:
        """Check the link to every watched party.

        Raises:
            LostPeerError, PeerFailedError, FrameError: the error that ended the party.
        """
        for stream in self._streams:
            stream.look()

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks run on this machine."""
        raise NotImplementedError

    @property
    def further(self) -> range:
        """Numbers of the ranks that run in other processes, from 1."""
        return range(1, self.size)

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """Send a rank its order.

        Args:
            rank: number of the rank, from 1.
            order: instructions for `play_rank`; JSON values only.
        """
        raise NotImplementedError

    def receive(self, rank: int) -> Mapping[str, Any]:
        """Receive the next message of a rank.

        Raises:
            LostRankError: the rank has ended, or was silent for too long.
            LostPeerError, PeerFailedError: a watched party ended while rank 0 waited for the rank.
        """
        raise NotImplementedError

    def join_group(self, data: PartyData) -> Ranks:
        """Form the group of all ranks when each additional rank is ready.

        Args:
            data: the party's rows, which every rank must have.
        """
        raise NotImplementedError

    def agree(self, weights_sha256: str) -> None:
        """Check that all ranks have the same weights after a training.

        Raises:
            DisagreementError: a rank has different weights.
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
            if self.size > 1 and isinstance(error, LostRankError | LostPeerError | PeerFailedError):
                self._explain(error)
        except VFLError as cause:
            error = cause
            raise
        finally:
            self._end(error)

    def _explain(self, loss: VFLError) -> None:
        """Raise the error that caused a loss, if `loss` itself is not that cause.

        Args:
            loss: the error that rank 0 noticed first.
        """
        if isinstance(loss, PeerFailedError) and loss.peer_code != LostPeerError.code:
            return
        if isinstance(loss, LostRankError):
            self._ask_parties()
            try:
                self._find_lost()
            except LostPeerError as missed:
                loss = missed
            else:
                return
        for _ in looks(_MISSED_S, _TICK_S):
            self._ask_parties()
            with suppress(LostPeerError):
                self.check()
        if isinstance(loss, PeerFailedError):
            raise LostPeerError(loss.peer_what) from None
        raise loss

    def _ask_parties(self) -> None:
        """Raise the error that a party reported, unless the party only lost another party."""
        for stream in self._streams:
            try:
                stream.drain()
            except PeerFailedError as failure:
                if failure.peer_code != LostPeerError.code:
                    raise

    def _find_lost(self) -> None:
        """Raise the error of the rank that has ended, if that error is not known yet."""
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """End all ranks, immediately if there is an error."""
        raise NotImplementedError


class RankProcesses(FurtherRanks):
    """Ranks that run as processes on rank 0's machine; with a single rank, no process starts.

    Args:
        party, size, patience_s: see `FurtherRanks`.
        device: device of the models at rank 0.
    """

    def __init__(self, party: str, size: int, patience_s: float, device: str = "cpu") -> None:
        super().__init__(party, size, patience_s)
        self._device = device
        self._processes: dict[int, Worker] = {}
        self._replies: dict[int, queue.Queue[Mapping[str, Any] | None]] = {}
        self._failed: dict[int, VFLError] = {}
        # Only this user can read the file; another store of torch would listen on a port.
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
        deadline = time.monotonic() + self._patience_s
        while True:
            with suppress(queue.Empty):
                reply = self._replies[rank].get(timeout=_TICK_S)
                break
            self.check_parties()
            if time.monotonic() >= deadline:
                raise lost(self.party, rank, f"silent for {self._patience_s:g} s")
        if reply is None:
            self._replies[rank].put(None)
            raise self._cause(rank)
        return reply

    def join_group(self, data: PartyData) -> Ranks:
        """See `FurtherRanks`; all ranks read the same files."""
        if self.size == 1:
            return ALONE
        for rank in self.further:
            self.receive(rank)
        store = store_at(self._place, self.size, self._patience_s)
        return Ranks.join_group(self.party, 0, self.size, store, self._patience_s, self._device)

    @property
    def _place(self) -> str:
        """Return the path of the file through which the ranks find each other."""
        assert self._meeting is not None, "there are several"
        return str(Path(self._meeting.name) / "store")

    def check(self) -> None:
        """See `FurtherRanks`; a rank that has finished its part may end without an error."""
        for rank, process in self._processes.items():
            if process.exit_code:
                raise self._cause(rank) from None

    def _find_lost(self) -> None:
        for _ in looks(_GRACE_S, _TICK_S):
            self.check()

    def _cause(self, rank: int) -> VFLError:
        """Make the error of a rank that has ended, for example the error that the rank reported."""
        code = self._processes[rank].wait()
        while self._replies[rank].get() is not None:  # all messages of the rank have been read
            pass
        self._replies[rank].put(None)
        if (failure := self._failed.get(rank)) is not None:
            known = failure.code, failure.what, failure.where, failure.fix
            return ended(self.party, rank, *known)
        return lost(self.party, rank, f"signal {-code}" if code < 0 else f"exit {code}")

    def _listen(self, rank: int) -> None:
        """Read the messages of a rank until it ends."""
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
        # After a successful session, ranks end by themselves. The ranks that are stopped here write
        # no files.
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
    """Rank 0's order to an additional rank, and the rank's channel for answers.

    Args:
        content: the order, as rank 0 sent it.
        rank: number of the rank.
        local_rank: number of the rank among the ranks on its machine.
        party_file: the party's own configuration file on this machine.
        reply: function that sends an answer.
        join_group: function that reports to rank 0 that this rank is ready, and forms the group
            with the other ranks; its arguments are the device of the models and the party's rows.

    Attributes:
        rank, local_rank, party_file, reply, join_group: the arguments.
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
    """Make the error that a rank has reported; a rank that lost a party gives a `LostPeerError`."""
    if code == LostPeerError.code:
        return LostPeerError(f"{what}; rank {rank} of '{party}' noticed")
    found = lost(party, rank, f"{code}: {what}")
    found.where, found.fix = where, fix
    return found


@contextmanager
def ordered() -> Iterator[Order]:
    """Read rank 0's order to this process, an additional rank; report errors to rank 0.

    Raises:
        ConfigError: standard input contained something other than an order.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output goes to the standard error, which rank 0 reads

    def reply(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    line = sys.stdin.buffer.readline()
    if not line:
        raise ConfigError(
            "the party's first rank starts a further rank; it cannot be started by hand"
        )
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
    """End this process when rank 0 ends; until then, rank 0 keeps our standard input open."""
    while os.read(0, 1):  # unbuffered: at exit, Python would wait for the buffer's lock
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def store_at(place: str, size: int, patience_s: float) -> Any:
    """Open torch's key-value store in a file, through which a party's ranks find each other."""
    from torch import distributed

    stores: Any = distributed
    store = stores.FileStore(place, size)
    store.set_timeout(timedelta(seconds=patience_s))
    return store


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank; "cuda" gives each rank the next of the machine's GPUs.

    >>> device_of("cpu", 1), device_of("cuda:3", 1)
    ('cpu', 'cuda:3')
    """
    return f"cuda:{rank}" if device == "cuda" else device
