"""The label party's end of one party's stream; it waits for the party to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from vfl.errors import FrameError, LostPeerError, VFLError
from vfl.frame import LIMIT_BYTES, Frame
from vfl.transport.base import (
    LINGER_S,
    WINDOW_FRAMES,
    LinkLimits,
    Timeouts,
    check_outgoing,
)
from vfl.transport.messages import Hello, Welcome, error_frame, in_session
from vfl.transport.reliable import Sequence
from vfl.transport.stream import Stream


class HubLink:
    """One party's link, used by one thread while handshake threads attach new streams to it.

    Args:
        party: name of the feature party.
        timeouts: how long to wait.
        window: sent frames kept for a resend.

    Attributes:
        party: name of the feature party.
        attached: whether the party has ever attached.
        limits: what its frames may carry; None until something was agreed.
    """

    def __init__(
        self, party: str, timeouts: Timeouts | None = None, window: int = WINDOW_FRAMES
    ) -> None:
        self.party = party
        self.attached = False
        self.limits: LinkLimits | None = None
        self._timeouts = timeouts or Timeouts()
        self._changed = threading.Condition()
        self._sequence = Sequence(window)
        self._stream: Stream | None = None
        self._lost_at: float | None = None  # when a read or write of the stream first failed
        self._ended: VFLError | None = None

    def agree(self, limits: LinkLimits) -> None:
        """From the next frame on, take and send no more than this."""
        with self._changed:
            self.limits = limits
            if self._stream is not None:
                self._limit(self._stream)

    @property
    def held_bytes(self) -> int:
        """Bytes of frames held for this party: those not taken yet, and those kept for a resend."""
        with self._changed:
            unread = 0 if self._stream is None else self._stream.inbox_bytes
            return unread + self._sequence.stored_bytes

    def attach(self, stream: Stream, hello: Hello, terms: Mapping[str, Any]) -> None:
        """Greet with WELCOME, resend what the party lacks, and take over from the old stream.

        All under the lock: a frame sent meanwhile is either among those resent or follows them,
        and one that the old stream still delivers is dropped, for the party sends it again.

        Raises:
            LostPeerError: the two ends' counts cannot be reconciled.
            VFLError: why the link has ended.
            ConnectionError, TimeoutError: the new stream broke; another may be attached.
        """
        with self._changed:
            self._check_open()
            self._sequence.check_sent(hello.sent)
            missing = self._sequence.missing(hello.received)
            self._release()
            deadline = time.monotonic() + self._timeouts.handshake_s
            self._limit(stream)
            stream.write(Welcome(self._sequence.received, terms).frame(), deadline)
            for frame in missing:
                stream.write(frame, deadline)
            self._stream, self._lost_at = stream, None
            self.attached = True
            self._changed.notify_all()

    def send(self, frame: Frame) -> None:
        """Store and write a frame; one failed write is mended when the party comes back.

        Raises:
            LostPeerError: the rejoin window has passed, or the party takes nothing in time.
        """
        deadline = time.monotonic() + self._timeouts.step_s
        check_outgoing(frame, None if self.limits is None else self.limits.down)
        with self._changed:
            self._await(lambda: self._lost_at is None, deadline, "took nothing")
            self._sequence.store(frame)
            stream = self._stream
        if stream is None:  # before the first attach
            return
        try:
            stream.write(frame, deadline)
        except ConnectionError:
            # The stream stays: what the party sent before the cut can still be read.
            self._note_loss(stream)
        except TimeoutError as error:
            raise self._end(self._silent("took nothing")) from error
        except FrameError as error:
            raise self._end(error) from None

    def receive(self) -> Frame:
        """Wait for the next frame, through cuts of the stream.

        Raises:
            LostPeerError: nothing came within `step_s`, or the rejoin window has passed.
            PeerFailedError: the party reported an error.
            FrameError: the bytes are no frame; the link has ended.
        """
        deadline = time.monotonic() + self._timeouts.step_s
        while True:
            stream = self._readable(deadline)
            try:
                frame = stream.read(deadline)
            except ConnectionError:
                self._note_loss(stream, unreadable=True)
                continue
            except TimeoutError as error:
                raise self._end(self._silent("sent nothing")) from error
            except FrameError as error:
                raise self._end(error) from None
            if self._count(stream):
                break
        try:
            return in_session(frame, f"party '{self.party}'")
        except VFLError as error:
            raise self._end(error) from None

    def fail(self, error: VFLError) -> None:
        """Tell the party what went wrong here, then close; a later attach is told the same."""
        with self._changed:
            stream = self._stream if self._ended is None else None
            self._ended = self._ended or error
        if stream is not None:
            try:
                stream.write(error_frame(error), time.monotonic() + LINGER_S)
                stream.end(LINGER_S)
            except (OSError, FrameError):
                stream.end()
        self.close()

    def close(self) -> None:
        """Release the link; closing twice is harmless."""
        self._end(LostPeerError(f"the link to party '{self.party}' was closed"))

    def _limit(self, stream: Stream) -> None:
        window = stream.window = self._sequence.window
        stream.wire_limit_bytes = None
        stream.limit_bytes = LIMIT_BYTES if self.limits is None else self.limits.up
        if self.limits is not None:
            stream.inbox_limit_bytes = self.limits.inbox_bytes(window)

    def _readable(self, deadline: float) -> Stream:
        with self._changed:
            self._await(lambda: self._stream is not None, deadline, "sent nothing")
            assert self._stream is not None
            return self._stream

    def _await(self, ready: Callable[[], bool], deadline: float, did: str) -> None:
        """Wait under the lock for a handshake thread to mend the link, in its rejoin window."""
        window_s = self._timeouts.rejoin_window_s
        while True:
            self._check_open()
            if ready():
                return
            now = time.monotonic()
            if now >= deadline:
                raise self._end(self._silent(did))
            if self._lost_at is not None and now >= self._lost_at + window_s:
                raise self._end(
                    LostPeerError(
                        f"party '{self.party}' went away and did not come back",
                        want=f"a new connection within {window_s:g} s",
                    )
                )
            rejoin_by = deadline if self._lost_at is None else self._lost_at + window_s
            self._changed.wait(min(deadline, rejoin_by) - now)

    def _count(self, stream: Stream) -> bool:
        """Count a received frame, unless its stream was replaced while it was read."""
        with self._changed:
            current = self._stream is stream
            self._sequence.received += current
            return current

    def _note_loss(self, stream: Stream, *, unreadable: bool = False) -> None:
        with self._changed:
            if self._stream is not stream:
                return
            if unreadable:
                self._release()
            self._lost_at = self._lost_at or time.monotonic()

    def _release(self) -> None:
        """Let go of the current stream; the rejoin window runs from here at the latest."""
        if self._stream is not None:
            self._stream.end()
            self._stream = None
            self._lost_at = self._lost_at or time.monotonic()

    def _silent(self, did: str) -> LostPeerError:
        return LostPeerError(f"party '{self.party}' {did} for {self._timeouts.step_s:g} s")

    def _end(self, error: VFLError) -> VFLError:
        with self._changed:
            self._ended = self._ended or error
            self._release()
            self._changed.notify_all()
        return error

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
