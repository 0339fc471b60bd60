"""The feature party's end of a stream; it reconnects by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vfl.errors import FrameError, LostPeerError, VFLError
from vfl.frame import LIMIT_BYTES, Frame, Kind
from vfl.transport.base import LINGER_S, WINDOW_FRAMES, LinkLimits, Timeouts, check_outgoing
from vfl.transport.messages import (
    ANSWER_LIMIT_BYTES,
    Hello,
    Welcome,
    error_frame,
    in_session,
    read_refusal,
)
from vfl.transport.reliable import Sequence
from vfl.transport.sockets import client_context, dial, require_loopback
from vfl.transport.stream import Stream

_LABEL_PARTY = "the label party"


class TcpLink:
    """An attached link; made by `connect`, used by one thread.

    Args:
        reach: opens a new stream to the hub.
        hello: who this party is.
        timeouts: how long to wait.
        window: sent frames kept for a resend; the hub's is best the same.
        peer: who listens, for messages.
        limits: what frames may carry; None where nothing was agreed.

    Attributes:
        terms: what the label party told at the first attach.
    """

    def __init__(
        self,
        reach: Callable[[], Stream],
        hello: Hello,
        timeouts: Timeouts,
        window: int,
        peer: str = _LABEL_PARTY,
        limits: LinkLimits | None = None,
    ) -> None:
        self._peer = peer
        self._limits = limits
        self._reach = reach
        self._hello = hello
        self._timeouts = timeouts
        self._sequence = Sequence(window)
        self._broken = False
        self._ended: VFLError | None = None
        self._stream, self.terms = self._attach()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        hello: Hello,
        ca_pem: bytes | None = None,
        timeouts: Timeouts | None = None,
        window: int = WINDOW_FRAMES,
        peer: str = _LABEL_PARTY,
        limits: LinkLimits | None = None,
        *,
        plaintext: bool = False,
    ) -> TcpLink:
        """Attach to a hub; returns once it has said WELCOME.

        Args:
            host: the hub's name or address, as its certificate has it.
            port: the hub's port.
            hello: who this party is.
            ca_pem: certificate of the CA that must have signed the hub's; None for no TLS, which a
                loopback address alone allows.
            timeouts: how long to wait.
            window: sent frames kept for a resend.
            peer: who listens, for messages.
            limits: what frames may carry; without it a frame may be as large as any.
            plaintext: measure without TLS beyond this machine, where nothing is worth protecting.

        Raises:
            AuthenticationError: wrong session, node, token or certificate.
            UserError: no TLS, and another machine.
            DisagreementError, ConsentError, PeerFailedError: the listener's refusal.
            LostPeerError: no hub answered within the rejoin window.
        """
        if ca_pem is None and not plaintext:
            require_loopback(host)
        waits = timeouts or Timeouts()
        context = None if ca_pem is None else client_context(ca_pem)
        try:
            reach = partial(dial, host, port, context, waits)
            return cls(reach, hello, waits, window, peer, limits)
        except LostPeerError as loss:
            loss.where = f"{host}:{port}"
            raise

    def agree(self, limits: LinkLimits) -> None:
        """From the next frame on, take and send no more than this."""
        self._limits = limits
        self._limit(self._stream)

    def send(self, frame: Frame) -> None:
        """Store and write a frame; if the link breaks here, the next call mends it.

        Raises:
            OversizedFrameError: it is larger than what was agreed on; nothing was sent.
            LostPeerError: the hub is gone for good.
        """
        self._check_open()
        check_outgoing(frame, None if self._limits is None else self._limits.up)
        if self._broken:
            self._rejoin()
        self._sequence.store(frame)
        try:
            self._stream.write(frame, time.monotonic() + self._timeouts.idle_s)
        except ConnectionError:
            # What the hub sent before the cut, its last words perhaps, can still be read.
            self._broken = True
        except TimeoutError as error:
            raise self._end(self._silent("took nothing")) from error
        except FrameError as error:
            raise self._end(error) from None

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: nothing came within `idle_s`, or the hub is gone for good.
            PeerFailedError: the listener reported an error.
            FrameError: the bytes are no frame; the link has ended.
        """
        self._check_open()
        deadline = time.monotonic() + self._timeouts.idle_s
        while True:
            try:
                frame = self._stream.read(deadline)
                break
            except ConnectionError:
                self._rejoin()
            except TimeoutError as error:
                raise self._end(self._silent("sent nothing")) from error
            except FrameError as error:
                raise self._end(error) from None
        self._sequence.received += 1
        try:
            return in_session(frame, self._peer)
        except VFLError as error:
            raise self._end(error) from None

    def fail(self, error: VFLError) -> None:
        """Tell the label party what went wrong here, then close."""
        if self._ended is None:
            try:
                self._stream.write(error_frame(error), time.monotonic() + LINGER_S)
                self._stream.end(LINGER_S)
            except (OSError, FrameError):
                self._broken = True
        self.close()

    def close(self) -> None:
        """Release the link; closing twice is harmless."""
        self._end(LostPeerError("this link was closed by its own party"))

    def _rejoin(self) -> None:
        self._stream.end()
        time.sleep(self._timeouts.retry_s)
        try:
            self._stream, _ = self._attach()
        except VFLError as error:
            self._end(error)
            raise
        self._broken = False

    def _attach(self) -> tuple[Stream, Mapping[str, Any]]:
        """Try until the rejoin window has passed; a refusal is final."""
        deadline = time.monotonic() + self._timeouts.rejoin_window_s
        while True:
            try:
                return self._greet(self._reach())
            except OSError as error:
                if time.monotonic() + self._timeouts.retry_s >= deadline:
                    raise LostPeerError(
                        f"{self._peer} cannot be reached",
                        got=type(error).__name__,
                        want=f"an answer within {self._timeouts.rejoin_window_s:g} s",
                        fix="check host, port, that the run is alive, and that both use TLS",
                    ) from error
            time.sleep(self._timeouts.retry_s)

    def _greet(self, stream: Stream) -> tuple[Stream, Mapping[str, Any]]:
        try:
            deadline = time.monotonic() + self._timeouts.handshake_s
            sequence = self._sequence
            hello = replace(self._hello, sent=sequence.sent, received=sequence.received)
            stream.limit_bytes = ANSWER_LIMIT_BYTES
            stream.write(hello.frame(), deadline)
            answer = stream.read(deadline)
            if answer.kind is Kind.ERROR:
                raise read_refusal(answer, self._peer)
            welcome = Welcome.of(answer)
            self._limit(stream)
            for frame in sequence.missing(welcome.received):
                stream.write(frame, time.monotonic() + self._timeouts.idle_s)
        except BaseException:
            stream.end()
            raise
        return stream, welcome.terms

    def _limit(self, stream: Stream) -> None:
        stream.window = self._sequence.window
        stream.limit_bytes = LIMIT_BYTES if self._limits is None else self._limits.down

    def _silent(self, did: str) -> LostPeerError:
        return LostPeerError(f"{self._peer} {did} for {self._timeouts.idle_s:g} s")

    def _end(self, error: VFLError) -> VFLError:
        if self._ended is None:
            self._ended = error
            self._stream.end()
        return error

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
