"""Frames on one connected socket, with deadlines; functions that open sockets.

The socket never blocks; the code waits in `poll`, with one deadline for a whole frame. If a write
has to wait until the peer reads, arriving frames are read meanwhile, so two parties that send at
the same time cannot block each other. A lost connection raises `ConnectionError`, and a passed
deadline raises `TimeoutError`; the link that owns the stream decides whether the peer counts as
lost. Received bytes that are not a valid frame raise `FrameError`. All sockets get the same socket
options, and TLS connections use TLS 1.3 only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from vfl.core.address import Address, is_loopback
from vfl.core.errors import AuthenticationError, OversizedFrameError, UserError
from vfl.core.frame import (
    HEADER_BYTES,
    LIMIT_BYTES,
    Frame,
    Header,
    PayloadLimit,
    join,
    pack_header,
    parse_header,
)
from vfl.transport.link import WINDOW_FRAMES, Timeouts
from vfl.transport.proxies import connect

#: If header and payload together have at most this many bytes, they are written at once; with TLS,
#: longer frames are written in pieces of this size.
JOINED_BYTES = 64 * 1024
#: Largest size of one TLS record in bytes.
_RECORD_BYTES = 16 * 1024
#: Number of bytes that one read requests while no payload is expected; one read then suffices for a
#: small frame.
_READ_BYTES = 4096
#: Largest number of bytes for which a waiting reader sleeps before it reads. The reason: each time
#: that the reader wakes up costs about 10 us of CPU time.
_WAKE_BYTES = 256 * 1024
#: Byte offset of the field tcpi_bytes_received (a u64) in Linux's struct tcp_info.
_RECEIVED_AT = 128
_NO_ADDRESS_OF_OURS = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN)
_BACKLOG = 1024
_EVERY_ADDRESS = "::"
#: Keep-alive options of a socket, because a NAT drops connections without traffic; macOS calls the
#: first option TCP_KEEPALIVE.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stream:
    """One connection. Deadlines are times of the clock `time.monotonic`.

    Args:
        connection: a connected socket; the TLS handshake may not be done yet.
        limit_bytes: largest accepted payload in bytes, for all kinds or by kind; the owner of the
            stream may change this limit between two frames.

    Attributes:
        inbox_limit_bytes: most bytes of unread frames, including a frame that has arrived partly;
            None sets no limit.
        inbox_bytes: number of bytes of unread frames at present.
        wire_limit_bytes: most bytes that the peer may send in total, including TLS; None sets no
            limit.
        window: most frames that are read in advance while a write waits.
    """

    def __init__(self, connection: socket.socket, limit_bytes: PayloadLimit = LIMIT_BYTES) -> None:
        connection.setblocking(False)
        self.limit_bytes = limit_bytes
        self.inbox_limit_bytes: int | None = None
        self.inbox_bytes = 0
        self.wire_limit_bytes: int | None = None
        self.window = WINDOW_FRAMES
        self._socket = connection
        tls = isinstance(connection, ssl.SSLSocket)
        self._payload_checked = not tls
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._events, self._least_bytes = select.POLLIN, 1
        self._busy = threading.Lock()
        self._inbox: deque[Frame] = deque()
        # The bytes of the buffer from `_start` to `_end` have been read, but their frame is not
        # complete yet; a payload that does not fit into the buffer is read into a separate one.
        self._buffer, self._start, self._end = bytearray(_READ_BYTES), 0, 0
        self._header: Header | None = None
        self._body = bytearray()
        self._filled = 0
        self._tls, self._tls_holds = tls, tls

    def handshake(self, deadline: float) -> None:
        """Complete the TLS handshake; do nothing if the connection has no TLS.

        Raises:
            ssl.SSLCertVerificationError: the peer's certificate is not trusted.
            ConnectionError, TimeoutError: the handshake failed, or was not complete before the
                deadline.
        """
        if not isinstance(self._socket, ssl.SSLSocket):
            return
        with self._busy:
            while True:
                try:
                    return self._socket.do_handshake()
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN, deadline)
                except ssl.SSLWantWriteError:
                    self._wait(select.POLLOUT, deadline)
                except ssl.SSLCertVerificationError:
                    raise
                except (OSError, ValueError) as error:
                    raise ConnectionError("the TLS handshake failed") from error

    def fileno(self) -> int:
        """File descriptor of the socket, with which a caller can wait for several streams.

        The value is -1 after `end`.
        """
        return self._socket.fileno()

    def read(self, deadline: float) -> Frame:
        """Read the next frame.

        If the deadline passes within a frame, a later call continues this frame.

        Raises:
            ConnectionError, TimeoutError, FrameError: the connection broke, the deadline passed, or
                the bytes are not a valid frame; see the module's docstring.
        """
        with self._busy:
            try:
                while not self._inbox:
                    # polling first costs less than the exception of a read without data
                    if self._poll_sees_all():
                        self._wait(select.POLLIN, deadline, self._awaited_bytes())
                    self._advance()
            finally:
                self._wake_at(1)  # a write on another stream may also wait for this descriptor
            return self._take()

    def poll(self) -> Frame | None:
        """Return the next frame without waiting, or None if no frame has arrived.

        Raises:
            ConnectionError, FrameError: the connection broke, or the bytes are not a valid frame;
                see the module's docstring.
        """
        with self._busy:
            return self._take() if self._inbox or self._advance() else None

    def _take(self) -> Frame:
        frame = self._inbox.popleft()
        self.inbox_bytes -= frame.wire_bytes
        return frame

    def write(self, frame: Frame, deadline: float, beside: Sequence[Stream] = ()) -> None:
        """Write a whole frame; after an error, the stream can only be read.

        Args:
            frame: the frame.
            deadline: time before which the whole frame must be written.
            beside: further streams that are read while the write waits, as this stream is.

        Raises:
            ConnectionError, TimeoutError, FrameError: the connection broke, the deadline passed, or
                received bytes are not a valid frame; see the module's docstring.
        """
        with self._busy:
            header = pack_header(frame, payload_checked=self._payload_checked)
            # TCP_CORK is not used: with this option, the kernel delays full windows by some 100 ms,
            # even on the loopback interface.
            for piece in self._pieces(header, memoryview(frame.payload)):
                self._push(piece, deadline, beside)

    def end(self, linger_s: float = 0.0) -> None:
        """Close the connection, from any thread.

        Threads that read or write then get a `ConnectionError`.

        Args:
            linger_s: longest time in seconds to wait until the peer has received all written bytes.
                If a socket with unread bytes were closed, the connection would be reset, and
                written bytes could be lost.
        """
        if linger_s:
            self._linger(time.monotonic() + linger_s)
        with contextlib.suppress(OSError):  # the peer may already have closed the connection
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._busy:
            self._socket.close()

    def _linger(self, deadline: float) -> None:
        # The methods of the plain socket are called, because TLS need not process these bytes any
        # more.
        with contextlib.suppress(OSError), self._busy:
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while True:
                self._wait(select.POLLIN, deadline)
                if not socket.socket.recv(self._socket, JOINED_BYTES):
                    return

    def _pieces(self, header: bytes, payload: memoryview) -> Iterator[memoryview]:
        yield memoryview(header + payload[:JOINED_BYTES])
        size = JOINED_BYTES if self._tls else sys.maxsize
        for start in range(JOINED_BYTES, len(payload), size):
            yield payload[start : start + size]

    def _push(self, piece: memoryview, deadline: float, beside: Sequence[Stream]) -> None:
        while piece:
            try:
                # TLS requires that a write which could not be completed is repeated with the same
                # bytes, which this loop does.
                piece = piece[self._socket.send(piece) :]
            except _LATER:
                room = len(self._inbox) < self.window
                events = select.POLLOUT | select.POLLIN if room else select.POLLOUT
                if beside:
                    beside = self._wait_beside(events, deadline, beside)
                elif self._wait(events, deadline) & ~select.POLLOUT and room:
                    self._fill_inbox()
            except OSError as error:
                raise ConnectionError("the connection broke") from error

    def _wait_beside(
        self, events: int, deadline: float, beside: Sequence[Stream]
    ) -> Sequence[Stream]:
        """Wait until this stream can be written.

        Meanwhile the function reads this stream and those of `beside`. It returns the streams of
        `beside` that are not broken.
        """
        waiting, broken = select.poll(), []
        waiting.register(self._socket, events)
        others = {stream.fileno(): stream for stream in beside}
        for number, stream in others.items():
            if number >= 0 and len(stream._inbox) < stream.window:
                waiting.register(number, select.POLLIN)
        ready = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise TimeoutError("the deadline passed")
        for number, found in ready:
            if number not in others:
                if found & ~select.POLLOUT and events & select.POLLIN:
                    self._fill_inbox()
            elif not others[number]._read_ahead():
                broken.append(others[number])
        return [stream for stream in beside if stream not in broken]

    def _read_ahead(self) -> bool:
        """Read the bytes that have arrived.

        Return False if the connection broke, which a later `read` reports.
        """
        with self._busy:
            try:
                self._fill_inbox()
            except ConnectionError:
                return False
        return True

    def _fill_inbox(self) -> None:
        """Read the frames that have arrived, at most `window` of them."""
        while len(self._inbox) < self.window and self._advance():
            pass

    def _poll_sees_all(self) -> bool:
        """Return False if frame bytes were already read, or if the socket is closed."""
        if self._header is None and self._end - self._start >= HEADER_BYTES:
            return False
        if self._tls_holds and self._socket.pending():  # type: ignore[attr-defined]
            return False
        return self._socket.fileno() >= 0

    def _advance(self) -> bool:
        """Read the bytes that have arrived.

        The method returns True when a frame is complete, and False if more bytes are needed.
        """
        while True:
            if self._header is None and self._begin():
                return True
            if self._header is None:
                self._end += (count := self._receive(self._buffer, self._end))
            else:
                self._filled += (count := self._receive(self._body, self._filled))
            if not count:
                return False
            if self._header is not None and self._filled == len(self._body):
                self._complete(self._header, self._body)
                return True

    def _receive(self, whole: bytearray, start: int) -> int:
        """Read bytes into `whole` from index `start` on.

        Return their number, or 0 if none have arrived.
        """
        try:
            with memoryview(whole) as view, view[start:] as rest:
                count = self._socket.recv_into(rest)
                self._tls_holds = self._tls and count == len(rest)
        except _LATER:
            return 0
        except (OSError, ValueError) as error:
            raise ConnectionError("the connection broke") from error
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        return count

    def _begin(self) -> bool:
        """Parse a header in the buffer, and take those bytes of its payload that are in the buffer.

        The method returns True if these bytes complete the frame.
        """
        start = self._start
        if self._end - start < HEADER_BYTES:
            if start:  # move the bytes to the beginning of the buffer, so that a whole header fits
                self._buffer[: self._end - start] = self._buffer[start : self._end]
                self._start, self._end = 0, self._end - start
            return False
        header = parse_header(self._buffer[start : start + HEADER_BYTES], self.limit_bytes)
        self.inbox_bytes += HEADER_BYTES + header.body_bytes
        if self.inbox_limit_bytes is not None and self.inbox_bytes > self.inbox_limit_bytes:
            raise OversizedFrameError(
                "the unread frames need more bytes than agreed",
                got=f"{self.inbox_bytes} bytes",
                want=f"at most {self.inbox_limit_bytes} bytes",
            )
        start += HEADER_BYTES
        stop = min(self._end, start + header.body_bytes)
        self._start, self._filled = stop, stop - start
        if self._filled == header.body_bytes:
            self._complete(header, self._buffer[start:stop])
            return True
        self._header, self._body = header, bytearray(header.body_bytes)
        self._body[: self._filled] = self._buffer[start:stop]
        return False

    def _complete(self, header: Header, payload: bytearray) -> None:
        """Add a complete frame to the queue of unread frames."""
        self._header, self._body = None, bytearray()
        self._inbox.append(join(header, payload, payload_checked=self._payload_checked))

    def _awaited_bytes(self) -> int:
        """Return the number of bytes to wait for: many within a long frame, otherwise one.

        Within a long frame, the number is the count of missing bytes minus the size of one TLS
        record. The reason: the TLS library may already have read most of a record from the socket.
        """
        left = 0 if self._header is None else len(self._body) - self._filled
        return max(1, min(left - _RECORD_BYTES, _WAKE_BYTES))

    def _wait(self, events: int, deadline: float, least_bytes: int = 1) -> int:
        """Wait for events on the socket and return them.

        A closed connection is always among the events.

        Args:
            events: events to wait for, as in `select.poll`.
            deadline: time at which the wait ends with an error.
            least_bytes: number of unread bytes from which on the socket counts as readable; it is
                always readable when its buffer is full or the peer has closed the connection.
        """
        if self.wire_limit_bytes is not None:
            self._check_received(self.wire_limit_bytes)
        self._wake_at(least_bytes)
        if events != self._events:
            self._poll.modify(self._socket, events)
            self._events = events
        left_s = deadline - time.monotonic()
        ready = self._poll.poll(max(0.0, left_s) * 1000)
        if not ready:
            raise TimeoutError("the deadline passed")
        return ready[0][1]

    def _wake_at(self, least_bytes: int) -> None:
        """Set from how many unread bytes on the socket is reported as readable."""
        if least_bytes != self._least_bytes:
            # the connection is broken, which the next read reports
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)
            self._least_bytes = least_bytes

    def _check_received(self, limit_bytes: int) -> None:
        """Check that the peer has not sent more bytes than this limit.

        Only Linux reports the number of received bytes; on other systems, only the deadline limits
        them.
        """
        if sys.platform != "linux":
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        if int.from_bytes(info[_RECEIVED_AT:], sys.byteorder) > limit_bytes:
            raise ConnectionError("the peer sent too many bytes before it was admitted")


def require_loopback(host: str) -> None:
    """Refuse to use a stream without TLS if the peer may be on another machine.

    Raises:
        UserError: `host` is neither a loopback address nor a name of such an address.
    """
    if not is_loopback(host):
        raise UserError(
            "a stream without TLS must stay on one machine",
            got=host,
            want="a certificate, or a loopback address",
        )


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family for listening: IPv4, or IPv6 if the name has no IPv4 address.

    Raises:
        OSError: the host name cannot be resolved.

    >>> family_of("::1").name, family_of("127.0.0.1").name
    ('AF_INET6', 'AF_INET')
    """
    found = {each[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes any free port, and host "::" accepts IPv6 and IPv4.

    Raises:
        UserError: this process cannot listen at the address.
    """
    try:
        family = family_of(host)
        both = host == _EVERY_ADDRESS and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except (OSError, OverflowError) as error:
        elsewhere = getattr(error, "errno", None) in _NO_ADDRESS_OF_OURS
        here = "use an address of this machine, or 0.0.0.0 or :: for all of its addresses"
        raise UserError(
            "this process cannot listen for the other parties",
            where=str(Address(host, port)),
            got=getattr(error, "strerror", None) or str(error),
            fix=here if elsewhere else "choose another port, or 0 for any free port",
        ) from error


def stop_accepting(listening: socket.socket) -> None:
    """Refuse connections to a TCP port; Linux ends a waiting `accept` at once with an `OSError`.

    The socket stays open, so that no other file gets its descriptor while a thread waits.
    """
    with contextlib.suppress(OSError):  # elsewhere than on Linux, a listening socket may refuse
        listening.shutdown(socket.SHUT_RDWR)


def dial(host: str, port: int, context: ssl.SSLContext | None, timeouts: Timeouts) -> Stream:
    """Open a stream to a hub (the label party's server), including the TLS handshake.

    Raises:
        AuthenticationError: the hub's certificate is not trusted.
        ConnectionError, TimeoutError, OSError: no process listens at the address, or none answers
            in time.
        PeerError, ConfigError: the proxy that the environment variables set does not connect to the
            address.
    """
    connection = connect(host, port, timeouts.connect_s)
    if connection.getsockname() == connection.getpeername():
        # If no process listens on a local port, the operating system may choose this port as source
        # port of the connection. The socket would then be connected to itself, and would block the
        # port for the process that should listen.
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    try:
        stream = open_stream(connection, context, server_hostname=host)
    except BaseException:
        connection.close()
        raise
    try:
        stream.handshake(time.monotonic() + timeouts.handshake_s)
    except ssl.SSLCertVerificationError as error:
        stream.end()
        raise AuthenticationError(
            "the hub's certificate is not trusted",
            where=str(Address(host, port)),
            got=error.verify_message,
            want="a certificate for this host name, signed by the CA in the session message",
        ) from error
    except BaseException:
        stream.end()
        raise
    return stream


def open_stream(
    connection: socket.socket,
    context: ssl.SSLContext | None,
    *,
    server_hostname: str | None = None,
) -> Stream:
    """Make a stream from a connected socket; if there is TLS, the handshake is not done yet."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # each of these options is missing on some operating systems
        with contextlib.suppress(AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if context is not None:
        connection = context.wrap_socket(
            connection,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
    return Stream(connection)


def client_context(ca_pem: bytes, route: str = "") -> ssl.SSLContext:
    """Return the TLS 1.3 context for connecting to a hub whose certificate this CA has signed.

    Args:
        ca_pem: the CA's certificate.
        route: name of the session if several sessions share the port; see `vfl.transport.router`.

    Raises:
        AuthenticationError: the bytes are not a valid certificate.
    """
    # These settings check the hub's certificate and that it was issued for the host name.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca_pem.decode())
    except (ssl.SSLError, ValueError) as error:
        raise AuthenticationError("the certificate of the CA cannot be read") from error
    if route:
        context.set_alpn_protocols([route])
    return context
