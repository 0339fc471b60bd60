"""Further ranks (processes) of a party on the same machine, which rank 0 starts.

Rank 0 is the process that runs the party's session. Rank 0 starts each further rank with the
command `vfl party-rank`, and sends an order, one line of JSON, to the rank's standard input. The
order contains the number of the rank, the path of the file through which the ranks find each other,
and the path of the party's own file. The order also contains the address and the token of the
rank's stream to another party. The rank answers with lines of JSON on its standard output. A rank
ends when its standard input closes, which happens at the latest when rank 0 ends.
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

from vfl.config import PartyFile
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
from vfl.core.seeds import Secret
from vfl.core.text import printable_lines
from vfl.datasets import PartyData
from vfl.session.exchange import Own
from vfl.session.handshake import unexpected
from vfl.session.ranks.group import ALONE, Ranks, lost
from vfl.session.store.party_folder import own_augment
from vfl.transport import PolledLink, wait_briefly

COMMAND = (sys.executable, "-P", "-m", "vfl", "party-rank")
#: Longest time in seconds for which rank 0 searches for the rank that has ended, and for which it
#: waits until the other ranks have ended.
_GRACE_S = 10.0
#: Seconds within which a rank must end after rank 0 has requested its end; a rank that waits for
#: another rank does not read this request.
_TOLD_S = 2.0
#: If another party has lost the connection to this party, seconds within which this party can still
#: report that one of its own ranks was lost. The next attempt of the session waits longer than this
#: time for the process to end.
_MISSED_S = 5.0
_TICK_S = 0.05


class WatchedLink:
    """A link that, while it waits for a frame, checks whether ranks or other parties have ended.

    Args:
        link: link to another party, or to another rank of the same party.
        peer: name of the party or rank at the other end, for error messages.
        check: function that is called every 0.05 s while no frame arrives; if the function raises
            an error, the wait ends with this error.
    """

    def __init__(self, link: PolledLink, peer: str, check: Callable[[], None]) -> None:
        self._link, self._peer, self._check = link, peer, check
        self._next: Frame | None = None

    def look(self) -> None:
        """Read the next frame if it has arrived, and store the frame for `receive`.

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
            LostPeerError: no frame arrived in time, or the connection is lost and cannot be
                restored.
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
        """Send an error of this party to the peer, then close the link."""
        self._link.fail(error)

    def close(self) -> None:
        """Close the link."""
        self._link.close()


class FurtherRanks:
    """The ranks of one party other than rank 0, during one session; a context manager.

    Two other processes notice when a rank ends: rank 0 of the party, and the rank of the same
    number at another party, to which the whole party seems lost. While rank 0 waits for another
    party, it therefore checks its ranks, and while it waits for a rank, it checks the other
    parties. If the context ends with the error of a loss, rank 0 looks for the cause: an error that
    another party has reported takes precedence, and a party whose connection was lost has 5 s to
    report that one of its ranks was lost.

    Args:
        party: party to which the ranks belong.
        size: number of ranks, including rank 0.
        patience_s: most seconds that a rank may take to start, and to send an answer during the
            training.
    """

    def __init__(self, party: str, size: int, patience_s: float) -> None:
        self.party, self.size = party, size
        self._streams: list[WatchedLink] = []
        self._patience_s = patience_s

    def watch(self, link: PolledLink, peer: str) -> WatchedLink:
        """Wrap rank 0's link to a party, so that waits check all ranks and parties.

        Args:
            link: link to the other party.
            peer: name of the other party, for error messages.
        """
        self._streams.append(WatchedLink(link, peer, self.check))
        return self._streams[-1]

    def check(self) -> None:
        """Check whether all ranks still run.

        Raises:
            LostRankError: a rank has ended.
            LostPeerError: a rank has ended because its stream to another party was lost.
        """
        raise NotImplementedError

    def check_parties(self) -> None:
        """Check whether all watched parties still run.

        Raises:
            LostPeerError, PeerFailedError, FrameError: the error with which the other party ended,
                or the loss of its connection.
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
        """Send a rank its order, which makes it start to work.

        Args:
            rank: number of the rank, from 1 on.
            order: arguments of `play_rank`; JSON values only.
        """
        raise NotImplementedError

    def receive(self, rank: int) -> Mapping[str, Any]:
        """Receive the next message of a rank.

        Raises:
            LostRankError: the rank has ended, or sent nothing for too long.
            LostPeerError, PeerFailedError: another party ended while rank 0 waited for the rank.
        """
        raise NotImplementedError

    def join_group(self, data: PartyData) -> Ranks:
        """Form the group of all ranks, as soon as every further rank is ready.

        Args:
            data: the party's rows, which must be the same at every rank.
        """
        raise NotImplementedError

    def agree(self, weights_sha256: str) -> None:
        """Check that all ranks have equal weights after a training.

        Raises:
            DisagreementError: the weights of a rank differ from those of rank 0.
        """
        for rank in self.further:
            if self.receive(rank).get("weights") != weights_sha256:
                raise DisagreementError(
                    f"rank {rank} of party '{self.party}' has different weights from rank 0",
                    want="equal sums of gradients at every rank",
                    fix="run every rank on the same kind of processor or GPU",
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
        """Find the cause of a loss, and raise its error, if `loss` itself is not the cause.

        Args:
            loss: the error by which rank 0 noticed the loss.
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
        """Raise an error that a party reported, except the loss of another party."""
        for stream in self._streams:
            try:
                stream.drain()
            except PeerFailedError as failure:
                if failure.peer_code != LostPeerError.code:
                    raise

    def _find_lost(self) -> None:
        """Raise the error of the rank that has ended, unless this error is already known."""
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """End all ranks; do not wait for their work if there is an error."""
        raise NotImplementedError


