"""A proxy that makes tunnels by CONNECT, as an organisation has one on its way out."""

import socket
import threading
from base64 import b64encode
from contextlib import suppress

_HEAD_BYTES = 16 * 1024


class ConnectProxy:
    """Tunnels to the hosts it knows, on the loopback; a context manager.

    Args:
        routes: real address of a target, by HOST:PORT; all other targets are refused.
        login: name and password that it wants.
        idle_s: tunnels that carry nothing for so long are cut.
        answer: the first line of every answer, in place of a tunnel.

    Attributes:
        asked: the targets it was asked for.
    """

    def __init__(self, routes, *, login=None, idle_s=None, answer=None):
        self.asked, self.cuts = [], 0
        self._routes, self._idle_s, self._answer = routes, idle_s, answer
        self._login = login and f"Basic {b64encode(':'.join(login).encode()).decode()}"
        self._open, self._threads = [], []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._door = threading.Thread(target=self._accept, daemon=True)
        self._door.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.join()
        self._listener.close()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._tunnel, near)

    def _start(self, target, *arguments):
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _tunnel(self, near):
        self._open.append(near)
        with suppress(OSError):  # whoever asked may be gone at any time
            self._answer_to(near)

    def _answer_to(self, near):
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            more = near.recv(_HEAD_BYTES)
            if not more:
                return
            head += more
        lines = head.decode().split("\r\n")
        method, target, _ = lines[0].split()
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        assert method == "CONNECT"
        assert fields["Host"] == target
        self.asked.append(target)
        said = self._answer
        if said is None and fields.get("Proxy-Authorization") != self._login:
            said = "407 Proxy Authentication Required"
        if said is None and target not in self._routes:
            said = "403 Forbidden"
        if said is None:
            try:
                far = socket.create_connection(self._routes[target], 5)
            except OSError:
                said = "502 Bad Gateway"
        near.sendall(f"HTTP/1.1 {said or '200 Connection established'}\r\n\r\n".encode())
        if said is not None:
            near.shutdown(socket.SHUT_WR)
            return
        self._open.append(far)
        for one, other in ((near, far), (far, near)):
            one.settimeout(self._idle_s)
            self._start(self._pump, one, other)

    def _pump(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except TimeoutError:
            self.cuts += 1
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
