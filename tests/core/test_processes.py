"""Processes beside ours: they start, answer, end when told, and are started again, not for ever."""

import os
import sys
import time

import pytest

from vfl.core import processes as room
from vfl.core.errors import AuthenticationError, LostPeerError
from vfl.core.processes import Service, Worker, supervise

#: What is started here would go on for ten minutes.
HANGS_S = 60.0
ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"


def python(name, script, log):
    return Service(name, [sys.executable, "-u", "-c", script], os.environ, log)


def test_a_service_is_ready_when_its_log_says_so_and_ends_when_told(tmp_path):
    service = python(
        "it", "print('ready'); import time; time.sleep(600)", tmp_path / "deep" / "log"
    )
    try:
        service.wait_for("ready")
        assert service.alive
    finally:
        service.stop()
    assert not service.alive
    service.stop()
    assert (tmp_path / "deep" / "log").read_text() == "ready\n"


def test_a_service_that_does_not_listen_is_ended_all_the_same(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready')\n"
    service = python("it", deaf + "time.sleep(600)", tmp_path / "log")
    service.wait_for("ready")
    started = time.monotonic()
    service.stop(patience_s=0.2)
    assert not service.alive
    assert time.monotonic() - started < HANGS_S


def test_a_service_that_ends_before_it_is_ready(tmp_path):
    service = python("the SuperLink", "raise SystemExit(3)", tmp_path / "log")
    with pytest.raises(LostPeerError, match="the SuperLink did not start") as caught:
        service.wait_for("ready")
    assert caught.value.got == "exit 3"
    assert str(tmp_path / "log") in caught.value.fix
    assert service.wait() == 3


def test_a_service_that_takes_too_long(tmp_path):
    service = python("it", "import time; time.sleep(600)", tmp_path / "log")
    try:
        with pytest.raises(LostPeerError) as caught:
            service.wait_for("ready", timeout_s=0.2)
        assert caught.value.got == "still starting"
    finally:
        service.stop()


def test_a_service_that_is_refused_is_not_waited_for(tmp_path):
    script = "print('no such key'); import time; time.sleep(600)"
    service, started = python("it", script, tmp_path / "log"), time.monotonic()
    try:
        with pytest.raises(LostPeerError, match="it did not start") as caught:
            service.wait_for("ready", refusals=["no such key"])
        assert caught.value.where == "no such key"
        assert time.monotonic() - started < HANGS_S
    finally:
        service.stop()


def test_the_log_of_an_earlier_start_does_not_count(tmp_path):
    log = tmp_path / "log"
    log.write_text("ready\n")
    service = python("it", "raise SystemExit('port taken')", log)
    with pytest.raises(LostPeerError, match="it did not start") as caught:
        service.wait_for("ready")
    assert caught.value.where == "port taken"
    assert log.read_text() == "ready\nport taken\n"


def worker(script):
    return Worker("it", [sys.executable, "-c", script], os.environ)


def test_a_worker_answers_lines_and_ends_with_its_input():
    with worker(ECHO) as echo:
        for line in ("one", "two"):
            echo.send(line)
            assert echo.receive() == line.upper()
        assert echo.alive
    assert echo.wait() == 0


def test_a_worker_that_ended_says_how():
    with worker("raise SystemExit(3)") as gone:
        assert gone.wait() == 3
        gone.send("one")
        with pytest.raises(LostPeerError, match="ended early") as caught:
            gone.receive()
        assert caught.value.got == "exit status 3"


def test_a_worker_that_does_not_listen_is_ended_all_the_same():
    deaf = worker("import time; time.sleep(600)")
    started = time.monotonic()
    deaf.stop(patience_s=0.2)
    assert not deaf.alive
    assert time.monotonic() - started < HANGS_S


class Standing:
    name = "the SuperNode of bank"

    def __init__(self, stopped):
        self._stopped = stopped

    def stop(self):
        self._stopped.append(self)

    def wait(self):
        return -9


class World:
    """A clock that only pauses move, and what each attempt to start brings."""

    def __init__(self, *attempts):
        self.attempts = list(attempts)
        self.now = 0.0
        self.pauses, self.said, self.stopped = [], [], []

    def start(self):
        attempt = self.attempts.pop(0)
        if isinstance(attempt, Exception):
            raise attempt
        return Standing(self.stopped)

    def follow(self, service):
        if not self.attempts:
            raise KeyboardInterrupt

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def run(self, **options):
        supervise(self.start, self.follow, self.said.append, **options)


@pytest.fixture
def world(monkeypatch):
    def make(*attempts):
        made = World(*attempts)
        monkeypatch.setattr(room, "sleep", made.sleep)
        monkeypatch.setattr(room, "monotonic", lambda: made.now)
        return made

    return make


def away():
    return LostPeerError("the SuperLink cannot be reached", got="Connection refused")


def test_it_is_started_again_until_somebody_interrupts(world):
    bank = world("up", away(), away(), "up", "up")
    with pytest.raises(KeyboardInterrupt):
        bank.run()
    assert bank.pauses == [1.0, 2.0, 4.0, 1.0]
    assert bank.said[0] == "the SuperNode of bank ended (exit -9); starting it again in 1 s"
    assert bank.said[1] == (
        "the SuperLink cannot be reached (Connection refused); starting it again in 2 s"
    )
    assert len(bank.stopped) == 3


def test_patience_ends_and_the_reason_is_told(world):
    bank = world(*(away() for _ in range(100)))
    with pytest.raises(LostPeerError, match="cannot be reached"):
        bank.run(patience_s=60)
    assert bank.pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert bank.now <= 60


def test_what_waiting_does_not_mend_is_told_at_once(world):
    bank = world(AuthenticationError("the certificate of the SuperLink is not accepted"))
    with pytest.raises(AuthenticationError):
        bank.run()
    assert bank.pauses == []
