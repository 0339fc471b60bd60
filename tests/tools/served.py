"""Sessions that serve, and a caller that asks them over HTTP."""

import csv
import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np

from vfl.serving import service
from vfl.serving.front import LeadSettings, settings_file
from vfl.session.store.party_folder import own_ledger

service._TICK_S = 0.02  # each test ends services, which notice it this soon
PARTIES, ROWS = ("bank", "shop"), 90
CONTENT = {
    "name": "scored",
    "parties": {name: {"width": 4} for name in PARTIES},
    "label": {"party": "lender", "top": "mlp:hidden=8"},
    "train": {"epochs": 1, "batch_size": 20},
    "federation": {"step_timeout_s": 60.0, "rejoin_window_s": 1.0, "join_timeout_s": 180.0},
}


class Client:
    """What a caller of the service has: its address and the token."""

    def __init__(self, address, token, context=None):
        self.address, self.token, self._context = address, token, context

    def ask(self, path, body=None, token=None):
        shown = self.token if token is None else token
        headers = {"Authorization": f"Bearer {shown}", "Content-Type": "application/json"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120, context=self._context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()

    def predict(self, *ids, **more):
        status, text = self.ask("/predict", {"ids": list(ids), **more})
        return status, json.loads(text)

    def wait_ready(self, ready=True, timeout_s=120.0):
        deadline = time.monotonic() + timeout_s
        while (self.ask("/ready")[0] == 200) is not ready:
            assert time.monotonic() < deadline, self.ask("/ready")
            time.sleep(0.05)


def client_of(folder, timeout_s=120.0):
    """A client of the service whose address and token lie in a folder, once they do."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            address = json.loads((folder / "serving.json").read_text())["address"]
            return Client(address, (folder / "serve.token").read_text().strip())
        except FileNotFoundError:  # not there yet, or between two sessions
            assert time.monotonic() < deadline
            time.sleep(0.02)


class Serving:
    """A session that serves, in a thread; `stop` ends it and raises what ended it otherwise."""

    def __init__(self, folder, play, context=None, token=None):
        self.folder, self.problem, self._play = folder, None, play
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        state = folder / "serving.json"
        deadline = time.monotonic() + 120
        while not state.exists() and self._thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if self.problem:
            raise self.problem
        address = json.loads(state.read_text())["address"]
        shown = (token or folder / "serve.token").read_text().split()[0]
        self.client = Client(address, shown, context)

    def __enter__(self):
        """Its client, once rows can be asked for."""
        self.client.wait_ready()
        return self.client

    def __exit__(self, *error):
        self.stop()

    def _run(self):
        try:
            self._play()
        except BaseException as problem:
            self.problem = problem

    def stop(self):
        (self.folder / "serving.stop").touch()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()
        if self.problem:
            raise self.problem


def predicted(folder):
    """What `vfl predict` wrote: prediction and probabilities by id, as they stand in the file."""
    with (folder / "predictions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    shown = [at for at, name in enumerate(head) if name.startswith("probability_")]
    return {row[0]: (row[1], [np.float32(row[at]) for at in shown]) for row in rows}


def same(answer, expected):
    """Bit for bit: the same float32 numbers."""
    got = [np.float32(value) for value in answer["probabilities"]]
    return str(answer["prediction"]) == expected[0] and got == expected[1]


def asked_of_deployment(federation, run, ids):
    """What `vfl serve` answers for some rows on a real federation."""
    serving = federation.ask("serve", run, "--port", "0", "--probability-decimals", "off")
    serving.wait_for("listens at")
    token = (run / "serve.token").read_text().strip()
    client = Client(json.loads((run / "serving.json").read_text())["address"], token)
    client.wait_ready(timeout_s=120.0)
    status, told = client.predict(*ids)
    (run / "serving.stop").touch()
    assert serving.wait() == 0, serving.said()
    assert status == 200, told
    return told["predictions"]


def settings(**more):
    """Settings under which answers are compared bit for bit."""
    return LeadSettings(**{"port": 0, "probability_decimals": "off"} | more)


def start(session, timeout_s=3.0, **changes):
    """A session that serves, over streams."""
    settings_file(session.run, settings(timeout_s=timeout_s))
    return Serving(session.run, lambda: session.play("serve", **changes))


def consent(session, name, text):
    """Add to what a party consents to."""
    path = session.folder / name / "party.toml"
    session.write(name, path.read_text() + text + "\n")


def passes_of(played, name):
    """Rows and passes that a party's own ledger has of serving."""
    (entry,) = own_ledger(played.flower.files[name]).entries()
    return entry.spent["serve"].rows, entry.spent["serve"].passes
