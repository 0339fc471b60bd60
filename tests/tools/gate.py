"""A network between the feature parties and the label party's stream that a test can cut."""

import contextlib
import socket
import threading


class Gate:
    """Carries bytes from one address to another, until it is shut.

    Args:
        listen, target: (host, port) pairs.
    """

    def __init__(self, listen, target):
        self._target = target
        self._lock = threading.Lock()
        self._open = True
        self._ends = []
        self._listener = socket.create_server(listen)
        self._door = threading.Thread(target=self._accept, daemon=True)
        self._door.start()

    def shut(self):
        """Break every connection, and refuse new ones until `restore`."""
        with self._lock:
            self._open = False
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def restore(self):
        with self._lock:
            self._open = True

    def close(self):
        self.shut()
        with contextlib.suppress(OSError):  # closing alone would not wake the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.join(5)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # no run has its stream open just now
                near.close()
                continue
            with self._lock:
                if self._open:
                    self._ends += [near, far]
                    threading.Thread(target=self._carry, args=(near, far), daemon=True).start()
                    continue
            near.close()
            far.close()

    def _carry(self, near, far):
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        near.close()
        far.close()

    @staticmethod
    def _pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
