"""The label party's end of one party's stream; it waits for the party to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from vfl.errors import FrameError, LostPeerError, ProtocolError, VFLError
from vfl.frame import Frame, Kind
from vfl.transport.base import WINDOW_FRAMES, Timeouts
from vfl.transport.client import LINGER_S
from vfl.transport.messages import Hello, Welcome, error_frame, read_failure
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
    """

    def __init__(
        self, party: str, timeouts: Timeouts | None = None, window: int = WINDOW_FRAMES
    ) -> None:
        self.party = party
        self.attached = False
        self._timeouts = timeouts or Timeouts()
        self._changed = threading.Condition()
        self._sequence = Sequence(window)
        self._stream: Stream | None = None
        self._lost_s = time.monotonic()
        self._ended: VFLError | None = None

    def attach(self, stream: Stream, hello: Hello, terms: Mapping[str, Any]) -> None:
        """Greet with WELCOME, resend what the party lacks, and take over from the old stream.

        All under the lock: a frame sent meanwhile is either among those resent or follows them,
        and one that the old stream still delivers is dropped, for the party sends it again.

        Raises:
            LostPeerError: the two ends' counts cannot be reconciled.
            VFLError: why the link has ended.
        """
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._sequence.check_sent(hello.sent)
            missing = self._sequence.missing(hello.received)
            self._release()
            deadline = time.monotonic() + self._timeouts.handshake_s
            stream.write(Welcome(self._sequence.received, terms).frame(), deadline)
            for frame in missing:
                stream.write(frame, deadline)
            self._stream = stream
            self.attached = True
            self._changed.notify_all()

    def send(self, frame: Frame) -> None:
        """Store and write a frame; a failed write is mended when the party comes back.

        Raises:
            LostPeerError: the rejoin window has passed, or the party takes nothing in time.
        """
        with self._changed:
            self._check_open()
            self._check_window()
            self._sequence.store(frame)
            stream = self._stream
        if stream is None:
            return
        try:
            stream.write(frame, time.monotonic() + self._timeouts.step_s)
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
            stream = self._current(deadline)
            try:
                frame = stream.read(deadline)
            except ConnectionError:
                self._drop(stream)
                continue
            except TimeoutError as error:
                raise self._end(self._silent("sent nothing")) from error
            except FrameError as error:
                raise self._end(error) from None
            with self._changed:
                if self._stream is not stream:
                    continue
                self._sequence.received += 1
            if frame.kind is Kind.ERROR:
                raise self._end(read_failure(frame, f"party '{self.party}'"))
            if frame.kind in (Kind.HELLO, Kind.WELCOME):
                raise self._end(ProtocolError("a greeting out of turn", where=self.party))
            return frame

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

    def _current(self, deadline: float) -> Stream:
        """The attached stream; waits for one within the rejoin window."""
        with self._changed:
            while True:
                self._check_open()
                if self._stream is not None:
                    return self._stream
                self._check_window()
                until = min(deadline, self._lost_s + self._timeouts.rejoin_window_s)
                self._changed.wait(max(0.0, until - time.monotonic()))
                if time.monotonic() >= deadline and self._stream is None:
                    raise self._end(self._silent("sent nothing"))

    def _check_window(self) -> None:
        window_s = self._timeouts.rejoin_window_s
        if self._lost_s is not None and time.monotonic() >= self._lost_s + window_s:
            raise self._end(
                LostPeerError(
                    f"party '{self.party}' went away and did not come back",
                    want=f"a new connection within {window_s:g} s",
                )
            )

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