class RankProcesses(FurtherRanks):
    """Ranks that run as processes on rank 0's machine; if the party has one rank, none is started.

    Args:
        party, size, patience_s: see `FurtherRanks`.
        device: device of the models of rank 0.
    """

    def __init__(self, party: str, size: int, patience_s: float, device: str = "cpu") -> None:
        super().__init__(party, size, patience_s)
        self._device = device
        self._processes: dict[int, Worker] = {}
        self._replies: dict[int, queue.Queue[Mapping[str, Any] | None]] = {}
        self._failed: dict[int, VFLError] = {}
        # The ranks find each other through this file, which only this user can read; torch's other
        # stores would listen at a port.
        self._meeting = TemporaryDirectory(prefix="vfl-ranks-") if size > 1 else None

    @property
    def one_machine(self) -> bool:
        """Return True: the ranks are processes of this machine."""
        return True

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """Start the process of the rank, and send it its order."""
        process = Worker(f"rank {rank}", COMMAND, os.environ)
        self._processes[rank], self._replies[rank] = process, queue.Queue()
        reader = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        reader.start()
        group = {"party": self.party, "rank": rank, "size": self.size, "place": self._place}
        order = {**order, "group": {**group, "patience_s": self._patience_s}}
        process.send(json.dumps(order))

    def receive(self, rank: int) -> Mapping[str, Any]:
        """Return the next message of a rank."""
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
        """Wait for all ranks, and join their group.

        Rows need no check, because all ranks read the same files.
        """
        if self.size == 1:
            return ALONE
        for rank in self.further:
            self.receive(rank)
        store = store_at(self._place, self.size, self._patience_s)
        return Ranks.join_group(self.party, 0, self.size, store, self._patience_s, self._device)

    @property
    def _place(self) -> str:
        """Return the path of the file through which the ranks of the party find each other."""
        assert self._meeting is not None, "there are several"
        return str(Path(self._meeting.name) / "store")

    def check(self) -> None:
        """Check that no rank has failed; a rank that has finished may have ended."""
        for rank, process in self._processes.items():
            if process.exit_code:
                raise self._cause(rank) from None

    def _find_lost(self) -> None:
        for _ in looks(_GRACE_S, _TICK_S):
            self.check()

    def _cause(self, rank: int) -> VFLError:
        """Make the error for a rank that has ended, from its report or else its exit code."""
        code = self._processes[rank].wait()
        # wait until all messages of the rank have been read
        while self._replies[rank].get() is not None:
            pass
        self._replies[rank].put(None)
        if (failure := self._failed.get(rank)) is not None:
            known = failure.code, failure.what, failure.where, failure.fix
            return ended(self.party, rank, *known)
        return lost(self.party, rank, f"signal {-code}" if code < 0 else f"exit {code}")

    def _listen(self, rank: int) -> None:
        """Read the messages of a rank, in a thread, until the rank ends."""
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
        # After a successful session, ranks end without being stopped. Ranks write no files, so it
        # does no harm to stop them.
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
    """Rank 0's order to a further rank, with the functions with which the rank answers.

    Args:
        content: contents of the order, as rank 0 sent them.
        rank: number of the rank in the party.
        local_rank: number of the rank among the ranks on the same machine.
        party_file: the party's own configuration file on this machine.
        reply: function that sends an answer to rank 0.
        join_group: function that reports to rank 0 that this rank is ready, and forms the group
            with the other ranks; its arguments are the device of the models, and the party's rows.

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


def own_of_rank(order: Order, party: PartyFile, data: PartyData) -> Own:
    """Form the group of a party's ranks; return the private state of this further rank.

    No random number of this rank depends on its own secret: weights come from rank 0, and settings
    that draw random numbers are refused.
    """
    device = device_of(party.device, order.local_rank)
    ranks = order.join_group(device, data)
    return Own(Secret.fresh(), device=device, ranks=ranks, augment=own_augment(party, data))


def ended(
    party: str, rank: int, code: str, what: str, where: str | None, fix: str | None
) -> VFLError:
    """Make the error that a rank has reported; it is a `LostPeerError` if the rank lost a party."""
    if code == LostPeerError.code:
        return LostPeerError(f"{what}; rank {rank} of party '{party}' noticed this")
    found = lost(party, rank, f"{code}: {what}")
    found.where, found.fix = where, fix
    return found


@contextmanager
def ordered() -> Iterator[Order]:
    """Read rank 0's order to this process, which is a further rank.

    Report errors of the block to rank 0.

    Raises:
        ConfigError: standard input does not contain an order.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output goes to standard error, which is that of rank 0

    def reply(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    line = sys.stdin.buffer.readline()
    if not line:
        raise ConfigError(
            "only the party's rank 0 can start a further rank; a user cannot start it"
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
    """End this process when rank 0 ends.

    Rank 0 keeps this process's standard input open until then.
    """
    # read without a buffer: when Python exits, it would wait for the buffer's lock
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def store_at(place: str, size: int, patience_s: float) -> Any:
    """Open torch's key-value store in a file.

    Through this store, a party's ranks find each other.
    """
    from torch import distributed

    stores: Any = distributed
    store = stores.FileStore(place, size)
    store.set_timeout(timedelta(seconds=patience_s))
    return store


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank; with "cuda", rank r of a machine uses the machine's GPU r.

    >>> device_of("cpu", 1), device_of("cuda:3", 1)
    ('cpu', 'cuda:3')
    """
    return f"cuda:{rank}" if device == "cuda" else device
