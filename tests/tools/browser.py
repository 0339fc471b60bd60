"""A page of a real browser, for tests of what people see."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from contextlib import ExitStack

from websockets.sync.client import connect as websocket

#: Its program; None where none is installed.
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


class Browser:
    """A page of a real browser, driven over its DevTools protocol."""

    def __init__(self, folder):
        self.errors = []
        flags = ["--headless", "--no-sandbox", "--remote-debugging-port=0", "--disable-gpu"]
        command = [BROWSER, *flags, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        listening = next(line for line in self._process.stderr if "listening on ws://" in line)
        at = listening.split("ws://")[1].split("/")[0]
        with urllib.request.urlopen(f"http://{at}/json", timeout=60) as answer:
            page = next(one for one in json.load(answer) if one["type"] == "page")
        self._open = ExitStack()
        url = page["webSocketDebuggerUrl"]
        self._socket = self._open.enter_context(websocket(url, max_size=None))
        self._number = 0

    def call(self, method, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (told := json.loads(self._socket.recv(timeout=60))).get("id") != self._number:
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(told["params"])
        return told["result"]

    def value(self, script):
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return told["result"].get("value")

    def wait_for(self, script, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not self.value(script):
            assert time.monotonic() < deadline, self.value("document.body.innerText")
            time.sleep(0.1)

    def close(self):
        self._open.close()
        os.killpg(self._process.pid, signal.SIGTERM)  # a script may have started it
        self._process.wait(60)
        self._process.stderr.close()
