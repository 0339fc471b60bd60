"""The page of a service in a real browser, driven by WebDriver (W3C recommendation of 2018)."""

import base64
import csv
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.serving.front import ServeSettings
from vfl.serving.local import serve
from vfl.training import predict, run

pytestmark = pytest.mark.net

#: The name of an element in WebDriver's JSON.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
CONTENT = {
    "name": "scored",
    "data": {"source": "breast_cancer"},
    "parties": {"clinic": {"width": 8}, "laboratory": {"width": 8}},
    "label": {"party": "registry"},
    "train": {"epochs": 2},
}


class Browser:
    """One window."""

    def __init__(self, address):
        self._address = address
        options = {"goog:chromeOptions": {"args": ARGUMENTS}}
        asked = {"capabilities": {"alwaysMatch": options}}
        self._session = f"/session/{self._ask('/session', asked)['sessionId']}"

    def _ask(self, path, content=None, method=None):
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, address):
        self._ask(self._session + "/url", {"url": address})

    def _found(self, selector):
        asked = {"using": "css selector", "value": selector}
        return f"{self._session}/element/{self._ask(self._session + '/element', asked)[ELEMENT]}"

    def type(self, selector, text):
        place = self._found(selector)
        self._ask(place + "/clear", {})
        self._ask(place + "/value", {"text": text})

    def click(self, selector):
        self._ask(self._found(selector) + "/click", {})

    def text(self, selector):
        return self._ask(self._found(selector) + "/text")

    def shown(self, selector, timeout_s=20):
        """The text of an element, once it has one."""
        deadline = time.monotonic() + timeout_s
        while not (text := self.text(selector)):
            assert time.monotonic() < deadline, f"nothing is shown in {selector}"
            time.sleep(0.05)
        return text

    def script(self, text):
        return self._ask(self._session + "/execute/sync", {"script": text, "args": []})

    def picture(self):
        return base64.b64decode(self._ask(self._session + "/screenshot"))

    def close(self):
        self._ask(self._session, method="DELETE")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if shutil.which("chromedriver") is None:
        pytest.skip("there is no browser: chromium and its chromedriver are not installed")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    home = {"HOME": str(tmp_path_factory.mktemp("home"))}
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | home,
    )
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(address + "/status", timeout=5).close()
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline, "chromedriver does not answer"
                time.sleep(0.1)
        window = Browser(address)
        yield window
        window.close()
    finally:
        driver.terminate()
        driver.wait(30)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A run that is served: its folder and address."""
    folder = tmp_path_factory.mktemp("runs")
    run.train(Experiment.model_validate(CONTENT), folder, "one")
    predict(RunFolder.open(folder / "one"))
    settings = ServeSettings(port=0, explain=True)
    thread = threading.Thread(target=serve, args=(folder / "one", settings))
    thread.start()
    state, deadline = folder / "one" / "serving.json", time.monotonic() + 60
    while not state.exists():
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield folder / "one", json.loads(state.read_text())["address"]
    (folder / "one" / "serving.stop").touch()
    thread.join(30)
    assert not thread.is_alive()


def test_a_person_asks_for_a_row(browser, service):
    folder, address = service
    with (folder / "predictions.csv").open() as lines:
        row = next(csv.DictReader(lines))
    browser.open(address + "/")
    browser.type("#token", (folder / "serve.token").read_text().strip())
    browser.type("#id", row["id"])
    browser.click("#explain")
    browser.click("#ask")
    assert browser.shown("#prediction") == row["prediction"]
    assert "ms at the service" in browser.shown("#latency")
    told = browser.shown("#contributions")
    assert "clinic" in told
    assert "laboratory" in told
    if kept := os.environ.get("VFL_PICTURES"):
        (Path(kept) / "page.png").write_bytes(browser.picture())


def test_what_is_wrong_is_said_on_the_page(browser, service):
    folder, address = service
    browser.open(address + "/")
    browser.type("#token", "a token that nobody gave out")
    browser.type("#id", "1")
    browser.click("#ask")
    assert browser.shown("#error") == "the token is missing or wrong"
    browser.type("#token", (folder / "serve.token").read_text().strip())
    browser.type("#id", "<img src=x onerror=alert(1)>")
    browser.click("#ask")
    while browser.text("#error") != "an id is not known here":
        time.sleep(0.05)
    # Nothing is loaded from elsewhere, and nothing outlives the page.
    loaded = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert all(name.startswith(address) for name in browser.script(loaded))
    assert (
        browser.script("return document.cookie + localStorage.length + sessionStorage.length")
        == "00"
    )
